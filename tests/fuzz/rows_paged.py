"""The table's rows of `PagedKVCache`, its steps and swapped sequences, and of `BlockPool`."""

from __future__ import annotations

import numpy as np
from layer_lists import paged_kv_cache

import numkv
from fuzz.common import (
    CAP,
    CHECK_FINITE,
    EXTRA,
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
    SM_SCALE,
    WINDOW,
    WRITE,
    WRITE_LATENTS,
    Q,
    choose_kind,
    integer,
)
from fuzz.hostile import OMIT
from fuzz.play import Arg, Draw, Pair, Row
from fuzz.rows_single import BIND, LAYER_OPTIONS, SHIFT_OPTION, SIZES, Single, constructed
from numkv.blocks import BlockPool, block_digests
from numkv.planning import needs_of

__all__ = ["SCENES"]


class Paged(Single):
    """A `PagedKVCache` with open steps and swapped sequences."""

    def __init__(self, rng) -> None:
        super().__init__(rng)
        d = self.d
        self.kind = choose_kind(rng)
        self.layers = d.choice([1, 2, 3])
        if d.randrange(3) == 0:
            self.dim_v = d.choice([8, 16])
        options = {
            "num_blocks": d.choice([2, 8, 24]),
            "block_size": d.choice([1, 2, 3]),
            "kind": self.kind,
            "head_dim_v": self.dim_v,
        } | self.be_latent()
        if d.randrange(3) == 0:
            options["windows"] = [d.choice([-1, 0, 2, 5]) for _ in range(self.layers)]
        elif d.randrange(3) == 0:
            options |= _unlike(d, self.layers, options["block_size"])
        bounded = not self.latent and self.kind in ("fp32", "bf16", "int8", "int4")
        options["key_bounds"] = bounded and d.randrange(3) == 0
        quantised = not self.latent and self.kind in ("int8", "int4")
        if quantised and "chunks" not in options and d.randrange(2):
            options["full_precision"] = numkv.FullPrecision(d.choice([1, 3]), d.choice([0, 2]))
        self.take(options)

    def take(self, options) -> None:
        """Begin with caches of these options."""
        made = [paged_kv_cache(self.layers, self.heads, self.dim, **options) for _ in "ab"]
        self.cache = made[0]
        self.objects["PagedKVCache"] = Pair(*made)
        self.steps: list[Pair] = []
        self.ended: list[Pair] = []
        self.swapped: list[Pair] = []
        self.buffers: list[Pair] = []
        self.seq = 0

    def held(self, side: int) -> list[object]:
        return [
            self.objects["PagedKVCache"][side],
            [pair[side] for pair in self.steps + self.ended],
        ]

    def check(self, side: int) -> None:
        self.objects["PagedKVCache"][side].check()

    def choose_step(self) -> None:
        """Have the next call of a step be one of any that is open."""
        self.objects.pop("Step", None)
        if self.steps:
            self.objects["Step"] = self.rng.choice(self.steps)

    def step(self):
        """The step of this call."""
        return self.objects["Step"].a

    def length(self) -> int:
        try:
            return self.cache.length(self.seq)
        except (IndexError, numkv.NumkvError):
            return 0

    def tokens_of_rows(self, d: Draw) -> int:
        return self.step()._rows

    def tokens_of_queries(self, d: Draw) -> int:
        if "sequences" in d.given:
            return len(d.given["sequences"])
        if "seq" in d.given:
            return super().tokens_of_queries(d)
        return self.step()._rows

    def own_arrays(self) -> list[np.ndarray]:
        return [
            x
            for pool in getattr(self.cache, "_pools", [])
            for x in getattr(pool, "arrays", tuple)()
        ]


def _seq(d: Draw) -> int:
    known = list(d.scene.cache.sequences)
    d.scene.seq = d.choice(known) if known else 0
    return d.scene.seq


def _sequences(d: Draw) -> list[int]:
    known = list(d.scene.cache.sequences)
    return d.rng.sample(known, min(len(known), d.choice([0, 1, 1, 2, 3])))


def _new_lens(d: Draw) -> object:
    return d.choice(
        [d.randrange(4), np.array([d.randrange(5) for _ in d.given["sequences"]], np.int64)]
    )


def _step(d: Draw) -> object:
    steps = d.scene.steps if d.scene.steps and d.randrange(8) else d.scene.ended
    return d.choice(steps) if steps else None


def _of_step(d: Draw):
    step = d.given.get("step")
    return None if step is None else step.a


def _accepted(d: Draw) -> object:
    step = _of_step(d)
    if step is None or step._tree is not None:
        return OMIT
    return np.array([d.randrange(int(n) + 1) for n in step.new_lens], np.int64)


def _token_ids(d: Draw) -> object:
    step = _of_step(d)
    return (
        OMIT
        if step is None
        else np.array([d.randrange(3) for _ in range(step.num_tokens)], np.int64)
    )


def _parents(d: Draw) -> object:
    """Chains and bushes, seldom: attention to trees is a kernel of its own."""
    seqs = d.given["sequences"]
    if d.scene.kind not in ("fp32", "int8") or d.randrange(5) or "into" in d.given:
        return OMIT
    n, lens = d.given["new_lens"], d.given["new_lens"]
    lens = [n] * len(seqs) if isinstance(n, int) else lens.tolist()
    return np.array([d.randrange(-1, i) for n in lens for i in range(n)], np.int64)


def _paths(d: Draw) -> object:
    step = _of_step(d)
    if step is None or step._tree is None:
        return OMIT
    return [[0][: int(n)] if d.randrange(3) else [] for n in step.new_lens]


def _swapped(d: Draw) -> object:
    return d.choice(d.scene.swapped) if d.scene.swapped else None


def _unlike(d: Draw, layers: int, block_size: int) -> dict[str, object]:
    """Chunks, a layer that reads another's rows, states beside rows."""
    found: dict[str, object] = {}
    if d.randrange(2):
        found["chunks"] = [d.choice([None, 3])] * layers
    if layers > 1 and d.randrange(2):
        found["shares"] = {layers - 1: 0}
    if d.randrange(2):
        found["states"] = {0: [((2,), "float32")]}
        found["state_slots"] = numkv.StateSlots(d.choice([2, 6, 12]), d.choice([1, 2]) * block_size)
    return found


def _states(d: Draw) -> object:
    return [np.full((len(d.scene.step().sequences), 2), d.randrange(9), np.float32)]


def _write_state(function, given):
    states = given["states"]
    return function(given["layer"], *(states if type(states) is list else [states]))


def _begun(scene, d, ours, theirs) -> None:
    scene.steps.append(Pair(ours, theirs))
    scene.choose_step()


def _ended(scene, d, ours, theirs) -> None:
    pair = d.given["step"]
    scene.steps = [p for p in scene.steps if p.a is not pair.a]
    scene.ended = [*scene.ended, pair][-2:]
    scene.choose_step()


def _swapped_out(scene, d, ours, theirs) -> None:
    scene.swapped = [*scene.swapped, Pair(ours, theirs)][-3:]


def _into(d: Draw) -> object:
    return d.choice(d.scene.buffers) if d.scene.buffers and d.randrange(2) else OMIT


def _buffers_made(scene, d, ours, theirs) -> None:
    scene.buffers = [*scene.buffers, Pair(ours, theirs)][-2:]


def _chosen(scene, d, ours, theirs) -> None:
    scene.choose_step()


SEQ = Arg("int", _seq)
SEQUENCES = Arg("iterable", _sequences)
STEP = Arg("object", _step)
SHARED_LEN = Arg("size", lambda d: d.randrange(5) if d.randrange(4) == 0 else OMIT)
TOKENS = Arg(
    "integers", lambda d: np.array([d.randrange(3) for _ in range(d.randrange(9))], np.int64)
)
APPEND = {"k": NEW_K, "v": NEW_V, "check_finite": CHECK_FINITE}
WEIGHTS = {"q": Q, "lse": LSE, "sm_scale": SM_SCALE, "logits_soft_cap": CAP}
LENGTH = Arg("int", lambda d: d.randrange(d.scene.length() + 1))


def _row(name: str, args: dict[str, Arg], weight: float = 1.0, after=None) -> Row:
    return Row(f"PagedKVCache.{name}", args, "PagedKVCache", after, weight)


PAGED_OPTIONS = {n: LAYER_OPTIONS[n] for n in ("kind", "rotate", "target")}
CACHE_SIZES = {
    "num_layers": integer(1, 4, "size"),
    **SIZES,
    "num_blocks": integer(0, 4, "size"),
    "block_size": integer(1, 4, "size"),
}
NEEDS = needs_of({"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 8})
SPEC = {
    **SIZES,
    "head_dim_v": integer(1, 9, "size"),
    "kind": KIND,
    "v_kind": KIND_OPTION,
    "rotate": FLAG,
    "full_precision": LAYER_OPTIONS["full_precision"],
    "window_left": WINDOW,
    "chunk_size": Arg("size", lambda d: OMIT),
    "shares": Arg("size", lambda d: OMIT),
    "states": Arg("object", lambda d: d.choice([OMIT, [((2, 3), "float32")]])),
    "key_bounds": FLAG,
}


Q_HEADS_OF_EACH = BIND["num_q_heads"]._replace(family="int or ints")

Paged.rows = [
    _row("add", {"tokens": TOKENS, "extra": EXTRA}, 2),
    _row(
        "reserve",
        {
            "sequences": SEQUENCES,
            "new_lens": Arg("integers", _new_lens),
            "into": Arg("object", _into),
            "parents": Arg("integers", _parents, True),
        },
        3,
        _begun,
    ),
    _row(
        "step_buffers",
        {
            "num_seqs": integer(1, 3, "size"),
            "num_tokens": integer(1, 9, "size"),
            "max_length": integer(1, 9, "size"),
        },
        0.4,
        _buffers_made,
    ),
    _row(
        "commit",
        {
            "step": STEP,
            "accepted": Arg("integers", _accepted),
            "token_ids": Arg("integers", _token_ids),
            "paths": Arg("iterable", _paths),
        },
        3,
        _ended,
    ),
    _row("rollback", {"step": STEP}, 0.5, _ended),
    _row("fork", {"seq": SEQ}, 0.7),
    _row("remove", {"seq": SEQ}, 0.4),
    _row("truncate", {"seq": SEQ, "length": LENGTH}, 0.6),
    _row("compact", {"seq": SEQ, "keep": KEEP, "shift": SHIFT_OPTION}, 0.8),
    _row("pin", {"seq": SEQ}, 0.4),
    _row("unpin", {"seq": SEQ}, 0.4),
    _row("length", {"seq": SEQ}, 0.4),
    _row("cached_len", {"seq": SEQ}, 0.4),
    _row("bind", {**BIND, "num_q_heads": Q_HEADS_OF_EACH}, 0.3)._replace(call=constructed),
    _row("swap_out", {"seq": SEQ}, 0.5, _swapped_out),
    _row("swap_in", {"swapped": Arg("object", _swapped)}, 0.5),
    _row("set_scales", {"layer": LAYER, "k": SCALE, "v": SCALE}, 0.5),
    _row("decode_attention", {"layer": LAYER, "sequences": SEQUENCES, "q": Q, **OPTIONS}, 2),
    _row("attention_weights", {"layer": LAYER, "seq": SEQ, **WEIGHTS}),
    _row("key_error", {"layer": LAYER, "seq": SEQ, "q": Q, "sm_scale": WEIGHTS["sm_scale"]}, 0.5),
    _row("arrays", {"layer": LAYER}, 0.3),
    _row("block_table", {"seq": SEQ, "layer": LAYER}, 0.3),
    Row("Step.mark_written", {"layer": LAYER}, "Step", _chosen, 0.3),
    Row("Step.append", {"layer": LAYER, **APPEND}, "Step", _chosen, 8),
    Row("Step.write", {"layer": LAYER, **WRITE}, "Step", _chosen, 3),
    Row("Step.write_latents", {"layer": LAYER, **WRITE_LATENTS}, "Step", _chosen, 2),
    Row(
        "Step.attention",
        {"layer": LAYER, "q": Q, **OPTIONS, "causal": FLAG, "shared_len": SHARED_LEN},
        "Step",
        _chosen,
        3,
    ),
    Row(
        "Step.sparse_attention",
        {
            "layer": LAYER,
            "q": Q,
            "most_blocks": integer(2, 6, "size"),
            "first": integer(0, 1, "size"),
            "newest": integer(1, 1, "size"),
            **OPTIONS,
        },
        "Step",
        _chosen,
        3,
    ),
    Row("Step.attention_weights", {"layer": LAYER, **WEIGHTS}, "Step", _chosen),
    Row("Step.arrays", {"layer": LAYER}, "Step", weight=0.3),
    Row("Step.state", {"layer": LAYER}, "Step", weight=0.3),
    Row("Step.read_state", {"layer": LAYER}, "Step", weight=0.5),
    Row(
        "Step.write_state",
        {"layer": LAYER, "states": Arg("object", _states)},
        "Step",
        _chosen,
        1.5,
        _write_state,
    ),
    Row(
        "PagedKVCache",
        {
            **CACHE_SIZES,
            **PAGED_OPTIONS,
            **{
                n: Arg("object", lambda d: OMIT)
                for n in ("layers", "store", "state_slots", "max_nbytes")
            },
        },
        call=constructed,
        weight=0.3,
    ),
    Row("LayerSpec", SPEC, call=constructed, weight=0.3),
    Row(
        "LayerSpec.for_model",
        {"needs": Arg("object", lambda d: NEEDS)},
        call=constructed,
        weight=0.3,
    ),
    Row(
        "FullPrecision",
        {
            "window": integer(0, 4, "size"),
            "num_sink_tokens": integer(1, 4, "size"),
            "kind": Arg("kind", lambda d: OMIT),
        },
        call=constructed,
        weight=0.2,
    ),
    Row(
        "StateSlots",
        {"num_slots": integer(0, 4, "size"), "checkpoint_every": integer(1, 4, "size")},
        call=constructed,
        weight=0.2,
    ),
]


# ---------------------------------------------------------------- blocks alone


class ByChannel(Paged):
    """A `PagedKVCache` whose keys are stored by channel, in blocks of whole token groups."""

    def take(self, options) -> None:
        self.kind, self.latent = (
            self.d.choice(["int8_channel", "int4_channel_fine", "int4_channel"]),
            False,
        )
        self.rotate = False
        own = {"num_blocks": 24, "block_size": 64, "kind": self.kind, "head_dim_v": self.dim_v}
        own["key_bounds"] = self.d.randrange(2) == 0
        super().take(own)


class Blocks(Single):
    """A `BlockPool`: ids, references, pins and names."""

    def __init__(self, rng) -> None:
        super().__init__(rng)
        self.size = rng.choice([1, 2])
        self.pools = [BlockPool(rng.choice([1, 4, 9]), self.size) for _ in "a"]
        self.pools.append(BlockPool(self.pools[0].num_blocks, self.size))
        self.objects["BlockPool"] = Pair(*self.pools)
        self.ids: list[int] = []


def _ids(d: Draw) -> np.ndarray:
    known = d.scene.ids
    return np.array(sorted(set(d.rng.sample(known, min(len(known), d.randrange(4))))), np.int32)


def _taken(scene, d, ours, theirs) -> None:
    scene.ids = [*scene.ids, *np.asarray(ours).tolist()][-9:]


def _named_tokens(d: Draw) -> np.ndarray:
    n = len(d.given["ids"]) if "ids" in d.given else d.randrange(3)
    return np.array([[d.randrange(2) for _ in range(d.scene.size)] for _ in range(n)], np.int32)


def _digests(d: Draw) -> np.ndarray:
    return block_digests(d.given["tokens"].reshape(-1), d.scene.size)


IDS = Arg("integers", _ids)
NAMED = {"tokens": Arg("integers", _named_tokens), "digests": Arg("integers", _digests)}


def _pool_row(name: str, args: dict[str, Arg], weight: float = 1.0, after=None) -> Row:
    return Row(f"blocks.BlockPool.{name}", args, "BlockPool", after, weight)


Blocks.rows = [
    _pool_row("allocate", {"n": integer(0, 3, "size")}, 3, _taken),
    _pool_row("allocate_ids", {"ids": IDS}, 0.5, _taken),
    *(
        _pool_row(name, {"ids": IDS})
        for name in (
            "release",
            "acquire",
            "pin",
            "unpin",
            "ref_count",
            "pin_count",
            "is_cached",
            "forget",
        )
    ),
    _pool_row("register", {"ids": IDS, **NAMED}, 2),
    *(_pool_row(name, NAMED) for name in ("lookup", "find", "find_each")),
    _pool_row(
        "count_lookup", {"wanted": integer(0, 4), "found": integer(0, 4), "reason": integer(0, 2)}
    ),
    Row(
        "blocks.BlockPool",
        {
            "num_blocks": integer(0, 9, "size"),
            "block_size": integer(1, 4, "size"),
            "on_event": Arg("function", lambda d: OMIT),
        },
        call=constructed,
        weight=0.3,
    ),
]

SCENES = [(5, Paged), (1, ByChannel), (1.5, Blocks)]
