"""No two streams touch the same bytes with nothing between them: torch's sanitizer is the judge."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .test_promises import MIB, assert_same_at_home, home, on, ours

PROGRAM = Path(__file__).with_name("race_program.py")


def run(kind: str) -> str:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), kind],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[:6000] + "\n...\n" + done.stderr[-2000:]
    assert "CSAN detected a possible data race" not in done.stderr
    return done.stdout


def assert_all_was_heard(output: str) -> None:
    kernels, copies, evicted = map(int, output.split())
    assert evicted > 20
    assert kernels > evicted
    assert copies > evicted / 2, "what is evicted clean is copied once"


def test_the_program_moves_everything_about():
    assert_all_was_heard(run("late"))


def test_what_a_slow_kernel_reads_is_not_overwritten(manage, device, scale):
    """The sanitizer forgets a pointer when its storage is emptied, so bits are compared, too.

    Each kernel sleeps first. Its operand is evicted as soon as it was issued, and the next fetch
    gets that room: without a wait in between it would poison what the kernel is about to read.
    """
    is_card = device.torch_device.type == "cuda"
    count, width = 6, scale.width(256)
    torch.manual_seed(4)
    weights = [torch.rand(width, width) for _ in range(count)]
    x = torch.rand(4, width)
    expected = [on(device, x) @ on(device, w) for w in weights]
    expected = [home(y) for y in expected]
    manager = manage("lru", scale.nbytes(2 * MIB))
    managed = [manager.adopt(w.clone()) for w in weights]
    y = manager.adopt(x.clone()).toGPU()
    evictor, books = manager.residency.evictor, manager.residency.books
    results: list[list[torch.Tensor]] = []
    with torch.no_grad():
        for _ in range(4):
            found = []
            for w in managed:
                if is_card:
                    torch.cuda._sleep(20_000_000)  # some milliseconds
                found.append(y @ w)
                replica = w._ttr_block.replicas[books.main]
                assert evictor.evict(replica, "at once"), "it is evicted under the kernel"
            results.append(ours(manager, found))
    for result in results:
        assert_same_at_home(expected, result)


@pytest.mark.device
def test_no_race_on_a_card(accelerator):
    if accelerator.kind != "cuda":
        pytest.skip(f"torch has a sanitizer for cuda only, not for {accelerator.kind}")
    assert_all_was_heard(run("cuda"))
