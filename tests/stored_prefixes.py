"""Caches over a `numkv.store.PrefixStore`, whose rows are computed from their tokens, for its tests."""

import zlib

import numpy as np
from layer_lists import paged_kv_cache

from numkv.store import PrefixStore

LAYERS, HEADS, DIM, SIZE = 2, 2, 8, 4


def cache(store, *, num_blocks=64, kind="fp32", **options):
    layers = options.pop("layers", LAYERS)
    return paged_kv_cache(
        layers,
        HEADS,
        DIM,
        num_blocks=num_blocks,
        block_size=SIZE,
        kind=kind,
        store=store,
        **options,
    )


def store_in(folder, mark="a model", **options):
    return PrefixStore(folder, mark=mark, **options)


def prompt(number, tokens=21):
    """A prompt that shares nothing with those of other numbers."""
    return [(7 * number + i * (number + 1)) % 1000 for i in range(tokens)]


def rows(layer, text):
    """K and V of all tokens of a text: each depends on all tokens up to its own."""
    found, crc = np.empty((2, len(text), HEADS, DIM), np.float32), layer + 1
    for i, token in enumerate(text):
        crc = zlib.crc32(int(token).to_bytes(4, "little"), crc)
        found[:, i] = crc % 4093 + np.arange(2 * HEADS * DIM).reshape(2, HEADS, DIM) / 64
    return found


def grow(of, seq, text):
    """Let a sequence become `text`; return the number of tokens found."""
    begin = of.length(seq)
    step = of.reserve([seq], len(text) - begin)
    for layer in range(of.num_layers):
        k, v = rows(layer, text)[:, begin:]
        step.append(layer, *map(of._target.asarray, (k, v)))
    of.commit(step, token_ids=text[begin:])
    return begin


def started(of, text):
    """Make a sequence with this text; return it and the number of tokens found."""
    seq = of.add(text)
    return seq, grow(of, seq, text)


def stored_rows(of, seq, length=None):
    """K and V of a sequence in each layer, in host memory, as values."""
    found = []
    length = of.length(seq) if length is None else length
    for layer in range(of.num_layers):
        pool, group = of._store.place(layer)
        table = of._sequences[seq].tables[group]
        at = np.arange(length)
        slots = of._target.index(table[at // SIZE] * SIZE + at % SIZE, np.int64)
        found.append([of._target.to_host(side.gather(slots)) for side in (pool.k_buffer, pool.v_buffer)])  # fmt: skip
    return found


def check_rows(of, seq, text):
    """Check that a sequence has the rows of its text."""
    of.check()
    for layer, (k, v) in enumerate(stored_rows(of, seq)):
        want_k, want_v = rows(layer, text[: of.length(seq)])
        np.testing.assert_array_equal(k, want_k)
        np.testing.assert_array_equal(v, want_v)
