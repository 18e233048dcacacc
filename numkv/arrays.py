"""The array types that mypy sees."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Array", "HostArray"]

#: An array in host memory.
HostArray = np.ndarray[Any, Any]

Array = Any  # a NumPy array, or a device array of the CUDA target
