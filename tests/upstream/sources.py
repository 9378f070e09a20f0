"""Source distributions: fetched from pip's index, compared with its checksum, unpacked."""

from __future__ import annotations

import hashlib
import json
import os
import ssl
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "upstream"


def _read(url: str, accept: str = "*/*") -> bytes:
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, context=context, timeout=120) as answer:
        found: bytes = answer.read()
    return found


def _listed(name: str) -> list[dict[str, Any]]:
    # Only where it is needed: it exchanges distutils, which others may have imported before.
    from pip._internal.models.index import PyPI  # type: ignore[import-untyped]

    index = os.environ.get("PIP_INDEX_URL", PyPI.simple_url)
    text = _read(f"{index.rstrip('/')}/{name}/", "application/vnd.pypi.simple.v1+json")
    files: list[dict[str, Any]] = json.loads(text)["files"]
    return files


def unpacked(requirement: str) -> Path:
    """Return the folder of a source distribution, fetched if it is not there.

    Raises
    ------
    LookupError
        The index has none of that version, or other bytes than its checksum says.
    """
    name, _, version = requirement.partition("==")
    plain = name.replace("-", "_")
    folder = CACHE / f"{plain}-{version}"
    if folder.exists():
        return folder
    wanted = {f"{plain}-{version}.tar.gz", f"{name}-{version}.tar.gz"}
    found = [row for row in _listed(name.replace("_", "-")) if row["filename"] in wanted]
    if not found:
        raise LookupError(f"the index has no source distribution of {requirement}")
    archive = _read(found[0]["url"])
    if hashlib.sha256(archive).hexdigest() != found[0]["hashes"]["sha256"]:
        raise LookupError(f"{found[0]['filename']} is not what the index says it is")
    CACHE.mkdir(parents=True, exist_ok=True)
    packed = CACHE / found[0]["filename"]
    packed.write_bytes(archive)
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
