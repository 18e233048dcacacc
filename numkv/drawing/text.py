"""Drawings as text: `show`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from numkv.drawing.describe import picture_of
from numkv.drawing.picture import Picture, State

_MARGIN = 9
_MOST_LINES = 3
#: Lines for sequences; of more there are the first ones.
_MOST_SEQUENCES = 12


def show(cache: Any, *, file: TextIO | None = None) -> None:
    """Draw a cache: its blocks, cells or tokens, its sequences and its memory.

    Every sign stands for a block, a cell or a token; in caches too large for that, for several of them, and the drawing
    says how many. Where the stream cannot print block graphics, there are letters.

    Parameters
    ----------
    cache : object
        Any cache, layer or pool, one for transformers too, a compressor, or a `SwappedSequence`.
    file : text stream, optional
        Where to print; ``sys.stdout`` by default. Lines fit a terminal, and are 80 wide elsewhere.

    Raises
    ------
    TypeError
        If it is nothing that can be drawn, or `file` has no ``write``.

    Examples
    --------
    >>> import numpy as np, numkv
    >>> cache = numkv.PagedKVCache(1, 2, 8, num_blocks=20, block_size=4)
    >>> seq = cache.add()
    >>> step = cache.reserve([seq], [10])
    >>> step.append(0, *np.ones((2, 10, 2, 8), np.float32))
    >>> cache.commit(step)
    >>> copy = cache.fork(seq)
    >>> numkv.show(cache)
    PagedKVCache: fp16, 1 layer, 2 kv heads of 8, cpu, 5 KiB
    blocks   ▓▓▓·················  3 of 20 in use, 4 tokens each
    0        10 tokens, blocks 0-2
    1        10 tokens, blocks 0-2
             ▓ shared  · free
    """
    if file is not None and not callable(getattr(type(file), "write", None)):
        raise TypeError(
            f"`file`: expected a text stream, got {type(file).__name__}; pass what has a write method"
        )
    picture = picture_of(cache)
    stream = sys.stdout if file is None else file
    width = shutil.get_terminal_size().columns if getattr(stream, "isatty", bool)() else 80
    print(text_of(picture, max(width, 40), has_graphics(stream)), file=stream)


def has_graphics(stream: Any) -> bool:
    """Return whether a stream can print the signs; one that does not say how it encodes takes any text.

    Parameters
    ----------
    stream : text stream
        The stream.

    Returns
    -------
    bool
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        "".join(state.glyph for state in State).encode(encoding)
    except (UnicodeError, LookupError):
        return False
    return True


def text_of(picture: Picture, width: int = 80, graphics: bool = True) -> str:
    """Draw a picture.

    Parameters
    ----------
    picture : Picture
        What to draw.
    width : int
        Columns that there are.
    graphics : bool
        Whether to draw with block graphics; else in ASCII.

    Returns
    -------
    str
        Lines, without a newline at the end.
    """
    return "\n".join(_lines(picture, width, graphics))


def _lines(picture: Picture, width: int, graphics: bool) -> Iterator[str]:
    yield _cut(f"{picture.name}: {', '.join(picture.facts)}", width)
    room = width - _MARGIN
    for strip in picture.strips:
        each, marks = strip.marks(_MOST_LINES * room)
        signs = "".join(label or (s.glyph if graphics else s.letter) for s, label in marks)
        title, _, text = strip.title.partition(": ")
        if each > 1:
            text += f", each sign {each:,} of them"
        rows = [signs[i : i + room] for i in range(0, len(signs), room)] or [""]
        if len(rows[-1]) + 2 + len(text) <= room:
            rows[-1] += f"  {text}"
        else:
            rows.append(text)
        for i, row in enumerate(rows):
            yield f"{'' if i else title:<{_MARGIN}}{row}"
    for name, text in picture.lines[:_MOST_SEQUENCES]:
        yield _cut(f"{name:<{_MARGIN}}{text}", width)
    if len(picture.lines) > _MOST_SEQUENCES:
        yield f"{'':<{_MARGIN}}and {len(picture.lines) - _MOST_SEQUENCES:,} more"
    if states := picture.states():
        legend = [f"{s.glyph if graphics else s.letter} {s.legend}" for s in states]
        yield _cut(f"{'':<{_MARGIN}}{'  '.join(legend)}", width)
    for part in picture.parts:
        yield from (f"  {line}" for line in _lines(part, width - 2, graphics))


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 3].rstrip(" ,") + "..."
