"""Caches of one small number for each token, for tests of which cells hold what."""

import naive_cells
import numpy as np
from cell_problems import Pair, draw, plus, plus_one

import numkv

F32, F16 = np.float32, np.float16
LAST = 2**31 - 1  # the largest position
CACHES = {  # by name: the arguments of numkv's cache, and those of the oracle
    "causal": ({}, {}),
    "sliding": ({"window_left": 1}, {"window": 1}),
    "chunked": ({"chunk_size": 2}, {"chunk": 2}),
}


def numbers(values):
    """Rows of K and of V of tokens that are numbers."""
    k = np.array(values, F32).reshape(-1, 1, 1)
    return k, np.concatenate([k, -k], axis=2)


class Numbers(Pair):
    """A cache whose tokens are numbers."""

    def step(self, values, positions, sequences, shown, mask, v_shown=None, layer=0):
        """One pass: the numbers that `get` shows, and the mask."""
        assert self.start_forward(positions, sequences)
        self.put(layer, *numbers(values))
        self.shows(shown, mask, v_shown, layer)

    def shows(self, shown, mask, v_shown=None, layer=0):
        k, v, got = self.check(layer)
        assert draw(got) == draw(self.cells(layer).mask()) == mask
        assert np.allclose(k[:, 0, 0].astype(F32), shown, rtol=1e-6, atol=0)
        _, want = numbers(shown if v_shown is None else v_shown)
        assert np.allclose(v.astype(F32), want, rtol=1e-6, atol=0)


def make(
    target, name="causal", args=None, sizes=(1, 16, 16), *, kind="fp32", shift=False, config=None,
    **told,
):  # fmt: skip
    """A cache of `CACHES`, with other arguments if given, initialised, beside its oracle."""
    default, defaults = CACHES[name]
    options = default if args is None else args
    cache = numkv.CausalCache(plus(target) if shift else None, **options)
    config = config or {}
    if config:
        cache.set_config(numkv.CacheConfig(**config))
    cache.init(kind, *sizes, target)
    cells = naive_cells.Cells(
        *sizes, **(defaults | told), padding=config.get("padding", 1),
        shift=plus_one if shift else None,
    )  # fmt: skip
    mask_dtype = config.get("mask_dtype", "fp32")
    return Numbers(
        cache, cells, target=target, k_kind=kind, mask_dtype=mask_dtype,
        permuted_v=config.get("permuted_v", False),
    )  # fmt: skip


# ---------------------------------------------------------------- remove


def filled(target, name="causal", sizes=(2, 16, 16), n=4, **options):
    """Keys 10, 20, … of sequence 0, and a mark beside them in layer 1."""
    pair = make(target, name, sizes=sizes, **options)
    assert pair.start_forward(list(range(n)), [0] * n)
    for layer in (0, 1):
        pair.put(layer, *numbers(10.0 * np.arange(1, n + 1) + layer))
    return pair


# ---------------------------------------------------------------- what can go wrong


def ready(target, **options):
    pair = make(target, **({"sizes": (1, 8, 4)} | options))
    pair.step([1, 2], [0, 1], [0, 0], [1, 2], "0x / 00")
    return pair
