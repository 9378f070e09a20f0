"""A seeded sample of torch's operators, each forced into blocks of random sizes."""

from __future__ import annotations

import pytest
import torch

from torchTensorRef.strategy.choice import make_strategy

from ..support.forced_blocks import forced_blocks
from ..support.operator_cases import Outcome, cases_of, compare, operators, turn_of
from ..support.sweeps import WHOLE, in_turn
from .known_differences import KNOWN

#: One operator in so many is in the sample.
ONE_IN = 40 if WHOLE else 80

#: So many inputs of each dtype; all by `make conformance` with "--blocks" in CONFORMANCE_ARGS.
SAMPLES = {torch.float32: 2, torch.bfloat16: 1, torch.int64: 1}
#: Operators whose backward or forward is made of those that have a rule of their own.
ALWAYS = frozenset(
    {
        "addmm",
        "baddbmm",
        "cat",
        "cumsum",
        "gather",
        "index_select",
        "log_softmax",
        "nn.functional.conv2d",
        "nn.functional.embedding",
        "nn.functional.group_norm",
        "nn.functional.layer_norm",
        "nn.functional.linear",
        "nn.functional.nll_loss",
        "nn.functional.scaled_dot_product_attention",
        "sort",
        "sum",
        "topk",
        "var",
    }
)
#: Which operators have met their rules, by the name of whose samples were run.
RULES_MET: dict[str, set[str]] = {}
SAMPLE = [name for name in operators() if name in ALWAYS or turn_of(name) % ONE_IN == 0]


@pytest.fixture(autouse=True)
def one_thread():
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "where"),
    in_turn([name for name in SAMPLE if name not in KNOWN], ["exact", "anywhere"], each=1),
)
def test_the_operator_in_blocks_does_what_plain_torch_does(manage, name, where):
    manage(make_strategy("lru"))
    outcome = Outcome()
    with forced_blocks(turn_of(name), keep_bits=where == "exact") as met:
        for dtype in SAMPLES:
            for case in cases_of(operators()[name], dtype, samples=SAMPLES[dtype]):
                outcome.note(case.variant, dtype, compare(case))
    RULES_MET[name] = set(met)
    assert not outcome.failures


@pytest.mark.filterwarnings("ignore")
def test_the_rules_are_met(manage):
    """By the tests above; what of them was not run is run here."""
    manage("lru", nbytes=1 << 24)
    with forced_blocks(0, keep_bits=False) as met:
        for name in sorted(ALWAYS - RULES_MET.keys()):
            for case in cases_of(operators()[name], torch.float32, samples=2):
                compare(case)
    assert len(met.keys() | set().union(*RULES_MET.values())) > 20
