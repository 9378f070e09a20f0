"""Progress of long work: on a terminal only, and only if it takes its time."""

import contextlib
import functools
import io
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

import torchTensorRef
from torchTensorRef.base import progress
from torchTensorRef.base.listeners import listeners
from torchTensorRef.base.units import format_nbytes
from torchTensorRef.devices.host.page_lock import LEAST_NBYTES, PageLocks
from torchTensorRef.inject import hooks
from torchTensorRef.interception.onlookers import first_pass
from torchTensorRef.memory.report import living_blocks


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Give what is stderr inside a test `on_a_terminal`; a tenth of a second is long there."""
    monkeypatch.setenv("TERM", "xterm")  # on a dumb one nothing can be drawn anew
    monkeypatch.setattr(progress, "AFTER_S", 0.1)
    yield Terminal()
    assert not progress.screen.is_taken
    assert not listeners.any
    timers = [t for t in threading.enumerate() if isinstance(t, threading.Timer)]
    assert all(t.finished.is_set() for t in timers)  # one that was cancelled ends a moment later


def on_a_terminal(test):
    """Run a test with `terminal` as stderr, which pytest itself sets between fixtures and test."""

    @functools.wraps(test)
    def run(*, terminal, **fixtures):
        with contextlib.redirect_stderr(terminal):
            test(terminal=terminal, **fixtures)

    return run


def wait_for(condition):
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < 20
        time.sleep(0.01)


@on_a_terminal
def test_a_bar_comes_after_a_while_and_goes_away(terminal):
    with progress.Bar("adopting Llama", 4 << 20) as bar:
        assert terminal.getvalue() == ""
        wait_for(lambda: "adopting Llama" in terminal.getvalue())
        bar.advance(2 << 20)
        wait_for(lambda: "2.0/4.0 MiB" in terminal.getvalue())
        with progress.Bar("another", 4 << 20):
            time.sleep(0.3)  # one at a time draws
    assert "another" not in terminal.getvalue()


@on_a_terminal
def test_what_ends_soon_shows_nothing(terminal):
    with progress.Bar("short", 1):
        pass
    time.sleep(0.2)
    assert terminal.getvalue() == ""


def test_where_there_is_no_terminal_nothing_is_shown(monkeypatch):
    monkeypatch.setattr(progress, "AFTER_S", 0.0)
    file = io.StringIO()
    for stderr in (file, None):
        with contextlib.redirect_stderr(stderr), progress.Bar("adopting", 1):
            time.sleep(0.1)
            assert not progress.Lines("page-locking").is_due()
    assert file.getvalue() == ""


@on_a_terminal
def test_adopting_a_large_module_shows_how_far_it_is(terminal, manager, monkeypatch):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    adopt, ownership = manager.ownership.adopt_in_place, manager.ownership
    monkeypatch.setattr(
        type(ownership), "adopt_in_place", lambda _, t: (time.sleep(0.05), adopt(t))[1]
    )
    assert manager.adopt(model) is model
    assert "adopting Sequential" in terminal.getvalue()
    assert "/130.0 KiB" in terminal.getvalue()
    model[0].lazy = torch.nn.LazyLinear(3)  # has no bytes yet
    manager.adopt(model)


@on_a_terminal
def test_loading_a_file_shows_its_name_and_size(terminal, manager, tmp_path):
    class Slow:
        def __reduce__(self):
            return time.sleep, (0.5,)

    path = tmp_path / "weights.pt"
    torch.save({"w": torch.ones(1000), "slow": Slow()}, path)
    with hooks.is_disabled.entered(False):
        loaded = torch.load(path, weights_only=False)
    assert loaded["w"].sum() == 1000
    assert "loading weights.pt" in terminal.getvalue()


class SlowLocker:
    """Takes its time, as a driver does with gigabytes."""

    makes_storages = True

    def allocate(self, nbytes, free_later):
        time.sleep(0.1)
        return torch.empty(nbytes, dtype=torch.uint8)


@on_a_terminal
def test_page_locking_says_how_much_is_left(terminal):
    locks = PageLocks(SlowLocker(), 1 << 40)
    with torchTensorRef.disabled():
        bases = [torch.empty(LEAST_NBYTES, dtype=torch.uint8) for _ in range(8)]
    for _ in range(2):
        for base in bases:
            locks.wish(base, may_mirror=True)
    assert locks.settle(20)
    lines = terminal.getvalue().splitlines()
    assert "torchTensorRef: page-locking host memory: " in lines[0]
    assert " MiB of 8.00 MiB, after " in lines[0]
    assert 1 <= len(lines) <= 4  # after 0.1 s, 0.2 s, 0.4 s
    assert locks.locked_nbytes == 8 * LEAST_NBYTES


@on_a_terminal
def test_the_first_pass_says_how_many_weights_were_met(terminal, manage):
    manager = manage("lru", 1 << 20)
    model = manager.adopt(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))))
    first_pass.begin(manager)
    assert listeners.any
    x = manager.adopt(torch.rand(1, 64))
    with torch.no_grad():
        for layer in model:
            time.sleep(0.05)
            x = layer(x)
    lines = terminal.getvalue().splitlines()
    assert lines
    assert "first pass, weights met: " in lines[0]
    weights = [block for block in living_blocks(manager) if block.is_persistent]
    total = format_nbytes(sum(block.nbytes for block in weights))
    assert f" of {total}, after " in lines[0]
    manager.bring_all_home()
    with torch.no_grad():
        model(x)
    assert not listeners.any  # a weight came for the second time: it is over
    assert len(terminal.getvalue().splitlines()) == len(lines) <= 4


@pytest.mark.skipif(sys.platform == "win32", reason="terminals of POSIX")
def test_a_program_on_a_terminal_is_told_and_one_in_a_pipe_is_not(script):
    program = script("""\
        import time
        import torchTensorRef
        from torchTensorRef.base import progress
        progress.AFTER_S = 0.2
        torchTensorRef.tensorsManager.device = "sim"
        import torch
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        x = torch.rand(1, 64)
        with torch.no_grad():
            for layer in model:
                time.sleep(0.1)
                x = layer(x)
        print("done")
    """)
    import pty

    ours, theirs = pty.openpty()
    said = {}
    for name, stderr in (("terminal", theirs), ("pipe", subprocess.PIPE)):
        done = subprocess.run([sys.executable, program], stdout=subprocess.PIPE, stderr=stderr,
                              text=True, timeout=200, check=True)  # fmt: skip
        assert done.stdout == "done\n"
        said[name] = done.stderr
    os.close(theirs)
    text = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "first pass, weights met" in text
    assert said["pipe"] == ""
