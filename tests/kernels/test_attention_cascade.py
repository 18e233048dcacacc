"""`cascade_attention`, and steps with `shared_len`: a prefix that is read once for all, merged with the rest."""

import naive
import numpy as np
import pytest
import tolerances
from layer_lists import paged_kv_cache

import numkv
from numkv.errors import DimensionMismatch

BLOCK = 8


class Problem:
    """Sequences that begin with the same blocks; `lens` are beside the shared tokens."""

    def __init__(self, rng, heads, lens, new, shared, kind="fp32", dim=16):
        self.kind, self.shared, self.new = kind, shared, new
        self.lens = np.array([shared + n for n in lens])
        self.starts = np.concatenate([[0], np.cumsum(new)])
        most = -(-int(self.lens.max()) // BLOCK)
        prefix = -(-shared // BLOCK)
        own = [prefix + i * (most - prefix) + np.arange(most - prefix) for i in range(len(lens))]
        self.table = np.array([[*range(prefix), *ids] for ids in own], np.int32)
        blocks = int(self.table.max()) + 1
        self.table = rng.permutation(blocks).astype(np.int32)[self.table]
        shape = (blocks, heads[1], BLOCK, dim)
        self.q = rng.standard_normal((int(self.starts[-1]), heads[0], dim)).astype(np.float32)
        rows = [rng.standard_normal(shape).astype(np.float32) for _ in range(2)]
        self.scales = {}
        if kind in naive.CODES:
            codes = [naive.quantise(x, kind) for x in rows]
            self.pools = [c[0] for c in codes]
            self.values = [naive.dequantise(*c) for c in codes]
            self.scales = {"k_scale": codes[0][1], "v_scale": codes[1][1]}
        else:
            self.pools = [x.astype(naive.DTYPES[kind]) for x in rows]
            self.values = [x.astype(np.float64) for x in self.pools]

    def run(self, to, host, seqs=None, call=None, **options):
        """The result for some of the sequences."""
        seqs = range(len(self.lens)) if seqs is None else seqs
        tokens = np.concatenate([np.arange(*self.starts[s : s + 2]) for s in seqs])
        new = [self.new[s] for s in seqs]
        starts = np.concatenate([[0], np.cumsum(new)])
        arrays = [self.q[tokens], *self.pools, self.table[list(seqs)], self.lens[list(seqs)]]
        scales = {n: to(x) for n, x in self.scales.items()}
        arrays = [to(np.ascontiguousarray(x)) for x in arrays]
        found = numkv.cascade_attention(
            *arrays, self.shared, to(starts), return_lse=True, **scales, **options
        )
        return [host(x) for x in found]

    def expect(self, **options):
        k, v = (
            np.stack(
                [x[ids].swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[3]) for ids in self.table]
            )
            for x in self.values
        )
        return naive.attention_to_seen(self.q, k, v, self.lens, self.starts, **options)


CASES = [
    ((4, 2), (1, 9, 30), (1, 1, 1), 40), ((4, 4), (5, 3, 17), (5, 2, 1), 16), ((3, 1), (2, 4), (2, 0), 9),
]  # fmt: skip
ON_CPU = [
    *CASES, ((8, 2), tuple(range(1, 20)), (1,) * 19, 1100), ((12, 1), (9, 70, 3), (9, 1, 2), 130),
    ((7, 1), (3, 4), (3, 1), 64), ((17, 1), (3, 4), (3, 1), 64), ((10, 2), (1, 2, 3), (1, 1, 1), 2100),
]  # fmt: skip
ALL_ON_CPU = [("cpu", case, kind) for case in ON_CPU for kind in ("fp32", "int8")]


@pytest.mark.parametrize(
    ("target", "case", "kind"),
    [*ALL_ON_CPU, *(("cuda", case, "fp32") for case in CASES), ("cuda", CASES[0], "int8")],
    indirect=["target"],
)
def test_it_is_attention_to_all_tokens(target, to, host, rng, case, kind):
    problem = Problem(rng, *case, kind)
    bound = tolerances.attention(kind, "fp32")
    out, lse = problem.run(to, host)
    want, want_lse = problem.expect()
    tolerances.assert_rows_close(out, want, 2 * bound)
    tolerances.assert_lse_close(lse, want_lse, max(bound, tolerances.LSE))


@pytest.mark.parametrize(
    ("target", "case", "kind"),
    [*ALL_ON_CPU, ("cuda", CASES[2], "fp32"), ("cuda", CASES[0], "int8")],
    indirect=["target"],
)
def test_who_shares_does_not_matter(target, to, host, rng, case, kind):
    """Bit for bit: each alone, in other orders, in pairs."""
    problem = Problem(rng, *case, kind)
    whole = problem.run(to, host)
    n = len(problem.lens)
    some = [[s] for s in range(n)] + [list(range(n))[::-1], [n - 1, 0]]
    for seqs in some if target == "cpu" else some[-2:]:
        tokens = np.concatenate([np.arange(*problem.starts[s : s + 2]) for s in seqs])
        for of_all, of_some in zip(whole, problem.run(to, host, seqs), strict=True):
            np.testing.assert_array_equal(of_all[tokens], of_some)


@pytest.mark.parametrize("kind", ["bf16", "fp32", "int8"])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_any_number_that_share_gives_the_same(rng, group, kind):
    """Chunks are short: from one that is filled up to several items of several chunks."""
    many = 70 // group
    problem = Problem(rng, (2 * group, 2), (3,) * many, (1,) * many, 200, kind)
    whole = problem.run(np.asarray, np.asarray)
    for n in {1, 2, 16 // group + 1, 32 // group, many - 1}:
        for of_all, of_some in zip(
            whole, problem.run(np.asarray, np.asarray, range(n)), strict=True
        ):
            np.testing.assert_array_equal(of_all[:n], of_some)


def test_options_and_other_dtypes(target, to, host, rng):
    problem = Problem(rng, *CASES[0])
    sinks = rng.standard_normal(4).astype(np.float32)
    options = {"sm_scale": 0.4, "logits_soft_cap": 2.0}
    out, lse = problem.run(to, host, sinks=to(sinks), **options)
    want, want_lse = problem.expect(sinks=sinks, **options)
    tolerances.assert_rows_close(out, want, 2e-5)
    tolerances.assert_lse_close(lse, want_lse)
    problem.q = problem.q.astype(naive.DTYPES["bf16"])
    out, _ = problem.run(to, host)
    assert out.dtype == problem.q.dtype
    tolerances.assert_rows_close(out, problem.expect()[0], tolerances.attention("fp32", "bf16"))


def test_what_is_refused(rng):
    problem = Problem(rng, *CASES[0])
    same = (lambda x: x, lambda x: x)
    problem.shared = 41
    with pytest.raises(IndexError, match="shared_len"):
        problem.run(*same)
    problem.shared = 40
    problem.table[1, 2] = problem.table[1, 3]
    with pytest.raises(ValueError, match="block_table"):
        problem.run(*same)
    with pytest.raises(DimensionMismatch, match="shared_len"):
        numkv.cascade_attention(problem.q, *problem.pools, problem.table, problem.lens, -1)
    with pytest.raises(TypeError, match="window_left"):
        problem.run(*same, window_left=3)


def test_steps_share_what_their_sequences_have_in_common(target, to, host, rng):
    """Two families of sequences, forked from two prompts, and one that is alone; one layer has a window."""
    cache = paged_kv_cache(
        2, 2, 16, num_blocks=64, block_size=4, windows=[-1, 5], kind="fp32", target=target
    )

    def put(seqs, n):
        step = cache.reserve(seqs, n)
        for layer in range(2):
            k, v = (
                rng.standard_normal((step.num_tokens, 2, 16)).astype(np.float32) for _ in range(2)
            )
            step.append(layer, to(k), to(v))
        return step

    prompts = [cache.add() for _ in range(3)]
    cache.commit(put(prompts, 13))
    seqs = [prompts[0], cache.fork(prompts[0]), prompts[1], cache.fork(prompts[0]), prompts[2]]
    cache.commit(put(seqs, [1, 2, 3, 1, 2]))
    new = [1, 2, 1, 1, 0]
    step = put(seqs, new)
    q = rng.standard_normal((5, 4, 16)).astype(np.float32)
    for layer in range(2):
        want = host(step.attention(layer, to(q)))
        tolerances.assert_rows_close(host(step.attention(layer, to(q), shared_len=12)), want, 2e-5)
    with pytest.raises(IndexError, match="shared_len"):
        step.attention(0, to(q), shared_len=15)
    for wrong in (np.array([4, 8]), 1.5, None, "4"):
        with pytest.raises(TypeError, match="`shared_len`"):
            step.attention(0, to(q), shared_len=wrong)
    cache.rollback(step)
