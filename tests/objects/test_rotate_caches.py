"""Caches with ``rotate=True``: the same answers as without, over rows that are stored in another basis."""

import copy
import importlib

import naive
import naive_cells
import numpy as np
import pytest
import tolerances
from messages import about
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import numkv
from numkv import targets
from numkv.caches.paged.files import load_sequences, save_sequences
from numkv.storage.hadamard import Rotation

F32 = np.float32
HEADS, DIM, TOKENS = 2, 8, 7


def basis(dim):
    """What a row is multiplied by before it is stored, as a column, in float64."""
    return naive.rotation(Rotation(dim).signs)


def turned(x):
    """Rows as they are stored but for their kind, in float64."""
    return np.asarray(x).astype(np.float64) @ basis(x.shape[-1]).T


def back(x):
    """The inverse of `turned`."""
    return np.asarray(x).astype(np.float64) @ basis(x.shape[-1])


def rows(rng, tokens=TOKENS, dim=DIM, dim_v=None, heads=HEADS):
    k, v = (rng.standard_normal((tokens, heads, d)).astype(F32) for d in (dim, dim_v or dim))
    return k, v


def half_a_step(stored, kind):
    """How far an element of the stored rows may be off, by row: ``(..., 1)``."""
    largest = np.abs(stored).max(axis=-1, keepdims=True)
    # A search may leave out what is far from the rest.
    step = {"int8": largest / 127, "int4": 2 * largest / 15 * 1.5, "fp16": largest * 2.0**-10,
            "fp32": largest * 1e-6, "fp64": largest * 1e-14}[kind]  # fmt: skip
    return 0.51 * step


# ---------------------------------------------------------------- one sequence in every object


def contiguous(target, **kw):
    layer = numkv.ContiguousLayer(12, HEADS, DIM, target=target, **kw)
    return layer, layer.append, layer.decode_attention


def paged(target, **kw):
    layer = numkv.PagedLayer(6, 3, HEADS, DIM, target=target, **kw)
    return layer, layer.append, layer.decode_attention


def shared_pool(target, **kw):
    pool = numkv.PagedPool(8, 3, HEADS, DIM, target=target, **kw)
    numkv.PagedLayer(2, 3, HEADS, DIM, pool=pool).seq_len = 4  # in the way
    layer = numkv.PagedLayer(5, 3, HEADS, DIM, pool=pool)
    return layer, layer.append, layer.decode_attention


def cache(target, **kw):
    made = numkv.KVCache(2, HEADS, DIM, target=target, **kw)
    return (
        made,
        lambda k, v, **kw: made.append(1, k, v, **kw),
        lambda q, **kw: made.decode_attention(1, q, **kw),
    )


def paged_cache(target, **kw):
    made = numkv.PagedKVCache(2, HEADS, DIM, num_blocks=8, block_size=3, target=target, **kw)
    seq, steps = made.add(), []

    def append(k, v, **kw):
        steps.append(made.reserve([seq], [k.shape[0]]))
        try:
            steps[-1].append(1, k, v, **kw)
        except numkv.NumkvError:
            made.rollback(steps.pop())
            raise

    return made, append, lambda q, **kw: steps[-1].attention(1, q, **kw)


def cells(target, **kw):
    made = numkv.CausalCache()
    made.init(kw.pop("kind", "fp32"), 2, 12, TOKENS, target, **kw)

    def append(k, v, **kw):
        made.start_forward(numkv.Batch(np.arange(k.shape[0]), np.zeros(k.shape[0], int)))
        made.put(3, k, v, **kw)

    return made, append, lambda q, **kw: made.decode_attention(3, q, **kw)


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
    assert made.rotate
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


def test_a_layers_buffers_hold_rotated_rows(target, to, host, rng):
    """Bit for bit what a layer without rotation stores of rows that a user has rotated; own code sees these."""
    k, v = rows(rng)
    where, rotation = targets.get(target), Rotation(DIM)
    for kind in ("fp16", "int8", "int4"):
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
        if target == "cpu":
            out = np.empty(DIM, F32)
            layers[0].jit.load_k(5, 1, out)
            step = half_a_step(turned(k[5, 1]), kind)
            assert np.all(np.abs(out - turned(k[5, 1])) <= step)


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
    """Found before anything changes; let through, they harm no row but their own."""
    made, append, attend = make(target, kind="int8", rotate=True)
    good = rows(rng)
    bad = [x.copy() for x in good]
    bad["kv".index(which)][4, 1, 2] = np.nan
    with pytest.raises(numkv.NonFiniteInput, match=about(which)) as caught:
        append(*map(to, bad))
    assert caught.value.index == (4, 1, 2)
    if isinstance(made, (numkv.ContiguousLayer, numkv.PagedLayer)):
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


# ---------------------------------------------------------------- keys that move


def tables(dtype=F32):
    return naive.rope_tables(16, DIM, base=100.0, dtype=dtype)


def roped(raw, positions):
    cos, sin = tables(np.float64)
    return np.stack(
        [naive.rope(x, cos[p], sin[p], False) for x, p in zip(raw, positions, strict=True)]
    )


def by_hand(target):
    """A shift function of a user's own that does what `rope_shift` does, on the host."""
    where, (cos, sin) = targets.get(target), tables(np.float64)

    def shift(layer, keys, offsets):
        keys, offsets = where.to_host(keys), where.to_host(offsets)
        moved = [
            naive_cells.rotate(k, int(o), cos, sin, False)
            for k, o in zip(keys, offsets, strict=True)
        ]
        return where.asarray(np.stack(moved).astype(F32))

    return shift


@pytest.mark.parametrize("own", [False, True], ids=["rope_shift", "own-function"])
@pytest.mark.parametrize("kind", ["fp32", "int8", "int4"])
def test_keys_move_in_their_own_basis(target, to, host, rng, kind, own):
    """Removal and compaction of a multi-sequence cache, against keys computed for their new positions."""
    made = numkv.CausalCache(by_hand(target) if own else numkv.rope_shift(*tables()))
    made.init(kind, 2, 16, 8, target, rotate=True)
    raw, v = rows(rng, 8)
    made.start_forward(numkv.Batch([*range(7), 0], [0] * 7 + [1]))
    made.put(0, to(roped(raw, [*range(7), 0]).astype(F32)), to(v))
    before = [np.array(host(x)) for x in made.get(0)[:2]]
    made.remove(0, 1, 3)  # 3, 4, 5, 6 become 1, 2, 3, 4
    made.compact(0, [0, 2, 4])  # 4 becomes 1, 6 becomes 2
    made.start_forward(numkv.Batch([2, 0], [0, 1]), reserve=True)
    k, values, mask = (host(x) for x in made.get(0))
    assert np.flatnonzero(mask[0] == 0).tolist() == [0, 4, 6]
    assert np.array_equal(values[:8], before[1])
    assert np.array_equal(k[[0, 7]], before[0][[0, 7]])
    want = roped(raw[[4, 6]], [1, 2])
    # Quantised three times: when it was put, and as it moved twice.
    off = 3 * np.linalg.norm(
        np.broadcast_to(half_a_step(turned(want), kind) * 1.2, want.shape), axis=-1
    )
    assert np.all(np.linalg.norm(k[[4, 6]] - want, axis=-1) <= off)


def test_a_function_sees_keys_as_they_were_put(target, to, host, rng):
    """In float32; its results are checked as any rows are, before anything changes."""
    seen, where = [], targets.get(target)

    def shift(layer, keys, offsets):
        seen.append(np.array(host(keys)))
        return where.asarray(np.full(keys.shape, np.nan, F32)) if len(seen) > 1 else keys

    made = numkv.CausalCache(shift)
    made.init("int8", 1, 8, 8, target, rotate=True)
    k, v = rows(rng, 4)
    made.start_forward(numkv.Batch(range(4), [0] * 4))
    made.put(0, to(k), to(v))
    made.remove(0, 1, 2)
    assert seen[0].dtype == F32
    np.testing.assert_allclose(seen[0], k[2:], rtol=0, atol=0.05)
    before = host(made._layers[0].k).copy()
    with pytest.raises(numkv.NonFiniteInput, match="finite"):
        made.remove(0, 0, 1)
    assert np.array_equal(host(made._layers[0].k), before)
    assert made.positions(0).tolist() == [0, 1, 2]


@pytest.mark.parametrize("make", [contiguous, paged, cache], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_compaction(target, to, host, rng, monkeypatch, make, kind):
    """With a shift as if the kept tokens alone had been written; without one the stored bits move."""
    monkeypatch.setattr(importlib.import_module("numkv.compaction.key_shift"), "_AT_ONCE", 3)
    raw, v = rows(rng)
    keep = [0, 3, 4, 5, 6]  # four that move by as much
    k = roped(raw, range(TOKENS)).astype(F32)
    q = rng.standard_normal((1, 2 * HEADS, DIM)).astype(F32)

    def filled(k, v):
        made, append, attend = make(target, kind=kind, rotate=True)
        append(to(k), to(v))
        if make is cache:
            made.append(0, to(k), to(v))
            made.advance(len(k))
        return made, attend

    fresh, attend_fresh = filled(roped(raw[keep], range(5)).astype(F32), v[keep])
    made, attend = filled(k, v)
    made.compact(keep, numkv.rope_shift(*tables()))
    bound = 1e-5 if kind == "fp32" else 0.02
    tolerances.assert_rows_close(
        host(attend(to(q))), host(attend_fresh(to(q))).astype(np.float64), bound
    )
    same, attend_same = filled(k[keep], v[keep])
    made, attend = filled(k, v)
    made.compact(keep)
    assert np.array_equal(host(attend(to(q))), host(attend_same(to(q))))


def test_truncation(target, to, host, rng):
    k, v = rows(rng)
    q = rng.standard_normal((1, 4, DIM)).astype(F32)
    for make in (paged, cache):
        made, append, attend = make(target, kind="int8", rotate=True)
        append(to(k), to(v))
        want = host(attend(to(q))).copy()
        if make is cache:
            made.append(0, to(k), to(v))
            made.advance(TOKENS)
        made.truncate(3)
        append(to(k[3:]), to(v[3:]))
        assert np.array_equal(host(attend(to(q))), want)


# ---------------------------------------------------------------- copies


def test_growth_and_copies(target, to, host, rng):
    made = numkv.KVCache(1, HEADS, DIM, kind="int4", target=target, rotate=True)
    k, v = rows(rng, 20)
    made.append(0, to(k[:3]), to(v[:3]))
    first = host(made.k(0)).copy()
    twin = copy.deepcopy(made)
    made.append(0, to(k[3:]), to(v[3:]))  # grows
    assert twin.rotate
    assert np.array_equal(host(made.k(0))[:3], first)
    twin.append(0, to(k[3:]), to(v[3:]))
    assert np.array_equal(host(twin.k(0)), host(made.k(0)))


def filled(rng, to, target="cpu", kind="int8", **kw):
    made = numkv.PagedKVCache(
        2, HEADS, DIM, num_blocks=16, block_size=3, kind=kind, target=target, **kw
    )
    k, v = rows(rng)
    seq = made.add()
    step = made.reserve([seq], [TOKENS])
    for layer in range(2):
        step.append(layer, to(k), to(v))
    made.commit(step, token_ids=np.arange(TOKENS))
    return made, seq, k, v


def test_forks_prefixes_and_swapping(target, to, host, rng):
    """Blocks are shared and copied as they are stored."""
    made, seq, k, v = filled(rng, to, target, rotate=True)
    q = to(rng.standard_normal((1, 4, DIM)).astype(F32))
    fork = made.fork(seq)
    step = made.reserve([fork], [1])  # copies the last block
    for layer in range(2):
        step.append(layer, to(k[:1]), to(v[:1]))
    made.commit(step)
    made.truncate(fork, TOKENS)
    want = host(made.decode_attention(0, [seq], q))
    assert np.array_equal(host(made.decode_attention(0, [fork], q)), want)
    prefix = made.add(np.arange(TOKENS))
    assert made.cached_len(prefix) == 6
    step = made.reserve([prefix], [1])
    for layer in range(2):
        step.append(layer, to(k[6:]), to(v[6:]))
    made.commit(step)
    assert np.array_equal(host(made.decode_attention(0, [prefix], q)), want)
    back = made.swap_in(made.swap_out(seq))
    assert np.array_equal(host(made.decode_attention(0, [back], q)), want)


def test_files(tmp_path, rng):
    """What was rotated comes back only into a cache that rotates, and the other way round."""
    path, q = tmp_path / "s", rng.standard_normal((1, 4, DIM)).astype(F32)
    plain = np.random.default_rng(1)
    for rotate in (False, True):
        made, seq, *_ = filled(plain, lambda x: x, rotate=rotate)
        save_sequences(path, [made.swap_out(seq)])
        (loaded,) = load_sequences(path)
        same, other = (
            numkv.PagedKVCache(2, HEADS, DIM, num_blocks=4, block_size=3, kind="int8", rotate=r)
            for r in (rotate, not rotate)
        )
        want = made.decode_attention(1, [seq], q)
        assert np.array_equal(same.decode_attention(1, [same.swap_in(loaded)], q), want)
        found = "got one of " + ("rotated" if rotate else "unrotated")
        with pytest.raises(numkv.DimensionMismatch, match=f"{found}.*rotate={rotate}"):
            other.swap_in(loaded)
        assert other.num_free == 4


def test_files_of_the_first_version(tmp_path, rng):
    """They had no rotation, and say nothing of it."""
    made, seq, *_ = filled(rng, lambda x: x)
    path = tmp_path / "s"
    save_sequences(path, [made.swap_out(seq)])
    with safe_open(path, framework="numpy") as file:
        header = file.metadata()["numkv"]
    assert '"version": 2' in header
    assert ", null]" in header
    old = header.replace('"version": 2', '"version": 1').replace(", null]", "]")
    save_file(load_file(path), tmp_path / "old", metadata={"numkv": old})
    other = numkv.PagedKVCache(2, HEADS, DIM, num_blocks=4, block_size=3, kind="int8")
    q = rng.standard_normal((1, 4, DIM)).astype(F32)
    (loaded,) = load_sequences(tmp_path / "old")
    got = other.decode_attention(0, [other.swap_in(loaded)], q)
    assert np.array_equal(got, made.decode_attention(0, [seq], q))


# ---------------------------------------------------------------- other objects


def test_encoder_rows_and_wrappers(target, to, host, rng):
    """`init` of a wrapper has all children rotate."""
    causal, encoder = numkv.SlidingWindowCache(2), numkv.EncoderCache()
    made = numkv.WrapperCache(causal, encoder, layer_types=[0, 1])
    made.init("fp32", 1, 16, 8, target, rotate=True)
    assert causal.rotate
    assert encoder.rotate
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
        assert pool.rotate is rotate
        assert ("rotate=True" in repr(pool)) is rotate
        for given in (None, rotate):
            assert numkv.PagedLayer(2, 3, HEADS, DIM, pool=pool, rotate=given).rotate is rotate
        with pytest.raises(
            numkv.DimensionMismatch, match=f"`rotate`: expected the pool's, {rotate}"
        ):
            numkv.PagedLayer(2, 3, HEADS, DIM, pool=pool, rotate=not rotate)


@every_object
def test_not_unless_it_is_asked_for(target, make):
    made, *_ = make(target)
    assert made.rotate is False
    assert "rotate" not in repr(made)
