"""How a program may name a device: each of torch's ways, against `docs/injection.md`.

On a torch without CUDA "cuda" asks for the accelerator, and so does "sim" anywhere; the program
gets a tensor of ours, labelled cpu, with the values that plain torch has on the host.
"""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

import torchTensorRef
from torchTensorRef import ConfigError, TensorRef, injectTo, tensorsManager
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.spec import DeviceSpec
from torchTensorRef.inject import hooks

from ..support.injection import kind_of

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="this torch can name an accelerator"
)


@pytest.fixture(autouse=True)
def injected(manager):
    with hooks.is_disabled.entered(False):
        yield manager
    injectTo.clear()


def plain(*values):
    with torchTensorRef.disabled():
        return torch.tensor(values or (1.0, 2.0))


def drawn(device):
    return torch.rand(3, generator=torch.Generator(device).manual_seed(5), device=device)


def module(**options):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 2, **options), nn.BatchNorm1d(2, **options))


def stored(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def under_default(device, make):
    torch.set_default_device(device)
    try:
        return make()
    finally:
        torch.set_default_device(None)


def packed(device):
    return nn.utils.rnn.pack_padded_sequence(torch.ones(2, 1, 1), [2]).to(device).data


#: Ways in which the name is the program's to choose.
WAYS = {
    "zeros(device=)": lambda d: torch.zeros(2, device=d),
    "tensor(device=)": lambda d: torch.tensor([1.0], device=d),
    "as_tensor(device=)": lambda d: torch.as_tensor(plain(), device=d),
    "asarray(device=)": lambda d: torch.asarray([1.0], device=d),
    "zeros_like(device=)": lambda d: torch.zeros_like(plain(), device=d),
    "one_hot": lambda d: nn.functional.one_hot(torch.arange(3, device=d)),
    "x.new_zeros": lambda d: torch.ones(2).new_zeros(3, device=d),
    "x.new_ones": lambda d: torch.ones(2).new_ones(3, device=d),
    "x.new_full": lambda d: torch.ones(2).new_full((3,), 2.0, device=d),
    "x.new_empty": lambda d: torch.ones(2).new_empty(3, device=d).zero_(),
    "x.new_empty_strided": lambda d: torch.ones(2).new_empty_strided((3,), (1,), device=d).zero_(),
    "x.new_tensor": lambda d: torch.ones(2).new_tensor([4.0], device=d),
    "plain.new_zeros": lambda d: plain().new_zeros(3, device=d),
    "x.to(d)": lambda d: torch.ones(2).to(d),
    "x.to(device=d)": lambda d: torch.ones(2).to(device=d),
    "x.to(d, dtype)": lambda d: torch.ones(2).to(d, torch.float64),
    "x.to(d, None, False)": lambda d: torch.ones(2).to(d, None, False),
    "x.to(d, dtype, copy)": lambda d: torch.ones(2).to(d, torch.float32, False, True),
    "x.to(d, memory_format=)": lambda d: torch.ones(1, 2, 2, 2).to(
        d, memory_format=torch.channels_last
    ),
    "part.to(d)": lambda d: torch.arange(6.0).view(2, 3)[:, 1].to(d, copy=True),
    "plain.to(d)": lambda d: plain().to(d),
    "plain.to(d, dtype)": lambda d: plain().to(d, torch.int64),
    "parameter.to(d)": lambda d: nn.Parameter(torch.ones(2)).to(d),
    "module.to(d)": lambda d: module().to(d)[0].weight,
    "module.to(device=d)": lambda d: module().to(device=d)[1].running_mean,
    "module.to(d, dtype)": lambda d: module().to(d, torch.float64)[0].bias,
    "module.to_empty": lambda d: (
        module(device="meta").to_empty(device=d)[0].weight.detach().fill_(1)
    ),
    "Module(device=)": lambda d: module(device=d)[0].weight,
    "PackedSequence.to": packed,
    "Generator(d)": drawn,
    "Generator(device=)": lambda d: torch.rand(2, generator=torch.Generator(device=d)) * 0,
    "set_default_device": lambda d: under_default(d, lambda: torch.zeros(2)),
    "load(map_location=d)": lambda d: torch.load(stored(torch.ones(2)), map_location=d),
    "load({cpu: d})": lambda d: torch.load(stored(torch.ones(2)), map_location={"cpu": d}),
    "load(function)": lambda d: torch.load(
        stored(torch.ones(2)),
        map_location=lambda s, _: torch.serialization.default_restore_location(s, d),
    ),
}

#: Ways that name CUDA, or need a `torch.device`.
OF_CUDA = {
    "with device": lambda: in_context(lambda: torch.zeros(2)),
    "with device, another by default": lambda: under_default(
        "cpu", lambda: in_context(lambda: module()[0].weight)
    ),
    "with device, module": lambda: in_context(lambda: module()[0].weight),
    "with device, load": lambda: in_context(lambda: torch.load(stored(torch.ones(2)))),
    "x.cuda()": lambda: torch.ones(2).cuda(),
    "x.cuda(0)": lambda: torch.ones(2).cuda(0),
    "x.cuda(device)": lambda: torch.ones(2).cuda(torch.device("cuda:0")),
    "x.cuda(non_blocking=)": lambda: torch.ones(2).cuda(non_blocking=True),
    "x.to(0)": lambda: torch.ones(2).to(0),
    "x.to(other)": lambda: torch.ones(2).to(torch.ones(2, device="cuda")),
    "x.xpu()": lambda: torch.ones(2).xpu(),
    "x.type(name)": lambda: torch.ones(2).type("torch.cuda.DoubleTensor"),
    "x.type(class)": lambda: torch.ones(2).type(torch.cuda.FloatTensor),
    "plain.cuda()": lambda: plain().cuda(),
    "plain.type(name)": lambda: plain().type("torch.cuda.FloatTensor"),
    "module.cuda()": lambda: module().cuda()[0].weight,
    "module.cuda(0)": lambda: module().cuda(0)[0].weight,
    "module.xpu()": lambda: module().xpu()[0].weight,
    "load(storage.cuda)": lambda: torch.load(
        stored(torch.ones(2)), map_location=lambda storage, _: storage.cuda(0)
    ),
}


def in_context(make):
    with torch.device("cuda"):
        return make()


def assert_ours(made, on_host):
    assert isinstance(made, TensorRef)
    assert made.device == torch.device("cpu")
    assert made.dtype == on_host.dtype
    assert made.stride() == on_host.stride()
    assert torch.equal(made, on_host)


@pytest.mark.parametrize("name", ["cuda", "cuda:9", "sim", "sim:1", "sim:rtx3060"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_device_that_torch_cannot_name_is_the_accelerator(way, name):
    torch.manual_seed(1)
    on_host = way("cpu")
    torch.manual_seed(1)
    assert_ours(way(name), on_host)


@pytest.mark.parametrize("way", OF_CUDA.values(), ids=OF_CUDA)
def test_ways_that_name_cuda_by_themselves(way):
    made = way()
    assert_ours(made, made.detach().clone())


@pytest.mark.filterwarnings("ignore:torch.range:UserWarning", "ignore:Sparse:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(
    "make", sorted(_device_constructors(), key=lambda make: make.__name__), ids=lambda m: m.__name__
)
def test_every_function_that_a_default_device_reaches_may_name_it(make):
    """What torch itself lists; their results differ, so only their labels are looked at."""
    arguments = {
        "full": ((2,), 1.0),
        "asarray": ([1.0],),
        "tensor": ([1.0],),
        "as_tensor": ([1.0],),
        "scalar_tensor": (1.0,),
        "nested_tensor": ([[1.0]],),
        "empty_strided": ((2,), (1,)),
        "empty_permuted": ((2,), (0,)),
        "empty_quantized": ((2,), torch.quantize_per_tensor(plain(), 1.0, 0, torch.qint8)),
        "linspace": (0, 1, 2),
        "logspace": (0, 1, 2),
        "range": (0, 1),
        "randint": (3, (2,)),
        "tril_indices": (2, 2),
        "triu_indices": (2, 2),
        "sparse_coo_tensor": ([[0]], [1.0], (2,)),
        "sparse_compressed_tensor": ([0, 1], [0], [1.0], (1, 1)),
        "sparse_csr_tensor": ([0, 1], [0], [1.0], (1, 1)),
        "sparse_csc_tensor": ([0, 1], [0], [1.0], (1, 1)),
        "sparse_bsr_tensor": ([0, 1], [0], [[[1.0]]], (1, 1)),
        "sparse_bsc_tensor": ([0, 1], [0], [[[1.0]]], (1, 1)),
    }.get(make.__name__, (2,))
    options = {}
    if make.__name__ == "sparse_compressed_tensor":
        options["layout"] = torch.sparse_csr
    assert make(*arguments, **options, device="cuda").device.type == "cpu"
    if "sparse" not in make.__name__:  # lists inside are plain torch's own business there
        assert in_context(lambda: make(*arguments, **options)).device.type == "cpu"


def test_the_default_device_is_said_to_be_what_the_label_says():
    assert under_default("cuda", torch.get_default_device) == torch.device("cpu")


def test_a_generator_is_still_torchs():
    generator = torch.Generator("cuda").manual_seed(4)
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert generator.device.type == "cpu"
    expected = torch.rand(3, generator=torch.Generator().manual_seed(4))
    assert torch.equal(torch.rand(3, generator=generator, device="cuda"), expected)
    restored = torch.Generator()
    restored.set_state(generator.get_state())
    assert torch.equal(torch.rand(2, generator=restored), torch.rand(2, generator=generator))


def test_the_program_has_its_own_copy_there_and_a_second_asking_gives_the_same():
    x = torch.arange(4.0)
    there = x.to("cuda")
    assert there is not x
    assert there.to("cuda:0") is there
    assert there.cuda() is there
    assert there.to("cuda", torch.float32) is there
    assert there.to("cuda", copy=True) is not there
    there.zero_()
    assert x.tolist() == [0, 1, 2, 3]
    x.fill_(7)
    assert there.tolist() == [0, 0, 0, 0]


HOME = {
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to, later": lambda x: x.to("cpu", non_blocking=True),
    "to a device": lambda x: x.to(device="cpu"),
    "to an index": lambda x: x.to(device="cpu:0"),
    "as_tensor": lambda x: torch.as_tensor(x, device="cpu"),
    "numpy": lambda x: torch.from_numpy(x.numpy(force=True)),
}
OF_THERE = {
    "made": lambda x: x,
    "a view": lambda x: x[1:3],
    "data": lambda x: x.data,
    "detached": lambda x: x.detach(),
    "a copy": lambda x: copy.deepcopy(x),
    "a parameter": lambda x: nn.Parameter(x).detach(),
    "another": lambda x: torch.ones(4).to(x),
    "a plain one": lambda x: plain(1.0, 1.0).to(x),
}


@pytest.mark.parametrize("home", HOME)
@pytest.mark.parametrize("of", OF_THERE)
def test_what_is_brought_home_from_there_is_a_copy(home, of):
    """A snapshot, as of a card: whoever of the two is written, the other one stays."""
    there = OF_THERE[of](torch.ones(4, device="cuda"))
    here = HOME[home](there)
    there.fill_(7)
    assert here.unique().tolist() == [1]
    here.fill_(3)
    assert there.unique().tolist() == [7]
    assert there.to("cuda") is there
    is_copy = home == "to an index"  # torch compares it with `cpu`, which has none
    assert (HOME[home](here).data_ptr() == here.data_ptr()) is not is_copy  # at home already


def test_the_label_of_a_tensor_there_does_not_bring_home():
    """It says cpu, and programs hand it on."""
    there = torch.ones(4, device="cuda")
    assert there.to(there.device) is there
    assert there.to(torch.ones(1).to("cuda")) is there
    assert there.to(other=there) is there


def test_snapshots_of_a_module_there_stay_what_they_were():
    model = module().to("cuda")
    weight = model[0].weight
    best = {name: value.cpu() for name, value in model.state_dict().items()}
    before = {name: value.tolist() for name, value in best.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        model(torch.rand(4, 2, device="cuda")).square().sum().backward()
        optimizer.step()
    assert {name: value.tolist() for name, value in best.items()} == before
    assert model[0].weight.tolist() != before["0.weight"]
    model[0].weight.data.to("cuda").fill_(3)
    assert model[0].weight.unique().tolist() == [3]
    assert model.cpu()[0].weight is weight
    assert weight.cpu() is weight


def test_gradients_come_back_through_a_copy_that_was_brought_home():
    weight = nn.Parameter(torch.ones(3, device="cuda"))
    (weight.cpu() * 2).sum().backward()
    assert weight.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("take", [torch.as_tensor, torch.asarray])
@pytest.mark.parametrize("device", ["cuda", torch.device("cuda", 1), 0, "sim"])
def test_what_is_taken_there_is_a_copy(take, device):
    array, x, other = np.zeros(2, dtype=np.float32), torch.zeros(2), plain(0.0, 0.0)
    taken = [take(source, device=device) for source in (array, x, other)]
    assert {kind_of(tensor) for tensor in taken} == {TensorRef}
    array += 1
    x += 1
    other += 1
    assert [tensor.tolist() for tensor in taken] == [[0, 0]] * 3
    assert take(taken[0], device=device) is taken[0]
    taken[1].fill_(5)
    assert x.tolist() == [1, 1]
    injectTo.exclude(__name__)
    again = take(array, device=device)
    assert kind_of(again) is torch.Tensor
    array += 1
    assert again.tolist() == [1, 1]


SOURCES = {
    "an array": lambda device: np.ones(3, dtype=np.float32),
    "a list": lambda device: [1.0, 1.0, 1.0],
    "a tensor": lambda device: torch.ones(3).to(device),
    "a leaf": lambda device: torch.ones(3).to(device).requires_grad_(),
    "a result": lambda device: torch.ones(3, requires_grad=True).to(torch.float64).to(device),
}
GRADIENTS = (
    {},
    {"requires_grad": True},
    {"requires_grad": False},
    {"requires_grad": True, "copy": True},
)


def _taken(of, there, device, options):
    """What `asarray` makes of a source there, and leaves of it."""
    source = SOURCES[of](there)
    made = torch.asarray(source, device=device, **options)
    kept = getattr(source, "requires_grad", None)
    return made, (made.is_leaf, made.requires_grad, made is source, kept)


@pytest.mark.filterwarnings("ignore:torch.asarray")
@pytest.mark.parametrize(
    ("there", "device", "is_excluded"),
    [
        ("cpu", "cpu", False),
        ("cpu", "cuda", False),
        ("cuda", "cpu", False),
        ("cuda", "cuda", False),
        ("cpu", "cuda", True),
    ],
)
@pytest.mark.parametrize("of", SOURCES)
def test_what_is_taken_there_has_the_gradient_that_is_asked_for(of, there, device, is_excluded):
    """In plain torch "meta" stands for the other device."""
    if is_excluded:
        injectTo.exclude(__name__)
    for options in GRADIENTS:
        with torchTensorRef.disabled():
            _, expected = _taken(of, "cpu", "cpu" if there == device else "meta", options)
        made, found = _taken(of, there, device, options)
        assert found == expected, options
        if made.is_leaf and made.requires_grad:
            (made * 2).sum().backward()
            assert made.grad.tolist() == [2, 2, 2]


class Calls(TorchFunctionMode):
    """Notes what is called, and with what."""

    def __init__(self):
        """Begin with nothing."""
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Note it."""
        self.seen.append((function.__name__, len(args), kwargs or {}))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("take", [torch.as_tensor, torch.asarray])
@pytest.mark.parametrize("of", SOURCES)
def test_what_is_taken_there_is_one_call_to_a_mode(of, take):
    for there, device in (("cpu", "cpu"), ("cuda", "cuda"), ("cpu", "cuda")):
        source = SOURCES[of](there)
        with Calls() as calls:
            take(source, device=device)
        assert [name for name, *_ in calls.seen] == [take.__name__]
        if device == "cpu":
            assert calls.seen == [(take.__name__, 1, {"device": "cpu"})]


def test_where_the_default_device_is_there_an_array_is_still_shared():
    array = np.zeros(2, dtype=np.float32)
    shared, taken = under_default("cuda", lambda: (torch.from_numpy(array), torch.asarray(array)))
    array += 1
    assert (shared.tolist(), taken.tolist()) == ([1, 1], [0, 0])


def test_a_gradient_comes_back_from_there():
    x = torch.ones(3, requires_grad=True)
    (x.to("cuda", torch.float64) * 2).sum().backward()
    (x.cuda() * 3).sum().backward()
    assert x.grad.tolist() == [5, 5, 5]


def test_a_module_that_goes_there_keeps_its_parameters_and_its_bytes(manager):
    model = module()
    before = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    weight = model[0].weight.detach().clone()
    home_nbytes = sum(p.nbytes for p in before)
    assert model.to("cuda") is model
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    assert {kind_of(p) for p in model.parameters()} == {TensorRef}
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in before)
    model(torch.rand(4, 2, device="cuda")).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, weight)
    assert home_nbytes == sum(p.nbytes for p in model.parameters())


def test_a_batch_of_a_data_loader_goes_there():
    """Torch makes the labels by itself, out of Python numbers: plain tensors."""
    rows = [(torch.ones(2) * i, i) for i in range(4)]
    for x, y in torch.utils.data.DataLoader(rows, batch_size=2):
        assert kind_of(y) is torch.Tensor
        assert_ours(y.to("cuda", non_blocking=True), y)
        assert_ours(x.to("cuda"), x)


def test_page_locked_memory_is_the_runtimes_business():
    assert isinstance(torch.zeros(2, pin_memory=True), TensorRef)
    assert isinstance(torch.zeros(2, device="cuda", pin_memory=True), TensorRef)


def test_safetensors_loads_there(tmp_path):
    safetensors_torch = pytest.importorskip("safetensors.torch")
    safetensors_torch.save_file({"a": torch.arange(3.0)}, tmp_path / "file")
    loaded = safetensors_torch.load_file(tmp_path / "file", device="cuda")["a"]
    assert (loaded + torch.ones(3)).tolist() == [1, 2, 3]


def test_a_pipeline_goes_there():
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=4)
    unet = diffusers.UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8,),
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        norm_num_groups=4,
    )
    pipe = diffusers.DDPMPipeline(unet, scheduler)
    pipe.set_progress_bar_config(disable=True)

    def images(device):
        generator = torch.Generator(device).manual_seed(0)
        return pipe.to(device)(generator=generator, num_inference_steps=2, output_type="np").images

    on_host = images("cpu")
    assert (images("cuda") == on_host).all()
    assert isinstance(unet.conv_in.weight, TensorRef)


def test_a_checkpoint_that_was_written_on_cuda_is_read():
    location = torch.serialization._get_restore_location(None)
    storage = torch.ones(3).untyped_storage()
    assert location(storage, "cuda:0") is storage
    with torchTensorRef.disabled(), pytest.raises(RuntimeError, match="CUDA"):
        location(storage, "cuda:0")


def test_where_we_are_not_asked_torch_refuses_as_ever():
    x = torch.ones(2)
    with pytest.raises(RuntimeError, match="gpu"):
        x.to("gpu")
    with pytest.raises(RuntimeError, match="sim"):
        torch.device("sim")
    with torchTensorRef.disabled():
        for refused in (
            lambda: plain().to("cuda"),
            lambda: plain().cuda(),
            lambda: torch.zeros(2, device="cuda"),
            lambda: torch.Generator("cuda"),
            lambda: plain().new_zeros(2, device="cuda"),
            lambda: nn.Linear(2, 2).to("cuda"),
        ):
            with pytest.raises((RuntimeError, AssertionError)):
                refused()


def test_what_an_excluded_module_makes_there_stays_plain(monkeypatch):
    injectTo.exclude(__name__)
    assert kind_of(plain().to("cuda")) is torch.Tensor
    assert kind_of(plain().new_zeros(2, device="cuda")) is torch.Tensor
    assert kind_of(torch.zeros(2, device="cuda")) is torch.Tensor


def two_devices():
    spec = DeviceSpec(name="test", capacity_nbytes=1 << 20)
    return [SimDevice(spec, i, name=f"sim:{i}") for i in (0, 1)]


def test_to_gpu_names_one_of_those_in_use(manager):
    tensorsManager.device = two_devices()
    x = torch.ones(4)
    assert x.toGPU("sim:1").proxyInfo.device == "sim:1"
    x.toCPU()
    for name in (None, "sim", "sim:0", "cuda", torch.device("cuda:1")):
        assert x.toGPU(name).proxyInfo.device == "sim:0"
        x.toCPU()
    with pytest.raises(ConfigError, match=r"'sim:2' is not in use\. Did you mean 'sim:1'\?"):
        x.toGPU("sim:2")
    with pytest.raises(ConfigError, match="'simm' is not in use"):
        x.toGPU("simm")
    assert (x + 1).tolist() == [2, 2, 2, 2]


def copied_and_trained(where):
    first, second = nn.Linear(3, 3), nn.Linear(3, 3).to(where)
    with torch.no_grad():
        for number, p in enumerate([*first.parameters(), *second.parameters()]):
            p.copy_(torch.arange(p.numel()).view_as(p) / (number + 7))
    second(first(torch.ones(2, 3))).sum().backward()
    return [p.grad for p in [*first.parameters(), *second.parameters()]]


FROM_WHERE = {
    "to": lambda x, where: x.to(where),
    "large": lambda x, where: torch.ones(1 << 15).to(where)[:2],
    "other dtype": lambda x, where: x.to(where, torch.float64),
    "new_zeros": lambda x, where: x.new_zeros(2, device=where),
    "empty_like": lambda x, where: torch.zeros_like(x, device=where),
    "added": lambda x, where: x.to(where) + x,
    "attended": lambda x, where: nn.functional.scaled_dot_product_attention(
        x.view(1, 2, 1), x.to(where).view(1, 2, 1), x.view(1, 2, 1)
    ),
    "a gradient": lambda x, where: copied_and_trained(where),
    "a parameter": lambda x, where: nn.Parameter(x).to(where),
    "of a module": lambda x, where: nn.LayerNorm(2).to(where).weight,
    "as_tensor": lambda x, where: torch.as_tensor(x, device=where),
    "ones": lambda x, where: torch.ones(2, device=where),
}


@pytest.mark.parametrize("where", ["cpu:0", "cpu:1", torch.device("cpu", 0)])
@pytest.mark.parametrize("made", FROM_WHERE)
def test_the_host_has_no_index(made, where):
    """Its tensors say `cpu` whatever index was asked for, and so go together with all others."""
    found = FROM_WHERE[made](torch.ones(2), where)
    with torchTensorRef.disabled():
        wanted = FROM_WHERE[made](torch.ones(2), where)
    for one, other in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        assert one.device == other.device == torch.device("cpu")
        assert one.tolist() == other.tolist()
