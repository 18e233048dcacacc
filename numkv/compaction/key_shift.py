"""Moving keys: what turns a cached key from one position to another, and how a cache has it done.

A rotated key at position p is turned by the angles of p; to stand at p + o it needs those of o more. Values do not
know their position.

Su et al., "RoFormer" (arXiv:2104.09864), section 3.4.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.checks import check_array, check_integers
from numkv.errors import DimensionMismatch, NotSupported
from numkv.kinds import QUERY_DTYPES
from numkv.numbers import check_flag
from numkv.snapshots.snapshot import crc32_of
from numkv.storage.buffer import source_dtypes, source_kind
from numkv.storage.pool import Pool
from numkv.targets.base import Array, Target

#: ``shift(layer, keys, offsets) -> keys``.
Shift = Callable[[int, Any, Any], Any]

_TABLES = (np.dtype(np.float32), np.dtype(np.float64))

# Keys of rotated caches that are turned at once.
_AT_ONCE = 1024


def rope_shift(cos: Any, sin: Any, interleaved: bool | None = False) -> RopeShift:
    """Make the shift of a model with rotary position embedding.

    Parameters
    ----------
    cos, sin : float32 or float64 array (num_positions, rotary_dim / 2)
        The model's tables, a row per position: as many as a key can ever be moved by, and one more. With
        ``rotary_dim < head_dim`` the first dims are rotated. Tables that scale too, as YaRN's do, are taken for their
        angles alone.
    interleaved : bool
        Whether the pairs are (2i, 2i + 1), not (i, i + rotary_dim / 2).

    Returns
    -------
    RopeShift
        For `numkv.CausalCache` and its like.

    Raises
    ------
    DimensionMismatch, UnsupportedDType
        If the tables differ in shape, or are no floats.
    ValueError
        If an entry of the tables is no angle: 0 and 0, or not finite.
    """
    return RopeShift(cos, sin, interleaved)


class RopeShift:
    """Turns keys to other positions; made by `rope_shift`.

    Caches recognise it and turn their keys in place, of every kind; quantised ones are turned in float32 and quantised
    once. Where a cache rotates what it stores (``rotate=True``), keys are brought back from that first.

    Parameters
    ----------
    cos, sin, interleaved
        See `rope_shift`.
    """

    def __init__(self, cos: Any, sin: Any, interleaved: bool | None = False) -> None:
        shape = ("num_positions", "rotary_dim / 2")
        tables = []
        for name, x in (("cos", cos), ("sin", sin)):
            target = targets.of(x)
            table = target.to_host(check_array(target, name, x, _TABLES, shape))
            tables.append(table.astype(np.float64))
            shape = table.shape
        with np.errstate(over="ignore", invalid="ignore"):
            length = np.hypot(*tables)
        if not np.all((length > 0) & np.isfinite(length)):
            raise ValueError("`cos`: expected a pair of cosines and sines, got a pair of no length")
        self._tables = tuple((x / length).astype(np.float32) for x in tables)
        self._interleaved = check_flag("interleaved", interleaved)
        self._on_target: dict[str, tuple[Array, ...]] = {}

    @property
    def num_positions(self) -> int:
        """Rows of the tables: keys can be moved by fewer positions than that, in either direction."""
        return len(self._tables[0])

    @property
    def rotary_dim(self) -> int:
        """Leading elements of a key that are rotated."""
        return 2 * int(self._tables[0].shape[1])

    def __repr__(self) -> str:
        return (
            f"rope_shift(num_positions={self.num_positions}, rotary_dim={self.rotary_dim}, "
            f"interleaved={self._interleaved})"
        )

    def __call__(self, layer: int, keys: Any, offsets: Any) -> Array:
        """Turn keys, each by its own offset.

        Parameters
        ----------
        layer : int
            Ignored: all layers are rotated alike.
        keys : array (n, num_kv_heads, head_dim)
            Keys, of any float dtype.
        offsets : int32 or int64 array (n,)
            How many positions further each is to stand; negative: back.

        Returns
        -------
        array (n, num_kv_heads, head_dim)
            New keys, in the dtype of `keys`; computed in float32, in float64 where they are.

        Raises
        ------
        IndexError
            If an offset is outside the tables.
        DimensionMismatch, UnsupportedDType, NotSupported
            If an array has another shape, dtype, layout or target; or the tables are wider than a key.
        """
        target = targets.of(keys)
        keys = check_array(target, "keys", keys, QUERY_DTYPES, ("n", "num_kv_heads", "head_dim"))
        n, heads, dim = (int(size) for size in keys.shape)
        offsets = target.to_host(check_integers(target, "offsets", offsets, (n,)))
        by = [int(o) for o in np.unique(offsets)]
        for offset in by:
            self._check(offset, dim)
        kind = source_kind(keys)
        turned = target.empty((n, heads, dim), keys.dtype)
        rows = target.words(turned).reshape((n, heads, 1, dim))  # blocks of one token
        no_scale = target.empty((0, 0, 0), np.float32)
        if n:
            slots = target.index(np.arange(n), np.int64)
            target.ops.scatter_rows(target.words(keys), kind, rows, kind, no_scale, slots)
        for offset in by:
            if offset:
                slots = target.index(np.flatnonzero(offsets == offset), np.int64)
                self._turn(target, rows, kind, no_scale, slots, offset)
        return turned

    def plan(self, pool: Pool, slots: Array, offset: int) -> Callable[[], object]:
        """Check that keys can be turned, and return what turns them in place.

        Parameters
        ----------
        pool : Pool
            Where they are.
        slots : int64 array (n,)
            Which they are, on the target.
        offset : int
            How many positions further they are to stand.
        """
        if pool.is_latent:
            raise NotSupported(
                "`shift`: expected None for latents, whose rotary part is the end of a row that may share one scale, "
                "got one; keep the positions that tokens had"
            )
        self._check(offset, pool.head_dim)
        self._tables_on(pool.target)  # what is returned needs no more memory, but for rotated keys
        if pool.rotate:
            return functools.partial(self._turn_rotated, pool, slots, offset)
        return functools.partial(
            self._turn, pool.target, pool.k, pool.k_kind.name, pool.k_scale, slots, offset
        )

    def _check(self, offset: int, head_dim: int) -> None:
        if abs(offset) >= self.num_positions:
            raise IndexError(
                f"`shift`: expected an offset below the {self.num_positions} rows of rope_shift's tables, got "
                f"{offset}; make it with longer tables"
            )
        if self.rotary_dim > head_dim:
            raise DimensionMismatch(
                f"`shift`: expected keys of at least rope_shift's rotary_dim={self.rotary_dim} elements, got "
                f"{head_dim}; make it with rotary_dim / 2 columns",
                expected=self.rotary_dim,
                actual=head_dim,
            )

    def _turn(
        self, target: Target, k: Array, kind: str, scale: Array, slots: Array, offset: int
    ) -> None:
        cos, sin = self._tables_on(target)
        target.ops.shift_rows(k, kind, scale, slots, offset, cos, sin, self._interleaved)

    def _tables_on(self, target: Target) -> tuple[Array, ...]:
        if target.key not in self._on_target:
            self._on_target[target.key] = tuple(target.asarray(x) for x in self._tables)
        return self._on_target[target.key]

    def _turn_rotated(self, pool: Pool, slots: Array, offset: int) -> None:
        """Turn keys that are stored in another basis, which are brought back from it, some at a time."""
        target = pool.target
        no_scale = target.empty((0, 0, 0), np.float32)
        for first in range(0, int(slots.shape[0]), _AT_ONCE):
            part = slots[first : min(int(slots.shape[0]), first + _AT_ONCE)]
            keys = pool.k_buffer.gather(part)
            n, heads, dim = (int(size) for size in keys.shape)
            numbers = target.index(np.arange(n), np.int64)
            rows = keys.reshape((n, heads, 1, dim))  # blocks of one token
            self._turn(target, rows, source_kind(keys), no_scale, numbers, offset)
            pool.k_buffer.scatter(keys, part)


def plan_shift(
    shift: Shift, layers: Mapping[int, Pool], cells: NDArray[np.int32], offset: int, step: int
) -> list[Callable[[], object]]:
    """Turn the keys of some cells in all layers, up to the point where nothing can go wrong any more.

    Parameters
    ----------
    shift : Shift
        What turns them. A `RopeShift` does so in place; any other function gets copies, and what it returns is
        stored beside the cache. So does a `RopeShift` of rotated keys, as these take memory to turn.
    layers : mapping of int to Pool
        The layers: pools of one block.
    cells : int32 array (n,)
        Which keys, by position.
    offset : int
        How many positions further they are to stand.
    step : int
        Keys that a function is called with at most.

    Returns
    -------
    list of callable
        What there is to do; none of it fails.
    """
    moves: list[Callable[[], object]] = []
    slots = None
    for layer, pool in layers.items():
        if not isinstance(shift, RopeShift) or pool.rotate:
            moves.append(_turned(shift, layer, pool, cells, offset, step))
            continue
        if slots is None:
            slots = pool.target.index(cells, np.int64)
        moves.append(shift.plan(pool, slots, offset))
    return moves


def _turned(
    shift: Shift, layer: int, pool: Pool, cells: NDArray[np.int32], offset: int, step: int
) -> Callable[[], object]:
    """Have a function turn a layer's keys; what puts them into their place."""
    target, heads = pool.target, int(pool.k.shape[1])
    dim, n = pool.head_dim, len(cells)
    slots = target.index(cells, np.int64)
    # What is to be stored lies in a block of its own until then.
    staging = pool.k_buffer.like(1, n)
    dtypes = source_dtypes(pool.k_kind)
    for first in range(0, n, step):
        part = slice(first, min(n, first + step))
        size = part.stop - first
        # Copies, as the function may work in place and keep what it was given.
        keys = pool.k_buffer.gather(slots[part])
        offsets = target.index(np.full(size, offset, np.int32), np.int32)
        result = shift(layer, keys, offsets)
        result = check_array(target, "keys from shift", result, dtypes, (size, heads, dim))
        pool.k_buffer.check_finite("k", result)
        staging.scatter(result, target.index(np.arange(first, part.stop), np.int64))

    numbers = target.index(np.arange(n), np.int64)
    return functools.partial(staging.copy_tokens, numbers, pool.k_buffer, slots)


def turns_of(shift: Any) -> dict[str, Any] | None:
    """Describe a key shift: of RoPE by the angles of one position, of a function only as such."""
    if not isinstance(shift, RopeShift):
        return None if shift is None else {"is": "a function"}
    cos, sin = (table[1:2] for table in shift._tables)
    return {
        "is": "rope",
        "rotary_dim": shift.rotary_dim,
        "interleaved": shift._interleaved,
        "one_position": crc32_of((cos, sin)),
    }
