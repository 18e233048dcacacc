"""Arguments that many rows of the table share."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np

from fuzz import SHORT
from fuzz.hostile import OMIT
from fuzz.play import Arg, Draw

__all__ = [
    "ANGLES",
    "CAP",
    "CHECK_FINITE",
    "CODES",
    "EXTRA",
    "FLAG",
    "KEEP",
    "KIND",
    "KIND_OPTION",
    "LAYER",
    "LSE",
    "NEW_K",
    "NEW_V",
    "NOTHING",
    "OPTIONS",
    "OUT",
    "SCALE",
    "SINKS",
    "SIZES",
    "SM_SCALE",
    "TARGET",
    "WEIGHT_OPTIONS",
    "WINDOW",
    "WRITE",
    "Q",
    "choose_kind",
    "integer",
    "number",
    "one_of",
    "stored",
]

BF16 = np.dtype(ml_dtypes.bfloat16)
#: Dtypes of queries and of rows, each with the kinds that they meet: all of them are compiled by other tests too.
QUERIES = [np.dtype(np.float32)] * 4 + [np.dtype(np.float16), BF16]
KINDS = ["fp32", "fp32", "fp16", "bf16", "int8", "int8", "int4", "fp8_e4m3"]
#: And those that are compiled for nothing else in every run: long runs have them.
KINDS += [] if os.environ.get(SHORT) else ["code4"]
#: Kinds of these that are codes.
CODES = ("int8", "int4", "code4")
#: Elements of a row: more and less than a vector, and whole groups of INT4; pairs, as INT4 and CODE4 want.
DIMS = [4, 8, 16, 32, 34]


def choose_kind(rng) -> str:
    """A storage kind."""
    return rng.choice(KINDS)


def integer(low: int, high: int, family: str = "int") -> Arg:
    """An integer between two, both included."""
    return Arg(family, lambda d: d.randrange(low, high + 1))


def number(*values: float) -> Arg:
    """One of some numbers."""
    return Arg("real", lambda d: d.choice(values))


def one_of(family: str, *values: object) -> Arg:
    """One of some values."""
    return Arg(family, lambda d: d.choice(values))


FLAG = one_of("flag", True, False)
CHECK_FINITE = one_of("flag", True)
SM_SCALE = number(0.1, 0.25, 1.0, 0.0, -0.5)
CAP = number(0.0, 1.0, 30.0)
WINDOW = Arg("int", lambda d: d.choice([-1, 0, 1, 2, 5, 100]))
SINKS = Arg("floats", lambda d: d.floats((d.scene.q_heads,)))
KIND = one_of("kind", "fp32", "fp16", "int8", "int4", "bf16")
#: Of an object that is thrown away at once.
KIND_OPTION = Arg("kind", lambda d: None)
TARGET = one_of("target", "cpu")
NOTHING: dict[str, Arg] = {}


def _queries(d: Draw) -> np.ndarray:
    tokens = d.scene.tokens_of_queries(d)
    return d.floats((tokens, d.scene.q_heads, d.scene.dim), d.choice(QUERIES))


def _out(d: Draw) -> object:
    q = d.given.get("q")
    if not isinstance(q, np.ndarray) or q.ndim != 3:
        return OMIT
    return np.zeros((*q.shape[:2], d.scene.dim_v), q.dtype)


def _lse(d: Draw) -> object:
    q = d.given.get("q")
    if not isinstance(q, np.ndarray) or q.ndim != 3:
        return OMIT
    return d.floats(q.shape[:2])


Q = Arg("floats", _queries)
OUT = Arg("output", _out)
LSE = Arg("floats", _lse)
WEIGHT_OPTIONS = {"lse": LSE, "sm_scale": SM_SCALE, "logits_soft_cap": CAP}
#: Options of attention, without the window, which caches with windows of their own do not take.
OPTIONS = {
    "sm_scale": SM_SCALE,
    "logits_soft_cap": CAP,
    "sinks": SINKS,
    "return_lse": FLAG,
    "out": OUT,
}


def _rows(width: str):
    def make(d: Draw) -> object:
        if width == "dim" or not d.n:
            d.n = d.scene.tokens_of_rows(d)
        if width == "dim_v" and getattr(d.scene, "latent", False):
            return OMIT
        return d.floats((d.n, d.scene.heads, getattr(d.scene, width)), d.scene.dtype_of_rows(d))

    return Arg("floats", make, True)


NEW_K, NEW_V = _rows("dim"), _rows("dim_v")
LAYER = Arg("int", lambda d: d.randrange(d.scene.layers))


def _keep(d: Draw) -> np.ndarray:
    length = d.scene.length_to_compact(d)
    return np.array([i for i in range(length) if d.randrange(4)], np.int64)


KEEP = Arg("integers", _keep)


def _scale(d: Draw) -> object:
    return d.choice([0.5, 2.0, 1.0, np.full(d.scene.heads, 0.5, np.float32)])


SCALE = Arg("scale", _scale)
EXTRA = one_of("mapping", {"adapter": 7}, {"adapter": "a", "b": b"x"})

#: What constructors of caches have in common.
SIZES = {
    "num_kv_heads": integer(1, 2, "size"),
    "head_dim": integer(1, 9, "size"),
    "head_dim_v": integer(1, 9, "size"),
}


def _qkv(d: Draw) -> np.ndarray:
    s = d.scene
    d.n = s.tokens_of_rows(d)
    return d.floats((d.n, (s.q_heads + 2 * s.heads) * s.dim), np.float32)


def _angles(function):
    def make(d: Draw) -> object:
        s = d.scene
        width = s.dim - s.dim_v if getattr(s, "latent", False) else s.dim
        angles = np.outer(np.arange(40), 0.5 ** np.arange(width // 2))
        return function(angles).astype(np.float32) if d.given.get("qk_mode") else OMIT

    return Arg("floats", make, True)


def _q_out(d: Draw) -> np.ndarray:
    return np.zeros((d.n, d.scene.q_heads, d.scene.dim), np.float32)


def _weight(d: Draw) -> object:
    return d.floats((d.scene.dim,)) if d.given.get("qk_mode") in (1, 4) else OMIT


#: Tables of 40 positions for rows of 8 elements.
ANGLES = {
    name: Arg(
        "floats", lambda d, f=f: f(np.outer(np.arange(40), 0.5 ** np.arange(4))).astype(np.float32)
    )
    for name, f in (("cos", np.cos), ("sin", np.sin))
}
#: Arguments of the fused write.
WRITE = {
    "qkv": Arg("floats", _qkv),
    "num_q_heads": Arg("size", lambda d: d.scene.q_heads),
    # Before those that only some modes use.
    "qk_mode": Arg("int", lambda d: d.choice([0, 1, 2, 3, 4, 0, 2])),
    "cos": _angles(np.cos),
    "sin": _angles(np.sin),
    "q_norm_weight": Arg("floats", _weight, True),
    "k_norm_weight": Arg("floats", _weight, True),
    "eps": number(1e-6, 1e-5),
    "q_out": Arg("output", _q_out),
    "check_finite": CHECK_FINITE,
}


def _latent_rows(d: Draw) -> np.ndarray:
    d.n = d.scene.tokens_of_rows(d)
    return d.floats((d.n, d.scene.heads, d.scene.dim), np.float32)


#: Arguments of the fused write of latents.
WRITE_LATENTS = {
    "rows": Arg("floats", _latent_rows),
    **{name: WRITE[name] for name in ("qk_mode", "cos", "sin", "eps", "check_finite")},
    "norm_weight": Arg(
        "floats",
        lambda d: d.floats((d.scene.dim_v,)) if d.given.get("qk_mode") in (1, 4) else OMIT,
        True,
    ),
}


def stored(d: Draw, shape: tuple[int, ...], kind: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Rows ``(…, dim)`` as a kind stores them, with their scales."""
    from numkv import kind as find

    found = find(kind)
    if not found.has_scales:
        return d.floats(shape).astype(found.dtype), None
    words = d.floats((*shape[:-1], found.words_per_row(shape[-1])))
    codes = np.clip(
        words * 40 + (100 if kind == "int4" else 0), 0 if kind == "int4" else -127, 127
    ).astype(found.word)
    scales = np.abs(d.floats(found.scale_shape(shape[:-1], shape[-1]))).astype(found.scale_dtype)
    return codes, scales
