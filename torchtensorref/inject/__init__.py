"""Patches of torch and of other libraries, each in a table and each undone on request."""
