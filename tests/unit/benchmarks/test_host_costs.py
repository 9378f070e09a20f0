"""Calibration finds what each path takes; the table with the host's time is what was measured."""

from __future__ import annotations

import json

import pytest

from benchmarks import calibrate_host, with_host
from benchmarks.calibrate_host import COUNT, costs_of
from torchTensorRef.devices.sim.host_costs import HOST_COSTS, HostCosts


def test_what_each_path_takes_is_found_from_sweeps():
    ready, decided, fetched, evicted = 3_000, 40_000, 50_000, 70_000
    plain = 2_000 * COUNT
    took = {"plain": plain, "ready": plain + ready * COUNT}
    took["decided"] = took["ready"] + decided * COUNT
    took["fetched"] = took["decided"] + fetched * 190
    took["half"] = took["decided"] + fetched * 120 + evicted * 110
    moves = {"fetched": 190, "half fetched": 120, "half evicted": 110}
    assert costs_of(took, moves, "mine") == HostCosts(ready, decided, fetched, evicted, "mine")


def test_what_is_saved_is_read(tmp_path, monkeypatch):
    took = {"plain": 1, "ready": 2, "decided": 3, "fetched": 4, "half": 6}
    sweeps = {
        name: calibrate_host.Took(factor * COUNT * 1e3, factor * COUNT * 2e3)
        for name, factor in took.items()
    }
    moves = {"fetched": COUNT, "half fetched": COUNT, "half evicted": COUNT}
    monkeypatch.setattr(calibrate_host, "measured", lambda: (sweeps, moves))
    monkeypatch.setattr(calibrate_host, "keep_what_is_freed", lambda: True)
    path = tmp_path / "mine.json"
    assert calibrate_host.calibrate("mine", str(path)) == 0
    assert HostCosts.read(path) == HostCosts(1_000, 1_000, 1_000, 2_000, "mine")


ROW = {"time_over_floor": 1.03, "with_host": {"with_host": 1.2, "host_share": 0.1, "bound_by": "x"}}


def test_a_cell_stands_with_and_without_and_the_shape_has_a_bound():
    rows = dict(with_host.rows_of_cells({"decode": {50: {"flow": ROW}}}))
    assert rows == {"decode/50/flow": {"without": 1.03, **ROW["with_host"]}}
    cell = f"{with_host.SHAPE}/50/flow"
    figures = with_host.figures_of({**rows, cell: rows["decode/50/flow"]})
    assert [f.value for f in figures.values()] == [1.03, 1.2, 1.03, 1.2]
    assert [name for name, f in figures.items() if f.bound] == [f"{cell}/with_host"]
    assert figures[f"{cell}/with_host"].bound == 1.10
    assert "| decode/50/flow | 1.030 | 1.200 | 10.0% | x |" in with_host.markdown_of(rows)


@pytest.mark.parametrize("name", HOST_COSTS)
def test_the_page_says_of_whom_it_is(name, monkeypatch):
    monkeypatch.setattr(with_host, "BASELINE_HOST", name)
    assert HOST_COSTS[name].costs.processor in with_host.markdown_of({})


def test_the_baseline_is_within_the_bound():
    kept = json.loads(with_host.KEEPER.path.read_text())
    assert kept["settings"] == {"host": with_host.BASELINE_HOST}
    for cell, bound in with_host.BOUNDS.items():
        assert kept["figures"][f"{cell}/with_host"]["value"] <= bound
