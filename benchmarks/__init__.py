"""Measurements: one question each. Run from the root: `python -m benchmarks.NAME`."""
