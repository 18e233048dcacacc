"""`ContiguousLayer`: one sequence of one layer; fused write, append, attention."""

import enum
import inspect

import naive
import numpy as np
import pytest
import tolerances
from messages import about
from walked import each
from worked import OUT, K, Q, V

import numkv

KINDS = list(naive.DTYPES)
MODES = [0, 1, 2, 3, 4]


def stored(layer, host):
    """K and V of the cached tokens, ``(num_kv_heads, tokens, head_dim)``, and the length."""
    n = layer.seq_len
    return host(layer.k)[0, :, :n].copy(), host(layer.v)[0, :, :n].copy(), n


def whole(layer, host):
    """All bits of both buffers, used or not, and every length."""
    lens = layer.context_lens.tolist()
    return naive.words(host(layer.k)).copy(), naive.words(host(layer.v)).copy(), layer.seq_len, lens


def assert_unchanged(layer, host, before):
    for a, b in zip(whole(layer, host), before, strict=True):
        assert np.array_equal(a, b)


# ---------------------------------------------------------------- properties


@pytest.mark.parametrize("kind", KINDS)
def test_fresh(target, host, kind):
    layer = numkv.ContiguousLayer(16, 2, 8, kind=kind, target=target)
    assert (layer.seq_len, layer.capacity, layer.num_kv_heads, layer.head_dim) == (0, 16, 2, 8)
    assert layer.is_paged is False
    assert (layer.block_size, layer.block_table, layer.block_indices) == (0, None, [])
    assert layer.context_lens.tolist() == [0]
    assert host(layer.k).shape == (1, 2, 16, 8)
    assert host(layer.k).dtype == naive.DTYPES[kind]


def test_kind_defaults_to_fp16():
    assert inspect.signature(numkv.ContiguousLayer).parameters["kind"].default == "fp16"


def test_modes_have_names():
    assert issubclass(numkv.QKMode, enum.IntEnum)
    assert [int(mode) for mode in numkv.QKMode] == MODES


@pytest.mark.parametrize("bad", [-1, 9, 2**40])
def test_seq_len_has_bounds(target, to, host, bad):
    layer = numkv.ContiguousLayer(8, 1, 4, target=target)
    layer.seq_len = 8
    assert layer.context_lens.tolist() == [8]
    with pytest.raises(IndexError, match="seq_len"):
        layer.seq_len = bad
    assert layer.seq_len == 8
    layer.seq_len = 0
    assert layer.seq_len == 0


# ---------------------------------------------------------------- bad writes


def filled(rng, to, target, kind="fp32"):
    layer = numkv.ContiguousLayer(4, 1, 4, kind=kind, target=target)
    rows = to(rng.standard_normal((2, 1, 4), np.float32))
    layer.append(rows, rows)
    return layer


F32 = np.float32
BAD_WRITES = [  # what to change, error, start of the message
    ({"qkv": np.ones((3, 12), F32)}, numkv.CacheFull, "room|capacity|full"),
    ({"qkv": np.ones((2, 13), F32)}, numkv.DimensionMismatch, about("qkv")),
    ({"qkv": np.ones((2, 12), np.int32)}, numkv.UnsupportedDType, about("qkv")),
    ({"qkv": np.ones(12, F32)}, numkv.DimensionMismatch, about("qkv")),
    ({"num_q_heads": 2}, numkv.DimensionMismatch, about("qkv")),
    ({"cos": np.ones((9, 3), F32)}, numkv.DimensionMismatch, about("cos|sin")),
    ({"sin": np.ones((8, 2), F32)}, numkv.DimensionMismatch, about("cos|sin")),
    (
        {"cos": np.ones((9, 3), F32), "sin": np.ones((9, 3), F32)},
        numkv.DimensionMismatch,
        about("cos"),
    ),
    ({"cos": None}, numkv.NumkvError, "cos"),
    ({"q_norm_weight": None}, numkv.DimensionMismatch, "q_norm_weight"),
    ({"k_norm_weight": None}, numkv.DimensionMismatch, "k_norm_weight"),
    ({"q_norm_weight": np.ones(3, F32)}, numkv.DimensionMismatch, about("q_norm_weight")),
    ({"k_norm_weight": np.ones((4, 1), F32)}, numkv.DimensionMismatch, about("k_norm_weight")),
    ({"q_norm_weight": np.ones(4, np.complex64)}, numkv.UnsupportedDType, about("q_norm_weight")),
    ({"pos_offset": 8}, IndexError, "pos_offset|position|cos"),
    ({"pos_offset": -1}, IndexError, "pos_offset|position|cos"),
    ({"qk_mode": 5}, ValueError, "qk_mode|QKMode"),
    ({"qk_mode": -1}, ValueError, "qk_mode|QKMode"),
    ({"q_out": np.ones((2, 1, 5), F32)}, numkv.DimensionMismatch, about("q_out")),
    ({"q_out": np.ones((2, 1, 4), np.float16)}, numkv.UnsupportedDType, about("q_out")),
]


@each("change, error, message", BAD_WRITES)
def test_bad_writes_change_nothing(target, to, host, rng, change, error, message):
    layer = filled(rng, to, target)
    before = whole(layer, host)
    arguments = {
        "qkv": np.ones((2, 12), F32),
        "num_q_heads": 1,
        "cos": np.ones((9, 2), F32),
        "sin": np.ones((9, 2), F32),
        "qk_mode": 1,
        "q_norm_weight": np.ones(4, F32),
        "k_norm_weight": np.ones(4, F32),
    } | change
    moved = {n: to(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    with pytest.raises(error, match=message):
        layer.write(moved.pop("qkv"), **moved)
    assert_unchanged(layer, host, before)


def test_positions_past_the_table(target, to, host, rng):
    layer = filled(rng, to, target)  # two tokens, so the next two need rows 2 and 3
    before = whole(layer, host)
    tables = {"cos": to(np.ones((3, 2), F32)), "sin": to(np.ones((3, 2), F32))}
    with pytest.raises(IndexError):
        layer.write(to(np.ones((2, 12), F32)), num_q_heads=1, qk_mode=2, **tables)
    assert_unchanged(layer, host, before)
    layer.write(to(np.ones((1, 12), F32)), num_q_heads=1, qk_mode=2, **tables)
    assert layer.seq_len == 3


# ---------------------------------------------------------------- append, truncate


@pytest.mark.parametrize("kind", KINDS)
def test_append_and_truncate(target, to, host, rng, kind):
    layer = numkv.ContiguousLayer(6, 2, 4, kind=kind, target=target)
    k = rng.standard_normal((5, 2, 4), np.float32)
    v = naive.round_to(rng.standard_normal((5, 2, 4)), kind)
    layer.append(to(k[:3]), to(v[:3]))
    layer.append(to(k[3:]), to(v[3:]))
    got_k, got_v, n = stored(layer, host)
    assert n == 5
    assert np.array_equal(got_k.swapaxes(0, 1), naive.round_to(k, kind))
    assert np.array_equal(got_v.swapaxes(0, 1), v)
    layer.truncate(2)
    assert layer.seq_len == 2
    layer.append(to(k[4:]), to(v[4:]))
    assert np.array_equal(stored(layer, host)[1].swapaxes(0, 1), v[[0, 1, 4]])
    before = whole(layer, host)
    for bad in (-1, 4):
        with pytest.raises((IndexError, ValueError, numkv.NumkvError)):
            layer.truncate(bad)
    with pytest.raises(numkv.CacheFull):
        layer.append(to(k[:4]), to(v[:4]))
    assert_unchanged(layer, host, before)


# ---------------------------------------------------------------- attention


def worked_layer(to, target, kind, tokens):
    layer = numkv.ContiguousLayer(8, 2, 2, kind=kind, target=target)
    k, v = np.array(K, np.float32).swapaxes(0, 1), np.array(V, np.float32).swapaxes(0, 1)
    layer.append(to(k[:tokens].copy()), to(v[:tokens].copy()))
    return layer


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_worked_attention(target, to, host, kind, tokens):
    layer = worked_layer(to, target, kind, tokens)
    out = layer.decode_attention(to(np.array([Q], np.float32)))
    assert np.allclose(host(out)[0], OUT[tokens], rtol=0, atol=2e-6)


def test_worked_prefill(target, to, host):
    layer = worked_layer(to, target, "fp32", 3)
    out = layer.decode_attention(to(np.array([Q, Q], np.float32)))
    assert np.allclose(host(out), [OUT[2], OUT[3]], rtol=0, atol=2e-6)


def test_an_empty_layer(target, to, host):
    layer = numkv.ContiguousLayer(8, 2, 2, target=target)
    out, lse = layer.decode_attention(to(np.ones((1, 4, 2), np.float32)), return_lse=True)
    assert np.all(host(out) == 0)
    assert np.all(host(lse) == -np.inf)


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_more_queries_than_tokens(target, to, tokens):
    layer = worked_layer(to, target, "fp32", tokens)
    with pytest.raises(numkv.DimensionMismatch, match="q"):
        layer.decode_attention(to(np.ones((max(2, tokens + 1), 4, 2), np.float32)))


def test_options_reach_the_kernel(target, to, host, rng):
    layer = numkv.ContiguousLayer(16, 2, 8, kind="bf16", target=target)
    rows = [rng.standard_normal((9, 2, 8), np.float32) for _ in "kv"]
    layer.append(*map(to, rows))
    k, v, n = stored(layer, host)
    q = rng.standard_normal((3, 4, 8), np.float32)
    sinks = rng.standard_normal(4).astype(np.float32)
    options = {"sm_scale": 0.4, "logits_soft_cap": 3.0, "window_left": 4}
    place = to(np.zeros((3, 4, 8), np.float32))
    out, lse = layer.decode_attention(to(q), sinks=to(sinks), return_lse=True, out=place, **options)
    want, want_lse = naive.attention(q, k[None], v[None], [n], [0, 3], sinks=sinks, **options)
    assert out is place
    tolerances.assert_rows_close(host(out), want, 1e-5)
    tolerances.assert_lse_close(host(lse), want_lse)
