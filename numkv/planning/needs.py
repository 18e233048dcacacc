"""The rows and states of each layer, and the number of weights, from the entries of a config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from numkv.errors import NotSupported, NumkvError
from numkv.planning.description import LayerNeeds, ModelNeeds, Rows
from numkv.planning.keys import Keys, open_config
from numkv.planning.layer_types import (
    FULL,
    GEMMA4,
    HYBRID,
    LINEAR,
    SLIDING,
    layer_types_of,
    states_of,
)


class _Family(NamedTuple):
    """Properties of a family that its configs do not have, as in its transformers class."""

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


# Families that store other things than rows and states.
_REFUSED = {
    "blt": "three decoders over bytes and patches, each with a cache of its own",
    "reformer": "hashed buckets of hidden states",
    "xlnet": "hidden states of earlier segments",
    "pi0": "a cache that belongs to the model inside",
}
# Models that compute K and V anew, because transformers has no cache for them.
_UNCACHED = ("openai_gpt", "xlm")
_CROSS = "keys and values of the text that is read"
_K_AND_V = "keys and values"
_WITH_ROWS = {
    FULL, SLIDING, HYBRID, "hybrid_sliding", "chunked_attention", "indexed_attention", "minimax_m3_sparse",
    "reference_sliding_attention",
}  # fmt: skip
_COMPRESSED = ("compressed_sparse_attention", "heavily_compressed_attention")
_KNOWN = _WITH_ROWS.union(_COMPRESSED, (LINEAR, "conv", "none"))
_DTYPES = ("float64", "float32", "float16", "bfloat16")


def needs_of(config: str | Path | Mapping[str, Any], *, expanded: bool = False) -> ModelNeeds:
    """Return the rows and states that a decoder stores for each sequence, from its config.

    Parameters
    ----------
    config : path or mapping
        A ``config.json`` of Hugging Face's transformers, the folder it is in, or its content.
    expanded : bool
        Whether latent attention stores K and V of every head, instead of the latents that produce them.

    Returns
    -------
    ModelNeeds
        Its `remarks` name unknown entries, and the assumptions made instead.

    Raises
    ------
    ConfigError
        If it is no config, or lacks the sizes.
    NotSupported
        If the model stores other things than rows and states.
    OSError
        If there is no such file.

    Examples
    --------
    >>> from numkv.planning import needs_of
    >>> needs = needs_of({"model_type": "gemma2", "num_hidden_layers": 2, "sliding_window": 512})
    >>> [layer.type for layer in needs.layers]
    ['sliding_attention', 'full_attention']
    >>> needs.sequence_bytes(1024, "bf16")
    6291456
    """
    keys, outer = open_config(config)
    try:
        return _needs_of(keys, outer, expanded)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        if isinstance(error, NumkvError):
            raise
        raise keys.error(
            f"expected entries as {keys.model_type!r} has them, but {error}"
        ) from error


def _needs_of(keys: Keys, outer: Mapping[str, Any], expanded: bool) -> ModelNeeds:
    for name in (str(outer.get("model_type")), keys.model_type):
        if name in _REFUSED:
            raise NotSupported(
                f"expected a model that stores rows or states, got {name!r}, which stores {_REFUSED[name]}"
            )
    remarks: list[str] = []
    layers = _layers(keys, expanded, remarks)
    if _reads_across(keys, outer):
        layers = [_with_cross(keys, layer) for layer in layers]
    for layer in layers:
        _check_sizes(keys, layer)
    dtype = keys.get("dtype") or keys.get("torch_dtype")
    context = keys.get("max_position_embeddings")
    if not keys.known:
        name = repr(keys.model_type) if keys.model_type else "missing"
        remarks.append(
            f"`model_type` {name}: not a family known here, so plain attention by its entries is assumed"
        )
    remarks += [
        f"`{name}`: not understood, and left out of account" for name in keys.not_understood()
    ]
    return ModelNeeds(
        keys.model_type,
        tuple(layers),
        str(dtype) if dtype in _DTYPES else "bfloat16",
        context if type(context) is int and context > 0 else None,
        tuple(remarks),
        _q_heads(keys),
        _parameters(keys, outer, layers),
    )


def _q_heads(keys: Keys) -> int | None:
    """Return the query heads of every layer; None if layers differ."""
    types = layer_types_of(keys)
    own = (keys.changed(_changes(keys, i, len(types), x)) for i, x in enumerate(types))
    first, *rest = [x.get("num_attention_heads") for x in own]
    return first if type(first) is int and all(n == first for n in rest) else None


def _parameters(keys: Keys, outer: Mapping[str, Any], layers: list[LayerNeeds]) -> int | None:
    """Return the number of weights of a decoder with equal layers.

    None for other families, such as those with experts, and if entries are missing.
    """
    alike = {(rows.heads, rows.dim, rows.dim_v) for x in layers for rows in x.rows}
    if len(alike) != 1 or outer.get("quantization_config") or keys.get("quantization_config"):
        return None
    ((kv_heads, head_dim, _),) = alike
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
    total: int = len(layers) * layer + ends * vocab * hidden + hidden
    return total


def _layers(keys: Keys, expanded: bool, remarks: list[str]) -> list[LayerNeeds]:
    """Return the rows and states of each layer for a sequence's own tokens."""
    types = layer_types_of(keys)
    n = len(types)
    _check_count(keys, n, remarks)
    sources = _sources(keys, types)
    for i, source in sources.items():
        if type(source) is not int or not 0 <= source < i or source in sources:
            raise keys.error(f"expected layer {i} to read an earlier one's rows, got {source!r}")
    blocks = keys.get("block_configs")  # DeciLM: each layer as the search left it
    layers = []
    unknown: set[str] = set()
    for i, name in enumerate(types):
        own = keys.changed(_changes(keys, i, n, name))
        if isinstance(blocks, list) and i < len(blocks):
            layers.append(_of_block(own, blocks[i]))
            continue
        counted = name if name in _KNOWN else FULL
        if counted != name:
            unknown.add(name)
        shares = sources.get(i)
        rows = () if shares is not None else _rows(own, i, counted, expanded)
        layers.append(LayerNeeds(counted, rows, states_of(own, counted), shares))
    remarks += [
        f"`layer_types` {name!r}: not a type known here, so these layers are counted as full attention"
        for name in sorted(unknown)
    ]
    if "reference_sliding_attention" in types:
        remarks.append(
            "`layer_types` 'reference_sliding_attention': all tokens are counted as the prompt, which is stored whole"
        )
    if keys.model_type in _UNCACHED:
        remarks.append(
            f"`model_type` {keys.model_type!r}: transformers has no cache for this family; its K and V are counted"
        )
    if keys.model_type == "longcat_flash":  # two attentions in each
        layers = [layer for layer in layers for _ in range(2)]
    if keys.get("ple_layer_ids"):
        remarks.append(
            "`ple_layer_ids`: states of these layers' convolutions are left out of account"
        )
    return layers


def _check_sizes(keys: Keys, layer: LayerNeeds) -> None:
    """Check that all sizes computed from several entries are positive."""
    for rows in layer.rows:
        numbers = (rows.heads, rows.dim, rows.dim_v + 1, rows.tokens_per_row, rows.limit or 1)
        if not all(isinstance(n, int) and n > 0 for n in numbers):
            raise keys.error(f"expected sizes above 0, got {rows}")
    if any(state.numbers < 0 for state in layer.states):
        raise keys.error(f"expected sizes above 0, got {layer.states}")


def _check_count(keys: Keys, n: int, remarks: list[str]) -> None:
    count = keys.get("num_hidden_layers")
    if (
        isinstance(count, int)
        and count != n
        and keys.model_type != "nemotron_h"
        and keys.get("layer_types")
    ):
        remarks.append(f"`num_hidden_layers` {count}: `layer_types` lists {n}, which are counted")


def _changes(keys: Keys, i: int, n: int, name: str) -> dict[str, Any]:
    """Return the entries that differ for one layer."""
    changes: dict[str, Any] = {}
    sliding = name in (SLIDING, "hybrid_sliding")
    if keys.model_type in GEMMA4 and name == FULL:
        changes["head_dim"] = keys.get("global_head_dim", 512)
        if keys.get("attention_k_eq_v", True) and keys.get("num_global_key_value_heads"):
            changes["num_key_value_heads"] = keys.get("num_global_key_value_heads")
    if keys.model_type == "mimo_v2_flash":
        heads = keys.size("num_key_value_heads")
        changes["num_key_value_heads"] = (
            keys.get("swa_num_key_value_heads", 2 * heads) if sliding else heads
        )
    elif sliding:
        for key in (
            "num_key_value_heads",
            "num_attention_heads",
            "head_dim",
            "v_head_dim",
            "kv_lora_rank",
            "qk_nope_head_dim",
        ):
            default = _DOTS3.get(key) if keys.model_type == "dots3_note_text" else None
            value = keys.get(f"swa_{key}", default)
            if value is not None:
                changes[key] = value
    for key, names in _IN_LISTS.items():
        for one in (f"{key}_per_layer", *names):
            value = keys.peek(one)
            if isinstance(value, (list, tuple)) and len(value) >= n:
                changes[key] = keys.get(one)[i]
    listed = keys.get("per_layer_config")
    if isinstance(listed, Mapping):
        number = next((key for key in listed if str(key).isdecimal() and int(key) == i), None)
        changes |= listed[number] if number is not None else {}
    elif isinstance(listed, list) and i < len(listed) and isinstance(listed[i], Mapping):
        changes |= listed[i]
    return changes


# Entries that may be lists, with an item for each layer.
_IN_LISTS = {
    "num_attention_heads": ("num_attention_heads", "num_query_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "sliding_window": ("sliding_window",),
    "attention_chunk_size": ("attention_chunk_size",),
}
# Windows of families whose config classes compute them.
_WINDOWS = {"modernbert_decoder": 1, "dots3_note_text": 512}
_DOTS3 = {
    "num_key_value_heads": 64,
    "num_attention_heads": 64,
    "kv_lora_rank": 1024,
    "qk_nope_head_dim": 192,
}


def _sources(keys: Keys, types: list[str]) -> dict[int, int]:
    """Return the source layer of each layer that reads another layer's rows."""
    n = len(types)
    listed = keys.get("kv_source_layers")
    if isinstance(listed, list) and len(listed) >= n:
        return {i: listed[i] for i in range(n) if listed[i] != i}
    if keys.get("use_cla") and keys.get("cla_share_factor"):
        step = int(keys.get("cla_share_factor"))
        return {i: i - i % step for i in range(n) if i % step}
    if keys.model_type == "phi4flash":
        return {i: n // 2 + 1 for i in range(n // 2 + 2, n) if types[i] == FULL}
    shared = keys.get("num_kv_shared_layers")
    if not isinstance(shared, int) or not 0 < shared < n:
        return {}
    last = {types[j]: j for j in range(n - shared)}  # of each type
    return {i: last[types[i]] for i in range(n - shared, n) if types[i] in last}


def _rows(keys: Keys, i: int, name: str, expanded: bool) -> tuple[Rows, ...]:
    """Return the rows of a layer that does not read another's."""
    if name in _COMPRESSED:
        return _compressed(keys, name)
    if name not in _WITH_ROWS:
        return ()
    if i in _crossing(keys):  # Llama 3.2 vision: these read pictures only
        row = _attention(keys, None, expanded)[0]
        return (Rows(_CROSS, row.heads, row.dim, row.dim_v, of_source=True),)
    limit = None
    if name in (SLIDING, "hybrid_sliding"):
        limit = keys.size("sliding_window", _WINDOWS.get(keys.model_type))
        if keys.model_type == "mimo_v2_flash" and keys.written("sliding_window_size"):
            limit = int(keys.written("sliding_window_size")) + 1
        elif keys.model_type == "modernbert_decoder" and keys.written("sliding_window") is None:
            limit = max(1, keys.size("local_attention") // 2)
        elif keys.get("use_bidirectional_attention") in (True, "all"):
            limit = limit // 2 + 1
    elif name == "chunked_attention":
        limit = keys.size("attention_chunk_size")
    return (*_attention(keys, limit, expanded), *_index(keys, i, name))


def _crossing(keys: Keys) -> list[int]:
    """Return the layers that attend only to another input than the sequence."""
    mllama = keys.model_type == "mllama_text_model"
    listed = keys.get("cross_attention_layers", [3, 8, 13, 18, 23, 28, 33, 38] if mllama else [])
    return listed if isinstance(listed, list) else []


def _attention(keys: Keys, limit: int | None, expanded: bool) -> tuple[Rows, ...]:
    """Return the rows of K and V, or of the latents that produce them."""
    if keys.get("kv_lora_rank"):
        rank, rope = keys.size("kv_lora_rank"), int(keys.get("qk_rope_head_dim", 64))
        if not expanded:
            return (Rows("latents", 1, rank + rope, 0, limit, latent_dim=rank),)
        heads, plain = keys.size("num_attention_heads"), int(keys.get("qk_nope_head_dim", 128))
        return (Rows(_K_AND_V, heads, plain + rope, keys.size("v_head_dim", 128), limit),)
    heads, dim = _kv_heads(keys), _head_dim(keys)
    return (Rows(_K_AND_V, heads, dim, keys.size("v_head_dim", dim), limit),)


def _kv_heads(keys: Keys) -> int:
    """Return the kv heads of a layer; by default as many as query heads."""
    if keys.get("num_attention_heads") is None:  # JetMoE has only those of K and V
        return keys.size("num_key_value_heads")
    heads = keys.size("num_attention_heads")
    if keys.model_type in ("falcon", "RefinedWeb", "RefinedWebModel"):
        if keys.get("new_decoder_architecture"):
            return keys.size("num_key_value_heads", heads)
        return 1 if keys.get("multi_query", True) else keys.size("num_key_value_heads", heads)
    if keys.model_type == "gpt_bigcode":
        return 1 if keys.get("multi_query", True) else heads
    inner = keys.get("attn_config")  # DBRX, MPT
    if isinstance(inner, Mapping) and inner.get("kv_n_heads"):
        return int(inner["kv_n_heads"])
    if keys.model_type == "dbrx":
        return keys.size("num_key_value_heads", 1)
    if not keys.known and keys.get("multi_query") and keys.written("num_key_value_heads") is None:
        return keys.size("num_kv_heads", 1)
    return keys.size("num_key_value_heads", heads)


def _head_dim(keys: Keys) -> int:
    """Return the elements of a head's row."""
    if keys.model_type in _DIVIDED and keys.get("hidden_size"):
        return keys.size("hidden_size") // keys.size("num_attention_heads")
    if keys.model_type in ("zamba", "zamba2"):
        return int(
            keys.get("attention_head_dim")
            or 2 * keys.size("hidden_size") // keys.size("num_attention_heads")
        )
    if keys.get("head_dim"):
        return keys.size("head_dim")
    heads, hidden = keys.size("num_attention_heads"), keys.size("hidden_size")
    if hidden < heads:
        raise keys.error(
            f"hidden_size: expected at least num_attention_heads {heads}, got {hidden}"
        )
    return hidden // heads


# Families whose head dim always follows from the hidden size.
_DIVIDED = (
    "cohere2",
    "cohere_compass_text",
    "recurrent_gemma",
    "unlimited_ocr_text",
    "falcon",
    "gpt_bigcode",
)


def _index(keys: Keys, i: int, name: str) -> tuple[Rows, ...]:
    """Return the keys of an indexer, which chooses the visible tokens."""
    if name not in ("indexed_attention", "minimax_m3_sparse"):
        return ()
    kinds = keys.get("indexer_types")
    if isinstance(kinds, list) and i < len(kinds) and kinds[i] == "shared":
        return ()
    if kinds is None and keys.model_type == "hy_v4" and i and (i - 1) % 4:
        return ()
    if kinds is None and (keys.get("index_topk_pattern") or keys.get("index_topk_freq")):
        pattern, step = keys.get("index_topk_pattern"), int(keys.get("index_topk_freq", 1)) or 1
        shift = i - int(keys.get("index_skip_topk_offset", 2)) + 1
        if pattern[i] in ("S", "shared") if pattern else max(shift, 0) % step:
            return ()
    sparse = keys.get("sparse_attention_config") or {}
    dim = int(sparse.get("sparse_index_dim") or keys.get("index_head_dim", 128))
    if keys.model_type == "glm5_next_text":  # each with a gate
        dim *= 2
    return (Rows("index keys", 1, dim, 0),)


def _compressed(keys: Keys, name: str) -> tuple[Rows, ...]:
    """DeepSeek V4: a window of keys that are also values, and one such key for every few earlier tokens."""
    rates = keys.get("compress_rates") or {}
    sparse = name == "compressed_sparse_attention"
    legacy = keys.get("compress_rate_csa" if sparse else "compress_rate_hca")
    rate = int(legacy or rates.get(name) or (4 if sparse else 128))
    dim = keys.size("head_dim")
    rows = [
        Rows("compressed keys", 1, dim, 0, keys.size("sliding_window")),
        Rows("compressed keys", 1, dim, 0, tokens_per_row=rate),
    ]
    if sparse:
        rows.append(Rows("index keys", 1, keys.size("index_head_dim"), 0, tokens_per_row=rate))
    return tuple(rows)


def _of_block(keys: Keys, block: Any) -> LayerNeeds:
    """Return a layer of DeciLM: without attention, with a linear map instead, or with its own number of kv heads."""
    attention = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(attention, Mapping):
        raise keys.error(f"block_configs: expected an `attention` in each, got {block!r:.80}")
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return LayerNeeds("none")
    heads = keys.size("num_attention_heads")
    kv_heads = attention.get("num_key_value_heads") or heads // int(
        attention.get("n_heads_in_group") or 1
    )
    window = attention.get("window_length") or attention.get("sliding_window_length")
    dim = _head_dim(keys)
    return LayerNeeds(
        SLIDING if window else FULL, (Rows(_K_AND_V, int(kv_heads), dim, dim, window or None),)
    )


def _reads_across(keys: Keys, outer: Mapping[str, Any]) -> bool:
    """Return whether layers of the decoder also store K and V of a source text, such as an encoder's."""
    keys.get("cross_attention_hidden_size")
    if _crossing(keys):
        return False  # `_rows` has them
    whole = outer.get("is_encoder_decoder")
    if whole is None:
        whole = keys.get("is_encoder_decoder")
    if keys.get("is_decoder") and not whole and not keys.get("add_cross_attention"):
        return False
    return bool(whole or keys.get("add_cross_attention"))


def _with_cross(keys: Keys, layer: LayerNeeds) -> LayerNeeds:
    own = next((rows for rows in layer.rows if rows.what == _K_AND_V), None)
    if own is None:
        return layer
    cross = Rows(_CROSS, own.heads, own.dim, own.dim_v, of_source=True)
    return LayerNeeds(layer.type, (*layer.rows, cross), layer.states, layer.shares)
