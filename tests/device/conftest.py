"""The promises on a real accelerator; the same tests also run over a double of one.

Each test takes `device`, and so runs several times: `late` is the real adapter over host memory,
whose copies happen as late as they may (`tests/support/device_double.py`); `exchanging` besides
cannot empty a storage, as mps: every other test runs there, all of them by `make sweeps`;
`accelerator` is what torch finds, and is skipped where it finds none.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ..support.device_double import ExchangingDevice, LateDevice, LateModule
from ..support.sweeps import turn_of
from ..support.workspaces import give_up_workspaces

MIB = 1 << 20


def accelerator_name() -> str | None:
    """The kind of accelerator that torch finds and we know, or None."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type in ("cuda", "xpu", "mps") else None


REAL = pytest.param("accelerator", marks=pytest.mark.device)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test on the one double and on what torch finds, every other one on both doubles."""
    if "kind_of_device" in metafunc.fixturenames:
        also = turn_of(metafunc.function.__name__, [["exchanging"], []])
        metafunc.parametrize("kind_of_device", ["late", *itertools.chain(*also), REAL])


@pytest.fixture
def device(kind_of_device: str) -> Any:
    """A device behind the real adapter."""
    from torchTensorRef.memory import once

    once.said.update(("room", "thrash"))  # said once in a process: not what these are about
    if kind_of_device == "late":
        return LateDevice(LateModule(seed=1))
    if kind_of_device == "exchanging":
        return ExchangingDevice(LateModule(seed=2))
    name = accelerator_name()
    if name is None:
        pytest.skip("torch finds no accelerator here (cuda, xpu, mps)")
    from torchTensorRef.devices import registry

    return registry.resolve(name)


class Scale:
    """Sizes that make sense on a device: kernels of a real one need tens of MiB in passing."""

    def __init__(self, is_real: bool) -> None:
        self._factor = 64 if is_real else 1

    def nbytes(self, nbytes: int) -> int:
        """A budget."""
        return nbytes * self._factor

    def count(self, count: int) -> int:
        """Elements of a vector."""
        return count * self._factor

    def width(self, width: int) -> int:
        """Rows, and columns, of a square matrix."""
        return width * int(self._factor**0.5)


@pytest.fixture
def scale(device: Any) -> Scale:
    """Sizes for the device at hand."""
    return Scale(device.torch_device.type != "cpu")


@pytest.fixture
def accelerator() -> Any:
    """A real accelerator, or a skip with its reason."""
    name = accelerator_name()
    if name is None:
        pytest.skip("torch finds no accelerator here (cuda, xpu, mps)")
    from torchTensorRef.devices import registry

    return registry.resolve(name)


def give_up_all(device: Any) -> None:
    """Give back to the driver what torch keeps: what products work in, and what is cached."""
    give_up_workspaces(device)
    device.give_up_caches()


@contextlib.contextmanager
def managed_by(device: Any) -> Iterator[Callable[..., Any]]:
    """Give `manage(strategy, nbytes)`: the manager on a device, checked at the end."""
    import torch

    import torchTensorRef
    import torchTensorRef.tensor.install
    from torchTensorRef import tensorsManager

    torch.manual_seed(0)

    def make(strategy: Any = "lru", nbytes: int | None = 64 * MIB) -> Any:
        gc.collect()
        give_up_all(device)  # what plain torch has left would count against the budget
        tensorsManager.device = device
        tensorsManager.budget = nbytes
        tensorsManager.strategy = strategy
        tensorsManager.reset_stats()
        return tensorsManager

    with torchTensorRef.disabled():
        yield make
    gc.collect()
    tensorsManager.check()
    assert not tensorsManager.residency.holds.pins_by_thread
    tensorsManager.bring_all_home()
    device.limit(device.capacity_nbytes)
    device.synchronize()
    give_up_all(device)
    tensorsManager.device = "sim"
    tensorsManager.budget = None


@pytest.fixture
def manage(device: Any) -> Iterator[Callable[..., Any]]:
    """The manager on the double, and on a real accelerator."""
    with managed_by(device) as make:
        yield make


@pytest.fixture
def manage_real(accelerator: Any) -> Iterator[Callable[..., Any]]:
    """The manager on a real accelerator."""
    with managed_by(accelerator) as make:
        yield make
