"""Encoding, decoding, scores and attention on codes, against the oracle.

Codes are compared one by one, but for numbers so near to an edge that float32 may put them on either side; everything
else is computed by the oracle from the codes as stored.
"""

import dataclasses
import importlib
from dataclasses import dataclass

import naive
import naive_codes
import numpy as np
import pytest
import tolerances

import numkv
from numkv.kernels.operations import Codebook, CodesOptions, StoredCodes, load

NEAR = 2e-6  # what float32 may get wrong of a coordinate of a unit vector


@dataclass(frozen=True)
class Shape:
    dim: int
    bits: int
    projections: int = 0
    heads: int = 1
    group: int = 1
    tokens: int = 5
    begin: int = 0
    queries: int = 1
    v_bits: int = 0  # 0: those of keys

    def __str__(self):
        told = [
            f
            for f in dataclasses.fields(self)
            if f.default is dataclasses.MISSING or getattr(self, f.name) != f.default
        ]
        return "-".join(f"{f.name[0]}{getattr(self, f.name)}" for f in told)


# Every width of codes; dims that are no whole vectors, bytes or chunks; every way of taking q rows.
WIDTHS = [Shape(dim, bits) for bits in range(1, 17) for dim in (1, 13)]
# Some of them where each width is compiled anew: tables in registers, of one vector and of several, and in memory. By
# day the last of these; a table of one vector has 4 bits, in `SHAPES`, and 3 of values in `SEVERAL`.
COMPILED = [shape for shape in WIDTHS if shape.bits == 8]
COMPILED += [
    pytest.param("cpu", shape, marks=mark)
    for mark, widths in ((pytest.mark.slow, (3, 5)), (pytest.mark.nightly, (1, 11, 16)))
    for shape in WIDTHS
    if shape.bits in widths
]
SHAPES = [
    Shape(8, 4, 16),
    Shape(2, 4, 1),
    Shape(16, 4, 5, heads=2, group=4, begin=3),
    Shape(24, 4, 0, heads=3, group=3, tokens=19),
    Shape(33, 4, 40, group=9, tokens=3, begin=1),
    Shape(5, 8, 0, heads=2, group=5, tokens=40),
]
LARGE = [
    Shape(128, 4, 128, heads=2, group=4, tokens=2100, begin=7),
    Shape(80, 4, 10, group=7, tokens=1024),
    Shape(64, 8, 0, heads=3, tokens=33),
    Shape(136, 4, 0, group=13, tokens=1025, begin=31),
    Shape(300, 4, 0, tokens=70),
]
LARGEST = [pytest.param("cpu", LARGE[0], marks=pytest.mark.slow), *LARGE[1:]]


def both_targets(cpu, cuda):
    """Parameters ``target, shape``: all shapes on the CPU, those that the simulator can bear on CUDA."""
    cases = [("cpu", shape) if isinstance(shape, Shape) else shape for shape in cpu]
    cases += [("cuda", shape) for shape in cuda]
    return pytest.mark.parametrize(("target", "shape"), cases, indirect=["target"], ids=str)


def orthogonal(rng, heads, dim):
    return np.stack([np.linalg.qr(rng.standard_normal((dim, dim)))[0] for _ in range(heads)])


class Problem:
    """Random vectors, matrices and codebook of a shape, encoded on a target."""

    def __init__(self, rng, shape, target, to, host, kind="fp32"):
        self.shape, self.host, self.to, self.ops = shape, host, to, load(target)
        heads, dim, m = shape.heads, shape.dim, shape.projections
        self.rotation = orthogonal(rng, heads, dim).astype(np.float32)
        self.sketch = rng.standard_normal((heads, dim, m)).astype(np.float32)
        self.levels = self.levels_of(rng, shape.bits)
        self.v_levels = self.levels_of(rng, shape.v_bits) if shape.v_bits else self.levels
        rows = rng.standard_normal((2, shape.tokens, heads, dim))
        rows *= np.exp(rng.uniform(-8, 8, (2, shape.tokens, heads, 1)))
        self.rows = naive.round_to(np.clip(rows, -6e4, 6e4), kind)
        self.by_head = np.swapaxes(self.rows.astype(np.float64), 1, 2)
        self.q = naive.round_to(
            rng.standard_normal((shape.queries, heads * shape.group, dim)), kind
        )
        self.kind = kind
        self.capacity = shape.begin + shape.tokens + 2
        self.k, self.v = self.buffers(m), self.buffers(0, shape.v_bits or shape.bits)

    def levels_of(self, rng, bits):
        """Not the best levels, but such that all are used; symmetry is not needed either."""
        gaps = rng.uniform(0.5, 1.5, 1 << bits)
        spread = 5 / np.sqrt(self.shape.dim) if self.shape.dim > 1 else 2
        return ((np.cumsum(gaps) / gaps.sum() - 0.5) * spread).astype(np.float32)

    def sides(self):
        """Of keys and of values: rows by head, buffers, signs, bits and levels."""
        shape = self.shape
        return (
            (self.by_head[0], self.k, shape.projections, shape.bits, self.levels),
            (self.by_head[1], self.v, 0, shape.v_bits or shape.bits, self.v_levels),
        )

    @property
    def range(self):
        return slice(self.shape.begin, self.shape.begin + self.shape.tokens)

    def buffers(self, projections, bits=None, fill=0xA5):
        """Codes, scales, signs and residual norms, full of rubbish."""
        heads, capacity, bits = self.shape.heads, self.capacity, bits or self.shape.bits
        arrays = (
            np.full((heads, capacity, -(-self.shape.dim * bits // 8)), fill, np.uint8),
            np.full((heads, capacity), np.nan, np.float32),
            np.full((heads, capacity, -(-projections // 8)), fill, np.uint8),
            np.full((heads, capacity if projections else 0), np.nan, np.float32),
        )
        return tuple(self.to(x) for x in arrays)

    def matrices(self, projections, levels=None):
        levels = self.levels if levels is None else levels
        edges = naive_codes.edges_of(levels).astype(np.float32)
        sketch = self.sketch if projections else self.sketch[:, :, :0]
        return tuple(self.to(x) for x in (self.rotation, edges, levels, sketch))

    def encode(self, rows, buffers, projections, start=None, levels=None):
        if self.kind in ("fp16", "bf16"):
            rows = naive.words(rows)
        start = self.shape.begin if start is None else start
        matrices = self.matrices(projections, levels)
        self.ops.encode_rows(self.to(rows), self.kind, *matrices, *buffers, start)

    def encoded(self):
        self.encode(self.rows[0], self.k, self.shape.projections)
        self.encode(self.rows[1], self.v, 0, levels=self.v_levels)
        return self

    def codes(self, buffers):
        _, _, _, bits, _ = self.sides()[buffers is self.v]
        packed = self.host(buffers[0])[:, self.range]
        return naive_codes.unpack(packed, self.shape.dim, bits)

    def decoded(self, buffers):
        scales = self.host(buffers[1])[:, self.range]
        levels = self.v_levels if buffers is self.v else self.levels
        return naive_codes.decode(self.codes(buffers), scales, levels, self.rotation)

    def signs(self):
        packed = self.host(self.k[2])[:, self.range]
        return naive_codes.unpack(packed, self.shape.projections, 1)

    def expected_scores(self, sm_scale, cap=0.0, window_left=-1):
        """By query, q head and token."""
        left = self.host(self.k[3])[:, self.range] if self.shape.projections else None
        keys, signs = self.decoded(self.k), self.signs()
        found = [
            naive_codes.scores(q, keys, self.rotation, self.sketch, signs, left, sm_scale)
            for q in self.q
        ]
        return naive_codes.restrict(np.stack(found), cap, window_left)

    def expected(self, sm_scale, **options):
        """Outputs and lse."""
        values = self.decoded(self.v)
        found = [naive_codes.attend(x, values) for x in self.expected_scores(sm_scale, **options)]
        return tuple(np.stack(x) for x in zip(*found, strict=True))

    def words_of_q(self):
        return self.to(naive.words(self.q) if self.kind in ("fp16", "bf16") else self.q)

    def asked(self, sm_scale, cap=0.0, window_left=-1):
        """What is read, as operations take it."""
        rotation, _, levels, sketch = self.matrices(self.shape.projections)
        back = self.to(np.ascontiguousarray(np.swapaxes(self.rotation, 1, 2)))
        v_levels = self.to(self.v_levels)
        return (
            self.words_of_q(), self.kind, Codebook(rotation, back, levels, v_levels, sketch),
            StoredCodes(*self.k, *self.v[:2], self.range.start, self.range.stop),
            CodesOptions(sm_scale, cap, window_left),
        )  # fmt: skip

    def scores(self, sm_scale, **options):
        out = self.to(np.full((*self.q.shape[:2], self.shape.tokens), np.nan, np.float32))
        self.ops.score_codes(*self.asked(sm_scale, **options), out)
        return self.host(out)

    def attend(self, sm_scale, **options):
        return self.attend_lse(sm_scale, want_lse=False, **options)[0]

    def attend_lse(self, sm_scale, want_lse=True, **options):
        out = self.to(np.full(self.q.shape, np.nan, np.float32))
        lse = self.to(np.full(self.q.shape[:2] if want_lse else (0, 0), np.nan, np.float32))
        self.ops.attend_codes(*self.asked(sm_scale, **options), out, lse)
        return self.host(out), self.host(lse)


# ---------------------------------------------------------------- encoding


def check_encoded(problem):
    shape = problem.shape
    for x, buffers, m, bits, levels in problem.sides():
        z, expected = naive_codes.quantise(x, problem.rotation, levels)
        codes = problem.codes(buffers)
        edges = np.concatenate([[-np.inf], naive_codes.edges_of(levels), [np.inf]])
        assert np.all(z >= edges[codes] - NEAR)
        assert np.all(z <= edges[codes + 1] + NEAR)
        assert np.mean(codes != expected) <= NEAR * 4 * len(edges)  # few are that near
        # Bits past the last code are zeros.
        packed = problem.host(buffers[0])
        again = naive_codes.pack(codes, bits)
        assert np.array_equal(packed[:, problem.range], again)

        scales, rest = naive_codes.scale_and_rest(x, z, codes, levels)
        norm = np.linalg.norm(x, axis=-1)
        stored = problem.host(buffers[1])
        assert np.all(np.abs(stored[:, problem.range] - scales) <= 4 * NEAR * norm)
        if m:
            products = naive_codes.turn(rest, problem.sketch)
            # What float32 may get wrong of a product with a direction of about this length.
            doubt = 8 * NEAR * norm[..., None] * np.sqrt(shape.dim)
            sure = np.abs(products) > doubt
            assert np.array_equal(problem.signs()[sure], (products >= 0)[sure])
            left = problem.host(buffers[3])[:, problem.range]
            assert np.all(np.abs(left - np.linalg.norm(rest, axis=-1)) <= 8 * NEAR * norm)
        # Nothing else was written to.
        outside = np.ones(problem.capacity, bool)
        outside[problem.range] = False
        assert np.all(packed[:, outside] == 0xA5)
        assert np.all(np.isnan(stored[:, outside]))
        assert np.all(problem.host(buffers[2])[:, outside] == 0xA5)


@both_targets(WIDTHS + SHAPES + LARGEST, WIDTHS[1::6] + SHAPES)
def test_encode(target, to, host, rng, shape):
    check_encoded(Problem(rng, shape, target, to, host).encoded())


@pytest.mark.parametrize("kind", ["fp64", "fp16", "bf16"])
def test_encode_every_float_kind(target, to, host, rng, kind):
    check_encoded(Problem(rng, SHAPES[2], target, to, host, kind).encoded())


@pytest.mark.boundscheck
def test_rows_of_zeros_and_of_any_size(target, to, host, rng):
    shape = Shape(8, 4, 8, tokens=7)
    problem = Problem(rng, shape, target, to, host)
    unit = problem.rows[0, 0, 0] / np.linalg.norm(problem.rows[0, 0, 0].astype(np.float64))
    sizes = [0, 1e-44, 1e-38, 1e-30, 1, 65504, 3e38]
    rows = np.stack([size * unit for size in sizes]).astype(np.float32)
    problem.rows = np.stack([rows, rows])[:, :, None]
    problem.encoded()
    scales, left = (host(problem.k[i])[0, problem.range] for i in (1, 3))
    codes = problem.codes(problem.k)[0]
    assert scales[0] == left[0] == 0
    assert np.all(codes[2:] == codes[4])
    for i in range(2, len(sizes)):
        norm = np.linalg.norm(problem.rows[0, i, 0].astype(np.float64))
        assert np.isclose(scales[i], norm * scales[4], rtol=1e-5, atol=1e-43)
        assert np.isclose(left[i], norm * left[4], rtol=1e-5, atol=1e-43)
    assert np.all(np.isfinite(scales))


def test_a_norm_that_float32_does_not_hold(target, to, host, rng):
    problem = Problem(rng, Shape(8, 4, 8, tokens=1), target, to, host)
    problem.rows = np.full((2, 1, 1, 8), 3e38, np.float32)
    problem.encoded()
    assert host(problem.k[1])[0, 0] == np.finfo(np.float32).max
    assert np.all(np.isfinite(host(problem.k[3])[0, 0]))


def test_strided_rows(target, to, host, rng):
    shape = Shape(8, 4, 8, heads=2, tokens=3)
    problem = Problem(rng, shape, target, to, host)
    wide = np.zeros((6, 2, 16), np.float32)
    wide[::2, :, 8:] = problem.rows[0]
    views = [to(wide)[::2, :, 8:], to(problem.rows[0])]
    for view, buffers in zip(views, (problem.k, problem.v), strict=True):
        problem.ops.encode_rows(view, "fp32", *problem.matrices(0), *buffers, 0)
    assert np.array_equal(host(problem.k[0])[:, :3], host(problem.v[0])[:, :3])


def test_no_rows(target, to, host, rng):
    problem = Problem(rng, Shape(8, 4, 8), target, to, host)
    problem.encode(problem.rows[0, :0], problem.k, 8)
    assert np.all(host(problem.k[0]) == 0xA5)


@both_targets([SHAPES[2], LARGE[1]], [SHAPES[2]])
def test_one_by_one_is_the_same_as_all_at_once(target, to, host, rng, shape):
    """Codes do not depend on what else is encoded, nor on the number of threads."""
    problem = Problem(rng, shape, target, to, host)
    problem.encode(problem.rows[0], problem.k, shape.projections)
    single = problem.buffers(shape.projections)
    with numkv.num_threads(1):
        for t in range(min(shape.tokens, 50)):
            rows = problem.rows[0, t : t + 1]
            problem.encode(rows, single, shape.projections, shape.begin + t)
    upto = slice(shape.begin, shape.begin + min(shape.tokens, 50))
    for a, b in zip(problem.k, single, strict=True):
        assert host(a)[:, upto].tobytes() == host(b)[:, upto].tobytes()


# ---------------------------------------------------------------- reading


@both_targets(WIDTHS + SHAPES + LARGEST, WIDTHS[1::6] + SHAPES)
def test_decode(target, to, host, rng, shape):
    problem = Problem(rng, shape, target, to, host).encoded()
    out = to(np.full((shape.heads, shape.tokens, shape.dim), np.nan, np.float32))
    back = to(np.ascontiguousarray(np.swapaxes(problem.rotation, 1, 2)))
    codes, scales = problem.v[:2]
    problem.ops.decode_rows(codes, scales, shape.begin, to(problem.v_levels), back, out)
    tolerances.assert_rows_close(host(out), problem.decoded(problem.v), 2e-6)


def assert_scores_close(got, expected, problem, sm_scale):
    """Relative to what a score can be: the lengths of the key, its sketch, and the query."""
    k = np.linalg.norm(problem.decoded(problem.k), axis=-1)
    if problem.shape.projections:
        left = problem.host(problem.k[3])[:, problem.range].astype(np.float64)
        k = k + left * np.sqrt(problem.shape.dim * problem.shape.projections)
    k = np.repeat(k, problem.shape.group, axis=0)
    sizes = np.linalg.norm(problem.q.astype(np.float64), axis=2)
    bound = 4e-6 * abs(sm_scale) * k * sizes[:, :, None]
    seen = expected > -np.inf
    assert np.array_equal(got[~seen], expected[~seen])
    assert np.all(np.abs(got[seen] - expected[seen]) <= bound[seen])


@both_targets(COMPILED + SHAPES + LARGEST, WIDTHS[1::6] + SHAPES)
def test_scores(target, to, host, rng, shape):
    problem = Problem(rng, shape, target, to, host).encoded()
    assert_scores_close(problem.scores(0.3), problem.expected_scores(0.3), problem, 0.3)


@both_targets(COMPILED + SHAPES + LARGEST, WIDTHS[1::6] + SHAPES)
def test_attend(target, to, host, rng, shape):
    problem = Problem(rng, shape, target, to, host)
    # Keys of one size, so that many tokens count.
    problem.rows /= np.linalg.norm(problem.rows.astype(np.float64), axis=-1, keepdims=True)
    problem.encoded()
    sm_scale = 0.3 if shape.projections else 2.0
    expected, _ = problem.expected(sm_scale)
    tolerances.assert_rows_close(problem.attend(sm_scale), expected, 3e-5)


@pytest.mark.parametrize("kind", ["fp64", "fp16", "bf16"])
def test_queries_of_every_float_kind(target, to, host, rng, kind):
    problem = Problem(rng, SHAPES[2], target, to, host, kind).encoded()
    assert_scores_close(problem.scores(0.1), problem.expected_scores(0.1), problem, 0.1)


def test_scores_far_apart(target, to, host, rng):
    """The softmax of scores in the thousands is that of the largest."""
    problem = Problem(rng, Shape(8, 4, heads=2, tokens=40), target, to, host).encoded()
    expected, _ = problem.expected(500.0)
    assert np.all(np.isfinite(problem.attend(500.0)))
    tolerances.assert_rows_close(problem.attend(500.0), expected, 1e-3)


@both_targets([LARGE[0], LARGE[3]], [SHAPES[5]])
def test_results_do_not_depend_on_the_threads_or_the_heads(target, to, host, rng, shape):
    problem = Problem(rng, shape, target, to, host).encoded()
    first = problem.attend(0.01), problem.scores(0.01)
    with numkv.num_threads(1):
        assert np.array_equal(problem.attend(0.01), first[0])
        assert np.array_equal(problem.scores(0.01), first[1])
    if shape.heads > 1:
        problem.q[:, : shape.group] = 0
        assert np.array_equal(problem.attend(0.01)[:, shape.group :], first[0][:, shape.group :])


# ---------------------------------------------------------------- several queries, windows, caps, other bits of values


def unit_problem(rng, shape, target, to, host, kind="fp32"):
    """Vectors of one size, so that many tokens count."""
    problem = Problem(rng, shape, target, to, host, kind)
    sizes = np.linalg.norm(problem.rows.astype(np.float64), axis=-1, keepdims=True)
    problem.rows = naive.round_to(problem.rows.astype(np.float64) / sizes, kind)
    problem.by_head = np.swapaxes(problem.rows.astype(np.float64), 1, 2)
    return problem.encoded()


#: Queries of a group that is no multiple of four, more rows than an item takes, values of other widths, of every table.
SEVERAL = [
    Shape(24, 4, 0, heads=2, group=3, tokens=19, queries=7, begin=3),
    Shape(33, 4, 40, group=9, tokens=5, begin=1, queries=5),
    Shape(8, 4, 16, tokens=21, queries=11),
    Shape(13, 4, 0, heads=2, group=2, tokens=18, queries=2, v_bits=3),
]
MANY = [
    Shape(64, 4, 0, heads=2, group=4, tokens=1300, begin=5, queries=40, v_bits=3),
    Shape(32, 4, 9, group=2, tokens=2100),
]
WINDOWS = [
    {},
    {"window_left": 0},
    {"window_left": 4, "cap": 0.7},
    {"window_left": 10**6, "cap": 30.0},
]


#: On CUDA all shapes without a window, those that the simulator does sooner with one.
OPTIONS = [
    *(("cpu", shape, options) for shape in SEVERAL + MANY for options in WINDOWS),
    *(("cuda", shape, {}) for shape in SEVERAL),
    *(("cuda", shape, options) for shape in SEVERAL[2:] for options in WINDOWS[1:]),
]


@pytest.mark.parametrize(("target", "shape", "options"), OPTIONS, indirect=["target"], ids=str)
def test_options(target, to, host, rng, shape, options):
    problem = unit_problem(rng, shape, target, to, host)
    scale = 0.3 if shape.projections else 2.0
    check_encoded(problem)
    expected = problem.expected_scores(scale, **options)
    assert_scores_close(problem.scores(scale, **options), expected, problem, scale)
    out, lse = problem.attend_lse(scale, **options)
    wanted, wanted_lse = problem.expected(scale, **options)
    tolerances.assert_rows_close(out, wanted, 3e-5)
    assert np.allclose(lse, wanted_lse, rtol=0, atol=2e-5)
    assert np.array_equal(problem.attend(scale, **options), out)


@both_targets(SEVERAL + MANY, SEVERAL[3:])
def test_a_query_does_not_depend_on_the_others(target, to, host, rng, shape, monkeypatch):
    """Bit for bit: alone at its own time, beside all others, and where there is room for a few at once."""
    problem = unit_problem(rng, shape, target, to, host)
    several = {window: problem.attend_lse(0.3, window_left=window) for window in (-1, 6)}
    compress = importlib.import_module(f"numkv.kernels.{target}.compress")
    monkeypatch.setattr(compress, "MOST_PARTS", 3 * (shape.dim + 2) * shape.heads * shape.group)
    again = {window: problem.attend_lse(0.3, window_left=window) for window in (-1, 6)}
    q = problem.q
    for i in sorted({0, shape.queries // 2, shape.queries - 1}):
        problem.q = q[i : i + 1]
        problem.shape = dataclasses.replace(shape, tokens=shape.tokens - shape.queries + i + 1)
        for window, found in several.items():
            alone = problem.attend_lse(0.3, window_left=window)
            for a, b, c in zip(alone, found, again[window], strict=True):
                assert a[0].tobytes() == b[i].tobytes() == c[i].tobytes()


@pytest.mark.parametrize("window_left", [-1, 3])
def test_what_a_query_does_not_see_may_be_anything(target, to, host, rng, window_left):
    """Scales and residuals that are NaN, of later tokens and of those before the window."""
    problem = unit_problem(rng, SEVERAL[2], target, to, host)
    clean = (
        problem.attend_lse(0.3, window_left=window_left),
        problem.scores(0.3, window_left=window_left),
    )
    spoiled = [problem.range.stop - 1] + [problem.range.start] * (window_left >= 0)
    for part in (problem.k[1], problem.k[3], problem.v[1]):
        values = host(part).copy()
        values[:, spoiled] = np.nan
        part[:] = to(values)
    out, lse = problem.attend_lse(0.3, window_left=window_left)
    scores = problem.scores(0.3, window_left=window_left)
    sees = np.zeros(len(out), bool)
    sees[-1] = True
    assert np.array_equal(out[~sees], clean[0][0][~sees])
    assert np.array_equal(lse[~sees], clean[0][1][~sees])
    assert np.isnan(out[sees]).all()
    assert np.isnan(lse[sees]).all()
    hidden = clean[1] == -np.inf
    assert np.array_equal(scores[hidden], clean[1][hidden])
