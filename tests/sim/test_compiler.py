"""Compiled modules and functions called with TensorRefs: natively, by blocks, or intercepted."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex

from torchTensorRef import TensorRef, options, tensorsManager

from ..support.differential import differences
from ..support.injection import injected, kind_of, one_thread, plain_result, seed
from ..support.sweeps import usual

WIDTH = 32


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.second = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(nn.functional.gelu(self.first(self.norm(x))))


class Model(nn.Module):
    def __init__(self, count: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(count))
        self.out = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        hidden = x * scale
        for layer in self.layers[:]:  # a list that is made anew
            hidden = layer(hidden)
        return {"out": self.out(hidden), "hidden": hidden}


class Backend:
    """Compiles nothing, counts the graphs, and has them see plain tensors only."""

    def __init__(self) -> None:
        self.graph_count = 0
        self.call_count = 0

    def __call__(self, graph: Any, examples: list[Any]) -> Any:
        self.graph_count += 1

        def run(*args: Any) -> Any:
            self.call_count += 1
            kinds = {type(arg) for arg in args if isinstance(arg, torch.Tensor)}
            assert kinds <= {torch.Tensor, nn.Parameter}
            assert not any(isinstance(arg, TensorRef) for arg in args)
            return graph.forward(*args)

        return run


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()
    gc.collect()


def plainly(program: Callable[[], Any]) -> Any:
    """What plain torch makes of a program without compiling, which takes most of the time."""

    def not_compiled() -> Any:
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(torch, "compile", lambda function, **_: function)
            return program()

    return plain_result(not_compiled)


@pytest.fixture
def ours(manage) -> Callable[..., Any]:
    """Give `ours(program, nbytes)`: its results, which are plain torch's to the bit.

    With `by=plainly` they are those without a compiler, where that must change nothing.
    """

    def run(
        program: Callable[[], Any],
        nbytes: int = 1 << 20,
        strategy: str = "lru",
        by: Callable[[Callable[[], Any]], Any] = plain_result,
    ) -> Any:
        plain = by(program)
        torch._dynamo.reset()
        manager = manage(strategy, nbytes)
        seed()
        with injected(), one_thread():
            found = program()
        manager.check()
        assert differences(plain, found) == []
        return manager

    return run


def batches(count: int = 4) -> list[torch.Tensor]:
    return [torch.rand(5, WIDTH) for _ in range(count)]


WAYS = {
    "module": lambda model, backend: torch.compile(model, fullgraph=True, backend=backend),
    "in place": lambda model, backend: model.compile(fullgraph=True, backend=backend) or model,
    "method": lambda model, backend: torch.compile(model.forward, fullgraph=True, backend=backend),
    "function": lambda model, backend: torch.compile(
        lambda x, **options: model(x, **options), fullgraph=True, backend=backend
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_compiled_runs_natively(ours, way):
    backend = Backend()

    def program() -> Any:
        model = Model(2).eval()
        compiled = WAYS[way](model, backend)
        with torch.no_grad():
            return [compiled(x, scale=2.0) for x in batches()]

    manager = ours(program)
    assert manager.stats()["native_call_count"] >= 3  # the first call is learned
    assert backend.graph_count == 2  # once for plain torch, once for us
    assert backend.call_count == 4 + 3


def test_nothing_stays_exchanged(ours):
    def program() -> Any:
        model = Model(2)
        compiled = torch.compile(model, fullgraph=True, backend=Backend())
        kinds = [type(p) for p in model.parameters()]
        with torch.no_grad():
            results = [compiled(x) for x in batches()]
        assert [type(p) for p in model.parameters()] == kinds
        assert {kind_of(r) for result in results for r in result.values()} <= {
            TensorRef,
            torch.Tensor,
        }
        return [results, [p.detach() for p in model.parameters()]]

    ours(program, by=plainly)


@pytest.mark.parametrize("strategy", ["lru", "flow"])
@pytest.mark.parametrize("is_forced", [True, False])
def test_a_model_that_does_not_fit_is_intercepted_or_forced_to_run_by_blocks(
    ours, strategy, is_forced
):
    backend = Backend()
    nbytes = sum(p.nbytes for p in Model().parameters())

    def program() -> Any:
        model = Model()
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        with torch.no_grad():
            return [compiled(x) for x in batches(5)]

    with options(compiled="forced" if is_forced else "on"):
        manager = ours(program, nbytes // 2, strategy)
    assert (manager.stats()["native_call_count"] >= 4 * 3) is is_forced
    assert manager.stats()["peak_resident_nbytes"] <= nbytes // 2
    # Plain torch's whole, and one for all layers.
    assert backend.graph_count == 1 + is_forced


@pytest.mark.parametrize(("width", "rows"), usual([(WIDTH, 5)], [(512, 256)]))
def test_by_blocks_takes_no_longer_than_not_compiling(manage, width, rows):
    took = {}
    nbytes = sum(p.nbytes for p in Model(8, width).parameters())
    for is_compiled in (False, True):
        manager = manage("flow", nbytes // 2)
        seed()
        with injected(), one_thread(), torch.no_grad():
            model = Model(8, width)
            run = torch.compile(model, backend=Backend()) if is_compiled else model
            xs = [torch.rand(rows, width) for _ in range(9)]
            for x in xs[:5]:
                run(x)
            device: Any = manager.residency.books.main
            device.synchronize()
            before_ns = device.now_ns()
            for x in xs[5:]:
                run(x)
            device.synchronize()
            took[is_compiled] = device.now_ns() - before_ns
    # What comes after a layer is fetched while it is computed.
    assert took[True] <= 1.02 * took[False]


def test_what_is_there_and_stays_is_not_asked_for_again(manage, monkeypatch):
    manager, asked = manage("lru"), []
    acquire = manager.residency.acquire

    def listening(device: Any, blocks: Any, written: Any, expected: int) -> Any:
        asked.extend(blocks)
        return acquire(device, blocks, written, expected)

    with injected(), one_thread(), torch.no_grad():
        model = Model()
        compiled = torch.compile(model, backend=Backend())
        xs = batches(5)
        for x in xs[:4]:
            compiled(x)
        monkeypatch.setattr(manager.residency, "acquire", listening)
        compiled(xs[4])
    own = {p._ttr_block for p in model.parameters()}
    assert own.isdisjoint(asked)
    assert xs[4]._ttr_block in asked  # what is given may be written inside, and is at home, too


@pytest.mark.parametrize("comes_again", [False, True])
def test_a_result_that_is_a_weight_shares_its_memory(manage, comes_again):
    manager = manage("lru")

    class Handing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.linear(x), self.linear.weight[1:]

    with injected(), one_thread(), torch.no_grad():
        model = Handing()
        compiled = torch.compile(model, backend=Backend())
        for x in batches(3):
            part = compiled(x)[1]
        if comes_again:
            for p in model.parameters():
                p.toCPU()
            others = torch.rand(64, WIDTH) + 1  # takes the room that was given back
            part = compiled(torch.rand(5, WIDTH))[1]
            assert others.proxyInfo.block != part.proxyInfo.block
        assert part.proxyInfo.block == model.linear.weight.proxyInfo.block
        part.zero_()
        assert not model.linear.weight[1:].any()
    assert manager.stats()["native_call_count"] >= 2


def test_what_is_written_is_seen(ours):
    """A cache that is written in place, an attribute, a weight that the program writes between."""

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, cache: torch.Tensor, row: int) -> torch.Tensor:
            cache[row] = self.linear(x)[0]
            return cache.sum(0) + x

    def program() -> Any:
        model = Writing()
        compiled = torch.compile(model, fullgraph=True, backend=Backend(), dynamic=True)
        cache, results = torch.zeros(6, WIDTH), []
        with torch.no_grad():
            for row, x in enumerate(batches(6)):
                results.append(compiled(x, cache, row))
                model.linear.weight.mul_(1.5)
                results.append(cache.clone())
        return [results, cache]

    ours(program, by=plainly)


class Changing(nn.Module):
    """Uses what it has; none of that is there in each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.scale = 1.0
        self.register_parameter("shift", None)
        self.register_buffer("mask", torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.linear(x)) * self.scale * self.mask
        if hasattr(self, "extra"):
            x = self.extra(x)
        return x if self.shift is None else x + self.shift


CHANGES: dict[str, Callable[[Changing], Any]] = {
    "a weight for another": lambda model: setattr(
        model.linear, "weight", nn.Parameter(torch.rand(WIDTH, WIDTH))
    ),
    "a weight's data": lambda model: setattr(model.linear.weight, "data", torch.eye(WIDTH)),
    "a part of a weight": lambda model: setattr(model.mask, "data", model.linear.weight.data[1]),
    "no bias": lambda model: setattr(model.linear, "bias", None),
    "a parameter for None": lambda model: setattr(model, "shift", nn.Parameter(torch.rand(WIDTH))),
    "one for two": lambda model: setattr(model, "shift", model.linear.bias),
    "a child": lambda model: setattr(model, "extra", nn.Linear(WIDTH, WIDTH)),
    "a child for another": lambda model: setattr(model, "linear", nn.Linear(WIDTH, WIDTH)),
    "a number": lambda model: setattr(model, "scale", 3.0),
    "an attribute of torch's": lambda model: model.dropout.train(),
    "all weights": lambda model: model.load_state_dict(Changing().state_dict(), assign=True),
    "where gradients are": lambda model: model.requires_grad_(False),
    "a buffer": lambda model: model.mask.zero_(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_program_changes_between_calls_is_seen(ours, change):
    def program() -> Any:
        model = Changing().eval()
        compiled = torch.compile(model, fullgraph=True, backend=Backend())
        results = []
        with torch.no_grad():
            results += [compiled(x) for x in batches(3)]
            CHANGES[change](model)
            results += [compiled(x) for x in batches(3)]
        return [results, [p.detach() for p in model.parameters()], [*model.buffers()]]

    manager = ours(program, by=plainly)
    assert manager.stats()["native_call_count"] >= 3


def test_a_graph_break_of_the_programs_own_is_raised_as_by_torch(ours):
    def program() -> Any:
        def broken(x: torch.Tensor) -> Any:
            torch._dynamo.graph_break()
            return x + 1

        compiled = torch.compile(broken, fullgraph=True, backend=Backend())
        raised = []
        for x in batches(2):
            try:
                with torch.no_grad():
                    compiled(x)
            except torch._dynamo.exc.Unsupported as error:
                raised.append(str(error).splitlines()[0])
        return raised[-1:]

    ours(program)


def doubled(module: nn.Module) -> torch.Tensor:
    return module.weight * 2


def test_a_function_that_is_given_nothing_but_a_module_is_intercepted(manage):
    """peft's conversion compiles one that takes a layer: inductor asked for memory it has not."""
    manager = manage("lru")
    with injected(), one_thread(), torch.no_grad():
        layer, compiled = nn.Linear(WIDTH, 8), torch.compile(doubled)
        for _ in range(2):
            assert torch.equal(compiled(layer), layer.weight * 2)
            assert torch.equal(compiled(module=layer), layer.weight * 2)
    manager.check()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(manage, mode):
    manager = manage("lru")
    with injected(), one_thread(), torch.no_grad():
        model = Model(2)
        xs = batches(3)
        expected = [model(x)["out"] for x in xs]
        compiled = torch.compile(model, fullgraph=True, mode=mode)
        for x, wanted in zip(xs, expected, strict=True):
            torch.testing.assert_close(compiled(x)["out"], wanted)
    assert manager.stats()["native_call_count"] >= 2


def test_what_a_region_was_made_of_can_be_compiled(ours):
    def program() -> Any:
        model = Model(2)
        with torch.no_grad():
            before = [model(x) for x in batches(4)]
            compiled = torch.compile(model, fullgraph=True, backend=Backend())
            return [before, [compiled(x) for x in batches()], [model(x) for x in batches()]]

    ours(program, by=plainly)


def test_copies_and_pickles_of_what_is_compiled(ours):
    def program() -> Any:
        model = Model(2)
        model.compile(backend=Backend())
        x = torch.rand(5, WIDTH)
        with torch.no_grad():
            results = [model(x) for _ in range(3)]
            return [results, copy.deepcopy(model)(x)]

    ours(program)


def test_several_threads_call_it(manage):
    manager = manage("lru")
    with injected(), one_thread(), torch.no_grad():
        model = Model(2)
        xs = batches(6)
        expected = [model(x)["out"].clone() for x in xs]
        compiled = torch.compile(model, backend=Backend())
        for x in xs[:3]:
            compiled(x)
    wrong: list[Any] = []

    def work() -> None:
        torch.set_num_threads(1)  # each thread has a number of its own; other bits with another
        with injected(), torch.no_grad():
            for x, wanted in zip(xs, expected, strict=True):
                if not torch.equal(compiled(x)["out"], wanted):
                    wrong.append(x)

    threads = [threading.Thread(target=work) for _ in range(3)]
    with one_thread():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert {kind_of(p) for p in model.parameters()} == {TensorRef}
    assert manager is tensorsManager


def test_it_can_be_switched_off(ours):
    backend = Backend()

    def program() -> Any:
        compiled = torch.compile(Model(2), fullgraph=True, backend=backend)
        with torch.no_grad(), options(compiled="off"):
            return [compiled(x) for x in batches()]

    manager = ours(program)
    assert manager.stats()["native_call_count"] == 0
    assert backend.call_count == 4  # plain torch's


def flex_program() -> Any:
    """Attention by a function, which sees tensors that it has closed over."""
    query, bias = torch.rand(1, 2, 16, 8), torch.rand(16)
    ends = torch.tensor([16])

    def score(score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
        return score + bias[k]

    def mask(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (k < ends[batch])

    blocks = flex.create_block_mask(mask, 1, 1, 16, 16, device="cpu")
    compiled = torch.compile(flex.flex_attention, fullgraph=True, backend="aot_eager")
    results = []
    with torch.no_grad():
        for _ in range(3):
            results.append(flex.flex_attention(query, query, query, score, blocks))
            results.append(compiled(query, query, query, score, blocks))
            bias.mul_(2)
    return results


def test_attention_by_a_function(ours):
    ours(flex_program)


def test_a_tensor_of_the_function_around_it_may_be_exchanged(ours):
    def results() -> list[torch.Tensor]:
        last = torch.ones(3)

        def step(x: torch.Tensor) -> torch.Tensor:
            nonlocal last
            y = last * 2 + x
            last = x
            return y

        call = torch.compile(step, backend="eager")
        with torch.no_grad():
            found = [call(torch.full((3,), float(n))) for n in range(4)]
        return [*found, last]

    ours(results)


def test_what_was_learned_with_a_flag_is_not_taken_for_calls_without(ours):
    def results() -> list[torch.Tensor]:
        p = torch.ones(3, requires_grad=True)

        def step(x: torch.Tensor, is_written: bool) -> torch.Tensor:
            if is_written:
                x.add_(1)
            return x * x

        call, found = torch.compile(step, backend="eager"), []
        for is_written in (False, False, True, True):
            x = p * 2
            found += [call(x, is_written), x]
        sum(x.sum() for x in found).backward()
        return [x.detach() for x in (*found, p.grad)]

    ours(results)


class Holder:
    """An object that is no module, and has tensors."""

    def __init__(self) -> None:
        self.weight, self.parts = torch.rand(WIDTH, WIDTH), {"shift": [torch.rand(WIDTH)]}

    def result(self) -> torch.Tensor:
        return (self.weight + self.parts["shift"][0]).relu()


def of_an_optimizer() -> Any:
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=True)
    step = torch.compile(lambda: optimizer.step())
    for x in batches(3):
        model(x).square().mean().backward()
        step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def of_a_holder() -> Any:
    holder = Holder()
    call, results = torch.compile(holder.result), []
    with torch.no_grad():
        for _ in range(3):
            results.append(call())
            holder.weight.mul_(0.5)
    return results


def of_a_list() -> Any:
    weights = [torch.rand(WIDTH, WIDTH) for _ in range(3)]
    call = torch.compile(lambda: sum(weight.sum(0) for weight in weights))
    with torch.no_grad():
        return [call() for _ in range(3)]


def of_a_module_in_an_object() -> Any:
    holder = Holder()
    holder.parts = {"model": nn.Linear(WIDTH, WIDTH)}
    call = torch.compile(lambda: holder.parts["model"].weight * 2)
    with torch.no_grad():
        return [call() for _ in range(2)]


@pytest.mark.parametrize(
    "program", [of_an_optimizer, of_a_holder, of_a_list, of_a_module_in_an_object]
)
def test_what_is_reached_through_objects_is_intercepted(manage, program):
    """Torch's own compiler asked a TensorRef for memory that it has not got, in C++."""

    plain, manager = plainly(program), manage("lru", 1 << 14)
    seed()
    with injected(), one_thread():
        found = program()
    manager.check()
    assert differences(plain, found) == []


def test_a_function_that_reaches_plain_tensors_only_stays_compiled(manage):
    manage("lru")
    holder, backend = Holder(), Backend()  # made here, where injection is off
    with injected(), torch.no_grad():
        call = torch.compile(holder.result, backend=backend)
        torch.ones(2)  # there has been a TensorRef
        call()
    assert backend.call_count == 1


@pytest.mark.parametrize("is_module", [False, True])
def test_what_an_object_holds_is_used_later_only(manage, is_module):
    """The compiler was given the memory of a TensorRef, and raised or ended the process."""

    def program() -> Any:
        holder, results = Holder(), []
        holder.is_used, holder.model = False, nn.Linear(WIDTH, WIDTH) if is_module else None

        def step(x: torch.Tensor) -> torch.Tensor:
            if not holder.is_used:
                return x * 2
            return holder.model(x) if is_module else x * 2 + holder.weight[0]

        call = torch.compile(step)
        for number, x in enumerate(batches(5)):
            holder.is_used = number >= 3
            result = call(x.requires_grad_())
            result.sum().backward()
            results += [result.detach(), x.grad]
        return results

    plain = plainly(program)
    manage("lru")
    seed()
    with injected(), one_thread():
        for expected, found in zip(plain, program(), strict=True):
            torch.testing.assert_close(tensorsManager.release(found), expected)
