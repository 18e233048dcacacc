"""Growing texts, and a live panel of the cache below them.

The text scrolls in the upper part of a terminal, by the terminal's own margins (DECSTBM), so nothing is drawn twice.
There is no panel without a terminal, on a dumb or small one, or with ``NO_COLOR``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from numkv.demo.cache import LayerCache
from numkv.demo.evaluate import Document
from numkv.demo.stream import ShiftingCache
from numkv.demo.tokenizer import Tokenizer
from numkv.drawing.describe import picture_of
from numkv.drawing.picture import format_bytes, plural
from numkv.drawing.text import has_graphics, text_of

#: Control characters could move the cursor; the text shows a sign in their place.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), 127) if code not in (9, 10)}
_MAX_PROMPT_LINES = 20


def show(text: str) -> None:
    """Print any text at once.

    Parameters
    ----------
    text : str
        The text.
    """
    print(text.translate(_CONTROLS), end="", flush=True)


class Screen:
    """Prints texts one below the other, although all of them grow at the same time.

    One text is shown while it grows; tokens of later texts wait until it has ended. Several texts have a line with
    their names, as in ``head`` and ``tail``.

    Parameters
    ----------
    tokenizer : Tokenizer
        Converts tokens to text.
    texts : sequence of Document
        The prompts.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[Document]) -> None:
        self._texts = texts
        self._streams = [tokenizer.stream() for _ in texts]
        self._waiting = ["" for _ in texts]
        self._ended = [False for _ in texts]
        self._current = 0
        self._begin()

    def show(self, text: int, token: int | None) -> None:
        """Show a token, at once or when it is the text's turn.

        Parameters
        ----------
        text : int
            Number of the text.
        token : int or None
            Its next token; None for its end.
        """
        stream = self._streams[text]
        self._ended[text] = token is None
        self._waiting[text] += stream.finish() + "\n\n" if token is None else stream.push(token)
        while text == self._current < len(self._texts):
            show(self._waiting[text])
            self._waiting[text] = ""
            if not self._ended[text]:
                return
            self._current = text = text + 1
            self._begin()

    def _begin(self) -> None:
        """Show the prompt of the current text, or its end if it is long."""
        if self._current == len(self._texts):
            return
        text = self._texts[self._current]
        if len(self._texts) > 1:
            show(f"==> {text.name} <==\n")
        lines = text.text.splitlines(keepends=True)
        hidden = len(lines) - max(_MAX_PROMPT_LINES // len(self._texts), 3)
        if hidden > 0:
            show(f"[… {hidden:,} lines]\n")
        show("".join(lines[max(hidden, 0) :]))


_LINES = 7
_LEAST = (40, 16)
_SECONDS = 0.1
_SAVE, _RESTORE, _DOWN = "\x1b7", "\x1b8", "\x1bD"


class Live:
    """The panel at the bottom of a terminal, shown within a ``with`` block.

    Parameters
    ----------
    draw : callable
        Returns the lines of the panel, given the tokens generated so far, the seconds and the width.
    """

    def __init__(self, draw: Callable[[int, float, int], Sequence[str]]) -> None:
        self._draw = draw
        self._size = _size()
        self._begun = self._drawn = 0.0
        self._tokens = 0

    def __enter__(self) -> Live:
        self._begun = time.monotonic()
        if self._size is not None:
            # Make room below the cursor, and save its position, because margins move it.
            _write(_DOWN * _LINES + f"\x1b[{_LINES}A" + _SAVE + self._margins() + _RESTORE)
            self._show()
        return self

    def token(self) -> None:
        """Count a token, and redraw the panel if it is time."""
        self._tokens += 1
        if self._size is not None and time.monotonic() - self._drawn >= _SECONDS:
            now = _size()
            if now is not None and now != self._size:
                self._size = now
                _write("\x1b[r" + self._margins() + f"\x1b[{now[1] - _LINES};1H")
            self._show()

    def __exit__(self, *error: object) -> None:
        if self._size is not None:
            first = self._size[1] - _LINES + 1
            cleared = "".join(f"\x1b[{row};1H\x1b[2K" for row in range(first, self._size[1] + 1))
            _write(_SAVE + "\x1b[r" + cleared + _RESTORE)

    def _margins(self) -> str:
        assert self._size is not None
        return f"\x1b[1;{self._size[1] - _LINES}r"

    def _show(self) -> None:
        assert self._size is not None
        columns, rows = self._size
        self._drawn = time.monotonic()
        lines = list(self._draw(self._tokens, self._drawn - self._begun, columns - 1))[:_LINES]
        lines += [""] * (_LINES - len(lines))
        first = rows - _LINES + 1
        drawn = "".join(f"\x1b[{first + i};1H\x1b[2K{line}" for i, line in enumerate(lines))
        _write(_SAVE + drawn + _RESTORE)


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _size() -> tuple[int, int] | None:
    """Return columns and rows of the terminal; None if there is none to draw on."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return None
    try:
        if not sys.stdout.isatty():
            return None
        size = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return None
    fits = size.columns >= _LEAST[0] and size.lines >= _LEAST[1]
    return (size.columns, size.lines) if fits else None


def panel(cache: Any) -> Callable[[int, float, int], Sequence[str]]:
    """Return the function that draws a cache of the demo, for `Live`.

    Parameters
    ----------
    cache : numkv.demo.cache.Cache
        The cache.

    Returns
    -------
    callable
        See `Live`.
    """
    graphics = has_graphics(sys.stdout)

    def draw(tokens: int, seconds: float, width: int) -> Sequence[str]:
        shown, layers = cache, 1
        if isinstance(cache, LayerCache):
            shown, layers = cache.layers[0], len(cache.layers)
        elif isinstance(cache, ShiftingCache):
            shown = cache.cells
        nbytes = shown.nbytes * layers
        facts = [
            f"{plural(tokens, 'token')} generated, {tokens / max(seconds, 1e-9):,.0f} a second",
            f"cache of {format_bytes(nbytes)}",
        ]
        if isinstance(cache, ShiftingCache):
            dropped = sum(shift.end - shift.begin for shift in cache.shifts)
            facts.append(f"{plural(len(cache.shifts), 'shift')}, {dropped:,} tokens dropped")
        rule = "\N{BOX DRAWINGS LIGHT HORIZONTAL}" if graphics else "-"
        head = f"{rule * 2} {'; '.join(facts)} "
        lines = text_of(picture_of(shown), width, graphics).splitlines()[1:]
        if len(lines) > _LINES - 1:  # the first of many sequences, and the legend
            lines = [*lines[: _LINES - 2], lines[-1]]
        return [head[:width].ljust(width, rule), *lines]

    return draw
