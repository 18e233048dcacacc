"""Full-precision tokens of a quantised `PagedKVCache`, the newest ones of each sequence and the first ones: attention.

Every quantised layer has a *twin*: a float layer behind the model's own layers, whose group has a window. Blocks of
full-precision vectors therefore come from the same pool. Forks, prefixes, rollback, host memory and files treat them
like any other block.

All tokens are quantised at once. A query at position p reads two ranges in full precision: the tokens newer than
``p - window``, and the first ``num_sink_tokens``. It reads the other tokens as codes. A result therefore does not
depend on how a prompt was split into steps, or on prefix-cache hits.

Keys by channel have no scales until their token group is complete. The newest token's group is therefore stored in full
precision: its twin is a layer whose queries attend within chunks of one group. A query reads its own group in full
precision and earlier groups as codes, in prompts and in decode. Keys are quantised from the twin's vectors when a group
is complete. A group that is truncated and filled again is quantised from them again.

Attention over tokens in full precision and codes has parts that are merged exactly. Each part is attention over ranges
of one block table; see `numkv.attention.parts`. Which token a query reads where follows from positions alone (`split`),
so that no result depends on the batch.

Sources: see `numkv.caches.full_precision`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from numkv.arrays import Array
from numkv.attention.options import CheckedOptions
from numkv.attention.parts import Part, attend_to_parts
from numkv.attention.sight import Sight
from numkv.caches.paged.store import BlockStore, Ints, SequenceState
from numkv.checks import check_integers
from numkv.errors import NotSupported


def split(
    window: int, group: int, keeps: int, seen: Ints, positions: Ints, first: Ints
) -> tuple[Ints, Ints, Ints]:
    """Split what queries see: newest tokens in full precision, first tokens in full precision, codes between.

    Parameters
    ----------
    window, group : int
        The newest full-precision tokens, a query's own included. The tokens of a group if keys are by channel, or 0
        for a window.
    keeps : int
        The layer's first tokens in full precision.
    seen : int64 array (n, 2)
        Range of tokens that each query sees.
    positions : int64 array (n,)
        Position of each query.
    first : int64 array (n,)
        First token that each query's sequence still has in full precision, apart from the first ones.

    Returns
    -------
    newest, sinks, codes : int64 array (n, 2)
        Ranges; an empty one is ``[0, 0)``.
    """
    low, high = seen[:, 0], seen[:, 1]
    newest_from = positions // group * group if group else positions + 1 - window
    begin = np.maximum(np.maximum(newest_from, first), keeps)
    parts = (
        (np.maximum(low, begin), high),
        (low, np.minimum(high, keeps)),
        (np.maximum(low, keeps), np.minimum(high, begin)),
    )
    newest, sinks, codes = (
        np.where((a < b)[:, None], np.stack([a, b], 1), 0).astype(np.int64) for a, b in parts
    )
    return newest, sinks, codes


class Queries(NamedTuple):
    """The queries of a call."""

    positions: Ints
    """The position of each query in its sequence."""
    lens: Ints
    """The tokens of each query's sequence."""
    first: Ints
    """The first token that each query's sequence still has in full; see `split`."""

    def seen(self, sight: Sight | None, window: int, target: Any) -> Ints:
        """Tokens ``[low, high)`` that each sees."""
        sight = Sight() if sight is None else sight
        for name in ("mask", "alibi_slopes"):
            if getattr(sight, name) is not None:
                raise NotSupported(
                    f"`{name}`: expected None for a cache with tokens in full precision, got one; use a cache without"
                )
        if sight.ranges is not None:
            given = check_integers(target, "ranges", sight.ranges, (len(self.positions), 2))
            ranges: Ints = target.to_host(given).astype(np.int64)
            return ranges.clip(0, self.lens[:, None])
        high = np.minimum(self.positions + 1, self.lens) if sight.causal else self.lens
        low = np.maximum(0, self.positions - window) if window >= 0 else np.zeros_like(high)
        return np.stack([low, high], 1)


class Ranges(NamedTuple):
    """The tokens that queries see, laid out for kernels; None for parts that no query sees, except the newest."""

    newest: Array
    """Newest tokens in full."""
    first: Array | None
    codes: Array | None
    on_host: Ints
    """The codes, on the host."""


def ranges_of(store: BlockStore, twin: int, queries: Queries, seen: Ints) -> Ranges:
    """Return the parts that queries see in the layer with this full-precision copy."""
    residual = store.layers.residual
    assert residual is not None
    keeps = store.layers.keeps(twin)
    group = store.groups[store.place(twin)[1]].chunk
    newest, *others = split(residual.window, group, keeps, seen, queries.positions, queries.first)
    index = store.target.index
    sinks, codes = (index(x, np.int64) if (x[:, 0] < x[:, 1]).any() else None for x in others)
    return Ranges(index(newest, np.int64), sinks, codes, others[1])


def parts_of(store: BlockStore, layer: int, twin: int, tables: Any, ranges: Ranges) -> list[Part]:
    """Return the parts of a layer's attention; `tables` gives the table of a group."""
    codes, floats = store.place(layer), store.place(twin)
    return [
        Part(pool, tables(group), of)
        for (pool, group), of in zip((floats, floats, codes), ranges[:3], strict=True)
        if of is not None
    ]


def parts_of_queries(
    store: BlockStore, layer: int, states: Sequence[SequenceState], of: Ints, positions: Ints, options: CheckedOptions
) -> list[Part]:  # fmt: skip
    """Return the parts that queries see in a layer with a twin; `of` has the sequence's number of each query."""
    twin = store.layers.twin(layer)
    assert twin is not None
    group = store.place(twin)[1]
    first = np.array([store.first_stored(state, group) for state in states], np.int64)
    lens = np.array([state.length for state in states], np.int64)
    queries = Queries(positions, lens[of], first[of])
    seen = queries.seen(options.sight, options.window_left, store.target)

    def table(group: int) -> Array:
        return store.target.index(store.block_table(states, group), np.int32)

    return parts_of(store, layer, twin, table, ranges_of(store, twin, queries, seen))


def attend_to_newest(
    store: BlockStore, layer: int, states: Sequence[SequenceState], q: Array, lens: Ints, options: CheckedOptions
) -> Any:  # fmt: skip
    """Attend with a query for the newest token of each sequence, in a layer that has a twin."""
    target, of = store.target, np.arange(len(states))
    starts = target.index(np.arange(len(states) + 1), np.int64)
    parts = parts_of_queries(store, layer, states, of, lens - 1, options)
    return attend_to_parts(parts, q, target.index(lens, np.int64), starts, options)
