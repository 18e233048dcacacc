"""Attention of sequences with a common prefix: its rows are read once for all, and both parts are merged.

A sequence's result does not depend, bit for bit, on the sequences that share its prefix. Queries attend to the prefix
in chunks whose number of rows makes the kernels use the same code path, however many queries there are. A partial chunk
is padded with copies of its queries. Source: Ye et al., "Cascade Inference" (FlashInfer, 2024).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.arrays import Array
from numkv.attention.attend import attend, check_call
from numkv.attention.options import CheckedOptions
from numkv.attention.parts import gathered, merged
from numkv.attention.sight import Sight
from numkv.errors import NotSupported
from numkv.storage.pool import Pool

_FLOAT32 = np.dtype(np.float32)
# Rows of a kv head that attend to a prefix together: at least the first, a multiple of the second, at most the third.
# All are rows of one item, in whole groups of rows. On the CPU several chunks, up to the third, are one item, whose
# rows are independent. On CUDA splits depend on the number of rows, so each chunk is alone. From the first on, a matrix
# unit and CUDA always use one path. Vector code needs less padding. Panels of float rows use one path for more than a
# few rows, and other rows for any number of whole groups.
_LEAST, _UNIT, _MOST = 32, 8, 64


class Prefix(NamedTuple):
    """The common prefix of some sequences.

    Attributes
    ----------
    seq : int
        A sequence that begins with it, whose row of the block table is used.
    tokens : int64 array
        Numbers of the queries that see it.
    """

    seq: int
    tokens: NDArray[np.int64]


def chunk_tokens(group: int, least: int = _LEAST) -> int:
    """Return the query tokens of a chunk, for q heads that share a kv head; 0 if no chunk is one item."""
    rows = math.lcm(group, _UNIT)
    rows *= -(-least // rows)
    return rows // group if rows <= _MOST else 0


def _least_rows(pool: Pool, q_dtype: Any) -> int:
    """Return the fewest rows of a chunk, by kinds and machine, for all calls."""
    if not pool.target.values_on_host:
        return _LEAST
    from numkv.kernels.cpu.attention.engines import by_panels, panels_from, use_amx

    kinds, compute = (pool.k_kind.name, pool.v_kind.name), "float32"
    if q_dtype == np.float64 or use_amx(*kinds, compute):
        return _LEAST
    return panels_from(*kinds, compute) if by_panels(*kinds, compute) else _UNIT


def attend_cascade(
    pool: Pool, block_table: Array, q: Array, seq_lens: Array, q_starts: Array, options: CheckedOptions,
    shared_len: int, prefixes: list[Prefix],
) -> Any:  # fmt: skip
    """Attend with checked queries over a pool, to the first `shared_len` tokens apart from the rest.

    Parameters
    ----------
    pool, block_table, q, seq_lens, q_starts
        See `numkv.attention.attend.attend`.
    options : CheckedOptions
        From `check_options`; without a window and `sight`.
    shared_len : int
        Tokens that prefixes have; all queries are later ones.
    prefixes : list of Prefix
        Of which each query sees one.

    Returns
    -------
    array or tuple of array
        The output, and the lse if asked for.
    """
    if shared_len and (options.window_left >= 0 or options.sight is not None):
        raise NotSupported(
            "`shared_len`: expected 0 with a window, a mask, ranges or slopes, got another number"
        )
    tokens, num_q_heads = int(q.shape[0]), int(q.shape[1])
    group = num_q_heads // int(pool.k.shape[1])
    each = chunk_tokens(group, _least_rows(pool, q.dtype)) if group else 0
    if not tokens or not shared_len or not each:
        return attend(pool, block_table, q, seq_lens, q_starts, options)
    tables = {"block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": q_starts}
    options = check_call(q, options, (pool,), tables)
    asked = options._replace(return_lse=True, out=None)

    def of_prefixes(wide: Array) -> tuple[Array, Array]:
        alone = asked._replace(sinks=None)
        return _of_prefixes(pool, block_table, wide, alone, shared_len, prefixes, each)

    def of_rest(wide: Array) -> Any:
        later = asked._replace(sight=Sight(first=shared_len))
        return attend(pool, block_table, wide, seq_lens, q_starts, later)

    return merged(pool, q, options, (of_prefixes, of_rest))


def _of_prefixes(
    pool: Pool, block_table: Array, q: Array, options: CheckedOptions, shared_len: int,
    prefixes: list[Prefix], each: int,
) -> tuple[Array, Array]:  # fmt: skip
    """Attention of every query to its prefix alone, and the lse."""
    target = pool.target
    most = each
    if target.values_on_host:
        most *= _MOST // (each * (int(q.shape[1]) // int(pool.k.shape[1])))
    source: list[NDArray[np.int64]] = []
    tables: list[int] = []
    ends = [0]
    back = np.empty(int(q.shape[0]), np.int64)
    for prefix in prefixes:
        first, padded = ends[-1], -(-len(prefix.tokens) // each) * each
        back[prefix.tokens] = first + np.arange(len(prefix.tokens))
        source.append(np.resize(prefix.tokens, padded))
        own = [first + min(n + most, padded) for n in range(0, padded, most)]
        ends += own
        tables += [prefix.seq] * len(own)
    number, columns = len(tables), int(block_table.shape[1])
    words = block_table.view(_FLOAT32).reshape((int(block_table.shape[0]), 1, columns))
    table = gathered(target, words, np.array(tables)).reshape((number, columns)).view(np.int32)
    queries = gathered(target, q, np.concatenate(source))
    lens = target.index(np.full(number, shared_len), np.int64)
    starts = target.index(np.array(ends), np.int64)
    o, lse = attend(
        pool, table, queries, lens, starts, options._replace(sight=Sight(causal=False))
    )  # fmt: skip
    of_heads = lse.reshape((*lse.shape, 1))
    lse = gathered(target, of_heads, back)
    return gathered(target, o, back), lse.reshape(tuple(lse.shape[:2]))
