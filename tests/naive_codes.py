"""The oracle of compressed heads: codes, scales, sketches and the vectors decoded from them, in NumPy float64.

Like ``naive.py`` it imports nothing of numkv. Arrays are by head: vectors ``(heads, tokens, dim)``.
"""

import numpy as np


def edges_of(levels):
    """Halfway between levels."""
    levels = np.asarray(levels, np.float64)
    return (levels[1:] + levels[:-1]) / 2


def turn(x, matrices):
    """Each head's vectors times its matrix: ``(heads, n, d)`` and ``(heads, d, m)``."""
    return np.stack([np.asarray(a, np.float64) @ b for a, b in zip(x, matrices, strict=True)])


def quantise(x, rotation, levels):
    """Turned unit vectors, and the numbers of the levels nearest to their coordinates."""
    x = np.asarray(x, np.float64)
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    z = turn(x / np.where(norm > 0, norm, 1), rotation)
    return z, np.searchsorted(edges_of(levels), z, side="right")


def scale_and_rest(x, z, codes, levels):
    """Return the scale that fits levels to the vector best, and the rotated residual."""
    norm = np.linalg.norm(np.asarray(x, np.float64), axis=-1)
    c = np.asarray(levels, np.float64)[codes]
    factor = np.sum(z * c, axis=-1) / np.sum(c * c, axis=-1)
    return norm * factor, norm[..., None] * (z - factor[..., None] * c)


def pack(codes, bits):
    """Codes ``(..., count)`` as bytes, the lowest bits first."""
    each = (np.asarray(codes)[..., None] >> np.arange(bits)) & 1
    flat = each.reshape(*np.shape(codes)[:-1], -1).astype(np.uint8)
    return np.packbits(flat, axis=-1, bitorder="little")


def unpack(packed, count, bits):
    """The inverse of `pack`."""
    each = np.unpackbits(np.asarray(packed), axis=-1, bitorder="little", count=count * bits)
    return each.reshape(*packed.shape[:-1], count, bits).astype(np.int64) @ (1 << np.arange(bits))


def decode(codes, scales, levels, rotation):
    """Vectors from the numbers of their levels."""
    c = np.asarray(levels, np.float64)[codes] * np.asarray(scales, np.float64)[..., None]
    return turn(c, np.swapaxes(rotation, -1, -2))


def scores(q, keys, rotation, sketch, signs, residuals, sm_scale):
    """Scores ``(q heads, tokens)`` of decoded keys, with a sketch where there are signs of one."""
    group = len(q) // len(keys)
    out = np.zeros((len(q), keys.shape[1]))
    for i, row in enumerate(np.asarray(q, np.float64)):
        h = i // group
        out[i] = keys[h] @ row
        if sketch.shape[2]:
            products = (row @ np.asarray(rotation[h], np.float64)) @ sketch[h]
            out[i] += np.asarray(residuals[h], np.float64) * ((2.0 * signs[h] - 1) @ products)
    return sm_scale * out


def restrict(score, cap=0.0, window_left=-1):
    """Cap scores ``(queries, q heads, tokens)`` of the newest tokens' queries; -inf for tokens that are not seen."""
    queries, _, tokens = score.shape
    out = cap * np.tanh(score / cap) if cap else score.copy()
    for i in range(queries):
        position = tokens - queries + i
        for t in range(tokens):
            if t > position or 0 <= window_left < position - t:
                out[i, :, t] = -np.inf
    return out


def attend(score, values):
    """Softmax of scores ``(q heads, tokens)`` over values ``(heads, tokens, dim)``, and the natural log of its sum."""
    group = len(score) // len(values)
    outs, lse = [], []
    for i, row in enumerate(score):
        seen = row > -np.inf
        weights = np.exp(row[seen] - row[seen].max())
        outs.append(weights @ values[i // group][seen] / weights.sum())
        lse.append(row[seen].max() + np.log(weights.sum()))
    return np.stack(outs), np.array(lse)
