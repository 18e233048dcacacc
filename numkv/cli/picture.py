"""Error over bytes as a picture; needs matplotlib, which is imported when something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numkv.demo.accuracy import better_caches
from numkv.kinds import kinds

# Colour and marker of a kind, by what shares a scale in it.
_BY_SCALES = {
    "none": ("#7f7f7f", "s"),
    "head": ("#e45756", "P"),
    "row": ("#54a24b", "D"),
    "group": ("#4c78a8", "o"),
}
_OTHER = ("#000000", "v")
# Colour and marker of a cache, by the beginning of its label.
_FAMILIES = {
    **{kind.name: _BY_SCALES.get(kind.scales_per, _OTHER) for kind in kinds()},
    "codes": ("#f58518", "^"),
    "last": ("#eeca3b", "<"),
    "per-row": ("#b279a2", "X"),
}


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes
    ----------
    title, x_label : str
        What is shown, and over what.
    points : sequence of tuple of str, float, float
        Label, bytes and error; errors of 0 are left out, as most axes are logarithmic.
    linear : str
        Axes that are not logarithmic: ``"x"``, ``"y"``, both or none.
    """

    title: str
    x_label: str
    points: Sequence[tuple[str, float, float]]
    linear: str = ""


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Draw panels, two in a line, each with its lower envelope: the least error for so many bytes.

    Parameters
    ----------
    panels : sequence of Panel
        What to draw.
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

    lines = -(-len(panels) // 2)
    figure = Figure(figsize=(13, 5.5 * lines), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = list(figure.subplots(lines, 2, squeeze=False).flat)
    for panel, ax in zip(panels, axes, strict=False):
        _plot(panel, ax)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    canvas.draw()  # settles the layout, which the places of labels depend on
    for panel, ax in zip(panels, axes, strict=False):
        _label(panel, ax, canvas.get_renderer())
    with matplotlib.rc_context({"svg.hashsalt": "numkv", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _shown(panel: Panel) -> list[tuple[str, float, float]]:
    return [point for point in panel.points if point[2] > 0]


def _style(label: str) -> tuple[str, str]:
    return next((s for start, s in _FAMILIES.items() if label.startswith(start)), _OTHER)


def _plot(panel: Panel, ax: Any) -> None:
    points = _shown(panel)
    better = better_caches({label: (x, y) for label, x, y in points})
    envelope = sorted((x, y) for label, x, y in points if better[label] is None)
    if len(envelope) > 1:
        ax.step(
            *zip(*envelope, strict=True), where="post", color="#bbbbbb", linewidth=1.5, zorder=1
        )
    codes = sorted(
        (x, y) for label, x, y in points if label.startswith("codes") and "+" not in label
    )
    if codes:
        ax.plot(*zip(*codes, strict=True), color=_FAMILIES["codes"][0], linewidth=0.8, alpha=0.6)
    for label, x, y in points:
        colour, marker = _style(label)
        hollow = "rotate" in label
        face = "white" if hollow else colour
        ax.plot(x, y, marker, color=colour, markerfacecolor=face, markersize=6, zorder=3)
    if "x" not in panel.linear:
        ax.set_xscale("log", base=2)
    if "y" not in panel.linear:
        ax.set_yscale("log")
    ax.minorticks_off()
    ax.margins(0.12)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")
    ax.set_xlabel(panel.x_label)
    ax.set_title(panel.title, fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.3)
    ax.set_axisbelow(True)


def _label(panel: Panel, ax: Any, renderer: Any) -> None:
    """Name points, each where its label is nearest and covers no other label, no point and no edge."""
    points = _shown(panel)
    places = ax.transData.transform([(x, y) for _, x, y in points])
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    inside = ax.get_window_extent(renderer).extents
    for (label, x, y), (px, py) in sorted(
        zip(points, places, strict=True), key=lambda point: -point[1][1]
    ):
        text = ax.annotate(
            label, (x, y), (0, 0), textcoords="offset pixels", fontsize=8, color=_style(label)[0], zorder=2.5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.2, "alpha": 0.8},
            arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3},
        )  # fmt: skip
        left, bottom, right, top = text.get_window_extent(renderer).extents
        width, height = right - left, top - bottom
        best = min(
            _offsets(width, height),
            key=lambda offset: _cost(offset, (px, py), (width, height), taken, inside),
        )
        text.set_position(best)
        taken.append((px + best[0], py + best[1], px + best[0] + width, py + best[1] + height))


def _offsets(width: float, height: float) -> list[tuple[float, float]]:
    """Where a label's lower left corner may be from its point, in pixels."""
    steps = [0.0]
    for n in range(1, 15):
        steps += [n * height / 2, -n * height / 2]
    columns = [9.0, -width - 9, -width / 2, 30.0, -width - 30, 60.0, -width - 60]
    return [
        (dx, dy - height / 2)
        for dx in columns
        for dy in steps
        if not (-width < dx < 0 and abs(dy) < height)  # not on the point itself
    ]


def _cost(
    offset: tuple[float, float],
    point: tuple[float, float],
    size: tuple[float, float],
    taken: Sequence[tuple[float, float, float, float]],
    inside: Sequence[float],
) -> float:
    """Distance of a label from its point, and a lot for what it covers."""
    left, bottom = point[0] + offset[0], point[1] + offset[1]
    right, top = left + size[0], bottom + size[1]
    covered = sum(
        left < t[2] + 1 and t[0] - 1 < right and bottom < t[3] and t[1] < top for t in taken
    )
    beyond = left < inside[0] or right > inside[2] or bottom < inside[1] or top > inside[3]
    gap = max(offset[0], -offset[0] - size[0], 0.0) + abs(offset[1] + size[1] / 2)
    return float(gap + 10_000 * covered + 10_000 * beyond)
