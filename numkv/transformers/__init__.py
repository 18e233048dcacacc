"""numkv as cache and attention of Hugging Face's transformers, on the CPU.

``numkv.transformers.use(model, kind="int8")`` is all that ``model.generate`` needs. In single steps::

    model.set_attn_implementation("numkv")
    model.generate(**inputs, past_key_values=NumkvCache(model.config, kind="int8"))

Many requests at once, in one pool of blocks, are a `ContinuousBatch`.

Importing this registers the attention function and the mask function ``numkv``. docs/transformers.md lists supported
models and options.

It needs transformers 5.19 or a later 5, and PyTorch 2.8 or newer: ``pip install "numkv[transformers]"``.
"""

from __future__ import annotations

try:
    import transformers as _transformers
except ImportError as error:
    raise ImportError(
        'numkv.transformers needs transformers, which is not installed; try pip install "numkv[transformers]"'
    ) from error

import torch as _torch

for _what, _found, _from, _below in (
    ("transformers>=5.19,<5.24", _transformers.__version__, (5, 19), (5, 24)),
    ("torch>=2.8", _torch.__version__, (2, 8), (99,)),
):
    if not _from <= tuple(map(int, _found.split(".")[:2])) < _below:
        raise ImportError(
            f"numkv.transformers needs {_what}, because caches and masks differ between versions, got {_found}; try "
            'pip install "numkv[transformers]"'
        )

try:
    from transformers import AttentionInterface, AttentionMaskInterface

    from numkv.transformers.attention import attention as _attention
    from numkv.transformers.batch import BatchStats, ContinuousBatch
    from numkv.transformers.cache import NumkvCache, restore, use
    from numkv.transformers.masks import plan_of_mask as _plan_of_mask
    from numkv.transformers.request import BatchEvent, BatchRequest
    from numkv.transformers.saved import mark_of
except ImportError as error:
    raise ImportError(
        f"numkv.transformers was made for transformers 5.23, and transformers {_transformers.__version__} lacks what "
        f"it needs: {error}"
    ) from error

__all__ = [
    "BatchEvent", "BatchRequest", "BatchStats", "ContinuousBatch", "NumkvCache", "mark_of", "restore", "use",
]  # fmt: skip

AttentionInterface.register("numkv", _attention)
AttentionMaskInterface.register("numkv", _plan_of_mask)
