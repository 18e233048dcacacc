"""Bounds of the keys in the blocks of a `PagedKVCache`, for steps that read sparsely.

Keys reach blocks in many ways: `append`, `write`, users' kernels, copies from other blocks or the host, compaction.
None of these computes bounds. The cache records on the host, once for all layers, how many of a block's first rows its
bounds cover. Reserving, filling or moving rows lowers that count.

A sparse step recomputes the bounds of each block that covers fewer rows than the step reads. It also recomputes those
of each block that it writes to: one per sequence in decode, all of a prompt's blocks after a prompt. The counts of
written blocks do not rise, because the step may write to them again.

A count that is too low only costs time. Bounds may still include rows that were dropped from the end of a block; they
are then wider than necessary. Such a block is the newest one of its sequence, so it is read in any case. The next row
written to it lowers the count.
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
    """Return the bytes of the bounds of one block."""
    return sum(8 * heads * dim for heads, dim in _places(layers, groups)[0])


def _places(
    layers: Layers, groups: Sequence[LayerGroup]
) -> tuple[list[tuple[int, int]], list[int]]:
    """Return kv heads and head dim of each pair of arrays, and the pair that stores each buffer's bounds.

    A block belongs to one group. A pair therefore serves one layer of each group whose keys have its shape.
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
    """The smallest and the largest element of each key channel, for every block of all buffers.

    Parameters
    ----------
    target : Target
        The target that stores the bounds.
    layers : Layers
        The layers' shapes and kinds.
    groups : sequence of LayerGroup
        Layers by group.
    num_blocks, block_size : int
        The number of blocks. The tokens of a block.

    Raises
    ------
    NotSupported
        If layers store latents.
    MemoryError
        If memory is exhausted.
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
        self._guard = Guard()  # steps of several threads may read a shared prefix

    @property
    def nbytes(self) -> int:
        """Return the bytes of all bounds."""
        return self._nbytes

    def forget(self, ids: Any = None) -> None:
        """Mark the bounds of blocks as out of date: all blocks if None."""
        self._covered[slice(None) if ids is None else ids] = 0

    def lower(self, ids: NDArray[np.int32], first: Ints) -> None:
        """Record that rows from `first` on are written to blocks; each block occurs once."""
        self._covered[ids] = np.minimum(self._covered[ids], first[:, None])

    def covered(self, part: int) -> NDArray[np.int32]:
        """Return how many of each block's first rows the bounds of a buffer cover: a copy."""
        return self._covered[:, self._place_of[part]].copy()

    def update(
        self, part: int, pool: Pool, blocks: NDArray[np.int32], counts: Ints, written: NDArray[np.bool_]
    ) -> tuple[Array, Array]:  # fmt: skip
        """Recompute bounds that cover too few rows, and return the arrays of lower and upper bounds.

        Parameters
        ----------
        part : int
            Index of the buffer.
        pool : Pool
            The buffer's vectors.
        blocks : int32 array (n,)
            Blocks to bound. A block that sequences share may occur more than once.
        counts : int64 array (n,)
            The first rows of each block that its bounds must cover.
        written : bool array (n,)
            Whether the running step may write to the block again. If so, its covered rows do not rise.
        """
        place = self._place_of[part]
        low, high = self._arrays[place]
        # The lock lasts until the kernel has run, or was launched. A signal handler that interrupts computes the same
        # bounds for blocks that are not written to.
        with self._guard.lock:
            stale = (self._covered[blocks, place] < counts) | written
            if stale.any():
                ids, where = np.unique(blocks[stale], return_inverse=True)
                rows, known = np.zeros(len(ids), np.int64), self._covered[ids, place]
                np.maximum.at(rows, where, counts[stale])
                # Blocks that this step does not write to are covered up to `rows` from now on.
                known[where[~written[stale]]] = self._block_size
                index = self._target.index
                self._covered[ids, place] = 0  # after an interrupt, these bounds are undefined
                self._target.ops.key_bounds(
                    pool.k, pool.k_kind.name, pool.k_scale, index(ids, np.int64), index(rows, np.int64), low, high
                )  # fmt: skip
                self._covered[ids, place] = np.minimum(known, rows)
        return low, high
