"""A forecast of a real model is what the run does: bytes, peaks, virtual time; there and back.

Under LRU, with room for the largest operator: what runs in blocks no forecast knows. Under Flow one
byte more or less can change what is given up, and so all that follows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks import forecast_against_run as benchmark
from benchmarks.model_shapes import Shape
from torchTensorRef import forecast
from torchTensorRef.promises.record import Record

from ..support.injection import injected, one_thread
from ..support.sweeps import WHOLE
from .zoo import CASES
from .zoo.cases import seed

BY_NAME = {case.name: case for case in CASES if not case.missing}
SAMPLE = (
    "BertForMaskedLM",
    "LlamaForCausalLM",
    "LSTM",
    "ResNetForImageClassification",
)
#: Those of which something is known by values only, or lives otherwise.
KNOWN = {
    "SwitchTransformersForConditionalGeneration": "runs the experts that are chosen",
    "VitsModel": "as long as a number that it has computed says",
    "EncodecModel": "padded by as much as a number that it has computed says",
    "LSTM, both ways, packed": "lengths are read",
    "LongformerModel": "torch's gradient of `as_strided` makes indices, which a promise holds",
    "LEDForConditionalGeneration": "the same",
    "Qwen2VLForConditionalGeneration": "what was asked for is computed before the program runs",
    "LSTM with projection": "a composite operator that only just fits comes in other parts",
}
NAMES = [name for name in (BY_NAME if WHOLE else SAMPLE) if name not in KNOWN]


def largest_nbytes(record: Record) -> int:
    """The most that an operator of a program takes at once."""
    return max(sum(record.blocks[n].nbytes for n in {*op.reads, *op.births}) for op in record.ops)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_a_forecast_is_what_a_run_does(manage: Any, monkeypatch: Any, name: str) -> None:
    monkeypatch.setattr(benchmark, "STRATEGY", "lru")
    case = BY_NAME[name]
    logging.disable(logging.WARNING)
    try:
        with injected(), one_thread():
            manage()
            for how in ("forward", "backward"):
                if how in case.runs:
                    compare(case, case.runs[how])
    finally:
        logging.disable(logging.NOTSET)


def compare(case: Any, work: Any) -> None:
    """Hold a forecast of two parts against the run, with little room and with enough."""

    def run(model: Any) -> Iterator[str]:
        for number in range(2):
            seed(number)
            work(model)
            yield f"part {number}"

    model = benchmark.made(case.make, real=False)
    spec = benchmark.scaled_spec(benchmark.weights_nbytes(model))
    seen = forecast(run, model, device=spec, budget=spec.capacity_nbytes)
    least = largest_nbytes(seen.record) * 5 // 4
    for share in (60, 110):
        budget = max(least, seen.enough_nbytes * share // 100)
        parts = benchmark.run(Shape(case.name, case.make, run), spec, budget)
        for step, part in zip(seen.on(budget=budget, strategy="lru").steps, parts, strict=True):
            foretold = step.time_ns, step.fetched_nbytes, step.written_back_nbytes, step.peak_nbytes
            pairs = zip(foretold, part, (benchmark.TIME_BOUND, 0.01, 0.01, 0.01), strict=True)
            assert all(benchmark.apart(a, b) <= most for a, b, most in pairs), (foretold, part)
