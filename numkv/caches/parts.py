"""Attention over several parts of what queries see, ranges of tables, merged exactly: see `numkv.merge_states`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from numkv.arrays import Array
from numkv.attention.attend import attend, check_own_memory
from numkv.attention.cascade import converted
from numkv.attention.options import CheckedOptions
from numkv.checks import check_array, check_writable
from numkv.kinds import kind, kind_of_dtype
from numkv.storage.pool import Pool


class Part(NamedTuple):
    """What is read of one pool."""

    pool: Pool
    table: Array
    """See `attend`."""
    ranges: Array
    """What each query sees along its sequence's row of the table."""
    by_slot: bool = False
    """See `attend`."""
    lens: Array | None = None
    """Tokens in each row of the table, if not as many as the call says."""


def attend_to_parts(
    parts: Sequence[Part], q: Array, lens: Array, starts: Array, options: CheckedOptions
) -> Any:
    """Attend with checked queries over parts that have no token in common.

    A part that nobody sees may be left out, but for the first: that changes no bit, as queries of 16 bits are widened
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
        As `attend` gives them.
    """
    target = parts[0].pool.target
    shape = int(q.shape[0]), int(q.shape[1]), parts[0].pool.head_dim_v
    out = options.out
    if out is not None:
        out = check_array(target, "out", out, (q.dtype,), shape)
        check_writable("out", out)
        for part in parts:
            of_call = {"seq_lens": lens, "cu_seqlens_q": starts, "block_table": part.table}
            check_own_memory(target, out, q, part.pool, of_call)
    own = kind_of_dtype(q.dtype)
    assert own is not None
    exact = own if own.dtype.itemsize >= 4 else kind("fp32")
    wide = q if exact is own else converted(target, q, target.empty(q.shape, exact.dtype))
    asked = options._replace(return_lse=True, out=None, window_left=-1, sight=None)
    words, found = target.words, None
    for part in parts:
        args = part.pool, part.table, wide, lens if part.lens is None else part.lens, starts, asked
        o, lse = attend(*args, ranges=part.ranges, by_slot=part.by_slot)
        if found is not None:
            into = target.empty(shape, exact.dtype), target.empty(shape[:2], np.dtype(np.float32))
            target.ops.merge_states(
                words(found[0]), found[1], words(o), lse, exact.name, words(into[0]), into[1]
            )
            o, lse = into
        found, asked = (o, lse), asked._replace(sinks=None)
    assert found is not None
    o, lse = found
    if out is not None or exact is not own:
        o = converted(target, o, target.empty(shape, q.dtype) if out is None else out)
    return (o, lse) if options.return_lse else o
