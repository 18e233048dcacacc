"""Attention over contiguous and paged caches, masks, the merge of partial results, and attention mass by token."""

from __future__ import annotations

from numkv.attention.contiguous import decode_attention, merge_states, prefill_attention
from numkv.attention.mass import attention_weights
from numkv.attention.options import AttentionOptions
from numkv.attention.paged import (
    cascade_attention,
    paged_decode_attention,
    paged_prefill_attention,
)
from numkv.attention.tree import tree_mask

__all__ = [
    "AttentionOptions",
    "attention_weights",
    "cascade_attention",
    "decode_attention",
    "merge_states",
    "paged_decode_attention",
    "paged_prefill_attention",
    "prefill_attention",
    "tree_mask",
]
