"""TensorRef: the class that programs hold, and its protocols (arrays, pickles, printing, labels).

May import: all but inject, diagnostics.
"""
