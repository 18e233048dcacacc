"""numkv on PyTorch's tensors: the same functions and caches, tensors in and tensors out.

``numkv.torch`` has the names of `numkv` that take or give arrays. Tensors on the CPU, and on a CUDA device where that
is the target, are taken without a copy, of every float dtype that there is a kind for (bfloat16 and 8-bit floats too),
contiguous or strided, under ``no_grad`` and ``inference_mode``. What comes back is a tensor; with `out` it is `out`
itself. Everything else is as `numkv` says.

- **Functions** run at once, past PyTorch's dispatcher. Under ``torch.compile`` they become operators,
  ``torch.ops.numkv``, which have fake implementations and say what they change; see `numkv.torch.operators`.
- **Caches** are subclasses of numkv's own: an object of ``numkv.torch.KVCache`` is a `numkv.KVCache`. What their
  ``arrays`` and ``jit`` give is for kernels, and stays as it is.
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
