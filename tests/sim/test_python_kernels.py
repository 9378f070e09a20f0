"""Operators whose kernels a program has written in Python, and which make arrays of operands."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from torchTensorRef.base.activation import is_disabled
from torchTensorRef.interception.recorded_inside import key_of_kernel
from torchTensorRef.operators.plan import plan_of
from torchTensorRef.operators.python_kernels import recorded_inside

from ..support.differential import differences
from ..support.over_host import adapters
from ..support.processes import python

LIBRARY = torch.library.Library("ttr_python_kernels", "DEF")
LIBRARY.define("blend(Tensor(a!) out, Tensor x) -> Tensor(a!)")
LIBRARY.impl("blend", lambda out, x: out.add_(torch.from_numpy(x.numpy())), "CPU")


def grow_two(xs, y=None, *, z):
    """Write through an array and by an operator, and return something fresh."""
    xs[1].numpy()[...] += 2
    if y is not None:
        y.mul_(3)
    return z * 2


def grow_and_look(x):
    """Write, and return a part."""
    x.add_(1)
    return x[1:]


#: What they write and return of their operands is not marked, as in torch's own `fully_shard`.
for SCHEMA, KERNEL in {
    "grow_two(Tensor[] xs, Tensor? y=None, *, Tensor z) -> Tensor": grow_two,
    "grow_and_look(Tensor x) -> Tensor": grow_and_look,
    "itself(Tensor x) -> Tensor": lambda x: x,
    "twice(Tensor x) -> Tensor": lambda x: x * 2,
}.items():
    LIBRARY.define(SCHEMA)
    LIBRARY.impl(SCHEMA.partition("(")[0], KERNEL, "CPU")


def raising(x):
    """Write, and end in an error."""
    x.add_(1)
    raise KeyError("after it has written")


#: Made of torch's operators: into these autograd looks.
for SCHEMA, KERNEL in {
    "scaled(Tensor x, *, Tensor? by=None) -> Tensor": lambda x, by=None: x.sin() * (by or 2),
    "sums(Tensor[] xs) -> (Tensor, Tensor)": lambda xs: (xs[0] * xs[1], xs[1].cumsum(0)),
    "nested(Tensor x) -> Tensor": lambda x: torch.ops.ttr_python_kernels.scaled(x) + x,
    "detached(Tensor x) -> Tensor": lambda x: x.detach() * 2,
    "by_arrays(Tensor x) -> Tensor": lambda x: torch.from_numpy(np.sort(x.detach().numpy())),
    "add_to(Tensor(a!) x, Tensor y) -> Tensor(a!)": lambda x, y: x.add_(y),
    "double(Tensor(a!) x) -> ()": lambda x: (x.mul_(2), None)[1],
    "tail(Tensor(a) x) -> Tensor(a)": lambda x: x[1:],
    "split(Tensor(a) x) -> (Tensor(a), Tensor(a))": lambda x: (x[:1], x[1:]),
    "raising(Tensor(a!) x) -> ()": raising,
}.items():
    LIBRARY.define(SCHEMA)
    for KEY in ("CPU", "CompositeExplicitAutograd"):
        if KEY == "CPU" or SCHEMA.startswith(("scaled", "tail", "add_to")):
            LIBRARY.impl(SCHEMA.partition("(")[0], KERNEL, KEY)
LIBRARY.define("everywhere(Tensor x) -> Tensor")
LIBRARY.impl("everywhere", lambda x: x.exp() * 2, "CompositeExplicitAutograd")


@torch.library.custom_op("ttr_python_kernels::grow", mutates_args=("x",))
def grow(x: torch.Tensor) -> None:
    """Write through an array."""
    array = x.numpy()
    array += 1


@torch.library.custom_op("ttr_python_kernels::in_order", mutates_args=())
def in_order(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor over an array."""
    return torch.from_numpy(np.sort(x.numpy()))


@torch.library.custom_op("ttr_python_kernels::both", mutates_args=())
def both(xs: list[torch.Tensor], factor: float) -> list[torch.Tensor]:
    """Take and return lists."""
    return [torch.from_numpy(x.numpy() * np.float32(factor)) for x in xs]


def program(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Three times: all of them through every kernel, among them views."""
    for _ in range(3):
        for i, x in enumerate(rows):
            y = x * 2
            grow(x)
            grow(y[1:3])
            y = in_order(y) + in_order(x.t())
            y, z = both([y, x[:2]], 0.5)
            torch.ops.ttr_python_kernels.blend(y[:2], z)
            rows[i] = x + y * 0.1
    return rows


@pytest.mark.parametrize("strategy", ["flow", "lru", "genoa"])
def test_kernels_that_make_arrays(manage, strategy):
    torch.manual_seed(0)
    plain = [torch.randn(64, 64) for _ in range(8)]
    manager = manage(strategy=strategy)
    manager.budget = 60_000
    rows = program([manager.adopt(x.clone()) for x in plain])
    for expected, got in zip(program(plain), rows, strict=True):
        assert torch.equal(manager.release(got), expected)
    assert manager.stats()["evict_count"] > 20
    assert manager.stats()["host_op_count"] == 0
    manager.check()


def unmarked(bring):
    """Each three times: what has been seen once is known; `y` is not there at the first call."""
    mine = torch.ops.ttr_python_kernels
    a, b, y, z = (bring(torch.arange(4.0) + i) + 0 for i in range(4))
    twin, results = a.clone(), []
    for _ in range(3):
        results += [mine.grow_two([b, a], z=z), mine.grow_two([a, b], y, z=z)]
        part = mine.grow_and_look(b)
        part.mul_(2)
        mine.grow_and_look(a[1:3])
        mine.itself(y).add_(1)
        results.append(mine.twice(twin))
    return [a, b, y, z, twin, part, *results]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode], ids=["grad", "none"])
@pytest.mark.parametrize("budget", [100, 10_000])
def test_kernels_that_write_what_their_schema_does_not_mark(manager, mode, budget):
    manager.budget = budget
    with mode():
        expected, got = unmarked(lambda x: x), unmarked(manager.adopt)
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(other, one)


def test_a_kernel_that_writes_nothing_is_believed_when_it_has_been_seen(manager):
    op = torch.ops.ttr_python_kernels.twice.default
    x = manager.adopt(torch.rand(4)) + 0
    torch.ops.ttr_python_kernels.twice(x)
    plan = plan_of(op)
    assert plan.write_names == ()
    x.toGPU()
    torch.ops.ttr_python_kernels.twice(x)
    assert plan_of(op) is plan


MINE = torch.ops.ttr_python_kernels


def twice_differentiated(x):
    """A gradient of a gradient."""
    (grad,) = torch.autograd.grad(MINE.scaled(x).sum(), x, create_graph=True)
    return grad


def written(x, write):
    """A product whose operand is written before its gradient is asked for."""
    y = x * 1
    z = y * x
    write(y)
    return z


def without_gradients(write):
    def run(x):
        with torch.no_grad():
            write(x)

    return run


def raised(x):
    with pytest.raises(KeyError):
        MINE.raising(x)


RECORDED = {
    "a sum of parts": lambda x: MINE.scaled(x),
    "by a keyword": lambda x: MINE.scaled(x, by=x[0]),
    "lists": lambda x: sum(MINE.sums([x, x * 2])),
    "nested": lambda x: MINE.nested(x),
    "for every device": lambda x: MINE.everywhere(x),
    "twice": twice_differentiated,
    "detached": lambda x: MINE.detached(x) * x,
    "arrays": lambda x: MINE.by_arrays(x) * x,
    "written first": lambda x: MINE.add_to(x * 1, x[0]),
    "written, nothing returned": lambda x: (y := x * 1, MINE.double(y))[0],
    "a view": lambda x: MINE.tail(x * 3),
    "a view that is written": lambda x: (y := x * 1, MINE.tail(y).mul_(x[1:]))[0],
    "views": lambda x: MINE.split(x)[1] * 2,
    "written afterwards": lambda x: written(x, lambda y: MINE.add_to(y, y)),
    "written without gradients": lambda x: written(x, without_gradients(MINE.double)),
    "written through a view": lambda x: written(x, lambda y: MINE.tail(y.detach()).mul_(5)),
    "written before an error": lambda x: written(x, lambda y: raised(y.detach())),
    "a leaf is written": lambda x: MINE.double(x),
    "no gradients": lambda x: without_gradients(MINE.scaled)(x) or x * 2,
    "another thread": lambda x: ThreadPoolExecutor(1).submit(MINE.scaled, x).result(),
}


def seen_of(function, x):
    """A result, what is seen of it, and the gradient that comes of it; or the error."""
    x = x.requires_grad_()
    try:
        out = function(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
    except RuntimeError as error:
        return str(error).partition(".")[0]
    return out, grad, out._version, out._is_view(), out._base is not None


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@pytest.mark.parametrize("budget", [30, 10_000])
@pytest.mark.parametrize("name", RECORDED)
def test_autograd_looks_into_kernels_that_are_made_of_operators(manager, name, budget):
    manager.budget = budget
    x = torch.arange(1.0, 5.0)
    expected = seen_of(RECORDED[name], x.clone())
    got = seen_of(RECORDED[name], manager.adopt(x.clone()))
    if isinstance(expected, str):
        assert got == expected
        return
    assert got[2:] == expected[2:]
    for one, other in zip(expected[:2], got[:2], strict=True):
        assert not differences(one.detach(), other.detach())
    manager.check()


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_the_kernel_is_that_of_the_device_where_the_program_takes_it_to_be(manager):
    LIBRARY.define("by_device(Tensor x) -> Tensor")
    LIBRARY.impl("by_device", lambda x: x * 2, "CPU")
    LIBRARY.impl("by_device", lambda x: x * 3, "CompositeExplicitAutograd")
    LIBRARY.define("by_address(Tensor(a!) x) -> ()")
    for key in ("CPU", "CUDA"):
        LIBRARY.impl("by_address", lambda x: None, key)
    x = manager.adopt(torch.ones(3)).requires_grad_()
    MINE.by_device(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    by_device = MINE.by_device.default
    assert recorded_inside(by_device, "cpu") is torch._C.DispatchKey.CPU
    assert recorded_inside(by_device, "cuda") is torch._C.DispatchKey.CompositeExplicitAutograd
    by_address = MINE.by_address.default
    assert recorded_inside(by_address, "cpu") is torch._C.DispatchKey.CPU
    assert recorded_inside(by_address, "cuda") is None
    plan, plain = plan_of(by_address), manager.adopt(torch.ones(3))
    assert key_of_kernel(plan, (plain,), {}) is None
    assert key_of_kernel(plan, (plain.requires_grad_(),), {}) is torch._C.DispatchKey.CPU


@torch.library.custom_op("ttr_python_kernels::product", mutates_args=())
def product(x: torch.Tensor) -> torch.Tensor:
    """Multiply, in what autocast wants."""
    return x @ x


product.register_autograd(lambda _, grad: grad.float())
for SCHEMA, KERNEL in {
    "squared(Tensor x) -> Tensor": lambda x: x @ x,
    "squared_exactly(Tensor x) -> Tensor": lambda x: (
        MINE.squared(x) + torch.autocast("cpu", enabled=False)(MINE.squared)(x)
    ),
    "add_and_square(Tensor(a!) x) -> Tensor": lambda x: x.add_(1) @ x,
    "cast_before(Tensor x) -> Tensor": lambda x: x.float() @ x.float(),
}.items():
    LIBRARY.define(SCHEMA)
    LIBRARY.impl(SCHEMA.partition("(")[0], KERNEL, "CPU")
torch.library.register_autocast("ttr_python_kernels::cast_before", "cpu", torch.bfloat16)
CAST = {
    "recorded": MINE.squared,
    "nested": MINE.squared_exactly,
    "a formula": product,
    "written": lambda x: MINE.add_and_square(x * 1),
    "cast before": MINE.cast_before,
}


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize("name", CAST)
def test_kernels_find_autocast_as_the_program_has_it(manager, name, wants, is_enabled):
    torch.manual_seed(0)
    plain = torch.rand(8, 8)

    def run(x):
        x.requires_grad_(wants)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
            out = CAST[name](x)
            with torch.no_grad():
                again = CAST[name](x)
        if wants:
            out.float().sum().backward()
        return [out, again, x.grad]

    for one, other in zip(run(plain.clone()), run(manager.adopt(plain.clone())), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype is other.dtype
            assert not differences(one.detach(), other.detach())


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: torch.einsum("ij,jk->ik", x, x),
        lambda x: torch.tensordot(x, x, 1),
        lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0],
        MINE.cast_before,
    ],
    ids=["einsum", "tensordot", "attention", "cast before"],
)
def test_in_inference_mode_autocast_finds_what_composite_operators_are_made_of(manager, compute):
    torch.manual_seed(0)
    plain = torch.rand(8, 8)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        one, other = compute(plain), compute(manager.adopt(plain))
    assert one.dtype is other.dtype
    assert not differences(one, other)


class Passing(TorchDispatchMode):
    """A mode that does what it is told of."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Run it."""
        return function(*args, **(kwargs or {}))


class Around(torch.Tensor):
    """A tensor that holds another."""

    @staticmethod
    def __new__(cls, inner):
        """Say of itself what the other one says."""
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """Run it on the other one."""
        out = function(*tree_map_only(cls, lambda x: x.inner, args), **(kwargs or {}))
        return tree_map_only(torch.Tensor, cls, out)


def in_a_mode(function, x):
    with Passing():
        return function(x)


CALLED = {
    "a mode": in_a_mode,
    "another class": lambda function, x: function(Around(x)).inner,
    "a mode in another class": lambda function, x: in_a_mode(function, Around(x)).inner,
}


@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize("name", ["recorded", "nested", "a formula"])
@pytest.mark.parametrize("by", CALLED)
def test_kernels_that_others_call_find_what_torch_leaves_to_these(manager, by, name, wants):
    torch.manual_seed(0)
    plain = torch.rand(8, 8)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            out = CALLED[by](CAST[name], x.requires_grad_(wants))
            return out.detach(), out.requires_grad

    (one, *noted), (other, *noted_too) = run(plain.clone()), run(manager.adopt(plain.clone()))
    assert one.dtype is other.dtype
    assert noted == noted_too
    assert not differences(one, other)


def test_what_a_kernel_writes_in_a_mode_counts_as_in_plain_torch(manager):
    def program(x):
        in_a_mode(MINE.double, x)
        return x._version, x.tolist()

    assert program(manager.adopt(torch.arange(3.0))) == program(torch.arange(3.0))


def test_versions_and_views_of_kernels_in_python(manager):
    def program(x):
        MINE.add_to(x, x)
        with torch.no_grad():
            MINE.double(x)
        raised(x)
        part = MINE.tail(x)
        part.mul_(3)
        return x._version, part._version, part._base is x, part._is_view(), x.tolist()

    assert program(manager.adopt(torch.arange(3.0))) == program(torch.arange(3.0))


def test_what_a_library_of_torch_s_own_records():
    """In a process of its own: what it registers stays."""
    body = """
import torchTensorRef, torch
import torch.ao.quantization.fx._decomposed
def grad(bring):
    q, zero = bring(torch.arange(-6, 6, dtype=torch.int8).view(3, 4)), bring(torch.zeros(3).long())
    scale = bring(torch.tensor([0.1, 0.2, 0.3])).requires_grad_()
    op = torch.ops.quantized_decomposed.dequantize_per_channel
    op(q, scale, zero, 0, -128, 127, torch.int8).sum().backward()
    return scale.grad.tolist()
ours = grad(torchTensorRef.tensorsManager.adopt)
with torchTensorRef.disabled():
    assert ours == grad(lambda x: x), ours
"""
    run = python("-c", body)
    assert run.returncode == 0, run.stderr


def program_of_torchs_own(bring):
    """Operators of torch's that a program gives kernels of its own, for a while."""
    x = bring(torch.arange(-4.0, 4.0).view(2, 4)) + 1
    results = [torch.relu(x), torch.tan(x), torch.mm(x, x.t()), x @ x.t(), torch.logsumexp(x, 1)]

    def relu(x):
        out = torch.zeros(x.shape)
        out.copy_(x.clamp(min=0))
        return out

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("relu", relu, "CPU")
        library.impl("logsumexp", lambda x, dim, keepdim=False: torch.full((len(x),), 3.0), "CPU")
        library.impl("tan", lambda x: x + 100, "AutogradCPU")
        library.impl("mm", lambda a, b: torch.ops.aten.sub.Tensor(a.sum(), b) * 1000, "AutogradCPU")
        results += [torch.relu(x), torch.tan(x), torch.mm(x, x.t()), x @ x.t()]
        results += [torch.logsumexp(x, 1), torch.relu(x).add_(1), torch.relu(x) * 2]
        results += [torch.tan(x.clone().requires_grad_()).detach()]
        with torch.no_grad():
            results += [torch.tan(x), torch.nn.functional.linear(x, x)]
    return [*results, torch.relu(x), torch.tan(x), torch.mm(x, x.t()), x @ x.t()]


@pytest.mark.filterwarnings("ignore:.*[Oo]verrid")
@pytest.mark.parametrize("device", ["sim", "adapter"])
def test_kernels_that_a_program_gives_torchs_own_operators(manager, device):
    """A factory's result was taken for bytes, and autograd's own kernel was not called."""
    if device == "adapter":
        (manager.device,) = adapters(1, 1 << 26)
    expected = program_of_torchs_own(lambda x: x)
    with is_disabled.entered(False):  # what factories in kernels make is ours, too
        ours = program_of_torchs_own(manager.adopt)
    for one, other in zip(expected, ours, strict=True):
        assert not differences(one, other)
    manager.check()


def program_of_late_kernels(bring, name):
    """An operator that gets its kernels after it has been called."""
    x, z = bring(torch.ones(3)).requires_grad_(), bring(torch.ones(3))
    library = torch.library.Library(f"ttr_late_{name}", "DEF")
    library.define("foo(Tensor x) -> Tensor")
    library.define("bar(Tensor x) -> Tensor")
    ours = getattr(torch.ops, f"ttr_late_{name}")
    for op in (ours.foo, ours.bar):
        with pytest.raises(NotImplementedError):
            op(z)
    library.impl("foo", lambda x: x * 2, "CPU")
    library.impl("bar", lambda x: x.clone(), "CPU")
    ours.foo(x).sum().backward()
    seen = [x.grad.clone(), ours.bar(z), z.clone()]
    torch.library.register_autograd(f"ttr_late_{name}::foo", lambda ctx, g: g * 7, lib=library)
    library.impl("bar", lambda x: x.add_(1).clone(), "CPU", allow_override=True)
    ours.foo(x).sum().backward()
    return [*seen, x.grad, ours.bar(z), z]


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered", "ignore:.*[Oo]verrid")
def test_kernels_that_come_after_the_first_call(manager):
    """What was known of the operator stayed: a gradient was not taken, and a write was lost."""
    ours = program_of_late_kernels(manager.adopt, "ours")
    for one, other in zip(program_of_late_kernels(lambda x: x, "plain"), ours, strict=True):
        assert not differences(one, other)


@pytest.mark.filterwarnings("ignore:.*[Oo]verrid")
def test_an_operator_that_is_given_a_kernel_is_the_one_that_it_was(manager):
    """Files of learned times, and operators that look like it, know it by its kind."""
    mm, linear = torch.ops.aten.mm.default, torch.ops.aten.linear.default
    kinds = [plan_of(op).kind for op in (mm, linear)]
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("mm", lambda a, b: a @ b, "AutogradCPU")
        assert [plan_of(op).kind for op in (mm, linear)] == kinds
    assert [plan_of(op).kind for op in (mm, linear)] == kinds
