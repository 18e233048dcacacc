"""The CPU target: NumPy arrays in host memory."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import numpy as np

from numkv.arrays import Array, HostArray
from numkv.errors import NotSupported, NumkvError, UnsupportedDType
from numkv.kernels.cpu.threads import SERIAL_ELEMENTS
from numkv.kernels.operations import Operations, load
from numkv.kernels.scratch import aligned
from numkv.kinds import Kind
from numkv.targets.base import TORCH_DTYPES, WORD_OF, check_real, masked, no_array
from numkv.targets.fixed import HostFixed, Layout
from numkv.targets.memory import column_of

_HOST = 1  # of DLPack
_NOTHING = contextlib.nullcontext()
# Steps of NumPy's search for a byte that two arrays share; interleaved views take a few.
_MOST_WORK = 10_000
# Without what NumPy does first for arrays of other libraries, which takes three times as long as the function itself.
_may_share_memory = inspect.unwrap(np.may_share_memory)


class CpuTarget:
    """Arrays in host memory: NumPy arrays."""

    name = "cpu"
    key = device_key = "cpu"
    values_on_host = True
    has_jit_views = True
    chooses_stream = False
    small_call = SERIAL_ELEMENTS

    @property
    def ops(self) -> Operations:
        """The CPU's operations."""
        return load("cpu")

    def asarray(self, x: Any, name: str = "array") -> Array:
        """`x` as a NumPy array; a list or a scalar is converted, anything else is taken without a copy."""
        if isinstance(x, (list, tuple, int, float)):
            try:
                return np.asarray(x)
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                raise no_array(name, x, "or numbers", error) from error
        return self.accept(x, name)

    def accept(self, x: Any, name: str) -> Array:
        """`x` as a NumPy array, without a copy.

        Takes NumPy arrays, and whatever has ``__array_interface__`` or ``__dlpack__``; torch tensors of bfloat16 and
        8-bit floats too, which neither of the two can hand over as such. Arrays of classes derived from NumPy's are
        taken for plain ones, but for masked arrays.
        """
        if type(x) is np.ndarray:
            return x
        if isinstance(x, np.ma.MaskedArray):
            raise masked(name)
        if isinstance(x, np.ndarray):
            return x.view(np.ndarray)
        try:
            return self._handed_over(x, name)
        except (NumkvError, MemoryError):
            raise
        except Exception as error:
            raise no_array(name, x, "in host memory", error) from error

    def _handed_over(self, x: Any, name: str) -> Array:
        """Return the array of an object that is not NumPy's."""
        if getattr(x, "__cuda_ndarray__", False):  # the simulator's would even pass for host arrays
            raise NotSupported(
                f"`{name}`: expected an array in host memory, got one on the CUDA device; "
                'bring it to the host first, or use target="cuda"'
            )
        if type(x).__module__.partition(".")[0] == "torch":
            return self._from_torch(x, name)
        if hasattr(x, "__array_interface__"):
            return np.asarray(x)
        if hasattr(x, "__dlpack__"):
            try:
                return np.from_dlpack(x)
            except (BufferError, RuntimeError, TypeError) as error:
                if x.__dlpack_device__()[0] == _HOST and hasattr(x, "__array__"):
                    return np.asarray(x, copy=False)  # JAX's bfloat16, which DLPack of NumPy lacks
                raise NotSupported(
                    f"`{name}`: expected an array in host memory, got {type(x).__name__}, which "
                    f"NumPy cannot take without a copy ({error}); bring it to the host first"
                ) from error
        raise UnsupportedDType(
            f"`{name}`: expected a NumPy array (or an object with __array_interface__ or "
            f"__dlpack__), got {type(x).__name__}; {_instead(x)}"
        )

    @staticmethod
    def _from_torch(x: Any, name: str) -> Array:
        if x.device.type != "cpu":
            raise NotSupported(
                f"`{name}`: expected an array in host memory, got a tensor on {x.device}; "
                'move it with .cpu(), or use target="cuda"'
            )
        x = x.detach()
        dtype = TORCH_DTYPES.get(str(x.dtype))
        if dtype is None:
            return x.numpy()
        import torch

        return x.view(getattr(torch, WORD_OF[dtype].name)).numpy().view(dtype)

    def on(self, *arrays: Any, after: Any = None, default: Any = None) -> Any:
        """A context in which nothing differs: operations are done when they return."""
        return _NOTHING

    def run(
        self, function: Any, call: Any, arrays: tuple[Any, ...], options: tuple[Any, ...]
    ) -> Any:
        """Nothing: there are no streams to choose from, so nobody asks."""

    def place(self) -> None:
        """None: there is one."""

    def watch(self, k: Any, v: Any, marker: Any = None) -> int:
        """0: values are looked at before they are written."""
        return 0

    def mend_rows(self, k: Any, v: Any, slots: Any, look: int) -> None:
        """Do nothing: values are looked at before they are written."""

    def new_watch(self) -> Any:
        """None: nothing is reported late."""
        return None

    def collect_late(self, watch: Any, wait: bool = False) -> None:
        """Do nothing: nothing is reported late."""

    def repeats(self) -> Any:
        """None: calls of functions are short as they are."""
        return None

    def number(self, value: int, which: int) -> int:
        """Return the value: no call is written down."""
        return value

    def length(self, length: int) -> HostArray:
        """An array of one element."""
        return np.array([length], np.int64)

    def refuse_capture(self, what: str, instead: str = "") -> None:
        """Do nothing: there are no graphs."""

    def hold(self, *objects: Any) -> bool:
        """False: there are no graphs."""
        return False

    def fixed(self, layout: Layout) -> HostFixed:
        """New arrays of integers which stay where they are and are filled anew."""
        return HostFixed(layout)

    def constant(self, x: HostArray) -> Array:
        """`x` itself."""
        return x

    def mark_queries(self, starts: Array, queries: str) -> None:
        """Nothing: kernels see values."""

    def share_memory(self, a: Any, b: Any) -> bool:
        """Return whether two arrays have a byte in common; first by the ends of their memory, then exactly."""
        if not _may_share_memory(a, b):
            return False
        try:
            return np.shares_memory(a, b, max_work=_MOST_WORK)  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True

    def same_memory(self, a: Any, b: Any) -> bool:
        """Return whether two arrays of a dtype and a shape have the same elements in the same places."""
        here, there = a.__array_interface__, b.__array_interface__
        return bool(here["data"][0] == there["data"][0] and a.strides == b.strides)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new array whose elements are undefined."""
        return np.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new array of zeros, for buffers; the system gives its memory when it is first touched."""
        return aligned(np.zeros, shape, dtype)

    def column(self, pages: Any, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """A view of shape ``(rows, *shape)`` on rows of bytes ``(rows, n)``: of each what comes after byte `start`."""
        return column_of(pages, start, shape, dtype)

    def to_host(self, x: Any) -> HostArray:
        """`x` itself."""
        return x

    def words(self, x: Any) -> Array:
        """Return the array that kernels see: see `WORD_OF`; of other dtypes as they are."""
        word = WORD_OF.get(x.dtype)
        return x if word is None else x.view(word)

    def typed(self, words: Array, dtype: np.dtype[Any]) -> Array:
        """Return the array that a user sees of words, in `Kind.stored_dtype`."""
        return words.view(dtype)

    def dequantise(self, kind: Kind, codes: Array, scale: Array) -> Array:
        """Values ``(heads, tokens, head_dim)`` of codes ``(heads, tokens, words)`` and their scales' words, float32."""
        from numkv.kernels.cpu.convert import dequantise

        heads, tokens, words = codes.shape
        out = np.empty((heads, tokens, kind.elements_of(words)), np.float32)
        dequantise(codes, kind.name, scale, out)  # type: ignore[no-untyped-call]
        return out

    def one_head(self, x: Any) -> Array:
        """A view of shape ``(tokens, 1, width)`` on an array of shape ``(tokens, width)``."""
        return x[:, None, :]

    def token_major(self, x: Any) -> Array:
        """A view of shape ``(tokens, heads, dim)`` on an array of shape ``(heads, tokens, dim)``."""
        return x.transpose(1, 0, 2)

    def dim_major(self, x: Any) -> Array:
        """A view of shape ``(heads, dim, tokens)`` on an array of shape ``(heads, tokens, dim)``."""
        return x.transpose(0, 2, 1)

    def by_token(self, x: Any) -> Array:
        """A view of shape ``(tokens, heads, 1, …)`` on an array of one block, ``(1, heads, tokens, …)``."""
        return x.swapaxes(0, 2)

    def index(self, x: Any, dtype: Any) -> Array:
        """A host integer array as a NumPy array of `dtype`; a copy only where the dtype differs."""
        return np.asarray(x, dtype)

    def index_all(self, given: list[tuple[Any, Any]]) -> list[Array]:
        """Many arrays of integers as kernels take them."""
        return [self.index(x, dtype) for x, dtype in given]

    def reals(self, name: str, x: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """A small float argument as a NumPy array of `dtype` and `shape`; converted if it has another float dtype."""
        x = self.asarray(x, name)
        check_real(name, x, dtype, shape)
        return np.require(x, dtype, "A")


def _instead(x: Any) -> str:
    """What to do about something that is no array."""
    if x is None:
        return "this argument cannot be left out"
    if isinstance(x, (bool, int, float, complex)):
        return "pass an array"
    return "convert it with numpy.asarray"
