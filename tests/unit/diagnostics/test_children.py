"""Shares of a run's budget, and what happens where its folder cannot be used."""

import atexit
import json
import os
import shutil

import pytest

from torchTensorRef.base.errors import TransferError
from torchTensorRef.base.event_log import EventLog
from torchTensorRef.base.options import settings
from torchTensorRef.diagnostics import children


class Manager:
    """What a membership asks of a manager."""

    def __init__(self):
        self.device, self.log = "sim:0", EventLog()
        self.budget = self._budget_setting = None

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)
        if name == "budget":
            object.__setattr__(self, "_budget_setting", value)

    def stats(self):
        return {"op_count": 3}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "run", str(tmp_path))
    monkeypatch.setattr(settings, "budget", "6000")
    monkeypatch.setattr(atexit, "register", lambda *call: None)
    (tmp_path / "rule.json").write_text('{"divides": true}')
    return tmp_path


def member(folder):
    membership, manager = children.Membership(str(folder), is_child=True), Manager()
    membership.open(manager)
    return membership, manager


def other(folder, pid, **said):
    row = {"pid": pid, "is_child": True, "device": "sim:0", "command": "x", **said}
    new = folder / f"{pid}.new"
    new.write_text(json.dumps(row))
    new.rename(folder / f"{pid}.json")  # whole, whenever the thread of shares looks


def test_a_share_goes_by_who_is_alive_on_the_same_device(folder):
    membership, manager = member(folder)
    look = lambda: membership._look(manager) or manager.budget  # noqa: E731
    assert look() is None  # alone it has all of it, as the settings say
    other(folder, os.getppid())
    assert look() == 3000
    other(folder, os.getppid(), stats={})
    assert look() == 6000
    other(folder, os.getppid(), device="sim:1")
    other(folder, 1 << 30)  # nobody
    assert look() == 6000
    membership._end(manager)
    (mine,) = (row for row in children.read_rows(folder) if row["pid"] == os.getpid())
    assert mine["stats"] == {"op_count": 3}


def test_a_program_that_sets_its_budget_is_left_alone(folder):
    membership, manager = member(folder)
    manager.budget = 77
    other(folder, os.getppid())
    membership._look(manager)
    assert manager.budget == 77
    membership._end(manager)


def test_a_share_that_could_not_be_taken_is_tried_again(folder):
    class Broken(Manager):
        is_broken = False

        def __setattr__(self, name, value):
            if name == "budget" and self.is_broken:
                raise TransferError("the link is broken")  # the budget is what it was before
            super().__setattr__(name, value)

    membership, manager = children.Membership(str(folder), is_child=True), Broken()
    membership.open(manager)
    other(folder, os.getppid())
    membership._look(manager)
    other(folder, os.getppid(), stats={})
    Broken.is_broken = True
    for _ in range(2):
        with pytest.raises(TransferError):
            membership._look(manager)
        assert manager.budget == 3000
    Broken.is_broken = False
    membership._look(manager)
    assert manager.budget == 6000
    membership._end(manager)


def test_a_run_that_is_over_is_nobodys_concern(folder, capsys):
    membership, manager = member(folder)
    shutil.rmtree(folder)
    membership._look(manager)
    membership._end(manager)
    second, _ = member(folder)
    assert second._thread is None
    assert capsys.readouterr().err == ""


def test_a_full_disk_costs_the_report_and_not_the_program(folder, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    membership, manager = member(folder)
    assert (membership._thread, manager.budget) == (None, None)
    assert "not in the report: [Errno 28]" in capsys.readouterr().err


def test_without_a_folder_children_stay_plain(monkeypatch, capsys):
    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(children.tempfile, "mkdtemp", full)
    before = dict(os.environ)
    children.prepare({"TTR_DEVICE": "sim"}, budget_is_each=False)
    assert dict(os.environ) == before
    assert "children stay plain" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("whole", "share"),
    [
        ("6GiB", 2 << 30),
        (10, 3),
        ("30%", "10.0%"),
        ({"sim:0": "9KiB", "cuda": "60%"}, {"sim:0": 3 << 10, "cuda": "20.0%"}),
        ("sim:0=9B,cpu=3B", {"sim:0": 3, "cpu": 1}),
    ],
)
def test_a_third_of_a_budget(whole, share):
    assert children.divided(whole, 3) == share
