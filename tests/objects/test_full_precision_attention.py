"""Attention over caches with full-precision tokens."""

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
    fill,
)
from layer_lists import in_full
from messages import about

import numkv

every_kind = pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(kinds, id=name, marks=pytest.mark.nightly if name == "mixed" else [])
        for name, kinds in KINDS.items()
    ],
)


OPTIONS = {
    "plain": {},
    "cap": {"logits_soft_cap": 2.5, "sm_scale": 0.4},
    "window": {"window_left": 6},
    "narrow": {"window_left": 1},
    "sinks": {"sinks": np.array([0.5, -1.0, 3.0, 0.0], F32)},
    "all": {
        "logits_soft_cap": 4.0, "window_left": 9, "sinks": np.array([2.0, 0.1, -3.0, 1.0], F32),
    },
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@every_kind
def test_attention(rng, kinds, options):
    """Every number of queries: those of the window alone, and some for which the window is in the future."""
    for layout in ("cache", "shared"):
        one, model = Cache(layout, "cpu", kinds, 4, 2), Model(kinds, 4, 2)
        for n in (1, 5, 8):
            fill(one, model, rng, np.asarray, [n], kinds[2])
            for tokens in (1, 3, len(model.rows)):
                if tokens <= len(model.rows):
                    q = rng.standard_normal((tokens, 2 * HEADS, kinds[2])).astype(F32)
                    assert_attends(one, model, q, np.asarray, np.asarray, **options)


@cases(["name"], [("int4",), ("mixed",)], [("mixed",)])
def test_attention_on_both_targets(target, to, host, rng, name):
    kinds = KINDS[name]
    one, model = Cache("paged", target, kinds, 3, 1), Model(kinds, 3, 1)
    fill(one, model, rng, to, [4, 8], kinds[2])
    q = rng.standard_normal((2, 2 * HEADS, kinds[2])).astype(F32)
    assert_attends(one, model, q, to, host, **OPTIONS["all"])


@cases(
    ["q_kind", "rotate"],
    [("fp16", False), ("bf16", False), ("fp64", False), ("fp16", True)],
    [("bf16", False)],
)
def test_queries_of_other_dtypes(target, to, host, rng, q_kind, rotate):
    """Parts are merged before they are rounded; with an `out` that is part of something larger too."""
    kinds = KINDS["int8"]
    one = Cache("contiguous", target, kinds, 3, 1, rotate=rotate)
    model = Model(kinds, 3, 1, rotate)
    fill(one, model, rng, to, [9], kinds[2])
    q = rng.standard_normal((2, HEADS, kinds[2])).astype(naive.DTYPES[q_kind])
    want, want_lse = model.attention(q)
    room = to(np.zeros((3, HEADS, kinds[2]), q.dtype))
    got, lse = one.attend(to(q), return_lse=True, out=room[1:])
    bound = tolerances.attention("int8", "fp32" if q_kind == "fp64" else q_kind)
    tolerances.assert_rows_close(host(room)[1:], want, bound)
    assert host(got).dtype == q.dtype
    tolerances.assert_lse_close(host(lse), want_lse, 2e-3)
    assert not host(room)[0].any()


def test_out_with_strides(rng):
    one, model = Cache("cache", "cpu", KINDS["int8"], 3, 1), Model(KINDS["int8"], 3, 1)
    fill(one, model, rng, np.asarray, [9], 8)
    q = rng.standard_normal((3, HEADS, 8)).astype(np.float16)
    room = np.zeros((6, 2 * HEADS, 16), np.float16)
    out = room[::2, ::2, :8]
    assert one.attend(q, out=out) is not None
    assert np.array_equal(out, one.attend(q))
    assert not room[1::2].any()
    single = np.zeros((HEADS, 8), np.float16)
    one.it.decode_attention(1, q[2], out=single)
    np.testing.assert_allclose(single.astype(F32), out[2].astype(F32), atol=2e-3)


def test_an_empty_cache(target, to, host):
    one = Cache("cache", target, KINDS["int8"], 3, 1)
    q = to(np.ones((1, HEADS, 8), F32))
    out, lse = one.attend(q, return_lse=True)
    assert not host(out).any()
    assert np.all(host(lse) == -np.inf)
    assert one.attend(to(np.ones((0, HEADS, 8), F32))).shape == (0, HEADS, 8)
    assert one.weigh(q).shape == (HEADS, 0)
    assert one.it.k(1).shape == (0, HEADS, 8)
    with pytest.raises(numkv.DimensionMismatch, match=about("q")):
        one.attend(to(np.ones((2, HEADS, 8), F32)))


def test_slots_that_are_not_used_are_not_read(rng):
    """Rows that were dropped may hold anything."""
    for layout in LAYOUTS:
        one, model = Cache(layout, "cpu", KINDS["int8"], 4, 2), Model(KINDS["int8"], 4, 2)
        fill(one, model, rng, np.asarray, [9], 8)
        bad = np.full((2, 5, HEADS, 8), np.nan, F32)
        if layout == "cache":
            one.level()
        one.append(*bad, check_finite=False)
        one.it.truncate(9)
        model.append(*np.zeros((2, 5, HEADS, 8), F32))
        model.truncate(9)
        q = rng.standard_normal((2, HEADS, 8)).astype(F32)
        assert_same(one, model, np.asarray)
        assert_attends(one, model, q, np.asarray, np.asarray)
        assert np.all(np.isfinite(one.weigh(q)))


WEIGHED = [
    *((layout, name, False) for layout in LAYOUTS for name in ("plain", "all")),
    ("cache", "all", True), ("shared", "plain", True),
]  # fmt: skip


@cases(
    ["layout", "name", "rotate", "of"],
    [(*case, of) for case in WEIGHED for of in ("int8", "mixed")],
    [("cache", "plain", False, "int8"), ("paged", "all", True, "int8")],
)
def test_attention_weights(target, to, host, rng, layout, name, rotate, of):
    options = {n: x for n, x in OPTIONS[name].items() if n != "sinks"}
    kinds = KINDS[of]
    one = Cache(layout, target, kinds, 3, 2, rotate=rotate)
    model = Model(kinds, 3, 2, rotate)
    done = 0
    for n in (1, 11) if target == "cpu" else (9,):
        fill(one, model, rng, to, [n], kinds[2])
        done += n
        for tokens in (1, done) if target == "cpu" else (5,):
            q = rng.standard_normal((tokens, 2 * HEADS, kinds[2])).astype(F32)
            want = np.zeros((HEADS, done))
            k = model.values(0).swapaxes(0, 1)
            for i, p in enumerate(range(done - tokens, done)):
                low = max(0, p - options.get("window_left", done))
                for h in range(2 * HEADS):
                    _, lse = naive.attention_row(
                        q[i, h], k[h // 2, low : p + 1], k[h // 2, low : p + 1],
                        kinds[2] ** -0.5, options.get("logits_soft_cap", 0), None,
                    )  # fmt: skip
                    for j in range(low, p + 1):
                        one_row = k[h // 2, j : j + 1]
                        _, score = naive.attention_row(
                            q[i, h], one_row, one_row, kinds[2] ** -0.5,
                            options.get("logits_soft_cap", 0), None,
                        )  # fmt: skip
                        want[h // 2, j] += np.exp(score - lse)
            got = host(one.weigh(to(q), **options))
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-6)
            _, lse = one.attend(to(q), return_lse=True, **options)
            assert np.array_equal(got, host(one.weigh(to(q), lse=lse, **options)))


def test_recent_tokens_matter_most(rng):
    """The error of attention falls where queries look at the newest tokens, and with the first ones at them too."""
    dim, tokens = 64, 96
    k, v = rng.standard_normal((2, tokens, 1, dim)).astype(F32)
    q = (k[-4:] * 1.5 + k[:1]).astype(F32)  # each looks at its own token and the first
    want, _ = naive.attention(
        q, k.swapaxes(0, 1)[None], v.swapaxes(0, 1)[None], [tokens], [0, len(q)]
    )
    errors = []
    for window, sinks in ((0, 0), (16, 0), (16, 4)):
        layer = numkv.ContiguousLayer(
            tokens,
            1,
            dim,
            kind="int4",
            full_precision=in_full(window, sinks),
        )
        layer.append(k, v)
        errors.append(tolerances.row_errors(layer.decode_attention(q), want).mean())
    assert errors[1] < 0.8 * errors[0]
    assert errors[2] < 0.5 * errors[1]
