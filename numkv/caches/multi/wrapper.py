"""`WrapperCache`: several caches that go through the same passes, for models whose layers differ.

Some layers have a sliding window, others attend to everything, and some attend to an encoder's rows. Each kind of layer
has a cache of its own, a *child*, and all children take part in every pass. A change is planned for all children before
the first is changed, so that it happens to all of them or to none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.attention.options import AttentionOptions
from numkv.caches.multi.base import MultiSequenceCache
from numkv.caches.multi.config import CacheConfig, Setup
from numkv.cells.cells import Rows
from numkv.checks import check_index
from numkv.targets.base import Array

__all__ = ["WrapperCache"]


class WrapperCache(MultiSequenceCache):
    """Children that are changed together.

    Parameters
    ----------
    *caches : CausalCache, SlidingWindowCache, ChunkedCache or EncoderCache
        The children, before their `init`. They may have been configured one by one.
    layer_types : sequence of int, optional
        Which child each layer belongs to. Without it, `set_layer_type` chooses the child for the calls that follow.

    Raises
    ------
    ValueError
        If there are no children, or one is listed twice.
    IndexError
        If `layer_types` names a child that is not there.

    Examples
    --------
    >>> import numpy as np, numkv
    >>> sliding, causal = numkv.SlidingWindowCache(1), numkv.CausalCache()
    >>> cache = numkv.WrapperCache(sliding, causal, layer_types=[0, 1])
    >>> cache.init("fp32", max_sequences=1, capacity=16, max_batch=4)
    >>> cache.start_forward(numkv.Batch(positions=[0, 1, 2], sequences=[0, 0, 0]))
    >>> rows = np.ones((3, 2, 8), np.float32)
    >>> for layer in range(2):
    ...     cache.put(layer, rows, rows)
    >>> cache.get(0)[2][2], cache.get(1)[2][2]
    (array([-inf,   0.,   0.], dtype=float32), array([0., 0., 0.], dtype=float32))
    """

    def __init__(
        self, *caches: MultiSequenceCache, layer_types: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        if not caches or len({id(child) for child in caches}) < len(caches):
            raise ValueError("`caches`: expected one cache or more, each of them once")
        for child in caches:
            if not isinstance(child, MultiSequenceCache):
                raise TypeError(f"`caches`: expected caches, got {type(child).__name__}")
        self._children = caches
        self._layer_types: list[int] | None = None
        if layer_types is not None:
            self._layer_types = [check_index("layer_types", i, len(caches)) for i in layer_types]
        self._type = 0

    # -- children

    @property
    def caches(self) -> tuple[MultiSequenceCache, ...]:
        """The children."""
        return self._children

    def set_layer_type(self, i: int) -> None:
        """Choose the child for the calls that follow; the next `start_forward` goes back to the first.

        With `layer_types`, it only chooses the `underlying_cache`.

        Parameters
        ----------
        i : int
            Which child.

        Raises
        ------
        IndexError
            If there is no such child.
        """
        self._type = check_index("i", i, len(self._children))

    @property
    def underlying_cache(self) -> MultiSequenceCache:
        """The child that `set_layer_type` chose."""
        return self._children[self._type]

    def _child(self, layer: int) -> MultiSequenceCache:
        """The child of a layer."""
        if self._layer_types is None:
            return self._children[self._type]
        return self._children[
            self._layer_types[check_index("layer", layer, len(self._layer_types))]
        ]

    def __repr__(self) -> str:
        parts = [repr(child) for child in self._children]
        if self._layer_types is not None:
            parts.append(f"layer_types={self._layer_types}")
        return f"WrapperCache({', '.join(parts)})"

    # -- its life

    def _check_configurable(self) -> None:
        super()._check_configurable()
        for child in self._children:
            child._check_configurable()

    def _take_config(self, config: CacheConfig) -> None:
        super()._take_config(config)
        for child in self._children:
            child._take_config(config)

    def _check_new(self) -> None:
        super()._check_new()
        for child in self._children:
            child._check_new()

    def _plan_init(self, setup: Setup) -> list[Any]:
        return [child._plan_init(setup) for child in self._children]

    def _commit_init(self, plan: list[Any]) -> None:
        for child, part in zip(self._children, plan, strict=True):
            child._commit_init(part)
        self._state = "ready"

    def close(self) -> None:
        """Close all children."""
        super().close()
        for child in self._children:
            child.close()

    # -- changes

    def _plan_forward(self, rows: Rows, items: tuple[int, ...], reserve: bool) -> list[Any]:
        return [child._plan_forward(rows, items, reserve) for child in self._children]

    def _commit_forward(self, plan: list[Any]) -> None:
        for child, part in zip(self._children, plan, strict=True):
            child._commit_forward(part)
        self._type = 0

    def _plan_remove(self, seq: int, begin: int, end: int | None) -> list[Any]:
        return [child._plan_remove(seq, begin, end) for child in self._children]

    def _commit_remove(self, plan: list[Any]) -> None:
        for child, part in zip(self._children, plan, strict=True):
            child._commit_remove(part)

    def _plan_compact(self, seq: int, keep: NDArray[np.int64]) -> list[Any]:
        return [child._plan_compact(seq, keep) for child in self._children]

    def _commit_compact(self, plan: list[Any]) -> None:
        for child, part in zip(self._children, plan, strict=True):
            child._commit_compact(part)

    def _plan_copy(self, src: int, dst: int, length: int) -> list[Any]:
        return [child._plan_copy(src, dst, length) for child in self._children]

    def _commit_copy(self, plan: list[Any]) -> None:
        for child, part in zip(self._children, plan, strict=True):
            child._commit_copy(part)

    def can_resume(self, seq: int, pos: int) -> bool:
        """Whether a sequence can go on with a token at a position in all children.

        Parameters
        ----------
        seq : int
            The sequence.
        pos : int
            Position of the next token.

        Returns
        -------
        bool

        Raises
        ------
        IndexError
            If `seq` or `pos` is negative.
        """
        self._check_ready()
        return all(child.can_resume(seq, pos) for child in self._children)

    # -- a pass

    def put(self, layer: int, k: Any, v: Any, *, check_finite: bool = True) -> None:
        """Write a layer's rows to its child.

        Parameters
        ----------
        layer : int
            Which layer.
        k, v, check_finite
            See the child's own `put`, its errors too.

        Raises
        ------
        IndexError
            If `layer_types` does not list the layer.
        """
        self._check_ready()
        self._child(layer).put(layer, k, v, check_finite=check_finite)

    def get(self, layer: int) -> tuple[Array, Array, Array]:
        """K, V and the mask of a layer from its child.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        k, v, mask
            See the child's own `get`, its errors too.

        Raises
        ------
        IndexError
            If `layer_types` does not list the layer.
        """
        self._check_ready()
        return self._child(layer).get(layer)

    def _set_scales(self, layer: int, k: Any, v: Any) -> None:
        self._child(layer)._set_scales(layer, k, v)

    def _attend(self, layer: int, q: Any, options: AttentionOptions) -> Any:
        return self._child(layer)._attend(layer, q, options)

    def attention_weights(
        self,
        layer: int,
        q: Any,
        *,
        lse: Any = None,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
    ) -> dict[int, Array]:
        """How much attention each token of the batch's sequences gets in a layer of its child.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array (num_tokens, num_q_heads, head_dim)
            Queries.
        lse, sm_scale, logits_soft_cap
            See the child's own `attention_weights`, its errors too.

        Returns
        -------
        dict of int to float32 array (num_kv_heads, n)
            By sequence; a column for each token that the child stores.

        Raises
        ------
        IndexError
            If `layer_types` does not list the layer.
        NotSupported
            If the child does not hold sequences of tokens.
        """
        self._check_ready()
        return self._child(layer).attention_weights(
            layer, q, lse=lse, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap
        )
