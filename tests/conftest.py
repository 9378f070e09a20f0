"""Fixtures: a manager on a simulated device of a given size, checked and counted at the end."""

from __future__ import annotations

import gc
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is loaded: MKL's code that is the same on all processors, and oneDNN's without AMX.
# Those of an Intel Xeon with AMX add parts of products in another order than whole ones, which
# `probe.py` notices, and then what tests see run in blocks runs on the host.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# What processes that tests start begin with; it says why. Where a test names a path, that holds.
_IN_PROCESSES = str(Path(__file__).parent / "support" / "in_processes")
if _IN_PROCESSES not in (_before := os.environ.get("PYTHONPATH", "")).split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_IN_PROCESSES, _before)))

#: What a managed test gets unless it asks for more: small enough that everything is evicted often.
DEFAULT_NBYTES = 1 << 20
#: So many objects that are there before a test begins are libraries.
MANY_OBJECTS = 10_000


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import libraries without the collector, which finds next to nothing, and set them aside."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def libraries_are_set_aside() -> None:
    """Keep the collector from walking through imported libraries, which every test has it run.

    That took more than half of the time of the tests: 0.2 s for 400,000 objects. Tests import
    libraries, too: before each one, those of the tests before it are set aside.
    """
    if len(gc.get_objects()) > MANY_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def threads_of_kernels_are_given_back() -> Iterator[None]:
    """Give the number of threads back that a test has set: kernels have other bits with another.

    What came later compared results of threads of its own, which begin with the number that torch
    was started with, with those of the main one: on torch 2.15 they differed.
    """
    before = "torch" in sys.modules and sys.modules["torch"].get_num_threads()
    yield
    if before and sys.modules["torch"].get_num_threads() != before:
        sys.modules["torch"].set_num_threads(before)


@pytest.fixture(autouse=True)
def the_default_device_is_given_back() -> Iterator[None]:
    """Have torch forget that a default device was taken back: old ones stumble over that.

    `torch_versions.DEFAULT_DEVICE` says which.
    """
    yield
    context = getattr(sys.modules.get("torch"), "_GLOBAL_DEVICE_CONTEXT", None)
    if context is not None and getattr(context, "device_context", context) is None:
        del context.device_context


@pytest.fixture(autouse=True)
def budgets_by_name_are_given_back() -> Iterator[None]:
    """Leave the next test no budget of devices that it does not use: it would be warned of it."""
    yield
    manager = getattr(sys.modules.get("torchTensorRef.memory.manager"), "tensorsManager", None)
    if manager is not None and isinstance(manager._budget_setting, dict):
        manager.budget = None


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Write a program that has never heard of us; return its path."""

    def write(text: str, name: str = "program.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


@pytest.fixture
def times_are_not_kept() -> Iterator[None]:
    """Leave nothing of operators' times in the cache of who runs the tests, and find nothing."""
    from torchTensorRef.base.options import settings

    before, settings.op_times = settings.op_times, "off"
    yield
    settings.op_times = before


@pytest.fixture
def manage(times_are_not_kept: None) -> Iterator[Callable[..., Any]]:
    """Give `manage(strategy=, nbytes=, ...)`: the manager on a fresh simulated accelerator.

    Its capacity is the budget, so the device itself refuses any byte too many; freed and stale
    bytes are poisoned. With `count=2` there are two such in one machine. At the end the books are
    checked, nothing may be held, and all goes home. What a test makes stays plain unless it adopts
    it, or injection is what it is about (`hooks.is_disabled.entered(False)`).
    """
    torch = pytest.importorskip("torch")
    import torchTensorRef
    import torchTensorRef.tensor.install
    from torchTensorRef import tensorsManager
    from torchTensorRef.devices.sim.device import SimDevice
    from torchTensorRef.devices.sim.machine import Machine
    from torchTensorRef.devices.sim.spec import DeviceSpec
    from torchTensorRef.memory import once

    torch.manual_seed(0)

    def make(
        strategy: Any = "lru", nbytes: int = DEFAULT_NBYTES, count: int = 1, **values: Any
    ) -> Any:
        spec = DeviceSpec(name="test", capacity_nbytes=nbytes, **values)
        machine = Machine.of(spec)
        names = ["sim:test", *(f"sim:test{number}" for number in range(1, count))]
        devices = [
            SimDevice(spec, number, machine=machine, poison=True, name=name)
            for number, name in enumerate(names)
        ]
        tensorsManager.budget = None  # it may name devices that go now
        tensorsManager.device = devices if count > 1 else devices[0]
        tensorsManager.budget = nbytes
        tensorsManager.strategy = strategy
        tensorsManager.reset_stats()
        once.said.clear()
        once.said.update(("room", "thrash"))  # tiny budgets are what these tests are about
        return tensorsManager

    with torchTensorRef.disabled():
        yield make
    gc.collect()
    residency = tensorsManager.residency
    tensorsManager.check()
    assert not residency.holds.pins_by_thread, "an operator ended and still holds operands"
    assert not residency.holds.announced, "an operator ended and is still announced"
    for lock in (residency.books.lock, residency.feed.lock):
        assert not lock._is_owned(), "nobody gives it back: other threads would wait for ever"
    for ledger in residency.books.ledgers.values():
        assert not [r for r in ledger.replicas() if r.pins]
    tensorsManager.bring_all_home()
    for device in residency.books.accelerators:
        held = [
            block
            for replica in residency.books.ledgers[device].replicas()
            if (block := replica.block) is not None and block.exposure is None
        ]
        assert held == []
    tensorsManager.check()


@pytest.fixture
def manager(manage: Callable[..., Any]) -> Any:
    """The manager on a simulated accelerator of one MiB, with the strategy `lru`."""
    return manage()
