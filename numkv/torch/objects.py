"""numkv's caches on tensors: subclasses whose methods and properties take and give tensors.

Every public method of a class is wrapped. Tensors among its arguments become arrays on the same memory, and arrays in
its result become tensors. Steps and bound calls are those of this module. What is for kernels stays as it is:
``arrays``, ``jit``.
"""

from __future__ import annotations

import inspect

import numkv
from numkv.torch.tensors import counterparts, on_tensors

# For kernels, and for numkv's own books.
_AS_THEY_ARE = {"arrays", "jit", "pool", "caches", "underlying_cache"}

_PLAIN = {
    "bool", "float", "int", "int | None", "Kind", "LayerSpec", "dict[int, LayerSpec]", "list[int]", "range", "str",
    "tuple[LayerSpec, ...]", "tuple[int, ...]",
}  # fmt: skip
# Methods that a model calls for each token and layer; none keeps an array, or returns one except `out` and `q_out`.
_MOMENTARY = {
    "__call__", "append", "attention", "attention_weights", "decode_attention", "put", "sparse_attention", "write",
    "write_latents",
}  # fmt: skip


def _wrapped_property(own: property) -> property:
    get = own.fget
    assert get is not None

    return property(on_tensors(get), own.fset, own.fdel, own.__doc__)


def _is_plain(own: property) -> bool:
    """Whether a property gives neither arrays nor numkv's objects, by its annotation: left alone, it costs nothing."""
    assert own.fget is not None
    return inspect.get_annotations(own.fget).get("return") in _PLAIN


def _on_tensors(cls: type) -> None:
    """Wrap what a class of this module inherits, and have it stand in for its base."""
    counterparts[cls.__mro__[1]] = cls
    for name in dir(cls):
        if (name.startswith("_") and name != "__call__") or name in _AS_THEY_ARE:
            continue
        found = inspect.getattr_static(cls, name)
        if isinstance(found, property) and not _is_plain(found):
            setattr(cls, name, _wrapped_property(found))
        elif inspect.isfunction(found):
            setattr(cls, name, on_tensors(found, keeps=name not in _MOMENTARY))


class AttentionTally(numkv.AttentionTally):
    """`numkv.AttentionTally` on tensors."""


class CausalCache(numkv.CausalCache):
    """`numkv.CausalCache` on tensors."""


class ContiguousLayer(numkv.ContiguousLayer):
    """`numkv.ContiguousLayer` on tensors."""


class EncoderCache(numkv.EncoderCache):
    """`numkv.EncoderCache` on tensors."""


class HeadCompressor(numkv.HeadCompressor):
    """`numkv.HeadCompressor` on tensors."""


class KVCache(numkv.KVCache):
    """`numkv.KVCache` on tensors."""


class MultiHeadCompressor(numkv.MultiHeadCompressor):
    """`numkv.MultiHeadCompressor` on tensors."""


class PagedCompressor(numkv.PagedCompressor):
    """`numkv.PagedCompressor` on tensors."""


class PagedLayer(numkv.PagedLayer):
    """`numkv.PagedLayer` on tensors."""


class PagedPool(numkv.PagedPool):
    """`numkv.PagedPool` on tensors."""


class Step(numkv.Step):
    """`numkv.Step` on tensors."""


class WrapperCache(numkv.WrapperCache):
    """`numkv.WrapperCache` on tensors."""


class PagedKVCache(numkv.PagedKVCache):
    """`numkv.PagedKVCache` on tensors; its steps take and give tensors too."""


# Results of `bind`.


class BoundAttention(numkv.BoundAttention):
    """`numkv.BoundAttention` on tensors."""


class BoundLayer(numkv.BoundLayer):
    """`numkv.BoundLayer` on tensors."""


class BoundStep(numkv.BoundStep):
    """`numkv.BoundStep` on tensors."""


for _cls in list(vars().values()):
    if isinstance(_cls, type) and _cls.__module__ == __name__:
        _on_tensors(_cls)
