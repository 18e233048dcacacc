"""`StepBuffers`: memory of fixed size for the tables of a `PagedKVCache`'s steps, so that CUDA graphs can read them."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from numkv.caches.paged.store import BlockStore, Ints
from numkv.errors import DimensionMismatch, NonFiniteInput, NotSupported, NumkvError
from numkv.numbers import check_bytes, check_size
from numkv.targets.call import Marker


class _Before(NamedTuple):
    """A step whose rows a graph may have written, before it is known whether they were finite."""

    update: int  #: which of the buffers' it was
    sequences: tuple[int, ...]
    positions: Ints
    ends: Ints
    kept: list[int]  #: how many tokens of each sequence are, once the step has ended


class StepBuffers:
    """Tables of steps at fixed addresses, which `PagedKVCache.reserve` fills and a CUDA graph reads when it runs.

    Made by `PagedKVCache.step_buffers`. A step in buffers accepts and returns rows of `num_tokens` tokens. The first
    `Step.num_tokens` are its own. The others are not written, and attention returns 0 for them.

    Parameters
    ----------
    store : BlockStore
        Buffers of the cache.
    num_seqs : int
        The most sequences of a step.
    num_tokens : int
        The most new tokens of all of its sequences.
    max_length : int
        The most tokens that a sequence has, the new ones included.

    Attributes
    ----------
    num_seqs, num_tokens, max_length : int
        As they were given.

    Notes
    -----
    One open step at a time lies in them. A graph that has captured a step's calls keeps the buffers, and those of the
    cache. They cannot be copied or pickled.
    """

    def __init__(self, store: BlockStore, num_seqs: int, num_tokens: int, max_length: int) -> None:
        self._tables = made = StepTables(store, num_seqs, num_tokens, max_length)
        self.num_seqs, self.num_tokens = made.num_seqs, made.num_tokens
        self.max_length = made.max_length

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotSupported("StepBuffers cannot be copied or pickled: make others of the copy")

    def __repr__(self) -> str:
        return (
            f"<StepBuffers: {self.num_seqs} sequences, {self.num_tokens} new tokens, "
            f"{self.max_length} tokens in a sequence>"
        )


def tables_of(into: Any) -> StepTables:
    """Return the tables in a caller's buffers."""
    if not isinstance(into, StepBuffers):
        raise TypeError(f"`into`: expected StepBuffers, got {type(into).__name__}")
    return into._tables


class StepTables:
    """The tables that lie in `StepBuffers`, and the steps that they have been of.

    Attributes
    ----------
    num_seqs, num_tokens, max_length : int
        See `StepBuffers`.
    place : object
        Where they were filled last.
    """

    def __init__(self, store: BlockStore, num_seqs: int, num_tokens: int, max_length: int) -> None:
        self.num_seqs = check_size("num_seqs", num_seqs, 1)
        self.num_tokens = check_size("num_tokens", num_tokens, 1)
        self.max_length = check_size("max_length", max_length, 1)
        most = store.blocks.num_blocks * store.block_size
        if self.max_length > most:
            raise DimensionMismatch(
                f"`max_length`: expected at most {most} tokens, for which the cache has blocks, got {self.max_length}",
                expected=most,
                actual=self.max_length,
            )
        for layer in range(store.num_layers):
            store.refuse_residual("step_buffers", "use one without")
            store.refuse_chunks("step_buffers", layer)
        blocks = store.blocks_for(self.max_length)
        check_bytes({"num_tokens": self.num_tokens}, 8 * (1 + len(store.groups)))
        check_bytes({"num_seqs": self.num_seqs + 2, "max_length": blocks}, 16 * len(store.groups))
        # A sequence more than there can be, of length 0: rows that no sequence has are its queries.
        seqs, tokens, groups = self.num_seqs + 1, self.num_tokens, len(store.groups)
        layout: list[tuple[tuple[int, ...], Any]] = [
            ((tokens,), np.int64), ((seqs,), np.int64), ((seqs + 1,), np.int64),
            *[((tokens,), np.int64)] * groups,
            *[((seqs, blocks), np.int32)] * groups,
        ]  # fmt: skip
        self._store = store
        self._fixed = store.target.fixed(layout)
        self._layout, self._groups = layout, groups
        self.place = store.target.place()
        self._open: Any = None
        self._updates = 0
        self._before: deque[_Before] = deque()

    # -- arrays of the target

    def arrays(self) -> tuple[Any, Any, Any, list[Any], list[Any]]:
        """Positions, lengths and starts of queries; slots and tables of each layer group."""
        found, groups = self._fixed.arrays, self._groups
        return found[0], found[1], found[2], found[3 : 3 + groups], found[3 + groups :]

    # -- steps

    def check(self, store: BlockStore, lens: Ints, num_tokens: int) -> None:
        """Refuse a step that does not fit: `lens` are the lengths that its sequences will have."""
        if self._store is not store:
            raise NumkvError("`into`: expected buffers of this cache, got those of another")
        if self._open is not None and self._open.open:
            raise NumkvError(
                "`into`: expected buffers without an open step, got some with one; commit it or roll it back first"
            )
        for what, got, most in (
            ("sequences", len(lens), self.num_seqs),
            ("new tokens", num_tokens, self.num_tokens),
            ("tokens in a sequence", int(lens.max(initial=0)), self.max_length),
        ):
            if got > most:
                raise DimensionMismatch(
                    f"`into`: expected at most {most} {what}, got {got}; make larger buffers",
                    expected=most,
                    actual=got,
                )

    def fill(
        self, positions: Ints, lens: Ints, starts: Ints, slots: list[NDArray[np.int64]], tables: list[NDArray[np.int32]]
    ) -> None:  # fmt: skip
        """Put a step's tables in place, in the order of the current stream: host arrays, of the step's own sizes."""
        seqs, tokens = len(lens), len(positions)
        host = [np.zeros(shape, dtype) for shape, dtype in self._layout]
        host[0][:tokens], host[1][:seqs] = positions, lens
        host[2][: seqs + 1], host[2][seqs + 1 :] = starts, self.num_tokens
        for x, of_group in zip(host[3 : 3 + self._groups], slots, strict=True):
            x[:tokens], x[tokens:] = of_group, -1
        for x, table in zip(host[3 + self._groups :], tables, strict=True):
            x[:] = -1
            x[:seqs, : table.shape[1]] = table[:, : x.shape[1]]
        self._fixed.update(host)
        self.place = self._store.target.place()
        self._updates += 1

    def take(self, step: Any, ends: Ints, kept: list[int]) -> None:
        """Let a step lie here: the one that has filled them."""
        self._open = step
        self._forget_finite()
        self._before.append(_Before(self._updates, step.sequences, step.positions, ends, kept))

    # -- rows that are not finite

    def _forget_finite(self) -> None:
        """Forget the steps of which no row can still turn out to be NaN or infinite, as the device is past them."""
        arrived = self._fixed.arrived()
        self._store.reports.collect()  # what they had is told by now
        while self._before and self._before[0].update < arrived:
            self._before.popleft()

    def marker(self) -> Marker:
        """What notes a row of a graph that is not finite: in each step that it may have been of."""
        buffers = weakref.ref(self)

        def mark(token: int, error: NonFiniteInput, call: int) -> None:
            of = buffers()
            if of is None:
                return
            for step in tuple(of._before):
                if token >= len(step.positions):
                    continue
                i = int(np.searchsorted(step.ends, token, "right"))
                first = int(step.ends[i - 1]) if i else 0
                if step.kept and token - first >= step.kept[i]:
                    continue  # rolled back
                of._store.reports.tell(step.sequences[i], int(step.positions[token]), error, call)

        return self._store.reports.marker(mark)
