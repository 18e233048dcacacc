"""The CUDA target: arrays in the memory of an NVIDIA GPU, or in Numba's simulator of one.

Besides `numkv.kernels.cuda` the only module that imports ``numba.cuda``; `numkv.targets.get` imports it when the target
is first asked for.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
from numba.core import config

from numkv.arrays import Array, HostArray
from numkv.errors import NotSupported, NumkvError, UnsupportedDType
from numkv.kernels.dispatch import load
from numkv.kernels.operations import Operations
from numkv.kinds import Kind
from numkv.targets.base import TORCH_DTYPES, WORD_OF, check_real, masked, no_array
from numkv.targets.cpu import CpuTarget
from numkv.targets.memory import Memory, may_overlap

__all__ = ["CudaTarget"]

_REMEDY = (
    'install an NVIDIA driver and `pip install "numkv[cuda]"`, or set NUMBA_ENABLE_CUDASIM=1 '
    "before Python starts for Numba's simulator"
)


def _load_cuda() -> Any:
    """``numba.cuda``, or an error that says what is missing."""
    simulated = bool(config.ENABLE_CUDASIM)
    if not simulated and importlib.util.find_spec("numba_cuda") is None:
        raise NotSupported(f'target "cuda" needs the package numba-cuda; {_REMEDY}')
    try:
        from numba import cuda
    except ImportError as error:
        raise NotSupported(f'target "cuda" does not load ({error}); {_REMEDY}') from error
    if not cuda.is_available():
        reason = " ".join(str(cuda.cuda_error() or "no device").split())
        raise NotSupported(f'target "cuda": there is no usable GPU ({reason}); {_REMEDY}')
    return cuda


def _names_a_dtype(typestr: str) -> bool:
    """Whether NumPy knows a dtype by its typestr; those of ml_dtypes are void, or ``"<f1"``."""
    return typestr[1] != "V" and typestr[1:] != "f1"


class CudaTarget:
    """Arrays in device memory: Numba's device arrays, which carry ``__cuda_array_interface__``.

    Raises
    ------
    NotSupported
        If there is neither a GPU nor the simulator.
    """

    name = "cuda"
    values_on_host = False
    has_jit_views = False
    has_streams = True
    small_call = 0

    def __init__(self) -> None:
        self._cuda = _load_cuda()
        self._simulated = bool(config.ENABLE_CUDASIM)

    @property
    def ops(self) -> Operations:
        """CUDA's operations."""
        return load("cuda")

    # -- taking arrays in

    def asarray(self, x: Any, name: str = "array") -> Array:
        """`x` as a device array: copied where it is in host memory, else taken as it is.

        Parameters
        ----------
        x : object
            A list, a NumPy array or anything that `accept` takes.
        name : str
            What errors call it.
        """
        if isinstance(x, np.ma.MaskedArray):
            raise masked(name)
        if self._on_host(x):
            x = CpuTarget().asarray(x, name)
            host = np.ascontiguousarray(x).reshape(x.shape)
            # Numba copies no dtypes of ml_dtypes, as they have no buffers.
            word = WORD_OF.get(x.dtype)
            return self.typed(
                self._cuda.to_device(host if word is None else host.view(word)), x.dtype
            )
        return self.accept(x, name)

    def accept(self, x: Any, name: str) -> Array:
        """`x` as a device array, without a copy.

        Takes Numba's device arrays, and whatever has ``__cuda_array_interface__`` or hands device memory over by
        ``__dlpack__``. What is still being written on another stream is waited for if ``__cuda_array_interface__``
        names the stream.
        """
        try:
            return self._accept(x, name)
        except (NumkvError, MemoryError):
            raise
        except Exception as error:
            raise no_array(name, x, "on the CUDA device", error) from error

    def _accept(self, x: Any, name: str) -> Array:
        if getattr(x, "__cuda_ndarray__", False):
            return x
        if isinstance(x, np.ma.MaskedArray):
            raise masked(name)
        if self._on_host(x):
            what = "a NumPy array" if isinstance(x, np.ndarray) else f"a host {type(x).__name__}"
            raise NotSupported(
                f"`{name}`: expected an array on the CUDA device, got {what}; copy it with "
                f'numkv.targets.get("cuda").asarray({name})'
            )
        dtype = TORCH_DTYPES.get(str(getattr(x, "dtype", "")))
        if dtype is not None:  # no typestr names it
            import torch

            # Older versions of torch have no uint16.
            word = torch.int16 if dtype.itemsize == 2 else torch.uint8
            return self._cuda.as_cuda_array(x.detach().view(word)).view(dtype)
        interface = getattr(x, "__cuda_array_interface__", None)
        if interface is not None and _names_a_dtype(interface["typestr"]):
            return self._cuda.as_cuda_array(x)
        if hasattr(x, "__dlpack__"):
            return self._from_dlpack(x, name)
        raise UnsupportedDType(
            f"`{name}`: expected an array on the CUDA device (an object with "
            f"__cuda_array_interface__ or __dlpack__), got {type(x).__name__}; make one with "
            f'numkv.targets.get("cuda").asarray({name})'
        )

    @staticmethod
    def _on_host(x: Any) -> bool:
        """Whether `x` is, or hands over, host memory."""
        if getattr(x, "__cuda_ndarray__", False):
            return False
        if isinstance(x, (np.ndarray, np.generic, list, tuple, int, float)):
            return True
        if hasattr(x, "__dlpack_device__"):
            return bool(int(x.__dlpack_device__()[0]) == 1)  # kDLCPU
        return hasattr(x, "__array_interface__") and not hasattr(x, "__cuda_array_interface__")

    def _from_dlpack(self, x: Any, name: str) -> Array:
        if self._simulated:
            raise NotSupported(f"`{name}`: the simulator takes no device memory by DLPack")
        from cuda.core.utils import StridedMemoryView

        try:
            view = StridedMemoryView.from_dlpack(x, stream_ptr=0)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise NotSupported(
                f"`{name}`: {type(x).__name__} does not hand its memory over by DLPack ({error})"
            ) from error
        dtype = np.dtype(view.dtype)
        strides = view.strides  # in elements; None if contiguous
        description = {
            "shape": tuple(view.shape),
            "strides": None if strides is None else tuple(n * dtype.itemsize for n in strides),
            "data": (view.ptr, view.readonly),
            "typestr": WORD_OF.get(dtype, dtype).str,
            "version": 3,
        }
        array = self._cuda.from_cuda_array_interface(description, owner=view)
        return self.typed(array, dtype)

    def check_stream(self, stream: Any) -> None:
        """Refuse what is no stream: Numba's, 0 for the default one, or an object with ``__cuda_stream__``."""
        if self._simulated:
            found = isinstance(stream, self._cuda.stream)
        else:
            found = hasattr(stream, "handle") or hasattr(stream, "__cuda_stream__")
        if not (found or (type(stream) is int and stream == 0)):
            raise NotSupported(
                f"`stream`: expected a stream of numba.cuda, or None, got {type(stream).__name__}; make one with "
                "numba.cuda.stream() or numba.cuda.external_stream(pointer)"
            )

    def share_memory(self, a: Any, b: Any) -> bool:
        """Whether two device arrays have a byte in common, or may have: strided ones of unlike steps count as such."""
        return may_overlap(self._lies(a), self._lies(b))

    def same_memory(self, a: Any, b: Any) -> bool:
        """Whether two arrays of a dtype and a shape have the same elements in the same places."""
        return self._lies(a) == self._lies(b)

    def _lies(self, x: Any) -> Memory:
        """Where a device array lies."""
        if self._simulated:
            address = x._ary.__array_interface__["data"][0]
        else:
            address = x.__cuda_array_interface__["data"][0]
        return Memory(int(address), tuple(x.shape), tuple(x.strides), int(x.dtype.itemsize))

    # -- making arrays

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new device array whose elements are undefined."""
        try:
            return self._cuda.device_array(tuple(shape), np.dtype(dtype))
        except Exception as error:
            if "OUT_OF_MEMORY" not in str(error):
                raise
            raise MemoryError(
                f"the CUDA device has no room for an array {tuple(shape)} of {np.dtype(dtype)} ({error})"
            ) from error

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new device array of zeros."""
        array = self.empty(shape, dtype)
        if self._simulated:
            array[...] = 0
        elif array.size:
            from numba.cuda.cudadrv.driver import device_memset

            device_memset(array, 0, array.nbytes)
        return array

    def to_host(self, x: Any) -> HostArray:
        """A copy of `x` as a NumPy array; waits for the device."""
        if isinstance(x, np.ndarray):
            return x
        device: Any = self.accept(x, "array")
        words: Any = self.words(device)
        host = words.copy_to_host()
        return host if host.dtype == device.dtype else host.view(device.dtype)

    # -- views

    def words(self, x: Any) -> Array:
        """The array that kernels see: 16-bit and 8-bit floats as unsigned words, others as they are."""
        word = WORD_OF.get(x.dtype)
        return x if word is None else x.view(word)

    def typed(self, words: Array, dtype: np.dtype[Any]) -> Array:
        """The array that a user sees of float words: the inverse of `words`."""
        return words.view(dtype) if dtype in WORD_OF else words

    def dequantise(self, kind: Kind, codes: Array, scale: Array) -> Array:
        """Values ``(heads, tokens, head_dim)`` of codes ``(heads, tokens, words)`` and their scales' words, float32."""
        from numkv.kernels.cuda.convert import dequantise

        heads, tokens, words = codes.shape
        out = self.empty((heads, tokens, words * kind.elements_per_word), np.float32)
        dequantise(codes, kind.name, scale, out)  # type: ignore[no-untyped-call]
        return out

    def one_head(self, x: Any) -> Array:
        """A view of shape ``(tokens, 1, width)`` on an array of shape ``(tokens, width)``."""
        tokens, width = x.shape
        if self._simulated:
            return x.reshape((tokens, 1, width))
        from numba.cuda.cudadrv.devicearray import DeviceNDArray

        by_token, by_element = x.strides
        return DeviceNDArray(  # its own reshape is for contiguous arrays
            (tokens, 1, width), (by_token, by_token, by_element), x.dtype, x.stream, x.gpu_data
        )

    def token_major(self, x: Any) -> Array:
        """A view of shape ``(tokens, heads, dim)`` on an array of shape ``(heads, tokens, dim)``."""
        return self._transposed(x, (1, 0, 2))

    def dim_major(self, x: Any) -> Array:
        """A view of shape ``(heads, dim, tokens)`` on an array of shape ``(heads, tokens, dim)``."""
        return self._transposed(x, (0, 2, 1))

    def by_token(self, x: Any) -> Array:
        """A view of shape ``(tokens, heads, 1, …)`` on an array of one block, ``(1, heads, tokens, …)``."""
        return self._transposed(x, (2, 1, 0, *range(3, len(x.shape))))

    def _transposed(self, x: Any, axes: tuple[int, ...]) -> Array:
        """A view of an array, with its axes in another order."""
        if self._simulated:
            return x.transpose(axes)
        from numba.cuda.cudadrv.devicearray import DeviceNDArray

        shape, strides = (tuple(sizes[i] for i in axes) for sizes in (x.shape, x.strides))
        # Its own transpose is for two axes.
        return DeviceNDArray(shape, strides, x.dtype, x.stream, x.gpu_data)

    # -- small arguments

    def index(self, x: Any, dtype: Any) -> Array:
        """Integers as a device array: a NumPy array is copied as `dtype`; kernels take device arrays of any width."""
        if isinstance(x, np.ndarray):
            return self._cuda.to_device(np.ascontiguousarray(x, dtype).reshape(x.shape))
        return x

    def reals(self, name: str, x: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """A small float argument as a device array of `dtype` and `shape`; converted on the host if it must be."""
        x = self.accept(x, name)
        check_real(name, x, dtype, shape)
        if x.dtype == dtype:
            return x
        return self._cuda.to_device(self.to_host(x).astype(dtype))
