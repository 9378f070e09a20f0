"""The documents: what is made from the code is up to date, and what they point at exists."""

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchTensorRef.base.options import OPTIONS
from torchTensorRef.diagnostics import documents

ROOT = Path(__file__).parents[2]
TEXTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("changelog.d/*.md")])


@pytest.mark.parametrize("name", ["environment.md", "errors.md"])
def test_a_generated_page_has_not_drifted(name):
    """If it has: python -m torchTensorRef.diagnostics.documents docs."""
    assert (ROOT / "docs" / name).read_text() == documents.pages()[name]


def test_every_option_is_on_the_page():
    page = documents.environment_page()
    assert [option.variable for option in OPTIONS.values() if option.variable not in page] == []


def test_every_error_has_its_section():
    sections = re.findall(r"^## (\w+)$", documents.errors_page(), re.MULTILINE)
    assert sections[0] == "TensorRefError"
    assert {"ConfigError", "InvariantError", "OutOfBudgetError"} < set(sections)
    assert documents.errors_page().count("**Cause:**") == len(sections)
    assert documents.errors_page().count("**Cure:**") == len(sections)


def test_the_pages_are_written_where_asked(tmp_path, capsys):
    assert documents.main([str(tmp_path)]) == 0
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == documents.pages()
    assert "errors.md" in capsys.readouterr().out


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text())
    inside = [target for target in targets if "://" not in target]
    assert [target for target in inside if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_switches_that_are_named_exist(path):
    named = set(re.findall(r"\bTTR_[A-Z_]*[A-Z]\b", path.read_text()))
    assert named <= {option.variable for option in OPTIONS.values()}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_names_of_ours_that_are_named_exist(path):
    roots = {"tensorsManager": "torchTensorRef.tensorsManager", "torchTensorRef": "torchTensorRef"}
    named = re.findall(r"\b(tensorsManager|torchTensorRef)((?:\.[A-Za-z_]\w*)+)", path.read_text())
    missing = []
    for root, rest in sorted(set(named)):
        try:
            pkgutil.resolve_name(roots[root] + rest)
        except (AttributeError, ImportError):
            missing.append(root + rest)
    assert missing == []


def blocks(path: Path) -> str:
    """The Python blocks of a text, one after the other: a program."""
    return "\n".join(
        re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    )


@pytest.mark.parametrize(
    "name", ["README.md", "docs/quickstart.md", "docs/strategies.md", "docs/einsum.md"]
)
def test_examples_run(name, tmp_path):
    """In a process of their own, because they begin with the imports."""
    program = tmp_path / "example.py"
    program.write_text(blocks(ROOT / name))
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
