"""The table of patches: installed once, taken back whole, and invisible to those who look."""

import copy
import functools
import importlib
import inspect
import pickle
import subprocess
import sys
import types

import pytest
import torch
import wrapt

from torchTensorRef.base import torch_versions
from torchTensorRef.inject import hooks, torch_
from torchTensorRef.inject.patches import HookPatch, LatePatch, MethodPatch, Patch, PatchedFunction

from ...support.injection import kind_of

FUNCTIONS = [patch for patch in torch_.PATCHES if isinstance(patch, Patch)]


def current(patch):
    return wrapt.resolve_path(importlib.import_module(patch.module), patch.path)[2]


def snapshot():
    """What every row touches, by identity."""
    nn = torch.nn.modules.module
    hooks_now = [
        list(nn._global_parameter_registration_hooks.values()),
        list(nn._global_buffer_registration_hooks.values()),
    ]
    return [current(patch) for patch in FUNCTIONS], hooks_now


@pytest.fixture
def uninstalled():
    hooks.uninstall()
    yield
    hooks.install()


def test_every_row_has_a_reason_and_matches_this_torch():
    assert [patch.name for patch in torch_.PATCHES if not patch.reason] == []
    for patch in torch_.PATCHES:
        importlib.import_module(patch.module)  # late rows find out only then
    absent = {patch.name for patch in torch_.PATCHES if patch.absence}
    lacking = torch_versions.lacking(torch.__version__)
    assert absent == {patch.name for patch in torch_.PATCHES if patch.name in lacking}
    assert all(patch.installed or patch.name in lacking for patch in torch_.PATCHES)


def test_uninstall_gives_back_the_same_objects(uninstalled):
    originals, nn_hooks = snapshot()
    assert not any(isinstance(original, PatchedFunction) for original in originals)
    assert nn_hooks == [[], []]
    for _ in range(2):
        hooks.install()
        hooks.uninstall()
    again, nn_hooks = snapshot()
    assert all(now is before for now, before in zip(again, originals, strict=True))
    assert nn_hooks == [[], []]
    assert not any(patch.installed for patch in torch_.PATCHES)
    made = [torch.zeros(2), torch.nn.Linear(2, 2).weight, torch.tensor([1.0])]
    assert [type(tensor) for tensor in made] == [torch.Tensor, torch.nn.Parameter, torch.Tensor]


def test_installing_twice_changes_nothing():
    before, nn_hooks = snapshot()
    hooks.install()
    torch_.apply()
    after, nn_hooks_after = snapshot()
    assert all(now is then for now, then in zip(after, before, strict=True))
    assert nn_hooks_after == nn_hooks
    assert [len(row) for row in nn_hooks] == [1, 1]


def test_a_name_taken_while_installed_is_plain_afterwards():
    taken = torch.zeros
    hooks.uninstall()
    try:
        assert kind_of(taken(2)) is torch.Tensor
    finally:
        hooks.install()


def test_somebody_elses_patch_over_ours_is_left_alone(monkeypatch):
    def theirs(*sizes):
        return ours(*sizes)

    ours = torch.ones
    monkeypatch.setattr(torch, "ones", theirs)
    hooks.uninstall()
    try:
        assert torch.ones is theirs
        assert kind_of(torch.ones(2)) is torch.Tensor
    finally:
        monkeypatch.undo()
        torch.ones = ours.__wrapped__
        hooks.install()
    assert isinstance(torch.ones, PatchedFunction)


def test_a_row_that_matches_nothing_says_so_and_raises_nothing():
    rows = [
        Patch("torch", "no_such_factory", torch_.own_memory_factory, "for this test"),
        Patch("no_such_library", "f", torch_.own_memory_factory, "for this test"),
        HookPatch("torch", "no_such_hook", print, "for this test"),
        MethodPatch("torch._C", "Generator.no_such_method", print, "for this test"),
        MethodPatch("torch", "NoSuchClass.method", print, "for this test"),
        MethodPatch("torch", "zeros.method", print, "for this test"),
    ]
    for row in rows:
        row.install()
        row.uninstall()
    assert [(row.installed, bool(row.absence)) for row in rows] == [(False, True)] * len(rows)


def test_methods_of_classes_in_c_are_taken_and_given_back(uninstalled):
    rows = [patch for patch in torch_.PATCHES if isinstance(patch, MethodPatch)]
    legacy = type(torch.FloatTensor)
    before = vars(torch.Generator)["set_state"], vars(legacy)["__instancecheck__"]
    for _ in range(2):
        hooks.install()
        assert vars(torch.Generator)["set_state"] is not before[0]
        # Also what was looked up before: the interpreter remembers methods.
        for x, kind in (
            (torch.ones(2), torch.FloatTensor),
            (torch.ones(2).long(), torch.LongTensor),
        ):
            assert isinstance(x, kind)
            assert not isinstance(x, torch.DoubleTensor)
        generator = torch.Generator()
        generator.set_state(torch.Generator().manual_seed(3).get_state())
        assert generator.initial_seed() == 3
        hooks.uninstall()
        after = vars(torch.Generator)["set_state"], vars(legacy)["__instancecheck__"]
        assert all(now is then for now, then in zip(after, before, strict=True))
    assert {row.path for row in rows} >= {"_C.Generator.set_state", "_C.TensorBase.to"}
    assert isinstance(torch.ones(2), torch.FloatTensor)


def test_a_late_row_waits_for_its_module():
    module = types.ModuleType("late_for_this_test")
    seen = []

    def change(arrived):
        seen.append(arrived)
        return lambda: seen.append("undone")

    row = LatePatch("late_for_this_test", "x", change, "for this test")
    row.install()
    row.install()
    assert seen == []
    sys.modules["late_for_this_test"] = module
    try:
        row.install()
        row.uninstall()
        row.uninstall()
        row.install()
    finally:
        del sys.modules["late_for_this_test"]
    assert seen == [module, "undone", module]


def test_a_failure_while_patching_does_not_reach_the_import(tmp_path):
    """A torch that is too old, say: one warning, and everything plain."""
    program = (
        "import warnings, torchTensorRef\n"
        "from torchTensorRef.inject import hooks\n"
        "import types, sys\n"
        "sys.modules['torchTensorRef.inject.torch_'] = types.ModuleType('broken')\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import torch\n"
        "print(type(torch.zeros(1)) is torch.Tensor, hooks.state.failures)\n"
        "print([str(w.message) for w in caught if w.category is RuntimeWarning])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True ")
    assert "AttributeError" in done.stdout
    assert "TTR_DISABLE=1" in done.stdout


def test_what_is_imported_before_torch_keeps_nothing_from_being_patched(tmp_path):
    """It imports torch itself, whose import asks for it."""
    program = "import torchTensorRef.memory.core, torch; print(torch.ones(2).proxyInfo)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "8 bytes on cpu" in done.stdout


@pytest.mark.parametrize(
    ("version", "is_old"),
    [("2.8.1", True), ("1.13.0+cu117", True), ("2.9.0", False), ("2.13.0+cpu", False)],
)
def test_an_old_torch_is_refused_in_a_sentence(version, is_old):
    assert bool(hooks.complaint_of(version)) is is_old


@pytest.mark.parametrize("patch", FUNCTIONS, ids=lambda patch: patch.path)
def test_a_patched_function_passes_for_the_original(patch):
    ours, original = current(patch), patch.original
    assert ours == original
    assert hash(ours) == hash(original)
    assert ours in {original}
    assert original in {ours}
    assert ours.__name__ == original.__name__
    assert ours.__doc__ == original.__doc__
    assert inspect.isroutine(ours) or inspect.isclass(ours)
    assert copy.copy(ours) is ours
    assert copy.deepcopy(ours) is ours
    if (
        "<locals>" not in original.__qualname__
    ):  # as what torch's compiler puts there once it is used
        assert pickle.loads(pickle.dumps(ours)) == original


def test_a_pickle_of_a_partial_factory_makes_tensors():
    made = pickle.loads(pickle.dumps(functools.partial(torch.zeros, 2)))()
    assert made.tolist() == [0, 0]


def test_torchs_own_tables_find_the_patched_functions():
    assert torch.zeros in torch.overrides.get_ignored_functions()
    assert torch.zeros_like in torch.overrides.get_testing_overrides()
    assert torch.overrides.resolve_name(torch.zeros) == "torch.zeros"
    assert torch.zeros in torch.utils._device._device_constructors()


def test_a_function_kept_on_a_class_is_not_bound():
    class Maker:
        make = torch.zeros

    assert Maker().make(2).tolist() == [0, 0]


def test_another_current_stream_is_seen(monkeypatch):
    from torchTensorRef.devices.accelerator import streams

    class Follower:
        seen = 0

        def follow(self):
            self.seen += 1

    follower = Follower()
    streams._followers.add(follower)
    monkeypatch.setattr(torch._C, "_cuda_setStream", lambda **_: None, raising=False)

    class Stream:
        stream_id = device_index = device_type = 0

    torch.cuda.set_stream(Stream())
    assert follower.seen == 1
