"""Modules that run natively where no gradient is noted, until ready operators are in C++.

May import: base, operators, strategy, devices, memory, interception.
"""
