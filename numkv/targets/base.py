"""`Target`: the protocol of every place to compute, and the types of arrays."""

from __future__ import annotations

from typing import Any, Protocol

import ml_dtypes
import numpy as np

from numkv import arrays
from numkv.errors import DimensionMismatch, NotSupported, UnsupportedDType
from numkv.kernels.operations import Operations, load
from numkv.kinds import Kind, kinds
from numkv.targets.call import Marker
from numkv.targets.fixed import Fixed, Layout

#: Modules import these from here or from `numkv.arrays`.
Array = arrays.AnyArray

BF16 = np.dtype(ml_dtypes.bfloat16)
#: Words in which kernels see small floats: ``uint16`` for 16-bit floats, ``uint8`` for 8-bit ones.
WORD_OF = {k.dtype: k.word for k in kinds() if k.is_float and k.word != k.dtype}
#: Those of these dtypes that torch has and NumPy lacks, by torch's names.
TORCH_DTYPES = {f"torch.{dtype}": dtype for dtype in WORD_OF if dtype != np.float16}


def masked(name: str) -> NotSupported:
    """Return the error for a masked array, whose mask kernels do not see."""
    return NotSupported(
        f"`{name}`: expected an array without a mask, got a masked array; pass {name}.filled(value), or {name}.data"
    )


def no_array(name: str, x: Any, where: str, error: Exception) -> UnsupportedDType:
    """Return the error for an object whose array interface fails."""
    return UnsupportedDType(
        f"`{name}`: expected an array {where}, got {type(x).__name__}, whose array interface fails "
        f"({type(error).__name__}: {error})"
    )


def check_real(name: str, x: arrays.Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Require a float array of native byte order and of `shape`, as an argument of `Target.reals`."""
    got = f"expected {dtype} {shape}, got {x.dtype} {tuple(x.shape)}"
    if (x.dtype.kind != "f" and x.dtype != BF16) or not x.dtype.isnative:
        raise UnsupportedDType(f"`{name}`: {got}; convert it to a float dtype")
    if tuple(x.shape) != shape:
        raise DimensionMismatch(
            f"`{name}`: {got}; pass an array of this shape", expected=shape, actual=tuple(x.shape)
        )


class Target(Protocol):
    """The operations of a place to compute.

    What only a device with streams does has a body here, which is that of the CPU: its calls are complete when they
    return, and check values before they write.
    """

    name: str
    #: Whether the host sees the values of arrays without waiting for a device.
    values_on_host: bool
    #: Whether compiled host code can use the buffers, by a jitclass.
    has_jit_views: bool
    #: A call with fewer new elements of K is small: one function on one thread may do it; 0 if there is none.
    small_call: int

    @property
    def chooses_stream(self) -> bool:
        """Return whether the next call must choose a stream, by `on` or `run`; False within a call that has chosen."""

    @property
    def key(self) -> str:
        """Return the key of reusable objects: on CUDA the device and the stream of this thread."""

    @property
    def device_key(self) -> str:
        """Return the key of `constant` arrays: the device of this thread."""

    @property
    def ops(self) -> Operations:
        """Return the target's operations: see `numkv.kernels`."""
        return load(self.name)

    def asarray(self, x: Any, name: str = "array") -> arrays.Array:
        """Return `x` as an array of this target, without a copy if it is already here.

        Parameters
        ----------
        x : object
            An array of this target, or an object with an array interface; on CUDA also a NumPy array, which is copied.
        name : str
            Its name in errors.
        """

    def accept(self, x: Any, name: str) -> arrays.Array:
        """Return `x` as an array of this target without a copy, or raise an error that names it."""

    def on(self, *arrays: Any, after: Any = None, default: Any = None) -> Any:
        """Return a context in which operations run on one stream: on CUDA that of the enclosing call, if any.

        Without one it is the stream named by `numkv.on_stream`, then `default`, then the current stream of the first
        foreign array's library, then the legacy default stream.

        Parameters
        ----------
        *arrays : object
            The caller's arrays.
        after : object
            A place returned by `place`, whose earlier work must be done first.
        default : object
            A place returned by `place`, or None.
        """

    def place(self) -> Any:
        """Return this thread's device and stream; None on the CPU."""
        return None

    def run(
        self, function: Any, call: Any, arrays: tuple[Any, ...], options: tuple[Any, ...]
    ) -> Any:
        """Choose the stream of a public function, and call the function on it.

        Parameters
        ----------
        function : function
            The function.
        call : object
            A `numkv.targets.call.Call` with the names of its arguments.
        arrays, options : tuple
            Its arguments, in that order.
        """
        return function(**call.named(arrays, options))

    def watch(
        self, k: tuple[str, tuple[int, ...], Kind, int], v: tuple[str, tuple[int, ...], Kind, int],
        marker: Marker | None = None,
    ) -> int:  # fmt: skip
        """Return the number under which a kernel reports NaN and infinity in rows to quantise; 0 on the CPU.

        Parameters
        ----------
        k, v : tuple of str, tuple, Kind and int
            For the arrays of K and of V: the name in errors, the shape, the storage kind, and the number of axes of an
            index.
        marker : Marker, optional
            Receives the report; without it a later function raises the error.
        """
        return 0

    def mend_rows(
        self, k: arrays.Array | None, v: arrays.Array | None, slots: arrays.Array, look: int
    ) -> None:
        """Replace rows with NaN or infinity by zeros, in pools of floats.

        On the CPU nothing happens, because values are checked before they are written.

        Parameters
        ----------
        k, v : float32 array (num_blocks, num_kv_heads, block_size, head_dim) or None
            The pools; at least one is given.
        slots : int64 array (num_tokens,)
            Slots of the rows; -1 for tokens without a row.
        look : int
            A number returned by `watch`.
        """
        return

    def new_watch(self) -> Any:
        """Return a new receiver of kernels' reports for an object that writes; None on the CPU."""
        return None

    def collect_late(self, watch: Any, wait: bool = False) -> None:
        """Call `Marker.mark` for kernels' reports; with `wait`, after all launched kernels have ended."""
        return

    def repeats(self) -> Any:
        """Return a recorder that replays an object's repeated calls; None if there is none."""
        return None

    def number(self, value: int, which: int) -> int:
        """Mark a number that differs between an object's otherwise equal calls; on the CPU return the value."""
        return value

    def length(self, length: int) -> arrays.Array:
        """Return an array of one element, an int32 or int64."""

    def refuse_capture(self, what: str, instead: str = "") -> None:
        """Raise an error while a stream is captured, for calls whose host numbers a CUDA graph would freeze.

        Parameters
        ----------
        what : str
            Name of the call, for users.
        instead : str
            The remedy; by default functions, and steps with buffers.
        """
        return

    def hold(self, *objects: Any) -> bool:
        """Keep objects alive as long as the CUDA graph being captured; return False if there is none."""
        return False

    def fixed(self, layout: Layout) -> Fixed:
        """Return new integer arrays at fixed addresses, which can be filled again."""

    def constant(self, x: np.ndarray[Any, Any]) -> arrays.Array:
        """Return a constant copy, for calls on all streams of this thread's device."""
        return x

    def mark_queries(self, starts: arrays.Array, queries: str) -> None:
        """Record what the host knows of the starts of queries, so that kernels need not read them.

        Parameters
        ----------
        starts : array
            The starts of queries.
        queries : {"one each", "fewer"}
            Each sequence has one query; or there may be fewer queries than `q` has rows.
        """
        return

    def share_memory(self, a: arrays.Array, b: arrays.Array) -> bool:
        """Return whether two arrays of this target have a byte in common; True if that is too expensive to decide."""

    def same_memory(self, a: arrays.Array, b: arrays.Array) -> bool:
        """Return whether two arrays of a dtype and a shape have the same elements in the same places."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> arrays.Array:
        """Return a new array with undefined elements."""

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> arrays.Array:
        """Return a new array of zeros."""

    def column(
        self, pages: arrays.Array, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> arrays.Array:
        """Return a view of shape ``(rows, *shape)`` on rows of bytes ``(rows, n)``, from byte `start` of each."""

    def to_host(self, x: arrays.Array) -> np.ndarray[Any, Any]:
        """Return `x` as a NumPy array; a copy on CUDA."""

    def words(self, x: arrays.Array) -> arrays.Array:
        """Return the array that kernels see: 16-bit and 8-bit floats as unsigned words, others unchanged."""

    def typed(self, words: arrays.Array, dtype: np.dtype[Any]) -> arrays.Array:
        """Return the array that a user sees of float words: the inverse of `words`."""

    def dequantise(self, kind: Kind, codes: arrays.Array, scale: arrays.Array) -> arrays.Array:
        """Return float32 values ``(heads, tokens, head_dim)`` of codes ``(heads, tokens, words)`` and their scales."""

    def one_head(self, x: arrays.Array) -> arrays.Array:
        """Return a view of shape ``(tokens, 1, width)`` on an array of shape ``(tokens, width)``."""

    def token_major(self, x: arrays.Array) -> arrays.Array:
        """Return a view of shape ``(tokens, heads, dim)`` on an array of shape ``(heads, tokens, dim)``."""

    def dim_major(self, x: arrays.Array) -> arrays.Array:
        """Return a view of shape ``(heads, dim, tokens)`` on an array of shape ``(heads, tokens, dim)``."""

    def by_token(self, x: arrays.Array) -> arrays.Array:
        """Return a view of shape ``(tokens, heads, 1, …)`` on an array of one block, ``(1, heads, tokens, …)``."""

    def index(self, x: Any, dtype: Any) -> arrays.Array:
        """Return integers of this target or of a NumPy array as an array for this target's kernels."""

    def index_all(self, given: list[tuple[Any, Any]]) -> list[arrays.Array]:
        """Return the `index` of many NumPy arrays, each with its dtype; on CUDA by one asynchronous copy."""
        return [self.index(x, dtype) for x, dtype in given]

    def reals(
        self, name: str, x: Any, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> arrays.Array:
        """Return a small float argument (norm weights, sinks) as an array of this target, of `dtype` and `shape`."""
