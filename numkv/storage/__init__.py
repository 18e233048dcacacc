"""K and V in memory: buffers with their kinds, scales and rotation, and what compiled code sees of them."""

from __future__ import annotations

from numkv.storage.hadamard import Rotation
from numkv.storage.pool import Pool

__all__ = ["Pool", "Rotation"]
