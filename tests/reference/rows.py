"""Rows of words to floats and back, by slots; and how an operation is marked."""

import functools

import ml_dtypes
import naive
import numpy as np

from numkv.kernels.operations import implements

FP8 = {"fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2)}
FLOATS = {**naive.DTYPES, **FP8}
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
#: Dtypes of codes and of their scales by which `naive.dequantise` tells kinds apart.
CODES = {
    "int8": (np.int8, np.float32), "code6": (np.int16, np.float32), "code4": (np.uint8, np.float32),
    "int4": (np.uint8, ml_dtypes.bfloat16),
}  # fmt: skip
CHANNELS = ("int8_channel", "int4_channel_fine", "int4_channel")
GROUP = {"int4": naive.INT4_GROUP}


def operation(spec):
    """Mark an implementation: its arrays come as NumPy's, those of a simulated device as well, and nothing warns."""

    def mark(function):
        inner = implements(spec)(function)

        @functools.wraps(inner)
        def run(*args, **kwargs):
            with np.errstate(all="ignore"):
                return inner(*_on_host(args), **{k: _on_host(x) for k, x in kwargs.items()})

        return run

    return mark


def _on_host(x):
    if isinstance(x, tuple):
        found = [_on_host(y) for y in x]
        return type(x)(*found) if hasattr(x, "_fields") else tuple(found)
    return getattr(x, "_ary", x)


def floats(words, kind, compute=np.float64):
    """Elements of a float kind, as their words say, without a scale."""
    return np.asarray(words).view(FLOATS[kind]).astype(compute)


def values(words, kind, scale):
    """Stored rows ``(n, heads, words)`` in float64; scales are those of the rows, of their groups, or of the heads."""
    if kind in CHANNELS:
        return naive.channel_values(words, scale, kind)
    if kind in CODES:
        codes, scales = CODES[kind]
        if not words.size:
            return np.zeros((*words.shape[:2], dim_of(words, kind)))
        return naive.dequantise(np.ascontiguousarray(words).view(codes), scale.view(scales))
    found = floats(words, kind)
    return found * scale.astype(np.float64)[:, None] if kind in FP8 else found


def dequantise(codes, kind, scale, out):
    """Stand in for `numkv.kernels.cpu.convert.dequantise` and CUDA's."""
    codes, scale, out = _on_host((codes, scale, out))
    if kind in FP8:
        out[...] = floats(codes, kind) * scale.astype(np.float64)[..., None]
    else:
        out[...] = values(codes.swapaxes(0, 1), kind, scale.swapaxes(0, 1)).swapaxes(0, 1)


def stored(x, kind, scale, words, scales):
    """Rows ``(n, heads, dim)`` as words of a kind, and the scales that they bring along, or None."""
    if kind in CODES:
        codes, made = naive.quantise(x.astype(np.float32), kind)
        if kind in GROUP:  # a group that holds NaN or infinity, and no other
            starts = np.arange(0, x.shape[2], GROUP[kind])
            lost = np.add.reduceat(~np.isfinite(x), starts, axis=2) > 0
            made = np.where(lost, made.dtype.type(np.nan), made)
        return codes.view(words), made.view(scales)
    if kind in FP8:
        x = (x / scale.astype(x.dtype)[:, None]).astype(np.float32)
        x = np.clip(x, -LARGEST[kind], LARGEST[kind])
    if FLOATS[kind].itemsize <= 2:  # by way of float32
        x = x.astype(np.float32)
    return x.astype(FLOATS[kind]).view(words), None


def places(pool, slots):
    """An index of rows ``(n, heads, …)`` by their slots."""
    size = pool.shape[2]
    return slots // size, slice(None), slots % size


def dim_of(rows, kind):
    """Elements of a stored row."""
    words = rows.shape[-1]
    return {
        "int4": 2 * words,
        "int4_channel": 2 * words,
        "int4_channel_fine": 2 * words - naive.channel_fine(kind),
        "code4": 2 * words,
        "code6": words * 8 // 6,
    }.get(kind, words)


def put(x, pool, kind, scale, slots, report=None):
    """Store rows in slots; those outside the pool are left out."""
    slots = np.asarray(slots, np.int64)
    kept = (slots >= 0) & (slots < pool.shape[0] * pool.shape[2])
    if kind in CODES and report is not None:
        x = report(x, kept)
    at = places(pool, slots[kept])
    words, scales = stored(x[kept], kind, scale, pool.dtype, scale.dtype)
    pool[at] = words
    if scales is not None:
        scale[at] = scales
