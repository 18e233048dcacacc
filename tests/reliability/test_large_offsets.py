"""Elements past 2**31 and 2**33 of a buffer: the same, bit for bit, as in a buffer that is small.

The buffers are mapped without memory behind them, so that only the pages that are touched take any: some megabytes of
up to 70 GB.
"""

import mmap
import sys

import naive
import numpy as np
import pytest

import numkv
from numkv import targets

HEADS, DIM, BLOCK, GROUP = 2, 64, 16, 2
TOKENS = 150
F32 = np.float32
#: Elements before the first block that is used: past what 32 bits count, of elements and of bytes.
FAR = [2**31, 2**33]
KINDS = ["fp32", "fp16", "int8", "int4"]
_NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python's mmap names from 3.13 on

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="maps memory as Linux does")


def sparse(shape, dtype):
    """An array of zeros that takes memory where it is touched."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    try:
        memory = mmap.mmap(-1, max(size, 1), flags=flags)
    except OSError as error:
        pytest.skip(f"this system maps no {size} bytes: {error}")
    return np.frombuffer(memory, np.uint8, size).view(dtype).reshape(shape)


def pools(kind, blocks, make):
    """Buffers of K and V, and keywords with their scales."""
    form = numkv.PagedPool(1, BLOCK, HEADS, DIM, kind=kind)
    layer = numkv.PagedLayer(1, BLOCK, HEADS, DIM, pool=form)
    found = [make((blocks, *x.shape[1:]), x.dtype) for x in (layer.k, layer.v)]
    scales = {}
    if numkv.kind(kind).has_scales:
        scales = {
            name: make((blocks, *x.shape[1:]), x.dtype)
            for name, x in (("k_scale", layer.k_scale), ("v_scale", layer.v_scale))
        }
    return found, scales


def everything(kind, blocks, table, make):
    """What all operations give over a pool, with the used blocks of `table`; rows come from a fixed seed."""
    rng = np.random.default_rng(5)
    (k_pool, v_pool), scales = pools(kind, blocks, make)
    table = np.asarray(table, np.int32)
    used = len(table) - 1  # the last one is for a copy
    rows = rng.standard_normal((2, TOKENS, HEADS, DIM), dtype=F32)
    qkv = rng.standard_normal((8, (GROUP + 2) * HEADS * DIM), dtype=F32)
    angles = rng.standard_normal((8, DIM // 2)).astype(F32)
    q = rng.standard_normal((9, GROUP * HEADS, DIM), dtype=F32)
    slots = (
        table[np.arange(TOKENS + 8) // BLOCK].astype(np.int64) * BLOCK
        + np.arange(TOKENS + 8) % BLOCK
    )
    numkv.paged_append(rows[0], rows[1], k_pool, v_pool, slots[:TOKENS], **scales)
    found = {}
    found["write"] = numkv.paged_write(
        qkv, k_pool, v_pool, slots[TOKENS:], num_q_heads=GROUP * HEADS, qk_mode=1, cos=np.cos(angles),
        sin=np.sin(angles), positions=np.arange(8), q_norm_weight=np.ones(DIM, F32),
        k_norm_weight=np.ones(DIM, F32), **scales,
    )  # fmt: skip
    n, blocks_of = TOKENS + 8, table[None, :used].copy()
    found["decode"], found["lse"] = numkv.paged_decode_attention(
        q[:1], k_pool, v_pool, blocks_of, [n], return_lse=True, **scales
    )
    found["prefill"] = numkv.paged_prefill_attention(
        q, k_pool, v_pool, blocks_of, [n], [0, 9], window_left=70, **scales
    )
    # Mass, copies of blocks and of tokens.
    target = targets.get("cpu")
    k_words = target.words(k_pool)
    weights = np.zeros((1, HEADS, n), F32)
    no_scale = numkv.PagedPool(1, BLOCK, HEADS, DIM, kind=kind).pool.scales("k")
    target.ops.attention_weights(
        q[:1], "fp32", k_words, kind, target.words(scales.get("k_scale", no_scale)), blocks_of, np.array([n]),
        np.array([0, 1]), np.empty((0, 2), np.int64), False, found["lse"], 0.125, 0.0, -1, weights,
    )  # fmt: skip
    found["mass"] = weights
    target.ops.copy_blocks(k_words, table[:1], k_words, table[-1:])
    target.ops.copy_tokens(target.words(v_pool), slots[:3], target.words(v_pool), slots[20:23])
    for name, x in {"k": k_pool, "v": v_pool, **scales}.items():
        found[name] = naive.words(x[table].copy())
    return found


@pytest.mark.parametrize("far", FAR, ids=["2^31", "2^33"])
@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=[pytest.mark.slow] * (x in ("fp16", "int4"))) for x in KINDS]
)
def test_far_blocks_are_like_near_ones(kind, far):
    word = numkv.kind(kind)
    per_block = HEADS * BLOCK * word.words_per_row(DIM)
    first = far // per_block
    count = -(-(TOKENS + 8) // BLOCK) + 1
    order = np.random.default_rng(2).permutation(count)
    # Blocks on both sides of the border, in no order.
    want = everything(kind, count, order, np.zeros)
    got = everything(kind, first + count, first - count // 2 + order, sparse)
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert np.array_equal(naive.words(got[name]), naive.words(x)), name
        assert np.any(naive.words(x) != 0), name


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_a_contiguous_cache_with_a_far_sequence(kind):
    """One sequence's rows begin behind more than 2**31 elements of others'."""
    rng = np.random.default_rng(3)
    capacity = 2**20
    word = numkv.kind(kind)
    per_sequence = HEADS * capacity * word.words_per_row(DIM)
    sequences = 2**31 // per_sequence + 2
    rows = rng.standard_normal((2, TOKENS, HEADS, DIM), dtype=F32)
    layer = numkv.ContiguousLayer(TOKENS, HEADS, DIM, kind=kind)
    layer.append(*rows)
    (k, v), scales = pools(kind, 1, np.zeros)
    big = [sparse((sequences, HEADS, capacity, x.shape[3]), x.dtype) for x in (k, v)]
    big_scales = {name: sparse((sequences, HEADS, capacity), x.dtype) for name, x in scales.items()}
    for x, own in zip(
        [*big, *big_scales.values()], [layer.k, layer.v, layer.k_scale, layer.v_scale], strict=False
    ):
        x[-1, :, :TOKENS] = own[0]
    q = rng.standard_normal((sequences, GROUP * HEADS, DIM), dtype=F32)
    lens = [0] * (sequences - 1) + [TOKENS]
    got, lse = numkv.decode_attention(q, *big, lens, return_lse=True, **big_scales)
    want, want_lse = layer.decode_attention(q[-1:].copy(), return_lse=True)
    assert np.array_equal(got[-1:], want)
    assert np.array_equal(lse[-1:], want_lse)
    assert not got[:-1].any()
