"""Estimate how far quantised keys move scores, from the stored scales alone; no exact copy of the keys is needed.

Rounding errors of elements are nearly independent, so those of a score add up like random numbers. Let the elements of
a key have an error of variance ``c * scale ** 2``. Its score with query q is then off by ``sm_scale * sqrt(sum_d q_d **
2 * c * scale_d ** 2)``, root mean square. For evenly spaced levels c is 1/12; for codebooks it follows from their
levels.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.errors import NotSupported
from numkv.kinds import Kind
from numkv.rows import code4, code6
from numkv.rows.channel import FINE
from numkv.storage.buffer import Buffer

Floats = NDArray[np.float64]


@functools.cache
def _variance(kind: str) -> float:
    """The variance of an element's error, in units of its scale squared."""
    if kind not in ("code4", "code6"):
        return 1 / 12
    # Of normal numbers, which rotated rows are, with the scale that fits them.
    of: Any = code4 if kind == "code4" else code6
    sizes = np.linspace(0, 8, 100_001)
    density = np.exp(-(sizes**2) / 2)
    places = sizes / of.OF_NORMAL
    levels = np.array(of.LEVELS)[np.searchsorted(of.EDGES, places, side="right")]
    return float(((places - levels) ** 2 * density).sum() / density.sum())


@np.errstate(invalid="ignore", over="ignore")  # of infinite queries the result is not finite
def key_error(
    buffer: Buffer, slots: NDArray[np.int64], num_tokens: int, q: Any, sm_scale: float
) -> Floats:
    """Estimate how far scores over a sequence's keys are off.

    Parameters
    ----------
    buffer : Buffer
        The keys.
    slots : int64 array (n,)
        Where the tokens lie that are quantised, on the host.
    num_tokens : int
        Tokens of the sequence, those in full precision included, which add no error.
    q : array (num_queries, num_q_heads, head_dim)
        Checked queries.
    sm_scale : float
        Scale of the scores.

    Returns
    -------
    float64 array (num_queries, num_q_heads)
        The root mean square over the tokens.
    """
    target, kind = buffer.target, buffer.kind
    if not kind.has_scales:
        raise NotSupported(
            f"key_error: expected keys in a quantised kind, got {kind}, whose error depends on each element and not on "
            "a scale; compare with attention over the exact keys"
        )
    if buffer.rotation is not None:
        q = buffer.rotation.forward(target, q, np.float32)
    squares: Floats = np.asarray(target.to_host(q), np.float64) ** 2
    each = 1 if kind.group_tokens else kind.group_size or squares.shape[2]
    starts = np.arange(0, squares.shape[2], each)
    heads, size = (int(n) for n in buffer.words.shape[1:3])
    # These are the whole pool's scales; only the sequence's become float64.
    every = target.to_host(buffer.typed_scales())
    if kind.group_tokens:
        slots, size = slots // kind.group_tokens, size // kind.group_tokens
    scales = _steps(kind, every[slots // size, :, slots % size], len(starts))
    mean: Floats = (scales**2).sum(0) / max(num_tokens, 1)  # (num_kv_heads, groups)
    of_groups = np.add.reduceat(squares, starts, axis=2)
    of_groups = of_groups.reshape(len(squares), heads, squares.shape[1] // heads, len(starts))
    found: Floats = np.sqrt(_variance(kind.name) * np.einsum("nhqg,hg->nhq", of_groups, mean))
    return abs(sm_scale) * found.reshape(squares.shape[:2])


def _steps(kind: Kind, stored: Any, count: int) -> Floats:
    """Return the distances between levels ``(slots, num_kv_heads, count)``, by the stored scales of the slots."""
    of_row = stored if stored.ndim == 3 else stored[..., None]
    scales: Floats = of_row[..., :count].astype(np.float64)
    if kind.fine_channels:  # a second code divides the steps of these channels
        wide = stored[..., 2 * count :].view(kind.scale_word).astype(np.int64)
        np.put_along_axis(scales, wide, np.take_along_axis(scales, wide, -1) / FINE, -1)
    return scales
