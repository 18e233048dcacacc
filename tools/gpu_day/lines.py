"""The lines that are timed on a GPU, and the contestants: numkv, and PyTorch, FlashInfer and flash-attn if installed.

Each contestant is a function that makes calls for a line, one for each set of buffers. There are so many sets that none
is still in L2 when its turn comes again. Peers get the shapes of a line in their own layout.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from perf.shapes import Shape, attend

__all__ = ["LINES", "PEERS", "Job", "Line", "numkv_calls", "turns"]

#: Total bytes of a line's buffers: several times the L2 of any device.
COLD = 512 << 20
BLOCK = 16
#: Queries that are checked at a prompt's beginning and at its end.
CHECKED = 16
DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


class Line(NamedTuple):
    """A line of the page."""

    what: str  #: decode, prefill, append, write or step
    letter: str
    shape: Shape
    kind: str
    layers: int = 1

    @property
    def name(self) -> str:
        return f"{self.what} {self.letter}/{self.kind}"

    @property
    def bytes(self) -> int:
        """Bytes of K and V that must be read or written; 0 where arithmetic is the bound."""
        s, per = self.shape, bytes_per_element(self.kind)
        if self.what == "prefill":
            return 0
        tokens = sum(s.lens) if self.what in ("decode", "step") else s.batch * s.queries
        return round(self.layers * tokens * s.kv_heads * (s.dim + s.dim_v) * per)

    @property
    def flops(self) -> int:
        """Operations of the two products of causal attention; 0 where memory is the bound."""
        s = self.shape
        pairs = s.queries * (s.length - s.queries) + s.queries * (s.queries + 1) // 2
        return 2 * s.batch * s.q_heads * pairs * (s.dim + s.dim_v) if self.what == "prefill" else 0

    @property
    def bound(self) -> float:
        """Largest relative L2 error of a right result.

        A rounding to bf16 is off by 2**-8 at most and by 1.6e-3 in the root mean square. Weights and results are
        rounded; some contestants round scaled queries and keys too. Four such errors add up to 3.2e-3.
        """
        return 2e-3 if self.kind in ("fp16", "fp32") else 4e-3


class Job(NamedTuple):
    """A contestant's calls of a line."""

    calls: list[Callable[[], object]]
    off: Callable[[Any], float] | None = None  #: relative L2 error of what the first call gave

    def checked(self, line: Line) -> dict[str, Any]:
        """Return the error of the first call against float64, and the largest error allowed."""
        return {"off": self.off(self.calls[0]()), "bound": line.bound} if self.off else {}


#: Reads rows ``(heads, tokens, width)`` to the host, from an array, a sequence's number and a slice of heads.
Part = Callable[[Any, int, slice], Any]


def _off(line: Line, q: Any, k: Any, v: Any, part: Part, cached: Part | None = None) -> Any:
    """Make `Job.off`: the worst error of two pairs of a sequence and a kv head, against plain attention in float64.

    `cached` reads K and V where their layout is not that of queries and results. The pairs are chosen so that swapped
    axes are found.
    """
    s, cached = line.shape, cached or part

    def off(out: Any) -> float:
        found = []
        for i, h in {(0, s.kv_heads - 1), (s.batch - 1, 0)}:
            heads, one = slice(h * s.group, (h + 1) * s.group), slice(h, h + 1)
            queries, result = part(q, i, heads), part(out, i, heads)
            keys, values = cached(k, i, one), cached(v, i, one)
            for end in {min(CHECKED, s.queries), s.queries}:
                some, seen = slice(max(0, end - CHECKED), end), s.length - s.queries + end
                right = attend(queries[:, some], keys[:, :seen], values[:, :seen], causal=True)
                found.append(np.linalg.norm(result[:, some] - right) / np.linalg.norm(right))
        return float(np.max(found))

    return off


def bytes_per_element(kind: str) -> float:
    """Return the bytes of an element of K or V, scales included, at 128 elements a row."""
    return {
        "fp32": 4,
        "fp16": 2,
        "bf16": 2,
        "int8": 1 + 4 / 128,
        "int4": 0.5 + 2 / 32,
        "fp8_e4m3": 1,
    }[kind]


DECODE = {
    "A": Shape(1, 32, 8, 128, 32768), "B8": Shape(8, 32, 8, 128, 8192), "B32": Shape(32, 32, 8, 128, 4096),
    "G8": Shape(8, 64, 8, 128, 8192), "H": Shape(1, 16, 1, 128, 131072), "T1": Shape(1, 32, 8, 128, 8192),
    "Q16": Shape(1, 32, 8, 128, 32768, queries=16),
}  # fmt: skip
TOKENS = {x: Shape(n, 32, 8, 128, 8192) for x, n in (("1", 1), ("64", 64), ("8k", 8192))}
LINES = [
    *(Line("decode", x, DECODE[x], kind) for kind in ("bf16", "int8", "int4", "fp16", "fp32") for x in ("B8", "A")),
    *(Line("decode", x, DECODE[x], "fp8_e4m3") for x in ("B8", "A")),
    *(Line("decode", letter, DECODE[letter], "bf16") for letter in ("B32", "G8", "H", "T1", "Q16")),
    *(Line("prefill", "P", Shape(1, 32, 8, 128, n, queries=n), "bf16") for n in (8192,)),
    *(Line("append", x, TOKENS[x], kind) for x in TOKENS for kind in ("bf16", "int8", "int4")),
    *(Line("write", x, TOKENS[x], kind) for x in ("64", "8k") for kind in ("bf16", "int8")),
    *(Line("step", "B8", DECODE["B8"], kind, layers=32) for kind in ("bf16", "int8")),
]  # fmt: skip


# ---------------------------------------------------------------- numkv


class Arrays:
    """Makes arrays on the device, of random numbers that repeat."""

    def __init__(self) -> None:
        from numkv import targets

        self.target, self.rng = targets.get("cuda"), np.random.default_rng(0)

    def random(self, shape: tuple[int, ...], dtype: Any) -> Any:
        size = min(math.prod(shape), 1_000_003)  # a prime: no two blocks are alike
        some = self.rng.standard_normal(size).astype(np.float32)
        if np.dtype(dtype).kind in "iu":
            of = np.iinfo(dtype)
            some = self.rng.integers(max(of.min, -of.max), of.max, size, dtype, endpoint=True)
        return self.target.asarray(np.resize(some.astype(dtype), shape))

    def given(self, x: Any) -> Any:
        return self.target.asarray(x)


def _pools(make: Arrays, line: Line, blocks: int) -> tuple[Any, Any, dict[str, Any]]:
    import numkv

    kind, shape = numkv.kind(line.kind), line.shape
    found, scales = [], {}
    for name, dim in (("k_scale", shape.dim), ("v_scale", shape.dim_v)):
        size = (blocks, shape.kv_heads, BLOCK)
        dtype = kind.dtype if kind.is_float else kind.word
        found.append(make.random((*size, kind.words_per_row(dim)), dtype))
        if kind.has_scales:
            groups = (dim // kind.group_size,) if kind.scales_per == "group" else ()
            unit = 3.5 / 2 ** (8 * kind.bytes_per_element)  # rows of about 1
            scale = make.rng.uniform(0.5 * unit, 1.5 * unit, (*size, *groups))
            scales[name] = make.given(scale.astype(kind.scale_dtype))
    return found[0], found[1], scales


def _q_dtype(line: Line) -> Any:
    return DTYPES.get(line.kind, ml_dtypes.bfloat16)


def numkv_calls(line: Line, cold: int = COLD) -> Job:
    """Make numkv's calls of a line, over paged pools."""
    makers = {
        "decode": _attend,
        "prefill": _attend,
        "append": _append,
        "write": _write,
        "step": _step,
    }
    return makers[line.what](line, cold)


def _sets(size: float, cold: int) -> int:
    """Return how many sets of buffers of `size` bytes are needed."""
    return max(1, min(64, math.ceil(cold / max(1.0, size))))


def _decoded(codes: Any, scale: Any) -> Any:
    """Return rows of codes as numbers, as the tests' oracle reads them."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
    import naive

    return naive.dequantise(codes, scale)


def _attend(line: Line, cold: int) -> Job:
    import numkv

    make, s = Arrays(), line.shape
    per = -(-s.length // BLOCK)
    tokens = s.batch * s.queries
    q, out = (make.random((tokens, s.q_heads, d), _q_dtype(line)) for d in (s.dim, s.dim_v))
    lens = make.given(np.array(s.lens, np.int32))
    size = s.batch * per * BLOCK * s.kv_heads * (s.dim + s.dim_v) * bytes_per_element(line.kind)
    calls, pools, host = [], [], make.target.to_host
    for _ in range(_sets(size, cold)):
        k, v, scales = _pools(make, line, s.batch * per)
        table = make.given(
            make.rng.permutation(s.batch * per).reshape(s.batch, per).astype(np.int32)
        )
        pools.append((table, (k, scales.get("k_scale")), (v, scales.get("v_scale"))))
        if s.queries == 1:
            calls.append(
                lambda a=(q, k, v, table, lens), m=scales: numkv.paged_decode_attention(
                    *a, out=out, **m
                )
            )
        else:
            starts = make.given(np.arange(s.batch + 1, dtype=np.int32) * s.queries)
            calls.append(
                lambda a=(q, k, v, table, lens, starts), m=scales: numkv.paged_prefill_attention(
                    *a, out=out, **m
                )
            )
    table, k, v = pools[0]

    def cached(x: Any, i: int, one: slice) -> Any:
        rows, *scale = (host(y)[host(table)[i]][:, one] for y in x if y is not None)
        rows = _decoded(rows, *scale) if scale else rows
        return rows.swapaxes(0, 1).reshape(1, per * BLOCK, -1)

    def part(x: Any, i: int, heads: slice) -> Any:
        return host(x)[i * s.queries : (i + 1) * s.queries, heads].swapaxes(0, 1)

    return Job(calls, _off(line, q, k, v, part, cached))


def _append(line: Line, cold: int) -> Job:
    import numkv

    make, s = Arrays(), line.shape
    blocks = max(64, 2 * s.batch // BLOCK)
    rows = [make.random((s.batch, s.kv_heads, d), _q_dtype(line)) for d in (s.dim, s.dim_v)]
    slots = make.given(make.rng.permutation(blocks * BLOCK)[: s.batch].astype(np.int64))
    calls = []
    for _ in range(
        _sets(blocks * BLOCK * s.kv_heads * (s.dim + s.dim_v) * bytes_per_element(line.kind), cold)
    ):
        k, v, scales = _pools(make, line, blocks)
        calls.append(lambda a=(*rows, k, v, slots), m=scales: numkv.paged_append(*a, **m))
    return Job(calls)


def _write(line: Line, cold: int) -> Job:
    import numkv

    make, s = Arrays(), line.shape
    blocks = max(64, 2 * s.batch // BLOCK)
    qkv = make.random((s.batch, (s.q_heads + 2 * s.kv_heads) * s.dim), _q_dtype(line))
    angles = [make.random((s.length, s.dim // 2), np.float32) for _ in range(2)]
    slots = make.given(make.rng.permutation(blocks * BLOCK)[: s.batch].astype(np.int64))
    more = {
        "positions": make.given(make.rng.integers(0, s.length, s.batch)), "cos": angles[0], "sin": angles[1],
        "q_out": make.random((s.batch, s.q_heads, s.dim), _q_dtype(line)),
    }  # fmt: skip
    calls = []
    for _ in range(
        _sets(blocks * BLOCK * s.kv_heads * (s.dim + s.dim_v) * bytes_per_element(line.kind), cold)
    ):
        k, v, scales = _pools(make, line, blocks)
        calls.append(
            lambda a=(qkv, k, v, slots), m={**more, **scales}: numkv.paged_write(
                *a, num_q_heads=s.q_heads, qk_mode=2, **m
            )
        )
    return Job(calls)


def _step(line: Line, cold: int) -> Job:
    """Make a call that passes a token of all sequences through all layers of a `PagedKVCache`, then rolls back."""
    import numkv

    make, s = Arrays(), line.shape
    per = -(-(s.length + 2) // BLOCK)
    cache = numkv.PagedKVCache(
        num_layers=line.layers, num_kv_heads=s.kv_heads, head_dim=s.dim, num_blocks=s.batch * per + 1,
        block_size=BLOCK, kind=line.kind, target="cuda",
    )  # fmt: skip
    row = make.random((s.batch, s.kv_heads, s.dim), _q_dtype(line))
    q = make.random((s.batch, s.q_heads, s.dim), _q_dtype(line))
    ids = [np.full(s.length, i, np.int32) for i in range(s.batch)]
    seqs = [cache.add(x) for x in ids]
    first = make.random((s.length, s.kv_heads, s.dim), _q_dtype(line))
    for seq, prompt in zip(seqs, ids, strict=True):
        step = cache.reserve([seq], [s.length])
        for layer in range(line.layers):
            step.append(layer, first, first)
        cache.commit(step, token_ids=prompt)

    def one() -> None:
        step = cache.reserve(seqs, [1] * s.batch)
        for layer in range(line.layers):
            step.append(layer, row, row)
            step.attention(layer, q)
        cache.rollback(step)

    return Job([one])


# ---------------------------------------------------------------- others


def _host(x: Any) -> Any:
    """Return a tensor as a NumPy array."""
    return x.float().cpu().numpy()


def _by_head(x: Any, i: int, heads: slice) -> Any:
    """`Part` of tensors ``(sequences, heads, tokens, width)``."""
    return _host(x[i, heads])


def _by_token(x: Any, i: int, heads: slice) -> Any:
    """`Part` of tensors ``(sequences, tokens, heads, width)``."""
    return _host(x[i, :, heads]).swapaxes(0, 1)


def _torch_rows(line: Line, cold: int) -> Any:
    """Make tensors ``q, k, v`` of a line, K and V contiguous by head, one pair for each set."""
    import torch

    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[line.kind]
    s = line.shape
    q = torch.randn(s.batch, s.q_heads, s.queries, s.dim, device="cuda", dtype=dtype)
    size = s.batch * s.kv_heads * s.length * (s.dim + s.dim_v) * dtype.itemsize
    pairs = [
        tuple(
            torch.randn(s.batch, s.kv_heads, s.length, d, device="cuda", dtype=dtype)
            for d in (s.dim, s.dim_v)
        )
        for _ in range(_sets(size, cold))
    ]
    return q, pairs


def _torch_sdpa(backend: str) -> Callable[[Line, int], Job]:
    def calls(line: Line, cold: int) -> Job:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, pairs = _torch_rows(line, cold)
        causal = line.shape.queries > 1
        if causal and line.shape.queries != line.shape.length:
            raise NotImplementedError("is_causal aligns at the top")

        def call(k: Any, v: Any) -> object:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, enable_gqa=True
                )

        calls = [lambda k=k, v=v: call(k, v) for k, v in pairs]
        return Job(calls, _off(line, q, *pairs[0], _by_head))

    return calls


def _flex(line: Line, cold: int) -> Job:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, pairs = _torch_rows(line, cold)
    mask = None
    if line.shape.queries > 1:
        later = line.shape.length - line.shape.queries
        mask = create_block_mask(
            lambda b, h, i, j: i + later >= j,
            None,
            None,
            line.shape.queries,
            line.shape.length,
            device="cuda",
        )
    compiled = torch.compile(flex_attention, dynamic=False)
    return Job(
        [lambda k=k, v=v: compiled(q, k, v, block_mask=mask, enable_gqa=True) for k, v in pairs],
        _off(line, q, *pairs[0], _by_head),
    )


def _flash_attn(line: Line, cold: int) -> Job:
    from flash_attn import flash_attn_func, flash_attn_with_kvcache

    q, pairs = _torch_rows(line, cold)
    q, pairs = (
        q.transpose(1, 2).contiguous(),
        [tuple(x.transpose(1, 2).contiguous() for x in p) for p in pairs],
    )
    call = flash_attn_with_kvcache if line.shape.queries < line.shape.length else flash_attn_func
    calls = [lambda k=k, v=v: call(q, k, v, causal=True) for k, v in pairs]
    return Job(calls, _off(line, q, *pairs[0], _by_token))


def _flashinfer(line: Line, cold: int) -> Job:
    import flashinfer
    import torch

    s, dtype = line.shape, {"fp16": torch.float16, "bf16": torch.bfloat16}[line.kind]
    if s.queries > 1:
        q = torch.randn(s.queries, s.q_heads, s.dim, device="cuda", dtype=dtype)
        k, v = (
            torch.randn(s.length, s.kv_heads, d, device="cuda", dtype=dtype)
            for d in (s.dim, s.dim_v)
        )
        return Job(
            [lambda: flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True)],
            _off(line, q, k, v, lambda x, _, heads: _by_token(x[None], 0, heads)),
        )
    per = -(-s.length // BLOCK)
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
    starts = torch.arange(s.batch + 1, dtype=torch.int32, device="cuda") * per
    ids = torch.randperm(s.batch * per, device="cuda").int()
    last = torch.full((s.batch,), (s.length - 1) % BLOCK + 1, dtype=torch.int32, device="cuda")
    wrapper.plan(
        starts,
        ids,
        last,
        s.q_heads,
        s.kv_heads,
        s.dim,
        BLOCK,
        q_data_type=dtype,
        kv_data_type=dtype,
    )
    q = torch.randn(s.batch, s.q_heads, s.dim, device="cuda", dtype=dtype)
    size = s.batch * per * BLOCK * s.kv_heads * 2 * s.dim * dtype.itemsize
    pools = [
        torch.randn(s.batch * per, 2, s.kv_heads, BLOCK, s.dim, device="cuda", dtype=dtype)
        for _ in range(_sets(size, cold))
    ]

    def cached(x: Any, i: int, one: slice) -> Any:
        rows = x[ids.reshape(s.batch, per)[i].long()]
        return _host(rows[:, one]).swapaxes(0, 1).reshape(1, per * BLOCK, -1)

    return Job(
        [lambda pool=pool: wrapper.run(q, pool) for pool in pools],
        _off(line, q, pools[0][:, 0], pools[0][:, 1], lambda x, i, h: _host(x[i, h, None]), cached),
    )


class Peer(NamedTuple):
    """Another library: the package that it needs, the lines that it can do, and its calls."""

    package: str
    kinds: tuple[str, ...]
    calls: Callable[[Line, int], Job]

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


HALVES = ("fp16", "bf16")
PEERS = {
    "torch SDPA flash_attention": Peer("torch", HALVES, _torch_sdpa("FLASH_ATTENTION")),
    "torch SDPA cudnn_attention": Peer("torch", HALVES, _torch_sdpa("CUDNN_ATTENTION")),
    "torch SDPA efficient_attention": Peer("torch", (*HALVES, "fp32"), _torch_sdpa("EFFICIENT_ATTENTION")),
    "torch SDPA math": Peer("torch", (*HALVES, "fp32"), _torch_sdpa("MATH")),
    "torch FlexAttention": Peer("torch", HALVES, _flex),
    "FlashInfer": Peer("flashinfer", HALVES, _flashinfer),
    "flash-attn": Peer("flash_attn", HALVES, _flash_attn),
}  # fmt: skip


def turns(calls: list[Callable[[], object]]) -> Callable[[], object]:
    """Make a call that uses the sets of buffers in turns."""
    following = itertools.cycle(calls)
    return lambda: next(following)()
