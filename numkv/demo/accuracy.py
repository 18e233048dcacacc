"""The error of attention over a cache, compared with attention over the original rows.

`evaluate` measures caches on a model's predictions, this module on random rows. Each cache stores the same rows. Its
output for the newest tokens' queries is compared with attention in float64 over the original rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from numkv import QKMode, targets
from numkv.demo.cache import CacheFactory
from numkv.demo.checkpoint import ModelConfig
from numkv.demo.model import PREFILL_CHUNK
from numkv.storage.hadamard import Rotation

Array = NDArray[np.float64]

HEAD_DIM, NUM_KV_HEADS, NUM_Q_HEADS = 128, 8, 32
#: Number of newest tokens whose queries are measured.
NUM_QUERIES = 8
#: Factor of the outlier channel over the others.
OUTLIER = 20.0
_OUTLYING = 42
#: Least and largest bias, added to 8 channels of keys before RoPE: 4 pairs of each kv head.
BIASES = (50.0, 100.0)
_THETA, _PAIRS = 1e6, 4
#: Number of keys whose sum is a query of the sharp rows.
NUM_SOUGHT = 4
#: Names of the baseline without and with rotation.
PER_ROW = {False: "per-row 4 bits", True: "per-row 4 bits+rotate"}
#: Bytes of the baseline's key and value: two codes to a byte, and scales of 4 bytes, as in int8.
PER_ROW_BYTES = 2.0 * (HEAD_DIM // 2 + 4)


@dataclass(frozen=True)
class Rows:
    """Keys and values of a text, and queries of its newest tokens.

    Attributes
    ----------
    k, v : float64 array (num_tokens, num_kv_heads, head_dim)
        The rows.
    q : float64 array (num_queries, num_q_heads, head_dim)
        The queries: each sees the tokens up to its own.
    """

    k: Array
    v: Array
    q: Array


def _gaussian(num_tokens: int) -> Rows:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, num_tokens, NUM_KV_HEADS, HEAD_DIM))
    return Rows(k, v, rng.standard_normal((min(NUM_QUERIES, num_tokens), NUM_Q_HEADS, HEAD_DIM)))


def _one_channel(num_tokens: int, change: np.ufunc) -> Rows:
    """Rows of which one channel is changed by `OUTLIER`."""
    rows = _gaussian(num_tokens)
    for x in (rows.k, rows.v):
        x[..., _OUTLYING] = change(x[..., _OUTLYING], OUTLIER)
    return rows


def _sharp(num_tokens: int) -> Rows:
    rows, rng = _gaussian(num_tokens), np.random.default_rng(1)
    seen = num_tokens - len(rows.q) + 1
    sought = rng.integers(seen, size=(*rows.q.shape[:2], NUM_SOUGHT))
    heads = np.arange(NUM_Q_HEADS) // (NUM_Q_HEADS // NUM_KV_HEADS)
    return Rows(rows.k, rows.v, rows.k[sought, heads[:, None]].sum(axis=2))


def _biased(num_tokens: int, first: int, end: int) -> Rows:
    """Keys with a bias in pairs of channels from `first` to `end`, and queries, after RoPE."""
    rows, rng = _gaussian(num_tokens), np.random.default_rng(2)
    bias = np.zeros((NUM_KV_HEADS, HEAD_DIM))
    for of_head in bias:
        pairs = rng.choice(np.arange(first, end), _PAIRS, replace=False)
        dims = np.concatenate([pairs, pairs + HEAD_DIM // 2])
        of_head[dims] = rng.choice([-1, 1], len(dims)) * rng.uniform(*BIASES, len(dims))
    k, q = _rope(2 * rows.k + bias, 0), _rope(rows.q, num_tokens - len(rows.q))
    return Rows(k, rows.v, q)


def _rope(x: Array, position: int) -> Array:
    """Apply RoPE in half-split pairs to rows from a position on."""
    half = HEAD_DIM // 2
    angles = np.outer(np.arange(position, position + len(x)), _THETA ** (-np.arange(half) / half))
    turn, (a, b) = np.exp(1j * angles)[:, None], (x[..., :half], x[..., half:])
    turned = (a + 1j * b) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _heavy_tails(num_tokens: int) -> Rows:
    rows = _gaussian(num_tokens)
    return Rows(np.random.default_rng(3).standard_t(3, rows.k.shape), rows.v, rows.q)


#: Sets of rows by name: a function that draws the rows of a number of tokens, reproducibly.
ROWS: dict[str, Callable[[int], Rows]] = {
    "Gaussian": _gaussian,
    "outlier": lambda num_tokens: _one_channel(num_tokens, np.multiply),
    "offset": lambda num_tokens: _one_channel(num_tokens, np.add),
    "sharp": _sharp,
    "slow bias": lambda num_tokens: _biased(num_tokens, 40, 64),
    "fast bias": lambda num_tokens: _biased(num_tokens, 0, 16),
    "heavy tails": _heavy_tails,
}


def row_shape() -> ModelConfig:
    """Return a model configuration with the sizes of the rows and one layer, for `CacheFactory`.

    Returns
    -------
    ModelConfig
    """
    sizes = {
        "vocab_size": 1, "hidden_size": NUM_Q_HEADS * HEAD_DIM, "intermediate_size": 1, "num_hidden_layers": 1,
        "num_attention_heads": NUM_Q_HEADS, "num_key_value_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM,
        "max_position_embeddings": 1,
    }  # fmt: skip
    return ModelConfig.from_dict({"model_type": "llama", **sizes})


def attended(factory: CacheFactory, rows: Rows, target: str = "cpu") -> Array:
    """Store rows in a cache, and attend with the newest tokens' queries.

    Parameters
    ----------
    factory : callable
        Makes the cache, such as a `CacheChoice`.
    rows : Rows
        The rows, stored from float32.
    target : str
        Target of the cache.

    Returns
    -------
    float64 array (num_queries, num_q_heads, head_dim)
    """
    place = targets.get(target)
    num_tokens, num_queries = len(rows.k), len(rows.q)
    q = np.zeros((num_tokens, *rows.q.shape[1:]), np.float32)
    q[num_tokens - num_queries :] = rows.q
    heads = np.concatenate([q, rows.k, rows.v], axis=1).astype(np.float32)
    cache = factory(row_shape(), [num_tokens])
    text = cache.add()
    # Older tokens first, in chunks as of a prompt; then the queries' own tokens at once.
    older = num_tokens - num_queries
    bounds = [*range(0, older, PREFILL_CHUNK), older, num_tokens]
    for begin, end in itertools.pairwise(bounds):
        step = cache.reserve([text], [end - begin])
        qkv = place.asarray(heads[begin:end].reshape(end - begin, -1))
        new = step.write(0, qkv, num_q_heads=NUM_Q_HEADS, cos=None, sin=None, qk_mode=QKMode.COPY)
        out = step.attention(0, new)
        cache.commit(step)
    return place.to_host(out).astype(np.float64)


def exact_attention(k: Array, v: Array, q: Array) -> Array:
    """Return attention in float64 of the newest tokens' queries, each to the tokens up to its own.

    Parameters
    ----------
    k, v, q : float64 arrays
        See `Rows`.

    Returns
    -------
    float64 array (num_queries, num_q_heads, head_dim)
    """
    group = q.shape[1] // k.shape[1]
    out = np.empty_like(q)
    for i in range(len(q)):
        seen = len(k) - len(q) + i + 1
        for h in range(q.shape[1]):
            scores = k[:seen, h // group] @ q[i, h] / math.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            out[i, h] = weights @ v[:seen, h // group] / weights.sum()
    return out


def per_row_attention(rows: Rows, rotate: bool) -> Array:
    """Return attention with 4 bits and one symmetric scale for each row: a baseline that numkv does not store.

    Codes are -7 to 7; arithmetic is float64.

    Parameters
    ----------
    rows : Rows
        Keys, values and queries.
    rotate : bool
        Whether all of them are rotated first, and the output is rotated back.

    Returns
    -------
    float64 array (num_queries, num_q_heads, head_dim)
    """
    k, v, q = rows.k, rows.v, rows.q
    if not rotate:
        return exact_attention(_per_row(k), _per_row(v), q)
    rotation, cpu = Rotation(k.shape[2]), targets.get("cpu")
    k, v, q = (rotation.forward(cpu, x) for x in (k, v, q))
    return rotation.backward(cpu, exact_attention(_per_row(k), _per_row(v), q), np.float64)


def _per_row(x: Array) -> Array:
    scale = np.abs(x).max(axis=-1, keepdims=True) / 7
    return np.rint(x / scale) * scale


def relative_error(actual: Array, expected: Array) -> float:
    """Return the L2 norm of the difference of all outputs, relative to that of the expected outputs.

    Parameters
    ----------
    actual, expected : float64 arrays
        Outputs of one shape.

    Returns
    -------
    float
    """
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def better_caches(points: Mapping[str, tuple[float, float]]) -> dict[str, str | None]:
    """Find the caches above the lower envelope of loss over bytes, and a better one for each.

    A cache lies above the envelope if another one is not larger in bytes or loss, and smaller in one of them.

    Parameters
    ----------
    points : mapping of str to tuple of float, float
        Bytes and loss of each cache.

    Returns
    -------
    dict of str to (str or None)
        For each cache the better one with the least loss, then with the fewest bytes; None for a cache on the envelope.
    """
    found: dict[str, str | None] = {}
    for label, (size, loss) in points.items():
        better = [
            (other_loss, other_size, other)
            for other, (other_size, other_loss) in points.items()
            if other_size <= size
            and other_loss <= loss
            and (other_size, other_loss) != (size, loss)
        ]
        found[label] = min(better)[2] if better else None
    return found
