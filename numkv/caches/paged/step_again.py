"""A step's calls that are made again: on CUDA those that repeat an earlier one go a short way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numkv.caches.paged.buffers import StepBuffers
from numkv.caches.paged.store import BlockStore, Ints
from numkv.storage.pool import Pool
from numkv.targets.base import Array
from numkv.targets.call import Marker
from numkv.writing.fused_write import Projection

__all__ = ["StepAgain"]


class StepAgain:
    """The part of `Step` that concerns calls like earlier ones; see `numkv.targets.base.Target.repeats`."""

    _store: BlockStore
    _buffers: StepBuffers | None
    _written: Any
    _slots: list[Array]
    _tables: list[Array]
    _positions: Array
    _lens: Array
    _starts: Array
    _ends: list[int]
    _place: Any
    positions: Ints
    _refuse_bad: Callable[[], None]
    _marker: Callable[[bool], Marker]
    _append_here: Any
    _write_here: Any
    _attend_here: Any

    @property
    def _again(self) -> Any:
        """What makes calls that repeat the short way; None for steps in buffers, whose calls are for graphs."""
        return self._store.again if self._buffers is None else None

    def _append_again(
        self, layer: int, pool: Pool, group: int, k: Any, v: Any, check_finite: bool, stream: Any
    ) -> None:  # fmt: skip
        """Append as an earlier call did, or in the general way."""
        again = self._store.again
        what = "append", layer, check_finite, len(self.positions)
        call, own = again.find(what, stream, (k, v), pool.k, self._place), self._slots[group]
        if call.replay is not None:
            self._refuse_bad()
            numbers = (0, self._look(call.replay.note))
            if call.run((again.pointer(own),), numbers) is None:
                self._written[layer] = True
                return
        call.long(
            lambda: self._append_here(layer, pool, own, k, v, check_finite), lambda: (own,),
            lambda: self._store.watch.latest, after=self._place,
        )  # fmt: skip

    def _write_again(
        self, layer: int, pool: Pool, slots: Array, given: tuple[Any, ...], check_finite: bool, stream: Any
    ) -> Array:  # fmt: skip
        """Write as an earlier call did, or in the general way."""
        qkv, num_q_heads, cos, sin, qk_mode, q_weight, k_weight, eps, q_out = given
        kinds = type(num_q_heads), type(qk_mode), type(eps)
        what = "write", layer, kinds, num_q_heads, qk_mode, eps, check_finite, len(self.positions)
        arrays = (qkv, cos, sin, q_weight, k_weight, q_out)
        again, own = self._store.again, (slots, self._positions)
        call = again.find(what, stream, arrays, pool.k, self._place)
        if call.replay is not None:
            self._refuse_bad()
            positions, looked_at = call.replay.note
            if positions < 0 or max(self._ends, default=0) <= positions:
                numbers = (0, self._look(looked_at))
                q = call.run([*map(again.pointer, own)], numbers)
                if q is not again.missed:
                    self._written[layer] = True
                    return q
        made: list[Projection] = []

        def write() -> Array:
            made.append(self._write_here(layer, pool, slots, given, check_finite))
            return made[0].q_out

        def note() -> tuple[int, Any]:
            return int(made[0].cos.shape[0]) if made[0].rotates else -1, self._store.watch.latest

        found: Array = call.long(write, lambda: own, note, frozenset({5}), self._place)
        return found

    def _attend_again(
        self, layer: int, pool: Pool, group: int, q: Any, asked: tuple[Any, ...], stream: Any
    ) -> Any:
        """Attend as an earlier call did, or in the general way."""
        sm_scale, logits_soft_cap, sinks, return_lse, out = asked
        again, own = self._store.again, (self._tables[group], self._lens, self._starts)
        kinds, shape = (type(sm_scale), type(logits_soft_cap)), own[0].shape
        what = "attend", layer, kinds, sm_scale, logits_soft_cap, return_lse, shape, len(self.positions)  # fmt: skip
        call = again.find(what, stream, (q, sinks, out), pool.k, self._place)
        if call.replay is not None:
            found = call.run([*map(again.pointer, own)])
            if found is not again.missed:
                return found
        return call.long(
            lambda: self._attend_here(pool, group, q, *asked), lambda: own, lambda: None,
            frozenset({2}), self._place,
        )  # fmt: skip

    def _look(self, looked_at: Any) -> int:
        """A number for a call that is made again."""
        if looked_at is None:
            return 0
        of_k, of_v, _ = looked_at
        marker = self._marker(False)._replace(watch=None)
        look: int = self._store.watch.look((of_k, of_v, marker))
        return look
