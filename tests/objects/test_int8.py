"""INT8 storage: codes, scales and their errors, in every object that stores rows."""

import copy

import naive
import numpy as np
import pytest
import tolerances
from kinds import attending
from messages import about
from quantised_stores import Stores
from worked import INT8

import numkv

F32 = np.float32
SOURCES = ["fp32", "fp16", "bf16"]


STORES = Stores("int8")
in_contiguous, in_paged, assert_exact = STORES.in_contiguous, STORES.in_paged, STORES.assert_exact
every_store = pytest.mark.parametrize("store", STORES.all.values(), ids=STORES.all)


# ---------------------------------------------------------------- codes and scales


@every_store
@pytest.mark.parametrize("source", SOURCES)
def test_worked_rows(target, to, host, store, source):
    rows = [row for row in INT8 if row[0] == source]
    k = np.array([row[1] for row in rows])[:, None].astype(naive.DTYPES[source])
    codes, scale, v_codes, v_scale = store(k, -k, to, host, target)
    assert codes[:, 0].tolist() == [row[2] for row in rows]
    assert np.array_equal(v_codes, -codes)
    assert np.allclose(scale[:, 0], [row[3] for row in rows], rtol=1e-7, atol=0)
    assert np.array_equal(v_scale, scale)


SIZES = [1e-30, 1e-20, 1e-7, 6e-8, 1e-3, 1.0, 300.0, 65504.0]


def rows_of_all_sizes(rng, kind, heads, dim):
    """A token for each size, its largest element exactly that, as far as the kind goes."""
    rows = rng.uniform(-1, 1, (len(SIZES), heads, dim))
    rows[..., 0] = np.sign(rows[..., 0])
    return naive.round_to(rows * np.array(SIZES)[:, None, None], kind)


@pytest.mark.boundscheck
@every_store
@pytest.mark.parametrize("source", SOURCES)
def test_rows_of_all_sizes(target, to, host, rng, store, source):
    """Exact codes and scales, and no element further off than half a scale."""
    dim = 67 if target == "cpu" else 9
    k, v = (rows_of_all_sizes(rng, source, 2, dim) for _ in "kv")
    got = store(k, v, to, host, target)
    assert_exact(got, k, v)
    for rows, codes, scale in ((k, *got[:2]), (v, *got[2:])):
        x = rows.astype(np.float64)
        error = np.abs(naive.int8_dequantise(codes, scale) - x)
        half = 0.5 * scale.astype(np.float64)[..., None]
        assert np.all(error <= half * (1 + 1e-6) + 2.0**-23 * np.abs(x))
        assert np.all(scale[[i for i, n in enumerate(SIZES) if n >= 1e-7 or source != "fp16"]] > 0)


@pytest.mark.parametrize("dim", [1, 2, 7, 8, 16, 31, 32, 64, 128, 200])
def test_every_row_length(rng, dim):
    """Vectors and their remainders, on the CPU."""
    k, v = (rng.standard_normal((5, 3, dim), F32) for _ in "kv")
    assert_exact(in_contiguous(k, v, lambda x: x, lambda x: x, "cpu"), k, v)


def test_ties_go_to_the_even_code(target, to, host):
    """Every half-way value between two codes, of either sign."""
    halves = np.arange(-126.5, 127).astype(F32)
    rows = np.concatenate([[127], halves]).astype(F32).reshape(1, 1, -1)
    codes, scale, *_ = in_contiguous(rows, rows, to, host, target)
    assert scale.tolist() == [[1]]
    assert np.all(codes[0, 0, 1:] % 2 == 0)
    assert np.all(np.abs(codes[0, 0, 1:] - halves) == 0.5)


def test_codes_never_leave_their_range(rng):
    """A quotient may round to a hair above 127; -128 is no code."""
    rows = rng.standard_normal((500, 2, 4), F32) * F32(1.37)
    codes, scale, *_ = in_contiguous(rows, rows, lambda x: x, lambda x: x, "cpu")
    assert np.all(np.abs(codes.astype(int)).max(axis=-1) == 127)
    assert np.all(scale > 0)


def test_tiny_rows_far_below_the_promise():
    """Subnormal rows lose digits, not their minds: finite values, errors of the size of the row."""
    rows = np.array([[[1e-45, -1e-45]], [[1e-40, 5e-41]], [[3e-38, 1e-38]]], F32)
    codes, scale, *_ = in_contiguous(rows, rows, lambda x: x, lambda x: x, "cpu")
    assert np.all(np.isfinite(scale))
    assert np.all(np.abs(naive.int8_dequantise(codes, scale) - rows) <= np.abs(rows).max())


# ---------------------------------------------------------------- what may not be stored


@every_store
@pytest.mark.parametrize(("bad", "source"), [(np.nan, "fp32"), (np.inf, "bf16"), (-np.inf, "fp16")])
@pytest.mark.parametrize("which", ["k", "v"])
def test_non_finite_input(target, to, host, store, bad, source, which):
    good = np.ones((3, 2, 4)).astype(naive.DTYPES[source])
    rows = good.copy()
    rows[1, 1, 2] = bad
    rows[2, 0, 0] = bad  # the first one is named
    given = (rows, good) if which == "k" else (good, rows)
    with pytest.raises(numkv.NonFiniteInput, match=about(which)) as caught:
        store(*given, to, host, target)
    if store not in (in_contiguous, in_paged):  # these come in two parts
        assert caught.value.index == (1, 1, 2)
    store(*given, to, host, target, check_finite=False)


def snapshot(*arrays):
    return [np.array(x) for x in arrays]


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("how", ["append", "write"])
def test_a_refused_row_changes_nothing(target, to, host, rng, kind, how):
    layer = numkv.ContiguousLayer(6, 1, 4, kind="int8", target=target)
    if kind == "paged":
        layer = numkv.PagedLayer(3, 2, 1, 4, kind="int8", target=target)
    rows = rng.standard_normal((2, 1, 4), F32)
    layer.append(to(rows), to(rows))

    def state():
        return snapshot(
            *map(host, (layer.k, layer.v, layer.k_scale, layer.v_scale)),
            layer.context_lens, layer.block_indices,
        )  # fmt: skip

    before = state()
    bad = rng.standard_normal((2, 1, 4), F32)
    bad[1, 0, 3] = np.inf
    with pytest.raises(numkv.NonFiniteInput) as caught:
        if how == "append":
            layer.append(to(rows), to(bad))
        else:
            layer.write(to(np.tile(bad[:, 0], 3)), num_q_heads=1, qk_mode=0)
    assert caught.value.index == ((1, 0, 3) if how == "append" else (1, 7))
    assert all(np.array_equal(a, b) for a, b in zip(state(), before, strict=True))
    layer.append(to(rows), to(bad), check_finite=False)
    assert layer.seq_len == 4


def test_float_kinds_take_anything(target, to, host):
    layer = numkv.PagedLayer(2, 2, 1, 2, kind="fp16", v_kind="int8", target=target)
    k, v = np.full((1, 1, 2), np.nan, F32), np.ones((1, 1, 2), F32)
    layer.append(to(k), to(v))
    assert np.all(np.isnan(host(layer.k)[layer.block_indices[0], 0, 0]))
    with pytest.raises(numkv.NonFiniteInput, match=about("v")):
        layer.append(to(v), to(k))


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("kinds", [("int8", "int8"), ("int8", "fp16"), ("fp32", "int8")])
def test_a_fused_write_looks_at_what_is_quantised(target, to, host, kinds, rotate):
    """Not at q, nor at what stays a float; `index` is the place in `qkv`."""
    layer = numkv.ContiguousLayer(
        9, 2, 4, k_kind=kinds[0], v_kind=kinds[1], target=target, rotate=rotate
    )
    of = [None] * 3 + [kinds[0]] * 2 + [kinds[1]] * 2  # by head of 4 columns
    for column in (0, 11, 12, 19, 20, 27):
        kind = of[column // 4]
        qkv, before = np.ones((3, 7 * 4), F32), layer.seq_len
        qkv[1, column] = np.nan
        if kind == "int8":
            with pytest.raises(numkv.NonFiniteInput, match=about("qkv")) as caught:
                layer.write(to(qkv), num_q_heads=3, qk_mode=0)
            assert caught.value.index == (1, column)
            assert "storage in int8" in str(caught.value)
            assert layer.seq_len == before
        else:
            q = host(layer.write(to(qkv), num_q_heads=3, qk_mode=0))
            assert np.array_equal(np.isnan(q.ravel()), np.isnan(qkv[:, :12].ravel()))
            layer.truncate(before)


def test_float64_rows_are_refused(target, to):
    rows = to(np.ones((1, 1, 4)))
    layer = numkv.PagedLayer(2, 2, 1, 4, kind="int8", target=target)
    with pytest.raises(numkv.UnsupportedDType, match=about("k")):
        layer.append(rows, rows)
    assert layer.block_indices == []


# ---------------------------------------------------------------- KVCache


def test_what_a_cache_gives_back(target, to, host, rng):
    cache = numkv.KVCache(2, 2, 4, head_dim_v=6, kind="int8", target=target)
    k, v = rng.standard_normal((3, 2, 4), F32), rng.standard_normal((3, 2, 6), F32)
    cache.append(1, to(k), to(v))
    for rows, read, codes, scales in (
        (k, cache.k, cache.k_codes, cache.k_scales),
        (v, cache.v, cache.v_codes, cache.v_scales),
    ):
        want, scale = naive.int8_quantise(rows)
        assert host(codes(0)).shape == (0, *rows.shape[1:])
        assert np.array_equal(host(codes(1)), want)
        assert np.array_equal(host(scales(1)), scale)
        assert host(read(1)).dtype == F32
        assert np.array_equal(host(read(1)), want.astype(F32) * scale[..., None])
        for bad in (-1, 2):
            for method in (read, codes, scales):
                with pytest.raises(IndexError, match="layer"):
                    method(bad)
    assert cache.nbytes == cache.capacity * 2 * numkv.kind("int8").bytes_per_token(2, 4, 6)


def test_float_caches_have_no_codes(target):
    cache = numkv.KVCache(1, 1, 2, kind="fp16", v_kind="int8", target=target)
    for method in (cache.k_codes, cache.k_scales):
        with pytest.raises(numkv.NotSupported):
            method(0)
    cache.v_codes(0), cache.v_scales(0)


def test_growth_copy_and_truncate(target, to, host, rng):
    """Scales move with their codes."""
    cache = numkv.KVCache(2, 1, 4, kind="int8", target=target)
    k, v = (rng.standard_normal((40, 1, 4), F32) for _ in "kv")
    for begin, end in ((0, 5), (5, 16), (16, 33)):
        for layer in (0, 1):
            cache.append(layer, to(k[begin:end]), to(v[begin:end]))
        cache.advance(end - begin)
    assert cache.capacity >= 33
    twins = [cache.copy(), copy.copy(cache), copy.deepcopy(cache)]
    cache.truncate(3)
    cache.append(0, to(k[33:]), to(v[33:]))
    assert np.array_equal(host(cache.k_codes(0))[3:], naive.int8_quantise(k[33:])[0])
    for twin in twins:
        for layer in (0, 1):
            assert np.array_equal(host(twin.k_codes(layer)), naive.int8_quantise(k[:33])[0])
            assert np.array_equal(host(twin.v_scales(layer)), naive.int8_quantise(v[:33])[1])


# ---------------------------------------------------------------- fused write


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize("kinds", [("int8", "int8"), ("int8", "fp16"), ("fp32", "int8")])
def test_a_fused_write_quantises_what_it_would_have_written(target, to, host, rng, layout, kinds):
    heads, dim = 2, 8
    cos, sin = (to(x) for x in naive.rope_tables(16, dim))
    weights = [to((1 + 0.1 * rng.standard_normal(dim)).astype(F32)) for _ in "qk"]
    qkv = to(rng.standard_normal((5, (4 + 2 * heads) * dim), F32))

    def make(**kw):
        if layout == "paged":
            return numkv.PagedLayer(4, 3, heads, dim, target=target, **kw)
        return numkv.ContiguousLayer(12, heads, dim, target=target, **kw)

    layers = [make(k_kind=kinds[0], v_kind=kinds[1]), make(kind="fp32")]
    q = [
        layer.write(
            qkv, num_q_heads=4, cos=cos, sin=sin, qk_mode=1, q_norm_weight=weights[0],
            k_norm_weight=weights[1],
        )
        for layer in layers
    ]  # fmt: skip
    table = layers[0].block_table[None] if layout == "paged" else [[0]]
    assert np.array_equal(host(q[0]), host(q[1]))
    for which, kind in zip("kv", kinds, strict=True):
        got = naive.gather(host(getattr(layers[0], which)), table, [5])
        plain = naive.gather(host(getattr(layers[1], which)), table, [5])
        if kind != "int8":
            assert np.array_equal(got, naive.round_to(plain, kind))
            continue
        codes, scale = naive.int8_quantise(plain)
        found = naive.gather(host(getattr(layers[0], f"{which}_scale")), table, [5])
        assert np.array_equal(got, codes)
        assert np.array_equal(found, scale)


# ---------------------------------------------------------------- attention


def stored_values(layer, host):
    """What a layer holds, as float64 ``(1, num_kv_heads, tokens, head_dim)``."""
    table, n = (layer.block_table[None] if layer.is_paged else [[0]]), [layer.seq_len]
    out = []
    for which, kind in (("k", layer.kind), ("v", layer.v_kind)):
        x = naive.gather(host(getattr(layer, which)), table, n)
        if kind.has_scales:
            x = naive.int8_dequantise(
                x, naive.gather(host(getattr(layer, f"{which}_scale")), table, n)
            )
        out.append(x)
    return out


APART = [("int8", "int8"), ("int8", "fp16"), ("int8", "bf16"), ("fp32", "int8")]


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize(("k_kind", "v_kind"), attending(APART, "kv"))
def test_k_and_v_kinds_apart(target, to, host, rng, layout, k_kind, v_kind):
    kinds = k_kind, v_kind
    args = {"k_kind": k_kind, "v_kind": v_kind, "target": target}
    layer = numkv.ContiguousLayer(20, 2, 8, **args)
    if layout == "paged":
        layer = numkv.PagedLayer(7, 3, 2, 8, **args)
    assert (layer.kind.name, layer.v_kind.name) == kinds
    assert "/".join(dict.fromkeys(kinds)) in repr(layer)
    rows = [rng.standard_normal((17, 2, 8), F32) for _ in "kv"]
    layer.append(*map(to, rows))
    q = rng.standard_normal((3, 4, 8), F32)
    options = {"window_left": 9, "logits_soft_cap": 3.0}
    out, lse = layer.decode_attention(to(q), return_lse=True, **options)
    want, want_lse = naive.attention(q, *stored_values(layer, host), [17], [0, 3], **options)
    tolerances.assert_rows_close(host(out), want, tolerances.attention("int8", "fp32"))
    tolerances.assert_lse_close(host(lse), want_lse, tolerances.INTEGERS)


@pytest.mark.parametrize("q_kind", list(naive.DTYPES))
def test_a_cache_attends(target, to, host, rng, q_kind):
    cache = numkv.KVCache(1, 2, 8, head_dim_v=5, kind="int8", target=target)
    k, v = rng.standard_normal((9, 2, 8), F32), rng.standard_normal((9, 2, 5), F32)
    cache.append(0, to(k), to(v))
    q = naive.round_to(rng.standard_normal((2, 4, 8)), q_kind)
    values = [naive.int8_dequantise(*naive.int8_quantise(x)).swapaxes(0, 1)[None] for x in (k, v)]
    want, _ = naive.attention(q, *values, [9], [0, 2])
    out = host(cache.decode_attention(0, to(q)))
    tolerances.assert_rows_close(out, want, tolerances.attention("int8", q_kind))


@pytest.mark.parametrize(("size", "bound"), [(1e-30, 5e-4), (65504.0, 5e-4)])
def test_attention_over_rows_of_extreme_size(target, to, host, rng, size, bound):
    layer = numkv.ContiguousLayer(9, 1, 8, kind="int8", target=target)
    k, v = (rng.uniform(-size, size, (9, 1, 8)).astype(F32) for _ in "kv")
    layer.append(to(k), to(v))
    q = rng.standard_normal((1, 1, 8), F32)
    options = {"sm_scale": 1 / size}
    want, _ = naive.attention(q, *stored_values(layer, host), [9], **options)
    tolerances.assert_rows_close(host(layer.decode_attention(to(q), **options)), want, bound)


def relative_error(rng, kind, tokens, queries=48, heads=4, dim=128):
    """L2 error of all outputs over exact rows, relative."""
    k, v = (rng.standard_normal((tokens, heads, dim), F32) for _ in "kv")
    q = rng.standard_normal((queries, 4 * heads, dim), F32)
    layer = numkv.PagedLayer(-(-tokens // 16), 16, heads, dim, kind=kind)
    layer.append(k, v)
    exact = (x.swapaxes(0, 1)[None] for x in (k, v))
    want, _ = naive.attention(q, *exact, [tokens], [0, queries])
    return np.linalg.norm(layer.decode_attention(q) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("tokens", [200, 1000])
def test_accuracy_on_gaussian_data(rng, tokens):
    """0.92% is what the format gives."""
    assert 0.008 < relative_error(rng, "int8", tokens) <= 0.0095
    assert relative_error(rng, "fp16", tokens) < 0.0005
