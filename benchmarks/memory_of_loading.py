"""How much memory loading a model takes, with us and without.

    python -m benchmarks.memory_of_loading [--layers 4] [--ways from_pretrained sharded ...]
                                           [--write-baseline]

A Llama of about 1 GB is saved once and loaded in fresh processes, in several ways. What is measured
is the growth of resident memory from before the loading to its peak, sampled by psutil. Pages of a
mapped file count as soon as they are touched, although the system may take them back at any time: a
conversion (`bfloat16`) shows the file beside the weights, with us as without.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import Progress

from .baseline import Figure, Keeper, Tolerance

WAYS = ("from_pretrained", "sharded", "bfloat16", "torch_load", "torch_load_mmap", "load_file")
#: What issue 5 allows beyond the weights.
ALLOWED_SHARE, ALLOWED_NBYTES = 0.15, 200e6
#: Or what plain torch took, and this beyond: of two loadings with plain torch one takes more, too.
ALLOWED_OVER_PLAIN = 0.01
KEEPER = Keeper(
    "memory_of_loading",
    "python -m benchmarks.memory_of_loading",
    Tolerance(share=0.05, amount=20),
)


class Peak:
    """The most resident memory of this process inside a `with`."""

    def __enter__(self) -> Peak:
        self._process = psutil.Process()
        self.before_nbytes = self.peak_nbytes = self._process.memory_info().rss
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self.peak_nbytes = max(self.peak_nbytes, self._process.memory_info().rss)

    def __exit__(self, *error: object) -> None:
        self.after_nbytes = self._process.memory_info().rss
        self._stop.set()
        self._thread.join()
        self.peak_nbytes = max(self.peak_nbytes, self.after_nbytes)


def save(folder: Path, layers: int) -> None:
    """Write the model in every form that is loaded later."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}
    config = LlamaConfig(vocab_size=16384, num_hidden_layers=layers, **sizes)
    with torch.no_grad():
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "whole", max_shard_size="100GB")
    model.save_pretrained(folder / "shards", max_shard_size="200MB")
    torch.save(model.state_dict(), folder / "state.pt")


def load(way: str, folder: Path) -> object:
    """Load it in one of the ways."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if way in ("from_pretrained", "sharded", "bfloat16"):
        options = {"dtype": torch.bfloat16} if way == "bfloat16" else {}
        name = "shards" if way == "sharded" else "whole"
        return AutoModelForCausalLM.from_pretrained(folder / name, **options)
    if way == "load_file":
        from safetensors.torch import load_file

        state = load_file(folder / "whole" / "model.safetensors")
    else:
        state = torch.load(folder / "state.pt", mmap=way.endswith("mmap"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "whole"))
    model.load_state_dict(state, assign=True, strict=False)
    return model


def measure(way: str, folder: Path, *, is_plain: bool) -> None:
    """Load in this process, and print what it took as JSON."""
    if not is_plain:
        import torchTensorRef

        torchTensorRef.tensorsManager.device = "sim"
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))  # all that is imported late
    torch.ones(2).sum().item()
    with Peak() as peak:
        start = time.perf_counter()
        model = load(way, folder)
        took_s = time.perf_counter() - start
    weights_nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    found = {
        "way": way,
        "is_plain": is_plain,
        "weights_nbytes": weights_nbytes,
        "peak_nbytes": peak.peak_nbytes - peak.before_nbytes,
        "after_nbytes": peak.after_nbytes - peak.before_nbytes,
        "took_s": round(took_s, 2),
        "kinds": sorted({type(p).__name__ for p in model.parameters()}),
    }
    print(json.dumps(found))


TINY = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 8,
}


def run(way: str, folder: Path, *, is_plain: bool) -> dict[str, object]:
    """Measure in a fresh process."""
    command = [sys.executable, "-m", __spec__.name, "--measure", way, "--folder", str(folder)]
    command += ["--plain"] * is_plain
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="4 make 1.1 GB (%(default)s)")
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help=argparse.SUPPRESS)
    chosen = KEEPER.parse(parser, None, defaults=["layers", "ways"])
    if chosen.measure:
        measure(chosen.measure, chosen.folder, is_plain=chosen.plain)
        return 0
    if chosen.save:
        save(chosen.folder, chosen.layers)
        return 0
    figures = figures_of(measured(chosen.ways, chosen.layers))
    result = {
        way: {
            "peak_mb": figures[f"{way}/peak"].value,
            "allowed_mb": figures[f"{way}/peak"].bound,
            "is_within": figures[f"{way}/peak"].value <= figures[f"{way}/peak"].bound,
        }
        for way in chosen.ways
    }
    settings = {"layers": chosen.layers}
    return KEEPER.conclude(figures, result, settings=settings, writes=chosen.write_baseline)


def measured(ways: Sequence[str], layers: int) -> list[dict[str, object]]:
    """Save the model, and load it in each way without us and with us; print each as it is found."""
    rows = []
    with (
        tempfile.TemporaryDirectory() as name,
        Progress(console=Console(stderr=True)) as progress,
    ):
        task = progress.add_task("saving", total=1 + 2 * len(ways))
        saving = ["--save", "--folder", name, "--layers", str(layers)]
        subprocess.run([sys.executable, "-m", __spec__.name, *saving], check=True)
        progress.advance(task)
        print(f"{'':16}{'':6}{'weights':>10}{'peak':>10}{'after':>10}  MB", flush=True)
        for way in ways:
            for is_plain in (True, False):
                progress.update(task, description=f"{way} {'plain' if is_plain else 'ours'}")
                rows.append(run(way, Path(name), is_plain=is_plain))
                print(line_of(rows[-1]), flush=True)
                progress.advance(task)
    return rows


def line_of(row: dict[str, object]) -> str:
    """Everything known of one loading."""
    who = "plain" if row["is_plain"] else "ours"
    sizes = (row[f"{name}_nbytes"] / 1e6 for name in ("weights", "peak", "after"))
    figures = "".join(f"{size:10.0f}" for size in sizes)
    return f"{row['way']:16}{who:6}{figures}  {row['took_s']} s, {', '.join(row['kinds'])}"


def figures_of(rows: list[dict[str, object]]) -> dict[str, Figure]:
    """Of the loadings with us; those without are what they may take."""
    plain_peak = {row["way"]: row["peak_nbytes"] for row in rows if row["is_plain"]}
    figures = {}
    for row in rows:
        if not row["is_plain"]:
            way = row["way"]
            least = row["weights_nbytes"] * (1 + ALLOWED_SHARE) + ALLOWED_NBYTES
            allowed = round(max(least, plain_peak[way] * (1 + ALLOWED_OVER_PLAIN)) / 1e6)
            figures[f"{way}/peak"] = Figure(round(row["peak_nbytes"] / 1e6), "MB", allowed)
            figures[f"{way}/after"] = Figure(round(row["after_nbytes"] / 1e6), "MB")
    return figures


if __name__ == "__main__":
    sys.exit(main())
