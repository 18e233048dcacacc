"""Time contestants in turns, with the machine's own speed between the turns.

A machine that others use too changes its speed from second to second. So every round lets each contestant have a turn,
in random order, and probes the machine before and after; shares and ratios are formed within a round, and the median
over the rounds counts.
"""

import itertools
from dataclasses import dataclass, field
from statistics import fmean, median

from perf.workers import Died

ROUNDS = 20
FEWEST_ROUNDS = 5


@dataclass
class Race:
    """What was measured: per contestant and round the times of its calls (none where it sat out), and the probes.

    ``probes[r]`` and ``probes[r + 1]`` are bytes a second right before and after round r. `lost` says who could not
    finish, and why.
    """

    calls: dict[str, list[list[float]]]
    probes: list[float]
    lost: dict[str, str] = field(default_factory=dict)

    def seconds(self, name):
        """Median time of a call."""
        return median(itertools.chain.from_iterable(self.calls[name]))

    def share(self, name, size):
        """Median over the rounds of the share of the probed bandwidth, where a call moves `size` bytes."""
        around = [fmean(pair) for pair in itertools.pairwise(self.probes)]
        rounds = zip(self.calls[name], around, strict=True)
        return median(size / median(calls) / probe for calls, probe in rounds if calls)

    def ratio(self, name, base):
        """Median over the rounds of the time beside that of `base`."""
        rounds = zip(self.calls[name], self.calls[base], strict=True)
        return median(median(one) / median(other) for one, other in rounds if one and other)


def takes_part(n, spent, seconds, rounds=ROUNDS):
    """Whether a contestant that has spent so much of its seconds has a turn in round `n`.

    The slow ones sit rounds out to keep to their seconds, but have a few turns in any case, all in the same rounds.
    """
    return n % (rounds // FEWEST_ROUNDS) == 0 or spent <= seconds * (n + 1) / rounds


def race(contestants, seconds, probe, rng, rounds=ROUNDS):
    """Race contestants, a dict by name, each for about so many seconds; `probe` gives bytes a second.

    ``contestant.turn(seconds)`` gives the times of its calls, or raises `Died`: then the race goes on without it.
    """
    result = Race({name: [] for name in contestants}, [probe()])
    spent = dict.fromkeys(contestants, 0.0)
    for n in range(rounds):
        for times in result.calls.values():
            times.append([])
        for name in rng.permutation(list(contestants)):
            if name in result.lost or not takes_part(n, spent[name], seconds, rounds):
                continue
            try:
                times = contestants[name].turn(seconds / rounds)
            except Died as error:
                result.lost[name] = str(error)
                continue
            result.calls[name][-1] += times
            spent[name] += sum(times)
        result.probes.append(probe())
    return result
