"""The results of ``numkv accuracy``, as tables, a page and a picture."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import numkv
from numkv.cli.evaluate import SCORES, score_cells
from numkv.cli.output import is_installed, markdown_table, save_figure, table, wrapped
from numkv.demo import accuracy
from numkv.demo.evaluate import Score
from numkv.demo.recall import DISTANCES, Recall
from numkv.kinds import kinds

# Colour and marker of a kind, by the group that shares a scale.
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
        Title, and label of the horizontal axis.
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
    """Draw panels, two in a line, each with its lower envelope: the least error for a number of bytes.

    Parameters
    ----------
    panels : sequence of Panel
        The panels.
    path : pathlib.Path
        File of the picture; its suffix is the format.

    Raises
    ------
    ModuleNotFoundError
        If matplotlib is missing.
    """
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
    canvas.draw()  # computes the layout, on which the places of labels depend
    for panel, ax in zip(panels, axes, strict=False):
        _label(panel, ax, canvas.get_renderer())
    save_figure(figure, path)


def _shown(panel: Panel) -> list[tuple[str, float, float]]:
    return [point for point in panel.points if point[2] > 0]


def _style(label: str) -> tuple[str, str]:
    return next((s for start, s in _FAMILIES.items() if label.startswith(start)), _OTHER)


def _plot(panel: Panel, ax: Any) -> None:
    points = _shown(panel)
    better = accuracy.better_caches({label: (x, y) for label, x, y in points})
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
    from matplotlib.transforms import Bbox

    points = _shown(panel)
    places = ax.transData.transform([(x, y) for _, x, y in points])
    taken = [Bbox.from_bounds(x - 6, y - 5, 12, 10) for x, y in places]
    inside = ax.get_window_extent(renderer)
    for (label, x, y), place in sorted(
        zip(points, places, strict=True), key=lambda point: -point[1][1]
    ):
        text = ax.annotate(
            label, (x, y), (0, 0), textcoords="offset pixels", fontsize=8, color=_style(label)[0], zorder=2.5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.2, "alpha": 0.8},
            arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3},
        )  # fmt: skip
        box = Bbox.from_bounds(*place, *text.get_window_extent(renderer).size)
        offsets = _offsets(box.width, box.height)
        best = min(offsets, key=lambda offset: _cost(box, offset, taken, inside))
        text.set_position(best)
        taken.append(box.translated(*best))


def _offsets(width: float, height: float) -> list[tuple[float, float]]:
    """Return candidates for the offset of a label's lower left corner from its point, in pixels."""
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


def _cost(box: Any, offset: tuple[float, float], taken: Sequence[Any], inside: Any) -> float:
    """Return the distance of a label from its point, plus a penalty for everything that it covers."""
    moved = box.translated(*offset)
    beyond = len(moved.corners()) - inside.count_contains(moved.corners())
    gap = max(offset[0], -offset[0] - box.width, 0.0) + abs(offset[1] + box.height / 2)
    return float(gap + 10_000 * (moved.count_overlaps(taken) + beyond))


_WORSE = "What is not worth its bytes"
# A header, and rows.
_Cells = tuple[Sequence[str], list[Sequence[str]]]
#: Bits of an element, scales included, between which the report looks at the lower envelope: codes of 3 to 8 bits.
_FEWEST, _MOST = 3.0, 9.0


@dataclass(frozen=True)
class RowErrors:
    """Errors of attention over random rows.

    Attributes
    ----------
    label : str
        Name of the cache.
    num_bytes : float
        Bytes of a token's key and value in one head.
    errors : dict of str to float
        Relative L2 error of the attention output, by the name of the rows.
    """

    label: str
    num_bytes: float
    errors: dict[str, float]


@dataclass(frozen=True)
class Measured:
    """All results of a cache.

    Attributes
    ----------
    label : str
        Name of the cache.
    num_bytes : float
        Bytes of a token in all layers of the model.
    score : Score
        Score of the model's predictions.
    recall : Recall
        Recall of names copied from far back.
    rows : RowErrors or None
        Errors over random rows; None if they were not measured.
    outliers : tuple of Score
        Scores of predictions with outlier channels in keys, by `numkv.demo.evaluate.OUTLIER_FACTORS`.
    """

    label: str
    num_bytes: float
    score: Score
    recall: Recall
    rows: RowErrors | None
    outliers: tuple[Score, ...]


@dataclass(frozen=True)
class Report:
    """All results, and their presentation.

    Attributes
    ----------
    caches : sequence of Measured
        First the reference in fp32, then the others from the most bytes to the fewest.
    baselines : sequence of RowErrors
        Errors of formats that numkv does not store.
    without : Recall
        Recall over fp32 of texts without needles.
    settings : dict
        Settings of the measurement.
    num_elements : int
        Elements of a token's keys and values in all layers of the model.
    """

    caches: Sequence[Measured]
    baselines: Sequence[RowErrors]
    without: Recall
    settings: dict[str, Any]
    num_elements: int

    @cached_property
    def better(self) -> dict[str, str | None]:
        """Return a better cache for each cache, or None; see `numkv.demo.accuracy.better_caches`."""
        return accuracy.better_caches(
            {x.label: (x.num_bytes, x.score.kl_divergence) for x in self.caches}
        )

    def bits(self, x: Measured) -> float:
        """Return the bits of an element, scales included."""
        return 8 * x.num_bytes / self.num_elements

    def model_cells(self) -> _Cells:
        """Return the table of the model's predictions and recall, by cache."""
        reference = self.caches[0].score
        cells: list[Sequence[str]] = []
        for x in self.caches:
            bits, more, *others = score_cells(x.score, reference)
            error = "reference" if x.score is reference else _standard_error(x.score, reference)
            cells.append(
                (
                    x.label,
                    f"{x.num_bytes:,.0f}",
                    f"{self.bits(x):.2f}",
                    bits,
                    more,
                    error,
                    *others,
                    _share(x.recall.copied),
                    "no" if self.better[x.label] else "yes",
                )
            )
        bits, more, *others = SCORES
        sizes = ("bytes/token", "bits/element")
        header = ("cache", *sizes, bits, more, "std. error", *others, "names copied", "on envelope")
        return header, cells

    def recall_cells(self) -> _Cells:
        """Return the table of copied names, by cache and distance."""
        rows = [(f"{x.num_bytes:,.0f}", x.recall) for x in self.caches]
        cells: list[Sequence[str]] = [
            (x.label, size, f"{x.bits_per_byte:.3f}", *map(_share, (x.copied, *x.by_distance)))
            for size, x in (*rows, ("", self.without))
        ]
        context = self.settings["context"]
        distances = (f"{share * context:,.0f} back" for share in DISTANCES)
        return ("cache", "bytes/token", "bits/byte of names", "copied", *distances), cells

    def outlier_cells(self) -> _Cells:
        """Return the table of the cost of outlier channels in keys, by cache."""
        bits = self.caches[0].outliers[-1].bits_per_byte
        cells: list[Sequence[str]] = [
            (
                x.label,
                f"{x.num_bytes:,.0f}",
                *(f"{score.kl_divergence:.2e}" for score in x.outliers),
                f"{x.outliers[-1].bits_per_byte - bits:+.4f}",
            )
            for x in self.caches[1:]
        ]
        factors = self.settings["outliers"]["factors"]
        columns = ("as it is", *(f"× {factor}" for factor in factors[1:]))
        return ("cache", "bytes/token", *columns, f"bits/byte more, × {factors[-1]}"), cells

    def about_outliers(self) -> str:
        """Describe the outlier channels."""
        facts, scores = self.settings["outliers"], self.caches[0].outliers
        sizes = " and ".join(str(factor) for factor in facts["factors"][1:])
        return (
            f"KL divergence from fp32, in nats a token, where one RoPE pair of channels in all keys is {sizes} times "
            "as large, and that of the queries as many times smaller: over fp32 the model's predictions are the same "
            f"({', '.join(f'{score.bits_per_byte:.4f}' for score in scores)} bits/byte). Keys of many trained models "
            f"have such channels. The first {scores[0].num_bytes:,} bytes of {facts['text']}, windows of "
            f"{facts['context']:,} tokens."
        )

    def worse_cells(self) -> _Cells:
        """Return the table of caches above the lower envelope, each with a better one."""
        by_label = {x.label: x for x in self.caches}
        cells: list[Sequence[str]] = []
        for x in self.caches:
            name = self.better[x.label]
            if name is not None:
                y = by_label[name]
                cells.append((*_facts(x), *_facts(y)))
        columns = ("bytes/token", "KL", "names copied")
        return ("not worth its bytes", *columns, "better", *columns), cells

    def row_cells(self) -> _Cells:
        """Return the table of errors of attention over random rows."""
        cells: list[Sequence[str]] = [
            (
                row.label,
                f"{row.num_bytes:,.1f}".removesuffix(".0"),
                f"{8 * row.num_bytes / (2 * accuracy.HEAD_DIM):.2f}",
                *(_percent(row.errors[name]) for name in accuracy.ROWS),
            )
            for row in self._rows
        ]
        return ("cache", "bytes/token/head", "bits/element", *accuracy.ROWS), cells

    def about_model(self) -> str:
        """Describe the texts of the predictions."""
        facts, score = self.settings, self.caches[0].score
        windows = "in all" if facts["windows"] is None else f"{facts['windows']} of each module's"
        return (
            f"{facts['source']}: {score.num_bytes:,} bytes, {windows} windows of {facts['context']:,} tokens, "
            f"{facts['chunk']} at once. Std. error: of the difference from fp32, over the texts. On envelope: no "
            "other cache has as few bytes and as small a KL divergence."
        )

    def about_recall(self) -> str:
        """Describe the needles."""
        facts = self.settings
        return (
            f"Recall: {facts['needle_texts']} texts of {facts['context']:,} tokens, lines of the same modules, with "
            f"definitions of {self.caches[0].recall.num_needles} random names. Each name is used once, at about its "
            "column's distance; its first 4 letters are given, 8 are predicted. Copied: share of these "
            "that the model finds most probable. fp32 is the model's own limit, which falls with the distance. No "
            "needle: fp32 on texts whose definitions have other names, the share that can be guessed."
        )

    def about_envelope(self) -> str:
        """Name the caches of few bits on the envelope."""
        found = [
            f"{x.label} ({x.num_bytes:,.0f} bytes, {x.score.kl_divergence:.2e})"
            for x in reversed(self.caches)
            if self.better[x.label] is None and _FEWEST <= self.bits(x) < _MOST
        ]
        return (
            "Lower envelope of KL divergence over bytes, for codes of 3 to 8 bits and their scales: "
            f"{', '.join(found) or 'none of these caches'}."
        )

    def about_rows(self) -> str:
        """Describe the random rows."""
        return (
            "Relative L2 error of the attention output against float64 on the unrounded rows: "
            f"{self.settings['rows']:,} tokens, {accuracy.NUM_KV_HEADS} kv heads, {accuracy.NUM_Q_HEADS} q heads, "
            f"head dim {accuracy.HEAD_DIM}, queries of the newest {accuracy.NUM_QUERIES} tokens. Outlier: one channel "
            f"of K and of V is {accuracy.OUTLIER:g} times the others. Offset: it has {accuracy.OUTLIER:g} added "
            f"instead. Sharp: a query is the sum of {accuracy.NUM_SOUGHT} keys, and attends to few tokens. Slow bias: "
            f"before RoPE, {accuracy.BIASES[0]:g} to {accuracy.BIASES[1]:g} are added to 4 pairs of channels of K "
            "whose frequency is low, as in keys of Qwen2.5; fast bias: whose frequency is high. Heavy tails: K has "
            "Student's t distribution with 3 degrees of freedom. Per-row, with one scale for each row, is a baseline "
            "computed in NumPy; numkv has no such kind."
        )

    def about_caches(self) -> str:
        """Explain the labels."""
        return (
            "int4 has a scale and an offset for each 32 elements; channel: keys have a scale and a zero point for each "
            "channel of 64 tokens, of which the newest are in full precision, counted in bytes per token, and values "
            "are rows; rotate: rows are rotated before they are quantised; "
            "window and sinks: so many newest and first tokens in full precision, counted in bytes per token; codesN: "
            "heads compressed to N bits an element; sketch: a sign for each element of a key on top; lastN: fp16 "
            "rows of the newest N tokens alone."
        )

    def about_rotation(self) -> list[str]:
        """Compare the errors with and without rotation, for the baseline and each kind measured with both."""
        by_label = {row.label: row for row in self._rows}
        pairs = [(accuracy.PER_ROW[False], "int4+rotate")]
        pairs += [(x, f"{x}+rotate") for x in by_label]
        lines = []
        for plain, rotated in pairs:
            if rotated not in by_label:
                continue
            changes = []
            for name in accuracy.ROWS:
                before, after = by_label[plain].errors[name], by_label[rotated].errors[name]
                changes.append(
                    f"{name} {_percent(before)} to {_percent(after)} (÷ {before / after:.2f})"
                )
            lines.append(f"From {plain} to {rotated}: {'; '.join(changes)}.")
        return lines

    def _sections(self) -> list[tuple[str, str, _Cells | None]]:
        """Return headings, texts and tables."""
        worse = self.worse_cells() if any(self.better.values()) else None
        return [
            (
                f"A model's predictions: {self.settings['model']}",
                self.about_model(),
                self.model_cells(),
            ),
            ("Long-range recall", self.about_recall(), self.recall_cells()),
            ("Outlier channels in keys", self.about_outliers(), self.outlier_cells()),
            (_WORSE, self.about_envelope(), worse),
            ("Random rows", self.about_rows(), self.row_cells()),
        ]

    def terminal(self) -> str:
        """Return the report as text."""
        parts = []
        for heading, about, cells in self._sections():
            text, drawn = wrapped(about, 100), "" if cells is None else table(*cells)
            parts += [text, drawn] if heading == _WORSE else [f"{drawn}\n{text}"]
        parts.append("\n".join(wrapped(line, 100) for line in self.about_rotation()))
        parts.append(wrapped(self.about_caches(), 100))
        return "\n\n".join(part for part in parts if part)

    def markdown(self, picture: str | None) -> str:
        """Return the report as a page."""
        versions = (
            f"numkv {numkv.__version__}, Python {platform.python_version()}, NumPy {np.__version__}"
        )
        parts = [
            "# Accuracy of caches",
            wrapped(f"`numkv accuracy`: {versions}. {self.about_caches()}"),
            "" if picture is None else f"![Error over bytes, without fp32]({picture})",
        ]
        for heading, about, cells in self._sections():
            parts += [f"## {heading}", wrapped(about), markdown_table(*cells) if cells else ""]
        parts.append("\n".join(wrapped(f"- {line}", indent="  ") for line in self.about_rotation()))
        return "\n\n".join(part for part in parts if part) + "\n"

    def panels(self) -> list[Panel]:
        """Return the plots of the picture."""
        context = self.settings["context"]
        few = [x for x in self.caches if _FEWEST <= self.bits(x) < _MOST]
        return [
            Panel(
                f"predictions at {context:,} tokens: KL divergence, nats per token",
                "bytes per token",
                [(x.label, x.num_bytes, x.score.kl_divergence) for x in self.caches],
            ),
            Panel(
                f"names from far back at {context:,} tokens: share not copied, %",
                "bytes per token",
                [(x.label, x.num_bytes, 100 * (1 - x.recall.copied)) for x in self.caches],
                "y",
            ),
            Panel(
                "the same predictions, codes of 3 to 8 bits: KL divergence",
                "bits per element, with scales",
                [(x.label, self.bits(x), x.score.kl_divergence) for x in few],
                "x",
            ),
            *(
                Panel(
                    f"{name} rows: error of the attention output",
                    "bytes per token and head",
                    [
                        (x.label, x.num_bytes, x.errors[name])
                        for x in self._rows
                        if x.label != "fp32"
                    ],
                )
                for name in accuracy.ROWS
            ),
        ]

    @property
    def _rows(self) -> list[RowErrors]:
        """Return the errors over random rows: of caches, then of baselines."""
        return [*(x.rows for x in self.caches if x.rows is not None), *self.baselines]

    def data(self) -> dict[str, Any]:
        """Return the results for a later report."""
        return {"settings": self.settings, "caches": [asdict(x) for x in self.caches]}


def _standard_error(score: Score, reference: Score) -> str:
    """Return the standard error of the excess bits per byte over the reference."""
    each = np.subtract(score.by_document, reference.by_document)
    return "-" if len(each) < 2 else f"{each.std(ddof=1) / np.sqrt(len(each)):.5f}"


def _share(x: float) -> str:
    return f"{100 * x:.1f} %"


def _facts(x: Measured) -> tuple[str, str, str, str]:
    return (
        x.label,
        f"{x.num_bytes:,.0f}",
        f"{x.score.kl_divergence:.2e}",
        _share(x.recall.copied),
    )


def _percent(x: float) -> str:
    """Format with three digits; small numbers with two and a power of ten."""
    return f"{100 * x:#.3g}".rstrip(".") + " %" if x >= 1e-4 else f"{100 * x:.1e} %"


def write(report: Report, folder: Path) -> None:
    """Write ``accuracy.md``, ``accuracy.json`` and, where matplotlib is installed, ``accuracy.svg``.

    Parameters
    ----------
    report : Report
        The results.
    folder : pathlib.Path
        The folder of these files.
    """
    picture = "accuracy.svg" if is_installed("matplotlib") else None
    if picture is None:
        print(
            "numkv: no picture: matplotlib is missing; pip install matplotlib, or numkv with its extra perf",
            file=sys.stderr,
        )
    else:
        draw(report.panels(), folder / picture)
    (folder / "accuracy.md").write_text(report.markdown(picture), encoding="utf-8")
    (folder / "accuracy.json").write_text(json.dumps(report.data(), indent=1), encoding="utf-8")
    written = ["accuracy.md", "accuracy.json", *([picture] if picture else [])]
    print(f"\nwritten: {', '.join(str(folder / name) for name in written)}")
