"""How a `NumkvCache` stores rows: one object that its layers share."""

from __future__ import annotations

from typing import Any

from numkv.access import Access
from numkv.caches import FullPrecision
from numkv.caches.layer_spec import in_full
from numkv.kinds import Kind, kind
from numkv.numbers import check_flag, check_size
from numkv.transformers.books import Books
from numkv.transformers.bound import Groups
from numkv.transformers.recent import Recent

# Short blocks are copied fast where beams part, and long ones read as fast as memory without blocks.
_BLOCK_SIZE = 256
_SMALLEST = 16


class Options:
    """Kinds, room and rotation of a cache, checked.

    Parameters
    ----------
    kind, k_kind, v_kind : str, optional
        Storage kinds; see `numkv.transformers.NumkvCache`.
    capacity : int, optional
        Tokens of each sequence to reserve room for.
    rotate : bool
        Whether rows are rotated.
    full_precision : FullPrecision, optional
        Newest and first tokens of each sequence that are kept in full precision, too.
    """

    def __init__(
        self,
        kind: Any = None,
        k_kind: Any = None,
        v_kind: Any = None,
        capacity: int | None = None,
        rotate: bool = False,
        full_precision: FullPrecision | None = None,
    ) -> None:
        if kind is not None and k_kind is not None and v_kind is not None:
            raise ValueError(
                "`kind`: expected None where k_kind and v_kind are both given, got all three"
            )
        self.k_kind, self.v_kind = (_kind(x if x is not None else kind) for x in (k_kind, v_kind))
        self.capacity = 0 if capacity is None else check_size("capacity", capacity)
        self.rotate = check_flag("rotate", rotate)
        kinds = self.k_kind, self.v_kind
        quantises = any(of is not None and of.has_scales for of in kinds)
        self.full_precision = in_full(full_precision, "floats", quantises)
        self.access = Access()
        self.groups = Groups()
        self._empty: dict[tuple[int, int, int, int], Books] = {}

    def recent(self) -> Recent | None:
        """What keeps a layer's tokens in full precision, if any."""
        kept = self.full_precision
        return None if kept is None else Recent(kept.window, kept.num_sink_tokens)

    def kinds(self, of_keys: Kind, of_values: Kind) -> tuple[Kind, Kind]:
        """Kinds of K and V, those of the model where none was asked for."""
        return self.k_kind or of_keys, self.v_kind or of_values

    def block_size_for(self, reach: int) -> int:
        """Tokens of a block in a layer that drops tokens out of reach; of -1, in one that keeps all."""
        size = _BLOCK_SIZE
        while 0 <= reach < 4 * size and size > _SMALLEST:
            size //= 2
        return size

    def empty_books(
        self, batch: int, block_size: int, reach: int, num_blocks: int | None = None
    ) -> Books:
        """Books of a batch without tokens; the same object for all layers that ask alike."""
        if num_blocks is None:
            tokens = self.capacity
            if reach >= 0:
                tokens = min(tokens, reach + block_size)
            num_blocks = max(1, batch * -(-tokens // block_size))
        key = (batch, block_size, reach, num_blocks)
        if key not in self._empty:
            self._empty[key] = Books.empty(batch, block_size, num_blocks, reach)
        return self._empty[key]


def _kind(name: Any) -> Kind | None:
    return None if name is None else kind(name)
