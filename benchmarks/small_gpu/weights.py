"""Seeded weights: made from a configuration, saved once as sharded files, loaded by everybody."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from .scales import SCALES, Scale

DTYPE = torch.bfloat16
STANDARD_DEVIATION = 0.02
#: Bytes per mebibyte of a file that the manifest's digest is made from.
SAMPLE_NBYTES = 1024


class Sizes(NamedTuple):
    """Bytes of a model's weights: all, and those that a step reads whole."""

    nbytes: int
    #: All but the embedding, of which a step needs a few rows, and they may be gathered anywhere.
    read_nbytes: int


def folder_of(root: Path, scale: Scale, family: str) -> Path:
    """Where a family's weights are; adapters are not saved, so that "lora" shares the Llama's."""
    return root / f"{'llama' if family == 'lora' else family}_{scale.name}"


def empty_model(scale: Scale, family: str) -> Any:
    """Return the model without bytes."""
    with torch.device("meta"):
        if family == "denoiser":
            from .denoiser import Denoiser, DenoiserConfig

            return Denoiser(DenoiserConfig(**scale.denoiser)).to(DTYPE)
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(**scale.llama, dtype=DTYPE, tie_word_embeddings=False)
        return LlamaForCausalLM(config).to(DTYPE)


def sizes_of(scale: Scale, family: str) -> Sizes:
    """Count the bytes of the weights (adapters not counted)."""
    return _sizes_of(scale.name, family)


@functools.cache
def _sizes_of(name: str, family: str) -> Sizes:
    scale = SCALES[name]
    model = empty_model(scale, family)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    gathered = sum(
        p.numel() * p.element_size()
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for p in module.parameters()
    )
    return Sizes(nbytes, nbytes - gathered)


def prepare(root: Path, scale: Scale, family: str, device: str = "cpu") -> Path:
    """Make and save the weights, unless they are there already; return their folder.

    Parameters
    ----------
    device : str
        Where random numbers are made. Another device makes other numbers, which is why the
        contestants load files instead of making their own.
    """
    folder = folder_of(root, scale, family)
    if (folder / "manifest.json").exists():
        verify(folder)
        return folder
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    model = empty_model(scale, family)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(unfinished)
    _save_shards(unfinished, _filled(model, device), scale.shard_nbytes)
    manifest = {path.name: digest_of(path) for path in sorted(unfinished.glob("*.safetensors"))}
    (unfinished / "manifest.json").write_text(json.dumps(manifest))
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return folder


def _filled(model: nn.Module, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Give each parameter its numbers; the n-th has the n-th seed, whatever came before it."""
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        tensor = torch.empty(parameter.shape, dtype=DTYPE, device=device)
        if parameter.dim() > 1:
            generator = torch.Generator(device).manual_seed(seed)
            tensor.normal_(0, STANDARD_DEVIATION, generator=generator)
        else:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        yield name, tensor.cpu()


def _save_shards(
    folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], shard_nbytes: int
) -> None:
    from safetensors.torch import save_file

    place: dict[str, str] = {}
    total = 0

    def close(shard: dict[str, torch.Tensor]) -> None:
        name = f"model-{len(set(place.values())) + 1:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        place.update(dict.fromkeys(shard, name))
        shard.clear()

    shard: dict[str, torch.Tensor] = {}
    for key, tensor in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > shard_nbytes:
            close(shard)
        shard[key] = tensor
        total += tensor.nbytes
    close(shard)
    index = {"metadata": {"total_size": total}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def digest_of(path: Path) -> str:
    """Digest of a file's size and of a kilobyte of each of its mebibytes."""
    digest = hashlib.sha256(str(path.stat().st_size).encode())
    with path.open("rb") as file:
        while sample := file.read(SAMPLE_NBYTES):
            digest.update(sample)
            file.seek(2**20 - SAMPLE_NBYTES, os.SEEK_CUR)
    return digest.hexdigest()


def verify(folder: Path) -> str:
    """Check that the files are those that were made; return a digest of them all.

    Raises
    ------
    RuntimeError
        A file is another one, or missing.
    """
    manifest: Mapping[str, str] = json.loads((folder / "manifest.json").read_text())
    for name, expected in manifest.items():
        if not (folder / name).exists() or digest_of(folder / name) != expected:
            raise RuntimeError(f"{folder / name} is not what was made; remove {folder}")
    return hashlib.sha256("".join(manifest.values()).encode()).hexdigest()[:16]


def load(folder: Path, family: str) -> Any:
    """Load the model as any program does: `from_pretrained`, on the host."""
    if family == "denoiser":
        from .denoiser import Denoiser

        return Denoiser.from_pretrained(folder, dtype=DTYPE).eval()
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE).eval()
