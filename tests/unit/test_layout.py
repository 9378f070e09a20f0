"""The layout that the documents claim: who imports whom, what is packaged, what needs torch."""

import ast
import configparser
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchtensorref"
STRATEGIES = ROOT / "strategies"

#: Lowest first. A module may use its own row and the rows before it.
ROWS = (
    ("errors", "units", "option_texts", "config", "events", "world", "_version"),
    ("strategy", "birth_places", "history"),
    ("devices",),
    ("blocks",),
    (
        "budget",
        "transfer",
        "places",
        "bindings",
        "schema",
        "costs",
        "views",
        "tracing",
    ),
    (
        "books",
        "copies",
        "movement",
        "look_ahead",
        "residency",
        "adoption",
        "custody",
        "invariants",
        "strategy_choice",
        "headroom",
        "reports",
        "manager",
    ),
    (
        "composites",
        "labels",
        "operands",
        "shadow",
        "ladder",
        "op_call",
        "variants",
        "handlers",
        "onlookers",
        "fast_path",
        "higher_order",
        "carried",
        "dispatch",
    ),
    (
        "exchange",
        "recorder",
        "region",
        "region_learning",
        "region_hold",
        "region_entry",
        "regions",
        "faces",
        "formulas",
        "above_autograd",
        "methods",
        "tensor",
    ),
    ("inject", "diagnostics"),
    ("__init__", "__main__"),
)
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}

#: Modules that may know less than their row says, and what is left to them.
STRICTER = {
    "inject.hooks": set(ROWS[0]),
    "blocks": {*ROWS[0], *ROWS[1], "devices.base", "blocks"},
}

#: Modules of 400 lines or more, waiting to be split where it hurts. The list may only get shorter.
STILL_TOO_LONG: set[str] = set()

#: The part of us that a strategy may know.
FOR_STRATEGIES = {"strategy", "history", "errors", "units"}


def dotted(path: Path, package: Path) -> str:
    """`devices.sim` for devices/sim.py, `devices` for its __init__, `__init__` for the root's."""
    parts = path.relative_to(package).with_suffix("").parts
    if len(parts) > 1 and parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def imports(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name (from our root) of every module of ours that `path` imports."""
    folder = path.relative_to(package).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root, _, rest = alias.name.partition(".")
                if root == "torchTensorRef":
                    yield node.lineno, rest or "__init__"
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, name) for name in imported_from(node, folder))


def imported_from(node: ast.ImportFrom, folder: tuple[str, ...]) -> list[str]:
    """The modules of ours that one `from ... import ...` names."""
    if node.level:
        start = folder[: len(folder) - (node.level - 1)]
        assert node.level - 1 <= len(folder), f"line {node.lineno} reaches out of the package"
        named = (*start, *(node.module.split(".") if node.module else ()))
    else:
        root, *rest = (node.module or "").split(".")
        if root != "torchTensorRef":
            return []
        named = tuple(rest)
    if not named:
        # `from . import manager`: the names are modules, unless __init__ itself defines them.
        return [alias.name if is_module(alias.name) else "__init__" for alias in node.names]
    if (PACKAGE.joinpath(*named)).is_dir():
        return [".".join((*named, alias.name)) for alias in node.names]
    return [".".join(named)]


def is_module(name: str) -> bool:
    return (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir()


def row_of(module: str) -> int:
    top = module.partition(".")[0]
    assert top in ROW_OF, f"{top} has no row: give it its place in tests/unit/test_layout.py"
    return ROW_OF[top]


def is_within(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def wrong_imports(paths: list[Path], package: Path) -> list[str]:
    """Every import in `paths` that reaches a higher row, in words."""
    found = []
    for path in paths:
        module = dotted(path, package)
        allowed = next((STRICTER[name] for name in STRICTER if is_within(module, {name})), None)
        for line, reached in imports(path, package):
            too_high = row_of(reached) > row_of(module)
            if too_high or (allowed is not None and not is_within(reached, allowed)):
                found.append(f"{path.name}:{line} imports {reached}")
    return found


def heads(path: Path) -> set[str]:
    """Packages of others that are imported when `path` is, type checking aside."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    found: set[str] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)
    return found


def python(program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_imports_point_downward():
    assert wrong_imports(sources(), PACKAGE) == []


@pytest.mark.parametrize(
    ("module", "line", "is_wrong"),
    [
        ("budget.py", "from .manager import TensorsManager", True),
        ("manager.py", "from .budget import Budget", False),
        ("devices/sim.py", "from ..blocks.block import Block", True),
        ("devices/sim.py", "from . import base", False),
        ("devices/sim.py", "from .. import errors", False),
        ("devices/sim.py", "from .. import tensor", True),
        (
            "devices/sim.py",
            "def late():\n    from torchTensorRef.manager import tensorsManager",
            True,
        ),
        ("blocks/table.py", "from ..devices.base import Device", False),
        ("blocks/table.py", "from ..devices.sim import SimDevice", True),
        ("inject/hooks.py", "from ..config import settings", False),
        ("inject/hooks.py", "from ..dispatch import dispatch", True),
        ("units.py", "import torchTensorRef.strategy", True),
        ("tensor.py", "import torch", False),
    ],
)
def test_an_upward_import_is_found(tmp_path, module, line, is_wrong):
    path = tmp_path / module
    path.parent.mkdir(exist_ok=True)
    path.write_text(line)
    assert bool(wrong_imports([path], tmp_path)) is is_wrong


def test_a_module_without_a_row_is_found(tmp_path):
    path = tmp_path / "helpers.py"
    path.write_text("from . import errors")
    with pytest.raises(AssertionError, match="helpers has no row"):
        wrong_imports([path], tmp_path)


def test_every_module_has_a_row():
    assert [path.name for path in sources() if row_of(dotted(path, PACKAGE)) < 0] == []


def test_nothing_imports_the_strategies():
    """They are found by name, so that a third party's are worth as much as ours."""
    found = [
        f"{path.name}:{line}"
        for path in sources()
        for line, name in imports(path, PACKAGE)
        if name.startswith("strategies")
    ]
    assert found == []


def test_strategies_know_only_their_contract():
    found = []
    for path in sorted(STRATEGIES.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 2:
                names = [node.module] if node.module else [alias.name for alias in node.names]
                found += [(path.name, name) for name in names if name not in FOR_STRATEGIES]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found += [(path.name, "ours")] * (node.module or "").startswith("torchTensorRef")
            elif isinstance(node, ast.Import):
                found += [(path.name, a.name) for a in node.names if a.name.startswith("torch")]
    assert found == []


def test_low_rows_use_the_standard_library_alone():
    low = [path for path in sources() if row_of(dotted(path, PACKAGE)) <= 1]
    foreign = {path.name: heads(path) - sys.stdlib_module_names for path in low}
    assert {name: found for name, found in foreign.items() if found} == {}


def test_devices_import_torch_only_inside_functions():
    found = [path.name for path in (PACKAGE / "devices").glob("*.py") if "torch" in heads(path)]
    assert found == []


WITHOUT_TORCH = """
import importlib, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked by this test")

sys.meta_path.insert(0, NoTorch())
for name in {names!r}:
    importlib.import_module(name)
"""


def test_low_rows_and_the_hook_need_no_torch(tmp_path):
    """So `env` works where torch does not, and strategies are tested with integers."""
    low = [name for name in (*ROWS[0], *ROWS[1], "inject.hooks") if in_tree(name)]
    ours = [f"torchTensorRef.strategies.{path.stem}" for path in STRATEGIES.glob("[!_]*.py")]
    names = ["torchTensorRef", *(f"torchTensorRef.{name}" for name in low), *ours]
    done = python(WITHOUT_TORCH.format(names=names), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def in_tree(name: str) -> bool:
    return PACKAGE.joinpath(*name.split(".")).with_suffix(".py").exists()


def test_importing_us_imports_no_torch_and_starts_no_thread(tmp_path):
    program = (
        "import sys, threading, torchTensorRef\n"
        "print('torch' in sys.modules, threading.active_count())"
    )
    assert python(program, tmp_path).stdout == "False 1\n"


def test_the_lower_case_name_is_refused():
    """It would be a second copy of everything, with a second manager."""
    done = python("import torchtensorref", ROOT)
    assert "ImportError" in done.stderr
    assert "import torchTensorRef" in done.stderr


def test_setup_lists_every_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = setup["options"]["packages"].split()
    folders = [path for path in PACKAGE.rglob("*") if path.is_dir() and path.name != "__pycache__"]
    inside = [".".join(("torchTensorRef", *path.relative_to(PACKAGE).parts)) for path in folders]
    assert sorted(listed) == sorted(["torchTensorRef", "torchTensorRef.strategies", *inside])
    missing = [path.name for path in (*folders, STRATEGIES) if not (path / "__init__.py").exists()]
    assert missing == []


def test_modules_stay_readable():
    lines = {dotted(path, PACKAGE): len(path.read_text().splitlines()) for path in sources()}
    assert {name for name, count in lines.items() if count >= 400} <= STILL_TOO_LONG
