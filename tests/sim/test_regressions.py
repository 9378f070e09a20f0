"""Bugs that were found, each with its story."""

import contextlib
import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchTensorRef import options
from torchTensorRef.memory.plain_views import make_ref, plain_on
from torchTensorRef.strategy import Prefetch
from torchTensorRef.tensor.tensor_ref import TensorRef


def test_attributes_of_a_parameter_survive_its_adoption(manager):
    """transformers marks what it has loaded; without the mark it drew the weights again."""
    module = torch.nn.Linear(3, 2, bias=False)
    module.weight._is_hf_initialized = True
    manager.adopt(module)
    assert isinstance(module.weight, TensorRef)
    assert module.weight._is_hf_initialized


def test_a_fresh_result_can_be_set_to_another_storage(manager):
    """Its first view was the replica's own base, which `set_` then took away."""
    ref, other = manager.adopt(torch.rand(2)) + 1, manager.adopt(torch.rand(5)) + 1
    ref.toCPU()
    ref.set_(other)
    assert ref.proxyInfo.block == other.proxyInfo.block
    assert torch.equal(ref.sum(), other.sum())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_refs_stay_plain_and_work(manager):
    """They say that they are strided, and have no sizes to ask for."""
    rows = [manager.adopt(torch.rand(2, 4)), manager.adopt(torch.rand(3, 4))]
    weight = manager.adopt(torch.rand(2, 4, 4))
    nested = torch.nested.nested_tensor(rows)
    assert nested.is_nested
    assert torch.equal(torch.bmm(nested, weight)[1], rows[1] @ weight[1])


def test_a_subclass_of_others_shares_the_memory(manager):
    class Points(torch.Tensor):
        pass

    ref = manager.adopt(torch.rand(3))
    points = ref.as_subclass(Points)
    points.zero_()
    assert type(points) is Points
    assert ref.tolist() == [0, 0, 0]


def test_data_may_be_a_plain_tensor_that_requires_gradients(manager):
    """thinc's optimizers give a parameter what DLPack makes of an array, with gradients wanted."""
    parameter = manager.adopt(torch.rand(3)).requires_grad_()
    array = np.ones(3, dtype="float32")
    parameter.data = torch.utils.dlpack.from_dlpack(array).requires_grad_()
    assert parameter.tolist() == [1, 1, 1]
    assert parameter.is_leaf
    parameter.square().sum().backward()
    assert parameter.grad.tolist() == [2, 2, 2]


def test_gradients_come_back_from_a_subclass_of_others(manager):
    """fastai's losses make tensors of its own class of what a model gives."""

    class Points(torch.Tensor):
        pass

    def program(weight, x):
        points = (x @ weight).as_subclass(Points)
        assert isinstance(points, Points)
        loss = (points.exp() * weight[0]).sum()
        (first,) = torch.autograd.grad(loss, weight, create_graph=True)
        first.square().sum().backward()
        leaf = weight.detach().requires_grad_()
        leaf.as_subclass(Points).square().sum().backward()
        with torch.no_grad():
            asks = weight.as_subclass(Points).exp().requires_grad
        with pytest.raises(RuntimeError, match="view"):
            weight.as_subclass(Points).mul_(2)
        return [loss.detach(), first.detach(), weight.grad, leaf.grad, asks]

    plain = torch.rand(3, 4), torch.rand(2, 3)
    expected = program(plain[0].clone().requires_grad_(), plain[1])
    *tensors, asks = program(
        manager.adopt(plain[0].clone()).requires_grad_(), manager.adopt(plain[1])
    )
    assert asks == expected[-1]
    for mine, theirs in zip(tensors, expected, strict=False):
        assert torch.equal(mine.as_subclass(torch.Tensor), theirs.as_subclass(torch.Tensor))


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x[1:],
        lambda x: x.detach(),
        lambda x: x.chunk(2)[1],
        lambda x: x.split(1)[0],
        lambda x: x.reshape(-1),
        lambda x: x.T,
        lambda x: x.movedim(0, 1),
        lambda x: x.contiguous(),
        lambda x: torch.dropout(x, 0.1, False),
        lambda x: torch.atleast_3d(x),
        lambda x: torch.einsum("ij->ji", x),
        lambda x: torch.broadcast_tensors(x, torch.ones(1, 1))[0],
        lambda x: next(iter(x)),
    ],
)
def test_in_inference_mode_a_view_of_a_normal_tensor_is_normal(manager, look):
    """sentence-transformers slices a buffer there; autograd wants to count the view's versions."""
    plain = torch.rand(4, 3, requires_grad=True)
    ref = manager.adopt(torch.nn.Parameter(plain.detach().clone()))
    with torch.inference_mode():
        seen, expected = look(ref), look(plain)
        product = seen * 2
    assert torch.equal(seen, expected)
    assert product.is_inference()
    assert not seen.is_inference()
    assert seen.requires_grad == expected.requires_grad
    assert (seen is ref) == (expected is plain)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_in_inference_mode_nested_rows_meet_a_weight_that_wants_gradients(manager):
    """Torch makes another thing of nested tensors than of others, and no rule knows their sizes."""
    rows, weight = [torch.rand(2, 4), torch.rand(3, 4)], torch.rand(5, 4)
    ref = manager.adopt(torch.nn.Parameter(weight.clone()))
    with torch.inference_mode():
        products = torch.nn.functional.linear(torch.nested.nested_tensor(rows), ref)
    for row, product in zip(rows, products.unbind(), strict=True):
        torch.testing.assert_close(product, row @ weight.t())


def test_strides_over_dimensions_of_size_one_are_kept(manager):
    # #2, found by random programs: a slice is contiguous and yet has a stride of its own there.
    plain = torch.rand(2, 3, 2)
    result, plain_result = manager.adopt(plain.clone()) * 2, plain * 2
    assert result[::2].stride() == plain_result[::2].stride()


def test_a_view_of_a_copy_follows_it_when_it_parts(manager):
    """#2, found by random programs: the view stayed on the bytes the copy had shared."""
    source = manager.adopt(torch.arange(5.0))
    twin = copy.deepcopy(source)
    twin.toGPU()
    view = twin[1:]
    twin.add_(1)
    view.mul_(2)
    assert (twin + 0).tolist() == [1, 4, 6, 8, 10]
    assert (source + 0).tolist() == [0, 1, 2, 3, 4]


def test_what_was_fetched_ahead_goes_with_the_last_ref(manager):
    """#2, found by random programs: the list of copies under way kept the bytes, and nobody
    could evict them."""
    ref = manager.adopt(torch.rand(50)) + 0
    ref.toCPU()
    device = manager.residency.books.main
    manager.residency.books.known[ref._ttr_block.block_id] = ref._ttr_block
    assert manager.residency.prefetcher.prefetch(device, [Prefetch(ref._ttr_block.block_id, ())])
    assert device.resident_nbytes == 200
    del ref
    assert device.resident_nbytes == 0


def test_statistics_are_written_once_when_the_results_do_not_fit(manage):
    """#2, found by threads: the operator ran again at home, with the statistics it had written."""
    manager = manage(nbytes=2000)
    large = manager.adopt(torch.rand(400)).toGPU()
    held = large.target  # 1600 bytes that cannot be evicted
    x, mean, var = torch.rand(5, 10), torch.zeros(10), torch.ones(10)
    refs = [manager.adopt(t.clone()) for t in (x, mean, var)]
    result = torch.nn.functional.batch_norm(*refs, training=True)
    expected = torch.nn.functional.batch_norm(x, mean, var, training=True)
    for ref, plain in zip([result, *refs], [expected, x, mean, var], strict=True):
        assert torch.equal(manager.release(ref), plain)
    del held


def test_what_a_list_operator_writes_is_counted(manage):
    """An optimizer steps, with `foreach`, while a graph waits: its backward pass is refused."""
    manager = manage("lru")
    weights = [manager.adopt(torch.rand(3)).requires_grad_() for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=0.1, foreach=True)
    loss = (weights[0] * weights[1]).sum()
    loss.backward(retain_graph=True)
    before = [weight._version for weight in weights]
    optimizer.step()
    assert [weight._version for weight in weights] == [version + 1 for version in before]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_any_operator_writes_to_a_list_is_counted(manager):
    source, parts = torch.rand(6), [torch.rand(3), torch.rand(3)]
    for whole, halves in ((source, parts), (manager.adopt(source), [*map(manager.adopt, parts)])):
        before = [half._version for half in halves]
        torch.split_copy(whole, 3, out=halves)
        assert [half._version for half in halves] == [version + 1 for version in before]


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.to("meta"),
        lambda x: x.to(device="meta", dtype=torch.float64),
        lambda x: x.T.to(torch.device("meta"), copy=True),
        lambda x: torch.empty_like(x, device="meta"),
        lambda x: torch.nn.Parameter(x).to("meta"),
        lambda x: x.new_zeros(3, 2, device="meta"),
    ],
)
def test_what_goes_to_the_meta_device_is_fetched_by_nobody(manage, look):
    """accelerate empties the weights of models far larger than memory so, one by one."""
    manager = manage("lru", 1 << 10)
    plain = torch.rand(64, 64)
    found, expected = look(manager.adopt(plain.clone())), look(plain)
    assert found.is_meta
    assert (found.size(), found.stride(), found.dtype, found.requires_grad) == (
        expected.size(),
        expected.stride(),
        expected.dtype,
        expected.requires_grad,
    )
    stats = manager.stats()
    assert stats["fetched_nbytes"] == 0
    assert stats["host_fallback_count"] == 0


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x + 1,
        lambda x: x.add_(1),
        lambda x: (x[:64] + 1).sum(),
        lambda x: torch.fft.fft(x).real,
        lambda x: torch.cumsum(x, 0),
        lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
        lambda x: x.sort()[0],
        lambda x: x[torch.tensor([3, 1])],
        lambda x: torch.nn.functional.embedding(torch.tensor([3, 1]), x.view(-1, 64)),
        lambda x: x.view(64, -1) @ x.view(-1, 64),
        lambda x: x @ x.new_ones(3),  # an error
    ],
    ids=[
        "add",
        "add_",
        "part",
        "fft",
        "cumsum",
        "layer_norm",
        "sort",
        "rows",
        "embedding",
        "matmul",
        "error",
    ],
)
@pytest.mark.parametrize("nbytes", [8, 1 << 10, 1 << 14, 1 << 20])
@pytest.mark.parametrize("blocks", ["exact", "any"])
def test_no_operator_keeps_its_operands_in_a_cycle(manage, program, nbytes, blocks):
    """An error was kept in a variable of the frame that its traceback held, and so the bytes."""
    manager = manage("lru", nbytes)
    with options(blocks=blocks), contextlib.suppress(RuntimeError):
        program(manager.adopt(torch.rand(8192)))  # what torch imports for it keeps its frames
    x = manager.adopt(torch.rand(8192))  # 32 KiB
    block = weakref.ref(x._ttr_block)
    gc.collect()
    gc.disable()
    try:
        with options(blocks=blocks), contextlib.suppress(RuntimeError):
            program(x)
        del x
        assert block() is None
    finally:
        gc.enable()


class _SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert "storage" not in getattr(func, "__name__", "")
        return func(*args, **(kwargs or {}))


class _SeesOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} is not the program's")


@pytest.mark.parametrize(
    "around",
    [
        lambda act: torch.func.grad(lambda x: (act(), x.sum())[1])(torch.ones(2)),
        lambda act: torch.func.jvp(lambda x: (act(), x)[1], *[(torch.ones(2),)] * 2),
        lambda act: torch.func.vmap(lambda x: (act(), x)[1])(torch.ones(2)),
        lambda act: torch.func.functionalize(lambda x: (act(), x)[1])(torch.ones(2)),
        lambda act: _within(FakeTensorMode(), act),
        lambda act: _within(_SeesFunctions(), act),
        lambda act: _within(_SeesOperators(), act),
    ],
    ids=["grad", "jvp", "vmap", "functionalize", "fake", "functions", "operators"],
)
@pytest.mark.parametrize(
    "act",
    [
        lambda manager, ref: setattr(manager, "budget", "8B"),
        lambda manager, ref: manager.bring_all_home(),
        lambda manager, ref: ref.toCPU().toGPU(),
        lambda manager, ref: str(ref.target.shape),
    ],
    ids=["budget", "home", "there", "target"],
)
def test_what_the_runtime_does_to_storages_is_below_modes_and_transforms(manager, around, act):
    """In `jvp` a lower budget raised: functorch had wrapped the memory that was made at home.

    Whoever called the manager from there on got the same error; and a mode saw our own storages.
    """
    ref = manager.adopt(torch.zeros(4)).add_(1)
    assert ref.proxyInfo.device != "cpu"
    around(lambda: act(manager, ref))
    manager.budget = "1MiB"
    assert ref.add_(1).tolist() == [2] * 4


def _within(mode, act):
    with mode:
        act()


def test_copies_and_pickles_are_made_inside_transforms(manager):
    """They told the copy that it requires no gradients, which functorch does not want to hear."""
    ref, made = manager.adopt(torch.arange(3.0)), []

    def program(x):
        made.extend([copy.copy(ref), copy.deepcopy(ref), pickle.loads(pickle.dumps(ref))])
        return x

    torch.func.vmap(program)(torch.ones(2))
    assert [copied.tolist() for copied in made] == [[0, 1, 2]] * 3


def test_data_of_a_normal_tensor_is_normal_in_inference_mode(manager):
    """It was an inference tensor: a program that wrote it afterwards got torch's refusal."""
    weight = manager.adopt(torch.nn.Parameter(torch.ones(2)))
    with torch.inference_mode():
        data = weight.data
    data.add_(1)
    (data * weight).sum().backward()
    assert weight.grad.tolist() == [2, 2]


def test_a_plain_tensor_set_to_a_ref_shares_its_memory(manager):
    """The memory of the ref was cut to the size of what the plain tensor had before."""
    ref, plain = manager.adopt(torch.arange(8.0)).add_(1), torch.FloatTensor([1])
    plain.set_(ref)
    plain[0] = 5
    assert ref.add_(1).tolist() == [6, *range(3, 10)]
    assert plain.tolist() == ref.tolist()


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t_(),
        lambda x: x.unsqueeze_(0),
        lambda x: x.as_strided_((2,), (1,)),
        lambda x: x.resize_(3),
        lambda x: x.set_(torch.ones(4)),
        lambda x: torch.mul(torch.ones(5), 2, out=x),
    ],
)
def test_in_inference_mode_a_normal_tensor_that_gets_other_sizes_stays_normal(manager, change):
    """It became an inference tensor: a program that wrote it afterwards got torch's refusal."""
    plain = torch.arange(6.0).reshape(2, 3)
    ref = manager.adopt(plain.clone())
    for x in (plain, ref):
        with torch.inference_mode():
            assert change(x) is x
        x.add_(1)
    assert not ref.is_inference()
    assert ref._version == plain._version
    assert torch.equal(ref, plain)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.multiply_(2),
        lambda x: x.square_(),
        lambda x: x.clip_(0.5),
        lambda x: torch.nn.functional.dropout(x, 0.5, inplace=True),
        lambda x: torch.nn.functional.selu(x, inplace=True),
    ],
)
def test_a_composite_in_inference_mode_counts_the_versions_of_what_it_writes(manager, write):
    """Autograd took what was overwritten there for what it had saved: another gradient."""
    plain = torch.rand(3)
    for x in (plain, manager.adopt(plain.clone())):
        weight = manager.adopt(torch.ones(3)).requires_grad_()
        product = weight * x
        with torch.inference_mode():
            write(x)
        assert x._version == 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_a_ref_is_set_to_a_part_of_another(manager):
    """C++ asked the other one for its storage: an error, and in Python the process ended."""
    ref, other = manager.adopt(torch.zeros(1)), manager.adopt(torch.arange(8.0)).add_(1)
    assert ref.set_(other, 1, (2, 2), (3, 1)) is ref
    assert ref.add_(10).tolist() == [[12, 13], [15, 16]]
    assert other.tolist() == [1, 12, 13, 4, 15, 16, 7, 8]
    assert ref.set_(other, 6, (2,)).tolist() == [7, 8]


@pytest.mark.parametrize("function", [torch.linalg.inv, torch.linalg.cholesky])
def test_what_is_written_before_it_is_refused_is_counted(manager, function):
    """A composite operator finds a singular matrix when it has written: another gradient."""
    for bring in (torch.clone, manager.adopt):
        out, weight = bring(torch.rand(3, 3)), bring(torch.ones(3, 3)).requires_grad_()
        product = (weight * out).sum()
        with pytest.raises(torch.linalg.LinAlgError):
            function(bring(torch.zeros(3, 3)), out=out)
        assert out._version == 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@pytest.mark.parametrize(("classes", "count"), [([0, 5], 3), ([0, -1], 4), ([0, -1], -1), ([], -1)])
def test_classes_that_there_are_none_of_are_refused(manager, classes, count):
    """For a subclass torch looks at none: a row of zeros."""
    plain = torch.tensor(classes, dtype=torch.long)
    refusals = []
    for x in (plain, manager.adopt(plain.clone())):
        with pytest.raises(RuntimeError) as refusal:
            torch.nn.functional.one_hot(x, count)
        refusals.append(str(refusal.value))
    assert refusals[0] == refusals[1]


def test_a_result_of_bytes_keeps_its_shape_when_it_comes_back(manager):
    """A replica that a kernel had made became a row of bytes, and was what later operators read."""
    ref = manager.adopt(torch.arange(12)).reshape(3, 4).to(torch.uint8)
    ref.toCPU()
    ref.toGPU()
    assert (ref + 1).shape == (3, 4)
    assert (ref << 1).tolist() == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20, 22]]


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.reshape(6),
        lambda x: x.flatten(),
        lambda x: torch.atleast_3d(x),
        lambda x: x.unflatten(1, (3, 1)),
        lambda x: x.expand_as(x),
        lambda x: x.tensor_split(2)[0],
        lambda x: x.movedim(0, 1),
    ],
)
def test_a_composite_in_inference_mode_makes_views_of_normal_tensors(manager, look):
    """What was written through them was not counted, so another gradient came out."""
    plain = torch.rand(2, 3)
    for x in (plain, manager.adopt(plain.clone())):
        weight = manager.adopt(torch.ones(2, 3)).requires_grad_()
        product = weight * x
        with torch.inference_mode():
            part = look(x)
        assert not part.is_inference()
        assert part._base is x
        part.mul_(2)
        assert x._version == part._version == 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.to(torch.float64),
        lambda x: x.t().reshape(6),
        lambda x: x.t().contiguous(),
        lambda x: x.to(torch.float32, copy=True),
    ],
)
def test_a_composite_that_copies_in_inference_mode_makes_inference_tensors(manager, change):
    ref = manager.adopt(torch.rand(2, 3))
    with torch.inference_mode():
        assert change(ref).is_inference()


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("at", ["there", "home"])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t_(),
        lambda x: x.unsqueeze_(0),
        lambda x: x.as_strided_((2,), (1,)),
        lambda x: torch.add(torch.zeros(3, 2), 1, out=x),
        lambda x: x.resize_(3, 1),
    ],
)
def test_other_sizes_in_place_are_those_of_one_tensor_only(manager, change, at):
    """Its `data` was given them, too: what was computed of it was laid out otherwise."""
    plain = torch.rand(2, 3)
    ref = manager.adopt(plain.clone(), sole=True).toGPU()
    found = []
    for x in (plain, ref):
        alias = x.data
        if at == "home" and x is ref:
            manager.bring_all_home()
        change(alias)
        found.append((x + 0, alias + 0))
        manager.bring_all_home()
    assert torch.equal(found[1][0], found[0][0])
    assert torch.equal(found[1][1], found[0][1])


@pytest.mark.parametrize(
    "find",
    [
        torch.linalg.eigvalsh,
        torch.linalg.cond,
        lambda x: torch.linalg.matrix_norm(x, "nuc"),
        lambda x: torch.linalg.cond(x, out=torch.empty(0)),
    ],
)
def test_what_finds_values_alone_does_so_in_inference_mode(manager, find):
    """Of a subclass torch finds the vectors, too, by another algorithm: with other last bits."""
    plain = torch.rand(8, 8, generator=torch.Generator().manual_seed(0))
    plain = plain @ plain.T
    ref = manager.adopt(plain.clone())
    with torch.inference_mode():
        assert torch.equal(find(ref), find(plain))


@pytest.mark.parametrize("view", [lambda z: z.conj(), lambda z: z.conj().imag])
def test_a_deep_copy_has_the_values_and_no_note_of_how_to_read_them(manager, view):
    plain = view(torch.tensor([1 + 2j, 3 - 1j]))
    ref = view(manager.adopt(torch.tensor([1 + 2j, 3 - 1j])))
    for x in (plain, ref):
        twin = copy.deepcopy(x)
        assert (twin.is_conj(), twin.is_neg()) == (False, False)
        assert torch.equal(twin, plain)
        first, second = copy.deepcopy([x, x[:]])  # of such views torch's share nothing
        first.zero_()
        assert torch.equal(second, plain)


@pytest.mark.parametrize("nbytes", [20_000, 10_000, 6_000])
def test_out_of_two_results_that_grow_where_the_second_finds_no_room(manage, nbytes):
    """The operator ran again with the blocks that the first one had before."""
    manager = manage("lru", nbytes)
    plain = torch.rand(64, 16)
    expected = torch.sort(plain, 1)
    x, values = manager.adopt(plain.clone()), manager.adopt(torch.empty(0))
    order = manager.adopt(torch.empty(0, dtype=torch.long))
    torch.sort(x, 1, out=(values, order))
    assert values.tolist() == expected.values.tolist()
    assert order.tolist() == expected.indices.tolist()


def test_statistics_that_batch_norm_updates_by_itself_are_written(manager):
    """The schema does not say so: what had been written was taken for what is at home, too."""
    x, mean, var = torch.rand(32, 8, 4), torch.zeros(8), torch.ones(8)
    refs = [manager.adopt(tensor.clone()) for tensor in (x, mean, var)]
    torch.batch_norm_update_stats(x, mean, var, 0.1)
    torch.batch_norm_update_stats(*refs, 0.1)
    manager.bring_all_home()
    assert refs[1].tolist() == mean.tolist()
    assert refs[2].tolist() == var.tolist()


@pytest.mark.parametrize("draw", [torch.bernoulli, torch.poisson])
def test_a_generator_is_drawn_from_once_where_the_result_finds_no_room(manage, draw):
    """The default one was set back before the second try, and one that was given was not."""
    plain = torch.rand(64, 16)
    given, again = (torch.Generator().manual_seed(5) for _ in range(2))
    expected = draw(plain, generator=given)
    manager = manage("lru", 6000)
    home = manager.adopt(plain.clone())
    host = manager.residency.books.host
    ref = make_ref(plain_on(home, host), home._ttr_block, host, torch.device("cuda:0"))
    assert torch.equal(manager.ownership.peek(draw(ref, generator=again)), expected)
    assert torch.equal(again.get_state(), given.get_state())


def test_a_use_while_a_compiled_call_runs_is_not_known_to_be_the_last(manager):
    """Operators of the call come after it, and nobody tells of them."""
    holds = manager.residency.holds
    assert holds.is_alone_on_ready_path()
    holds.native_blocks[1] = ()
    try:
        assert not holds.is_alone_on_ready_path()
    finally:
        del holds.native_blocks[1]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_an_output_that_had_grown_when_its_operator_raised_can_be_used(manager):
    """Its storage was larger than its block: no copy home could be made from then on."""
    ref = manager.adopt(torch.ones(4, 4)) + 0
    singular = manager.adopt(torch.zeros(8, 8))
    with pytest.raises(RuntimeError):
        torch.linalg.inv(singular, out=ref)
    manager.check()
    ref.fill_(1.0)
    manager.bring_all_home()
    assert set(ref.flatten().tolist()) == {1.0}
    again = manager.adopt(torch.eye(8))
    assert torch.equal(torch.linalg.inv(again, out=ref).cpu(), torch.eye(8))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("strategy", ["genoa", "lru"])
def test_an_output_still_to_be_conjugated_that_shrinks_has_its_new_sizes(manage, strategy):
    """Torch gives it them in C++, and its view at home was kept, which had the old ones."""
    manager = manage(strategy, 1 << 20)
    for out in (torch.ones(4, 2, dtype=torch.complex64).conj(), torch.ones(4, 2) * 1j):
        ref = manager.adopt(out.clone()).conj() if out.is_conj() else manager.adopt(out).conj().imag
        for _ in range(2):  # the first makes the view that is kept
            ref.tolist()
        torch.mul(manager.adopt(torch.ones(1, 2, dtype=ref.dtype)), 2, out=ref)
        assert (ref.shape, ref.detach().shape, ref[:].shape) == ((1, 2),) * 3
        assert ref.detach().tolist() == ref.view(2)[None].tolist() == [[2, 2]]


GROWING = {
    "cat": lambda x, out: torch.cat([x, x], out=out),
    "stack": lambda x, out: torch.stack([x, x], out=out),
    "mul": lambda x, out: torch.mul(x[:30, None], x[None, :30], out=out),
    "outer": lambda x, out: torch.outer(x[:30], x[:30], out=out),  # composite
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("strategy", ["genoa", "lru", "flow"])
@pytest.mark.parametrize("grow", GROWING.values(), ids=GROWING)
@pytest.mark.parametrize("lazily", [torch.conj, lambda x: x.conj().imag], ids=["conj", "neg"])
def test_an_output_that_cannot_grow_has_the_sizes_that_it_had(manage, strategy, grow, lazily):
    """In C++ torch gives an output that is still to be conjugated or negated its sizes itself."""
    manager = manage(strategy, 8_000)
    out = lazily(manager.adopt(torch.full((300,), 2 + 3j)))
    before = out.shape, out.stride(), out.tolist()
    x = manager.adopt(torch.ones(300, dtype=out.dtype))
    refused = ""
    try:
        grow(x, out)
    except RuntimeError as error:
        refused = str(error)
    if refused:
        assert "not resizable" in refused
        assert (out.shape, out.stride(), out.tolist()) == before
        torch.mul(x, 2, out=out)
        assert out.sum().item() == 600
    else:  # it grows without C++
        assert out.numel() >= 600
        assert set(out.flatten().tolist()) == {1}
    manager.check()


def test_a_weight_that_is_a_number_is_refused_as_torch_does(manager):
    """A rule asked for its rows, an IndexError, before torch could say what is wrong."""
    weight = manager.adopt(torch.tensor(2.0))
    for x in (torch.ones(2, 3), torch.ones(2, 2, 3).transpose(0, 1), torch.ones(3, 2).t()):
        with pytest.raises(RuntimeError, match="need to be at least 1D"):
            torch.nn.functional.linear(manager.adopt(x), weight)


@pytest.mark.parametrize("wants", [False, True])
def test_the_choice_of_attention_sees_who_wants_gradients(manager, wants):
    """What stood for the mask had none, and a fused kernel was chosen, which has no gradient."""
    x, mask = torch.ones(1, 2, 4, 8), torch.ones(4, 4, requires_grad=wants)
    expected = torch._fused_sdp_choice(x, x, x, mask)
    ref = manager.adopt(x)
    mine = manager.adopt(mask.detach()).requires_grad_(wants)
    assert torch._fused_sdp_choice(ref, ref, ref, mine) == expected
