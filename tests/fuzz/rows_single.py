"""The table's rows of caches of one sequence: layers, pools of blocks, `KVCache`."""

from __future__ import annotations

import numpy as np

import numkv
from fuzz.common import (
    ANGLES,
    CAP,
    CHECK_FINITE,
    CODES,
    FLAG,
    KEEP,
    KIND,
    KIND_OPTION,
    LAYER,
    LSE,
    NEW_K,
    NEW_V,
    OPTIONS,
    SCALE,
    SINKS,
    SM_SCALE,
    TARGET,
    WINDOW,
    WRITE,
    WRITE_LATENTS,
    Q,
    choose_kind,
    integer,
)
from fuzz.hostile import OMIT
from fuzz.play import Arg, Draw, Pair, Row, Scene

__all__ = ["SCENES", "constructed"]

SHIFT = numkv.rope_shift(*(a.make(None) for a in ANGLES.values()))


def residual(d: Draw, kind: str) -> dict[str, object]:
    """Tokens in full precision, of quantised kinds, sometimes."""
    if kind not in CODES or d.randrange(3):
        return {}
    return {"full_precision": numkv.FullPrecision(d.choice([0, 2, 4]), d.choice([1, 2]))}


class Single(Scene):
    """What scenes of one sequence have in common: how long it is."""

    layers = 1

    def __init__(self, rng) -> None:
        super().__init__(rng)
        d = self.d = Draw(self, rng)
        self.kind = choose_kind(rng)
        self.heads = d.choice([1, 2, 2])
        self.q_heads = self.heads * d.choice([1, 2, 4])
        # As `rope_shift` turns 8 elements, no fewer.
        self.dim = self.dim_v = d.choice([8, 8, 16, 32])
        self.rotate = d.randrange(5) == 0
        self.latent = False

    def be_latent(self) -> dict[str, object]:
        """Sometimes, have V be a part of K: what a cache then is made with."""
        d = self.d
        self.latent = d.randrange(4) == 0
        if not self.latent:
            return {"rotate": self.rotate}
        self.dim_v = self.dim - d.choice([0, 2, 4])
        return {"head_dim_v": self.dim_v, "v_kind": "latent"}

    def dtype_of_rows(self, d: Draw) -> object:
        """Rows in float32, of codes in others too."""
        if self.kind in CODES:
            return d.choice([np.float32, np.float32, np.float16])
        return np.float32

    def tokens_of_rows(self, d: Draw) -> int:
        return d.choice([1, 1, 1, 2, 3, 7])

    def length(self) -> int:
        """Tokens of the first object."""
        raise NotImplementedError

    def tokens_of_queries(self, d: Draw) -> int:
        return max(1, min(self.length(), d.choice([1, 1, 1, 2, 3])))

    def length_to_compact(self, d: Draw) -> int:
        return self.length()


LENGTH = Arg("int", lambda d: d.randrange(d.scene.length() + 1))
SHIFT_OPTION = Arg("object", lambda d: SHIFT)
SCALES = {"k": SCALE, "v": SCALE}
APPEND = {"k": NEW_K, "v": NEW_V, "check_finite": CHECK_FINITE}
WEIGHTS = {"q": Q, "lse": LSE, "sm_scale": SM_SCALE, "logits_soft_cap": CAP, "window_left": WINDOW}
POSITION = Arg("int", lambda d: d.randrange(20))


def constructed(function, given):
    """Calls of constructors: what has been made says what it is, and goes."""
    return repr(function(**given))


def _kind_of_rows(d: Draw) -> str:
    """Float kinds that new rows may have, whatever a cache's kind is: one that it takes."""
    return "fp32"


BIND = {
    "num_q_heads": Arg("size", lambda d: d.scene.q_heads),
    "kind": Arg("kind", _kind_of_rows),
    "sm_scale": SM_SCALE,
    "logits_soft_cap": CAP,
    "sinks": SINKS,
    "check_finite": CHECK_FINITE,
}


class Layers(Single):
    """A layer, contiguous or paged, with its pool; another one shares the pool."""

    def __init__(self, rng) -> None:
        super().__init__(rng)
        d = self.d
        self.paged = bool(d.randrange(2))
        of_pool = {"kind": self.kind, **self.be_latent()}
        options = {**of_pool, **({} if self.latent else residual(d, self.kind))}
        if not self.paged:
            capacity = d.choice([1, 5, 20, 40])
            made = [numkv.ContiguousLayer(capacity, self.heads, self.dim, **options) for _ in "ab"]
            self.objects["ContiguousLayer"] = Pair(*made)
            return
        blocks, size = d.choice([1, 3, 8]), d.choice([1, 2, 5])
        if d.randrange(2):
            made = [numkv.PagedLayer(blocks, size, self.heads, self.dim, **options) for _ in "ab"]
            self.objects["PagedPool"] = Pair(*(layer.pool for layer in made))
        else:
            pools = [
                numkv.PagedPool(blocks + 2, size, self.heads, self.dim, **of_pool) for _ in "ab"
            ]
            self.objects["PagedPool"] = Pair(*pools)
            sizes = (blocks, size, self.heads, self.dim)
            other = [numkv.PagedLayer(*sizes, pool=pool) for pool in pools]
            self.objects["other"] = Pair(*other)
            options = {name: x for name, x in options.items() if name not in of_pool}
            made = [numkv.PagedLayer(*sizes, pool=pool, **options) for pool in pools]
        self.objects["PagedLayer"] = Pair(*made)

    def layer(self):
        """The layer."""
        return self.objects["PagedLayer" if self.paged else "ContiguousLayer"].a

    def length(self) -> int:
        return self.layer().seq_len

    def own_arrays(self) -> list[np.ndarray]:
        layer = self.layer()
        return [layer.k, layer.v, layer.k_scale, layer.v_scale]


def _set_length(layer, given):
    layer.seq_len = given["value"]


def _layer_rows(cls: str) -> list[Row]:
    set_length = Row(
        f"{cls}.seq_len",
        {"value": Arg("int", lambda d: d.randrange(max(1, d.scene.length() + 1)))},
        cls,
    )
    return [
        Row(f"{cls}.append", APPEND, cls, weight=4),
        Row(f"{cls}.decode_attention", {"q": Q, "window_left": WINDOW, **OPTIONS}, cls, weight=3),
        Row(f"{cls}.attention_weights", WEIGHTS, cls),
        Row(f"{cls}.write", {**WRITE, "pos_offset": POSITION}, cls, weight=2),
        Row(f"{cls}.write_latents", {**WRITE_LATENTS, "pos_offset": POSITION}, cls, weight=1),
        Row(f"{cls}.truncate", {"length": LENGTH}, cls, weight=0.7),
        Row(f"{cls}.compact", {"keep": KEEP, "shift": SHIFT_OPTION}, cls, weight=0.7),
        Row(f"{cls}.set_scales", SCALES, cls, weight=0.5),
        Row(f"{cls}.bind", {**BIND, "window_left": WINDOW}, cls, weight=0.3, call=constructed),
        Row(f"{cls}.reserve", {"n": integer(0, 9, "size")}, cls, weight=0.5),
        set_length._replace(call=_set_length, weight=0.7),
    ]


LAYER_OPTIONS = {
    "kind": KIND,
    "target": TARGET,
    "k_kind": KIND_OPTION,
    "v_kind": KIND_OPTION,
    "rotate": FLAG,
    "full_precision": Arg(
        "object", lambda d: numkv.FullPrecision(2) if d.randrange(4) == 0 else OMIT
    ),
    "head_dim_v": integer(1, 9, "size"),
}
SIZES = {"num_kv_heads": integer(1, 2, "size"), "head_dim": integer(1, 9, "size")}
POOL_SIZES = {"num_blocks": integer(0, 4, "size"), "block_size": integer(1, 4, "size"), **SIZES}
POOL_OPTIONS = {n: a for n, a in LAYER_OPTIONS.items() if n != "full_precision"}


def _row_of_new(name: str, args: dict[str, Arg], weight: float = 0.3) -> Row:
    return Row(name, args, call=constructed, weight=weight)


def _free_blocks(d: Draw) -> np.ndarray:
    pool = d.scene.objects["PagedPool"].a
    taken = set(d.scene.layer().block_indices)
    free = [i for i in range(pool.blocks.num_blocks) if i not in taken]
    return np.array(d.rng.sample(free, min(len(free), d.randrange(3))), np.int32)


def _pool(d: Draw) -> object:
    return d.scene.objects.get("PagedPool", OMIT)


Layers.rows = [
    *_layer_rows("ContiguousLayer"),
    *_layer_rows("PagedLayer"),
    Row("PagedLayer.append", APPEND, "other", weight=2),
    Row("PagedLayer.take_blocks", {"ids": Arg("integers", _free_blocks)}, "PagedLayer", weight=0.3),
    Row("PagedPool.like", {"num_blocks": integer(0, 4, "size")}, "PagedPool", weight=0.2),
    Row("PagedLayer.free", {}, "PagedLayer", weight=0.3),
    Row("PagedLayer.free", {}, "other", weight=0.5),
    Row("PagedPool.set_scales", SCALES, "PagedPool", weight=0.5),
    Row("PagedPool.stats", {}, "PagedPool", weight=0.3),
    Row("PagedPool.check", {}, "PagedPool", weight=0.3),
    _row_of_new("ContiguousLayer", {"capacity": integer(0, 9, "size"), **SIZES, **LAYER_OPTIONS}),
    _row_of_new(
        "PagedLayer",
        {
            "max_blocks_per_seq": integer(0, 4, "size"),
            **{n: a for n, a in POOL_SIZES.items() if n != "num_blocks"},
            **LAYER_OPTIONS,
            "pool": Arg("object", _pool),
        },
    ),
    _row_of_new("PagedPool", {**POOL_SIZES, **POOL_OPTIONS}),
]


class KV(Single):
    """A `KVCache` of one to three layers."""

    def __init__(self, rng) -> None:
        super().__init__(rng)
        d = self.d
        self.layers = d.choice([1, 2, 3])
        if d.randrange(3) == 0:
            self.dim_v = d.choice([8, 16, 32])
        options = {
            "max_seq_len": d.choice([None, None, 5, 40]),
            "kind": self.kind,
            "head_dim_v": self.dim_v,
            "rotate": self.rotate,
            **residual(d, self.kind),
        }
        made = [numkv.KVCache(self.layers, self.heads, self.dim, **options) for _ in "ab"]
        self.objects["KVCache"] = Pair(*made)

    def length(self) -> int:
        return len(self.objects["KVCache"].a)

    def own_arrays(self) -> list[np.ndarray]:
        return [x for p in self.objects["KVCache"].a._pools for x in p.arrays()]


def _layers_keep(d: Draw) -> np.ndarray:
    length = d.scene.length()
    if d.randrange(3) or not length:
        return KEEP.make(d)
    n = d.randrange(1, length + 1)
    return np.array(
        [sorted(d.rng.sample(range(length), n)) for _ in range(d.scene.layers)], np.int64
    )


WINDOW_OF_EACH = WINDOW._replace(family="int or ints")


def _row(name: str, args: dict[str, Arg], weight: float = 1.0) -> Row:
    return Row(f"KVCache.{name}", args, "KVCache", weight=weight)


KV.rows = [
    _row("append", {"layer": LAYER, **APPEND}, 5),
    _row("bind", {**BIND, "window_left": WINDOW_OF_EACH}, 0.3)._replace(call=constructed),
    _row("advance", {"n": integer(1, 3, "size")}, 1.5),
    _row("decode_attention", {"layer": LAYER, "q": Q, "window_left": WINDOW, **OPTIONS}, 3),
    _row("attention_weights", {"layer": LAYER, **WEIGHTS}),
    _row("truncate", {"length": LENGTH}, 0.7),
    _row("compact", {"keep": Arg("integers", _layers_keep), "shift": SHIFT_OPTION}, 0.7),
    _row("set_scales", {"layer": LAYER, **SCALES}, 0.5),
    _row("clear", {}, 0.2),
    _row("copy", {}, 0.2),
    _row("reserve", {"n": integer(0, 9, "size")}, 0.4),
    _row("arrays", {"layer": LAYER}, 0.3),
    *(
        _row(name, {"layer": LAYER}, 0.3)
        for name in ("k", "v", "k_codes", "v_codes", "k_scales", "v_scales", "quantised_tokens")
    ),
    _row_of_new(
        "KVCache",
        {
            "num_layers": integer(0, 3, "size"),
            **SIZES,
            "max_seq_len": integer(0, 9, "size"),
            "head_dim_v": integer(1, 9, "size"),
            **LAYER_OPTIONS,
        },
    ),
]

SCENES = [(4, Layers), (3, KV)]
