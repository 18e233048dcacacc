"""Caches with ``rotate=True``: the same answers as without, over rows that are stored in another basis."""

import naive
import naive_cells
import numpy as np
import pytest
import tolerances
from messages import about
from rotated_caches import (
    DIM,
    F32,
    HEADS,
    TOKENS,
    back,
    cache,
    cells,
    contiguous,
    half_a_step,
    paged,
    paged_cache,
    rows,
    shared_pool,
    turned,
)

import numkv
from numkv import targets
from numkv.storage.hadamard import Rotation

# ---------------------------------------------------------------- one sequence in every object


OBJECTS = {f.__name__: f for f in (contiguous, paged, shared_pool, cache, paged_cache, cells)}
every_object = pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)


@pytest.mark.parametrize(
    ("make", "kind", "q_kind"),
    [
        *((make, "fp32", q_kind) for make in OBJECTS.values() for q_kind in ("fp32", "fp16")),
        (contiguous, "fp64", "fp64"),
        (cells, "fp64", "fp64"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_attention_does_not_notice(target, to, host, rng, make, kind, q_kind):
    """Options, lse and `out` as without a rotation; of fp16 queries the output is rounded once."""
    made, append, attend = make(target, kind=kind, rotate=True)
    assert "rotate=True" in repr(made)
    k, v = (naive.round_to(x, kind) for x in rows(rng))
    append(to(k), to(v))
    q = naive.round_to(rng.standard_normal((TOKENS, 2 * HEADS, DIM)), q_kind)
    options = {"logits_soft_cap": 3.0, "sinks": np.array([0.5, -1, 2, 0], F32)}
    out = to(np.zeros((TOKENS, 2 * HEADS, DIM), q.dtype))
    got, lse = attend(
        to(q), return_lse=True, out=out, **(options | {"sinks": to(options["sinks"])})
    )
    assert host(got).dtype == q.dtype
    assert np.array_equal(host(out), host(got))
    want, want_lse = naive.attention(
        q, *(x.swapaxes(0, 1)[None] for x in (k, v)), [TOKENS], [0, TOKENS], **options
    )
    tolerances.assert_rows_close(host(got), want, tolerances.attention(kind, q_kind))
    tolerances.assert_lse_close(host(lse), want_lse)


@every_object
@pytest.mark.parametrize("kind", ["fp16", "int8", "int4"])
def test_what_is_stored(target, to, host, rng, make, kind):
    """Attention over rotated rows in the kind, turned back: nothing else is lost."""
    _, append, attend = make(target, kind=kind, rotate=True)
    k, v = rows(rng)
    append(to(k), to(v))
    q = rng.standard_normal((2 if make is not cells else TOKENS, 2 * HEADS, DIM)).astype(F32)
    if make is paged_cache:
        q = np.repeat(q, 4, axis=0)[:TOKENS]
    stored = []
    for x in (k, v):
        x = Rotation(DIM).forward(targets.get("cpu"), x)
        if kind == "fp16":
            stored.append(naive.round_to(x, kind).astype(np.float64))
        else:
            stored.append(naive.dequantise(*naive.quantise(x, kind)))
    want, _ = naive.attention(
        turned(q), *(x.swapaxes(0, 1)[None] for x in stored), [TOKENS], [0, len(q)]
    )
    bound = max(1e-5, tolerances.attention(kind, "fp32"))
    tolerances.assert_rows_close(host(attend(to(q))), back(want), bound)


def test_other_dims(target, to, host, rng):
    """K and V of different widths, blocks of a width that is no power of two, an odd width."""
    for dim, dim_v in ((12, 6), (6, 5)):
        made = numkv.KVCache(1, 2, dim, head_dim_v=dim_v, rotate=True, target=target)
        k, v = rows(rng, dim=dim, dim_v=dim_v)
        made.append(0, to(k), to(v))
        tolerances.assert_rows_close(host(made.k(0)), k, 1e-6)
        tolerances.assert_rows_close(host(made.v(0)), v, 1e-6)
        q = rng.standard_normal((1, 4, dim)).astype(F32)
        want, _ = naive.attention(q, *(x.swapaxes(0, 1)[None] for x in (k, v)), [TOKENS])
        tolerances.assert_rows_close(host(made.decode_attention(0, to(q))), want, 1e-5)


def test_rows_that_see_nothing(target, to, host):
    layer, _, attend = contiguous(target, kind="fp32", rotate=True)
    layer.k[...] = np.nan
    layer.v[...] = np.nan
    out, lse = attend(to(np.ones((1, 2, DIM), np.float16)), return_lse=True)
    assert not host(out).any()
    assert np.all(host(lse) == -np.inf)


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_attention_weights(target, to, host, rng, kind):
    k, v = rows(rng)
    q = rng.standard_normal((3, 2 * HEADS, DIM)).astype(F32)
    got = []
    for rotate in (False, True):
        layer, append, _ = paged(target, kind="fp32", rotate=rotate)
        append(to(k), to(v))
        got.append(host(layer.attention_weights(to(q))))
    np.testing.assert_allclose(got[1], got[0], rtol=2e-5, atol=1e-7)
    made, append, attend = cache(target, kind=kind, rotate=True)
    append(to(k), to(v))
    _, lse = attend(to(q), return_lse=True)
    weights = host(made.attention_weights(1, to(q), lse=lse))
    assert np.array_equal(weights, host(made.attention_weights(1, to(q))))
    np.testing.assert_allclose(weights, got[0], rtol=0.1 if kind == "int8" else 2e-5)


# ---------------------------------------------------------------- what goes in and what comes out


@pytest.mark.parametrize("kind", ["fp16", "int8", "int4"])
def test_a_layers_buffers_hold_rotated_rows(target, to, host, rng, kind):
    """Bit for bit what a layer without rotation stores of rows that a user has rotated."""
    k, v = rows(rng)
    where, rotation = targets.get(target), Rotation(DIM)
    layers = []
    for rotate, (a, b) in (
        (True, (to(k), to(v))),
        (False, (rotation.forward(where, to(k)), rotation.forward(where, to(v)))),
    ):
        layer, append, _ = paged(target, kind=kind, rotate=rotate)
        append(a, b)
        layers.append(layer)
    for name in ("k", "v", "k_scale", "v_scale"):
        got, want = (host(getattr(layer, name)) for layer in layers)
        assert np.array_equal(naive.words(got), naive.words(want))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["int8", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("fp16", "int4"))]
)
def test_own_code_sees_rotated_rows(rng, kind):
    """Each layer of one kind is compiled anew."""
    k, v = rows(rng)
    layer, append, _ = paged("cpu", kind=kind, rotate=True)
    append(k, v)
    out = np.empty(DIM, F32)
    layer.jit.load_k(5, 1, out)
    assert np.all(np.abs(out - turned(k[5, 1])) <= half_a_step(turned(k[5, 1]), kind))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("fp64", "fp64"), ("fp16", "fp32"), ("int8", "fp32"), ("int4", "fp32")]
)
def test_rows_come_back(target, to, host, rng, kind, dtype):
    """Copies in float32, of fp64 in float64, within half a step of the stored rows."""
    k, v = rows(rng)
    made, append, _ = cache(target, kind=kind, rotate=True)
    append(to(k), to(v))
    causal, put, _ = cells(target, kind=kind, rotate=True)
    put(to(k), to(v))
    for got, x in zip((made.k(1), made.v(1), *causal.get(3)[:2]), (k, v, k, v), strict=True):
        got = host(got)
        assert got.dtype == naive.DTYPES[dtype]
        off = np.linalg.norm(np.broadcast_to(half_a_step(turned(x), kind), x.shape), axis=-1)
        assert np.all(np.linalg.norm(got - x.astype(np.float64), axis=-1) <= off)
    assert host(made.k(0)).shape == (0, HEADS, DIM)
    if kind.startswith("int"):
        codes, scale = host(made.k_codes(1)), host(made.k_scales(1))
        values = naive.dequantise(codes, scale)
        np.testing.assert_allclose(back(values), host(made.k(1)), rtol=0, atol=1e-5)


def test_permuted_values(target, to, host, rng):
    made = numkv.CausalCache()
    made.set_config(numkv.CacheConfig(permuted_v=True))
    made.init("fp32", 1, 8, 8, target, rotate=True)
    k, v = rows(rng)
    made.start_forward(numkv.Batch(np.arange(TOKENS), np.zeros(TOKENS, int)))
    made.put(0, to(k), to(v))
    np.testing.assert_allclose(host(made.get(0)[1]), v.transpose(1, 2, 0), rtol=0, atol=1e-5)


MODES = [0, 1, 3]


@pytest.mark.parametrize("kind", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("mode", MODES)
def test_a_fused_write_is_an_append(target, to, host, rng, kind, mode):
    """Q is what it is without a rotation, and rows are rotated before their one rounding."""
    cos, sin = (to(x) for x in naive.rope_tables(16, DIM))
    weights = [to((1 + 0.1 * rng.standard_normal(DIM)).astype(F32)) for _ in "qk"]
    qkv = to(rng.standard_normal((5, (4 + 2 * HEADS) * DIM)).astype(F32))
    options = {
        "num_q_heads": 4, "cos": cos, "sin": sin, "qk_mode": mode, "q_norm_weight": weights[0],
        "k_norm_weight": weights[1],
    }  # fmt: skip
    plain, _, _ = contiguous(target, kind="fp32")
    q = host(plain.write(qkv, pos_offset=3, **options))
    k, v = (to(np.ascontiguousarray(host(x)[0, :, :5].swapaxes(0, 1))) for x in (plain.k, plain.v))
    written, appended = (paged(target, kind=kind, rotate=True)[0] for _ in range(2))
    room = to(np.zeros((5, 4, DIM), F32))
    assert np.array_equal(host(written.write(qkv, pos_offset=3, q_out=room, **options)), q)
    assert np.array_equal(host(room), q)
    appended.append(k, v)
    for name in ("k", "v", "k_scale", "v_scale"):
        got, want = (naive.words(host(getattr(x, name))) for x in (written, appended))
        assert np.array_equal(got, want)
    assert written.seq_len == 5
    assert written.write(to(np.zeros((0, 64), F32)), **options).shape == (0, 4, DIM)


def test_a_fused_write_of_a_step(target, to, host, rng):
    """Two sequences at positions of their own, the second one going on."""
    cos, sin = naive.rope_tables(16, DIM)
    made, plain = (
        numkv.PagedKVCache(
            1, HEADS, DIM, num_blocks=8, block_size=3, kind="fp32", target=target, rotate=r
        )
        for r in (True, False)
    )
    qkv = rng.standard_normal((6, 64)).astype(F32)
    results = []
    for one in (made, plain):
        seqs = [one.add(), one.add()]
        for lens, part in (([0, 2], slice(0, 2)), ([1, 3], slice(2, 6))):
            step = one.reserve(seqs, lens)
            q = step.write(0, to(qkv[part]), num_q_heads=4, cos=to(cos), sin=to(sin), qk_mode=2)
            out = host(step.attention(0, q))
            one.commit(step)
        results.append((host(q), out))
    assert np.array_equal(results[0][0], results[1][0])
    tolerances.assert_rows_close(results[0][1], results[1][1].astype(np.float64), 1e-5)


@every_object
@pytest.mark.parametrize("which", ["k", "v"])
def test_non_finite_rows(target, to, host, rng, make, which):
    """Found before anything changes, on CUDA later, by row; let through, they harm no row but their own."""
    made, append, attend = make(target, kind="int8", rotate=True)
    late = target == "cuda"
    good = rows(rng)
    bad = [x.copy() for x in good]
    bad["kv".index(which)][4, 1, 2] = np.nan
    with pytest.raises(numkv.NonFiniteInput, match=about(which)) as caught:
        step = append(*map(to, bad))
        made.check() if step is None else step.append(1, *map(to, good))
    assert caught.value.index == ((4, 1) if late else (4, 1, 2))
    if late:
        made, append, attend = make(target, kind="int8", rotate=True)
    elif isinstance(made, (numkv.ContiguousLayer, numkv.PagedLayer)):
        assert made.seq_len == 0
        assert not host(made.k).any()
        qkv = np.ones((1, 8 * DIM), F32)
        qkv[0, (4 + "kv".index(which) * HEADS) * DIM + 3] = np.inf
        with pytest.raises(numkv.NonFiniteInput, match=about("qkv")):
            made.write(to(qkv), num_q_heads=4, qk_mode=0)
        assert made.seq_len == 0
        assert not host(made.k).any()
    append(*map(to, bad), check_finite=False)
    if make is cache:
        for got, x in ((made.k(1), good[0]), (made.v(1), good[1])):
            error = np.abs(host(got) - x).max(axis=-1)
            error[4, 1] = 0
            assert np.all(error < 0.1)


# ---------------------------------------------------------------- errors of quantised rows


def outliers(rng, tokens, heads, dim):
    """Gaussian rows of which one channel is 20 times the others."""
    k, v = rows(rng, tokens, dim, heads=heads)
    k[..., 5] *= 20
    v[..., 5] *= 20
    return k, v


@pytest.mark.parametrize(("kind", "most", "times"), [("int8", 0.016, 5), ("int4", 0.2, 2.3)])
def test_one_outlier_channel(rng, kind, most, times):
    """The error of the output, relative to its size; without rotation many times that."""
    tokens, heads, dim, queries = 600, 2, 128, 24
    k, v = outliers(rng, tokens, heads, dim)
    q = rng.standard_normal((queries, 4 * heads, dim)).astype(F32)
    want, _ = naive.attention(q, *(x.swapaxes(0, 1)[None] for x in (k, v)), [tokens], [0, queries])
    errors = []
    for rotate in (False, True):
        layer = numkv.ContiguousLayer(tokens, heads, dim, kind=kind, rotate=rotate)
        layer.append(k, v)
        errors.append(np.linalg.norm(layer.decode_attention(q) - want) / np.linalg.norm(want))
    assert errors[1] < most
    assert errors[0] > times * errors[1]


def test_gaussian_rows_lose_nothing_by_it(rng):
    tokens, heads, dim, queries = 600, 2, 128, 24
    k, v = rows(rng, tokens, dim, heads=heads)
    q = rng.standard_normal((queries, 4 * heads, dim)).astype(F32)
    want, _ = naive.attention(q, *(x.swapaxes(0, 1)[None] for x in (k, v)), [tokens], [0, queries])
    layer = numkv.ContiguousLayer(tokens, heads, dim, kind="int4", rotate=True)
    layer.append(k, v)
    assert np.linalg.norm(layer.decode_attention(q) - want) / np.linalg.norm(want) < 0.115


def test_outliers_on_every_target(target, to, host, rng):
    """Rows read back: a channel 50 times the others costs the rest of its row less."""
    k, v = rows(rng, 4, 32)
    k[..., 3] *= 50
    errors = []
    for rotate in (False, True):
        made = numkv.KVCache(1, HEADS, 32, kind="int4", target=target, rotate=rotate)
        made.append(0, to(k), to(v))
        errors.append(np.linalg.norm(np.delete(host(made.k(0)) - k, 3, axis=-1)))
    assert errors[1] < 0.7 * errors[0]


# ---------------------------------------------------------------- other objects


def test_encoder_rows_and_wrappers(target, to, host, rng):
    """`init` of a wrapper has all children rotate."""
    causal, encoder = numkv.CausalCache(window_left=2), numkv.EncoderCache()
    made = numkv.WrapperCache(causal, encoder, layer_types=[0, 1])
    made.init("fp32", 1, 16, 8, target, rotate=True)
    assert repr(made).count("rotate=True") == 2
    k, v = rows(rng)
    made.start_forward(numkv.Batch([0, 1, 2, 3], [0] * 4, multimodal=[1]))
    made.put(0, to(k[:4]), to(v[:4]))
    made.put(1, to(k), to(v))
    for got, x in zip(made.get(1)[:2], (k, v), strict=True):
        tolerances.assert_rows_close(host(got), x.astype(np.float64), 1e-6)
    stored = host(encoder._layers[1].k)[0].swapaxes(0, 1)
    tolerances.assert_rows_close(stored, turned(k), 1e-6)
    q = rng.standard_normal((4, 4, DIM)).astype(F32)
    want, _ = naive_cells.attention(q, k, v, np.zeros((4, TOKENS)))
    tolerances.assert_rows_close(host(made.decode_attention(1, to(q))), want, 1e-5)
    positions = np.arange(4)
    hidden = (positions > positions[:, None]) | (positions < positions[:, None] - 2)
    want, _ = naive_cells.attention(q, k[:4], v[:4], np.where(hidden, -np.inf, 0))
    tolerances.assert_rows_close(host(made.decode_attention(0, to(q))), want, 1e-5)


def test_a_layer_rotates_as_its_pool_does(target):
    for rotate in (False, True):
        pool = numkv.PagedPool(4, 3, HEADS, DIM, target=target, rotate=rotate)
        assert pool.spec.rotate is rotate
        assert ("rotate=True" in repr(pool)) is rotate
        for given in (None, rotate):
            assert numkv.PagedLayer(2, 3, HEADS, DIM, pool=pool, rotate=given).spec.rotate is rotate
        with pytest.raises(
            numkv.DimensionMismatch, match=f"`rotate`: expected the pool's, {rotate}"
        ):
            numkv.PagedLayer(2, 3, HEADS, DIM, pool=pool, rotate=not rotate)


@every_object
def test_not_unless_it_is_asked_for(target, make):
    made, *_ = make(target)
    assert "rotate" not in repr(made)
