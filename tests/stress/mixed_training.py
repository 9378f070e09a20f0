"""Random programs that train: models of many kinds, and all that one does with them meanwhile.

They are another set of steps than `mixed_steps.py`: `python -m tests.stress.mixed --training`.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from .mixed_steps import Missing, Program, Step, Tensor, called

#: So many models are there at once.
MOST_MODELS = 3


class Tied(nn.Module):
    """A language model whose last layer is its table, which is read as rows and as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4, padding_idx=0)
        self.mix = nn.GRU(4, 4, batch_first=True)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.mix(self.table(ids))[0])
        return found


class Counting(nn.Module):
    """Writes its buffers, in place and by another tensor, and keeps a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)
        self.last = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.calls += 1
        out = (x - self.mean) * self.scale + self.last
        self.last = out.detach().mean(0)
        return out.masked_fill(x > 2, 0)


class Attending(nn.Module):
    """Attention with a mask, and a residual that is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.1)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        y = self.down(F.silu(self.up(self.norm(x)), inplace=True))
        y += x
        found: Tensor = y
        return found


def _rows(p: Program) -> Tensor:
    return p.drawn(3, 4)


def _ids(p: Program) -> Tensor:
    return torch.randint(0, 11, (2, 5), generator=p.generator)


#: How a model is made, and what it is called with.
KINDS: tuple[tuple[Callable[[], nn.Module], Callable[[Program], Tensor]], ...] = (
    (lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 4)), _rows),
    (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        ),
        lambda p: p.drawn(2, 2, 4, 4),
    ),
    (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(2, 2, 2, stride=2), nn.GroupNorm(1, 2), nn.AdaptiveAvgPool2d(2)
        ),
        lambda p: p.drawn(1, 2, 3, 3),
    ),
    (Tied, _ids),
    (Counting, _rows),
    (Attending, lambda p: p.drawn(2, 3, 4)),
    (lambda: nn.EmbeddingBag(11, 4, mode="max"), _ids),
    (lambda: nn.LSTM(4, 3, 2, bidirectional=True, dropout=0.1), lambda p: p.drawn(3, 2, 4)),
    (lambda: nn.RNN(4, 4, nonlinearity="relu"), lambda p: p.drawn(3, 2, 4)),
    (lambda: nn.Sequential(nn.LazyLinear(4), nn.Softplus()), _rows),
    (lambda: nn.TransformerEncoderLayer(4, 2, 8, norm_first=True), lambda p: p.drawn(3, 2, 4)),
    (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), _rows),
    (lambda: parametrizations.weight_norm(nn.Conv1d(4, 2, 1)), lambda p: p.drawn(1, 4, 5)),
    (
        lambda: nn.Sequential(nn.InstanceNorm1d(4, affine=True), nn.PReLU()),
        lambda p: p.drawn(2, 4, 6),
    ),
)

OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda weights: torch.optim.SGD(weights, 0.1, foreach=False, maximize=True),
    lambda weights: torch.optim.Adam(weights, 0.01, amsgrad=True),
    lambda weights: torch.optim.Adam(weights, torch.tensor(0.01), foreach=False),
    lambda weights: torch.optim.AdamW(weights, 0.01, foreach=True),
    lambda weights: torch.optim.AdamW(weights, 0.01, fused=True),
    lambda weights: torch.optim.AdamW(weights, 0.01, differentiable=False, capturable=False),
    lambda weights: torch.optim.Adagrad(weights, fused=True),
    lambda weights: torch.optim.Adadelta(weights),
    lambda weights: torch.optim.Adamax(weights),
    lambda weights: torch.optim.ASGD(weights),
    lambda weights: torch.optim.Rprop(weights, foreach=True),
    lambda weights: torch.optim.RMSprop(weights, 0.01, centered=True, momentum=0.5),
    lambda weights: torch.optim.RAdam(weights, 0.01),
    lambda weights: torch.optim.NAdam(weights, 0.01, decoupled_weight_decay=True),
    lambda weights: torch.optim.Adafactor(weights),
    lambda weights: torch.optim.LBFGS(weights, 0.1, max_iter=3, history_size=3),
)

SCHEDULERS: tuple[Callable[[Any], Any], ...] = (
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
    lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=99, cycle_momentum=False
    ),
)


@dataclass
class Trained:
    """A model in training, and what goes along with it."""

    model: nn.Module
    optimizer: Any
    make_input: Callable[[Program], Tensor]
    scheduler: Any = None
    averaged: Any = None
    hooks: list[Any] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)

    def state(self) -> Any:
        """All that can be seen of it."""
        parts = [
            self.model.state_dict(),
            {name: x.grad for name, x in self.model.named_parameters()},
            _plain_state(self.optimizer.state_dict()),
            self.seen[-4:],
        ]
        if self.averaged is not None:
            parts.append(self.averaged.state_dict())
        if self.scheduler is not None:
            parts.append(self.scheduler.get_last_lr())
        return parts


def _plain_state(state: dict[str, Any]) -> Any:
    groups = [
        {name: value for name, value in group.items() if isinstance(value, (int, float, Tensor))}
        for group in state["param_groups"]
    ]
    return [groups, [state["state"][number] for number in sorted(state["state"])]]


def _some(p: Program) -> Trained:
    if not p.trained:
        raise Missing
    found: Trained = p.one_of(p.trained)
    return found


def _add(p: Program, model: nn.Module, make_input: Callable[[Program], Tensor]) -> Trained:
    if any(isinstance(x, nn.UninitializedParameter) for x in model.parameters()):
        model(make_input(p))
    return _keep(p, Trained(model, p.one_of(OPTIMIZERS)(list(model.parameters())), make_input))


def _keep(p: Program, made: Trained) -> Trained:
    p.trained = [*p.trained[1 - MOST_MODELS :], made]
    return made


def _loss(one: Trained, x: Tensor) -> Tensor:
    return called(one.model, x).float().square().mean()


# -- steps ----------------------------------------------------------------------------------------


def begin(p: Program) -> Any:
    torch.manual_seed(p.below(1000))
    make, make_input = p.one_of(KINDS)
    return _add(p, make(), make_input).state()


def train(p: Program) -> Any:
    """One step, in one of the ways in which it is written."""
    one = _some(p)
    torch.manual_seed(p.below(1000))
    x = one.make_input(p)
    how = p.below(8)
    if isinstance(one.optimizer, torch.optim.LBFGS):

        def closure() -> Tensor:
            one.optimizer.zero_grad()
            torch.manual_seed(1)
            loss = _loss(one, x)
            loss.backward()
            return loss

        return one.optimizer.step(closure), one.state()
    if p.below(3):
        one.optimizer.zero_grad(set_to_none=p.below(2) == 0)
    if how == 0:
        for part in (x, one.make_input(p)):
            (_loss(one, part) / 2).backward()
    elif how == 1 and not isinstance(one.model, nn.LSTM):  # oneDNN has none of half precision here
        with torch.autocast("cpu", torch.bfloat16):
            loss = _loss(one, x)
        loss.backward()
    elif how == 2:
        loss = checkpoint(lambda x: _loss(one, x), x, use_reentrant=False)
        loss.backward()
    elif how == 3:
        loss = _loss(one, x)
        loss.backward(retain_graph=True)
        loss.backward()
    elif how == 4:
        weights = [w for w in one.model.parameters() if w.requires_grad]
        grads = torch.autograd.grad(_loss(one, x), weights, create_graph=True, allow_unused=True)
        sum((g.square().sum() for g in grads if g is not None), torch.zeros(())).backward()
    else:
        _loss(one, x).backward()
    clip = p.below(4)
    if clip == 0:
        p.keep(nn.utils.clip_grad_norm_(one.model.parameters(), 0.5))
    elif clip == 1:
        nn.utils.clip_grad_value_(one.model.parameters(), 0.01)
    one.optimizer.step()
    if one.scheduler is not None:
        one.scheduler.step()
    if one.averaged is not None:
        one.averaged.update_parameters(one.model)
    return one.state()


def evaluated(p: Program) -> Any:
    one = _some(p)
    one.model.eval()
    x = one.make_input(p)
    with p.one_of((torch.no_grad, torch.inference_mode))():
        out = called(one.averaged if one.averaged and p.below(2) else one.model, x)
    one.model.train()
    return p.keep(out.clone())


def by_functions(p: Program) -> Any:
    """Gradients of a call with other weights, of all samples at once, or along a direction."""
    one = _some(p)
    if one.hooks or isinstance(one.model, Counting):
        raise Missing  # they would keep what is only there inside
    one.model.eval()
    weights = {name: x.detach() for name, x in one.model.named_parameters()}
    buffers = {name: x.detach().clone() for name, x in one.model.named_buffers()}
    x = one.make_input(p)

    def loss(weights: Any, x: Tensor) -> Tensor:
        return called(lambda x: functional_call(one.model, (weights, buffers), (x,)), x).sum()

    try:
        return p.one_of(
            (
                lambda: grad(loss)(weights, x),
                lambda: vmap(grad(loss), (None, 0))(weights, x[:, None]),
                lambda: loss({name: w * 0.5 for name, w in weights.items()}, x),
                lambda: torch.func.jvp(lambda w: loss(w, x), (weights,), (weights,)),
            )
        )()
    finally:
        one.model.train()


def kept(p: Program) -> Any:
    """Save and load, copy, pickle."""
    one = _some(p)

    def saved() -> None:
        file = io.BytesIO()
        torch.save([one.model.state_dict(), one.optimizer.state_dict()], file)
        file.seek(0)
        model, optimizer = torch.load(file, weights_only=True)
        one.model.load_state_dict(model, assign=p.below(2) == 0)
        one.optimizer.load_state_dict(optimizer)

    def copied() -> None:
        _add(p, copy.deepcopy(one.model), one.make_input)

    def pickled() -> None:
        if not (one.hooks or parametrize.is_parametrized(one.model)):
            _add(p, pickle.loads(pickle.dumps(one.model)), one.make_input)

    def together() -> None:
        if not one.hooks and one.scheduler is None:
            model, optimizer = copy.deepcopy((one.model, one.optimizer))
            _keep(p, Trained(model, optimizer, one.make_input))

    p.one_of((saved, copied, pickled, together))()
    return [other.state() for other in p.trained]


def changed(p: Program) -> Any:
    """Change a model between two steps."""
    one = _some(p)
    model, weights = one.model, list(one.model.parameters())
    weight = p.one_of(weights)

    def frozen() -> None:
        weight.requires_grad_(not weight.requires_grad)

    def replaced() -> None:
        for module in model.modules():
            for name, old in list(module.named_parameters(recurse=False)):
                if old is weight:
                    setattr(module, name, nn.Parameter(old.detach() * 0.5))

    def halved() -> None:
        model.to(torch.float64).to(torch.float32)

    def written() -> None:
        with torch.no_grad():
            weight.copy_(weight * 0.9)
            weight.view(-1)[:2].zero_()

    def by_data() -> None:
        weight.data = weight.data * 0.5 + 0.01
        weight.data[..., :1].clamp_(-1, 1)

    def gradient() -> None:
        if weight.grad is not None:
            weight.grad.add_(0.01)
        elif weight.requires_grad:
            weight.grad = torch.full_like(weight, 0.02)

    def pruned() -> None:
        for module in model.modules():
            if type(module) is nn.Linear and not parametrize.is_parametrized(module):
                prune.l1_unstructured(module, "weight", amount=0.3)
                called(model, one.make_input(p))
                prune.remove(module, "weight")
                return

    def in_a_vector() -> None:
        vector = nn.utils.parameters_to_vector(weights)
        nn.utils.vector_to_parameters(vector.detach() * 0.99, weights)

    def reset() -> None:
        torch.manual_seed(5)
        for module in model.modules():
            if hasattr(module, "reset_parameters") and not parametrize.is_parametrized(module):
                module.reset_parameters()

    def initialised() -> None:
        torch.manual_seed(6)
        (nn.init.xavier_uniform_ if weight.dim() == 2 else nn.init.normal_)(weight)

    p.one_of(
        (
            *(frozen, replaced, halved, written, by_data),
            *(gradient, pruned, in_a_vector, reset, initialised),
        )
    )()
    return one.state()


def accompanied(p: Program) -> Any:
    """Add a schedule, an average, hooks, a group of weights; or take hooks away."""
    one = _some(p)

    def schedule() -> None:
        one.scheduler = p.one_of(SCHEDULERS)(one.optimizer)

    def average() -> None:
        if not one.hooks:
            one.averaged = AveragedModel(one.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def note(_: Any, args: Any, out: Any) -> None:
        one.seen.append((out[0] if isinstance(out, tuple) else out).detach().sum())

    def forward_hook() -> None:
        one.hooks.append(one.model.register_forward_hook(note))

    def doubled() -> None:
        def double(_: Any, args: Any) -> Any:
            return tuple(x * 2 if x.is_floating_point() else x for x in args)

        one.hooks.append(one.model.register_forward_pre_hook(double))

    def backward_hook() -> None:
        def note_gradient(_: Any, given: Any, out: Any) -> None:
            one.seen.append(out[0].sum() if out[0] is not None else None)

        one.hooks.append(one.model.register_full_backward_hook(note_gradient))

    def clip(weight: Any) -> None:
        weight.grad.clamp_(-0.1, 0.1)

    def of_weights() -> None:
        weight = p.one_of(list(one.model.parameters()))
        if weight.requires_grad:
            one.hooks.append(weight.register_hook(lambda gradient: gradient * 0.5))
            one.hooks.append(weight.register_post_accumulate_grad_hook(clip))

    def no_hooks() -> None:
        for hook in one.hooks:
            hook.remove()
        one.hooks.clear()

    def other_optimizer() -> None:
        one.optimizer = p.one_of(OPTIMIZERS)(list(one.model.parameters()))
        one.scheduler = None

    def group() -> None:
        if not isinstance(one.optimizer, torch.optim.LBFGS):
            one.optimizer.add_param_group({"params": [nn.Parameter(p.drawn(2, 2))]})
            one.scheduler = None

    p.one_of(
        (
            *(schedule, average, forward_hook, doubled, backward_hook),
            *(of_weights, no_hooks, other_optimizer, group),
        )
    )()
    return one.state()


#: What a program that trains begins with.
FIRST_STEPS: tuple[Step, ...] = (begin, begin)
#: Each as often as it is there.
STEPS: tuple[Step, ...] = (
    *[train] * 8,
    *(evaluated, kept, changed, accompanied) * 2,
    begin,
    by_functions,
)
