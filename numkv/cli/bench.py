"""``numkv bench transformers``: decode and prompts of a whole model, numkv and transformers' own caches."""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numkv
from numkv.bench.rounds import DYNAMIC, FLOOR, STATIC, Line, Spread, num_cores
from numkv.cli import bench_requests
from numkv.cli.output import (
    UsageError,
    at_least,
    check_picture,
    cpu_name,
    flag,
    is_installed,
    listening_to_kernels,
    markdown_table,
    option,
    page_head,
    positive,
    save_figure,
    stoppable,
    table,
    version_of,
    wrapped,
)
from numkv.demo.cache import CacheChoice

_NONE = "–"
_HOW = """\
In each round every contestant computes one step that is timed, after one that is not, in random order. Contestants
slower than twice DynamicCache's time take part in one round of four. Caches are filled with random rows, and cut back
after steps. Ratios (× as fast; quartiles in brackets) and shares are computed within a round; tables have the medians.
"Attention" is the time of a step beyond that of the model without attention and cache. "Bandwidth" is the rate at which
the cache is read in that time, as a share of the machine's read bandwidth, which is measured before and after each
round. "Ceiling" is the speed as a share of that without attention. Rounds in which other processes used more than 5 %
of the cores do not count. The logit error is the mean relative L2 error; random weights do not damp errors from layer
to layer as trained weights do.
"""


@dataclass(frozen=True)
class About:
    """Facts for the text of a page.

    Attributes
    ----------
    model, described, command, versions : str
        The model's name and sizes, the command, and versions of packages.
    threads : int
        Number of PyTorch's threads.
    reference : str
        The reference of the logits.
    """

    model: str
    described: str
    command: str
    versions: str
    threads: int
    reference: str

    def foot(self, lines: Sequence[Line]) -> str:
        """Return the text below the tables."""
        parts = [
            f"{self.model}: {self.described}; {self.threads} threads. {_machine()}. {self.versions}."
        ]
        if any(line.agreement and not line.prompt for line in lines):
            parts.append(f"Logits of steps are compared with {self.reference}.")
        if any(line.agreement and line.prompt for line in lines):
            parts.append("Logits of prompts are compared with DynamicCache's.")
        return wrapped(" ".join(parts), 100)


def _machine() -> str:
    return f"{cpu_name()}, {num_cores()} cores, {platform.system()}"


def _ratio(found: Spread | None) -> str:
    if found is None:
        return _NONE
    return f"{found.middle:.2f} ({found.low:.2f}–{found.high:.2f})"


def _size(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size else _NONE


def rows(line: Line) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of a measurement's table.

    Parameters
    ----------
    line : Line
        The measurement.

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
    """Return a sentence with the number of rounds, the read bandwidth, and a warning about noise."""
    measured = line.measured
    text = f"{len(measured.rounds)} rounds"
    if len(measured.rounds) < measured.wanted:
        text += f", as time was up before there were {measured.wanted}"
    if measured.all_count:
        text += f", {measured.left_out} of them disturbed by other processes"
    else:
        text += f", {measured.left_out} left out because other processes ran"
    text += f"; {measured.probe() / 1e9:.1f} GB/s of read bandwidth."
    if measured.noisy or measured.all_count:
        text = f"NOISY: time was up before there were enough undisturbed rounds. {text}"
    return text


def _absent(line: Line) -> list[str]:
    """Return a line for each reason of absence, with all contestants that share it."""
    found: dict[str, list[str]] = {}
    for name, why in line.absent.items():
        found.setdefault(why, []).append(name)
    return [f"Absent: {', '.join(names)}: {why}" for why, names in found.items()]


def terminal(line: Line) -> str:
    """Return a measurement's table and its text, for the terminal.

    Parameters
    ----------
    line : Line
        The measurement.

    Returns
    -------
    str
    """
    parts = [line.title, table(*rows(line)), wrapped(verdict(line), 100)]
    parts += [wrapped(x, 100) for x in _absent(line)]
    return "\n".join(parts)


def page(lines: Sequence[Line], about: About, path: Path, picture: Path | None) -> str:
    """Return a page in Markdown.

    Parameters
    ----------
    lines : sequence of Line
        The measurements.
    about : About
        Facts for the text.
    path, picture : pathlib.Path
        Files of the page and of the picture, if there is one.

    Returns
    -------
    str
    """
    title = (
        f"{about.model} in transformers, numkv and transformers' own caches, {num_cores()} cores"
    )
    facts = f"`{about.command}`: {about.foot(lines)}"
    parts = page_head(title, facts, _HOW, path, picture, "Time of a step by contestant")
    for line in lines:
        parts += [f"## {line.title}", markdown_table(*rows(line)), wrapped(verdict(line))]
        parts += [wrapped(x) for x in _absent(line)]
    return "\n\n".join(parts) + "\n"


_OURS, _THEIRS, _BELOW = "#4c78a8", "#b0b0b0", "#dddddd"
#: Bars longer than DynamicCache's by more than this factor are cut off.
_LONGEST = 2.0


def draw(lines: Sequence[Line], model: str, path: Path) -> None:
    """Draw a panel for each measurement: a bar for each contestant, with a lighter part for all but attention.

    Parameters
    ----------
    lines : sequence of Line
        The measurements.
    model : str
        Name of the model.
    path : pathlib.Path
        File of the picture; its suffix is the format.

    Raises
    ------
    ModuleNotFoundError
        If matplotlib is missing.
    """
    from matplotlib.figure import Figure

    shown = [line for line in lines if line.names]
    if not shown:
        return
    height = sum(0.32 * len(line.names) + 1.1 for line in shown)
    figure = Figure(figsize=(9, height), layout="constrained")
    heights = [len(line.names) + 1 for line in shown]
    axes = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    for line, ax in zip(shown, axes, strict=True):
        _plot(line, model, ax)
    save_figure(figure, path, dpi=120)


def _number(x: float) -> str:
    """Format a number with three significant digits, or more if it is large."""
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


#: Contestants by default; those of the second list need minutes to fill.
_USUAL = ["dynamic", "static", "fp8", "quanto", "turboquantcpu", "numkv", "floor"]
CONTESTANTS = [
    *_USUAL, "hqq", "turboquantcpu-mse", "turboquantcpu-qjl", "turboquantcpu-polar"
]  # fmt: skip
DEFAULT_KINDS = ["bf16", "int8", "int4"]
#: Rounds of prompts, which take seconds each, are fewer than rounds of steps by this factor.
_PROMPTS = 4
#: At short contexts, where steps are quick and ratios near 1, there are more of them.
_SHORT, _MORE = 1024, 3
_PACKAGES = ("torch", "transformers", "optimum-quanto", "hqq", "turboquantcpu")


class Bar:
    """A progress bar on a terminal, drawn between rounds, so that it never disturbs them.

    Parameters
    ----------
    stream : file, optional
        Output; stderr by default. If it is no terminal, each measurement prints one line.
    """

    WIDTH = 24

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._on_terminal = self._stream.isatty()
        self._what, self._drawn = "", 0
        self._started = time.monotonic()

    def _line(self, text: str) -> None:
        print(f"\r{text.ljust(self._drawn)}", end="", file=self._stream, flush=True)
        self._drawn = len(text)

    def report(self, what: str) -> None:
        """Show the name of the present work."""
        self._what = what.partition(":")[0]
        if self._on_terminal:
            self._line(f"{what}…")

    def count_rounds(self, done: int, left_out: int, wanted: int) -> None:
        """Draw how many rounds count, and how many are left out."""
        if self._on_terminal:
            full = self.WIDTH * done // wanted
            text = f", {left_out} left out" if left_out else ""
            self._line(
                f"{self._what}  [{'#' * full}{'.' * (self.WIDTH - full)}] {done} of {wanted} rounds{text}, "
                f"{time.monotonic() - self._started:.0f} s"
            )
        elif done == left_out == 0:
            print(f"{self._what}: {wanted} rounds…", file=self._stream, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._drawn:
            self._line("")
            print("\r", end="", file=self._stream, flush=True)


@dataclass(frozen=True)
class _Job:
    """One measurement: steps at a context, or prompts of a length."""

    tokens: int
    prompt: bool = False
    padded: bool = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``numkv bench transformers`` to a parser.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Parser of the command.
    """
    count = at_least(1)
    # fmt: off
    option(parser, "--model", "qwen2.5-0.5b, 8b (4 layers of its attention), or a config.json or the folder it is in",
           metavar="MODEL", default="qwen2.5-0.5b")
    option(parser, "--layers", "only the first N layers of the model", count, "N")
    option(parser, "--context", "tokens in the caches before a step (default: 64 16384, or none with --prefill)", count,
           "N", nargs="*")
    option(parser, "--prefill", "also time prompts of N tokens, with and without padding", count, "N", nargs="+")
    flag(parser, "--no-padding", "prompts without padding only")
    option(parser, "--requests", "instead of steps, serve N requests at once with ContinuousBatch, generate (one after "
           "another, and padded) and generate_batch; one request also with use", count, "N", nargs="+")
    option(parser, "--shared", "tokens of a prefix of all requests (default: 0 4096)", at_least(0), "N", nargs="+",
           default=[0, 4096])
    option(parser, "--longest", "most tokens of a request's own part, which has at least 64", count, "N", default=4096)
    option(parser, "--new", "new tokens of each request", count, "N", default=64)
    option(parser, "--contestants", f"of {', '.join(CONTESTANTS)} (default: {' '.join(_USUAL)})", metavar="NAME",
           default=_USUAL, nargs="+", choices=CONTESTANTS)
    option(parser, "--kind", "storage kinds of numkv, or K/V such as int8/fp16, with +rotate added (default: "
           f"{' '.join(DEFAULT_KINDS)})", metavar="KIND", default=list(DEFAULT_KINDS), nargs="+")
    option(parser, "--dtype", "of weights", default="bf16", choices=("bf16", "fp16", "fp32"))
    option(parser, "--batch", "sequences", count, "N", default=1)
    option(parser, "--threads", "of PyTorch and numkv (default: theirs)", count, "N")
    option(parser, "--rounds", f"rounds that count, for each context; three times as many up to {_SHORT:,} tokens, a "
           "quarter for prompts", count, "N", default=30)
    option(parser, "--minutes", "time limit, with requests that of each method (default: 10)", positive(),
           "M", default=10.0)
    option(parser, "--seed", "of all random numbers (default: 0)", int, "N", default=0)
    option(parser, "--picture", "draw it: .png or .svg; needs matplotlib", Path, "FILE")
    option(parser, "--markdown", "write a page", Path, "FILE")
    # fmt: on
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measure, print, and write a page and a picture where asked.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options.

    Raises
    ------
    UsageError
        If a package is missing, or a contestant or a kind is unknown.
    """
    started = time.monotonic()
    check_picture(arguments.picture)
    for name in ("torch", "transformers"):
        if not is_installed(name):
            raise UsageError(
                f'bench transformers needs {name}, which is not installed; try pip install "numkv[transformers]"'
            )
    bar = Bar()
    try:
        with listening_to_kernels(bar.report):
            model, kinds, about = _prepare(arguments, bar)
            if arguments.requests:
                found: Any = bench_requests.measure(arguments, model, kinds, about, bar.report)
            else:
                found = _steps(arguments, model, kinds, about, bar, started)
    finally:
        bar.close()
    requests = bool(arguments.requests)
    print(f"\n{about.foot([])}" if requests else about.foot(found))
    picture, where = arguments.picture, arguments.markdown
    written = [path for path in (where, picture) if path is not None]
    for path in written:
        path.parent.mkdir(parents=True, exist_ok=True)
    if picture is not None:
        (bench_requests.draw if requests else draw)(found, about.model, picture)
    if where is not None:
        text = (bench_requests.page if requests else page)(found, about, where, picture)
        where.write_text(text, "utf-8")
    if written:
        print(f"\nwritten: {', '.join(map(str, written))}")


def _steps(
    arguments: argparse.Namespace, model: Any, kinds: Any, about: About, bar: Bar, started: float
) -> list[Line]:
    """Measure steps and prompts, and print each table when it is done."""
    from numkv.bench.decode import Bench
    from numkv.bench.rounds import Probe

    probe = Probe(arguments.threads or numkv.get_num_threads())
    try:
        bench = Bench(
            model, list(arguments.contestants), kinds, arguments.batch, arguments.seed, arguments.rounds, probe,
            bar.report, bar.count_rounds,
        )  # fmt: skip
        jobs = _jobs(arguments)
        deadline = started + 60 * arguments.minutes
        lines: list[Line] = []
        with stoppable("stopping after this round") as asked:
            bench.enough = lambda: bool(asked)
            for i, job in enumerate(jobs):
                now = time.monotonic()
                until = now + max(0.0, deadline - now) / (len(jobs) - i)
                lines.append(_measured(bench, job, until, arguments.rounds))
                bar.close()
                print(terminal(lines[-1]) + "\n", flush=True)
                if asked:
                    raise KeyboardInterrupt(about.foot(lines))
        return lines
    finally:
        probe.close()


def _jobs(arguments: argparse.Namespace) -> list[_Job]:
    contexts = arguments.context
    if contexts is None:
        contexts = [] if arguments.prefill else [64, 16_384]
    jobs = [_Job(context) for context in contexts]
    for tokens in arguments.prefill or []:
        jobs.append(_Job(tokens, prompt=True))
        if not arguments.no_padding:
            jobs.append(_Job(tokens, prompt=True, padded=True))
    if not jobs:
        raise UsageError("nothing to measure: expected --context or --prefill with some lengths")
    return jobs


def _measured(bench: Any, job: _Job, until: float, rounds: int) -> Any:
    if job.prompt:
        bench.rounds = max(2, rounds // _PROMPTS)
        return bench.prefill(job.tokens, until, padded=job.padded)
    bench.rounds = rounds * _MORE if job.tokens <= _SHORT else rounds
    return bench.decode(job.tokens, until)


def _prepare(arguments: argparse.Namespace, bar: Bar) -> tuple[Any, list[Any], About]:
    """Return the model, the storage kinds of numkv, and the facts for the text."""
    import torch  # before any of numkv's threads start
    import transformers

    from numkv.bench.contestants import Kinds
    from numkv.bench.models import build, config_of, num_kv_heads, num_parameters

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
        numkv.set_num_threads(arguments.threads)
    kinds = [Kinds(*_kinds(CacheChoice.parse(text))) for text in arguments.kind]
    config = config_of(arguments.model, arguments.layers)
    bar.report(f"{arguments.model}: building the model")
    model = build(config, arguments.dtype, arguments.seed)
    heads = f"{config.num_attention_heads} q and {num_kv_heads(config)} kv heads"
    described = (
        f"{config.num_hidden_layers} layers, hidden {config.hidden_size:,}, {heads}, vocabulary "
        f"{config.vocab_size:,}, {num_parameters(model) / 1e6:,.0f} million random weights in {arguments.dtype}"
    )
    about = About(
        model=Path(arguments.model).name if "/" in arguments.model else arguments.model,
        described=described,
        command=shlex.join(["numkv", *getattr(arguments, "argv", [])]),
        versions=_versions(),
        threads=int(torch.get_num_threads()),
        reference="the same model and rows in fp32, or DynamicCache's if that would be too large",
    )
    return model, kinds, about


def _kinds(choice: CacheChoice) -> tuple[str, str, str, bool]:
    if choice.options.keys() - {"rotate"}:
        raise UsageError(
            f"--kind: expected kinds, with or without +rotate, got {choice.label}; numkv.transformers keeps no "
            "tokens in full precision"
        )
    return choice.label, *choice.kinds, choice.rotate


def _versions() -> str:
    of_package = [(name, version_of(name)) for name in _PACKAGES]
    found = [f"numkv {numkv.__version__}", f"Python {platform.python_version()}"]
    return ", ".join([*found, *(f"{name} {of}" if of else f"no {name}" for name, of in of_package)])
