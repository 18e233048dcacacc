"""Random attention problems over contiguous caches, with NaN wherever nothing may be read."""

from dataclasses import dataclass, replace

import naive
import numpy as np
import tolerances


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention problem; ``new`` queries per sequence, or decode if None."""

    num_q_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 8
    seq_lens: tuple[int, ...] = (5, 0, 1)
    new: tuple[int, ...] | None = None
    head_dim_v: int | None = None
    spare: int = 3

    def __str__(self) -> str:
        dims = f"{self.head_dim}" + ("" if self.head_dim_v is None else f"v{self.head_dim_v}")
        lens = ".".join(map(str, self.seq_lens))
        new = "" if self.new is None else "-new" + ".".join(map(str, self.new))
        return f"h{self.num_q_heads}.{self.num_kv_heads}-d{dims}-n{lens}{new}"


@dataclass(frozen=True)
class Problem:
    """The arrays of one problem, in NumPy."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    seq_lens: np.ndarray
    cu_seqlens_q: np.ndarray | None
    kind: str
    q_kind: str

    def expect(self, **options):
        """Return the oracle's out and lse."""
        return naive.attention(self.q, self.k, self.v, self.seq_lens, self.cu_seqlens_q, **options)

    def run(self, to, **options):
        """Return numkv's results, on the target that `to` moves arrays to."""
        import numkv

        arrays = [to(x) for x in (self.q, self.k, self.v, self.seq_lens)]
        options = {n: to(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
        if self.cu_seqlens_q is None:
            return numkv.decode_attention(*arrays, **options)
        return numkv.prefill_attention(*arrays, to(self.cu_seqlens_q), **options)

    def check(self, to, host, *, may_cancel=False, **options):
        """Run and compare output and lse; returns the output."""
        out, lse = (host(x) for x in self.run(to, return_lse=True, **options))
        want, want_lse = self.expect(**options)
        assert out.dtype == naive.DTYPES[self.q_kind]
        assert lse.dtype == np.float32
        summed = replace(self, v=np.abs(self.v)).expect(**options)[0] if may_cancel else None
        bound = tolerances.attention(self.kind, self.q_kind)
        tolerances.assert_rows_close(out, want, bound, summed)
        tolerances.assert_lse_close(lse, want_lse)
        return out

    def only(self, s):
        """The problem of sequence `s` alone."""
        if self.cu_seqlens_q is None:
            q, cu = self.q[s : s + 1], None
        else:
            begin, end = self.cu_seqlens_q[s : s + 2]
            q, cu = self.q[begin:end], np.array([0, end - begin], np.int32)
        one = np.s_[s : s + 1]
        return replace(
            self, q=q, k=self.k[one], v=self.v[one], seq_lens=self.seq_lens[one], cu_seqlens_q=cu
        )


def make(rng, shape: Shape, kind="fp32", q_kind="fp32") -> Problem:
    """Draw a problem; rows from each length on are NaN in K and V."""
    capacity = max(shape.seq_lens, default=0) + shape.spare
    heads = (len(shape.seq_lens), shape.num_kv_heads, capacity)
    dim_v = shape.head_dim if shape.head_dim_v is None else shape.head_dim_v
    k = naive.round_to(rng.standard_normal((*heads, shape.head_dim)), kind)
    v = naive.round_to(rng.standard_normal((*heads, dim_v)), kind)
    for s, n in enumerate(shape.seq_lens):
        k[s, :, n:] = np.nan
        v[s, :, n:] = np.nan
    num_tokens = len(shape.seq_lens) if shape.new is None else sum(shape.new)
    q = rng.standard_normal((num_tokens, shape.num_q_heads, shape.head_dim))
    cu = None
    if shape.new is not None:
        cu = np.concatenate([[0], np.cumsum(shape.new)]).astype(np.int32)
    return Problem(
        naive.round_to(q, q_kind), k, v, np.array(shape.seq_lens, np.int32), cu, kind, q_kind
    )
