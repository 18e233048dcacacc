"""The command line: ``python -m numkv`` or ``numkv``.

One file per command; this one reads the arguments and turns errors into one line and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numkv
from numkv.cli import (
    accuracy,
    bench,
    cache,
    evaluate,
    generate,
    info,
    plan,
    plan_nodes,
    show,
    stream,
    warmup,
)
from numkv.cli.output import UsageError
from numkv.demo import BUNDLED_MODEL
from numkv.demo.cache import CacheChoice
from numkv.demo.compressed import parse_cache
from numkv.demo.sharded import WAYS
from numkv.errors import NotSupported, NumkvError
from numkv.kinds import kinds
from numkv.planning.scale import Network

__all__ = ["main"]

T = TypeVar("T")

_DESCRIPTION = """\
Generate text with a small language model whose KV cache is numkv's, and say what the cache cost.

Without arguments the bundled model, which has read the Python standard library, continues a few
lines of Python. The text and the table go to stdout, progress to stderr.
"""
_EPILOG = """\
examples:
  numkv --prompt 'class Stack:' --tokens 200 --temperature 0
  numkv --kind int8 fp16                  compare kinds on the same text
  numkv --file a.py --file b.py           a batch; a common beginning is stored once
  numkv --shards 2 --by context           the cache divided among two processes
  numkv stream --context 256 --keep 64    a text that outlives its context
  numkv --model ~/models/Qwen3-0.6B --prompt 'The capital of France is'
  numkv plan ~/models/Qwen3-0.6B --memory 4GiB
  numkv show prompt.kv                    draw a saved cache
  numkv bench transformers --context 16384    tokens per second of a whole model
"""
# What may follow a kind.
_MORE = "; behind it +rotate, +windowN, +sinksN"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


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
    except (UsageError, NumkvError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"numkv: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nnumkv: interrupted", file=sys.stderr)
        return 130
    return 0


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror.lower()}"
    return " ".join(str(error).split())


def _print_anywhere() -> None:
    """Let what is printed to a closed stream go nowhere, and a terminal show a question mark for what it cannot."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (for as long as the process runs)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    for output in (sys.stdout, sys.stderr):
        reconfigure = getattr(output, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def _checked(convert: Callable[[str], T], what: str) -> Callable[[str], T]:
    """An argparse type whose error says what was expected."""

    def check(text: str) -> T:
        try:
            return convert(text)
        except NumkvError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}") from None

    return check


def _at_least(smallest: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        number = int(text.replace(",", "").replace("_", ""))
        if number < smallest:
            raise ValueError(text)
        return number

    return _checked(convert, f"an integer of {smallest} or more")


def _temperature(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError(text)
    return number


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=Path,
        default=BUNDLED_MODEL,
        metavar="DIR",
        help="folder of a Qwen3 or Llama checkpoint in Hugging Face format (default: bundled)",
    )
    parser.add_argument(
        "--target", choices=("cpu", "cuda"), default="cpu", help="where the cache lives"
    )


def _plain_kind(text: str) -> CacheChoice:
    choice = CacheChoice.parse(text)
    if choice.options:
        raise NotSupported(
            f"expected a kind alone, got {text!r}; `numkv eval` and `numkv accuracy` take what follows a '+'"
        )
    return choice


def _row_kind(text: str) -> str:
    kind = numkv.kind(text)
    if not kind.is_query:
        raise NotSupported(f"expected a kind that new rows may have, got {kind}")
    return kind.name


def _add_kind_option(
    parser: argparse.ArgumentParser,
    default: list[str],
    what: str,
    parse: Callable[[str], Any] = _plain_kind,
    more: str = "",
) -> None:
    names = ", ".join(kind.name for kind in kinds())
    parser.add_argument(
        "--kind",
        nargs="+",
        default=[parse(name) for name in default] or None,
        type=_checked(parse, "a kind"),
        metavar="KIND",
        help=f"{what}: {names}, or K/V such as int8/fp16{more} (default: {' '.join(default) or 'all that fit'})",
    )


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--temperature",
        type=_checked(_temperature, "0 or more"),
        default=generate.DEFAULT_TEMPERATURE,
        metavar="T",
        help="0 takes the most probable token, more is more varied (default: %(default)s)",
    )
    parser.add_argument(
        "--top-k",
        type=_at_least(0),
        default=generate.DEFAULT_TOP_K,
        metavar="K",
        help="choose among the K most probable tokens, 0 among all (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="the same seed gives the same text (default: %(default)s)",
    )


def _parser() -> argparse.ArgumentParser:
    text: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = _Parser(prog="numkv", description=_DESCRIPTION, epilog=_EPILOG, **text)
    parser.add_argument("--version", action="version", version=f"numkv {numkv.__version__}")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue; given more than once, all texts are one batch",
    )
    source.add_argument(
        "--file",
        action="append",
        type=Path,
        metavar="PATH",
        help="file with the text to continue; given more than once, all texts are one batch",
    )
    parser.add_argument(
        "--tokens",
        type=_at_least(1),
        default=generate.DEFAULT_TOKENS,
        metavar="N",
        help="tokens to generate at most; the bundled model's are bytes (default: %(default)s)",
    )
    _add_kind_option(
        parser, ["fp16"], "storage kind of the cache; with several, the others repeat the text"
    )
    parser.add_argument(
        "--block-size",
        type=_at_least(1),
        metavar="N",
        help="keep the cache in blocks of N tokens (default: contiguous for one text, blocks of "
        f"{generate.DEFAULT_BLOCK_SIZE} for several, which share those of a common beginning)",
    )
    parser.add_argument(
        "--shards",
        type=_at_least(1),
        metavar="N",
        help="divide the cache among N actors of Ray, which needs the extra ray; other kinds stay in one process",
    )
    parser.add_argument(
        "--by", choices=WAYS, default=WAYS[0], help="what --shards divides (default: %(default)s)"
    )
    _add_model_options(parser)
    _add_sampling_options(parser)
    parser.set_defaults(run=generate.run)
    commands = parser.add_subparsers(title="other commands", prog="numkv")
    _add_info(commands)
    _add_plan(commands)
    _add_eval(commands)
    _add_accuracy(commands)
    _add_stream(commands)
    _add_warmup(commands)
    _add_cache(commands)
    _add_show(commands)
    _add_bench(commands)
    return parser


def _add_info(commands: Any) -> None:
    parser = commands.add_parser(
        "info",
        help="versions, targets, threads, kernel cache: what to paste into a bug report",
        description="Print what a bug report needs to know about this machine.",
    )
    parser.set_defaults(run=info.run)


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="what a model keeps of a token and of a sequence, and how many fit in a given memory",
        description="Say how many bytes a token and a sequence cost in each kind of cache, and how many fit in a "
        "given memory. Give a model's config.json, or its sizes. Windows, chunks, latents, layers that share "
        "another's rows, states and cross attention are counted as they are; entries that are not understood "
        "are named as NOT KNOWN.",
    )
    parser.add_argument(
        "path", nargs="?", type=Path, metavar="CONFIG", help="a config.json, or the folder it is in"
    )
    parser.add_argument("--config", type=Path, metavar="PATH", help="the same")
    for option, meaning in (
        ("--layers", "layers that have a KV cache"),
        ("--kv-heads", "key/value heads of a layer"),
        ("--head-dim", "elements of a key (and of a value)"),
        ("--head-dim-v", "elements of a value, where they differ"),
    ):
        parser.add_argument(option, type=_at_least(1), metavar="N", help=meaning)
    parser.add_argument(
        "--memory",
        type=_checked(plan.parse_bytes, "a size such as 8GiB or 500MB"),
        default=plan.DEFAULT_MEMORY,
        metavar="SIZE",
        help="memory for the cache: 8GiB, 500MB, … (default: 8GiB)",
    )
    parser.add_argument(
        "--tokens", type=_at_least(1), metavar="N", help="also say what N tokens need"
    )
    parser.add_argument(
        "--context",
        nargs="+",
        type=_at_least(1),
        metavar="N",
        help="lengths of sequences to list (default: 4,096, 32,768 and the model's)",
    )
    parser.add_argument(
        "--block-size", type=_at_least(1), metavar="N", help="round up to blocks of N tokens"
    )
    parser.add_argument("--key-bounds", action="store_true", help="count bounds of keys, too")
    parser.add_argument(
        "--source-tokens",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="tokens of the text that a decoder with cross attention reads (default: 0)",
    )
    parser.add_argument(
        "--expanded",
        action="store_true",
        help="count latent attention with K and V of every head, not its latents",
    )
    _add_kind_option(parser, [], "kinds to list")
    _add_nodes_options(parser)
    parser.set_defaults(run=plan.run)


def _add_nodes_options(parser: argparse.ArgumentParser) -> None:
    nodes = parser.add_argument_group("a cache that is sharded over nodes")
    nodes.add_argument(
        "--nodes",
        nargs="+",
        type=_at_least(1),
        metavar="N",
        help="model decode steps on N nodes instead: 8 64 1024; --memory is a node's, --context the sequences' length",
    )
    count, network = _at_least(1), Network()
    seconds = _checked(plan_nodes.parse_seconds, "a time such as 300us")
    size = _checked(plan.parse_bytes, "a size such as 10GB")
    options: list[tuple[str, Any, str, Any, str]] = [
        ("--batch", count, "N", plan_nodes.DEFAULT_BATCH, "sequences that are decoded at once"),
        ("--q-heads", count, "N", None, "query heads of a layer; the config's, or four for each key/value head"),
        ("--latency", seconds, "TIME", network.latency, "of a message and its answer; perf.ray_steps measures it"),
        ("--message", seconds, "TIME", network.message, "what a message costs the process that sends it: 300us, 1ms"),
        ("--bandwidth", size, "SIZE", network.bandwidth, "of a node's link, in a second: 1.25GB"),
        ("--memory-bandwidth", size, "SIZE", network.memory_bandwidth, "rows that a node attends to, in a second"),
        ("--weights", size, "SIZE", None, "the model's, read once a step by each group's caller; else the config's"),
    ]  # fmt: skip
    for option, kind, metavar, default, meaning in options:
        nodes.add_argument(option, type=kind, default=default, metavar=metavar, help=meaning)
    nodes.add_argument("--picture", type=Path, metavar="PATH", help="also draw it, with matplotlib")


def _add_eval(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="bits per byte, KL divergence and agreement of cache kinds on held-out text",
        description="Measure what cache kinds cost in quality against an fp32 cache, at full "
        "context, on modules of the standard library that the bundled model never saw.",
    )
    _add_kind_option(parser, ["fp16", "bf16", "int8"], "kinds to judge", CacheChoice.parse, _MORE)
    _add_model_options(parser)
    _add_text_options(parser, None, "only these held-out modules, such as csv")
    parser.set_defaults(run=evaluate.run)


def _add_accuracy(commands: Any) -> None:
    parser = commands.add_parser(
        "accuracy",
        help="error, recall and bytes of storage kinds and compressed heads, as tables and a picture",
        description="Measure what caches cost in quality: bits per byte, KL divergence and agreement of the model's "
        "predictions at full context, how well it copies names from far back, and the error of attention over random "
        "rows. Takes about a quarter of an hour with the defaults: see --add.",
    )
    _add_kind_option(
        parser,
        accuracy.DEFAULT_CACHES,
        "caches to judge",
        parse_cache,
        f"{_MORE}; or codesN and codesN+sketch, heads compressed to N bits; or lastN, the newest N tokens alone",
    )
    _add_model_options(parser)
    _add_text_options(
        parser,
        accuracy.DEFAULT_MODULES,
        f"these held-out modules, or all (default: {' '.join(accuracy.DEFAULT_MODULES)})",
    )
    parser.add_argument(
        "--windows",
        type=_at_least(0),
        default=accuracy.DEFAULT_WINDOWS,
        metavar="N",
        help="windows to predict of each text, 0 for all (default: %(default)s)",
    )
    parser.add_argument(
        "--needles",
        type=_at_least(1),
        default=accuracy.DEFAULT_NEEDLES,
        metavar="N",
        help="texts with names to copy, 8 in each (default: %(default)s)",
    )
    parser.add_argument(
        "--rows",
        type=_at_least(accuracy.LEAST_ROWS),
        default=accuracy.DEFAULT_ROWS,
        metavar="N",
        help="tokens of the random rows (default: %(default)s)",
    )
    what = "also write accuracy.md and accuracy.json there and, where matplotlib is installed, accuracy.svg"
    parser.add_argument("--out", type=Path, metavar="DIR", help=what)
    parser.add_argument(
        "--add",
        nargs="+",
        type=Path,
        metavar="JSON",
        help="show the caches of these accuracy.json too, of reports with the same options but --kind",
    )
    parser.set_defaults(run=accuracy.run)


def _add_text_options(
    parser: argparse.ArgumentParser, modules: list[str] | None, what: str
) -> None:
    parser.add_argument("--modules", nargs="+", default=modules, metavar="NAME", help=what)
    parser.add_argument(
        "--file",
        action="extend",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="these texts instead of the modules",
    )
    parser.add_argument(
        "--context",
        type=_at_least(2),
        metavar="N",
        help="tokens in a window (default: the model's context)",
    )


def _add_stream(commands: Any) -> None:
    parser = commands.add_parser(
        "stream",
        help="a text that outlives its context: keep the first tokens, drop the middle, shift",
        description="Continue a text for longer than the cache has room for. Whenever it is full, the first "
        "tokens stay, half of the others are dropped, and the keys behind the gap are shifted, so that nothing "
        "is computed again.",
    )
    parser.add_argument(
        "--prompt",
        default=generate.DEFAULT_PROMPT,
        metavar="TEXT",
        help="text to continue (default: a few lines of Python)",
    )
    for option, smallest, default, meaning in (
        ("--context", 2, stream.DEFAULT_CONTEXT, "tokens that the cache has room for"),
        ("--keep", 0, stream.DEFAULT_KEEP, "first tokens that always stay"),
        ("--tokens", 1, stream.DEFAULT_TOKENS, "tokens to generate at most"),
    ):
        parser.add_argument(
            option,
            type=_at_least(smallest),
            default=default,
            metavar="N",
            help=f"{meaning} (default: %(default)s)",
        )
    parser.add_argument(
        "--kind",
        default=CacheChoice.parse("fp16"),
        type=_checked(_plain_kind, "a kind"),
        metavar="KIND",
        help="storage kind of the cache (default: fp16)",
    )
    _add_model_options(parser)
    _add_sampling_options(parser)
    parser.set_defaults(run=stream.run)


def _add_warmup(commands: Any) -> None:
    parser = commands.add_parser(
        "warmup",
        help="compile the kernels of some storage kinds ahead of time",
        description="Fill the kernel cache on disk, so that no program has to wait for the compiler. Kernels "
        "serve every head dim, group of query heads and block size: only kinds matter.",
    )
    _add_kind_option(parser, ["fp16"], "storage kinds of caches")
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=["fp32"],
        type=_checked(_row_kind, "a kind"),
        metavar="KIND",
        help="float kinds of new rows and queries, beside the cache's own (default: fp32)",
    )
    parser.add_argument(
        "--target", choices=("cpu", "cuda"), default="cpu", help="where kernels run"
    )
    parser.add_argument(
        "--rotate", action="store_true", help="also kernels of caches with rotate=True"
    )
    parser.add_argument(
        "--residual",
        action="store_true",
        help="also kernels of quantised caches that keep some tokens in full precision",
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="how many processes compile (default: 1)"
    )
    parser.set_defaults(run=warmup.run)


def _add_cache(commands: Any) -> None:
    parser = commands.add_parser(
        "cache",
        help="where compiled kernels lie on disk, how many bytes they take, and how to clear them away",
        description="Name the folders of compiled kernels, with the number of files and of bytes. Kernels are machine "
        "code that numkv runs: it says so where others can write there. What is cleared is compiled again when it "
        "is needed.",
    )
    parser.add_argument(
        "--clear",
        action="store_true",
        help="remove the files of kernels, those of other versions too, and nothing else",
    )
    parser.add_argument(
        "--stale",
        action="store_true",
        help="with --clear: only those that were made of other sources than these",
    )
    parser.set_defaults(run=cache.run)


def _add_show(commands: Any) -> None:
    parser = commands.add_parser(
        "show",
        help="draw what is in a file that `numkv.save` wrote: blocks, sequences, bytes",
        description="Draw saved caches: their blocks, cells or tokens, the sequences, and how many bytes they take. A "
        "damaged file is refused with the reason.",
    )
    parser.add_argument("path", nargs="+", type=Path, metavar="FILE", help="a saved cache")
    parser.set_defaults(run=show.run)


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="tokens per second of a whole model in transformers, numkv beside transformers' own caches",
        description="Time models.",
    )
    what = parser.add_subparsers(title="what to time", prog="numkv bench", required=True)
    bench.add_options(
        what.add_parser(
            "transformers",
            help="a model of Hugging Face's transformers with random weights",
            description="Build a model with random weights from a config (nothing is downloaded), fill each "
            "contestant's cache to a context, and time decode steps in turns: DynamicCache, StaticCache and "
            "QuantizedCache with SDPA, turboquantcpu, numkv in the kinds asked for, and the model without attention. "
            "What is not installed is named as absent. Nothing else should be running.",
        )
    )
