"""The shapes that are measured, the rows in them, and the attention over them in float64."""

from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

COLD = 256 << 20  # bytes of separate layers to cycle through
MOST_LAYERS = 64


class Shape(NamedTuple):
    """How many of what; `length` tokens are in the cache."""

    batch: int
    q_heads: int
    kv_heads: int
    dim: int
    length: int


SHAPES = {
    "A": Shape(1, 32, 8, 128, 32768),
    "B": Shape(8, 32, 8, 128, 4096),
    "C": Shape(1, 32, 32, 128, 4096),
    "D": Shape(32, 32, 8, 128, 1024),
    "E": Shape(1, 14, 2, 64, 32768),
    "F": Shape(1, 32, 8, 128, 512),
}
PREFILL = {"P": Shape(1, 32, 8, 128, 2048)}
PREFILL_KINDS = ("fp32", "bf16")

#: What stands beside the letters in tables and pictures.
WORDS = {
    "A": "1 sequence, 32k tokens",
    "B": "8 sequences, 4k tokens",
    "C": "no grouping, 4k tokens",
    "D": "32 sequences, 1k tokens",
    "E": "small heads, 32k tokens",
    "F": "1 sequence, 512 tokens",
    "P": "prompt, 2k tokens",
}


def labelled(letter):
    """A shape's letter and its words."""
    return f"{letter}: {WORDS[letter]}" if letter in WORDS else letter


def cold_layers(size):
    """How many layers of `size` bytes to cycle through, so that each comes from memory."""
    return max(1, min(MOST_LAYERS, -(-COLD // size)))


def causal_flops(shape):
    """Multiplications and additions of the two products of a prompt, where a query sees a key."""
    return 4 * shape.q_heads * shape.dim * shape.length * (shape.length + 1) // 2


def attend(q, k, v, causal=False):
    """One sequence's attention in float64: q ``(heads, queries, dim)`` over k, v ``(kv heads, tokens, dim)``."""
    heads, queries, dim = q.shape
    out = np.empty((heads, queries, v.shape[2]))
    group = heads // len(k)
    for h in range(heads):
        if h % group == 0:
            keys, values = (x[h // group].astype(np.float64) for x in (k, v))
        scores = q[h].astype(np.float64) @ keys.T / np.sqrt(dim)
        if causal:
            scores[~np.tri(queries, len(keys), len(keys) - queries, dtype=bool)] = -np.inf
        p = np.exp(scores - scores.max(1, keepdims=True))
        out[h] = p @ values / p.sum(1, keepdims=True)
    return out


class Decode:
    """One new token for each sequence: random rows in float32, and the right result for them.

    q is ``(batch, q heads, dim)``, k and v are ``(batch, kv heads, tokens, dim)``, `expected` is shaped as q.
    """

    flops = 0  # what counts is bytes

    def __init__(self, shape, rng):
        self.shape = shape
        rows = (shape.batch, shape.kv_heads, shape.length, shape.dim)
        self.k, self.v = (rng.standard_normal(rows, np.float32) for _ in range(2))
        self.q = rng.standard_normal((shape.batch, *self._queries()), np.float32)

    def _queries(self):
        return self.shape.q_heads, self.shape.dim

    @cached_property
    def expected(self):
        every = zip(self.q[:, :, None], self.k, self.v, strict=True)
        return np.stack([attend(*one) for one in every])[:, :, 0]

    def forget_layers(self):
        """Give back what contestants share; see `perf.peers.float_layers`."""
        self.__dict__.pop("_float_layers", None)

    def error(self, result):
        """Relative L2 error of a result against float64 on the unrounded rows."""
        if result.shape != self.expected.shape:
            raise ValueError(f"expected a result {self.expected.shape}, got {result.shape}")
        off = np.linalg.norm(result.astype(np.float64) - self.expected)
        return float(off / np.linalg.norm(self.expected))


class Prefill(Decode):
    """A whole causal prompt of one sequence: q and `expected` are ``(1, tokens, q heads, dim)``."""

    def _queries(self):
        return self.shape.length, self.shape.q_heads, self.shape.dim

    @cached_property
    def expected(self):
        return attend(self.q[0].swapaxes(0, 1), self.k[0], self.v[0], True).swapaxes(0, 1)[None]

    @property
    def flops(self):
        return causal_flops(self.shape)


def problem_of(shape, prefill, seed):
    """A problem whose rows follow from the seed, the same in every process."""
    return (Prefill if prefill else Decode)(shape, np.random.default_rng(seed))


class Problems:
    """What is asked of the workers: a shape's rows by seed, and a file with the right result."""

    def __init__(self, folder, seed=0):
        self.folder, self.seed = Path(folder), seed

    def __getitem__(self, letter):
        is_prefill = letter in PREFILL
        shape = (SHAPES | PREFILL)[letter]
        file = self.folder / f"{letter}.npy"
        if not file.exists():
            np.save(file, problem_of(shape, is_prefill, self.seed).expected)
        return {
            "shape": list(shape),
            "prefill": is_prefill,
            "seed": self.seed,
            "expected": str(file),
        }
