"""Run a module from a carried tree: with what is installed, carried wheels, and nothing fetched.

    python -m benchmarks.small_gpu.carried [MODULE [ARGUMENTS]]     # run it
    python -m benchmarks.small_gpu.carried --fetch [3.12]           # where there is a registry
    python -m benchmarks.small_gpu.carried --pack FILE.tar.gz       # the tree and the wheels

Where torchTensorRef is not installed, it is taken from this tree. Wheels in `.cache/wheels` and in
`.cache/wheels/3.12` (for that Python: wheels go together) are unpacked into `.cache/site`, which
comes before what is installed: whoever carries another version means it. Nothing is installed and
no pip is needed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / ".cache" / "wheels"
SITE = ROOT / ".cache" / "site"

#: What rented machines with torch and transformers lack: two peers and what these import, and what
#: torch's own tests import, whose database of operators the audit uses.
WANTED = (
    "diffusers",
    "expecttest",
    "importlib-metadata",
    "flextensor",
    "beartype",
    "posix-ipc",
    "proxytypes3",
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
    "shared-memory-dict",
)
PLATFORMS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux_2_5", "manylinux1")
#: The folders of ours that an installed package has.
PACKAGE = (("torchtensorref", "torchTensorRef"), ("strategies", "torchTensorRef/strategies"))


def is_for(wheel: str, version: tuple[int, int]) -> bool:
    """Whether a wheel is of this Python, by its name.

    Examples
    --------
    >>> is_for("pydantic_core-2.41.5-cp312-cp312-manylinux_2_17_x86_64.whl", (3, 12))
    True
    >>> is_for("pydantic_core-2.41.5-cp312-cp312-manylinux_2_17_x86_64.whl", (3, 11))
    False
    >>> is_for("diffusers-0.42.1-py3-none-any.whl", (3, 11))
    True
    """
    tags = Path(wheel).stem.split("-")
    python, abi = tags[-3].split("."), tags[-2]
    this = f"cp{version[0]}{version[1]}"
    return this in python or "py3" in python or (abi == "abi3" and python[0].startswith("cp3"))


def open_site(wheels: Path = WHEELS, site: Path = SITE) -> list[Path]:
    """Unpack what is carried, and ours where it is not installed; return what to import from."""
    shutil.rmtree(site, ignore_errors=True)
    version = sys.version_info[:2]
    found = [*wheels.glob("*.whl"), *wheels.glob("{}.{}/*.whl".format(*version))]
    carried = [wheel for wheel in sorted(found) if is_for(wheel.name, version)]
    for wheel in carried:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    is_ours_there = importlib.util.find_spec("torchTensorRef") is not None
    if not is_ours_there:
        for here, there in PACKAGE:
            shutil.copytree(
                ROOT / here,
                site / there,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
    return [site] if carried or not is_ours_there else []


def environment(site: Sequence[Path]) -> dict[str, str]:
    """Return the environment of the module to be run, which asks no hub."""
    before = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([*map(str, site), *([before] if before else [])])
    found = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return {**found, "PYTHONPATH": path} if path else found


def fetch(version: str, wheels: Path = WHEELS) -> int:
    """Bring the wheels, as this project pins them, for a Python of Linux on x86-64."""
    pins = {
        line.partition("==")[0].lower().replace("_", "-"): line.strip()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    }
    wheels = wheels / version
    wheels.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", version, "--implementation", "cp"]
    command += [part for p in PLATFORMS for part in ("--platform", f"{p}_x86_64")]
    # One at a time: pydantic says in its own metadata which core it wants.
    wanted = [pins.get(name, name) for name in WANTED if name != "pydantic-core"]
    status = subprocess.run([*command, "-d", str(wheels), *wanted], check=False).returncode
    core = _core_of_pydantic(wheels)
    if status == 0 and core is not None:
        status = subprocess.run([*command, "-d", str(wheels), core], check=False).returncode
    return status


def _core_of_pydantic(wheels: Path) -> str | None:
    for wheel in wheels.glob("pydantic-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            for line in archive.read(name).decode().splitlines():
                if line.startswith("Requires-Dist: pydantic-core"):
                    return line.partition(": ")[2].partition(";")[0].replace(" ", "")
    return None


def pack(target: Path) -> None:
    """Write the files that git knows, and the wheels, into one archive."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]
    names += [str(w.relative_to(ROOT)) for w in sorted(WHEELS.rglob("*.whl"))]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:gz") as archive:
        for name in names:
            archive.add(ROOT / name, arcname=name)


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit status of what was run."""
    if arguments and arguments[0] == "--fetch":
        return fetch(arguments[1] if len(arguments) > 1 else "3.12")
    if arguments and arguments[0] == "--pack":
        pack(Path(arguments[1]))
        return 0
    module = list(arguments) or ["benchmarks.small_gpu.calls"]
    command = [sys.executable, "-m", *module]
    return subprocess.run(command, env=environment(open_site()), cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
