"""Looks at tensors that are current on the accelerator only: they copy what they read."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from torchTensorRef.memory import looks, transfer
from torchTensorRef.memory.looks import look_at
from torchTensorRef.memory.states import DIRTY

SHAPE = (24, 64, 40)
NBYTES = 1 << 22

DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool),
    *(torch.complex64, torch.float8_e4m3fn),
]

VIEWS = {
    "all": lambda x: x,
    "some of a row": lambda x: x[5, 7, 3:9],
    "one number": lambda x: x[3, 60, 39],
    "a column": lambda x: x[:, 2, 1],
    "every seventh": lambda x: x[2, ::7, ::7],
    "turned": lambda x: x[1, :5, :4].t(),
    "repeated": lambda x: x[2, 3, :3].expand(4, 3),
    "overlapping": lambda x: x.as_strided((5, 4), (2, 1), 1201),
    "far apart": lambda x: x.as_strided((3, 2), (20000, 1), 11),
    "nothing of a row": lambda x: x[5, 7, 4:4],
    "nothing": lambda x: x[4:4],
    "nearly all": lambda x: x.view(-1)[1:-1],
    "conjugate": lambda x: x[3, 4, :5].conj(),
    "negative": lambda x: x[3, 4, :5].conj().imag if x.is_complex() else x[0, 0, :5],
}


def values(dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    drawn = torch.randn(*shape) * 3
    return torch.complex(drawn, -drawn).to(dtype) if dtype.is_complex else drawn.to(dtype)


def made_there(manager: Any, plain: torch.Tensor) -> Any:
    """A TensorRef with these values that are current on the accelerator only."""
    ref = manager.adopt(plain.clone()).toGPU().clone()
    ref.view(torch.uint8).bitwise_xor_(0)
    main = manager.residency.books.main
    assert ref._ttr_block.replicas[main].state is DIRTY
    return ref


def counted(manager: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that the simulated device copies home from now on."""
    main, found = manager.residency.books.main, []
    copy_out = main.copy_out

    def copied(base: Any, destination: Any, **order: Any) -> Any:
        found.append(destination.nbytes)
        return copy_out(base, destination, **order)

    monkeypatch.setattr(main, "copy_out", copied)
    manager.reset_stats()
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_looks_are_those_of_plain_torch(manage, monkeypatch, dtype):
    manager = manage("lru", NBYTES)
    plain = values(dtype)
    ref = made_there(manager, plain)
    block, main = ref._ttr_block, manager.residency.books.main
    states = {device: replica.state for device, replica in block.replicas.items()}
    copied = counted(manager, monkeypatch)
    for name, view in VIEWS.items():
        expected, found = view(plain), view(ref)
        assert found.tolist() == expected.tolist(), name
        assert repr(found) == repr(expected), name
    assert {device: replica.state for device, replica in block.replicas.items()} == states
    stats = manager.stats()
    assert (stats["peeked_nbytes"], stats["peek_count"]) == (sum(copied), len(copied))
    assert stats["by_device"][main.name]["peeked_nbytes"] == sum(copied)
    assert stats["written_back_nbytes"] == 0


@pytest.mark.parametrize(
    ("view", "nbytes"),
    [
        ("some of a row", [24]),
        ("one number", [4]),
        ("every seventh", [4 * (63 * 40 + 35 + 1)]),
        ("turned", [4 * (4 * 40 + 4)]),
        ("repeated", [12]),
        ("overlapping", [4 * (4 * 2 + 4)]),
        ("far apart", [8, 8, 8]),
        ("nothing", []),
        ("all", [4 * 24 * 64 * 40]),
    ],
)
def test_a_look_copies_what_it_reads(manage, monkeypatch, view, nbytes):
    manager = manage("lru", NBYTES)
    ref = made_there(manager, values(torch.float32))
    looked_at = VIEWS[view](ref)
    copied = counted(manager, monkeypatch)
    looked_at.tolist()
    assert copied == nbytes


def test_what_is_long_prints_by_its_ends(manage, monkeypatch):
    """The whole of it was copied home."""
    manager = manage("lru", 1 << 24)
    plain = values(torch.float32, (512, 2048))
    ref = made_there(manager, plain)
    copied = counted(manager, monkeypatch)
    assert repr(ref) == repr(plain)
    assert copied == [4 * (2 * 2048 + 2048)] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"edgeitems": 1},
        {"edgeitems": 5, "threshold": 100},
        {"edgeitems": 0},
        {"edgeitems": 30, "threshold": 500},
        {"threshold": 1, "precision": 2, "sci_mode": True},
        {"profile": "full"},
    ],
)
def test_what_is_long_prints_as_is_set(manage, monkeypatch, options):
    def filled(nbytes: int) -> torch.Tensor:  # what was not copied would be seen
        return torch.full((nbytes,), 0x55, dtype=torch.uint8)

    monkeypatch.setattr(looks, "GAP_NBYTES", 8)
    monkeypatch.setattr(transfer, "empty_bytes", filled)
    manager = manage("lru", NBYTES)
    plain = values(torch.float32, (2, 9, 70))
    ref = made_there(manager, plain)
    copied = counted(manager, monkeypatch)
    try:
        torch.set_printoptions(**options)
        for view in (lambda x: x, lambda x: x.mT[1], lambda x: x[0, :, ::3], lambda x: x[0, 0]):
            assert repr(view(ref)) == repr(view(plain))
    finally:
        torch.set_printoptions(profile="default", sci_mode=None)
    if options == {"edgeitems": 1}:
        assert copied[0] == 4


def test_limits_that_another_thread_sets_meanwhile(manage, monkeypatch):
    from torchTensorRef.tensor import printing

    manager = manage("lru", NBYTES)
    plain = values(torch.float32, (100, 128))
    ref, printed = made_there(manager, plain), printing._printed

    def late(*args: Any) -> Any:
        found = printed(*args)
        torch.set_printoptions(edgeitems=4)
        return found

    monkeypatch.setattr(printing, "_printed", late)
    try:
        text = repr(ref)
        assert text == repr(plain)
    finally:
        torch.set_printoptions(profile="default")


@pytest.mark.parametrize("seed", range(3))
def test_each_byte_that_is_read_is_among_the_parts(manage, monkeypatch, seed):
    monkeypatch.setattr(looks, "GAP_NBYTES", 24)
    monkeypatch.setattr(looks, "MOST_PARTS", 40)
    manager = manage("lru", NBYTES)
    draw, ref = random.Random(seed), manager.adopt(torch.zeros(5000))
    for _ in range(60):
        sizes = [draw.choice([1, 2, 3, 7, 9]) for _ in range(draw.randrange(4))]
        strides = [draw.choice([0, 1, 2, 5, 31, 90]) for _ in sizes]
        edge = draw.choice([0, 1, 2, 3])
        view = ref.as_strided(sizes, strides, draw.randrange(100))
        look = look_at(view, edge)
        among = {at for start, stop in look.parts for at in range(start, stop)}
        assert not among or (min(among), max(among) + 1) == (look.start, look.stop)
        for index in itertools.product(*map(range, sizes)):
            pairs = zip(index, sizes, strict=True)
            if all(not 0 < 2 * edge < n or min(i, n - 1 - i) < edge for i, n in pairs):
                first = view.storage_offset() + sum(map(int.__mul__, index, strides))
                assert among.issuperset(range(4 * first, 4 * first + 4))


def test_the_wait_is_a_stall(manage):
    manager = manage("lru", NBYTES)
    ref = made_there(manager, values(torch.float32))
    main = manager.residency.books.main
    main.synchronize()
    manager.reset_stats()
    began_ns = main.now_ns()
    ref.tolist()
    took_ns = main.now_ns() - began_ns
    assert manager.stats()["stall_ns"] == took_ns > 0
    text = manager.report()
    assert "  peeked     240.00 KiB copied home to be read once, in 1 copies" in text


def test_a_copy_that_fails_is_tried_again(manage):
    manager = manage("lru", NBYTES)
    plain = values(torch.float32)
    ref = made_there(manager, plain)
    manager.residency.books.main.fail_next("copy")
    view = VIEWS["far apart"]
    assert view(ref).tolist() == view(plain).tolist()
    assert manager.residency.copier.transfer.counts.retry_count == 1


def test_who_holds_it_on_the_accelerator_may_have_written_it(manage):
    manager = manage("lru", NBYTES)
    ref = made_there(manager, torch.zeros(SHAPE))
    held = ref.target
    held[5, 7] += 2
    assert ref[5, 7, :3].tolist() == [2] * 3
    assert ref[5, 8, :3].tolist() == [0] * 3
    del held


def test_what_is_written_keeps_the_whole_storage(manage, tmp_path):
    """As in plain torch: a view is written with what it is a view of."""
    manager = manage("lru", NBYTES)
    ref = made_there(manager, torch.arange(4096.0))
    held = ref.target
    torch.save(ref[7:9], tmp_path / "part.pt")
    loaded = torch.load(tmp_path / "part.pt")
    assert (loaded.tolist(), loaded.untyped_storage().nbytes()) == ([7, 8], 4 * 4096)
    del held
