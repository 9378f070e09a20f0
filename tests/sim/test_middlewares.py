"""Middlewares: they see each operator, place, replace, answer and veto; without them nothing is."""

import math
import re
import subprocess
import sys
import threading
import time
import warnings
import weakref
from contextlib import ExitStack

import pytest
import torch
from torch import nn

import torchTensorRef
from torchTensorRef import middlewares
from torchTensorRef.base.activation import watch
from torchTensorRef.base.errors import ConfigError
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.spec import DeviceSpec

from ..support import programs
from ..support.differential import same_values as same_bits
from ..support.programs import Scatter, linears, sweep


class Noting(middlewares.Middleware):
    """Writes down what it sees."""

    def __init__(self):
        self.seen = []

    def before(self, op):
        self.seen.append((op.name, op.module, op.operands))

    @property
    def names(self):
        return [name for name, _, _ in self.seen]


@pytest.fixture(autouse=True)
def none_left(manage):
    yield
    from torchTensorRef import tensorsManager

    assert list(tensorsManager.middlewares) == []
    assert not watch.on


def model_of(manager, seed=0):
    """Return a small model under management, and the same one plain."""
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Sequential(nn.Linear(64, 64)))
    torch.manual_seed(seed)
    managed = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Sequential(nn.Linear(64, 64)))
    return manager.adopt(managed), plain


def test_they_are_imported_by_their_public_name(tmp_path):
    """Also where nothing else was asked for before; torch is loaded by the first part."""
    program = (
        "import sys, torchTensorRef.middlewares\n"
        "assert 'torch' not in sys.modules\n"
        "from torchTensorRef.middlewares import Pin\n"
        "from torchTensorRef import middlewares, tensorsManager\n"
        "assert middlewares.Pin is Pin\n"
        "assert 'NanGuard' in dir(middlewares)\n"
        "assert not hasattr(middlewares, 'Pni')\n"
        "try: middlewares.Pni\n"
        "except AttributeError as error: assert \"Did you mean 'Pin'?\" in str(error)\n"
        "with tensorsManager.middlewares.scoped(Pin('layers.0')): pass\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          cwd=tmp_path, timeout=200, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_it_sees_overload_operands_and_module(manager):
    model, _ = model_of(manager)
    noting = Noting()
    with manager.middlewares.scoped(noting), torch.no_grad():
        model(torch.rand(2, 64))
    name, _module, _operands = next(row for row in noting.seen if row[1] == "2.0")
    assert name.startswith("aten.")
    by_name = {o.name: o for _, _, operands in noting.seen for o in operands}
    weight = by_name["2.0.weight"]
    assert (weight.shape, weight.dtype, weight.nbytes) == ((64, 64), torch.float32, 64 * 64 * 4)
    assert not weight.is_written
    assert {module for _, module, _ in noting.seen} == {"0", "1", "2.0"}


def test_what_an_operator_writes_is_said(manager):
    x = manager.adopt(torch.rand(8))
    noting = Noting()
    with manager.middlewares.scoped(noting):
        x.add_(x)
    assert noting.names == ["aten.add_.Tensor"]
    assert [operand.is_written for operand in noting.seen[0][2]] == [True, True]


@pytest.mark.parametrize("strategy", ["lru", "genoa", "flow"])
def test_a_module_placed_on_the_host_runs_there_with_the_same_bits(manage, strategy):
    manager = manage(strategy)
    model, plain = model_of(manager)
    x = torch.rand(2, 64)
    with torch.no_grad():
        expected = plain(x)
        first = model[0](manager.adopt(x))
        assert first.proxyInfo.device == ("sim:test" if strategy != "genoa" else "cpu")
        with manager.middlewares.scoped(middlewares.Place("2", "cpu")):
            result = model(manager.adopt(x))
    assert result.proxyInfo.device == "cpu"
    assert model[2][0].weight.proxyInfo.device == "cpu"
    assert same_bits(result, expected)
    assert manager.stats()["host_op_count"] > 0


def test_a_placed_module_has_its_gradients_there_too(manager):
    model, plain = model_of(manager)
    x = torch.rand(2, 64)
    plain(x).sum().backward()
    with manager.middlewares.scoped(middlewares.Place("2.0", "cpu")):
        model(manager.adopt(x)).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert same_bits(ours.grad, theirs.grad)


@pytest.mark.parametrize("where", ["sim:test", "sim:test1", "cpu"])
@pytest.mark.parametrize("strategy", ["venice", Scatter(1)], ids=["venice", "scatter"])
def test_a_module_is_placed_on_one_of_several_accelerators(manage, strategy, where):
    manager = manage(strategy, count=2)
    model, plain = model_of(manager)
    x = torch.rand(2, 64)
    plain(x).sum().backward()
    with manager.middlewares.scoped(middlewares.Place("2", where)):
        model(manager.adopt(x)).sum().backward()
        with torch.no_grad():
            placed = model[2](model[1](model[0](manager.adopt(x))))
    assert placed.proxyInfo.device == where
    with torch.no_grad():
        assert same_bits(placed, plain[2](plain[1](plain[0](x))))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert same_bits(ours.grad, theirs.grad)


def test_operators_are_placed_by_their_name(manager):
    x = manager.adopt(torch.rand(8, 8))
    with manager.middlewares.scoped(middlewares.Place("aten.mm", "cpu")):
        product, total = x @ x, x + x
    assert (product.proxyInfo.device, total.proxyInfo.device) == ("cpu", "sim:test")


def test_an_unknown_device_is_refused_with_those_in_use(manager):
    x = manager.adopt(torch.rand(8))
    with (
        manager.middlewares.scoped(middlewares.Place("aten", "cuda:7")),
        pytest.raises(ConfigError, match=r"is not in use. .*Known: cpu, sim:test") as caught,
    ):
        x + x
    assert any("Place.before, of aten.add.Tensor, which has not run" in note
               for note in caught.value.__notes__)  # fmt: skip


class Doubling(middlewares.Middleware):
    def before(self, op):
        if op.name == "aten.exp.default":
            op.args = (op.args[0] * 2,)  # an operator of its own: it passes no middleware

    def after(self, op, result):
        if op.name == "aten.sin.default":
            return result + 1
        return None


def test_arguments_and_results_are_replaced(manager):
    x = torch.rand(8)
    ref = manager.adopt(x)
    with manager.middlewares.scoped(Doubling()):
        assert same_bits(torch.exp(ref), torch.exp(x * 2))
        assert same_bits(torch.sin(ref), torch.sin(x) + 1)


def test_it_answers_itself(manager):
    class Answering(middlewares.Middleware):
        def before(self, op):
            op.answer(torch.full((8,), 3.0))

    x = manager.adopt(torch.rand(8))
    with manager.middlewares.scoped(Answering()):
        result = x + x
        assert isinstance(result, torchTensorRef.TensorRef)
        with pytest.raises(ConfigError, match="returns its own operands, or views"):
            x.add_(1)
        with pytest.raises(ConfigError, match="returns its own operands, or views"):
            x.view(2, 4)
    assert result.tolist() == [3.0] * 8


def test_what_is_written_is_not_exchanged(manager):
    class Exchanging(middlewares.Middleware):
        def before(self, op):
            op.args = (op.args[0].clone(), *op.args[1:])

    x = manager.adopt(torch.zeros(8))
    with (
        manager.middlewares.scoped(Exchanging()),
        pytest.raises(ConfigError, match="writes an argument that a middleware has exchanged"),
    ):
        x.add_(1)
    assert x.tolist() == [0.0] * 8


def test_a_veto_is_an_error_and_the_operator_has_not_run(manager):
    class Refusing(middlewares.Middleware):
        def before(self, op):
            if any(operand.is_written for operand in op.operands):
                raise PermissionError(f"{op.name} writes")

    x = manager.adopt(torch.zeros(8))
    with manager.middlewares.scoped(Refusing()):
        with pytest.raises(PermissionError, match=r"aten.add_.Tensor writes"):
            x.add_(1)
        assert (x + 1).tolist() == [1.0] * 8
    assert x.tolist() == [0.0] * 8


def test_a_type_error_of_the_program_is_not_taken_for_torchs_own(manager):
    """Torch's own make `a + b` say that operands of these classes cannot be added."""

    class Wrong(middlewares.Middleware):
        def before(self, op):
            return 3 + op.name

    def wrong(happening):
        raise TypeError("mine")

    x = manager.adopt(torch.rand(2, 2)).toGPU()
    for run in (lambda: x + 1, lambda: x @ x, lambda: x.mul(2)):
        refused = pytest.raises(RuntimeError, match="unsupported operand type")
        with manager.middlewares.scoped(Wrong()), refused as caught:
            run()
        assert isinstance(caught.value.__cause__, TypeError)
        assert "in the middleware Wrong.before" in caught.value.__notes__[0]
        manager.on("op", wrong)
        try:
            with pytest.raises(RuntimeError, match="mine") as caught:
                run()
        finally:
            manager.off("op", wrong)
        assert "in the callback" in caught.value.__notes__[0]
    with pytest.raises(TypeError):
        x + "text"


def test_an_error_after_a_write_lets_no_gradient_come_from_what_was_overwritten(manager):
    class Failing(middlewares.Middleware):
        def after(self, op, result):
            if op.name == "aten.add_.Tensor":
                raise ValueError("after all")

    leaf = manager.adopt(torch.rand(8)).requires_grad_()
    x = leaf * 1
    squared = x * x  # saves x
    with (
        manager.middlewares.scoped(Failing()),
        pytest.raises(ValueError, match="after all"),
        torch.no_grad(),
    ):
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


def test_they_are_called_in_their_order_and_back(manager):
    calls = []

    class Named(middlewares.Middleware):
        def __init__(self, name):
            self.name = name

        def before(self, op):
            calls.append(f"before {self.name}")

        def after(self, op, result):
            calls.append(f"after {self.name}")

        def leave(self):
            calls.append(f"left {self.name}")

    x = manager.adopt(torch.rand(4))
    manager.middlewares = [Named("a")]
    with manager.middlewares.scoped(Named("b")):
        x + x
    manager.middlewares.clear()
    assert calls == ["before a", "before b", "after b", "after a", "left b", "left a"]


def test_a_scope_is_of_its_thread_or_of_all(manager):
    x = manager.adopt(torch.rand(4))
    mine, everybodys = Noting(), Noting()
    with manager.middlewares.scoped(mine), manager.middlewares.scoped(everybodys, all_threads=True):
        thread = threading.Thread(target=lambda: x + x)
        thread.start()
        thread.join()
    assert (len(mine.seen), len(everybodys.seen)) == (0, 1)


def test_a_scope_that_another_thread_ends_is_over(manager):
    """A web server's, or a generator's that is collected there."""
    model, _ = model_of(manager)
    noting = Noting()
    scope = manager.middlewares.scoped(middlewares.Pin("0"), noting)
    scope.__enter__()
    model(torch.rand(2, 64))
    thread = threading.Thread(target=scope.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    seen = len(noting.seen)
    model(torch.rand(2, 64))
    assert len(noting.seen) == seen > 0
    assert not watch.on
    assert not model[0].weight._ttr_block.is_kept


@pytest.mark.parametrize("wrong", [3, object(), middlewares.NanGuard])
def test_what_is_none_is_refused(manager, wrong):
    with pytest.raises(ConfigError, match="A middleware is an object with a method before"):
        manager.middlewares.append(wrong)


def test_one_of_whose_methods_one_is_none_is_refused(manager):
    class Half:
        before = None

        def after(self, op, result):
            return result

    with pytest.raises(ConfigError, match="has before = None, which cannot be called"):
        manager.middlewares.append(Half())
    assert list(manager.middlewares) == []


def test_methods_that_take_other_arguments_are_refused(manager):
    class Short(middlewares.Middleware):
        def before(self):
            pass

    class Long(middlewares.Middleware):
        def after(self, op, result, more):
            pass

    class Right:
        def before(self, *operator, more=None):
            pass

    with pytest.raises(ConfigError, match=r"Short\.before is called with \(op\), and takes others"):
        manager.middlewares.append(Short())
    refused = pytest.raises(ConfigError, match=r"Long\.after is called with \(op, result\)")
    with refused, manager.middlewares.scoped(Long()):
        pass
    with manager.middlewares.scoped(Right()):
        assert len(manager.middlewares.here()) == 1


def test_one_without_a_method_of_its_own_is_refused_with_what_it_has(manager):
    class Misspelt(middlewares.Middleware):
        def befor(self, op):
            pass

    with pytest.raises(ConfigError, match=r"would do nothing\. It has 'befor'\."):
        manager.middlewares.append(Misspelt())
    with pytest.raises(ConfigError, match=r"would do nothing\.$"):
        manager.middlewares.append(middlewares.Middleware())
    named = Misspelt()
    named.after = lambda op, result: None
    with manager.middlewares.scoped(named):
        assert list(manager.middlewares.here()) == [named]


class Answers(middlewares.Middleware):
    def before(self, op):
        op.answer(3)


class Returns(middlewares.Middleware):
    def after(self, op, result):
        return "x"


class Exchanges(middlewares.Middleware):
    def before(self, op):
        op.args = 3


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Answers, r"answer\(\) was given 3 for aten.add.Tensor, which returns a tensor"),
        (Returns, r"after\(\) has returned 'x' for aten.add.Tensor, which returns a tensor"),
        (Exchanges, r"has made op.args 3 and .* of aten.add.Tensor; they are a tuple"),
    ],
)
def test_what_cannot_be_an_argument_or_a_result_is_refused(manager, kind, words):
    x = manager.adopt(torch.rand(2))
    with manager.middlewares.scoped(kind()), pytest.raises(ConfigError, match=words):
        x + 1


def test_what_is_not_on_the_list_is_not_removed(manager):
    manager.middlewares.append(there := middlewares.NanGuard())
    with pytest.raises(ConfigError, match=r"Pin\('x'\) is not among the middlewares: \[<.*Nan"):
        manager.middlewares.remove(middlewares.Pin("x"))
    manager.middlewares.remove(there)


@pytest.mark.parametrize("device", ["gpu", None, 3])
def test_a_device_that_nobody_knows_is_refused_at_once(device):
    with pytest.raises(ConfigError, match=f"no device '{device}', where 'lm_head' is to be placed"):
        middlewares.Place("lm_head", device)


# -- Pin ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["lru", "genoa", "flow"])
def test_pinned_layers_stay_under_pressure(manage, strategy):
    manager = manage(strategy, nbytes=5 * 64 * 64 * 4)
    model = linears(manager)
    x = manager.adopt(torch.rand(2, 64))
    expected = sweep(model, x, 6).tolist()
    fetched = []
    manager.on("fetch", note := lambda told: fetched.append(told.name))
    with manager.middlewares.scoped(middlewares.Pin("layers.0-1")):
        assert sweep(model, x, 6).tolist() == expected
        assert model.layers[0].weight.proxyInfo.device == "sim:test"
        assert model.layers[1].weight.proxyInfo.device == "sim:test"
    manager.off("fetch", note)
    pinned = [name for name in fetched if name in ("layers.0.weight", "layers.1.weight")]
    assert len(pinned) <= 2  # once each at most, however often they were used
    assert len([name for name in fetched if name == "layers.5.weight"]) >= 3
    assert not any(layer.weight._ttr_block.is_kept for layer in model.layers)


def test_a_pin_that_the_budget_cannot_hold_says_so(manage):
    manager = manage("lru", nbytes=3 * 64 * 64 * 4)
    model = linears(manager)
    x = manager.adopt(torch.rand(2, 64))
    for passes in (2, 1):  # in one pass nothing that went is asked for again: it is said at the end
        expected = sweep(model, x, passes).tolist()
        with (
            pytest.warns(RuntimeWarning, match=r"the budget of sim:test cannot hold .* KiB of it"),
            manager.middlewares.scoped(middlewares.Pin("layers.0-6")),
        ):
            assert sweep(model, x, passes).tolist() == expected
    assert manager.stats()["host_fallback_count"] == 0


def test_a_pin_gives_way_to_a_budget_that_is_lowered(manage):
    manager = manage("lru", nbytes=8 * 64 * 64 * 4)
    model = linears(manager)
    x = manager.adopt(torch.rand(2, 64))

    def lower_it():
        with manager.middlewares.scoped(middlewares.Pin("layers.0-6")):
            expected = sweep(model, x, 2).tolist()
            began_s = time.monotonic()
            manager.budget = 3 * 64 * 64 * 4
            assert time.monotonic() - began_s < 5  # nobody else holds it
            assert manager.stats()["resident_nbytes"] <= 3 * 64 * 64 * 4
            manager.check()
            assert sweep(model, x, 2).tolist() == expected

    with pytest.warns(RuntimeWarning, match=r"the budget of sim:test cannot hold .* KiB of it"):
        lower_it()


def test_a_place_whose_device_has_left_says_so_and_waits(manager):
    x = manager.adopt(torch.ones(4))
    spec = DeviceSpec("place", 1 << 20)
    one, other = (SimDevice(spec, k, name=f"sim:place{k}") for k in range(2))
    manager.device = [one, other]
    with manager.middlewares.scoped(middlewares.Place("aten.add", "sim:place1")):
        assert (x + 1).proxyInfo.device == "sim:place1"
        manager.device = one
        with pytest.warns(RuntimeWarning, match=r"does nothing: its device has left") as said:
            assert (x + 1).proxyInfo.device == (x + 2).proxyInfo.device == "sim:place0"
        assert len(said) == 1
        manager.device = [one, other]
        assert (x + 1).proxyInfo.device == "sim:place1"


def test_a_pin_that_leaves_takes_nothing_from_another(manage):
    manager = manage("lru", nbytes=3 * 64 * 64 * 4)
    model = linears(manager)
    x = manager.adopt(torch.rand(2, 64))
    first = model.layers[0].weight._ttr_block
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "torchTensorRef: ")
        with manager.middlewares.scoped(middlewares.Pin("layers.0")):
            sweep(model, x, 1)
            with manager.middlewares.scoped(middlewares.Pin("layers.0-0")):
                sweep(model, x, 1)
            assert first.is_kept
            sweep(model, x, 2)
            assert first.readable_on(manager.residency.books.main) is not None
        assert not first.is_kept


def test_a_pin_that_has_left_keeps_nothing_any_more(manager):
    """Another thread may be just going through the list as it was."""
    model = linears(manager)
    pin = middlewares.Pin("layers.0")

    class Removes(middlewares.Middleware):
        def before(self, op):
            if pin in manager.middlewares:
                manager.middlewares.remove(pin)

    with manager.middlewares.scoped():
        manager.middlewares.extend([Removes(), pin])
        sweep(model, manager.adopt(torch.rand(2, 64)), 1)
        del manager.middlewares[:]
    assert not any(p._ttr_block.is_kept for p in model.parameters())


class Handing(middlewares.Middleware):
    """Looks, and hands on what it was given."""

    def after(self, op, result):
        return result


class Cloning(middlewares.Middleware):
    def after(self, op, result):
        return result.clone()


def test_the_result_that_it_was_given_is_no_other_one(manager):
    x = manager.adopt(torch.arange(6.0))
    with manager.middlewares.scoped(Handing()):
        parts = x.detach().view(2, 3).unbind()
        parts[0].add_(1)
        torch._foreach_mul_([parts[1]], 2)
    assert x.tolist() == [1, 2, 3, 6, 8, 10]
    with (
        manager.middlewares.scoped(Cloning()),
        pytest.raises(ConfigError, match="has returned another result for aten"),
    ):
        x.view(2, 3)


# -- patterns that match nothing ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "meant"),
    [
        (middlewares.Pin("layer.0-3"), "'layers.0'"),
        (middlewares.Place("lyers.1", "cpu"), "'layers.0'"),
        (middlewares.Place("aten.adm", "cpu"), "'aten.addm"),
    ],
)
def test_a_pattern_that_matches_nothing_says_so_once(manager, one, meant):
    model = linears(manager)
    x = manager.adopt(torch.rand(2, 64))
    text = re.escape(f"{one!r} matches nothing that is there by now") + f".* Did you mean {meant}"

    def use_it_twice():
        for _ in range(2):
            with manager.middlewares.scoped(one):
                sweep(model, x, 2)

    with pytest.warns(RuntimeWarning, match=text) as caught:
        use_it_twice()
    assert len(caught) == 1
    assert len(str(caught[0].message)) < 300
    assert caught[0].filename == programs.__file__


@pytest.mark.parametrize(
    "one",
    [
        middlewares.Pin("layers.5"),
        middlewares.Place("**.weight", "cpu"),
        middlewares.Place("aten.embedding", "cpu"),  # which this model does not use
        middlewares.Place("aten.add*.Tensor", "cpu"),
    ],
)
def test_a_pattern_of_what_is_there_says_nothing(manager, one):
    model = linears(manager)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with manager.middlewares.scoped(one):
            model.layers[0](manager.adopt(torch.rand(2, 64)))


def test_without_a_module_at_work_it_is_said_at_the_end(manager):
    x = manager.adopt(torch.rand(2))
    pin = middlewares.Pin("nowhere.at.all")
    manager.middlewares.append(pin)
    x + 1
    with pytest.warns(RuntimeWarning, match=r"Pin\('nowhere.at.all'\) matches nothing") as caught:
        manager.middlewares.remove(pin)
    with (
        pytest.warns(RuntimeWarning) as in_a_scope,
        manager.middlewares.scoped(middlewares.Pin("no")),
    ):
        x + 1
    assert {one.filename for one in (*caught, *in_a_scope)} == {__file__}


class KeepsItsLocals(nn.Module):
    def forward(self, x, scale=2.0):
        kept = locals()
        return x * kept["scale"] + kept["scale"], kept


class ExecutesText(nn.Module):
    def forward(self, x):
        if sys.version_info >= (3, 13):
            return 3
        exec("made = 3")  # there until the function ends
        x + 1
        return locals()["made"]


def test_what_looks_at_the_module_at_work_leaves_the_program_its_locals(manager, tmp_path):
    """`locals()` was emptied: before Python 3.13 a frame has one dictionary for all who ask."""
    x = manager.adopt(torch.ones(3))
    pin = middlewares.Pin("nothing")
    for scope in (manager.trace(str(tmp_path / "run.json")), manager.middlewares.scoped(pin)):
        with warnings.catch_warnings(), ExitStack() as stack:
            warnings.simplefilter("ignore")  # the pin matches nothing
            stack.enter_context(scope)
            y, kept = KeepsItsLocals()(x)
            assert y.tolist() == [4, 4, 4]
            assert kept["scale"] == 2.0
            assert kept["x"] is x
            assert ExecutesText()(x) == 3


class LetsGo(nn.Module):
    def forward(self, x):
        y = x + 1
        gone = weakref.ref(y)
        y = y * 2
        del x
        return y if gone() is None else None


def test_what_looks_at_the_module_at_work_holds_nothing_of_it(manager, tmp_path):
    with manager.trace(str(tmp_path / "run.json")):
        assert LetsGo()(manager.adopt(torch.ones(3))) is not None
        y, kept = KeepsItsLocals()(manager.adopt(torch.ones(3)))
        gone = weakref.ref(kept.pop("x"))
        kept["x"], kept["self"] = gone(), None
        del y, kept
        assert gone() is None  # as what held itself would not be


# -- NanGuard -------------------------------------------------------------------------------------


class Divides(nn.Module):
    def forward(self, x):
        return x / x


def test_the_guard_names_the_first_operator_that_makes_a_nan(manager):
    model = nn.Sequential(nn.Identity(), Divides(), nn.ReLU())
    x = manager.adopt(torch.tensor([1.0, 0.0]))
    with (
        manager.middlewares.scoped(middlewares.NanGuard()),
        pytest.raises(middlewares.NanError, match=r"aten.div.Tensor in 1 has made 1 NaN"),
    ):
        model(x)


def test_the_guard_lets_a_given_nan_pass(manager):
    x = manager.adopt(torch.tensor([float("nan"), 0.0]))
    with manager.middlewares.scoped(middlewares.NanGuard()):
        assert torch.isnan((x + 1)[0])
        with pytest.raises(middlewares.NanError, match=r"aten.log.default"):
            torch.log(x[1:] - 1)
    with (
        manager.middlewares.scoped(middlewares.NanGuard(infinite=True)),
        pytest.raises(middlewares.NanError, match=r"aten.reciprocal"),
    ):
        torch.reciprocal(x[1:])


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x.index_put_((torch.tensor([1]),), torch.tensor(1.0)),
        lambda x: x.index_fill_(0, torch.tensor([1]), 1.0),
        lambda x: torch._foreach_add_([x], 1.0),
        lambda x: torch._foreach_mul_([torch.ones(2), x], 2.0),
    ],
)
def test_the_guard_lets_a_nan_pass_that_was_in_what_is_written(manager, write):
    x = manager.adopt(torch.tensor([float("nan"), 0.0]))
    with manager.middlewares.scoped(middlewares.NanGuard()):
        write(x)
        assert torch.isnan(x[0])


@pytest.mark.parametrize(
    "write",
    [
        lambda x, y: torch.log(y, out=x),
        lambda x, y: x.fill_(float("nan")),
        lambda x, y: y.log_(),
        lambda x, y: y.div_(y + 1),
    ],
)
def test_the_guard_names_what_writes_a_nan(manager, write):
    """Also over one that was there before."""
    x = manager.adopt(torch.tensor([float("nan"), 0.0]))
    y = manager.adopt(torch.tensor([-1.0, -1.0]))
    with (
        manager.middlewares.scoped(middlewares.NanGuard(infinite=True)),
        pytest.raises(middlewares.NanError, match=r"has made [12] NaN"),
    ):
        write(x, y)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_guard_leaves_out_what_it_cannot_look_at(manager):
    """Torch has no kernels there, and the guard raised what torch raises."""
    x = manager.adopt(torch.ones(1, 2, 4, 4))
    for infinite in (False, True):
        with manager.middlewares.scoped(middlewares.NanGuard(infinite=infinite)):
            assert x.to_mkldnn().layout == torch._mkldnn
            assert torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).is_nested
            if hasattr(torch, "float4_e2m1fn_x2"):
                torch.ones(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).clone()
            x.to(torch.float8_e4m3fn)
    with (
        manager.middlewares.scoped(middlewares.NanGuard(infinite=True)),
        pytest.raises(middlewares.NanError, match="has made 32 NaN"),
    ):
        (x * 1e30).to(torch.float8_e5m2)


def test_the_guard_looks_at_nothing_that_is_made_up(manager):
    """Its own question was answered with made up values, and seen as an operator of the program."""
    model, x = linears(manager), manager.adopt(torch.ones(2, 64))
    expected = len(torchTensorRef.forecast(model.layers[0], x).record.ops)
    with manager.middlewares.scoped(middlewares.NanGuard()):
        for values in (*range(10), "compute", "zeros", None):
            seen = torchTensorRef.forecast(model.layers[0], x, values=values)
            assert len(seen.record.ops) == expected


def test_the_shipped_ones_are_short():
    from pathlib import Path

    from torchTensorRef.interception.onlookers import nan_guard, pin, place

    for module in (nan_guard, pin, place):
        text = Path(module.__file__).read_text()
        body = text[text.index("\nclass ") :]
        assert len(body.splitlines()) <= 60, module.__name__


def test_it_looks_at_what_has_values(manager):
    """Sparse results too; promises, and the metadata that transforms compute, have none."""
    places = torch.tensor([[0, 1], [1, 2]])
    bad, good = (
        torch.sparse_coo_tensor(places, torch.tensor([x, 1.0]), (3, 3), check_invariants=False)
        for x in (math.nan, 0.0)
    )
    x = manager.adopt(torch.ones(3))
    plain = torch.tensor([1.0, math.nan, 1.0])
    with manager.middlewares.scoped(middlewares.NanGuard()):
        for matrix in (manager.adopt(bad), manager.adopt(bad.to_sparse_csr())):
            assert (matrix * 2)._nnz() == 2
        assert (x + plain).isnan().sum().item() == 1  # it was there, and is no TensorRef's
        assert torch.func.jacrev(lambda a: (a * a).sum())(x).tolist() == [2, 2, 2]
        assert torch.func.hessian(lambda a: (a**3).sum())(x).diag().tolist() == [6, 6, 6]
        with torchTensorRef.promising():
            y = (x * 2).view(3, 1) + 1
        assert y.fulfil().tolist() == [[3], [3], [3]]
        for matrix in (manager.adopt(good), manager.adopt(good.to_sparse_csr())):
            with pytest.raises(middlewares.NanError, match="has made 1 NaN"):
                matrix * math.inf
