"""The picture of a forecast: the time of a part against the budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError

__all__ = ["draw_curves"]


def draw_curves(
    title: str, curves: Sequence[tuple[str, list[tuple[int, Any]]]], path: Path
) -> None:
    """Draw a curve for each device: (name, list of (budget in bytes, part)).

    Raises
    ------
    ConfigError
        matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("Pictures need matplotlib: pip install 'torchTensorRef[plot]'.") from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, points in curves:
        budgets = [nbytes / 2**30 for nbytes, _ in points]
        axes.plot(budgets, [step.time_ns / 1e6 for _, step in points], marker="o", label=name)
    axes.set_xlabel("budget in GiB")
    axes.set_ylabel("time of the last part in ms")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
