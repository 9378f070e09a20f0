"""A device whose tensors really lie elsewhere: are operands, results and labels where they belong?

The double keeps its tensors on `meta`: torch refuses there what a card would refuse, operands on
several devices and operators without a kernel, but nothing has values.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from torchTensorRef.interception import results, slow_path
from torchTensorRef.memory import plain_views
from torchTensorRef.operators.plan import plan_of

from ..device import audit
from ..support.device_double import MetaDevice
from ..support.sweeps import one_in

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def manager() -> Any:
    import torchTensorRef
    import torchTensorRef.tensor.install
    from torchTensorRef import tensorsManager

    device = MetaDevice()
    tensorsManager.device = device
    tensorsManager.budget = 1 << 28
    tensorsManager.strategy = "lru"
    tensorsManager.reset_stats()
    with torchTensorRef.disabled():
        yield tensorsManager
    tensorsManager.check()
    # Not `bring_all_home`: on `meta` there are no bytes to bring, and nobody wants them.
    tensorsManager.residency.books.ledgers.clear()
    tensorsManager.budget = None
    tensorsManager.device = "sim"


def is_there(manager: Any, ref: Any) -> bool:
    return ref._ttr_block.readable_on(manager.residency.books.main) is not None


def test_labels_differ_only_while_it_is_used(manager):
    books = manager.residency.books
    assert books.labels_differ
    manager.device = "sim"
    assert not books.labels_differ


def test_a_step_of_training_stays_there(manager):
    model = manager.adopt(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten())
    )
    optimizers = [
        torch.optim.AdamW(model.parameters(), foreach=True),
        torch.optim.AdamW(model.parameters(), fused=True),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False),
    ]
    for optimizer in optimizers:
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(manager.adopt(torch.rand(2, 3, 20, 20))).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=False)
            optimizer.step()
    assert is_there(manager, loss)
    assert all(is_there(manager, p) and is_there(manager, p.grad) for p in model.parameters())
    assert manager.stats()["host_fallback_reasons"] == {}


@pytest.mark.parametrize("is_open", [False, True], ids=["first", "ready"])
def test_a_device_that_a_call_names_is_a_label(manager, is_open):
    x = manager.adopt(torch.rand(300, 300))
    if is_open:
        x = x + 1
    for made in (
        x.new_zeros(3),
        x.new_zeros(3, device="cpu"),
        torch.zeros_like(x, device="cpu"),
        torch.full_like(x, 2.0, device=torch.device("cpu")),
        x.new_empty_strided((2, 2), (2, 1)),
        x.to("cpu", torch.float64),
    ):
        assert made.device.type == "cpu"
        assert is_there(manager, made)
        assert is_there(manager, made + 1)


def test_what_is_made_beside_a_ready_tensor_takes_the_ready_path(manager):
    x = manager.adopt(torch.rand(300, 300)) + 1
    before = manager.stats()
    made = (
        x.double(),
        x.to(torch.float16),
        torch.zeros_like(x),
        torch.full_like(x, 2.0, dtype=torch.int64),
        x.new_empty((3, 4)),
        x.new_empty((3, 4), device="cpu"),
        x.softmax(-1, dtype=torch.float64),
    )
    after = manager.stats()
    assert after["slow_op_count"] == before["slow_op_count"]
    assert after["ready_op_count"] >= before["ready_op_count"] + len(made)
    for one in made:
        assert one.device.type == "cpu"
        assert is_there(manager, one)


def test_attention_and_lstms_that_were_chosen_for_the_host(manager):
    q = manager.adopt(torch.rand(2, 4, 5, 8)).requires_grad_()
    nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    lstm = manager.adopt(nn.LSTM(8, 8, bidirectional=True))
    y, _ = lstm(manager.adopt(torch.rand(3, 2, 8)))
    y.sum().backward()
    assert is_there(manager, q.grad)
    assert is_there(manager, lstm.weight_hh_l0.grad)
    assert manager.stats()["host_fallback_reasons"] == {}


def test_operands_that_kernels_read_at_home(manager):
    lstm = manager.adopt(nn.LSTM(8, 8))
    lengths = manager.adopt(torch.tensor([4, 2]))
    packed = nn.utils.rnn.pack_padded_sequence(manager.adopt(torch.rand(4, 2, 8)), lengths)
    y, _ = lstm(packed)
    padded, _ = nn.utils.rnn.pad_packed_sequence(y)
    padded.sum().backward()
    assert is_there(manager, y.data)
    assert is_there(manager, lstm.weight_hh_l0.grad)
    assert manager.stats()["host_fallback_reasons"] == {}


def test_what_has_no_kernel_there_runs_on_the_host(manager):
    x = manager.adopt(torch.tensor([3.0, 1.0, 3.0]))
    for _ in range(2):
        assert manager.release(x.unique()).tolist() == [1.0, 3.0]
    (reason,) = manager.stats()["host_fallback_reasons"]
    assert reason.startswith("no kernel for aten._unique2")


def test_what_a_kernel_there_refuses_runs_on_the_host(manager):
    x = manager.adopt(torch.tensor([3.0, 1.0]))
    assert torch.equal(x, manager.adopt(torch.tensor([3.0, 1.0])))
    ready = x + 1  # on the ready path there is no ladder: it has to be left
    assert torch.equal(ready, ready)
    assert isinstance(ready.sum().item(), float)
    y = manager.adopt(torch.tensor(2.5))
    assert y.item() == 2.5
    assert float(y) == 2.5


def test_a_mistake_of_the_programs_own_is_raised(manager):
    x = manager.adopt(torch.rand(30, 40))
    for operand in (x, x + 1):
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size mismatch"):
            operand @ operand


@pytest.mark.parametrize("number", one_in(2, range(4)))
def test_the_operator_database(manager, number, monkeypatch):
    """A sixteenth of it each; the audit runs all of it on a real accelerator."""
    monkeypatch.setattr(audit, "DTYPES", (torch.float32,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ops = audit.op_db[number::16]
        found = audit.audit(manager, manager.residency.books.main, ops, samples=1)
    assert found.called > 20
    assert found.failures == []


def test_a_dtype_that_the_device_does_not_have_is_computed_at_home(manager, monkeypatch):
    """As float64 on mps, where torch says so with a TypeError."""
    empty = plain_views._empty

    def refusing(size, **kwargs):
        if kwargs.get("dtype") is torch.float64 and torch.device(kwargs["device"]).type == "meta":
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype. Please use float32.")
        return empty(size, **kwargs)

    monkeypatch.setattr(plain_views, "_empty", refusing)
    x = manager.adopt(torch.arange(400.0, dtype=torch.float64))
    manager.residency.books.main.exchanges_storages = True
    assert (x + 1)[1].item() == 2.0
    assert torch.sub(x, 1)[1].item() == 0.0
    assert x.mul_(2)[1].item() == 2.0
    assert manager.stats()["host_fallback_count"] >= 3


def test_an_operator_that_has_written_is_not_run_again_on_the_host(manager, monkeypatch):
    x, mean, var = (manager.adopt(torch.rand(*size)).toGPU() for size in ((4, 3), (3,), (3,)))
    plan, run, ran = plan_of(torch.ops.aten.native_batch_norm.default), slow_path.run_kernel, []

    def counted(staged: Any) -> Any:
        ran.append(staged.device)
        return run(staged)

    def settled(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the allocator of the host: not enough memory")

    monkeypatch.setattr(slow_path, "run_kernel", counted)
    monkeypatch.setattr(results, "settled", settled)
    with pytest.raises(RuntimeError, match="not enough memory"):
        slow_path.SlowPath(plan, (x, None, None, mean, var, True, 0.1, 1e-5), {}, manager).run()
    assert ran == [manager.residency.books.main]
