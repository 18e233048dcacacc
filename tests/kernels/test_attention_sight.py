"""Who sees what: `causal`, `ranges`, masks of trees and ALiBi, in attention over contiguous and paged caches.

What no query sees holds NaN. The oracle is `naive.attention_to_seen`, which walks a tree by its parents.
"""

from dataclasses import dataclass

import naive
import numpy as np
import pytest
import tolerances

import numkv
from numkv.errors import DimensionMismatch, NotSupported, UnsupportedDType


@dataclass(frozen=True)
class Shape:
    """Sizes: of each sequence tokens and queries."""

    lens: tuple[int, ...]
    new: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)

    def __str__(self):
        lens = ".".join(f"{n}q{t}" for n, t in zip(self.lens, self.new, strict=True))
        return f"{lens}-h{self.heads[0]}.{self.heads[1]}"


SMALL = [Shape((9, 3, 40), (5, 3, 1)), Shape((40, 4), (34, 2), (1, 1), (8, 16))]
# More than a split, trees of more than a word, many query rows; a group of many heads.
LARGE = [
    *SMALL,
    Shape((1300, 80, 200), (9, 40, 1), (8, 2), (32, 32)),
    Shape((90, 300), (80, 3), (12, 1), (40, 64)),
]
# On the CPU each kind is a kernel of its own, which takes seconds to compile. On CUDA what is masked and biased are
# scores, whatever kind they come from; float64 has scores of its own.
ALWAYS = ("fp32", "int8")
CASES = [
    pytest.param("cpu", shape, kind, marks=[] if kind in ALWAYS else pytest.mark.nightly)
    for shape in LARGE
    for kind in ("fp32", "int8", "int4", "bf16", "fp64")
]
CASES += [("cuda", SMALL[0], "fp32"), ("cuda", SMALL[0], "fp64"), ("cuda", SMALL[1], "int8")]
every_case = pytest.mark.parametrize(
    ("target", "shape", "kind"), CASES, indirect=["target"], ids=str
)


class Problem:
    """Arrays of a problem; `k` and `v` are as stored, with scales where they hold codes."""

    def __init__(self, rng, shape, kind="fp32"):
        self.shape, self.kind = shape, kind
        self.lens, self.starts = np.array(shape.lens), np.concatenate([[0], np.cumsum(shape.new)])
        capacity, tokens = max(shape.lens) + 5, int(self.starts[-1])
        self.q = rng.standard_normal((tokens, shape.heads[0], shape.dims[0])).astype(np.float32)
        sizes = [(len(shape.lens), shape.heads[1], capacity, dim) for dim in shape.dims]
        self.k, self.v = (rng.standard_normal(size).astype(np.float32) for size in sizes)
        self.parents = np.concatenate([[rng.integers(-1, i) for i in range(n)] for n in shape.new])
        self.parents = self.parents.astype(int)
        self.slopes = (2.0 ** -np.arange(1.0, 1 + shape.heads[0])).astype(np.float32)
        self.sinks = rng.standard_normal(shape.heads[0]).astype(np.float32)

    def spans(self, rng):
        """Ranges of queries: some empty, some beyond the ends."""
        return np.sort(rng.integers(-6, max(self.shape.lens) + 9, (len(self.q), 2)), axis=1)

    def bits(self, words=None):
        words = -(-max(self.shape.new) // 32) if words is None else words
        return naive.packed_bits(self.parents, self.starts, words)

    def stored(self):
        """K, V and their scales as stored, and their values; NaN in what lies past each length."""
        if self.kind in naive.CODES:
            rows = [naive.quantise(x, self.kind) for x in (self.k, self.v)]
            values = [naive.dequantise(*pair) for pair in rows]
            for pair, n in ((pair, n) for pair in rows for n in range(len(self.lens))):
                pair[1][n, :, self.lens[n] :] = np.nan
            return [rows[0][0], rows[1][0]], {"k_scale": rows[0][1], "v_scale": rows[1][1]}, values
        rows = [x.astype(naive.DTYPES[self.kind]) for x in (self.k, self.v)]
        for x, n in ((x, n) for x in rows for n in range(len(self.lens))):
            x[n, :, self.lens[n] :] = np.nan
        return rows, {}, [np.nan_to_num(x.astype(np.float64)) for x in rows]

    def check(self, to, host, oracle, **options):
        """Compare with the oracle, which is given `oracle` in place of what it has no word for."""
        rows, scales, values = self.stored()
        given = {
            n: to(x) if isinstance(x, np.ndarray) else x for n, x in (options | scales).items()
        }
        arrays = map(to, (self.q, *rows, self.lens, self.starts))
        out, lse = map(host, numkv.prefill_attention(*arrays, return_lse=True, **given))
        known = ("causal", "ranges", "window_left", "sinks", "logits_soft_cap", "sm_scale")
        oracle = {n: x for n, x in options.items() if n in known} | oracle
        want, want_lse = naive.attention_to_seen(
            self.q, *values, self.lens, self.starts, **oracle
        )  # fmt: skip
        bound = tolerances.attention(self.kind, "fp32")
        # Biases far from 0, of which float32 rounds the last digits.
        if "slopes" in oracle and "ranges" in options:
            bound += 2.0**-23 * float(self.slopes.max()) * max(self.shape.lens)
        summed = naive.attention_to_seen(
            self.q, values[0], np.abs(values[1]), self.lens, self.starts, **oracle
        )[0]
        tolerances.assert_rows_close(out, want, bound, summed)
        tolerances.assert_lse_close(lse, want_lse, max(bound, tolerances.LSE))
        return out, lse


def both_targets(shapes):
    return pytest.mark.parametrize(("target", "shape"), shapes, indirect=["target"], ids=str)


@every_case
def test_not_causal(target, to, host, rng, shape, kind):
    problem = Problem(rng, shape, kind)
    problem.check(to, host, {}, causal=False)
    problem.check(to, host, {}, causal=False, window_left=7, sinks=problem.sinks)


@every_case
def test_ranges(target, to, host, rng, shape, kind):
    problem = Problem(rng, shape, kind)
    problem.check(to, host, {}, ranges=problem.spans(rng), sinks=problem.sinks)
    problem.check(to, host, {}, ranges=problem.spans(rng).astype(np.int32), logits_soft_cap=3.0)


@every_case
def test_alibi(target, to, host, rng, shape, kind):
    """With windows, caps, sinks, ranges and without causality; LSEs as well."""
    problem = Problem(rng, shape, kind)
    slopes = problem.slopes
    for options in (
        {}, {"window_left": 6, "sinks": problem.sinks}, {"logits_soft_cap": 2.0}, {"causal": False},
        {"ranges": problem.spans(rng)},
    ):  # fmt: skip
        problem.check(to, host, {"slopes": slopes}, alibi_slopes=slopes, **options)


@every_case
def test_trees(target, to, host, rng, shape, kind):
    """Alone, with windows shorter and longer than paths, with biases that count along the path."""
    problem = Problem(rng, shape, kind)
    mask, parents = problem.bits(), {"parents": problem.parents}
    problem.check(to, host, parents, mask=mask)
    problem.check(to, host, parents, mask=mask, window_left=1, sinks=problem.sinks)
    problem.check(to, host, parents, mask=problem.bits(4).view(np.int32), window_left=30)
    slopes = problem.slopes
    problem.check(to, host, parents | {"slopes": slopes}, mask=mask, alibi_slopes=slopes)
    problem.check(
        to, host, parents | {"slopes": slopes}, mask=mask, alibi_slopes=slopes, window_left=4
    )


@both_targets([("cpu", SMALL[1]), ("cuda", SMALL[0])])
def test_a_tree_gives_each_path_what_it_has_alone(target, to, host, rng, shape):
    """Tokens of a path, appended alone, are seen causally: positions and windows are those of the path."""
    problem = Problem(rng, shape)
    rows, _, _ = problem.stored()
    options = {"window_left": 5, "alibi_slopes": to(problem.slopes)}
    arrays = [to(x) for x in (problem.q, *rows, problem.lens, problem.starts)]
    of_tree = host(numkv.prefill_attention(*arrays, mask=to(problem.bits()), **options))
    for s in range(len(shape.lens)):
        path, t = [], shape.new[s] - 1
        while t >= 0:
            path, t = [t, *path], problem.parents[problem.starts[s] + t]
        base = shape.lens[s] - shape.new[s]
        kept = [*range(base), *(base + t for t in path)]
        alone = [to(np.ascontiguousarray(x[s : s + 1, :, kept])) for x in rows]
        q = to(problem.q[problem.starts[s] + np.array(path)])
        lens, starts = to(np.array([len(kept)])), to(np.array([0, len(path)]))
        want = host(numkv.prefill_attention(q, *alone, lens, starts, **options))
        got = of_tree[problem.starts[s] + np.array(path)]
        tolerances.assert_rows_close(got, want, tolerances.attention("fp32", "fp32"))


@both_targets([("cpu", LARGE[2]), ("cpu", SMALL[0]), ("cuda", SMALL[0])])
@pytest.mark.parametrize("side", ["k", "v"])
def test_nan_in_a_masked_token_reaches_those_who_see_it_only(target, to, host, rng, shape, side):
    problem = Problem(rng, shape)
    s = 0
    first, base = problem.starts[s], shape.lens[s] - shape.new[s]
    problem.parents[first : first + 4] = [-1, -1, 0, 1]
    mask, parents = problem.bits(), {"parents": problem.parents}
    want, _ = problem.check(to, host, parents, mask=mask)
    getattr(problem, side)[s, :, base + 1] = np.nan
    rows, _, _ = problem.stored()
    arrays = map(to, (problem.q, *rows, problem.lens, problem.starts))
    out = host(numkv.prefill_attention(*arrays, mask=to(mask)))
    bad = np.isnan(out).any(axis=(1, 2))
    sees = (mask[:, 0] >> 1 & 1).astype(bool)
    sees[problem.starts[1] :] = False
    np.testing.assert_array_equal(bad, sees)
    assert 0 < sees.sum() < len(sees)
    np.testing.assert_array_equal(out[~bad], want[~bad])


@both_targets([("cpu", LARGE[2]), ("cuda", SMALL[0])])
def test_sequences_are_alone_with_masks_and_biases(target, to, host, rng, shape):
    """Bit for bit, whatever the batch."""
    problem = Problem(rng, shape)
    rows, _, _ = problem.stored()
    mask, slopes = problem.bits(), to(problem.slopes)

    def attend(s, e):
        first, last = problem.starts[s], problem.starts[e]
        lens, starts = problem.lens[s:e], problem.starts[s : e + 1] - first
        arrays = [problem.q[first:last], *(x[s:e] for x in rows), lens, starts]
        given = {"mask": to(np.ascontiguousarray(mask[first:last])), "alibi_slopes": slopes}
        found = numkv.prefill_attention(
            *(to(np.ascontiguousarray(x)) for x in arrays), return_lse=True, **given
        )
        return [host(x) for x in found]

    whole = attend(0, len(shape.lens))
    for s in range(len(shape.lens)):
        for of_all, of_one in zip(whole, attend(s, s + 1), strict=True):
            part = of_all[problem.starts[s] : problem.starts[s + 1]]
            np.testing.assert_array_equal(part, of_one)


def test_decoding_and_pages(target, to, host, rng):
    """The other functions, with the same options."""
    shape = Shape((9, 21), (1, 1))
    problem = Problem(rng, shape)
    rows, _, values = problem.stored()
    spans, slopes = np.array([[2, 5], [0, 30]]), problem.slopes
    want = naive.attention_to_seen(
        problem.q, *values, problem.lens, problem.starts, ranges=spans, slopes=slopes
    )
    given = {"ranges": to(spans), "alibi_slopes": to(slopes), "return_lse": True}
    found = [numkv.decode_attention(*map(to, (problem.q, *rows, problem.lens)), **given)]
    # Pages of 13 tokens: blocks of the contiguous cache, cut in two, in another order.
    pages = [np.ascontiguousarray(x.reshape(2, 2, 2, 13, -1).swapaxes(1, 2)) for x in rows]
    pools = [np.ascontiguousarray(x.reshape(4, 2, 13, -1)[[3, 0, 2, 1]]) for x in pages]
    table = np.array([[1, 3], [2, 0]], np.int32)
    arrays = [to(x) for x in (problem.q, *pools, table, problem.lens)]
    found.append(numkv.paged_decode_attention(*arrays, **given))
    found.append(numkv.paged_prefill_attention(*arrays, to(problem.starts), **given))
    for out, lse in found:
        tolerances.assert_rows_close(host(out), want[0], 1e-5)
        tolerances.assert_lse_close(host(lse), want[1])


def test_cross_attention_takes_more_queries_than_tokens(target, to, host, rng):
    shape = Shape((3, 0, 6), (5, 2, 9))
    problem = Problem(rng, shape)
    problem.check(to, host, {}, causal=False)
    rows, _, _ = problem.stored()
    arrays = [to(x) for x in (problem.q, *rows, problem.lens, problem.starts)]
    with pytest.raises(DimensionMismatch, match="at most as many queries"):
        numkv.prefill_attention(*arrays, validate=True)


WRONG = [
    (TypeError, "unknown", {"windows": 3}),
    (TypeError, "causal", {"causal": "no"}),
    (DimensionMismatch, "ranges", {"ranges": np.zeros((2, 2), np.int64)}),
    (UnsupportedDType, "ranges", {"ranges": np.zeros((9, 2), np.float32)}),
    (NotSupported, "window_left", {"ranges": np.zeros((9, 2), np.int64), "window_left": 3}),
    (NotSupported, "mask", {"ranges": np.zeros((9, 2), np.int64), "mask": np.zeros((9, 1), np.uint32)}),
    (UnsupportedDType, "mask", {"mask": np.zeros((9, 1), bool)}),
    (DimensionMismatch, "mask", {"mask": np.zeros((8, 1), np.uint32)}),
    (DimensionMismatch, "mask", {"mask": np.zeros((9, 0), np.uint32)}),
    (DimensionMismatch, "alibi_slopes", {"alibi_slopes": np.zeros(3, np.float32)}),
    (ValueError, "alibi_slopes", {"alibi_slopes": np.full(4, np.nan, np.float32)}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "name", "options"), WRONG)
def test_what_is_refused(target, to, rng, error, name, options):
    problem = Problem(rng, SMALL[0])
    rows, _, _ = problem.stored()
    arrays = [to(x) for x in (problem.q, *rows, problem.lens, problem.starts)]
    given = {n: to(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    with pytest.raises(error, match=name):
        numkv.prefill_attention(*arrays, validate=True, **given)


def test_calls_without_queries_are_checked_too(target, to, rng):
    k, q = (to(rng.standard_normal(x).astype(np.float32)) for x in ((2, 2, 3, 8), (0, 4, 8)))
    arrays = q, k, k, to(np.array([3, 0])), to(np.zeros(3, np.int64))
    fine = {
        "ranges": np.empty((0, 2), np.int64),
        "mask": np.empty((0, 0), np.uint32),  # of an empty tree
        "alibi_slopes": np.ones(4, np.float32),
    }
    for name, x in fine.items():
        assert numkv.prefill_attention(*arrays, **{name: to(x)}).shape == (0, 4, 8)
    for error, name, wrong in (
        (DimensionMismatch, "ranges", np.empty((0, 3), np.int64)),
        (UnsupportedDType, "ranges", "x"),
        (DimensionMismatch, "mask", np.empty((1, 1), np.uint32)),
        (UnsupportedDType, "mask", np.empty((0, 1), bool)),
        (DimensionMismatch, "alibi_slopes", np.ones(3, np.float32)),
        (ValueError, "alibi_slopes", np.full(4, np.nan, np.float32)),
    ):
        given = to(wrong) if isinstance(wrong, np.ndarray) else wrong
        with pytest.raises(error, match=name):
            numkv.prefill_attention(*arrays, validate=True, **{name: given})


def test_a_mask_with_too_few_words_is_refused(target, to, rng):
    problem = Problem(rng, SMALL[1])
    rows, _, _ = problem.stored()
    arrays = [to(x) for x in (problem.q, *rows, problem.lens, problem.starts)]
    with pytest.raises(DimensionMismatch, match="2 words"):
        numkv.prefill_attention(
            *arrays, mask=to(np.zeros((len(problem.q), 1), np.uint32)), validate=True
        )


def test_tree_mask_is_that_of_parents(rng):
    problem = Problem(rng, LARGE[2])
    want = naive.packed_bits(problem.parents, problem.starts, 2)
    np.testing.assert_array_equal(numkv.tree_mask(problem.parents, problem.starts), want)
    assert numkv.tree_mask([]).shape == (0, 1)
    for wrong in ([0], [-2], [-1, 1], [-1, 2, 0]):
        with pytest.raises(IndexError, match="parents"):
            numkv.tree_mask(wrong)
    with pytest.raises(DimensionMismatch, match="cu_seqlens_q"):
        numkv.tree_mask([-1, 0], [0, 1])
