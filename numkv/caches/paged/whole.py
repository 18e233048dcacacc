"""A `PagedKVCache` as a whole: its scales, and how it is cleared, copied and pickled."""

from __future__ import annotations

from typing import Any, Self

from numkv.access import writes
from numkv.caches.paged.reading import ReadableSequences
from numkv.caches.paged.tiers import with_tiers
from numkv.checks import check_index
from numkv.errors import NotSupported, NumkvError

__all__ = ["WholeCache"]


class WholeCache(ReadableSequences):
    """The part of `PagedKVCache` that is not about one sequence."""

    # -- scales

    @writes
    def set_scales(self, layer: int, k: Any = None, v: Any = None) -> None:
        """Set the scales of a layer's kv heads, for kinds that have such: a value is its 8-bit float times the scale.

        Parameters
        ----------
        layer : int
            Which layer.
        k, v : float or float32 array (num_kv_heads,), optional
            Finite scales above 0 of K and of V, on the host; None leaves them as they are, which is 1 at first.

        Raises
        ------
        NumkvError
            If the cache has sequences, or pinned blocks: their rows are stored by the present scales.
        NotSupported
            If the kind has no scales of heads.
        DimensionMismatch, UnsupportedDType, ValueError
            If they are no such scales.
        IndexError
            If there is no such layer.

        Notes
        -----
        The prefix cache forgets what it has, as it is stored by the former scales. Nothing has changed after an error.
        """
        pool, _ = self._store.place(check_index("layer", layer, self.num_layers))
        if self._sequences:
            raise NumkvError(
                f"set_scales: expected a cache without sequences, got {len(self)}; set scales before "
                "sequences are added"
            )
        for name, scales in (("k", k), ("v", v)):
            if scales is not None:
                pool.buffer(name).check_scales(name, scales)
        self.blocks.forget()
        pool.set_scales(k, v)
        if self._store.tiers is not None:
            self._store.tiers.rename()

    # -- as a whole

    @writes
    def clear(self) -> None:
        """Remove all sequences and forget all cached prefixes, pinned ones too; the memory stays.

        Raises
        ------
        NumkvError
            If there is an open step.

        Notes
        -----
        Blocks that were allocated by `blocks` itself are free afterwards too. Numbers of sequences are not used again.
        """
        self._refuse_open_steps("clear")
        before = dict(self._sequences)
        self._publish(dict.fromkeys(before))
        try:
            self.blocks.clear()
        except Exception:  # memory, say
            self._publish(before)
            raise

    @writes
    def copy(self) -> Self:
        """The same cache once more, in memory of its own: rows, sequences by the same numbers, cached prefixes, pins.

        Returns
        -------
        PagedKVCache

        Raises
        ------
        NumkvError
            If there is an open step.
        """
        return self._copied()

    def _copied(self) -> Self:
        self._refuse_open_steps("copy")
        made = self.__class__.__new__(self.__class__)
        store = with_tiers(self._store.copy(), self.store)
        made._adopt(store, dict(self._sequences), self._next)
        return made

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    @writes
    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: a copy, so that it is of one moment."""
        if not self._target.values_on_host:
            raise NotSupported(
                f"a cache on {self._target.name} cannot be pickled, only one on the CPU; swap its sequences out, "
                "and pickle these"
            )
        self._refuse_open_steps("copy")
        store = self._store.copy()
        return {"store": store, "sequences": dict(self._sequences), "next": self._next}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._adopt(state["store"], state["sequences"], state["next"])

    def _refuse_open_steps(self, name: str) -> None:
        for seq, state in self._sequences.items():
            if state.reserved is not None:
                raise NumkvError(
                    f"{name}: expected a cache without open steps, got one of sequence {seq}; commit it or roll it "
                    "back first"
                )
