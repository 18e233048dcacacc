"""The picture of a cache: a headline, facts, strips of blocks, and pictures of its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


class State(Enum):
    """The state of a block, a cell or a token: its name in a legend, as a character of block graphics, and in ASCII."""

    SHARED = "shared", "▓", "S"
    FULL = "in use", "█", "#"
    PART = "filled in part", "▄", "+"
    EXACT = "full precision", "◆", "f"
    OTHER = "another's", "▒", "o"
    CACHED = "released prefix", "░", "c"
    FREE = "free", "·", "."

    def __init__(self, legend: str, glyph: str, letter: str) -> None:
        self.legend, self.glyph, self.letter = legend, glyph, letter


@dataclass(frozen=True)
class Strip:
    """Blocks, cells or tokens side by side.

    Attributes
    ----------
    title : str
        What they are, in the plural.
    runs : sequence of (int, State, str)
        How many in a row are alike, what they are, and what stands for one of them: empty for the state's own sign.
    """

    title: str
    runs: Sequence[tuple[int, State, str]]

    @classmethod
    def of(cls, title: str, states: NDArray[np.int64], names: Sequence[tuple[State, str]]) -> Strip:
        """Make a strip of one number for each block.

        Parameters
        ----------
        title : str
            What they are.
        states : int array (n,)
            Indices in `names`.
        names : sequence of (State, str)
            What numbers mean.

        Returns
        -------
        Strip
        """
        ends = np.flatnonzero(np.diff(states, append=-1)) + 1
        counts = np.diff(ends, prepend=0).tolist()
        runs = zip(counts, states[ends - 1].tolist(), strict=True)
        return cls(title, [(n, *names[state]) for n, state in runs])

    def __len__(self) -> int:
        return sum(n for n, _, _ in self.runs)

    def marks(self, most: int) -> tuple[int, list[tuple[State, str]]]:
        """Signs for the strip, where one may stand for several neighbours: for what most of them are.

        Parameters
        ----------
        most : int
            How many signs there is room for.

        Returns
        -------
        each : int
            What a sign stands for; the last one may stand for less.
        marks : list of (State, str)
            The signs.
        """
        whole = len(self)
        each = max(-(-whole // most), 1)
        ends = np.cumsum([n for n, _, _ in self.runs])
        marks = []
        for begin in range(0, whole, each):
            end = min(begin + each, whole)
            first, last = np.searchsorted(ends, (begin, end - 1), "right")
            counts: Counter[tuple[State, str]] = Counter()
            for (n, state, label), stop in zip(
                self.runs[first : last + 1], ends[first : last + 1].tolist(), strict=True
            ):
                counts[state, label] += min(end, stop) - max(begin, stop - n)
            marks += [mark for mark, _ in counts.most_common(1)]
        return each, marks


@dataclass(frozen=True)
class Picture:
    """A cache, as it is drawn.

    Attributes
    ----------
    name : str
        Its class.
    facts : sequence of str
        What it is: kind, sizes, bytes.
    strips : sequence of Strip
        Its blocks, cells or tokens.
    lines : sequence of (str, str)
        What it holds: sequences by name, and what there is to say of each.
    parts : sequence of Picture
        Caches that it is made of.
    """

    name: str
    facts: Sequence[str]
    strips: Sequence[Strip] = ()
    lines: Sequence[tuple[str, str]] = ()
    parts: Sequence[Picture] = ()

    def states(self) -> list[State]:
        """States whose own sign is drawn, in the order of `State`."""
        drawn = {s for strip in self.strips for n, s, label in strip.runs if n and not label}
        return [state for state in State if state in drawn]


def format_bytes(size: int, decimal: bool = False) -> str:
    """Write a number of bytes with a unit: in full where that is short, else with three digits.

    Parameters
    ----------
    size : int
        Bytes.
    decimal : bool
        Whether units are powers of 1000 (kB, MB, …), as of bytes in a second, and not of 1024 (KiB, MiB, …).

    Returns
    -------
    str
        Such as ``"640 B"``, ``"8 GiB"`` or ``"1.25 MiB"``.
    """
    base, units = (1000, _DECIMAL_UNITS) if decimal else (1024, _UNITS)
    power = 0
    while size >= base ** (power + 1) and power < len(units) - 1:
        power += 1
    if size % base**power == 0:
        return f"{size // base**power} {units[power]}"
    value = size / base**power
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {units[power]}"


def plural(n: int, what: str) -> str:
    """Write a number of things, such as ``"1 block"`` or ``"1,024 blocks"``.

    Parameters
    ----------
    n : int
        How many.
    what : str
        One of them.

    Returns
    -------
    str
    """
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def in_short(numbers: Iterable[int], most: int = 12) -> str:
    """List numbers, runs of neighbours as ``first-last``, and the last ones only where there are many.

    Parameters
    ----------
    numbers : iterable of int
        The numbers.
    most : int
        Entries to list.

    Returns
    -------
    str
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    if len(parts) > most:
        parts = [*parts[: most // 2], "...", *parts[-(most // 2) :]]
    return " ".join(parts)
