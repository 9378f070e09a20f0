"""How much memory loading a model takes, with us and without.

    python -m benchmarks.memory_of_loading [--layers 4] [--ways from_pretrained sharded ...]

A Llama of about 1 GB is saved once and loaded in fresh processes, in several ways. What is measured
is the growth of resident memory from before the loading to its peak, sampled by psutil. Pages of a
mapped file count as soon as they are touched, although the system may take them back at any time: a
conversion (`bfloat16`) shows the file beside the weights, with us as without.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

WAYS = ("from_pretrained", "sharded", "bfloat16", "torch_load", "torch_load_mmap", "load_file")
#: What issue 5 allows beyond the weights.
ALLOWED_SHARE, ALLOWED_NBYTES = 0.15, 200e6


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
    chosen = parser.parse_args()
    if chosen.measure:
        measure(chosen.measure, chosen.folder, is_plain=chosen.plain)
        return 0
    if chosen.save:
        save(chosen.folder, chosen.layers)
        return 0
    print(f"{platform.platform()}, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as name:
        saving = ["--save", "--folder", name, "--layers", str(chosen.layers)]
        subprocess.run([sys.executable, "-m", __spec__.name, *saving], check=True)
        rows = [
            run(way, Path(name), is_plain=is_plain)
            for way in chosen.ways
            for is_plain in (True, False)
        ]
    return show(rows)


def show(rows: list[dict[str, object]]) -> int:
    """Print a table and the result line."""
    print(f"{'':18}{'':8}{'weights':>10}{'peak':>10}{'after':>10}  MB")
    result = {}
    plain_peak = {row["way"]: row["peak_nbytes"] for row in rows if row["is_plain"]}
    for row in rows:
        weights, peak, after = (row[f"{name}_nbytes"] for name in ("weights", "peak", "after"))
        who = "plain" if row["is_plain"] else "ours"
        figures = f"{weights / 1e6:10.0f}{peak / 1e6:10.0f}{after / 1e6:10.0f}"
        print(f"{row['way']:18}{who:8}{figures}  {row['took_s']} s, {', '.join(row['kinds'])}")
        if not row["is_plain"]:
            allowed = max(weights * (1 + ALLOWED_SHARE) + ALLOWED_NBYTES, plain_peak[row["way"]])
            result[row["way"]] = {
                "peak_mb": round(peak / 1e6),
                "allowed_mb": round(allowed / 1e6),
                "is_within": peak <= allowed,
            }
    print(f"RESULT {json.dumps(result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
