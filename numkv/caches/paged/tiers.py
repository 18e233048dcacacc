"""A `PagedKVCache` and its `numkv.store.PrefixStore`: full blocks are written in the background and read on a miss.

The pool is the first tier, the store's host memory the second, its folder the third; see `numkv.store`. `Tiers` is the
cache's side of a store. It passes hashes and numbers of full blocks to the store's queue. The `BlockPool` reports
evicted blocks to it, before they can be overwritten. It reads blocks that `add` lacks into the pool. If layers have
states, it does the same with checkpoints: a prefix from the store ends at one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from numkv.blocks.pool import name_of
from numkv.caches.paged.block_bytes import BlockBytes
from numkv.caches.paged.lookup import Contents
from numkv.caches.paged.prefix_match import (
    Match,
    NewNames,
    find_prefix,
    group_mask,
    last_name,
    longest_prefix,
)
from numkv.caches.paged.states import Checkpoint
from numkv.caches.paged.store import BlockStore, Extra
from numkv.caches.paged.stored_blocks import Missing, Source, StoredBlocks
from numkv.caches.paged.swap import head_scales_of
from numkv.errors import CacheFull
from numkv.store.engine import IN_HOST, IN_POOL, NOWHERE, FullBlock
from numkv.store.objects import Section
from numkv.store.prefix_store import PrefixStore
from numkv.store.records import PrefixFound

#: Checkpoints of states that are looked for at once.
_FIRST_LOOK = 32

#: States have not been searched for yet.
_UNKNOWN = -1

_NONE = np.empty(0, np.int32)
Where = NDArray[np.int8]


def with_tiers(
    store: BlockStore, prefixes: PrefixStore | None, like: Tiers | None = None
) -> BlockStore:
    """Give buffers a place for prefixes beyond them, and return them; `like` is that of which they are a copy."""
    if prefixes is not None:
        store.tiers = Tiers(store, prefixes)
        if like is not None:
            store.tiers.take(like)
    return store


@contextlib.contextmanager
def longest_found(
    store: BlockStore, ids: NDArray[np.int32], names: list[NDArray[np.uint8]], extra: Extra | None = None,
    contents: Contents | None = None,
) -> Iterator[Match]:  # fmt: skip
    """Find the longest prefix in any tier and read it into the pool, where it stays as long as the context lasts.

    Parameters
    ----------
    store, ids, names
        See `find_prefix`.
    extra : mapping or None
        Other inputs that the content depends on.
    contents : Contents, optional
        A lookup's blocks, which replace the store.
    """
    match = found = find_prefix(store, ids, names)
    kept = None
    try:
        if store.tiers is not None and match.wanted:
            kept = store.tiers.bring(ids, names, match, contents)
            if kept.blocks or kept.slots:
                found = find_prefix(store, ids, names)
                chain = names[0][: found.blocks]
                root = last_name(store, [chain[:0]], extra)
                store.continuations.note(
                    root, chain, ids.reshape(-1, store.block_size)[: len(chain)]
                )
            store.tiers.count(found, kept)
        yield found
    finally:
        if kept is not None:
            kept.release(store)
    if match.wanted:
        store.blocks.count_lookup(match.wanted, match.blocks, match.reason)


class Brought:
    """The tiers of a lookup's blocks, and references to blocks that lengthen the prefix.

    Parameters
    ----------
    where : list of int8 array (num_blocks,)
        Where each block was found, for each group.
    ends : int8 array (num_blocks + 1,) or None
        Where the states were found after so many blocks, if layers keep some.
    """

    def __init__(self, where: list[Where], ends: Where | None) -> None:
        self.where, self.ends, self.nbytes = where, ends, 0
        self.blocks: list[NDArray[np.int32]] = []
        self.slots: list[NDArray[np.int32]] = []

    def release(self, store: BlockStore) -> None:
        """Give the references back."""
        blocks, slots = self.blocks, self.slots
        self.blocks, self.slots = [], []
        if blocks:
            store.blocks.release(np.concatenate(blocks))
        if slots and store.states is not None:
            store.states.block_pool.release(np.concatenate(slots))


class Tiers:
    """One cache's side of a store.

    Parameters
    ----------
    of : BlockStore
        The cache's buffers and metadata.
    store : PrefixStore
        The store, which others may use too.
    """

    def __init__(self, of: BlockStore, store: PrefixStore) -> None:
        self.store, self._of = store, of
        self.engine, self._section = store.__tier__()
        contents = [
            BlockBytes.of_pools(of.target, [x.pool for x in of.parts if n in x.groups])
            for n in range(1 if of.layers.alike else len(of.groups))
        ]
        make, blocks = self._section_maker(), of.blocks
        #: The parts of blocks, group after group; one for all of them if layers have one shape.
        self.parts = [
            StoredBlocks(self.engine, blocks, content, make(content.content))
            for content in contents
        ]
        #: The part of each registered block; -1 for blocks that others have registered.
        self._nobody = -1 if len(self.parts) > 1 else 0
        self._part_of = np.full(blocks.num_blocks, self._nobody, np.int32)
        self.of_states: StoredBlocks | None = None
        if of.states is not None:
            content = BlockBytes.of_slots(of.states)
            self.of_states = StoredBlocks(
                self.engine, of.states.block_pool, content, make(content.content), group_mask(len(of.groups))
            )  # fmt: skip
            #: 0 for slots with names that others know, else -1.
            self._named = np.full(of.states.block_pool.num_blocks, -1, np.int32)
            of.states.block_pool._watcher = _Watcher([self.of_states], self._named, -1)
        blocks._watcher = _Watcher(self.parts, self._part_of, self._nobody)

    def take(self, like: Tiers) -> None:
        """Know of blocks and slots what another one does, of whose block pool these are a copy."""
        self._part_of[:] = like._part_of
        if self.of_states is not None:
            self._named[:] = like._named

    def _section_maker(self) -> Callable[[int], Section]:
        """What gives the objects of so many bytes their place, as the cache is now."""
        of = self._of
        sizes, k_kind, v_kind, windows, seed, *more = of.geometry
        scales = [[x.tolist() for x in layer] for layer in head_scales_of(of)]
        fields = {
            "sizes": sizes, "kinds": [k_kind, v_kind], "windows": windows, "rotation": seed,
            "layers_per_block": len(of.pools), "scales": scales,
        }  # fmt: skip
        if more:  # rows, chunks, sources and states of each layer, and what shares a block
            fields |= {"layers": more[0], "groups": [group.layers for group in of.groups]}
        return lambda content: self._section(fields, of.block_size, content)

    def rename(self) -> None:
        """Have another identity from now on, as scales of heads have changed."""
        make = self._section_maker()
        for part in (*self.parts, *([] if self.of_states is None else [self.of_states])):
            part.section = make(part.content.content)

    def _part(self, group: int) -> StoredBlocks:
        return self.parts[group if len(self.parts) > 1 else 0]

    # -- out

    def stored(self, new: NewNames, holders: NDArray[np.int32], groups: NDArray[np.int64]) -> None:
        """Have blocks written that have been registered, but for those whose content another block has already."""
        own = holders == new.ids
        for number, part in enumerate(self.parts):
            if self._of.groups[number].begins_anew:  # nobody will ask for them
                continue
            mine = np.flatnonzero(own & (groups == number) if len(self.parts) > 1 else own)
            self._part_of[new.ids[mine]] = number
            columns = new.ids[mine], new.names[mine], new.tokens[mine], new.depths[mine]
            self._write(part, part.full_blocks(*columns))

    def stored_states(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Have states written that have been registered under the name of a prefix."""
        slots, part, blocks = self._of.states, self.of_states, []
        assert slots is not None
        assert part is not None
        for slot, name, length, tokens in checkpoints:
            if tokens is not None and name_of(slots.block_pool, slot) == name:
                self._named[slot] = 0
                of_name = np.frombuffer(bytearray(name), np.uint8)[None]
                depth = np.array([length // self._of.block_size - 1])
                blocks += part.full_blocks(np.array([slot], np.int32), of_name, tokens[None], depth)
        self._write(part, blocks)

    def _write(self, part: StoredBlocks, blocks: list[FullBlock]) -> None:
        if not blocks:
            return
        if part.content.seen_by_host:
            part.queue(blocks)
        elif not self.store.closed:
            copies = part.content.copies([of.block for of in blocks])
            self._of.reports.collect()  # by now all that was written before the copies has been told of
            if not self._of.reports:
                part.queue(blocks, copies)

    # -- in

    def look_up(
        self, ids: NDArray[np.int32], names: list[NDArray[np.uint8]], contents: Contents
    ) -> int:
        """Read the longest prefix's blocks that the pool lacks into host memory; return its number of tokens.

        The cache is not changed, and no call waits, so this runs concurrently with all others.
        """
        size, engine = self._of.block_size, self.engine
        by_block = ids.reshape(-1, size)
        in_pool = [self._of.blocks.find_each(of_group, by_block) >= 0 for of_group in names]
        where = [np.where(there, IN_POOL, NOWHERE).astype(np.int8) for there in in_pool]
        if not len(by_block) or self.store.closed:
            return 0
        self._look(names, where, engine)
        present, ends = [x > NOWHERE for x in where], self._ends(names[0])
        blocks = self._longest(present, ends)
        while blocks and ends is not None and ends[blocks] == _UNKNOWN:
            self._look_for_states(names[0], ends, blocks, 0, engine)
            blocks = self._longest(present, ends)
        for group, of_group in enumerate(names):
            first = self._of.first_needed(group, blocks * size)
            wanted = (first + np.flatnonzero(where[group][first:blocks] > IN_POOL)).tolist()
            missing = [Missing(group, i, of_group[i], by_block[i]) for i in wanted]
            good = self._part(group).bring(missing, contents)
            present[group][[i for i, is_good in zip(wanted, good, strict=True) if not is_good]] = (
                False
            )
        if blocks and ends is not None and ends[blocks] > IN_POOL and self.of_states is not None:
            of_end = Missing(0, blocks - 1, names[0][blocks - 1], by_block[blocks - 1])
            if not self.of_states.bring([of_end], contents).all():
                ends[blocks] = NOWHERE
        if ends is not None:
            ends[ends == _UNKNOWN] = NOWHERE
        return self._longest(present, ends) * size

    def bring(
        self, ids: NDArray[np.int32], names: list[NDArray[np.uint8]], match: Match,
        contents: Contents | None = None,
    ) -> Brought:  # fmt: skip
        """Bring into the pool, and register there, what makes a prefix longer."""
        source: Source = self.engine if contents is None else contents
        where = [np.where(x >= 0, IN_POOL, NOWHERE).astype(np.int8) for x in match.found]
        kept = Brought(where, self._ends(names[0]))
        if match.blocks == match.wanted or self.store.closed:
            return kept
        self._look(names, where, source)
        present, ends = [x > NOWHERE for x in where], kept.ends
        if ends is not None:
            self._hold_states(names[0], match.blocks, kept)
        try:
            while (blocks := self._longest(present, ends)) > match.blocks:
                if ends is not None and ends[blocks] == _UNKNOWN:
                    self._look_for_states(names[0], ends, blocks, match.blocks, source)
                    continue
                missing = self._missing(ids, names, blocks, kept)
                room = self._of.blocks.num_free
                if len(missing) > room:  # as much as there is room for
                    for there in present:
                        there[max(match.blocks, blocks - (len(missing) - room)) :] = False
                    continue
                if not self._fetch_states(names[0], ids, blocks, kept, source):
                    continue
                good = self._fetch(missing, kept, source)
                if good.all():
                    break
                for (group, i, *_), is_good in zip(missing, good, strict=True):
                    present[group][i] &= is_good
        except CacheFull:  # another user of the pool was first
            pass
        except BaseException:
            kept.release(self._of)
            raise
        return kept

    def _longest(self, present: list[NDArray[np.bool_]], ends: Where | None) -> int:
        """Return the blocks of the longest prefix; unknown states count as present."""
        return longest_prefix(self._of, present, None if ends is None else ends != NOWHERE)

    def _look(self, names: list[NDArray[np.uint8]], where: list[Where], source: Source) -> None:
        """Search for blocks in the other tiers, and record the found ones in `where`."""
        limit = len(where[0])
        # Where a group is full its first hole ends the prefix, so that no other group needs more.
        each = [x for x in enumerate(self._of.groups) if not x[1].begins_anew]
        for number, group in sorted(each, key=lambda x: not x[1].is_full):
            missing = np.flatnonzero(where[number][:limit] == NOWHERE)
            wanted = names[number][missing]
            found = self._part(number).where(wanted, source, chain=group.is_full)
            where[number][missing] = found
            if group.is_full and not found.all():
                limit = int(missing[np.argmin(found)])
        for in_group in where:
            in_group[limit:] = np.minimum(in_group[limit:], IN_POOL)

    def _missing(
        self, ids: NDArray[np.int32], names: list[NDArray[np.uint8]], blocks: int, kept: Brought
    ) -> list[Missing]:
        """Return the missing blocks of so many; acquire the others, and add them to `kept`."""
        size, block_pool = self._of.block_size, self._of.blocks
        by_block = ids.reshape(-1, size)
        missing = []
        there = []
        for group, of_group in enumerate(names):
            first = self._of.first_needed(group, blocks * size)
            found = block_pool.find_each(of_group[first:blocks], by_block[first:blocks])
            there.append(found[found >= 0])
            if self._of.groups[group].begins_anew:
                continue
            for i in (first + np.flatnonzero(found < 0)).tolist():
                in_host = kept.where[group][i] == IN_HOST
                missing.append(Missing(group, i, of_group[i], by_block[i], in_host))
        new = np.setdiff1d(np.concatenate(there), np.concatenate([_NONE, *kept.blocks]))
        block_pool.acquire(new.astype(np.int32))
        kept.blocks.append(new.astype(np.int32))
        return missing

    def _fetch(self, missing: list[Missing], kept: Brought, source: Source) -> NDArray[np.bool_]:
        """Bring blocks into the pool and register them; which of them there were."""
        block_pool = self._of.blocks
        taken = block_pool.allocate(len(missing))
        self._of.forget_bounds(taken)
        groups = np.array([of.group for of in missing], np.int32)
        part_of = groups if len(self.parts) > 1 else np.zeros_like(groups)
        good = np.zeros(len(missing), np.bool_)
        try:
            for number in np.unique(part_of).tolist():
                mine, part = np.flatnonzero(part_of == number), self.parts[number]
                chosen = [missing[i] for i in mine]
                good[mine], tiers = part.fill(chosen, taken[mine], source)
                for of, tier in zip(chosen, tiers, strict=True):
                    kept.where[of.group][of.number] = tier
                kept.nbytes += int(good[mine].sum()) * part.content.content
            if good.any():
                chosen = [missing[i] for i in np.flatnonzero(good)]
                tokens = np.stack([of.tokens for of in chosen])
                block_pool.register(taken[good], np.stack([of.name for of in chosen]), tokens)
                self._part_of[taken[good]] = part_of[good]
        except BaseException:
            block_pool.release(taken)
            raise
        kept.blocks.append(taken[good])
        block_pool.release(taken[~good])
        return good

    # -- states

    def _ends(self, chain: NDArray[np.uint8]) -> Where | None:
        """Return the tier of the states after each number of blocks: the pool or unknown; None without states."""
        slots = self._of.states
        if slots is None:
            return None
        there = slots.present(chain, self._of.block_size)
        ends = np.where(there, IN_POOL, NOWHERE).astype(np.int8)
        if slots.block_pool.num_free:
            at = slice(slots.every // self._of.block_size, None, slots.every // self._of.block_size)
            ends[at][~there[at]] = _UNKNOWN
        return ends

    def _hold_states(self, chain: NDArray[np.uint8], blocks: int, kept: Brought) -> None:
        """Keep the checkpoint that the pool itself has: those that are brought could take its place."""
        slots = self._of.states
        if slots is not None and blocks and kept.ends is not None:
            found = slots.find([chain[blocks - 1].tobytes()], [blocks * self._of.block_size])
            if found[0] >= 0:
                slots.block_pool.acquire(found)
                kept.slots.append(found)
            if not slots.block_pool.num_free:
                kept.ends[kept.ends == _UNKNOWN] = NOWHERE

    def _look_for_states(
        self, chain: NDArray[np.uint8], ends: Where, blocks: int, least: int, source: Source
    ) -> None:
        """Look for the states after so many blocks, and after some fewer, in the other tiers."""
        assert self.of_states is not None
        unknown = np.flatnonzero(ends[: blocks + 1] == _UNKNOWN)
        asked = unknown[unknown > least][-_FIRST_LOOK:]
        ends[asked] = self.of_states.where(chain[asked - 1], source)

    def _fetch_states(
        self, chain: NDArray[np.uint8], ids: NDArray[np.int32], blocks: int, kept: Brought, source: Source
    ) -> bool:  # fmt: skip
        """Bring the states after so many blocks, if the pool has none; whether there are some now."""
        slots, ends, part = self._of.states, kept.ends, self.of_states
        if slots is None or ends is None or part is None or ends[blocks] == IN_POOL:
            return True
        size, name = self._of.block_size, chain[blocks - 1]
        length = blocks * size
        if slots.find([name.tobytes()], [length])[0] >= 0:  # of a turn before
            return True
        if not slots.block_pool.num_free:
            ends[blocks] = NOWHERE
            return False
        missing = Missing(0, blocks - 1, name, ids[length - size : length], ends[blocks] == IN_HOST)
        taken = slots.block_pool.allocate(1)
        try:
            good, tiers = part.fill([missing], taken, source)
            if good[0]:
                slots.register([Checkpoint(int(taken[0]), name.tobytes(), length, None)])
                self._named[taken] = 0
        except BaseException:
            slots.block_pool.release(taken)
            raise
        if not good[0]:
            slots.block_pool.release(taken)
            ends[blocks] = NOWHERE
            return False
        kept.slots.append(taken)
        kept.nbytes += part.content.content
        ends[blocks] = tiers[0]
        return True

    def count(self, found: Match, kept: Brought) -> None:
        """Count a lookup, and report the tier of each block of a prefix."""
        size, blocks = self._of.block_size, found.blocks
        tiers = np.full(blocks, IN_POOL, np.int8)
        for group, in_group in enumerate(kept.where):
            first = self._of.first_needed(group, blocks * size)
            np.maximum(tiers[first:], in_group[first:blocks], out=tiers[first:])
        if kept.ends is not None and blocks:
            tiers[-1] = max(tiers[-1], kept.ends[blocks])
        _, in_pool, in_host, in_store = np.bincount(tiers, minlength=4).tolist()
        missed = found.wanted - blocks
        self.engine.count(found.wanted, (missed, in_pool, in_host, in_store))
        self.engine.tell_now(
            PrefixFound(found.wanted, in_pool, in_host, in_store, missed, kept.nbytes)
        )


class _Watcher:
    """Receives events of a block pool; see `numkv.blocks.records.Watcher`.

    Parameters
    ----------
    parts : list of StoredBlocks
        What its blocks may be a part of.
    part_of : int32 array (num_blocks,)
        The number of each block's part, which is set where blocks are registered.
    nobody : int
        That of blocks that have lost their content.
    """

    def __init__(self, parts: list[StoredBlocks], part_of: NDArray[np.int32], nobody: int) -> None:
        self._parts, self._part_of, self._nobody = parts, part_of, nobody

    def evicted(
        self, ids: NDArray[np.int32], names: NDArray[np.uint64], tokens: NDArray[np.int32]
    ) -> None:
        """Copy blocks that the pool evicts into the host tier."""
        of_each = self._part_of[ids]
        for number, part in enumerate(self._parts):
            mine = of_each == number
            if mine.any():
                part.rescue(ids[mine], names[mine])
        self._part_of[ids] = self._nobody

    def dropped(self, ids: NDArray[np.int32]) -> None:
        """Copy blocks that the pool drops before they were written into the host tier."""
        of_each = self._part_of[ids]
        for number, part in enumerate(self._parts):
            part.rescue_waiting(ids[of_each == number].tolist())
        self._part_of[ids] = self._nobody
