"""Rotary position embedding: the angles; numkv turns the heads."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from numkv.demo.config import ModelConfig

Array = NDArray[np.float32]


def rotary_tables(config: ModelConfig, num_positions: int) -> tuple[Array, Array]:
    """Cosines and sines of the half-split rotation.

    Frequencies and angles are rounded to float32 as in the models' own implementation: at late
    positions that rounding shows, and the weights were trained with it.

    Parameters
    ----------
    config : ModelConfig
        Head dim, theta and scaling.
    num_positions : int
        Rows of the tables.

    Returns
    -------
    cos, sin : ndarray
        ``(num_positions, head_dim / 2)``.
    """
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    frequency = 1 / (config.rope_theta**exponents).astype(np.float32)
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        turns = scaling.original_max_position_embeddings * frequency / np.float32(2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        # Frequencies with many turns in the original context stay, those with few are divided.
        kept = np.clip((turns - low) / (high - low), 0, 1)
        frequency = frequency * (kept + (1 - kept) / scaling.factor)
    angles = np.outer(np.arange(num_positions, dtype=np.float32), frequency.astype(np.float32))
    return np.cos(angles), np.sin(angles)
