"""numkv's caches on tensors: subclasses whose methods and properties take and give tensors.

Every public method of a class is wrapped: tensors among its arguments become arrays on the same memory, arrays in its
result become tensors. What is for kernels stays as it is: ``arrays``, ``jit``, ``layer_jit``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

import numkv
from numkv.torch.tensors import array_of, tensors_of

__all__ = [
    "AttentionTally", "CausalCache", "ChunkedCache", "ContiguousLayer", "EncoderCache", "HeadCompressor",
    "KVCache", "MultiHeadCompressor", "PagedKVCache", "PagedLayer", "PagedPool", "SlidingWindowCache", "Step",
    "WrapperCache",
]  # fmt: skip

# For kernels, and for numkv's own books.
_AS_THEY_ARE = {"arrays", "jit", "layer_jit", "pool", "caches", "underlying_cache"}
# Arguments that take a result.
_OUTPUTS = {"out", "q_out"}


def _wrapped_method(method: Callable[..., Any]) -> Callable[..., Any]:
    names = tuple(inspect.signature(method).parameters)[1:]
    output = next((name for name in names if name in _OUTPUTS), "")

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        arrays = [array_of(x, name) for x, name in zip(args, names, strict=False)]
        arrays += args[len(names) :]
        named = {name: array_of(x, name) for name, x in kwargs.items()}
        found = method(self, *arrays, **named)
        if found is None:
            return None
        out = kwargs.get(output)
        if isinstance(out, torch.Tensor):
            return (out, tensors_of(found[1])) if isinstance(found, tuple) else out
        return tensors_of(found)

    return call


def _wrapped_property(own: property) -> property:
    get = own.fget
    assert get is not None

    @functools.wraps(get)
    def found(self: Any) -> Any:
        return tensors_of(get(self))

    return property(found, own.fset, own.fdel, own.__doc__)


def _on_tensors(cls: type) -> type:
    """Wrap what a class of this module inherits."""
    for name in dir(cls):
        if name.startswith("_") or name in _AS_THEY_ARE or name in cls.__dict__:
            continue
        found = inspect.getattr_static(cls, name)
        if isinstance(found, property):
            setattr(cls, name, _wrapped_property(found))
        elif inspect.isfunction(found):
            setattr(cls, name, _wrapped_method(found))
    return cls


@_on_tensors
class AttentionTally(numkv.AttentionTally):
    """`numkv.AttentionTally` on tensors."""


@_on_tensors
class CausalCache(numkv.CausalCache):
    """`numkv.CausalCache` on tensors."""


@_on_tensors
class ChunkedCache(numkv.ChunkedCache):
    """`numkv.ChunkedCache` on tensors."""


@_on_tensors
class ContiguousLayer(numkv.ContiguousLayer):
    """`numkv.ContiguousLayer` on tensors."""


@_on_tensors
class EncoderCache(numkv.EncoderCache):
    """`numkv.EncoderCache` on tensors."""


@_on_tensors
class HeadCompressor(numkv.HeadCompressor):
    """`numkv.HeadCompressor` on tensors."""


@_on_tensors
class KVCache(numkv.KVCache):
    """`numkv.KVCache` on tensors."""


@_on_tensors
class MultiHeadCompressor(numkv.MultiHeadCompressor):
    """`numkv.MultiHeadCompressor` on tensors."""


@_on_tensors
class PagedLayer(numkv.PagedLayer):
    """`numkv.PagedLayer` on tensors."""


@_on_tensors
class PagedPool(numkv.PagedPool):
    """`numkv.PagedPool` on tensors."""


@_on_tensors
class SlidingWindowCache(numkv.SlidingWindowCache):
    """`numkv.SlidingWindowCache` on tensors."""


@_on_tensors
class Step(numkv.Step):
    """`numkv.Step` on tensors."""


@_on_tensors
class WrapperCache(numkv.WrapperCache):
    """`numkv.WrapperCache` on tensors."""


@_on_tensors
class PagedKVCache(numkv.PagedKVCache):
    """`numkv.PagedKVCache` on tensors; its steps take and give tensors too."""

    def reserve(self, sequences: Iterable[int], new_lens: Any) -> Step:
        """See `numkv.PagedKVCache.reserve`."""
        step = cast(Step, super().reserve(sequences, array_of(new_lens, "new_lens")))
        step.__class__ = Step
        return step
