"""Which KV cache the demo's model runs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numkv

__all__ = ["CacheChoice", "CacheFactory", "CacheLayer"]


class CacheLayer(Protocol):
    """What the forward pass asks of the cache of one layer; `numkv.ContiguousLayer` is one."""

    @property
    def seq_len(self) -> int:
        """Tokens in the cache."""

    def truncate(self, length: int) -> None:
        """Forget all but the first tokens."""

    def write(
        self,
        qkv: Any,
        *,
        num_q_heads: int,
        cos: Any,
        sin: Any,
        qk_mode: int,
        q_norm_weight: Any = None,
        k_norm_weight: Any = None,
        eps: float = 1e-6,
    ) -> Any:
        """Norm and rotate q and k, store k and v, return q."""

    def decode_attention(self, q: Any) -> Any:
        """Attend with queries of the last tokens."""


#: Makes the cache of one layer from ``(capacity, num_kv_heads, head_dim)``.
CacheFactory = Callable[[int, int, int], CacheLayer]


@dataclass(frozen=True)
class CacheChoice:
    """A contiguous cache of a storage kind; calling it makes the cache of one layer.

    Parameters
    ----------
    kind : str
        Storage kind of K and V.
    k_kind, v_kind : str, optional
        Kinds of K and of V where they differ.
    target : str
        ``"cpu"`` or ``"cuda"``.
    """

    kind: str = "fp32"
    k_kind: str | None = None
    v_kind: str | None = None
    target: str = "cpu"

    @classmethod
    def parse(cls, text: str, target: str = "cpu") -> CacheChoice:
        """Read ``"fp16"``, or ``"fp16/bf16"`` for K and V apart.

        Parameters
        ----------
        text : str
            One kind, or that of K and that of V around a slash.
        target : str
            Target of the cache.

        Returns
        -------
        CacheChoice

        Raises
        ------
        numkv.UnsupportedDType
            If there is no such kind.
        """
        k, slash, v = text.partition("/")
        k_kind = numkv.kind(k).name
        v_kind = numkv.kind(v).name if slash else k_kind
        if k_kind == v_kind:
            return cls(k_kind, target=target)
        return cls(k_kind, k_kind, v_kind, target)

    @property
    def label(self) -> str:
        """What `parse` reads."""
        return self.kind if self.v_kind is None else f"{self.k_kind or self.kind}/{self.v_kind}"

    def bytes_per_token(
        self, num_kv_heads: int, head_dim: int, head_dim_v: int | None = None
    ) -> int:
        """Bytes that a token costs in one layer.

        Parameters
        ----------
        num_kv_heads, head_dim : int
            Sizes of the layer.
        head_dim_v : int, optional
            Elements of a V row, where they differ from those of a K row.

        Returns
        -------
        int
        """
        k, v = (numkv.kind(kind or self.kind) for kind in (self.k_kind, self.v_kind))
        return num_kv_heads * (k.row_bytes(head_dim) + v.row_bytes(head_dim_v or head_dim))

    def __call__(self, capacity: int, num_kv_heads: int, head_dim: int) -> CacheLayer:
        """Make the cache of one layer."""
        return numkv.ContiguousLayer(
            capacity,
            num_kv_heads,
            head_dim,
            kind=self.kind,
            k_kind=self.k_kind,
            v_kind=self.v_kind,
            target=self.target,
        )
