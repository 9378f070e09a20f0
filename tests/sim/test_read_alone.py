"""Operators that read a small part of a large block that is away: the part moves alone."""

import ctypes
import gc
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchTensorRef.base.options import options
from torchTensorRef.memory.report import living_blocks

from ..support.differential import differences
from ..support.sweeps import in_turn

#: Thirty-two matrices of 64 KiB in one block.
COUNT, ROWS, COLUMNS = 32, 64, 256
MATRIX_NBYTES = 4 * ROWS * COLUMNS
BLOCK_NBYTES = COUNT * MATRIX_NBYTES
#: The block fits, and little beside it.
BUDGET = BLOCK_NBYTES + 8 * MATRIX_NBYTES


def matrices(dtype=torch.float32):
    return torch.randn(COUNT, ROWS, COLUMNS).to(dtype)


VIEWS = {
    "linear": lambda w, x: F.linear(x, w[5]),
    "product": lambda w, x: x @ w[3].t(),
    "elementwise": lambda w, x: w[7] * 2 + x[:1],
    "reduction": lambda w, x: w[9].sum(0),
    "in a list": lambda w, x: torch.cat([w[2], x, w[1]]),
    "two of one block": lambda w, x: w[1] + w[2],
    "twice": lambda w, x: w[4] * w[4],
    "of a view": lambda w, x: w[8:16][1].t().exp(),
    "by a number in a tensor": lambda w, x: F.linear(x, w[torch.tensor(6)]),
    "written into another": lambda w, x: x.add_(w[5, :1]),
    "given as out": lambda w, x: torch.mul(w[5, :3], 2, out=x),
    "of a batch": lambda w, x: torch.bmm(x.expand(3, 3, COLUMNS), w[:3].mT),
}


@pytest.mark.parametrize("strategy", ["lru", "genoa", "flow"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_short_view_moves_alone(manage, name, strategy):
    weights, x = matrices(), torch.randn(3, COLUMNS)
    manager = manage(strategy, nbytes=BUDGET)
    ours, ours_too = manager.adopt(weights.clone()), manager.adopt(x.clone())
    expected, found = VIEWS[name](weights, x), VIEWS[name](ours, ours_too)
    assert not differences(expected, found)
    assert found.stride() == expected.stride()
    stats = manager.stats()
    assert stats["parts_op_count"] >= 1
    assert stats["host_op_count"] == stats["host_fallback_count"] == 0
    assert 0 < stats["fetched_nbytes"] <= 4 * MATRIX_NBYTES
    manager.check()


WHOLES = {
    "more than a share": lambda w, x: w[:5] * 2,
    "beside all of it": lambda w, x: w[0] + w,
    "that begins elsewhere": lambda w, x: w.view(-1)[1:1001] * 2,
    "with gaps": lambda w, x: w[:, 3] * 2,
    "that is written": lambda w, x: w[3].mul_(2),
    "written into another of the same block": lambda w, x: w[3].mul_(w[4]),
}


@pytest.mark.parametrize("name", WHOLES)
def test_what_is_not_short_is_fetched_as_a_block(manage, name):
    weights, x = matrices(), torch.randn(3, COLUMNS)
    manager = manage(nbytes=2 * BUDGET)
    ours = manager.adopt(weights.clone())
    assert not differences(WHOLES[name](weights, x), WHOLES[name](ours, manager.adopt(x)))
    assert not differences(weights, ours)
    assert manager.stats()["fetched_nbytes"] >= BLOCK_NBYTES
    assert manager.stats()["parts_op_count"] == 0


def test_a_small_block_is_fetched_as_soon(manage):
    manager = manage()
    ours = manager.adopt(torch.randn(64, 16))
    ours[3] * 2
    assert manager.stats()["fetched_nbytes"] == 64 * 16 * 4


def test_a_view_is_no_part_where_the_block_is_there(manage):
    manager = manage(nbytes=BUDGET)
    ours = manager.adopt(matrices())
    ours.sum()
    fetched_nbytes = manager.stats()["fetched_nbytes"]
    ours[3] * 2
    assert manager.stats()["fetched_nbytes"] == fetched_nbytes
    assert manager.stats()["parts_op_count"] == 0


def test_blocks_are_off(manage):
    manager = manage(nbytes=BUDGET)
    with options(blocks="off"):
        manager.adopt(matrices())[3] * 2
    assert manager.stats()["fetched_nbytes"] == BLOCK_NBYTES


def test_what_is_used_often_is_fetched_where_there_is_room(manage):
    manager = manage(nbytes=4 * BLOCK_NBYTES)
    ours = manager.adopt(matrices())
    for number in range(8):
        ours[number] * 2
    assert manager.stats()["parts_op_count"] == 3
    assert manager.stats()["fetched_nbytes"] == BLOCK_NBYTES + 3 * MATRIX_NBYTES


@pytest.mark.parametrize("strategy", ["lru", "genoa", "flow"])
def test_under_pressure_nothing_else_is_driven_out_for_it(manage, strategy):
    """Two blocks fit, of three in turn: the other one's parts come alone, step by step."""
    blocks = [matrices() for _ in range(3)]
    manager = manage(strategy, nbytes=2 * BLOCK_NBYTES + 8 * MATRIX_NBYTES)
    ours = [manager.adopt(block.clone()) for block in blocks]
    for block in ours:
        block.sum()
    manager.reset_stats()
    for step in range(20):
        for plain, block in zip(blocks, ours, strict=True):
            assert not differences(plain[step] * 2, block[step] * 2)
    away = 3 if strategy == "genoa" else 1
    assert manager.stats()["fetched_nbytes"] <= away * 22 * MATRIX_NBYTES


def test_what_is_written_at_home_is_read_anew(manage):
    weights = matrices()
    manager = manage(nbytes=BUDGET)
    ours = manager.adopt(weights.clone())
    for number in range(3):
        assert not differences(weights[5] * 2, ours[5] * 2)
        weights[5, number] = 7
        ours.numpy()[5, number] = 7


# -- parts that stay ------------------------------------------------------------------------------


def away(manager, weights):
    """Adopt a block, read a part of it twice, so that this stays, and let memory be short."""
    ours, other = manager.adopt(weights.clone()), manager.adopt(torch.randn(2, 400_000))
    other.sum()
    manager.adopt(torch.randn(2, 400_000)).sum()
    assert manager.residency.books.is_pressed
    for _ in range(3):
        ours[5] * 2
    assert manager.residency.books.parts._of[ours._ttr_block].at
    return ours


@pytest.mark.parametrize("strategy", ["lru", "flow"])
def test_what_is_read_again_stays(manage, strategy):
    weights = matrices()
    manager = manage(strategy, nbytes=BUDGET)
    ours = away(manager, weights)
    manager.reset_stats()
    for _ in range(5):
        assert not differences(weights[5] * 2, ours[5] * 2)
        assert not differences(weights[5].t().sum(0), ours[5].t().sum(0)), "of another shape"
    assert manager.stats()["fetched_nbytes"] == manager.stats()["prefetched_nbytes"] == 0


def test_a_report_says_of_a_block_what_was_copied_of_its_parts(manage):
    manager = manage(nbytes=BUDGET)
    ours = away(manager, matrices())
    number = ours._ttr_block.block_id
    costs = manager.residency.books.counts.costs
    assert costs.by_block[number].parts_nbytes == 2 * MATRIX_NBYTES
    assert set(costs.by_block) <= {block.block_id for block in living_blocks(manager)}
    assert costs._whole_of
    del ours
    gc.collect()
    assert not costs._whole_of


def test_genoa_keeps_none(manage):
    weights = matrices()
    manager = manage("genoa", nbytes=BUDGET)
    ours = manager.adopt(weights.clone())
    for _ in range(4):
        assert not differences(weights[5] * 2, ours[5] * 2)
    assert manager.stats()["fetched_nbytes"] == 4 * MATRIX_NBYTES
    assert not manager.residency.books.parts._of


def write_array(x):
    array = x.numpy()
    array[5, 1] = 7


def write_while_exposed(x):
    array = x.numpy()
    x[5] * 2
    array[5, 1] = 7


def write_by_pointer(x):
    ctypes.c_float.from_address(x.data_ptr() + 5 * MATRIX_NBYTES).value = 7


def write_twin(x):
    twin = x.clone()
    twin[5, 1] = 7
    return twin


def write_and_keep_twin(x):
    twin = x.clone()
    x[5, 1] = 7
    return twin


def exchange_storage(x):
    x.resize_(2 * COUNT, ROWS, COLUMNS)
    x.fill_(3)


def train(x):
    x.requires_grad_()
    (x[5] * 2).sum().backward()
    torch.optim.SGD([x], lr=0.5).step()
    x.requires_grad_(False)
    x.grad = None


WRITERS = {
    "an operator": lambda x: x.mul_(2),
    "an operator on a view": lambda x: x[5].add_(1),
    "a number": lambda x: x.__setitem__((5, 1), 7),
    "out": lambda x: torch.mul(x[3], 2, out=x[5]),
    "a copy": lambda x: x.copy_(x.flip(0)),
    "an array": write_array,
    "an array that is there meanwhile": write_while_exposed,
    "a pointer": write_by_pointer,
    "a copy that shares": write_twin,
    "what shares with a copy": write_and_keep_twin,
    "another storage": exchange_storage,
    "shared memory": lambda x: x.share_memory_()[5].add_(1),
    "other data": lambda x: setattr(x, "data", x.data.flip(0)),
    "an optimizer": train,
}


@pytest.mark.parametrize("strategy", ["lru", "flow"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_part_that_stays_is_not_read_after_the_block_was_written(manage, writer, strategy):
    weights = matrices()
    manager = manage(strategy, nbytes=BUDGET)
    ours = away(manager, weights)
    expected_twin, twin = WRITERS[writer](weights), WRITERS[writer](ours)
    for _ in range(4):
        assert not differences(weights[5] * 2, ours[5] * 2)
        if isinstance(twin, torch.Tensor) and twin is not ours:
            assert not differences(expected_twin[5] * 2, twin[5] * 2)
    manager.adopt(torch.randn(2, 400_000)).sum()
    assert not differences(weights[5] * 2, ours[5] * 2)


def test_a_part_that_another_thread_has_read_while_it_was_written_does_not_stay(manage):
    weights = matrices()
    manager = manage(nbytes=BUDGET)
    ours = away(manager, weights)
    copier, written = manager.residency.copier, []

    def read_meanwhile(block, device):
        type(copier).written(copier, block, device)
        if block is ours._ttr_block and device.is_host and not written:
            written.append(True)
            for _ in range(2):
                thread = threading.Thread(target=lambda: ours[5] * 2)
                thread.start()
                thread.join()

    copier.written = read_meanwhile
    state = torch.get_rng_state()
    try:
        ours.uniform_()  # at home, where the numbers are those of plain torch
    finally:
        del copier.written
    assert written
    torch.set_rng_state(state)
    weights.uniform_()
    assert not differences(weights[5] * 2, ours[5] * 2)
    assert not differences(weights * 2, ours * 2)


def test_layers_that_lie_in_one_tensor_are_fetched_ahead(manage):
    weights, x = matrices().view(COUNT, 128, 128), torch.randn(4, 128)
    manager = manage("flow", nbytes=12 * MATRIX_NBYTES)
    ours, ours_too = manager.adopt(weights.clone()), manager.adopt(x.clone())
    for _ in range(8):
        manager.reset_stats()
        expected, found = x, ours_too
        for layer in range(COUNT):
            expected = F.linear(expected, weights[layer]).tanh()
            found = F.linear(found, ours[layer]).tanh()
        assert not differences(expected, found)
    stats = manager.stats()
    assert stats["fetched_nbytes"] < stats["prefetched_nbytes"] <= COUNT * MATRIX_NBYTES


def test_parts_go_with_their_block(manage):
    manager = manage(nbytes=BUDGET)
    ours = away(manager, matrices())
    number = next(iter(manager.residency.books.parts._of[ours._ttr_block].at.values())).block_id
    del ours
    gc.collect()
    assert not manager.residency.books.parts._of
    assert manager.residency.books.known.get(number) is None


def test_gradients_go_to_the_block(manage):
    weights, x = matrices(), torch.randn(3, COLUMNS)
    plain = nn.Parameter(weights.clone())
    F.linear(x, plain[5]).square().sum().backward()
    manager = manage(nbytes=3 * BUDGET)
    ours = manager.adopt(nn.Parameter(weights.clone()))
    F.linear(manager.adopt(x), ours[5]).square().sum().backward()
    assert not differences(plain.grad, ours.grad)
    assert manager.stats()["parts_op_count"] > 0


def test_a_copy_is_a_tensor_of_its_own(manage):
    """What makes no other numbers may hand its operand back: nothing stands for that."""
    manager = manage(nbytes=BUDGET)
    ours = manager.adopt(matrices())
    for make in (torch.clone, torch.Tensor.contiguous, torch.Tensor.detach, torch.Tensor.float):
        made = make(ours[3])
        made.zero_()
        expected = 0 if make is not torch.clone else 1
        assert bool(ours[3].any()) == expected
        ours[3].fill_(1)


@pytest.mark.parametrize("number", range(1, 4))
@pytest.mark.parametrize("kind", ["copy", "alloc"])
def test_a_copy_or_an_allocation_fails(manage, kind, number):
    weights, x = matrices(), torch.randn(3, COLUMNS)
    manager = manage(nbytes=BUDGET)
    device = manager.residency.books.main
    ours, ours_too = manager.adopt(weights.clone()), manager.adopt(x.clone())
    for more in range(3):
        device.fail_next(kind, number + more)
    assert not differences(F.linear(x, weights[5]), F.linear(ours_too, ours[5]))


def test_an_error_of_the_program_lets_go_of_the_block(manage):
    manager = manage(nbytes=BUDGET)
    ours = manager.adopt(matrices())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        F.linear(manager.adopt(torch.randn(3, 7)), ours[5])
    assert not manager.residency.holds.pinned
    manager.check()


# -- groups ----------------------------------------------------------------------------------------


def ends_of(*counts):
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def counts_of(**rows):
    counts = [0] * COUNT
    for name, count in rows.items():
        counts[int(name.removeprefix("of_"))] = count
    return counts


USED = {
    "one": counts_of(of_5=4),
    "the first and the last": counts_of(of_0=1, of_31=3),
    "several": counts_of(of_3=2, of_4=1, of_9=5, of_30=1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("used", USED)
def test_groups_that_have_rows_move_alone(manage, used, is_transposed, dtype):
    counts = USED[used]
    weights, x = matrices(dtype), torch.randn(sum(counts), ROWS if is_transposed else COLUMNS)
    ends = ends_of(*counts)

    def product(weights, x, ends):
        matrices = weights if is_transposed else weights.mT
        return torch._grouped_mm(x.to(dtype), matrices, offs=ends)

    expected = product(weights, x, ends)
    manager = manage(nbytes=BUDGET)
    found = product(*(manager.adopt(one.clone()) for one in (weights, x, ends)))
    assert not differences(expected, found)
    assert found.stride() == expected.stride()
    stats = manager.stats()
    assert stats["parts_op_count"] == 1
    assert stats["host_op_count"] == stats["host_fallback_count"] == 0
    assert stats["fetched_nbytes"] <= len(counts) * MATRIX_NBYTES // 4


@pytest.mark.parametrize(
    "counts", [[1] * COUNT, [0] * COUNT, [1, 0] * (COUNT // 2)], ids=["all", "none", "half"]
)
def test_of_many_groups_the_table_is_fetched(manage, counts):
    weights, x, ends = matrices(), torch.randn(sum(counts), COLUMNS), ends_of(*counts)
    expected = torch._grouped_mm(x, weights.mT, offs=ends)
    manager = manage(nbytes=BUDGET)
    ours = [manager.adopt(one.clone()) for one in (weights, x, ends)]
    assert not differences(expected, torch._grouped_mm(ours[1], ours[0].mT, offs=ours[2]))
    assert manager.stats()["parts_op_count"] == 0
    assert manager.stats()["host_op_count"] == 0


def test_a_product_that_is_grouped_along_its_sums_reads_all(manage):
    """As the gradient of the matrices is."""
    a, b, ends = torch.randn(1024, 512), torch.randn(512, 256), ends_of(16, 0, 496)
    expected = torch._grouped_mm(a, b, offs=ends)
    manager = manage(nbytes=4 * BUDGET)
    ours = [manager.adopt(one.clone()) for one in (a, b, ends)]
    assert not differences(expected, torch._grouped_mm(ours[0], ours[1], offs=ours[2]))
    assert manager.stats()["parts_op_count"] == 0


def test_gradients_of_groups_are_those_of_plain_torch(manage):
    counts = USED["several"]
    weights, x, ends = matrices(), torch.randn(sum(counts), COLUMNS), ends_of(*counts)
    found = []
    manager = manage(nbytes=4 * BUDGET)
    for bring in (lambda one: one, manager.adopt):
        a, w = (bring(nn.Parameter(one.clone())) for one in (x, weights))
        torch._grouped_mm(a, w.mT, offs=bring(ends.clone())).square().sum().backward()
        found.append((a.grad, w.grad))
    assert not differences(*found)
    assert manager.stats()["parts_op_count"] == 2  # forward, and the gradient of the rows


def test_what_a_prompt_uses_all_of_is_not_fetched_ahead_for_each_token(manage):
    """Flow, too, lets those groups move that a token uses, though the record has whole tables."""
    tables = [torch.randn(COUNT, COLUMNS, ROWS) for _ in range(4)]
    manager = manage("flow", nbytes=4 * BLOCK_NBYTES, h2d_bytes_per_s=2e9, d2h_bytes_per_s=2e9)
    layers = [
        [manager.adopt(one) for one in (table, torch.randn(ROWS, COLUMNS) / 16)]
        + [manager.adopt(torch.randn(COLUMNS, COLUMNS) / 16) for _ in range(8)]
        for table in tables
    ]
    del tables
    prompt, tokens = [1] * COUNT, [counts_of(of_7=1, of_4=1), counts_of(of_14=1, of_7=1)] * 4
    for _ in range(8):
        manager.reset_stats()
        for counts in (prompt, *tokens):
            x = manager.adopt(torch.randn(sum(counts), COLUMNS))
            ends = manager.adopt(ends_of(*counts))
            for table, *others in layers:
                x = torch._grouped_mm(x, table, offs=ends)
                for weight in others:
                    x = x @ weight
    stats = manager.stats()
    moved_nbytes = stats["fetched_nbytes"] + stats["prefetched_nbytes"]
    assert moved_nbytes < 2 * (1 + len(tokens)) * BLOCK_NBYTES  # it was four for each token


KINDS = ["grouped_mm", "no kernel", "batched_mm", "eager"]


@pytest.mark.parametrize(
    ("kind", "strategy"), in_turn(KINDS, ["lru", "genoa", "flow", "venice"], each=1)
)
def test_a_mixture_of_experts_fetches_those_that_work(manage, monkeypatch, strategy, kind):
    transformers = pytest.importorskip("transformers")
    if kind == "no kernel":
        moe = pytest.importorskip("transformers.integrations.moe")
        monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=2,
    )
    config._experts_implementation = "grouped_mm" if kind == "no kernel" else kind
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    ids = torch.randint(64, (1, 5))
    with torch.no_grad():
        expected = model.generate(ids, max_new_tokens=8, do_sample=False, output_logits=True,
                                  return_dict_in_generate=True)  # fmt: skip
        experts_nbytes = sum(p.nbytes for name, p in model.named_parameters() if "experts" in name)
        manager = manage(strategy, nbytes=experts_nbytes // 3, count=1 + (strategy == "venice"))
        ours = manager.adopt(model)
        ours(manager.adopt(ids))
        manager.reset_stats()
        found = ours.generate(manager.adopt(ids), max_new_tokens=8, do_sample=False,
                              output_logits=True, return_dict_in_generate=True)  # fmt: skip
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert not differences(list(expected.logits), list(found.logits))
    stats = manager.stats()
    assert stats["parts_op_count"] > 0
    moved_nbytes = stats["fetched_nbytes"] + stats["prefetched_nbytes"]
    assert moved_nbytes < 5 * experts_nbytes  # 8 steps; all of them would be 8 times that
