"""``numkv bench transformers``: decode and prompts of a whole model, numkv beside transformers' own caches."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import logging
import platform
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numkv
from numkv.cli.bench_page import About, page, terminal
from numkv.cli.options import at_least, flag, option
from numkv.cli.output import UsageError
from numkv.demo.cache import CacheChoice

#: By default; those of the second list take minutes to be filled.
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
_NO_PICTURE = "--picture needs matplotlib, which is not installed; try pip install matplotlib"


class Bar:
    """How far rounds are: a bar on a terminal, redrawn between rounds, so that nothing runs beside them.

    Parameters
    ----------
    stream : file, optional
        Where to draw; stderr by default. Where it is no terminal, it says in a line what begins.
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

    def say(self, what: str) -> None:
        """Name what is being done."""
        self._what = what.partition(":")[0]
        if self._on_terminal:
            self._line(f"{what}…")

    def told(self, done: int, left_out: int, wanted: int) -> None:
        """Draw how many rounds count, and how many are left out."""
        if self._on_terminal:
            full = self.WIDTH * done // wanted
            said = f", {left_out} left out" if left_out else ""
            self._line(
                f"{self._what}  [{'#' * full}{'.' * (self.WIDTH - full)}] {done} of {wanted} rounds{said}, "
                f"{time.monotonic() - self._started:.0f} s"
            )
        elif done == left_out == 0:
            print(f"{self._what}: {wanted} rounds…", file=self._stream, flush=True)

    def close(self) -> None:
        """Remove it."""
        if self._drawn:
            self._line("")
            print("\r", end="", file=self._stream, flush=True)


class _Kernels(logging.Handler):
    """Says which kernel is being compiled, as the library logs it, so that it writes no lines of its own."""

    def __init__(self, bar: Bar) -> None:
        super().__init__(logging.INFO)
        self._bar = bar
        self._logger = logging.getLogger("numkv.kernels")

    def emit(self, record: logging.LogRecord) -> None:
        """Show a log record."""
        self._bar.say(record.getMessage())

    def __enter__(self) -> None:
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)

    def __exit__(self, *error: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)


@dataclass(frozen=True)
class _Job:
    """One thing to measure: steps at a context, or prompts of a length."""

    tokens: int
    prompt: bool = False
    padded: bool = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of ``numkv bench transformers``.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        The command's.
    """
    count = at_least(1)
    # fmt: off
    option(parser, "--model", "qwen2.5-0.5b, 8b (4 layers of its attention), or a config.json or the folder it is in",
           metavar="MODEL", default="qwen2.5-0.5b")
    option(parser, "--layers", "only the first N layers of the model", count, "N")
    option(parser, "--context", "tokens in the caches before a step (default: 64 16384, or none with --prefill)", count,
           "N", nargs="*")
    option(parser, "--prefill", "time prompts of N tokens too, in batches with padding as well", count, "N", nargs="+")
    flag(parser, "--no-padding", "prompts without padding only")
    option(parser, "--contestants", f"of {', '.join(CONTESTANTS)} (default: {' '.join(_USUAL)})", metavar="NAME",
           default=_USUAL, nargs="+", choices=CONTESTANTS)
    option(parser, "--kind", "storage kinds of numkv, or K/V such as int8/fp16; behind it +rotate (default: "
           f"{' '.join(DEFAULT_KINDS)})", metavar="KIND", default=list(DEFAULT_KINDS), nargs="+")
    option(parser, "--dtype", "of weights", default="bf16", choices=("bf16", "fp16", "fp32"))
    option(parser, "--batch", "sequences", count, "N", default=1)
    option(parser, "--threads", "of PyTorch and numkv (default: theirs)", count, "N")
    option(parser, "--rounds", f"rounds that count, for each context; three times as many up to {_SHORT:,} tokens, a "
           "quarter for prompts", count, "N", default=30)
    option(parser, "--minutes", "when to give up and print what there is (default: 10)", _minutes, "M", default=10.0)
    option(parser, "--seed", "of all random numbers (default: 0)", int, "N", default=0)
    option(parser, "--picture", "draw it: .png or .svg; needs matplotlib", Path, "FILE")
    option(parser, "--markdown", "write a page", Path, "FILE")
    # fmt: on
    parser.set_defaults(run=run)


def _minutes(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


def run(arguments: argparse.Namespace) -> None:
    """Measure, print, and write a page and a picture where asked.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options.

    Raises
    ------
    UsageError
        If a package is missing, or a contestant or a kind is not one that can be asked for.
    """
    started = time.monotonic()
    if arguments.picture is not None and arguments.picture.suffix not in (".png", ".svg"):
        raise UsageError(
            f"--picture: expected a name that ends in .png or .svg, got {arguments.picture}"
        )
    if arguments.picture is not None and not _is_there(
        "matplotlib"
    ):  # rather now than after minutes
        raise UsageError(_NO_PICTURE)
    for name in ("torch", "transformers"):
        if not _is_there(name):
            raise UsageError(
                f'bench transformers needs {name}, which is not installed; try pip install "numkv[transformers]"'
            )
    bar = Bar()
    try:
        with _Kernels(bar):
            bench, about, probe = _prepare(arguments, bar)
            jobs = _jobs(arguments)
            deadline = started + 60 * arguments.minutes
            lines = []
            for i, job in enumerate(jobs):
                now = time.monotonic()
                until = now + max(0.0, deadline - now) / (len(jobs) - i)
                lines.append(_measured(bench, job, until, arguments.rounds))
                bar.close()
                print(terminal(lines[-1]) + "\n", flush=True)
    finally:
        bar.close()
    probe.close()
    print(about.foot(lines))
    picture = arguments.picture
    if picture is not None:
        from numkv.cli.bench_page import draw

        picture.parent.mkdir(parents=True, exist_ok=True)
        draw(lines, about.model, picture)
    if arguments.markdown is not None:
        arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
        arguments.markdown.write_text(page(lines, about, arguments.markdown, picture), "utf-8")
    written = [str(path) for path in (arguments.markdown, picture) if path is not None]
    if written:
        print(f"\nwritten: {', '.join(written)}")


def _is_there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


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


def _prepare(arguments: argparse.Namespace, bar: Bar) -> tuple[Any, About, Any]:
    """The model, and what is said about it."""
    import torch  # before any of numkv's threads start
    import transformers

    from numkv.bench.contestants import Kinds
    from numkv.bench.decode import Bench
    from numkv.bench.models import build, config_of, num_kv_heads, num_parameters
    from numkv.bench.rounds import Probe

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
        numkv.set_num_threads(arguments.threads)
    kinds = [_kinds(CacheChoice.parse(text)) for text in arguments.kind]
    config = config_of(arguments.model, arguments.layers)
    bar.say(f"{arguments.model}: building the model")
    model = build(config, arguments.dtype, arguments.seed)
    probe = Probe(arguments.threads or numkv.get_num_threads())
    bench = Bench(
        model, list(arguments.contestants), [Kinds(*of) for of in kinds], arguments.batch, arguments.seed,
        arguments.rounds, probe, bar.say, bar.told,
    )  # fmt: skip
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
        reference="the same model and rows in fp32, or DynamicCache's where that would be too large",
    )
    return bench, about, probe


def _kinds(choice: CacheChoice) -> tuple[str, str, str, bool]:
    if choice.options.keys() - {"rotate"}:
        raise UsageError(
            f"--kind: expected kinds, with or without +rotate, got {choice.label}; numkv.transformers keeps no "
            "tokens in full precision"
        )
    return choice.label, *choice.kinds, choice.rotate


def _versions() -> str:
    found = [
        f"numkv {numkv.__version__}", f"Python {platform.python_version()}",
    ]  # fmt: skip
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)
