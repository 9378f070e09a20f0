"""What a composite operator takes at its peak: the rules, and the events of torch's allocator."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from torchTensorRef.operators import peaks

#: batches, heads, queries, keys, width, width of the values
SIZES = [
    (2, 4, 64, 64, 16, 16),
    (1, 8, 1, 512, 64, 64),
    (2, 4, 33, 65, 24, 40),
    (1, 2, 256, 256, 8, 9),
    (2, 4, 3, 300, 64, 65),
    (2, 4, 300, 3, 65, 8),
]


def taken_nbytes(path: Path, call: Any) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = call()
    seen.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    del result
    return max(itertools.accumulate(event["args"]["Bytes"] for event in memory))


def calls(sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    b, h, n, m, d, dv = sizes
    q, k, v = torch.rand(b, h, n, d), torch.rand(b, h, m, d), torch.rand(b, h, m, dv)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    mask, kept = torch.zeros(n, m, dtype=dtype), torch.ones(b, h, n, m, dtype=torch.bool)
    grouped = {"enable_gqa": True}
    return {
        "plain": (q, k, v),
        "mask": (q, k, v, mask),
        "whole mask": (q, k, v, kept),
        "grouped": (q, k[:, :2], v[:, :2], grouped),
        "grouped, mask": (q, k[:, :2], v[:, :2], kept, grouped),
        "grouped by one": (q, k[:, :1], v[:, :1], mask, grouped),
        "grouped keys": (q, k[:, :2], v, kept, grouped),
        "one batch of queries": (q[:1], k, v),
        "one batch of keys": (q, k[:1], v[:1]),
        "one head of queries": (q[:, :1], k, v),
        "one head of keys": (q, k[:, :1], v[:, :1], kept),
        "strided": (q.mT.contiguous().mT, k.mT.contiguous().mT, v, kept),
        "strided mask": (q, k, v, torch.zeros(m, n, dtype=dtype).t()),
    }


@pytest.mark.parametrize("how", ["as torch chooses", "math", "dropout"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sizes", SIZES)
def test_attention_takes_no_more_than_its_rule_says(tmp_path, sizes, dtype, how):
    backends = [SDPBackend.MATH] + [SDPBackend.FLASH_ATTENTION] * (how != "math")
    for name, (*args, last) in calls(sizes, dtype).items():
        more = {"dropout_p": 0.5 if how == "dropout" else 0.0}
        args, more = (args, more | last) if isinstance(last, dict) else ([*args, last], more)
        with torch.no_grad(), sdpa_kernel(backends):
            said = peaks.attention(*args, **more)
            call = functools.partial(F.scaled_dot_product_attention, *args, **more)
            taken = taken_nbytes(tmp_path / "events.json", call)
        assert said is not None, name
        assert taken <= said, f"{name}: {taken:,} are taken, {said:,} said"


def test_attention_that_is_fused_counts_its_operands_once():
    q = k = torch.rand(1, 4, 5, 8)
    assert peaks.attention(q, k, k) == 4 * 4 * (3 * 25 + 15 * 8 + 5 * 8)
    assert peaks.attention(q, k, k, torch.zeros(5, 5), 0.0, False) == peaks.attention(q, k, k)
    assert peaks.attention(q, k[:, :2], k[:, :2], enable_gqa=True) == peaks.attention(q, k, k)
