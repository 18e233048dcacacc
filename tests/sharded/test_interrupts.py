"""Interrupts before lines of the calls of a sharded cache, whose shards are in this process."""

import numpy as np
import pytest
from fault_base import plain
from interrupts import raising_signals, walk
from sharded_caches import DIM, HEADS, Q_HEADS, grow, make


def built():
    cache = make((1, 2, 4))
    first, second = cache.add(), cache.add()
    grow(cache, {first: [1, 2, 3, 4, 5], second: [9, 8, 7]})
    cache.fork(first)
    return cache


def in_step():
    cache = built()
    cache.step = cache.reserve([0, 1], [2, 1])
    rows = np.ones((3, HEADS, DIM), np.float32)
    for layer in range(2):
        cache.step.append(layer, rows, rows)
    return cache


def see(cache):
    cache.check()
    seqs = list(cache.sequences)
    seen = [seqs, [cache.length(seq) for seq in seqs], len(cache._shards.open_steps)]
    queries = np.ones((len(seqs), Q_HEADS, DIM), np.float32)
    return [*seen, plain(cache.decode_attention(0, seqs, queries))]


def roll_back(cache):
    cache.rollback(cache.step)


CALLS = {
    "add": (built, lambda c: c.add()),
    "add a known prompt": (built, lambda c: c.add([1, 2, 3, 4, 5, 6])),
    "fork": (built, lambda c: c.fork(0)),
    "remove": (built, lambda c: c.remove(1)),
    "truncate": (built, lambda c: c.truncate(0, 3)),
    "reserve": (built, lambda c: c.reserve([0, 1], [2, 1])),
    "clear": (built, lambda c: c.clear()),
    # A commit that waits for shards is rolled back, as when one is lost.
    "commit": (in_step, lambda c: c.commit(c.step), roll_back),
    "commit what was accepted": (in_step, lambda c: c.commit(c.step, [1, 1]), roll_back),
    "rollback": (in_step, roll_back),
}


@pytest.mark.parametrize("samples", [3, pytest.param(None, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("call", CALLS)
def test_a_signal_at_a_line(call, samples):
    begin, do, *allowed = CALLS[call]
    with raising_signals():
        walk(begin, do, see, allowed, samples, call)
