"""The CUDA target: arrays in the memory of an NVIDIA GPU, or in Numba's simulator of one.

Besides `numkv.kernels.cuda` the only module that imports ``numba.cuda``; `numkv.targets.get` imports it when the target
is first asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numkv.arrays import Array, HostArray
from numkv.errors import NotSupported, NumkvError, UnsupportedDType
from numkv.kernels.cuda import graphs, memory, streams, uploads
from numkv.kernels.cuda.late import Watch
from numkv.kernels.cuda.launches import Number
from numkv.kernels.cuda.uploads import DeviceFixed
from numkv.kernels.operations import Operations, load
from numkv.kinds import Kind
from numkv.targets import cuda_calls as calls
from numkv.targets.base import TORCH_DTYPES, WORD_OF, check_real, masked, no_array
from numkv.targets.cpu import CpuTarget
from numkv.targets.cuda_loading import load_cuda
from numkv.targets.cuda_repeats import Repeats
from numkv.targets.fixed import Fixed, Layout
from numkv.targets.memory import Memory, column_of, column_strides, may_overlap
from numkv.targets.streamed import has_streams


def _names_a_dtype(typestr: str) -> bool:
    """Return whether NumPy knows a dtype by its typestr; those of ml_dtypes are void, or ``"<f1"``."""
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
    small_call = 0

    def __init__(self) -> None:
        self._cuda = load_cuda()
        self._simulated = streams.SIMULATED
        self._calls = calls.Calls(self.accept)
        has_streams.append(self.name)

    @property
    def chooses_stream(self) -> bool:
        """Whether a call that comes now has to choose a stream; not within one that has."""
        return streams.chosen() is None

    @property
    def key(self) -> str:
        """Device and stream on which this thread works."""
        here = streams.current()
        return f"cuda:{here.device}:{here.handle}"

    @property
    def device_key(self) -> str:
        """Device on which this thread works."""
        return f"cuda:{streams.current().device}"

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
            word = WORD_OF.get(
                x.dtype
            )  # Numba copies no dtypes of ml_dtypes, as they have no buffers
            return self.typed(self._upload(host if word is None else host.view(word)), x.dtype)
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
        """A tensor on the device, whatever its dtype."""
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
        """What an object's ``__cuda_array_interface__`` describes; the device waits for its stream, not the host."""
        if self._simulated:
            array = self._cuda.as_cuda_array(x)
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
        """Return whether `x` is, or hands over, host memory."""
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
        """A context in which operations run on the stream that is named, or that `arrays` come from."""
        place = calls.place_of(arrays, default)
        if after is not None and after is not place and place.capturing():
            after = None  # a graph cannot wait for what is not in it
        return streams.on(place, after)

    def place(self) -> Any:
        """Return where this thread works."""
        return streams.current()

    def run(
        self, function: Any, call: Any, arrays: tuple[Any, ...], options: tuple[Any, ...]
    ) -> Any:
        """Run a public function on its stream, the short way if it repeats; see `numkv.targets.cuda_calls`."""
        return self._calls.run(function, call, arrays, options)

    def watch(self, k: Any, v: Any, marker: Any = None) -> int:
        """A number under which a kernel reports NaN and infinity in rows that it was to quantise."""
        return calls.watch(k, v, marker)

    def mend_rows(self, k: Any, v: Any, slots: Array, look: int) -> None:
        """Have a kernel look at rows that pools of floats hold, and put zeros in place of those that are not finite."""
        from numkv.kernels.cuda.finite import mend_rows

        mend_rows(k, v, slots, look)  # type: ignore[no-untyped-call]

    def new_watch(self) -> Any:
        """What an object that writes has, for kernels to report to."""
        return Watch()

    def collect_late(self, watch: Any, wait: bool = False) -> None:
        """Call `Marker.mark` for what kernels have reported; with `wait` once all that was launched is done."""
        calls.collect_late(watch, wait)

    def repeats(self) -> Any:
        """What makes an object's calls that repeat the short way; None in the simulator."""
        return None if self._simulated else Repeats(self.accept)

    def number(self, value: int, which: int) -> int:
        """A number that differs between calls that are the same otherwise, where one is written down."""
        return value if streams.recording() is None else Number.of(value, which)

    def length(self, length: int) -> Array:
        """An array of one element; it is a part of one that has been made already."""
        if self._simulated:
            return self._upload(np.array([length], np.int64))
        return uploads.length(length)

    def refuse_capture(self, what: str, instead: str = "") -> None:
        """Refuse to do what a CUDA graph would repeat with the numbers of the day, while a stream is captured."""
        if calls.capturing():
            raise NotSupported(
                f"{what}: expected a stream that is not captured, as a CUDA graph would repeat this with the same "
                f"numbers; capture {instead or calls.CAPTURABLE}"
            )

    def hold(self, *objects: Any) -> bool:
        """Have the CUDA graph that is being captured keep objects; False, and nothing, where none is."""
        return not self._simulated and graphs.hold(streams.current(), *objects)

    def fixed(self, layout: Layout) -> Fixed:
        """New arrays of integers, filled by one copy that nobody waits for."""
        return DeviceFixed(layout)

    def constant(self, x: HostArray) -> Array:
        """A copy on the device, made while the host waits, also beside a capture."""
        return self._cuda.to_device(x) if self._simulated else uploads.constant(x)

    def mark_queries(self, starts: Any, queries: str) -> None:
        """Leave a mark on the array, which attention looks for."""
        starts.queries = queries

    def share_memory(self, a: Any, b: Any) -> bool:
        """Whether two device arrays have a byte in common, or may have: strided ones of unlike steps count as such."""
        return may_overlap(self._lies(a), self._lies(b))

    def same_memory(self, a: Any, b: Any) -> bool:
        """Return whether two arrays of a dtype and a shape have the same elements in the same places."""
        return self._lies(a) == self._lies(b)

    def _lies(self, x: Any) -> Memory:
        """Return where a device array lies."""
        return Memory(memory.pointer_of(x), tuple(x.shape), tuple(x.strides), int(x.dtype.itemsize))

    # -- making arrays

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new device array whose elements are undefined, in memory of the current stream."""
        return memory.empty(tuple(shape), np.dtype(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new device array of zeros, for buffers; it waits until they are there."""
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
        """A view of shape ``(rows, *shape)`` on rows of bytes ``(rows, n)``: of each what comes after byte `start`."""
        if self._simulated:
            return type(pages)(column_of(memory.simulated(pages), start, shape, dtype))
        strides = column_strides(int(pages.strides[0]), shape, dtype)
        pointer = memory.pointer_of(pages) + start
        return memory.foreign(pointer, (int(pages.shape[0]), *shape), strides, dtype, pages)

    def to_host(self, x: Any) -> HostArray:
        """A copy of `x` as a NumPy array; waits for the device."""
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
        """Return the array that kernels see: 16-bit and 8-bit floats as unsigned words, others as they are."""
        word = WORD_OF.get(x.dtype)
        return x if word is None else memory.reinterpret(x, word)

    def typed(self, words: Array, dtype: np.dtype[Any]) -> Array:
        """Return the array that a user sees of words, in `Kind.stored_dtype`: the inverse of `words`."""
        return words if dtype == words.dtype else memory.reinterpret(words, dtype)

    def dequantise(self, kind: Kind, codes: Array, scale: Array) -> Array:
        """Values ``(heads, tokens, head_dim)`` of codes ``(heads, tokens, words)`` and their scales' words, float32."""
        from numkv.kernels.cuda.convert import dequantise

        heads, tokens, words = codes.shape
        out = self.empty((heads, tokens, kind.elements_of(words)), np.float32)
        dequantise(codes, kind.name, scale, out)  # type: ignore[no-untyped-call]
        return out

    def one_head(self, x: Any) -> Array:
        """A view of shape ``(tokens, 1, width)`` on an array of shape ``(tokens, width)``."""
        tokens, width = x.shape
        if self._simulated:
            return x.reshape((tokens, 1, width))
        by_token, by_element = x.strides
        return memory.viewed(x, (tokens, 1, width), (by_token, by_token, by_element), x.dtype)

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
        shape, strides = (tuple(sizes[i] for i in axes) for sizes in (x.shape, x.strides))
        return memory.viewed(x, shape, strides, x.dtype)  # Numba's own transpose is for two axes

    # -- small arguments

    def index(self, x: Any, dtype: Any) -> Array:
        """Integers as a device array: a NumPy array is copied as `dtype`; kernels take device arrays of any width."""
        if isinstance(x, np.ndarray):
            return self._upload(np.ascontiguousarray(x, dtype).reshape(x.shape))
        return x

    def index_all(self, given: list[tuple[Any, Any]]) -> list[Array]:
        """Many arrays of integers, by one copy."""
        host = [np.ascontiguousarray(x, dtype).reshape(x.shape) for x, dtype in given]
        if self._simulated:
            return [self._upload(x) for x in host]
        streams.spoil()
        self.refuse_capture("a copy to the device")
        return uploads.upload_all(host)

    def _upload(self, x: HostArray) -> Array:
        """A copy on the device, which nobody waits for."""
        streams.spoil()
        self.refuse_capture("a copy to the device")
        if self._simulated:
            return self._cuda.to_device(x)
        return uploads.upload(x)

    def reals(self, name: str, x: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """A small float argument as a device array of `dtype` and `shape`; converted on the host if it must be."""
        x = self.accept(x, name)
        check_real(name, x, dtype, shape)
        if x.dtype == dtype:
            return x
        return self._upload(self.to_host(x).astype(dtype))
