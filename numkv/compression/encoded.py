"""`Encoded`: the buffers that encoded vectors lie in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from numkv.compression.config import CodesKind
from numkv.rows.codes import packed_bytes
from numkv.targets.base import Array, Target


@dataclass(frozen=True, slots=True)
class Encoded:
    """Buffers of encoded vectors; see `numkv.kernels.cpu.compress.encode_rows`."""

    codes: Array
    scales: Array
    signs: Array
    residuals: Array

    @staticmethod
    def shapes(
        num_heads: int, capacity: int, head_dim: int, kind: CodesKind
    ) -> tuple[tuple[int, ...], ...]:
        """Shapes of the four arrays."""
        projections = kind.projections or 0
        return (
            (num_heads, capacity, packed_bytes(head_dim, kind.bits)),
            (num_heads, capacity),
            (num_heads, capacity, packed_bytes(projections, 1)),
            (num_heads, capacity if projections else 0),
        )

    @classmethod
    def allocate(
        cls,
        target: Target,
        num_heads: int,
        capacity: int,
        head_dim: int,
        kind: CodesKind,
    ) -> Self:
        """Buffers of zeros."""
        codes, scales, signs, residuals = cls.shapes(num_heads, capacity, head_dim, kind)
        return cls(
            target.zeros(codes, np.uint8),
            target.zeros(scales, np.float32),
            target.zeros(signs, np.uint8),
            target.zeros(residuals, np.float32),
        )

    def arrays(self) -> tuple[Array, Array, Array, Array]:
        return self.codes, self.scales, self.signs, self.residuals

    def move(self, target: Target, to: Encoded, begin: int) -> None:
        """Copy the tokens from `begin` on to the start of other buffers."""
        offset = target.index(np.array([-begin]), np.int64)
        for source, destination in zip(self.arrays(), to.arrays(), strict=True):
            if source.size:
                width = source.shape[2] if len(source.shape) == 3 else 1
                shapes = [(1, *x.shape[:2], width) for x in (source, destination)]
                target.ops.copy_rows(
                    source.reshape(shapes[0]), destination.reshape(shapes[1]), offset
                )
