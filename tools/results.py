"""The calls whose results `same_results.py` compares; it runs this file once for each tree.

Only public names of numkv are used, so that the same calls run before and after modules have moved. Rows are random
numbers with fixed seeds. What a call gives is kept as a digest, an error as its type and message. A kind that the tree
does not know is left out.
"""

import argparse
import fnmatch
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import re
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np

import numkv
import numkv.blocks
import numkv.files

PLAIN = [(kind, kind) for kind in ("fp64", "fp32", "fp16", "bf16", "int8", "int4", "fp8_e4m3")]
APART = [("int8", "fp16"), ("fp32", "int8"), ("int8", "int4"), ("int4", "bf16"), ("fp16", "fp32")]
PAIRS = PLAIN + APART
#: Kinds that keep some tokens in full precision, with options that say which.
RESIDUAL = [("int8", "int8"), ("int4", "int4"), ("int8", "int4")]
#: Kinds that the simulator, which is slow, runs variants with; of others it runs cases "as it is" only.
VARIED = [("int8", "int8"), ("int8", "int4")]
#: Kinds of a cache that take fused projections in another kind than fp32.
FUSED = {"fp64": "fp64", "fp16": "fp16", "bf16": "bf16", "int8": "bf16", "int4": "fp16"}

CASES = {}


def case(*rows, cpu_only=False):
    """Register a function, once for each row of arguments; pairs among them are kinds of K and V."""

    def register(function):
        for row in rows or [()]:
            words = ["/".join(dict.fromkeys(a)) if isinstance(a, tuple) else str(a) for a in row]
            name = ":".join([function.__name__, *words])
            kinds = {kind for a in row if isinstance(a, tuple) for kind in a}
            variant = {"rotate", "windows", "sliding", "chunked", "wrapper"} & set(row)
            for_cpu = cpu_only or (bool(variant) and row[0] not in VARIED)
            CASES[name] = SimpleNamespace(run=function, row=row, kinds=kinds, cpu_only=for_cpu)
        return function

    return register


def known(kind):
    """Whether this tree has a kind."""
    try:
        numkv.kind(kind)
    except numkv.UnsupportedDType:
        return False
    return True


class Run:
    """Makes the arrays of the cases, and keeps digests of what comes out.

    `ours` is the folder where files are written, `theirs` that where those to be loaded are. On CUDA, which is the
    simulator here, `few` asks for small sizes.
    """

    def __init__(self, target, ours, theirs):
        self.target, self.ours, self.theirs = target, ours, theirs
        self.few = target == "cuda"
        self.results = {}
        self.case = ""

    def begin(self, name):
        """Start a case: its random numbers depend on nothing but its name."""
        self.case, self.rng = name, np.random.default_rng(zlib.crc32(name.encode()))

    def to(self, x):
        """An array on the target."""
        if self.target == "cpu" or not isinstance(x, np.ndarray):
            return x
        from numba import cuda

        return cuda.to_device(np.ascontiguousarray(x).reshape(x.shape))

    @staticmethod
    def host(x):
        """An array of the target, as NumPy's."""
        return x.copy_to_host() if hasattr(x, "copy_to_host") else x

    def draw(self, *shape, kind="fp32"):
        """Random rows on the target."""
        return self.to(self.rng.standard_normal(shape).astype(numkv.kind(kind).dtype))

    def note(self, what, value):
        """Keep the digest of an array, of several, or of anything whose ``repr`` says all."""
        self.results[f"{self.case} {what}"] = self.digest(value)

    def digest(self, value):
        """What is kept of a value."""
        sha = hashlib.sha256()
        for x in value if isinstance(value, list | tuple) else [value]:
            x = self.host(x)
            if isinstance(x, np.ndarray):
                sha.update(f"{x.dtype} {x.shape} ".encode() + np.ascontiguousarray(x).tobytes())
            else:
                sha.update(repr(x).encode())
        return sha.hexdigest()[:20]

    def attempt(self, what, call, *args, **options):
        """Keep what a call gives, or its error; returns the value, or None."""
        try:
            value = call(*args, **options)
        except Exception as error:
            self.results[f"{self.case} {what}"] = f"{type(error).__name__}: {error}"
            return None
        self.note(what, value)
        return value

    def kinds(self, kinds, **options):
        """Arguments of an object's constructor."""
        return {"kind": kinds[0], "v_kind": kinds[1], "target": self.target, **options}

    @functools.cached_property
    def tables(self):
        """Cosines and sines of 512 positions, for rotary dims of 32."""
        angles = np.arange(512)[:, None] * 10000.0 ** (-np.arange(16) / 16)
        return [self.to(f(angles).astype(np.float32)) for f in (np.cos, np.sin)]

    def shift(self, interleaved=False):
        """Turns keys that are moved."""
        return numkv.rope_shift(*self.tables, interleaved=interleaved)


# ---------------------------------------------------------------- objects, as each tree makes them


def in_full(window, sinks):
    """The argument for tokens in full precision; two numbers in trees before `numkv.FullPrecision`."""
    if hasattr(numkv, "FullPrecision"):
        return {"full_precision": numkv.FullPrecision(window, sinks)}
    return {"residual_window": window, "num_sink_tokens": sinks}


def many_layers(layers, heads, dim, **options):
    """A `PagedKVCache` whose layers have windows; lists of them in trees before `numkv.LayerSpec`."""
    if not hasattr(numkv, "LayerSpec"):
        return numkv.PagedKVCache(layers, heads, dim, **options)
    windows = options.pop("windows", None) or [-1] * layers
    alike = {k: options.pop(k) for k in ("kind", "v_kind", "rotate") if k in options}
    specs = [numkv.LayerSpec(heads, dim, window_left=window, **alike) for window in windows]
    return numkv.PagedKVCache(layers=specs, **options)


def stored_kinds(cache):
    """The kinds of K and of V of a cache or layer of one sequence."""
    if not hasattr(numkv, "LayerSpec"):
        return cache.kind, cache.v_kind
    spec = cache.layers[0] if hasattr(cache, "layers") else cache.spec
    return spec.kind, spec.v_kind


# ---------------------------------------------------------------- functions over raw pools

#: Query heads, kv heads, dims of K and V, lengths, and new tokens of each sequence or None for decode.
SHAPES = {
    "decode-few": (4, 2, 64, 64, (5, 0, 1, 70), None),
    "prefill-few": (3, 1, 40, 24, (9, 0, 33), (3, 0, 20)),
    "decode-16": (16, 1, 72, 72, (33, 0, 300, 1024), None),
    "decode-apart": (12, 4, 80, 64, (129, 17), None),
    "decode-odd": (5, 1, 33, 65, (90, 8), None),
    "decode-long": (8, 2, 128, 128, (4500, 100), None),
    "decode-alone": (8, 8, 96, 128, (2049,), None),
    "prefill-64": (8, 2, 64, 64, (100, 70, 0, 9), (100, 64, 0, 3)),
    "prefill-all": (4, 4, 72, 72, (80,), (66,)),
    "prefill-far": (16, 1, 128, 80, (1500, 33), (64, 33)),
    "prefill-7": (7, 1, 128, 128, (2300,), (7,)),
}
OPTIONS = {
    "plain": {},
    "scale": {"sm_scale": 0.3},
    "cap": {"logits_soft_cap": 3.0},
    "window": {"window_left": 20},
    "near": {"window_left": 0},
    "all": {"sm_scale": 0.2, "logits_soft_cap": 5.0, "window_left": 50, "sinks": True},
}


def form_of(kind, dim):
    """Arrays of the dtypes and ranks that a kind's rows and scales are stored in."""
    layer = numkv.ContiguousLayer(1, 1, dim, kind=kind)
    return layer.k, layer.k_scale if numkv.kind(kind).has_scales else None


def make_pools(run, kinds, heads, dims, blocks, size):
    """Pools of K and V on the target, and keywords with their scales; full of what must not get anywhere."""
    pools, scales = [], {}
    for name, kind, dim in zip("kv", kinds, dims, strict=True):
        rows, scale = form_of(kind, dim)
        shape = (blocks, heads, size)
        filler = 99 if rows.dtype.kind in "iu" else np.nan
        pools.append(run.to(np.full((*shape, rows.shape[3]), filler, rows.dtype)))
        if scale is not None:
            full = np.full((*shape, *scale.shape[3:]), np.nan, scale.dtype)
            scales[f"{name}_scale"] = run.to(full)
    return pools, scales


def fill(run, kinds, heads, dims, lens, size):
    """Pools with the rows of sequences, their scales and the block table; without a `size` contiguous caches."""
    paged, size = size is not None, size or max(lens) + 3
    needs = [-(-n // size) if paged else 1 for n in lens]
    order = iter(run.rng.permutation(sum(needs) + 2) if paged else range(len(lens)))
    table = np.full((len(lens), max([*needs, 1])), 10**6, np.int32)  # no such block
    for row, need in zip(table, needs, strict=True):
        row[:need] = [next(order) for _ in range(need)]
    pools, scales = make_pools(run, kinds, heads, dims, len([*order]) + sum(needs), size)
    slots = run.to(numkv.blocks.slot_mapping(table, lens, size, new_lens=lens))
    numkv.paged_append(*(run.draw(sum(lens), heads, d) for d in dims), *pools, slots, **scales)
    return pools, scales, run.to(table)


def attend(run, what, shape, kinds, q_kind, size, options):
    """Attention of one shape with some sets of options, with blocks of `size` tokens or contiguous (None)."""
    q_heads, kv_heads, *dims, lens, new = shape
    dims = [d + d % 2 if kind == "int4" else d for d, kind in zip(dims, kinds, strict=True)]
    paged = size is not None
    pools, scales, table = fill(run, kinds, kv_heads, dims, lens, size)
    cache = [*pools, table] if paged else pools
    queries = len(lens) if new is None else sum(new)
    q, sinks = run.draw(queries, q_heads, dims[0], kind=q_kind), run.draw(q_heads)
    batch = [run.to(np.array(lens, np.int32))]
    if new is not None:
        batch.append(run.to(np.cumsum([0, *new]).astype(np.int32)))
    stage, layout = "decode" if new is None else "prefill", "paged_" if paged else ""
    function = getattr(numkv, f"{layout}{stage}_attention")
    for name in options:
        given = OPTIONS[name] | scales | ({"sinks": sinks} if "sinks" in OPTIONS[name] else {})
        run.attempt(f"{what} {name}", function, q, *cache, *batch, return_lse=True, **given)
    out = run.to(np.empty((queries, q_heads, dims[1]), numkv.kind(q_kind).dtype))
    run.attempt(f"{what} out", function, q, *cache, *batch, out=out, **scales)
    run.note(f"{what} in place", out)
    if not paged and len(set(kinds)) == 1:
        for name in ("plain", "cap", "window"):
            given = OPTIONS[name] | {"k_scale": scales.get("k_scale")}
            run.attempt(
                f"{what} weights {name}", numkv.attention_weights, q, cache[0], *batch, **given
            )


@case(*itertools.product(PAIRS))
def attention(run, kinds):
    """Attention of all shapes, contiguous and paged, by one and by two threads."""
    for what, shape in list(SHAPES.items())[: 2 if run.few else None]:
        sets = [["plain", "all"], ["cap", "near", "all"]] if run.few else [OPTIONS, OPTIONS]
        for size, options in zip((None, 5 if "few" in what else 16), sets, strict=True):
            layout = "contiguous" if size is None else f"blocks of {size}"
            attend(run, f"{what} {layout}", shape, kinds, "fp32", size, options)
        if "long" in what or "64" in what or "far" in what:
            numba.set_num_threads(1)
            attend(run, f"{what} by one thread", shape, kinds, "fp32", 64, ["plain", "all"])
            numba.set_num_threads(2)
    if run.few:  # longer than a split of the simulator
        attend(run, "split", (2, 1, 16, 16, (200,), None), kinds, "fp32", 16, ["plain"])
        return
    wide = ["fp64"] if kinds in (*PLAIN[:2], *PLAIN[4:6]) else []
    for q_kind in [] if "fp64" in kinds else ["fp16", "bf16", *wide]:
        for what in ("decode-16", "prefill-64"):
            attend(run, f"{what} q {q_kind}", SHAPES[what], kinds, q_kind, 16, ["plain", "all"])


@case(*itertools.product(PAIRS, ["fp32", "fp16", "bf16", "own"]))
def paged_append(run, kinds, source):
    """Rows into slots of raw pools: few and many, some skipped, from rows of several dtypes."""
    quantised = [numkv.kind(kind).has_scales for kind in kinds]
    fits = {"fp32": True, "own": kinds[0] == kinds[1] and not any(quantised)}
    if not fits.get(source, all(quantised)):
        return
    rows_of = kinds[0] if source == "own" else source
    for dims, counts in (((64, 64), (1, 3, 40)), ((40, 72), (2, 9)), ((128, 128), (700,))):
        if run.few and dims[0] == 128:
            continue
        pools, scales = make_pools(run, kinds, 2, dims, 64, 16)
        for tokens in counts:
            slots = run.rng.permutation(64 * 16)[:tokens].astype(np.int64)
            slots[1::7] = -1
            rows = [run.draw(tokens, 2, dim, kind=rows_of) for dim in dims]
            append = functools.partial(numkv.paged_append, *rows, *pools, run.to(slots), **scales)
            run.attempt(f"{dims} {tokens} tokens", append)
        run.note(f"{dims} pools", [*pools, *scales.values()])


@case(*itertools.product(["fp64", "fp32", "fp16", "bf16"], ["function", "plan"]))
def append(run, kind, form):
    """Bit patterns of any kind, NaN among them, put at offsets that partly lie outside."""
    dtype = numkv.kind(kind).dtype
    for sizes in ((3, 2, 1, 9, 8, 12), (2, 3, 5, 16, 64, 33), (2, 4, 300, 512, 64, 64)):
        if run.few and sizes[2] == 300:
            continue
        batch, heads, new, capacity, *dims = sizes
        arrays = [
            run.to(
                np.frombuffer(
                    run.rng.bytes(batch * heads * n * d * dtype.itemsize), dtype
                ).reshape(batch, heads, n, d).copy()
            )
            for n, d in itertools.product((new, capacity), dims)
        ]  # fmt: skip
        offsets = run.to(np.array([0, capacity - new // 2 - 1, -1][:batch], np.int64))
        if form == "function":
            run.attempt(f"{sizes}", numkv.append, *arrays, offsets)
        else:
            described = numkv.AppendDescriptor(*sizes, dtype)
            plan = numkv.AppendPlan.select(described, target=run.target)
            run.note(f"{sizes} plan", (plan.sku, plan.workspace_size, plan.precision_guarantee))
            run.attempt(f"{sizes}", plan.run, numkv.AppendArgs(*arrays, offsets))
        run.note(f"{sizes} caches", [x.view(f"u{dtype.itemsize}") for x in arrays[2:]])


def write_options(run, mode, dim):
    """Arguments of a fused write in some mode, without positions."""
    options = {"num_q_heads": 4, "qk_mode": mode}
    if mode is not numkv.QKMode.COPY:
        options |= dict(zip(("cos", "sin"), run.tables, strict=True))
    if mode in (1, 4):
        options |= {"q_norm_weight": run.draw(dim), "k_norm_weight": run.draw(dim), "eps": 1e-5}
    return options


@case(*[(pair,) for pair in PLAIN])
def paged_write(run, kinds):
    """Fused writes into raw pools."""
    for mode, tokens in itertools.product(numkv.QKMode, (1, 6) if run.few else (1, 6, 200)):
        pools, scales = make_pools(run, kinds, 2, (64, 64), 32, 16)
        options = write_options(run, mode, 64) | scales
        if mode is not numkv.QKMode.COPY:
            options["positions"] = run.to(run.rng.integers(0, 512, tokens))
        slots = run.to(run.rng.permutation(512)[:tokens])
        qkv = run.draw(tokens, 8 * 64)
        what = f"{mode.name} {tokens} tokens"
        run.attempt(what, numkv.paged_write, qkv, *pools, slots, **options)
        run.note(f"{what} pools", [*pools, *scales.values()])


@case(*itertools.product(["fp64", "fp32", "fp16", "bf16"]))
def merge_states(run, kind):
    """Two partial results, some of which saw nothing."""
    for rows in (1, 5, 300):
        outs = [run.draw(rows, 3, 40, kind=kind) for _ in range(2)]
        lses = [run.rng.standard_normal((rows, 3)).astype(np.float32) for _ in range(2)]
        lses[0][::3] = -np.inf
        lses[1][::2] = -np.inf
        lses = [run.to(lse) for lse in lses]
        run.attempt(f"{rows}", numkv.merge_states, outs[0], lses[0], outs[1], lses[1])


@case(*itertools.product(["fp64", "fp32", "fp16", "bf16"], [False, True]))
def rope_shift(run, kind, interleaved):
    """Keys turned by offsets to both sides, outside of any cache."""
    keys, offsets = run.draw(20, 2, 40, kind=kind), run.to(np.arange(20) % 7 * 30 - 90)
    run.attempt("keys", run.shift(interleaved), 0, keys, offsets)


# ---------------------------------------------------------------- one sequence


def of_layer(run, layer):
    """The stored rows of a layer's sequence, as they lie."""
    table = layer.block_indices if layer.is_paged else [0]
    stored = [layer.k, layer.v]
    scaled = [kind.has_scales for kind in stored_kinds(layer)]
    stored += [layer.k_scale] if scaled[0] else []
    stored += [layer.v_scale] if scaled[1] else []
    rows = []
    for x in stored:
        by_head = np.moveaxis(run.host(x)[table], 1, 0)  # heads, blocks, block_size, …
        rows.append(by_head.reshape(len(by_head), -1, *by_head.shape[3:])[:, : layer.seq_len])
    return rows


def use_layer(run, what, layer, dim, counts):
    """Append rows, which lie apart, attend, weigh, compact, truncate."""
    for i, tokens in enumerate(counts):
        both = run.draw(tokens, 4, dim)
        layer.append(both[:, :2], both[:, 2:])
        q = run.draw(tokens, 6, dim)
        name = f"{what} {i} {tokens} tokens"
        run.attempt(name, layer.decode_attention, q, return_lse=True, window_left=[-1, 25][i % 2])
    run.note(f"{what} stored", of_layer(run, layer))
    q = run.draw(2, 6, dim)
    run.attempt(f"{what} weights", layer.attention_weights, q)
    run.attempt(f"{what} full precision", lambda: layer.quantised_tokens)
    keep = np.flatnonzero(run.rng.random(layer.seq_len) < 0.6)
    run.attempt(f"{what} compact", layer.compact, keep, shift=run.shift())
    run.attempt(f"{what} compacted", layer.decode_attention, q, return_lse=True)
    layer.truncate(layer.seq_len - 1)
    run.note(f"{what} truncated", [layer.seq_len, *of_layer(run, layer)])
    run.attempt(f"{what} after", layer.decode_attention, q, logits_soft_cap=2.0)


def layers(run, kinds, dim, capacity, **options):
    """A contiguous layer, and a paged one whose blocks are taken out of order."""
    made = run.kinds(kinds, **options)
    yield "contiguous", numkv.ContiguousLayer(capacity, 2, dim, **made)
    own = {k: options.pop(k) for k in in_full(1, 1) if k in options}
    pool = numkv.PagedPool(2 * capacity // 8, 8, 2, dim, **run.kinds(kinds, **options))
    first, second = (numkv.PagedLayer(capacity // 8, 8, 2, dim, pool=pool) for _ in "12")
    for layer in (first, second, first):
        layer.append(*(run.draw(12, 2, dim) for _ in "kv"))
    first.free()
    yield "paged", numkv.PagedLayer(capacity // 8, 8, 2, dim, pool=pool, **own)


@case(*itertools.product(PAIRS, ["as it is", "rotate"]))
def layer(run, kinds, how):
    """Layers in both layouts."""
    for dim in (64,) if run.few else (64, 72, 128):
        counts = (1, 9, 1) if run.few else (1, 3, 40, 1, 400, 1)
        for what, one in layers(run, kinds, dim, 512, rotate=how == "rotate"):
            use_layer(run, f"{what} {dim}", one, dim, counts)


@case(*itertools.product(RESIDUAL, ["as it is", "rotate"]))
def residual_layer(run, kinds, how):
    """Layers that keep some tokens in full precision."""
    options = {**in_full(6, 3), "rotate": how == "rotate"}
    for what, one in layers(run, kinds, 64, 128, **options):
        use_layer(run, what, one, 64, (1, 9, 1) if run.few else (1, 3, 40, 1, 1, 20, 1))


@case(*itertools.product(PAIRS, ["as it is", "rotate"]))
def write(run, kinds, how):
    """Fused writes in all modes."""
    sources = ["fp32"]
    if kinds[0] == kinds[1] and kinds[0] in FUSED and how != "rotate":
        sources.append(FUSED[kinds[0]])
    for source, mode in itertools.product(sources, numkv.QKMode):
        dim = 72 if mode % 2 else 64
        for what, one in layers(run, kinds, dim, 256, rotate=how == "rotate"):
            options = write_options(run, mode, dim)
            for tokens in (1, 5) if run.few else (1, 5, 190, 1):
                qkv = run.draw(tokens, 8 * dim, kind=source)
                name = f"{what} {source} {mode.name} {tokens} tokens"
                at = {} if tokens != 5 or mode == 0 else {"pos_offset": 300}
                run.attempt(name, one.write, qkv, **options, **at)
            run.note(f"{what} {source} {mode.name} stored", of_layer(run, one))


@case(("fp16",), ("int8",), ("int4",), cpu_only=True)
def jit(run, kind):
    """Rows loaded in compiled code."""

    @numba.njit
    def load(layer, position, k, v):
        layer.load_k(position, 1, k)
        layer.load_v(position, 1, v)
        return layer.slot(position)

    layer = numkv.PagedLayer(4, 4, 2, 32, kind=kind)
    layer.append(*(run.draw(9, 2, 32) for _ in "kv"))
    rows = np.empty((2, 32), np.float32)
    for position in range(9):
        run.note(f"{position}", [load(layer.jit, position, *rows), rows])


# ---------------------------------------------------------------- one sequence, all layers


def of_cache(cache, run):
    """All that a cache shows of its rows."""
    said = re.sub(r"full_precision=FullPrecision\((.*?)\)", r"residual_\1", repr(cache))
    shown = [len(cache), said]
    for i in range(cache.num_layers):
        shown += [cache.k(i), cache.v(i)]
        for side, kind in zip("kv", stored_kinds(cache), strict=True):
            if kind.has_scales and "residual_" not in said:
                shown += [getattr(cache, f"{side}_{form}")(i) for form in ("codes", "scales")]
    return shown


def use_cache(run, cache, dims, counts):
    """Let a cache grow, then take back, copy, and drop."""
    for step, tokens in enumerate(counts):
        for i in range(cache.num_layers):
            rows = [run.draw(tokens, 2, dim) for dim in dims]
            cache.append(i, *(rows if tokens > 1 else (x.reshape((2, x.shape[2])) for x in rows)))
            q = run.draw(tokens, 8, dims[0])
            options = {"return_lse": True} if step % 2 else {"logits_soft_cap": 4.0}
            run.attempt(f"step {step} layer {i}", cache.decode_attention, i, q, **options)
        cache.advance(tokens)
    run.attempt("rows", of_cache, cache, run)
    run.attempt("full precision", cache.quantised_tokens, 0)
    twin, q = cache.copy(), run.draw(3, 8, dims[0])
    twin.truncate(len(twin) - 4)
    twin.append(0, *(run.draw(2, 2, dim) for dim in dims))
    run.attempt("truncated", twin.decode_attention, 0, q)
    run.attempt("pending", of_cache, twin, run)
    weights = run.attempt("weights", cache.attention_weights, 1, q, window_left=30)
    heaviest = run.attempt(
        "heaviest", numkv.compaction.heavy_hitters, weights, len(cache) // 2, 2, 3
    )
    run.attempt("compact", cache.compact, heaviest, shift=run.shift())
    run.attempt("compacted", of_cache, cache, run)
    run.attempt("attention", cache.decode_attention, 1, q, sinks=run.draw(8), return_lse=True)
    keep = np.sort(run.rng.permuted(np.tile(np.arange(len(cache)), (2, 1)), axis=1)[:, :5])
    run.attempt("compact by layer", cache.compact, keep)
    run.attempt("in the end", of_cache, cache, run)


@case(*itertools.product(PAIRS, ["as it is", "rotate"]))
def kv_cache(run, kinds, how):
    """A cache of two layers that grows."""
    dims = (64, 48)
    options = run.kinds(kinds, head_dim_v=dims[1], rotate=how == "rotate")
    counts = (1, 1, 9) if run.few else (1, 1, 30, 1, 100, 1)
    use_cache(run, numkv.KVCache(2, 2, dims[0], **options), dims, counts)


@case(*itertools.product(RESIDUAL, ["as it is", "rotate"]))
def residual_cache(run, kinds, how):
    """A bounded cache that keeps some tokens in full precision."""
    options = run.kinds(kinds, rotate=how == "rotate", **in_full(7, 2))
    cache = numkv.KVCache(2, 2, 64, max_seq_len=150, **options)
    use_cache(run, cache, (64, 64), (1, 8, 9) if run.few else (1, 3, 30, 1, 100, 1))
    rows = run.draw(200, 2, 64)
    run.attempt("full", cache.append, 0, rows, rows)


# ---------------------------------------------------------------- many sequences in blocks

SIZES = {"num_blocks": 64, "block_size": 8}


def compute(run, what, cache, sequences, new_tokens, accepted=None, **options):
    """A step of a model: reserve, write, attend, commit."""
    step = cache.reserve(sequences, [len(tokens) for tokens in new_tokens])
    for i in range(cache.num_layers):
        if options and i:
            shape, call = (step.num_tokens, 12 * 64), functools.partial(step.write, i, **options)
            q = run.attempt(f"{what} write {i}", call, run.draw(*shape))
        else:
            step.append(i, *(run.draw(step.num_tokens, 2, 64) for _ in "kv"))
            q = run.draw(step.num_tokens, 8, 64)
        run.attempt(f"{what} layer {i}", step.attention, i, q, return_lse=True)
        run.attempt(f"{what} weights {i}", step.attention_weights, i, q)
    cache.commit(step, accepted, token_ids=np.concatenate(new_tokens))
    lengths = [(cache.length(s), cache.cached_len(s)) for s in cache.sequences]
    run.note(f"{what} lengths", [lengths, cache.num_free])


def of_swapped(swapped, size):
    """What a sequence in host memory holds, without the slots past its end."""
    held = [swapped.length, swapped.tokens, swapped.starts, swapped.geometry, *swapped.logical]
    blocks = np.concatenate(swapped.logical)
    there = (blocks[:, None] * size + np.arange(size)).reshape(-1) < swapped.length
    for x in itertools.chain(*swapped.buffers):
        if len(x) == len(blocks):  # scales of float kinds are empty
            held.append(np.moveaxis(x, 2, 1).reshape(-1, x.shape[1], *x.shape[3:])[there])
    return held


def paged_story(run, kinds, **options):
    """A cache of four sequences that share blocks, after steps with prefixes, forks, refusals and a rollback."""
    cache = many_layers(2, 2, 64, **SIZES, **run.kinds(kinds, **options))
    prompt = np.arange(17 if run.few else 60)
    first = cache.add(prompt, extra={"adapter": 7})
    compute(run, "prompt", cache, [first], [prompt])
    second = cache.add(np.append(prompt, [7, 8, 9]), extra={"adapter": 7})
    rest = np.append(prompt, [7, 8, 9])[cache.cached_len(second) :]
    fused = write_options(run, numkv.QKMode.NORM_HALF_SPLIT, 64) | {"num_q_heads": 8}
    other = cache.add()
    compute(run, "shared", cache, [second, other], [rest, [1, 2, 3]], **fused)
    third = cache.fork(second)
    compute(
        run, "forked", cache, [first, second, third, other], [[1], [2], [3], [4, 5]], [1, 1, 1, 0]
    )
    lost = cache.reserve([first], [2])
    lost.append(0, *(run.draw(2, 2, 64) for _ in "kv"))
    cache.rollback(lost)
    return cache, (first, second, third, other)


def show_paged(run, what, cache):
    """Note how a cache accounts, and attention over it."""
    cache.check()
    run.note(f"{what} stats", [repr(cache.stats()), repr(cache)])
    q = run.draw(len(cache.sequences), 8, 64)
    for i in range(cache.num_layers):
        run.attempt(f"{what} layer {i}", cache.decode_attention, i, cache.sequences, q)
    for seq in cache.sequences:
        run.attempt(f"{what} swapped {seq}", lambda s=seq: of_swapped(cache.swap_out(s), 8))


@case(*itertools.product(PAIRS, ["as it is", "rotate", "windows"]))
def paged_cache(run, kinds, how):
    """Prefixes, forks, rollbacks, swapping and compaction."""
    options = {"as it is": {}, "rotate": {"rotate": True}, "windows": {"windows": [-1, 10]}}[how]
    cache, (first, second, third, other) = paged_story(run, kinds, **options)
    show_paged(run, "made", cache)
    run.attempt("weights", cache.attention_weights, 0, second, run.draw(1, 8, 64))
    length = cache.length(second)
    keep = [i for i in range(length) if i % 3 or i > length - 12]
    run.attempt("compact", cache.compact, second, keep, shift=run.shift())
    run.attempt("truncate", cache.truncate, third, 17 if how != "windows" else length - 1)
    run.attempt("pin", cache.pin, first)
    swapped = cache.swap_out(third)
    cache.remove(third)
    third = run.attempt("swap in", cache.swap_in, swapped)
    show_paged(run, "changed", cache)
    compute(run, "after", cache, [second, other], [[5], [6]])
    cache.remove(first)
    run.attempt("too much", cache.reserve, [other], [10**4])
    show_paged(run, "in the end", cache)


@case(*itertools.product(PAIRS, ["as it is", "rotate"]))
def loads(run, kinds, how):
    """Sequences and whole caches written by the tree that is compared with (by this one, if it is that)."""
    if run.few and kinds not in VARIED:
        return
    name = f"{'-'.join(kinds)} {how}.safetensors"
    options = {"rotate": how == "rotate", "windows": [-1, 10] if kinds[0] == "fp16" else None}
    quiet = Run(run.target, run.ours, run.theirs)  # what it notes is for nobody
    quiet.begin(run.case)
    cache, sequences = paged_story(quiet, kinds, **options)
    numkv.files.save_sequences(run.ours / f"one {name}", [cache.swap_out(sequences[1])])
    numkv.files.save_sequences(run.ours / name, [cache.swap_out(s) for s in sequences])
    for path in (run.theirs / f"one {name}", run.theirs / name):
        if not path.exists():  # a kind that they do not have
            continue
        found = run.attempt(f"{path.stem} read", numkv.files.load_sequences, path)
        into = many_layers(2, 2, 64, **SIZES, **run.kinds(kinds, **options))
        for i, sequence in enumerate(found or []):
            run.note(f"{path.stem} {i} held", of_swapped(sequence, 8))
            run.attempt(f"{path.stem} {i} taken", into.swap_in, sequence)
        show_paged(run, path.stem, into)


# ---------------------------------------------------------------- many sequences in cells


def of_cells(**options):
    """A `CausalCache` with a window or chunks; other classes in trees before it had them."""
    name = "SlidingWindowCache" if "window_left" in options else "ChunkedCache"
    return getattr(numkv, name, numkv.CausalCache)(**options)


CELLS = {
    "causal": lambda shift: numkv.CausalCache(shift=shift),
    "sliding": lambda shift: of_cells(window_left=5, memory=9, shift=shift),
    "chunked": lambda shift: of_cells(chunk_size=4, shift=shift),
    "wrapper": lambda shift: numkv.WrapperCache(
        of_cells(window_left=3, shift=shift), numkv.CausalCache(shift=shift), layer_types=[0, 1]
    ),
}


def forward(run, what, cache, positions, sequences, dims, **options):
    """Store a batch in two layers, and attend."""
    batch = numkv.Batch(positions=positions, sequences=sequences)
    run.attempt(f"{what} start", cache.start_forward, batch, **options)
    for i in range(2):
        rows = [run.draw(len(positions), 2, dim) for dim in dims]
        run.attempt(f"{what} put {i}", cache.put, i, *rows)
        run.attempt(f"{what} get {i}", cache.get, i)
        q = run.draw(len(positions), 6, dims[0])
        run.attempt(f"{what} attention {i}", cache.decode_attention, i, q, return_lse=True)
        run.attempt(f"{what} weights {i}", weights, cache, i, q)


def weights(cache, layer, q):
    """Weights of the sequences of a batch, in order."""
    found = cache.attention_weights(layer, q)
    return [x for seq in sorted(found) for x in (seq, found[seq])]


@case(*itertools.product(PAIRS, CELLS, ["as it is", "rotate"]))
def cells(run, kinds, which, how):
    """Several sequences that share cells, move and are removed."""
    if kinds in APART and (how == "rotate" or which != "causal"):
        return
    dims = (64, 48)
    cache = CELLS[which](run.shift(interleaved=which == "chunked"))
    if which == "causal" and how != "rotate":
        cache.set_config(numkv.CacheConfig(padding=4, permuted_v=True, mask_dtype="fp16"))
    with cache:
        kind, v_kind = kinds
        cache.init(kind, 3, 32, 16, run.target, v_kind=v_kind, rotate=how == "rotate")
        forward(run, "first", cache, [*range(8), *range(5)], [0] * 8 + [1] * 5, dims)
        forward(run, "next", cache, [8, 5], [0, 1], dims)
        run.attempt("remove within", cache.remove, 1, 3, 5)
        run.attempt("copy", cache.copy_prefix, 0, 2, 4)
        run.attempt("remove shared", cache.remove, 0, 1, 3)
        forward(run, "copied", cache, [4, 9, 5], [2, 0, 2], dims)
        run.attempt("remove", cache.remove, 0, 6, 8)
        run.attempt("remove first", cache.remove, 1, 0, 2)
        forward(run, "moved", cache, [8, 4], [0, 1], dims)
        run.attempt("resume", lambda: [cache.can_resume(s, p) for s in range(4) for p in range(12)])
        run.attempt("compact", cache.compact, 1, [0, 4])
        forward(run, "compacted", cache, [2], [1], dims)
        forward(run, "reserved", cache, [9], [0], dims, reserve=True)
        run.attempt("too much", cache.start_forward, numkv.Batch(list(range(99)), [7] * 99))
        if which == "causal":
            run.attempt("positions", lambda: [cache.positions(s) for s in cache.sequences])
            cache.start_forward(numkv.Batch([9, 10, 11], [0, 0, 0]))
            cache.set_causal([0])
            run.attempt("not causal", cache.get, 0)


@case(*itertools.product(PLAIN, ["as it is", "rotate"]))
def encoder(run, kinds, how):
    """An encoder's rows."""
    cache = numkv.EncoderCache()
    cache.init(kinds[0], 1, 32, 8, run.target, rotate=how == "rotate")
    for count in (7, 30):
        batch = numkv.Batch(positions=[0, 1], sequences=[0, 0], multimodal=[1])
        run.attempt(f"{count} start", cache.start_forward, batch)
        run.attempt(f"{count} put", cache.put, 0, run.draw(count, 2, 64), run.draw(count, 2, 48))
        run.attempt(f"{count} get", cache.get, 0)
        q = run.draw(3, 4, 64)
        run.attempt(f"{count} attention", cache.decode_attention, 0, q, return_lse=True)
        run.note(f"{count} cached", cache.encoder_cached)


# ---------------------------------------------------------------- compressed heads, choices, errors


@case(*[(4, 64, None), (3, 72, 16), (2, 128, None), (6, 64, 64), (8, 48, None), (1, 15, 5)])
def compressor(run, bits, dim, projections):
    """Vectors of one head, and of several."""
    config = numkv.CompressorConfig(dim, bits=bits, projections=projections, seed=bits)
    one = numkv.HeadCompressor(config, target=run.target)
    many = numkv.MultiHeadCompressor(2, config, num_q_heads=6, target=run.target)
    for count in (1, 12 if run.few else 90):
        one.extend(run.draw(count, dim), run.draw(count, dim, kind="bf16"))
        many.extend(run.draw(count, 2, dim), run.draw(count, 2, dim))
    one.push(run.draw(dim), run.draw(dim))
    many.push_token(run.draw(2, dim), run.draw(2, dim))
    twin = many.copy()
    twin.evict_outside_window(7)
    queries = {"one": run.draw(dim), "many": run.draw(6, dim), "twin": run.draw(6, dim)}
    for (what, q), heads in zip(queries.items(), (one, many, twin), strict=True):
        run.note(what, [len(heads), heads.compression_ratio, heads.bytes_per_token, repr(heads)])
        for name, given in (("attention_scores", [q]), ("attend", [q]), ("decode_keys", []),
                            ("decode_values", [])):  # fmt: skip
            run.attempt(f"{what} {name}", getattr(heads, name), *given)


@case()
def choices(run):
    """What to keep, where blocks lie, what prefixes are called."""
    weights, keep = np.abs(run.rng.standard_normal((2, 40))), numkv.compaction
    run.attempt("first and recent", keep.first_and_recent, 40, 3, 9)
    run.attempt("heavy hitters", keep.heavy_hitters, weights, 20, 2, 5)
    run.attempt("seen by recent", keep.seen_by_recent, weights, 20, 6, kernel_size=5)
    run.attempt("max pool", keep.max_pool, weights, 3)
    tally = numkv.AttentionTally(num_kv_heads=2)
    for n in (10, 12, 40):
        tally.add(weights[:, :n])
    tally.compact([0, 3, 9, 30])
    run.attempt("tally", lambda: tally.weights)
    csr = run.attempt("csr", numkv.blocks.block_table_to_csr, [[7, 2, 9], [5, -1, -1]], [33, 3], 16)
    run.attempt("table", numkv.blocks.csr_to_block_table, *csr, 16)
    digests = functools.partial(numkv.blocks.block_digests, np.arange(40), 8)
    run.attempt("digests", digests)
    run.attempt("digests of an adapter", functools.partial(digests, extra={"adapter": 7}))
    for kind in filter(known, ["fp64", "fp32", "fp16", "bf16", "int8", "int4", "f16", "bfloat16"]):
        found = numkv.kind(kind)
        facts = [found.name, found.bytes_per_element, found.has_scales, found.dtype]
        run.note(kind, [*facts, found.bytes_per_token(8, 128), found.bytes_per_token(2, 64, 96)])


@case()
def errors(run):
    """What is refused, and in which words."""
    place = {"target": run.target}
    layer = numkv.ContiguousLayer(8, 2, 64, kind="int8", **place)
    paged = numkv.PagedLayer(2, 4, 2, 64, **place)
    cache = numkv.KVCache(2, 2, 64, max_seq_len=4, **place)
    many = numkv.PagedKVCache(2, 2, 64, num_blocks=4, block_size=16, **place)
    rows, q = run.draw(3, 2, 64), run.draw(3, 4, 64)
    nan = np.ones((3, 2, 64), np.float32)
    nan[1, 1, 5] = np.nan
    qkv, k, lens = run.draw(2, 8 * 64), run.draw(1, 2, 8, 64), run.to(np.array([8], np.int32))
    slots, pools = run.to(np.array([0, 9, 99])), [run.draw(2, 2, 4, 64) for _ in "kv"]
    cos, sin = run.tables
    calls = {
        "not finite": lambda: layer.append(run.to(nan), rows),
        "more queries": lambda: layer.decode_attention(q),
        "head dim": lambda: layer.append(run.draw(3, 2, 32), rows),
        "heads": lambda: layer.append(run.draw(3, 1, 64), rows),
        "full": lambda: [paged.append(rows, rows) for _ in range(3)],
        "no weights": lambda: layer.write(qkv, num_q_heads=4, qk_mode=1, cos=cos, sin=sin),
        "no tables": lambda: layer.write(qkv, num_q_heads=4, qk_mode=2, cos=None, sin=None),
        "width": lambda: layer.write(qkv, num_q_heads=3, qk_mode=0, cos=None, sin=None),
        "length": lambda: setattr(layer, "seq_len", 9),
        "group": lambda: numkv.decode_attention(run.draw(1, 3, 64), k, k, lens),
        "q dtype": lambda: numkv.decode_attention(slots.reshape((3, 1, 1)), k, k, lens),
        "cap": lambda: numkv.decode_attention(run.draw(1, 4, 64), k, k, lens, logits_soft_cap=-1.0),
        "window": lambda: numkv.decode_attention(run.draw(1, 4, 64), k, k, lens, window_left=-2),
        "slots": lambda: numkv.paged_append(rows, rows, *pools, slots, validate=True),
        "too long": lambda: cache.append(0, run.draw(5, 2, 64), run.draw(5, 2, 64)),
        "layer": lambda: cache.append(2, rows, rows),
        "advance": lambda: cache.advance(),
        "no codes": lambda: cache.k_codes(0),
        "truncate": lambda: cache.truncate(1),
        "no sequence": lambda: many.reserve([5], [1]),
        "no room": lambda: many.reserve([many.add()], [99]),
        "no step": lambda: many.commit(many.reserve([many.add()], [1])),
        "window memory": lambda: of_cells(window_left=5, memory=2).init("fp32", 1, 8, 8),
        "no init": lambda: numkv.CausalCache().put(0, rows, rows),
        "bits": lambda: numkv.CompressorConfig(64, bits=17),
        "no kind": lambda: numkv.KVCache(1, 1, 8, kind="int3"),
        "odd int4": lambda: numkv.KVCache(1, 1, 7, kind="int4"),
        "target": lambda: numkv.KVCache(1, 1, 8, target="tpu"),
        "keep": lambda: layer.compact([3]),
        "not a file": lambda: numkv.files.load_sequences("there is no such file"),
        "extents": lambda: numkv.AppendPlan.select(numkv.AppendDescriptor(1, 1, -1, 8, 8, 8, "f4")),
    }
    for what, call in calls.items():
        run.attempt(what, call)
    run.note("as it was", [layer.seq_len, paged.seq_len, len(cache), many.num_free, *pools])


# ---------------------------------------------------------------- the run


def simulator():
    """The tests' simulator, which is fast and runs threads in an order that comes again."""
    path = Path(__file__).resolve().parents[1] / "tests" / "simulator.py"
    spec = importlib.util.spec_from_file_location("simulator", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install()
    return module


def main():
    """Run the cases and write their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=["cpu", "cuda"])
    parser.add_argument("ours", type=Path, help="where results and files are written")
    parser.add_argument("theirs", type=Path, help="where the files to load are")
    parser.add_argument("--only", default="*", help="a pattern of the names of cases")
    args = parser.parse_args()
    simulated = simulator() if args.target == "cuda" else None
    run, seconds, broken = Run(args.target, args.ours, args.theirs), {}, []
    for name, one in CASES.items():
        skip = one.cpu_only and args.target != "cpu"
        if skip or not fnmatch.fnmatch(name, args.only) or not all(map(known, one.kinds)):
            continue
        started = time.perf_counter()
        run.begin(name)
        if simulated:
            simulated.seed(zlib.crc32(name.encode()))
        try:
            one.run(run, *one.row)
        except Exception as error:
            run.results[f"{name} ends"] = f"{type(error).__name__}: {error}"
            broken.append(name)
        seconds[name] = round(time.perf_counter() - started, 2)
    found = {"package": os.path.dirname(numkv.__file__), "results": run.results}
    found |= {"seconds": seconds, "broken": broken}
    (args.ours / "results.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    sys.exit(main())
