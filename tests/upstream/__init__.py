"""Other projects' own tests, on plain torch and with us: ``python -m tests.upstream``."""
