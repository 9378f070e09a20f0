"""Libraries that ask a class for its module or its name, and choose by it what they do."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchTensorRef import TensorRef
from torchTensorRef.memory import core

from ..support.injection import assert_same_injected, injected
from ..support.processes import python
from ..support.sweeps import only_in_sweeps

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def same(manage) -> Callable[..., None]:
    manager = manage("lru", 8 << 10)
    return lambda program, **reasons: assert_same_injected(program, manager, **reasons)


def test_the_class_is_called_as_torchs_is(manage):
    manage("lru")
    with injected():
        x, p = torch.rand(2), nn.Linear(2, 2).weight
    assert isinstance(x, TensorRef)
    assert isinstance(p, TensorRef)
    for ref in (x, p) if core.library is None else (x,):
        assert str(type(ref)) == str(torch.Tensor)
        assert type(ref).__module__ == ref.__class__.__module__ == "torch"
        assert type(ref).__name__ == type(ref).__qualname__ == "Tensor"
    if core.library is not None:
        assert (type(x), type(p)) == (torch.Tensor, nn.Parameter)
    assert pickle.loads(pickle.dumps(type(x))) is torch.Tensor
    assert pickle.loads(pickle.dumps({type(x): 1})) == {torch.Tensor: 1}
    assert not hasattr(x, "__array_namespace__")


def test_opt_einsum(same):
    library = pytest.importorskip("opt_einsum")

    def program() -> Any:
        a, b, c = torch.rand(24, 32), torch.rand(32, 40), torch.rand(40, 16)
        a.requires_grad_()
        y = library.contract("ij,jk,kl->il", a, b, c)
        y.sum().backward()
        expression = library.contract_expression("ij,jk->ik", (24, 32), (32, 40))
        constant = library.contract_expression("ij,jk->ik", b, (40, 16), constants=[0])
        return [y.detach(), a.grad, expression(a, b).detach(), constant(c)]

    same(program)


def test_einops(same):
    library = pytest.importorskip("einops")
    layers = importlib.import_module("einops.layers.torch")

    def program() -> Any:
        x = torch.rand(4, 6, 8, 3, requires_grad=True)
        layer = nn.Sequential(
            layers.Rearrange("b h w c -> b c h w"),
            layers.Reduce("b c (h 2) (w 2) -> b c h w", "max"),
            layers.EinMix("b c h w -> b d h w", weight_shape="c d", c=3, d=5),
        )
        y = layer(x)
        y.sum().backward()
        packed, shapes = library.pack([x.detach(), y.detach()[:, :, :, :3].mT], "b * c")
        return [
            y.detach(),
            x.grad,
            library.rearrange(x.detach(), "b h (w two) c -> (b two) c h w", two=2),
            library.repeat(x.detach(), "b h w c -> b h w (c three)", three=3),
            library.reduce([x.detach(), x.detach() + 1], "n b h w c -> b h c", "mean"),
            library.einsum(x.detach(), y.detach(), "b h w c, b d x y -> b h d x"),
            packed,
            list(library.unpack(packed, shapes, "b * c")),
            library.parse_shape(x, "b h w c"),
        ]

    same(program)


def test_autoray(same):
    library = pytest.importorskip("autoray")

    def program() -> Any:
        x = torch.rand(32, 32)
        q, r = library.do("linalg.qr", x)
        return [
            library.infer_backend(x),
            library.infer_backend_multi(1.0, x),
            library.get_dtype_name(x),
            library.do("tensordot", x, x, axes=1),
            library.do("stack", (x, x)),
            library.do("random.normal", size=(2, 2), like=x).shape,
            q @ r,
            library.astype(x, "float64"),
            library.numpy.sum(library.lazy.array(x).compute()),
        ]

    same(program)


def test_array_api(same):
    library = pytest.importorskip("array_api_compat")

    def program() -> Any:
        x = torch.rand(32, 32)
        xp = library.array_namespace(x)
        return [
            xp.__name__,
            [library.is_torch_array(x), library.is_numpy_array(x), library.is_array_api_obj(x)],
            xp.matmul(x, x),
            xp.concat([x, xp.zeros((1, 32))]),
            xp.linalg.svd(x).S,
            xp.astype(x, xp.float64),
            str(library.device(x)),
            library.size(x),
        ]

    same(program)


def test_tensorly(same):
    library = pytest.importorskip("tensorly")

    def program() -> Any:
        library.set_backend("pytorch")
        try:
            x = torch.rand(6, 7, 8)
            core, factors = library.decomposition.tucker(x, rank=[3, 3, 3], init="svd")
            return [
                library.is_tensor(x),
                library.unfold(x, 1),
                library.tenalg.mode_dot(x, torch.rand(4, 7), 1),
                library.tucker_to_tensor((core, factors)),
            ]
        finally:
            library.set_backend("numpy")

    same(program)


SCIKIT_LEARN = """
    import sklearn, torch
    from sklearn.decomposition import PCA
    from sklearn.linear_model import Ridge
    from sklearn.preprocessing import StandardScaler

    torch.manual_seed(0)
    x, y = torch.rand(40, 6, dtype=torch.float64), torch.rand(40, dtype=torch.float64)
    with sklearn.config_context(array_api_dispatch=True):
        scaled = StandardScaler().fit_transform(x)
        parts = PCA(n_components=3, svd_solver="full").fit_transform(scaled)
        told = Ridge(solver="svd").fit(parts, y).predict(parts)
    print([isinstance(t, torch.Tensor) for t in (scaled, parts, told)])
    print(scaled.tolist(), parts.tolist(), told.tolist())
"""


@only_in_sweeps
def test_scikit_learn(script):
    pytest.importorskip("sklearn")
    path = script(SCIKIT_LEARN)
    environ = {"SCIPY_ARRAY_API": "1", "OMP_NUM_THREADS": "1"}
    plain = python(path, **environ)
    assert plain.stdout.startswith("[True, True, True]"), plain.stderr
    ours = python(
        "-m", "torchTensorRef", "run", "--device", "sim", "--budget", "4KiB", path, **environ
    )
    assert ours.stdout == plain.stdout, ours.stderr
