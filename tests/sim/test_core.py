"""The core on a simulated accelerator: values, aliasing, copy on write, exposure, settings."""

from __future__ import annotations

import copy
import gc
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchTensorRef import promising
from torchTensorRef.base.errors import ConfigError, StrategyError
from torchTensorRef.memory.budget import OutOfBudgetError
from torchTensorRef.tensor.tensor_ref import TensorRef

from ..support.calls import calls_of
from ..support.injection import kind_of


def same(ref: Any, plain: torch.Tensor, manager: Any) -> bool:
    """Equal to the bit, and of the same shape and strides."""
    seen = manager.release(ref.detach())
    return (
        isinstance(ref, TensorRef)
        and ref.stride() == plain.stride()
        and torch.equal(seen, plain.detach())
    )


def test_a_ref_is_a_tensor(manager):
    ref = manager.adopt(torch.rand(3, 4))
    assert isinstance(ref, torch.Tensor)
    assert torch.is_tensor(ref)
    assert ref.device == torch.device("cpu")


def test_an_operator_runs_on_the_accelerator(manager):
    plain = torch.rand(20, 20)
    ref = manager.adopt(plain.clone())
    result = ref @ ref
    assert result.proxyInfo.device == "sim:test"
    assert same(result, plain @ plain, manager)


def test_there_and_back_is_the_same_object(manager):
    ref = manager.adopt(torch.rand(5))
    assert ref.toGPU() is ref
    assert ref.proxyInfo.device == "sim:test"
    assert ref.toCPU() is ref
    assert ref.proxyInfo.device == "cpu"
    assert manager.stats()["resident_nbytes"] == 0


def test_views_share_their_block(manager):
    plain = torch.arange(24.0).reshape(4, 6)
    ref = manager.adopt(plain.clone())
    view, plain_view = ref.t()[1:4, ::2], plain.t()[1:4, ::2]
    assert view.proxyInfo.block == ref.proxyInfo.block
    view.mul_(3)
    plain_view.mul_(3)
    assert same(ref, plain, manager)
    ref.add_(1)
    plain.add_(1)
    assert same(view, plain_view, manager)


def test_a_write_at_one_device_is_seen_at_the_other(manager):
    plain = torch.rand(10, 10)
    ref = manager.adopt(plain.clone())
    ref.toGPU()
    ref.normal_(generator=torch.Generator().manual_seed(1))  # random: runs at home
    plain.normal_(generator=torch.Generator().manual_seed(1))
    assert same(ref * 2, plain * 2, manager)


def test_views_of_views_with_autograd(manager):
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[1:3].t()[0].mul_(5)
        y.view(-1)[::7].add_(y.view(-1)[1::7][: y.view(-1)[::7].numel()].sum())
        return y.square().sum()

    plain = torch.rand(6, 7, requires_grad=True)
    ref = manager.adopt(plain.detach().clone()).requires_grad_()
    program(plain).backward()
    program(ref).backward()
    assert same(ref.grad, plain.grad, manager)


def test_tied_weights_stay_one_block(manager):
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    manager.adopt(model)
    assert model[0].weight is model[1].weight
    assert len(list(model.parameters())) == 1
    assert isinstance(model[0].weight, nn.Parameter)


def test_adopting_keeps_the_parameter_object(manager):
    model = nn.Linear(3, 3)
    weight = model.weight
    manager.adopt(model)
    assert model.weight is weight
    assert isinstance(weight, TensorRef)


def test_data_can_be_exchanged(manager):
    parameter = nn.Parameter(manager.adopt(torch.rand(3)))
    other = torch.rand(2, 2)
    parameter.data = manager.adopt(other.clone())
    assert isinstance(parameter, nn.Parameter)
    assert same(parameter, other, manager)
    parameter.data.add_(1)
    assert same(parameter, other + 1, manager)


def test_set_makes_two_tensors_aliases(manager):
    a, b = manager.adopt(torch.rand(4)), manager.adopt(torch.rand(6))
    a.set_(b)
    assert a.shape == (6,)
    a.zero_()
    assert same(b, torch.zeros(6), manager)


def test_resize_keeps_what_fits(manager):
    plain = torch.arange(6.0)
    ref = manager.adopt(plain.clone())
    ref.toGPU()
    ref.resize_(2, 2)
    assert same(ref, plain[:4].reshape(2, 2), manager)
    ref.resize_(50)
    assert ref.shape == (50,)
    assert same(ref[:6] + 0, plain, manager)


def test_as_strided_over_a_ref(manager):
    plain = torch.arange(20.0)
    ref = manager.adopt(plain.clone())
    assert same(ref.as_strided((3, 3), (5, 2), 1), plain.as_strided((3, 3), (5, 2), 1), manager)


def test_out_of_another_size_is_followed(manager):
    plain = torch.rand(4, 4)
    ref = manager.adopt(plain.clone())
    out, plain_out = manager.adopt(torch.empty(0)), torch.empty(0)
    torch.mul(ref, 2, out=out)
    torch.mul(plain, 2, out=plain_out)
    assert same(out, plain_out, manager)


def test_a_clone_costs_nothing_until_it_is_written(manager):
    plain = torch.rand(200, 200)
    ref = manager.adopt(plain.clone())
    ref.toGPU()
    twin = ref.clone()
    assert manager.stats()["resident_nbytes"] == plain.nbytes
    twin.add_(1)
    assert same(ref, plain, manager)
    assert same(twin, plain + 1, manager)


PINNED = {
    "large": lambda: torch.rand(200, 200).t(),
    "small": lambda: torch.rand(3),
    "number": lambda: torch.rand(()),
    "nothing": lambda: torch.rand(0, 2),
    "part": lambda: torch.rand(4, 6)[1:, ::2],
    "conjugate": lambda: torch.view_as_complex(torch.rand(3, 2)).conj(),
}


@pytest.mark.parametrize("kind", PINNED)
def test_what_is_pinned_is_a_copy_that_costs_nothing_until_it_is_written(manager, kind):
    plain = PINNED[kind]()
    ref = manager.adopt(copy.deepcopy(plain))
    before = manager.stats()
    pinned = ref.pin_memory()
    assert pinned is not ref
    assert kind in ("part", "conjugate") or manager.stats() == before
    expected = torch.empty_strided(plain.size(), plain.stride(), dtype=plain.dtype).copy_(plain)
    assert same(pinned, expected, manager)
    ref.add_(1)
    assert same(pinned, expected, manager)
    pinned = ref.pin_memory()
    pinned.zero_()
    assert torch.equal(manager.release(ref).resolve_conj(), expected + 1)


def test_a_backup_of_pinned_weights_does_not_change_with_them(manager):
    layer = manager.adopt(torch.nn.Linear(200, 200))
    backup = {name: x.detach().cpu().pin_memory() for name, x in layer.state_dict().items()}
    expected = {name: manager.release(x).clone() for name, x in layer.state_dict().items()}
    with torch.no_grad():
        for weight in layer.parameters():
            weight.zero_()
    assert all(torch.equal(manager.release(backup[name]), expected[name]) for name in expected)


def test_a_gradient_comes_through_what_is_pinned(manager):
    weight = torch.nn.Parameter(manager.adopt(torch.rand(3)))
    pinned = weight.pin_memory()
    assert not pinned.is_leaf
    (pinned * 2).sum().backward()
    assert torch.equal(manager.release(weight.grad), torch.full((3,), 2.0))


def test_a_pinned_promise_is_a_copy(manager):
    with promising():
        x = manager.adopt(torch.ones(3)) + 1
        pinned, part = x.pin_memory(), x[1:].pin_memory()
        x.add_(1)
    assert [t.fulfil().tolist() for t in (x, pinned, part)] == [[3, 3, 3], [2, 2, 2], [2, 2]]


def test_the_original_of_a_clone_may_be_written_or_die(manager):
    plain = torch.rand(200, 200)
    ref = manager.adopt(plain.clone())
    twin, third = ref.clone(), copy.deepcopy(ref)
    ref.mul_(2)
    assert same(twin + third, plain + plain, manager)
    del ref
    gc.collect()
    twin.zero_()
    assert same(third * 1, plain, manager)


def test_an_array_shares_the_memory_both_ways(manager):
    ref = manager.adopt(torch.zeros(8))
    array = ref.numpy()
    array[3] = 5
    assert (ref + 0)[3].item() == 5
    ref.add_(1)
    assert array.tolist() == [1, 1, 1, 6, 1, 1, 1, 1]
    view = ref[2:5]
    del array
    gc.collect()
    assert same(view * 2, torch.tensor([2.0, 12.0, 2.0]), manager)
    assert ref._ttr_block.exposure is None


def test_a_plain_tensor_that_shares_memory_is_heard(manager):
    plain = torch.zeros(4)
    ref = manager.adopt(plain)
    assert same(ref + 1, torch.ones(4), manager)
    plain[2] = 7
    assert same(ref + 1, torch.tensor([1.0, 1, 8, 1]), manager)
    ref.mul_(2)
    assert plain[2] == 14


def test_target_is_the_plain_tensor_where_it_is(manager):
    ref = manager.adopt(torch.ones(4))
    ref.toGPU()
    target = ref.target
    assert kind_of(target) is torch.Tensor
    target.add_(1)
    assert same(ref + 0, torch.full((4,), 2.0), manager)
    del target


def test_plain_and_managed_operands_mix(manager):
    plain, other = torch.rand(5, 5), torch.rand(5, 5)
    ref = manager.adopt(plain.clone())
    assert same(ref @ other, plain @ other, manager)
    assert same(other @ ref, other @ plain, manager)
    other.add_(ref)
    assert kind_of(other) is torch.Tensor


def test_numbers_print_as_in_torch(manager):
    plain = torch.rand(3, 3)
    ref = manager.adopt(plain.clone())
    assert repr(ref) == repr(plain)
    assert ref.proxyInfo.device == "cpu"
    assert f"{ref[0, 0]:.3f}" == f"{plain[0, 0]:.3f}"
    ref.requires_grad_()
    plain.requires_grad_()
    assert repr(ref) == repr(plain)
    assert repr((ref * 2).sum()) == repr((plain * 2).sum())
    assert repr(nn.Parameter(ref.detach())) == repr(nn.Parameter(plain.detach()))
    moved = ref + 1
    assert repr(moved) == repr(plain + 1)
    assert moved.proxyInfo.device == "sim:test"


def test_a_view_that_no_gradient_may_go_through_prints_as_in_torch(manager):
    def printed(x: torch.Tensor) -> str:
        base = x.requires_grad_() * 1
        with torch.no_grad():
            view = base[0]
        base.mul_(2)
        return repr(view)

    x = torch.ones(2, 2)
    expected = printed(x.clone())
    assert "Invalid" in expected
    assert printed(manager.adopt(x)) == expected


def test_an_operand_larger_than_the_budget_runs_at_home(manage):
    manager = manage(nbytes=10_000)
    plain = torch.rand(100, 100)
    ref = manager.adopt(plain.clone())
    assert same(ref @ ref, plain @ plain, manager)
    stats = manager.stats()
    assert stats["host_fallback_count"] == 1
    assert "more than the budget" in next(iter(stats["host_fallback_reasons"]))


def test_rows_of_a_table_larger_than_the_budget(manage):
    manager = manage(nbytes=50_000)
    table = torch.rand(1000, 100)
    ref = manager.adopt(table.clone())
    rows = nn.functional.embedding(manager.adopt(torch.tensor([3, 999])), ref)
    assert same(rows * 2, table[[3, 999]] * 2, manager)
    assert manager.stats()["fetched_nbytes"] < 5_000
    assert manager.stats()["host_fallback_count"] == 0


def test_fetching_what_does_not_fit_changes_nothing(manage):
    manager = manage(nbytes=1000)
    ref = manager.adopt(torch.rand(1000))
    with pytest.raises(OutOfBudgetError, match="out of memory"):
        ref.toGPU()
    assert ref.proxyInfo.device == "cpu"


def test_a_copy_on_the_accelerator_dies_with_its_last_ref(manager):
    ref = manager.adopt(torch.rand(100))
    result = ref * 2
    assert manager.stats()["resident_nbytes"] == 800
    del result
    assert manager.stats()["resident_nbytes"] == 400


def test_settings_are_refused_with_the_nearest_name(manager):
    with pytest.raises(ConfigError, match="'genoa'"):
        manager.strategy = "genua"
    with pytest.raises(ConfigError, match="sim"):
        manager.device = "simm"
    with pytest.raises(ConfigError, match="GiB"):
        manager.budget = "6 gigs"
    with pytest.raises(StrategyError, match="derived from"):
        manager.strategy = type("Half", (), {"name": "half"})
    assert manager.strategy.name == "lru"


def test_the_strategy_and_the_device_may_change_at_any_time(manage):
    manager = manage()
    plain = torch.rand(30, 30)
    ref = manager.adopt(plain.clone())
    product = ref @ ref
    manager.strategy = "genoa"
    product = product + ref
    manager = manage("lru", 1 << 16)
    assert same(product @ ref, (plain @ plain + plain) @ plain, manager)


def test_the_budget_may_shrink_at_any_time(manager):
    refs = [manager.adopt(torch.rand(1000)) + 1 for _ in range(20)]
    manager.budget = 9000
    assert manager.stats()["resident_nbytes"] <= 9000
    assert sum(ref.sum() for ref in refs).item() > 0


def test_the_budget_may_shrink_while_operands_are_on_their_way(manager):
    device = manager.residency.books.main
    a, b = manager.adopt(torch.rand(1000)), manager.adopt(torch.rand(1000))
    for attempt in (2, 3, 4):  # one of the two is there, and the operator runs at home
        device.fail_next("copy", attempt)
    expected = (a + b).tolist()
    assert manager.stats()["resident_nbytes"] == 4000
    began_s = time.monotonic()
    manager.budget = 3000
    assert time.monotonic() - began_s < 5  # nobody holds it
    assert manager.stats()["resident_nbytes"] == 0
    manager.check()
    assert (a + b).tolist() == expected


def test_checkpoints_are_plain(manager, tmp_path):
    model = manager.adopt(nn.Linear(3, 3))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert kind_of(loaded["weight"]) is torch.Tensor
    assert torch.equal(loaded["weight"], manager.release(model.weight.detach()))


def test_numpy_reads_a_ref(manager):
    ref = manager.adopt(torch.arange(4.0)) + 1
    assert np.asarray(ref).tolist() == [1, 2, 3, 4]
    assert np.array(ref, dtype=np.int64).sum() == 10


@pytest.mark.parametrize("add", [torch._foreach_add, torch._foreach_add_])
def test_what_a_list_of_absent_tensors_takes_goes_by_its_length(manager, add):
    def calls_for(count: int) -> int:
        plain = [torch.rand(8) for _ in range(count)]
        refs = [manager.adopt(tensor.clone()) for tensor in plain]
        calls = calls_of(lambda: refs.extend(add(refs, 1.0) or ()))
        assert all(map(torch.equal, map(manager.release, refs[-count:]), add(plain, 1.0) or plain))
        return calls

    calls_for(2)
    assert calls_for(160) / 160 < 1.5 * calls_for(20) / 20


def test_a_failing_operator_leaves_the_books_right(manager):
    ref = manager.adopt(torch.rand(3, 4))
    with pytest.raises(RuntimeError, match="shape"):
        ref @ ref
    assert same(ref + 0, manager.release(ref), manager)


def test_what_dies_while_the_books_are_checked_is_no_violation(manage):
    """Another thread may let go of a block whose replica is just being looked at."""
    manager = manage("lru", 1 << 20)
    x = manager.adopt(torch.rand(64)).toGPU()
    residency = manager.residency
    replica = x._ttr_block.replicas[residency.books.main]
    del x
    assert replica.block is None
    ledger = residency.books.ledgers[residency.books.main]
    assert ledger.oldest(1) == []  # whose last use is known by nobody
    manager.check()
