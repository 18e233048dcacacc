"""Count the driver calls of each CUDA call of numkv, and time its host code; no GPU needed.

    NUMBA_ENABLE_CUDASIM=0 python -m tools.cuda.ledger [--lines REGEX] [--page perf/results/NAME.md]

Every operation of the CUDA target runs on the stub driver (`tools.cuda.stub_driver`), warm: kernels are compiled and
loaded, but do nothing. For each line the table has launches, copies, allocations, frees and waits a call, and host
microseconds a call, without a log. Arrays are Numba's own, torch-like ones (with the methods and attributes of tensors
that numkv uses), and CuPy-like ones (``__cuda_array_interface__`` of version 3, with a stream). A real driver adds some
2 us a launch; times on a GPU are not measured.

Lines that exceed `LIMITS` are marked; ``--strict`` then exits with 1.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from tools.cuda import pages, stub_driver

__all__ = ["LIMITS", "Line", "Measured", "measure", "over", "table"]

#: Sizes of a decode call: sequences, kv heads, q heads, head dim, tokens of a block, tokens of a sequence.
B, HEADS, GROUP, DIM, BLOCK, LENGTH = 8, 8, 4, 128, 16, 8192
Q_HEADS = HEADS * GROUP
LAYERS = 4

#: Driver calls that only query the current device and stream.
ASKING = {
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuCtxSetCurrent",
}


class Limit(NamedTuple):
    """The most driver calls of lines with some names, by group; other groups must have none."""

    lines: str  #: a regular expression
    most: dict[str, int]


#: Warm calls over device arrays with ``out=``.
LIMITS = [
    Limit(r"^paged_(decode|prefill)_attention .*out=", {"launches": 2}),
    Limit(r"^paged_(append|write) ", {"launches": 1}),
    Limit(r"^PagedKVCache .*: a step", {"launches": 3 * LAYERS, "async copies": 1}),
    Limit(r"^CausalCache .*: a pass", {"launches": 3 * LAYERS, "async copies": 1}),
    # Of two caches.
    Limit(r"^WrapperCache .*: a pass", {"launches": 3 * LAYERS, "async copies": 2}),
    Limit(r"^(KVCache|\w+Layer) .*: (append|write)", {"launches": 1}),
    Limit(r"^(KVCache|\w+Layer) .*: decode_attention", {"launches": 2}),
    Limit(r"rotated: a token", {"launches": 3}),  # rows of K, rows of V, and the append
    Limit(r": a call", {"launches": 3}),
    Limit(r"^first_non_finite", {"launches": 1, "async copies": 2, "blocking waits": 1}),
]


@dataclass
class Line:
    """A line of the table: a function, and the number of calls that it makes."""

    name: str
    call: Callable[[], object]
    calls: int = 1


@dataclass
class Measured:
    """The cost of a line for each call."""

    name: str
    groups: dict[str, float]
    others: dict[str, float]
    microseconds: float


class Foreign:
    """An array of another library, with the attributes that numkv uses."""

    def __init__(self, array: Any) -> None:
        self.dtype, self.shape, self._array = array.dtype, array.shape, array
        self._pointer = array.__cuda_array_interface__["data"][0]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape, "typestr": self.dtype.str, "strides": None, "version": 3,
            "data": (self._pointer, False), "stream": 1,
        }  # fmt: skip


class Named(NamedTuple):
    """A stand-in for a dtype or a device of torch."""

    name: str
    index: int = 0

    def __str__(self) -> str:
        return self.name


class Tensor:
    """A stand-in for a tensor of torch on a device; its attributes are about as slow as torch's."""

    is_cuda, requires_grad, device = True, False, Named("cuda:0")
    dtypes: ClassVar[dict[str, Named]] = {}

    def __init__(self, array: Any) -> None:
        self.shape, self._array = array.shape, array
        self.dtype = self.dtypes.setdefault(array.dtype.name, Named(f"torch.{array.dtype.name}"))
        self._strides = tuple(n // array.dtype.itemsize for n in array.strides)
        self._pointer = array.__cuda_array_interface__["data"][0]

    def data_ptr(self) -> int:
        return self._pointer

    def stride(self) -> tuple[int, ...]:
        return self._strides


Tensor.__module__ = "torch"


def stand_in_for_torch() -> None:
    """Install a stand-in for torch whose current stream is the default one."""
    torch: Any = types.ModuleType("torch")
    torch._C = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda device: 0)
    sys.modules["torch"] = torch


def cupy_like(array: Any) -> Any:
    """Return an array with CuPy's interface; the array itself if the interface lacks its dtype."""
    return array if array.dtype.str[1] == "V" else Foreign(array)


def measure(driver: stub_driver.Driver, line: Line, seconds: float = 0.2) -> Measured:
    """Count the driver calls of a warm call, then time it.

    Parameters
    ----------
    driver : Driver
        The stub.
    line : Line
        The line.
    seconds : float
        Duration of the timing.
    """
    for _ in range(3):
        line.call()
    rounds = 8  # deferred work, such as Numba's frees, shows as a fraction
    with driver.calls() as log:
        for _ in range(rounds):
            line.call()
    many = rounds * line.calls
    known = set().union(*stub_driver.GROUPS.values()) | ASKING
    others = {name: n / many for name, n in log.names.items() if name not in known}
    driver.logging(False)
    try:
        taken, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end or len(taken) < 5:
            start = time.perf_counter()
            line.call()
            taken.append(time.perf_counter() - start)
    finally:
        driver.logging(True)
    groups = {group: n / many for group, n in log.groups().items()}
    # The median of the faster half, because other processes only make calls slower.
    half = sorted(taken)[: max(1, len(taken) // 2)]
    return Measured(line.name, groups, others, half[len(half) // 2] / line.calls * 1e6)


def over(measured: Measured) -> list[str]:
    """Return the groups in which a line exceeds its limit."""
    for limit in LIMITS:
        if re.search(limit.lines, measured.name):
            return [
                f"{group} {n:g} (at most {limit.most.get(group, 0)})"
                for group, n in measured.groups.items()
                if n > limit.most.get(group, 0)
            ]
    return []


def table(rows: list[Measured]) -> str:
    """Return the lines as a Markdown table."""
    heads = ["a call of", *stub_driver.GROUPS, "other calls", "host us", "over its limit"]
    body = [
        [
            row.name, *(f"{n:.3g}" if n else "" for n in row.groups.values()),
            ", ".join(f"{name} {n:.3g}" for name, n in row.others.items()), f"{row.microseconds:.1f}",
            "; ".join(over(row)),
        ]
        for row in rows
    ]  # fmt: skip
    return pages.table(
        heads, body, left={0, len(stub_driver.GROUPS) + 1, len(stub_driver.GROUPS) + 3}
    )


# ---------------------------------------------------------------- the lines


class Maker:
    """Makes arrays on the target, and lines over them."""

    def __init__(self) -> None:
        import numkv
        from numkv import targets

        self.numkv, self.target = numkv, targets.get("cuda")

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.target.zeros(shape, np.dtype(dtype))

    def pools(
        self, kind: str, blocks: int = B * LENGTH // BLOCK
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Return pools of K and V, and keywords with their scales."""
        of = self.numkv.kind(kind)
        shape = (blocks, HEADS, BLOCK, of.words_per_row(DIM))
        dtype = of.word if of.has_scales and of.scales_per != "head" else of.dtype
        k, v = (self.array(shape, dtype) for _ in range(2))
        if not of.has_scales:
            return k, v, {}
        if of.scales_per == "head":
            sizes: tuple[int, ...] = (HEADS,)
        else:
            groups = (DIM // of.group_size,) if of.scales_per == "group" else ()
            sizes = (*shape[:3], *groups)
        return k, v, {name: self.array(sizes, of.scale_dtype) for name in ("k_scale", "v_scale")}


Arrays = list[tuple[str, Callable[[Any], Any]]]
ARRAYS: Arrays = [
    ("Numba", lambda x: x), ("torch-like", Tensor), ("CuPy-like", cupy_like)
]  # fmt: skip


def attention_lines(make: Maker) -> Iterator[Line]:
    """Decode and a chunk of prefill over paged pools."""
    numkv = make.numkv
    for kind in ("fp16", "bf16", "int8", "int4"):
        k, v, scales = make.pools(kind)
        dtype = np.float16 if kind != "bf16" else numkv.kind("bf16").dtype
        q, out = (make.array((B, Q_HEADS, DIM), dtype) for _ in range(2))
        places = make.array((B, LENGTH // BLOCK), np.int32), make.array((B,), np.int32)
        if kind == "fp16":
            yield Line(
                f"paged_decode_attention {kind}, Numba arrays",
                lambda a=(q, k, v, *places): numkv.paged_decode_attention(*a),
            )
        for name, wrap in ARRAYS:
            if name != "Numba" and kind == "bf16":
                continue  # such arrays use DLPack
            a = [wrap(x) for x in (q, k, v, *places)]
            more = {"out": wrap(out), **{key: wrap(x) for key, x in scales.items()}}
            yield Line(
                f"paged_decode_attention {kind}, {name} arrays, out=",
                lambda a=a, more=more: numkv.paged_decode_attention(*a, **more),
            )
        if kind == "fp16":
            short = make.array((B, 4), np.int32), make.array((B,), np.int32)
            yield Line(
                f"paged_decode_attention {kind}, tables of 64 tokens, Numba arrays, out=",
                lambda a=(q, k, v, *short), out=out: numkv.paged_decode_attention(*a, out=out),
            )
            starts = make.array((B + 1,), np.int32)
            yield Line(
                f"paged_prefill_attention {kind}, Numba arrays, out=",
                lambda a=(q, k, v, *places, starts), out=out: numkv.paged_prefill_attention(
                    *a, out=out
                ),
            )


def append_lines(make: Maker) -> Iterator[Line]:
    """Rows into slots, for every kind that functions recognise by its arrays."""
    numkv = make.numkv
    from numkv.kinds import kinds

    slots = make.array((B,), np.int64)
    for kind in kinds():
        if kind.codes_dtype is not None:  # its arrays have another dtype than its words
            continue
        k, v, scales = make.pools(kind.name, 64)
        dtype = kind.dtype if kind.is_query else np.float16
        rows = [make.array((B, HEADS, DIM), dtype) for _ in range(2)]
        for name, wrap in ARRAYS:
            if name != "Numba" and kind.name not in ("fp16", "int8"):
                continue
            a = [wrap(x) for x in (*rows, k, v, slots)]
            more = {key: wrap(x) for key, x in scales.items()}
            yield Line(
                f"paged_append {kind}, {name} arrays", lambda a=a, more=more: numkv.paged_append(*a, **more)
            )  # fmt: skip
        if kind.name == "int8":
            yield Line(
                "paged_append int8, Numba arrays, check_finite=False",
                lambda a=(*rows, k, v, slots), more=scales: numkv.paged_append(
                    *a, **more, check_finite=False
                ),
            )


def write_lines(make: Maker) -> Iterator[Line]:
    """The fused write."""
    numkv = make.numkv
    qkv, q_out = (
        make.array((B, (Q_HEADS + 2 * HEADS) * DIM), np.float16),
        make.array((B, Q_HEADS, DIM), np.float16),
    )
    cos, sin = (make.array((LENGTH, DIM // 2), np.float32) for _ in range(2))
    slots, positions = (make.array((B,), np.int64) for _ in range(2))
    for kind in ("fp16", "int8", "int4"):
        k, v, scales = make.pools(kind, 64)
        for name, wrap in ARRAYS[:2]:
            a = [wrap(x) for x in (qkv, k, v, slots)]
            arrays = {"positions": positions, "cos": cos, "sin": sin, "q_out": q_out, **scales}
            more = {key: wrap(x) for key, x in arrays.items()}
            yield Line(
                f"paged_write {kind}, {name} arrays, q_out=",
                lambda a=a, more=more: numkv.paged_write(
                    *a, **more, num_q_heads=Q_HEADS, qk_mode=2
                ),
            )


def object_lines(make: Maker) -> Iterator[Line]:
    """A token through caches."""
    numkv = make.numkv
    row, q = make.array((HEADS, DIM), np.float16), make.array((Q_HEADS, DIM), np.float16)
    for kind in ("fp16", "int8", "int4", "fp8_e4m3"):
        cache = numkv.KVCache(LAYERS, HEADS, DIM, max_seq_len=4096, kind=kind, target="cuda")

        def token(cache=cache):
            if len(cache) > 4000:
                cache.truncate(10)
            for layer in range(LAYERS):
                cache.append(layer, row, row)
            cache.advance()

        def attend(cache=cache):
            for layer in range(LAYERS):
                cache.decode_attention(layer, q)

        yield Line(f"KVCache {kind}: append, of a layer", token, LAYERS)
        yield Line(f"KVCache {kind}: decode_attention, of a layer", attend, LAYERS)
        layer = numkv.ContiguousLayer(4096, HEADS, DIM, kind=kind, target="cuda")
        qkv = make.array((1, (Q_HEADS + 2 * HEADS) * DIM), np.float16)
        tables = [make.array((LENGTH, DIM // 2), np.float32) for _ in range(2)]

        yield from layer_lines(f"ContiguousLayer {kind}", layer, qkv, tables)
        if kind in ("fp16", "int8"):
            cache = numkv.KVCache(
                LAYERS, HEADS, DIM, max_seq_len=4096, kind=kind, target="cuda", rotate=True
            )
            yield Line(
                f"KVCache {kind}, rotated: a token of a layer", lambda c=cache: token(c), LAYERS
            )
            layer = numkv.PagedLayer(256, 16, HEADS, DIM, kind=kind, target="cuda")
            layer.reserve(4096)
            yield from layer_lines(f"PagedLayer {kind}", layer, qkv, tables)


def layer_lines(name: str, layer: Any, qkv: Any, tables: list[Any]) -> Iterator[Line]:
    """A token through a layer."""
    q = []

    def write() -> None:
        if len(layer) > 4000:
            layer.truncate(10)
        more = {"cos": tables[0], "sin": tables[1], "qk_mode": 2}
        q[:] = [layer.write(qkv, num_q_heads=Q_HEADS, **more)]

    yield Line(f"{name}: write", write)
    yield Line(f"{name}: decode_attention", lambda: layer.decode_attention(q[0]))


def cache_lines(make: Maker) -> Iterator[Line]:
    """A step of caches of many sequences."""
    numkv = make.numkv
    sizes = {"num_kv_heads": HEADS, "head_dim": DIM, "kind": "fp16", "target": "cuda"}
    paged = numkv.PagedKVCache(num_layers=LAYERS, num_blocks=512, block_size=16, **sizes)
    prompts = [np.arange(5) + 100 * i for i in range(B)]
    seqs = [paged.add(prompt) for prompt in prompts]
    row, q = make.array((B, HEADS, DIM), np.float16), make.array((B, Q_HEADS, DIM), np.float16)
    first = make.array((5 * B, HEADS, DIM), np.float16)
    step = paged.reserve(seqs, [5] * B)
    for layer in range(LAYERS):
        step.append(layer, first, first)
    paged.commit(step, token_ids=np.concatenate(prompts))

    def one(row=row, q=q):
        step = paged.reserve(seqs, [1] * B)
        for layer in range(LAYERS):
            step.append(layer, row, row)
            step.attention(layer, q)
        paged.rollback(step)

    yield Line(f"PagedKVCache fp16: a step of {B} sequences and {LAYERS} layers", one)
    tensors = Tensor(row), Tensor(q)
    name = f"PagedKVCache fp16: a step of {B} sequences and {LAYERS} layers, torch-like arrays"
    yield Line(name, lambda: one(*tensors))
    yield Line("PagedKVCache fp16: swap_out and swap_in of a sequence", lambda: swap(paged, seqs))
    bound_cache = numkv.KVCache(LAYERS, HEADS, DIM, max_seq_len=4096, kind="fp16", target="cuda")
    bound = bound_cache.bind(Q_HEADS, "fp16")
    rows, queries = make.array((1, HEADS, DIM), np.float16), make.array((1, Q_HEADS, DIM), np.float16)  # fmt: skip

    def forward_bound():
        if len(bound_cache) > 4000:
            bound_cache.truncate(10)
        now = bound.begin()
        for layer in range(LAYERS):
            now(layer, queries, rows, rows)
        bound_cache.advance()

    yield Line("KVCache fp16, bound: a call of a layer", forward_bound, LAYERS)
    small = numkv.KVCache(LAYERS, HEADS, DIM, max_seq_len=512, kind="fp16", target="cuda")
    some = make.array((64, HEADS, DIM), np.float16)

    def compact():
        small.truncate(0)
        for layer in range(LAYERS):
            small.append(layer, some, some)
        small.advance(64)
        small.compact(np.arange(0, 64, 2))

    yield Line(
        f"KVCache fp16: compact 64 tokens of {LAYERS} layers to 32, appended before", compact
    )
    yield from cell_lines(make, row, q)


def swap(cache: Any, seqs: list[int]) -> None:
    """Move a sequence to the host and back."""
    swapped = cache.swap_out(seqs[0])
    cache.remove(seqs[0])
    seqs[0] = cache.swap_in(swapped)


def cell_lines(make: Maker, row: Any, q: Any) -> Iterator[Line]:
    """Passes of caches of cells, of one that wraps two, and of an encoder's rows."""
    numkv = make.numkv
    wrapper = numkv.WrapperCache(
        numkv.CausalCache(window_left=128),
        numkv.CausalCache(),
        layer_types=[i % 2 for i in range(LAYERS)],
    )
    for name, cells in (("CausalCache", numkv.CausalCache()), ("WrapperCache", wrapper)):
        cells.init("fp16", B, 512, 64, target="cuda")
        at = [0]

        def forward(cells=cells, at=at):
            if at[0] >= 400:
                for s in range(B):
                    cells.remove(s, 0)
                at[0] = 0
            cells.start_forward(numkv.Batch(positions=[at[0]] * B, sequences=list(range(B))))
            for layer in range(LAYERS):
                cells.put(layer, row, row)
                cells.decode_attention(layer, q)
            at[0] += 1

        yield Line(f"{name} fp16: a pass of {B} sequences and {LAYERS} layers", forward)
    encoder = numkv.EncoderCache()
    encoder.init("fp16", 1, 512, 64, target="cuda")
    many = make.array((64, HEADS, DIM), np.float16)
    encoder.start_forward(numkv.Batch(positions=[0], sequences=[0]))
    encoder.put(0, many, many)
    one = make.array((1, Q_HEADS, DIM), np.float16)
    yield Line("EncoderCache fp16: put 64 rows", lambda: encoder.put(0, many, many))
    yield Line("EncoderCache fp16: decode_attention", lambda: encoder.decode_attention(0, one))


def other_lines(make: Maker) -> Iterator[Line]:
    """Operations outside of steps."""
    numkv, f32 = make.numkv, np.float32
    a, b = (
        (make.array((B, Q_HEADS, DIM), np.float16), make.array((B, Q_HEADS), f32)) for _ in range(2)
    )
    yield Line("merge_states fp16", lambda: numkv.merge_states(*a, *b))
    q, k = make.array((B, Q_HEADS, DIM), np.float16), make.array((B, HEADS, 512, DIM), np.float16)
    v, lens = make.array((B, HEADS, 512, DIM), np.float16), make.array((B,), np.int64)
    yield Line("decode_attention fp16", lambda: numkv.decode_attention(q, k, v, lens))
    yield Line("attention_weights fp16", lambda: numkv.attention_weights(q, k, lens))
    new, offsets = make.array((B, HEADS, 1, DIM), np.float16), make.array((B,), np.int64)
    yield Line("append fp16", lambda: numkv.append(new, new, k, v, offsets))
    ops, rows = make.target.ops, make.array((B, HEADS, DIM), f32)
    signs, out = make.array((DIM,), f32), make.array((B, HEADS, DIM), f32)
    yield Line("rotate_rows fp32", lambda: ops.rotate_rows(rows, "fp32", signs, False, out, "fp32"))
    yield Line("first_non_finite fp32", lambda: ops.first_non_finite(rows, "fp32"))
    pool, _, _ = make.pools("fp16", 64)
    words, slots, more = (
        make.target.words(pool),
        make.array((B,), np.int64),
        make.array((B,), np.int64),
    )
    yield Line(
        "copy_tokens fp16, within a pool", lambda: ops.copy_tokens(words, slots, words, more)
    )
    ids = make.array((B,), np.int32)
    yield Line("copy_blocks fp16", lambda: ops.copy_blocks(words, ids, words, ids))
    none, angles = make.array((0, 0, 0), f32), make.array((LENGTH, DIM // 2), f32)
    yield Line(
        "shift_rows fp16", lambda: ops.shift_rows(words, "fp16", none, slots, 3, angles, angles, False)
    )  # fmt: skip
    config = numkv.CompressorConfig(head_dim=DIM, bits=4)
    heads = numkv.MultiHeadCompressor(HEADS, config, target="cuda")
    many = make.array((64, HEADS, DIM), f32)
    heads.extend(many, many, check_finite=False)
    token = make.array((HEADS, DIM), f32)
    growing = numkv.MultiHeadCompressor(HEADS, config, target="cuda")
    yield Line("MultiHeadCompressor: append a token", lambda: growing.push_token(token, token))
    queries = make.array((HEADS, DIM), f32)
    yield Line("MultiHeadCompressor: attend", lambda: heads.attend(queries, check_finite=False))
    yield Line(
        "MultiHeadCompressor: attention_scores", lambda: heads.attention_scores(queries, check_finite=False)
    )  # fmt: skip


GROUPS = {
    "attention": attention_lines, "append": append_lines, "write": write_lines, "objects": object_lines,
    "caches": cache_lines, "others": other_lines,
}  # fmt: skip


def run(
    driver: stub_driver.Driver, groups: list[str], pattern: str, seconds: float
) -> Iterator[Measured]:
    """Measure the lines of some groups whose names match."""
    make = Maker()
    for group in groups:
        for line in GROUPS[group](make):
            if re.search(pattern, line.name):
                yield measure(driver, line, seconds)


def main(arguments: list[str] | None = None) -> int:
    """Print the ledger, and write its page if asked to."""
    parse = argparse.ArgumentParser(
        prog="python -m tools.cuda.ledger", description=(__doc__ or "").partition("\n")[0]
    )
    parse.add_argument("--groups", default=",".join(GROUPS), help="of " + ", ".join(GROUPS))
    parse.add_argument("--lines", default="", help="a regular expression: those lines only")
    parse.add_argument("--seconds", type=float, default=0.2, help="to time a line for")
    parse.add_argument("--page", type=Path, help="write a Markdown page")
    parse.add_argument(
        "--strict", action="store_true", help="exit with 1 where a line is over its limit"
    )
    given = parse.parse_args(arguments)
    driver = stub_driver.load()
    stand_in_for_torch()
    rows = []
    for row in run(driver, given.groups.split(","), given.lines, given.seconds):
        counts = ", ".join(f"{group} {n:.3g}" for group, n in row.groups.items() if n) or "nothing"
        more = ", ".join(f"{name} {n:.3g}" for name, n in row.others.items())
        print(
            f"{row.name}: {row.microseconds:.1f} us; {counts}{'; ' + more if more else ''}",
            flush=True,
        )
        rows.append(row)
    text = table(rows)
    if given.page:
        pages.write(given.page, "The CUDA target's ledger", __doc__ or "", text)
    return 1 if given.strict and any(over(row) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
