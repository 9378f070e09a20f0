"""The simulated accelerator: real bytes and numbers, a size enforced to the byte, its own clock.

May import: base, devices.
"""
