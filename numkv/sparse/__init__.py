"""Sparse reading: attention over some blocks or tokens of a paged cache, chosen by the query.

In a long context, a token attends to a small part of it. `KeyBounds` stores the smallest and the largest key of each
block, which bound the score of any query there. `choose_blocks` chooses the best blocks for each kv head, and
`sparse_decode_attention` attends to these alone, exactly. `token_decode_attention` attends to tokens chosen by the
model. See docs/sparse.md.
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
