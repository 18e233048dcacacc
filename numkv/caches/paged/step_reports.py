"""What kernels on CUDA report of a step's rows, after the calls are over."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from numkv.errors import NonFiniteInput
from numkv.targets.call import Marker


class ToldStep:
    """What a step does about rows that a kernel may find to be NaN or infinite."""

    _store: Any
    _buffers: Any
    _noting: Marker | None

    def _watch_nothing(self: Any) -> None:
        """Say that the call that comes looks for nothing, unless it says so."""
        if self._store.watch is not None:
            self._store.watch.latest = None

    def _look(self: Any, looked_at: Any) -> int:
        """A number for a call that is made again."""
        if looked_at is None:
            return 0
        of_k, of_v, _ = looked_at
        marker = self._marker(False)._replace(watch=None)
        look: int = self._store.watch.look((of_k, of_v, marker))
        return look

    def _captured(self: Any, name: str) -> bool:
        """Whether a call becomes a part of a CUDA graph, which keeps what it needs; refused where tables may go."""
        if self._buffers is None:
            self._store.target.refuse_capture(f"Step.{name}")
            return False
        held: bool = self._store.target.hold(self._buffers, self._store)
        return held

    def _marker(self: Any, captured: bool) -> Marker:
        """What notes a new token whose rows are not what they should be; it keeps nothing large alive."""
        if captured and self._buffers is not None:
            of_buffers: Marker = self._buffers._marker()
            return of_buffers
        noting: Marker | None = self._noting
        if noting is None:
            store = weakref.ref(self._store)
            sequences, places, new_lens = self.sequences, self._places, self.new_lens
            kept, tree = self._kept, self._tree

            def mark(token: int, error: NonFiniteInput, call: int) -> None:
                of, ends = store(), np.cumsum(new_lens)
                i = int(np.searchsorted(ends, token, "right"))
                if tree is not None and kept:
                    token = tree.moved.get(token, int(ends[i]))
                if of is None or (kept and token - int(ends[i] - new_lens[i]) >= kept[i]):
                    return  # rolled back
                of.bad.tell(sequences[i], int(places[token]), error, call)

            noting = self._noting = Marker(self._store.watch, mark)
        return noting

    def _refuse_bad(self: Any) -> None:
        """Refuse to go on with a step of which a kernel has found rows to be NaN or infinite."""
        self._store.collect()
        if self._store.bad:
            for seq, length in zip(self.sequences, self._ends, strict=True):
                self._store.bad.refuse(seq, length)
