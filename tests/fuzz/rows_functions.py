"""The table's rows of functions over a caller's own arrays."""

from __future__ import annotations

import contextlib
import io

import numpy as np

import numkv
from fuzz.common import (
    ANGLES,
    CAP,
    CHECK_FINITE,
    DIMS,
    EXTRA,
    FLAG,
    KIND,
    LSE,
    OUT,
    SINKS,
    SM_SCALE,
    WINDOW,
    WRITE,
    choose_kind,
    integer,
    one_of,
    stored,
)
from fuzz.hostile import OMIT
from fuzz.play import Arg, Draw, Pair, Row, Scene
from fuzz.sight import PARENTS, SIGHT

__all__ = ["SCENES", "Attention", "Books"]


class Attention(Scene):
    """Contiguous caches and paged pools of the caller's own, of one kind."""

    def __init__(self, rng) -> None:
        super().__init__(rng)
        d = Draw(self, rng)
        self.kind = choose_kind(rng)
        self.heads = d.choice([1, 2, 2, 3])
        self.q_heads = self.heads * d.choice([1, 1, 2, 4])
        self.dim = self.dim_v = d.choice(DIMS)
        if d.randrange(4) == 0:
            self.dim_v = d.choice(DIMS)
        self.num_seqs, self.block = d.choice([1, 1, 2, 3]), d.choice([1, 2, 3, 5, 16])
        self.num_blocks = d.choice([1, 4, 7])
        self.k, self.k_scale = stored(
            d, (self.num_seqs, self.heads, d.choice([1, 3, 17, 40]), self.dim), self.kind
        )
        self.v, self.v_scale = stored(d, (*self.k.shape[:3], self.dim_v), self.kind)
        pool = (self.num_blocks, self.heads, self.block)
        self.k_pool, self.k_pool_scale = stored(d, (*pool, self.dim), self.kind)
        self.v_pool, self.v_pool_scale = stored(d, (*pool, self.dim_v), self.kind)
        self.paged = False

    def tokens_of_queries(self, d: Draw) -> int:
        return self.num_seqs

    def own_arrays(self) -> list[np.ndarray]:
        return [self.k, self.v, self.k_pool, self.v_pool]

    def held(self, side: int) -> list[object]:
        return []

    def capacity(self, name: str) -> int:
        return self.num_blocks * self.block if name.startswith("paged") else self.k.shape[2]


def of_scene(field: str, family: str = "floats") -> Arg:
    """An array of the scene, or nothing where there is none."""

    def make(d: Draw) -> object:
        x = getattr(d.scene, field)
        return OMIT if x is None else x

    return Arg(family, make, True)


def lengths(paged: bool) -> Arg:
    """Lengths of the sequences, within their capacity."""

    def make(d: Draw) -> np.ndarray:
        s = d.scene
        most = s.num_blocks * s.block if paged else s.k.shape[2]
        least = min(most, int(d.given.get("cu_seqlens_q") is not None) * 4)
        return np.array(
            [d.randrange(least, most + 1) for _ in range(s.num_seqs)],
            d.choice([np.int32, np.int64]),
        )

    return Arg("integers", make)


def _table(d: Draw) -> np.ndarray:
    s = d.scene
    return np.array(
        [[d.randrange(s.num_blocks) for _ in range(s.num_blocks)] for _ in range(s.num_seqs)],
        np.int32,
    )


def _starts(d: Draw) -> np.ndarray:
    counts = [d.randrange(0, 3) for _ in range(d.scene.num_seqs)]
    d.n = sum(counts)
    return np.concatenate([[0], np.cumsum(counts)]).astype(d.choice([np.int32, np.int64]))


def _ragged_queries(d: Draw) -> np.ndarray:
    from fuzz.common import QUERIES

    return d.floats((d.n, d.scene.q_heads, d.scene.dim), d.choice(QUERIES))


def _one_query_each(d: Draw) -> np.ndarray:
    from fuzz.common import QUERIES

    return d.floats((d.scene.num_seqs, d.scene.q_heads, d.scene.dim), d.choice(QUERIES))


TABLE = Arg("integers", _table)
STARTS = Arg("integers", _starts, True)
VALIDATE = {"validate": FLAG}
CONTIGUOUS = {"k": of_scene("k"), "v": of_scene("v")}
POOLS = {"k_pool": of_scene("k_pool"), "v_pool": of_scene("v_pool")}
SCALES = {"k_scale": of_scene("k_scale"), "v_scale": of_scene("v_scale")}
POOL_SCALES = {"k_scale": of_scene("k_pool_scale"), "v_scale": of_scene("v_pool_scale")}
ATTENTION = {
    "sm_scale": SM_SCALE,
    "logits_soft_cap": CAP,
    "window_left": WINDOW,
    "sinks": SINKS,
    "return_lse": FLAG,
    "out": OUT,
    "causal": FLAG,
    **SIGHT,
}
ONE_EACH, RAGGED = Arg("floats", _one_query_each), Arg("floats", _ragged_queries)


def _token_rows(width: str) -> Arg:
    def make(d: Draw) -> np.ndarray:
        d.n = d.n or d.choice([1, 1, 2, 3])
        return d.floats((d.n, d.scene.heads, getattr(d.scene, width)))

    return Arg("floats", make)


def _slots(d: Draw) -> np.ndarray:
    size = d.scene.num_blocks * d.scene.block
    return np.array([d.randrange(-1, size) for _ in range(d.n)], d.choice([np.int32, np.int64]))


SLOTS = Arg("integers", _slots)
PAGED_WRITTEN = {
    "k_pool": of_scene("k_pool", "output"),
    "v_pool": of_scene("v_pool", "output"),
    "slot_mapping": SLOTS,
    "k_scale": of_scene("k_pool_scale", "output"),
    "v_scale": of_scene("v_pool_scale", "output"),
    "check_finite": CHECK_FINITE,
    "validate": FLAG,
}


def _positions(d: Draw) -> np.ndarray:
    if not d.given.get("qk_mode"):
        return OMIT
    return np.array([d.randrange(40) for _ in range(d.n)], d.choice([np.int32, np.int64]))


def _output_rows(d: Draw) -> np.ndarray:
    from fuzz.common import QUERIES

    if "o_a" in d.given:
        return d.floats(d.given["o_a"].shape, d.given["o_a"].dtype)
    return d.floats((d.choice([1, 2, 5]), d.scene.q_heads, d.scene.dim_v), d.choice(QUERIES))


def _lse_of_rows(d: Draw) -> np.ndarray:
    return d.floats(d.given["o_a"].shape[:2])


ATTENTION_ROWS = [
    Row(
        "decode_attention",
        {
            "q": ONE_EACH,
            **CONTIGUOUS,
            "seq_lens": lengths(False),
            **ATTENTION,
            **SCALES,
            **VALIDATE,
        },
        weight=3,
    ),
    Row(
        "prefill_attention",
        {
            "cu_seqlens_q": STARTS,
            "q": RAGGED,
            **CONTIGUOUS,
            "seq_lens": lengths(False),
            **ATTENTION,
            **SCALES,
            **VALIDATE,
        },
        weight=3,
    ),
    Row(
        "paged_decode_attention",
        {
            "q": ONE_EACH,
            **POOLS,
            "block_table": TABLE,
            "seq_lens": lengths(True),
            **ATTENTION,
            **POOL_SCALES,
            **VALIDATE,
        },
        weight=3,
    ),
    Row(
        "paged_prefill_attention",
        {
            "cu_seqlens_q": STARTS,
            "q": RAGGED,
            **POOLS,
            "block_table": TABLE,
            "seq_lens": lengths(True),
            **ATTENTION,
            **POOL_SCALES,
            **VALIDATE,
        },
        weight=3,
    ),
    Row(
        "attention_weights",
        {
            "cu_seqlens_q": STARTS,
            "q": RAGGED,
            "k": of_scene("k"),
            "seq_lens": lengths(False),
            "lse": LSE,
            "sm_scale": SM_SCALE,
            "logits_soft_cap": CAP,
            "window_left": WINDOW,
            "k_scale": of_scene("k_scale"),
            **VALIDATE,
        },
        weight=2,
    ),
    Row(
        "cascade_attention",
        {
            "cu_seqlens_q": Arg("integers", lambda d: None, True),
            "q": ONE_EACH,
            **POOLS,
            "block_table": TABLE,
            "seq_lens": lengths(True),
            "shared_len": integer(0, 3, "size"),
            "sm_scale": SM_SCALE,
            "logits_soft_cap": CAP,
            "sinks": SINKS,
            "return_lse": FLAG,
            **POOL_SCALES,
        },
    ),
    Row("tree_mask", {"parents": PARENTS, "cu_seqlens_q": Arg("integers", lambda d: None, True)}),
    Row(
        "merge_states",
        {
            "o_a": Arg("floats", _output_rows),
            "lse_a": Arg("floats", _lse_of_rows),
            "o_b": Arg("floats", _output_rows),
            "lse_b": Arg("floats", _lse_of_rows),
        },
        weight=2,
    ),
    Row(
        "paged_append",
        {"k": _token_rows("dim"), "v": _token_rows("dim_v"), **PAGED_WRITTEN},
        weight=3,
    ),
]

Attention.rows = ATTENTION_ROWS


class Writing(Attention):
    """The same with V rows as long as K rows, as the fused write needs."""

    def __init__(self, rng) -> None:
        super().__init__(rng)
        d = Draw(self, rng)
        self.dim = self.dim_v = d.choice([4, 8, 16, 32])
        pool = (self.num_blocks, self.heads, self.block, self.dim)
        self.k_pool, self.k_pool_scale = stored(d, pool, self.kind)
        self.v_pool, self.v_pool_scale = stored(d, pool, self.kind)

    def tokens_of_rows(self, d: Draw) -> int:
        return d.choice([1, 1, 2, 3])


Writing.rows = [
    Row("paged_write", {**WRITE, **PAGED_WRITTEN, "positions": Arg("integers", _positions, True)})
]


# ---------------------------------------------------------------- append


class Appending(Scene):
    """A caller's own caches for `numkv.append` and `AppendPlan`."""

    def __init__(self, rng) -> None:
        super().__init__(rng)
        d = Draw(self, rng)
        self.shape = (d.choice([1, 2]), d.choice([1, 2]))
        self.length, self.dims = d.choice([1, 4, 9]), (d.choice([1, 4, 8]), d.choice([1, 4, 8]))
        self.new = d.choice([1, 2, 3])
        self.dtype = d.choice([np.float32, np.float16, np.float64])
        self.k_cache, self.v_cache = (
            d.floats((*self.shape, self.length, n), self.dtype) for n in self.dims
        )
        descriptor = numkv.AppendDescriptor(
            *self.shape, self.new, self.length, *self.dims, np.dtype(self.dtype)
        )
        plans = [numkv.AppendPlan.select(descriptor) for _ in range(2)]
        self.objects["plan"] = Pair(*plans)

    def own_arrays(self) -> list[np.ndarray]:
        return [self.k_cache[:, :, : self.new], self.v_cache[:, :, : self.new]]


def _new(i: int) -> Arg:
    return Arg(
        "floats", lambda d: d.floats((*d.scene.shape, d.scene.new, d.scene.dims[i]), d.scene.dtype)
    )


def _offsets(d: Draw) -> np.ndarray:
    return np.array(
        [d.randrange(-2, d.scene.length + 2) for _ in range(d.scene.shape[0])], np.int64
    )


APPENDED = {
    "k_new": _new(0),
    "v_new": _new(1),
    "k_cache": of_scene("k_cache", "output"),
    "v_cache": of_scene("v_cache", "output"),
    "cache_offsets": Arg("integers", _offsets),
}
EXTENT = integer(0, 3, "size")
DESCRIBED = dict.fromkeys(
    ("batch_size", "num_heads", "new_len", "max_cache_len", "d_k", "d_v"), EXTENT
)
DESCRIBED["dtype"] = one_of("kind", "fp32", np.float32, np.dtype(np.float16), "bf16")


def _plan_call(function, given):
    """Calls of a plan take their arrays as one object."""
    fields = {n: given.pop(n) for n in APPENDED if n in given}
    return function(given.pop("args") if "args" in given else numkv.AppendArgs(**fields), **given)


def _select_call(function, given):
    fields = {n: given.pop(n) for n in DESCRIBED if n in given}
    if "descriptor" not in given:
        given["descriptor"] = numkv.AppendDescriptor(**fields)
    plan = function(**given)
    return (plan.sku, plan.workspace_size, repr(plan))


#: An object in place of what is made of the other arguments.
INSTEAD = Arg("object", lambda d: OMIT)
ANYTHING = Arg("anything", lambda d: 1)
Appending.rows = [
    Row("append", APPENDED, weight=3),
    Row(
        "AppendPlan.run",
        {
            **APPENDED,
            "args": INSTEAD,
            "stream": Arg("anything", lambda d: None),
            "workspace": ANYTHING,
        },
        "plan",
        call=_plan_call,
        weight=2,
    ),
    Row("AppendPlan.can_implement", {**APPENDED, "args": INSTEAD}, "plan", call=_plan_call),
    Row(
        "AppendPlan.select",
        {
            **DESCRIBED,
            "descriptor": INSTEAD,
            "target": one_of("target", "cpu"),
        },
        "plan",
        call=_select_call,
    ),
]


# ---------------------------------------------------------------- tables, eviction, names of blocks, kinds


class Books(Scene):
    """Functions of integers and weights: tables, eviction, digests, kinds."""

    def __init__(self, rng) -> None:
        super().__init__(rng)
        self.kind_pair = Pair(
            *[numkv.kind(rng.choice(["fp32", "fp16", "int8", "int4", "code4", "fp8_e5m2"]))] * 2
        )
        self.objects["kind"] = self.kind_pair
        self.block = rng.choice([1, 2, 4])

    def held(self, side: int) -> list[object]:
        return []


def _weights(d: Draw) -> np.ndarray:
    d.n = d.choice([1, 3, 8])
    return np.abs(d.floats(d.choice([(d.n,), (2, d.n)])))


def _ids(most: int):
    return Arg(
        "integers",
        lambda d: np.array([d.randrange(50) for _ in range(d.randrange(most))], np.int64),
    )


def _book_table(d: Draw) -> np.ndarray:
    d.n = d.choice([1, 2, 3])
    return np.array([[d.randrange(9) for _ in range(4)] for _ in range(d.n)], np.int32)


def _book_lens(d: Draw) -> np.ndarray:
    return np.array([d.randrange(4 * d.scene.block + 1) for _ in range(d.n)], np.int32)


def _csr(d: Draw) -> np.ndarray:
    counts = [d.randrange(1, 3) for _ in range(d.choice([1, 2, 3]))]
    d.n = len(counts)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _csr_ids(d: Draw) -> np.ndarray:
    return np.array([d.randrange(9) for _ in range(int(d.given["kv_indptr"][-1]))], np.int32)


def _last(d: Draw) -> np.ndarray:
    return np.array([d.randrange(1, d.scene.block + 1) for _ in range(d.n)], np.int32)


BLOCK = Arg("size", lambda d: d.scene.block)
COUNT = integer(0, 9, "size")
PARENT = Arg("object", lambda d: bytes(32))
ROWS_SHAPE = Arg("object", lambda d: (2, 3))
TABLES = {
    "block_table": Arg("integers", _book_table),
    "seq_lens": Arg("integers", _book_lens),
    "block_size": BLOCK,
}


def _quietly(function, given):
    """What is printed where no file is given, is not for who reads the fuzzer's own lines."""
    with contextlib.redirect_stdout(io.StringIO()):
        return function(**given)


Books.rows = [
    Row(
        "show",
        {
            "cache": Arg("object", lambda d: numkv.PagedPool(3, 2, 1, 4)),
            "file": Arg("object", lambda d: io.StringIO()),
        },
        call=_quietly,
    ),
    Row("kind", {"name": one_of("kind", "fp32", "int8", "code4", "fp8_e4m3", numkv.kind("fp16"))}),
    Row(
        "Kind.bytes_per_token",
        {
            "num_kv_heads": integer(1, 4, "size"),
            "head_dim": integer(2, 64, "size"),
            "head_dim_v": integer(2, 64, "size"),
        },
        "kind",
    ),
    Row("Kind.row_bytes", {"head_dim": integer(2, 64, "size")}, "kind"),
    Row("Kind.scale_shape", {"rows": ROWS_SHAPE, "head_dim": integer(2, 64, "size")}, "kind"),
    Row("Kind.whole_groups", {"tokens": integer(0, 200, "size")}, "kind"),
    Row("Kind.scales_per_row", {"head_dim": integer(2, 64, "size")}, "kind"),
    Row("Kind.words_per_row", {"head_dim": integer(2, 64, "size")}, "kind"),
    Row("Kind.elements_of", {"words": integer(2, 64, "size")}, "kind"),
    Row("blocks.block_table_to_csr", TABLES),
    Row(
        "blocks.csr_to_block_table",
        {
            "kv_indptr": Arg("integers", _csr),
            "kv_indices": Arg("integers", _csr_ids),
            "kv_last_page_len": Arg("integers", _last),
            "block_size": BLOCK,
            "fill": integer(-1, 3),
        },
    ),
    Row(
        "blocks.slot_mapping",
        {**TABLES, "new_lens": Arg("integers", lambda d: np.minimum(1, d.given["seq_lens"]))},
    ),
    Row(
        "blocks.block_digests",
        {"tokens": _ids(9), "block_size": BLOCK, "extra": EXTRA, "parent": PARENT},
    ),
    Row("blocks.root_digest", {"block_size": BLOCK, "extra": EXTRA, "parent": PARENT}),
    Row("blocks.token_ids", {"tokens": _ids(9), "name": Arg("anything", lambda d: "tokens")}),
    Row("compaction.first_and_recent", {"length": COUNT, "num_first": COUNT, "num_recent": COUNT}),
    Row(
        "compaction.heavy_hitters",
        {
            "weights": Arg("floats", _weights),
            "num_keep": COUNT,
            "num_first": integer(0, 3, "size"),
            "num_recent": integer(0, 3, "size"),
        },
    ),
    Row(
        "compaction.max_pool",
        {
            "weights": Arg("floats", _weights),
            "kernel_size": Arg("size", lambda d: d.choice([1, 3, 5])),
        },
    ),
    Row(
        "compaction.seen_by_recent",
        {
            "weights": Arg("floats", _weights),
            "num_keep": COUNT,
            "num_recent": integer(0, 3, "size"),
            "kernel_size": Arg("size", lambda d: d.choice([1, 3])),
            "num_first": integer(0, 3, "size"),
        },
    ),
    Row("targets.get", {"name": one_of("target", "cpu"), "target": one_of("target", "cpu")}),
    Row("targets.of", {"x": ANYTHING}),
    Row(
        "CompressorConfig",
        {
            "head_dim": integer(1, 9, "size"),
            "bits": integer(1, 16),
            "projections": integer(1, 9),
            "seed": integer(0, 99),
            "v_bits": integer(1, 16),
        },
    ),
    Row(
        "CacheConfig",
        {
            "padding": integer(0, 4, "size"),
            "permuted_v": FLAG,
            "mask_dtype": one_of("kind", "fp32", "fp16"),
        },
    ),
    *(Row(f"device.{name}", {"kind": KIND}) for name in ("load_row", "load_element", "store_row")),
    Row("rope_shift", {**ANGLES, "interleaved": FLAG}),
    Row(
        "store.PrefixStore",
        {
            "place": Arg("anything", lambda d: "/nowhere/at/all"),  # made when something is written
            "mark": one_of("anything", "a model", {"model": "mine", "base": 1e6}),
            "rope": one_of("anything", "plain", {"base": 1e6}),
            "max_nbytes": integer(1, 9, "size"),
            "host_nbytes": integer(0, 9, "size"),
            "durable": FLAG,
            "file_system": Arg("anything", lambda d: None),
            "timeout": Arg("anything", lambda d: d.choice([None, 0.0, 0.3])),
            "local": Arg("anything", lambda d: None),
            "local_nbytes": Arg("anything", lambda d: None),
            "on_event": Arg("function", lambda d: OMIT),
        },
        call=lambda function, given: repr(function(**given)),
    ),
    Row("storage.Rotation", {"head_dim": integer(1, 64, "size"), "seed": integer(0, 99)}),
    *(
        Row(name, dict.fromkeys(fields, ANYTHING), weight=0.1)
        for name, fields in {
            "AppendArgs": APPENDED,
            "AppendDescriptor": DESCRIBED,
            "Batch": ["positions", "sequences", "multimodal"],
        }.items()
    ),
]
SCENES = [(4, Attention), (2, Writing), (1.5, Appending), (1, Books)]
