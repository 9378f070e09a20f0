"""A selection of the tests on other versions of torch and Python; `python -m tests.matrix`."""
