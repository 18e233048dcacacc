"""A `PagedKVCache` of known rows, for its tests."""

import zlib

import naive
import numpy as np
import pytest
import tolerances
from layer_lists import paged_kv_cache

HEADS, Q_HEADS, DIM = 2, 4, 8


def make(layers=2, *, num_blocks=32, block_size=2, kind="fp32", **options):
    return paged_kv_cache(
        layers, HEADS, DIM, num_blocks=num_blocks, block_size=block_size, kind=kind, **options
    )


def rows(layer, tokens, begin=0, salt=0):
    """``(2, n, heads, dim)``: K and V of tokens from `begin` on, which depend on all tokens before them."""
    found = [
        np.random.default_rng(
            zlib.crc32(repr((layer, salt, list(map(int, tokens[: i + 1])))).encode())
        ).standard_normal((2, HEADS, DIM), np.float32)
        for i in range(begin, len(tokens))
    ]
    return np.stack(found, 1) if found else np.empty((2, 0, HEADS, DIM), np.float32)


def write(step, to, texts, starts, salt=0):
    """Write all layers' rows of a step in which each sequence's text grows from `starts` on."""
    for layer in range(step._store.num_layers):
        parts = [rows(layer, t, n, salt) for t, n in zip(texts, starts, strict=True)]
        parts.append(rows(layer, []))  # a step may be empty
        step.append(layer, *(to(np.ascontiguousarray(x)) for x in np.concatenate(parts, 1)))


def grow(cache, to, seq, text, *, named=True, salt=0):
    """Let a sequence's text become `text`, which begins as it does now."""
    begin = cache.length(seq)
    step = cache.reserve([seq], [len(text) - begin])
    write(step, to, [text], [begin], salt)
    cache.commit(step, token_ids=text[begin:] if named else None)


def fill(cache, seqs, n):
    """Let sequences grow by arbitrary tokens."""
    step = cache.reserve(seqs, n)
    for layer in range(cache.num_layers):
        pool, _ = cache._store.place(layer)
        shape = (step.num_tokens, pool.k.shape[1])
        zeros = (np.zeros((*shape, dim), np.float32) for dim in (pool.head_dim, pool.head_dim_v))
        step.append(layer, *map(cache._target.asarray, zeros))
    cache.commit(step)


def started(cache, to, text, *, extra=None, **options):
    seq = cache.add(text, extra=extra)
    grow(cache, to, seq, text, **options)
    return seq


def queries(n):
    return np.random.default_rng(n).standard_normal((n, Q_HEADS, DIM), np.float32)


def outputs(cache, to, host, seqs):
    q = to(queries(1).repeat(len(seqs), 0))
    return np.stack([host(cache.decode_attention(n, seqs, q)) for n in range(cache.num_layers)])


def check_attention(cache, to, host, seq, text, salt=0, kind="fp32"):
    """Check that a sequence attends as if it were the only one."""
    assert cache.length(seq) == len(text)
    for layer, out in enumerate(outputs(cache, to, host, [seq])):
        x = rows(layer, text, salt=salt)
        if kind in naive.CODES:
            x = naive.dequantise(*naive.quantise(x, kind))
        else:
            x = naive.round_to(x, kind)
        k, v = x.transpose(0, 2, 1, 3)[:, None]
        want, _ = naive.attention(
            queries(1), k, v, [len(text)], window_left=cache.layers[layer].window_left
        )
        tolerances.assert_rows_close(out, want, tolerances.attention(kind, "fp32"))


def state_of(cache):
    """Return everything that a refused call must leave as it was."""
    states = [
        (seq, s.length, [t.tolist() for t in s.tables], s.tokens.tolist(), s.registered, s.reserved)
        for seq, s in cache._sequences.items()
    ]
    buffers = [
        x.tobytes() for pool in cache._pools for x in map(pool.target.to_host, pool.arrays())
    ]
    return states, buffers, cache.blocks._state.tobytes(), cache.stats(), cache._next


def refused(cache, error, match, call, *args, **options):
    before = state_of(cache)
    with pytest.raises(error, match=match):
        call(*args, **options)
    assert state_of(cache) == before
    cache.check()
