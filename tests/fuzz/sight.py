"""Arguments that say who sees what: ranges, masks, slopes, parents of drafts."""

from __future__ import annotations

import numpy as np

from fuzz.hostile import OMIT
from fuzz.play import Arg, Draw

__all__ = ["PARENTS", "SIGHT"]


def _sight(make) -> object:
    """What seldom comes: arrays for queries of the call."""

    def some(d: Draw) -> object:
        q = d.given.get("q")
        if not isinstance(q, np.ndarray) or q.ndim != 3 or d.randrange(6):
            return OMIT
        return make(d, q)

    return some


def _with_kernel(d: Draw, q: np.ndarray) -> bool:
    """Whether kernels for masks and biases are made in a fuzzer's run: each takes seconds to compile."""
    return d.scene.kind in ("fp32", "int8") and q.dtype != np.float64


def _ranges(d: Draw, q: np.ndarray) -> object:
    low, high = -3, d.scene.capacity("") + 4
    some = [[d.randrange(low, high), d.randrange(low, high)] for _ in q]
    return np.array(some, d.choice([np.int32, np.int64])).reshape(-1, 2)


def _mask(d: Draw, q: np.ndarray) -> object:
    words = [[d.randrange(2**32)] for _ in q]
    return np.array(words, np.uint32).reshape(-1, 1) if _with_kernel(d, q) else OMIT


def _slopes(d: Draw, q: np.ndarray) -> object:
    return d.floats((d.scene.q_heads,)) if _with_kernel(d, q) else OMIT


SIGHT = {
    "ranges": Arg("integers", _sight(_ranges), True),
    "mask": Arg("integers", _sight(_mask), True),
    "alibi_slopes": Arg("floats", _sight(_slopes), True),
}
PARENTS = Arg(
    "integers",
    lambda d: np.array([d.randrange(-1, i) for i in range(d.choice([0, 1, 5, 40]))], np.int64),
)
