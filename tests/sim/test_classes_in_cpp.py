"""In C++ a TensorRef is of torch's own classes, or of the program's: what follows from that.

`test_cpp_path.py` runs this in a process where the path in C++ is on.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import get_testing_overrides, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from torchTensorRef import TensorRef
from torchTensorRef.memory import core

from ..support.faces import failure
from ..support.injection import assert_same_injected, injected

pytestmark = pytest.mark.skipif(core.library is None, reason=f"the path is {core.path_in_words()}")


class Scaled(nn.Parameter):
    """A library's own class of parameters."""

    scale = 2.0


class Named(torch.Tensor):
    """A library's own class of tensors, which its results are of, too."""


class Telling(torch.Tensor):
    """A class that writes down what it is told of."""

    told: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do as torch does, and write the function down."""
        is_torchs = func in get_testing_overrides()
        cls.told.append(f"{func.__name__} {is_torchs} {resolve_name(func)}")
        return super().__torch_function__(func, types, args, kwargs or {})


class Told(torch.Tensor):
    """A class that torch lets copy, since it says how one of its own is made (monai's)."""

    @staticmethod
    def __new__(cls, x: Any, said: str) -> Any:
        made = torch.as_tensor(x).as_subclass(cls)
        made.said = said
        return made

    def new_empty(self, size: Any, **_: Any) -> Any:  # type: ignore[override]
        """Return one of this class, as torch asks of those that it is to copy."""
        return Told(self.as_subclass(torch.Tensor).new_empty(size), self.said)


@pytest.fixture
def same(manage) -> Callable[..., None]:
    manager = manage("lru", 8 << 10)
    return lambda program, **reasons: assert_same_injected(program, manager, **reasons)


def test_classes_are_torchs(manage):
    manage("lru")
    with injected():
        x, p, b = torch.rand(2), nn.Linear(2, 2).weight, nn.Buffer(torch.ones(2))
    assert [type(t) for t in (x, p, b)] == [torch.Tensor, nn.Parameter, torch.Tensor]
    assert all(isinstance(t, TensorRef) for t in (x, p, b))
    assert not isinstance(torch.ones(2), TensorRef)
    assert not isinstance("text", TensorRef)


def test_a_parameter_is_made_of_what_is_not_there(manage):
    """The view that it is of the tensor goes to Python then, and comes back without an object."""
    manager = manage("genoa", 8 << 10)
    with injected():
        x = torch.rand(64)
        x.toGPU()
        p = type(nn.Linear(1, 1).weight)(x, requires_grad=False)
    assert type(p) is nn.Parameter
    assert p._ttr_block is x._ttr_block
    assert p.tolist() == x.tolist()
    manager.check()


def test_classes_of_a_library_are_trained(same):
    def program() -> Any:
        torch.manual_seed(0)
        layer = nn.Linear(16, 16)
        layer.weight = Scaled(layer.weight.detach() * 2)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (layer(torch.ones(4, 16)) * layer.weight.scale).sum().backward()
            optimizer.step()
        twin = copy.deepcopy(layer)
        read = pickle.loads(pickle.dumps(layer.weight))
        return [
            [type(w).__name__ for w in (layer.weight, twin.weight, read)],
            [layer.weight.detach() + 0, twin.weight.detach() + 0, read.tolist()],
        ]

    same(program)


def test_tensors_of_a_library_keep_gradients_and_class(same):
    def program() -> Any:
        x = torch.rand(4, 4, requires_grad=True)
        y = x.as_subclass(Named)
        out = (y * 2).sum()
        out.backward()
        made = torch.Tensor._make_subclass(Named, torch.rand(3), True)
        return [type(y).__name__, type(y * 2).__name__, x.grad, made.requires_grad, made + 1]

    same(program)
    with injected():
        assert isinstance(torch.rand(4).as_subclass(Named), TensorRef)


def test_tensors_of_a_library_are_copied_as_such(same):
    """With their class and attributes, also where the class is asked what is copied, or refuses."""

    def copies(x: Any) -> list[Any]:
        file = io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        made = [pickle.loads(pickle.dumps(x)), copy.copy(x), torch.load(file, weights_only=False)]
        return [*made, *([copy.deepcopy(x)] if isinstance(x, Told) else [])]

    def program() -> Any:
        torch.manual_seed(0)
        whole = torch.rand(4, 6)
        found: list[Any] = []
        for x in (whole.as_subclass(Named), Told(whole[1:3, ::2], "m"), Told(whole + 0, "g")):
            x.noted = 3
            x.requires_grad_(getattr(x, "said", None) == "g")
            for made in copies(x):
                values = made.detach().as_subclass(torch.Tensor)
                found += [type(made).__name__, sorted(vars(made).items()), values.tolist()]
                found += [made.stride(), made.requires_grad]
            shared = copy.copy(x).detach().as_subclass(torch.Tensor)
            shared.add_(1)
            found.append(x.detach().as_subclass(torch.Tensor).tolist())
        named = whole.as_subclass(Named)
        in_a_transform = torch.func.grad(lambda x: pickle.loads(pickle.dumps(named)).sum() * x)
        found.append(in_a_transform(torch.tensor(1.0)).as_subclass(torch.Tensor))
        return [found, failure(lambda: copy.deepcopy(named))]

    same(program)


METHODS: dict[str, Callable[[Any], Any]] = {
    "data": lambda x: x.data,
    "new": lambda x: x.new(2).zero_(),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "numpy": lambda x: x.numpy().tolist(),
    "array": lambda x: np.asarray(x).tolist(),
    "print": repr,
    "tolist": lambda x: x.tolist(),
    "to": lambda x: x.to(torch.float64),
    "shared": lambda x: x.share_memory_(),
    "pinned": lambda x: x.is_pinned(),
    "storage": lambda x: x.untyped_storage().nbytes(),
    "address": lambda x: x.data_ptr() > 0,
    "apply": lambda x: x.apply_(lambda number: number * 2),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)).tolist(),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_class_is_told_of_methods(same, method):
    """What torch asks `__torch_function__` first, by the same functions, and nothing of ours."""

    def program() -> Any:
        torch.manual_seed(0)
        x, named = torch.rand(2, 3).as_subclass(Telling), torch.rand(2, 3).as_subclass(Named)
        Telling.told = told = []
        made = method(x)
        Telling.told = []
        return [told, type(made).__name__, made, type(method(named)).__name__, named + 1]

    same(program)


def test_data_of_one_kind_is_given_to_the_other(manage):
    manager = manage("lru", 8 << 10)
    plain = torch.zeros(3)
    with injected():
        ref = torch.arange(3.0)
    plain.data = ref
    assert not isinstance(plain, TensorRef)
    assert plain.tolist() == [0, 1, 2]
    ref.mul_(2)
    assert plain.tolist() == [0, 2, 4]  # one memory, as in torch
    other = torch.ones(3)
    ref.data = other
    assert isinstance(ref, TensorRef)
    assert ref.tolist() == [1, 1, 1]
    manager.check()


def test_plain_tensors_have_none_of_our_attributes(manage):
    manage("lru")
    with injected():
        torch.rand(1)
    plain = torch.ones(2)
    ours = ("proxyInfo", "target", "toGPU", "toCPU", "exposed_plain", "_repr_html_", "_ttr_block")
    assert [name for name in ours if hasattr(plain, name)] == []
    assert failure(lambda: plain.toGPU())[1].startswith("'Tensor' object has no attribute 'toGPU'")
    plain.target = 3  # of the program
    assert plain.target == 3
    assert copy.copy(plain).tolist() == [1, 1]


def test_a_ref_is_no_fake_tensor(manage):
    """Torch 2.15 would know its own in C++ by a key that TensorRefs carry."""
    from torch._subclasses import fake_tensor

    manage("lru")
    with injected():
        x = torch.rand(2)
    assert not fake_tensor.is_fake(x)
    assert not getattr(torch._C, "_is_fake_tensor", lambda _: False)(x)
    with fake_tensor.FakeTensorMode() as mode:
        assert fake_tensor.is_fake(mode.from_tensor(torch.ones(2)))


class Holding(torch.Tensor):
    """A tensor of another library that holds one, and no bytes of its own."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [x.inner if type(x) is cls else x for x in args]
        return cls(op(*args, **(kwargs or {})))


def test_refs_inside_tensors_of_another_class(same):
    """Before torch 2.13 what torch calls there would not come to us by itself."""

    def program() -> Any:
        x = torch.rand(4, 4)
        alone, with_one = Holding(x) * 2, Holding(x) + x.relu()
        within = Holding(Holding(x)).exp().inner
        assert type(within) is Holding
        return [alone.inner, with_one.inner, within.inner]

    same(program)


def test_a_mode_reads_refs_of_its_own(same):
    """It is called for operators on plain tensors, and for those on TensorRefs."""

    def program() -> Any:
        seen, bias = [], torch.rand(4)

        class Reading(TorchDispatchMode):
            def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None):
                done = op(*args, **(kwargs or {}))
                seen.append((done + bias).sum())
                return done

        x, y = torch.rand(4), torch.ones(4)
        with Reading(), Reading():
            y.mul(2)
            x.conj().mul(y)
            torch.ones(4)
        return seen

    same(program)
