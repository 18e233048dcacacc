"""``numkv accuracy``: error and bytes of every storage kind and compressor, as tables and a picture."""

from __future__ import annotations

import argparse
import platform
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import numkv
from numkv.cli.evaluate import check_context, documents_of
from numkv.cli.output import KernelProgress, Progress, table
from numkv.cli.picture import Panel, draw
from numkv.demo import BUNDLED_MODEL, accuracy
from numkv.demo.blas import blas_threads_for
from numkv.demo.cache import CacheChoice
from numkv.demo.compressed import CompressorChoice
from numkv.demo.evaluate import Score, evaluate
from numkv.demo.model import Model
from numkv.kinds import kinds

__all__ = ["DEFAULT_CACHES", "DEFAULT_MODULES", "DEFAULT_ROWS", "LEAST_ROWS", "RowErrors", "run"]

#: Every kind but the widest, and what else can be done with them.
DEFAULT_CACHES = [
    *(kind.name for kind in kinds()[1:]), "int8/int4", "int8/int4+rotate", "int4+rotate",
    "int4+window128+sinks4", "codes8", "codes6", "codes4", "codes4+sketch", "codes3", "codes2",
]  # fmt: skip
DEFAULT_MODULES = ["csv", "graphlib"]
DEFAULT_ROWS = 2048
#: Tokens of a text that are computed at once: fewer than in a window of recent tokens, which is whole for the last of
#: them and lacks as many for the first.
CHUNK = 32
#: Fewer tokens than that are no text that queries of several tokens could attend to.
LEAST_ROWS = 2 * accuracy.NUM_QUERIES

# A header, and rows.
_Cells = tuple[Sequence[str], list[Sequence[str]]]
_NO_PICTURE = (
    "no picture: matplotlib is missing; pip install matplotlib, or numkv with its extra perf"
)


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


def run(arguments: argparse.Namespace) -> None:
    """Measure, print, and write the report where asked.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options.
    """
    if arguments.file is None and arguments.modules == ["all"]:
        arguments.modules = None
    documents, source = documents_of(arguments)
    with Progress(f"loading {arguments.model}") as progress:
        model = Model.load(arguments.model, progress.update)
    context = check_context(arguments, model)
    choices = [replace(choice, target=arguments.target) for choice in arguments.kind]
    caches = {choice.label: choice for choice in choices}
    if arguments.out is not None:  # rather now than after minutes
        arguments.out.mkdir(parents=True, exist_ok=True)
    with KernelProgress():
        for cache in (None, *caches.values()):
            model.warm_up(cache, arguments.target)
    with Progress("random rows") as progress:
        rows = _row_errors(list(caches.values()), arguments.rows, arguments.target, progress)
    compared = {label: choice for label, choice in caches.items() if label != "fp32"}
    options = {"context": context, "target": arguments.target, "chunk": CHUNK}
    with blas_threads_for(model.weights), Progress("evaluating") as progress:
        scores = evaluate(model, documents, compared, **options, progress=progress.update)
    sizes = [c.bytes_at(model.config, context) for c in (CacheChoice(), *compared.values())]
    scores[0] = replace(scores[0], label="fp32")
    report = _Report(
        scores,
        sizes,
        rows,
        f"{source}: {scores[0].num_bytes:,} bytes in windows of {context:,} tokens, {CHUNK} at once.",
        arguments.rows,
        context,
    )
    print(report.terminal())
    if arguments.out is not None:
        bundled = arguments.model == BUNDLED_MODEL
        _write(report, arguments.out, "the bundled one" if bundled else arguments.model.name)


def _row_errors(
    choices: Sequence[CacheChoice | CompressorChoice],
    num_tokens: int,
    target: str,
    progress: Progress,
) -> list[RowErrors]:
    errors: dict[str, dict[str, float]] = {}
    num_done, total = 0, len(accuracy.ROWS) * len(choices)
    for name, make in accuracy.ROWS.items():
        rows = make(num_tokens)
        expected = accuracy.exact_attention(rows.k, rows.v, rows.q)

        def note(
            label: str, out: accuracy.Array, name: str = name, expected: accuracy.Array = expected
        ) -> None:
            errors.setdefault(label, {})[name] = accuracy.relative_error(out, expected)

        for choice in choices:
            note(choice.label, accuracy.attended(choice, rows, target))
            num_done += 1
            progress.update(num_done, total)
        for rotate, label in accuracy.PER_ROW.items():
            note(label, accuracy.per_row_attention(rows, rotate))
    shape = accuracy.row_shape()
    sizes = {c.label: c.bytes_at(shape, num_tokens) / shape.num_kv_heads for c in choices}
    sizes |= dict.fromkeys(accuracy.PER_ROW.values(), accuracy.PER_ROW_BYTES)
    return [RowErrors(label, sizes[label], found) for label, found in errors.items()]


@dataclass(frozen=True)
class _Report:
    """What was measured, and how it is told."""

    scores: Sequence[Score]  # the first is fp32's, the reference
    sizes: Sequence[float]  # bytes of a token in all layers, by score
    rows: Sequence[RowErrors]
    source: str
    num_rows: int
    context: int

    def model_cells(self) -> _Cells:
        reference = self.scores[0]
        cells: list[Sequence[str]] = []
        for score, size in zip(self.scores, self.sizes, strict=True):
            same = score is reference
            cells.append(
                (
                    score.label,
                    f"{size:,.0f}",
                    f"{score.bits_per_byte:.4f}",
                    f"{score.bits_per_byte - reference.bits_per_byte:+.5f}",
                    "reference" if same else f"{score.kl_divergence:.2e}",
                    "reference" if same else f"{100 * score.agreement:.2f} %",
                )
            )
        header = (
            "cache",
            "bytes/token",
            "bits/byte",
            "more than fp32",
            "KL, nats/token",
            "same top token",
        )
        return header, cells

    def row_cells(self) -> _Cells:
        cells: list[Sequence[str]] = [
            (
                row.label,
                f"{row.num_bytes:,.1f}".removesuffix(".0"),
                f"{8 * row.num_bytes / (2 * accuracy.HEAD_DIM):.2f}",
                *(_percent(row.errors[name]) for name in accuracy.ROWS),
            )
            for row in self.rows
        ]
        return ("cache", "bytes/token/head", "bits/element", *accuracy.ROWS), cells

    def about_rows(self) -> str:
        return (
            f"Relative L2 error of the attention output against float64 on the unrounded rows: {self.num_rows:,} "
            f"tokens, {accuracy.NUM_KV_HEADS} kv heads, {accuracy.NUM_Q_HEADS} q heads, head dim {accuracy.HEAD_DIM}, "
            f"queries of the newest {accuracy.NUM_QUERIES} tokens. Outlier: one channel of K and of V is "
            f"{accuracy.OUTLIER:g} times the others. Offset: it has {accuracy.OUTLIER:g} added instead. Sharp: a query "
            f"is the sum of {accuracy.NUM_SOUGHT} keys, and attends to few tokens. What is called per-row, of one "
            "scale for each row, is a baseline that is computed in NumPy; numkv stores no such kind."
        )

    def about_caches(self) -> str:
        return (
            "int4 has a scale and an offset for each 32 elements; rotate: rows are rotated before they are quantised; "
            "window and sinks: so many newest and first tokens in full precision, counted in bytes per token; codesN: "
            "heads compressed to N bits an element; sketch: a sign for each element of a key on top."
        )

    def about_rotation(self) -> list[str]:
        """What rotation makes of the errors, for each kind that was measured both ways, and beside the baseline."""
        by_label = {row.label: row for row in self.rows}
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
        parts = [f"{table(*self.model_cells())}\n{_wrap(self.source, 100)}"]
        parts += [f"{table(*self.row_cells())}\n{_wrap(self.about_rows(), 100)}"]
        parts += [
            "\n".join(_wrap(line, 100) for line in self.about_rotation()),
            _wrap(self.about_caches(), 100),
        ]
        return "\n\n".join(parts)

    def markdown(self, model: str, picture: str | None) -> str:
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
            f"## A model's predictions: {model}",
            _wrap(self.source),
            _markdown(*self.model_cells()),
        ]
        parts += ["## Random rows", _wrap(self.about_rows()), _markdown(*self.row_cells())]
        parts.append("\n".join(_wrap(f"- {line}", indent="  ") for line in self.about_rotation()))
        return "\n\n".join(parts) + "\n"

    def panels(self) -> list[Panel]:
        panels = [
            Panel(
                f"{name} rows: error of the attention output",
                "bytes per token and head",
                [
                    (row.label, row.num_bytes, row.errors[name])
                    for row in self.rows
                    if row.label != "fp32"
                ],
            )
            for name in accuracy.ROWS
        ]
        points = [
            (score.label, size, score.kl_divergence)
            for score, size in zip(self.scores, self.sizes, strict=True)
        ]
        title = f"predictions at {self.context:,} tokens: KL divergence, nats per token"
        return [*panels, Panel(title, "bytes per token", points)]


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


def _write(report: _Report, folder: Path, model: str) -> None:
    picture: str | None = "accuracy.svg"
    try:
        draw(report.panels(), folder / "accuracy.svg")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        picture = None
        print(f"numkv: {_NO_PICTURE}", file=sys.stderr)
    (folder / "accuracy.md").write_text(report.markdown(model, picture), encoding="utf-8")
    written = ["accuracy.md", *([picture] if picture else [])]
    print(f"\nwritten: {', '.join(str(folder / name) for name in written)}")
