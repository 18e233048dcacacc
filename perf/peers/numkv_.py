"""numkv itself: contiguous, and paged with blocks of 128 tokens in shuffled order."""

import dataclasses
import subprocess
from pathlib import Path

import llvmlite
import numba
import numpy as np

import numkv
from perf.peers import (
    CONTIGUOUS,
    FLOATS,
    INT8_BESIDE,
    LARGEST_ERROR,
    OURS,
    PAGED,
    Contestant,
    float_layers,
    layers_of,
    padded_layers,
)

NAME = OURS
BLOCK_SIZE = 128  # the default, as `PAGED` says


def versions():
    at = _commit()
    of_numkv = f"numkv {numkv.__version__}" + (f" (commit {at})" if at else "")
    return f"{of_numkv} with Numba {numba.__version__}, llvmlite {llvmlite.__version__}"


def _commit():
    """The commit that is measured, where there is a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def stored(problem, kind):
    """K, V and their scales as numkv stores them, by name: lists of what a layer holds of each sequence."""
    shape = problem.shape
    layer = numkv.ContiguousLayer(
        shape.length, shape.kv_heads, shape.dim, kind=kind, head_dim_v=shape.dim_v
    )
    names = ("k", "v", "k_scale", "v_scale") if numkv.kind(kind).has_scales else ("k", "v")
    parts = {name: [] for name in names}
    for k, v in zip(problem.k, problem.v, strict=True):
        layer.seq_len = 0
        layer.append(k.swapaxes(0, 1), v.swapaxes(0, 1))
        for name, rows in parts.items():
            rows.append(getattr(layer, name)[0, :, : k.shape[1]].copy())
    return parts


def _layers(problem, kind):
    if kind in FLOATS:
        return dict(zip("kv", float_layers(problem, kind), strict=True))
    parts = stored(problem, kind)
    return dict(zip(parts, padded_layers(parts.values(), problem.shape.length), strict=True))


def _row_bytes(problem, kind):
    """Bytes of the rows of K and V that are there, scales included."""
    shape, of = problem.shape, numkv.kind(kind)
    widths = (shape.dim, shape.dim_v)
    return sum(shape.lens) * sum(of.bytes_per_token(shape.kv_heads, w) // 2 for w in widths)


def _contestant(call, stacks, size):
    """Calls ``call(i, k, v, **scales)`` with a layer's arrays."""
    layers = len(stacks["k"])
    of = [{name: x[i] for name, x in stacks.items()} for i in range(layers)]
    return Contestant(lambda i: call(**of[i]), np.asarray, layers, size)


def _queries(problem, kind):
    """The queries as calls take them, and the boundaries between sequences where they have several each.

    They have the kind's own dtype where that is one of floats, as the other libraries' have, and as a model's of that
    dtype.
    """
    shape, q = problem.shape, problem.q
    if kind in FLOATS:
        q = q.astype(numkv.kind(kind).dtype)
    if shape.queries == 1:
        return q, ()
    starts = np.arange(shape.batch + 1) * shape.queries
    return q.reshape(-1, *q.shape[2:]), (starts,)


def _contiguous(kind):
    def make(problem):
        lens, expected = np.array(problem.shape.lens), (*problem.q.shape[:-1], problem.shape.dim_v)
        q, starts = _queries(problem, kind)
        attend = numkv.prefill_attention if starts else numkv.decode_attention

        def call(k, v, **scales):
            return attend(q, k, v, lens, *starts, **scales).reshape(expected)

        made = _contestant(call, _layers(problem, kind), _row_bytes(problem, kind))
        # It may be in the race of another kind.
        return dataclasses.replace(made, largest_error=LARGEST_ERROR[kind])

    return make


def in_blocks(x, blocks):
    """``(batch, heads, tokens, …)`` as a pool ``(blocks, heads, BLOCK_SIZE, …)``; `blocks` has each sequence's."""
    heads, tokens = x.shape[1:3]
    cut = x.reshape(len(x), heads, tokens // BLOCK_SIZE, BLOCK_SIZE, *x.shape[3:]).swapaxes(1, 2)
    pool = np.empty((sum(map(len, blocks)), heads, BLOCK_SIZE, *x.shape[3:]), x.dtype)
    for of, rows in zip(blocks, cut, strict=True):
        pool[of] = rows[: len(of)]
    return pool


def _paged(kind):
    def make(problem):
        counts = [-(-n // BLOCK_SIZE) for n in problem.shape.lens]
        order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
        blocks = np.split(order, np.cumsum(counts)[:-1])
        table = np.zeros((len(blocks), max(counts)), np.int32)
        for to, of in zip(table, blocks, strict=True):
            to[: len(of)] = of
        pools = {n: in_blocks(x[0], blocks) for n, x in _layers(problem, kind).items()}
        stacks = dict(zip(pools, layers_of(*pools.values()), strict=True))
        lens, expected = np.array(problem.shape.lens), (*problem.q.shape[:-1], problem.shape.dim_v)
        q, starts = _queries(problem, kind)
        attend = numkv.paged_prefill_attention if starts else numkv.paged_decode_attention

        def call(k, v, **scales):
            return attend(q, k, v, table, lens, *starts, **scales).reshape(expected)

        made = _contestant(call, stacks, _row_bytes(problem, kind) + order.nbytes)
        of_head = pools["k"][0, 0].nbytes
        return dataclasses.replace(made, pieces=(of_head, of_head * problem.shape.kv_heads))

    return make


def decode(kind):
    forms = {CONTIGUOUS: _contiguous(kind), PAGED: _paged(kind)}
    if kind in ("int4", "code4"):
        forms[INT8_BESIDE] = _contiguous("int8")  # the two are to be compared, so they race
    return forms


def prefill(kind):
    """Queries in the kind's own dtype, as a model of that dtype has them."""

    def make(problem):
        length = problem.shape.length
        q = problem.q[0].astype(numkv.kind(kind).dtype)

        def call(k, v, **scales):
            return numkv.prefill_attention(q, k, v, [length], [0, length], **scales)[None]

        return _contestant(call, _layers(problem, kind), _row_bytes(problem, kind))

    return {CONTIGUOUS: make}
