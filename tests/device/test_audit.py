"""Every operator of torch's database, on a real accelerator through us; see `audit.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from . import audit

ROOT = Path(__file__).parents[2]
SAMPLE = ("add", "matmul", "softmax", "unique", "nn.functional.linear", "index_select", "cumsum")


def test_the_audit_over_a_double(manage, device, tmp_path):
    """The audit itself works: what it calls, compares and writes."""
    if not hasattr(device, "double"):
        pytest.skip("the whole audit runs there")
    manager = manage("lru")
    ops = [op for op in audit.op_db if op.name in SAMPLE]
    found = audit.audit(manager, device, ops)
    assert found.called > 30
    assert found.failures == []
    assert found.fallbacks == {}, "the double has the host's kernels"
    page = audit.page_of("late:0", found)
    assert "Not equal to plain torch: 0" in page


def test_the_audit_sees_a_wrong_result_and_a_fallback(manage, device, monkeypatch):
    if not hasattr(device, "double"):
        pytest.skip("the whole audit runs there")
    manager = manage("lru")
    ops = [op for op in audit.op_db if op.name == "add"]
    monkeypatch.setattr(audit, "plain_result", lambda *_: [torch.tensor(7.25)])
    assert audit.audit(manager, device, ops).failures
    found = audit.Findings(called=1, fallbacks={"unique": {"no kernel": 2}}, left=["zeta"])
    page = audit.page_of("x", found)
    assert "| unique | 2 | no kernel |" in page
    assert "zeta" in page


@pytest.mark.device
@pytest.mark.timeout(280)
def test_every_operator_on_the_accelerator(accelerator):
    """In a process of its own: an operator that breaks the device ends only that."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.device.audit", "--device", accelerator.kind),
            *("--samples", "1", "--seconds", "240"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
