"""For your own kernels: where a row lies, and how to load and store it, in ``@njit`` and in ``@cuda.jit`` alike."""

from __future__ import annotations

from numkv.arrays import CacheArrays
from numkv.rows.address import slot_of

__all__ = ["CacheArrays", "slot_of"]
