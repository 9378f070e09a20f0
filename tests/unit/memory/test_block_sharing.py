"""Blocks that an error keeps from sharing their bytes, at any line: each has its own values."""

import torch

from torchTensorRef.memory.block import Block
from torchTensorRef.memory.plain_views import bare_ref

from ...support.interrupting import interrupt, lines_of, sent


def test_who_is_written_writes_nothing_of_the_other(manager):
    wanted = torch.arange(4096.0)

    def begin():
        mine = manager.adopt(wanted.clone())
        other = Block(4 * 4096)
        return mine, other

    def share(mine, other):
        mine._ttr_block.share_with(other)

    for place in lines_of(lambda: share(*begin())):
        for is_other_first in (False, True):
            mine, other = begin()
            interrupt(lambda mine=mine, other=other: share(mine, other), sent, place)
            ref = bare_ref((4096,), (1,), 0, torch.float32, torch.device("cpu"), other)
            is_there = bool(other.replicas)
            if is_there and is_other_first:
                ref.add_(1)
                assert torch.equal(ref, wanted + 1), place
            assert torch.equal(mine, wanted), place
            mine.mul_(2)
            assert torch.equal(mine, wanted * 2), place
            if is_there:
                assert torch.equal(ref, wanted + is_other_first), place
            share(mine, other)  # once more
            ref.add_(1)
            assert torch.equal(ref, wanted * 2 + 1), place
            assert torch.equal(mine, wanted * 2), place
            manager.check()
