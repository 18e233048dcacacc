"""How large a store may become: what was used longest ago is deleted first."""

from __future__ import annotations

import collections
import errno
from typing import Any

#: A process looks at what there is again when it has written this part of the bound since: so far may each process go
#: beyond it, as nobody counts for all.
_SLACK = 1 / 16
#: What is left after evicting, as a part of the bound.
_LEFT = 0.9


class Bound:
    """The bound of one process on a folder that others write to as well.

    Parameters
    ----------
    place : Folder or RemoteFolder
        Where objects lie.
    most : int or None
        Bytes; None: as many as there is room for.
    """

    def __init__(self, place: Any, most: int | None) -> None:
        self._place, self._most = place, most
        self._known: int | None = None  # bytes there, as far as this process knows
        self._since = 0  # bytes written since it looked

    def make_room(self, nbytes: int) -> int:
        """Have room for an object that is to be written; how many were deleted for that.

        Raises
        ------
        OSError
            If it is larger than all of them may be together.
        """
        if self._most is None:
            return 0
        if nbytes > self._most:
            raise OSError(
                errno.EFBIG, f"an object of {nbytes} bytes is larger than the store may be"
            )
        evicted = 0
        look = self._known is None or self._since > self._most * _SLACK
        if look or (self._known or 0) + nbytes > self._most:
            evicted = self._evict(nbytes)
        self._known = (self._known or 0) + nbytes
        self._since += nbytes
        return evicted

    def _evict(self, nbytes: int) -> int:
        assert self._most is not None
        with self._place.alone():
            entries = list(self._place.entries())
            total, evicted = sum(entry.nbytes for entry in entries), 0
            if total + nbytes > self._most:
                oldest = collections.deque(sorted(entries, key=lambda x: x.stamp))
                while oldest and total + nbytes > self._most * _LEFT:
                    chosen, size = [], 0
                    while oldest and total + nbytes - size > self._most * _LEFT:
                        chosen.append(oldest.popleft())
                        size += chosen[-1].nbytes
                    for entry, gone in zip(chosen, self._place.delete(chosen), strict=True):
                        total -= entry.nbytes * gone
                        evicted += gone
            self._known, self._since = total, 0
        return evicted
