"""Caches of latents in the test of memory that runs out; see `fault_subjects`."""

import functools

import numpy as np
from fault_base import BLOCK, DIM, F32, TABLES, Subject, plain, queries, refused, rows
from layer_lists import paged_kv_cache

import numkv

LATENT = {"head_dim_v": DIM - 4, "v_kind": "latent"}
FUSED = {
    "qk_mode": numkv.QKMode.NORM_INTERLEAVED, "cos": TABLES[0][:, :2], "sin": TABLES[1][:, :2],
    "norm_weight": np.full(DIM - 4, 2, F32),
}  # fmt: skip


def _rows(n, seed):
    return rows(n, seed, 1)[0]


#: Calls of a layer and of a step without latents.
OF_LAYER = {"write_latents": refused(lambda c: c.write_latents(_rows(5, 7), **FUSED))}
OF_STEP = {"write_latents": refused(lambda c: c.step.write_latents(1, _rows(5, 7), **FUSED))}

_LAYER = {
    "append": lambda c: c.append(_rows(9, 7)),
    "write one token": lambda c: c.write_latents(_rows(1, 7), **FUSED),
    "write_latents": lambda c: c.write_latents(_rows(9, 7), **FUSED),
    "truncate": lambda c: c.truncate(4),
    "compact": lambda c: c.compact([0, 2, 5, 9]),
    "copy": lambda c: c.copy().decode_attention(queries(2), return_lse=True),
    "decode_attention": lambda c: c.decode_attention(queries(2), return_lse=True),
}


def _layer(make):
    layer = make(kind="int8", **LATENT)
    layer.append(_rows(11, 0))
    return layer


def _see_layer(layer):
    layer.check()
    return plain([layer.seq_len, layer.decode_attention(queries(2), return_lse=True)])


def _cache():
    cache = paged_kv_cache(1, 1, DIM, num_blocks=32, block_size=BLOCK, kind="int8", **LATENT)
    for tokens in (7, 5):
        step = cache.reserve([cache.add()], [tokens])
        step.append(0, _rows(tokens, 0))
        cache.commit(step)
    cache.fork(0)
    cache.step = cache.reserve([1, 2], [3, 2])
    return cache


def _see_cache(cache):
    cache.check()
    seen = [
        [cache.length(seq) for seq in cache.sequences],
        cache.num_free,
        list(cache.step.unwritten_layers),
    ]
    return plain([*seen, cache.decode_attention(0, [0, 1], queries(2), return_lse=True)])


_STEP = {
    "append": lambda c: c.step.append(0, _rows(5, 9)),
    "write_latents": lambda c: c.step.write_latents(0, _rows(5, 9), **FUSED),
    "swap_out and in": lambda c: c.swap_in(c.swap_out(0)),
}

SUBJECTS = {
    "a layer of latents": Subject(
        functools.partial(_layer, functools.partial(numkv.ContiguousLayer, 40, 1, DIM)),
        _see_layer,
        _LAYER,
        None,
    ),
    "a paged layer of latents": Subject(
        functools.partial(_layer, functools.partial(numkv.PagedLayer, 12, BLOCK, 1, DIM)),
        _see_layer,
        _LAYER,
        None,
    ),
    "a step of latents": Subject(_cache, _see_cache, _STEP, None),
}
