"""Workers of `torch.distributed.rpc`, whose C++ reads the memory of what it sends."""

import socket

from ..support.processes import RUN, python

PROGRAM = "tests/support/rpc_workers.py"


def told(*before):
    """What the program prints, line by line."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port = asked.getsockname()[1]
    done = python(*before, PROGRAM, port)
    assert done.returncode == 0, done.stderr[-4000:]
    return [line for line in done.stdout.splitlines() if not line.startswith("torchTensorRef")]


def test_workers_are_sent_what_tensorrefs_stand_for():
    *expected, _ = told()
    *values, refusal = told(*RUN)
    assert values == expected
    assert refusal.startswith("UnsupportedOpError: ")
