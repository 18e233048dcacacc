"""A warning if quantised keys change a model's scores too much: `use(model, tolerance=…)`."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from numkv.caches import ContiguousLayer
from numkv.errors import NotSupported
from numkv.numbers import check_number
from numkv.storage.key_error import key_error
from numkv.storage.pool import Pool
from numkv.transformers.layers import NumkvLayer
from numkv.transformers.metadata import Step

#: Number of newest queries of a prompt that are measured.
_QUERIES = 8
#: Alternatives for layers that exceed it, with their names.
_OTHERS = (("int8", False, "kind='int8'"), ("int8", True, "kind='int8', rotate=True"))
_LAST = "k_kind='bf16'"


class Tolerance:
    """Measures the first prompt of a model, and warns once.

    Parameters
    ----------
    most : float
        Largest tolerated error of scores: see `numkv.KVCache.key_error`.

    Raises
    ------
    ValueError, TypeError
        If it is no number above 0.
    """

    def __init__(self, most: float) -> None:
        self.most = check_number("tolerance", most)
        if not self.most > 0:
            raise ValueError(f"`tolerance`: expected a number above 0, got {most}")
        self.has_looked = False
        self._layers: list[NumkvLayer] = []
        #: Error of each measured layer, with those of the alternatives if it exceeds the tolerance.
        self._found: dict[int, tuple[float, list[float]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_layers": [], "_found": {}}

    def watch(self, cache: Any) -> None:
        """Measure the first prompt of a new `NumkvCache`, unless one was measured before."""
        layers = [layer for layer in cache.layers if isinstance(layer, NumkvLayer)]
        if self.has_looked:
            return
        if not all(
            layer.options.k_kind is not None and layer.options.k_kind.has_scales for layer in layers
        ):
            raise NotSupported(
                "`tolerance`: expected None for keys that are not quantised, whose error it does not measure; leave it "
                "out, or choose kind='int8'"
            )
        self._layers, self._found = layers, {}
        for layer in layers:
            layer.options.shared.tolerance = self

    def look(
        self, layer: NumkvLayer, q: Any, k: Any, pool: Pool, step: Step, sm_scale: float
    ) -> None:
        """Estimate the error of a layer's keys, and warn after the last layer.

        Parameters
        ----------
        layer : NumkvLayer
            The layer.
        q, k : array (batch * T, num_heads, head_dim)
            Queries and keys of the pass, of which those of the first sequence are measured.
        pool, step
            The layer's pool, and the step of the pass.
        sm_scale : float
            Scale of the scores.
        """
        if self.has_looked:
            return
        number = next((i for i, x in enumerate(self._layers) if x is layer), None)
        new = int(step.lengths[0])
        if number is None or number in self._found or new < 2:
            return
        slots = np.asarray(step.slots[: len(step.slots) // len(step.lengths)])
        columns, is_token = len(slots), slots >= 0
        slots = slots[is_token]
        coded = slice(None)
        if some := pool.k_kind.group_tokens:  # the newest group has no scales yet
            start = int(step.before.lengths[0])
            coded = slice(
                -(-start // some) * some - start,
                max(0, (start + len(slots)) // some * some - start),
            )
            if not len(slots[coded]):
                return
        queries = np.asarray(q)[:columns][is_token][-_QUERIES:].astype(np.float32)
        error = float(key_error(pool.k_buffer, slots[coded], len(slots), queries, sm_scale).max())
        others = []
        if error > self.most:
            rows = np.asarray(k)[:columns][is_token].astype(np.float32)
            others = [
                _error_in(kind, rotate, rows, queries, sm_scale) for kind, rotate, _ in _OTHERS
            ]
        self._found[number] = error, others
        if len(self._found) == len(self._layers):
            self._warn()

    def _warn(self) -> None:
        broken = {i: found for i, found in sorted(self._found.items()) if found[0] > self.most}
        kinds = ", ".join(dict.fromkeys(layer.storage for layer in self._layers))
        count = len(self._layers)
        self.has_looked, self._layers, self._found = True, [], {}
        if not broken:
            return
        worst = max(error for error, _ in broken.values())
        remedy = f"8 bits exceed it too: pass {_LAST}"
        for i, (_, _, name) in enumerate(_OTHERS):
            least = max(others[i] for _, others in broken.values())
            if least <= self.most:
                remedy = f"{name} reduces it to {least:.2g}"
                break
        warnings.warn(
            f"numkv.transformers: keys in {kinds} change scores by {worst:.2g}, more than tolerance={self.most:g}, in "
            f"layers {', '.join(map(str, broken))} of {count}; {remedy}. `numkv fit` chooses kinds by layer",
            stacklevel=2,
        )


def _error_in(kind: str, rotate: bool, k: Any, q: Any, sm_scale: float) -> float:
    """Return the largest error over heads for the same keys in another kind."""
    tokens, heads, dim = (int(n) for n in k.shape)
    layer = ContiguousLayer(tokens, heads, dim, kind=kind, rotate=rotate)
    layer.append(k, k)
    return float(layer.key_error(q, sm_scale=sm_scale).max())
