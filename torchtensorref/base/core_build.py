"""The library in C++ that runs ready operators: where it is kept, and how it is built.

It is built where it is used, for the torch, the Python and the compiler at hand, into the user's
cache: in the background when it is first wanted, for the next start, or at once by
`torchtensorref build`. A process of its own does it, which knows torch and not us; nothing here
imports torch. What is built is tried by whoever loads it (`memory/core.py`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from . import torch_versions

PACKAGE = Path(__file__).parents[1]
SOURCES = PACKAGE / "interception" / "csrc"
#: The module that the library is, and its file.
NAME = "torchTensorRef_core"
#: What the compiler is told: torch's own libraries, too, are without the assertions in its headers,
#: and go on where one does not hold (a host with an index).
_USUAL = ["-O2", "-DNDEBUG"]
#: What it is told beside that: another library. For sanitizers (`tests/stress`).
FLAGS: list[str] = []

_BUILD = """
import sys
from torch.utils import cpp_extension
cpp_extension._import_module_from_library = lambda *how: None  # who wants it loads and tries it
flags = sys.argv[4:]
cpp_extension.load(
    sys.argv[1], sys.argv[2:3], build_directory=sys.argv[3], extra_cflags=flags,
    extra_ldflags=[flag for flag in flags if flag.startswith("-fsanitize")],
)
"""


class Build(NamedTuple):
    """The library for what is installed here."""

    folder: Path
    #: Why none can be built, and what to do about it; "" if one can.
    obstacle: str

    @property
    def library(self) -> Path:
        """The file, whether it is there or not."""
        return self.folder / f"{NAME}.so"

    @property
    def complaint(self) -> Path:
        """Where the last build that failed has written what it said."""
        return self.folder / "failed.txt"

    @property
    def state(self) -> str:
        """What there is, in words: built, not built, or why not."""
        if self.library.exists():
            return "built"
        if self.obstacle:
            return self.obstacle
        if self.complaint.exists():
            return f"the build failed: see {self.complaint}; `torchtensorref build` tries again"
        return "not built: `torchtensorref build` does that"


def of_this_process() -> Build:
    """Say where the library for the torch, Python and compiler of this process is kept."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    torch = _torch_version()
    key = [torch, sys.version, sys.platform, *_USUAL, *FLAGS]
    if compiler is not None:
        found = os.stat(compiler)
        key += [os.path.realpath(compiler), str(found.st_size), str(found.st_mtime_ns)]
    for source in (PACKAGE / "_version.py", *sorted(SOURCES.iterdir())):
        key.append(source.read_text())
    name = hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]
    return Build(cache_folder() / f"core-{name}", _obstacle(torch, compiler))


def _torch_version() -> str:
    """Return what ``torch.__version__`` is; where torch is not imported, from its files.

    Not from the metadata of its package: those of builds with CUDA lack what the version says of
    that, and the library would be built for one torch and looked for by another.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        return str(torch.__version__)
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(folder) / "version.py"
        said = file.read_text() if file.exists() else ""
        found = re.search(r"""^__version__ = ['"]([^'"]+)""", said, re.MULTILINE)
        if found:
            return found[1]
    return ""


def cache_folder() -> Path:
    """Return where we keep what can be made again: in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "torchtensorref"


def _obstacle(torch: str, compiler: str | None) -> str:
    if not torch_versions.has(torch_versions.MANAGEMENT, torch):
        return f"it needs {torch_versions.WANTED}, and this is {torch or 'absent'}"
    if os.name != "posix":
        return "it is built on Linux and macOS only"
    if compiler is None:
        return "no C++ compiler was found: install g++ or clang, or set CXX"
    if shutil.which("ninja", path=_path()) is None:
        return "no ninja was found: install it (`pip install ninja`)"
    return ""


def build(wanted: Build) -> str:
    """Build the library now, unless another process has done so meanwhile.

    Returns
    -------
    str
        What went wrong; "" if the library is there. A build that fails leaves nothing but what it
        said (`Build.complaint`).
    """
    import fcntl

    if wanted.obstacle:
        return wanted.obstacle
    wanted.folder.mkdir(parents=True, exist_ok=True)
    with open(wanted.folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back by the system, however this process ends
        if wanted.library.exists():
            return ""
        work = wanted.folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        done = subprocess.run(
            _command(work), env=_environment(), capture_output=True, text=True, check=False
        )
        made = work / f"{NAME}.so"
        if done.returncode or not made.exists():
            wanted.complaint.write_text(done.stdout + done.stderr)
            return wanted.state
        made.replace(wanted.library)
        wanted.complaint.unlink(missing_ok=True)
        shutil.rmtree(work, ignore_errors=True)
    return ""


#: What was begun: kept, since Python warns of a process that is let go of while it runs.
_begun: list[subprocess.Popen[bytes]] = []


def begin(wanted: Build) -> bool:
    """Begin to build the library in the background, for the next start; whether it was begun.

    A process of its own does it, which outlives this one. A build that has failed before is not
    tried again: `torchtensorref build` does that.
    """
    if wanted.obstacle or wanted.complaint.exists():
        return False
    command = [sys.executable, "-m", "torchTensorRef", "build", "--quiet"]
    if shutil.which("nice"):
        command = ["nice", *command]
    _begun.append(
        subprocess.Popen(
            command,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    )
    return True


def _command(work: Path) -> list[str]:
    source = str(SOURCES / "core.cpp")
    return [sys.executable, "-c", _BUILD, NAME, source, str(work), *_USUAL, *FLAGS]


def _environment() -> dict[str, str]:
    return {**os.environ, "TTR_DISABLE": "1", "MAX_JOBS": "1", "PATH": _path()}


def _path() -> str:
    """Return where programs are looked for: also where pip has put those of this environment."""
    return os.pathsep.join((os.environ.get("PATH", ""), sysconfig.get_path("scripts")))
