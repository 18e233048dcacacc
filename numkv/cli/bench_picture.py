"""Time of a step by contestant, as a picture; needs matplotlib, which is imported when something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numkv.bench.results import DYNAMIC, FLOOR, Line

_OURS, _THEIRS, _BELOW = "#4c78a8", "#b0b0b0", "#dddddd"
#: Bars that are longer than DynamicCache's by more than this are cut off.
_LONGEST = 2.0


def draw(lines: Sequence[Line], model: str, path: Path) -> None:
    """Draw a panel for each line: a bar for each contestant, lighter up to where attention begins.

    Parameters
    ----------
    lines : sequence of Line
        What was measured.
    model : str
        Name of the model.
    path : pathlib.Path
        Where the picture goes; its suffix says in which format.

    Raises
    ------
    ModuleNotFoundError
        If matplotlib is missing.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [line for line in lines if line.names]
    if not shown:
        return
    height = sum(0.32 * len(line.names) + 1.1 for line in shown)
    figure = Figure(figsize=(9, height), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [len(line.names) + 1 for line in shown]
    axes = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    for line, ax in zip(shown, axes, strict=True):
        _plot(line, model, ax)
    settings = {"svg.hashsalt": "numkv", "svg.fonttype": "none"}
    with matplotlib.rc_context(settings):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=120)


def _number(x: float) -> str:
    """Three digits, and all of a large number."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _plot(line: Line, model: str, ax: Any) -> None:
    measured = line.measured
    names = [name for name in line.names if name != FLOOR][::-1]
    scale = 1.0 if line.prompt else 1e3
    times = {name: scale * (measured.seconds(name) or 0.0) for name in line.names}
    floor = times.get(FLOOR, 0.0)
    most = _LONGEST * times.get(DYNAMIC, max(times.values()))
    for i, name in enumerate(names):
        colour = _OURS if name.startswith("numkv") else _THEIRS
        ax.barh(i, min(times[name], most), color=colour, height=0.7)
        ax.barh(i, min(floor, times[name]), color=_BELOW, height=0.7)
        ratio = measured.ratio(name, DYNAMIC)
        cut = "→ " if times[name] > most else ""
        text = f" {cut}{_number(times[name])}"
        if ratio is not None and name != DYNAMIC:
            text += f"  ({ratio.middle:.2f} ×)"
        ax.text(min(times[name], most), i, text, va="center", fontsize=8)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.set_xlim(0, 1.22 * min(most, max(times.values())))
    unit = "seconds for a prompt" if line.prompt else "ms for a token"
    ax.set_xlabel(
        f"{unit}; in brackets × as fast as {DYNAMIC}; light: all but attention", fontsize=8
    )
    ax.set_title(f"{model}: {line.title[0].lower()}{line.title[1:]}", fontsize=10, loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)
