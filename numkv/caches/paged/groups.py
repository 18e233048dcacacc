"""Layer groups: layers with the same window, or chunk, share a block table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.caches.paged.layers import LayerRows, Layers

#: Chunk, window, rows, first tokens that stay, and whether they are full-precision copies of codes.
_Shape = tuple[int, int, LayerRows, int, bool]


class LayerGroup(NamedTuple):
    """Layers that share a block table."""

    window: int
    """Earlier tokens that a query of these layers attends to, -1 for all."""
    layers: list[int]
    """The layers. Where all layers are alike the i-th of each group lies in the i-th pool."""
    chunk: int = 0
    """Tokens of a chunk, within which queries attend; 0 for none."""
    keeps: int = 0
    """First tokens whose blocks stay when the window has moved past them."""
    beside: bool = False
    """Whether these are rows in full precision, beside codes that are read where such are gone."""

    def kept_blocks(self, block_size: int) -> int:
        """First blocks that stay."""
        return -(-self.keeps // block_size)

    @property
    def begins_anew(self) -> bool:
        """Whether tokens after whole blocks need none of their rows, as with token groups of newest tokens."""
        return self.beside and self.chunk > 0 and not self.keeps

    @property
    def is_full(self) -> bool:
        """Whether queries attend to all earlier tokens."""
        return self.window < 0 and not self.chunk

    def first_visible(self, length: int) -> int:
        """First token that the newest of `length` tokens attends to; later tokens need no earlier one."""
        if self.chunk:
            return max(0, length - 1) // self.chunk * self.chunk
        return 0 if self.window < 0 else max(0, length - 1 - self.window)

    def ranges(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """What queries at some positions see of their sequences: each its chunk up to itself."""
        return np.stack([positions // self.chunk * self.chunk, positions + 1], 1)

    def reach(self, length: int) -> int:
        """Earlier tokens that the newest of `length` tokens attends to, -1 for all."""
        return length - 1 - self.first_visible(length) if self.chunk and length else self.window


def groups_of(layers: Layers, block_size: int) -> list[LayerGroup]:
    """Split layers into groups, each with one window or chunk, whose blocks have the same bytes.

    So all groups use one free list. If layers have one shape, groups have equal sizes: the greatest common divisor of
    the numbers of layers that share a window. Otherwise a group has as many layers of one shape as fit into a block's
    bytes. These bytes are chosen to waste least.

    Parameters
    ----------
    layers : Layers
        Their rows, windows and chunks.
    block_size : int
        Tokens in a block.

    Returns
    -------
    list of LayerGroup
        Full attention first: its table is the longest, and prefixes are looked up by it.
    """
    if layers.alike:
        return _equal_groups(layers, layers.storing)
    by_shape: dict[_Shape, list[int]] = {}
    for layer in layers.storing:
        rows = layers.rows[layer]
        assert rows is not None
        shape = (
            layers.chunks[layer],
            layers.windows[layer],
            rows,
            layers.keeps(layer),
            layer >= layers.own,
        )
        by_shape.setdefault(shape, []).append(layer)
    sizes = {shape: shape[2].offsets(block_size)[1] for shape in by_shape}

    def parts(nbytes: int) -> dict[_Shape, int]:
        """Return how many groups layers of each shape make."""
        return {x: -(-len(of) // min(len(of), nbytes // sizes[x])) for x, of in by_shape.items()}

    largest = max(sizes.values())
    choices = {
        count * sizes[x]
        for x, of in by_shape.items()
        for count in range(1, len(of) + 1)
        if count * sizes[x] >= largest
    }
    # The bytes of a token, counting layers with and without windows equally; of equals the fewest groups.
    # Full-precision copies count less, as only the newest tokens have them.
    best = min(
        choices, key=lambda n: (n * sum(m / 8 if x[4] else m for x, m in parts(n).items()), -n)
    )
    found = []
    for shape in sorted(by_shape, key=lambda x: (x[4], x[0], x[1], by_shape[x][0])):
        of, count = by_shape[shape], parts(best)[shape]
        ends = [len(of) * i // count for i in range(count + 1)]
        rest = shape[0], *shape[3:]
        found += [LayerGroup(shape[1], of[a:b], *rest) for a, b in itertools.pairwise(ends)]
    return found


def page_bytes(layers: Layers, groups: Sequence[LayerGroup], block_size: int) -> int:
    """Return the bytes of a block if layers differ: those of the largest group."""
    found = []
    for group in groups:
        of_group = [layers.rows[layer] for layer in group.layers]
        found.append(sum(rows.offsets(block_size)[1] for rows in of_group if rows is not None))
    return max(found)


def _equal_groups(layers: Layers, storing: Sequence[int]) -> list[LayerGroup]:
    by_reach: dict[tuple[int, int], list[int]] = {}
    for layer in storing:
        by_reach.setdefault((layers.chunks[layer], layers.windows[layer]), []).append(layer)
    size = math.gcd(*(len(of) for of in by_reach.values()))
    return [
        LayerGroup(window, by_reach[chunk, window][i : i + size], chunk)
        for chunk, window in sorted(by_reach)
        for i in range(0, len(by_reach[chunk, window]), size)
    ]
