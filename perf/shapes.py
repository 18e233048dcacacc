"""The shapes that are measured, the rows in them, and the attention over them in float64."""

from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

COLD = 256 << 20  # bytes of separate layers to cycle through
MOST_LAYERS = 64


class Shape(NamedTuple):
    """How many of what; `length` tokens are in the cache, or for each sequence as many as `lengths` says.

    Then `length` is how many there is room for. `v_dim` is the width of V's rows where it is not that of K's. Each
    sequence's newest `queries` tokens attend, each to itself and all before it.
    """

    batch: int
    q_heads: int
    kv_heads: int
    dim: int
    length: int
    v_dim: int | None = None
    queries: int = 1
    lengths: tuple[int, ...] = ()

    @property
    def dim_v(self):
        return self.v_dim or self.dim

    @property
    def lens(self):
        """The length of each sequence."""
        return self.lengths or (self.length,) * self.batch

    @property
    def group(self):
        """Q heads for each kv head."""
        return self.q_heads // self.kv_heads

    @property
    def plain(self):
        """Whether one query attends in each sequence, all are of one length, and K and V of one width."""
        return self.dim_v == self.dim and self.queries == 1 and not self.lengths

    def __str__(self):
        """The numbers, and in words what is not plain."""
        more = [f"{min(self.lengths)} to {max(self.lengths)} tokens"] if self.lengths else []
        more += [f"rows of V {self.dim_v}"] if self.dim_v != self.dim else []
        more += [f"{self.queries} queries"] if self.queries > 1 else []
        return f"({', '.join([*map(str, self[:5]), *more])})"


def mixed_lengths(count, least, most):
    """Lengths whose logarithms are uniform, the same each time."""
    logs = np.random.default_rng(16).uniform(np.log(least), np.log(most), count)
    return tuple(int(x) for x in np.exp(logs).round())


SHAPES = {
    "A": Shape(1, 32, 8, 128, 32768),
    "B": Shape(8, 32, 8, 128, 4096),
    "C": Shape(1, 32, 32, 128, 4096),
    "D": Shape(32, 32, 8, 128, 1024),
    "E": Shape(1, 14, 2, 64, 32768),
    "F": Shape(1, 32, 8, 128, 512),
    "G": Shape(1, 64, 8, 128, 16384),
    "H": Shape(1, 16, 1, 128, 32768),
    "I": Shape(1, 16, 4, 256, 8192),
    "J": Shape(1, 32, 8, 192, 8192, v_dim=128),
    "K": Shape(64, 32, 8, 128, 8192, lengths=mixed_lengths(64, 16, 8192)),
    "L4": Shape(8, 32, 8, 128, 4096, queries=4),
    "L8": Shape(8, 32, 8, 128, 4096, queries=8),
}
#: Those that one call of `decode_attention` over dense rows of one width attends to.
PLAIN = [letter for letter, shape in SHAPES.items() if shape.plain]
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
    "G": "groups of 8, 16k tokens",
    "H": "one kv head, 32k tokens",
    "I": "heads of 256, 8k tokens",
    "J": "K 192, V 128, 8k tokens",
    "K": "64 sequences, 16 to 8k tokens",
    "L4": "4 queries each, 4k tokens",
    "L8": "8 queries each, 4k tokens",
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
    """The newest tokens of each sequence: random rows in float32, and the right result for them.

    k and v have, for each sequence, ``(kv heads, tokens, dim)``: arrays of one more axis, or lists where
    lengths differ. q is ``(batch, q heads, dim)``, or ``(batch, queries, q heads, dim)`` where there are several, and
    `expected` like it.
    """

    flops = 0  # what counts is bytes

    def __init__(self, shape, rng):
        self.shape = shape
        self.k, self.v = (self._rows(rng, width) for width in (shape.dim, shape.dim_v))
        self.q = rng.standard_normal((shape.batch, *self._queries()), np.float32)

    def _rows(self, rng, width):
        shape = self.shape
        if not shape.lengths:
            return rng.standard_normal(
                (shape.batch, shape.kv_heads, shape.length, width), np.float32
            )
        return [rng.standard_normal((shape.kv_heads, n, width), np.float32) for n in shape.lengths]

    def _queries(self):
        shape = self.shape
        one = (shape.q_heads, shape.dim)
        return one if shape.queries == 1 else (shape.queries, *one)

    @property
    def every_query(self):
        """The queries as ``(batch, queries, q heads, dim)``."""
        return self.q.reshape(self.shape.batch, -1, self.shape.q_heads, self.shape.dim)

    @cached_property
    def expected(self):
        every = zip(self.every_query.swapaxes(1, 2), self.k, self.v, strict=True)
        out = np.stack([attend(*one, True) for one in every]).swapaxes(1, 2)
        return out.reshape(*self.q.shape[:-1], self.shape.dim_v)

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
    """A whole causal prompt of one sequence: `queries` is its length, and q is ``(1, tokens, q heads, dim)``."""

    def _queries(self):
        return self.shape.length, self.shape.q_heads, self.shape.dim

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
