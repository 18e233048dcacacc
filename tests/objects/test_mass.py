"""Attention mass per cached token: the methods of layers and caches, and what the function refuses."""

import naive
import numpy as np
import pytest
import tolerances
from layer_lists import paged_kv_cache
from messages import about

import numkv
from numkv import targets
from numkv.storage.hadamard import Rotation

F32 = np.float32


# ---------------------------------------------------------------- methods


def layer_of(kind, layout, target):
    if layout == "contiguous":
        return numkv.ContiguousLayer(16, 2, 8, kind=kind, target=target)
    pool = numkv.PagedPool(8, 3, 2, 8, kind=kind, target=target)
    other = numkv.PagedLayer(2, 3, 2, 8, pool=pool)
    layer = numkv.PagedLayer(6, 3, 2, 8, pool=pool)
    layer.seq_len = 3
    other.seq_len = 4  # in the way
    layer.seq_len = 0
    return layer


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_of_a_layer(target, to, host, rng, kind, layout):
    k = rng.standard_normal((11, 2, 8)).astype(F32)
    q = rng.standard_normal((4, 6, 8)).astype(F32)
    layer = layer_of(kind, layout, target)
    layer.append(to(k), to(k))
    stored = (
        naive.int8_dequantise(*naive.int8_quantise(k))
        if kind == "int8"
        else naive.round_to(k, kind)
    )
    want = naive.attention_weights(q, stored.transpose(1, 0, 2)[None], [11], [0, 4], window_left=5)[
        0
    ]
    tolerances.assert_weights_close(host(layer.attention_weights(to(q), window_left=5)), want, kind)
    _, lse = layer.decode_attention(to(q), window_left=5, return_lse=True)
    tolerances.assert_weights_close(
        host(layer.attention_weights(to(q), window_left=5, lse=lse)), want, kind
    )


def test_of_an_empty_layer(target, to, host):
    layer = layer_of("fp32", "paged", target)
    q = to(np.ones((1, 4, 8), F32))
    assert host(layer.attention_weights(q)).shape == (2, 0)
    with pytest.raises(numkv.DimensionMismatch, match="queries"):
        layer.attention_weights(to(np.ones((2, 4, 8), F32)))


def test_of_a_cache(target, to, host, rng):
    """One query or several; rows not yet advanced count."""
    cache = numkv.KVCache(3, 2, 8, target=target)
    k = rng.standard_normal((5, 2, 8)).astype(F32)
    q = rng.standard_normal((3, 4, 8)).astype(F32)
    cache.append(1, to(k), to(k))
    want = naive.attention_weights(q, k.transpose(1, 0, 2)[None], [5], [0, 3])[0]
    tolerances.assert_weights_close(host(cache.attention_weights(1, to(q))), want, "fp32")
    last = naive.attention_weights(q[2:], k.transpose(1, 0, 2)[None], [5], [0, 1])[0]
    tolerances.assert_weights_close(host(cache.attention_weights(1, to(q[2]))), last, "fp32")
    _, lse = cache.decode_attention(1, to(q[2]), return_lse=True)
    tolerances.assert_weights_close(
        host(cache.attention_weights(1, to(q[2]), lse=lse)), last, "fp32"
    )
    with pytest.raises(IndexError, match="layer"):
        cache.attention_weights(3, to(q))
    with pytest.raises(numkv.DimensionMismatch, match="queries"):
        cache.attention_weights(0, to(q))


def as_read(rows, kind, rotate):
    """What rows ``(tokens, heads, dim)`` are after they were stored, in float64."""
    if rotate:
        rows = Rotation(rows.shape[-1]).forward(targets.get("cpu"), rows)
    stored = naive.int8_dequantise(*naive.int8_quantise(rows)) if kind == "int8" else rows
    stored = stored.astype(np.float64)
    return stored @ naive.rotation(Rotation(rows.shape[-1]).signs) if rotate else stored


STORED = pytest.mark.parametrize(
    ("kind", "rotate"), [("fp32", False), ("int8", False), ("int8", True)]
)


@STORED
def test_of_a_paged_cache(target, to, host, rng, kind, rotate):
    """Of a step and of what is committed; layers with a window, and blocks that they have let go of."""
    cache = paged_kv_cache(
        2,
        2,
        8,
        num_blocks=40,
        block_size=2,
        kind=kind,
        target=target,
        windows=[-1, 3],
        rotate=rotate,
    )
    a, b, c = (cache.add() for _ in range(3))
    rows = rng.standard_normal((12, 2, 8)).astype(F32)
    stored = as_read(rows, kind, rotate)
    step = cache.reserve([a, b], [7, 2])
    for layer in (0, 1):
        step.append(layer, *[to(rows[[*range(7), 5, 4]])] * 2)
    cache.commit(step)
    q = rng.standard_normal((5, 4, 8)).astype(F32)
    step = cache.reserve([b, c, a], [1, 0, 4])
    for layer, window in enumerate((-1, 3)):
        step.append(layer, *[to(rows[[3, 8, 9, 10, 11]])] * 2)
        k = np.zeros((3, 2, 11, 8))
        k[0, :, :3] = stored[[5, 4, 3]].transpose(1, 0, 2)
        k[2] = stored[[*range(7), *range(8, 12)]].transpose(1, 0, 2)
        want = naive.attention_weights(q, k, [3, 0, 11], [0, 1, 1, 5], window_left=window)
        tolerances.assert_weights_close(host(step.attention_weights(layer, to(q))), want, kind)
    _, lse = step.attention(1, to(q), return_lse=True)
    tolerances.assert_weights_close(host(step.attention_weights(1, to(q), lse=lse)), want, kind)
    cache.commit(step)
    for layer, window, queries in ((0, -1, 4), (1, 3, 2)):
        last = q[5 - queries :]
        want = naive.attention_weights(last, k[2:], [11], [0, queries], window_left=window)[0]
        tolerances.assert_weights_close(
            host(cache.attention_weights(layer, a, to(last))), want, kind
        )
    # Blocks before token 6 are gone: the newest token but two would see token 5.
    with pytest.raises(numkv.NotSupported, match="first of which sees token 5"):
        cache.attention_weights(1, a, to(q[:3]))
    with pytest.raises(numkv.DimensionMismatch, match="queries"):
        cache.attention_weights(0, b, to(q[:4]))
    assert host(cache.attention_weights(1, c, to(q[:1]))).shape == (2, 0)
    with pytest.raises(numkv.DimensionMismatch, match="tokens"):
        cache.reserve([b], [1]).attention_weights(0, to(q))


def sees_window(row, at):
    return row - 3 <= at <= row


def sees_chunk(row, at):
    return row // 4 * 4 <= at <= row


@pytest.mark.parametrize(
    ("make", "sees"),
    [
        (numkv.CausalCache, lambda row, at: at <= row),
        (lambda: numkv.CausalCache(window_left=3), sees_window),
        (lambda: numkv.CausalCache(chunk_size=4), sees_chunk),
    ],
    ids=["causal", "window", "chunk"],
)
@STORED
def test_of_cells(target, to, host, rng, make, sees, kind, rotate):
    """Sequences whose tokens are no neighbours, and cells that were someone else's before."""
    cache = make()
    cache.init(kind, 3, 16, 8, target, rotate=rotate)
    tokens = {5: {}, 2: {}, 9: {}}  # rows by sequence and position
    batches = [([5, 5, 5, 2, 9, 9], [0, 1, 2, 0, 0, 1]), ([5] * 6, [3, 4, 5, 6, 7, 8]),
               ([2, 5, 2, 9], [1, 9, 2, 2])]  # fmt: skip
    for i, (seqs, positions) in enumerate(batches):
        if i == 2:
            cache.remove(9, 1)
            tokens[9].pop(1)
            positions[3] = 1
        rows = rng.standard_normal((len(seqs), 2, 8)).astype(F32)
        cache.start_forward(numkv.Batch(positions, seqs))
        cache.put(1, to(rows), to(rows))
        stored = as_read(rows, kind, rotate)
        for seq, position, row in zip(seqs, positions, stored, strict=True):
            tokens[seq][position] = row
    q = rng.standard_normal((4, 4, 8)).astype(F32)
    got = cache.attention_weights(1, to(q))
    _, lse = cache.decode_attention(1, to(q), return_lse=True)
    given = cache.attention_weights(1, to(q), lse=lse)
    assert sorted(got) == sorted(given) == [2, 5, 9]
    for seq in got:
        held = cache.positions(seq).tolist()
        keys = np.array([tokens[seq][p] for p in held])
        want = np.zeros((2, len(held)))
        for row, (of, position) in enumerate(zip(seqs, positions, strict=True)):
            seen = [j for j, p in enumerate(held) if of == seq and sees(position, p)]
            for h in range(4 if seen else 0):
                scores = keys[seen, h // 2] @ q[row, h].astype(np.float64) / np.sqrt(8)
                want[h // 2, seen] += np.exp(scores) / np.exp(scores).sum()
        tolerances.assert_weights_close(host(got[seq]), want, kind)
        tolerances.assert_weights_close(host(given[seq]), want, kind)


def test_of_cells_that_see_what_comes_after(target, to, host, rng):
    """Ranges that are not causal, of a single run; and a wrapper hands on to its child."""
    sliding, causal = numkv.CausalCache(window_left=2), numkv.CausalCache()
    cache = numkv.WrapperCache(sliding, causal, layer_types=[0, 1])
    cache.init("fp32", 1, 16, 8, target)
    cache.start_forward(numkv.Batch(range(5), [0] * 5))
    rows = rng.standard_normal((5, 2, 8)).astype(F32)
    for layer in (0, 1):
        cache.put(layer, to(rows), to(rows))
    causal.set_causal([1])
    q = rng.standard_normal((5, 4, 8)).astype(F32)
    keys = rows.transpose(1, 0, 2)[None]
    want = naive.attention_weights(q, keys, [5], [0, 5])[0]
    want -= naive.attention_weights(q[1:2], keys, [2], [0, 1])[0]
    want += naive.attention_weights(q[1:2], keys, [5], [0, 1])[0]
    tolerances.assert_weights_close(host(cache.attention_weights(1, to(q))[0]), want, "fp32")
    want = naive.attention_weights(q, keys, [5], [0, 5], window_left=2)[0]
    tolerances.assert_weights_close(host(cache.attention_weights(0, to(q))[0]), want, "fp32")
    with pytest.raises(numkv.DimensionMismatch, match="5 tokens of the batch"):
        cache.attention_weights(1, to(q[:4]))
    with pytest.raises(IndexError, match="layer"):
        causal.attention_weights(0, to(q))


def test_of_an_encoders_rows():
    cache = numkv.EncoderCache()
    cache.init("fp32", 1, 16, 4)
    with pytest.raises(numkv.NotSupported, match="EncoderCache"):
        cache.attention_weights(0, np.ones((1, 4, 8), F32))


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"lse": np.zeros((2, 3), F32)}, numkv.DimensionMismatch, about("lse")),
        ({"lse": np.zeros((2, 4))}, numkv.UnsupportedDType, about("lse")),
        ({"window_left": -2}, ValueError, "window_left"),
        ({"logits_soft_cap": -1.0}, ValueError, "logits_soft_cap"),
        ({"k_scale": np.zeros((2, 2, 4), F32)}, numkv.NotSupported, about("k_scale")),
        ({"q": np.zeros((3, 4, 8), F32)}, numkv.DimensionMismatch, "one query for each"),
        ({"q": np.zeros((2, 3, 8), F32)}, numkv.DimensionMismatch, about("q")),
        ({"seq_lens": [5, 1]}, IndexError, "seq_lens"),
        ({"cu_seqlens_q": [0, 2, 1]}, numkv.DimensionMismatch, "cu_seqlens_q"),
    ],
)  # fmt: skip
def test_errors(change, error, match):
    good = {"q": np.zeros((2, 4, 8), F32), "k": np.zeros((2, 2, 4, 8), F32), "seq_lens": [4, 2]}
    with pytest.raises(error, match=match):
        numkv.attention_weights(**(good | change))
    with pytest.raises(ValueError, match="window_left"):
        numkv.attention_weights(**good, lse=np.zeros((2, 4), F32), window_left=-5)
    layer = numkv.ContiguousLayer(4, 2, 8)
    with pytest.raises(TypeError, match=r"`q`: .*call its own method: ContiguousLayer\.attention"):
        numkv.attention_weights(layer, good["q"], np.zeros((2, 4), F32))
