"""numkv's functions on tensors.

Each one takes what the function of `numkv` takes, with tensors in place of arrays, and returns tensors. Errors are
those of `numkv`. Where ``torch.compile`` traces a call, it becomes one of an operator: see `numkv.torch.operators`.
"""

from __future__ import annotations

from typing import Any

import numkv
from numkv.torch import operators
from numkv.torch.tensors import on_tensors


def _function(name: str) -> Any:
    """A function of numkv on tensors; its operator where calls are traced, if it has one."""
    operator = operators.calls.get(name)
    return on_tensors(getattr(numkv, name), operator, keeps=operator is None)


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
