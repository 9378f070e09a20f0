"""Arrays, storages, pointers, pickles, files and copies: as with plain torch."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ..support.faces import QUIET, failure
from ..support.programs import Bring

pytestmark = QUIET

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
            *[(type(r).__name__, np.asarray(r).tolist()) for r in results],
            shared.tolist(),
            own.tolist(),
            x.__array__(np.float64).dtype.name,
            np.asarray(x, dtype=np.int32).tolist(),
            np.stack([x, x]).tolist(),
            [np.shape(x), np.ndim(x)],
        ]

    right(program)


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="it means another thing")
@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize("options", [{}, {"dtype": "f8"}, {"requires_grad": True}])
def test_no_array_is_given_where_no_copy_is_wanted(right, options):
    """Plain torch's tensors say nothing of copies, so that numpy refuses whatever is asked for."""

    def program(bring: Bring) -> Any:
        x = bring(torch.ones(2, requires_grad="requires_grad" in options)) * 2
        wanted = {"dtype": options.get("dtype"), "copy": False}
        return [failure(lambda: np.asarray(x, **wanted)), failure(lambda: x.__array__(**wanted)), x]

    right(program)


# -- memory -------------------------------------------------------------------------------------


def test_arrays_of_what_has_a_gradient_are_given_where_none_is_noted(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(3, requires_grad=True))
        with torch.no_grad():
            as_float64 = np.array(x, dtype="float64")
            x.numpy()[0] = 3
        with torch.inference_mode():
            seen = (x * 2).numpy().tolist()
        return [seen, x, str(as_float64.dtype), as_float64.tolist(), failure(x.numpy)]

    right(program, on_host_because="torch gives the memory at home")


def test_functions_of_python_for_each_element(right):
    def program(bring: Bring) -> Any:
        x, y, z = bring(torch.arange(6.0).view(2, 3)), bring(torch.ones(2, 3)), torch.zeros(3)
        x.t().apply_(lambda value: value + 1)
        x.map_(y, lambda a, b: a - 3 * b).map2_(y, z, lambda a, b, c: a + b + c)
        torch.Tensor.apply_(x, lambda value: value + 2)  # in Python this ended the process
        torch.Tensor.map_(x, y, max)
        torch.Tensor.map2_(x, y, z, lambda a, b, c: a * b - c)
        w = bring(torch.ones(2, requires_grad=True))
        refused = [failure(lambda: w.apply_(float)), failure(lambda: x[0, :2].map_(w, max))]
        return [x, x + 1, x._version, refused]

    right(program, on_host_because="Python computes")


def test_what_is_not_quantized_is_its_own_dequantization(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(3, requires_grad=True))
        y = x * 2
        again = y.dequantize()
        return [again, again is y, x.dequantize() is x, failure(again.sum().backward)]

    right(program)


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
            repr(x.__dlpack_device__()),
        ]

    right(program, on_host_because="it exchanges memory and computes nothing")


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

    right(
        program,
        plain_because="storages give plain tensors",
        on_host_because="it looks at the memory at home and computes nothing",
    )


def test_resizing(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.arange(4.0))
        x.resize_(2, 3)
        x.view(-1)[4:].fill_(9)
        return [x, x.untyped_storage().nbytes()]

    right(program)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_what_a_formula_makes_to_be_resized(right):
    """A single number that is given as `out=`, and grows."""

    def program(bring: Bring) -> Any:
        x, y = bring(torch.rand(3, 3)), bring(torch.rand(3, 3))
        return [torch.linalg.matrix_rank(x, y), torch.linalg.matrix_rank(x, atol=y, rtol=y)]

    right(program)


def test_share_memory(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(3))
        before = x.is_shared()
        same = x.share_memory_() is x
        x.add_(1)
        model = bring(nn.Linear(2, 2)).share_memory()
        return [before, same, x.is_shared(), x, [p.is_shared() for p in model.parameters()]]

    right(program, on_host_because="shared memory stays at home")


def _as_parameter(bring: Bring, x: Any) -> Any:
    module = nn.Module()
    module.weight = nn.Parameter(x)
    return bring(module).weight.detach()


def _of_a_part(bring: Bring, x: Any) -> Any:
    part = bring(x[2:])
    return part.as_strided((4,), (1,), 0)


@pytest.mark.parametrize(
    "take",
    [
        lambda bring, x: bring(x),
        _as_parameter,
        _of_a_part,
        lambda bring, x: bring(torch.zeros(4)).set_(x),
    ],
    ids=["tensor", "parameter", "part", "set_"],
)
def test_memory_that_another_process_maps(right, tmp_path, take):
    """What we were given alone: nobody here holds the storage, and somebody there writes it."""

    def program(bring: Bring) -> Any:
        path = tmp_path / "bytes"
        theirs = np.memmap(path, dtype="f4", mode="w+", shape=4)
        x = take(bring, torch.from_file(str(path), shared=True, size=4))
        x.fill_(1)
        x.add_(2)
        seen = [theirs.tolist()]
        theirs[:] = 7
        storage = x.untyped_storage()
        return [*seen, x + 1, x.is_shared(), storage.is_shared(), storage.filename == str(path)]

    right(program, on_host_because="the memory at home is another's, too")


def test_shared_memory_that_is_handed_on(right):
    """It is the same memory at the next process, too."""

    def program(bring: Bring) -> Any:
        theirs = torch.ones(4).share_memory_()
        ours = bring(theirs)
        ours.add_(1)
        there = pickle.loads(ForkingPickler.dumps(ours))
        there[1] = 7
        ours[2] = 8
        return [theirs, there, ours + 1]

    right(program, plain_because="what another process gets is plain, and what we got stays so")


# -- writing and reading ------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 100_000])
@pytest.mark.parametrize(
    "hand_out",
    [
        lambda x: x.numpy(),
        lambda x: x.data_ptr(),
        lambda x: x.__dlpack__(),
        lambda x: x.share_memory_(),
    ],
    ids=["numpy", "data_ptr", "dlpack", "share_memory_"],
)
def test_memory_that_was_handed_out_before_it_is_shared(right, hand_out, count):
    def program(bring: Bring) -> Any:
        x = bring(torch.full((count,), 3.0))
        y, kept = x.view(-1), hand_out(x)
        x.share_memory_()
        others = [bring(torch.full((count,), float(n))).numpy() for n in range(5)]
        array = y.numpy()
        seen = [array.min(), array.max(), (x + 1).max(), x.is_shared(), len(others)]
        array[0] = 7
        seen += [x[0].item(), y[0].item(), x.data_ptr() == array.ctypes.data]
        x.fill_(5)
        del kept
        return [*seen, array.max(), x.mean()]

    right(program, on_host_because="the memory at home is held")


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

    right(program, plain_because="what is unpickled without injection is plain")


def test_pickles_are_those_of_plain_tensors(right):
    def program(bring: Bring) -> Any:
        text = pickle.dumps(bring(torch.rand(3)))
        return [b"torchTensorRef" in text, b"TensorRef" in text]

    right(
        program,
        plain_because="what is unpickled without injection is plain",
        on_host_because="it reads and writes files",
    )


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

    right(
        program,
        plain_because="what is loaded without injection is plain",
        on_host_because="it reads and writes files",
    )


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

    right(program, plain_because="what is loaded without injection is plain")


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


@pytest.mark.parametrize("storage", ["untyped_storage", "storage"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_a_storage_and_its_tensors_share_their_memory_in_a_deep_copy(right, storage, order):
    def program(bring: Bring) -> Any:
        x = bring(torch.arange(12.0)) * 2
        all_ = [x, x[3:9], getattr(x, storage)()]
        made = dict(zip(order, copy.deepcopy([all_[i] for i in order]), strict=True))
        made[0].add_(1)
        made[1].mul_(2)
        made[2][0] = 7
        return [x, made[0], made[1], list(made[2]), made[1].storage_offset()]

    right(program)


def test_a_shallow_copy_counts_its_versions_by_itself(right):
    def program(bring: Bring) -> Any:
        x = bring(torch.rand(3, requires_grad=True))
        shallow = copy.copy(x)
        y = x * x
        with torch.no_grad():
            shallow.add_(1)
        y.sum().backward()  # torch does not hear that what it has saved was written
        return [x, x._version, shallow, shallow.requires_grad, shallow.is_leaf, x.grad]

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
