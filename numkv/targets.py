"""Where arrays live and kernels run: ``"cpu"`` and ``"cuda"``.

A target takes arrays in (`Target.asarray`), allocates them, brings them back to the host, and gives the view that its
kernels work on (`Target.words`). Objects hold a target and never ask which one it is.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from numkv.errors import DimensionMismatch, NotSupported, UnsupportedDType
from numkv.kernels import on
from numkv.kernels.cpu.memory import aligned
from numkv.kinds import Kind

__all__ = ["CpuTarget", "Target", "get", "of"]

Array = Any  # a NumPy array, or a device array of the CUDA target

_BF16 = np.dtype(ml_dtypes.bfloat16)
_HALVES = frozenset((_BF16, np.dtype(np.float16)))

_ops = functools.cache(on)  # to look a module up takes half a microsecond


class Target(Protocol):
    """What objects and functions need of a place to compute."""

    name: str

    @property
    def ops(self) -> ModuleType:
        """The target's operations: see `numkv.kernels`."""

    def asarray(self, x: Any, name: str = "array") -> Array:
        """`x` as an array of this target, without a copy where it is already here.

        Parameters
        ----------
        x : object
            An array of this target or one that hands its memory over; on CUDA also a NumPy array, which is copied.
        name : str
            What errors call it.
        """

    def accept(self, x: Any, name: str) -> Array:
        """`x` as an array of this target, without a copy, or an error that names it."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new array whose elements are undefined."""

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new array of zeros."""

    def to_host(self, x: Array) -> np.ndarray[Any, Any]:
        """`x` as a NumPy array; a copy on CUDA."""

    def words(self, x: Array) -> Array:
        """The array that kernels see: 16-bit floats as ``uint16`` words, others as they are."""

    def typed(self, words: Array, dtype: np.dtype[Any]) -> Array:
        """The array that a user sees of float words: the inverse of `words`."""

    def dequantise(self, kind: Kind, codes: Array, scale: Array) -> Array:
        """Values ``(heads, tokens, head_dim)`` of codes ``(heads, tokens, words)`` and their scales' words, float32."""

    def one_head(self, x: Array) -> Array:
        """A view of shape ``(tokens, 1, width)`` on an array of shape ``(tokens, width)``."""

    def token_major(self, x: Array) -> Array:
        """A view of shape ``(tokens, heads, dim)`` on an array of shape ``(heads, tokens, dim)``."""

    def dim_major(self, x: Array) -> Array:
        """A view of shape ``(heads, dim, tokens)`` on an array of shape ``(heads, tokens, dim)``."""

    def index(self, x: Any, dtype: Any) -> Array:
        """Integers, here or in a NumPy array, as the array of this target that its kernels take."""

    def reals(self, name: str, x: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """A small float argument (norm weights, sinks) as an array of this target, of `dtype` and `shape`."""


class CpuTarget:
    """Arrays in host memory: NumPy arrays."""

    name = "cpu"

    @property
    def ops(self) -> ModuleType:
        """The CPU's operations."""
        return _ops("cpu")

    def asarray(self, x: Any, name: str = "array") -> Array:
        """`x` as a NumPy array; a list or a scalar is converted, anything else is taken without a copy."""
        if isinstance(x, (list, tuple, int, float)):
            return np.asarray(x)
        return self.accept(x, name)

    def accept(self, x: Any, name: str) -> Array:
        """`x` as a NumPy array, without a copy.

        Takes NumPy arrays, and whatever has ``__array_interface__`` or ``__dlpack__``; a bfloat16 torch tensor too,
        which neither of the two can hand over as such.
        """
        if type(x) is np.ndarray:
            return x
        if isinstance(x, np.ndarray):
            return x.view(np.ndarray)
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
                raise NotSupported(
                    f"`{name}`: expected an array in host memory, got {type(x).__name__}, which "
                    f"NumPy cannot take without a copy ({error}); bring it to the host first"
                ) from error
        raise UnsupportedDType(
            f"`{name}`: expected a NumPy array (or an object with __array_interface__ or "
            f"__dlpack__), got {type(x).__name__}; convert it with numpy.asarray"
        )

    @staticmethod
    def _from_torch(x: Any, name: str) -> Array:
        if x.device.type != "cpu":
            raise NotSupported(
                f"`{name}`: expected an array in host memory, got a tensor on {x.device}; "
                'move it with .cpu(), or use target="cuda"'
            )
        x = x.detach()
        if str(x.dtype) == "torch.bfloat16":
            import torch

            return x.view(torch.uint16).numpy().view(_BF16)
        return x.numpy()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new array whose elements are undefined."""
        return np.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new array of zeros, for buffers; the system gives its memory when it is first touched."""
        return aligned(np.zeros, shape, dtype)

    def to_host(self, x: Array) -> np.ndarray[Any, Any]:
        """`x` itself."""
        return x  # type: ignore[no-any-return]

    def words(self, x: Array) -> Array:
        """The array that kernels see: 16-bit floats as ``uint16`` words, others as they are."""
        return x.view(np.uint16) if x.dtype in _HALVES else x

    def typed(self, words: Array, dtype: np.dtype[Any]) -> Array:
        """The array that a user sees of float words."""
        return words.view(dtype)

    def dequantise(self, kind: Kind, codes: Array, scale: Array) -> Array:
        """Values ``(heads, tokens, head_dim)`` of codes ``(heads, tokens, words)`` and their scales' words, float32."""
        from numkv.kernels.cpu.convert import dequantise

        heads, tokens, words = codes.shape
        out = np.empty((heads, tokens, words * kind.elements_per_word), np.float32)
        dequantise(codes, kind.name, scale, out)  # type: ignore[no-untyped-call]
        return out

    def one_head(self, x: Array) -> Array:
        """A view of shape ``(tokens, 1, width)`` on an array of shape ``(tokens, width)``."""
        return x[:, None, :]

    def token_major(self, x: Array) -> Array:
        """A view of shape ``(tokens, heads, dim)`` on an array of shape ``(heads, tokens, dim)``."""
        return x.transpose(1, 0, 2)

    def dim_major(self, x: Array) -> Array:
        """A view of shape ``(heads, dim, tokens)`` on an array of shape ``(heads, tokens, dim)``."""
        return x.transpose(0, 2, 1)

    def index(self, x: Any, dtype: Any) -> Array:
        """A host integer array as a NumPy array of `dtype`; a copy only where the dtype differs."""
        return np.asarray(x, dtype)

    def reals(self, name: str, x: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """A small float argument as a NumPy array of `dtype` and `shape`; converted if it has another float dtype."""
        x = self.asarray(x, name)
        if x.dtype.kind != "f" and x.dtype != _BF16:
            raise UnsupportedDType(
                f"`{name}`: expected {dtype} {shape}, got {x.dtype} {x.shape}; convert it to a float dtype"
            )
        if x.shape != shape:
            raise DimensionMismatch(
                f"`{name}`: expected {dtype} {shape}, got {x.dtype} {x.shape}; pass an array of this shape",
                expected=shape,
                actual=x.shape,
            )
        return np.require(x, dtype, "A")


@functools.cache
def get(name: str) -> Target:
    """The target of a name.

    Parameters
    ----------
    name : {"cpu", "cuda"}
        Where to compute. ``"cuda"`` needs an NVIDIA GPU and the ``cuda`` extra, or ``NUMBA_ENABLE_CUDASIM=1``.

    Returns
    -------
    Target

    Raises
    ------
    ValueError
        If there is no such target.
    NotSupported
        If ``"cuda"`` is asked for where there is no CUDA.
    """
    if name == "cpu":
        return CpuTarget()
    if name == "cuda":
        from numkv.targets_cuda import CudaTarget

        cuda: Target = CudaTarget()
        return cuda
    raise ValueError(f'target: expected "cpu" or "cuda", got {name!r}')


def of(x: Any) -> Target:
    """The target that an array is on.

    Parameters
    ----------
    x : object
        An array, or what hands one over.

    Returns
    -------
    Target
        CUDA for device arrays, else the CPU, whose checks say what is wrong with anything that is no array at all.
    """
    if isinstance(x, np.ndarray):
        return get("cpu")
    if hasattr(x, "__cuda_array_interface__") or "cuda" in type(x).__module__:
        return get("cuda")
    device = getattr(x, "__dlpack_device__", None)
    if device is not None and device()[0] == 2:  # kDLCUDA
        return get("cuda")
    return get("cpu")
