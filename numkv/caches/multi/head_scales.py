"""`HeadScales`: scales of kv heads of a cache's layers, which may be set before a layer is allocated."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.caches.multi.saved import SavedScales
from numkv.checks import host_array
from numkv.kinds import Kind
from numkv.numbers import is_number
from numkv.storage.buffer import Buffer
from numkv.storage.pool import Pool


class HeadScales:
    """Scales of kv heads, K's and V's, by layer; 1 where nothing is set."""

    def __init__(self) -> None:
        self._by_layer: dict[int, dict[str, Any]] = {}

    def copy(self) -> HeadScales:
        """Scales of its own; arrays in it are never changed."""
        new = HeadScales()
        new._by_layer.update(self._by_layer)
        return new

    def saved(self) -> dict[SavedScales, NDArray[Any]]:
        """What was set, for a snapshot, also for layers that were never put."""
        return {
            SavedScales(layer, side, len(x) if x.ndim else 0): np.atleast_1d(x)
            for layer, by_side in self._by_layer.items()
            for side, x in by_side.items()
        }

    def set(
        self, layer: int, pool: Pool | None, kinds: tuple[Kind, Kind], k: Any = None, v: Any = None
    ) -> None:
        """Set the scales of a layer, and apply them if it is allocated already.

        Parameters
        ----------
        layer : int
            Which layer.
        pool : Pool or None
            Its buffers, if it has any. If not, the number of heads is checked when it gets them.
        kinds : tuple of Kind
            Kinds of K and of V.
        k, v : float or float32 array (num_kv_heads,), optional
            The scales; None leaves them as they are.
        """
        given = {name: x for name, x in (("k", k), ("v", v)) if x is not None}
        if pool is not None:
            pool.set_scales(k, v)
        else:
            for name, scales in given.items():
                kind = kinds[name == "v"]
                heads = 1 if is_number(scales) else max(1, host_array(name, scales).size)
                empty = (0, heads, 1)
                buffer = Buffer.allocate(targets.get("cpu"), empty, kind.unit[0], kind)
                buffer.check_scales(name, scales)
        copies = {name: np.array(x, np.float32) for name, x in given.items()}
        self._by_layer[layer] = self._by_layer.get(layer, {}) | copies

    def apply(self, layer: int, pool: Pool) -> None:
        """Give the buffers of a layer that has just been allocated their scales."""
        for name, scales in self._by_layer.get(layer, {}).items():
            buffer, given = pool.buffer(name), scales if scales.ndim else float(scales)
            found = buffer.check_scales(f"{name} of set_scales", given)
            buffer.scales[:] = buffer.target.asarray(found)
