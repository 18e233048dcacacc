"""Attention with a range for each query, over tables of slots: what multi-sequence caches attend with.

Lists of tokens lie in shuffled slots. Every slot that nobody sees holds NaN, and what no query of a sequence needs of
its table is no slot at all.
"""

from dataclasses import dataclass, replace

import naive
import numpy as np
import pytest
import tolerances
from kinds import attending
from paged_problems import GARBAGE

from numkv import kinds, targets
from numkv.attention.attend import attend
from numkv.attention.options import check_options
from numkv.storage.buffer import Buffer
from numkv.storage.pool import Pool


@dataclass(frozen=True)
class Shape:
    """Sizes of a problem: for each sequence the length of its list and the ranges of its queries."""

    lists: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    num_q_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 8
    head_dim_v: int = 8
    block_size: int = 4
    by_slot: bool = True

    def __str__(self) -> str:
        lists = ".".join(f"{n}q{len(ranges)}" for n, ranges in self.lists)
        places = "slots" if self.by_slot else f"blocks{self.block_size}"
        heads = f"h{self.num_q_heads}.{self.num_kv_heads}"
        return f"{heads}-d{self.head_dim}v{self.head_dim_v}-{lists}-{places}"


@dataclass(frozen=True)
class Problem:
    """The arrays of one problem, in NumPy; `k` and `v` are pools, with scales where they hold codes."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_scale: np.ndarray | None
    v_scale: np.ndarray | None
    slots: list[np.ndarray]  # of the tokens of each sequence
    table: np.ndarray
    seq_lens: np.ndarray
    q_starts: np.ndarray
    ranges: np.ndarray
    by_slot: bool
    kinds: tuple[str, str, str]

    def run(self, target, to, host, **options):
        """What numkv says: out and lse, in NumPy."""
        where = targets.get(target)
        no_scale = np.empty((0, 0, 0), np.float32)
        sides = zip((self.k, self.v), (self.k_scale, self.v_scale), self.kinds[1:], strict=True)
        pool = Pool(
            *(
                Buffer(
                    where,
                    where.words(to(words)),
                    to(no_scale if scale is None else scale),
                    kinds.kind(kind),
                )
                for words, scale, kind in sides
            )
        )
        arrays = (self.table, self.q, self.seq_lens, self.q_starts)
        results = attend(
            pool, *map(to, arrays), check_options(options, return_lse=True),
            ranges=to(self.ranges), by_slot=self.by_slot,
        )  # fmt: skip
        return tuple(map(host, results))

    def expect(self, *, sm_scale=None, logits_soft_cap=0.0, sinks=None):
        """What the oracle says."""
        k, v = (self._values(x, s) for x, s in ((self.k, self.k_scale), (self.v, self.v_scale)))
        num_tokens, num_q_heads, dim = self.q.shape
        group = num_q_heads // k.shape[1]
        scale = 1 / np.sqrt(dim) if sm_scale is None else sm_scale
        out = np.zeros((num_tokens, num_q_heads, v.shape[2]))
        lse = np.zeros((num_tokens, num_q_heads))
        for s, slots in enumerate(self.slots):
            for t in range(self.q_starts[s], self.q_starts[s + 1]):
                low, high = np.clip(self.ranges[t], 0, len(slots))
                seen = slots[low : max(low, high)]
                for h in range(num_q_heads):
                    sink = None if sinks is None else float(sinks[h])
                    row = self.q[t, h].astype(np.float64)
                    out[t, h], lse[t, h] = naive.attention_row(
                        row, k[seen, h // group], v[seen, h // group], scale, logits_soft_cap, sink
                    )
        return out, lse

    @staticmethod
    def _values(pool, scale):
        """Float64 rows by slot, ``(slots, heads, dim)``."""
        values = pool.astype(np.float64) if scale is None else naive.int8_dequantise(pool, scale)
        return values.swapaxes(1, 2).reshape(-1, pool.shape[1], pool.shape[3])

    def check(self, target, to, host, **options):
        """Run and compare output and lse; returns both."""
        moved = {n: to(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
        out, lse = self.run(target, to, host, **moved)
        want, want_lse = self.expect(**options)
        assert out.dtype == naive.DTYPES[self.kinds[0]]
        bound = tolerances.attention(tolerances.widest(*self.kinds), self.kinds[0])
        tolerances.assert_rows_close(out, want, bound)
        tolerances.assert_lse_close(lse, want_lse, max(bound, tolerances.LSE))
        return out, lse

    def only(self, s):
        """The problem of sequence `s` alone, in the same pools."""
        begin, end = self.q_starts[s : s + 2]
        return replace(
            self,
            q=self.q[begin:end],
            slots=self.slots[s : s + 1],
            table=self.table[s : s + 1],
            seq_lens=self.seq_lens[s : s + 1],
            q_starts=np.array([0, end - begin]),
            ranges=self.ranges[begin:end],
        )


def make(rng, shape, q_kind="fp32", k_kind="fp32", v_kind=None, spare=3):
    """Draw a problem; `spare` blocks belong to nobody."""
    v_kind = k_kind if v_kind is None else v_kind
    lens = np.array([n for n, _ in shape.lists])
    unit = 1 if shape.by_slot else shape.block_size  # tokens of an entry of the table
    entries = -(-lens // unit)
    num_blocks = -(-int(entries.sum()) * unit // shape.block_size) + spare
    order = rng.permutation(num_blocks * shape.block_size // unit)
    table = rng.choice(np.array(GARBAGE, np.int32), (len(lens), max(entries, default=0)))
    seen, slots = np.zeros(num_blocks * shape.block_size, bool), []
    for s, (n, ranges) in enumerate(shape.lists):
        mine, order = order[: entries[s]], order[entries[s] :]
        slots.append((mine[:, None] * unit + np.arange(unit)).reshape(-1)[:n])
        full = [r for r in ranges if r[0] < r[1]]
        for low, high in full:
            seen[slots[s][low:high]] = True
        if full:
            first, last = min(low for low, _ in full) // unit, max(high for _, high in full) - 1
            table[s, first : last // unit + 1] = mine[first : last // unit + 1]
    q_starts = np.concatenate([[0], np.cumsum([len(ranges) for _, ranges in shape.lists])])
    ranges = np.array([r for _, ranges in shape.lists for r in ranges], np.int64).reshape(-1, 2)
    pools = []
    for kind, dim in ((k_kind, shape.head_dim), (v_kind, shape.head_dim_v)):
        rows = rng.standard_normal((num_blocks, shape.num_kv_heads, shape.block_size, dim))
        hidden = np.broadcast_to(
            ~seen.reshape(num_blocks, 1, -1), (num_blocks, shape.num_kv_heads, shape.block_size)
        )
        scale = None
        if kind == "int8":
            rows, scale = naive.int8_quantise(rows)
            scale[hidden] = np.nan
        else:
            rows[hidden] = np.nan
            rows = naive.round_to(rows, kind)
        pools.append((rows, scale))
    q = rng.standard_normal((len(ranges), shape.num_q_heads, shape.head_dim))
    (k, k_scale), (v, v_scale) = pools
    return Problem(
        naive.round_to(q, q_kind), k, v, k_scale, v_scale, slots, table, lens.astype(np.int64),
        q_starts.astype(np.int64), ranges, shape.by_slot, (q_kind, k_kind, v_kind),
    )  # fmt: skip


def both_targets(cpu, cuda):
    """Parameters ``target, shape``: large shapes on the CPU, small ones on CUDA."""
    return pytest.mark.parametrize(
        ("target", "shape"),
        [("cpu", shape) for shape in cpu] + [("cuda", shape) for shape in cuda],
        indirect=["target"],
        ids=str,
    )


# Ranges: whole, empty in the middle and at both ends, single tokens, overlapping, apart, in any order.
MIXED = ((0, 21), (5, 5), (7, 8), (3, 12), (10, 19), (0, 1), (20, 21), (21, 21), (0, 0), (16, 20))
SMALL = [
    Shape(((9, ((0, 9),)), (5, ((1, 4),)), (7, ((6, 7),)))),
    Shape(((21, MIXED),), num_q_heads=4, num_kv_heads=2, head_dim=13, head_dim_v=5),
    Shape(
        ((6, ((0, 2), (4, 6))), (0, ()), (11, ((3, 3),)), (8, ()), (0, ((0, 0),)), (4, ((0, 4),)))
    ),
    Shape(((10, ((2, 9), (0, 5), (5, 10))),), num_q_heads=3, head_dim=40, block_size=16),
    Shape(((17, ((0, 17), (4, 11))), (6, ((1, 5),))), num_q_heads=4, num_kv_heads=2, by_slot=False),
    Shape(((21, MIXED), (3, ((0, 3),))), block_size=1, head_dim_v=16),
    Shape(((5, ((0, 0),)), (3, ((2, 1), (3, 3))))),
]
# On CUDA: more tokens than a split has in the simulator.
SPLIT = [
    Shape(((200, ((0, 200),)), (70, ((3, 66),)), (90, ((80, 80),)))),
    Shape(((230, ((150, 228), (20, 30), (40, 40), (25, 180))),), num_q_heads=4, num_kv_heads=2),
    Shape(((140, tuple((10 * i, 10 * i + 50) for i in range(9))),)),  # too many queries to split
    Shape(((150, ((1, 149),)), (75, ((9, 75), (0, 3)))), block_size=5, by_slot=False),
]
LARGE = [
    Shape(((300, ((17, 299), (0, 300), (64, 65))), (40, ((8, 40),))), 8, 2, 64, 64, 16),
    Shape(((129, tuple((i, 129 - i) for i in range(60))), (33, ((1, 33),))), 6, 3, 40, 24, 32),
    Shape(((5000, ((13, 4990),)), (2100, ((0, 2100),)), (4, ((0, 4),))), 2, 1, 32, 32, 64),
    Shape(((6000, ((4000, 6000), (5, 300), (77, 77), (2000, 5500))),), 4, 1, 24, 40, 5000),
    Shape(((4100, ((50, 4100), (49, 4099))), (3000, ((2999, 3000),))), 4, 2, 16, 16, 16, False),
]


@both_targets(LARGE + SMALL, SMALL + SPLIT)
def test_every_shape(target, to, host, rng, shape):
    make(rng, shape).check(target, to, host)


# Kinds of q, K and V: each of them everywhere, and float64 sums for any reason.
KINDS = [
    ("fp16", "fp16", "fp16"), ("bf16", "bf16", "bf16"), ("fp32", "int8", "int8"),
    ("bf16", "int8", "fp16"), ("fp16", "fp32", "int8"), ("fp64", "fp64", "fp64"),
    ("fp64", "int8", "int8"), ("fp64", "int8", "bf16"), ("fp32", "fp64", "fp32"),
]  # fmt: skip


@both_targets([LARGE[0], SMALL[1], LARGE[3]], [SMALL[1], SMALL[3]])
@pytest.mark.parametrize(("q_kind", "k_kind", "v_kind"), attending(KINDS, "qkv"))
def test_every_kind(target, to, host, rng, shape, q_kind, k_kind, v_kind):
    make(rng, shape, q_kind, k_kind, v_kind).check(target, to, host)


@pytest.mark.parametrize("target", ["cuda"], indirect=True)
def test_splits_in_float64(target, to, host, rng):
    """On CUDA; splits in float32 are among the shapes."""
    make(rng, SPLIT[1], "fp64", "fp64", "fp64").check(target, to, host)


@both_targets([LARGE[0], LARGE[2], SMALL[2]], [SMALL[1], SMALL[2], SPLIT[0]])
@pytest.mark.parametrize("kind", ["fp32", "int8"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_options(target, to, host, rng, shape, kind, with_sinks):
    options = {"logits_soft_cap": 1.5, "sm_scale": 0.9}
    if with_sinks:
        options["sinks"] = rng.standard_normal(shape.num_q_heads).astype(np.float32)
    make(rng, shape, "fp32", kind).check(target, to, host, **options)


@pytest.mark.boundscheck
@pytest.mark.parametrize("seed", range(6))
def test_random_ranges(target, to, host, rng, seed):
    """Any bounds in any order, for sequences with no query, few, and too many to split."""
    longest = 700 if target == "cpu" else 90
    lists = []
    for queries in rng.permutation([0, 1, 3, 11 if target == "cpu" else 9]):
        n = int(rng.integers(1, longest))
        bounds = rng.integers(0, n + 1, (queries, 2)).tolist()
        lists.append((n, tuple((low, high) for low, high in bounds)))
    shape = Shape(
        tuple(lists), 4, 2, int(rng.integers(1, 20)), int(rng.integers(1, 20)),
        int(rng.integers(1, 9)), bool(seed % 3),
    )  # fmt: skip
    make(rng, shape, "fp32", ["fp32", "bf16", "int8"][seed % 3]).check(target, to, host)


def test_empty_ranges_give_nothing_or_the_sink(target, to, host, rng):
    """Beside ranges that are not, in the same item."""
    sinks = np.array([0.5, -2.0], np.float32)
    problem = make(rng, Shape(((12, ((3, 3), (2, 10), (0, 0), (9, 4))),)))
    out, lse = problem.run(target, to, host)
    assert np.all(out[[0, 2, 3]] == 0)
    assert np.all(lse[[0, 2, 3]] == -np.inf)
    out, lse = problem.run(target, to, host, sinks=to(sinks))
    assert np.all(out[[0, 2, 3]] == 0)
    assert np.all(lse[[0, 2, 3]] == sinks)


def test_ranges_end_where_the_table_does(target, to, host, rng):
    """Lower and upper bounds far outside stand for its first and last token."""
    problem = make(rng, Shape(((21, ((0, 21),) * 5),)))
    far = [(-7, 21), (4, 22), (-(2**62), 2**62), (21, 2**40), (-9, -1)]
    problem = replace(problem, ranges=np.array(far, np.int64))
    out, _ = problem.check(target, to, host)
    assert np.all(out[3:] == 0)


LONG = Shape(((5000, ((0, 4000), (700, 5000))),), 4, 2, 16, 16, 16)


@pytest.mark.parametrize(
    ("target", "shape", "kind"),
    [
        *(("cpu", shape, kind) for shape in (SMALL[0], LONG) for kind in ("fp32", "int8")),
        ("cuda", SMALL[3], "fp32"), ("cuda", SMALL[3], "int8"), ("cuda", SPLIT[1], "fp32"),
    ],
    indirect=["target"],
    ids=str,
)  # fmt: skip
def test_a_nan_reaches_only_the_rows_that_see_it(target, to, host, rng, shape, kind):
    """Rows of one item read the same tiles; a weight of 0 would not hide a NaN."""
    problem = make(rng, shape, "fp32", kind)
    want, _ = problem.expect()
    poisoned = {int(r[0]) for r in problem.ranges} | {int(r[1]) - 1 for r in problem.ranges}
    for position in sorted(poisoned - {-1})[:3]:
        slot = problem.slots[0][position]
        at = slot // shape.block_size, slice(None), slot % shape.block_size
        names = ("k_scale", "v_scale") if kind == "int8" else ("k", "v")
        bad = replace(problem, **{name: getattr(problem, name).copy() for name in names})
        for name in names:
            getattr(bad, name)[at] = np.nan
        out, _ = bad.run(target, to, host)
        first = np.arange(len(out)) < problem.q_starts[1]
        sees = first & (problem.ranges[:, 0] <= position) & (position < problem.ranges[:, 1])
        assert sees.any()
        assert np.all(np.isnan(out[sees]))
        tolerances.assert_rows_close(out[~sees], want[~sees], tolerances.attention(kind, "fp32"))


def test_no_ranges_is_causal(target, to, host, rng):
    """Slots alone: each query sees its own position and earlier ones, from the window on."""
    lists = ((30, tuple((0, n) for n in range(26, 31))), (3, ((0, 3),)))
    problem = make(rng, Shape(lists))
    causal = replace(problem, ranges=np.empty((0, 2), np.int64))
    want, want_lse = problem.check(target, to, host)
    out, lse = causal.run(target, to, host)
    tolerances.assert_rows_close(out, want.astype(np.float64), 1e-6)
    tolerances.assert_lse_close(lse, want_lse)
    out, _ = causal.run(target, to, host, window_left=6)
    last = np.array([high - 1 for _, ranges in lists for _, high in ranges])
    windows = np.stack([np.maximum(last - 6, 0), last + 1], axis=1)
    want, _ = replace(problem, ranges=windows).expect()
    tolerances.assert_rows_close(out, want, 1e-5)


@both_targets([LARGE[2], LARGE[1]], [SPLIT[0], SMALL[2]])
def test_a_result_does_not_depend_on_the_batch(target, to, host, rng, shape):
    """Bit for bit, alone and beside others, and in a table of any width."""
    problem = make(rng, shape, "fp32", "bf16")
    together = problem.run(target, to, host)
    for s, (n, ranges) in enumerate(shape.lists):
        alone = problem.only(s)
        alone = replace(alone, table=alone.table[:, :n])
        if not ranges:
            continue
        begin, end = problem.q_starts[s : s + 2]
        for got, want in zip(alone.run(target, to, host), together, strict=True):
            assert np.array_equal(got, want[begin:end])


@pytest.mark.parametrize("target", ["cuda"], indirect=True)
@pytest.mark.parametrize("lost", GARBAGE)
def test_a_slot_outside_the_pool_counts_for_nothing(target, to, host, rng, lost):
    """The host has not seen the table; on the CPU it has, and the caller answers for it."""
    problem = make(rng, Shape(((40, ((0, 40), (5, 30))), (6, ((0, 6),)))))
    table = problem.table.copy()
    table[0, [7, 33]] = lost
    # The oracle sees the lists without the lost tokens.
    rest = replace(
        problem,
        slots=[np.delete(problem.slots[0], [7, 33]), problem.slots[1]],
        ranges=np.array([(0, 38), (5, 29), (0, 6)], np.int64),
    )
    want, want_lse = rest.expect()
    out, lse = replace(problem, table=table).run(target, to, host)
    tolerances.assert_rows_close(out, want, 1e-5)
    tolerances.assert_lse_close(lse, want_lse)
