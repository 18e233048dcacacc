"""Keys with outlier channels, drawn anew for tests of storage kinds: what real models' keys look like.

Each head draws from a generator of its own, in this order: bias, K, V, q. Large keys of models with RoPE gather in
channels of low frequency (arXiv:2502.01563), which hardly rotate within a block; a bias of high frequency is a stress
test. Errors are errors of attention in float64, where all queries see all keys.
"""

import math

import numpy as np

HEADS, DIM, QUERIES = 4, 128, 64
PLACES = {"low": (40, 64, 4), "high": (0, 16, 4)}


def rope(x, first, theta):
    """Half-split pairs of rows ``(n, d)`` at positions from `first` on."""
    half = x.shape[-1] // 2
    angle = np.arange(first, first + len(x))[:, None] * theta ** (-np.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], 1
    )


def biased(low, high, place, *, tokens=2048, theta=1e6, seed=0):
    """K, V ``(tokens, heads, dim)`` and q ``(queries, heads, dim)``; K has a bias before RoPE, of 0 where `high` is."""
    found = []
    for head in range(HEADS):
        rng = np.random.default_rng([seed, head])
        bias = np.zeros(DIM)
        if high:
            if place == "random":
                dims = rng.choice(DIM, 8, replace=False)
            else:
                first, end, count = PLACES[place]
                pairs = rng.choice(np.arange(first, end), count, replace=False)
                dims = np.concatenate([pairs, pairs + DIM // 2])
            bias[dims] = rng.choice([-1, 1], len(dims)) * rng.uniform(low, high, len(dims))
        k = rope(2 * rng.standard_normal((tokens, DIM)) + bias, 0, theta)
        v = rng.standard_normal((tokens, DIM))
        found.append((k, v, rope(rng.standard_normal((QUERIES, DIM)), tokens, theta)))
    return [np.stack(x, 1) for x in zip(*found, strict=True)]


def without_rope(rows, *, tokens=2048, seed=0):
    """Keys of Student's t with 3 degrees of freedom, or whose size grows from a quarter to 4."""
    found = []
    for head in range(HEADS):
        rng = np.random.default_rng([seed, head])
        shape = (tokens, DIM)
        k = rng.standard_t(3, shape) if rows == "student" else rng.standard_normal(shape)
        if rows == "growing":
            k *= np.linspace(0.25, 4, tokens)[:, None]
        found.append((k, rng.standard_normal(shape), rng.standard_normal((QUERIES, DIM))))
    return [np.stack(x, 1) for x in zip(*found, strict=True)]


def attention(k, v, q):
    """Attention of all queries to all keys, head by head, in float64."""
    out = np.empty(q.shape)
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head].T / math.sqrt(q.shape[2])
        weights = np.exp(scores - scores.max(1, keepdims=True))
        out[:, head] = weights @ v[:, head] / weights.sum(1, keepdims=True)
    return out


def error(actual, expected):
    """L2 norm of the difference, relative to that of what was expected."""
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
