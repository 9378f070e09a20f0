"""What writes a timeline and what reads one agree on; to read one needs no torch."""

from __future__ import annotations

#: Of what stands under `torchTensorRef`; a reader refuses others.
VERSION = 2
#: Tracks by their numbers, in the order in which they are shown.
TRACKS = {1: "compute", 2: "stalls", 3: "host to device", 4: "device to host", 5: "host"}
COMPUTE, STALLS, H2D, D2H, HOST = TRACKS
