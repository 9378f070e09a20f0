"""A timeline in the format of Chrome's traces, which https://ui.perfetto.dev opens.

Each accelerator is a process, whose engines are tracks, with a slice (`B` and its `E`) for each
operator, copy and stall; evictions are instants; residency is a counter. What the host runs is with
the first. Times are in microseconds from the beginning. What a replay needs stands in the arguments
of the slices, and under `torchTensorRef`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

from ...base.timeline_tracks import COMPUTE, D2H, H2D, HOST, STALLS, TRACKS, VERSION

#: Of the first accelerator; the others follow.
_PID = 1


def chrome_trace(timeline: Any, manager: Any, stats_before: dict[str, Any]) -> dict[str, Any]:
    """Put a timeline together as an object that is a Chrome trace in JSON."""
    books = manager.residency.books
    stats, devices = manager.stats(), timeline.devices or [books.main]
    pids = {device.name: _PID + place for place, device in enumerate(devices)}
    slices: list[tuple[int, int, str, str, int, int, dict[str, Any]]] = []
    points: list[dict[str, Any]] = []
    name_of = _namer(timeline)
    for happening, ran in timeline.events:
        name = name_of(happening.block_id) if happening.block_id else happening.name
        _add(happening, ran, name, slices, points, timeline.began_ns, pids)
    points += [
        _counter(nbytes, at_ns - timeline.began_ns, pids[name])
        for at_ns, name, nbytes in timeline.resident
    ]
    happened = [*_pairs(slices, timeline.began_ns), *points]
    rows = [_about(device, timeline, books) for device in devices]
    return {
        "traceEvents": [
            *(head for name, pid in pids.items() for head in _heads(name, pid)),
            *sorted(happened, key=_when),
        ],
        "displayTimeUnit": "ns",
        "torchTensorRef": {
            "version": VERSION,
            "strategy": stats["strategy"],
            **rows[0],
            "others": rows[1:],
            "is_cut": timeline.is_cut,
            "stats": since(stats_before, stats),
            "blocks": {
                number: [name_of(number), nbytes, is_persistent]
                for number, (nbytes, is_persistent) in timeline.blocks.items()
            },
        },
    }


def _about(device: Any, timeline: Any, books: Any) -> dict[str, Any]:
    """What there is to say of one accelerator."""
    ledger = books.ledgers.get(device)
    return {
        "device": device.name,
        "spec": _spec_of(device),
        "clock": "virtual" if device.has_virtual_clock else "wall",
        "budget_nbytes": ledger.limit_nbytes if ledger else device.capacity_nbytes,
        # More than the budget where none was set.
        "limit_nbytes": getattr(device, "limit_nbytes", None),
        "resident_at_first": timeline.resident_at_first.get(device.name, []),
    }


def _namer(timeline: Any) -> Callable[[int], str]:
    """Return what names a block: the program's name, else by the operator that has made it."""
    made: dict[int, str] = {}
    for happening, ran in timeline.events:
        for number, _ in ran.born if ran is not None else ():
            operator = happening.name.removeprefix("aten.").partition(".")[0]
            made[number] = f"result of {operator}" + (
                f" in {happening.module}" if happening.module else ""
            )

    def name_of(number: int) -> str:
        return timeline.names.get(number) or made.get(number) or f"b{number}"

    return name_of


def _when(event: dict[str, Any]) -> float:
    """When an event is; the order of those at one moment stays."""
    at: float = event["ts"]
    return at


def _spec_of(device: Any) -> Any:
    spec = getattr(device, "spec", None)
    return dataclasses.asdict(spec) if dataclasses.is_dataclass(spec) else None  # type: ignore[arg-type]


#: What is not counted up.
_LEVELS = frozenset(
    {
        "budget_nbytes",
        "largest_op_nbytes",
        "optimizer_nbytes",
        "page_locked_nbytes",
        "peak_resident_nbytes",
        "resident_nbytes",
        "weights_nbytes",
    }
)


def since(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return statistics less what had been counted before; levels, names and lists as they are."""
    return {
        key: value - before[key]
        if isinstance(value, int) and key not in _LEVELS and key in before
        else value
        for key, value in now.items()
    }


def _add(
    happening: Any,
    ran: Any,
    name: str,
    slices: list[Any],
    points: list[dict[str, Any]],
    began_ns: int,
    pids: dict[str, int],
) -> None:
    kind, start_ns = happening.kind, happening.start_ns
    end_ns, pid = max(happening.end_ns, start_ns), pids.get(happening.device, _PID)
    if kind == "op":
        args = {"module": happening.module, "nbytes": happening.nbytes, **ran._asdict()}
        args["place"] = len(slices)  # two tracks may show two operators at one moment
        track = COMPUTE if happening.device in pids else HOST
        slices.append((pid, track, name, "op", start_ns, end_ns, args))
    elif kind == "stall":
        args = {"cause": happening.cause, "module": happening.module, "name": name}
        slices.append((pid, STALLS, f"waits for {name}", "stall", start_ns, end_ns, args))
    elif kind in ("fetch", "write_back"):
        word = kind if not happening.is_ahead else "prefetch"
        args = {"block": happening.block_id, "nbytes": happening.nbytes, "cause": happening.cause}
        args["name"] = name
        track = D2H if kind == "write_back" else H2D
        slices.append((pid, track, f"{word} {name}", word, start_ns, end_ns, args))
    elif kind != "drop":  # it stands there as an eviction
        point = _point(f"{kind} {name}", kind, start_ns - began_ns, pid)
        point["args"] = {"nbytes": happening.nbytes, "cause": happening.cause, "name": name}
        point["args"]["block"] = happening.block_id
        points.append(point)


def _pairs(slices: list[Any], began_ns: int) -> list[dict[str, Any]]:
    """Give each slice its beginning and its end; those of a track follow one another."""
    events = []
    free_ns: dict[tuple[int, int], int] = {}
    in_order = sorted(slices, key=lambda s: (s[0], s[1], s[5]))
    for pid, track, name, kind, start_ns, end_ns, args in in_order:
        # Those of a real device overlap where their ends are seen late.
        start_ns = max(start_ns, free_ns.get((pid, track), began_ns))
        free_ns[pid, track] = end_ns = max(end_ns, start_ns)
        head = {"pid": pid, "tid": track, "name": name, "cat": kind}
        events.append({**head, "ph": "B", "ts": (start_ns - began_ns) / 1000, "args": args})
        events.append({**head, "ph": "E", "ts": (end_ns - began_ns) / 1000})
    return events


def _counter(nbytes: int, at_ns: int, pid: int) -> dict[str, Any]:
    at = max(at_ns, 0) / 1000
    return {"pid": pid, "ph": "C", "name": "resident", "ts": at, "args": {"bytes": nbytes}}


def _point(name: str, kind: str, at_ns: int, pid: int) -> dict[str, Any]:
    at = max(at_ns, 0) / 1000
    return {"pid": pid, "tid": COMPUTE, "ph": "i", "s": "t", "name": name, "cat": kind, "ts": at}


def _heads(device: str, pid: int) -> list[dict[str, Any]]:
    heads: list[dict[str, Any]] = [
        {"pid": pid, "ph": "M", "name": "process_name", "args": {"name": device}}
    ]
    for number, name in TRACKS.items():
        if number == HOST and pid != _PID:
            continue  # there is one host
        head = {"pid": pid, "tid": number, "ph": "M"}
        heads.append({**head, "name": "thread_name", "args": {"name": name}})
        heads.append({**head, "name": "thread_sort_index", "args": {"sort_index": number}})
    return heads


def write_json(path: str, value: Any) -> None:
    """Write a file that is either as it was or has all of it."""
    part = f"{path}.{os.getpid()}.part"
    try:
        with open(part, "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(part, path)
    except BaseException:
        if os.path.exists(part):
            os.unlink(part)
        raise
