"""Episodes: a scene, and a hundred calls on its objects. The n-th of a seed is always the same."""

from __future__ import annotations

import inspect
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from fuzz import play, table
from fuzz.play import Defect, Row
from fuzz.surface import resolve

__all__ = ["CALLS", "Count", "episode", "function_of"]

#: Calls of an episode.
CALLS = 100
#: How many arguments of a call are hostile.
HOSTILE = [0, 0, 0, 0, 1, 1, 1, 1, 1, 2]


class Count:
    """What came of calls."""

    def __init__(self) -> None:
        self.accepted = 0
        self.refused: Counter[str] = Counter()
        self.defects: list[tuple[int, Defect]] = []

    @property
    def calls(self) -> int:
        """How many there were."""
        return self.accepted + sum(self.refused.values()) + len(self.defects)


def function_of(row: Row, scene: Any) -> Callable[[int], Any]:
    """What a row calls, of an object and of its twin."""
    if not row.on:
        function = resolve(row.name)
        return lambda side: function
    method = row.name.rpartition(".")[2]
    pair = scene.objects[row.on]
    if isinstance(inspect.getattr_static(type(pair.a), method), property):  # read, or set
        return lambda side: pair[side]
    return lambda side: getattr(pair[side], method)


def weighted(rng: random.Random, choices: list[tuple[float, Any]]) -> Any:
    """One of some things, by weight."""
    weights, things = zip(*choices, strict=True)
    return rng.choices(things, weights)[0]


def episode(seed: int, number: int, count: Count, first: int = 0) -> Iterator[int]:
    """Play an episode; gives the number of each call, before it is made.

    Parameters
    ----------
    seed, number : int
        Which one.
    count : Count
        Takes what came of it.
    first : int
        Number of its first call.
    """
    rng = random.Random(f"{seed} {number}")
    scene = None
    for i in range(CALLS):
        yield first + i
        # A scene with a defect is given up: what follows from it is no other one.
        if scene is None:
            scene = weighted(rng, table.SCENES)(rng)
            rows = [(row.weight, row) for row in table.rows_of(scene)]
        row = weighted(rng, [r for r in rows if not r[1].on or r[1].on in scene.objects])
        names = [name for name, arg in row.args.items() if arg.family != "anything"]
        hostile = dict.fromkeys(rng.sample(names, min(len(names), rng.choice(HOSTILE))))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            outcome, words = play.play(row, scene, function_of(row, scene), rng, hostile)
        if outcome.defect is not None:
            count.defects.append((first + i, outcome.defect))
            scene = None
        elif outcome.accepted:
            count.accepted += 1
        else:
            count.refused[outcome.error] += 1
