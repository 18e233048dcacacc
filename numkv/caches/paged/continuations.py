"""Which cached blocks come after which: where a prompt ends inside a block, the one that begins as it goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from numkv.blocks.pool import BlockPool

#: How many of the possible next blocks are checked: those that were noted last.
_MOST = 256


class Continuations:
    """Hashes and tokens of blocks by the hash of the block before.

    Noted blocks may have been evicted since, so callers ask the `BlockPool`. Hashes are those of group 0.

    Parameters
    ----------
    blocks : BlockPool
        Which blocks are cached.
    """

    def __init__(self, blocks: BlockPool) -> None:
        self._blocks = blocks
        self._after: dict[bytes, dict[bytes, NDArray[np.int32]]] = {}
        self._count = 0

    def note(self, parent: bytes, names: NDArray[np.uint8], tokens: NDArray[np.int32]) -> None:
        """Note a chain of blocks.

        Parameters
        ----------
        parent : bytes
            Name of the block before the first, or of the root.
        names : uint8 array (n, 32)
            Their names in group 0.
        tokens : int32 array (n, block_size)
            Their tokens.
        """
        for name, of_block in zip(names, tokens, strict=True):
            after, own = self._after.setdefault(parent, {}), name.tobytes()
            self._count += after.pop(own, None) is None
            after[own] = of_block  # the last one now
            parent = own
        if self._count > 2 * self._blocks.num_blocks + _MOST:
            self._drop_evicted()

    def newest(self, parent: bytes) -> Iterator[tuple[bytes, NDArray[np.int32]]]:
        """Names and tokens of the blocks that were noted last after a block, last first."""
        return itertools.islice(reversed(self._after.get(parent, {}).items()), _MOST)

    def copy(self, blocks: BlockPool) -> Continuations:
        """The same for a copy of the pool."""
        made = Continuations(blocks)
        made._after = {parent: dict(after) for parent, after in self._after.items()}
        made._count = self._count
        return made

    def _drop_evicted(self) -> None:
        """Drop blocks that are no longer cached. Afterwards the rest may double, so that this is rare."""
        each = ((parent, dict(self._still(x.items()))) for parent, x in self._after.items())
        self._after = {parent: still for parent, still in each if still}
        self._count = sum(map(len, self._after.values()))

    def _still(
        self, after: Iterable[tuple[bytes, NDArray[np.int32]]]
    ) -> Iterator[tuple[bytes, NDArray[np.int32]]]:
        for name, tokens in after:
            of_name = np.frombuffer(bytearray(name), np.uint8).reshape(1, -1)
            if self._blocks.find_each(of_name, tokens)[0] >= 0:
                yield name, tokens
