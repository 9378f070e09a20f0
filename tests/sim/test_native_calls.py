"""Calls that run natively: the same results, right books, interception where anything is in doubt.

What torch has compiled is stood in for by the module itself, so no compiler looks at it.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.differential import differences
from torchTensorRef import TensorRef, options, tensorsManager
from torchTensorRef.compiled.region import Part, Region
from torchTensorRef.compiled.slots import Slots
from torchTensorRef.inject.built_before import PATIENCE

from ..support.injection import injected
from ..support.programs import called_natively

AMPLE_NBYTES = 1 << 24


class Mlp(nn.Module):
    """What most tests call: learned once, then run natively."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        return self.second(torch.relu(self.first(x)))


@pytest.fixture
def ample(manage: Callable[..., Any]) -> Any:
    """A manager with room for everything, gradients off."""
    manager = manage("lru", AMPLE_NBYTES)
    with torch.no_grad():
        yield manager
    assert not manager.residency.holds.native_blocks
    assert not manager.residency.holds.native_entries
    assert manager.residency.recorder is None


def native_runs(call: Callable[[], Any]) -> int:
    """How many calls ran natively inside one."""
    before = tensorsManager.stats()["native_call_count"]
    call()
    return int(tensorsManager.stats()["native_call_count"] - before)


def learned(module: nn.Module, x: Any) -> nn.Module:
    """Call a module until it runs natively; each result is that of plain torch."""
    for i in range(5):
        count = native_runs(lambda: module(x))
        assert count == (i >= 1), f"call {i}"
    return module


def assert_equal(plain: Any, ours: Any) -> None:
    found = differences(plain, ours)
    assert not found, found


def pair(manager: Any, make: Callable[[], nn.Module], seed: int = 0) -> tuple[Any, Any]:
    """A plain module and the same one managed."""
    torch.manual_seed(seed)
    plain = make().eval()
    return plain, called_natively(manager.adopt(copy.deepcopy(plain)))


def follow(manager: Any, plain: Any, ours: Any, x: Any, calls: int = 3, **kwargs: Any) -> int:
    """Call both with the same input; results are equal. Returns how many calls ran natively."""
    before = manager.stats()["native_call_count"]
    for _ in range(calls):
        assert_equal(plain(x, **kwargs), ours(manager.adopt(x.clone()), **kwargs))
        manager.check()
    return int(manager.stats()["native_call_count"] - before)


# -- the same results ------------------------------------------------------------------------------


def test_inference_mode_gives_the_same(ample: Any) -> None:
    plain, ours = pair(ample, Mlp)
    with torch.inference_mode():
        assert follow(ample, plain, ours, torch.rand(3, 16)) == 2


# -- doubts ----------------------------------------------------------------------------------------


class WithTable(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.use = True
        self.table: Any = torch.rand(16)

    def forward(self, x: Any) -> Any:
        x = super().forward(x)
        return x * self.table if self.use else x


@pytest.mark.parametrize("is_managed", [True, False])
@pytest.mark.parametrize("is_used", [True, False], ids=["seen", "only later"])
def test_tensor_that_is_no_buffer(ample: Any, is_managed: bool, is_used: bool) -> None:
    plain, ours = pair(ample, WithTable)
    if is_managed:
        ours.table = ample.adopt(ours.table)
    x = torch.rand(2, 16)
    plain.use = ours.use = is_used
    assert follow(ample, plain, ours, x) == (0 if is_used else 2)
    plain.use = ours.use = True
    follow(ample, plain, ours, x)


def test_tensor_that_only_a_branch_uses(ample: Any) -> None:
    table = torch.rand(16)
    use = [False]

    class Branching(Mlp):
        def forward(self, x: Any) -> Any:
            x = super().forward(x)
            return x * self.held[0] if use[0] else x

    plain, ours = pair(ample, Branching)
    plain.held, ours.held = [table], [ample.adopt(table.clone())]
    x = torch.rand(2, 16)
    assert follow(ample, plain, ours, x) == 2
    use[0] = True
    follow(ample, plain, ours, x)


class Leaving(Mlp):
    keeps = "result"

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None
        self.all: list[Any] = []

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        z = self.second(y)
        if self.keeps == "inside":
            self.last = y
        elif self.keeps == "result":
            self.last = z
        elif self.keeps == "list":
            self.all.append(y)
        return z


@pytest.mark.parametrize("keeps", ["inside", "result", "list"])
@pytest.mark.parametrize("later", [False, True], ids=["always", "after learning"])
def test_tensors_left_behind_in_the_module(ample: Any, keeps: str, later: bool) -> None:
    plain, ours = pair(ample, Leaving)
    x = torch.rand(2, 16)
    if later:
        Leaving.keeps = ""
        assert follow(ample, plain, ours, x) == 2
    Leaving.keeps = keeps
    try:
        follow(ample, plain, ours, x)
    finally:
        Leaving.keeps = "result"
    ample.bring_all_home()
    assert_equal([plain.last, plain.all], [ours.last, ours.all])


def test_buffers_that_are_written(ample: Any) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))

    plain, ours = pair(ample, make)
    x = torch.rand(4, 16)
    assert follow(ample, plain, ours, x) == 2
    plain.train(), ours.train()
    follow(ample, plain, ours, x)
    ample.bring_all_home()
    assert_equal(list(plain.buffers()), [ample.release(b) for b in ours.buffers()])
    plain.eval(), ours.eval()
    follow(ample, plain, ours, x)


def test_buffer_that_an_unseen_branch_writes(ample: Any) -> None:
    use = [False]

    class Counting(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sum", torch.zeros(16))

        def forward(self, x: Any) -> Any:
            if use[0]:
                self.sum.add_(x[0])
            return super().forward(x) + self.sum

    plain, ours = pair(ample, Counting)
    x = torch.rand(2, 16)
    assert follow(ample, plain, ours, x) == 2
    use[0] = True
    assert follow(ample, plain, ours, x) == 1
    ample.bring_all_home()
    assert_equal(plain.sum, ours.sum)
    use[0] = False
    follow(ample, plain, ours, x)


def test_buffer_that_is_exchanged_inside(ample: Any) -> None:
    use = [False]

    class Exchanging(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sum", torch.zeros(16))

        def forward(self, x: Any) -> Any:
            if use[0]:
                self.sum = self.sum + x[0]
            return super().forward(x) + self.sum

    plain, ours = pair(ample, Exchanging)
    x = torch.rand(2, 16)
    assert follow(ample, plain, ours, x) == 2
    use[0] = True
    follow(ample, plain, ours, x)
    ample.bring_all_home()
    assert_equal(plain.sum, ours.sum)


def test_random_operators(ample: Any) -> None:
    plain, ours = pair(ample, lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)))
    plain.train(), ours.train()
    x, seen = torch.rand(4, 16), []
    for model, bring in ((plain, lambda x: x), (ours, ample.adopt)):
        torch.manual_seed(3)
        seen.append([model(bring(x.clone())) for _ in range(5)] + [torch.rand(2)])
    assert_equal(*seen)


def test_branch_that_changes(ample: Any) -> None:
    way = ["a"]

    class Branching(Mlp):
        def forward(self, x: Any) -> Any:
            if way[0] == "a":
                return super().forward(x)
            if way[0] == "b":
                return self.first(x), [x, x.t()], {"w": self.second.weight, "x": x}
            return None

    plain, ours = pair(ample, Branching)
    x = torch.rand(2, 16)
    for way[0] in "abcabc":
        follow(ample, plain, ours, x)


def test_module_or_parameter_exchanged_after_learning(ample: Any) -> None:
    plain, ours = pair(ample, Mlp)
    x = torch.rand(2, 16)
    assert follow(ample, plain, ours, x) == 2
    other = nn.Linear(16, 16)
    plain.second, ours.second = other, ample.adopt(copy.deepcopy(other))
    assert follow(ample, plain, ours, x) == 2
    weight = torch.rand(16, 16)
    plain.first.weight = nn.Parameter(weight)
    ours.first.weight = nn.Parameter(weight.clone())
    follow(ample, plain, ours, x)
    ample.adopt(ours)
    assert follow(ample, plain, ours, x) > 0
    plain.first.weight.data.mul_(2), ours.first.weight.data.mul_(2)
    follow(ample, plain, ours, x)
    state = {name: torch.rand_like(value) for name, value in plain.state_dict().items()}
    plain.load_state_dict(state), ours.load_state_dict(state)
    follow(ample, plain, ours, x)
    plain.load_state_dict(state, assign=True), ours.load_state_dict(state, assign=True)
    follow(ample, plain, ours, x)


def test_bias_that_comes_after_learning(ample: Any) -> None:
    plain, ours = pair(ample, lambda: nn.Sequential(nn.Linear(16, 16, bias=False)))
    x = torch.rand(2, 16)
    assert follow(ample, plain, ours, x) == 2
    bias = torch.rand(16)
    plain[0].bias = nn.Parameter(bias)
    ours[0].bias = ample.ownership.adopt_in_place(nn.Parameter(bias.clone()))
    assert follow(ample, plain, ours, x) == 2


def test_tied_weights_and_shared_modules(ample: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 16), nn.Linear(16, 16, bias=False)
            self.head.weight = self.embed.weight
            self.again = self.block = Mlp()

        def forward(self, ids: Any) -> Any:
            assert self.head.weight is self.embed.weight
            return self.head(self.again(self.block(self.embed(ids)))), self.head.weight

    plain, ours = pair(ample, Tied)
    assert follow(ample, plain, ours, torch.arange(6)) == 2
    assert ours(torch.arange(3))[1] is ours.embed.weight


def test_exceptions_restore_everything(ample: Any) -> None:
    fails = [False]

    class Failing(Mlp):
        def forward(self, x: Any, cache: Any) -> Any:
            cache["n"] = cache.get("n", 0) + 1
            cache["x"] = x + cache["x"] if "x" in cache else x * 1
            y = super().forward(cache["x"])
            if fails[0]:
                raise ValueError("inside")
            return y

    plain, ours = pair(ample, Failing)
    x = torch.rand(2, 16)
    caches: list[Any] = [{}, {}]
    for _ in range(7):  # the next one is hardly larger than one that is known
        assert_equal(plain(x, caches[0]), ours(ample.adopt(x.clone()), caches[1]))
    fails[0] = True
    with pytest.raises(ValueError, match="inside"):
        ours(ample.adopt(x.clone()), caches[1])
    with pytest.raises(ValueError, match="inside"):
        plain(x, caches[0])
    assert caches[1]["n"] == caches[0]["n"]  # what it has done before is done, as in plain torch
    assert_equal(caches[0]["x"], caches[1]["x"])
    assert isinstance(caches[1]["x"], TensorRef)
    assert all(isinstance(p, TensorRef) for p in ours.parameters())
    fails[0] = False
    assert_equal(plain(x, caches[0]), ours(ample.adopt(x.clone()), caches[1]))
    ample.check()


def test_threads_run_the_same_module(ample: Any) -> None:
    plain, ours = pair(ample, Mlp)
    xs = [torch.rand(3, 16) for _ in range(4)]
    expected = [plain(x) for x in xs]
    found: list[str] = []

    def work(i: int) -> None:
        with torch.no_grad():
            for n in range(60):
                part = ours.first if n % 7 == 3 and i == 3 else ours
                wanted = plain.first(xs[i]) if part is ours.first else expected[i]
                found.extend(differences(wanted, part(ample.adopt(xs[i].clone()))))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not found, found[:3]
    ample.check()
    residency = ample.residency
    assert residency.books.ready_on == (residency.books.main, residency.books.host)


def test_what_stands_in_natively_is_not_taken_for_a_plain_model(ample: Any) -> None:
    """Another thread meets the parameters of a native run: they were adopted, nothing is said."""
    inside, may_end = threading.Event(), threading.Event()
    waits = [False]

    class Waiting(Mlp):
        def forward(self, x: Any) -> Any:
            if waits[0]:
                inside.set()
                may_end.wait(60)
            return super().forward(x)

    plain, ours = pair(ample, Waiting)
    x = torch.rand(2, 16)
    learned(ours, ample.adopt(x.clone()))
    waits[0] = True

    def run() -> None:
        with torch.no_grad():
            ours(ample.adopt(x.clone()))

    def meet() -> None:
        """As in a program: injected, which a test's own thread is not."""
        assert inside.wait(60)
        try:
            assert not isinstance(ours._modules["first"]._parameters["weight"], TensorRef)
            with torch.no_grad():
                for _ in range(2 * PATIENCE):  # a warning is an error here, in threads too
                    found.extend(differences(wanted, ours.first(ample.adopt(x.clone()))))
        finally:
            may_end.set()

    wanted, found = plain.first(x), []
    threads = [threading.Thread(target=work) for work in (run, meet)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not found, found[:3]
    ample.check()


class Keeping(Mlp):
    """Keeps what it finds in a parameter's place, where nobody looks for it."""

    kept: Callable[[], list[Any]] = list

    def forward(self, x: Any) -> Any:
        self.kept().append(self.first.weight)
        return super().forward(x)


#: What a program makes of a parameter that it has kept, to multiply with it later.
MADE_OF_IT: dict[str, Callable[[Any], Any]] = {
    "itself": lambda kept: kept,
    "a part": lambda kept: kept[:, 4:8],
    "transposed": lambda kept: kept.t(),
    "detached": lambda kept: kept.detach(),
    "its data": lambda kept: kept.data,
    "a part of its data": lambda kept: kept.data[:, 4:8],
    "a shallow copy": copy.copy,
}


def kept_by(module: nn.Module, x: Any, calls: int = 3) -> Any:
    """Call a module, and return what it has kept of its last call."""
    found: list[Any] = []
    module.kept = lambda: found  # type: ignore[assignment]
    for _ in range(calls):
        module(x)
    return found[-1]


def evict_all(manager: Any, module: nn.Module) -> None:
    """Leave no bytes of a module on the device: they are at home."""
    for p in module.parameters():
        p.toCPU()
    manager.check()


@pytest.mark.parametrize("made", MADE_OF_IT)
def test_what_stood_in_natively_is_what_it_stood_for(ample: Any, made: str) -> None:
    plain, ours = pair(ample, Keeping)
    x = torch.rand(3, 16)
    mine = ample.adopt(x.clone())
    theirs = MADE_OF_IT[made](kept_by(plain, x))
    assert native_runs(lambda: kept_by(ours, mine)) == 2
    kept = MADE_OF_IT[made](kept_by(ours, mine))
    assert not isinstance(kept, TensorRef)
    with injected():
        for _ in range(2 * PATIENCE):  # nor is it said that it is plain: a warning is an error
            evict_all(ample, ours)
            assert kept.untyped_storage().nbytes() == 0
            assert_equal(x @ theirs, mine @ kept)
    evict_all(ample, ours)
    factor = torch.full(theirs.shape, 2.0)
    theirs.mul_(factor)
    kept.mul_(ample.adopt(factor))
    assert_equal(plain.first.weight, ours.first.weight)
    for module in (plain, ours):
        module.first.weight.add_(1)
    evict_all(ample, ours)
    assert_equal(x @ theirs, mine @ kept)
    assert_equal(plain(x), ours(mine))
    ample.check()


def test_what_another_thread_has_read_in_a_native_call(ample: Any) -> None:
    inside, may_end = threading.Event(), threading.Event()

    class Waiting(Mlp):
        def forward(self, x: Any) -> Any:
            inside.set()
            may_end.wait(60)
            return super().forward(x)

    may_end.set()
    plain, ours = pair(ample, Waiting)
    x = torch.rand(2, 16)
    mine = ample.adopt(x.clone())
    learned(ours, mine)
    inside.clear()
    may_end.clear()

    def run() -> None:
        with torch.no_grad():
            ours(mine)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert inside.wait(60)
        read = ours.first.weight
    finally:
        may_end.set()
        thread.join()
    assert not isinstance(read, TensorRef)
    evict_all(ample, ours)
    assert_equal(x @ plain.first.weight, mine @ read)


def test_what_stood_in_natively_has_room_taken_from_it(manage: Callable[..., Any]) -> None:
    manager = manage("lru", 8 << 10)
    plain, ours = pair(manager, Keeping)
    x = torch.rand(3, 16)
    with torch.no_grad():
        theirs, kept = kept_by(plain, x), kept_by(ours, manager.adopt(x.clone()))
        others = [manager.adopt(torch.rand(32, 32)) for _ in range(4)]
        for other in others:
            other @ other
        assert kept.untyped_storage().nbytes() == 0
        assert_equal(x @ theirs, manager.adopt(x.clone()) @ kept)


@pytest.mark.parametrize("is_frozen", [False, True], ids=["", "frozen before"])
def test_gradients_of_what_stood_in_natively(ample: Any, is_frozen: bool) -> None:
    """They are those of the parameter, where it had some before, too."""
    plain, ours = pair(ample, Keeping)
    x = torch.rand(3, 16)
    mine = ample.adopt(x.clone())
    with torch.enable_grad():
        for module, given in ((plain, x), (ours, mine)):
            module.requires_grad_(not is_frozen)
            kept_by(module, given)
            module.requires_grad_(True)
            kept = kept_by(module, given)
            given.requires_grad_()
            for _ in range(2):
                if module is ours:
                    evict_all(ample, ours)
                    assert kept.untyped_storage().nbytes() == 0
                (module(given).sum() + (given @ kept).square().sum()).backward()
    for theirs, p in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(ample.release(p.grad), theirs.grad)
    torch.testing.assert_close(ample.release(mine.grad), x.grad)
    ample.check()


def test_copies_of_what_stood_in_natively_are_their_own(ample: Any) -> None:
    plain, ours = pair(ample, Keeping)
    x = torch.rand(3, 16)
    mine = ample.adopt(x.clone())
    theirs, kept = kept_by(plain, x), kept_by(ours, mine)
    file = io.BytesIO()
    torch.save(kept, file)
    file.seek(0)
    copies = [copy.deepcopy(kept), pickle.loads(pickle.dumps(kept)), torch.load(file)]
    assert b"torchTensorRef" not in file.getvalue() + pickle.dumps(kept)
    wanted = x @ theirs
    ours.first.weight.zero_()
    evict_all(ample, ours)
    for one in copies:
        assert type(one) is nn.Parameter
        assert_equal(wanted, mine @ one)
    assert not (mine @ kept).any()


def test_what_stood_in_natively_and_was_set_to_other_memory(ample: Any) -> None:
    _, ours = pair(ample, Keeping)
    mine = ample.adopt(torch.rand(3, 16))
    kept, others = kept_by(ours, mine), torch.rand(16, 16)
    kept.data = others
    assert_equal(ample.release(mine) @ others, mine @ kept)


def test_a_parameter_set_to_other_memory_is_what_stood_in_for_it(ample: Any) -> None:
    plain, ours = pair(ample, Keeping)
    x = torch.rand(3, 16)
    mine = ample.adopt(x.clone())
    theirs, kept = kept_by(plain, x), kept_by(ours, mine)
    plain.first.weight.data = torch.ones(16, 5)
    ours.first.weight.data = ample.adopt(torch.ones(16, 5))
    assert_equal(x @ theirs, mine @ kept)


def test_what_stood_in_natively_becomes_another_modules(ample: Any) -> None:
    """It is one parameter of two modules then, as in plain torch."""
    _, ours = pair(ample, Keeping)
    mine = ample.adopt(torch.rand(3, 16))
    kept, other = kept_by(ours, mine), nn.Linear(16, 16)
    assert ample.adopt(kept) is ours.first.weight
    with injected():
        other.weight = kept
    assert other.weight is ours.first.weight
    assert native_runs(lambda: kept_by(ours, mine)) == 2


def test_a_copy_of_what_stood_in_natively_shares_until_it_is_written(ample: Any) -> None:
    plain, ours = pair(ample, lambda: Keeping(128))
    x = torch.rand(3, 128)
    mine = ample.adopt(x.clone())
    kept = [kept_by(plain, x)], [kept_by(ours, mine)]
    assert ours.first.weight.nbytes >= 1 << 16  # else a copy shares nothing
    plain_copy, our_copy = copy.deepcopy(plain), called_natively(copy.deepcopy(ours))
    for module in (plain, ours):
        module.first.weight.mul_(2)
    for several, module, given in ((kept[0], plain_copy, x), (kept[1], our_copy, mine)):
        several += [found := kept_by(module, given), found.data]
    for theirs, one in zip(*kept, strict=True):
        evict_all(ample, ours)
        evict_all(ample, our_copy)
        assert_equal(x @ theirs, mine @ one)


def test_input_exposed_to_numpy(ample: Any) -> None:
    plain, ours = pair(ample, Mlp)
    x = torch.rand(2, 16)
    assert follow(ample, plain, ours, x) == 2
    ref = ample.adopt(x.clone())
    array = ref.numpy()
    for i in range(3):
        array[0, i] = i
        assert_equal(plain(torch.from_numpy(array.copy())), ours(ref))
    weight = ours.first.weight.detach().numpy()
    weight[0] = 0
    plain.first.weight[0] = 0
    for _ in range(3):
        assert_equal(plain(x), ours(ample.adopt(x.clone())))


def test_numpy_inside(ample: Any) -> None:
    class Numpy(Mlp):
        def forward(self, x: Any) -> Any:
            self.array = super().forward(x).numpy()
            return torch.from_numpy(self.array) + x

    plain, ours = pair(ample, Numpy)
    assert follow(ample, plain, ours, torch.rand(2, 16)) == 0


def test_views_of_inputs_and_parameters_as_results(ample: Any) -> None:
    class Viewing(Mlp):
        def forward(self, x: Any) -> Any:
            return x.t(), x, self.first.weight[0], self.second.weight

    plain, ours = pair(ample, Viewing)
    x = ample.adopt(torch.rand(2, 16))
    learned(ours, x)
    view, same, row, weight = ours(x)
    assert same is x
    assert weight is ours.second.weight
    view.add_(1), row.zero_()
    ample.bring_all_home()
    plain.first.weight[0] = 0
    assert_equal(plain.first.weight, ours.first.weight)
    assert_equal(view.t() + 0, x + 0)
    with torch.no_grad():
        assert not (ours.first.weight[0] != 0).any().item()


def test_inputs_written_inside(ample: Any) -> None:
    class Writing(Mlp):
        def forward(self, x: Any, state: Any) -> Any:
            state.add_(super().forward(x))
            return state * 2

    plain, ours = pair(ample, Writing)
    x, states = torch.rand(2, 16), [torch.zeros(2, 16), ample.adopt(torch.zeros(2, 16))]
    for _ in range(6):
        assert_equal(plain(x, states[0]), ours(ample.adopt(x.clone()), states[1]))
        assert_equal(*states)
        version = states[1]._version
        ample.bring_all_home()
        assert_equal(*states)
    ours(ample.adopt(x.clone()), states[1])
    assert states[1]._version > version


def test_gradients_enabled_inside(ample: Any) -> None:
    class Enabling(Mlp):
        @torch.enable_grad()
        def forward(self, x: Any) -> Any:
            return super().forward(x)

    ours = ample.adopt(Enabling().eval())
    x = ample.adopt(torch.rand(2, 16))
    assert native_runs(lambda: [ours(x) for _ in range(4)]) == 0
    with torch.enable_grad():
        ours(x).sum().backward()
    assert ours.first.weight.grad is not None


def test_copies_and_state_hold_nothing_of_ours(ample: Any) -> None:
    ours = called_natively(ample.adopt(Mlp().eval()))
    x = ample.adopt(torch.rand(2, 16))
    expected = learned(ours, x)(x)
    for twin in (copy.deepcopy(ours), copy.copy(ours), pickle.loads(pickle.dumps(ours))):
        assert "_compiled_call_impl" not in twin.__dict__
        assert_equal(expected, twin(x))
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    assert b"torchTensorRef" not in file.getvalue()
    assert b"torchTensorRef" not in pickle.dumps(ours)


def test_what_is_let_go_of_is_gone(ample: Any) -> None:
    ours = called_natively(ample.adopt(Mlp().eval()))
    x = ample.adopt(torch.rand(2, 16))
    learned(ours, x)
    gc.collect()
    gc.disable()
    try:
        old = weakref.ref(ours.first.weight)
        block = weakref.ref(ours.first.weight._ttr_block)
        ours.first.weight = None
        assert old() is None
        assert block() is None
    finally:
        gc.enable()
    del ours
    gc.collect()
    assert ample.stats()["resident_nbytes"] <= 2 * x.nbytes


def test_memory_error_inside_leaves_the_program_running(ample: Any) -> None:
    fails = [False]

    class Full(Mlp):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            if fails[0] and not isinstance(x, TensorRef):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
            return y

    plain, ours = pair(ample, Full)
    x = torch.rand(2, 16)
    assert follow(ample, plain, ours, x) == 2
    fails[0] = True
    expected = Mlp.forward(plain, x)
    assert_equal(expected, ours(ample.adopt(x.clone())))


def test_the_share_of_native_operators_is_known(ample: Any) -> None:
    ours, x = called_natively(ample.adopt(Mlp().eval())), ample.adopt(torch.rand(2, 16))
    learned(ours, x)
    assert 0 < ample.stats()["native_share"] < 1
    ample.reset_stats()
    assert ample.stats()["native_share"] == 0
    ours(x)
    assert ample.stats()["native_share"] == 1
    _ = x + x, x + x, x + x
    assert ample.stats()["native_share"] == 0.5


def _uses_told(strategy: Any, names: dict[int, str]) -> list[Any]:
    """From now on, note which named blocks a strategy is told of, and as what."""
    seen: list[Any] = []
    whole = strategy.on_access

    def on_access(access: Any) -> None:
        if access.block_id in names:
            seen.append((names[access.block_id], access.struct))
        whole(access)

    strategy.on_access = on_access
    return seen


def test_uses_are_told_as_the_operators_tell_them(manage: Callable[..., Any]) -> None:
    told: dict[bool, list[Any]] = {}
    torch.manual_seed(0)
    plain = nn.Sequential(*(Mlp() for _ in range(6))).eval()
    for is_native in (False, True):
        manager = manage("flow", 9_000)
        with torch.no_grad(), options(compiled="forced" if is_native else "off"):
            ours, x = manager.adopt(copy.deepcopy(plain)), manager.adopt(torch.rand(2, 16))
            for layer in ours:
                called_natively(layer)
            names = {p._ttr_block.block_id: name for name, p in ours.named_parameters()}
            for _ in range(4):
                ours(x)
            seen = _uses_told(manager.strategy, names)
            start = manager.residency.books.tick
            ours(x)
            # Not by which kind of operator: what is there runs as one, and else in parts.
            told[is_native] = [*(name for name, _ in seen), manager.residency.books.tick - start]
            assert bool(manager.stats()["native_call_count"]) == is_native
        del ours, x
    assert told[True] == told[False]


def test_forecasts_are_fed_once_per_block(manage: Callable[..., Any]) -> None:
    manager = manage("flow", 7_000)
    plain, ours = pair(manager, lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(12))))
    with torch.no_grad(), options(compiled="forced"):
        follow(manager, plain, ours, torch.rand(2, 16), calls=8)
    assert manager.stats()["peak_resident_nbytes"] <= 7_000


def test_subclass_that_an_unseen_branch_leaves_in_a_cache(ample: Any) -> None:
    use = [False]

    class Scaled(torch.Tensor):
        """A tensor of another library: it holds another one, and no bytes."""

        @staticmethod
        def __new__(cls, inner: Any, scale: float) -> Any:
            made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)
            made.inner, made.scale = inner, scale
            return made

        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            args = [x.inner * x.scale if type(x) is cls else x for x in args]
            return op(*args, **(kwargs or {}))

    class Caching(Mlp):
        def forward(self, x: Any, cache: list[Any]) -> Any:
            y = super().forward(x)
            cache.append(Scaled(y, 0.5) if use[0] else y)
            return sum(part + 0 for part in cache)

    plain, ours = pair(ample, Caching)
    x, caches = torch.rand(2, 16), ([], [])
    for i in range(9):
        use[0] = i > 5
        assert_equal(plain(x, caches[0]), ours(ample.adopt(x.clone()), caches[1]))
        if not use[0]:
            caches[0].clear(), caches[1].clear()
    ample.bring_all_home()
    assert_equal([part + 0 for part in caches[0]], [part + 0 for part in caches[1]])


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "an attribute": lambda model: setattr(model[0], "in_features", 7),
    "a new attribute": lambda model: setattr(model[0], "mark", "new"),
    "an attribute that was None for another": lambda model: (
        delattr(model, "nothing"),
        setattr(model, "mark", "new"),
    ),
    "a dictionary for an equal one": lambda model: setattr(
        model[0], "_parameters", dict(model[0]._parameters)
    ),
    "a tensor for a tensor": lambda model: setattr(model, "kept", torch.ones(3)),
    "a child": lambda model: model[1].register_module("more", nn.Linear(2, 2)),
    "another child": lambda model: setattr(model[1], "0", nn.Linear(4, 4)),
    "a parameter where none was": lambda model: setattr(
        model[0], "bias", nn.Parameter(torch.ones(4))
    ),
    "no parameter where one was": lambda model: setattr(model[0], "weight", None),
    "a buffer": lambda model: model[0].register_buffer("more", torch.ones(2)),
    "a parameter in the dictionary": lambda model: model[1]._parameters.update(
        more=nn.Parameter(torch.ones(2))
    ),
    "all attributes": lambda model: setattr(
        model[0], "__dict__", {**model[0].__dict__, "mark": "new"}
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_in_a_region_is_seen(manager: Any, change: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Sequential(nn.Linear(4, 4)))
    model.kept, model.nothing = torch.zeros(3), None
    manager.adopt(model)
    slots, region = Slots(model.modules()), Region()
    region.parts = [Part(part) for part in model.modules()]
    assert region.parts_are_as_before()
    assert region.outline is not None
    assert region.parts_are_as_before()
    assert slots.hold()
    CHANGES[change](model)
    assert not (region.parts_are_as_before() and slots.hold())


class Guarded(dict[str, Any]):
    """As a `ModelOutput`: entries come by its constructor only."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("You cannot use update on a Guarded")

    def clear(self) -> None:
        raise TypeError("You cannot use clear on a Guarded")

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("You cannot set an entry of a Guarded")


class Refusing(Mlp):
    """Leaves something in what it is given, and raises."""

    refuses = False

    def forward(self, given: Any, log: Any) -> Any:
        y = super().forward(given["x"])
        if self.refuses:
            log.append(len(log))
            log.append(given["x"][:1])
            raise ValueError("the program's own")
        return y


def test_an_error_inside_comes_out_and_leaves_containers_as_the_program_has(ample: Any) -> None:
    plain, ours = pair(ample, Refusing)
    x = torch.rand(2, 16)
    given, log = Guarded(x=ample.adopt(x.clone())), [ample.adopt(torch.rand(3))]
    before = given["x"], log[0]
    assert native_runs(lambda: [ours(given, log) for _ in range(3)]) == 2
    ours.refuses = plain.refuses = True
    with pytest.raises(ValueError, match="the program's own"):
        ours(given, log)
    assert [*given] == ["x"]
    assert given["x"] is before[0]
    assert log[0] is before[1]
    assert log[1] == 1
    assert isinstance(log[2], TensorRef)
    assert_equal(x[:1], log[2])
    ample.check()
