"""The array types that mypy sees.

Functions that have checked their arrays say `Array`, or ``Array | None``; what a caller may pass before it is checked
is ``Any``. Modules that take `Array` from `numkv.targets` see `AnyArray` under that name: they are still to be
converted, as is what `numkv.checks` returns.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

__all__ = ["AnyArray", "Array", "HostArray"]

#: An array in host memory.
HostArray = np.ndarray[Any, Any]


class Array(Protocol):
    """An array of a target: a NumPy array, or a device array of the CUDA target."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one index of an axis to the next."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """What its elements are."""

    @property
    def ndim(self) -> int:
        """How many axes it has."""

    @property
    def size(self) -> int:
        """How many elements it has."""

    @property
    def nbytes(self) -> int:
        """What they take."""

    # As properties, so that the overloads of NumPy and the methods of device arrays both fit.

    @property
    def reshape(self) -> Any:
        """The same elements in another shape, by calling it."""

    @property
    def view(self) -> Any:
        """The same memory as another dtype, by calling it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...

    def __setitem__(self, index: Any, value: Any, /) -> None: ...


#: What modules that are not converted yet call an array.
AnyArray = Any
