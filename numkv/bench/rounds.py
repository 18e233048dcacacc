"""Rounds of all contestants, medians of ratios within rounds, and the machine's read bandwidth."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numba
import numpy as np

#: A round does not count if other processes use more than this share of the cores.
MOST = 0.05
#: Shortest time in seconds for which a share is computed, because the system counts hundredths of a second.
_SHORTEST = 0.2


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _busy_seconds(stat: str = "/proc/stat") -> float | None:
    """Return the busy seconds of all cores since the start, time taken by the host included; None if unknown."""
    try:
        numbers = [int(x) for x in Path(stat).read_text().split("\n", 1)[0].split()[1:9]]
        _, _, _, idle, waiting, *_ = numbers
        return (sum(numbers) - idle - waiting) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None


class Load:
    """Measures the CPU use of other processes since it was made.

    Parameters
    ----------
    clock, busy, own, thread : callable
        Return seconds: of the wall clock, of all cores (or None), of this process, and of this thread.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        busy: Callable[[], float | None] = _busy_seconds,
        own: Callable[[], float] = time.process_time,
        thread: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock, self._busy, self._own, self._thread = clock, busy, own, thread
        self._start = self._now()

    def _now(self) -> tuple[float, float | None, float, float]:
        return self._clock(), self._busy(), self._own(), self._thread()

    def of_others(self) -> float:
        """Return the share of all cores that other processes have used.

        If the system does not report it, this is the share of the time in which this thread, which never sleeps, did
        not run. It is 0 for less than 0.2 seconds.
        """
        start, busy, own, thread = self._start
        now, busy_now, own_now, thread_now = self._now()
        passed = now - start
        if passed < _SHORTEST:
            return 0.0
        if busy is None or busy_now is None:
            return max(0.0, 1 - (thread_now - thread) / passed)
        used = (busy_now - busy) - (own_now - own)
        return max(0.0, used / passed / num_cores())


#: With fewer undisturbed rounds than this, all rounds count.
FEWEST = 5
#: Contestants slower than the first one by more than this factor take part in one of so many rounds.
SLOW, EVERY = 2.0, 4


@dataclass(frozen=True)
class Round:
    """One turn of each contestant.

    Attributes
    ----------
    seconds : dict of str to float
        Seconds by contestant, without those that skipped the round.
    probe : float
        The machine's read bandwidth in bytes a second.
    others : float
        Share of the cores that other processes used.
    """

    seconds: dict[str, float]
    probe: float
    others: float = 0.0


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles.

    Attributes
    ----------
    middle, low, high : float
        The median and the quartiles.
    count : int
        Number of values.
    """

    middle: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread | None:
        """Return the spread of numbers; None if there are none."""
        if not numbers:
            return None
        low, middle, high = np.quantile(numbers, (0.25, 0.5, 0.75)).tolist()
        return cls(middle, low, high, len(numbers))


@dataclass
class Measured:
    """The result of a measurement.

    Attributes
    ----------
    rounds : list of Round
        The rounds that count.
    left_out : int
        Number of disturbed rounds, in which other processes ran.
    noisy : bool
        Whether time ran out because many rounds were disturbed.
    all_count : bool
        Whether disturbed rounds count too, because there were too few others.
    lost : dict of str to str
        Contestants that failed, and the reasons.
    wanted : int
        Wanted number of rounds; 0 for the present number.
    """

    rounds: list[Round]
    left_out: int = 0
    noisy: bool = False
    all_count: bool = False
    lost: dict[str, str] = field(default_factory=dict)
    wanted: int = 0

    def seconds(self, name: str) -> float | None:
        """Return the median time of a step; None if there was none."""
        found = Spread.of([x.seconds[name] for x in self.rounds if name in x.seconds])
        return None if found is None else found.middle

    def _pairs(self, name: str, base: str) -> list[tuple[float, float, float]]:
        return [
            (x.seconds[name], x.seconds[base], x.probe)
            for x in self.rounds
            if name in x.seconds and base in x.seconds
        ]

    def ratio(self, name: str, base: str) -> Spread | None:
        """Return how many times as fast as `base`, within each round."""
        return Spread.of([other / own for own, other, _ in self._pairs(name, base)])

    def beyond(self, name: str, floor: str) -> float | None:
        """Return the median of the seconds of a step beyond those of `floor`."""
        found = Spread.of([own - other for own, other, _ in self._pairs(name, floor)])
        return None if found is None else found.middle

    def share(self, name: str, floor: str, size: int) -> float | None:
        """Return the share of the bandwidth at which `size` bytes are read in the seconds beyond `floor`.

        It is None if these seconds are within the floor's own noise.
        """
        readable = Spread.of([(own - other) * p for own, other, p in self._pairs(name, floor)])
        return size / readable.middle if readable is not None and readable.low > 0 else None

    def probe(self) -> float:
        """Return the median of the bandwidth."""
        return median(x.probe for x in self.rounds)


def _takes_part(number: int, own: float | None, first: float | None) -> bool:
    """Return whether a contestant takes part in a round, given its last time and the first contestant's."""
    return number % EVERY == 0 or own is None or first is None or own <= SLOW * first


def take_rounds(
    turns: Mapping[str, Callable[[], float]],
    probe: Callable[[], float],
    count: int,
    deadline: float,
    *,
    fewest: int = FEWEST,
    shuffled: Callable[[list[str]], list[str]] = list,
    load: Callable[[], Load] = Load,
    clock: Callable[[], float] = time.monotonic,
    count_rounds: Callable[[int, int], None] = lambda done, left_out: None,
    enough: Callable[[], bool] = lambda: False,
    took: dict[str, float] | None = None,
) -> Measured:
    """Run rounds of all contestants until enough rounds count, or time is up.

    Parameters
    ----------
    turns : dict of str to callable
        By contestant, a function that computes a step and returns its seconds. A contestant that raises an error takes
        no further part. Slow contestants are compared with the first one.
    probe : callable
        Measures the read bandwidth in bytes a second.
    count : int
        Wanted number of undisturbed rounds.
    deadline : float
        Time on `clock` at which to stop, after at least `fewest` rounds.
    fewest : int
        See `FEWEST`.
    shuffled : callable
        Returns names in the order of a round.
    load, clock : callable
        Return a new `Load`, and the time.
    count_rounds : callable
        Called after each round with the number of rounds that count and that were left out.
    enough : callable
        Called after each round; returns whether to stop, even before `fewest` rounds.
    took : dict of str to float, optional
        The seconds of each contestant's last turn, filled by turns that make several steps; by default those of a step.

    Returns
    -------
    Measured
    """
    quiet: list[Round] = []
    disturbed: list[Round] = []
    lost: dict[str, str] = {}
    last = {} if took is None else took
    fewest = min(fewest, count)
    first, before, gave_up = next(iter(turns), None), probe(), False
    while len(quiet) < count:
        num_done = len(quiet) + len(disturbed)
        if (num_done >= fewest and clock() > deadline) or (num_done and enough()):
            gave_up = True
            break
        number, watched = len(quiet), load()
        reference = last.get(first) if first is not None else None
        names = [x for x in turns if x not in lost and _takes_part(number, last.get(x), reference)]
        seconds: dict[str, float] = {}
        for name in shuffled(names):
            try:
                seconds[name] = turns[name]()
                if took is None:
                    last[name] = seconds[name]
            except Exception as error:  # any error of a contestant
                lost[name] = f"{type(error).__name__}: {error}".split("\n")[0]
        others, after = watched.of_others(), probe()
        one = Round(seconds, 2 / (1 / before + 1 / after) if before and after else math.nan, others)
        (quiet if others <= MOST else disturbed).append(one)
        before = after
        count_rounds(len(quiet), len(disturbed))
    left_out, some = len(disturbed), len(quiet) >= fewest
    rounds = quiet if some else quiet + disturbed
    all_count = not some and left_out > 0
    noisy = all_count or (gave_up and len(quiet) + left_out >= count)  # else only time was short
    return Measured(rounds, left_out, noisy, all_count, lost, count)


_SIZE = 256 << 20  # far more than any cache
_PASSES = 3


@numba.njit(nogil=True, fastmath=True)  # type: ignore[untyped-decorator]
def _sum(x: Any) -> Any:
    total = np.float32(0)
    for i in range(x.size):
        total += x[i]
    return total


class Probe:
    """Reads 256 MB on some threads of Python, so that no OpenMP runtime is disturbed.

    Parameters
    ----------
    num_threads : int
        Number of threads.
    """

    def __init__(self, num_threads: int) -> None:
        self._parts = np.array_split(np.ones(_SIZE // 4, np.float32), num_threads)
        self._pool = ThreadPoolExecutor(num_threads)
        self()

    def __call__(self) -> float:
        """Return bytes a second: the median of a few passes."""
        times = []
        for _ in range(_PASSES):
            start = time.perf_counter()
            list(self._pool.map(_sum, self._parts))
            times.append(time.perf_counter() - start)
        return _SIZE / median(times)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


#: Names of the contestants with which others are compared.
DYNAMIC, STATIC, FLOOR = "DynamicCache + SDPA", "StaticCache + SDPA", "attention left out"


@dataclass(frozen=True)
class Agreement:
    """The agreement of a contestant's logits with a reference's.

    Attributes
    ----------
    same, predictions : int
        Number of equal greedy tokens, and of all predictions.
    error : float
        Mean relative L2 error of the logits over the predictions.
    """

    same: int
    predictions: int
    error: float


@dataclass
class Line:
    """The results of one measurement: steps at one context, or prompts of one length.

    Attributes
    ----------
    tokens : int
        The context, or the length of the prompts.
    measured : Measured
        The times.
    batch : int
        Number of sequences.
    prompt : bool
        Whether prompts were read; if not, each step computed a token of each sequence.
    padded : bool
        Whether half of the sequences have half of the tokens, with padding on the left.
    sizes : dict of str to int
        Bytes of the cache by contestant, spare room included.
    read : dict of str to int
        Bytes that a step reads by contestant.
    agreement : dict of str to Agreement
        Agreement by contestant.
    absent : dict of str to str
        Contestants that did not take part, and the reasons.
    """

    tokens: int
    measured: Measured
    batch: int = 1
    prompt: bool = False
    padded: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    agreement: dict[str, Agreement] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Return the title of the measurement."""
        if not self.prompt:
            what = f"Decode at {self.tokens:,} tokens"
        else:
            what = f"Prompts of {self.tokens:,} tokens"
        if self.padded:
            what += ", every other one half as long, padded on the left"
        return f"{what}, batch {self.batch}" if self.batch > 1 else what

    @property
    def names(self) -> list[str]:
        """Return the timed contestants, in order."""
        return [name for name in self.sizes if self.measured.seconds(name) is not None]

    @property
    def new_tokens(self) -> int:
        """Return the tokens that a turn computes, without padding."""
        if not self.prompt:
            return self.batch
        short = self.batch // 2 if self.padded else 0
        return (self.batch - short) * self.tokens + short * (self.tokens // 2)

    def rate(self, name: str) -> float:
        """Return tokens a second."""
        seconds = self.measured.seconds(name)
        return self.new_tokens / seconds if seconds else 0.0
