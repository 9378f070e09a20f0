"""The layout that the documents claim: who imports whom, what is packaged, what needs torch."""

import ast
import configparser
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchtensorref"
STRATEGIES = ROOT / "strategies"

#: Files at the root of the package: above all folders.
ROOT_FILES = {"__init__", "__main__", "_version"}

#: What `ls torchtensorref` may show at most; `py.typed` is one of the files.
MOST_FOLDERS, MOST_FILES = 12, 4

#: Modules that may know less than their folder, and what is left to them.
STRICTER = {"inject.hooks": {"base"}}

#: Folders that are there before torch is, and may use the standard library alone.
WITHOUT_TORCH_FOLDERS = ("base", "strategy")

#: Modules of 400 lines or more, waiting to be split where it hurts. The list may only get shorter.
STILL_TOO_LONG: set[str] = set()

#: Folders without a module: caches, and the sources in C++, which are packaged as data.
NO_PACKAGES = {"__pycache__", "csrc"}

#: The part of us that a strategy may know.
FOR_STRATEGIES = {"strategy", "base.errors", "base.units"}


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


def folder_of(module: str) -> str:
    """`memory` for memory.block; `` for what lies at the root."""
    top = module.partition(".")[0]
    return "" if top in ROOT_FILES else top


def folders(package: Path = PACKAGE) -> list[str]:
    return sorted(path.parent.name for path in package.glob("*/__init__.py"))


def rights_of(folder: str, package: Path = PACKAGE) -> set[str]:
    """The folders that a folder may import from, itself included: its docstring says which."""
    text = ast.get_docstring(ast.parse((package / folder / "__init__.py").read_text())) or ""
    last = text.splitlines()[-1] if text else ""
    assert last.startswith("May import: "), f"{folder}/__init__.py does not say what it may import"
    said = last.removeprefix("May import: ").removesuffix(".")
    if said == "nothing of ours":
        return {folder}
    if said == "all":
        return {"", *folders(package)}
    if said.startswith("all but "):
        return set(folders(package)) - set(said.removeprefix("all but ").split(", "))
    named = set(said.split(", "))
    unknown = named - set(folders(package))
    assert not unknown, f"{folder}/__init__.py names folders that are not there: {unknown}"
    return {folder, *named}


def is_within(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def wrong_imports(paths: list[Path], package: Path) -> list[str]:
    """Every import in `paths` that its folder has no right to, in words."""
    found = []
    for path in paths:
        module = dotted(path, package)
        folder = folder_of(module)
        allowed = STRICTER.get(module) or (rights_of(folder) if folder else None)
        for line, reached in imports(path, package):
            if allowed is not None and folder_of(reached) not in allowed:
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


def test_imports_are_those_that_folders_have_a_right_to():
    assert wrong_imports(sources(), PACKAGE) == []


def test_rights_lead_in_no_circle():
    order: list[str] = []
    waiting = {folder: rights_of(folder) - {folder, ""} for folder in folders()}
    while waiting:
        free = [folder for folder, needs in waiting.items() if needs <= set(order)]
        assert free, f"a circle among {sorted(waiting)}"
        order += free
        for folder in free:
            del waiting[folder]


def test_modules_lead_in_no_circle():
    """Also inside a folder. What is imported for its types alone counts; late imports do, too."""
    graph = {dotted(p, PACKAGE): {name for _, name in imports(p, PACKAGE)} for p in sources()}
    graph = {m: {real_module(name, graph) for name in names} - {m} for m, names in graph.items()}
    del graph["__init__"]  # its names are loaded on demand
    done: set[str] = set()
    while len(done) < len(graph):
        free = [m for m, needs in graph.items() if m not in done and needs & set(graph) <= done]
        assert free, f"a circle among {sorted(set(graph) - done)}"
        done.update(free)


def real_module(name: str, graph: dict[str, set[str]]) -> str:
    """`memory.block` for memory.block; `strategy` for its name strategy.Access."""
    return name if name in graph else name.rpartition(".")[0]


def test_the_listing_fits_a_glance():
    inside = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert sum(path.is_dir() for path in inside) <= MOST_FOLDERS
    assert sum(path.is_file() for path in inside) <= MOST_FILES


@pytest.mark.parametrize(
    ("module", "line", "is_wrong"),
    [
        ("memory/budget.py", "from ..interception import slow_path", True),
        ("memory/manager.py", "from .budget import Budget", False),
        ("devices/sim/device.py", "from ...memory.block import Block", True),
        ("devices/sim/device.py", "from .. import base", False),
        ("devices/sim/device.py", "from ...base import errors", False),
        ("devices/sim/device.py", "from ... import tensor", True),
        (
            "devices/sim/device.py",
            "def late():\n    from torchTensorRef.memory.manager import tensorsManager",
            True,
        ),
        ("inject/hooks.py", "from ..base.options import settings", False),
        ("inject/hooks.py", "from ..interception.entry import dispatch", True),
        ("base/units.py", "import torchTensorRef.strategy", True),
        ("tensor/tensor_ref.py", "import torch", False),
    ],
)
def test_an_import_without_a_right_is_found(tmp_path, module, line, is_wrong):
    path = tmp_path / module
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert bool(wrong_imports([path], tmp_path)) is is_wrong


def test_a_folder_that_says_nothing_of_its_rights_is_found(tmp_path):
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "__init__.py").write_text('"""Helpers."""')
    with pytest.raises(AssertionError, match="does not say what it may import"):
        rights_of("helpers", tmp_path)


def test_units_are_tested_where_they_lie():
    """A folder of tests under tests/unit is named after the folder of the package it tests."""
    known = {*folders(), "strategies", "benchmarks"}
    found = {path.name for path in (ROOT / "tests/unit").iterdir() if path.is_dir()}
    assert found - {"__pycache__"} <= known


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
    for path in sorted(STRATEGIES.rglob("*.py")):
        outside = len(path.relative_to(STRATEGIES).parts) + 1
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == outside:
                names = [node.module] if node.module else [alias.name for alias in node.names]
                found += [(path.name, name) for name in names if name not in FOR_STRATEGIES]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found += [(path.name, "ours")] * (node.module or "").startswith("torchTensorRef")
            elif isinstance(node, ast.Import):
                found += [(path.name, a.name) for a in node.names if a.name.startswith("torch")]
    assert found == []


def test_low_folders_use_the_standard_library_alone():
    low = [path for path in sources() if folder_of(dotted(path, PACKAGE)) in WITHOUT_TORCH_FOLDERS]
    foreign = {path.name: heads(path) - sys.stdlib_module_names for path in low}
    assert {name: found for name, found in foreign.items() if found} == {}


def test_devices_import_torch_only_inside_functions():
    found = [path.name for path in (PACKAGE / "devices").rglob("*.py") if "torch" in heads(path)]
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


def test_low_folders_and_the_hook_need_no_torch(tmp_path):
    """So `env` works where torch does not, and strategies are tested with integers."""
    low = [dotted(path, PACKAGE) for path in sources()]
    low = [name for name in low if folder_of(name) in WITHOUT_TORCH_FOLDERS] + ["inject.hooks"]
    within = (path.relative_to(STRATEGIES) for path in STRATEGIES.rglob("[!_]*.py"))
    ours = [".".join(("torchTensorRef.strategies", *p.with_suffix("").parts)) for p in within]
    names = ["torchTensorRef", *(f"torchTensorRef.{name}" for name in low), *ours]
    done = python(WITHOUT_TORCH.format(names=names), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


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


def test_installed_it_says_what_to_write(tmp_path):
    """Installed as it is in a checkout, the folder says so; from a wheel, a module of that name."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    (name,) = setup["options"]["py_modules"].split()
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    done = python("import torchtensorref", tmp_path)
    assert done.stderr.splitlines()[-1] == (
        "ImportError: There is no module 'torchtensorref': write `import torchTensorRef`."
    )


def test_setup_lists_every_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = setup["options"]["packages"].split()
    found = {}
    for name, root in (("torchTensorRef", PACKAGE), ("torchTensorRef.strategies", STRATEGIES)):
        for path in (root, *root.rglob("*")):
            is_package = path.is_dir() and path.name not in NO_PACKAGES
            if is_package:
                found[".".join((name, *path.relative_to(root).parts))] = path
    assert sorted(listed) == sorted(found)
    assert [name for name, path in found.items() if not (path / "__init__.py").exists()] == []


def test_modules_stay_readable():
    lines = {dotted(path, PACKAGE): len(path.read_text().splitlines()) for path in sources()}
    for path in STRATEGIES.rglob("*.py"):
        lines["strategies." + dotted(path, STRATEGIES)] = len(path.read_text().splitlines())
    assert {name for name, count in lines.items() if count >= 400} <= STILL_TOO_LONG


def test_the_path_in_cpp_stays_readable():
    folder = PACKAGE / "interception" / "csrc"
    assert sum(len(path.read_text().splitlines()) for path in folder.iterdir()) < 1500


def test_the_path_in_cpp_calls_nothing_that_newer_pythons_lack():
    """Until Python 3.15 took it away, the compiler only warned of it."""
    gone = {"PyWeakref_GetObject", "PyWeakref_GET_OBJECT", "PyImport_ImportModuleNoBlock"}
    folder = PACKAGE / "interception" / "csrc"
    words = {word for path in folder.iterdir() for word in re.findall(r"\w+", path.read_text())}
    assert words & gone == set()
