"""The switches of the ladder: shadow, check, trace, poison."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from torchTensorRef.base.errors import InvariantError
from torchTensorRef.base.options import options
from torchTensorRef.operators.plan import plan_of

from ..support.sweeps import only_in_sweeps


def test_the_shadow_agrees_with_what_is_right(manager):
    with options(shadow=True):
        ref = manager.adopt(torch.rand(20, 20))
        result = torch.nn.functional.dropout(torch.relu(ref @ ref) + ref, 0.5).add_(ref)
    assert result.shape == (20, 20)


def test_the_shadow_names_the_first_wrong_operator(manager, monkeypatch):
    plan = plan_of(torch.ops.aten.mul.Tensor)
    calls = []

    def wrong_at_first(*args, **kwargs):
        calls.append(args)
        return torch.ops.aten.mul.Tensor(*args, **kwargs) + (len(calls) == 1)

    wrong_at_first.is_view = False
    wrong_at_first.overloadpacket = plan.op.overloadpacket
    wrong_plan = dataclasses.replace(plan, op=wrong_at_first)
    monkeypatch.setattr(torch.ops.aten.mul.Tensor, "_ttr_plan", wrong_plan)
    ref = manager.adopt(torch.rand(20, 20))
    with options(shadow=True), pytest.raises(InvariantError, match=r"aten\.mul\.Tensor"):
        ref * ref


def test_every_operator_is_checked_and_told(manager):
    with options(check=2, trace=3):
        ref = manager.adopt(torch.rand(20, 20))
        _ = ref @ ref + ref
    assert [record[2] for record in manager.log.records()][-1] == "aten.add.Tensor"


@only_in_sweeps
def test_a_trace_is_written_as_it_happens(tmp_path):
    path = tmp_path / "trace.jsonl"
    program = (
        "import torchTensorRef, torch\n"
        "torchTensorRef.tensorsManager.device = 'sim'\n"
        "x = torch.rand(100, 100)\n"
        "y = x @ x\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"TTR_TRACE": "3", "TTR_TRACE_FILE": str(path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    events = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    assert "aten.mm.default" in events
    assert any(event.startswith("fetch sim") for event in events)
    assert "operators" in done.stderr
