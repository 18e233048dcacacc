"""The CPU target: NumPy arrays in host memory."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from numkv.arrays import Array, HostArray, may_share_memory
from numkv.errors import NotSupported, NumkvError, UnsupportedDType
from numkv.kernels.cpu.threads import SERIAL_ELEMENTS
from numkv.kernels.scratch import aligned
from numkv.kinds import Kind
from numkv.targets.base import TORCH_DTYPES, WORD_OF, Target, check_real, masked, no_array
from numkv.targets.fixed import HostFixed, Layout
from numkv.targets.memory import column_of

_HOST = 1  # DLPack's device type of host memory
_NOTHING = contextlib.nullcontext()
# Steps of NumPy's search for a byte that two arrays share; interleaved views take a few.
_MOST_WORK = 10_000


class CpuTarget(Target):
    """Arrays in host memory: NumPy arrays."""

    name = "cpu"
    key = device_key = "cpu"
    values_on_host = True
    has_jit_views = True
    chooses_stream = False
    small_call = SERIAL_ELEMENTS

    def asarray(self, x: Any, name: str = "array") -> Array:
        """Return `x` as a NumPy array; only a list or a scalar is copied."""
        if isinstance(x, (list, tuple, int, float)):
            try:
                return np.asarray(x)
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                raise no_array(name, x, "or numbers", error) from error
        return self.accept(x, name)

    def accept(self, x: Any, name: str) -> Array:
        """Return `x` as a NumPy array, without a copy.

        Accepts NumPy arrays, objects with ``__array_interface__`` or ``__dlpack__``, and torch tensors of bfloat16 and
        8-bit floats, which neither interface supports. Subclasses of NumPy's array count as plain arrays, but masked
        arrays are an error.
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
        if getattr(x, "__cuda_ndarray__", False):  # the simulator's arrays have host interfaces too
            raise NotSupported(
                f"`{name}`: expected an array in host memory, got one on the CUDA device; "
                'copy it to the host first, or use target="cuda"'
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
                    f"NumPy cannot read without a copy ({error}); copy it to the host first"
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
        """Return an empty context: operations are complete when they return."""
        return _NOTHING

    def length(self, length: int) -> HostArray:
        """Return an array of one element."""
        return np.array([length], np.int64)

    def fixed(self, layout: Layout) -> HostFixed:
        """Return new integer arrays at fixed addresses, which can be filled again."""
        return HostFixed(layout)

    def share_memory(self, a: Any, b: Any) -> bool:
        """Return whether two arrays have a byte in common: by the ends of their memory, then exactly."""
        if not may_share_memory(a, b):
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
        """Return a new array with undefined elements."""
        return np.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a new array of zeros, for buffers; the system allocates its memory at the first use."""
        return aligned(np.zeros, shape, dtype)

    def column(self, pages: Any, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a view of shape ``(rows, *shape)`` on rows of bytes ``(rows, n)``, from byte `start` of each."""
        return column_of(pages, start, shape, dtype)

    def to_host(self, x: Any) -> HostArray:
        """Return `x` itself."""
        return x

    def words(self, x: Any) -> Array:
        """Return the array that kernels see: see `WORD_OF`; other dtypes are unchanged."""
        word = WORD_OF.get(x.dtype)
        return x if word is None else x.view(word)

    def typed(self, words: Array, dtype: np.dtype[Any]) -> Array:
        """Return the array that a user sees of words, in `Kind.stored_dtype`."""
        return words.view(dtype)

    def dequantise(self, kind: Kind, codes: Array, scale: Array) -> Array:
        """Return float32 values ``(heads, tokens, head_dim)`` of codes ``(heads, tokens, words)`` and their scales."""
        from numkv.kernels.cpu.convert import dequantise

        heads, tokens, words = codes.shape
        out = np.empty((heads, tokens, kind.elements_of(words)), np.float32)
        dequantise(codes, kind.name, scale, out)  # type: ignore[no-untyped-call]
        return out

    def one_head(self, x: Any) -> Array:
        """Return a view of shape ``(tokens, 1, width)`` on an array of shape ``(tokens, width)``."""
        return x[:, None, :]

    def token_major(self, x: Any) -> Array:
        """Return a view of shape ``(tokens, heads, dim)`` on an array of shape ``(heads, tokens, dim)``."""
        return x.transpose(1, 0, 2)

    def dim_major(self, x: Any) -> Array:
        """Return a view of shape ``(heads, dim, tokens)`` on an array of shape ``(heads, tokens, dim)``."""
        return x.transpose(0, 2, 1)

    def by_token(self, x: Any) -> Array:
        """Return a view of shape ``(tokens, heads, 1, …)`` on an array of one block, ``(1, heads, tokens, …)``."""
        return x.swapaxes(0, 2)

    def index(self, x: Any, dtype: Any) -> Array:
        """Return a host integer array as a NumPy array of `dtype`; a copy only if the dtype differs."""
        return np.asarray(x, dtype)

    def reals(self, name: str, x: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Return a small float argument as a NumPy array of `dtype` and `shape`, converted if necessary."""
        x = self.asarray(x, name)
        check_real(name, x, dtype, shape)
        return np.require(x, dtype, "A")


def _instead(x: Any) -> str:
    """Return the remedy for an object that is no array."""
    if x is None:
        return "this argument cannot be left out"
    if isinstance(x, (bool, int, float, complex)):
        return "pass an array"
    return "convert it with numpy.asarray"
