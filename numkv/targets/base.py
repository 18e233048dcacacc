"""What a target is: the protocol that every place to compute follows, and the types of arrays."""

from __future__ import annotations

from typing import Any, Protocol

import ml_dtypes
import numpy as np

from numkv import arrays
from numkv.errors import DimensionMismatch, NotSupported, UnsupportedDType
from numkv.kernels.operations import Operations
from numkv.kinds import Kind, kinds
from numkv.targets.call import Marker
from numkv.targets.fixed import Fixed, Layout

#: What modules take from here that `numkv.arrays` has not been brought to yet.
Array = arrays.AnyArray

BF16 = np.dtype(ml_dtypes.bfloat16)
#: Words of the floats that kernels do not see as such: ``uint16`` for 16-bit floats, ``uint8`` for 8-bit ones.
WORD_OF = {k.dtype: k.word for k in kinds() if k.is_float and k.word != k.dtype}
#: Of these, the dtypes that torch has and NumPy has not, by the names of torch.
TORCH_DTYPES = {f"torch.{dtype}": dtype for dtype in WORD_OF if dtype != np.float16}


def masked(name: str) -> NotSupported:
    """Return the error for a masked array, whose mask kernels do not see."""
    return NotSupported(
        f"`{name}`: expected an array without a mask, got a masked array; pass {name}.filled(value), or {name}.data"
    )


def no_array(name: str, x: Any, where: str, error: Exception) -> UnsupportedDType:
    """Return the error for an object that promises an array and fails to hand it over."""
    return UnsupportedDType(
        f"`{name}`: expected an array {where}, got {type(x).__name__}, which fails to hand one over "
        f"({type(error).__name__}: {error})"
    )


def check_real(name: str, x: arrays.Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Refuse what is no float array of native byte order and of `shape`, as an argument of `Target.reals`."""
    got = f"expected {dtype} {shape}, got {x.dtype} {tuple(x.shape)}"
    if (x.dtype.kind != "f" and x.dtype != BF16) or not x.dtype.isnative:
        raise UnsupportedDType(f"`{name}`: {got}; convert it to a float dtype")
    if tuple(x.shape) != shape:
        raise DimensionMismatch(
            f"`{name}`: {got}; pass an array of this shape", expected=shape, actual=tuple(x.shape)
        )


class Target(Protocol):
    """What objects and functions need of a place to compute."""

    name: str
    #: Whether the host sees the values of arrays without waiting for a device.
    values_on_host: bool
    #: Whether compiled host code can take the buffers, by a jitclass.
    has_jit_views: bool
    #: New elements of K below which a call is small, and one function on one thread may do it; 0 if there is none.
    small_call: int

    @property
    def chooses_stream(self) -> bool:
        """Whether a call that comes now has to choose where it runs, by `on` or `run`; not within one that has."""

    @property
    def key(self) -> str:
        """What things are kept by that are made once and used again: where this thread works.

        On CUDA a device and a stream, in whose order they have been made.
        """

    @property
    def device_key(self) -> str:
        """What `constant` arrays are kept by: the device on which this thread works."""

    @property
    def ops(self) -> Operations:
        """The target's operations: see `numkv.kernels`."""

    def asarray(self, x: Any, name: str = "array") -> arrays.Array:
        """`x` as an array of this target, without a copy where it is already here.

        Parameters
        ----------
        x : object
            An array of this target or one that hands its memory over; on CUDA also a NumPy array, which is copied.
        name : str
            What errors call it.
        """

    def accept(self, x: Any, name: str) -> arrays.Array:
        """`x` as an array of this target, without a copy, or an error that names it."""

    def on(self, *arrays: Any, after: Any = None, default: Any = None) -> Any:
        """A context in which operations run on one stream: on CUDA that of the call that this one is a part of.

        Else it is the one that `numkv.on_stream` names, `default`, or the one that the library of the first foreign
        array has current; else the legacy default stream.

        Parameters
        ----------
        *arrays : object
            What a caller passed.
        after : object
            What `place` gave, where that has got so far at least before anything runs.
        default : object
            What `place` gave, or None.
        """

    def place(self) -> Any:
        """Return where this thread works; None on the CPU."""

    def run(
        self, function: Any, call: Any, arrays: tuple[Any, ...], options: tuple[Any, ...]
    ) -> Any:
        """Run a public function on its stream: it is called again, when there is nothing to choose any more.

        Parameters
        ----------
        function : function
            The function.
        call : object
            A `numkv.targets.call.Call`: the names of its arguments.
        arrays, options : tuple
            Its arguments, in that order.
        """

    def watch(
        self, k: tuple[str, tuple[int, ...], Kind, int], v: tuple[str, tuple[int, ...], Kind, int],
        marker: Marker | None = None,
    ) -> int:  # fmt: skip
        """A number under which a kernel reports NaN and infinity in rows that it was to quantise; 0 on the CPU.

        Parameters
        ----------
        k, v : tuple of str, tuple, Kind and int
            What errors call the arrays that K and V come from, the shapes of these, what they were stored in, and how
            many axes of an index mean anything.
        marker : Marker, optional
            Whom to tell; without it the error is raised by a later function.
        """

    def mend_rows(
        self, k: arrays.Array | None, v: arrays.Array | None, slots: arrays.Array, look: int
    ) -> None:
        """Have a kernel look for NaN and infinity in rows that pools of floats hold, and put zeros in place of such.

        On the CPU nothing happens, as values are looked at before they are written.

        Parameters
        ----------
        k, v : float32 array (num_blocks, num_kv_heads, block_size, head_dim) or None
            The pools, one at least.
        slots : int64 array (num_tokens,)
            Where the rows are; -1 for tokens that have none there.
        look : int
            What `watch` gave.
        """

    def new_watch(self) -> Any:
        """What an object that writes has, for kernels to report to; None on the CPU."""

    def collect_late(self, watch: Any, wait: bool = False) -> None:
        """Call `Marker.mark` for what kernels have reported; with `wait` once all that was launched is done."""

    def repeats(self) -> Any:
        """What makes an object's calls that repeat the short way; None where there is none."""

    def number(self, value: int, which: int) -> int:
        """A number that differs between an object's calls that are the same otherwise; on the CPU the value itself."""

    def length(self, length: int) -> arrays.Array:
        """An array of one element, an int32 or int64."""

    def refuse_capture(self, what: str, instead: str = "") -> None:
        """Refuse to do what a CUDA graph would repeat with the numbers of the day, while a stream is captured.

        Parameters
        ----------
        what : str
            What is refused, by the name that users know it by.
        instead : str
            What to use in a graph; by default functions, and steps with buffers.
        """

    def hold(self, *objects: Any) -> bool:
        """Have the CUDA graph that is being captured keep objects; False, and nothing, where none is."""

    def fixed(self, layout: Layout) -> Fixed:
        """New arrays of integers, of these shapes and dtypes, which stay where they are and are filled anew."""

    def constant(self, x: np.ndarray[Any, Any]) -> arrays.Array:
        """A copy that nobody writes to, for calls on all streams of this thread's device."""

    def mark_queries(self, starts: arrays.Array, queries: str) -> None:
        """Say what the host knows of an array of where queries start, so that kernels need not look.

        Parameters
        ----------
        starts : array
            The array.
        queries : {"one each", "fewer"}
            Each sequence has one; or there may be fewer queries than `q` has rows.
        """

    def share_memory(self, a: arrays.Array, b: arrays.Array) -> bool:
        """Return whether two arrays of this target have a byte in common; where that is too hard to tell, yes."""

    def same_memory(self, a: arrays.Array, b: arrays.Array) -> bool:
        """Return whether two arrays of a dtype and a shape have the same elements in the same places."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> arrays.Array:
        """A new array whose elements are undefined."""

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> arrays.Array:
        """A new array of zeros."""

    def column(
        self, pages: arrays.Array, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> arrays.Array:
        """A view of shape ``(rows, *shape)`` on rows of bytes ``(rows, n)``: of each what comes after byte `start`."""

    def to_host(self, x: arrays.Array) -> np.ndarray[Any, Any]:
        """`x` as a NumPy array; a copy on CUDA."""

    def words(self, x: arrays.Array) -> arrays.Array:
        """Return the array that kernels see: 16-bit and 8-bit floats as unsigned words, others as they are."""

    def typed(self, words: arrays.Array, dtype: np.dtype[Any]) -> arrays.Array:
        """Return the array that a user sees of float words: the inverse of `words`."""

    def dequantise(self, kind: Kind, codes: arrays.Array, scale: arrays.Array) -> arrays.Array:
        """Values ``(heads, tokens, head_dim)`` of codes ``(heads, tokens, words)`` and their scales' words, float32."""

    def one_head(self, x: arrays.Array) -> arrays.Array:
        """A view of shape ``(tokens, 1, width)`` on an array of shape ``(tokens, width)``."""

    def token_major(self, x: arrays.Array) -> arrays.Array:
        """A view of shape ``(tokens, heads, dim)`` on an array of shape ``(heads, tokens, dim)``."""

    def dim_major(self, x: arrays.Array) -> arrays.Array:
        """A view of shape ``(heads, dim, tokens)`` on an array of shape ``(heads, tokens, dim)``."""

    def by_token(self, x: arrays.Array) -> arrays.Array:
        """A view of shape ``(tokens, heads, 1, …)`` on an array of one block, ``(1, heads, tokens, …)``."""

    def index(self, x: Any, dtype: Any) -> arrays.Array:
        """Integers, here or in a NumPy array, as the array of this target that its kernels take."""

    def index_all(self, given: list[tuple[Any, Any]]) -> list[arrays.Array]:
        """`index` of many NumPy arrays, each with its dtype; on CUDA by one copy, which nobody waits for."""

    def reals(
        self, name: str, x: Any, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> arrays.Array:
        """A small float argument (norm weights, sinks) as an array of this target, of `dtype` and `shape`."""
