"""What caches of one sequence do about rows that a kernel has found to be NaN or infinite, after the call was over."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.errors import NonFiniteInput
from numkv.targets.base import Target
from numkv.targets.call import Marker

#: Calls after which one is certainly done.
LONG_AGO = 1 << 12


class History:
    """What has become of a sequence's tokens since calls of which something may still be told.

    Of several tokens that were not finite sometimes only the first is told. So whatever comes after one counts as if it
    were not finite either.
    """

    def __init__(self) -> None:
        # Calls so far, and the tokens that were kept then: those below a length, or these, in each layer.
        self._changes: list[tuple[int, int | NDArray[np.int64]]] = []

    def add(self, calls: int, kept: int | NDArray[np.int64]) -> None:
        """Note that tokens were dropped after so many calls.

        Parameters
        ----------
        calls : int
            Calls of the watch so far.
        kept : int or int64 array (num_layers, n)
            How many were kept, or which.
        """
        changes = [(n, of) for n, of in self._changes if calls - n < LONG_AGO]
        if isinstance(kept, int):
            while changes and isinstance(changes[-1][1], int) and changes[-1][1] >= kept:
                changes.pop()
        self._changes = [*changes, (calls, kept)]

    def copy(self) -> History:
        """The same so far."""
        made = History()
        made._changes = self._changes  # which is replaced, not changed
        return made

    def now(self, position: int, call: int) -> int | None:
        """Where the first of the tokens is now that come with or after one that was told; None if all are gone."""
        for calls, kept in self._changes:
            if call <= calls:
                found = first_kept(position, kept)
                if found is None:
                    return None
                position = found
        return position


def first_kept(position: int, kept: int | NDArray[np.int64]) -> int | None:
    """Where the first token from a position on is, once these have been kept; None if there is none."""
    if isinstance(kept, int):
        return position if position < kept else None
    found = [int(np.searchsorted(of_layer, position)) for of_layer in kept]
    least = min(found, default=0)
    return least if least < kept.shape[1] else None


class Watched:
    """A cache of one sequence whose rows kernels look at; on the CPU nothing is ever reported."""

    _target: Target
    #: What kernels report to; None on the CPU.
    _watch: Any
    #: What makes calls that repeat the short way; None where there is none.
    _again: Any
    #: What has become of tokens since they were written.
    _history: History
    #: The first position with rows that were NaN or infinite, once that is known, and the error.
    _bad: tuple[int, NonFiniteInput] | None = None

    def _stored(self, layer: int) -> int:
        raise NotImplementedError

    def _longest(self) -> int | None:
        """The layer with most tokens; None if there are no layers."""
        raise NotImplementedError

    def _begin_watching(self) -> None:
        self._watch = self._target.new_watch()
        self._history = History()

    def _look(self, layer: int, start: int, looked_at: Any) -> int:
        """A number for a call that is made again, once nothing is known to be wrong with the tokens so far."""
        if self._bad is not None or self._watch.arrived():
            self._refuse_bad(layer)
        if looked_at is None:
            return 0
        of_k, of_v, marker = looked_at
        look: int = self._watch.look((of_k, of_v, marker._replace(first=start)))
        return look

    def _watch_nothing(self) -> None:
        """Say that the call that comes looks for nothing, unless it says so."""
        if self._watch is not None:
            self._watch.latest = None

    def _marker(self, start: int) -> Marker:
        """What notes a position, in a call from position `start` on, whose rows are not what they should be."""
        cache = weakref.ref(self)  # its memory is not kept for that

        def mark(position: int, error: NonFiniteInput, call: int) -> None:
            of = cache()
            now = None if of is None else of._history.now(position, call)
            if of is not None and now is not None and (of._bad is None or now < of._bad[0]):
                of._bad = now, error

        return Marker(self._watch, mark, start)

    def _refuse_bad(self, layer: int | None = 0) -> None:
        """Refuse to go on behind a token that a kernel has found to be NaN or infinite."""
        self._target.collect_late(self._watch)
        if self._bad is not None and layer is not None and self._bad[0] < self._stored(layer):
            position, error = self._bad
            raise NonFiniteInput(f"{error}; truncate to {position} tokens", error.index)

    def _refuse_told(self) -> None:
        """Wait for what has been launched, and refuse to go on if a token was NaN or infinite."""
        self._target.collect_late(self._watch, wait=True)
        self._refuse_bad(self._longest())

    def _mend(self, kept: int | NDArray[np.int64]) -> None:
        """Forget a bad token, and those after it, that are not among those which are kept; see `History.add`."""
        if self._bad is not None:
            now = first_kept(self._bad[0], kept)
            self._bad = None if now is None else (now, self._bad[1])
        if self._watch is not None and self._watch.calls:
            self._history.add(self._watch.calls, kept)
