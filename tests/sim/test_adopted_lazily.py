"""Adopted blocks have their storage and no more until somebody asks for their replicas."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from torchTensorRef import disabled
from torchTensorRef.memory import adoption, core


def numbers():
    """A plain tensor that nobody else holds."""
    with disabled():
        return torch.arange(64.0)


def test_nothing_is_made_before_somebody_asks(manager):
    plain = numbers()
    ref = manager.adopt(plain)
    block = ref._ttr_block
    assert block.settled is None
    assert block.births is not None
    assert ref._ttr_home is None
    assert (ref.shape, ref.stride(), ref.dtype) == (plain.shape, plain.stride(), plain.dtype)
    assert manager.adopt(plain)._ttr_block is block
    assert manager.adopt(plain[8:])._ttr_block is block
    assert block.settled is None
    assert torch.equal(manager.adopt(plain[8:]).cpu(), plain[8:])
    assert block.settled is not None
    assert block.births is None
    assert block.adopted is None


def test_what_plain_tensors_share_when_it_is_asked_for_stays_shared(manager):
    plain = numbers()
    ref = manager.adopt(plain)
    plain[0] = 7
    ref.add_(1)
    assert ref._ttr_block.exposure.alive
    assert plain[0] == 8
    plain[1] = -1
    assert (ref * 2)[1].item() == -2
    del plain
    gc.collect()
    assert not ref._ttr_block.exposure.alive


def test_what_plain_tensors_no_longer_share_is_the_blocks_own(manager):
    plain = numbers()
    address, ref = plain.data_ptr(), manager.adopt(plain)
    del plain
    assert ref._ttr_block.exposure is None
    home = ref._ttr_block.replicas[manager.residency.books.host]
    assert home.base.data_ptr() == address
    assert home.base.untyped_storage().resizable()


@pytest.mark.parametrize(
    "hold", [lambda x: x[3:], lambda x: x.numpy(), lambda x: x.untyped_storage()]
)
def test_whoever_holds_the_storage_shares_it(manager, hold):
    plain = numbers()
    ref = manager.adopt(plain)
    held = hold(plain)
    del plain
    assert ref._ttr_block.exposure.alive
    del held
    assert not ref._ttr_block.exposure.alive
    ref.add_(1)
    assert torch.equal(ref.toGPU().resize_(70)[:64].cpu(), numbers() + 1)


def test_an_interrupt_while_replicas_are_made_leaves_the_bytes(manager, monkeypatch):
    plain = numbers()

    def interrupted(*_):
        raise KeyboardInterrupt

    ref, expected = manager.adopt(plain), plain.clone()
    with monkeypatch.context() as patch:
        patch.setattr(adoption, "Replica", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _ = ref._ttr_block.replicas
    del plain
    gc.collect()
    assert torch.equal(ref.cpu(), expected)


def test_threads_that_ask_at_once_get_the_same_replicas(manager):
    with disabled():
        plain = [torch.rand(16) for _ in range(50)]
    blocks = [manager.adopt(x)._ttr_block for x in plain]
    start, found = threading.Barrier(4), []

    def ask():
        start.wait()
        found.append([block.replicas for block in blocks])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(a is b for other in found for a, b in zip(found[0], other, strict=True))


@pytest.mark.skipif(core.library is None, reason="in Python a block has a dictionary")
def test_a_block_has_no_dictionary(manager):
    plain = numbers()
    block = manager.adopt(plain)._ttr_block
    assert not hasattr(block, "__dict__")
    assert block.__sizeof__() <= 120
