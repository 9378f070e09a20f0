"""Source distributions: fetched by pip, which compares them with their checksums; unpacked."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "upstream"
#: Modules that stand in for build backends.
BACKENDS = Path(__file__).parent / "backends"


def unpacked(requirement: str) -> Path:
    """Return the folder of a source distribution, fetched if it is not there.

    Raises
    ------
    LookupError
        There is no source distribution of that version, or pip cannot read what it says of itself.
    """
    name, _, version = requirement.partition("==")
    plain = name.replace("-", "_")
    folder = CACHE / f"{plain}-{version}"
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", name]
    command += ["-d", str(CACHE), requirement]
    forms = [f"{form}-{version}.tar.gz" for form in (plain, name, name.replace("_", "-"))]
    # If pip cannot read it because a compiler is missing, once more with what stands in for that.
    stand_in = {**os.environ, "PYTHONPATH": str(BACKENDS)}
    for options, environ in (([], None), (["--no-build-isolation"], stand_in)):
        subprocess.run([*command, *options], check=False, env=environ)
        packed = next((CACHE / form for form in forms if (CACHE / form).exists()), None)
        if packed is not None:
            break
    else:
        raise LookupError(f"pip brings no source distribution of {requirement}")
    with tarfile.open(packed) as file:
        top = file.getnames()[0].partition("/")[0]
        file.extractall(CACHE, filter="data")
    if CACHE / top != folder:
        (CACHE / top).rename(folder)
    return folder


def install(requirements: tuple[str, ...]) -> Path:
    """Install packages into a folder of their own, and nothing that they need: no other torch."""
    site = CACHE / "site"
    missing = [text for text in requirements if not _is_there(text, site)]
    if missing:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade"]
        subprocess.run([*command, "--target", str(site), *missing], check=True)
    return site


def _is_there(requirement: str, site: Path) -> bool:
    name, _, version = requirement.partition("==")
    return any(
        (site / f"{form}-{version}.dist-info").exists() for form in (name, name.replace("-", "_"))
    )
