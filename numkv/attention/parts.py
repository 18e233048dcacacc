"""Attention over several parts of what queries see, merged exactly: see `numkv.merge_states`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.arrays import Array
from numkv.attention.attend import check_call, run
from numkv.attention.options import CheckedOptions
from numkv.kinds import float_kind, kind
from numkv.storage.pool import Pool
from numkv.targets.base import Target

_FLOAT32 = np.dtype(np.float32)


class Part(NamedTuple):
    """The part of a call that reads one pool."""

    pool: Pool
    table: Array
    """See `attend`."""
    ranges: Array
    """The range of tokens that each query sees, along its sequence's row of the table."""
    by_slot: bool = False
    """See `attend`."""
    lens: Array | None = None
    """Tokens in each row of the table, if not as many as the call says."""


def attend_to_parts(
    parts: Sequence[Part], q: Array, lens: Array, starts: Array, options: CheckedOptions
) -> Any:
    """Attend with checked queries over parts that have no token in common.

    A part that no query sees may be left out, except the first. That changes no bit, as queries of 16 bits are widened
    in any case.

    Parameters
    ----------
    parts : sequence of Part
        One or more; the first one has the sinks of the softmax.
    q, lens, starts, options
        See `attend`.

    Returns
    -------
    array or tuple of array
        The results of `attend`.
    """
    tables = {f"block_table of part {i} ({x.pool.k_kind})": x.table for i, x in enumerate(parts)}
    tables |= {"seq_lens": lens, "cu_seqlens_q": starts}
    return run_parts(
        parts, q, lens, starts, check_call(q, options, [part.pool for part in parts], tables)
    )


def run_parts(
    parts: Sequence[Part], q: Array, lens: Array, starts: Array, options: CheckedOptions,
    another: Callable[[Array, CheckedOptions], Any] | None = None,
) -> Any:  # fmt: skip
    """Attend as `attend_to_parts` does, without checks, with options from `check_call`.

    `another` attends to one more part, with the queries and the options that it is passed.
    """
    asked = options._replace(return_lse=True, out=None, window_left=-1, sight=None)

    def of(part: Part) -> Callable[[Array], Any]:
        own = asked if part is parts[0] or asked.sinks is None else asked._replace(sinks=None)
        its = lens if part.lens is None else part.lens
        return lambda wide: run(
            part.pool, part.table, wide, its, starts, own, ranges=part.ranges, by_slot=part.by_slot
        )

    every = [of(part) for part in parts]
    if another is not None:
        every.append(lambda wide: another(wide, asked._replace(sinks=None)))
    return merged(parts[0].pool, q, options, every)


def run_seen(
    parts: Sequence[Part], q: Array, lens: Array, starts: Array, options: CheckedOptions
) -> Any:
    """Attend as `run_parts` does, to the parts that some query sees, by their ranges on the host.

    A single visible part is read without widening queries. If no query sees a token, that is the first part.
    """
    seen = [x for x in parts if (x.ranges[:, 0] < x.ranges[:, 1]).any()] or parts[:1]
    index = parts[0].pool.target.index
    seen = [
        Part(pool, table, index(ranges, np.int64), by_slot, own)
        for pool, table, ranges, by_slot, own in seen
    ]
    if len(seen) > 1:
        return run_parts(seen, q, lens, starts, options)
    pool, table, ranges, by_slot, _ = seen[0]
    return run(pool, table, q, lens, starts, options, ranges=ranges, by_slot=by_slot)


def merged(
    pool: Pool, q: Array, options: CheckedOptions, parts: Sequence[Callable[[Array], Any]]
) -> Any:
    """Merge the functions' outputs by their lse, for queries of 32 bits or more; rounded at the end."""
    target, own = pool.target, float_kind(q.dtype)
    shape = int(q.shape[0]), int(q.shape[1]), pool.head_dim_v
    exact = own if own.dtype.itemsize >= 4 else kind("fp32")
    wide = q if exact is own else converted(target, q, target.empty(q.shape, exact.dtype))
    words, out = target.words, options.out
    o, lse = parts[0](wide)
    for i, part in enumerate(parts[1:], 2):
        other, of_other = part(wide)
        into = out if out is not None and exact is own and i == len(parts) else None
        both = target.empty(shape, exact.dtype) if into is None else into
        total = target.empty(shape[:2], _FLOAT32)
        target.ops.merge_states(
            words(o), lse, words(other), of_other, exact.name, words(both), total
        )
        o, lse = both, total
    if (out is not None and o is not out) or exact is not own:
        o = converted(target, o, target.empty(shape, q.dtype) if out is None else out)
    return (o, lse) if options.return_lse else o


def gathered(target: Target, x: Array, numbers: NDArray[np.int64]) -> Array:
    """Rows ``(num_tokens, num_heads, dim)`` of an array by their numbers."""
    made = target.empty((len(numbers), *x.shape[1:]), x.dtype)
    here, there = (
        target.words(y).reshape((int(y.shape[0]), int(y.shape[1]), 1, int(y.shape[2])))
        for y in (x, made)
    )
    places = target.index(np.arange(len(numbers)), np.int64)
    target.ops.copy_tokens(here, target.index(numbers, np.int64), there, places)
    return made


def converted(target: Target, x: Array, to: Array) -> Array:
    """Convert floats ``(num_tokens, num_heads, head_dim)`` into an array of another dtype."""
    source, dest = float_kind(x.dtype), float_kind(to.dtype)
    tokens, heads, dim = (int(n) for n in to.shape)
    rows = target.words(to).reshape((tokens, heads, 1, dim))  # blocks of one token
    table = target.index(np.arange(tokens), np.int32)
    no_scale = target.empty((0, 0, 0), _FLOAT32)
    target.ops.append_rows(target.words(x), source.name, rows, dest.name, no_scale, table, 0)
    return to
