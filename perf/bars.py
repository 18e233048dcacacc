"""What numkv is to reach in each line of the race, and whether it does: one table, `BARS`.

A line here is a shape, a kind and a layout of numkv's. A bar that compares with somebody who did not run is no bar.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from perf.peers import CONTIGUOUS, INT8_BESIDE, LARGEST_ERROR, OURS, PAGED
from perf.shapes import PREFILL, SHAPES

#: A line without groups need not be faster than a peer at this share of the bandwidth, only as fast.
AS_FAST_AS_CAN_BE = 0.95
#: What a small call may take: so many times what its bytes take at the probed bandwidth, and so many seconds.
SMALL_CALL = (1.3, 8e-6)


def _beside(other, row):
    """How many times as fast as another `row` is; None where one of the two has no time."""
    return other.ratio / row.ratio if other and other.ratio and row.ratio else None


def _fastest(line, library, form=""):
    rows = [row for row in line.ran if row.library == library and row.form.startswith(form)]
    return min(rows, key=lambda row: row.ratio or 0, default=None)


def best_peer(line, row):
    """Speed beside the fastest form of any other library."""
    return _beside(line.best_peer, row)


def _library(name, form=""):
    return lambda line, row: _beside(_fastest(line, name, form), row)


def _share(line, row):
    return row.share


def _beside_int8(line, row):
    speed = _beside(_fastest(line, OURS, INT8_BESIDE), row)
    return speed and 1 / speed


def _beside_contiguous(line, row):
    return row.ratio


def _small_call(line, row):
    times, more = SMALL_CALL
    return row.seconds / (times * row.share * row.seconds + more)


def has_feature(name, cpuinfo="/proc/cpuinfo"):
    """Whether the processor has a feature, by Linux' name."""
    try:
        return name in Path(cpuinfo).read_text().split()
    except OSError:
        return False


@dataclass(frozen=True)
class Bar:
    """What a line's ``measure(line, row)`` has to be, at least or at most; None is no bar.

    A line at the share `enough` of the bandwidth meets it as well. So does, where `level`, one that is no slower than a
    best peer that is as fast as can be.
    """

    words: str
    measure: Callable[[Any, Any], float | None]
    limit: float
    shapes: tuple[str, ...]
    kinds: tuple[str, ...]
    forms: tuple[str, ...] = (CONTIGUOUS, PAGED)
    at_most: bool = False
    enough: float = inf
    level: bool = False

    def __str__(self):
        return f"{'≤' if self.at_most else '≥'} {self.limit:g} {self.words}"

    def applies(self, line, row):
        return line.shape in self.shapes and line.kind in self.kinds and row.form in self.forms

    def met(self, value, line, row):
        if self.at_most:
            return value <= self.limit
        best = line.best_peer
        level = self.level and best and best.share and best.share >= AS_FAST_AS_CAN_BE
        return value >= min(self.limit, 1.0 if level else inf) or (row.share or 0) >= self.enough


def _speed(limit, shapes, *kinds, **more):
    return Bar("× best peer", best_peer, limit, tuple(shapes), kinds, **more)


GROUPED = tuple(letter for letter, shape in SHAPES.items() if shape.group > 1)
NOT_GROUPED = tuple(letter for letter in SHAPES if letter not in GROUPED)
PREFILLS = tuple(PREFILL)
EVERY_KIND = tuple(LARGEST_ERROR)
ALONE = (CONTIGUOUS,)

#: Shares of the bandwidth of INT8 in A to D and in E: vectors of 256 bits multiply half as many codes at a time.
INT8_SHARES = (0.75, 0.45) if has_feature("avx512f") else (0.65, 0.45)

BARS = (
    _speed(1.5, GROUPED, "fp32", "fp16", enough=0.9),
    _speed(1.1, GROUPED, "bf16", enough=0.9),
    _speed(2.0, GROUPED, "int8", enough=0.75),
    _speed(3.0, GROUPED, "int4", "code4"),
    _speed(1.1, NOT_GROUPED, *EVERY_KIND, level=True),
    Bar("of the bandwidth", _share, INT8_SHARES[0], tuple("ABCD"), ("int8",)),
    Bar("of the bandwidth", _share, INT8_SHARES[1], ("E",), ("int8",)),
    Bar("of int8's time", _beside_int8, 0.75, tuple("ABCD"), ("int4",), ALONE, at_most=True),
    Bar("of int8's time", _beside_int8, 0.85, ("E",), ("int4",), ALONE, at_most=True),
    Bar("of int8's time", _beside_int8, 1.0, tuple(SHAPES), ("code4",), ALONE, at_most=True),
    Bar("× contiguous", _beside_contiguous, 1.05, (*SHAPES,), EVERY_KIND, (PAGED,), at_most=True),
    Bar("× a small call's due", _small_call, 1.0, ("F",), ("fp32", "bf16"), at_most=True),
    Bar("× PyTorch", _library("PyTorch"), 1.25, PREFILLS, ("fp32", "bf16")),
)


@dataclass
class Verdict:
    """A line, numkv's row in it, and the bars with what was measured."""

    line: Any
    row: Any
    found: list[tuple[Bar, float]] = field(default_factory=list)

    @property
    def name(self):
        return f"{self.line.shape}/{self.line.kind} {self.row.form}".strip()

    @property
    def missed(self):
        """Of each bar that is not met, what was measured and what it is; or why the line does not run."""
        if self.row.reason:
            return [f"does not run: {self.row.reason}"]
        return [f"{x:.2f} ({bar})" for bar, x in self.found if not bar.met(x, self.line, self.row)]

    @property
    def met(self):
        return not self.missed

    @property
    def words(self):
        """Met, or what is missed."""
        if self.missed:
            return f"MISSED: {'; '.join(self.missed)}"
        short = [bar for bar, x in self.found if not bar.at_most and x < bar.limit]
        return f"met: {self.row.share:.2f} of the bandwidth" if short else "met"


def verdicts(lines, bars=BARS):
    """The verdicts of all lines that have a bar."""
    found = []
    for line in lines:
        for row in line.rows:
            mine = row.library == OURS and row.form in (CONTIGUOUS, PAGED)
            asked = [bar for bar in bars if mine and bar.applies(line, row)]
            if row.reason:
                found += [Verdict(line, row)] if asked else []
                continue
            values = [(bar, bar.measure(line, row)) for bar in asked]
            values = [(bar, x) for bar, x in values if x is not None]
            found += [Verdict(line, row, values)] if values else []
    return found


def head_count(found):
    """One sentence: how many lines meet their bars."""
    met = sum(verdict.met for verdict in found)
    return f"{met} of {len(found)} lines meet their bars."


def misses(found):
    """The lines that do not, with what they miss."""
    return [f"{x.name}: {'; '.join(x.missed)}" for x in found if not x.met]
