"""Stands in for a build backend of Rust, where only the source distribution itself is wanted.

Before pip hands one over it asks the backend for the name and version, which `PKG-INFO` has.
"""

from __future__ import annotations

import shutil
from email.parser import Parser
from pathlib import Path
from typing import Any


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    """Copy what the source distribution says of itself; return the folder's name."""
    said = Parser().parsestr(Path("PKG-INFO").read_text(encoding="utf-8"))
    folder = Path(metadata_directory, f"{said['Name']}-{said['Version']}.dist-info")
    folder.mkdir()
    shutil.copy("PKG-INFO", folder / "METADATA")
    return folder.name
