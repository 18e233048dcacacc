"""What multi-sequence caches cost beside their kernels: host time of a step's bookkeeping, with 32,768 cells in use.

Beside the median stands the best run, which says more about the code on a machine that others use too. `put` is not
timed: it is a kernel.
"""

import numpy as np
import pytest

import numkv
from numkv.caches.multi import causal as of_cells

CELLS = 32768
STEPS = 128  # that a cache has room for before it goes back to where it was


class Steps:
    """A cache whose sequences are as long as it allows, but for a few steps; one narrow head."""

    def __init__(self, cache, num_seqs, length):
        self.cache, self.length = cache, length
        self.sequences = list(range(num_seqs))
        cache.init("fp16", num_seqs, CELLS // num_seqs, 512)
        for first in range(0, length, 512):
            n = min(512, length - first)
            for sequence in self.sequences:
                self.put(np.arange(first, first + n), np.full(n, sequence))

    def put(self, positions, sequences):
        self.cache.start_forward(numkv.Batch(positions, sequences))
        rows = np.ones((len(positions), 1, 8), np.float16)
        self.cache.put(0, rows, rows)

    def step(self):
        """The next token of each sequence."""
        self.cache.start_forward(numkv.Batch([self.length] * len(self.sequences), self.sequences))
        self.length += 1

    def check(self, visible):
        """The last tokens see what they should, and attend to it: all values are 1."""
        self.step()
        n = len(self.sequences)
        ones = np.ones((n, 1, 8), np.float16)
        self.cache.put(0, ones, ones)
        k, v, mask = self.cache.get(0)
        assert np.array_equal((mask == 0).sum(1), [visible] * n)
        assert len(k) == len(v) == mask.shape[1]
        out, lse = self.cache.decode_attention(0, ones, sm_scale=0.0, return_lse=True)
        assert np.array_equal(out, ones)
        assert np.allclose(lse, np.log(visible), rtol=1e-6)


def causal(num_seqs):
    steps = Steps(numkv.CausalCache(), num_seqs, CELLS // num_seqs - STEPS)
    steps.check(steps.length + 1)
    assert steps.cache.num_cells == CELLS
    assert steps.cache.num_free == num_seqs * (STEPS - 1)
    return steps


def sliding(num_seqs):
    """Windows of 4,096 tokens that have begun to move."""
    steps = Steps(numkv.CausalCache(window_left=4096), num_seqs, 4096 + 512)
    steps.check(4097)
    return steps


CACHES = {
    "causal-1": (causal, 1),
    "causal-64": (causal, 64),
    "sliding-1": (sliding, 1),
    "sliding-7": (sliding, 7),  # of which the capacity of one is longer than the window
}
caches = pytest.mark.parametrize("which", CACHES)


@caches
def test_start_forward(host_time, which):
    make, num_seqs = CACHES[which]
    host_time(make(num_seqs).step)


@caches
def test_step(host_time, monkeypatch, which):
    """`start_forward`, and what `decode_attention` does before it comes to the kernel."""
    make, num_seqs = CACHES[which]
    steps = make(num_seqs)
    calls = []
    monkeypatch.setattr(of_cells, "attend", lambda *args, **options: calls.append(options))
    q = np.ones((num_seqs, 1, 8), np.float16)

    def run():
        steps.step()
        steps.cache.decode_attention(0, q)

    host_time(run)
    low, high = calls[-1]["ranges"][0]
    assert high - low == (steps.length if make is causal else 4097)


@caches
def test_get(host_time, which):
    """The first of a pass, which makes the mask."""
    make, num_seqs = CACHES[which]
    steps = make(num_seqs)
    host_time(lambda: steps.cache.get(0), steps.step)


def test_get_of_another_layer(host_time):
    """The mask is there."""
    steps = causal(1)
    _, _, mask = steps.cache.get(0)
    assert steps.cache.get(0)[2] is mask
    host_time(lambda: steps.cache.get(0))


def test_prefill(host_time):
    """`start_forward` of 512 tokens on top of all the others, and what is taken back for the next."""
    steps = Steps(numkv.CausalCache(), 1, CELLS - 512)
    tokens = numkv.Batch(np.arange(CELLS - 512, CELLS), np.zeros(512, int))
    steps.cache.start_forward(tokens)
    assert steps.cache.num_free == 0
    host_time(lambda: steps.cache.start_forward(tokens), lambda: steps.cache.remove(0, CELLS - 512))


@pytest.mark.parametrize("which", ["end", "middle"])
def test_remove(host_time, which):
    """512 tokens out of 32,768, which come back between; a shift that does nothing."""
    cache = numkv.CausalCache(shift=lambda layer, keys, offsets: keys)
    steps = Steps(cache, 1, CELLS)
    begin = CELLS - 512 if which == "end" else CELLS // 2
    back = numkv.Batch(np.arange(CELLS - 512, CELLS), np.zeros(512, int))
    cache._layers.clear()  # only the books are timed
    cache.remove(0, begin, begin + 512)
    assert len(cache.positions(0)) == steps.length - 512
    cache.start_forward(back)
    assert np.array_equal(cache.positions(0), np.arange(CELLS))

    def run():
        cache.remove(0, begin, begin + 512)

    def setup():
        if len(cache.positions(0)) < CELLS:
            cache.start_forward(back)

    host_time(run, setup)


def test_copy_prefix(host_time):
    """A prefix of 16,384 tokens for another sequence, which had it already."""
    steps = causal(1)
    run = lambda: steps.cache.copy_prefix(0, 1, CELLS // 2)  # noqa: E731
    run()
    assert np.array_equal(steps.cache.positions(1), np.arange(CELLS // 2))
    host_time(run)
