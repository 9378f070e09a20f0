"""Real accelerators through torch's device-generic interface: cuda, hip, xpu, mps.

May import: base, devices.
"""
