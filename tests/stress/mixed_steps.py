"""What random programs are made of: steps on tensors, modules and arrays that are there already.

Each draws what it takes from its program, so that the same program makes the same steps again, and
returns what is to be compared. What torch itself leaves to chance is left out: `median` of an
expanded tensor (it reads no element), a resize that has failed (the tensor has sizes that its
memory has not), and exchanging the memory of a tensor that a DLPack capsule holds.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor
Step = Callable[["Program"], Any]

SIDES = (1, 2, 3, 4, 6, 8, 16)
#: So many tensors are kept, of at most so many elements.
POOL_COUNT, MOST_NUMEL = 24, 5000
FLOATS = (torch.float32, torch.float64)


class Missing(Exception):
    """Nothing is there that a step could take."""


class Program:
    """What a random program has: tensors, models and their optimizers, arrays that share memory."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.pool: list[Tensor] = []
        self.models: list[tuple[nn.Module, torch.optim.Optimizer]] = []
        self.arrays: list[np.ndarray[Any, Any]] = []
        #: Models of `mixed_training.py`.
        self.trained: list[Any] = []

    def below(self, count: int) -> int:
        return self.random.randrange(count)

    def one_of(self, things: Any) -> Any:
        return things[self.below(len(things))]

    def tensor(self, is_fit: Callable[[Tensor], bool] = lambda x: True) -> Tensor:
        fit = [x for x in self.pool if x.layout is torch.strided and is_fit(x)]
        if not fit:
            raise Missing
        found: Tensor = self.one_of(fit)
        return found

    def number_of(self, is_fit: Callable[[Tensor], bool] = lambda x: True) -> Tensor:
        """One of floating point numbers, and of at least one."""
        return self.tensor(lambda x: x.dtype in FLOATS and x.numel() > 0 and is_fit(x))

    def matrix(self) -> Tensor:
        return self.number_of(lambda x: x.dim() >= 2)

    def drawn(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, generator=self.generator, dtype=torch.float64).to(dtype)

    def size(self, dims: int = 0) -> list[int]:
        return [self.one_of(SIDES) for _ in range(dims or 1 + self.below(3))]

    def dim(self, x: Tensor) -> int:
        return self.below(2 * x.dim()) - x.dim() if x.dim() else 0

    def keep(self, *made: Any) -> Any:
        """Have what was made take part from now on."""
        self.pool += [x for x in made if isinstance(x, Tensor) and x.numel() < MOST_NUMEL]
        while len(self.pool) > POOL_COUNT:
            self.pool.pop(self.below(len(self.pool)))
        return made

    def keep_one_of(self, makers: Any) -> Any:
        made = self.one_of(makers)()
        return self.keep(*(made if isinstance(made, (tuple, list)) else (made,)))


# -- tensors --------------------------------------------------------------------------------------


def create(p: Program) -> Any:
    size = p.size()
    count = int(np.prod(size))
    return p.keep_one_of(
        (
            lambda: p.drawn(*size),
            lambda: p.drawn(*size).requires_grad_(),
            lambda: nn.Parameter(p.drawn(*size)),
            lambda: p.drawn(*size, dtype=torch.float64),
            lambda: torch.randint(-3, 9, size, generator=p.generator),
            lambda: p.drawn(*size) > 0,
            lambda: torch.complex(p.drawn(*size), p.drawn(*size)),
            lambda: p.drawn(*size).to(torch.bfloat16),
            lambda: torch.from_numpy(np.arange(count, dtype=np.float32).reshape(size)),
            lambda: torch.tensor(list(range(count))).reshape(size),
        )
    )


def view(p: Program) -> Any:
    x = p.tensor()
    d = p.dim(x)
    return p.keep_one_of(
        (
            lambda: x.transpose(d, p.dim(x)),
            lambda: x.narrow(d, 0, max(1, x.size(d) // 2)),
            lambda: x.select(d, p.below(x.size(d))),
            lambda: x.unfold(d, 1 + x.size(d) // 2, 1),
            lambda: x.diagonal(),
            lambda: x[..., ::2],
            lambda: x.reshape(-1),
            lambda: x.unsqueeze(d),
            lambda: x.expand(3, *x.size()),
            lambda: p.one_of(x.unbind(d)),
            lambda: p.one_of(x.split(max(1, x.size(d) // 3), d)),
            lambda: x.squeeze(),
            lambda: x.detach(),
            lambda: x.view(-1),
            lambda: x.mT,
            lambda: x.data,
            lambda: x.movedim(d, 0),
            lambda: torch.view_as_real(x),
            lambda: x.view(torch.int32),
            lambda: torch.as_strided(x, (max(1, x.numel() // 2),), (1,), x.storage_offset()),
        )
    )


def conjugate(p: Program) -> Any:
    x = p.tensor(torch.is_complex)
    return p.keep_one_of(
        (x.conj, lambda: x.real, lambda: x.imag, lambda: x.conj().imag, lambda: x * x.conj())
    )


def elementwise(p: Program) -> Any:
    x, names = p.number_of(), ("abs", "exp", "log1p", "neg", "reciprocal", "relu", "sigmoid", "sin")
    return p.keep(getattr(torch, p.one_of((*names, "sqrt", "square", "tanh", "floor", "isnan")))(x))


def of_two(p: Program) -> Any:
    x, y = p.number_of(), p.number_of()
    names = ("add", "atan2", "dist", "div", "eq", "fmod", "hypot", "lt", "maximum", "mul", "sub")
    return p.keep_one_of(
        (
            lambda: getattr(torch, p.one_of(names))(x, y),
            lambda: torch.where(x > 0, x, y),
            lambda: 3 - x / 2,
            lambda: x**2,
            lambda: x - y.sum(),
            lambda: torch.lerp(x, y, 0.3),
        )
    )


def in_place(p: Program) -> Any:
    x = p.tensor(torch.is_floating_point)
    writes: tuple[Callable[[], Any], ...] = (
        lambda: x.add_(1),
        lambda: x.mul_(0.5),
        lambda: x.copy_(p.drawn(*x.size())),
        lambda: x.zero_(),
        lambda: x.clamp_(-1, 1),
        lambda: x.masked_fill_(x > 0, -1),
        lambda: x.index_fill_(p.dim(x), torch.tensor([0]), 2.0),
        lambda: x.index_put_((torch.tensor([0]),), torch.ones((), dtype=x.dtype), accumulate=True),
        lambda: x.add_(p.number_of(), alpha=0.5),
        lambda: x.normal_(generator=p.generator),
        lambda: x.transpose_(0, -1),
        lambda: x.cumsum_(p.dim(x)),
        lambda: x.sub_(x.mean()),
        lambda: x.fill_(p.number_of().sum()),
        lambda: x.data.mul_(2),
        lambda: x.unsqueeze_(0),
        lambda: x.div_(x.abs().max() + 1),
        lambda: x.addcmul_(x, x, value=0.1),
        lambda: x.__setitem__((..., 0), 3),
        lambda: x.__setitem__(torch.rand(x.size(), generator=p.generator) > 0.5, 7),
        lambda: x.detach().reshape(-1)[:1].add_(1),
    )
    with torch.set_grad_enabled(p.below(2) == 0):
        p.one_of(writes)()
    return x


def filled(p: Program) -> Any:
    x = p.number_of()
    d, compute = p.dim(x), p.one_of((torch.exp, torch.neg, "cumsum", "cat", "sum"))
    if isinstance(compute, str):
        compute = {
            "cumsum": lambda x, **out: torch.cumsum(x, d, **out),
            "cat": lambda x, **out: torch.cat([x, x], **out),
            "sum": lambda x, **out: torch.sum(x, d, **out),
        }[compute]
    with torch.no_grad():
        size = compute(x).size()
        fit = [y for y in p.pool if y.dtype == x.dtype and y.size() == size and not y.requires_grad]
        out = p.one_of(fit) if fit else torch.zeros(size, dtype=x.dtype)
        compute(x, out=out)
    return p.keep(out)


def reduction(p: Program) -> Any:
    x = p.number_of()
    d = p.dim(x)
    names = (
        "amax",
        "argmax",
        "cummax",
        "cumprod",
        "cumsum",
        "kthvalue",
        "log_softmax",
        "logsumexp",
    )
    name = p.one_of((*names, "max", "mean", "prod", "softmax", "sort", "std", "topk", "var"))
    first = (1,) if name in ("kthvalue", "topk") else ()
    return p.keep_one_of((lambda: getattr(x, name)(*first, d), x.norm, x.aminmax, x.min, x.sum))


def product(p: Program) -> Any:
    x = p.matrix()
    three = x.reshape(-1, *x.shape[-2:])
    return p.keep_one_of(
        (
            lambda: x @ x.mT,
            lambda: torch.einsum("...ij,...kj->...ik", x, x),
            lambda: F.linear(x, p.drawn(5, x.size(-1), dtype=x.dtype)),
            lambda: x @ p.drawn(x.size(-1), dtype=x.dtype),
            lambda: torch.baddbmm(p.drawn(1, dtype=x.dtype), three, three.mT),
            lambda: torch.addmm(p.drawn(x.size(-2), dtype=x.dtype), three[0], three[0].mT),
            lambda: torch.tensordot(x, x, dims=([-1], [-1])),
            lambda: F.scaled_dot_product_attention(three[None], three[None], three[None]),
        )
    )


def by_index(p: Program) -> Any:
    x = p.tensor(lambda x: x.dim() > 0 and x.numel() > 0)
    at = torch.randint(0, x.size(0), (3,), generator=p.generator)
    first = torch.zeros([1] * x.dim(), dtype=torch.long)
    return p.keep_one_of(
        (
            lambda: x[at],
            lambda: x[x != 0],
            lambda: x[None, ..., 0],
            lambda: x.gather(0, first),
            lambda: x.take(at),
            lambda: x.nonzero(),
            lambda: x.flip(0),
            lambda: x.roll(1, 0),
            lambda: x.unique(),
            lambda: x.scatter(0, first, 5),
            lambda: x.index_add(0, at, x[at]),
            lambda: F.pad(x, (1, 1)),
        )
    )


def joined(p: Program) -> Any:
    x = p.tensor()
    return p.keep_one_of(
        (
            lambda: torch.cat([x, x]),
            lambda: torch.stack([x, x], -1),
            lambda: torch.block_diag(x, x),
            lambda: torch.broadcast_tensors(x, x[:1]),
            lambda: torch.cartesian_prod(x.flatten()[:3], x.flatten()[:3]),
        )
    )


def by_lists(p: Program) -> Any:
    lists = [p.number_of(lambda x: not x.requires_grad and 0 not in x.stride()) for _ in range(3)]
    with torch.no_grad():
        made = p.one_of(
            (
                lambda: torch._foreach_mul(lists, 2.0),
                lambda: torch._foreach_norm(lists),
                lambda: torch._foreach_add_(lists, 1.0),
                lambda: torch._foreach_copy_(lists, [x * 2 for x in lists]),
            )
        )()
    return lists, p.keep(*(made or ()))


def decomposition(p: Program) -> Any:
    x = p.matrix().tanh().nan_to_num()
    a = x @ x.mT  # so that nothing is refused for its values: a promise would be, later
    a = a + 3 * torch.eye(a.size(-1), dtype=a.dtype)
    return p.keep_one_of(
        (
            lambda: torch.linalg.qr(x),
            lambda: torch.linalg.solve(a, x),
            lambda: torch.linalg.inv(a),
            lambda: torch.linalg.det(a),
            lambda: torch.linalg.matrix_norm(x),
            lambda: torch.linalg.lu_factor(a),
            lambda: torch.triu(x),
            lambda: torch.linalg.matrix_exp(a / 100),
            lambda: torch.fft.rfft(x),
            lambda: torch.fft.fft2(x),
        )
    )


def network_function(p: Program) -> Any:
    x = p.matrix()
    row, flat = x.reshape(1, 1, -1), x.reshape(-1, x.size(-1))
    rows = torch.randint(0, x.size(0), (4,), generator=p.generator)
    table = x.reshape(x.size(0), -1)
    weight = p.drawn(2, 1, 3, dtype=x.dtype)
    return p.keep_one_of(
        (
            lambda: F.layer_norm(x, x.shape[-1:]),
            lambda: F.rms_norm(x, x.shape[-1:]),
            lambda: F.group_norm(row, 1),
            lambda: F.batch_norm(flat, None, None, training=True),
            lambda: F.conv1d(row, weight, padding=1),
            lambda: F.interpolate(row, scale_factor=2.0),
            lambda: F.cross_entropy(flat, torch.zeros(flat.size(0), dtype=torch.long)),
            lambda: F.mse_loss(x, x * 0.5),
            lambda: F.embedding(rows, table),
            lambda: F.embedding_bag(rows, table, torch.tensor([0, 2])),
            lambda: torch.cdist(flat, flat + 1),
        )
    )


def random_numbers(p: Program) -> Any:
    torch.manual_seed(p.below(1000))
    x = p.number_of()
    return p.keep_one_of(
        (
            lambda: F.dropout(x, 0.3),
            lambda: torch.rand_like(x),
            lambda: torch.randperm(x.numel()),
            lambda: torch.normal(x, 1.0),
            lambda: torch.randn(3, 2),
        )
    )


def sparse(p: Program) -> Any:
    # Without a graph: a sparse gradient of what was promised asks for values, in whatever step.
    x = p.tensor(lambda x: x.dim() == 2 and x.dtype == torch.float32).detach()
    matrix = x.relu().to_sparse()
    return p.keep_one_of(
        (
            lambda: matrix @ x.mT,
            lambda: matrix.coalesce().values(),
            lambda: (matrix + matrix).to_dense(),
        )
    )


# -- gradients ------------------------------------------------------------------------------------


def backward(p: Program) -> Any:
    y = p.number_of(lambda x: x.requires_grad and not x.is_leaf)
    p.one_of(
        (
            lambda: y.sum().backward(retain_graph=True),
            lambda: y.square().mean().backward(retain_graph=True),
            lambda: y.backward(p.drawn(*y.size(), dtype=y.dtype), create_graph=True),
        )
    )()
    return [x for x in p.pool if x.is_leaf and x.requires_grad]


def gradient(p: Program) -> Any:
    x, y = p.number_of(lambda x: x.requires_grad), p.number_of(lambda x: x.requires_grad)
    how = {"retain_graph": True, "allow_unused": True, "create_graph": p.below(2) == 0}
    return p.keep(*torch.autograd.grad(y.sum(), x, **how))


def hooked(p: Program) -> None:
    x = p.number_of(lambda x: x.requires_grad)
    p.one_of((lambda: x.register_hook(lambda grad: grad * 2), x.retain_grad))()


def without_gradients(p: Program) -> None:
    for x in p.pool:
        if x.is_leaf and x.requires_grad:
            x.grad = None if x.grad is None or p.below(2) else torch.zeros_like(x)


class Scaled(torch.autograd.Function):
    """Two results, of which one has no gradient; the other is kept for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        out = x * y.sum()
        ctx.save_for_backward(x, y, out)
        return out, x.detach() > 0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y, out = ctx.saved_tensors
        return grads[0] * y.sum(), (grads[0] * x).sum() * torch.ones_like(y) + out.sum() * 0


class Tripled(torch.autograd.Function):
    """In place."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_dirty(x.mul_(3))
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


def own_function(p: Program) -> Any:
    x, y = p.number_of(), p.number_of()
    return p.keep_one_of((lambda: Scaled.apply(x, y), lambda: Tripled.apply(x * 1)))


def kept_otherwise(p: Program) -> Any:
    x = p.number_of()
    weight = p.drawn(*x.size(), dtype=x.dtype).requires_grad_()
    to_arrays = lambda t: t.detach().numpy().copy()  # noqa: E731

    def within(context: Any) -> Any:
        with context:
            return (x * x.exp() * weight).sigmoid()

    graph, used = torch.autograd.graph, p.below(2) == 0
    return p.keep_one_of(
        (
            lambda: checkpoint(lambda a, b: (a * b).tanh().exp(), x, weight, use_reentrant=used),
            lambda: within(graph.save_on_cpu()),
            lambda: within(graph.saved_tensors_hooks(to_arrays, torch.from_numpy)),
        )
    )


def transform(p: Program) -> Any:
    x, func = p.number_of(lambda x: x.numel() < 40), torch.func
    x = x.detach() if p.below(3) else x
    h = lambda a: (a.sin() * a).sum()  # noqa: E731
    return p.keep_one_of(
        (
            lambda: func.grad(h)(x),
            lambda: func.vjp(torch.tanh, x)[1](torch.ones_like(x))[0],
            lambda: func.jvp(torch.exp, (x,), (torch.ones_like(x),)),
            lambda: func.vmap(h)(x),
            lambda: func.jacrev(torch.sin)(x),
            lambda: func.jacfwd(torch.cos)(x),
            lambda: func.hessian(h)(x),
            lambda: func.vmap(func.grad(h))(x),
        )
    )


def forward_gradient(p: Program) -> Any:
    x = p.number_of()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        found = forward_ad.unpack_dual((dual * dual.sin()).sum(-1))
        return p.keep(found.primal.clone(), found.tangent.clone())


def half_precision(p: Program) -> Any:
    x = p.matrix()
    with torch.autocast("cpu", torch.bfloat16):
        return p.keep((x @ x.mT).relu().sum(-1))


# -- memory ---------------------------------------------------------------------------------------


def array(p: Program) -> Any:
    x = p.tensor(lambda x: not x.requires_grad and x.dtype in (*FLOATS, torch.int64))
    shared = x.numpy()
    p.arrays = [*p.arrays[-2:], shared]
    if p.below(2) and shared.flags.writeable and shared.size:
        shared.flat[0] = 5
    if p.below(3) == 0:
        x.add_(1)
    return shared, x


def array_written(p: Program) -> Any:
    if not p.arrays:
        raise Missing
    shared = p.one_of(p.arrays)
    if shared.flags.writeable and shared.size:
        shared.flat[-1] = p.below(9)
    return shared, list(p.pool)


def handed_on(p: Program) -> Any:
    x = p.tensor()

    def saved() -> Any:
        file = io.BytesIO()
        torch.save([x.detach(), x.detach()[..., :1]], file)
        file.seek(0)
        return torch.load(file)

    return p.keep_one_of(
        (
            lambda: pickle.loads(pickle.dumps(x.detach())),
            lambda: copy.copy(x),
            lambda: copy.deepcopy(x.detach()),
            saved,
            x.clone,
            lambda: x.to(torch.float64),
            x.contiguous,
            lambda: torch.asarray(x),
            lambda: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x.clone())).mul_(2),
            lambda: torch.tensor(x.tolist()),
        )
    )


def read(p: Program) -> Any:
    x = p.tensor(lambda x: x.numel() > 0)
    return p.one_of((x.tolist, lambda: x.flatten()[0].item(), lambda: repr(x), lambda: len(x)))()


def other_memory(p: Program) -> Any:
    x = p.number_of(lambda x: x.is_leaf)
    y = p.number_of(lambda y: y.dtype == x.dtype and not y.requires_grad)
    kind = p.below(4)
    if kind == 0:
        x.data = p.drawn(*x.size(), dtype=x.dtype)
    elif kind == 1:
        x.data = y.detach()
    elif kind == 2:
        x.requires_grad_(not x.requires_grad)
    else:
        p.keep(torch.empty(0, dtype=x.dtype).set_(y.untyped_storage(), 0, (1,)).add_(1))
    return x, y


def on_a_thread(p: Program) -> Any:
    x, made = p.number_of().detach(), list[Tensor]()
    thread = threading.Thread(target=lambda: made.append((x * 2).tanh()))
    thread.start()
    thread.join()
    return p.keep(*made)


def let_go(p: Program) -> None:
    for _ in range(min(4, len(p.pool))):
        p.pool.pop(p.below(len(p.pool)))
    del p.arrays[:1]


# -- modules --------------------------------------------------------------------------------------

MODELS: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Linear(4, 4),
    lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)),
    lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)),
    lambda: nn.LSTM(4, 4),
    lambda: nn.GRUCell(4, 4),
    lambda: nn.TransformerEncoderLayer(4, 2, 8),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3, padding=1), nn.Flatten()),
)
OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9),
    lambda weights: torch.optim.Adam(weights, 0.01),
    lambda weights: torch.optim.AdamW(weights, 0.01, foreach=True),
    lambda weights: torch.optim.AdamW(weights, 0.01, fused=True),
    lambda weights: torch.optim.RMSprop(weights, 0.01),
    lambda weights: torch.optim.Adagrad(weights),
    lambda weights: torch.optim.NAdam(weights),
)


def model(p: Program) -> Any:
    torch.manual_seed(p.below(1000))
    made = p.one_of(MODELS)()
    p.models = [*p.models[-2:], (made, p.one_of(OPTIMIZERS)(list(made.parameters())))]
    return list(made.parameters())


def _some_model(p: Program) -> tuple[nn.Module, torch.optim.Optimizer]:
    if not p.models:
        raise Missing
    found: tuple[nn.Module, torch.optim.Optimizer] = p.one_of(p.models)
    return found


def called(model: Any, *args: Any) -> Tensor:
    out = model(*args)
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found


def training_step(p: Program) -> Any:
    model, optimizer = _some_model(p)
    torch.manual_seed(3)
    optimizer.zero_grad()
    loss = called(model, p.drawn(3, 4)).square().mean()
    loss.backward()
    if p.below(2):
        p.keep(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()
    p.keep(loss.detach())
    return loss, list(model.parameters()), [[*s.values()] for s in optimizer.state.values()]


def inference(p: Program) -> Any:
    model, _ = _some_model(p)
    model.train(p.below(2) == 0)
    torch.manual_seed(4)
    with p.one_of((torch.no_grad, torch.inference_mode, torch.enable_grad))():
        out = called(model, p.drawn(3, 4))
    return p.keep(out.clone() if out.is_inference() else out)


def model_changed(p: Program) -> Any:
    model, optimizer = _some_model(p)
    weights = list(model.parameters())

    def saved_and_loaded() -> None:
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        file.seek(0)
        state, of_optimizer = torch.load(file)
        model.load_state_dict(state)
        optimizer.load_state_dict(of_optimizer)

    def copied() -> None:
        other = copy.deepcopy(model)
        p.models.append((other, p.one_of(OPTIMIZERS)(list(other.parameters()))))

    def by_a_vector() -> None:
        vector = nn.utils.parameters_to_vector(weights)
        nn.utils.vector_to_parameters(vector * 0.9, weights)

    def written() -> None:
        with torch.no_grad():
            for weight in weights:
                weight.mul_(0.9)
                weight.data[..., 0] = 0.1

    p.one_of(
        (
            lambda: model.load_state_dict(
                copy.deepcopy(model.state_dict()), assign=p.below(2) == 0
            ),
            saved_and_loaded,
            copied,
            by_a_vector,
            written,
            lambda: model.requires_grad_(False).requires_grad_(True),
            lambda: p.keep(*weights[:2]),
            lambda: model.double().float(),
        )
    )()
    return list(model.parameters()), model.state_dict()


#: What a program begins with, so that there is something to take.
FIRST_STEPS: tuple[Step, ...] = (*[create] * 8, model)
#: Each as often as it is there.
STEPS: tuple[Step, ...] = (
    *(create, view, in_place, backward, training_step) * 4,
    *(elementwise, of_two, reduction, product, by_index, gradient, own_function) * 2,
    *(transform, model, inference, model_changed, array, handed_on) * 2,
    *(conjugate, filled, joined, by_lists, decomposition, network_function, random_numbers),
    *(sparse, hooked, without_gradients, kept_otherwise, forward_gradient, half_precision),
    *(array_written, read, other_memory, on_a_thread, let_go),
)
