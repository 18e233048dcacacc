"""How many numbers a decoder's weights are, for families whose layers are attention and a gated MLP."""

from __future__ import annotations

from typing import Any, NamedTuple

from numkv.planning.keys import Keys


class _Family(NamedTuple):
    """What the entries of a config leave to the family, as its class in transformers has it."""

    norms: int = 2  #: of a layer, each as wide as the hidden states
    head_norms: bool = False  #: of queries and of keys, each as wide as a head
    bias: bool = False  #: of the projections to queries, keys and values
    tied: bool = False  #: whether the output's weights are the embeddings, if the file does not say
    vocab: int | None = None  #: if the file does not say


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(),
    "qwen2": _Family(bias=True),
    "qwen3": _Family(head_norms=True),
    "gemma3_text": _Family(norms=4, head_norms=True, tied=True, vocab=262_208),
}


def parameters_of(keys: Keys, layers: int, head_dim: int, kv_heads: int) -> int | None:
    """Numbers in the weights of a decoder with layers that are alike.

    Parameters
    ----------
    keys : Keys
        Its entries.
    layers, head_dim, kv_heads : int
        What has been read of them.

    Returns
    -------
    int or None
        None for other families, such as those with experts, and where the file does not say all.
    """
    family = _FAMILIES.get(keys.model_type)
    hidden, inner = keys.get("hidden_size"), keys.get("intermediate_size")
    heads, vocab = keys.get("num_attention_heads"), keys.get("vocab_size")
    if family is None or keys.get("attention_bias") or keys.get("mlp_bias"):
        return None
    sizes: tuple[Any, ...] = hidden, inner, heads, family.vocab if vocab is None else vocab
    if not all(type(n) is int and n > 0 for n in sizes):
        return None
    vocab = sizes[-1]
    rows = (heads + 2 * kv_heads) * head_dim  # of queries, keys and values
    layer = hidden * (rows + heads * head_dim) + 3 * hidden * inner + family.norms * hidden
    layer += rows * family.bias + 2 * head_dim * family.head_norms
    ends = 1 if keys.get("tie_word_embeddings", family.tied) else 2
    total: int = layers * layer + ends * vocab * hidden + hidden
    return total
