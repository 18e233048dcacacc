"""`Encoded`: the buffers that encoded vectors lie in."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np

from numkv.compression.config import CodesKind
from numkv.rows.codes import packed_bytes
from numkv.snapshots.regions import Rows, checked
from numkv.snapshots.saved import Spec
from numkv.snapshots.snapshot import Tensor
from numkv.targets.base import Array, Target

Numbers = np.ndarray[Any, np.dtype[Any]]

_BYTES, _FLOATS = np.dtype(np.uint8), np.dtype(np.float32)
#: Names and dtypes of the arrays.
_PARTS: tuple[tuple[str, np.dtype[Any]], ...] = (
    ("codes", _BYTES),
    ("scales", _FLOATS),
    ("signs", _BYTES),
    ("residuals", _FLOATS),
)


class Encoded(NamedTuple):
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
        shapes = cls.shapes(num_heads, capacity, head_dim, kind)
        return cls._make(
            target.zeros(shape, dtype) for shape, (_, dtype) in zip(shapes, _PARTS, strict=True)
        )

    @classmethod
    def specs(
        cls, side: str, num_heads: int, tokens: int, head_dim: int, kind: CodesKind
    ) -> dict[str, Spec]:
        """The tensors of ``"k"`` or ``"v"`` in a snapshot."""
        shapes = cls.shapes(num_heads, tokens, head_dim, kind)
        return {
            f"{side}_{part}": Spec(dtype, shape)
            for (part, dtype), shape in zip(_PARTS, shapes, strict=True)
            if kind.projections or part in ("codes", "scales")
        }

    def tensors(self, target: Target, specs: dict[str, Spec], slots: Numbers) -> list[Tensor]:
        """The vectors in some slots, zeros for slot -1, as tensors of these specs."""
        found = []
        for (name, spec), x in zip(specs.items(), self, strict=False):
            rows = Rows(target, x.reshape((1, *x.shape)), slots)
            tensor, part = Tensor(name, spec, rows.pieces, rows.fill), name[2:]
            if part in ("scales", "residuals"):
                bad = (
                    f"expected finite {part}, got NaN or infinity in vectors that were pushed with"
                )
                tensor = checked(tensor, _are_norms, f"{bad} check_finite=False; drop these tokens")
            found.append(tensor)
        return found

    def move(self, target: Target, to: Encoded, begin: int) -> None:
        """Copy the tokens from `begin` on to the start of other buffers."""
        offset = target.index(np.array([-begin]), np.int64)
        for source, destination in zip(self, to, strict=True):
            if source.size:
                width = source.shape[2] if len(source.shape) == 3 else 1
                shapes = [(1, *x.shape[:2], width) for x in (source, destination)]
                target.ops.copy_rows(
                    source.reshape(shapes[0]), destination.reshape(shapes[1]), offset
                )


def _are_norms(x: Numbers) -> bool:
    return bool((np.isfinite(x) & (x >= 0)).all())
