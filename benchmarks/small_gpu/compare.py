"""Rows against the bound, against the reference, and against what was set as a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..baseline import Figure
from .bound import Bound, Needs, bound, roofline_s
from .contestants import CONTESTANTS
from .plan import NO_CAP, Selection, State
from .scales import SCALES, WIDE_BATCH, WORKLOADS, Scale
from .weights import sizes_of
from .workloads import ALL

#: Share of the bound to be reached (issue 7), and at which caps.
OF_BOUND = {
    "decode1": (0.90, (25, 50, 75)),
    "prefill": (0.90, (25, 50, 75)),
    "diffusion": (0.90, (25, 50, 75)),
}
#: How much slower than plain torch where everything fits.
OVER_PLAIN = 1.05
#: How many times faster than the peers' best at half of the weights.
OVER_PEERS = {"accelerate": 3.0, "diffusers": 1.2}


class Reference(NamedTuple):
    """Whose result the others are compared with."""

    cap: int
    contestant: str
    words: str


class Comparison:
    """Everything that is known of a run, put together.

    Parameters
    ----------
    state : State
    results : Path
        The folder with the results of each cell.
    """

    def __init__(self, state: State, results: Path) -> None:
        self.state = state
        self.results = results
        self.scale: Scale = SCALES[state.options["scale"]]
        self.is_dry = str(state.options["device"]).startswith("sim:")
        self.is_rehearsal = state.options["device"] == "cpu"

    # -- the bound ------------------------------------------------------------------------------

    def cap_nbytes(self, workload: str, cap: int) -> int | None:
        """Bytes of a cap; None for no cap."""
        if cap == NO_CAP:
            return None
        return sizes_of(self.scale, WORKLOADS[workload]).nbytes * cap // 100

    def needs(self, workload: str, others: str = "in_steps") -> Needs:
        """What a workload needs whatever the cap: from the run with everything resident.

        Parameters
        ----------
        others : str
            How to count what is not weights: ``"in_steps"`` or ``"between_steps"``.
        """
        sizes = sizes_of(self.scale, WORKLOADS[workload])
        passes = ALL[workload].passes
        row = self.state.row(workload, NO_CAP, "lru" if self.is_dry else "plain")
        if row is not None and row["status"] == "measured":
            held = row["memory"][others]
            other = 0 if held is None else max(0, held - sizes.nbytes)
            return Needs(sizes.read_nbytes, passes, other, row["step_s"])
        found = self.probe(workload)
        rates = found["memory_bytes_per_s"], found["flops_per_s"]
        least_s = roofline_s(sizes.read_nbytes, passes, self._tokens(workload), *rates)
        return Needs(sizes.read_nbytes, passes, 0, least_s)

    def _tokens(self, workload: str) -> int:
        scale = self.scale
        return {
            "decode1": 1,
            "decode16": WIDE_BATCH,
            "prefill": scale.prefill_tokens,
            "diffusion": scale.images * scale.patches,
            "training": scale.training_tokens,
        }[workload]

    def probe(self, workload: str) -> dict[str, Any]:
        """What the link and the device reach."""
        probes = self.state.probes
        family = WORKLOADS[workload]
        return dict(probes[family if family in probes else next(iter(probes))]["probe"])

    def bound(self, workload: str, cap: int, others: str = "in_steps") -> Bound | None:
        """The least time of a step; None where nothing is known of the machine yet."""
        if not self.state.probes:
            return None
        nbytes = self.cap_nbytes(workload, cap)
        room = 2**60 if nbytes is None else nbytes
        return bound(self.needs(workload, others), room, self.probe(workload)["h2d_bytes_per_s"])

    # -- results --------------------------------------------------------------------------------

    def path_of(self, workload: str, cap: int, contestant: str) -> Path:
        """Where a cell's result is kept."""
        return self.results / f"{workload}_{cap or 'none'}_{contestant.replace(' ', '_')}.pt"

    def reference(self, workload: str) -> Reference | None:
        """Choose the reference: plain torch uncapped, else what comes nearest to it."""
        where = "on the host" if self.is_dry else "on the same device"
        for cap, who, words in (
            (NO_CAP, "plain", f"plain torch, no cap, {where}"),
            (110, "plain", f"plain torch under a cap of 110 %, {where}"),
            (110, "flow", "flow under a cap of 110 %: plain torch does not fit this device"),
        ):
            row = self.state.row(workload, cap, who)
            if row is not None and row["status"] == "measured":
                return Reference(cap, who, words)
        return None

    def sameness(self, workload: str, cap: int, contestant: str) -> dict[str, Any]:
        """Compare a cell's result with the reference's.

        Returns
        -------
        dict
            `tokens` (None where the workload has none), `bits`, and `largest`: the largest
            difference of two numbers. Empty without a reference.
        """
        reference = self.reference(workload)
        path = self.path_of(workload, cap, contestant)
        if reference is None or not path.exists():
            return {}
        if not self.path_of(workload, *reference[:2]).exists():
            return {}
        ours = torch.load(path, weights_only=True)
        theirs = torch.load(self.path_of(workload, *reference[:2]), weights_only=True)
        differences = [(ours[k].double() - theirs[k].double()).abs().max().item() for k in theirs]
        name = ALL[workload].tokens
        return {
            "tokens": None if name is None else torch.equal(ours[name], theirs[name]),
            "bits": all(torch.equal(ours[key], theirs[key]) for key in theirs),
            "largest": max(differences),
        }

    def is_needed(self, path: Path) -> bool:
        """Whether a file of a run says something that is not in the state.

        A result with the reference's bits does not; those of references are what others will be
        compared with.
        """
        if path.parent != self.results:
            return True
        for workload in WORKLOADS:
            reference = self.reference(workload)
            if reference is None or path == self.path_of(workload, *reference[:2]):
                continue
            for key in self.state.cells:
                name, cap, contestant = key.split("/")
                if name == workload and path == self.path_of(name, int(cap), contestant):
                    row = self.state.row(name, int(cap), contestant) or {}
                    return not row.get("same", {}).get("bits", False)
        return True

    # -- rows and targets -----------------------------------------------------------------------

    def rows(self, selection: Selection) -> list[dict[str, Any]]:
        """Return a row per cell of the selection, in the order of the page.

        A cell that there is no word about yet has the status "not run".
        """
        found = []
        for workload in selection.workloads:
            for cap in sorted(selection.caps):
                for who in selection.contestants:
                    found.append(self.finished(workload, cap, who))
        return found

    def finished(self, workload: str, cap: int, contestant: str) -> dict[str, Any]:
        """Return one cell's row with everything the page shows."""
        row = self.state.row(workload, cap, contestant)
        row = {"status": "not run", "reason": "the run is not finished"} if row is None else row
        row |= {"workload": workload, "cap": cap, "contestant": contestant}
        row["cap_nbytes"] = self.cap_nbytes(workload, cap)
        if row["status"] != "measured":
            return row
        least = self.bound(workload, cap)
        if least is not None and row["is_comparable"]:
            row |= {"bound_s": least.seconds, "of_bound": least.seconds / row["step_s"]}
            floor = self.bound(workload, cap, "between_steps")
            assert floor is not None
            row["of_floor"] = floor.seconds / row["step_s"]
        # A file that was equal does not come along in an archive.
        row["same"] = self.sameness(workload, cap, contestant) or row.get("same", {})
        return row

    def slowest_allowed_s(self, workload: str, cap: int) -> float | None:
        """How long a step of flow may take to meet its target; None without one.

        At 110 % there is one where everything fits, the program's other tensors too.
        """
        least = self.bound(workload, cap)
        if least is None:
            return None
        if cap == 110:
            needs, room_nbytes = self.needs(workload), self.cap_nbytes(workload, cap) or 0
            held_nbytes = sizes_of(self.scale, WORKLOADS[workload]).nbytes + needs.other_nbytes
            return needs.compute_s * OVER_PLAIN if held_nbytes <= room_nbytes else None
        share, caps = OF_BOUND.get(workload, (0.0, ()))
        return least.seconds / share if cap in caps else None

    def targets(self, selection: Selection) -> list[dict[str, Any]]:
        """Return what was set as a target, and what was found; `met` is None where not measured."""
        found = []
        for workload in selection.workloads:
            for cap in sorted(selection.caps):
                row = self.finished(workload, cap, "flow")
                found += self._of_time(workload, cap, row) + _of_memory(workload, cap, row)
            if 50 in selection.caps:
                found += self._of_peers(workload)
        return found

    def _of_time(self, workload: str, cap: int, row: dict[str, Any]) -> list[dict[str, Any]]:
        allowed_s = self.slowest_allowed_s(workload, cap)
        if allowed_s is None:
            return []
        if cap == 110:
            whom = "everything resident" if self.is_dry else "plain torch"
            what, wanted = f"time over {whom}", f"at most {OVER_PLAIN:.2f}"
            ratio = row.get("step_s", 0) / self.needs(workload).compute_s
            text = f"{ratio:.3f}"
        else:
            what, wanted = "share of the bound", f"at least {OF_BOUND[workload][0]:.0%}"
            text = f"{row.get('of_bound', 0):.1%}"
        return [
            {
                "workload": workload,
                "cap": cap,
                "what": what,
                "wanted": wanted,
                "found": text if _counts(row) else _why_not(row),
                "met": row["step_s"] <= allowed_s if _counts(row) else None,
            }
        ]

    def _of_peers(self, workload: str) -> list[dict[str, Any]]:
        found = []
        ours = self.finished(workload, 50, "flow")
        for peer, factor in OVER_PEERS.items():
            rows = [self.finished(workload, 50, w) for w in CONTESTANTS if w.startswith(peer)]
            best = min((r["step_s"] for r in rows if _counts(r)), default=None)
            ratio = best / ours["step_s"] if best is not None and _counts(ours) else None
            why = "; ".join(sorted({_why_not(r) for r in rows if not _counts(r)}))
            found.append(
                {
                    "workload": workload,
                    "cap": 50,
                    "what": f"times faster than {peer} at its best",
                    "wanted": f"at least {factor:g}",
                    "found": f"{ratio:.2f}" if ratio is not None else why or ours["status"],
                    "met": None if ratio is None else ratio >= factor,
                }
            )
        return found


def _counts(row: dict[str, Any]) -> bool:
    return row["status"] == "measured" and row["is_comparable"]


def _why_not(row: dict[str, Any]) -> str:
    if row["status"] == "measured":
        return "times of the host are not comparable"
    return str(row["status"])


def _of_memory(workload: str, cap: int, row: dict[str, Any]) -> list[dict[str, Any]]:
    """The peak within the cap, and the results equal."""
    if row["status"] != "measured":
        return []
    found = []
    held, room = row["memory"]["allocated"], row["cap_nbytes"]
    place = {"workload": workload, "cap": cap}
    if held is not None and room is not None:
        what, wanted = "peak allocated over the cap", "at most 100%"
        share = held / room
        found.append(
            {**place, "what": what, "wanted": wanted, "found": f"{share:.1%}", "met": share <= 1}
        )
    same = row["same"]
    if same:
        equal = same["bits"] if same["tokens"] is None else same["tokens"]
        words = "bits equal" if same["bits"] else f"largest difference {same['largest']:.2g}"
        found.append({**place, "what": "equal", "wanted": "yes", "found": words, "met": equal})
    return found


def figures_of_ours(rows: list[dict[str, Any]]) -> dict[str, Figure]:
    """Return what a dry run compares with its baseline: cells of ours, whose time is virtual."""
    found = {}
    for row in rows:
        if row["status"] == "skipped" or not CONTESTANTS[row["contestant"]].is_ours:
            continue
        cell = f"{row['workload']}/{row['cap']}/{row['contestant']}"
        is_measured = row["status"] == "measured"
        found[f"{cell}/failed"] = Figure(not is_measured, "yes or no", False)
        if is_measured:
            allocated, room = row["memory"]["allocated"], row["cap_nbytes"]
            found[f"{cell}/step"] = Figure(row["step_s"], "s")
            found[f"{cell}/first"] = Figure(row["first_s"], "s")
            found[f"{cell}/allocated"] = Figure(allocated, "bytes", room)
            found[f"{cell}/differs"] = Figure(not row["same"].get("bits"), "yes or no", False)
    return found
