"""What is made of a timeline afterwards, without the model and without an accelerator.

A table (`summary.py`), a picture (`picture.py`), and another strategy's run of it (`replay.py`).
"""
