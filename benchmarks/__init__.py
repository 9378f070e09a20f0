"""Measurements: one question each. Run as `python -m benchmarks.NAME` from the root of the project."""
