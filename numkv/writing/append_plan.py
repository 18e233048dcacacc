"""`AppendPlan`: copy new K and V rows into a batch of contiguous caches at an offset per sequence.

::

    k_cache[b, h, cache_offsets[b] + l, :] = k_new[b, h, l, :]        and the same for v

A plan is chosen once for a descriptor and run many times; `append` is the one-shot form. A row whose place lies
outside ``[0, max_cache_len)``, on either side, is skipped without a word: this rule belongs to the plan (and
to `append`), and to nothing else in numkv.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from numkv import targets
from numkv.checks import check_apart, check_array, check_integers, check_writable
from numkv.errors import NotSupported, UnsupportedDType
from numkv.kinds import QUERY_DTYPES, Kind, kind, kind_of_dtype
from numkv.numbers import check_size
from numkv.targets.base import Target
from numkv.targets.call import Call
from numkv.writing import fast_path

_EXTENTS = ("batch_size", "num_heads", "new_len", "max_cache_len", "d_k", "d_v")
_INT64 = (np.dtype(np.int64),)
_ARRAYS = ("k_new", "v_new", "k_cache", "v_cache", "cache_offsets")
_APPEND = Call(" ".join(_ARRAYS), "", "k_cache v_cache")


@dataclass(frozen=True)
class AppendDescriptor:
    """The problem that a plan is for.

    Attributes
    ----------
    batch_size : int
        Sequences.
    num_heads : int
        Heads of the cache: kv heads, with grouped queries.
    new_len : int
        New rows of each sequence.
    max_cache_len : int
        Rows of the cache.
    d_k : int
        Elements of a K row.
    d_v : int
        Elements of a V row.
    dtype : dtype-like or Kind
        Element type: fp32, fp64, fp16 or bf16.
    """

    batch_size: int
    num_heads: int
    new_len: int
    max_cache_len: int
    d_k: int
    d_v: int
    dtype: Any


@dataclass(frozen=True)
class AppendArgs:
    """The arrays of one run.

    Attributes
    ----------
    k_new, v_new : array (batch_size, num_heads, new_len, d_k), (…, d_v)
        New rows.
    k_cache, v_cache : array (batch_size, num_heads, max_cache_len, d_k), (…, d_v)
        Written in place.
    cache_offsets : int64 array (batch_size,)
        Row that each sequence's first new row goes to. Not changed: the caller adds `new_len` afterwards.
    """

    k_new: Any
    v_new: Any
    k_cache: Any
    v_cache: Any
    cache_offsets: Any


@dataclass(frozen=True)
class PrecisionGuarantee:
    """The precision that a plan guarantees.

    Attributes
    ----------
    math_precision, accumulator : str
        Both the element type: nothing is computed.
    bit_stable_on_same_hardware, deterministic, bit_exact : bool
        All true; NaN payloads are copied too.
    """

    math_precision: str
    accumulator: str
    bit_stable_on_same_hardware: bool = True
    deterministic: bool = True
    bit_exact: bool = True


@dataclass(frozen=True)
class AppendSku:
    """Which kernel a plan runs.

    Attributes
    ----------
    category, operation : str
        ``"attention"``, ``"kv_cache_append"``.
    element : str
        Name of the element kind.
    target : str
        Name of the target.
    precision : PrecisionGuarantee
        What the kernel promises.
    """

    category: str
    operation: str
    element: str
    target: str
    precision: PrecisionGuarantee


def _element(dtype: Any) -> Kind:
    """The float kind of what a descriptor calls its dtype."""
    found: Kind | None = None
    if dtype is not None:  # which NumPy takes for float64
        try:
            found = kind(dtype)
        except UnsupportedDType:
            with contextlib.suppress(Exception):  # whatever NumPy has to say of it
                found = kind_of_dtype(np.dtype(dtype))
    if found is None or not found.is_query:
        got = dtype if isinstance(dtype, (str, Kind, np.dtype)) else f"{type(dtype).__name__}"
        raise UnsupportedDType(
            f"`dtype`: expected fp64, fp32, fp16 or bf16, got {got!s}; quantised rows are appended "
            "by the layers"
        )
    return found


class AppendPlan:
    """A checked and chosen append; make one with `select`.

    Attributes
    ----------
    descriptor : AppendDescriptor
        The problem.
    """

    def __init__(self, descriptor: AppendDescriptor, element: Kind, target: Target) -> None:
        self.descriptor = descriptor
        self._element = element
        self._target = target

    @classmethod
    def select(cls, descriptor: AppendDescriptor, *, target: str = "cpu") -> Self:
        """Choose the kernel for a problem.

        Parameters
        ----------
        descriptor : AppendDescriptor
            The problem. Extents may be 0.
        target : {"cpu", "cuda"}
            Where to run.

        Returns
        -------
        AppendPlan

        Raises
        ------
        DimensionMismatch, TypeError
            If an extent is negative, or no integer.
        UnsupportedDType
            If the dtype is not one of the four floats.
        """
        if not isinstance(descriptor, AppendDescriptor):
            raise TypeError(
                f"`descriptor`: expected an AppendDescriptor, got {type(descriptor).__name__}"
            )
        extents = {name: check_size(name, getattr(descriptor, name)) for name in _EXTENTS}
        descriptor = replace(descriptor, **extents)
        return cls(descriptor, _element(descriptor.dtype), targets.get(target))

    @property
    def workspace_size(self) -> int:
        """Bytes of scratch memory that `run` needs: 0."""
        return 0

    @property
    def precision_guarantee(self) -> PrecisionGuarantee:
        """What the plan promises about its numbers."""
        return PrecisionGuarantee(self._element.name, self._element.name)

    @property
    def sku(self) -> AppendSku:
        """Which kernel the plan runs."""
        return AppendSku(
            "attention",
            "kv_cache_append",
            self._element.name,
            self._target.name,
            self.precision_guarantee,
        )

    def can_implement(self, args: AppendArgs) -> None:
        """Check the arrays of a run.

        Parameters
        ----------
        args : AppendArgs
            The arrays.

        Raises
        ------
        DimensionMismatch
            If a shape is not the descriptor's.
        UnsupportedDType
            If an element type is not the descriptor's, or the offsets are not int64.
        NotSupported
            If an array's last axis is strided, a cache is read-only or shares memory with another array, or an array is
            on another target.
        """
        self._check(args)

    def _check(self, args: AppendArgs) -> AppendArgs:
        if not isinstance(args, AppendArgs):
            raise TypeError(f"`args`: expected AppendArgs, got {type(args).__name__}")
        d, target = self.descriptor, self._target
        rows = (d.batch_size, d.num_heads, d.new_len)
        cache = (d.batch_size, d.num_heads, d.max_cache_len)
        shapes = {
            "k_new": (*rows, d.d_k),
            "v_new": (*rows, d.d_v),
            "k_cache": (*cache, d.d_k),
            "v_cache": (*cache, d.d_v),
            "cache_offsets": (d.batch_size,),
        }
        arrays = {name: target.accept(getattr(args, name), name) for name in list(shapes)[:4]}
        arrays["cache_offsets"] = check_integers(
            target, "cache_offsets", args.cache_offsets, ("batch_size",), _INT64
        )
        # Shapes of all arrays come before anything else about any of them.
        for name, shape in shapes.items():
            if tuple(arrays[name].shape) != shape:
                check_array(target, name, arrays[name], (arrays[name].dtype,), shape)
        for name in list(shapes)[:4]:
            check_array(target, name, arrays[name], (self._element.dtype,), shapes[name])
        caches = {name: arrays[name] for name in ("k_cache", "v_cache")}
        for name, x in caches.items():
            check_writable(name, x)
        check_apart(target, caches, {n: x for n, x in arrays.items() if n not in caches})
        return AppendArgs(**arrays)

    def run(self, args: AppendArgs, *, stream: Any = None, workspace: Any = None) -> None:
        """Copy the new rows; those that would land outside the cache are skipped.

        Parameters
        ----------
        args : AppendArgs
            The arrays; checked as by `can_implement`.
        stream : object, optional
            On CUDA the stream to run on, as ``with numkv.on_stream(stream)`` says it for any call.
        workspace : object, optional
            Ignored: none is needed.

        Raises
        ------
        DimensionMismatch, UnsupportedDType, NotSupported
            See `can_implement`; nothing is written.
        """
        if self._target.values_on_host:
            if stream is not None:
                raise NotSupported(
                    f"`stream`: expected None on the CPU target, got {type(stream).__name__}"
                )
            self._run(args)
        elif stream is not None:
            with targets.on_stream(stream):
                self.run(args)
        else:
            with self._target.on(*(getattr(args, name, None) for name in _ARRAYS)):
                self._run(args)

    def _run(self, args: AppendArgs) -> None:
        args = self._check(args)
        d, target = self.descriptor, self._target
        if 0 in (d.batch_size, d.num_heads, d.new_len, d.max_cache_len):
            return
        words = target.words
        if d.d_k and d.d_v:
            target.ops.copy_both(
                words(args.k_new),
                words(args.k_cache),
                words(args.v_new),
                words(args.v_cache),
                args.cache_offsets,
            )
        elif d.d_k:
            target.ops.copy_rows(words(args.k_new), words(args.k_cache), args.cache_offsets)
        elif d.d_v:
            target.ops.copy_rows(words(args.v_new), words(args.v_cache), args.cache_offsets)

    def __repr__(self) -> str:
        return f"AppendPlan({self.descriptor!r}, target={self._target.name})"


def append(k_new: Any, v_new: Any, k_cache: Any, v_cache: Any, cache_offsets: Any) -> None:
    """Copy new rows into caches at an offset per sequence: `AppendPlan` in one call.

    Rows that would land outside ``[0, max_cache_len)`` are skipped without a word. Extents and dtype come from the
    arrays.

    Parameters
    ----------
    k_new : array (batch_size, num_heads, new_len, d_k)
        New keys: fp32, fp64, fp16 or bf16.
    v_new : array (batch_size, num_heads, new_len, d_v)
        New values.
    k_cache : array (batch_size, num_heads, max_cache_len, d_k)
        Written in place.
    v_cache : array (batch_size, num_heads, max_cache_len, d_v)
        Written in place.
    cache_offsets : int64 array (batch_size,)
        Row of each sequence that its first new row goes to.

    Raises
    ------
    DimensionMismatch, UnsupportedDType, NotSupported
        If an array has another shape, dtype, layout or target, or a cache shares memory with another array; nothing
        is written.
    """
    if fast_path.append(k_new, v_new, k_cache, v_cache, cache_offsets):
        return
    target = targets.of(k_cache)
    if target.chooses_stream:
        target.run(append, _APPEND, (k_new, v_new, k_cache, v_cache, cache_offsets), ())
        return
    shape = ("batch_size", "num_heads", "max_cache_len", "d")
    k = check_array(target, "k_cache", k_cache, QUERY_DTYPES, shape)
    v = target.accept(v_cache, "v_cache")
    new = target.accept(k_new, "k_new")
    for name, x in (("v_cache", v), ("k_new", new)):
        if len(x.shape) != 4:
            check_array(target, name, x, (x.dtype,), shape)
    batch_size, num_heads, max_cache_len, d_k = k.shape
    descriptor = AppendDescriptor(
        batch_size, num_heads, new.shape[2], max_cache_len, d_k, v.shape[3], k.dtype
    )
    plan = AppendPlan.select(descriptor, target=target.name)
    plan._run(AppendArgs(k_new, v_new, k_cache, v_cache, cache_offsets))
