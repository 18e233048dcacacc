"""What has become of tokens since a kernel was asked to look at them: it reports when the call is long over."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Calls after which one is certainly done.
LONG_AGO = 1 << 12


class History:
    """What has become of a sequence's tokens since calls of which something may still be reported.

    Of several tokens that were not finite sometimes only the first is reported. So whatever comes after one counts as
    if it were not finite either.
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
        """Where the first of the tokens is now that come with or after one that was reported; None if all are gone."""
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
