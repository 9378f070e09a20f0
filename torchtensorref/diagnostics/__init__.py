"""What a person asks for: the environment report, the self-test, tables and documents."""
