"""The simulated accelerator: real bytes, a size enforced to the byte, a virtual clock.

May import: base, devices.
"""
