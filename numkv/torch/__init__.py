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

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        'numkv.torch needs PyTorch, which is not installed; try pip install "numkv[torch]"'
    ) from error

from numkv.torch.functions import (
    append,
    attention_weights,
    cascade_attention,
    decode_attention,
    merge_states,
    paged_append,
    paged_decode_attention,
    paged_prefill_attention,
    paged_write,
    prefill_attention,
    rope_shift,
)
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
