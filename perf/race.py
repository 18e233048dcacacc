"""Time contestants in turns, with the machine's own speed between the turns.

A machine that others use too changes its speed from second to second. So every round lets each contestant have a turn,
in random order, and probes the machine before and after; shares and ratios are formed within a round, and the median
over the rounds counts. A round in which something else ran is left out, and another one is run instead.
"""

import itertools
import math
import time
from dataclasses import dataclass, field
from statistics import fmean, median

from perf.load import MOST
from perf.workers import Died

ROUNDS = 20
FEWEST_ROUNDS = 5
#: Slow contestants have a turn in one round of so many at least, in short races more often.
EVERY = 4


@dataclass
class Race:
    """What was measured: per contestant and round the times of its calls, none where it sat out.

    `probes` are bytes a second, the mean of right before and right after a round; `others` is the share of the cores
    that something else used. `lost` says who could not finish, and why. `left_out` rounds are not among them; where
    patience ended before there were a few without other load, all rounds are, and it is `noisy`.
    """

    calls: dict[str, list[list[float]]]
    probes: list[float] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)
    left_out: int = 0
    noisy: bool = False

    def add(self, calls, probe, others):
        """Add a round."""
        for name, times in calls.items():
            self.calls[name].append(times)
        self.probes.append(probe)
        self.others.append(others)

    def seconds(self, name):
        """Median time of a call."""
        return median(itertools.chain.from_iterable(self.calls[name]))

    def share(self, name, size):
        """Median over the rounds of the share of the probed bandwidth, where a call moves `size` bytes."""
        rounds = zip(self.calls[name], self.probes, strict=True)
        return median(size / median(calls) / probe for calls, probe in rounds if calls)

    def ratio(self, name, base):
        """Median over the rounds of the time beside that of `base`."""
        rounds = zip(self.calls[name], self.calls[base], strict=True)
        return median(median(one) / median(other) for one, other in rounds if one and other)


def rounds_of(seconds):
    """How many rounds contestants have that get so many seconds each: fewer where turns would be short."""
    return max(FEWEST_ROUNDS, min(ROUNDS, round(ROUNDS * seconds)))


def takes_part(n, spent, seconds, rounds=ROUNDS):
    """Whether a contestant that has spent so much of its seconds has a turn in round `n`.

    The slow ones sit rounds out to keep to their seconds, but have a few turns in any case, all in the same rounds.
    """
    return n % min(EVERY, rounds // 2) == 0 or spent <= seconds * (n + 1) / rounds


def _round(contestants, names, seconds, lost):
    """A turn of each: the times of its calls, none of those that take no part or are lost."""
    calls = {name: [] for name in contestants}
    for name in names:
        try:
            calls[name] = contestants[name].turn(seconds)
        except Died as error:
            lost[name] = str(error)
    return calls


def race(
    contestants, seconds, probe, rng, rounds=ROUNDS, load=None, patience=math.inf, clock=time.perf_counter
):  # fmt: skip
    """Race contestants, a dict by name, each for about so many seconds; `probe` gives bytes a second.

    ``contestant.turn(seconds)`` gives the times of its calls, or raises `Died`: then the race goes on without it.
    ``load()`` is a `Load` that watches from now on. Rounds with more than `MOST` of it do not count, unless there are
    hardly others within `patience` seconds.
    """
    quiet, disturbed = (Race({name: [] for name in contestants}) for _ in range(2))
    lost, spent, start, before = quiet.lost, dict.fromkeys(contestants, 0.0), clock(), probe()
    while len(quiet.probes) < rounds:
        n = len(quiet.probes)
        ran = n + len(disturbed.probes)
        if ran >= FEWEST_ROUNDS and clock() - start > patience:
            break
        watched = load() if load else None
        names = [
            name
            for name in rng.permutation(list(contestants))
            if name not in lost and takes_part(n, spent[name], seconds, rounds)
        ]
        calls = _round(contestants, names, seconds / rounds, lost)
        after = probe()
        others = (watched.of_others() if watched else None) or 0.0
        into = quiet if others <= MOST else disturbed
        into.add(calls, fmean((before, after)), others)
        before = after
        if into is quiet:
            for name, times in calls.items():
                spent[name] += sum(times)
    quiet.left_out = len(disturbed.probes)
    if len(quiet.probes) < min(rounds, FEWEST_ROUNDS):
        quiet.noisy, quiet.left_out = bool(quiet.left_out), 0
        for n, (probed, others) in enumerate(zip(disturbed.probes, disturbed.others, strict=True)):
            calls = {name: of[n] for name, of in disturbed.calls.items()}
            quiet.add(calls, probed, others)
    return quiet
