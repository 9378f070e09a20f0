"""Injection as a program sees it: what becomes a TensorRef, and what must not."""

import copy
import io
import sys
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

import torchTensorRef
from torchTensorRef import TensorRef, disabled, injectTo
from torchTensorRef.inject import hooks, torch_

from ..support.injection import kind_of


@pytest.fixture
def injected(manager):
    """The managed device, and injection on, as in a program."""
    with hooks.is_disabled.entered(False):
        yield manager
    injectTo.clear()


@pytest.fixture
def module_of(monkeypatch):
    """Make a module from source, under a name, as an import would."""

    def make(name, source):
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(source, vars(module))
        return module

    return make


MAKERS = {
    "Normal(0, 1)": lambda: torch.distributions.Normal(0.0, 1.0).sample((3,)),
    "Transformer's mask": lambda: nn.Transformer.generate_square_subsequent_mask(4),
    "arange": lambda: torch.arange(3),
    "as_tensor": lambda: torch.as_tensor([1.0, 2.0]),
    "asarray": lambda: torch.asarray([1.0, 2.0]),
    "complex": lambda: torch.complex(torch.ones(2), torch.zeros(2)),
    "empty_strided": lambda: torch.empty_strided((2, 3), (3, 1)).zero_(),
    "DLPack": lambda: torch.utils.dlpack.from_dlpack(np.ones(3)),
    "eye": lambda: torch.eye(3),
    "fft.fftfreq": lambda: torch.fft.fftfreq(4),
    "frombuffer": lambda: torch.frombuffer(bytearray(b"abcd"), dtype=torch.uint8),
    "full": lambda: torch.full((2,), 3.0),
    "hann_window": lambda: torch.hann_window(4),
    "linspace": lambda: torch.linspace(0, 1, 3),
    "normal": lambda: torch.normal(0.0, 1.0, (2,)),
    "polar": lambda: torch.polar(torch.ones(2), torch.zeros(2)),
    "rand": lambda: torch.rand(2, 3),
    "randint": lambda: torch.randint(0, 9, (4,)),
    "randn": lambda: torch.randn(2),
    "randperm": lambda: torch.randperm(5),
    "signal.windows.hann": lambda: torch.signal.windows.hann(4),
    "scalar_tensor": lambda: torch.scalar_tensor(2.0),
    "tensor": lambda: torch.tensor([[1, 2], [3, 4]]),
    "tril_indices": lambda: torch.tril_indices(3, 3),
    "zeros": lambda: torch.zeros(2),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_factory_gives_a_tensor_ref_with_the_plain_values(injected, make):
    torch.manual_seed(7)
    made = make()
    assert isinstance(made, TensorRef)
    with torchTensorRef.disabled():
        torch.manual_seed(7)
        plain = make()
        assert kind_of(plain) is torch.Tensor
    assert (made.dtype, made.stride()) == (plain.dtype, plain.stride())
    assert torch.equal(made, plain)


def test_like_factories_wrap_what_they_make_of_plain_tensors(injected):
    with torchTensorRef.disabled():
        plain = torch.ones(3)
    likes = (torch.zeros_like, torch.ones_like, torch.rand_like, torch.empty_like, torch.randn_like)
    assert {kind_of(like(plain)) for like in likes} == {TensorRef}
    assert isinstance(torch.full_like(plain, 2), TensorRef)


def test_a_leaf_that_requires_grad_stays_one(injected):
    made = torch.tensor([1.0, 2.0], requires_grad=True)
    assert made.is_leaf
    (made * made).sum().backward()
    assert made.grad.tolist() == [2, 4]


def test_a_tensor_of_tensors(injected):
    parts = torch.arange(3.0)
    assert torch.tensor([parts[0], [parts[1]][0], 5]).tolist() == [0, 1, 5]
    assert torch.as_tensor([[parts[2]], [parts[0]]]).tolist() == [[2], [0]]
    with torchTensorRef.disabled():
        assert torch.tensor([parts[1]]).tolist() == [1]


def test_an_array_and_its_tensor_go_on_sharing_memory(injected):
    np = pytest.importorskip("numpy")
    array = np.ones(3)
    for share in (torch.from_numpy, torch.as_tensor):
        shared = share(array)
        assert isinstance(shared, TensorRef)
        array[0] = 5
        shared[1] = 7
        assert (shared + 0).tolist() == [5, 7, 1]
        assert array.tolist() == [5, 7, 1]


def test_out_is_given_back_as_it_is(injected):
    with torchTensorRef.disabled():
        plain = torch.empty(3)
    assert torch.zeros(3, out=plain) is plain
    made = torch.empty(3)
    assert torch.ones(3, out=made) is made
    assert made.tolist() == [1, 1, 1]


def test_an_accelerator_that_torch_cannot_name_is_ours(injected):
    if torch.cuda.is_available():
        pytest.skip("this torch can name cuda")
    made = torch.zeros(3, device="cuda")
    assert (kind_of(made), made.device.type, made.to("cuda") is made) == (TensorRef, "cpu", True)
    assert torch.zeros(2, device="sim").device.type == "cpu"
    assert isinstance(nn.Linear(2, 2, device="cuda").weight, TensorRef)
    with torch.device("cuda"):
        assert isinstance(torch.zeros(2), TensorRef)
        assert isinstance(nn.Linear(2, 2).weight, TensorRef)
    with pytest.raises(RuntimeError, match="gpu"):
        torch.zeros(2, device="gpu")


def test_disabled_leaves_everything_plain_and_nests(injected):
    with torchTensorRef.disabled():
        with torchTensorRef.disabled():
            pass
        linear = nn.Linear(2, 2)
        assert kind_of(torch.zeros(2)) is torch.Tensor
        assert type(linear.weight) is nn.Parameter
    assert isinstance(torch.zeros(2), TensorRef)


def test_disabled_is_for_this_thread_alone(injected):
    with torchTensorRef.disabled(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: kind_of(torch.zeros(1))).result() is TensorRef


def test_refs_work_inside_disabled(injected):
    made = torch.ones(3)
    with torchTensorRef.disabled():
        assert (made + torch.ones(3)).tolist() == [2, 2, 2]


# -- worlds that are not real ---------------------------------------------------------------------


def test_meta_and_fake_tensors_are_left_alone(injected):
    fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")
    with torch.device("meta"):
        assert kind_of(torch.zeros(2)) is torch.Tensor
        assert type(nn.Linear(2, 2).weight) is nn.Parameter
    assert kind_of(torch.zeros(2, device="meta")) is torch.Tensor
    with fake_tensor.FakeTensorMode():
        assert type(torch.zeros(2)) is fake_tensor.FakeTensor


def test_modes_of_the_program_see_plain_factories(injected):
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, kinds, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    for mode in (Functions(), Operators()):
        with mode:
            assert kind_of(torch.zeros(2)) is torch.Tensor
    with torch.device("cpu"):
        assert isinstance(torch.zeros(2), TensorRef)


def test_transforms_and_tracing(injected):
    mapped = torch.vmap(lambda x: x + torch.zeros(3))(torch.ones(4, 3))
    assert mapped.tolist() == [[1, 1, 1]] * 4
    assert torch.func.jacrev(lambda x: x * torch.ones(2))(torch.ones(2)).tolist() == [
        [1, 0],
        [0, 1],
    ]
    traced = torch.jit.trace(nn.Linear(3, 3), torch.ones(2, 3))
    assert traced(torch.ones(2, 3)).shape == (2, 3)


def test_symbolic_traces_name_torchs_functions(injected):
    class Doubled(nn.Module):
        def forward(self, x):
            return torch.zeros_like(x) + x + torch.tensor(1.0)

    graph = torch.fx.symbolic_trace(Doubled())
    assert "torch.zeros_like" in graph.code
    assert graph(torch.ones(2)).tolist() == [2, 2]


def test_torch_compile_gives_the_same_numbers(injected):
    pytest.importorskip("torch._dynamo")

    def program(x):
        return x * 2 + torch.zeros(3) + torch.arange(3)

    assert torch.compile(program, backend="eager")(torch.ones(3)).tolist() == [2, 3, 4]
    linear = nn.Linear(3, 3)
    compiled = torch.compile(linear, backend="eager")
    assert torch.equal(compiled(torch.ones(2, 3)), linear(torch.ones(2, 3)))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, about its own trees
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11 reads such
def test_torch_export_writes_down_the_same_program(injected):
    pytest.importorskip("torch._dynamo")
    with disabled():
        plain, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), torch.rand(3, 4)
        expected = torch.export.export(plain, (x,))
    model, mine = copy.deepcopy(plain), torch.clone(x)
    injected.adopt(model)
    exported = torch.export.export(model, (injected.adopt(mine),))
    assert str(exported.graph) == str(expected.graph)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    for program in (exported, exported.run_decompositions(), torch.export.load(file)):
        assert torch.equal(program.module()(mine), expected.module()(x))


# -- modules --------------------------------------------------------------------------------------


def test_parameters_and_buffers_are_refs(injected):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Embedding(4, 2))
    kinds = {kind_of(t) for t in (*model.parameters(), *model.buffers())}
    assert kinds == {TensorRef}
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert all(p._ttr_block.is_persistent for p in model.parameters())
    own = nn.Module()
    own.register_buffer("kept", torch.zeros(2))
    own.register_parameter("absent", None)
    assert own.kept._ttr_block.is_persistent


def test_the_object_that_was_registered_is_the_one_in_the_module(injected):
    with torchTensorRef.disabled():
        weight = nn.Parameter(torch.ones(2, 2))
    weight.remembered = "by its owner"
    model = nn.Linear(2, 2)
    model.weight = weight
    assert model.weight is weight
    assert (kind_of(weight), weight.remembered) == (TensorRef, "by its owner")


def test_a_parameter_that_is_weakly_held_is_the_one_in_the_module(injected):
    with torchTensorRef.disabled():
        weight = nn.Parameter(torch.ones(2, 2))
    held = weakref.ref(weight)
    model = nn.Linear(2, 2, bias=False)
    model.weight = weight
    assert model.weight is weight is held()
    model(torch.ones(1, 2)).sum().backward()
    assert weight.grad.tolist() == [[1, 1], [1, 1]]


def test_a_graph_from_before_a_registration_is_differentiated(injected):
    with torchTensorRef.disabled():
        weight = nn.Parameter(torch.ones(2, 2))
        total = weight.sum()
    model = nn.Linear(2, 2, bias=False)
    model.weight = weight
    (total + model(torch.ones(1, 2)).sum()).backward()
    assert model.weight is weight
    assert weight.grad.tolist() == [[2, 2], [2, 2]]


def test_tied_weights_stay_tied(injected):
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    twin = copy.deepcopy(model)
    assert len(list(model.parameters())) == len(list(twin.parameters())) == 3
    assert twin[0].weight is twin[1].weight


def test_a_model_emptied_from_meta_is_managed(injected):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.to_empty(device="cpu")
    assert {kind_of(t) for t in (*model.parameters(), *model.buffers())} == {TensorRef}


LOADS = {
    "values": lambda file: torch.load(file),
    "anything": lambda file: torch.load(file, weights_only=False),
    "on the host": lambda file: torch.load(file, map_location="cpu"),
    "where a function says": lambda file: torch.load(file, map_location=lambda stored, _: stored),
    "mapped": lambda file: torch.load(file, mmap=True),
}


@pytest.mark.parametrize("is_set", [False, True], ids=["in a block", "set"])
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_what_is_loaded_has_its_own_device_whatever_the_default_is(
    injected, tmp_path, load, is_set
):
    """Torch asks no default device for what is stored."""
    file = tmp_path / "stored.pt"
    torch.save({"a": torch.arange(4.0), "more": [torch.ones(2), 3]}, file)
    if is_set:
        torch.set_default_device("meta")
    try:
        with nullcontext() if is_set else torch.device("meta"):
            loaded = load(file)
    finally:
        torch.set_default_device(None)
    assert loaded["a"].device.type == loaded["more"][0].device.type == "cpu"
    assert loaded["a"].tolist() == [0, 1, 2, 3]
    assert loaded["more"][0].tolist() == [1, 1]
    assert {kind_of(loaded["a"]), kind_of(loaded["more"][0])} == {TensorRef}


def test_assigned_state_is_managed(injected):
    model = nn.Linear(2, 2)
    with torchTensorRef.disabled():
        state = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    model.load_state_dict(state, assign=True)
    assert isinstance(model.weight, TensorRef)
    assert isinstance(model.weight, nn.Parameter)
    assert model(torch.ones(1, 2)).tolist() == [[3, 3]]


def test_half_and_to_keep_parameters_managed(injected):
    model = nn.Linear(2, 2).half().to("cpu").float()
    assert isinstance(model.weight, TensorRef)


# -- who takes part -------------------------------------------------------------------------------

SOURCE = """
import torch
from torch import zeros, nn
def by_name(): return zeros(2)
def by_torch(): return torch.ones(2)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
def mixed(x): return x + torch.ones(2)
"""


def test_an_excluded_module_keeps_plain_tensors(injected, module_of):
    library = module_of("library_a.part", SOURCE)
    assert isinstance(library.by_name(), TensorRef)
    injectTo.exclude("library_a")
    assert kind_of(library.by_name()) is torch.Tensor
    assert kind_of(library.by_torch()) is torch.Tensor
    assert type(library.Model().inner.weight) is nn.Parameter
    assert library.zeros is next(p.original for p in torch_.PATCHES if p.name == "torch.zeros")
    assert library.mixed(torch.ones(2)).tolist() == [2, 2]
    later = module_of("library_a.later", SOURCE)
    assert kind_of(later.by_name()) is torch.Tensor
    injectTo.append("library_a.part")
    assert (kind_of(library.by_name()), kind_of(later.by_name())) == (TensorRef, torch.Tensor)
    injectTo.remove("library_a")
    assert isinstance(later.by_name(), TensorRef)


def test_a_name_taken_before_us_is_rebound_by_append(injected, module_of):
    hooks.uninstall()
    try:
        library = module_of("library_b", SOURCE)
    finally:
        hooks.install()
    assert kind_of(library.by_name()) is torch.Tensor
    assert "library_b.zeros" in torch_.taken_names()
    taken = library.zeros
    injectTo.append("library_b")
    assert isinstance(library.by_name(), TensorRef)
    assert "library_b.zeros" not in torch_.taken_names()
    injectTo.remove("library_b")
    assert library.zeros is taken
    injectTo.append("library_b")
    hooks.uninstall()
    try:
        assert library.zeros is taken
    finally:
        hooks.install()
    assert isinstance(library.by_name(), TensorRef)


def test_other_names_of_a_module_are_not_touched(injected, module_of):
    library = module_of("library_c", "zeros = lambda n: 'own'\ntorch = 'no module'\n")
    injectTo.append("library_c")
    injectTo.exclude("library_c")
    assert (library.zeros(2), library.torch) == ("own", "no module")


def test_a_forked_child_makes_plain_tensors(injected):
    import multiprocessing

    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("this system does not fork")
    with multiprocessing.get_context("fork").Pool(1) as pool:
        kind, total = pool.apply(_in_a_child)
    assert (kind, total) == (True, 3.0)


def _in_a_child():
    made = torch.ones(3)
    return kind_of(made) is torch.Tensor, made.sum().item()


def test_workers_of_a_loader_send_what_they_make(injected):
    dataset = torch.utils.data.TensorDataset(torch.arange(10.0).view(10, 1))
    loader = torch.utils.data.DataLoader(dataset, batch_size=5, num_workers=2)
    assert [batch.sum().item() for (batch,) in loader] == [10, 35]


class Branching(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def test_what_torch_draws_is_kept(injected):
    """A weight drawn of a distribution is fetched once, not by each operator."""
    weight = torch.distributions.Normal(0.0, 1.0).sample((16, 16))
    x = torch.ones(2, 16)
    for _ in range(4):
        x @ weight
    assert injected.stats()["fetched_nbytes"] == weight.nbytes + x.nbytes


# What torch 2.10 says when it exports a `cond`, without us too.
@pytest.mark.filterwarnings("ignore:You are calling torch.compile inside torch.export:UserWarning")
def test_control_flow(injected):
    """Written as such, inside an exported program, and with gradients: as plain torch."""
    from torch._higher_order_ops.while_loop import while_loop

    def doubled(x):
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x))

    with torchTensorRef.disabled():
        plain = torch.rand(3)
        exported = torch.export.export(Branching(), (plain,)).module()
        expected_rounds, expected = doubled(plain)
    x = injected.adopt(plain.clone())
    w = injected.adopt(plain.clone()).requires_grad_()
    for run in (Branching(), exported):
        with torch.no_grad():
            assert isinstance(run(x), TensorRef)
            assert run(x).tolist() == plain.sin().tolist()
            assert run(-x.view(3, 1).view(3)).tolist() == plain.neg().cos().tolist()
        w.grad = None
        run(w).sum().backward()
        assert w.grad.tolist() == plain.cos().tolist()
    with torch.no_grad():
        rounds, result = doubled(x)
    assert (rounds.item(), result.tolist()) == (expected_rounds.item(), expected.tolist())
