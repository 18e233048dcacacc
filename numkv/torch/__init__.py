"""numkv on PyTorch's tensors: the same functions and caches, tensors in and tensors out.

``numkv.torch`` has the names of `numkv` that accept or return arrays. Tensors on the CPU, and on CUDA devices for
that target, are used without a copy. They may have every float dtype with a kind (bfloat16 and 8-bit floats included)
and strides, under ``no_grad`` and ``inference_mode``. Results are tensors; with `out` the result is `out` itself. All
else is as in `numkv`.

- **Functions** run at once, past PyTorch's dispatcher. Under ``torch.compile`` they become operators,
  ``torch.ops.numkv``, with fake implementations and schemas of mutated arguments; see `numkv.torch.operators`.
- **Caches** are subclasses of numkv's own: an object of ``numkv.torch.KVCache`` is a `numkv.KVCache`. Their
  ``arrays`` and ``jit`` are for kernels, and are not converted.
- **Gradients** are not computed. A tensor that requires them is refused where they are recorded; pass
  ``x.detach()``, or call under ``torch.no_grad()``.

It needs PyTorch 2.8 or newer: ``pip install "numkv[torch]"``.
"""

from __future__ import annotations

from typing import Any as _Any

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        'numkv.torch needs PyTorch, which is not installed; try pip install "numkv[torch]"'
    ) from error

import numkv as _numkv
from numkv.torch.objects import (
    AttentionTally,
    CausalCache,
    ContiguousLayer,
    EncoderCache,
    HeadCompressor,
    KVCache,
    MultiHeadCompressor,
    PagedCompressor,
    PagedKVCache,
    PagedLayer,
    PagedPool,
    Step,
    WrapperCache,
)
from numkv.torch.operators import calls as _operators
from numkv.torch.tensors import on_tensors as _on_tensors

__all__ = [
    "AttentionTally",
    "CausalCache",
    "ContiguousLayer",
    "EncoderCache",
    "HeadCompressor",
    "KVCache",
    "MultiHeadCompressor",
    "PagedCompressor",
    "PagedKVCache",
    "PagedLayer",
    "PagedPool",
    "Step",
    "WrapperCache",
    "append",
    "attention_weights",
    "cascade_attention",
    "decode_attention",
    "merge_states",
    "paged_append",
    "paged_decode_attention",
    "paged_prefill_attention",
    "paged_write",
    "prefill_attention",
    "rope_shift",
]


def _function(name: str) -> _Any:
    """A function of numkv on tensors; its operator where calls are traced, if it has one."""
    operator = _operators.get(name)
    return _on_tensors(getattr(_numkv, name), operator, keeps=operator is None)


append = _function("append")
attention_weights = _function("attention_weights")
cascade_attention = _function("cascade_attention")
decode_attention = _function("decode_attention")
merge_states = _function("merge_states")
paged_append = _function("paged_append")
paged_decode_attention = _function("paged_decode_attention")
paged_prefill_attention = _function("paged_prefill_attention")
paged_write = _function("paged_write")
prefill_attention = _function("prefill_attention")
rope_shift = _function("rope_shift")
