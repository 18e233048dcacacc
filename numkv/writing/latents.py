"""`LatentRows`: the checked arguments of a write of latents (norm, RoPE, write), and that write, to any latent pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from numkv.checks import check_apart, check_array
from numkv.errors import DimensionMismatch, NotSupported
from numkv.kinds import QUERY_DTYPES, Kind, compute_dtype, float_kind
from numkv.numbers import check_number
from numkv.storage.pool import Pool
from numkv.targets.base import Array
from numkv.targets.call import Marker
from numkv.writing.fused_write import (
    DEFAULT_EPS,
    QKMode,
    Rotating,
    check_mode,
    check_tables,
    empty,
)

_FLOAT32 = np.dtype(np.float32)


@dataclass(slots=True)
class LatentRows(Rotating):
    """Checked rows, and what is to happen to them.

    Attributes
    ----------
    rows : array (num_tokens, num_kv_heads, head_dim)
        Latents with their rotary parts, as the model's projection gives them.
    kind : Kind
        Their float kind.
    mode : QKMode
        Whether latents are normalised, and how rotary parts are rotated.
    cos, sin : array (num_positions, rotary_dim / 2)
        Tables; empty where nothing is rotated.
    weight : array (head_dim_v,)
        Norm weight in the computing dtype; empty where nothing is normalised.
    eps : float
        Added to the mean square.
    """

    rows: Array
    kind: Kind
    mode: QKMode
    cos: Array
    sin: Array
    weight: Array
    eps: float

    @classmethod
    def check(
        cls, pool: Pool, rows: Any, qk_mode: QKMode | int, cos: Any, sin: Any, norm_weight: Any, eps: Any
    ) -> Self:  # fmt: skip
        """Check the arguments of a write; see `numkv.ContiguousLayer.write_latents`."""
        if not pool.is_latent:
            raise NotSupported(
                '`write_latents`: expected a cache made with v_kind="latent", got one of K and V; call write, or append'
            )
        target, mode = pool.target, check_mode(qk_mode)
        heads, dim, width = int(pool.k.shape[1]), pool.head_dim, pool.head_dim_v
        eps = check_number("eps", eps, 0.0, default=DEFAULT_EPS)
        rows = check_array(target, "rows", rows, QUERY_DTYPES, ("num_tokens", heads, dim))
        kind = float_kind(rows.dtype)
        compute = compute_dtype(kind.name, pool.k_kind.name)
        if mode is QKMode.COPY:
            cos = sin = empty(target.key, (0, 0), _FLOAT32)
        else:
            cos, sin = check_tables(target, cos, sin, mode, dim - width)
        weight = empty(target.key, (0,), compute)
        if mode.normalises:
            if norm_weight is None:
                raise DimensionMismatch(
                    f"`norm_weight`: expected {compute} ({width},) for qk_mode {mode}, got None; pass the model's "
                    "weight",
                    expected=(width,),
                )
            weight = target.reals("norm_weight", norm_weight, compute, (width,))
        read = {"rows": rows, "cos": cos, "sin": sin, "norm_weight": weight}
        check_apart(target, pool.written(), read)
        return cls(rows, kind, mode, cos, sin, weight, eps)

    @property
    def num_tokens(self) -> int:
        """Tokens."""
        return int(self.rows.shape[0])

    def check_finite(self, pool: Pool) -> None:
        """Refuse NaN and infinity in rows that the pool quantises."""
        pool.k_buffer.check_finite("rows", self.rows)

    def watch(self, pool: Pool, marker: Marker | None = None) -> int:
        """Have the kernel look for NaN and infinity in what it quantises; see `Pool.watch`."""
        if pool.target.values_on_host or not pool.k_kind.has_scales:
            return 0
        of_rows = ("rows", tuple(self.rows.shape), pool.k_kind, 3)
        return pool.target.watch(of_rows, of_rows, marker)

    def scatter(self, pool: Pool, slot_mapping: Array, positions: Array, look: int = 0) -> None:
        """Write the rows of any number of sequences.

        Parameters
        ----------
        pool : Pool
            What the arguments were checked for.
        slot_mapping : int64 array (num_tokens,)
            Where each token goes; -1 leaves it out.
        positions : int64 array (num_tokens,)
            Row of `cos` and `sin` for each.
        look : int
            What `watch` gave.
        """
        mode = self.mode
        how = (mode.normalises, self.rotates, mode.interleaved, float(self.eps), pool.head_dim_v)
        pool.target.ops.scatter_latents(
            pool.target.words(self.rows), self.kind.name, self.cos, self.sin, how, self.weight, positions, pool.k,
            pool.k_kind.name, pool.k_scale, slot_mapping, look,
        )  # fmt: skip
