"""What is changed in torch and in other libraries, as a table that can be undone.

`hooks.py` is loaded by every import of torchTensorRef and knows only `base`.

May import: all but diagnostics.
"""
