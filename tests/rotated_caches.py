"""Every cache with ``rotate=True``, and its rows before and after the rotation."""

import naive
import numpy as np
from layer_lists import paged_kv_cache

import numkv
from numkv.storage.hadamard import Rotation

F32 = np.float32
HEADS, DIM, TOKENS = 2, 8, 7


def basis(dim):
    """Return the matrix that a row, as a column, is multiplied by before it is stored, in float64."""
    return naive.rotation(Rotation(dim).signs)


def turned(x):
    """Return rows as they are stored, before rounding to the kind, in float64."""
    return np.asarray(x).astype(np.float64) @ basis(x.shape[-1]).T


def back(x):
    """The inverse of `turned`."""
    return np.asarray(x).astype(np.float64) @ basis(x.shape[-1])


def rows(rng, tokens=TOKENS, dim=DIM, dim_v=None, heads=HEADS):
    k, v = (rng.standard_normal((tokens, heads, d)).astype(F32) for d in (dim, dim_v or dim))
    return k, v


def half_a_step(stored, kind):
    """Return the error bound of stored elements, by row: ``(..., 1)``."""
    largest = np.abs(stored).max(axis=-1, keepdims=True)
    # The search for a scale may clip outliers.
    step = {"int8": largest / 127, "int4": 2 * largest / 15 * 1.5, "fp16": largest * 2.0**-10,
            "fp32": largest * 1e-6, "fp64": largest * 1e-14}[kind]  # fmt: skip
    return 0.51 * step


def contiguous(target, **kw):
    layer = numkv.ContiguousLayer(12, HEADS, DIM, target=target, **kw)
    return layer, layer.append, layer.decode_attention


def paged(target, **kw):
    layer = numkv.PagedLayer(6, 3, HEADS, DIM, target=target, **kw)
    return layer, layer.append, layer.decode_attention


def shared_pool(target, **kw):
    pool = numkv.PagedPool(8, 3, HEADS, DIM, target=target, **kw)
    numkv.PagedLayer(2, 3, HEADS, DIM, pool=pool).seq_len = 4  # in the way
    layer = numkv.PagedLayer(5, 3, HEADS, DIM, pool=pool)
    return layer, layer.append, layer.decode_attention


def cache(target, **kw):
    made = numkv.KVCache(2, HEADS, DIM, target=target, **kw)
    return (
        made,
        lambda k, v, **kw: made.append(1, k, v, **kw),
        lambda q, **kw: made.decode_attention(1, q, **kw),
    )


def paged_cache(target, **kw):
    made = paged_kv_cache(2, HEADS, DIM, num_blocks=8, block_size=3, target=target, **kw)
    seq, steps = made.add(), []

    def append(k, v, **kw):
        steps.append(made.reserve([seq], [k.shape[0]]))
        try:
            steps[-1].append(1, k, v, **kw)
        except numkv.NumkvError:
            made.rollback(steps.pop())
            raise
        return steps[-1]

    return made, append, lambda q, **kw: steps[-1].attention(1, q, **kw)


def cells(target, **kw):
    made = numkv.CausalCache()
    made.init(kw.pop("kind", "fp32"), 2, 12, TOKENS, target, **kw)

    def append(k, v, **kw):
        made.start_forward(numkv.Batch(np.arange(k.shape[0]), np.zeros(k.shape[0], int)))
        made.put(3, k, v, **kw)

    return made, append, lambda q, **kw: made.decode_attention(3, q, **kw)
