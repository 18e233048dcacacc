"""Whether the race slows anybody down: the best form of each library, alone in a fresh process, beside the race.

Alone means that no other process of the race is there. Both are done in turns and compared within a round: a race of
all, then each alone, then the other way round.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from numkv.bench.rounds import FEWEST
from perf.peers import CannotRun
from perf.race import race
from perf.workers import Died, Missing

#: How far a time in the race may be from that alone, either way.
TOLERANCE = 0.15
ROUNDS = 3
#: Rounds that are added where a first look finds a difference: on a shared machine most of those do not last.
MORE_ROUNDS = 4


@dataclass
class Compared:
    """A form's times in the race and alone, in seconds, by round."""

    shape: str
    kind: str
    library: str
    form: str
    in_race: dict[int, float] = field(default_factory=dict)
    alone: dict[int, float] = field(default_factory=dict)
    reason: str = ""  # why there is no comparison
    others: float = 0.0  # the share of the cores that other processes used, at most

    @property
    def name(self):
        return f"{self.library} {self.form}".strip()

    @property
    def ratio(self):
        """The time in the race / alone, median over the rounds; None where nothing was measured."""
        both = self.in_race.keys() & self.alone.keys()
        return median(self.in_race[n] / self.alone[n] for n in both) if both else None

    @property
    def verdict(self):
        if self.ratio is None:
            return f"not compared: {self.reason}"
        if self.ratio > 1 + TOLERANCE:
            return "UNFAIR: slower in the race"
        if self.ratio < 1 / (1 + TOLERANCE):
            return "DIFFERS: faster in the race"
        return "fair"

    @property
    def fair(self):
        return self.verdict == "fair"


@dataclass
class Check:
    """The comparison on one shape and kind.

    `found` has what is compared by peer, ``start(peer)`` starts a `Library`, ``start_probe()`` the worker that probes;
    `problem` is what `Library.problem` takes.
    """

    kind: str
    found: dict[str, Compared]
    problem: dict
    start: Callable
    start_probe: Callable
    seconds: float
    rng: np.random.Generator

    def run(self, say=print):
        """Compare; more often where a first look finds a difference."""
        for n in range(ROUNDS + MORE_ROUNDS):
            if n == ROUNDS and all(x.fair for x in self.found.values()):
                break
            steps = [self._all_together, self._each_alone]
            for step in steps if n % 2 == 0 else steps[::-1]:
                step(n)
            ratios = (f"{peer} {x.ratio or 0:.2f}" for peer, x in self.found.items())
            say(f"  after round {n + 1}, race / alone: {', '.join(ratios)}")
        return list(self.found.values())

    def _race(self, libraries, contestants, probe, whose):
        """Return the result of a race, and note the share of the cores that other processes used."""
        pids = [x.pid for x in libraries]
        result = race(contestants, self.seconds, probe, self.rng, FEWEST, pids)
        for compared in whose:
            compared.others = max(compared.others, *(x.others for x in result.rounds))
        return result

    def _all_together(self, n):
        """A race as the report's: all forms of all libraries."""
        libraries, contestants = {}, {}
        probe = self.start_probe()
        try:
            for peer, compared in self.found.items():
                try:
                    libraries[peer] = self.start(peer)
                    libraries[peer].problem(**self.problem)
                    made = libraries[peer].contestants(self.kind)
                except (Died, Missing, OSError) as error:
                    compared.reason = str(error)
                    continue
                for form, x in made.items():
                    if not isinstance(x, str):
                        contestants[f"{peer} {form}"] = x
            everybody = (probe, *libraries.values())
            asked = lambda: probe.ask("probe")  # noqa: E731
            result = self._race(everybody, contestants, asked, self.found.values())
        finally:
            for worker in (probe, *libraries.values()):
                worker.close()
        for peer, compared in self.found.items():
            name = f"{peer} {compared.form}"
            if name in contestants and name not in result.lost:
                compared.in_race[n] = result.seconds(name)
            else:
                compared.reason = compared.reason or result.lost.get(name, "not in the race")

    def _each_alone(self, n):
        """Each in a process of its own, when there is no other."""
        for peer, compared in self.found.items():
            library = None
            try:
                library = self.start(peer)
                library.problem(**self.problem)
                one = library.only(self.kind, compared.form)
                result = self._race([library], {"": one}, lambda: 1.0, [compared])
                if result.lost:
                    raise Died(result.lost[""])
                compared.alone[n] = result.seconds("")
            except (CannotRun, Died, Missing, OSError) as error:
                compared.reason = str(error)
            finally:
                if library:
                    library.close()
