"""Rounds in which contestants take turns, medians of what is formed within a round, and the read bandwidth beside."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numba
import numpy as np

#: A share of the cores above which a round does not count.
MOST = 0.05
#: Seconds that the system's clock, which counts hundredths, needs for a share to mean anything.
_SHORTEST = 0.2


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _busy_seconds(stat: str = "/proc/stat") -> float | None:
    """Seconds that all cores have been busy since the start, what the host took among them; None if not known."""
    try:
        numbers = [int(x) for x in Path(stat).read_text().split("\n", 1)[0].split()[1:9]]
        _, _, _, idle, waiting, *_ = numbers
        return (sum(numbers) - idle - waiting) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None


class Load:
    """Measures from its making on.

    Parameters
    ----------
    clock, busy, own, thread : callable
        Seconds: of the wall, of all cores (or None), of this process, and of this thread.
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
        """The share of all cores that others have used since.

        Where the system does not say, it is the share of the time in which this thread, which never sleeps, did not
        run. Of a fraction of a second nothing is known, and it is 0.
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


#: Fewer rounds without other load than that say less than all rounds do.
FEWEST = 5
#: Contestants that are slower than the first one by more than this have a turn in one round of so many only.
SLOW, EVERY = 2.0, 4


@dataclass(frozen=True)
class Round:
    """One turn of each.

    Attributes
    ----------
    seconds : dict of str to float
        By contestant; those that sat out are not there.
    probe : float
        Bytes a second that the machine reads.
    others : float
        The share of the cores that something else used.
    """

    seconds: dict[str, float]
    probe: float
    others: float = 0.0


@dataclass(frozen=True)
class Spread:
    """A median, and the middle half of what it is of.

    Attributes
    ----------
    middle, low, high : float
        The median and the quartiles.
    count : int
        How many numbers it is of.
    """

    middle: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread | None:
        """That of some numbers; None of none."""
        if not numbers:
            return None
        if len(numbers) == 1:
            return cls(numbers[0], numbers[0], numbers[0], 1)
        low, _, high = quantiles(numbers, n=4, method="inclusive")
        return cls(median(numbers), low, high, len(numbers))


@dataclass
class Measured:
    """What was measured.

    Attributes
    ----------
    rounds : list of Round
        Those that count.
    left_out : int
        Rounds in which something else ran.
    noisy : bool
        Whether time ran out as so many were left out.
    all_count : bool
        Whether there were so few others that all rounds count, disturbed ones too.
    lost : dict of str to str
        Who could not finish, and why.
    wanted : int
        Rounds that were wanted; 0 for those that there are.
    """

    rounds: list[Round]
    left_out: int = 0
    noisy: bool = False
    all_count: bool = False
    lost: dict[str, str] = field(default_factory=dict)
    wanted: int = 0

    def seconds(self, name: str) -> float | None:
        """Median time of a step; None if there was none."""
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
        """Median of the seconds that a step takes beyond one of `floor`."""
        found = Spread.of([own - other for own, other, _ in self._pairs(name, floor)])
        return None if found is None else found.middle

    def share(self, name: str, floor: str, size: int) -> float | None:
        """Share of the bandwidth at which `size` bytes are read in the seconds beyond `floor`.

        None where these are no more than the floor's own noise.
        """
        readable = Spread.of([(own - other) * p for own, other, p in self._pairs(name, floor)])
        return size / readable.middle if readable is not None and readable.low > 0 else None

    def probe(self) -> float:
        """Median of the bandwidth."""
        return median(x.probe for x in self.rounds)


def _takes_part(number: int, own: float | None, first: float | None) -> bool:
    """Return whether a contestant has a turn in a round, by what its last step and the first contestant's took."""
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
    told: Callable[[int, int], None] = lambda done, left_out: None,
    enough: Callable[[], bool] = lambda: False,
) -> Measured:
    """Let contestants take turns until enough rounds count, or time is up.

    Parameters
    ----------
    turns : dict of str to callable
        By contestant: does a step, and gives its seconds. One that raises has no further turn. The first one is what
        is slow is measured by.
    probe : callable
        Gives the bandwidth, bytes a second.
    count : int
        Rounds without other load that are wanted.
    deadline : float
        When to give up, on `clock`. `fewest` rounds are taken in any case.
    fewest : int
        See `FEWEST`.
    shuffled : callable
        Puts names in the order of a round.
    load, clock : callable
        Make a `Load`, and tell the time.
    told : callable
        Is told of each round: how many count, how many are left out.
    enough : callable
        Asked after each round whether to give up, even before `fewest` rounds.

    Returns
    -------
    Measured
    """
    quiet: list[Round] = []
    disturbed: list[Round] = []
    lost: dict[str, str] = {}
    last: dict[str, float] = {}
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
                seconds[name] = last[name] = turns[name]()
            except Exception as error:  # theirs, whatever it is
                lost[name] = f"{type(error).__name__}: {error}".split("\n")[0]
        others, after = watched.of_others(), probe()
        one = Round(seconds, 2 / (1 / before + 1 / after) if before and after else math.nan, others)
        (quiet if others <= MOST else disturbed).append(one)
        before = after
        told(len(quiet), len(disturbed))
    left_out, some = len(disturbed), len(quiet) >= fewest
    rounds = quiet if some else quiet + disturbed
    all_count = not some and left_out > 0
    noisy = all_count or (gave_up and len(quiet) + left_out >= count)  # else there was no time
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
    """Reads 256 MB on some threads. They are Python's own, so that no OpenMP runtime is disturbed.

    Parameters
    ----------
    num_threads : int
        Threads.
    """

    def __init__(self, num_threads: int) -> None:
        self._parts = np.array_split(np.ones(_SIZE // 4, np.float32), num_threads)
        self._pool = ThreadPoolExecutor(num_threads)
        self()

    def __call__(self) -> float:
        """Bytes a second: the median of a few passes."""
        times = []
        for _ in range(_PASSES):
            start = time.perf_counter()
            list(self._pool.map(_sum, self._parts))
            times.append(time.perf_counter() - start)
        return _SIZE / median(times)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


#: Names of the contestants that others are compared with.
DYNAMIC, STATIC, FLOOR = "DynamicCache + SDPA", "StaticCache + SDPA", "attention left out"


@dataclass(frozen=True)
class Agreement:
    """How a contestant's logits agree with a reference's.

    Attributes
    ----------
    same, predictions : int
        How many greedy tokens are the same, and of how many.
    error : float
        Relative L2 error of the logits, the mean over the predictions.
    """

    same: int
    predictions: int
    error: float


@dataclass
class Line:
    """What ran in turns: steps at one context, or prompts of one length.

    Attributes
    ----------
    tokens : int
        The context, or the length of the prompts.
    measured : Measured
        Times.
    batch : int
        Sequences.
    prompt : bool
        Whether prompts were read; if not, each step computed a token of each sequence.
    padded : bool
        Whether half of the sequences have half of the tokens, and padding before them.
    sizes : dict of str to int
        By contestant, the bytes of its cache, room included.
    read : dict of str to int
        By contestant, the bytes that a step has to read of it.
    agreement : dict of str to Agreement
        By contestant.
    absent : dict of str to str
        Who did not take part, and why.
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
        """What ran."""
        if not self.prompt:
            what = f"Decode at {self.tokens:,} tokens"
        else:
            what = f"Prompts of {self.tokens:,} tokens"
        if self.padded:
            what += ", every other one half as long, padded on the left"
        return f"{what}, batch {self.batch}" if self.batch > 1 else what

    @property
    def names(self) -> list[str]:
        """Who has been timed, in order."""
        return [name for name in self.sizes if self.measured.seconds(name) is not None]

    @property
    def new_tokens(self) -> int:
        """Tokens that a turn computes; padding is none."""
        if not self.prompt:
            return self.batch
        short = self.batch // 2 if self.padded else 0
        return (self.batch - short) * self.tokens + short * (self.tokens // 2)

    def rate(self, name: str) -> float:
        """Tokens a second."""
        seconds = self.measured.seconds(name)
        return self.new_tokens / seconds if seconds else 0.0
