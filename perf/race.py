"""Rounds of contestants that run in worker processes; see `numkv.bench.rounds`."""

import functools
import time
from statistics import median

from numkv.bench.rounds import FEWEST, take_rounds
from perf.load import beside

ROUNDS = 20


def rounds_of(seconds):
    """Return the number of rounds of contestants with so many seconds each: fewer where turns would be short."""
    return max(FEWEST, min(ROUNDS, round(ROUNDS * seconds)))


def race(contestants, seconds, probe, rng, rounds, pids, patience=None):
    """Time contestants, a dict by name, each for about so many seconds: a `numkv.bench.rounds.Measured`.

    ``contestant.turn(seconds)`` makes calls and returns their times, of which the median counts. ``probe()`` returns
    bytes a second. `pids` are the processes of the contestants. Further rounds replace disturbed ones for `patience`
    seconds; None for no further rounds.
    """
    took = {}

    def turn(name):
        calls = contestants[name].turn(seconds / rounds)
        took[name] = sum(calls)
        return median(calls)

    return take_rounds(
        {name: functools.partial(turn, name) for name in contestants}, probe, rounds,
        time.monotonic() + (patience or 0.0), fewest=rounds if patience is None else FEWEST,
        shuffled=rng.permutation, load=lambda: beside(pids), took=took,
    )  # fmt: skip


def share(measured, name, size):
    """Return the median share of the probed bandwidth at which calls move `size` bytes."""
    return median(size / x.seconds[name] / x.probe for x in measured.rounds if name in x.seconds)
