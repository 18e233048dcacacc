"""The array types that mypy sees.

Functions that have checked their arrays say `Array`, or ``Array | None``; what a caller may pass before it is checked
is ``Any``. Modules that take `Array` from `numkv.targets` see `AnyArray` under that name: they are still to be
converted, as is what `numkv.checks` returns.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, Protocol

import numpy as np

#: An array in host memory.
HostArray = np.ndarray[Any, Any]
#: NumPy's function without its dispatch to other libraries' arrays, which takes three times as long.
may_share_memory = inspect.unwrap(np.may_share_memory)


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


#: The type of arrays in modules without exact types.
AnyArray = Any


class CacheArrays(NamedTuple):
    """The arrays of a cache for your own kernels, on its target: the same fields for every class of cache.

    Pass it to an ``@njit`` function or a ``@cuda.jit`` kernel; `numkv.device` has the functions that find, load and
    store a row. Fields that do not apply have length 0. Ask the object for it before a launch: after a
    growth, or a change of tables that were copied, there is a new one, and else it costs microseconds.

    Attributes
    ----------
    k, v : array (num_blocks, num_kv_heads, block_size, words_per_row)
        The buffers, in words: see `numkv.Kind.word`.
    k_scale, v_scale : array
        Their scales, in words: see `numkv.Kind.scale_shape`.
    block_table : int32 array (num_seqs, max_blocks)
        Blocks of each sequence; entries past its length mean nothing. Yours to read.
    context_lens : int array (num_seqs,)
        Tokens of each sequence. The object that says so follows what is written there.
    slots : int64 array (num_tokens,)
        Slots of the tokens that are being written now, ``block * block_size + offset``.
    """

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    block_table: Any
    context_lens: Any
    slots: Any


def owned(x: Any, known: dict[int, Any] | None = None) -> Any:
    """Copy the read-only arrays of an unpickled state: in Ray, for one, they lie in memory that processes share.

    What `known` has by its id is copied already: one array, list or dictionary at several places stays one.
    """
    known = {} if known is None else known
    if id(x) in known:
        return known[id(x)]
    made = x
    if isinstance(x, np.ndarray):
        made = x if x.flags.writeable else x.copy()
    elif type(x) is dict:
        made = {name: owned(part, known) for name, part in x.items()}
    elif isinstance(x, tuple | list):
        parts = [owned(part, known) for part in x]
        made = type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    known[id(x)] = made
    return made
