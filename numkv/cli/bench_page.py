"""What ``numkv bench transformers`` prints, writes and draws: tables, a page and a picture (matplotlib)."""

from __future__ import annotations

import datetime
import os
import platform
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from numkv.bench.load import num_cores
from numkv.bench.results import DYNAMIC, FLOOR, STATIC, Line
from numkv.bench.rounds import Spread
from numkv.cli.output import table

_NONE = "–"
_HOW = """\
Contestants take turns in random order: in each round one step of each that counts, after one that does not; those that
take more than twice DynamicCache's time sit three rounds of four out. Caches are filled with random rows, and are cut
back after steps. Ratios (× as fast; the middle half of the rounds in brackets) and shares are formed within a round,
medians count. "Attention" is what a step takes beyond the step in which attention and its cache are left out;
"bandwidth" is at what share of the machine's read bandwidth, probed before and after each round, the cache is read in
that time. "Ceiling" is the share of the speed without attention. Rounds in which something else used more than 5 % of
the cores do not count. The logit error is the mean relative L2 error; random weights do not damp errors from layer
to layer as trained ones do.
"""


@dataclass(frozen=True)
class About:
    """What a page says beside the tables.

    Attributes
    ----------
    model, described, command, versions : str
        The model's name and sizes, the command, and versions of packages.
    threads : int
        Threads that PyTorch has.
    reference : str
        What logits are compared with.
    """

    model: str
    described: str
    command: str
    versions: str
    threads: int
    reference: str

    def foot(self, lines: Sequence[Line]) -> str:
        """What stands below the tables."""
        parts = [
            f"{self.model}: {self.described}; {self.threads} threads. {_machine()}. {self.versions}."
        ]
        if any(line.agreement and not line.prompt for line in lines):
            parts.append(f"Logits of steps are compared with {self.reference}.")
        if any(line.agreement and line.prompt for line in lines):
            parts.append("Logits of prompts are compared with DynamicCache's.")
        return _wrap(" ".join(parts), 100)


def _machine() -> str:
    name = platform.processor() or platform.machine()
    try:
        listing = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        found = [
            x.partition(":")[2].strip() for x in listing.splitlines() if x.startswith("model name")
        ]
        name = found[0] if found else name
    except OSError:
        pass
    return f"{name} ({llvm.get_host_cpu_name()} to LLVM), {num_cores()} cores, {platform.system()}"


def _wrap(text: str, width: int = 120) -> str:
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def _ratio(found: Spread | None) -> str:
    if found is None:
        return _NONE
    return f"{found.middle:.2f} ({found.low:.2f}–{found.high:.2f})"


def _size(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size else _NONE


def rows(line: Line) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a line's table.

    Parameters
    ----------
    line : Line
        What was measured.

    Returns
    -------
    list of str, list of list of str
    """
    unit = "s/prompt" if line.prompt else "ms/token"
    header = [
        "contestant", "tok/s", unit, "× Dynamic", "× Static", "attention, ms", "bandwidth", "ceiling", "cache",
        "same token", "logit error",
    ]  # fmt: skip
    measured, cells = line.measured, []
    for name in line.names:
        seconds = measured.seconds(name) or 0.0
        beyond = measured.beyond(name, FLOOR) if name != FLOOR else None
        share = (
            None if name == FLOOR or line.prompt else measured.share(name, FLOOR, line.read[name])
        )
        ceiling = measured.ratio(name, FLOOR)
        agreed = line.agreement.get(name)
        cells.append(
            [
                name,
                f"{line.rate(name):,.1f}" if line.rate(name) < 1000 else f"{line.rate(name):,.0f}",
                f"{seconds:.3f}" if line.prompt else f"{seconds * 1e3:.1f}",
                _ratio(measured.ratio(name, DYNAMIC)),
                _ratio(measured.ratio(name, STATIC)),
                _NONE if beyond is None else f"{beyond * 1e3:.1f}",
                _NONE if share is None else f"{share:.2f}",
                _NONE if ceiling is None else f"{ceiling.middle:.2f}",
                _size(line.sizes[name]),
                _NONE if agreed is None else f"{agreed.same}/{agreed.predictions}",
                _NONE if agreed is None else f"{agreed.error:.1e}",
            ]
        )
    used = [i for i in range(len(header)) if i == 0 or any(row[i] != _NONE for row in cells)]
    return [header[i] for i in used], [[row[i] for i in used] for row in cells]


def verdict(line: Line) -> str:
    """How many rounds count, what the machine read, and whether the figures can be trusted."""
    measured = line.measured
    said = f"{len(measured.rounds)} rounds"
    if len(measured.rounds) < measured.wanted:
        said += f", as time was up before there were {measured.wanted}"
    if measured.all_count:
        said += f", {measured.left_out} of them beside something else that ran"
    else:
        said += f", {measured.left_out} left out as something else ran"
    said += f"; {measured.probe() / 1e9:.1f} GB/s of read bandwidth."
    if measured.noisy or measured.all_count:
        said = f"NOISY: time was up before there were enough undisturbed rounds. {said}"
    return said


def _absent(line: Line) -> list[str]:
    """Who is absent, a reason that several share once."""
    found: dict[str, list[str]] = {}
    for name, why in line.absent.items():
        found.setdefault(why, []).append(name)
    return [f"Absent: {', '.join(names)}: {why}" for why, names in found.items()]


def terminal(line: Line) -> str:
    """A line's table and what is said about it, for the terminal.

    Parameters
    ----------
    line : Line
        What was measured.

    Returns
    -------
    str
    """
    parts = [line.title, table(*rows(line)), _wrap(verdict(line), 100)]
    parts += [_wrap(x, 100) for x in _absent(line)]
    return "\n".join(parts)


def page(lines: Sequence[Line], about: About, path: Path, picture: Path | None) -> str:
    """A page in Markdown.

    Parameters
    ----------
    lines : sequence of Line
        What was measured.
    about : About
        What else to say.
    path, picture : pathlib.Path
        Where the page goes, and the picture, if there is one.

    Returns
    -------
    str
    """
    today = datetime.date.today().isoformat()
    parts = [
        f"# {today}: {about.model} in transformers, numkv beside its own caches, {num_cores()} cores",
        _wrap(f"`{about.command}`: {about.foot(lines)}".replace("\n", " ")),
        _wrap(" ".join(_HOW.split())),
    ]
    if picture is not None:
        relative = os.path.relpath(picture, path.parent).replace(os.sep, "/")
        parts.append(f"![Time of a step by contestant]({relative})")
    for line in lines:
        header, cells = rows(line)
        rule = ["---", *["--:"] * (len(header) - 1)]
        grid = "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *cells))
        parts += [f"## {line.title}", grid, _wrap(verdict(line))]
        parts += [_wrap(x) for x in _absent(line)]
    return "\n\n".join(parts) + "\n"


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
