"""The command line: ``python -m numkv`` or ``numkv``.

One file per command; this one reads the arguments and turns errors into one line and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numkv
from numkv.cli import accuracy, bench, cache, evaluate, fit, generate, info, plan, show, stream
from numkv.cli.output import Size, UsageError, at_least, checked, flag, option, positive
from numkv.demo import BUNDLED_MODEL
from numkv.demo.cache import CacheChoice, parse_cache
from numkv.demo.fit import CHANNEL_KINDS, K_KINDS, V_KINDS
from numkv.demo.sharded import AXES
from numkv.errors import NotSupported, NumkvError
from numkv.keywords import meant
from numkv.kinds import kinds
from numkv.planning.keys import MOST_LAYERS
from numkv.planning.scale import Network

__all__ = ["main"]

_DESCRIPTION = """\
Generate text with a small language model over a numkv cache, and print the cache's memory and time.

Without arguments, the bundled model continues a few lines of Python. It was trained on the
Python standard library. The text and the table go to stdout, progress to stderr.
"""
_EPILOG = """\
examples:
  numkv --prompt 'class Stack:' --tokens 200 --temperature 0
  numkv --kind int8 fp16                  compare kinds on the same text
  numkv --file a.py --file b.py           a batch; a common beginning is stored once
  numkv --shards 2 --by context           the cache divided among two processes
  numkv stream --context 256 --keep 64    a text longer than its context
  numkv --model ~/models/Qwen3-0.6B --prompt 'The capital of France is'
  numkv plan ~/models/Qwen3-0.6B --memory 4GiB
  numkv fit ~/models/Qwen3-0.6B --text mine.txt --out mine.profile
  numkv show prompt.kv                    draw a saved cache
  numkv bench transformers --context 16384    tokens per second of a whole model
"""
_COMMANDS_TITLE = "commands"
# Options after a kind.
_MORE = ", with +rotate, +windowN, +sinksN added"


class _Parser(argparse.ArgumentParser):
    """A parser with one-line errors that suggest the nearest choice, and with commands first in its help."""

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        near = "" if choice is None else meant(choice[1], re.findall(r"[\w-]+", choice[2]))
        raise UsageError(f"{message}{near} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Reject unknown arguments of this command, which argparse would pass to its parent."""
        usage = self.format_usage()
        options = ["--help", *re.findall(r"--[\w-]+", usage)]
        commands = re.search(r"\{([^}]*)\}\s+\.\.\.", usage)
        for word in map(str, sys.argv[1:] if args is None else args):
            name = word.partition("=")[0]
            if name == "--" or (commands is not None and name in commands[1].split(",")):
                break  # no options follow, or those of a command
            is_option = name.startswith("--") and " " not in word  # argparse's rule
            if is_option and not any(x.startswith(name) for x in options):
                self.error(f"unrecognized arguments: {name}{meant(name, options)}")
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """Return the help, with commands before options."""
        parts = super().format_help().split("\n\n")
        commands = [part for part in parts if part.startswith(_COMMANDS_TITLE)]
        others = [part for part in parts if part not in commands]
        at = next(i for i, part in enumerate(others) if part.startswith("options:"))
        return "\n\n".join((*others[:at], *commands, *others[at:]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments; those of the process by default.

    Returns
    -------
    int
        The exit code: 0, 2 for an error of the user, 130 when interrupted.
    """
    _print_anywhere()
    try:
        arguments = _parser().parse_args(argv)
        arguments.argv = list(sys.argv[1:] if argv is None else argv)
        run: Callable[[argparse.Namespace], None] = arguments.run
        run(arguments)
        sys.stdout.flush()
    except (UsageError, NumkvError, OSError, MemoryError) as error:
        if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"numkv: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        if interrupt.args:  # partial results
            print(*interrupt.args, "partial: interrupted before everything was measured", sep="\n")
            sys.stdout.flush()
        print("\nnumkv: interrupted", file=sys.stderr)
        return 130
    return 0


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror.lower()}"
    if isinstance(error, MemoryError) and not str(error):
        return "not enough memory"
    return " ".join(str(error).split())


def _print_anywhere() -> None:
    """Discard output to closed streams, and replace characters that a terminal cannot show by question marks."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (for as long as the process runs)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    for output in (sys.stdout, sys.stderr):
        if reconfigure := getattr(output, "reconfigure", None):
            reconfigure(errors="replace")


_count, _some = at_least(1), at_least(0)
_size = checked(Size.parse, "a size such as 8GiB or 500MB")
_seconds = checked(plan.parse_seconds, "a time such as 300us")


def _plain_kind(text: str) -> CacheChoice:
    choice = CacheChoice.parse(text)
    if choice.options:
        raise NotSupported(
            f"expected a kind alone, got {text!r}; only `numkv eval` and `numkv accuracy` accept options after a '+'"
        )
    return choice


def _planned_kind(text: str) -> CacheChoice:
    choice = CacheChoice.parse(text)
    if choice.window or choice.sinks:
        raise NotSupported(f"expected a kind, or one with +rotate, got {text!r}")
    return choice


def _row_kind(text: str) -> str:
    kind = numkv.kind(text)
    if not kind.is_query:
        raise NotSupported(f"expected a float kind for new rows, got {kind}")
    return kind.name


# fmt: off
def _add_model_options(parser: Any) -> None:
    option(parser, "--model", "folder of a Qwen3 or Llama checkpoint in Hugging Face format (default: bundled)", Path,
            "DIR", default=BUNDLED_MODEL)
    _add_target(parser, "device of the cache")


def _add_target(parser: Any, meaning: str) -> None:
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu", help=meaning)


def _add_kind_option(
    parser: Any, default: list[str], what: str, parse: Callable[[str], Any] = _plain_kind, more: str = ""
) -> None:
    names = ", ".join(kind.name for kind in kinds())
    option(parser, "--kind", f"{what}: {names}, or K/V such as int8/fp16{more} (default: "
            f"{' '.join(default) or 'all that fit'})", checked(parse, "a kind"), "KIND",
            default=[parse(name) for name in default] or None, nargs="+")


def _add_sampling_options(parser: Any) -> None:
    option(parser, "--temperature", "0 takes the most probable token, more is more varied", positive(or_zero=True), "T",
            default=0.7)
    option(parser, "--top-k", "choose among the K most probable tokens, 0 among all", _some, "K",
            default=40)
    option(parser, "--seed", "the same seed gives the same text", _some, "N", default=0)


def _add_text_options(parser: Any, modules: list[str] | None, what: str) -> None:
    option(parser, "--modules", what, metavar="NAME", default=modules, nargs="+")
    option(parser, "--file", "these texts instead of the modules", Path, "PATH", action="extend", nargs="+")
    option(parser, "--context", "tokens in a window (default: the model's context)", at_least(2), "N")


def _parser() -> argparse.ArgumentParser:
    text: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = _Parser(prog="numkv", description=_DESCRIPTION, epilog=_EPILOG, **text)
    parser.add_argument("--version", action="version", version=f"numkv {numkv.__version__}")
    source = parser.add_mutually_exclusive_group()
    batch = "given more than once, all texts are one batch"
    option(source, "--prompt", f"text to continue; {batch}", metavar="TEXT", action="append")
    option(source, "--file", f"file with the text to continue; {batch}", Path, "PATH", action="append")
    option(parser, "--tokens", "tokens to generate at most; the bundled model's are bytes", _count, "N",
            default=400)
    _add_kind_option(parser, ["fp16"], "storage kind of the cache; with several, the others repeat the text")
    option(parser, "--block-size", "store the cache in blocks of N tokens (default: contiguous for one text, blocks of "
            f"{generate.DEFAULT_BLOCK_SIZE} for several, which share common prefixes)", _count, "N")
    option(parser, "--shards", "divide the cache among N actors of Ray, which needs the extra ray; other kinds stay "
            "in one process", _count, "N")
    option(parser, "--by", "the axis that --shards divides", choices=AXES, default=AXES[0])
    _add_model_options(parser)
    _add_sampling_options(parser)
    parser.set_defaults(run=generate.run)
    commands = parser.add_subparsers(title=_COMMANDS_TITLE, prog="numkv")
    for name, (run, add, short, description) in _COMMANDS.items():
        command = commands.add_parser(name, help=short, description=description)
        add(command)
        if run is not None:
            command.set_defaults(run=run)
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", type=Path, metavar="CONFIG", help="a config.json, or the folder it is in")
    option(parser, "--config", "the same", Path, "PATH")
    option(parser, "--profile", "a profile of `numkv fit` instead, which has shapes and kinds", Path, "FILE")
    option(parser, "--layers", "layers that have a KV cache", at_least(1, MOST_LAYERS), "N")
    for name, meaning in (
        ("--kv-heads", "key/value heads of a layer"),
        ("--head-dim", "elements of a key (and of a value)"),
        ("--head-dim-v", "elements of a value, where they differ"),
    ):
        option(parser, name, meaning, _count, "N")
    option(parser, "--memory", "memory for the cache: 8GiB, 500MB, … (default: 8GiB)", _size, "SIZE",
            default=plan.DEFAULT_MEMORY)
    option(parser, "--tokens", "also print the memory of N tokens", _count, "N")
    option(parser, "--context", "lengths of sequences to list (default: 4,096, 32,768 and the model's)", _count, "N",
            nargs="+")
    option(parser, "--block-size", "round up to blocks of N tokens", _count, "N")
    flag(parser, "--key-bounds", "count bounds of keys, too")
    option(parser, "--source-tokens", "tokens of the text that a decoder with cross attention reads", _some, "N",
            default=0)
    flag(parser, "--expanded", "count latent attention with K and V of every head, not its latents")
    _add_kind_option(parser, [], "kinds to list", _planned_kind, ", with +rotate added")
    nodes = parser.add_argument_group("a cache that is sharded over nodes")
    option(nodes, "--nodes", "model decode steps on N nodes instead: 8 64 1024; --memory is a node's, --context the "
            "sequences' length", _count, "N", nargs="+")
    network, batch = Network(), plan.DEFAULT_BATCH
    options: list[tuple[str, Any, str, Any, str]] = [
        ("--batch", _count, "N", batch, "sequences that are decoded at once"),
        ("--q-heads", _count, "N", None, "query heads of a layer; the config's, or four for each key/value head"),
        ("--latency", _seconds, "TIME", network.latency, "of a message and its answer; perf.ray_steps measures it"),
        ("--message", _seconds, "TIME", network.message, "what a message costs the process that sends it: 300us, 1ms"),
        ("--bandwidth", _size, "SIZE", network.bandwidth, "of a node's link, in a second: 1.25GB"),
        ("--memory-bandwidth", _size, "SIZE", network.memory_bandwidth, "rows that a node attends to, in a second"),
        ("--weights", _size, "SIZE", None, "the model's, read once a step by each group's caller; else the config's"),
    ]
    for name, kind, metavar, default, meaning in options:
        nodes.add_argument(name, type=kind, default=default, metavar=metavar, help=meaning)
    option(nodes, "--picture", "also draw it, with matplotlib", Path, "PATH")


def _add_eval(parser: argparse.ArgumentParser) -> None:
    _add_kind_option(parser, ["fp16", "bf16", "int8"], "kinds to judge", CacheChoice.parse, _MORE)
    _add_model_options(parser)
    _add_text_options(parser, None, "only these held-out modules, such as csv")


def _add_accuracy(parser: argparse.ArgumentParser) -> None:
    more = "; or codesN and codesN+sketch, heads compressed to N bits; or lastN, the newest N tokens alone"
    _add_kind_option(parser, accuracy.DEFAULT_CACHES, "caches to judge", parse_cache, f"{_MORE}{more}")
    _add_model_options(parser)
    _add_text_options(parser, accuracy.DEFAULT_MODULES, "these held-out modules, or all (default: "
                      f"{' '.join(accuracy.DEFAULT_MODULES)})")
    option(parser, "--windows", "windows to predict of each text, 0 for all", _some, "N",
            default=1)
    option(parser, "--needles", "texts with names to copy, 8 in each", _count, "N", default=4)
    option(parser, "--rows", "tokens of the random rows", at_least(accuracy.LEAST_ROWS), "N",
            default=2048)
    option(parser, "--out", "also write accuracy.md and accuracy.json there and, where matplotlib is installed, "
            "accuracy.svg", Path, "DIR")
    option(parser, "--add", "show the caches of these accuracy.json too, of reports with the same options but --kind",
            Path, "JSON", nargs="+")


def _add_fit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL",
                        help="folder of a model that transformers loads (default: the bundled model)")
    option(parser, "--text", "a text such as the model is to read; half of it chooses, half judges", Path, "FILE")
    option(parser, "--budget", "bytes of a token in all layers, or a kind that takes as many", metavar="BYTES|KIND",
            default="int4")
    more = f", and on the bundled model {' '.join(CHANNEL_KINDS)}"
    for name, default in (("--k-kind", " ".join(K_KINDS) + more), ("--v-kind", " ".join(V_KINDS))):
        option(parser, name, f"kinds to try for {name[2].upper()} (default: {default})",
                checked(lambda text: numkv.kind(text).name, "a kind"), "KIND", nargs="+")
    option(parser, "--context", "tokens in a window", at_least(2), "N", default=fit.CONTEXT)
    option(parser, "--windows", "windows of each text", _count, "N", default=fit.WINDOWS)
    option(parser, "--out", "write the profile there", Path, "FILE")
    option(parser, "--picture", "also draw it, with matplotlib", Path, "PATH")


def _add_stream(parser: argparse.ArgumentParser) -> None:
    option(parser, "--prompt", "text to continue (default: a few lines of Python)", metavar="TEXT",
            default=generate.DEFAULT_PROMPT)
    for name, smallest, default, meaning in (
        ("--context", 2, 256, "tokens that the cache has room for"),
        ("--keep", 0, 64, "first tokens that always stay"),
        ("--tokens", 1, 600, "tokens to generate at most"),
    ):
        option(parser, name, meaning, at_least(smallest), "N", default=default)
    option(parser, "--kind", "storage kind of the cache (default: fp16)", checked(_plain_kind, "a kind"), "KIND",
            default=CacheChoice.parse("fp16"))
    _add_model_options(parser)
    _add_sampling_options(parser)


def _add_warmup(parser: argparse.ArgumentParser) -> None:
    _add_kind_option(parser, ["fp16"], "storage kinds of caches")
    option(parser, "--dtype", "float kinds of new rows and queries, in addition to the cache's own (default: fp32)",
            checked(_row_kind, "a kind"), "KIND", default=["fp32"], nargs="+")
    _add_target(parser, "where kernels run")
    option(parser, "--head-dim", "elements of a row of K and of V (default: 128)", at_least(2), "N", default=128)
    flag(parser, "--rotate", "also kernels of caches with rotate=True")
    flag(parser, "--residual", "also kernels of quantised caches with some tokens in full precision")
    parser.add_argument("--processes", type=int, default=1, help="number of processes that compile (default: 1)")
    option(parser, "--export", "write CUDA kernels to FILE, for another machine; this one needs no GPU", Path, "FILE")
    option(parser, "--arch", "with --export: the other machine's GPU: sm_80, sm_90", metavar="NAME")
    option(parser, "--load", "take the CUDA kernels that --export has written", Path, "FILE", nargs="+")


def _add_cache(parser: argparse.ArgumentParser) -> None:
    flag(parser, "--clear", "remove the files of kernels, those of other versions too, and nothing else")
    flag(parser, "--stale", "with --clear: remove only kernels of other versions of numkv's sources")


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="+", type=Path, metavar="FILE", help="a saved cache")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(title="what to time", prog="numkv bench", required=True)
    bench.add_options(
        what.add_parser(
            "transformers", help="a model of Hugging Face's transformers with random weights",
            description="Build a model with random weights from a config (nothing is downloaded), fill each "
            "contestant's cache to a context, and time decode steps in turns: DynamicCache, StaticCache and "
            "QuantizedCache with SDPA, turboquantcpu, numkv in the kinds asked for, and the model without attention. "
            "What is not installed is named as absent. Nothing else should be running.",
        )
    )


#: By name: what runs it, what adds its options, a line on it, and its description.
_COMMANDS: dict[str, tuple[Any, Callable[[argparse.ArgumentParser], None], str, str]] = {
    "info": (
        info.run, lambda parser: None, "versions, targets, threads, kernel cache, for a bug report",
        "Print the facts about this machine for a bug report.",
    ),
    "plan": (
        plan.run, _add_plan, "bytes of a token and a sequence of a model, and how many fit into memory",
        "Print the bytes of a token and a sequence in each kind of cache, and how many fit into a given "
        "memory. Pass a model's config.json, or its sizes. Windows, chunks, latents, shared rows, states and "
        "cross attention are counted; entries that are not understood are listed as NOT KNOWN.",
    ),
    "eval": (
        evaluate.run, _add_eval, "bits per byte, KL divergence and agreement of cache kinds on held-out text",
        "Measure the quality of cache kinds against an fp32 cache, at full "
        "context, on modules of the standard library that the bundled model never saw.",
    ),
    "accuracy": (
        accuracy.run, _add_accuracy,
        "error, recall and bytes of storage kinds and compressed heads, as tables and a picture",
        "Measure the quality of caches: bits per byte, KL divergence and agreement of the model's "
        "predictions at full context, recall of names from far back, and the error of attention over random "
        "rows. Takes about a quarter of an hour with the defaults: see --add.",
    ),
    "fit": (
        fit.run, _add_fit, "choose storage kinds for each layer of your checkpoint, under a budget of bytes",
        "Run a text through a model, store K and V of each layer in each kind, and choose the kinds that change its "
        "predictions least. The result is a profile, for numkv.transformers.use(model, profile=...).",
    ),
    "stream": (
        stream.run, _add_stream, "continue a text beyond its context: keep the first tokens, drop the middle, shift",
        "Continue a text beyond the room of its cache. When the cache is full, the first tokens stay, half of "
        "the others are dropped, and the later keys are shifted. No token is computed again.",
    ),
    "warmup": (
        cache.warm_up, _add_warmup, "compile the kernels of some storage kinds ahead of time",
        "Compile kernels to the cache on disk, so that programs need not wait for the compiler. Kernels "
        "serve every head dim, group of query heads and block size: only kinds matter.",
    ),
    "cache": (
        cache.run, _add_cache,
        "list compiled kernels on disk with their bytes, and remove them",
        "List the folders of compiled kernels, with the number of files and of bytes. Kernels are machine "
        "code that numkv runs: a warning names folders that others can write to. Cleared kernels are compiled "
        "anew when they are needed.",
    ),
    "show": (
        show.run, _add_show, "draw the contents of a file of `numkv.save`: blocks, sequences, bytes",
        "Draw saved caches: their blocks, cells or tokens, their sequences and bytes. A "
        "damaged file is refused with the reason.",
    ),
    "bench": (
        None, _add_bench, "tokens per second of a whole model in transformers, numkv and transformers' own caches",
        "Time models.",
    ),
}
# fmt: on
