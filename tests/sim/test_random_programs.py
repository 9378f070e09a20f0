"""Random programs of everything that touches residency, step by step against plain torch."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import torchTensorRef
import torchTensorRef.tensor.tensor_ref
from torchTensorRef import ExposedError, TransferError, tensorsManager
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.machine import Machine
from torchTensorRef.devices.sim.spec import DeviceSpec
from torchTensorRef.interception import handlers
from torchTensorRef.memory import once
from torchTensorRef.tensor.tensor_ref import TensorRef

from ..support.differential import bits
from ..support.programs import Adversary, RandomEviction, Scatter

CAPACITY_NBYTES = 1 << 16
#: More failing copies in a row than a program of thirty steps plans.
MANY_FAULTS = 30
BUDGETS = [CAPACITY_NBYTES, 1_000, 300, 60]
STRATEGIES = {
    "lru": lambda: "lru",
    "genoa": lambda: "genoa",
    "flow": lambda: "flow",
    "random": lambda: RandomEviction(1),
    "adversary": lambda: Adversary(2),
    "venice": lambda: "venice",
    "scatter": lambda: Scatter(3),
}

#: What makes a view of any tensor of at least one dimension.
VIEWS = {
    "slice": lambda x: x[1:],
    "step": lambda x: x[::2],
    "transpose": lambda x: x.transpose(0, -1),
    "flat": lambda x: x.flatten() if x.is_contiguous() else x,
    "expand": lambda x: x.unsqueeze(0).expand(2, *x.shape),
    "select": lambda x: x.narrow(-1, 0, max(x.shape[-1] - 1, 0)),
    "diagonal": lambda x: x.diagonal() if x.dim() > 1 else x[:1],
    "strided": lambda x: x.as_strided((2,), (1,), x.storage_offset()) if x.numel() > 2 else x[:],
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "alias": lambda x: x.view_as(x),
}

#: What writes a tensor; never one whose elements overlap.
WRITES = {
    "add": lambda x, y: x.add_(1),
    "mul": lambda x, y: x.mul_(2),
    "zero": lambda x, y: x.zero_(),
    "copy": lambda x, y: x.copy_(y.sum()),
    "index": lambda x, y: x.__setitem__(0, 7.0) if x.numel() else x,
    "mask": lambda x, y: x.masked_fill_(x > 2, 0.5),
    "sum": lambda x, y: x.sub_(y.mean() if y.numel() else 0),
    "cumsum": lambda x, y: x.cumsum_(0),
    "out": lambda x, y: torch.mul(x, 3, out=x),
    "foreach": lambda x, y: torch._foreach_add_([x, x.detach()], 1),
    "uniform": lambda x, y: x.uniform_(),
}

#: What makes a new tensor.
RESULTS = {
    "add": lambda x, y: x + 1,
    "mean": lambda x, y: (x - y.sum()).cos(),
    "outer": lambda x, y: torch.outer(x.reshape(-1)[:4], y.reshape(-1)[:5]),
    "cat": lambda x, y: torch.cat([x.reshape(-1)[:6], y.reshape(-1)[:6]]),
    "sort": lambda x, y: x.sort(dim=0)[0],
    "clone": lambda x, y: x.clone(),
    "contiguous": lambda x, y: x.contiguous(),
    "double": lambda x, y: x.double().float(),
    "deepcopy": lambda x, y: copy.deepcopy(x),
    "shallow": lambda x, y: copy.copy(x),
    "gather": lambda x, y: x[torch.tensor([0, -1])] if len(x) else x.clone(),
    "unique": lambda x, y: torch.unique(x),
    "random": lambda x, y: torch.rand_like(x) + x,
    "to": lambda x, y: x.to("cpu"),
    "empty": lambda x, y: torch.mul(y, 2, out=y.new_empty(0)),
}


def devices(count: int) -> list[SimDevice]:
    """Accelerators plugged into one machine, whose freed and stale bytes are poisoned."""
    spec = DeviceSpec(
        name="test",
        capacity_nbytes=CAPACITY_NBYTES,
        decision_nbytes=1 << 10,
        peer_bytes_per_s=1e9,
    )
    machine = Machine.of(spec)
    return [
        SimDevice(spec, number, machine=machine, poison=True, name=f"sim:test{number}")
        for number in range(count)
    ]


def one_of(data: Any, things: list[Any], count: int) -> Any:
    """Draw one of the last things, by its number: Hypothesis would keep the thing, and print it."""
    return things[-data.draw(st.integers(1, min(count, len(things))), label="from the end")]


def in_spite_of_faults(look: Callable[[], Any]) -> Any:
    """Look until no copy fails on the way: after each one nothing has changed."""
    for _ in range(MANY_FAULTS):
        with contextlib.suppress(TransferError):
            return look()
    return look()


class Programs(RuleBasedStateMachine):
    """Two worlds that are given the same program; `pairs` holds a tensor of each."""

    device_count = 1
    first_strategy: Any = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.disabled = torchTensorRef.disabled()
        self.disabled.__enter__()
        self.shared_from, handlers.SHARE_FROM_NBYTES = handlers.SHARE_FROM_NBYTES, 1
        once.said.update(("room", "thrash"))  # budgets are too small on purpose
        self.manager: Any = tensorsManager
        self.manager.device = devices(self.device_count)
        self.manager.budget = CAPACITY_NBYTES
        self.manager.strategy = self.first_strategy
        self.pairs: list[tuple[torch.Tensor, Any]] = []
        self.arrays: list[tuple[Any, Any]] = []
        #: Plain tensors over the same memory: from before the adoption, and what `target` gave.
        self.aliases: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.seed = 0

    # -- helpers ----------------------------------------------------------------------------------

    def pick(self, data: Any) -> tuple[torch.Tensor, Any]:
        return one_of(data, self.pairs, 6)  # type: ignore[no-any-return]

    def both(self, function: Any, *pairs: tuple[torch.Tensor, Any]) -> None:
        """Do the same in both worlds; keep what comes out."""
        outs = []
        self.seed += 1
        for world in (0, 1):
            torch.manual_seed(self.seed)
            outs.append(function(*(pair[world] for pair in pairs)))
        plain, ours = outs
        if isinstance(plain, torch.Tensor):
            assert isinstance(ours, TensorRef)
            assert plain.shape == ours.shape
            assert plain.stride() == ours.stride()
            assert plain.storage_offset() == ours.storage_offset()
            if plain.dim() and not any(ours is pair[1] for pair in self.pairs):
                self.pairs.append((plain, ours))

    # -- what a program does ----------------------------------------------------------------------

    @initialize(size=st.sampled_from([(3, 4), (7,), (2, 3, 2)]))
    def begin(self, size: Any) -> None:
        self.create(size)

    @rule(size=st.sampled_from([(3, 4), (7,), (2, 3, 2), (1, 5)]))
    def create(self, size: Any) -> None:
        self.seed += 1
        plain = torch.rand(size, generator=torch.Generator().manual_seed(self.seed))
        self.pairs.append((plain, self.manager.adopt(plain.clone())))

    @rule(size=st.sampled_from([(6,), (2, 4)]))
    def create_with_a_plain_alias(self, size: Any) -> None:
        plain, mine = torch.ones(size), torch.ones(size)
        self.pairs.append((plain.detach(), self.manager.adopt(mine)))
        self.aliases.append((plain, mine))

    @rule(data=st.data(), kind=st.sampled_from(sorted(VIEWS)))
    def view(self, data: Any, kind: str) -> None:
        self.both(VIEWS[kind], self.pick(data))

    @rule(data=st.data(), kinds=st.lists(st.sampled_from(sorted(WRITES)), min_size=1, max_size=3))
    def write(self, data: Any, kinds: list[str]) -> None:
        x, y = self.pick(data), self.pick(data)
        if 0 in x[0].stride() or x[0].numel() == 0:
            return
        for kind in kinds:
            self.both(lambda *args, kind=kind: WRITES[kind](*args), x, y)

    @rule(data=st.data(), kinds=st.lists(st.sampled_from(sorted(RESULTS)), min_size=1, max_size=3))
    def compute(self, data: Any, kinds: list[str]) -> None:
        for kind in kinds:
            self.both(RESULTS[kind], self.pick(data), self.pick(data))

    @rule(data=st.data())
    def set_to_another(self, data: Any) -> None:
        self.both(lambda x, y: x.set_(y), self.pick(data), self.pick(data))

    @rule(data=st.data())
    def take_the_data_of_another(self, data: Any) -> None:
        self.both(lambda x, y: setattr(x, "data", y.data), self.pick(data), self.pick(data))

    @rule(data=st.data())
    def copy_together(self, data: Any) -> None:
        """Tensors that shared memory share it in the copy."""
        x, y = self.pick(data), self.pick(data)
        copies = [copy.deepcopy([x[world], y[world]]) for world in (0, 1)]
        self.pairs += zip(*copies, strict=True)

    @rule(data=st.data())
    def free(self, data: Any) -> None:
        if len(self.pairs) > 1:
            number = data.draw(st.integers(0, len(self.pairs) - 1))
            del self.pairs[number]

    # -- where the bytes are ----------------------------------------------------------------------

    @rule(data=st.data(), to_gpu=st.booleans())
    def move(self, data: Any, to_gpu: bool) -> None:
        ref = self.pick(data)[1]
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"toGPU\(\) has not made", RuntimeWarning)
                assert (ref.toGPU() if to_gpu else ref.toCPU()) is ref
        except torch.OutOfMemoryError:
            assert to_gpu
        except TransferError:
            pass  # nothing has changed

    @rule()
    def evict_all(self) -> None:
        in_spite_of_faults(self.manager.bring_all_home)

    @rule(data=st.data())
    def evict_one(self, data: Any) -> None:
        ref = self.pick(data)[1]
        for device in self.manager.residency.books.accelerators:
            replica = ref._ttr_block.replicas.get(device)
            if replica is not None:
                evict = self.manager.residency.evictor.evict
                in_spite_of_faults(partial(evict, replica, "the test says so"))

    @rule(budget=st.sampled_from(BUDGETS))
    def change_the_budget(self, budget: int) -> None:
        self.set_budget(budget)

    @rule(budgets=st.lists(st.sampled_from(BUDGETS), min_size=2, max_size=2))
    def change_the_budgets(self, budgets: list[int]) -> None:
        named = zip(self.manager.residency.books.accelerators, budgets, strict=False)
        self.set_budget({device.name: budget for device, budget in named})

    def set_budget(self, budget: Any) -> None:
        try:
            self.manager.budget = budget
        except torch.OutOfMemoryError:
            # More is held by what `target` gave.
            self.manager.budget = CAPACITY_NBYTES

    @rule(which=st.integers(0, 1), count=st.integers(1, 3), first=st.integers(1, 3))
    def have_copies_fail(self, which: int, count: int, first: int) -> None:
        """Each is tried three times: up to two in a row are not seen, a third may be."""
        accelerators = self.manager.residency.books.accelerators
        for number in range(first, first + count):
            accelerators[which % len(accelerators)].fail_next("copy", number)

    @rule(name=st.sampled_from(sorted(STRATEGIES)))
    def change_the_strategy(self, name: str) -> None:
        self.manager.strategy = STRATEGIES[name]()

    @rule(placement=st.sampled_from(["hybrid", "accelerator"]))
    def change_the_placement(self, placement: str) -> None:
        self.manager.placement = placement

    # -- bytes that are outside -------------------------------------------------------------------

    @rule(data=st.data())
    def expose(self, data: Any) -> None:
        plain, ours = self.pick(data)
        array = plain.detach().numpy()
        try:
            self.arrays.append((array, ours.detach().numpy()))
        except ExposedError:
            # What `target` gave holds it on an accelerator. Where it is depends on time, and what
            # is drawn may not.
            self.arrays.append((array.copy(), array.copy()))

    @rule(data=st.data())
    def take_the_target(self, data: Any) -> None:
        plain, ours = self.pick(data)
        if 0 not in plain.stride():  # torch writes no element that is there twice
            self.aliases.append((plain.detach(), ours.detach().target))

    @precondition(lambda self: self.arrays)
    @rule(data=st.data(), value=st.integers(0, 9))
    def write_through_an_array(self, data: Any, value: int) -> None:
        plain, ours = one_of(data, self.arrays, 4)
        if plain.flags.writeable and plain.size:
            plain[..., 0] = ours[..., 0] = value

    @precondition(lambda self: self.arrays)
    @rule()
    def drop_an_array(self) -> None:
        self.arrays.pop()

    @precondition(lambda self: self.aliases)
    @rule(data=st.data(), value=st.integers(0, 9))
    def write_through_a_plain_alias(self, data: Any, value: int) -> None:
        for tensor in one_of(data, self.aliases, 3):
            tensor[..., 0] = value

    @precondition(lambda self: self.aliases)
    @rule()
    def drop_a_plain_alias(self) -> None:
        self.aliases.pop()

    # -- what holds after each step ---------------------------------------------------------------

    @invariant()
    def the_books_are_right(self) -> None:
        self.manager.check()
        assert not self.manager.residency.holds.pins_by_thread

    @invariant()
    def every_value_is_that_of_plain_torch(self) -> None:
        for plain, ours in self.pairs:
            seen = in_spite_of_faults(partial(self.manager.ownership.peek, ours))
            assert plain.shape == seen.shape
            assert torch.equal(bits(plain), bits(seen)), f"{plain} became {seen}"
        for plain, ours in self.arrays:
            assert np.array_equal(plain, ours), f"the array {plain} became {ours}"
        for plain, ours in self.aliases:
            assert torch.equal(plain, ours), f"the alias {plain} became {ours}"

    def teardown(self) -> None:
        self.pairs.clear()
        self.arrays.clear()
        self.aliases.clear()
        handlers.SHARE_FROM_NBYTES = self.shared_from
        self.manager.placement = "auto"
        self.manager.check()
        accelerators = self.manager.residency.books.accelerators
        in_spite_of_faults(self.manager.bring_all_home)
        assert not any(device.resident_nbytes for device in accelerators)
        self.disabled.__exit__(None, None, None)


class ProgramsOnTwo(Programs):
    """The same on two accelerators, between which operators are scattered, or dealt out."""

    device_count = 2

    def __init__(self) -> None:
        self.first_strategy = Scatter(4)
        super().__init__()

    @rule(data=st.data())
    def move_to_the_second(self, data: Any) -> None:
        ref = self.pick(data)[1]
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"toGPU\(\) has not made", RuntimeWarning)
                ref.toGPU("sim:test1")
        except torch.OutOfMemoryError:
            assert self.manager.residency.books.is_pressed
        except TransferError:
            pass  # nothing has changed

    @rule()
    def scatter(self) -> None:
        self.manager.strategy = Scatter(5)


TestPrograms = Programs.TestCase
TestProgramsOnTwo = ProgramsOnTwo.TestCase
TestPrograms.settings = TestProgramsOnTwo.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
