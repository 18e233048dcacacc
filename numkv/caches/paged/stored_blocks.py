"""A cache's objects of one form in a `numkv.store.PrefixStore`: blocks of layer groups, or states.

If layers have one shape, a block has the same bytes in every group, and all blocks are one *part*. Otherwise each group
is a part, as its objects have their own size. States are one more part. Objects of all parts are in one folder, under
names that differ by part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.blocks.pool import BlockPool, name_of
from numkv.caches.paged.block_bytes import BlockBytes, Room
from numkv.caches.paged.lookup import Contents
from numkv.store.engine import IN_STORE, Engine, FullBlock
from numkv.store.objects import Section

#: Sources of contents: a store, or a lookup with contents that it has read already.
Source = Engine | Contents
#: Blocks that a lookup reads before it asks for more memory.
_AT_ONCE = 128


class Missing(NamedTuple):
    """A block, or the states after it, that a cache lacks."""

    group: int
    number: int
    """Blocks before it."""
    name: NDArray[np.uint8]
    tokens: NDArray[np.int32]
    is_in_host: bool = False
    """Whether the host tier had it when it was looked for."""


class StoredBlocks:
    """Transfers of blocks of one form, or of slots of states, to a store and back.

    Parameters
    ----------
    engine : Engine
        The store's.
    block_pool : BlockPool
        Which of them are cached, and under which names.
    content : BlockBytes
        Their bytes.
    section : Section
        Their objects.
    mask : numpy.uint64
        The difference between the first words of an object's name and of its hash in `block_pool`.
    """

    def __init__(
        self, engine: Engine, block_pool: BlockPool, content: BlockBytes, section: Section,
        mask: np.uint64 | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._block_pool, self._mask = engine, block_pool, mask
        self.content, self.section = content, section

    def _masked(self, names: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Names of objects for those in the metadata, or the other way round."""
        if self._mask is None:
            return names
        found = np.array(names)
        found.view(np.uint64)[..., 0] ^= self._mask
        return found

    # -- out

    def copy_block(self, block: int, out: NDArray[np.uint8]) -> None:
        """Copy the content of a block."""
        self.content.copy(block, out)

    def holds(self, block: int, name: bytes) -> bool:
        """Return whether a block is registered under a name; looked up without waiting for a turn."""
        registered = np.frombuffer(name_of(self._block_pool, block), np.uint8)
        return self._masked(registered).tobytes() == name

    def full_blocks(
        self, ids: NDArray[np.int32], names: NDArray[np.uint8], tokens: NDArray[Any], depths: NDArray[np.int64]
    ) -> list[FullBlock]:  # fmt: skip
        """Blocks as the store's queue takes them."""
        of_each = np.ascontiguousarray(tokens, "<i4")
        return [
            FullBlock(int(i), name.tobytes(), of_block.tobytes(), int(depth))
            for i, name, of_block, depth in zip(
                ids, self._masked(names), of_each, depths, strict=True
            )
        ]

    def queue(self, blocks: Sequence[FullBlock], copies: Sequence[Any] | None = None) -> None:
        """Have blocks written that lie in host memory, or copies of blocks."""
        if copies is None:
            self._engine.add(self.section, ((of, None) for of in blocks), self)
        else:
            self._engine.add(self.section, zip(blocks, copies, strict=True))

    def rescue(self, ids: NDArray[np.int32], names: NDArray[np.uint64]) -> None:
        """Copy evicted blocks into the host tier."""
        named = self._masked(np.ascontiguousarray(names).view(np.uint8).reshape(len(ids), -1))
        each = zip(ids.tolist(), (name.tobytes() for name in named), strict=True)
        self._engine.rescue(self.section, self, each)

    def rescue_waiting(self, ids: Iterable[int]) -> None:
        """Copy blocks that are dropped before they were written into the host tier."""
        self._engine.rescue(None, self, ((block, b"") for block in ids))

    # -- in

    def where(
        self, names: NDArray[np.uint8], source: Source, chain: bool = False
    ) -> NDArray[np.int8]:
        """In which tier each is, by its name in the metadata; of a `chain` up to the first that is nowhere."""
        each = [name.tobytes() for name in self._masked(names)]
        look = source.leading if chain else source.where
        return np.array(look(self.section, each), np.int8)

    def bring(self, missing: Sequence[Missing], contents: Contents) -> NDArray[np.bool_]:
        """Read content into host memory, as far as there is some; which of it there is now."""
        good = np.zeros(len(missing), np.bool_)
        for first in range(0, len(missing), _AT_ONCE):
            chosen = missing[first : first + _AT_ONCE]
            if not contents.take_room(len(chosen) * self.content.content):
                break
            names = self._names(chosen)
            room = self.content.staged(np.empty(len(chosen), np.int32))  # not in the pool yet
            reading = _Reading(self.content, room, range(len(chosen)), chosen, names)
            found = good[first : first + _AT_ONCE] = self._engine.read(self.section, reading)
            for i in np.flatnonzero(found):
                contents.put(self.section, names[i], np.concatenate(room.rows(int(i))))
        return good

    def _names(self, missing: Sequence[Missing]) -> list[bytes]:
        """Names of objects."""
        return [self._masked(of.name[None])[0].tobytes() for of in missing]

    def fill(
        self, missing: Sequence[Missing], taken: NDArray[np.int32], source: Source
    ) -> tuple[NDArray[np.bool_], NDArray[np.int8]]:
        """Copy and read content into blocks; which of them have it now, and from which tier."""
        room = self.content.room(taken)
        good = np.zeros(len(missing), np.bool_)
        tiers = np.full(len(missing), IN_STORE, np.int8)
        others = []
        names = self._names(missing)
        for at, of in enumerate(missing):
            data = source.from_host(self.section, names[at]) if of.is_in_host else None
            if data is None:
                others.append(at)
            else:
                room.fill(at, data)
                good[at], tiers[at] = True, source.tier
        if others:
            chosen = [missing[at] for at in others]
            reading = _Reading(self.content, room, others, chosen, [names[at] for at in others])
            good[others] = source.read(self.section, reading)
        room.done(good)
        return good, tiers


class _Reading:
    """Blocks that are read from a store; see `Readings`.

    Parameters
    ----------
    of : BlockBytes or SlotBytes
        What they are.
    room, places : Room, sequence of int
        Where their content goes.
    missing, names : sequence of Missing, list of bytes
        Which they are.
    """

    def __init__(
        self, of: BlockBytes, room: Room, places: Sequence[int], missing: Sequence[Missing],
        names: list[bytes],
    ) -> None:  # fmt: skip
        self._room, self._places, self._missing, self.sound = room, places, missing, of.sound
        self.names: Sequence[bytes] = names
        self.depths: Sequence[int] = [of.number for of in missing]

    def tokens(self, i: int) -> bytes:
        return self._missing[i].tokens.astype("<i4").tobytes()

    def content(self, i: int) -> list[NDArray[np.uint8]]:
        return self._room.rows(self._places[i])
