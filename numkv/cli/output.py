"""What commands print: tables, sizes, progress."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from numkv.drawing.picture import format_bytes


class Size(int):
    """A number of bytes, and in which units sizes beside it are written: in those that it was given in.

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
    """Something the user can put right; printed as one line."""


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


def styled(text: str, style: str, stream: TextIO) -> str:
    """Text in an ANSI style for a terminal, unless ``NO_COLOR`` is set (https://no-color.org)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    return text if plain else f"\x1b[{style}m{text}\x1b[0m"


@contextmanager
def stoppable(what: str) -> Iterator[list[bool]]:
    """In this context Ctrl-C makes the list that it yields non-empty: work stops soon, and its results are shown.

    A second one interrupts at once, as does the first outside of the main thread.
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


class Progress:
    """A line on stderr that says what takes so long; work of less than a second shows none.

    On a terminal the line is redrawn in place and removed at the end. Elsewhere a new line is
    written every few seconds.

    Parameters
    ----------
    what : str
        The work.
    stream : file, optional
        Where to write; stderr by default.
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
        """Note how far the work is; cheap enough for any loop.

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


class KernelProgress(logging.Handler):
    """A `Progress` that names the kernel being compiled, as the library logs it.

    As this listens to the log, the library writes no lines of its own.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._progress = Progress("compiling kernels (first run only)")
        self._logger = logging.getLogger("numkv.kernels")

    def emit(self, record: logging.LogRecord) -> None:
        """Show a log record."""
        verb, _, kernel = record.getMessage().partition(" ")
        if verb == "compiling":
            self._progress.detail = kernel

    def __enter__(self) -> KernelProgress:
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__(*error)
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)
