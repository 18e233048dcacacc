"""Input and output of commands: options, tables, sizes, progress, pictures."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import logging
import math
import os
import platform
import re
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

import llvmlite.binding as llvm

from numkv.demo.cache import CacheFactory
from numkv.demo.model import Model
from numkv.drawing.picture import format_bytes
from numkv.errors import NumkvError
from numkv.numbers import parse_size


class Size(int):
    """A number of bytes that remembers its units, in which related sizes are written.

    Parameters
    ----------
    size : number
        Bytes.
    decimal : bool
        Whether it was given in powers of 1000 (MB, GB) and not of 1024 (MiB, GiB).
    """

    decimal: bool

    def __new__(cls, size: Any, decimal: bool = False) -> Size:
        made = super().__new__(cls, size)
        made.decimal = decimal
        return made

    @classmethod
    def parse(cls, text: str) -> Size:
        """Read a size; see `numkv.numbers.parse_size`. It is written in the same units again."""
        size = cls(*parse_size(text))
        if size > sys.maxsize:
            raise ValueError(f"{text} is not a size of any memory")
        return size

    def text(self, size: int | None = None) -> str:
        """Write a size, this one if none is given.

        Parameters
        ----------
        size : int, optional
            Bytes.

        Returns
        -------
        str
        """
        return format_bytes(int(self) if size is None else size, self.decimal)


class UsageError(Exception):
    """An error that the user can correct; printed as one line."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay cells out in columns: the first to the left, the others to the right.

    Parameters
    ----------
    header : sequence of str
        Titles of the columns.
    rows : sequence of sequence of str
        Cells.

    Returns
    -------
    str
        Lines, the header underlined, and bold on a terminal.
    """
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, rule, *rows)
    ]
    return "\n".join((styled(lines[0], "1", sys.stdout), *lines[1:]))


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,)
) -> str:
    """Return the same table in Markdown; columns outside of `left` are aligned on the right."""
    rule = ["---" if i in left else "--:" for i in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def wrapped(text: str, width: int = 120, indent: str = "") -> str:
    """Wrap a paragraph, with `indent` from the second line on; a percent sign stays with its number."""
    bound = text.replace(" %", "\N{NO-BREAK SPACE}%")
    lines = textwrap.fill(
        bound, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines.replace("\N{NO-BREAK SPACE}", " ")


def styled(text: str, style: str, stream: TextIO) -> str:
    """Return text in an ANSI style for a terminal, unless ``NO_COLOR`` is set (https://no-color.org)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    return text if plain else f"\x1b[{style}m{text}\x1b[0m"


@contextmanager
def stoppable(what: str) -> Iterator[list[bool]]:
    """Handle Ctrl-C in this context: the first fills the yielded list, so that work can stop and show its results.

    A second Ctrl-C interrupts at once, as does the first outside of the main thread.
    """
    asked: list[bool] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        asked.append(True)
        print(f"\nnumkv: {what}; once more to stop at once", file=sys.stderr)

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


class SoFar:
    """A table that fills while a command measures; an interrupt in this context carries it, for ``main`` to print.

    Parameters
    ----------
    *header : str
        The columns; the first one names the rows.
    """

    def __init__(self, *header: str) -> None:
        self._header = header
        self._rows: dict[str, dict[str, str]] = {}

    def note(self, row: str, column: str, text: str) -> None:
        """Fill a cell.

        Parameters
        ----------
        row, column : str
            Names of its row and column.
        text : str
            The cell's text.
        """
        self._rows.setdefault(row, dict.fromkeys(self._header[1:], ""))[column] = text

    def __enter__(self) -> SoFar:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is KeyboardInterrupt and self._rows:
            cells = [(name, *row.values()) for name, row in self._rows.items()]
            raise KeyboardInterrupt(table(self._header, cells)) from None


class Progress:
    """A line on stderr that names slow work; work of less than a second shows none.

    On a terminal the line is redrawn in place and removed at the end. Elsewhere a new line is
    written every few seconds.

    Parameters
    ----------
    what : str
        Name of the work.
    stream : file, optional
        Output; stderr by default.
    """

    DELAY = 1.0
    FORECAST = 5.0

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self.what = what
        self.detail, self._share = "", 0.0
        self._stream = sys.stderr if stream is None else stream
        self._in_place = self._stream.isatty()
        self._started = time.monotonic()
        self._drawn = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._draw_until_done, daemon=True)

    def update(self, done: int, total: int) -> None:
        """Record the progress of the work; cheap enough for any loop.

        Parameters
        ----------
        done, total : int
            Units of work.
        """
        self.detail = f"{100 * done // total:3d} %"
        self._share = done / total

    def _draw_until_done(self) -> None:
        wait = self.DELAY
        while not self._done.wait(wait):
            seconds = time.monotonic() - self._started
            line = f"{self.what}… {self.detail}  {seconds:.0f} s"
            if 0 < self._share < 1 and seconds >= self.FORECAST:
                line += f", about {seconds / self._share - seconds:.0f} s left"
            if self._in_place:
                line = line[: shutil.get_terminal_size().columns - 1]  # a wrapped line would stay
                print(f"\r{line.ljust(self._drawn)}", end="", file=self._stream, flush=True)
                self._drawn = len(line)
                wait = 0.2
            else:
                print(line, file=self._stream, flush=True)
                wait = 5.0

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        if self._drawn:
            print(f"\r{' ' * self._drawn}\r", end="", file=self._stream, flush=True)


@contextmanager
def listening_to_kernels(tell: Callable[[str], None]) -> Iterator[None]:
    """Call a function with the name of each kernel compiled in this context, instead of the library's own lines."""
    logger = logging.getLogger("numkv.kernels")
    handler, level = logging.Handler(logging.INFO), logger.level
    handler.emit = lambda record: tell(record.getMessage())  # type: ignore[method-assign]
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def kernel_progress() -> Iterator[Progress]:
    """Yield a `Progress` that names the kernel being compiled."""

    def tell(message: str) -> None:
        verb, _, kernel = message.partition(" ")
        if verb == "compiling":
            progress.detail = kernel

    progress = Progress("compiling kernels (first run only)")
    with listening_to_kernels(tell), progress:
        yield progress


def warm_up(model: Model, caches: Iterable[CacheFactory | None], target: str) -> None:
    """Load or compile kernels first, so that their time is not counted."""
    with kernel_progress():
        for cache in caches:
            model.warm_up(cache, target)


def read_text(path: Path, name: str) -> str:
    """Return the text of a file; raise `UsageError` with this name if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{name}: not UTF-8 text") from None


def load_model(path: Path) -> Model:
    """Load a checkpoint, with a progress line."""
    with Progress(f"loading {path}") as progress:
        return Model.load(path, progress.update)


def cpu_name() -> str:
    """Return the system's name of the CPU, which virtual machines often shorten, and LLVM's."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        listing = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^model name\s*: *(.+)", listing, re.M):
            name = found[1].strip()
    return f"{name} ({llvm.get_host_cpu_name()})"


def version_of(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def check_place(name: str, path: Path | None) -> None:
    """Raise `UsageError`, before any work, if a result is to be written where no file can be."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise UsageError(f"{name}: expected a file in a folder that exists, got {path}")


def check_picture(path: Path | None) -> None:
    """Raise `UsageError`, before any work, if a picture is wanted that cannot be drawn."""
    if path is None:
        return
    if path.suffix not in (".png", ".svg"):
        raise UsageError(f"--picture: expected a name that ends in .png or .svg, got {path}")
    if not is_installed("matplotlib"):
        raise UsageError(
            "--picture needs matplotlib, which is not installed; try pip install matplotlib"
        )


def page_head(
    title: str, about: str, how: str, path: Path, picture: Path | None, caption: str
) -> list[str]:
    """Return the first paragraphs of a page in the file `path`: title and date, facts, method, picture."""
    date = datetime.date.today().isoformat()
    head = [f"# {date}: {title}", wrapped(" ".join(about.split())), wrapped(" ".join(how.split()))]
    if picture is not None:
        head.append(f"![{caption}]({os.path.relpath(picture, path.parent).replace(os.sep, '/')})")
    return head


def save_figure(figure: Any, path: Path, **options: Any) -> None:
    """Write a figure of matplotlib reproducibly; the suffix is the format."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "numkv", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, **options)


T = TypeVar("T")


def checked(convert: Callable[[str], T], what: str) -> Callable[[str], T]:
    """Return an argparse type whose error names the expected value."""

    def check(text: str) -> T:
        try:
            return convert(text)
        except NumkvError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}") from None

    return check


def at_least(smallest: int, most: int = sys.maxsize) -> Callable[[str], int]:
    def convert(text: str) -> int:
        number = int(text.replace(",", "").replace("_", ""))
        if not smallest <= number <= most:
            raise ValueError(text)
        return number

    return checked(
        convert, f"an integer of {smallest} {'or more' if most == sys.maxsize else f'to {most:,}'}"
    )


def positive(*, or_zero: bool = False) -> Callable[[str], float]:
    """Return an argparse type of finite numbers above 0, or of 0 too."""

    def convert(text: str) -> float:
        number = float(text)
        if not (0 < number < math.inf or (or_zero and number == 0)):
            raise ValueError(text)
        return number

    return checked(convert, "0 or more" if or_zero else "more than 0")


def option(
    parser: Any, name: str, meaning: str, of: Any = None, metavar: str | None = None, *,
    default: Any = None, **more: Any,
) -> None:  # fmt: skip
    """Add an option; its help ends with its default if there is one."""
    if of is not None:
        more["type"] = of
    if metavar is not None:
        more["metavar"] = metavar
    if default is not None and "(default: " not in meaning:
        meaning += " (default: %(default)s)"
    parser.add_argument(name, default=default, help=meaning, **more)


def flag(parser: Any, name: str, meaning: str) -> None:
    """Add an option without a value."""
    parser.add_argument(name, action="store_true", help=meaning)
