"""What caches of one sequence do about rows that a kernel has found to be NaN or infinite, after the call was over."""

from __future__ import annotations

import weakref
from typing import Any

from numkv.drawing.page import Drawn
from numkv.errors import NonFiniteInput
from numkv.targets.base import Target
from numkv.targets.call import Marker

__all__ = ["Watched"]

# Calls after which one is certainly done.
_LONG_AGO = 1 << 12


class Watched(Drawn):
    """A cache of one sequence whose rows kernels look at; on the CPU nothing is ever reported."""

    _target: Target
    #: What kernels report to; None on the CPU.
    _watch: Any
    #: What makes calls that repeat the short way; None where there is none.
    _again: Any
    #: Calls of the watch up to which tokens from a position on have been dropped.
    _drops: list[tuple[int, int]]
    #: The first position with rows that were NaN or infinite, once that is known, and the error.
    _bad: tuple[int, NonFiniteInput] | None = None

    def _stored(self, layer: int) -> int:
        raise NotImplementedError

    def _begin_watching(self) -> None:
        self._watch = self._target.new_watch()
        self._drops = []

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
            if of is None or (of._bad is not None and position >= of._bad[0]):
                return
            if not any(call <= last and position >= length for last, length in of._drops):
                of._bad = position, error

        return Marker(self._watch, mark, start)

    def _refuse_bad(self, layer: int | None = 0) -> None:
        """Refuse to go on behind a token that a kernel has found to be NaN or infinite."""
        self._target.collect_late(self._watch)
        if self._bad is not None and layer is not None and self._bad[0] < self._stored(layer):
            position, error = self._bad
            raise NonFiniteInput(f"{error}; truncate to {position} tokens", error.index)

    def _mend(self, length: int) -> None:
        """Forget a bad token from position `length` on, as it is dropped."""
        if self._bad is not None and length <= self._bad[0]:
            self._bad = None
        if (
            self._watch is not None and self._watch.calls
        ):  # what is reported of tokens that are gone is old
            calls = self._watch.calls
            kept = [(n, at) for n, at in self._drops if at < length and calls - n < 1 << 12]
            self._drops = [*kept, (calls, length)]
