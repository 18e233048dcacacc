"""Attention problems moved into paged pools: shuffled blocks, NaN and garbage wherever nothing may be read."""

from dataclasses import dataclass, replace

import naive
import numpy as np
import problems
import tolerances

GARBAGE = [-(2**31), -1, 10**6, 2**31 - 1]  # blocks that are in no pool


@dataclass(frozen=True)
class Paged:
    """A problem's rows in pools; the oracle attends over the pools' contents."""

    problem: problems.Problem
    k_pool: np.ndarray
    v_pool: np.ndarray
    k_scale: np.ndarray | None
    v_scale: np.ndarray | None
    block_table: np.ndarray

    def arguments(self, to):
        """Positional and keyword arrays of a call."""
        p = self.problem
        arrays = [p.q, self.k_pool, self.v_pool, self.block_table, p.seq_lens]
        if p.cu_seqlens_q is not None:
            arrays.append(p.cu_seqlens_q)
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        return list(map(to, arrays)), {n: to(x) for n, x in scales.items() if x is not None}

    def run(self, to, **options):
        """Return numkv's results."""
        import numkv

        arrays, scales = self.arguments(to)
        options = {n: to(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
        decode = self.problem.cu_seqlens_q is None
        call = numkv.paged_decode_attention if decode else numkv.paged_prefill_attention
        return call(*arrays, **scales, **options)

    def expect(self, *, unsigned=False, **options):
        """Return the oracle's out and lse, over rows gathered from the pools; with `unsigned`, of V without signs."""
        p, values = self.problem, []
        for pool, scale in ((self.k_pool, self.k_scale), (self.v_pool, self.v_scale)):
            rows = naive.gather(pool, self.block_table, p.seq_lens)
            if scale is not None:
                rows = naive.dequantise(rows, naive.gather(scale, self.block_table, p.seq_lens))
            values.append(rows)
        k, v = values
        v = np.abs(v) if unsigned else v
        return naive.attention(p.q, k, v, p.seq_lens, p.cu_seqlens_q, **options)

    def check(self, to, host, *, may_cancel=False, **options):
        """Run and compare output and lse; returns the output."""
        p = self.problem
        out, lse = (host(x) for x in self.run(to, return_lse=True, **options))
        want, want_lse = self.expect(**options)
        assert out.dtype == naive.DTYPES[p.q_kind]
        assert lse.dtype == np.float32
        bound = tolerances.attention(p.kind, p.q_kind)
        summed = self.expect(unsigned=True, **options)[0] if may_cancel else None
        tolerances.assert_rows_close(out, want, bound, summed)
        tolerances.assert_lse_close(lse, want_lse, max(bound, tolerances.LSE))
        return out

    def only(self, s):
        """The problem of sequence `s` alone, in the same pools."""
        return replace(self, problem=self.problem.only(s), block_table=self.block_table[s : s + 1])


def _pool(rows, kind, table, block_size, num_blocks):
    """A pool with the rows of a contiguous cache, and its scales."""
    shape = (num_blocks, rows.shape[1], block_size)
    scale = None
    if kind in naive.CODES:
        codes, found = naive.quantise(np.nan_to_num(rows), kind)
        pool = np.full((*shape, codes.shape[3]), 99, codes.dtype)
        scale = np.full((*shape, *found.shape[3:]), np.nan, found.dtype)
    else:
        codes = naive.round_to(rows, kind)
        pool = np.full((*shape, codes.shape[3]), np.nan, codes.dtype)
    for s, position in zip(*np.nonzero(~np.isnan(rows[:, 0, :, 0])), strict=True):
        at = table[s, position // block_size], slice(None), position % block_size
        pool[at] = codes[s, :, position]
        if scale is not None:
            scale[at] = found[s, :, position]
    return pool, scale


def make(rng, shape, kind="fp32", q_kind="fp32", *, block_size=3, v_kind=None, spare=2):
    """Draw a problem and page it; blocks past a length are garbage, `spare` blocks belong to nobody."""
    problem = problems.make(rng, shape, "fp32", q_kind)
    v_kind = kind if v_kind is None else v_kind
    # The kind that sets the tolerance.
    wide = tolerances.widest(kind, v_kind)
    needs = [-(-n // block_size) for n in shape.seq_lens]
    order = iter(rng.permutation(sum(needs) + spare))
    table = np.array(
        [
            [next(order) if i < n else GARBAGE[i % 4] for i in range(max(needs, default=0) + 1)]
            for n in needs
        ],
        np.int32,
    ).reshape(len(needs), -1)
    sizes = (table, block_size, sum(needs) + spare)
    k_pool, k_scale = _pool(problem.k, kind, *sizes)
    v_pool, v_scale = _pool(problem.v, v_kind, *sizes)
    return Paged(replace(problem, kind=wide), k_pool, v_pool, k_scale, v_scale, table)


def pools(to, kind, v_kind=None, shape=(4, 2, 3), dim=4, dim_v=4):
    """Pools of a recognisable filling, and their scales."""
    out, scales = [], {}
    for which, name, d in (("k", kind, dim), ("v", v_kind or kind, dim_v)):
        dtype = np.int8 if name == "int8" else naive.DTYPES[name]
        out.append(to(np.full((*shape, d), 77, dtype)))
        if name == "int8":
            scales[f"{which}_scale"] = to(np.full(shape, 7, np.float32))
    return out, scales
