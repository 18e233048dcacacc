"""What ``numkv accuracy`` has measured, as tables, a page and a picture."""

from __future__ import annotations

import json
import platform
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import numkv
from numkv.cli.output import table
from numkv.cli.picture import Panel, draw
from numkv.demo import accuracy
from numkv.demo.evaluate import Score
from numkv.demo.recall import DISTANCES, Recall

# A header, and rows.
_Cells = tuple[Sequence[str], list[Sequence[str]]]
_NO_PICTURE = (
    "no picture: matplotlib is missing; pip install matplotlib, or numkv with its extra perf"
)
#: Bits of an element, scales included, between which the report looks at the lower envelope: codes of 3 to 8 bits.
_FEWEST, _MOST = 3.0, 9.0


@dataclass(frozen=True)
class RowErrors:
    """How far attention over random rows was off.

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
    """A cache, and all that was found of it.

    Attributes
    ----------
    label : str
        Name of the cache.
    num_bytes : float
        Bytes of a token in all layers of the model.
    score : Score
        Of the model's predictions.
    recall : Recall
        Of the names copied from far back.
    rows : RowErrors or None
        Of random rows; None where it was not asked for.
    outliers : tuple of Score
        Of predictions with keys that have outlier channels, by `numkv.demo.evaluate.OUTLIER_FACTORS`.
    """

    label: str
    num_bytes: float
    score: Score
    recall: Recall
    rows: RowErrors | None
    outliers: tuple[Score, ...]


@dataclass(frozen=True)
class Report:
    """What was measured, and how it is told.

    Attributes
    ----------
    caches : sequence of Measured
        The first is fp32's, the reference; the others from the most bytes to the fewest.
    baselines : sequence of RowErrors
        Of what numkv does not store.
    without : Recall
        Of texts whose needles are missing, over fp32.
    settings : dict
        How it was measured.
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
        """For each cache one that is better, or None; see `numkv.demo.accuracy.better_caches`."""
        return accuracy.better_caches(
            {x.label: (x.num_bytes, x.score.kl_divergence) for x in self.caches}
        )

    def bits(self, x: Measured) -> float:
        """Bits of an element, scales included."""
        return 8 * x.num_bytes / self.num_elements

    def model_cells(self) -> _Cells:
        """The model's predictions and its recall, by cache."""
        reference = self.caches[0]
        cells: list[Sequence[str]] = []
        for x in self.caches:
            score, same = x.score, x is reference
            more, error = _difference(score, reference.score)
            cells.append(
                (
                    x.label,
                    f"{x.num_bytes:,.0f}",
                    f"{self.bits(x):.2f}",
                    f"{score.bits_per_byte:.4f}",
                    f"{more:+.5f}",
                    "reference" if same else error,
                    "reference" if same else f"{score.kl_divergence:.2e}",
                    "reference" if same else f"{100 * score.agreement:.2f} %",
                    f"{100 * x.recall.copied:.1f} %",
                    "no" if self.better[x.label] else "yes",
                )
            )
        header = (
            "cache",
            "bytes/token",
            "bits/element",
            "bits/byte",
            "more than fp32",
            "std. error",
            "KL, nats/token",
            "same top token",
            "names copied",
            "on envelope",
        )
        return header, cells

    def recall_cells(self) -> _Cells:
        """Names copied, by cache and distance."""
        cells: list[Sequence[str]] = [
            (
                label,
                "" if size is None else f"{size:,.0f}",
                f"{x.bits_per_byte:.3f}",
                f"{100 * x.copied:.1f} %",
                *(f"{100 * share:.1f} %" for share in x.by_distance),
            )
            for label, size, x in (
                *((x.label, x.num_bytes, x.recall) for x in self.caches),
                (self.without.label, None, self.without),
            )
        ]
        context = self.settings["context"]
        distances = (f"{share * context:,.0f} back" for share in DISTANCES)
        return ("cache", "bytes/token", "bits/byte of names", "copied", *distances), cells

    def outlier_cells(self) -> _Cells:
        """What outlier channels in keys cost, by cache."""
        reference = self.caches[0]
        more = [
            x.outliers[-1].bits_per_byte - reference.outliers[-1].bits_per_byte for x in self.caches
        ]
        cells: list[Sequence[str]] = [
            (
                x.label,
                f"{x.num_bytes:,.0f}",
                *(f"{score.kl_divergence:.2e}" for score in x.outliers),
                f"{worse:+.4f}",
            )
            for x, worse in zip(self.caches[1:], more[1:], strict=True)
        ]
        factors = self.settings["outliers"]["factors"]
        columns = ("as it is", *(f"× {factor}" for factor in factors[1:]))
        return ("cache", "bytes/token", *columns, f"bits/byte more, × {factors[-1]}"), cells

    def about_outliers(self) -> str:
        """What the outlier channels are."""
        told, scores = self.settings["outliers"], self.caches[0].outliers
        sizes = " and ".join(str(factor) for factor in told["factors"][1:])
        return (
            f"KL divergence from fp32, in nats a token, where one RoPE pair of channels in all keys is {sizes} times "
            "as large, and that of the queries as many times smaller: over fp32 the model's predictions are the same "
            f"({', '.join(f'{score.bits_per_byte:.4f}' for score in scores)} bits/byte). Keys of many trained models "
            f"have such channels. The first {scores[0].num_bytes:,} bytes of {told['text']}, windows of "
            f"{told['context']:,} tokens."
        )

    def worse_cells(self) -> _Cells:
        """Caches above the lower envelope, and what to take instead."""
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
        """Errors of attention over random rows."""
        rows = [*(x.rows for x in self.caches if x.rows is not None), *self.baselines]
        cells: list[Sequence[str]] = [
            (
                row.label,
                f"{row.num_bytes:,.1f}".removesuffix(".0"),
                f"{8 * row.num_bytes / (2 * accuracy.HEAD_DIM):.2f}",
                *(_percent(row.errors[name]) for name in accuracy.ROWS),
            )
            for row in rows
        ]
        return ("cache", "bytes/token/head", "bits/element", *accuracy.ROWS), cells

    def about_model(self) -> str:
        """What the predictions were measured on."""
        told, score = self.settings, self.caches[0].score
        windows = "in all" if told["windows"] is None else f"{told['windows']} of each module's"
        return (
            f"{told['source']}: {score.num_bytes:,} bytes, {windows} windows of {told['context']:,} tokens, "
            f"{told['chunk']} at once. Std. error: of the difference from fp32, over the texts. On envelope: no other "
            "cache has as few bytes and as small a KL divergence."
        )

    def about_recall(self) -> str:
        """What the needles are."""
        told = self.settings
        return (
            f"Recall: {told['needle_texts']} texts of {told['context']:,} tokens, lines of the same modules, with "
            f"definitions of {self.caches[0].recall.num_needles} random names. Each name is used once, about as many "
            "tokens further on as the column says; its first 4 letters are given, 8 are to be told. Copied: share "
            "of these that the model finds most probable. fp32 is what the model can do, which is less the further it "
            "has to look back. No needle: fp32 on texts whose definitions have other names, what can be guessed."
        )

    def about_envelope(self) -> str:
        """Which caches lie on the envelope, in few bits."""
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
        """What the random rows are."""
        return (
            "Relative L2 error of the attention output against float64 on the unrounded rows: "
            f"{self.settings['rows']:,} tokens, {accuracy.NUM_KV_HEADS} kv heads, {accuracy.NUM_Q_HEADS} q heads, "
            f"head dim {accuracy.HEAD_DIM}, queries of the newest {accuracy.NUM_QUERIES} tokens. Outlier: one channel "
            f"of K and of V is {accuracy.OUTLIER:g} times the others. Offset: it has {accuracy.OUTLIER:g} added "
            f"instead. Sharp: a query is the sum of {accuracy.NUM_SOUGHT} keys, and attends to few tokens. Slow bias: "
            f"before RoPE, {accuracy.BIASES[0]:g} to {accuracy.BIASES[1]:g} are added to 4 pairs of channels of K "
            "whose frequency is low, as in keys of Qwen2.5; fast bias: whose frequency is high. Heavy tails: K is of "
            "Student's t with 3 degrees of freedom. What is called per-row, of one scale for each row, is a baseline "
            "that is computed in NumPy; numkv stores no such kind."
        )

    def about_caches(self) -> str:
        """What labels mean."""
        return (
            "int4 has a scale and an offset for each 32 elements; rotate: rows are rotated before they are quantised; "
            "window and sinks: so many newest and first tokens in full precision, counted in bytes per token; codesN: "
            "heads compressed to N bits an element; sketch: a sign for each element of a key on top; lastN: fp16 "
            "rows of the newest N tokens alone."
        )

    def about_rotation(self) -> list[str]:
        """What rotation makes of the errors, for each kind that was measured both ways, and beside the baseline."""
        rows = [*(x.rows for x in self.caches if x.rows is not None), *self.baselines]
        by_label = {row.label: row for row in rows}
        pairs = [(accuracy.PER_ROW[False], "int4+rotate")]
        pairs += [(x, f"{x}+rotate") for x in by_label]
        lines = []
        for plain, rotated in pairs:
            if rotated not in by_label:
                continue
            told = []
            for name in accuracy.ROWS:
                before, after = by_label[plain].errors[name], by_label[rotated].errors[name]
                told.append(
                    f"{name} {_percent(before)} to {_percent(after)} (÷ {before / after:.2f})"
                )
            lines.append(f"From {plain} to {rotated}: {'; '.join(told)}.")
        return lines

    def terminal(self) -> str:
        """All of it as text."""
        parts = [
            f"{table(*self.model_cells())}\n{_wrap(self.about_model(), 100)}",
            f"{table(*self.recall_cells())}\n{_wrap(self.about_recall(), 100)}",
            f"{table(*self.outlier_cells())}\n{_wrap(self.about_outliers(), 100)}",
            _wrap(self.about_envelope(), 100),
        ]
        if any(self.better.values()):
            parts.append(table(*self.worse_cells()))
        parts += [
            f"{table(*self.row_cells())}\n{_wrap(self.about_rows(), 100)}",
            "\n".join(_wrap(line, 100) for line in self.about_rotation()),
            _wrap(self.about_caches(), 100),
        ]
        return "\n\n".join(part for part in parts if part)

    def markdown(self, picture: str | None) -> str:
        """All of it as a page."""
        versions = (
            f"numkv {numkv.__version__}, Python {platform.python_version()}, NumPy {np.__version__}"
        )
        parts = [
            "# Accuracy of caches",
            _wrap(f"`numkv accuracy`: {versions}. {self.about_caches()}"),
        ]
        if picture is not None:
            parts.append(f"![Error over bytes, without fp32]({picture})")
        parts += [
            f"## A model's predictions: {self.settings['model']}",
            _wrap(self.about_model()),
            _markdown(*self.model_cells()),
            "## Long-range recall",
            _wrap(self.about_recall()),
            _markdown(*self.recall_cells()),
            "## Outlier channels in keys",
            _wrap(self.about_outliers()),
            _markdown(*self.outlier_cells()),
            "## What is not worth its bytes",
            _wrap(self.about_envelope()),
        ]
        if any(self.better.values()):
            parts.append(_markdown(*self.worse_cells()))
        parts += ["## Random rows", _wrap(self.about_rows()), _markdown(*self.row_cells())]
        parts.append("\n".join(_wrap(f"- {line}", indent="  ") for line in self.about_rotation()))
        return "\n\n".join(part for part in parts if part) + "\n"

    def panels(self) -> list[Panel]:
        """The plots of the picture."""
        rows = [*(x.rows for x in self.caches if x.rows is not None), *self.baselines]
        context = self.settings["context"]
        few = [x for x in self.caches if _FEWEST <= self.bits(x) < _MOST]
        return [
            Panel(
                f"predictions at {context:,} tokens: KL divergence, nats per token",
                "bytes per token",
                [(x.label, x.num_bytes, x.score.kl_divergence) for x in self.caches],
            ),
            Panel(
                f"names copied from far back at {context:,} tokens: share that is not, %",
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
                    [(x.label, x.num_bytes, x.errors[name]) for x in rows if x.label != "fp32"],
                )
                for name in accuracy.ROWS
            ),
        ]

    def data(self) -> dict[str, Any]:
        """What a later report can take over."""
        return {"settings": self.settings, "caches": [asdict(x) for x in self.caches]}


def _difference(score: Score, reference: Score) -> tuple[float, str]:
    """Bits per byte more than the reference's, and the standard error of that."""
    more = score.bits_per_byte - reference.bits_per_byte
    each = np.subtract(score.by_document, reference.by_document)
    if len(each) < 2:
        return more, "-"
    return more, f"{each.std(ddof=1) / np.sqrt(len(each)):.5f}"


def _facts(x: Measured) -> tuple[str, str, str, str]:
    return (
        x.label,
        f"{x.num_bytes:,.0f}",
        f"{x.score.kl_divergence:.2e}",
        f"{100 * x.recall.copied:.1f} %",
    )


def _percent(x: float) -> str:
    """Three digits, of small numbers two and a power of ten."""
    return f"{100 * x:#.3g}".rstrip(".") + " %" if x >= 1e-4 else f"{100 * x:.1e} %"


def _wrap(text: str, width: int = 120, indent: str = "") -> str:
    """Lines of a paragraph, the first without `indent`; no percent sign is parted from its number."""
    bound = text.replace(" %", "\N{NO-BREAK SPACE}%")
    lines = textwrap.fill(
        bound, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines.replace("\N{NO-BREAK SPACE}", " ")


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def write(report: Report, folder: Path) -> None:
    """Write ``accuracy.md``, ``accuracy.json`` and, where matplotlib is installed, ``accuracy.svg``.

    Parameters
    ----------
    report : Report
        What was measured.
    folder : pathlib.Path
        Where they go.
    """
    picture: str | None = "accuracy.svg"
    try:
        draw(report.panels(), folder / "accuracy.svg")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        picture = None
        print(f"numkv: {_NO_PICTURE}", file=sys.stderr)
    (folder / "accuracy.md").write_text(report.markdown(picture), encoding="utf-8")
    (folder / "accuracy.json").write_text(json.dumps(report.data(), indent=1), encoding="utf-8")
    written = ["accuracy.md", "accuracy.json", *([picture] if picture else [])]
    print(f"\nwritten: {', '.join(str(folder / name) for name in written)}")
