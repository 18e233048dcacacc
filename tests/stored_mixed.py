"""Caches over a `numkv.store.PrefixStore` whose layers differ, and keep states, for its tests.

It has the functions of `stored_prefixes`, so that a test can use either.
"""

import zlib

import mixed_caches
import numpy as np
import tolerances
from mixed_caches import Layer
from stored_prefixes import prompt, store_in

import numkv

__all__ = ["cache", "check_rows", "grow", "prompt", "started", "store_in"]

SIZE = 4
#: Full layers of two shapes and kinds, one that slides, one within chunks, and one that reads another's rows.
LAYERS = [
    Layer(2, 8, 8),
    Layer(1, 16, 16, window=3),
    Layer(2, 8, 8, "int8", chunk=8),
    Layer(2, 8, 8, source=0),
    Layer(1, 16, 8),
]
STATES = {1: [((3,), "int32"), ((2, 2), "float32")], 4: [((5,), "uint8")]}


def cache(
    store, *, num_states=24, every=None, states=STATES, layers=LAYERS, num_blocks=96, **options
):
    slots = numkv.StateSlots(num_states, every) if states else None
    return mixed_caches.make(
        layers, num_blocks=num_blocks, block_size=SIZE, store=store, states=states, state_slots=slots, **options
    )  # fmt: skip


def states_of(text):
    """The states after a text, of one layer after another: they depend on all of it."""
    crc = 0
    for token in text:
        crc = zlib.crc32(int(token).to_bytes(4, "little"), crc)
    first = np.array([crc % 2**31, len(text), sum(text)], np.int32)
    return [[first, np.full((2, 2), crc % 4093, np.float32)], [np.full(5, crc % 251, np.uint8)]]


def grow(of, seq, text, layers=LAYERS):
    """Let a sequence become `text` in one step; return the number of tokens found."""
    begin, to = of.length(seq), of._target.asarray
    step = of.reserve([seq], len(text) - begin)
    for number, layer in enumerate(layers):
        if layer.source is None:
            each = [mixed_caches.row(number, layer, text[: i + 1]) for i in range(begin, len(text))]
            step.append(number, *(to(np.stack([x[i] for x in each])) for i in range(2)))
    if of.states is not None:
        for number, arrays in zip(STATES, states_of(text), strict=True):
            step.write_state(number, *(to(x[None]) for x in arrays))
    of.commit(step, token_ids=text[begin:])
    return begin


def started(of, text, layers=LAYERS):
    """Make a sequence with this text; return it and the number of tokens found. Steps end at every second block."""
    seq = of.add(text)
    found = of.cached_len(seq)
    for end in range((found // (2 * SIZE) + 1) * 2 * SIZE, len(text), 2 * SIZE):
        grow(of, seq, text[:end], layers)
    if of.length(seq) < len(text):
        grow(of, seq, text, layers)
    return seq, found


def check_rows(of, seq, text, layers=LAYERS):
    """Check that a sequence has the attention and states of its text."""
    of.check()
    text = text[: of.length(seq)]
    plain, host = mixed_caches.Plain(layers), of._target.to_host
    plain.extend(seq, text)
    for number, layer in enumerate(layers):
        q = mixed_caches.queries(layer, 1)
        out = host(of.decode_attention(number, [seq], of._target.asarray(q)))[0]
        bound = tolerances.attention(layer.kind, "fp32")
        tolerances.assert_rows_close(out, plain.attended(seq, number, q[0]), bound)
    if of.states is not None:
        step = of.reserve([seq], [0])
        for number, arrays in zip(STATES, states_of(text), strict=True):
            for got, want in zip(step.read_state(number), arrays, strict=True):
                assert host(got)[0].tobytes() == want.tobytes()
        of.rollback(step)
