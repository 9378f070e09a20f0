"""Forecasts in files: programs as JSON texts that another process can read."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError
from ..base.option_parsers import path_to_write
from ..operators.plan import kind_named
from .record import BlockRecord, OpRecord, Record

__all__ = ["read", "write"]

#: The files that are written, and the oldest that are read.
FORMAT = 2


def write(record: Record, path: str | Path) -> None:
    """Write a record into a file; ConfigError if it cannot be written there."""
    path = path_to_write(path, "save(path)")
    data = {
        "format": FORMAT,
        "blocks": [asdict(block) for block in record.blocks.values()],
        "ops": [_op_as_data(op) for op in record.ops],
        "steps": record.steps,
    }
    Path(path).write_text(json.dumps(data))


def read(path: str | Path) -> Record:
    """Read what `write` has written.

    Raises
    ------
    ConfigError
        There is no such file, or it is another one.
    """
    try:
        data = json.loads(Path(path).read_text())
        if data["format"] != FORMAT:
            raise ValueError(f"it has format {data['format']}, and {FORMAT} is what is read here")
        ops = [OpRecord(kind=kind_named(op["name"]), **op) for op in data["ops"]]
        blocks = {b["number"]: BlockRecord(**b) for b in data["blocks"]}
        steps = [(str(name), int(index)) for name, index in data["steps"]]
    except OSError as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read: {error.strerror}.", name=str(path)
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{str(path)!r} is no forecast that Forecast.save has written: {error}", name=str(path)
        ) from error
    return Record(blocks, ops, steps, is_from_file=True)


def _op_as_data(op: OpRecord) -> dict[str, Any]:
    """Return an operator as plain data; kinds are numbered anew by each process."""
    return {name: value for name, value in asdict(op).items() if name != "kind"}
