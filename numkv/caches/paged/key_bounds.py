"""Bounds of the keys in the blocks of a `PagedKVCache`, for steps that read sparsely.

Rows come into blocks in many ways: appended and written, by kernels of a user's own, copied from other blocks and from
the host, moved by compactions. None of these computes bounds. What the cache notes, on the host and once for all
layers, is how many of a block's first rows its bounds still speak for; whoever reserves, fills or moves rows lowers
that number. The step that reads sparsely bounds the blocks anew of which it wants more rows than that, and always those
that it writes to itself: in decode one block for each sequence, after a prompt all of its blocks at once. Of the latter
the number stays as it is, as the step may write to them again.

A number that is too low costs time, and nothing else. Rows that were dropped from the end of a block may still be in
its bounds, which are larger than they need be then; the block is the newest one of its sequence, which is read anyway,
and its next row lowers the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.blocks.guard import Guard
from numkv.caches.paged.groups import LayerGroup
from numkv.caches.paged.layers import Layers
from numkv.errors import NotSupported
from numkv.storage.pool import Pool
from numkv.targets.base import Array, Target

Ints = NDArray[np.int64]


def bounds_nbytes(layers: Layers, groups: Sequence[LayerGroup]) -> int:
    """Bytes of the bounds of a block."""
    return sum(8 * heads * dim for heads, dim in _places(layers, groups)[0])


def _places(
    layers: Layers, groups: Sequence[LayerGroup]
) -> tuple[list[tuple[int, int]], list[int]]:
    """Kv heads and head dim of each pair of arrays, and which pair each buffer's bounds lie in.

    A block is of one group, so that a pair serves a layer of each group whose rows of K have its shape.
    """
    shapes: list[tuple[int, int]] = []
    numbers: dict[tuple[tuple[int, int], int], int] = {}
    places: list[int] = []
    for group in groups[:1] if layers.alike else groups:
        counts: dict[tuple[int, int], int] = {}
        for layer in group.layers:
            rows = layers.rows[layer]
            assert rows is not None
            shape = rows.num_kv_heads, rows.head_dim
            counts[shape] = counts.get(shape, 0) + 1
            key = shape, counts[shape]
            if key not in numbers:
                numbers[key] = len(shapes)
                shapes.append(shape)
            places.append(numbers[key])
    return shapes, places


class BlockBounds:
    """The smallest and the largest element of each column of the keys of every block, in all buffers.

    Parameters
    ----------
    target : Target
        Where they are.
    layers : Layers
        What is stored.
    groups : sequence of LayerGroup
        Layers by group.
    num_blocks, block_size : int
        How many blocks, and the tokens in each.

    Raises
    ------
    NotSupported
        If layers keep latents.
    MemoryError
        If there is no room.
    """

    def __init__(
        self, target: Target, layers: Layers, groups: Sequence[LayerGroup], num_blocks: int, block_size: int
    ) -> None:  # fmt: skip
        if layers.first.is_latent:
            raise NotSupported(
                "`key_bounds`: expected False for latents, whose models choose tokens by an indexer, got True; see "
                "`numkv.sparse.token_decode_attention`"
            )
        self._target, self._nbytes = target, num_blocks * bounds_nbytes(layers, groups)
        shapes, self._place_of = _places(layers, groups)
        sizes = [(num_blocks, *shape) for shape in shapes]
        self._arrays: list[tuple[Array, Array]] = [
            (target.zeros(size, np.float32), target.zeros(size, np.float32)) for size in sizes
        ]
        self._covered, self._block_size = np.zeros((num_blocks, len(shapes)), np.int32), block_size
        self._guard = Guard()  # steps of several threads may read a prefix that they share

    @property
    def nbytes(self) -> int:
        """Bytes of the bounds."""
        return self._nbytes

    def forget(self, ids: Any = None) -> None:
        """Say that blocks have other rows now, or will have; all of them if None."""
        self._covered[slice(None) if ids is None else ids] = 0

    def lower(self, ids: NDArray[np.int32], first: Ints) -> None:
        """Say that rows from `first` on are written to blocks, each of which comes once."""
        self._covered[ids] = np.minimum(self._covered[ids], first[:, None])

    def covered(self, part: int) -> NDArray[np.int32]:
        """How many of each block's first rows the bounds of a buffer speak for: a copy."""
        return self._covered[:, self._place_of[part]].copy()

    def update(
        self, part: int, pool: Pool, blocks: NDArray[np.int32], counts: Ints, written: NDArray[np.bool_]
    ) -> tuple[Array, Array]:  # fmt: skip
        """Bound blocks anew of which not enough is known; the arrays of the bounds.

        Parameters
        ----------
        part : int
            Which buffer.
        pool : Pool
            Its rows.
        blocks : int32 array (n,)
            Blocks; sequences that share one may each name it.
        counts : int64 array (n,)
            How many of their first rows are to be bounded.
        written : bool array (n,)
            Which of them are of a step that may write to them, and to them again: no more is known of them afterwards.
        """
        place = self._place_of[part]
        low, high = self._arrays[place]
        # Held until the kernel is done, or launched. A signal handler that gets in between bounds the same rows of
        # what is not written to.
        with self._guard.lock:
            stale = (self._covered[blocks, place] < counts) | written
            if stale.any():
                ids, where = np.unique(blocks[stale], return_inverse=True)
                rows, known = np.zeros(len(ids), np.int64), self._covered[ids, place]
                np.maximum.at(rows, where, counts[stale])
                # Blocks that this step does not write to stay as they are bounded now.
                known[where[~written[stale]]] = self._block_size
                index = self._target.index
                self._covered[ids, place] = 0  # an interrupt leaves what nobody can tell
                self._target.ops.key_bounds(
                    pool.k, pool.k_kind.name, pool.k_scale, index(ids, np.int64), index(rows, np.int64), low, high
                )  # fmt: skip
                self._covered[ids, place] = np.minimum(known, rows)
        return low, high
