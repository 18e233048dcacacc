"""``numkv fit``: choose storage kinds for each layer of a checkpoint, and write a profile for caches."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numkv.caches import Profile
from numkv.cli.output import (
    Progress,
    SoFar,
    UsageError,
    check_picture,
    check_place,
    kernel_progress,
    load_model,
    read_text,
    save_figure,
    table,
)
from numkv.demo import BUNDLED_MODEL
from numkv.demo.evaluate import Document, held_out
from numkv.demo.fit import CHANNEL_KINDS, K_KINDS, V_KINDS, DemoJudge, Fit, Judge, Pair, fit, pairs
from numkv.demo.network import blas_threads_for
from numkv.errors import NumkvError
from numkv.kinds import kinds_of

#: Tokens of a window, and windows of each text.
CONTEXT, WINDOWS = 512, 2
#: Above this spread, a scale shared by all channels of a row loses the small channels.
WIDE = 10.0
_WEAK = "chosen by Python code that comes with numkv: weak evidence for other uses of the model; pass --text with yours"


def run(arguments: argparse.Namespace) -> None:
    """Choose, print, and write the profile and the picture where asked.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options.
    """
    check_picture(arguments.picture)
    check_place("--out", arguments.out)
    check_place("--picture", arguments.picture)
    texts, notes = _texts(arguments)
    judge: Judge
    if arguments.model in (None, BUNDLED_MODEL):
        model = load_model(BUNDLED_MODEL)
        context = min(arguments.context, model.config.max_context)
        judge = DemoJudge(model, texts[:1], texts[1:], context, arguments.windows)
        threads: contextlib.AbstractContextManager[Any] = blas_threads_for(model.weights)
    else:
        judge, more = _of_transformers(arguments, texts)
        notes, threads = notes + more, contextlib.nullcontext()
    of_k = (*K_KINDS, *CHANNEL_KINDS) if judge.takes_channels else K_KINDS
    if not judge.takes_channels:
        notes.append(
            "a layer sees 64 tokens or fewer, which keys by channel keep in full: they were not tried"
        )
    budget = _budget(arguments.budget, judge)
    tried = pairs(arguments.k_kind or of_k, arguments.v_kind or V_KINDS)
    shown = [pair for pair in tried if pair.is_even]

    def note(layer: int, costs: Mapping[Pair, float]) -> None:
        for pair in shown:
            so_far.note(str(layer), str(pair), f"{costs[pair]:.1e}")

    try:
        with (
            kernel_progress(),
            threads,
            SoFar("layer alone, KL", *map(str, shown)) as so_far,
            Progress("trying kinds") as progress,
        ):
            found = fit(judge, budget, tried=tried, progress=progress.update, report=note)
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    print("\n".join([report(found, judge.name), *notes]))
    if arguments.out is not None:
        found.chosen.profile.save(arguments.out)
        print(
            f"{arguments.out}: the profile; numkv.transformers.use(model, profile={str(arguments.out)!r})"
        )
    if arguments.picture is not None:
        draw(found, arguments.picture)


def report(found: Fit, name: str) -> str:
    """Return the tables: spread of channels and cost of each side, the choice, and the comparison with uniform kinds.

    Parameters
    ----------
    found : Fit
        The result.
    name : str
        Name of the model.

    Returns
    -------
    str
    """
    shown = _shown(found)
    header = ("layer", "K widest/median", "V", *map(str, shown), "chosen")
    rows = [
        (
            str(i), f"{k:.1f}{' !' if k > WIDE else ''}", f"{v:.1f}{' !' if v > WIDE else ''}",
            *(f"{cost[pair]:.1e}" for pair in shown), str(chosen_pair),
        )
        for i, ((k, v), cost, chosen_pair) in enumerate(zip(found.spreads, found.costs, found.kinds, strict=True))
    ]  # fmt: skip
    chosen = found.chosen
    others = sorted(found.uniform, key=lambda x: (x.profile.bytes_per_token, x.divergence))
    compared = [
        (x.label, f"{x.profile.bytes_per_token:,}", f"{x.divergence:.2e}")
        for x in (chosen, *(x for x in others if x.label in set(map(str, shown))))
    ]
    wide = sum(k > WIDE for k, _ in found.spreads)
    advice = (
        f"{wide} of {len(rows)} layers have outlier channels in their keys (!): a scale for each row loses the others"
        if wide
        else "no layer has outlier channels in its keys"
    )
    return "\n".join(
        (
            f"{name}: KL of each layer stored alone, nats a token",
            table(header, rows),
            advice,
            "",
            f"the whole, on text that had no part in the choice; at most {found.budget:,} bytes a token",
            table(("layers", "bytes/token", "KL"), compared),
        )
    )


def _shown(found: Fit) -> list[Pair]:
    """Return the kinds that tables show: K and V in equally many bits."""
    return [pair for pair in found.costs[0] if pair.is_even]


def draw(found: Fit, path: Path) -> None:
    """Draw the cost of each layer's kinds, and the choice.

    Parameters
    ----------
    found : Fit
        The result.
    path : pathlib.Path
        File of the picture.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    numbers = range(len(found.costs))
    for pair in _shown(found):
        axes.semilogy(
            numbers, [max(cost[pair], 1e-8) for cost in found.costs], marker=".", label=str(pair)
        )
    chosen = [max(cost[pair], 1e-8) for cost, pair in zip(found.costs, found.kinds, strict=True)]
    axes.semilogy(
        numbers,
        chosen,
        color="black",
        marker="o",
        fillstyle="none",
        linestyle="none",
        label="chosen",
    )
    axes.set(
        xlabel="layer",
        ylabel="KL of the layer alone, nats a token",
        title=found.chosen.profile.model,
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize="small")
    save_figure(figure, path)


def _texts(arguments: argparse.Namespace) -> tuple[list[Document], list[str]]:
    """Return the text for the choice, the text for the measurement, and remarks on them."""
    if arguments.text is None:
        found = {document.name: document for document in held_out().documents}
        return [found["calendar.py"], found["csv.py"]], [_WEAK]
    text = read_text(arguments.text, "--text")
    middle = len(text) // 2
    return [Document(str(arguments.text), x) for x in (text[:middle], text[middle:])], []


def _budget(text: str, judge: Judge) -> int:
    """Return the bytes of a token: a number, or those of a kind in all layers."""
    if text.replace(",", "").isdecimal():
        return int(text.replace(",", ""))
    try:
        k, v = kinds_of(text, None, None, by_channel=True)
    except NumkvError as error:
        raise UsageError(f"--budget: {error}") from None
    return Profile([Pair(k.name, v.name).spec(x) for x in judge.layers]).bytes_per_token


def _of_transformers(
    arguments: argparse.Namespace, texts: Sequence[Document]
) -> tuple[Judge, list[str]]:
    """Load a model with transformers; return its judge, and remarks on it."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from numkv.transformers.judge import ModelJudge
    except ImportError as error:
        raise UsageError(
            f"{arguments.model}: needs transformers and torch ({error}); pip install 'numkv[transformers]'"
        ) from None
    if not (arguments.model / "config.json").is_file():
        raise UsageError(
            f"{arguments.model}: expected a folder with a config.json, as transformers saves models"
        )
    notes = []
    with Progress(f"loading {arguments.model}"):
        try:
            model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto").eval()
        except Exception as error:  # of whichever of its libraries met the damage
            raise UsageError(f"{arguments.model}: transformers cannot load it: {error}") from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        except (OSError, ValueError, KeyError):
            tokenizer = None
        # Transformers makes an empty tokenizer if the files are missing.
        if tokenizer is not None and not tokenizer("text").input_ids:
            tokenizer = None
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    if tokenizer is None:
        notes.append(
            f"{arguments.model} has no tokenizer: bytes of the text are its tokens, which says little"
        )

    def windows(document: Document) -> list[Any]:
        if tokenizer is None:
            ids = [byte % vocabulary for byte in document.text.encode()]
        else:
            ids = tokenizer(document.text).input_ids
        size = min(arguments.context, len(ids))
        count = max(1, min(arguments.windows, len(ids) // size)) if size > 1 else 0
        if not count:
            raise UsageError(f"--text: expected a text of four tokens or more, got {document.name}")
        begin = [math.floor(i * (len(ids) - size) / max(1, count - 1)) for i in range(count)]
        return [torch.tensor(ids[x : x + size]) for x in begin]

    return ModelJudge(model, windows(texts[0]), windows(texts[1]), arguments.model.name), notes
