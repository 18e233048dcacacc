"""The CUDA target: arrays in the memory of an NVIDIA GPU, or in Numba's simulator of one.

Only this module and `numkv.kernels.cuda` import ``numba.cuda``; `numkv.targets.get` imports it on first use.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from numkv.arrays import Array, HostArray
from numkv.errors import NotSupported, NumkvError, UnsupportedDType
from numkv.kernels.cuda import graphs, late, memory, streams, uploads
from numkv.kernels.cuda.launches import Number
from numkv.kernels.cuda.uploads import DeviceFixed
from numkv.kinds import Kind
from numkv.targets import cuda_calls as calls
from numkv.targets.base import TORCH_DTYPES, WORD_OF, Target, check_real, masked, no_array
from numkv.targets.cpu import CpuTarget
from numkv.targets.cuda_repeats import Repeats
from numkv.targets.fixed import Fixed, Layout
from numkv.targets.memory import Memory, column_of, column_strides, may_overlap
from numkv.targets.streamed import has_streams


def _names_a_dtype(typestr: str) -> bool:
    """Return whether NumPy has a dtype of this typestr; those of ml_dtypes are void, or ``"<f1"``."""
    return typestr[1] != "V" and typestr[1:] != "f1"


class CudaTarget(Target):
    """Arrays in device memory: Numba's device arrays, which carry ``__cuda_array_interface__``.

    Raises
    ------
    NotSupported
        If there is neither a GPU nor the simulator.
    """

    name = "cuda"
    values_on_host = False
    has_jit_views = False
    small_call = 0

    def __init__(self) -> None:
        self._simulated = streams.SIMULATED
        self._calls = calls.Calls(self.accept)
        has_streams.append(self.name)

    @property
    def chooses_stream(self) -> bool:
        """Return whether the next call must choose a stream; False within a call that has chosen."""
        return streams.chosen() is None

    @property
    def key(self) -> str:
        """Return the device and the stream of this thread."""
        here = streams.current()
        return f"cuda:{here.device}:{here.handle}"

    @property
    def device_key(self) -> str:
        """Return the device of this thread."""
        return f"cuda:{streams.current().device}"

    # -- arrays of callers

    def asarray(self, x: Any, name: str = "array") -> Array:
        """Return `x` as a device array; host memory is copied.

        Parameters
        ----------
        x : object
            A list, a NumPy array or any argument of `accept`.
        name : str
            Its name in errors.
        """
        if isinstance(x, np.ma.MaskedArray):
            raise masked(name)
        if self._on_host(x):
            x = CpuTarget().asarray(x, name)
            host = np.ascontiguousarray(x).reshape(x.shape)
            # Numba copies no dtypes of ml_dtypes, as they have no buffers.
            word = WORD_OF.get(x.dtype)
            return self.typed(self._upload(host if word is None else host.view(word)), x.dtype)
        return self.accept(x, name)

    def accept(self, x: Any, name: str) -> Array:
        """Return `x` as a device array, without a copy.

        Accepts Numba's device arrays, and objects with ``__cuda_array_interface__`` or, for device memory,
        ``__dlpack__``. If ``__cuda_array_interface__`` names a stream, its pending writes come first.
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
        if type(x).__module__.partition(".")[0] == "torch" and getattr(x, "is_cuda", False):
            return self._from_torch(x, name)
        dtype = TORCH_DTYPES.get(str(getattr(x, "dtype", "")))
        interface = getattr(x, "__cuda_array_interface__", None)
        if interface is not None and (dtype is not None or _names_a_dtype(interface["typestr"])):
            return self._from_interface(x, interface, dtype)
        if hasattr(x, "__dlpack__"):
            return self._from_dlpack(x, name)
        raise UnsupportedDType(
            f"`{name}`: expected an array on the CUDA device (an object with "
            f"__cuda_array_interface__ or __dlpack__), got {type(x).__name__}; make one with "
            f'numkv.targets.get("cuda").asarray({name})'
        )

    def _from_torch(self, x: Any, name: str) -> Array:
        """Return the device array of a tensor of any dtype."""
        if x.requires_grad:
            raise NotSupported(
                f"`{name}`: expected a tensor without a gradient, as numkv computes none, got one with "
                f"requires_grad=True; pass {name}.detach()"
            )
        spelling = str(x.dtype)
        dtype = TORCH_DTYPES.get(spelling) or np.dtype(spelling.partition(".")[2])
        if streams.current().handle != (there := calls.torch_stream(x.device.index)):
            streams.follow(there)
        steps = tuple(n * dtype.itemsize for n in x.stride())
        return memory.foreign(x.data_ptr(), tuple(x.shape), steps, dtype, x)

    def _from_interface(self, x: Any, interface: dict[str, Any], dtype: Any) -> Array:
        """Return the array of a ``__cuda_array_interface__``; the device, not the host, waits for its stream."""
        if self._simulated:
            array = cuda.as_cuda_array(x)
            return array if dtype is None else array.view(dtype)
        there = interface.get("stream")
        if there is not None and (handle := calls.handle_of(there)) != streams.current().handle:
            streams.follow(handle)
        dtype = np.dtype(interface["typestr"]) if dtype is None else dtype
        strides = interface.get("strides")
        pointer, shape = interface["data"][0] or 0, tuple(interface["shape"])
        return memory.foreign(pointer, shape, None if strides is None else tuple(strides), dtype, x)

    @staticmethod
    def _on_host(x: Any) -> bool:
        """Return whether `x` is in host memory."""
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
            view = StridedMemoryView.from_dlpack(x, stream_ptr=streams.current().handle)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise NotSupported(
                f"`{name}`: {type(x).__name__} does not hand its memory over by DLPack ({error})"
            ) from error
        dtype = np.dtype(view.dtype)
        strides = view.strides  # in elements; None if contiguous
        steps = None if strides is None else tuple(n * dtype.itemsize for n in strides)
        return memory.foreign(view.ptr, tuple(view.shape), steps, dtype, view)

    # -- streams

    def on(self, *arrays: Any, after: Any = None, default: Any = None) -> Any:
        """Return a context on the named stream, or on that of `arrays`; see `Target.on`."""
        place = calls.place_of(arrays, default)
        if after is not None and after is not place and place.capturing():
            after = None  # a graph cannot wait for work outside of it
        return streams.on(place, after)

    def place(self) -> Any:
        """Return this thread's device and stream."""
        return streams.current()

    def run(
        self, function: Any, call: Any, arrays: tuple[Any, ...], options: tuple[Any, ...]
    ) -> Any:
        """Run a public function on its stream, or replay it if it repeats; see `numkv.targets.cuda_calls`."""
        return self._calls.run(function, call, arrays, options)

    def watch(self, k: Any, v: Any, marker: Any = None) -> int:
        """Return the number under which a kernel reports NaN and infinity in rows to quantise."""
        lasting = streams.current().capturing()
        if marker is None:
            return late.of_functions().look((k, v, None), lasting)
        watch: late.Watch = marker.watch
        return watch.look((k, v, marker._replace(watch=None)), lasting)

    def mend_rows(self, k: Any, v: Any, slots: Array, look: int) -> None:
        """Replace rows with NaN or infinity by zeros, in pools of floats."""
        from numkv.kernels.cuda.finite import mend_rows

        mend_rows(k, v, slots, look)  # type: ignore[no-untyped-call]

    def new_watch(self) -> Any:
        """Return a new receiver of kernels' reports for an object that writes."""
        return late.Watch()

    def collect_late(self, watch: Any, wait: bool = False) -> None:
        """Call `Marker.mark` for kernels' reports; with `wait`, after all launched kernels have ended."""
        calls.collect_late(watch, wait)

    def repeats(self) -> Any:
        """Return a recorder that replays an object's repeated calls; None in the simulator."""
        return None if self._simulated else Repeats(self.accept)

    def number(self, value: int, which: int) -> int:
        """Mark a number that differs between otherwise equal calls, if a call is recorded."""
        return value if streams.recording() is None else Number.of(value, which)

    def length(self, length: int) -> Array:
        """Return an array of one element, as a view on a cached array."""
        if self._simulated:
            return self._upload(np.array([length], np.int64))
        return uploads.length(length)

    def refuse_capture(self, what: str, instead: str = "") -> None:
        """Raise an error while a stream is captured, for calls whose host numbers a CUDA graph would freeze."""
        if calls.capturing():
            raise NotSupported(
                f"{what}: expected a stream that is not captured, as a CUDA graph would repeat this with the same "
                f"numbers; capture {instead or calls.CAPTURABLE}"
            )

    def hold(self, *objects: Any) -> bool:
        """Keep objects alive as long as the CUDA graph being captured; return False if there is none."""
        return not self._simulated and graphs.hold(streams.current(), *objects)

    def fixed(self, layout: Layout) -> Fixed:
        """Return new integer arrays at fixed addresses, filled by one asynchronous copy."""
        return DeviceFixed(layout)

    def constant(self, x: HostArray) -> Array:
        """Return a copy on the device; the host waits for it. It may be made during a capture."""
        return cuda.to_device(x) if self._simulated else uploads.constant(x)

    def mark_queries(self, starts: Any, queries: str) -> None:
        """Mark the array, for attention to read."""
        starts.queries = queries

    def share_memory(self, a: Any, b: Any) -> bool:
        """Return whether two device arrays may have a byte in common; arrays of different strides count as such."""
        return may_overlap(self._lies(a), self._lies(b))

    def same_memory(self, a: Any, b: Any) -> bool:
        """Return whether two arrays of a dtype and a shape have the same elements in the same places."""
        return self._lies(a) == self._lies(b)

    def _lies(self, x: Any) -> Memory:
        """Return the memory of a device array."""
        return Memory(memory.pointer_of(x), tuple(x.shape), tuple(x.strides), int(x.dtype.itemsize))

    # -- making arrays

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a new device array with undefined elements, in memory of the current stream."""
        return memory.empty(tuple(shape), np.dtype(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a new device array of zeros, for buffers, and wait until they are written."""
        if 0 not in shape:
            self.refuse_capture("a new buffer of zeros")
        array: Any = memory.buffer(tuple(shape), np.dtype(dtype))
        if self._simulated:
            array[...] = 0
        elif array.size:
            size, handle = array.alloc_size, streams.current().handle
            streams.ask("cuMemsetD8Async", array.gpu_data.device_pointer, 0, size, handle)
            streams.current().synchronize()  # buffers are used on any stream
        return array

    def column(self, pages: Any, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a view of shape ``(rows, *shape)`` on rows of bytes ``(rows, n)``, from byte `start` of each."""
        if self._simulated:
            return type(pages)(column_of(memory.simulated(pages), start, shape, dtype))
        strides = column_strides(int(pages.strides[0]), shape, dtype)
        pointer = memory.pointer_of(pages) + start
        return memory.foreign(pointer, (int(pages.shape[0]), *shape), strides, dtype, pages)

    def to_host(self, x: Any) -> HostArray:
        """Wait for the device, and return a copy of `x` as a NumPy array."""
        if isinstance(x, np.ndarray):
            return x
        streams.spoil()
        self.refuse_capture("a copy to the host")
        device: Any = self.accept(x, "array")
        with calls.beside(device):
            words: Any = self.words(device)
            streams.current().synchronize()
            host = words.copy_to_host()
        return host if host.dtype == device.dtype else host.view(device.dtype)

    # -- views

    def words(self, x: Any) -> Array:
        """Return the array that kernels see: 16-bit and 8-bit floats as unsigned words, others unchanged."""
        word = WORD_OF.get(x.dtype)
        return x if word is None else memory.reinterpret(x, word)

    def typed(self, words: Array, dtype: np.dtype[Any]) -> Array:
        """Return the array that a user sees of words, in `Kind.stored_dtype`: the inverse of `words`."""
        return words if dtype == words.dtype else memory.reinterpret(words, dtype)

    def dequantise(self, kind: Kind, codes: Array, scale: Array) -> Array:
        """Return float32 values ``(heads, tokens, head_dim)`` of codes ``(heads, tokens, words)`` and their scales."""
        from numkv.kernels.cuda.convert import dequantise

        heads, tokens, words = codes.shape
        out = self.empty((heads, tokens, kind.elements_of(words)), np.float32)
        dequantise(codes, kind.name, scale, out)  # type: ignore[no-untyped-call]
        return out

    def one_head(self, x: Any) -> Array:
        """Return a view of shape ``(tokens, 1, width)`` on an array of shape ``(tokens, width)``."""
        tokens, width = x.shape
        if self._simulated:
            return x.reshape((tokens, 1, width))
        by_token, by_element = x.strides
        return memory.viewed(x, (tokens, 1, width), (by_token, by_token, by_element), x.dtype)

    def token_major(self, x: Any) -> Array:
        """Return a view of shape ``(tokens, heads, dim)`` on an array of shape ``(heads, tokens, dim)``."""
        return self._transposed(x, (1, 0, 2))

    def dim_major(self, x: Any) -> Array:
        """Return a view of shape ``(heads, dim, tokens)`` on an array of shape ``(heads, tokens, dim)``."""
        return self._transposed(x, (0, 2, 1))

    def by_token(self, x: Any) -> Array:
        """Return a view of shape ``(tokens, heads, 1, …)`` on an array of one block, ``(1, heads, tokens, …)``."""
        return self._transposed(x, (2, 1, 0, *range(3, len(x.shape))))

    def _transposed(self, x: Any, axes: tuple[int, ...]) -> Array:
        """Return a view of an array with permuted axes."""
        if self._simulated:
            return x.transpose(axes)
        shape, strides = (tuple(sizes[i] for i in axes) for sizes in (x.shape, x.strides))
        return memory.viewed(x, shape, strides, x.dtype)  # Numba's own transpose is for two axes

    # -- small arguments

    def index(self, x: Any, dtype: Any) -> Array:
        """Return integers as a device array: a NumPy array is copied as `dtype`, a device array keeps its width."""
        if isinstance(x, np.ndarray):
            return self._upload(np.ascontiguousarray(x, dtype).reshape(x.shape))
        return x

    def index_all(self, given: list[tuple[Any, Any]]) -> list[Array]:
        """Return the `index` of many integer arrays, by one copy."""
        host = [np.ascontiguousarray(x, dtype).reshape(x.shape) for x, dtype in given]
        if self._simulated:
            return [self._upload(x) for x in host]
        streams.spoil()
        self.refuse_capture("a copy to the device")
        return uploads.upload_all(host)

    def _upload(self, x: HostArray) -> Array:
        """Return an asynchronous copy on the device."""
        streams.spoil()
        self.refuse_capture("a copy to the device")
        if self._simulated:
            return cuda.to_device(x)
        return uploads.upload(x)

    def reals(self, name: str, x: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Return a small float argument as a device array of `dtype` and `shape`; the host converts it if necessary."""
        x = self.accept(x, name)
        check_real(name, x, dtype, shape)
        if x.dtype == dtype:
            return x
        return self._upload(self.to_host(x).astype(dtype))
