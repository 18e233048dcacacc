"""``numkv bench transformers --requests``: what many requests at once take, by table, page and picture."""

from __future__ import annotations

import argparse
import datetime
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numkv.cli.output import markdown_table, save_figure, table, wrapped

_HOW = """\
All requests are submitted at once. The own parts of their prompts have log-uniform lengths. New tokens a second count
the time from the first submit to the last token, prompts included. The first token's time is the median over the
requests. Cache is its size at the peak. Same tokens counts the requests that get the tokens of `generate` alone:
linear layers in 16 bits round differently at another batch size, so random weights soon choose other tokens.
"""


@dataclass(frozen=True)
class Part:
    """One workload, and what each method took."""

    title: str
    found: list[tuple[str, Any]]

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Header and cells of a table."""
        header = [
            "method",
            "new tok/s",
            "× one after another",
            "first token, s",
            "cache",
            "same tokens",
        ]
        served = {name: x for name, x in self.found if not isinstance(x, Exception)}
        alone = next((x for name, x in served.items() if "one after" in name), None)
        cells = []
        for name, x in self.found:
            if name not in served:
                cells.append([name, *["–"] * 5])
                continue
            same = (
                None
                if alone is None
                else sum(a == b for a, b in zip(x.tokens, alone.tokens, strict=True))
            )
            cells.append(
                [
                    name, f"{x.rate:,.1f}", "–" if alone is None else f"{x.rate / alone.rate:.2f}",
                    "–" if math.isnan(x.first) else f"{x.first:.2f}",
                    f"{x.nbytes / 1e6:,.1f} MB" if x.nbytes else "–",
                    "–" if same is None else f"{same}/{len(x.tokens)}",
                ]
            )  # fmt: skip
        return header, cells

    def left_out(self) -> list[str]:
        """A line for each way that was left out."""
        return [f"Left out: {name}: {x}." for name, x in self.found if isinstance(x, Exception)]

    def text(self) -> str:
        """Return the table on a terminal."""
        return "\n".join(["", self.title, table(*self.rows()), *self.left_out()])


def measure(
    arguments: argparse.Namespace, model: Any, kinds: Any, about: Any, say: Any
) -> list[Part]:
    """Measure each load, and print its table when it is done; an interrupt carries what is there of one.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options.
    model : transformers.PreTrainedModel
        The model.
    kinds : sequence of Kinds
        How numkv stores rows.
    about : About
        What else to say.
    say : callable
        Is told what begins.

    Returns
    -------
    list of Part
    """
    from numkv.bench.requests import Load, serve

    parts = []
    for shared in arguments.shared:
        for count in arguments.requests:
            load = Load(count, shared, arguments.longest, arguments.new)
            common = f"{shared:,} tokens in common and " if shared else ""
            title = f"{count:,} request{'s' * (count > 1)}, {common}up to {load.longest:,} tokens of their own"
            part = Part(title, [])
            try:
                for way in serve(model, load, kinds, arguments.seed, 60 * arguments.minutes, say):
                    part.found.append(way)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(part.text(), about.foot([])) from None
            print(part.text(), flush=True)
            parts.append(part)
    return parts


def page(parts: Sequence[Part], about: Any, path: Path, picture: Path | None) -> str:
    """A page in Markdown.

    Parameters
    ----------
    parts : sequence of Part
        What was measured.
    about : About
        What else to say.
    path, picture : pathlib.Path
        Where the page goes, and the picture, if there is one.

    Returns
    -------
    str
    """
    lines = [
        f"# {datetime.date.today().isoformat()}: many requests to {about.model} in transformers",
        wrapped(f"`{about.command}`: {about.foot([])}".replace("\n", " ")),
        wrapped(" ".join(_HOW.split())),
    ]
    if picture is not None:
        relative = os.path.relpath(picture, path.parent).replace(os.sep, "/")
        lines.append(f"![New tokens a second by method]({relative})")
    for part in parts:
        lines += [f"## {part.title}", markdown_table(*part.rows()), *map(wrapped, part.left_out())]
    return "\n\n".join(lines) + "\n"


def draw(parts: Sequence[Part], model: str, path: Path) -> None:
    """Draw new tokens a second: a group of bars for each load.

    Parameters
    ----------
    parts : sequence of Part
        What was measured.
    model : str
        Name of the model.
    path : pathlib.Path
        Where the picture goes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 1.1 * len(parts)), layout="constrained")
    axes = figure.subplots(len(parts), 1, squeeze=False)[:, 0]
    for part, ax in zip(parts, axes, strict=True):
        served = [(name, x) for name, x in part.found if not isinstance(x, Exception)][::-1]
        rates = [x.rate for _, x in served]
        colours = ["#4c78a8" if name.startswith("numkv") else "#b0b0b0" for name, _ in served]
        ax.barh(range(len(served)), rates, color=colours)
        ax.set_yticks(range(len(served)), [name for name, _ in served], fontsize=8)
        ax.set_title(part.title, fontsize=9, loc="left")
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("new tokens a second", fontsize=8)
    figure.suptitle(model, fontsize=10)
    save_figure(figure, path)
