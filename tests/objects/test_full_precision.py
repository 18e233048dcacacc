"""Full-precision tokens beside quantised ones, against a list of rows that knows which of them have been quantised."""

import copy

import naive
import numpy as np
import pytest
import tolerances
from full_precision import (
    F32,
    HEADS,
    KINDS,
    LAYOUTS,
    Cache,
    Model,
    assert_attends,
    assert_same,
    cases,
    draw,
    fill,
)
from hypothesis import given
from hypothesis import strategies as st
from messages import about

import numkv
from numkv import targets
from numkv.storage.hadamard import Rotation

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


# ---------------------------------------------------------------- what is quantised


@cases(
    ["layout", "name", "rotate"],
    [(layout, name, rotate) for layout in LAYOUTS for name in KINDS for rotate in (False, True)],
    [("cache", "mixed", False), ("shared", "int8", False), ("cache", "int8", True)],
)
def test_each_token_is_quantised_once(target, to, host, rng, layout, name, rotate):
    """One by one, several at once, and more than the window holds; codes are those of the rows as appended.

    Of rows that are rotated, codes are those of rotating and quantising them once; full-precision ones are not rotated.
    """
    kinds = KINDS[name]
    one = Cache(layout, target, kinds, 4, 2, rotate=rotate)
    model = Model(kinds, 4, 2, rotate)
    for n in (1, 2, 1, 1, 1, 3, 9, 0, 1):
        fill(one, model, rng, to, [n], kinds[2])
        if target == "cpu" or n == 9:
            assert_same(one, model, host)
    assert_same(one, model, host)
    assert model.quantised == list(range(2, 15))
    q = rng.standard_normal((3, 2 * HEADS, kinds[2])).astype(F32)
    assert_attends(one, model, q, to, host)


@pytest.mark.parametrize(("window", "sinks"), [(0, 3), (5, 0), (40, 0), (1, 40), (3, 2)])
@every_layout
def test_windows_and_first_tokens(rng, layout, window, sinks):
    """Also more of them than tokens, or than there is room for."""
    kinds = KINDS["int8"]
    one, model = Cache(layout, "cpu", kinds, window, sinks, 21), Model(kinds, window, sinks)
    of = one.it.layers[0] if isinstance(one.it, numkv.KVCache) else one.it.spec
    assert of.full_precision == numkv.FullPrecision(window, sinks)
    for n in (2, 1, 7, 1, 10):
        fill(one, model, rng, np.asarray, [n], kinds[2])
        assert_same(one, model, np.asarray)
        q = rng.standard_normal((min(4, len(model.rows)), HEADS, kinds[2])).astype(F32)
        assert_attends(one, model, q, np.asarray, np.asarray)
    with pytest.raises(numkv.CacheFull):
        fill(one, Model(kinds, 0, 0), rng, np.asarray, [1], kinds[2])
    assert_same(one, model, np.asarray)


@cases(["dtype"], [("fp16",), ("bf16",)], [("bf16",)])
def test_rows_of_16_bits_are_kept_exactly(target, to, host, rng, dtype):
    kinds = KINDS["int4"]
    one, model = Cache("cache", target, kinds, 3, 1), Model(kinds, 3, 1)
    fill(one, model, rng, to, [2, 5, 1], kinds[2], naive.DTYPES[dtype])
    assert_same(one, model, host)


def test_beside_a_float_kind(target, to, host, rng):
    """V in fp16 is rounded when K is quantised."""
    cache = numkv.KVCache(
        1, HEADS, 8, head_dim_v=6, k_kind="int8", v_kind="fp16", target=target,
        full_precision=numkv.FullPrecision(3, 1),
    )  # fmt: skip
    k, v = draw(rng, 9, 8)
    v = v[:, :, :6]
    for part in (np.s_[:5], np.s_[5:6], np.s_[6:]):
        cache.append(0, to(k[part]), to(v[part]))
    assert cache.quantised_tokens(0) == range(1, 6)
    got = host(cache.v(0))
    v[1:6] = v[1:6].astype(np.float16)
    assert got.dtype == F32
    assert np.array_equal(got, v)
    got[:] = 0  # a copy
    assert np.array_equal(host(cache.v(0)), v)
    codes, scale = naive.int8_quantise(k)
    k[1:6] = naive.int8_dequantise(codes, scale)[1:6]
    np.testing.assert_allclose(host(cache.k(0)), k, rtol=1e-6)
    assert np.array_equal(host(cache.k(0))[[0, 6, 7, 8]], k[[0, 6, 7, 8]])


def test_rotated_beside_a_float_kind(target, to, host, rng):
    """What has left the window is turned back to be read, a float kind too; the others never were turned."""
    cache = numkv.KVCache(
        1, HEADS, 8, head_dim_v=6, k_kind="int8", v_kind="fp16", target=target, rotate=True,
        full_precision=numkv.FullPrecision(3, 1),
    )  # fmt: skip
    k, v = draw(rng, 9, 8)
    v = np.ascontiguousarray(v[:, :, :6])
    for part in (np.s_[:5], np.s_[5:]):
        cache.append(0, to(k[part]), to(v[part]))
    turned = [Rotation(x.shape[-1]).forward(targets.get("cpu"), x[1:6]) for x in (k, v)]
    stored = naive.int8_dequantise(*naive.int8_quantise(turned[0])), turned[1].astype(np.float16)
    for got, x, rows in zip((cache.k(0), cache.v(0)), (k, v), stored, strict=True):
        want = x.astype(np.float64)
        want[1:6] = rows.astype(np.float64) @ naive.rotation(Rotation(x.shape[-1]).signs)
        got = host(got)
        assert got.dtype == F32
        assert np.array_equal(got[[0, 6, 7, 8]], x[[0, 6, 7, 8]])
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    q = rng.standard_normal((2, 2 * HEADS, 8)).astype(F32)
    want, _ = naive.attention(
        q, *(host(x)[:, :, :].swapaxes(0, 1)[None] for x in (cache.k(0), cache.v(0))), [9], [0, 2]
    )
    got = host(cache.decode_attention(0, to(q)))
    tolerances.assert_rows_close(got, want, tolerances.attention("int8", "fp32"))


@cases(
    ["layout", "name", "rotate"],
    [("contiguous", "int8", False), ("paged", "int8", False), ("contiguous", "int8", True),
     ("paged", "int4", True)],
    [("paged", "int8", False)],
)  # fmt: skip
def test_fused_write(target, to, host, rng, layout, name, rotate):
    """Full-precision rows are those of an fp32 layer, codes those of a quantised one."""
    kinds = (name, name, 8)
    one = Cache(layout, target, kinds, 3, 1, rotate=rotate)
    whole = numkv.ContiguousLayer(32, HEADS, 8, kind=name, target=target, rotate=rotate)
    exact = numkv.ContiguousLayer(32, HEADS, 8, kind="fp32", target=target)
    cos, sin = (to(x) for x in naive.rope_tables(32, 8))
    weight = to(rng.uniform(0.5, 2, 8).astype(F32))
    for n in (1, 7, 1, 2, 0):
        qkv = to(rng.standard_normal((n, 3 * HEADS * 8)).astype(F32))
        args = {
            "num_q_heads": HEADS, "cos": cos, "sin": sin, "qk_mode": 1, "q_norm_weight": weight,
            "k_norm_weight": weight,
        }  # fmt: skip
        out = [host(layer.write(qkv, **args)) for layer in (one.it, whole, exact)]
        assert np.array_equal(out[0], out[1])
    assert one.quantised == list(range(1, 8))
    want = Cache.__new__(Cache)
    want.layout, want.it = "contiguous", whole
    for a, b in zip(one.codes(host), want.codes(host), strict=True):
        assert np.array_equal(a[1:8], b[1:8])
    # Attention as over an fp32 layer in which the quantised rows are what their codes say.
    k, v = (host(x)[0].astype(np.float64) for x in (exact.k, exact.v))
    for rows, codes, scale in ((k, whole.k, whole.k_scale), (v, whole.v, whole.v_scale)):
        stored = naive.dequantise(host(codes)[0, :, 1:8], host(scale)[0, :, 1:8])
        rows[:, 1:8] = stored @ naive.rotation(Rotation(8).signs) if rotate else stored
    q = rng.standard_normal((2, HEADS, 8)).astype(F32)
    got = host(one.attend(to(q)))
    expected, _ = naive.attention(q, k[None], v[None], [11], [0, 2])
    tolerances.assert_rows_close(got, expected, tolerances.attention("int8", "fp32"))


# ---------------------------------------------------------------- dropping tokens


@pytest.mark.parametrize("length", [16, 13, 11, 5, 2, 1, 0])
@every_layout
def test_truncation(rng, layout, length):
    """What is quantised stays so; the window fills up again from what is appended."""
    kinds = KINDS["int8"]
    one, model = Cache(layout, "cpu", kinds, 4, 2), Model(kinds, 4, 2)
    fill(one, model, rng, np.asarray, [9, 1, 7], kinds[2])
    one.level().truncate(length)
    model.truncate(length)
    assert_same(one, model, np.asarray)
    for n in (1, 1, 2, 5):
        fill(one, model, rng, np.asarray, [n], kinds[2])
        assert_same(one, model, np.asarray)
    assert_attends(
        one, model, rng.standard_normal((5, HEADS, 8)).astype(F32), np.asarray, np.asarray
    )


KEEPS = {
    "holes": [0, 3, 4, 6, 10, 12, 13],
    "no-first": [4, 5, 9, 12, 13],
    "one-first": [1, 2, 3, 10, 11, 12, 13],
    "floats": [1, 11, 13],
    "end": [10, 11, 12, 13],
    "prefix": [0, 1, 2, 3, 4],
    "all": list(range(14)),
    "nothing": [],
}


@cases(
    ["layout", "name", "rotate"],
    [*((layout, name, False) for layout in LAYOUTS for name in KEEPS),
     *((layout, "one-first", True) for layout in LAYOUTS)],
    [("paged", "holes", False), ("cache", "one-first", True)],
)  # fmt: skip
def test_compaction(target, to, host, rng, layout, name, rotate):
    """Rows move as they are, so a quantised one stays quantised, also to the very front."""
    keep = KEEPS[name]
    kinds = KINDS["int4"] if target == "cpu" else KINDS["int8"]
    one = Cache(layout, target, kinds, 4, 2, rotate=rotate)
    model = Model(kinds, 4, 2, rotate)
    fill(one, model, rng, to, [14], kinds[2])
    if layout == "cache":  # the other layer drops others, some of which have yet to be quantised
        one.level()
        kept = np.array([sorted(rng.choice(14, len(keep), replace=False)), keep], np.int64)
        kept = kept.reshape(2, len(keep))
        want = host(one.it.k(0))[kept[0]]
        one.it.compact(kept)
        assert np.array_equal(host(one.it.k(0)), want)
    else:
        one.it.compact(keep)
    model.keep(keep)
    assert_same(one, model, host)
    for n in (1, 6) if target == "cpu" else (3,):
        fill(one, model, rng, to, [n], kinds[2])
        assert_same(one, model, host)
    q = rng.standard_normal((3, HEADS, kinds[2])).astype(F32)
    assert_attends(one, model, q, to, host)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("layout", ["cache", "shared"])
def test_compaction_with_a_shift(rng, layout, kind, rotate):
    """Keys in full precision are turned and no more; quantised ones are quantised once more."""
    cos, sin = naive.rope_tables(32, 8, base=100.0, dtype=np.float64)
    shift = numkv.rope_shift(cos.astype(F32), sin.astype(F32))

    def rotated(raw, positions):
        return np.array(
            [naive.rope(x, cos[p], sin[p], False) for x, p in zip(raw, positions, strict=True)]
        )

    raw, v = draw(rng, 14, 8)
    keep = [1, 3, 4, 9, 11, 13]
    one = Cache(layout, "cpu", (kind, kind, 8), 4, 2, rotate=rotate)
    one.append(rotated(raw, range(14)).astype(F32), v)
    one.level()
    if layout == "cache":
        assert one.it.quantised_tokens(0) == one.it.quantised_tokens(1) == range(2, 10)
    with pytest.raises(IndexError, match="rope_shift"):
        one.it.compact(keep, numkv.rope_shift(cos[:5].astype(F32), sin[:5].astype(F32)))
    assert one.quantised == list(range(2, 10))
    with pytest.raises(TypeError, match=about("shift")):
        one.it.compact(keep, lambda *a: a[1])
    one.it.compact(keep, shift)
    assert one.quantised == [1, 2, 3]
    want = rotated(raw[keep], range(6))
    if layout == "cache":
        for layer in (0, 1):
            got = one.it.k(layer)
            np.testing.assert_allclose(got[[0, 4, 5]], want[[0, 4, 5]], rtol=1e-5, atol=1e-5)
            # Quantised twice. Turned back, an error may be as long as it is in all of its elements together.
            error = np.abs(got - want).max(axis=-1)
            largest = np.abs(want).max(axis=-1)
            if rotate:
                signs = Rotation(8).signs
                largest = np.sqrt(8) * np.abs(want @ naive.rotation(signs).T).max(axis=-1)
            assert np.all(error <= largest * {"int8": 1.5 / 127, "int4": 1.5 / 7}[kind])
            assert np.all(error[1:4] > 1e-5)
    q = rng.standard_normal((2, HEADS, 8)).astype(F32)
    fresh = naive.attention(
        q, want.swapaxes(0, 1)[None], v[keep].swapaxes(0, 1)[None], [6], [0, 2]
    )[0]
    assert tolerances.row_errors(one.attend(q), fresh).max() < {"int8": 0.03, "int4": 0.3}[kind]


# ---------------------------------------------------------------- the object


@every_layout
def test_errors_change_nothing(rng, layout):
    kinds = KINDS["int8"]
    one, model = Cache(layout, "cpu", kinds, 4, 2, 12), Model(kinds, 4, 2)
    fill(one, model, rng, np.asarray, [9], 8)
    k, v = draw(rng, 2, 8)
    for index, name in ((0, "k"), (1, "v")):
        rows = [k.copy(), v.copy()]
        rows[index][1, 1, 3] = np.inf
        with pytest.raises(numkv.NonFiniteInput, match=about(name)):
            one.append(*rows)  # although it would stay in full precision for now
    with pytest.raises(numkv.CacheFull):
        one.append(*draw(rng, 4, 8))
    with pytest.raises(numkv.UnsupportedDType):
        one.append(k.astype(np.float64), v)
    q = np.ones((1, HEADS, 8), F32)
    out = np.full((1, HEADS, 8), 7, F32)
    for bad, error in (
        ({"sinks": np.ones(3, F32)}, numkv.DimensionMismatch),
        ({"logits_soft_cap": -1.0}, ValueError),
        ({"window_left": -2}, ValueError),
    ):
        with pytest.raises(error):
            one.attend(q, out=out, **bad)
    with pytest.raises(numkv.DimensionMismatch, match=about("out")):
        one.attend(q, out=out[:, :1])
    out.flags.writeable = False
    with pytest.raises(numkv.NotSupported, match=about("out")):
        one.attend(q, out=out)
    assert np.all(out == 7)
    with pytest.raises(numkv.DimensionMismatch, match=about("lse")):
        one.weigh(q, lse=np.ones((2, HEADS), F32))
    assert_same(one, model, np.asarray)


def test_a_full_pool_changes_nothing(rng):
    pool = numkv.PagedPool(3, 2, HEADS, 8, kind="int8")
    layer = numkv.PagedLayer(8, 2, HEADS, 8, pool=pool, full_precision=numkv.FullPrecision(2))
    layer.append(*draw(rng, 5, 8))
    before = [x.copy() for x in (layer.k, layer.v, layer.k_scale)]
    q = np.ones((1, HEADS, 8), F32)
    want = layer.decode_attention(q)
    with pytest.raises(numkv.CacheFull):
        layer.append(*draw(rng, 3, 8))
    assert layer.seq_len == 5
    for a, b in zip(before, (layer.k, layer.v, layer.k_scale), strict=True):
        assert np.array_equal(a, b)
    assert np.array_equal(layer.decode_attention(q), want)
    pool.check()


@pytest.mark.parametrize("name", ["window", "num_sink_tokens"])
def test_numbers(name):
    with pytest.raises(numkv.DimensionMismatch, match=about(name)):
        numkv.FullPrecision(**{name: -1})
    with pytest.raises(TypeError, match=about(name)):
        numkv.FullPrecision(**{name: 1.5})
    with pytest.raises(ValueError, match="leave `full_precision` out"):
        numkv.FullPrecision(**{name: 0})
    assert repr(numkv.FullPrecision(**{name: 2})) == f"FullPrecision({name}=2)"


def test_arguments():
    makers = [
        lambda **kw: numkv.KVCache(1, 1, 8, **kw),
        lambda **kw: numkv.ContiguousLayer(4, 1, 8, **kw),
        lambda **kw: numkv.PagedLayer(4, 2, 1, 8, **kw),
    ]
    for make in makers:
        with pytest.raises(TypeError, match=about("full_precision")):
            make(kind="int8", full_precision=3)
        for kept in (numkv.FullPrecision(1), numkv.FullPrecision(num_sink_tokens=1)):
            for kind in ("fp16", "fp32"):
                with pytest.raises(numkv.NotSupported, match=about("full_precision")):
                    make(kind=kind, full_precision=kept)
        with pytest.raises(numkv.NotSupported, match="no `kind`"):
            make(kind="int8", full_precision=numkv.FullPrecision(1, kind="bf16"))


@every_layout
def test_what_it_says_of_itself(rng, layout):
    plain, one = (Cache(layout, "cpu", KINDS["int8"], *n, 12) for n in ((0, 0), (3, 2)))
    assert "FullPrecision(window=3, num_sink_tokens=2)" in repr(one.it)
    assert "full_precision" not in repr(plain.it)
    both = Cache(layout, "cpu", KINDS["int8"], 3, 2, 12, rotate=True)
    assert (
        "int8, rotate=True, full_precision=FullPrecision(window=3, num_sink_tokens=2), target"
        in repr(both.it)
    )
    assert both.it.nbytes == one.it.nbytes
    layers = 2 if layout == "cache" else 1
    assert one.it.nbytes - plain.it.nbytes == layers * 5 * HEADS * 2 * 8 * 4
    with pytest.raises(numkv.NotSupported, match=about("jit")):
        _ = one.it.jit
    fill(plain, Model(KINDS["int8"], 0, 0), rng, np.asarray, [4], 8)
    assert plain.quantised == [0, 1, 2, 3]
    assert numkv.ContiguousLayer(4, 1, 8).quantised_tokens == range(0)
    assert numkv.KVCache(1, 1, 8).quantised_tokens(0) == range(0)


@pytest.mark.parametrize("layout", ["contiguous", "paged", "shared"])
def test_the_length_can_be_set_downwards(rng, layout):
    one, model = Cache(layout, "cpu", KINDS["int8"], 4, 2), Model(KINDS["int8"], 4, 2)
    fill(one, model, rng, np.asarray, [9], 8)
    with pytest.raises(numkv.NotSupported, match=about("seq_len")):
        one.it.seq_len = 10
    with pytest.raises(IndexError):
        one.it.seq_len = -1
    one.it.seq_len = 9
    one.it.seq_len = 6
    model.truncate(6)
    fill(one, model, rng, np.asarray, [3], 8)
    assert_same(one, model, np.asarray)


def test_a_copy_is_independent(target, to, host, rng):
    one, model = Cache("cache", target, KINDS["int8"], 3, 1), Model(KINDS["int8"], 3, 1)
    fill(one, model, rng, to, [7], 8)
    one.level()
    twin, of_twin = copy.copy(one), copy.deepcopy(model)
    twin.it = one.it.copy()
    fill(twin, of_twin, rng, to, [4], 8)
    assert_same(one, model, host)
    assert_same(twin, of_twin, host)
    one.it.clear()
    assert one.quantised == []
    fill(one, Model(KINDS["int8"], 3, 1), rng, to, [7], 8)
    assert one.quantised == [1, 2, 3]
    assert_same(twin, of_twin, host)


def test_deep_copies_of_layers(rng):
    one, model = Cache("contiguous", "cpu", KINDS["int8"], 3, 1), Model(KINDS["int8"], 3, 1)
    fill(one, model, rng, np.asarray, [7], 8)
    twin = copy.copy(one)
    twin.it = copy.deepcopy(one.it)
    fill(twin, copy.deepcopy(model), rng, np.asarray, [7], 8)
    assert_same(one, model, np.asarray)


# ---------------------------------------------------------------- any order of calls


STEPS = st.lists(
    st.tuples(st.just("append"), st.integers(0, 6))
    | st.tuples(st.sampled_from(["truncate", "keep"]), st.floats(0, 1)),
    max_size=12,
)


@given(
    steps=STEPS, window=st.integers(0, 5), sinks=st.integers(0, 4), rotate=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_order_of_calls(steps, window, sinks, rotate, seed):
    rng = np.random.default_rng(seed)
    kinds = ("int8", "int8", 4)
    one = Cache("cache", "cpu", kinds, window, sinks, rotate=rotate)
    model = Model(kinds, window, sinks, rotate)
    for call, n in steps:
        length = len(model.rows)
        if call == "append":
            fill(one, model, rng, np.asarray, [n], 4)
        elif call == "truncate":
            length = int(n * length)
            one.level().truncate(length)
            model.truncate(length)
        else:
            kept = np.flatnonzero(rng.random(length) < n)
            one.level().compact(kept)
            model.keep(kept)
        assert_same(one, model, np.asarray)
        if model.rows:
            q = rng.standard_normal((min(3, len(model.rows)), HEADS, 4)).astype(F32)
            assert_attends(one, model, q, np.asarray, np.asarray, window_left=int(seed % 9) - 1)
