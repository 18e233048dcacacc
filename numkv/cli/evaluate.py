"""``numkv eval``: the quality of cache kinds."""

from __future__ import annotations

import argparse
from dataclasses import replace

from numkv.cli.output import (
    Progress,
    UsageError,
    load_model,
    read_text,
    stoppable,
    table,
    warm_up,
)
from numkv.demo.evaluate import Document, Score, evaluate, held_out
from numkv.demo.model import Model
from numkv.demo.network import blas_threads_for

#: Columns of tables that compare caches with one in fp32.
SCORES = ("bits/byte", "more than fp32", "KL, nats/token", "same top token")


def run(arguments: argparse.Namespace) -> None:
    """Measure and print.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options.
    """
    documents, source = documents_of(arguments)
    model = load_model(arguments.model)
    context = check_context(arguments, model)
    choices = [replace(choice, target=arguments.target) for choice in arguments.kind]
    caches = {choice.label: choice for choice in choices if choice.label != "fp32"}
    warm_up(model, (None, *caches.values()), arguments.target)
    with (
        blas_threads_for(model.weights),
        Progress("evaluating") as progress,
        stoppable("stopping after this window") as asked,
    ):
        scores = evaluate(
            model,
            documents,
            caches,
            context=context,
            target=arguments.target,
            progress=progress.update,
            enough=lambda: bool(asked),
        )
    reference = scores[0]
    labels = ("fp32", *caches)
    rows = [(label, *score_cells(x, reference)) for label, x in zip(labels, scores, strict=True)]
    print(table(("cache", *SCORES), rows))
    if asked:
        source = f"stopped early; of {source}"
    print(f"{source}: {reference.num_bytes:,} bytes in windows of {context:,} tokens")


def score_cells(score: Score, reference: Score) -> tuple[str, ...]:
    """Return a score's cells of the columns `SCORES`."""
    cells = (
        f"{score.bits_per_byte:.4f}",
        f"{score.bits_per_byte - reference.bits_per_byte:+.5f}",
    )
    if score is reference:
        return (*cells, "reference", "reference")
    return (*cells, f"{score.kl_divergence:.2e}", f"{100 * score.agreement:.2f} %")


def check_context(arguments: argparse.Namespace, model: Model) -> int:
    """Return the tokens of a window: those of the option, or the model's context.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options.
    model : Model
        The model.

    Returns
    -------
    int

    Raises
    ------
    UsageError
        If the model's context is shorter.
    """
    context: int = arguments.context or model.config.max_context
    if context > model.config.max_context:
        raise UsageError(f"--context {context:,}: the model has {model.config.max_context:,}")
    return context


def documents_of(arguments: argparse.Namespace) -> tuple[list[Document], str]:
    """Return the texts to evaluate on, and their name.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options: `file`, or `modules`, None for all.

    Returns
    -------
    list of Document, str

    Raises
    ------
    UsageError
        If there is no text, or no such module.
    """
    if arguments.file is not None:
        texts = [Document(str(path), read_text(path, "--file")) for path in arguments.file]
        source = ", ".join(document.name for document in texts)
    else:
        found = held_out()
        texts, source = list(found.documents), str(found)
        if arguments.modules is not None:
            by_name = {document.name.removesuffix(".py"): document for document in texts}
            wanted = [name.removesuffix(".py") for name in arguments.modules]
            unknown = sorted(set(wanted) - set(by_name))
            if unknown:
                raise UsageError(
                    f"--modules: expected some of {', '.join(by_name)}; got {', '.join(unknown)}"
                )
            texts = [by_name[name] for name in wanted]
            source = f"{', '.join(wanted)} of {source}"
    if not any(document.text for document in texts):
        raise UsageError("there is no text to evaluate")
    return texts, source
