"""A `PagedKVCache` and a `numkv.store.PrefixStore`: full blocks go out behind the cache's back, and come in on a miss.

The pool is the first tier, the store's host memory the second, its folder the third; see `numkv.store`. `Tiers` is
what the cache has of a store. It gives names and numbers of full blocks to the store's queue, is told by the
`BlockPool` which blocks it evicts, before anybody can write to them, and brings what `add` misses into blocks of the
pool.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.caches.paged.block_bytes import BlockBytes, Room
from numkv.caches.paged.prefix_match import (
    Match,
    NewNames,
    find_prefix,
    last_name,
    longest_prefix,
)
from numkv.caches.paged.store import BlockStore, Extra
from numkv.caches.paged.swap import head_scales_of
from numkv.errors import CacheFull
from numkv.store.engine import IN_HOST, IN_POOL, IN_STORE, NOWHERE, FullBlock, Section
from numkv.store.prefix_store import PrefixStore
from numkv.store.records import PrefixFound

__all__ = ["Tiers", "longest_found", "with_tiers"]

#: Names that are looked for at first; then twice as many, and so on, until one is nowhere.
_FIRST_LOOK = 32

_NONE = np.empty(0, np.int32)
Where = NDArray[np.int8]


def with_tiers(store: BlockStore, prefixes: PrefixStore | None) -> BlockStore:
    """The same buffers and books, with a place for prefixes beyond them."""
    if prefixes is None:
        return store
    return dataclasses.replace(store, tiers=Tiers(store, prefixes))


@contextlib.contextmanager
def longest_found(
    store: BlockStore, ids: NDArray[np.int32], names: list[NDArray[np.uint8]], extra: Extra | None = None
) -> Iterator[Match]:  # fmt: skip
    """The longest prefix in any tier, all of it in the pool now; it stays there as long as the context lasts.

    Parameters
    ----------
    store, ids, names
        See `find_prefix`.
    extra : mapping or None
        What the content depends on beside the tokens.
    """
    match = found = find_prefix(store, ids, names)
    kept = _NONE
    try:
        if store.tiers is not None and match.wanted:
            kept, where, nbytes = store.tiers.bring(ids, names, match)
            if len(kept):
                found = find_prefix(store, ids, names)
                chain = names[0][: found.blocks]
                root = last_name(store, [chain[:0]], extra)
                store.followers.note(root, chain, ids.reshape(-1, store.block_size)[: len(chain)])
            store.tiers.count(found, where, nbytes)
        yield found
    finally:
        if len(kept):
            store.blocks.release(kept)
    if match.wanted:
        store.blocks.count_lookup(match.wanted, match.blocks, match.reason)


class Tiers:
    """What one cache has of a store.

    Parameters
    ----------
    of : BlockStore
        The cache's buffers and books.
    store : PrefixStore
        The store, which others may use too.
    """

    def __init__(self, of: BlockStore, store: PrefixStore) -> None:
        self.store, self._of, self._engine = store, of, store._engine
        self._bytes = BlockBytes(of)
        self.rename()
        of.blocks._watcher = self

    def rename(self) -> None:
        """Have another identity from now on, as scales of heads have changed."""
        of = self._of
        sizes, k_kind, v_kind, windows, seed = of.geometry
        scales = [[x.tolist() for x in layer] for layer in head_scales_of(of)]
        fields = {
            "sizes": sizes, "kinds": [k_kind, v_kind], "windows": windows, "rotation": seed,
            "layers_per_block": len(of.pools), "scales": scales,
        }  # fmt: skip
        self._section: Section = self.store._section(fields, of.block_size, self._bytes.content)

    # -- out

    def stored(self, new: NewNames, holders: NDArray[np.int32]) -> None:
        """Have blocks written that have been registered, but for those whose content another block has already."""
        own = np.flatnonzero(holders == new.ids)
        tokens = np.ascontiguousarray(new.tokens, "<i4")
        blocks = [
            FullBlock(
                int(new.ids[i]), new.names[i].tobytes(), tokens[i].tobytes(), int(new.depths[i])
            )
            for i in own.tolist()
        ]
        if self._bytes.seen_by_host:
            self._engine.add(self._section, self, blocks)
        elif blocks and not self.store.closed:
            copies = self._bytes.copies([of.block for of in blocks])
            self._of.collect()  # by now all that was written before the copies has been told of
            if not self._of.bad:
                self._engine.add_data(self._section, zip(blocks, copies, strict=True))

    def copy_block(self, block: int, out: NDArray[np.uint8]) -> None:
        """Copy the content of a block of the pool."""
        self._bytes.copy(block, out)

    def holds(self, block: int, name: bytes) -> bool:
        """Whether a block is registered under a name; looked up without waiting for a turn."""
        return bool(self._of.blocks._digests[block].tobytes() == name)

    def evicted(
        self, ids: NDArray[np.int32], names: NDArray[np.uint64], tokens: NDArray[np.int32]
    ) -> None:
        """Take what the pool evicts into the host tier."""
        self._engine.rescue(self._section, self, self._named(ids, names))

    def dropped(self, ids: NDArray[np.int32]) -> None:
        """Take what the pool forgets, and what is still to be written, into the host tier."""
        self._engine.rescue(None, self, ((block, b"") for block in ids.tolist()))

    @staticmethod
    def _named(ids: NDArray[np.int32], names: NDArray[np.uint64]) -> Iterable[tuple[int, bytes]]:
        return zip(ids.tolist(), (name.tobytes() for name in names), strict=True)

    # -- in

    def bring(
        self, ids: NDArray[np.int32], names: list[NDArray[np.uint8]], match: Match
    ) -> tuple[NDArray[np.int32], list[Where], int]:
        """Bring into the pool, and register there, what makes a prefix longer.

        Returns
        -------
        kept : int32 array (n,)
            Blocks that the caller has a reference to: those brought, and those of the pool that go with them.
        where : list of int8 array (num_blocks,)
            Where each block was found, for each group.
        nbytes : int
            Bytes that were brought.
        """
        where = [np.where(x >= 0, IN_POOL, NOWHERE).astype(np.int8) for x in match.found]
        if match.blocks == match.wanted or self.store.closed:
            return _NONE, where, 0
        self._look(names, where)
        kept: list[NDArray[np.int32]] = [_NONE]
        nbytes = 0
        try:
            present = [x > NOWHERE for x in where]
            while (blocks := longest_prefix(self._of, present)) > match.blocks:
                missing = self._missing(ids, names, blocks, kept)
                room = self._of.blocks.num_free
                if len(missing) > room:  # as much as there is room for
                    for there in present:
                        there[max(match.blocks, blocks - (len(missing) - room)) :] = False
                    continue
                good = self._fetch(missing, where, kept)
                nbytes += int(good.sum()) * self._bytes.content
                if good.all():
                    break
                for (group, i, *_), is_good in zip(missing, good, strict=True):
                    present[group][i] &= is_good
        except CacheFull:  # another user of the pool was first
            pass
        except BaseException:
            self._of.blocks.release(np.concatenate(kept))
            raise
        return np.concatenate(kept), where, nbytes

    def _look(self, names: list[NDArray[np.uint8]], where: list[Where]) -> None:
        """Look for blocks in the other tiers, and note in `where` what is there."""
        limit = len(where[0])
        full = [g for g, group in enumerate(self._of.groups) if group.window < 0]
        sliding = [g for g, group in enumerate(self._of.groups) if group.window >= 0]
        for group in full:
            missing = np.flatnonzero(where[group][:limit] == NOWHERE)
            at, count = 0, _FIRST_LOOK
            while at < len(missing):
                part = missing[at : at + count]
                found = self._where(names[group][part])
                where[group][part] = found
                if not found.all():
                    limit = int(part[np.argmin(found)])
                    break
                at, count = at + count, 2 * count
        for group in sliding:
            missing = np.flatnonzero(where[group][:limit] == NOWHERE)
            where[group][missing] = self._where(names[group][missing])
        for in_group in where:
            in_group[limit:] = np.minimum(in_group[limit:], IN_POOL)

    def _where(self, names: NDArray[np.uint8]) -> Where:
        each = [name.tobytes() for name in names]
        return np.array(self._engine.where(self._section, each), np.int8)

    def _missing(
        self, ids: NDArray[np.int32], names: list[NDArray[np.uint8]], blocks: int,
        kept: list[NDArray[np.int32]],
    ) -> list[_Missing]:  # fmt: skip
        """What the pool lacks of so many blocks; a reference to each of the others is taken, and put into `kept`."""
        size, books = self._of.block_size, self._of.blocks
        by_block = ids.reshape(-1, size)
        missing = []
        there = []
        for group, of_group in enumerate(names):
            first = self._of.first_needed(group, blocks * size)
            found = books.find_each(of_group[first:blocks], by_block[first:blocks])
            there.append(found[found >= 0])
            for i in (first + np.flatnonzero(found < 0)).tolist():
                missing.append(_Missing(group, i, of_group[i], by_block[i]))
        new = np.setdiff1d(np.concatenate(there), np.concatenate(kept)).astype(np.int32)
        books.acquire(new)
        kept.append(new)
        return missing

    def _fetch(
        self, missing: list[_Missing], where: list[Where], kept: list[NDArray[np.int32]]
    ) -> NDArray[np.bool_]:
        """Bring blocks into the pool and register them; which of them there were."""
        books = self._of.blocks
        taken = books.allocate(len(missing))
        self._of.forget_bounds(taken)
        try:
            good = self._fill(missing, where, taken)
            if good.any():
                chosen = np.flatnonzero(good)
                names = np.stack([missing[i].name for i in chosen])
                books.register(taken[good], names, np.stack([missing[i].tokens for i in chosen]))
        except BaseException:
            books.release(taken)
            raise
        kept.append(taken[good])
        books.release(taken[~good])
        return good

    def _fill(
        self, missing: list[_Missing], where: list[Where], taken: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Copy and read content into blocks; which of them have it now."""
        room = self._bytes.room(taken)
        good = np.zeros(len(missing), np.bool_)
        others = []
        for at, (group, i, name, _) in enumerate(missing):
            data = None
            if where[group][i] == IN_HOST:
                data = self._engine.from_host(self._section, name.tobytes())
            if data is None:
                where[group][i] = IN_STORE
                others.append(at)
            else:
                room.fill(at, data)
                good[at] = True
        if others:
            good[others] = self._engine.read(
                self._section, _Reading(self._bytes, room, missing, others)
            )
        room.done(good)
        return good

    def count(self, found: Match, where: list[Where], nbytes: int) -> None:
        """Count a lookup, and tell of it: in which tier each block of a prefix was."""
        size, blocks = self._of.block_size, found.blocks
        tiers = np.full(blocks, IN_POOL, np.int8)
        for group, in_group in enumerate(where):
            first = self._of.first_needed(group, blocks * size)
            np.maximum(tiers[first:], in_group[first:blocks], out=tiers[first:])
        _, in_pool, in_host, in_store = np.bincount(tiers, minlength=4).tolist()
        missed = found.wanted - blocks
        self._engine.count(found.wanted, (missed, in_pool, in_host, in_store))
        self._engine.tell_now(PrefixFound(found.wanted, in_pool, in_host, in_store, missed, nbytes))


class _Missing(NamedTuple):
    """A block that the pool lacks."""

    group: int
    number: int
    name: NDArray[np.uint8]
    tokens: NDArray[np.int32]


class _Reading:
    """Blocks that are read from the store; see `Readings`."""

    def __init__(
        self, of: BlockBytes, room: Room, missing: list[_Missing], which: list[int]
    ) -> None:
        self._room, self._missing, self._which, self.sound = room, missing, which, of.sound
        self.names: Sequence[bytes] = [missing[at].name.tobytes() for at in which]
        self.depths: Sequence[int] = [missing[at].number for at in which]

    def tokens(self, i: int) -> bytes:
        return self._missing[self._which[i]].tokens.astype("<i4").tobytes()

    def content(self, i: int) -> list[NDArray[np.uint8]]:
        return self._room.rows(self._which[i])
