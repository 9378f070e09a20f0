"""Every setter and every option against what is right, wrong, on the border, and misspelt.

Each takes effect, or is refused with what was probably meant; nothing is taken and ignored.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchTensorRef
from torchTensorRef.base import device_names, public_module
from torchTensorRef.base.errors import ConfigError, StrategyError
from torchTensorRef.base.option_parsers import parse_budget
from torchTensorRef.base.options import OPTIONS, options, settings
from torchTensorRef.devices import registry
from torchTensorRef.devices.host import limits
from torchTensorRef.devices.sim.device import SimDevice
from torchTensorRef.devices.sim.spec import DeviceSpec
from torchTensorRef.memory import budget as budgets
from torchTensorRef.memory.manager import TensorsManager

from ..support.processes import python

GIB = 2**30


@pytest.fixture
def closed() -> TensorsManager:
    """A manager that has opened nothing."""
    return TensorsManager()


@pytest.fixture
def card(manage: Any) -> Iterator[Any]:
    """The manager on a simulated card of one GiB; its budget as it was, afterwards."""
    manager = manage(nbytes=GIB)
    yield manager
    manager.budget = GIB


# -- budgets --------------------------------------------------------------------------------------

#: What a user may write, and the bytes it stands for on a card of one GiB.
RIGHT_BUDGETS = {
    "512MiB": GIB // 2,
    " 512 mib ": GIB // 2,
    "25%": GIB // 4,
    "100%": GIB,
    "1048576": 2**20,
    "4096B": 4096,
    "0": 0,
    0: 0,
    2**20: 2**20,
    "1GiB": GIB,
}

#: What is refused, and what the message has to say.
WRONG_BUDGETS = [
    ("6", "'6' without a unit is 6 bytes. Did you mean '6GiB'? For bytes, write '6B'."),
    ("4096", "Did you mean '4096MiB'?"),
    ("1_000", "without a unit is 1000 bytes. Did you mean '1_000GiB'?"),
    ("0.5", "Did you mean '0.5GiB' or '50%'?"),
    ("1.5", "Did you mean '1.5GiB'?"),
    (0.5, "0.5 is no number of bytes. Did you mean '0.5GiB' or '50%'?"),
    (6.0, "Did you mean '6.0GiB'?"),
    (float("nan"), "is no number of bytes"),
    (float("inf"), "is no number of bytes"),
    ("6GBi", "(did you mean 'GB'?). Write"),
    ("6G", "'GiB' (1,073,741,824 bytes) or 'GB'"),
    ("-1", "is not a size"),
    (-1, "it is negative"),
    (True, "type bool"),
    ("", "is not a size"),
    ("all", "is not a size"),
    ("0%", "above 0% and up to 100%"),
    ("101%", "above 0% and up to 100%"),
    ("1GiB,2GiB", "'1GiB,2GiB' has 2 amounts; devices: 1 (sim:"),
    ("1GiB,2GiB", "Or say which device has which: 'cuda:0=6GiB,cuda:1=25%'"),
    ("1GiB,", "'1GiB,' has a comma too many"),
    ("atuo", "'atuo' is no budget. Did you mean 'auto'?"),
    ({"sim": "atuo"}, "'atuo' is no budget. Did you mean 'auto'?"),
    ([GIB], "type list"),
    ({"gpu": "1GiB"}, "'gpu', which the budget names. Did you mean 'cuda'?"),
    ({"cuad:0": "1GiB"}, "Did you mean 'cuda'?"),
    ({"disk": "1GiB"}, "There is no device 'disk'"),
    ({"sim:card": "6"}, "Did you mean '6GiB'?"),
    ({"cpu": "6GBi"}, "is not a size"),
]


@pytest.mark.parametrize(("setting", "nbytes"), RIGHT_BUDGETS.items())
def test_right_budgets(card: Any, closed: Any, setting: Any, nbytes: int) -> None:
    card.budget = setting
    assert card.budget == nbytes
    closed.budget = setting  # taken on trust: the devices are not open yet
    assert closed._budget_setting == (setting.strip() if isinstance(setting, str) else setting)


@pytest.mark.parametrize(("setting", "words"), WRONG_BUDGETS)
def test_wrong_budgets(card: Any, closed: Any, setting: Any, words: str) -> None:
    for manager, before in ((card, GIB), (closed, None)):
        with pytest.raises(ConfigError, match=re.escape(words)) as caught:
            manager.budget = setting
        assert "\n" not in str(caught.value)
        held = card.budget if manager is card else closed._budget_setting
        assert held == before
    if isinstance(setting, str):  # as the environment and the command line have it
        with pytest.raises(ConfigError):
            OPTIONS["budget"].parse(setting)


@pytest.mark.parametrize("free", ["auto", " Auto ", {"sim:test": "auto"}, None])
def test_what_is_free_as_a_budget(card: Any, closed: Any, free: Any) -> None:
    for given in (free, "1MiB", free):
        card.budget = given
    assert card.budget == int(GIB * (1 - budgets.HEADROOM_SHARE))
    closed.budget = free
    device = card.residency.books.accelerators[0]
    assert budgets.setting_for(closed._budget_setting, device) is None


def test_auto_is_said_over_what_the_environment_says(card: Any) -> None:
    settings.budget = "1MiB"
    try:
        card.budget = "auto"
        most, card.budget = card.budget, None
        assert (most > 2**20, card.budget) == (True, 2**20)
    finally:
        settings.budget = None


def test_amounts_without_names_are_in_the_order_of_the_devices(closed: Any) -> None:
    closed.device = "sim:1,sim:rtx3060"
    closed.budget = "8MiB,auto"
    assert closed._budget_setting == {"sim:1": "8MiB", "sim:rtx3060:0": "auto"}


@pytest.mark.parametrize("name", ["sim:test", "SIM:TEST", "sim"])
def test_a_budget_by_name(card: Any, name: str) -> None:
    card.budget = {name: "100MiB"}
    assert card.budget == 100 * 2**20


def test_the_first_of_a_kind_may_go_without_its_number() -> None:
    device = SimDevice(DeviceSpec("x", capacity_nbytes=GIB), name="sim:rtx3060:0")
    for name in ("sim:rtx3060:0", "sim:rtx3060", "sim"):
        assert budgets.resolve_budget({name: "1MiB"}, device).limit_nbytes == 2**20
    by_both = {"sim": "1MiB", "sim:rtx3060": "2MiB"}
    assert budgets.resolve_budget(by_both, device).limit_nbytes == 2**21
    assert budgets._canonical("hip:1") == "cuda:1"


@pytest.mark.parametrize("name", ["cuda:0", "sim:1", "sim:tset"])
def test_a_budget_for_a_device_that_is_not_in_use(card: Any, closed: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"names '{name}', which is not in use.*sim:test"):
        card.budget = {name: "1MiB"}
    assert card.budget == GIB
    closed.budget = {name: "1MiB"}  # that device may be chosen next
    said = budgets.doubts_of(closed._budget_setting, card.residency.books.accelerators)
    assert said == [
        f"The budget of {name} has no effect: in use is sim:test.",
        "sim:test has no budget, and may hold 921.60 MiB: set tensorsManager.budget.",
    ]


def test_a_budget_of_a_device_that_is_left_is_said_to_hold_no_longer(card: Any) -> None:
    card.budget = {"sim:test": "1MiB"}
    other = SimDevice(DeviceSpec("x", capacity_nbytes=GIB), name="sim:other")
    with pytest.warns(RuntimeWarning) as caught:
        card.device = other
    assert [(str(warning.message), warning.filename) for warning in caught] == [
        ("The budget of sim:test has no effect: in use is sim:other.", __file__),
        ("sim:other has no budget, and may hold 921.60 MiB: set tensorsManager.budget.", __file__),
    ]
    card.budget = "1GiB"


DOUBTS = [
    ({"sim:test": "1MiB", "cpu": "24GiB"}, "The budget of cpu has no effect"),
    (6, "6 B is next to nothing of sim:test's 1.00 GiB. Did you mean '6GiB'?"),
    ("6B", "6 B is next to nothing of sim:test's 1.00 GiB."),
    ("6GiB", "cut to the 1.00 GiB that it has"),
]


@pytest.mark.parametrize(("setting", "words"), DOUBTS)
def test_budgets_of_little_effect(card: Any, setting: Any, words: str) -> None:
    with pytest.warns(RuntimeWarning, match=re.escape(words)) as caught:
        card.budget = setting
    assert [warning.filename for warning in caught] == [__file__]


def test_a_card_larger_than_the_host(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "ram_limit_nbytes", lambda: GIB // 2)
    with pytest.warns(RuntimeWarning, match="memory of this host, which has 512.00 MiB"):
        card.budget = None
    assert limits.ram_limit_nbytes() > 0
    card.budget = "256MiB"


def test_a_budget_without_an_accelerator() -> None:
    said = "The budget has no effect: no accelerator is in use."
    assert budgets.doubts_of("1GiB", []) == [said]
    assert budgets.doubts_of(None, []) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cuda:0=6GiB,gpu=1GiB", "Did you mean 'cuda'?"),
        ("sim=6", "Did you mean '6GiB'?"),
        ("sim=6GiB,cuda", "Write it as 'cuda:0=6GiB,cuda:1=25%'"),
        ("=6GiB", "names no device and amount"),
        ("sim=6GiB,cuda=1GiB,sim=8GiB", "names sim twice. Name each device once."),
        ("6GiB,8GiB", "ay which device has which"),
    ],
)
def test_wrong_budgets_by_device_in_text(card: Any, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_budget(text)
    with pytest.raises(ConfigError, match=re.escape(words)):
        card.budget = text
    assert card.budget == GIB


def test_a_budget_by_device_in_text(card: Any, closed: Any) -> None:
    card.budget = "sim:test=50%"
    assert card.budget == GIB // 2
    closed.budget = "sim:0=1MiB, sim:1=50%"
    assert closed._budget_setting == {"sim:0": "1MiB", "sim:1": "50%"}


# -- devices, strategies ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("gpu", "cuda"),
        ("GPU:1", "cuda:1"),
        ("nvidia", "cuda"),
        ("rocm", "hip"),
        ("metal", "mps"),
        ("cdua", "cuda"),
        ("smi", "sim"),
        ("sim:rtx306", "rtx3060"),
        (3, None),
        ("", None),
        ("disk", None),
    ],
)
def test_wrong_devices(card: Any, name: Any, nearest: str | None) -> None:
    with pytest.raises(ConfigError, match="There is no") as caught:
        card.device = name
    assert nearest is None or caught.value.nearest == nearest
    assert str(caught.value).count("cpu") <= 1
    assert card.device == "sim:test"
    if isinstance(name, str) and name and ":" not in name:
        with pytest.raises(ConfigError, match="TTR_DEVICE="):
            OPTIONS["device"].parse(name)


@pytest.mark.parametrize("none", [[], ()])
def test_no_device_at_all_is_said_by_name(card: Any, none: Any) -> None:
    with pytest.raises(ConfigError, match="Write 'cpu' to use no accelerator"):
        card.device = none
    assert card.device == "sim:test"


def test_a_budget_that_names_a_device_twice(closed: TensorsManager) -> None:
    with pytest.raises(ConfigError, match="names one device twice: 'sim' and 'SIM'"):
        closed.budget = {"sim": "1GiB", "SIM": "2GiB"}


@pytest.mark.parametrize("twice", ["sim:1,sim:1", ["sim:1", "sim:2", "SIM:1"]])
def test_a_device_that_is_named_twice(card: Any, twice: Any) -> None:
    with pytest.raises(ConfigError, match="sim:1 is named twice among the devices"):
        card.device = twice
    assert card.device == "sim:test"


@pytest.mark.parametrize(
    ("text", "words"),
    [("sim:1,", "a comma too many"), ("sim:1;sim:2", "Several devices are separated by commas")],
)
def test_commas_between_devices(card: Any, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        card.device = text
    assert card.device == "sim:test"


def test_the_kinds_of_devices_are_those_that_can_be_opened() -> None:
    assert set(device_names.DEVICE_KINDS) == {"cpu", "sim", *registry.REAL_KINDS}
    assert set(device_names.MEANT_BY_WORD.values()) <= set(device_names.DEVICE_KINDS)


@pytest.mark.parametrize(
    ("setting", "error", "words"),
    [
        ("lur", ConfigError, "'lru'"),
        ("", ConfigError, "Known: flow, genoa, lru"),
        (3, StrategyError, "must be derived"),
        (dict, StrategyError, "must be derived"),
    ],
)
def test_wrong_strategies(card: Any, setting: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        card.strategy = setting
    assert card.strategy.name == "lru"


# -- names that are not there ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("buget", "budget"), ("devcie", "device"), ("stategy", "strategy"), ("placment", "placement")],
)
def test_misspelt_settings_of_the_manager(manager: Any, name: str, nearest: str) -> None:
    with pytest.raises(AttributeError, match=f"no setting '{name}'. Did you mean '{nearest}'?"):
        setattr(manager, name, 1)
    assert not hasattr(manager, name)


def test_the_settings_are_those_that_can_be_set() -> None:
    found = {
        name
        for name, value in vars(TensorsManager).items()
        if isinstance(value, property) and value.fset is not None
    }
    assert found == set(public_module.MANAGER_SETTINGS)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("budget", "write torchTensorRef.tensorsManager.budget = ..."),
        ("buget", "write torchTensorRef.tensorsManager.budget = ..."),
        ("strategy", "write torchTensorRef.tensorsManager.strategy = ..."),
        ("trace", "write `with torchTensorRef.options(trace=...):`, or set TTR_TRACE"),
        ("injectTo", "write torchTensorRef.injectTo.append(...)"),
        ("inject", "write torchTensorRef.injectTo.append(...)"),
        ("options", "write `with torchTensorRef.options(...):`"),
        ("tensorManager", "did you mean 'tensorsManager'?"),
        ("xyzzy", "settings are on torchTensorRef.tensorsManager: budget, device"),
    ],
)
def test_settings_that_the_package_does_not_have(name: str, words: str) -> None:
    with pytest.raises(
        AttributeError, match=re.escape(f"torchTensorRef.{name} cannot be set: ")
    ) as caught:
        setattr(torchTensorRef, name, 1)
    assert words in str(caught.value)
    assert getattr(torchTensorRef, name, None) != 1


def test_what_the_manager_has_is_said_of_the_package(card: Any) -> None:
    """`torchTensorRef.report()` said that there is no such attribute, and no more."""
    for name in (*public_module.MANAGER_METHODS, *public_module.MANAGER_SETTINGS):
        if name in ("middlewares", "strategy"):  # the package has modules of these names
            continue
        with pytest.raises(AttributeError, match=rf"write torchTensorRef.tensorsManager.{name}$"):
            getattr(torchTensorRef, name)
        assert hasattr(type(card), name)
    with pytest.raises(AttributeError, match=r"no attribute 'tensorManager'$") as caught:
        _ = torchTensorRef.tensorManager
    assert caught.value.obj is torchTensorRef  # of whose names Python shows the nearest


#: A name more is a decision.
PUBLIC = """
    ConfigError Equation ExposedError Forecast InvariantError OutOfBudgetError PromisedError
    Semiring StrategyError TensorRef TensorRefError TensorsManager TransferError UnsupportedOpError
    __version__ disabled einsum forecast injectTo install middlewares options promising
    tensorsManager uninstall
"""


def test_what_the_package_lists_is_what_a_program_may_use() -> None:
    listed = dir(torchTensorRef)
    assert listed == PUBLIC.split()
    assert all(hasattr(torchTensorRef, name) for name in listed)


def test_misspelt_names_of_inject_to() -> None:
    for name in ("exlude", "exclude", "includes"):
        with pytest.raises(AttributeError):
            setattr(torchTensorRef.injectTo, name, ["a"])


# -- scopes ---------------------------------------------------------------------------------------


def test_every_option_takes_effect_in_a_scope_or_is_refused_there(manage: Any) -> None:
    """With everything open: what `instead` does not refuse is read when it is needed."""
    refused = {name for name, option in OPTIONS.items() if option.instead is not None}
    assert refused == {
        "disable", "core", "strategy", "device", "budget", "page_lock", "inject_to", "exclude",
        "op_times",
    }  # fmt: skip
    for name in refused:
        said = pytest.raises(ConfigError, match=f"The option '{name}' says how to begin")
        with said, options(**{name: "1"}):
            pytest.fail("the scope was entered")


def test_faults_of_a_scope(manage: Any) -> None:
    manager = manage()
    x = manager.adopt(torch.rand(100, 100)) + 1
    device = manager.residency.books.main
    assert device.copy_count >= 1
    with options(faults="copy:1,copy:2,copy:3"):  # from now on; a copy is tried three times
        before_count = manager.stats()["host_fallback_count"]
        result = manager.adopt(torch.ones(100, 100)) + x
    assert manager.stats()["host_fallback_reasons"] == {"a copy failed": before_count + 1}
    assert torch.equal(manager.release(result), manager.release(x) + 1)
    with options(faults="alloc:2"):
        device.allocate(1)
        with pytest.raises(torch.OutOfMemoryError, match="made to fail"):
            device.allocate(1)
    with options(faults="alloc:1"):
        pass
    device.allocate(1)


def test_poison_of_a_scope() -> None:
    device = SimDevice(DeviceSpec("x", capacity_nbytes=1000), name="sim:x")
    assert device.allocate(4).tolist() != [255] * 4
    with options(poison=True):
        assert device.allocate(4).tolist() == [255] * 4


def test_the_books_are_checked_where_a_scope_ends(manager: Any, monkeypatch: Any) -> None:
    looked: list[int] = []
    monkeypatch.setattr(TensorsManager, "violations", lambda self: looked.append(1) or [])
    with options(check=1):
        manager.adopt(torch.rand(10)) + 1
        assert looked == []
    assert looked == [1]


def test_an_option_as_the_environment_has_it(tmp_path: Any) -> None:
    """Every variable, with a value that it has not."""
    wrong = {
        "disable": "yes", "trace": "4", "trace_file": "/no/such/folder/f", "check": "-1",
        "sync": "2", "poison": "true", "shadow": "on", "compiled": "of", "device": "gpu",
        "tracebacks": "long", "budget": "6", "page_lock": "0.5", "faults": "cpoy:1",
        "inject_to": "a b", "exclude": "a-b", "core": "rust",
        "placement": "hybird", "blocks": "eaxct", "op_times": "/no/such/folder/f",
    }  # fmt: skip
    # A strategy's name is looked up when it is made, and `run` is what a run tells its children.
    assert {*wrong, "strategy", "run"} == set(OPTIONS)
    for name, text in wrong.items():
        with pytest.raises(ConfigError, match=f"{OPTIONS[name].variable}='{text}' is not unders"):
            OPTIONS[name].parse(text)
    as_set = dataclasses.replace(type(settings)(), core=settings.core)  # a run may be on either
    assert dataclasses.asdict(settings) == dataclasses.asdict(as_set)


# -- the command line -----------------------------------------------------------------------------

COMMANDS = [
    (("--budget", "6"), "--budget='6' is not understood: '6' without a unit is 6 bytes. Did you"),
    (("--budget", "0.5"), "Did you mean '0.5GiB' or '50%'?"),
    (("--budget=6GBi",), "--budget='6GBi' is not understood"),
    (("--budget", "cuad:0=6GiB"), "Did you mean 'cuda'?"),
    (("--device", "gpu"), "Did you mean 'cuda'?"),
    (("--strategy", "folw"), "'flow'"),
    (("--inject-to", "transfomers"), "Did you mean 'transformers'?"),
    (("--exclude", "diffuser.models"), "Did you mean 'diffusers.models'?"),
    (("--report", "stdrr"), "Write stderr or none, 'report.json' for numbers, or './stdrr'"),
    (("--report", "stdout"), "Write stderr or none, 'report.json' for numbers, or './stdout'"),
    (("--report", "json"), "Write stderr or none, 'report.json' for numbers, or './json'"),
    (("--report", "/no/such/folder/f"), "there is no folder '/no/such/folder'"),
    (("--trace", "/no/such/folder/f"), "--trace='/no/such/folder/f' is not understood"),
    (("--bugdet", "6GiB"), "unrecognized arguments: --bugdet"),
]


def run(*arguments: str, **environ: str) -> Any:
    return python("-B", "-m", "torchTensorRef", "run", *arguments, **environ)


@pytest.mark.parametrize(("given", "words"), COMMANDS)
def test_wrong_options_of_the_command(tmp_path: Any, given: Any, words: str) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('the program ran')")
    done = run(*given, str(program))
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "TTR_" not in done.stderr  # it was not what was written


def test_right_options_of_the_command(tmp_path: Any) -> None:
    (tmp_path / "numpyy.py").write_text("")  # a module of the program's, nearly named as another
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import sys, torch, torchTensorRef
            x = torch.ones(3)
            m = torchTensorRef.tensorsManager
            print(m.device, m.budget, m.strategy.name, list(torchTensorRef.injectTo), sys.argv[1:])
        """)
    )
    given = ("--device", "sim:1", "--budget", "4096KiB", "--strategy", "lru", "--report", "none")
    done = run(*given, "--inject-to", "numpyy", "--", str(program), "--budget", "6")
    assert done.stdout == "sim:1 4194304 lru ['numpyy'] ['--budget', '6']\n"
    assert (done.returncode, done.stderr) == (0, "")


def test_what_was_set_before_anything_is_open(tmp_path: Any) -> None:
    program = tmp_path / "program.py"
    program.write_text("import torch\ntorch.ones(3)")
    environ = {
        "TTR_BUDGET": "cuda:0=6GiB,cpu=24GiB,sim=1GiB",
        "TTR_INJECT_TO": "transfomers",
    }
    done = run("--report", "none", "--device", "sim", str(program), **environ)
    assert (done.returncode, "Did you mean 'transformers'?" in done.stderr) == (2, True)
    program.write_text("import torchTensorRef, torch\ntorch.ones(3)\nprint('done')")
    environ["TTR_DEVICE"] = "sim"
    done = subprocess.run(
        [sys.executable, "-B", str(program)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr.count("Did you mean 'transformers'?") == 1
    assert done.stderr.count("The budget of cuda:0 has no effect: in use is sim:0.") == 1
    assert done.stderr.count("The budget of cpu has no effect") == 1
