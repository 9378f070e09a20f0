"""`torchtensorref forecast`: will it run, and how fast? Over several cards, without any of them."""

from __future__ import annotations

import argparse
import inspect
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..base.errors import ConfigError, TensorRefError, did_you_mean
from ..base.option_parsers import path_to_write
from ..base.options import settings
from ..base.text import fitted
from ..base.units import format_nbytes, format_ns
from ..devices.sim.cards import SPECS, read_specs
from ..inject import hooks

if TYPE_CHECKING:
    from ..promises.forecast import Forecast

__all__ = ["add_parser", "main"]

#: Steps of decoding that are foretold one by one; those after them are taken for like the last.
DECODED = 4
#: What bounds a step, in a word.
BOUNDS = {
    "the link": "link",
    "compute": "compute",
    "the host's calls": "calls",
    "the host's own time": "host",
}
#: What transformers calls what a model keeps from one token to the next; some keep nothing.
CACHES = ("past_key_values", "cache_params", "state")
#: What weights may be made of.
DTYPES = ("bfloat16", "float16", "float32", "float64")


def add_parser(commands: Any) -> None:
    """Add the command to those of the program."""
    parser = commands.add_parser(
        "forecast",
        help="say how a model or a script would run on devices that are not there",
        epilog=f"Cards that are known by name: {', '.join(SPECS)}.",
    )
    parser.add_argument("script", nargs="?", help="a Python program, with its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("--model", help="a folder with a config.json, or that file")
    parser.add_argument("--device", default="rtx4060", help="cards: rtx4060,h200 (rtx4060)")
    parser.add_argument("--devices", help="a TOML file with devices of your own")
    parser.add_argument("--host", help="a processor whose own time is counted, or a file of one")
    parser.add_argument("--budget", help="of each device: 8GB, 50%%; all but 10 percent without")
    parser.add_argument("--strategy", help="flow, lru, genoa, or your own (flow)")
    parser.add_argument("--prompt", type=count, default=512, help="tokens of the prompt (512)")
    parser.add_argument("--new-tokens", type=count, default=128, help="tokens to generate (128)")
    parser.add_argument("--batch", type=count, default=1, help="sequences at once (1)")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights (bfloat16)")
    parser.add_argument("--plot", help="draw the time by budget into this PNG")


def count(text: str) -> int:
    """Read a whole number from 1 on; argparse says of which option it was."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no count: write a whole number from 1 on")
    return int(text)


def main(chosen: argparse.Namespace) -> int:
    """Foretell what was asked for, and print it; see `torchtensorref forecast --help`."""
    from ..devices.registry import default_name, spec_of
    from ..promises.forecast import Forecast, check
    from ..promises.recording import budget_on, record_of

    if settings.device is None:  # nothing runs there, so nobody needs to hear which it is
        settings.device = default_name()
    hooks.load(".tensor.install")  # it connects the parts: the first TensorRef may be a promise
    if (chosen.model is None) == (chosen.script is None):
        raise ConfigError("Give either --model, or a script.")
    if chosen.devices:
        read_specs(chosen.devices)
    specs = [spec_of(name.strip(), chosen.host) for name in chosen.device.split(",")]
    check(chosen.budget, chosen.strategy)  # before the program, which may take long
    if chosen.plot:
        path_to_write(chosen.plot, "--plot")
    program = _program_of_model(chosen) if chosen.model else _program_of_script(chosen)
    lists_for = budget_on(specs[0], chosen.budget)
    record = record_of(program, values="compute or zeros", lists_for=lists_for)
    seen = [Forecast(record, spec, chosen.budget, chosen.strategy) for spec in specs]
    sys.stdout.write(table(seen, chosen.new_tokens if chosen.model else 0) + "\n")
    if len(seen) == 1:
        sys.stdout.write(seen[0].report() + "\n")
    if chosen.plot:
        _draw(seen, Path(chosen.plot))
    return 0


def table(seen: list[Forecast], new_tokens: int) -> str:
    """Return a row for each device; below them how long so many tokens take, if there are any."""
    head = f"{'device':14} {'budget':>10} {'peak':>10} {'first':>9} {'then':>9} {'/s':>7}"
    lines, longer = [f"{head} {'floor':>6} bound"], []
    for one in seen:
        step, first = one.steady, one.steps[0]
        times = one.times_floor(step)
        rate = "-" if times is None else f"{1e9 / max(step.time_ns, 1):.2f}"
        against = "-" if times is None else f"{times:.2f}x"
        lines.append(
            f"{one.spec.name:14} {format_nbytes(one.budget_nbytes):>10} "
            f"{format_nbytes(one.peak_nbytes):>10} {format_ns(first.time_ns):>9} "
            f"{format_ns(step.time_ns):>9} {rate:>7} "
            f"{against:>6} {BOUNDS[one.bound_by(step)]}"
        )
        later = max(new_tokens - len(one.steps), 0) * step.time_ns
        longer.append(f"{one.spec.name} {format_ns(one.time_ns + later)}")
    if new_tokens:
        lines += fitted([f"{new_tokens} tokens in: {', '.join(longer)}"])
    return "\n".join(lines)


def _program_of_model(chosen: argparse.Namespace) -> Callable[[], Iterator[tuple[str, Any]]]:
    """Make the program: a prompt, and some tokens after it, each with the caches it leaves."""
    import torch

    try:
        import transformers
    except ImportError:
        raise ConfigError("--model needs transformers: pip install transformers.") from None
    if chosen.dtype not in DTYPES:
        raise ConfigError(
            f"--dtype={chosen.dtype!r} is not understood: {did_you_mean(chosen.dtype, DTYPES)}",
            name=chosen.dtype,
            known=DTYPES,
        )
    dtype = getattr(torch, chosen.dtype)
    path = Path(chosen.model)
    if not path.exists():
        raise ConfigError(f"There is no {path}. Give a folder with a config.json, or that file.")
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    except (OSError, ValueError) as error:  # it says what it lacks, and then lists what there is
        said = str(error).strip().partition("\n")[0][:200]
        raise ConfigError(
            f"transformers makes no causal language model of {path}: {said}", name=str(path)
        ) from error
    ids = torch.ones(chosen.batch, chosen.prompt, dtype=torch.int64)

    def program() -> Iterator[tuple[str, Any]]:
        given, kept = ids, dict[str, Any]()
        if "use_cache" in inspect.signature(model.forward).parameters:
            kept["use_cache"] = True
        with torch.no_grad():
            for number in range(1 + min(DECODED, chosen.new_tokens - 1)):
                out = model(given, **kept)
                token = out.logits[:, -1:].argmax(-1)
                caches = {name: out[name] for name in CACHES if out.get(name) is not None}
                kept |= caches
                given = token if caches else torch.cat([given, token], 1)
                yield f"token {number + 1}" if number else f"prompt of {chosen.prompt}", caches

    return program


def _program_of_script(chosen: argparse.Namespace) -> Callable[[], None]:
    path = Path(chosen.script)
    if not path.exists():
        raise ConfigError(f"There is no program {path}.")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise ConfigError(f"{path} is a folder without a __main__.py. Name a file in it.")

    def program() -> None:
        before = sys.argv, list(sys.path)
        sys.argv = [str(path), *chosen.arguments]
        sys.path.insert(0, str(path.parent))
        try:
            runpy.run_path(str(path), run_name="__main__")
        except TensorRefError:
            raise
        except SystemExit as ended:
            if ended.code:
                raise
        except Exception as error:
            _end_as_python_does(error, str(path))
        finally:
            sys.argv, sys.path[:] = before

    return program


def _end_as_python_does(error: Exception, path: str) -> NoReturn:
    """End with a script's own error: the traceback begins in the script, and none of it is ours."""
    trace = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith(path):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    raise SystemExit(1) from None


def _draw(seen: list[Forecast], path: Path) -> None:
    from ..promises.picture import draw_curves

    title = f"{seen[0].steady.name} by budget, {seen[0].strategy}"
    draw_curves(title, [(one.spec.name, one.curve(one.budgets(6))) for one in seen], path)
    sys.stdout.write(f"wrote {path}\n")
