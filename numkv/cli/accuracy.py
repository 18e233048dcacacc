"""``numkv accuracy``: error, recall and bytes of every storage kind and compressor, as tables and a picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numkv.cli.accuracy_report import Measured, Report, RowErrors, write
from numkv.cli.evaluate import check_context, documents_of
from numkv.cli.output import Progress, SoFar, UsageError, load_model, stoppable, warm_up
from numkv.demo import BUNDLED_MODEL, accuracy
from numkv.demo.cache import AnyChoice, CacheChoice
from numkv.demo.evaluate import (
    OUTLIER_CONTEXT,
    OUTLIER_FACTORS,
    Document,
    Score,
    beginning,
    evaluate,
    with_outliers,
)
from numkv.demo.model import Model
from numkv.demo.network import blas_threads_for
from numkv.demo.recall import Haystack, Recall, haystacks, recall
from numkv.kinds import kinds

#: Every kind but the widest, and combinations: keys by channel, values in fewer bits than keys, some tokens in full
#: precision, compressed heads, and dropped tokens.
DEFAULT_CACHES = [
    *(kind.name for kind in kinds()[1:]),
    "int8_channel", "int8_channel/int4", "int4_channel_fine", "int4_channel",
    *(f"int8/{kind.name}" for kind in kinds() if kind.bytes_per_element < 1),
    "int8/int4+rotate", "int8/code4+rotate", "int4+rotate", "code4+rotate", "code6+rotate",
    "int4+window128+sinks4", "int4+rotate+window128+sinks4",
    "codes8", "codes6", "codes4", "codes4+sketch", "codes3", "last512", "last256",
]  # fmt: skip
DEFAULT_MODULES = ["csv", "calendar", "fractions", "graphlib", "shlex", "textwrap"]
#: Tokens of a text that are computed at once: fewer than in a full-precision window, which the first of them sees
#: shortened by as many tokens.
CHUNK = 64
#: Least tokens of the random rows, so that several queries have tokens to attend to.
LEAST_ROWS = 2 * accuracy.NUM_QUERIES
_KL, _COPIED = "KL, nats/token", "names copied"


def _wide(factor: float) -> str:
    return f"KL, channels × {factor}"


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
    model = load_model(arguments.model)
    context = check_context(arguments, model)
    bundled = arguments.model == BUNDLED_MODEL
    settings = {
        "model": "the bundled one" if bundled else arguments.model.name,
        "source": source,
        "context": context,
        "windows": arguments.windows or None,
        "chunk": CHUNK,
        "needle_texts": arguments.needles,
        "rows": arguments.rows,
        "outliers": {
            "factors": list(OUTLIER_FACTORS),
            "text": documents[0].name,
            "context": min(context, OUTLIER_CONTEXT),
        },
        "target": arguments.target,
    }
    texts = _texts(model, documents, arguments.needles, context)
    earlier = [_read(path, settings) for path in arguments.add or []]
    choices = [replace(choice, target=arguments.target) for choice in arguments.kind]
    caches = {choice.label: choice for choice in choices}
    if arguments.out is not None:  # before minutes of work
        arguments.out.mkdir(parents=True, exist_ok=True)
    warm_up(model, (None, *caches.values()), arguments.target)
    with SoFar("cache", *accuracy.ROWS, _KL, _COPIED, *map(_wide, OUTLIER_FACTORS)) as so_far:
        with Progress("random rows") as progress:
            rows, baselines = _row_errors(
                list(caches.values()), arguments.rows, arguments.target, progress, so_far
            )
        with blas_threads_for(model.weights):
            measured, without = _measure(
                model, documents, texts, caches, rows, arguments, context, so_far
            )
    by_label = {x.label: x for part in (*earlier, measured) for x in part}
    report = Report(
        sorted(by_label.values(), key=lambda x: (x.label != "fp32", -x.num_bytes)),
        baselines,
        without,
        settings,
        2 * model.config.num_layers * model.config.num_kv_heads * model.config.head_dim,
    )
    print(report.terminal())
    if arguments.out is not None:
        write(report, arguments.out)


def _texts(
    model: Model, documents: Sequence[Document], count: int, context: int
) -> tuple[list[Haystack], list[Haystack]]:
    """Return texts with names to copy, and the same texts whose definitions have other names."""
    try:
        texts, others = (
            haystacks(model.tokenizer, documents, context=context, num_texts=count, defined=x)
            for x in (True, False)
        )
    except ValueError as error:
        raise UsageError(f"names to copy: {error}") from None
    return texts, others


def _measure(
    model: Model, documents: Sequence[Document], texts: tuple[list[Haystack], list[Haystack]],
    caches: dict[str, AnyChoice], rows: dict[str, RowErrors], arguments: argparse.Namespace, context: int,
    so_far: SoFar,
) -> tuple[list[Measured], Recall]:  # fmt: skip
    """Measure the caches on the model, fp32 first, and the share of needles that can be guessed."""
    compared: dict[str, Any] = {label: x for label, x in caches.items() if label != "fp32"}
    reference = CacheChoice(target=arguments.target)
    options: dict[str, Any] = {"target": arguments.target, "chunk": CHUNK}
    with Progress("evaluating") as progress, stoppable("stopping after this window") as asked:
        scores = evaluate(
            model, documents, compared, context=context, windows=arguments.windows or None,
            progress=progress.update, enough=lambda: bool(asked), **options,
        )  # fmt: skip
    for score in scores[1:]:
        so_far.note(score.label, _KL, f"{score.kl_divergence:.2e}")
    if asked:
        raise KeyboardInterrupt
    everything = {"fp32": reference, **compared}
    with Progress("needles") as progress:
        (without,) = recall(model, texts[1], {"no needle": reference}, **options)
        found = []
        for i, (label, choice) in enumerate(everything.items()):

            def update(done: int, total: int, before: int = i) -> None:
                progress.update(before * total + done, len(everything) * total)

            found += recall(model, texts[0], {label: choice}, progress=update, **options)
            so_far.note(label, _COPIED, f"{100 * found[-1].copied:.1f} %")
    scores[0] = replace(scores[0], label="fp32")
    text, of_factors = [beginning(documents[0])], []
    for factor in OUTLIER_FACTORS:
        with Progress(f"keys with channels of {factor} times their size") as progress:
            of_factors.append(
                evaluate(
                    with_outliers(model, factor), text, compared, context=min(context, OUTLIER_CONTEXT),
                    progress=progress.update, **options,
                )
            )  # fmt: skip
        for score in of_factors[-1][1:]:
            so_far.note(score.label, _wide(factor), f"{score.kl_divergence:.2e}")
    outliers = zip(*of_factors, strict=True)
    measured = [
        Measured(label, choice.bytes_at(model.config, context), score, one, rows.get(label), wide)
        for (label, choice), score, one, wide in zip(
            everything.items(), scores, found, outliers, strict=True
        )
    ]
    return measured, without


def _row_errors(
    choices: Sequence[AnyChoice], num_tokens: int, target: str, progress: Progress, so_far: SoFar
) -> tuple[dict[str, RowErrors], list[RowErrors]]:
    """Return the errors of caches by label, and those of the baselines."""
    errors: dict[str, dict[str, float]] = {}
    num_done, total = 0, len(accuracy.ROWS) * len(choices)
    for name, make in accuracy.ROWS.items():
        rows = make(num_tokens)
        expected = accuracy.exact_attention(rows.k, rows.v, rows.q)

        def note(
            label: str, out: accuracy.Array, name: str = name, expected: accuracy.Array = expected
        ) -> None:
            error = errors.setdefault(label, {})[name] = accuracy.relative_error(out, expected)
            so_far.note(label, name, f"{error:.2e}")

        for choice in choices:
            note(choice.label, accuracy.attended(choice, rows, target))
            num_done += 1
            progress.update(num_done, total)
        for rotate, label in accuracy.PER_ROW.items():
            note(label, accuracy.per_row_attention(rows, rotate))
    shape = accuracy.row_shape()
    sizes = {c.label: c.bytes_at(shape, num_tokens) / shape.num_kv_heads for c in choices}
    sizes |= dict.fromkeys(accuracy.PER_ROW.values(), accuracy.PER_ROW_BYTES)
    found = {label: RowErrors(label, sizes[label], found) for label, found in errors.items()}
    return found, [found.pop(label) for label in accuracy.PER_ROW.values()]


def _read(path: Path, settings: dict[str, Any]) -> list[Measured]:
    """Return the caches of an earlier report, which must have the same settings."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        before = dict(content["settings"])
        caches = [_measured(x) for x in content["caches"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"--add {path}: expected an accuracy.json of this command ({error!r})"
        ) from None
    for name, value in settings.items():
        if before.get(name) != value:
            raise UsageError(
                f"--add {path}: expected {name} {value!r} as in this report, got {before.get(name)!r}"
            )
    return caches


def _measured(x: dict[str, Any]) -> Measured:
    score, *outliers = (Score(**of) for of in (x["score"], *x["outliers"]))
    rows = None if x["rows"] is None else RowErrors(**x["rows"])
    return Measured(x["label"], x["num_bytes"], score, Recall(**x["recall"]), rows, tuple(outliers))
