"""Loading: what a library reads from files is managed, once, and right."""

import array
import collections
import gc
import json
from mmap import MAP_SHARED

import pytest
import torch
from torch import nn

import torchTensorRef
from torchTensorRef import TensorRef
from torchTensorRef.inject import hooks
from torchTensorRef.inject.files import Adoption

from ..support.injection import kind_of

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")
safetensors_torch = pytest.importorskip("safetensors.torch")


@pytest.fixture
def injected(manage):
    with hooks.is_disabled.entered(False):
        yield manage("lru", 4 << 20)


def tiny_config(**changes):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 256,
    }
    return transformers.LlamaConfig(**{**sizes, **changes})


@pytest.fixture
def saved(tmp_path):
    """Save a model made of plain tensors; return its folder and its plain state."""

    def save(model_type, config, **options):
        with torchTensorRef.disabled():
            torch.manual_seed(0)
            model = model_type(config).eval()
            model.save_pretrained(tmp_path, **options)
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return tmp_path, state, model

    return save


def tensors_of(model):
    return [*model.named_parameters(), *model.named_buffers()]


def assert_managed(model):
    """Every parameter and buffer is a TensorRef that persists and that nobody else holds."""
    gc.collect()
    kinds = collections.Counter(kind_of(tensor) for _, tensor in tensors_of(model))
    assert set(kinds) == {TensorRef}
    assert [name for name, tensor in tensors_of(model) if not tensor._ttr_block.is_persistent] == []
    held = {
        name: tensor._ttr_block.exposure.why
        for name, tensor in tensors_of(model)
        if tensor._ttr_block.exposure is not None and tensor._ttr_block.exposure.alive
    }
    assert held == {}


def assert_same_state(model, state):
    found = model.state_dict()
    assert found.keys() == state.keys()
    assert [name for name in state if not torch.equal(found[name], state[name])] == []


def test_a_pretrained_model_is_managed_and_the_same(injected, saved):
    folder, state, plain = saved(transformers.LlamaForCausalLM, tiny_config())
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    assert_managed(model)
    assert_same_state(model, state)
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        ours = model(tokens).logits
        with torchTensorRef.disabled():
            theirs = plain(injected.release(tokens)).logits
    assert torch.equal(ours, theirs)
    assert_managed(model)


def test_shards_are_read_into_one_model(injected, saved):
    folder, state, _ = saved(transformers.LlamaForCausalLM, tiny_config(), max_shard_size="100KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert_managed(model)
    assert_same_state(model, state)


def test_tied_weights_are_one_parameter(injected, saved):
    folder, _, _ = saved(transformers.LlamaForCausalLM, tiny_config(tie_word_embeddings=True))
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert_managed(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 41
    assert model.model.embed_tokens.weight[0, 0].item() == 41


def test_buffers_that_are_not_saved_are_right(injected, saved):
    config = transformers.BertConfig(
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_hidden_layers=1,
        vocab_size=64,
    )
    folder, state, plain = saved(transformers.BertModel, config)
    model = transformers.BertModel.from_pretrained(folder)
    assert_managed(model)
    assert_same_state(model, state)
    expected = dict(plain.named_buffers())
    assert {name for name, _ in model.named_buffers()} == set(expected)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name


def test_missing_weights_are_initialised_as_without_us(injected, saved):
    folder, _, _ = saved(transformers.LlamaModel, tiny_config())
    torch.manual_seed(5)
    ours = transformers.LlamaForSequenceClassification.from_pretrained(folder)
    with torchTensorRef.disabled():
        torch.manual_seed(5)
        theirs = transformers.LlamaForSequenceClassification.from_pretrained(folder)
    assert_managed(ours)
    assert torch.equal(ours.score.weight, theirs.score.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype_is_converted(injected, saved, dtype):
    folder, state, _ = saved(transformers.LlamaForCausalLM, tiny_config())
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    assert_managed(model)
    assert_same_state(model, {name: tensor.to(dtype) for name, tensor in state.items()})


def test_what_is_saved_with_us_loads_without_us(injected, saved, tmp_path):
    folder, state, _ = saved(transformers.LlamaForCausalLM, tiny_config())
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "again")
    with torchTensorRef.disabled():
        plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "again")
    assert {type(p) for p in plain.parameters()} == {nn.Parameter}
    assert_same_state(plain, state)


def test_a_progress_bar_is_shown_where_the_library_shows_one(injected, saved, capfd):
    folder, _, _ = saved(transformers.LlamaForCausalLM, tiny_config())
    transformers.LlamaForCausalLM.from_pretrained(folder)
    assert "Loading weights" in capfd.readouterr().err


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_load_gives_refs_that_nobody_else_holds(injected, tmp_path, mmap):
    shared = torch.arange(6.0)
    state = nn.Linear(2, 3).state_dict()
    contents = {
        "state": state,
        "views": [shared[:3], shared[3:], (shared, "text", 3)],
        "same": [shared, shared],
    }
    torch.save(contents, tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", mmap=mmap)
    assert type(loaded["state"]) is type(state)
    assert loaded["state"]._metadata == state._metadata
    assert {kind_of(t) for t in loaded["state"].values()} == {TensorRef}
    assert loaded["same"][0] is loaded["same"][1]
    first, second, (whole, text, number) = loaded["views"]
    assert (text, number, kind_of(whole)) == ("text", 3, TensorRef)
    whole[4] = 9
    assert (second + 0).tolist() == [3, 9, 5]
    gc.collect()
    assert first._ttr_block.exposure is None or not first._ttr_block.exposure.alive
    assert nn.Linear(2, 3).load_state_dict(loaded["state"]).missing_keys == []


def test_torch_load_keeps_attributes(injected, tmp_path):
    """What a program notes on a tensor, and on a parameter, is in the file."""
    x, p = torch.ones(3), nn.Parameter(torch.ones(2))
    x.noted, p.noted = "x", ["p"]
    torch.save({"x": x, "p": p}, tmp_path / "noted.pt")
    read = torch.load(tmp_path / "noted.pt", weights_only=False)
    assert [isinstance(t, TensorRef) for t in read.values()] == [True, True]
    assert (read["x"].noted, read["p"].noted) == ("x", ["p"])


class Named(collections.namedtuple("Named", "a b")):
    """A tuple with names, made of one thing, that notes something."""

    def __new__(cls, both):
        self = super().__new__(cls, both, both + 1)
        self.noted = 5
        return self

    def __getnewargs__(self):
        return (self.a,)


class Pair(tuple):
    """One whose class takes other than its parts."""

    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))

    def __getnewargs__(self):
        return tuple(self)


def test_torch_load_of_tuples(injected, tmp_path):
    """They are made anew, with the attributes and the class that they had."""
    x = torch.arange(4.0).view(2, 2)
    named, packed = Named(x), nn.utils.rnn.pack_sequence([x])
    named.noted = 7
    for value in [(x, 1), x.max(0), packed, named, Pair(x, x + 1)]:
        torch.save(value, tmp_path / "file.pt")
        loaded = torch.load(tmp_path / "file.pt", weights_only=False)
        assert type(loaded) is type(value)
        assert kind_of(loaded[0]) is TensorRef
        assert str([*loaded]) == str([*value])
        assert getattr(loaded, "noted", None) == (7 if type(value) is Named else None)


class Guarded(dict):
    """Refuses entries, as `ModelOutput` and frozen dictionaries do."""

    def __setitem__(self, key, value):
        raise TypeError("no entries")

    def __reduce_ex__(self, protocol):
        return Guarded, (dict(self),)


class GuardedList(list):
    def __setitem__(self, key, value):
        raise TypeError("no entries")

    def __reduce_ex__(self, protocol):
        return GuardedList, (list(self),)


class View(collections.UserDict):
    """Another mapping, which is left alone."""

    def __setitem__(self, key, value):
        raise TypeError("no entries")

    def __init__(self, data):
        self.data = data

    def __reduce_ex__(self, protocol):
        return View, (dict(self.data),)


def test_torch_load_of_containers_that_refuse_entries(injected, tmp_path):
    x = torch.ones(3)
    torch.save([Guarded(x=x), GuardedList([x]), View({"x": x})], tmp_path / "file.pt")
    guarded, listed, view = torch.load(tmp_path / "file.pt", weights_only=False)
    assert kind_of(guarded["x"]) is TensorRef
    assert listed[0] is guarded["x"]
    assert view["x"].tolist() == [1, 1, 1]


class Mirrored(dict):
    """Has its entries as attributes, too, as `ModelOutput` has."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.__dict__[key] = value

    def __reduce_ex__(self, protocol):
        return Mirrored, (), vars(self), None, iter(self.items())


def test_torch_load_of_a_dictionary_that_has_entries_twice(injected, tmp_path):
    mirrored = Mirrored()
    mirrored["x"] = torch.ones(3)
    torch.save(mirrored, tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", weights_only=False)
    assert kind_of(loaded["x"]) is TensorRef
    assert loaded.x is loaded["x"]


def test_torch_load_asks_nothing_of_numbers(injected, tmp_path, monkeypatch):
    """Three megabytes took three seconds."""
    asked = []
    of = Adoption._of
    monkeypatch.setattr(
        Adoption, "_of", lambda self, value: (asked.append(value), of(self, value))[1]
    )
    many = {
        "bytes": bytearray(1000),
        "array": array.array("i", range(1000)),
        "list": [*range(1000)],
    }
    torch.save(many, tmp_path / "file.pt")
    assert torch.load(tmp_path / "file.pt", weights_only=False) == many
    assert len(asked) < 10


def test_torch_load_of_a_tuple_at_two_places(injected, tmp_path):
    pair = (torch.ones(2), 1)
    torch.save({"a": pair, "b": [pair]}, tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt")
    assert loaded["a"] is loaded["b"][0]
    assert kind_of(loaded["a"][0]) is TensorRef


def cycles():
    """Tuples, and what holds them that they hold, each from its own side."""
    x, inside, named, held = torch.ones(2), [], {}, []
    pair, both = (inside, x), Pair(named, x)
    around = (pair, held)
    inside += [pair, around, x]
    named.update(both=both, inside=inside)
    held += [around, named]
    return [pair, around, inside, both, named, held]


def paths_of(value):
    """Each object that a value is made of, as the places in it where it is."""
    found, waiting = {}, [((), value)]
    for place, one in waiting:
        if isinstance(one, (int, str)):
            continue
        places = found.setdefault(id(one), [])
        places.append(place)
        if len(places) == 1 and not isinstance(one, torch.Tensor):
            items = one.items() if isinstance(one, dict) else enumerate(one)
            waiting += [((*place, key), part) for key, part in items]
    return [*found.values()]


@pytest.mark.parametrize("side", range(6))
def test_torch_load_of_tuples_in_what_they_hold(injected, tmp_path, side):
    torch.save(cycles()[side], tmp_path / "file.pt")
    with torchTensorRef.disabled():
        expected = torch.load(tmp_path / "file.pt", weights_only=False)
    loaded = torch.load(tmp_path / "file.pt", weights_only=False)
    assert paths_of(loaded) == paths_of(expected)


@pytest.mark.parametrize("as_parameter", [False, True])
def test_what_is_mapped_to_be_written_is_written_to_the_file(injected, tmp_path, as_parameter):
    path = tmp_path / "file.pt"
    torch.save({"weight": torch.zeros(30, 30), "bias": torch.zeros(30)}, path)
    with torch.serialization.set_default_mmap_options(MAP_SHARED):
        state = torch.load(path, mmap=True)
    if as_parameter:
        module = nn.Linear(30, 30)
        module.load_state_dict(state, assign=True)
        state = dict(module.named_parameters())
    with torch.no_grad():
        state["weight"].fill_(3)
        state["weight"].mul_(2)
    assert kind_of(state["weight"]) is TensorRef
    found = torch.load(path)
    assert found["weight"].unique().tolist() == [6]
    assert found["bias"].unique().tolist() == [0]


def test_torch_load_of_a_module(injected, tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    torch.save(model, tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", weights_only=False)
    assert {kind_of(tensor) for _, tensor in tensors_of(loaded)} == {TensorRef}
    assert torch.equal(loaded[0].weight, model[0].weight)


def test_torch_load_to_an_accelerator_that_torch_cannot_name(injected, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this torch can name cuda")
    torch.save(torch.ones(2), tmp_path / "file.pt")
    for where in ("cuda", torch.device("cuda")):
        assert torch.load(tmp_path / "file.pt", map_location=where).tolist() == [1, 1]


def test_loading_in_an_excluded_module_stays_plain(injected, tmp_path):
    torch.save(torch.ones(2), tmp_path / "file.pt")
    with torchTensorRef.disabled():
        assert kind_of(torch.load(tmp_path / "file.pt")) is torch.Tensor


def test_a_state_dict_of_safetensors_loads(injected, tmp_path):
    model = nn.Linear(3, 3)
    safetensors_torch.save_file(model.state_dict(), tmp_path / "file.safetensors")
    state = safetensors_torch.load_file(tmp_path / "file.safetensors")
    twin = nn.Linear(3, 3)
    twin.load_state_dict(state)
    assert torch.equal(twin.weight, model.weight)
    third = nn.Linear(3, 3)
    third.load_state_dict(state, assign=True)
    assert_managed(third)
    assert torch.equal(third.weight, model.weight)
    safetensors_torch.load_model(twin, tmp_path / "file.safetensors")
    assert {kind_of(tensor) for _, tensor in tensors_of(twin)} == {TensorRef}


def train(module, steps=2):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("how", ["load_file", "safe_open", "mapped", "part of a file", "disabled"])
def test_what_was_loaded_is_what_is_trained(injected, tmp_path, how):
    """As in plain torch `nn.Parameter(tensor)` shares memory, whoever has made the tensor."""
    path = tmp_path / "file.safetensors"
    safetensors_torch.save_file({"weight": torch.rand(4, 3), "bias": torch.rand(4)}, path)
    if how == "load_file":
        state = safetensors_torch.load_file(path)
        assert {kind_of(tensor) for tensor in state.values()} == {TensorRef}
    elif how == "safe_open":
        with safetensors.safe_open(path, "pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    else:
        with torchTensorRef.disabled():
            state = safetensors_torch.load_file(path)
            if how == "mapped":
                torch.save(state, tmp_path / "file.pt")
                state = torch.load(tmp_path / "file.pt", mmap=True)
            elif how == "part of a file":
                whole = torch.UntypedStorage.from_file(str(path), nbytes=path.stat().st_size)
                whole = torch.asarray(whole, dtype=torch.uint8)[:64].view(torch.float32)
                state = {"weight": whole[:12].view(4, 3), "bias": whole[12:]}
                whole.copy_(torch.rand(16))
    before = state["weight"].tolist()
    module = nn.Linear(3, 4)
    module.load_state_dict(state, assign=True)
    assert {kind_of(tensor) for _, tensor in tensors_of(module)} == {TensorRef}
    train(module)
    assert state["weight"].tolist() == module.weight.tolist() != before
    state["bias"].fill_(7)
    assert module.bias.detach().numpy().tolist() == [7, 7, 7, 7]
    del state
    gc.collect()
    train(module)
    assert module.bias.tolist() != [7, 7, 7, 7]
    if how != "part of a file":
        assert_managed(module)


def test_a_storage_that_somebody_holds_is_exposed(injected):
    """Torch keeps one Python object per storage, which its count of users does not see."""
    tensor = torch.arange(4.0)
    storage = tensor.untyped_storage()
    assert tensor._ttr_block.exposure.alive
    torch.tensor([], dtype=torch.float32).set_(storage, 0, (4,))
    assert (tensor + 1).tolist() == [1, 2, 3, 4]
    del storage
    gc.collect()
    assert not tensor._ttr_block.exposure or not tensor._ttr_block.exposure.alive
