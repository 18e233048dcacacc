"""What numkv is to reach in each line of the race, and whether it does: one table, `BARS`.

A line here is a shape, a kind and a layout of numkv's. A bar that compares with somebody who did not run is no bar.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perf.peers import CONTIGUOUS, INT8_BESIDE, LARGEST_ERROR, OURS, PAGED
from perf.shapes import PREFILL, SHAPES

#: A line at this share of the bandwidth probed in the same rounds is as fast as can be: it need not beat others.
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


def has_amx(cpuinfo="/proc/cpuinfo"):
    """Whether the processor has Intel's matrix unit."""
    try:
        return "amx_tile" in Path(cpuinfo).read_text()
    except OSError:
        return False


@dataclass(frozen=True)
class Bar:
    """What a line's ``measure(line, row)`` has to be, at least or at most; None is no bar.

    A speed is met as well by a line that is as fast as can be.
    """

    words: str
    measure: Callable[[Any, Any], float | None]
    limit: float
    shapes: tuple[str, ...]
    kinds: tuple[str, ...]
    forms: tuple[str, ...] = (CONTIGUOUS, PAGED)
    at_most: bool = False
    speed: bool = False

    def __str__(self):
        return f"{'≤' if self.at_most else '≥'} {self.limit:g} {self.words}"

    def applies(self, line, row):
        return line.shape in self.shapes and line.kind in self.kinds and row.form in self.forms

    def met(self, value, row):
        if self.speed and row.share >= AS_FAST_AS_CAN_BE:
            return True
        return value <= self.limit if self.at_most else value >= self.limit


def _speed(words, measure, limit, shapes, kinds):
    return Bar(words, measure, limit, tuple(shapes), kinds, speed=True)


GROUPED = tuple(letter for letter, shape in SHAPES.items() if shape.group > 1)
NOT_GROUPED = tuple(letter for letter in SHAPES if letter not in GROUPED)
PREFILLS = tuple(PREFILL)
EVERY_KIND = tuple(LARGEST_ERROR)

BARS = (
    _speed("× best peer", best_peer, 1.5, GROUPED, ("fp32", "fp16")),
    _speed("× best peer", best_peer, 1.1, NOT_GROUPED, ("fp32", "fp16")),
    _speed("× best peer", best_peer, 1.1, SHAPES, ("bf16", "int8")),
    _speed("× best peer", best_peer, 4.0, SHAPES, ("int4", "code4")),
    _speed("× vLLM's fp8", _library("vLLM", "fp8"), 2.0, "ABCD", ("int8",)),
    _speed("× vLLM's AMX", _library("vLLM", "amx"), 1.15, "ABCDE", ("bf16",)),
    Bar("of the bandwidth", _share, 0.75, tuple("ABCD"), ("int8",)),
    Bar("of int8's time", _beside_int8, 0.6, tuple("ABCD"), ("int4",), (CONTIGUOUS,), at_most=True),
    Bar(
        "of int8's time", _beside_int8, 1.0, tuple(SHAPES), ("code4",), (CONTIGUOUS,), at_most=True
    ),
    Bar("× contiguous", _beside_contiguous, 1.03, (*SHAPES,), EVERY_KIND, (PAGED,), at_most=True),
    Bar("× a small call's due", _small_call, 1.0, ("F",), ("fp32", "bf16"), at_most=True),
    Bar("× PyTorch", _library("PyTorch"), 1.3, PREFILLS, ("fp32",)),
    Bar("× PyTorch", _library("PyTorch"), 1.3 if has_amx() else 1.5, PREFILLS, ("bf16",)),
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
        return [f"{x:.2f} ({bar})" for bar, x in self.found if not bar.met(x, self.row)]

    @property
    def met(self):
        return not self.missed

    @property
    def words(self):
        """Met, or what is missed."""
        if self.missed:
            return f"MISSED: {'; '.join(self.missed)}"
        short = [bar for bar, x in self.found if bar.speed and x < bar.limit]
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
