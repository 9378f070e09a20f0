"""``torchtensorref env``: one block to paste into a bug report. Works where torch does not."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from .._version import __version__
from ..base import core_build, torch_versions
from ..base.options import OPTIONS, PREFIX, settings
from ..base.units import format_nbytes
from ..inject import hooks
from ..inject.inject_to import injectTo
from ..strategy.choice import DEFAULT, known_names

#: What is named with its version, where it is installed.
COMPANIONS = ("wrapt", "numpy", "safetensors", "transformers", "accelerate", "diffusers")
#: Names taken before us that are listed one by one.
TAKEN_SHOWN = 8


def main() -> int:
    """Print the report; 0, whatever it had to say."""
    print(report())
    return 0


def report() -> str:
    """Describe this process and what it runs on: versions, patches, devices, switches.

    Notes
    -----
    Never raises: what cannot be found out is said in its line.
    """
    sections: tuple[tuple[str, Callable[[], Iterator[str]]], ...] = (
        ("beside", _companions),
        ("torch", _torch),
        ("core", _core),
        ("hook", _hook),
        ("patches", _patches),
        ("taken", _taken),
        ("injectTo", _inject_to),
        ("strategy", _strategy),
        ("devices", _devices),
        ("set", _switches),
        ("known", _known),
    )
    system = f"{platform.system()} {platform.machine()}"
    lines = [f"torchTensorRef {__version__}  python {platform.python_version()}  {system}"]
    for label, section in sections:
        try:
            found = list(section())
        except Exception as error:
            found = [f"could not be found out: {type(error).__name__}: {error}"]
        lines += [f"{'' if place else label:10}{line}" for place, line in enumerate(found)]
    return "\n".join(lines)


def version_of(name: str) -> str:
    """The installed version of a package, or "absent"."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def _companions() -> Iterator[str]:
    found = {name: version_of(name) for name in COMPANIONS}
    yield "  ".join(f"{name} {version}" for name, version in found.items() if version != "absent")


def _torch() -> Iterator[str]:
    installed = version_of("torch")
    if installed == "absent" and "torch" not in sys.modules:
        yield f"absent: torchTensorRef needs {torch_versions.WANTED} (pip install torch)"
        return
    torch = importlib.import_module("torch")
    built = torch.version.cuda or torch.version.hip
    kind = f"built with {'cuda' if torch.version.cuda else 'hip'} {built}" if built else "CPU build"
    yield f"{torch.__version__}, {kind}, {torch.get_num_threads()} threads"


def _core() -> Iterator[str]:
    if "torch" in sys.modules and not settings.disable:
        yield f"operators: {hooks.load('.memory.core').path_in_words()}"
    elif settings.core == "python":
        yield "operators: Python (TTR_CORE=python)"
    yield f"library in C++: {core_build.of_this_process().state}"


def _hook() -> Iterator[str]:
    if settings.disable:
        yield "off: TTR_DISABLE=1"
        return
    state = "active" if hooks.state.active else "not active"
    yield f"{state}, installed before torch: {'no' if hooks.state.torch_was_first else 'yes'}"
    yield from (f"failed: {failure}" for failure in hooks.state.failures)


def _patches() -> Iterator[str]:
    if "torch" not in sys.modules:
        yield "none: torch is not imported"
        return
    patches = hooks.load(".inject.torch_").PATCHES
    libraries: dict[str, list[bool]] = {}
    for patch in patches:
        libraries.setdefault(patch.module.partition(".")[0], []).append(patch.installed)
    yield "  ".join(f"{name} {sum(done)}/{len(done)}" for name, done in libraries.items())
    for patch in patches:
        if patch.absence:
            yield f"not found: {patch.name} ({patch.reason}): {patch.absence}"


def _taken() -> Iterator[str]:
    if "torch" not in sys.modules or not hooks.state.active:
        yield "nothing looked for"
        return
    names = hooks.load(".inject.torch_").taken_names()
    if not names:
        yield "no name was taken from torch before us"
        return
    yield f"{len(names)} names were taken from torch before us; injectTo.append rebinds them:"
    yield from names[:TAKEN_SHOWN]
    if len(names) > TAKEN_SHOWN:
        yield f"... and {len(names) - TAKEN_SHOWN} more"


def _inject_to() -> Iterator[str]:
    yield f"{', '.join(injectTo) or 'all'}; excluded: {', '.join(injectTo.excluded) or 'none'}"


def _strategy() -> Iterator[str]:
    chosen = f"TTR_STRATEGY={settings.strategy}" if settings.strategy else "TTR_STRATEGY not set"
    yield f"{settings.strategy or DEFAULT} ({chosen}); known: {', '.join(known_names())}"


def _devices() -> Iterator[str]:
    if "torch" not in sys.modules:
        yield "torch is not imported"
        return
    registry = hooks.load(".devices.registry")
    default = settings.device or registry.default_name()
    for name in dict.fromkeys(("cpu", *registry.REAL_KINDS, "sim", default)):
        mark = "*" if name == default else " "
        try:
            device = registry.resolve(name)
            size = format_nbytes(device.capacity_nbytes)
            free = format_nbytes(device.free_nbytes())
            yield f"{mark} {device.name:8} {size}, free {free}"
        except Exception as error:
            yield f"{mark} {name:8} absent: {str(error).partition('. ')[0].rstrip('.')}"


def _switches() -> Iterator[str]:
    given = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(PREFIX)]
    yield "  ".join(sorted(given)) or f"none of {len(OPTIONS)} {PREFIX} variables"


def _known() -> Iterator[str]:
    folder = Path(__file__).parent
    folds_case = (folder / "ENVIRONMENT.PY").exists()
    ours = Path(__file__).parents[2]
    editable = f"yes, {ours.name}" if (ours / "setup.cfg").exists() else "no"
    yield f"case-insensitive file system: {'yes' if folds_case else 'no'}   editable: {editable}"
