"""Attention over a paged pool (a contiguous cache is one with long blocks), on CUDA.

The docstring of `numkv.kernels.cpu.attention` has the formula. The unit of work is an *item*: one sequence, one kv
head, up to eight query rows and one split of the KV range. A query row is a token and a q head of the group. The host
knows neither lengths nor query starts. So each block counts the items itself and computes every ``gridDim``-th. No
block is launched in vain.

Within an item, one tile of tokens at a time:

1. *Scores.* Teams of adjacent threads read a K row together, 16 bytes each, for several tokens at once. Every element
   read serves all query rows. Partial sums go to shared memory.
2. *Softmax.* Each thread has (row, token) pairs. It adds up the team's sums, masks, finds the tile's maximum and turns
   scores into probabilities. This is the online softmax of Milakov and Gimelshein (arXiv:1805.02867), in base 2.
3. *Output.* Teams read V rows the same way and add them, weighted, to sums in registers. The teams' sums are added up
   when the item ends.

16-bit floats, codes and 8-bit floats use a kernel on tensor cores where their rows allow it: see
`numkv.kernels.cuda.attention.decode`. The rest describes the general kernel.

INT8 codes become floats as they are read. A token's scale of K multiplies its whole scores. Its scale of V multiplies
its probabilities, once these have been summed. Only scales of tokens that count are read. INT4 codes are scaled as they
are read, as each group of a row has its own scale. For 8-bit floats, a head's scale of K multiplies its query rows, and
its scale of V the output rows.

Causality and a window, or a range of its own, limit the tokens that a query sees: two numbers for each row. Tiles that
some rows of an item do not see whole are added up token by token, so masked tokens never enter a sum.

Another kernel on tensor cores computes sequences with many query rows, if it supports the call: see
`numkv.kernels.cuda.attention.prefill`.

Only the general kernel supports gaps between visible tokens, and biases. It is compiled anew for them: see
`numkv.kernels.cuda.attention.kernel`.

Splits depend on the sequence and the device alone. They depend on its length, number of queries and window, or on its
ranges, and on the number of multiprocessors (`numkv.kernels.cuda.attention.items.Splitting`). A second kernel merges
their parts in order, as in Flash-Decoding (Dao et al., 2023). The order of every sum depends on splits and head dims
alone. So results do not depend on the batch or the launch.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import types

from numkv.errors import NotSupported
from numkv.kernels.builder import WORDS
from numkv.kernels.cuda.attention.decode import make_decode
from numkv.kernels.cuda.attention.items import MAX_CAPACITY, shift_of, splitting
from numkv.kernels.cuda.attention.kernel import (
    Q_BYTES,
    V_WIDTHS,
    make_attention,
    q_bytes,
    row_choices,
)
from numkv.kernels.cuda.attention.prefill import make_prefill
from numkv.kernels.cuda.attention.sizes import (
    DECODE_ROWS,
    MOST_ROWS,
    fits,
    fits_prefill,
    sizes_for,
    sizes_of_prefill,
)
from numkv.kernels.cuda.attention.splits import merge_splits, parts_of, room_for
from numkv.kernels.cuda.launches import INDICES, THREADS, Kernel, array, launch, pool_types
from numkv.kernels.cuda.simd import WIDTH, aligned, ceil_div
from numkv.kernels.cuda.streams import current, multiprocessors
from numkv.kernels.operations import Operations, implements
from numkv.rows.softmax import LOG2_E

__all__ = ["append_attend", "attend"]


def _signature(
    q_kind: str, k_kind: str, v_kind: str, real: Any, integers: int, *parts: Any
) -> tuple[Any, ...]:
    """Return the signature of a kernel that computes in this type, with so many integers among its options."""
    return (
        array(WORDS[q_kind], 3), *pool_types(k_kind), *pool_types(v_kind), array(types.int32, 2), INDICES, INDICES,
        array(types.int64, 2), types.Tuple((*[types.int64] * integers, real, real)), array(real, 1),
        array(WORDS[q_kind], 3), array(types.float32, 2), *parts,
    )  # fmt: skip


@functools.cache
def _attention(
    q_kind: str, k_kind: str, v_kind: str, compute: str, rows: int, columns: int, wide: bool, masked: bool = False,
) -> Any:  # fmt: skip
    key = q_kind, k_kind, v_kind, compute, rows, columns, wide, masked
    real = getattr(types, compute)
    signature = _signature(q_kind, k_kind, v_kind, real, 8, array(real, 4))
    return Kernel(make_attention, key, signature, row_choices(k_kind, v_kind, compute)[rows])


@functools.cache
def _prefill(q_kind: str, k_kind: str, v_kind: str, dim: int, dim_v: int, capped: bool) -> Any:
    signature = _signature(q_kind, k_kind, v_kind, types.float32, 4)
    key = q_kind, k_kind, v_kind, dim, dim_v
    sizes = sizes_of_prefill(*key)
    return Kernel(make_prefill, (*key, capped), signature, sizes.blocks, sizes.threads)


def _launch_prefill(kinds, q, pools, batch, options, sm_scale, soft_cap, sinks, out, lse):
    """Attend for the sequences with more queries than the last number of `options`; see `fits_prefill`."""
    sizes, capped = sizes_of_prefill(*kinds, q.shape[2], out.shape[2]), soft_cap > 0
    _, heads, block_size, _ = pools[0].shape
    rows = q.shape[0] * (q.shape[1] // heads)
    by_slot, window_left, most_tokens = options
    real = sinks.dtype.type  # float32
    most = min(batch[1].shape[0], q.shape[0] // (most_tokens + 1))  # sequences with more queries
    launch(
        _prefill(*kinds, sizes.dim, sizes.dim_v, capped),
        (rows // sizes.rows + most) * heads, sizes.threads,
        q, *pools, *batch, (int(by_slot), shift_of(block_size), int(window_left), most_tokens,
        real(sm_scale if capped else sm_scale * LOG2_E), real(soft_cap)), sinks, out, lse,
        shared_bytes=sizes.shared_bytes,
    )  # fmt: skip


@functools.cache
def _decode(q_kind: str, k_kind: str, v_kind: str, dim: int, dim_v: int) -> Any:
    signature = _signature(q_kind, k_kind, v_kind, types.float32, 8, array(types.float32, 4))
    key = (q_kind, k_kind, v_kind, dim, dim_v)
    return Kernel(make_decode, key, signature, sizes_for(*key).blocks)


def _choose(
    q, q_kind, k, k_kind, k_scale, v, v_kind, v_scale, dim_v, wanted, compute, masked
) -> tuple[Any, int, int]:
    """Return the kernel for `wanted` query rows of a kv head, an item's rows, and its shared memory."""
    dim = q.shape[2]
    if not masked and fits(q, q_kind, k, k_kind, k_scale, v, v_kind, v_scale, dim_v):
        sizes = sizes_for(q_kind, k_kind, v_kind, dim, dim_v)
        return _decode(q_kind, k_kind, v_kind, dim, dim_v), DECODE_ROWS, sizes.shared_bytes
    choices = row_choices(k_kind, v_kind, compute.name)
    bytes_of = {n: q_bytes(k_kind, dim, n, compute.itemsize) for n in choices}
    fitting = [n for n in choices if bytes_of[n] <= Q_BYTES] or [1]
    rows = next((n for n in fitting if n >= wanted), fitting[-1])
    columns = ceil_div(ceil_div(dim_v, V_WIDTHS[v_kind]), THREADS)
    wide = aligned(k, k_kind, WIDTH[k_kind]) and aligned(v, v_kind, V_WIDTHS[v_kind])
    kernel = _attention(q_kind, k_kind, v_kind, compute.name, rows, columns, wide, masked)
    return kernel, rows, bytes_of[rows]


@implements(Operations.attend)
def attend(
    q, q_kind, k, k_kind, k_scale, v, v_kind, v_scale, block_table, seq_lens, q_starts, ranges,
    by_slot, sm_scale, logits_soft_cap, window_left, sinks, out, lse,
):  # fmt: skip
    compute = sinks.dtype
    num_tokens, num_q_heads = q.shape[:2]
    num_kv_heads, block_size, dim_v = v.shape[1], v.shape[2], out.shape[2]
    num_seqs = seq_lens.shape[0]
    if 0 in (num_tokens, num_seqs, num_q_heads, dim_v):
        return

    # -- which kernel
    group = num_q_heads // num_kv_heads
    most_tokens = num_tokens
    # A single query never goes to prefill. If the host does not know that each sequence has one, the kernel checks.
    queries, least = getattr(q_starts, "queries", ""), max(1, MOST_ROWS // group)
    alone = num_seqs == 1 and queries != "fewer"
    masked = ranges.shape[1] > 2  # the kernel of multiply-adds alone knows gaps and biases
    if (
        not masked
        and queries != "one each"
        and num_tokens > least
        and fits_prefill(q, q_kind, k, k_kind, k_scale, v, v_kind, v_scale, out, sm_scale)
    ):
        most_tokens = 0 if alone else least
        _launch_prefill(
            (q_kind, k_kind, v_kind), q, (k, k_scale, v, v_scale), (block_table, seq_lens, q_starts, ranges),
            (by_slot, window_left, most_tokens), sm_scale, logits_soft_cap, sinks, out, lse,
        )  # fmt: skip
        if alone:
            return
    wanted = group * ceil_div(num_tokens, num_seqs)
    kernel, rows, shared_bytes = _choose(
        q, q_kind, k, k_kind, k_scale, v, v_kind, v_scale, dim_v, wanted, compute, masked
    )

    # -- the most work
    capacity = block_table.shape[1] * (1 if by_slot else block_size)
    if capacity > MAX_CAPACITY:
        raise NotSupported(f"expected sequences of at most {MAX_CAPACITY} tokens, got {capacity}")
    window_left = int(window_left)
    how = splitting(multiprocessors(current().device))
    room = room_for(num_tokens, num_seqs, num_kv_heads, group, capacity, window_left, how)
    row_blocks = min(
        num_tokens * ceil_div(group, rows), ceil_div(num_tokens * group, rows) + num_seqs
    )  # fmt: skip
    parts = parts_of(room, dim_v, compute.name)
    real = compute.type
    scale = real(sm_scale if logits_soft_cap > 0 else sm_scale * LOG2_E)
    options = (
        int(by_slot), shift_of(block_size), window_left, room.slots, int(room.by_token), most_tokens,
        *how, scale, real(logits_soft_cap),
    )  # fmt: skip
    launch(
        kernel, row_blocks * room.splits * num_kv_heads, THREADS,
        q, k, k_scale, v, v_scale, block_table, seq_lens, q_starts, ranges, options, sinks,
        out, lse, parts,
        shared_bytes=shared_bytes,
    )  # fmt: skip
    if room.slots:
        merge_splits(
            parts, room, q_kind, capacity, num_kv_heads, seq_lens, q_starts, ranges, window_left, sinks, out, lse
        )  # fmt: skip


@implements(Operations.append_attend)
def append_attend(q_kind, rows_kind, k_kind, v_kind, by_address=False, in_full=None):
    return None  # two launches are cheaper than to look at arrays between them
