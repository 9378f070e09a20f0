"""Views that are linked late are, to whoever asks, torch's own: each program beside plain torch."""

import copy
import io
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


def told(ask: Callable[[], Any]) -> Any:
    """What a question is answered: a value, or the refusal."""
    try:
        return ask()
    except RuntimeError as error:
        return str(error)


def seen(*tensors: Any) -> list[Any]:
    return [(t._version, t._is_view(), t.requires_grad, t.is_leaf) for t in tensors]


def look(x: Any) -> Any:
    """A view of a view, made where no gradient is noted."""
    with torch.no_grad():
        return x.view(24)[3:21].view(2, 9).transpose(0, 1)


PROGRAMS: list[Callable[[Any], Any]] = []


def program(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    PROGRAMS.append(function)
    return function


@program
def the_view_is_written(x):
    v = look(x)
    with torch.no_grad():
        v.add_(1)
    return seen(x, v), v._base is x, v


@program
def the_base_is_written(x):
    v = look(x)
    with torch.no_grad():
        x.mul_(2)
        w = v + 1
    return seen(x, v), w, v._base is x


@program
def a_relative_is_written(x):
    u, v = look(x), look(x)
    with torch.no_grad():
        u.sub_(3)
        first = seen(x, u, v)
        v[1:].zero_()
    return first, seen(x, u, v), u


@program
def a_view_of_a_view_is_written(x):
    with torch.no_grad():
        v = x.view(24)
        parts = [*v.chunk(3), v.narrow(0, 2, 3), v.detach(), v.unbind()[4], v.split(5)[1]]
        for part in parts:
            part.add_(1)
        return [seen(x, v, part) for part in parts], [part._base is x for part in parts], v


@program
def an_item_is_set(x):
    with torch.no_grad():
        v = x.transpose(0, 1)
        v[2] = 7
        v[1:3, ..., None] = v[:2, ..., None].clone()
        v[v > 5] = -1
    return seen(x, v), v


@program
def an_operator_writes_to_it(x):
    with torch.no_grad():
        v, u = x.view(24)[:6], x[1]
        torch.add(u, 1, out=v)
        torch._foreach_add_([v, u], 2)
        torch.sin(u, out=u)
    return seen(x, v, u), v, u


@program
def it_is_saved_and_then_written(x):
    w = torch.rand(9, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
    results = []
    for write in (lambda v: x.add_(1), lambda v: v.add_(1), lambda v: look(x).add_(1)):
        v = look(x)
        loss = (v * w).sum()
        with torch.no_grad():
            write(v)
        results.append(told(loss.backward))
    (look(x) * w).sum().backward()
    return [str(r)[-150:] for r in results], w.grad


@program
def it_is_written_where_gradients_are_noted(x):
    w = torch.rand(9, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
    v = look(x)
    first = told(lambda: v.mul_(w))
    v.mul_(2)
    return first, seen(x, v), v


@program
def its_base_is_written_where_gradients_are_noted(x):
    w = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    v, u = look(x), look(x)
    x.mul_(w)
    return [
        told(lambda: (v * 2).sum()),
        told(lambda: u.grad_fn),
        told(lambda: look(x).sum()),
        x.grad_fn is not None,
    ]


@program
def its_base_is_written_and_then_wants_gradients(x):
    v, u = look(x), look(x)
    with torch.no_grad():
        x.mul_(2)
    x.requires_grad_()
    return (
        told(lambda: (v * x.sum()).sum().item()),
        told(lambda: u.is_leaf),
        told(lambda: v.add_(1)),
    )


@program
def it_wants_gradients(x):
    v, u, w = look(x), look(x), look(x)
    v.requires_grad_()
    u.requires_grad = True
    (v * u).sum().backward()
    return [
        v.grad,
        u.grad,
        told(lambda: v.add_(1)),
        seen(v, u),
        told(lambda: w.register_hook(print)),
        told(lambda: w.backward()),
    ]


@program
def a_parameter_is_made_of_it(x):
    p = nn.Parameter(look(x))
    (p * 2).sum().backward()
    with torch.no_grad():
        p.sub_(p.grad)
    return p, x, seen(x, p)


@program
def it_is_a_view_of_a_parameter(x):
    p = nn.Parameter(x)
    with torch.no_grad():
        p.view(24)[2:4].fill_(5)
        v = p.t()
    loss = (p * v.t()).sum()
    loss.backward()
    return p, p.grad, seen(p, v), told(lambda: v.add_(p.t()))


@program
def data_are_exchanged(x):
    v = look(x)
    with torch.no_grad():
        y = x + 1
        u = y.view(24)
    x.data = y
    first = seen(x, v, u)
    with torch.no_grad():
        v.add_(1)
        second = seen(x, v, u)
        u.data = v
        u.mul_(2)
    return first, second, seen(x, v, u), x, v, u, v._base is x


@program
def the_base_is_resized(x):
    v = look(x)
    with torch.no_grad():
        x.resize_(2, 3)
        v.add_(1)
        x.t_()
        v.t_()
    return seen(x, v), x, v, v._base is x


@program
def the_base_is_set(x):
    v = look(x)
    with torch.no_grad():
        x.set_(torch.ones(3))
        v.add_(1)
    return seen(x, v), x, v


@program
def it_is_changed_in_shape(x):
    v = look(x)
    with torch.no_grad():
        v.unsqueeze_(0)
        u = v.squeeze(0)
        v.transpose_(1, 2)
        u.squeeze_()
    return seen(x, v, u), v, u


@program
def it_is_detached_in_place(x):
    v = look(x)
    return told(v.detach_), seen(x, v)


@program
def inference_mode(x):
    v = look(x)
    with torch.inference_mode():
        u = v + 1
        first = seen(x, v), told(lambda: u._version)
        t = u.reshape(18)[2:]
        t.add_(1)
        s = v[1:]
        s.mul_(2)
        second = s.is_inference(), t.is_inference(), t._is_view(), t._base is None, s._base is x
    with torch.no_grad():
        r = u.reshape(18)
    return first, second, seen(x, v), told(lambda: r._version), r.is_inference(), t, v, s


@program
def transforms_of_functions(x):
    v, u = look(x), look(x)
    w = torch.rand(9, 2, generator=torch.Generator().manual_seed(1))
    mapped = torch.vmap(lambda row: row * 2 + u[0])(v)
    with torch.no_grad():
        again = torch.vmap(lambda row: row.sin() + u[0])(look(x))
    slope = torch.func.grad(lambda a: (a * v).sum())(w)
    mine = torch.func.grad(lambda a: (a * a).sum())(v)
    _, tangent = torch.func.jvp(lambda a: a * v, (w,), (w,))
    torch.vmap(lambda row: row.add_(1))(v)
    return mapped, again, slope, mine, tangent, seen(x, v, u), v


@program
def forward_derivatives(x):
    import torch.autograd.forward_ad as forward

    v = look(x)
    with forward.dual_level():
        dual = forward.make_dual(v, torch.ones(9, 2))
        result = forward.unpack_dual(dual * v)
        return result.primal, result.tangent, seen(x, v)


@program
def it_is_copied_and_serialised(x):
    v = look(x)
    v.note = "kept"
    twin, deep = copy.copy(v), copy.deepcopy(v)
    file = io.BytesIO()
    torch.save(v, file)
    file.seek(0)
    with torch.no_grad():
        v.add_(1)
    return v.note, twin, deep, torch.load(file), seen(x, v), getattr(twin, "note", None)


@program
def it_is_swapped(x):
    v, other = look(x), torch.ones(3)
    other = other + x.sum() * 0
    torch.utils.swap_tensors(v, other)
    with torch.no_grad():
        other.add_(1)
    return v, other, seen(x, v, other), other._base is x


@program
def somebody_refers_to_it(x):
    v = look(x)
    reference = weakref.ref(v)
    before = id(v)
    with torch.no_grad():
        v.add_(1)
    return reference() is v, id(v) == before, hash(v) == before


@program
def a_trace(x):
    v = look(x)
    with torch.no_grad():
        traced = torch.jit.trace(lambda a: a.view(18)[2:] * 2, v.contiguous())
        return traced(v.contiguous()), torch.fx.experimental.proxy_tensor.make_fx(
            lambda a: (a * v).t()
        )(v)(v)


class Listening(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.heard = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.heard.append(str(op))
        return op(*args, **(kwargs or {}))


@program
def a_mode_hears_no_more(x):
    v, u = look(x), look(x)
    with Listening() as mode:
        v * 2
        v.add_(1)
        u.t().reshape(18).contiguous()
        version = u._version
        with torch.no_grad():
            u[1:, 0].view(8).mul_(2)
    return mode.heard, version, seen(x, v, u)


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad * b, grad * a


@program
def a_function_in_python_keeps_it(x):
    w = torch.rand(9, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
    v = look(x)
    loss = Keeping.apply(w, v).sum()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        x.add_(1)
    return w.grad, told(loss.backward), seen(x, v)


class Returning(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        b.add_(1)
        ctx.mark_dirty(b)
        return b, a * 2

    @staticmethod
    def backward(ctx, first, second):
        return second * 2, first


@program
def a_function_in_python_writes_it(x):
    w = torch.rand(9, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
    v = look(x)
    return told(lambda: Returning.apply(w, v)[1].sum().item()), seen(x, v)


class Reshaping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return (a * 2).reshape(24), (a * 3).view(24)[2:]

    @staticmethod
    def backward(ctx, first, second):
        whole = torch.zeros(24)
        whole[2:] = second
        return first.view(4, 6) * 2 + whole.view(4, 6) * 3


@program
def a_function_in_python_returns_views(x):
    w = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    first, second = Reshaping.apply(w)
    (first * 3).sum().add(second.square().sum()).backward()
    return w.grad, seen(first, second), told(lambda: first.add_(1)), told(lambda: second.add_(1))


@program
def gradients_are_given_to_it(x):
    v, u = look(x), look(x)
    v.grad = torch.ones(9, 2)
    version = v._version
    torch.optim.SGD([v], lr=0.1).step()
    u.grad = torch.ones(2, 9).t()
    u.requires_grad_()
    (u * 2).sum().backward()
    w = torch.rand(9, 2).requires_grad_()
    w.grad = v
    with torch.no_grad():
        v.mul_(2)
    kept = w.grad is v, u.grad.clone()
    del u.grad
    return version, v, v.grad, seen(x, v, u), kept, u.grad


@program
def what_is_written_is_given_back(x):
    v, u, o = look(x), look(x), look(x.clone())
    results = []
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            results += [
                torch.relu_(v) is v,
                u.clamp_(max=3) is u,
                nn.functional.relu(v, inplace=True) is v,
                o.copy_(v) is o,
                v.mul_(2) is v,
            ]
    return results, seen(x, v, u), v, u


@program
def the_base_gets_another_dtype(x):
    v = look(x)
    x.data = x.view(torch.int32)
    return v._version, v.dtype, v, v._base is x


@program
def a_checkpoint(x):
    from torch.utils.checkpoint import checkpoint

    w = torch.rand(9, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
    v = look(x)
    checkpoint(lambda a, b: (a * b).sin(), w, v, use_reentrant=False).sum().backward()
    first = w.grad.clone()
    checkpoint(lambda a, b: (a * b).sin(), w, v, use_reentrant=True).sum().backward()
    checkpoint(lambda a: (a * 2).view(18)[1:], w, use_reentrant=True).sum().backward()
    return first, w.grad, seen(x, v)


@program
def a_scripted_function(x):
    v = look(x)
    with torch.no_grad():
        return _scripted(v), seen(x, v)


@torch.jit.script
def _scripted(a):
    a.view(18) if a.is_contiguous() else a.t()[0].add_(1)
    return a * 2


@program
def others_arithmetic(x):
    v = look(x)
    with torch.no_grad():
        return [
            torch.einsum("ij,ij->i", v, v),
            torch.atleast_3d(v)[0],
            torch.broadcast_tensors(v, torch.ones(1))[0],
            v.numpy().sum(),
            v.tolist(),
            torch.stack([v, v]).sum(0),
            torch.cat([v, v.contiguous()]),
            v.to(torch.float64),
            v.view(9, 2).view(torch.int32),
            v.flatten(),
            v.float() is v,
            v.expand(3, 9, 2),
            v.permute(1, 0)[..., None].squeeze(-1),
            nn.functional.linear(v, torch.ones(4, 2)),
            str(v),
            bool(v[0, 0] > 0),
            len(v),
            [float(row.sum()) for row in v],
            v.mT.contiguous(),
            v.contiguous().contiguous(),
            seen(x, v),
        ]


@program
def mistakes(x):
    with torch.no_grad():
        v = look(x)
        return [
            told(lambda: v.view(5)),
            told(lambda: v.reshape(-1, 7)),
            _refusal(lambda: v[9]),
            _refusal(lambda: v[0, 0, 0]),
            _refusal(lambda: v.transpose(0, 5)),
            _refusal(lambda: v.unsqueeze("a")),
            _refusal(lambda: v[1:2:-1]),
            _refusal(lambda: v.expand(2)),
        ]


def _refusal(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:
        return type(error).__name__, str(error)


def plain_of(value: Any) -> Any:
    """What a program tells, with plain tensors and arrays as lists."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, tuple(value.shape), value.stride(), value.detach().tolist())
    if isinstance(value, (list, tuple)):
        return [plain_of(part) for part in value]
    return value


@pytest.mark.parametrize("asked", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.parametrize(
    ("strategy", "nbytes"), [("lru", 1 << 20), ("flow", 1 << 20), ("genoa", 400)]
)
def test_a_program_sees_what_plain_torch_shows(manage, asked, strategy, nbytes):
    start = torch.arange(24.0).view(4, 6) - 10
    expected = plain_of(asked(start.clone()))
    manager = manage(strategy, nbytes=nbytes)
    x = manager.adopt(start.clone())
    x + 1  # there
    assert plain_of(asked(x)) == expected
    manager.check()


def test_views_are_linked_late(manage):
    """Else none of the other tests here shows anything."""
    manager = manage("lru", nbytes=1 << 20)
    x = manager.adopt(torch.rand(4, 6))
    x + 1
    v = look(x)
    assert v._root is x
    assert v._version == 0
    assert v._root is None
    with torch.no_grad():
        u = look(x)
        u + 1, torch.cat([u, u]), u.sin(), torch.nn.functional.linear(u, u), u * 2, u.sum(0)
    assert u._root is x


def test_threads_that_link_one_view(manage):
    manager = manage("lru", nbytes=1 << 20)
    x = manager.adopt(torch.zeros(4, 6))
    x + 1
    for _ in range(30):
        v = look(x)
        barrier, versions = threading.Barrier(6), []

        def work(v=v, barrier=barrier, versions=versions):
            barrier.wait()
            versions.append(v._is_view())
            with torch.no_grad():
                v.add_(1)

        threads = [threading.Thread(target=work) for _ in range(6)]
        before = x._version
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert versions == [True] * 6
        assert v._base is x
        assert x._version == v._version == before + 6
    manager.check()


def test_writes_are_counted_while_another_thread_links(manage):
    manager = manage("lru", nbytes=1 << 20)
    x = manager.adopt(torch.zeros(4, 6))
    x + 1
    done = threading.Event()

    def ask():
        while not done.is_set():
            assert look(x)._is_view()

    asking = threading.Thread(target=ask)
    asking.start()
    with torch.no_grad():
        for _ in range(1500):
            x.add_(1)
    done.set()
    asking.join()
    assert x._version == 1500
    manager.check()
