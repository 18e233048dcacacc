"""``numkv bench transformers --requests``: many requests at once, as a table, a page and a picture."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numkv.cli.output import markdown_table, page_head, save_figure, table, wrapped

_HOW = """\
All requests arrive at once. The own parts of their prompts have log-uniform lengths. New tokens a second count the time
from the first request to the last token, prompts included. The first token's time is the median over the requests.
Cache is its size at the peak. `generate_batch` has a cache for all requests, and takes 512 tokens a pass, as
`ContinuousBatch` does. Same tokens counts the requests that get the same tokens as from `generate` alone: linear layers
in 16 bits round differently at another batch size, so with random weights texts soon diverge.
"""


@dataclass(frozen=True)
class Section:
    """The results of one workload, by method."""

    title: str
    results: list[tuple[str, Any]]

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the cells of a table."""
        header = ["method", "new tok/s", "× one after another", "first token, s", "cache"]
        header.append("same tokens")
        served = {name: x for name, x in self.results if not isinstance(x, Exception)}
        alone = next((x for name, x in served.items() if "one after" in name), None)
        cells = []
        for name, x in self.results:
            if name not in served:
                cells.append([name, *["–"] * 5])
                continue
            speed = same = "–"
            if alone is not None:
                speed = f"{x.rate / alone.rate:.2f}"
                equal = sum(a == b for a, b in zip(x.tokens, alone.tokens, strict=True))
                same = f"{equal}/{len(x.tokens)}"
            first = "–" if math.isnan(x.first) else f"{x.first:.2f}"
            nbytes = f"{x.nbytes / 1e6:,.1f} MB" if x.nbytes else "–"
            cells.append([name, f"{x.rate:,.1f}", speed, first, nbytes, same])
        return header, cells

    def left_out(self) -> list[str]:
        """Return a line for each method that was left out."""
        return [f"Left out: {name}: {x}." for name, x in self.results if isinstance(x, Exception)]

    def text(self) -> str:
        """Return the table on a terminal."""
        return "\n".join(["", self.title, table(*self.rows()), *self.left_out()])


def measure(
    arguments: argparse.Namespace, model: Any, kinds: Any, about: Any, report: Any
) -> list[Section]:
    """Measure each workload, and print its table when it is done; an interrupt carries the partial table.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options.
    model : transformers.PreTrainedModel
        The model.
    kinds : sequence of Kinds
        Storage kinds of numkv.
    about : About
        Facts for the text.
    report : callable
        Called with the name of each measurement before it begins.

    Returns
    -------
    list of Section
    """
    from numkv.bench.requests import Workload, serve

    sections = []
    for shared in arguments.shared:
        for count in arguments.requests:
            workload = Workload(count, shared, arguments.longest, arguments.new)
            common = f"{shared:,} tokens in common and " if shared else ""
            title = f"{count:,} request{'s' * (count > 1)}, {common}up to {workload.longest:,} tokens of their own"
            section = Section(title, [])
            try:
                for method in serve(
                    model, workload, kinds, arguments.seed, 60 * arguments.minutes, report
                ):
                    section.results.append(method)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(section.text(), about.foot([])) from None
            print(section.text(), flush=True)
            sections.append(section)
    return sections


def page(sections: Sequence[Section], about: Any, path: Path, picture: Path | None) -> str:
    """Return a page in Markdown.

    Parameters
    ----------
    sections : sequence of Section
        The results.
    about : About
        Facts for the text.
    path, picture : pathlib.Path
        Files of the page and of the picture, if there is one.

    Returns
    -------
    str
    """
    title = f"many requests to {about.model} in transformers"
    facts = f"`{about.command}`: {about.foot([])}"
    lines = page_head(title, facts, _HOW, path, picture, "New tokens a second, by method")
    for section in sections:
        lines += [
            f"## {section.title}",
            markdown_table(*section.rows()),
            *map(wrapped, section.left_out()),
        ]
    return "\n\n".join(lines) + "\n"


def draw(sections: Sequence[Section], model: str, path: Path) -> None:
    """Draw new tokens a second: a group of bars for each workload.

    Parameters
    ----------
    sections : sequence of Section
        The results.
    model : str
        Name of the model.
    path : pathlib.Path
        File of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 1.1 * len(sections)), layout="constrained")
    axes = figure.subplots(len(sections), 1, squeeze=False)[:, 0]
    for section, ax in zip(sections, axes, strict=True):
        served = [(name, x) for name, x in section.results if not isinstance(x, Exception)][::-1]
        rates = [x.rate for _, x in served]
        colours = ["#4c78a8" if name.startswith("numkv") else "#b0b0b0" for name, _ in served]
        ax.barh(range(len(served)), rates, color=colours)
        ax.set_yticks(range(len(served)), [name for name, _ in served], fontsize=8)
        ax.set_title(section.title, fontsize=9, loc="left")
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("new tokens a second", fontsize=8)
    figure.suptitle(model, fontsize=10)
    save_figure(figure, path)
