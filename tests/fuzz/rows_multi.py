"""The table's rows of multi-sequence caches, and of compressed heads."""

from __future__ import annotations

import numpy as np

import numkv
from fuzz.common import (
    CAP,
    CHECK_FINITE,
    FLAG,
    KIND,
    KIND_OPTION,
    LAYER,
    LSE,
    NEW_K,
    NEW_V,
    OPTIONS,
    SCALE,
    SM_SCALE,
    TARGET,
    WINDOW,
    Q,
    integer,
)
from fuzz.play import Arg, Draw, Pair, Row
from fuzz.rows_functions import INSTEAD
from fuzz.rows_single import LENGTH, SHIFT, Single, constructed

__all__ = ["SCENES"]

CLASSES = ["CausalCache", "EncoderCache", "WrapperCache"]


class Cells(Single):
    """A multi-sequence cache of any class, before `init` for a moment, then in its passes."""

    layers = 2

    def __init__(self, rng) -> None:
        super().__init__(rng)
        d = self.d
        self.cls = d.choice(["CausalCache", "CausalCache", *CLASSES])
        self.batch: tuple[list[int], list[int]] | None = None
        self.next: dict[int, int] = {}
        if d.randrange(3) == 0:
            self.dim_v = d.choice([8, 16])
        self.sizes = (
            1 if self.cls in ("EncoderCache", "WrapperCache") else d.choice([1, 2, 3]),
            d.choice([4, 16]),
            d.choice([1, 4]),
        )
        self.choice = d.randrange(1000)
        made = [self.make() for _ in "ab"]
        if d.randrange(3):
            config = numkv.CacheConfig(
                padding=1 if self.sizes[0] == 1 else d.choice([1, 4]),
                permuted_v=bool(d.randrange(2)),
                mask_dtype=d.choice(["fp32", "fp16"]),
            )
            for cache in made:
                cache.set_config(config)
        if d.randrange(8):
            for cache in made:
                cache.init(self.kind, *self.sizes, rotate=self.rotate)
        self.cache = made[0]
        self.objects[self.cls] = Pair(*made)

    def make(self):
        """A cache of the class; the same each time."""
        n = self.choice
        shift = [None, SHIFT, SHIFT][n % 3]
        if self.cls == "CausalCache":
            window = {
                "window_left": n % 4,
                "memory": [None, 3][n // 4 % 2],
                "num_sink_tokens": n // 8 % 3,
            }
            return numkv.CausalCache(shift, **[{}, {"chunk_size": 1 + n % 4}, window][n // 24 % 3])
        if self.cls == "EncoderCache":
            return numkv.EncoderCache()
        children = [numkv.CausalCache(window_left=2, shift=shift), numkv.CausalCache(shift)]
        if n % 5 == 0:
            children.append(numkv.EncoderCache())
        types = [0, 1, 0, len(children) - 1] if n % 2 else None
        return numkv.WrapperCache(*children, layer_types=types)

    def check(self, side: int) -> None:
        try:
            super().check(side)
        except numkv.NumkvError as error:
            if "before init" not in str(error):
                raise

    def length(self) -> int:
        return max(self.next.values(), default=0)

    def tokens_of_rows(self, d: Draw) -> int:
        if self.cls == "EncoderCache":
            return d.choice([1, 3, 7])
        return len(self.batch[0]) if self.batch else 1

    def tokens_of_queries(self, d: Draw) -> int:
        return len(self.batch[0]) if self.batch else 1


def _positions(d: Draw) -> list[int]:
    s = d.scene
    n = d.randrange(1, s.sizes[2] + 1)
    seqs = [d.randrange(s.sizes[0]) for _ in range(n)]
    if d.randrange(2):
        seqs = [seqs[0]] * n
    taken = dict(s.next)
    positions = []
    for seq in seqs:
        at = taken.get(seq, 0)
        positions.append(at if d.randrange(12) else d.randrange(at + 1))
        taken[seq] = at + 1
    d.scene.wanted = (positions, seqs, taken)
    return positions


def _begun(scene, d, ours, theirs) -> None:
    scene.batch, scene.next = scene.wanted[:2], scene.wanted[2]


def _start_call(function, given):
    """Calls of `start_forward` take positions and sequences as one object."""
    fields = {n: given.pop(n) for n in ("positions", "sequences", "multimodal") if n in given}
    if "batch" not in given:
        given["batch"] = numkv.Batch(
            fields.pop("positions", None), fields.pop("sequences", None), **fields
        )
    return function(**given)


def _removed(scene, d, ours, theirs) -> None:
    scene.next = {}  # positions of batches begin anew, or are what `positions` says
    for seq in getattr(scene.cache, "sequences", ()):
        if isinstance(seq, int):
            known = scene.cache.positions(seq)
            # Among the last of all positions no valid batch would fit.
            scene.next[seq] = min(int(known[-1]) + 1, 1000) if len(known) else 0


def _keep_positions(d: Draw) -> np.ndarray:
    known = np.arange(d.scene.length())
    return np.array([i for i in known if d.randrange(4)], np.int64)


SEQ = Arg("int", lambda d: d.randrange(d.scene.sizes[0]))
POS = Arg("int", lambda d: d.randrange(d.scene.length() + 2))
BATCH = {
    "positions": Arg("integers", lambda d: np.array(_positions(d), np.int32)),
    "sequences": Arg("integers", lambda d: np.array(d.scene.wanted[1], np.int64)),
    "multimodal": Arg(
        "iterable", lambda d: [d.randrange(len(d.scene.wanted[0]))] if d.randrange(2) else [], True
    ),
    "batch": INSTEAD,
    "reserve": Arg("flag", lambda d: not d.randrange(6)),
}
INIT = {
    "kind": KIND,
    "max_sequences": integer(1, 2, "size"),
    "capacity": integer(1, 9, "size"),
    "max_batch": integer(0, 4, "size"),
    "target": TARGET,
    "k_kind": KIND_OPTION,
    "v_kind": KIND_OPTION,
    "rotate": FLAG,
}
CONFIG = Arg("object", lambda d: numkv.CacheConfig())
WEIGHTS = {"q": Q, "lse": LSE, "sm_scale": SM_SCALE, "logits_soft_cap": CAP}


def _rows(cls: str) -> list[Row]:
    def row(name, args, weight=1.0, after=None, call=None):
        return Row(f"{cls}.{name}", args, cls, after, weight, call)

    return [
        row("set_config", {"config": CONFIG}, 0.3),
        row("init", INIT, 0.5),
        row("start_forward", BATCH, 4, _begun, _start_call),
        row("put", {"layer": LAYER, "k": NEW_K, "v": NEW_V, "check_finite": CHECK_FINITE}, 6),
        row("get", {"layer": LAYER}, 1),
        row("decode_attention", {"layer": LAYER, "q": Q, **OPTIONS}, 3),
        row("attention_weights", {"layer": LAYER, **WEIGHTS}),
        row("remove", {"seq": SEQ, "begin": POS, "end": POS}, 0.5, _removed),
        row("compact", {"seq": SEQ, "keep": Arg("integers", _keep_positions)}, 0.5, _removed),
        row("copy_prefix", {"src": SEQ, "dst": SEQ, "length": POS}, 0.5, _removed),
        row("can_resume", {"seq": SEQ, "pos": POS}, 0.5),
        row("positions", {"seq": SEQ}, 0.5),
        row("set_scales", {"layer": LAYER, "k": SCALE, "v": SCALE}, 0.5),
        row(
            "set_causal",
            {
                "except_indices": Arg(
                    "iterable", lambda d: [d.randrange(2)] if d.scene.batch else []
                )
            },
            0.4,
        ),
        row("set_layer_type", {"i": integer(0, 1)}, 0.5),
        row("arrays", {"layer": LAYER}, 0.3),
    ]


SHIFT_FUNCTION = Arg("function", lambda d: SHIFT)


def _wrapper_call(function, given):
    return repr(function(*given.pop("caches", ()), **given))


Cells.rows = [
    *(row for cls in CLASSES for row in _rows(cls)),
    Row(
        "CausalCache",
        {
            "shift": SHIFT_FUNCTION,
            "window_left": integer(-1, 4),
            "memory": integer(0, 4, "size"),
            "num_sink_tokens": integer(0, 4, "size"),
            "chunk_size": Arg("size", lambda d: None if d.randrange(3) else 4),
        },
        call=constructed,
        weight=0.5,
    ),
    Row("EncoderCache", {}, call=constructed, weight=0.1),
    Row(
        "WrapperCache",
        {
            "caches": Arg(
                "anything", lambda d: [numkv.CausalCache(), numkv.CausalCache(chunk_size=2)]
            ),
            "layer_types": Arg("iterable", lambda d: [0, 1, 0]),
        },
        call=_wrapper_call,
        weight=0.2,
    ),
]


# ---------------------------------------------------------------- compressed heads, attention added up


class Compressors(Single):
    """A `HeadCompressor`, or a `MultiHeadCompressor`."""

    def __init__(self, rng) -> None:
        super().__init__(rng)
        d = self.d
        self.dim = self.dim_v = d.choice([4, 8, 16])
        bits, v_bits = d.choice([(1, None), (4, None), (4, 3), (8, None)])
        config = numkv.CompressorConfig(self.dim, bits, d.choice([None, 4, 16]), 1, v_bits)
        if d.randrange(2):
            self.key, self.shape = "HeadCompressor", ()
            made = [numkv.HeadCompressor(config) for _ in "ab"]
            self.queries: tuple[int, ...] = ()
        else:
            self.key, self.shape = "MultiHeadCompressor", (self.heads,)
            self.queries = (self.q_heads,)
            made = [
                numkv.MultiHeadCompressor(self.heads, config, num_q_heads=self.q_heads)
                for _ in "ab"
            ]
        self.objects[self.key] = Pair(*made)

    def length(self) -> int:
        return len(self.objects[self.key].a)


def _vectors(many: bool) -> Arg:
    def make(d: Draw) -> np.ndarray:
        if many and not d.n:
            d.n = d.choice([1, 2, 5])
        return d.floats((*((d.n,) if many else ()), *d.scene.shape, d.scene.dim))

    return Arg("floats", make)


VECTOR, VECTORS = _vectors(False), _vectors(True)


def _of_newest(d: Draw) -> np.ndarray:
    """One query, or those of several of the newest tokens."""
    several = d.choice([(), (), (1,), (2,), (5,)])
    if several and several[0] > max(1, d.scene.length()):
        several = ()
    return d.floats((*several, *d.scene.queries, d.scene.dim))


QUERY = Arg("floats", _of_newest)
FINITE = {"check_finite": CHECK_FINITE}
OF_SCORES = {"sm_scale": SM_SCALE, "logits_soft_cap": CAP, "window_left": WINDOW, **FINITE}


def _compressor_rows(cls: str, push: str, query: str, one: tuple[str, str]) -> list[Row]:
    return [
        Row(f"{cls}.{push}", {one[0]: VECTOR, one[1]: VECTOR, **FINITE}, cls, weight=2),
        Row(f"{cls}.extend", {"keys": VECTORS, "values": VECTORS, **FINITE}, cls, weight=2),
        Row(f"{cls}.attend", {query: QUERY, "return_lse": FLAG, **OF_SCORES}, cls, weight=3),
        Row(f"{cls}.attention_scores", {query: QUERY, **OF_SCORES}, cls, weight=2),
        Row(f"{cls}.evict_outside_window", {"n": integer(0, 9, "size")}, cls, weight=0.5),
        Row(f"{cls}.truncate", {"length": LENGTH}, cls, weight=0.5),
    ]


CODES = Arg("object", lambda d: numkv.CompressorConfig(d.choice([1, 3, 8]), d.choice([1, 4])))
Compressors.rows = [
    *_compressor_rows("HeadCompressor", "push", "query", ("key", "value")),
    *_compressor_rows("MultiHeadCompressor", "push_token", "queries", ("keys", "values")),
    Row("HeadCompressor", {"config": CODES, "target": TARGET}, call=constructed, weight=0.2),
    Row(
        "MultiHeadCompressor",
        {
            "num_heads": integer(1, 2, "size"),
            "config": CODES,
            "num_q_heads": Arg("size", lambda d: 2 * d.given.get("num_heads", 1)),
            "target": TARGET,
        },
        call=constructed,
        weight=0.2,
    ),
]


class PagedCodes(Compressors):
    """A `PagedCompressor`."""

    def __init__(self, rng) -> None:
        Single.__init__(self, rng)
        d = self.d
        self.dim = self.dim_v = d.choice([4, 8])
        config = numkv.CompressorConfig(self.dim, 4, d.choice([None, 4]), 1, d.choice([None, 3]))
        self.key, self.seq = "PagedCompressor", 0
        made = [numkv.PagedCompressor(self.heads, config, num_q_heads=self.q_heads) for _ in "ab"]
        self.queries = (self.q_heads,)
        self.objects[self.key] = Pair(*made)

    def check(self, side: int) -> None:
        self.objects[self.key][side].check()

    def length(self) -> int:
        cache = self.objects[self.key].a
        return cache.length(self.seq) if self.seq in cache.sequences else 0


def _code_seq(d: Draw) -> int:
    d.scene.seq = d.choice(list(d.scene.objects["PagedCompressor"].a.sequences) or [0])
    return d.scene.seq


def _code_sequences(d: Draw) -> list[int]:
    known = list(d.scene.objects["PagedCompressor"].a.sequences)
    return d.rng.sample(known, min(len(known), d.choice([0, 1, 1, 2, 3])))


def _code_counts(most: int, d: Draw) -> object:
    """Numbers of tokens or of queries, as many as there are tokens at most."""
    cache = d.scene.objects["PagedCompressor"].a
    counts = [d.randrange(most + 1) for _ in d.given["sequences"]]
    if most == 3:
        lengths = [cache.length(seq) for seq in d.given["sequences"]]
        counts = [min(n, max(1, length)) for n, length in zip(counts, lengths, strict=True)]
    d.n = sum(counts)
    return np.array(counts, np.int64)


def _of_counts(heads: str) -> Arg:
    return Arg("floats", lambda d: d.floats((d.n, getattr(d.scene, heads), d.scene.dim)))


SEQ_OF_CODES = {"seq": Arg("int", _code_seq)}
SEQS_OF_CODES = Arg("iterable", _code_sequences)
PagedCodes.rows = [
    Row("PagedCompressor.add", {}, "PagedCompressor", weight=1.5),
    Row("PagedCompressor.fork", SEQ_OF_CODES, "PagedCompressor", weight=0.7),
    Row("PagedCompressor.remove", SEQ_OF_CODES, "PagedCompressor", weight=0.3),
    Row("PagedCompressor.length", SEQ_OF_CODES, "PagedCompressor", weight=0.3),
    Row(
        "PagedCompressor.truncate",
        {**SEQ_OF_CODES, "length": LENGTH},
        "PagedCompressor",
        weight=0.5,
    ),
    Row(
        "PagedCompressor.extend",
        {
            "sequences": SEQS_OF_CODES,
            "new_lens": Arg("integers", lambda d: _code_counts(d.choice([1, 5, 140]), d)),
            "keys": _of_counts("heads"),
            "values": _of_counts("heads"),
            **FINITE,
        },
        "PagedCompressor",
        weight=3,
    ),
    Row(
        "PagedCompressor.attend",
        {
            "sequences": SEQS_OF_CODES,
            "query_lens": Arg("integers", lambda d: _code_counts(3, d)),
            "queries": _of_counts("q_heads"),
            "return_lse": FLAG,
            **OF_SCORES,
        },
        "PagedCompressor",
        weight=3,
    ),
    Row(
        "PagedCompressor.attention_scores",
        {**SEQ_OF_CODES, "queries": QUERY, **OF_SCORES},
        "PagedCompressor",
    ),
    *(
        Row(f"PagedCompressor.{name}", SEQ_OF_CODES, "PagedCompressor", weight=0.4)
        for name in ("decode_keys", "decode_values", "key_codes", "value_codes")
    ),
    Row(
        "PagedCompressor",
        {
            "num_heads": integer(1, 2, "size"),
            "config": CODES,
            "num_q_heads": Arg("size", lambda d: 2 * d.given.get("num_heads", 1)),
            "target": TARGET,
        },
        call=constructed,
        weight=0.2,
    ),
]


class Tally(Single):
    """An `AttentionTally`, and a `RopeShift`."""

    def __init__(self, rng) -> None:
        super().__init__(rng)
        self.objects["AttentionTally"] = Pair(*(numkv.AttentionTally(self.heads) for _ in "ab"))

    def length(self) -> int:
        return len(self.objects["AttentionTally"].a)


def _mass(d: Draw) -> np.ndarray:
    return np.abs(d.floats((d.scene.heads, d.scene.length() + d.randrange(3))))


def _tally_keep(d: Draw) -> np.ndarray:
    return np.array([i for i in range(d.scene.length()) if d.randrange(4)], np.int64)


Tally.rows = [
    Row("AttentionTally.add", {"weights": Arg("floats", _mass)}, "AttentionTally", weight=3),
    Row("AttentionTally.compact", {"keep": Arg("integers", _tally_keep)}, "AttentionTally"),
    Row(
        "AttentionTally.truncate",
        {"length": Arg("int", lambda d: d.randrange(d.scene.length() + 1))},
        "AttentionTally",
    ),
    Row("AttentionTally", {"num_kv_heads": integer(1, 3, "size")}, call=constructed),
]

SCENES = [(6, Cells), (2, Compressors), (1.5, PagedCodes), (0.3, Tally)]
