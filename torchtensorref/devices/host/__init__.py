"""The host: its memory, what of it may be page-locked, and who reads it meanwhile.

May import: base, devices.
"""
