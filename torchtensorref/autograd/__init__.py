"""Operators for which torch's autograd treats a subclass otherwise, and the formulas it takes.

May import: base, operators, strategy, devices, memory, interception.
"""
