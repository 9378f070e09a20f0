"""What torch is told of TensorRefs: before the first is made, and taken back after the last."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from ...support import processes

PROGRAM = """
import gc
import torch, torchTensorRef
from multiprocessing.reduction import ForkingPickler
from torch import _ops
from torchTensorRef.memory import core

torchTensorRef.tensorsManager.device = "sim"
TensorRef = torchTensorRef.TensorRef

def told():
    rules = sum(TensorRef in op.python_key_table for op in _ops._higher_order_ops.values())
    reader = "aten::tensor_split.tensor_indices_or_sections"
    kernels = torch._C._dispatch_has_kernel_for_dispatch_key(reader, "DeferredInit")
    keys = [op.non_fallthrough_keys.raw_repr() for op in _ops._higher_order_ops.values()]
    later = len(_ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS)
    kind = TensorRef if core.library is None else torch.Tensor
    reducer = ForkingPickler._extra_reducers.get(kind)
    travels = str(getattr(reducer, "__module__", "")).startswith("torchTensorRef")
    attributes = {name: id(value) for name, value in vars(torch.Tensor).items()}
    return rules > 0, kernels, travels, later, keys, attributes

def hooks():
    return len(torch.nn.modules.module._global_forward_pre_hooks)

before = told()
assert before[:3] == (False, False, False), before
x = torch.rand(3)
during = told()
assert during[:3] == (True, True, True), during

torchTensorRef.uninstall()
assert told() == during  # it is alive, and goes on working
assert isinstance(x * 2, TensorRef)
model = torchTensorRef.tensorsManager.adopt(torch.nn.Linear(2, 2))
assert hooks() == 0, hooks()
del model
gc.freeze()  # as servers do before they fork: it is alive all the same
torchTensorRef.uninstall()
assert told()[:3] == during[:3]
assert (x * 2).tolist() == [2 * value for value in x.tolist()]
gc.unfreeze()
del x
torchTensorRef.uninstall()
assert told() == before, (told(), before)
assert hooks() == 0

torchTensorRef.install()
y = torch.rand(3)
assert told()[:3] == during[:3]
print("right")
"""


def test_told_before_the_first_and_taken_back_after_the_last() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr[-2000:]) == ("right\n", "")


def test_another_threads_first_tensor_waits_until_all_is_told():
    """Twelve threads make the first TensorRefs of a process at once, and run operators on them."""
    program = """
        import threading, torchTensorRef, torch
        barrier, found = threading.Barrier(12), []
        def work():
            barrier.wait()
            found.append(torch.ones(4).add_(1).tolist())
        threads = [threading.Thread(target=work) for _ in range(12)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert found == [[2, 2, 2, 2]] * 12, found
    """
    done = processes.python("-c", textwrap.dedent(program))
    assert done.returncode == 0, done.stderr
