"""PNG and PDF by matplotlib, which is an extra."""

from __future__ import annotations

from pathlib import Path

from mt_core.errors import ConfigError
from mt_ops.plot.curves import Picture
from mt_ops.plot.svg import COLOURS, HEIGHT, WIDTH

DOTS_PER_INCH = 200


def write_figure(picture: Picture, path: Path) -> None:
    """PNG or PDF, by the ending. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"{path.name}: needs matplotlib (pip install 'mt-ops[plot]'); .svg does not") from None
    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), layout="constrained")
    axes = figure.add_subplot()
    for place, curve in enumerate(picture.curves):
        axes.plot(curve.x, curve.y, label=curve.name, color=COLOURS[place % len(COLOURS)], linewidth=1.2)
    axes.set(xlabel=picture.x_label, ylabel=picture.y_label)
    axes.set_xscale("log" if picture.log_x else "linear")
    axes.set_yscale("log" if picture.log_y else "linear")
    axes.grid(alpha=0.3)
    if len(picture.curves) > 1:
        axes.legend()
    figure.savefig(path, dpi=DOTS_PER_INCH)
