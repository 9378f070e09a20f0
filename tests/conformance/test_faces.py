"""The tensor's faces beside operators: each does on TensorRefs what plain torch does.

Every test is a small program that runs twice, on plain tensors and on ours, on a simulated device
with random evictions; what it returns is compared.
"""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from torchTensorRef.strategy_choice import make_strategy
from torchTensorRef.tensor import TensorRef

from ..support.programs import Bring, assert_right
from ..support.shaking import Shaken

# What torch and numpy say of features that these programs use on purpose.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "__array_wrap__ must accept context",
        "__array__ implementation doesn't accept a copy",
        "Sparse invariant checks are implicitly disabled",
        "Sparse ... tensor support is in beta",
        "Attempted to insert a get_attr Node",
    )
]


@pytest.fixture
def right(manage, request) -> Callable[[Callable[[Bring], Any]], None]:
    """Give `right(program)`: it fails where plain torch gives something else."""
    strategy = ("genoa", "flow")[zlib.crc32(request.node.name.encode()) % 2]
    manager = manage(Shaken(make_strategy(strategy), seed=1))
    return lambda program: assert_right(program, manager)


def failure(function: Callable[[], Any]) -> tuple[str, str]:
    """How a call fails: the type and the first line."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error).splitlines()[0]
    return "no error", ""


# -- numpy --------------------------------------------------------------------------------------


def test_an_array_shares_the_memory(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(3, 4))
        array = x.t().numpy()
        array[0, 0] = 7
        seen = x + 1
        x.mul_(2)
        return [seen, array.tolist(), array.strides, str(array.dtype), x.sum()]

    right(program)


def test_an_array_goes_on_sharing_it_through_many_operators(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.zeros(5))
        array = x.numpy()
        seen = []
        for step in range(6):
            array += step
            seen.append((x * x).sum().item())
            x.add_(1)
            seen.append(float(array.sum()))
        return seen

    right(program)


def test_a_tensor_over_an_array_shares_the_memory(right):
    def program(bring: Bring) -> Any:
        array = np.arange(12, dtype=np.float32).reshape(3, 4)
        x = bring(torch.from_numpy(array))
        array[1] = 9
        seen = x * 2
        x[2].add_(1)
        return [seen, array.tolist(), x]

    right(program)


def test_arrays_are_refused_where_torch_refuses_them(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(3, requires_grad=True))
        z = bring(torch.rand(3, dtype=torch.complex64)).conj()
        b = bring(torch.rand(3)).bfloat16()
        return [
            failure(x.numpy),
            failure(lambda: np.asarray(x)),
            failure((x * 2).numpy),
            x.detach().numpy().tolist(),
            x.numpy(force=True).tolist(),
            failure(z.numpy),
            z.resolve_conj().numpy().tolist(),
            failure(b.numpy),
        ]

    right(program)


def test_array_protocols(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.arange(6.0).reshape(2, 3))
        results = [
            np.sin(x),
            np.add(x, 1),
            np.multiply(x, x),
            x * np.float32(2),
        ]
        shared = np.asarray(x)
        own = np.array(x, copy=True)
        x.add_(1)
        return [
            *[
                (type(r).__name__.replace("TensorRef", "Tensor"), np.asarray(r).tolist())
                for r in results
            ],
            shared.tolist(),
            own.tolist(),
            x.__array__(np.float64).dtype.name,
            np.asarray(x, dtype=np.int32).tolist(),
            np.stack([x, x]).tolist(),
            [np.shape(x), np.ndim(x)],
        ]

    right(program)


# -- memory -------------------------------------------------------------------------------------


def test_dlpack(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(2, 3))
        array = np.from_dlpack(x)
        twin = torch.from_dlpack(x)
        capsule = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))
        twin[0, 0] = 5
        capsule[1, 1] = 6
        x.add_(1)
        grown = bring(torch.rand(2, requires_grad=True))
        return [
            array.tolist(),
            twin.tolist(),
            capsule.tolist(),
            x,
            failure(lambda: torch.from_dlpack(grown)),
            [int(part) for part in x.__dlpack_device__()],
        ]

    right(program)


def test_a_pointer_stays_good(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(4))
        y = x[1:]
        floats = (ctypes.c_float * 4).from_address(x.data_ptr())
        seen = []
        for step in range(4):
            floats[step] = step
            seen.append(x.sum().item())
            x.mul_(2)
            seen.append(list(floats))
        return [seen, y.data_ptr() - x.data_ptr(), x.data_ptr() == x.detach().data_ptr()]

    right(program)


def test_storages(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.arange(6.0).reshape(2, 3))
        storage = x.untyped_storage()
        other = bring(torch.empty(0)).set_(storage, 1, (2, 2), (2, 1))
        other.mul_(10)
        typed = x.storage()
        typed[0] = 42
        plain = torch.tensor(storage.tolist(), dtype=torch.uint8)
        return [
            x,
            other,
            storage.nbytes(),
            len(typed),
            typed.tolist(),
            plain,
            storage.data_ptr() == x.data_ptr(),
            x[1].storage_offset(),
            x.is_set_to(other),
            x.element_size(),
            x.nbytes,
            storage.device.type,
        ]

    right(program)


def test_resizing(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.arange(4.0))
        x.resize_(2, 3)
        x.view(-1)[4:].fill_(9)
        return [x, x.untyped_storage().nbytes()]

    right(program)


def test_share_memory(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(3))
        before = x.is_shared()
        same = x.share_memory_() is x
        x.add_(1)
        model = bring(nn.Linear(2, 2)).share_memory()
        return [before, same, x.is_shared(), x, [p.is_shared() for p in model.parameters()]]

    right(program)


# -- writing and reading ------------------------------------------------------------------------


def test_pickles(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(2, 3))
        views = pickle.loads(pickle.dumps([x, x.t(), x[1]]))
        views[0].zero_()
        grown = bring(torch.rand(2, requires_grad=True))
        parameter = bring(nn.Linear(2, 2)).weight
        back = pickle.loads(pickle.dumps(parameter))
        return [
            views,
            x,
            pickle.loads(pickle.dumps(grown)),
            isinstance(back, nn.Parameter),
            back,
            [pickle.loads(pickle.dumps(x, protocol)) for protocol in (2, 3, 4, 5)],
            failure(lambda: pickle.dumps((grown * 2).requires_grad_())),
        ]

    right(program)


def test_pickles_are_those_of_plain_tensors(right):
    def program(bring: Bring) -> Any:
        text = pickle.dumps(bring(torch.rand(3)))
        return [b"torchTensorRef" in text, b"TensorRef" in text]

    right(program)


def test_save_and_load(right):
    def program(bring: Bring) -> Any:
        model = bring(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
        tied = bring(torch.rand(4))
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "tied": [tied, tied[1:]]}, file)
        nbytes = len(file.getvalue())
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        loaded["tied"][0].zero_()
        whole = io.BytesIO()
        torch.save(model, whole)
        whole.seek(0)
        again = torch.load(whole, weights_only=False)
        return [
            loaded["model"],
            loaded["tied"],
            nbytes,
            again.state_dict(),
            type(again[0].weight).__name__,
        ]

    right(program)


def test_safetensors(right, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")

    def program(bring: Bring) -> Any:
        tensors = {
            "a": bring(torch.rand(2, 3)),
            "b": bring(torch.arange(4)),
            "c": bring(torch.ones(())),
        }
        path = str(tmp_path / "x.safetensors")
        safetensors.save_file(tensors, path)
        loaded = safetensors.load_file(path)
        text = safetensors.save(tensors)
        model = bring(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
        model[1].weight = model[0].weight
        safetensors.save_model(model, path)
        other = bring(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
        other[1].weight = other[0].weight
        safetensors.load_model(other, path)
        x = tensors["a"]
        return [
            sorted(loaded.items()),
            len(text),
            sorted(safetensors.load(text).items()),
            other.state_dict(),
            failure(lambda: safetensors.save({"x": x, "y": x[0]}))[0],
            failure(lambda: safetensors.save({"x": x.t()}))[0],
        ]

    right(program)


# -- copies -------------------------------------------------------------------------------------


def test_copies(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(3, requires_grad=True))
        x.sum().backward()
        x.mark = ["noted"]
        shallow, deep = copy.copy(x), copy.deepcopy(x)
        with torch.no_grad():
            x.add_(1)
        return [
            x,
            shallow,
            deep,
            deep.grad,
            deep.mark,
            deep.mark is x.mark,
            failure(lambda: copy.deepcopy(x * 2)),
        ]

    right(program)


def test_a_deep_copy_of_a_module_keeps_what_is_tied(right):
    def program(bring: Bring) -> Any:
        model = bring(nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}))
        model["b"].weight = model["a"].weight
        model.register_buffer("part", model["a"].weight.detach()[0])
        twin = copy.deepcopy(model)
        with torch.no_grad():
            model["a"].weight.zero_()
            twin["a"].weight.add_(1)
        return [
            list(model.parameters()),
            list(twin.parameters()),
            twin["b"].weight is twin["a"].weight,
            twin.part,
        ]

    right(program)


# -- text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_text(right, dtype):
    def program(bring: Bring) -> Any:
        x = bring((torch.rand(2, 3) * 5).to(dtype))
        large = bring(torch.ones(40, 40, dtype=dtype))
        return [repr(x), str(x[0, 0]), f"{x}", f"{x[0, 0]}", str(x), repr(large), repr(x[:0])]

    right(program)


def test_text_of_tensors_with_gradients(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(2, requires_grad=True))
        model = bring(nn.Linear(2, 2))
        y = x.double()
        return [
            repr(x),
            repr(x * 2),
            repr(x.prod()),
            repr(y.view(2, 1)),
            repr(torch.relu(x).sum()),
            repr(model.weight),
            repr(model(x)),
            repr(model.weight.detach()),
            f"{x.sum().item():.3f} {x.detach()[0]:.2f}",
            failure(lambda: f"{x:.2f}")[0],
            repr([x]),
            repr({"x": x}),
            repr(model),
        ]

    right(program)


def test_print_options(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(30, 30))
        torch.set_printoptions(precision=2, threshold=10, edgeitems=1)
        try:
            return repr(x)
        finally:
            torch.set_printoptions(profile="default")

    right(program)


# -- Python's protocols -------------------------------------------------------------------------


def test_python_protocols(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.arange(3))
        m = bring(torch.rand(3, 2))
        a, b, c = x
        words = ["zero", "one", "two"]
        return [
            [float(part) for part in x],
            [row.sum() for row in m],
            a + b + c,
            len(m),
            1 in x,
            9 in x,
            bool(x[1]),
            failure(lambda: bool(x)),
            int(x[2]),
            float(x[2]),
            complex(x[2]),
            [words[i] for i in x],
            list(range(x[2])),
            list(reversed(x)),
            sum(x),
            max(x),
            sorted(x, reverse=True),
            {x[0].item(): 1},
            hash(x) == id(x),
            x == x,
            list(zip(x, m, strict=True)),
            m[x[1]],
            m[x],
            m[m > 0.5],
            m[None, ..., -1:],
            x.tolist(),
            failure(lambda: m.item()),
            failure(lambda: len(x[0])),
            failure(lambda: iter(x[0])),
            m.T.shape == (2, 3),
            isinstance(m, torch.Tensor),
            torch.is_tensor(m),
            m.type(),
            dir(m) != [],
        ]

    right(program)


def test_assignment_to_parts(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.zeros(4, 4))
        x[1] = 1
        x[:, 2] = bring(torch.arange(4.0))
        x[x > 2] = -1
        x[[0, 3], [0, 3]] = bring(torch.tensor([8.0, 9.0]))
        x += 1
        x @= bring(torch.eye(4))
        y = 3 - x
        y **= 2
        del x
        return y

    right(program)


# -- random numbers -----------------------------------------------------------------------------


def test_generators(right):
    def program(bring: Bring) -> Any:
        generator = torch.Generator().manual_seed(3)
        x = bring(torch.empty(5))
        drawn = [
            x.uniform_(generator=generator).clone(),
            x.normal_(generator=generator).clone(),
            torch.bernoulli(x.sigmoid(), generator=generator),
            torch.multinomial(x.exp(), 3, generator=generator),
            torch.rand_like(x),
            torch.randn_like(x),
            nn.functional.dropout(x, 0.5),
            torch.normal(x, x.abs()),
            x[torch.randperm(5, generator=generator)],
        ]
        state = bring(torch.get_rng_state())
        first = torch.rand_like(x)
        torch.set_rng_state(state)
        return [drawn, first, torch.rand_like(x)]

    right(program)


# -- processes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loaders(right, workers):
    def program(bring: Bring) -> Any:
        dataset = torch.utils.data.TensorDataset(bring(torch.rand(10, 3)), bring(torch.arange(10)))
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_size=4,
            shuffle=True,
            num_workers=workers,
            generator=torch.Generator().manual_seed(0),
        )
        weight = bring(torch.rand(3, 2))
        batches = [[x @ weight, y] for x, y in loader]
        parts = torch.utils.data.random_split(dataset, [7, 3], torch.Generator().manual_seed(1))
        return [batches, [list(part) for part in parts]]

    right(program)


def _double_in_child(x: torch.Tensor, results: Any) -> None:
    x.mul_(2)
    results.put(x.sum().item())


def test_a_forked_child_shares_what_is_shared(right):
    def program(bring: Bring) -> Any:
        context = torch.multiprocessing.get_context("fork")
        x = bring(torch.ones(4)).share_memory_()
        results = context.SimpleQueue()
        child = context.Process(target=_double_in_child, args=(x, results))
        child.start()
        seen = results.get()
        child.join(30)
        return [x + 1, seen, child.exitcode]

    right(program)


def test_a_queue_passes_tensors_by_sharing_their_memory(right):
    def program(bring: Bring) -> Any:
        context = torch.multiprocessing.get_context("fork")
        there, back = context.SimpleQueue(), context.SimpleQueue()
        x = bring(torch.ones(4))
        child = context.Process(target=_echo, args=(there, back))
        child.start()
        there.put(x)
        seen = back.get()
        child.join(30)
        return [seen, x + 1, x.is_shared(), child.exitcode]

    right(program)


def _echo(there: Any, back: Any) -> None:
    tensor = there.get()
    tensor.add_(5)
    back.put(tensor.sum().item())


# -- functions of functions ---------------------------------------------------------------------


def test_torch_func(right):
    def program(bring: Bring) -> Any:
        x, w = bring(torch.rand(3)), bring(torch.rand(3, 3))

        def f(x: Any) -> Any:
            return (w @ x).sin().prod()

        model = bring(nn.Linear(3, 2))
        state = dict(model.named_parameters())
        other = {name: bring(torch.rand_like(p.detach())) for name, p in state.items()}
        loss = lambda state, x: torch.func.functional_call(model, state, (x,)).square().sum()  # noqa: E731
        batch = bring(torch.rand(4, 3))
        return [
            torch.func.grad(f)(x),
            torch.func.grad(torch.func.grad(lambda t: (t**3).sum()))(bring(torch.tensor(2.0))),
            torch.func.vmap(f)(batch),
            torch.func.vmap(torch.func.grad(f))(batch),
            torch.func.jacrev(lambda x: (w @ x).exp())(x),
            torch.func.jacfwd(lambda x: (w @ x).exp())(x),
            torch.func.hessian(f)(x),
            torch.func.jvp(f, (x,), (bring(torch.ones(3)),)),
            torch.func.vjp(f, x)[1](bring(torch.tensor(1.0))),
            torch.func.functional_call(model, other, (x,)),
            torch.func.grad(loss)(other, x),
            torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(other, batch),
            torch.vmap(lambda x: nn.functional.dropout(x, 0.5), randomness="different")(batch),
        ]

    right(program)


def test_stacks_of_models(right):
    def program(bring: Bring) -> Any:
        models = [bring(nn.Linear(3, 2)) for _ in range(3)]
        parameters, buffers = torch.func.stack_module_state(models)
        x = bring(torch.rand(5, 3))
        call = lambda p, b: torch.func.functional_call(models[0], (p, b), (x,))  # noqa: E731
        return torch.vmap(call)(parameters, buffers)

    right(program)


def test_traces_of_jit(right):
    def program(bring: Bring) -> Any:
        model = bring(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)))
        x = bring(torch.rand(4, 3))
        traced = torch.jit.trace(model, x)
        other = bring(torch.rand(2, 3))
        function = torch.jit.trace(lambda a, b: (a @ b).relu(), (x, bring(torch.rand(3, 3))))
        return [traced(other), traced(x), function(x, bring(torch.rand(3, 3)))]

    right(program)


def test_scripts_of_jit(right):
    def program(bring: Bring) -> Any:
        model = torch.jit.script(bring(nn.Sequential(nn.Linear(3, 3), nn.ReLU())))
        return model(bring(torch.rand(4, 3)))

    right(program)


def test_fx(right):
    def program(bring: Bring) -> Any:
        model = bring(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.ReLU()))
        x = bring(torch.rand(4, 3))
        graph = torch.fx.symbolic_trace(model)
        made = torch.fx.experimental.proxy_tensor.make_fx(lambda a: a.sin() + a.sum())(x)
        return [graph(x), str(graph.graph), made(x), len(made.graph.nodes)]

    right(program)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(right, reentrant):
    def program(bring: Bring) -> Any:
        model = bring(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2)))
        x = bring(torch.rand(4, 3, requires_grad=True))
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
        y.square().sum().backward()
        return [y, x.grad, [p.grad for p in model.parameters()]]

    right(program)


# -- autograd -----------------------------------------------------------------------------------


def test_hooks_of_tensors(right):
    def program(bring: Bring) -> Any:
        seen: list[Any] = []
        x = bring(torch.rand(3, requires_grad=True))
        x.register_hook(lambda grad: grad * 2)
        x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.clone()))
        y = x * 3
        y.retain_grad()
        y.register_hook(lambda grad: seen.append(grad.clone()))
        y.grad_fn.register_hook(lambda given, got: seen.extend(given))
        y.grad_fn.register_prehook(lambda got: seen.extend(got))
        handle = x.register_hook(lambda grad: grad * 100)
        handle.remove()
        y.sum().backward()
        return [x.grad, y.grad, seen]

    right(program)


def test_hooks_of_modules(right):
    def program(bring: Bring) -> Any:
        seen: list[Any] = []
        model = bring(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)))
        model[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        model[0].register_forward_hook(lambda m, args, out: out + 1)
        model[1].register_full_backward_hook(lambda m, given, got: seen.extend([*given, *got]))
        model[2].register_full_backward_pre_hook(lambda m, got: (got[0] * 2,))
        model.register_state_dict_post_hook(lambda m, state, prefix, local: seen.append(len(state)))
        model(bring(torch.rand(2, 3))).sum().backward()
        return [[p.grad for p in model.parameters()], seen, len(model.state_dict())]

    right(program)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, scale: float) -> Any:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x**3 * scale, (x > 0.5).long()

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * ctx.scale * grad, None


class AddInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        x.add_(1)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2


class ThroughNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.new_tensor(np.exp(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.new_tensor(grad.numpy() * 2)


def test_functions_with_gradients_of_their_own(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(4, requires_grad=True))
        cubed, mask = Cube.apply(x, 2.0)
        added = AddInPlace.apply(x * 1)
        grads = torch.autograd.grad(
            cubed.sum() + added.sum() + ThroughNumpy.apply(x).sum(), x, create_graph=True
        )
        return [cubed, mask, added, grads, torch.autograd.grad(grads[0].sum(), x)]

    right(program)


def test_saved_tensors_are_kept_where_the_program_says(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(4, requires_grad=True))
        packed = []

        def pack(t: Any) -> Any:
            packed.append(t.shape)
            return t.numpy(force=True).copy()

        with torch.autograd.graph.save_on_cpu():
            y = (x.exp() * x).sum()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda a: bring(torch.from_numpy(a))):
            z = (x.sin() * x).sum()
        (y + z).backward()
        return [x.grad, packed]

    right(program)


def test_double_backward(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(4, requires_grad=True))
        w = bring(torch.rand(4, 4, requires_grad=True))
        results = []
        for f in (lambda: (w @ x).tanh().sum(), lambda: x.max() * x[0], lambda: (w * x).median()):
            (first,) = torch.autograd.grad(f(), x, create_graph=True)
            loss = (first * first * x).sum()
            second = torch.autograd.grad(loss, [x, w], create_graph=True, allow_unused=True)
            (third,) = torch.autograd.grad(second[0].sum() + loss, x)
            results.append([first, second, third])
        return results

    right(program)


def test_gradcheck(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(3, dtype=torch.float64, requires_grad=True))
        f = lambda x: (x.exp() * x).sum().sin()  # noqa: E731
        return [torch.autograd.gradcheck(f, (x,)), torch.autograd.gradgradcheck(f, (x,))]

    right(program)


def test_the_graph_can_be_walked(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(3, requires_grad=True))
        y = (x * 2).prod() + x.min()
        names, todo = [], [y.grad_fn]
        while todo:
            node = todo.pop()
            names.append(type(node).__name__)
            todo += [next_ for next_, _ in node.next_functions if next_ is not None]
        return names

    right(program)


def test_versions_guard_what_was_saved(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(3, requires_grad=True))
        y = x.exp()
        y.add_(1)
        leaf = failure(lambda: x.add_(1))
        return [failure(lambda: y.sum().backward())[0], leaf, y._version, y.detach()._version]

    right(program)


def test_functional_jacobians(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(3))
        f = lambda x: x.prod() * x.exp()  # noqa: E731
        return [
            torch.autograd.functional.jacobian(f, x),
            torch.autograd.functional.jacobian(f, x, vectorize=True),
            torch.autograd.functional.hessian(lambda x: (x.exp() * x.sin()).sum(), x),
        ]

    right(program)


# -- other layouts ------------------------------------------------------------------------------


def test_sparse_coo(right):
    def program(bring: Bring) -> Any:
        dense = bring(torch.rand(4, 4).relu() * (torch.rand(4, 4) > 0.5))
        other = bring(torch.rand(4, 3))
        s = dense.to_sparse()
        indices = bring(torch.tensor([[0, 1, 1], [2, 0, 0]]))
        made = torch.sparse_coo_tensor(indices, bring(torch.rand(3)), (4, 4))
        whole = made.coalesce()
        return [
            s.to_dense(),
            s @ other,
            torch.sparse.mm(s, other),
            torch.sparse.mm(s, whole).to_dense(),
            (s + whole).to_dense(),
            whole.values() * 2,
            whole.indices() + 1,
            (whole * 3).to_dense(),
            s.sum(),
            torch.sparse.sum(s, 0).to_dense(),
            torch.sparse.softmax(s, 1).to_dense(),
            s.transpose(0, 1).to_dense(),
            dense + s,
            dense.sparse_mask(whole).to_dense(),
            repr(whole),
        ]

    right(program)


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
def test_compressed_sparse(right, layout):
    def program(bring: Bring) -> Any:
        dense = bring(torch.rand(4, 4) * (torch.rand(4, 4) > 0.5))
        other = bring(torch.rand(4, 3))
        size = ((2, 2),) if layout.startswith("bs") else ()
        s = getattr(dense, f"to_sparse_{layout}")(*size)
        results = [s.to_dense(), s.values() * 2, s.values().shape]
        if layout in ("csr", "csc"):
            results += [s @ other, (s @ s).to_dense(), s.to_sparse().to_dense()]
        if layout == "bsr":
            results.append(s @ other)
        return results

    right(program)


def test_sparse_made_of_parts(right):
    def program(bring: Bring) -> Any:
        rows, columns = bring(torch.tensor([0, 1, 2])), bring(torch.tensor([1, 0]))
        s = torch.sparse_csr_tensor(rows, columns, bring(torch.rand(2)), (2, 2))
        return [s @ bring(torch.rand(2, 2)), s.crow_indices() + 1]

    right(program)


def test_sparse_gradients(right):
    def program(bring: Bring) -> Any:
        table = bring(nn.Embedding(6, 3, sparse=True))
        optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
        table(bring(torch.tensor([1, 1, 4]))).sum().backward()
        grad = table.weight.grad.to_dense()
        optimizer.step()
        a = bring(torch.rand(3, 3)).to_sparse().requires_grad_()
        b = bring(torch.rand(3, 2, requires_grad=True))
        torch.sparse.mm(a, b).sum().backward()
        return [grad, table.weight, a.grad.to_dense(), b.grad]

    right(program)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested(right, layout):
    def program(bring: Bring) -> Any:
        rows = [bring(torch.rand(2, 4)), bring(torch.rand(3, 4))]
        nested = torch.nested.nested_tensor(rows, layout=layout)
        linear = bring(nn.Linear(4, 4))
        through = linear(nested)
        return [
            list(nested.unbind()),
            torch.nested.to_padded_tensor(nested, 0.0),
            [part.detach() for part in through.unbind()],
            nested.is_nested,
        ]

    right(program)


def test_nested_of_rows_with_gradients(right):
    def program(bring: Bring) -> Any:
        rows = [bring(torch.rand(n, 4, requires_grad=True)) for n in (2, 3)]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        (nested * 2).values().sum().backward()
        return [row.grad for row in rows]

    right(program)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantized(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(3, 4))
        q = torch.quantize_per_tensor(x, 0.1, 2, torch.quint8)
        c = torch.quantize_per_channel(
            x, bring(torch.rand(3)), bring(torch.zeros(3)), 0, torch.qint8
        )
        return [
            q.dequantize(),
            q.int_repr(),
            q.q_scale(),
            c.dequantize(),
            torch.relu(q).dequantize(),
            torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255),
        ]

    right(program)


# -- modes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)
def test_compile(right, backend):
    def program(bring: Bring) -> Any:
        torch._dynamo.reset()
        model = bring(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)))
        compiled = torch.compile(model, backend=backend)
        x = bring(torch.rand(4, 3))
        compiled(x).sum().backward()
        function = torch.compile(lambda a: (a.sin() * 2, a.shape[0]), backend=backend)
        return [compiled(x), [p.grad for p in model.parameters()], function(x)]

    right(program)


def test_autocast(right):
    def program(bring: Bring) -> Any:
        model = bring(nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2)))
        x = bring(torch.rand(4, 3))
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
            z = torch.bmm(x[None], x.t()[None])
            s = nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])
        y.float().square().sum().backward()
        return [y, z, s, [p.grad for p in model.parameters()]]

    right(program)


def test_inference_mode(right):
    def program(bring: Bring) -> Any:
        model = bring(nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU()))
        x = bring(torch.rand(3, 2, 8))
        with torch.inference_mode():
            y = model(x)
            y.add_(1)
            v = y[0]
            attended = nn.functional.scaled_dot_product_attention(y, y, y)
        w = torch.ones_like(x, requires_grad=True)
        return [
            y.is_inference(),
            (w * 2).is_inference(),
            failure(lambda: (y * bring(torch.ones(1)).requires_grad_()).sum().backward())[0],
            y.clone(),
            v.clone(),
            attended.clone(),
            model.state_dict(),
        ]

    right(program)


def test_default_dtype(right):
    def program(bring: Bring) -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            x = bring(torch.arange(3))
            return [x / 2, x.sqrt(), x * 0.5, bring(nn.Linear(3, 1))(x.to(torch.float64))]
        finally:
            torch.set_default_dtype(torch.float32)

    right(program)


def test_default_device(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(3))
        try:
            torch.set_default_device("meta")
            shape = torch.empty(2, 3)
            result = x + 1
            model = nn.Linear(3, 2)
        finally:
            torch.set_default_device(None)
        with torch.device("cpu"):
            y = bring(torch.zeros(3)) + x
        model = bring(model.to_empty(device="cpu"))
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        return [shape.device.type, result, y, model(x)]

    right(program)


# -- modules ------------------------------------------------------------------------------------


def test_conversions_of_modules(right):
    def program(bring: Bring) -> Any:
        results = []
        for convert in (
            lambda m: m.half(),
            lambda m: m.double(),
            lambda m: m.bfloat16(),
            lambda m: m.to(torch.float64),
            lambda m: m.to("cpu"),
            lambda m: m.to(memory_format=torch.channels_last),
            lambda m: m.type(torch.float64),
            lambda m: m.apply(lambda part: part.float()),
            lambda m: m.requires_grad_(False),
            lambda m: m.cpu(),
        ):
            model = bring(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)))
            first = model[0].weight
            same = convert(model) is model
            results += [
                same,
                model[0].weight is first,
                model.state_dict(),
                list(model.parameters()),
            ]
        return results

    right(program)


@pytest.mark.parametrize("assign", [True, False])
def test_load_state_dict(right, assign):
    def program(bring: Bring) -> Any:
        model = bring(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
        source = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        state = {name: bring(tensor + 1) for name, tensor in source.state_dict().items()}
        plain = {name: tensor + 2 for name, tensor in source.state_dict().items()}
        told = str(model.load_state_dict(state, assign=assign))
        with torch.no_grad():
            state["0.weight"].zero_()
        first = [tensor.clone() for tensor in model.state_dict().values()]
        model.load_state_dict(plain, assign=assign)
        wrong = failure(lambda: model.load_state_dict({"x": plain["0.bias"]}, assign=assign))
        return [
            told,
            first,
            model.state_dict(keep_vars=True),
            wrong,
            model(bring(torch.rand(2, 3))),
            [type(p).__name__.replace("TensorRef", "Parameter") for p in model.parameters()],
        ]

    right(program)


def test_swapping_tensors(right):
    def program(bring: Bring) -> Any:
        a, b = bring(torch.rand(2)), bring(torch.rand(3, dtype=torch.float64))
        torch.utils.swap_tensors(a, b)
        model = bring(nn.Linear(2, 2))
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.double()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        a.data, b.data = b.data, a.data
        return [a, b, model.weight, model.state_dict()]

    right(program)


def test_parametrizations(right):
    def program(bring: Bring) -> Any:
        class Symmetric(nn.Module):
            def forward(self, x: Any) -> Any:
                return x.triu() + x.triu(1).transpose(-1, -2)

        model = bring(nn.Linear(3, 3))
        nn.utils.parametrize.register_parametrization(model, "weight", Symmetric())
        normed = nn.utils.parametrizations.weight_norm(bring(nn.Linear(3, 3)))
        spectral = nn.utils.parametrizations.spectral_norm(bring(nn.Linear(3, 3)))
        orthogonal = nn.utils.parametrizations.orthogonal(bring(nn.Linear(3, 3)))
        x = bring(torch.rand(2, 3))
        results = [m(x) for m in (model, normed, spectral, orthogonal)]
        sum(r.sum() for r in results).backward()
        grads = [[p.grad for p in m.parameters()] for m in (model, normed, spectral, orthogonal)]
        nn.utils.parametrize.remove_parametrizations(model, "weight")
        return [results, grads, model.weight, list(normed.state_dict())]

    right(program)


def test_pruning(right):
    def program(bring: Bring) -> Any:
        model = bring(nn.Linear(4, 4))
        prune.l1_unstructured(model, "weight", amount=0.5)
        prune.random_unstructured(model, "bias", amount=0.25)
        y = model(bring(torch.rand(2, 4)))
        y.sum().backward()
        state = dict(model.state_dict())
        prune.remove(model, "weight")
        return [y, state, model.weight, model.bias_orig.grad]

    right(program)


def test_clipping_and_vectors_of_parameters(right):
    def program(bring: Bring) -> Any:
        model = bring(nn.Linear(4, 4))
        model(bring(torch.rand(2, 4))).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 2, model.parameters())
        return [norm, vector, list(model.parameters()), [p.grad for p in model.parameters()]]

    right(program)


def test_packed_sequences(right):
    def program(bring: Bring) -> Any:
        rows = [bring(torch.rand(n, 3)) for n in (4, 2)]
        packed = nn.utils.rnn.pack_sequence(rows)
        lstm = bring(nn.LSTM(3, 5))
        out, (h, c) = lstm(packed)
        padded, lengths = nn.utils.rnn.pad_packed_sequence(out)
        return [padded, lengths, h, c, nn.utils.rnn.pad_sequence(rows)]

    right(program)


def test_parameters_and_buffers(right):
    def program(bring: Bring) -> Any:
        model = bring(nn.Module())
        model.w = nn.Parameter(bring(torch.rand(3)))
        model.register_buffer("b", bring(torch.rand(3)), persistent=False)
        model.l = nn.ParameterList([nn.Parameter(bring(torch.rand(2))) for _ in range(2)])
        model = bring(model)
        return [
            isinstance(model.w, nn.Parameter),
            isinstance(model.b, nn.Parameter),
            [name for name, _ in model.named_parameters()],
            list(model.state_dict()),
            (model.w * model.b).sum(),
            nn.Parameter(model.b, requires_grad=False).requires_grad,
            model.w.is_leaf,
        ]

    right(program)


def test_a_ref_is_a_tensor(manager):
    x = manager.adopt(torch.rand(2))
    assert type(x) is TensorRef
    assert isinstance(x, torch.Tensor)
