"""Sparse reading: attention over some blocks or tokens of a paged cache, chosen by the query.

Where a context is long, a token attends to little of it. `KeyBounds` keeps the smallest and the largest key of each
block, which bound the score that a query can have there; `choose_blocks` chooses the best for each kv head, and
`sparse_decode_attention` attends to these alone, exactly. `token_decode_attention` attends to tokens that a model has
chosen itself. docs/sparse.md shows them at work.
"""

from numkv.sparse.attention import sparse_decode_attention, token_decode_attention
from numkv.sparse.bounds import KeyBounds
from numkv.sparse.choice import BlockChoice, choose_blocks

__all__ = [
    "BlockChoice",
    "KeyBounds",
    "choose_blocks",
    "sparse_decode_attention",
    "token_decode_attention",
]
