"""The type of each layer: from the config's list, or by its family's pattern."""

from __future__ import annotations

import math
from collections.abc import Callable

from numkv.planning.description import State
from numkv.planning.keys import Keys

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, CONV, HYBRID, HYBRID_SLIDING = "linear_attention", "conv", "hybrid", "hybrid_sliding"
INDEXED, NOTHING = "indexed_attention", "none"

# Other names of types, in older configs and in code outside of transformers.
_SAME = {
    "attention": FULL, "full": FULL, "global": FULL, "global_attention": FULL, "softmax_attention": FULL, "attn": FULL,
    "sliding": SLIDING, "local": SLIDING, "local_attention": SLIDING, "swa": SLIDING, "sliding_window": SLIDING,
    "chunked": CHUNKED,
    "linear": LINEAR, "mamba": LINEAR, "mamba2": LINEAR, "recurrent": LINEAR, "ssm": LINEAR, "m": LINEAR,
    "gated_delta_net": LINEAR, "lightning_attention": LINEAR, "kda": LINEAR,
    "short_conv": CONV, "convolution": CONV,
    "deepseek_sparse_attention": INDEXED, "qwen_sparse_attention": INDEXED,
    "moe": NOTHING, "mlp": NOTHING, "dummy": NOTHING, "ffn": NOTHING,
}  # fmt: skip

# Letters of the patterns of Nemotron-H, and of EXAONE.
_NEMOTRON = {"M": LINEAR, "*": FULL, "-": NOTHING, "E": NOTHING}
_LETTERS = {"L": SLIDING, "G": FULL}

_Pattern = Callable[[Keys, int], "list[str]"]


def _every(step: int, most: str, other: str, key: str = "", first: bool = False) -> _Pattern:
    """Return a pattern in which every `step`-th layer, the last or the first of each run, is of type `other`."""

    def pattern(keys: Keys, n: int) -> list[str]:
        size = int(keys.get(key, step) if key else step)
        at = 0 if first else size - 1
        return [other if size and i % size == at else most for i in range(n)]

    return pattern


def _where(other: str, most: str, chosen: Callable[[int, int], bool]) -> _Pattern:
    """Return a pattern in which layers chosen by a function of (index, number of layers) are of type `other`."""
    return lambda keys, n: [other if chosen(i, n) else most for i in range(n)]


def _last_full(pattern: _Pattern) -> _Pattern:
    return lambda keys, n: [*pattern(keys, n)[:-1], FULL]


def _from_max_window(keys: Keys, n: int) -> list[str]:
    """Qwen 2: the first layers are full, those from `max_window_layers` on sliding."""
    first = int(keys.get("max_window_layers", n))
    return [SLIDING if _slides(keys) and i >= first else FULL for i in range(n)]


def _qwen2_moe(keys: Keys, n: int) -> list[str]:
    first = int(keys.get("max_window_layers", n))
    return [SLIDING if _slides(keys) and i < first and i % 2 == 0 else FULL for i in range(n)]


def _slides(keys: Keys) -> bool:
    window = keys.get("sliding_window")
    return bool(keys.get("use_sliding_window", True) and window)


def _all_slide(keys: Keys, n: int) -> list[str]:
    return [SLIDING if _slides(keys) else FULL] * n


def _with_rope(keys: Keys, n: int) -> list[bool]:
    """Return which layers apply RoPE, in families where some do not."""
    if listed := keys.get("no_rope_layers"):  # 1: it does
        if not isinstance(listed, (list, tuple)) or len(listed) < n:
            raise keys.error(f"no_rope_layers: expected a list of {n}, got {listed!r:.80}")
        return list(map(bool, listed[:n]))
    step = int(keys.get("no_rope_layer_interval", 4))
    return [(i + 1) % step != 0 for i in range(n)]


def _llama4(keys: Keys, n: int) -> list[str]:
    return [CHUNKED if one else FULL for one in _with_rope(keys, n)]


def _smollm3(keys: Keys, n: int) -> list[str]:
    return [FULL if one or not _slides(keys) else SLIDING for one in _with_rope(keys, n)]


def _cohere2_moe(keys: Keys, n: int) -> list[str]:
    dense = min(max(int(keys.get("first_k_dense_replace", 0)), 0), n)
    before = _every(1, SLIDING, FULL, "prefix_dense_sliding_window_pattern")(keys, dense)
    return before + _every(4, SLIDING, FULL, "sliding_window_pattern")(keys, n - dense)


def _exaone(keys: Keys, n: int) -> list[str]:
    pattern = keys.get("sliding_window_pattern", 4)
    if keys.get("sliding_window") is None:
        return [FULL] * n
    if isinstance(pattern, str):  # "LLLG"; the last layer is a global one
        return [*(_LETTERS[pattern[i % len(pattern)]] for i in range(n - 1)), FULL]
    return _every(int(pattern), SLIDING, FULL)(keys, n)


def _jamba(keys: Keys, n: int) -> list[str]:
    step, at = int(keys.get("attn_layer_period", 8)), int(keys.get("attn_layer_offset", 4))
    return [FULL if i % step == at else LINEAR for i in range(n)]


def _bamba(keys: Keys, n: int) -> list[str]:
    chosen = keys.get("attn_layer_indices") or []
    return [FULL if i in chosen else LINEAR for i in range(n)]


def _lfm2(keys: Keys, n: int) -> list[str]:
    chosen = keys.get("full_attn_idxs")
    return [FULL if chosen is None or i in chosen else CONV for i in range(n)]


def _nemotron_h(keys: Keys, n: int) -> list[str]:
    pattern = keys.get("hybrid_override_pattern")
    if pattern is None:
        return [LINEAR, NOTHING, FULL, NOTHING]
    return [_NEMOTRON.get(letter, letter) for letter in str(pattern).replace("|", "")]


def _zamba(keys: Keys, n: int) -> list[str]:
    step, at = int(keys.get("attn_layer_period", 6)), int(keys.get("attn_layer_offset", 4))
    rest = [HYBRID if i % step == at else LINEAR for i in range(n - 3)]
    return [LINEAR, LINEAR, HYBRID, *rest]


def _zamba2(keys: Keys, n: int) -> list[str]:
    chosen = keys.get("hybrid_layer_ids", [6, 12, 18, 24, 30, 36, 42, 47, 51])
    return [HYBRID if i in chosen else LINEAR for i in range(n)]


def _recurrent_gemma(keys: Keys, n: int) -> list[str]:
    block = keys.get("block_types", ["recurrent", "recurrent", "attention"])
    return [LINEAR if block[i % len(block)] == "recurrent" else SLIDING for i in range(n)]


def _kimi(keys: Keys, n: int) -> list[str]:
    chosen = (keys.get("linear_attn_config") or {}).get("full_attn_layers")
    if chosen is not None:  # counted from 1
        return [FULL if i + 1 in chosen else LINEAR for i in range(n)]
    return [FULL if i and i % 4 == 0 else LINEAR for i in range(n)]


def _gpt_neo(keys: Keys, n: int) -> list[str]:
    listed = keys.get("attention_layers")
    if listed is None:
        types = keys.get("attention_types", [[["global", "local"], n // 2]])
        keys.check_layers(sum(len(names) * max(0, int(times)) for names, times in types))
        listed = [name for names, times in types for name in list(names) * int(times)]
    return [SLIDING if name == "local" else FULL for name in listed]


def _minimax(keys: Keys, n: int) -> list[str]:
    listed = keys.get("attn_type_list")
    if listed is not None:  # 1 where attention is softmax
        return [FULL if one else LINEAR for one in listed]
    return [LINEAR if i % 2 else FULL for i in range(n)]


def _minimax_m3(keys: Keys, n: int) -> list[str]:
    sparse = (keys.get("sparse_attention_config") or {}).get("sparse_attention_freq")
    return ["minimax_m3_sparse" if one else FULL for one in sparse] if sparse else [FULL] * n


def _dots3_note(keys: Keys, n: int) -> list[str]:
    full = FULL if keys.get("use_dsa") is False else INDEXED
    slides = keys.get("use_sliding_window", True)
    return [full if not slides or i < 2 or i % 4 == 1 else SLIDING for i in range(n)]


def _deepseek_v4(keys: Keys, n: int) -> list[str]:
    names = {0: SLIDING, 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    ratios = keys.get("compress_ratios")
    if ratios is not None:
        return [names.get(ratio, f"compress_ratios {ratio}") for ratio in ratios[:n]]
    return [names[4] if i >= 2 and i % 2 else names[128] for i in range(n)]


def _inkling(keys: Keys, n: int) -> list[str]:
    local = keys.get("local_layer_ids")
    return [
        HYBRID_SLIDING if ((i + 1) % 6 if local is None else i in local) else HYBRID
        for i in range(n)
    ]


def _olmo_hybrid(keys: Keys, n: int) -> list[str]:
    types = _every(4, LINEAR, FULL)(keys, n)
    return types if FULL in types else [*types[:-1], FULL]


def _phi4flash(keys: Keys, n: int) -> list[str]:
    """A decoder of two halves: the upper one reads the K and V of one layer, or the state of another (YOCO)."""
    step = int(keys.get("mb_per_layer", 2))
    half, types = n // 2, []
    for i in range(n):
        if step and i % step == 0:
            types.append(LINEAR if i <= half else NOTHING)
        else:
            types.append(SLIDING if i < half else FULL)
    return types


def _all(name: str) -> _Pattern:
    return lambda keys, n: [name] * n


_QWEN2 = ("qwen2", "qwen2_5_vl_text", "qwen2_vl_text", "qwen2_5_omni_text", "qwen3", "dots1")
_EVERY_OTHER = ("gemma2", "t5_gemma_module", "vaultgemma", "gpt_oss")
#: Families with other sizes in full layers.
GEMMA4 = ("gemma4_text", "gemma4_unified_text", "diffusion_gemma_text")
_LINEAR_MOSTLY = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_ONLY_LINEAR = ("mamba", "falcon_mamba", "mamba2", "xlstm", "rwkv")
_INDEXED = ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "mistral_large4_text")
_ALL_SLIDE = (
    "mistral", "mixtral", "ministral", "ministral3", "phi3", "phimoe", "starcoder2", "qwen3_moe", "moshi", "doge",
    "voxtral_realtime_text", "phi4_multimodal",
)  # fmt: skip
_FULL_IN_FRONT = ("cwm", "granite_swa", "granitemoe_swa")

_PATTERNS: dict[str, _Pattern] = {
    **dict.fromkeys(_QWEN2, _from_max_window),
    **dict.fromkeys(_EVERY_OTHER, _every(2, SLIDING, FULL)),
    **dict.fromkeys(GEMMA4, _last_full(_every(6, SLIDING, FULL))),
    **dict.fromkeys(_LINEAR_MOSTLY, _every(4, LINEAR, FULL, "full_attention_interval")),
    **dict.fromkeys(_ONLY_LINEAR, _all(LINEAR)),
    **dict.fromkeys(_INDEXED, _all(INDEXED)),
    **dict.fromkeys(_ALL_SLIDE, _all_slide),
    **dict.fromkeys(_FULL_IN_FRONT, _every(4, SLIDING, FULL, first=True)),
    **dict.fromkeys(("gemma3_text", "t5gemma2_decoder"), _every(6, SLIDING, FULL, "sliding_window_pattern")),
    **dict.fromkeys(("gemma3n_text", "kolibri1"), _every(5, SLIDING, FULL)),
    **dict.fromkeys(("exaone4", "exaone_moe"), _exaone),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _lfm2),
    **dict.fromkeys(("falcon_h1", "zaya"), _all(HYBRID)),
    **dict.fromkeys(("llama4_text",), _llama4),
    **dict.fromkeys(("inkling_text", "inkling2_text"), _inkling),
    **dict.fromkeys(
        ("muse_glimmer_text", "muse_spark_text"), _where(FULL, SLIDING, lambda i, n: (n - 1 - i) % 4 == 0)
    ),
    "afmoe": _every(4, SLIDING, FULL, "global_attn_every_n_layers"),
    "bailing_hybrid": _every(6, LINEAR, FULL, "layer_group_size"),
    "bamba": _bamba,
    "beam": _last_full(_every(6, SLIDING, FULL)),
    "cohere2": _every(4, SLIDING, FULL, "sliding_window_pattern"),
    "cohere2_moe": _cohere2_moe,
    "deepseek_v4": _deepseek_v4,
    "dots3_note_text": _dots3_note,
    "flint": _where(FULL, SLIDING, lambda i, n: i < 2 or i % 4 == 1 or i == n - 1),
    "glm5_next_text": _every(4, LINEAR, INDEXED),
    "gpt_neo": _gpt_neo,
    "granitemoehybrid": _all(LINEAR),
    "jamba": _jamba,
    "kimi_linear": _kimi,
    "lfm3": lambda keys, n: [FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i else CONV for i in range(n)],
    "mimo_v2_flash": _where(FULL, SLIDING, lambda i, n: i == 0 or (i + 1) % 6 == 0),
    "minimax": _minimax,
    "minimax_m3_vl_text": _minimax_m3,
    "modernbert_decoder": _every(3, SLIDING, FULL, "global_attn_every_n_layers", first=True),
    "nemotron_h": _nemotron_h,
    "olmo3": _every(4, SLIDING, FULL),
    "olmo_hybrid": _olmo_hybrid,
    "phi4flash": _phi4flash,
    "qwen2_moe": _qwen2_moe,
    "qwen4_exp_text": _every(4, LINEAR, INDEXED, "full_attention_interval"),
    "recurrent_gemma": _recurrent_gemma,
    "smollm3": _smollm3,
    "unlimited_ocr_text": lambda keys, n: ["reference_sliding_attention" if keys.get("sliding_window") else FULL] * n,
    "zamba": _zamba,
    "zamba2": _zamba2,
}  # fmt: skip


def layer_types_of(keys: Keys) -> list[str]:
    """Return the type of each layer, by transformers' present names; unknown names stay unchanged.

    Parameters
    ----------
    keys : Keys
        The decoder's entries.

    Returns
    -------
    list of str
    """
    listed = keys.get("layer_types")
    if isinstance(listed, (list, tuple)) and listed:
        types = [str(name) for name in listed]
    elif keys.model_type == "nemotron_h":
        types = _nemotron_h(keys, 0)
    elif keys.model_type == "hrm_text":  # a stack runs in cycles, each with rows of its own
        stack = int(keys.get("num_layers_per_stack") or keys.num_layers())
        n = stack * keys.size("H_cycles") * (keys.size("L_cycles") + 1)
        keys.check_layers(n)
        types = [FULL] * n
    else:
        pattern = _PATTERNS.get(keys.model_type, _all(FULL) if keys.known else _by_keys)
        types = pattern(keys, keys.num_layers())
    keys.check_layers(len(types))  # a list may be longer than the count says
    types = [_SAME.get(name.lower(), name) for name in types]
    if keys.model_type in _INDEXED or keys.model_type in ("qwen4_exp_text", "glm5_next_text"):
        types = [INDEXED if name == FULL else name for name in types]
    if keys.model_type in GEMMA4:
        types[-1:] = [FULL]
    return types


def _by_keys(keys: Keys, n: int) -> list[str]:
    """Return the types of an unknown family, from entries with the same meaning in all families."""
    if keys.get("attention_chunk_size"):
        return _llama4(keys, n) if keys.get("no_rope_layers") else [CHUNKED] * n
    if keys.get("full_attention_interval"):
        return _every(4, LINEAR, FULL, "full_attention_interval")(keys, n)
    if keys.get("attn_layer_period"):
        return _jamba(keys, n)
    if keys.get("hybrid_override_pattern"):
        return _nemotron_h(keys, n)
    if _slides(keys):
        pattern = keys.get("sliding_window_pattern")
        if isinstance(pattern, str) and set(pattern) <= set(_LETTERS):
            return _exaone(keys, n)
        if isinstance(pattern, int) and pattern > 0:
            return _every(pattern, SLIDING, FULL)(keys, n)
        if keys.get("max_window_layers") is not None:
            return _from_max_window(keys, n)
        return [SLIDING] * n
    return [FULL] * n


_FP32 = "float32"
_MAMBA_1 = ("mamba", "falcon_mamba", "jamba", "phi4flash", "zamba")
_DELTA_HEADS = ("kimi_linear", "bailing_hybrid", "glm5_next_text")


def states_of(keys: Keys, layer_type: str) -> tuple[State, ...]:
    """Return the states of a layer.

    Parameters
    ----------
    keys : Keys
        The decoder's entries.
    layer_type : str
        The layer's type.

    Returns
    -------
    tuple of State

    Notes
    -----
    Sizes and dtypes are those of transformers: recurrences in float32, convolutions in the model's dtype.
    """
    if layer_type == "conv":
        return (_convolution(keys.size("hidden_size"), int(keys.get("conv_L_cache", 3))),)
    if layer_type in ("compressed_sparse_attention", "heavily_compressed_attention"):
        return _unfinished(keys, layer_type)
    if layer_type not in ("linear_attention", "hybrid", "hybrid_sliding"):
        return ()
    family = keys.model_type
    if family in ("inkling_text", "inkling2_text"):
        return _inkling_states(keys)
    if family == "zaya":
        return _zaya(keys)
    if family == "recurrent_gemma":
        width = int(keys.get("lru_width") or keys.size("hidden_size"))
        return (
            _convolution(keys.size("hidden_size"), int(keys.get("conv1d_width", 4)) - 1),
            _recurrence(width),
        )
    if family == "rwkv":
        hidden = keys.size("hidden_size")
        inner = int(keys.get("attention_hidden_size") or hidden)
        return (State("shift", 2 * hidden), _recurrence(3 * inner))
    if family == "xlstm":
        return _xlstm(keys)
    if family in ("minimax", "minimax_text_01"):
        heads = keys.size("num_attention_heads")
        dim = int(keys.get("head_dim") or keys.size("hidden_size") // heads)
        return (State("recurrent", heads * dim * dim),)
    if family in _DELTA_HEADS:
        return _delta_of_heads(keys)
    if (
        keys.get("linear_num_value_heads")
        or keys.get("linear_key_head_dim")
        or family == "olmo_hybrid"
    ):
        return _delta(keys)
    if family in _MAMBA_1 or (keys.get("mamba_n_heads") is None and keys.get("num_heads") is None):
        return _mamba(keys)
    return _mamba_2(keys)


def _convolution(channels: int, width: int) -> State:
    return State("convolution", channels * width)


def _recurrence(numbers: int) -> State:
    return State("recurrent", numbers, _FP32)


def _mamba(keys: Keys) -> tuple[State, ...]:
    """Mamba: channels of the inner width, each with a state of its own."""
    inner = keys.size("mamba_expand", 2) * keys.size("hidden_size")
    if keys.model_type in ("mamba", "falcon_mamba") and keys.get("intermediate_size"):
        inner = keys.size("intermediate_size")
    return (
        _convolution(inner, keys.size("mamba_d_conv", 4)),
        _recurrence(inner * keys.size("mamba_d_state", 16)),
    )


def _mamba_2(keys: Keys) -> tuple[State, ...]:
    """Mamba 2: heads, and B and C of each group in the same convolution."""
    expanded = int(float(keys.get("mamba_expand", 2)) * keys.size("hidden_size"))
    if keys.model_type == "mamba2":
        heads, dim = keys.size("num_heads"), keys.size("head_dim")
    else:
        heads = keys.size("mamba_n_heads")
        dim = keys.get("mamba_d_head")
        if not isinstance(dim, int) or keys.model_type == "zamba2":  # "auto"
            dim = int(keys.get("mamba_d_ssm") or expanded) // heads
    inner = int(keys.get("mamba_d_ssm") or heads * dim)
    state = keys.size("mamba_d_state", 128)
    groups = keys.size("mamba_n_groups", 1)
    return (
        _convolution(inner + 2 * groups * state, keys.size("mamba_d_conv", 4)),
        _recurrence(heads * dim * state),
    )


def _delta(keys: Keys) -> tuple[State, ...]:
    """Gated delta net: a matrix for each value head, and one convolution for Q, K and V."""
    heads = keys.get("num_attention_heads")
    key_heads = int(keys.get("linear_num_key_heads") or heads)
    value_heads = int(keys.get("linear_num_value_heads") or heads)
    key_dim = int(
        keys.get("linear_key_head_dim") or int(0.75 * keys.size("hidden_size") / key_heads)
    )
    value_dim = int(keys.get("linear_value_head_dim") or 2 * key_dim)
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return (
        _convolution(channels, keys.size("linear_conv_kernel_dim", 4)),
        _recurrence(value_heads * key_dim * value_dim),
    )


def _delta_of_heads(keys: Keys) -> tuple[State, ...]:
    """Kimi's delta attention: Q, K and V of as many heads, of one dim."""
    given = keys.get("linear_attn_config") or {}
    heads = int(given.get("num_heads") or keys.get("linear_num_heads") or 32)
    dim = int(given.get("head_dim") or keys.get("linear_head_dim") or 128)
    width = given.get("short_conv_kernel_size") or keys.get("linear_conv_kernel_dim") or 4
    if keys.model_type == "bailing_hybrid":
        heads = int(keys.written("linear_num_heads") or keys.size("num_attention_heads"))
        dim = int(keys.written("linear_head_dim") or keys.size("head_dim"))
        width = keys.get("short_conv_kernel_size", 4)
    return (_convolution(3 * heads * dim, int(width)), _recurrence(heads * dim * dim))


def _xlstm(keys: Keys) -> tuple[State, ...]:
    """mLSTM: a matrix, a vector and a number for each head."""
    heads, hidden = keys.size("num_heads", 8), keys.size("hidden_size")

    def dim_of(factor: float) -> int:
        return math.ceil(hidden * factor / 64) * 64 // heads

    qk = dim_of(float(keys.get("qk_dim_factor", 0.5)))
    value = dim_of(float(keys.get("v_dim_factor", 1.0)))
    return (State("recurrent", heads * (qk * value + qk + 1)),)


def _inkling_states(keys: Keys) -> tuple[State, ...]:
    """Inkling: short convolutions over K, V, the output of attention and the output of the feed-forward part."""
    width = int(keys.get("conv_kernel_size") or keys.get("sconv_kernel_size") or 4)
    rows = keys.size("num_key_value_heads") * keys.size("head_dim")
    return (State("convolution", 2 * (rows + keys.size("hidden_size")) * width, _FP32),)


def _zaya(keys: Keys) -> tuple[State, ...]:
    """Zaya: a convolution over Q and K, and half of the last token's value."""
    dim = keys.size("head_dim")
    kv_heads = keys.size("num_key_value_heads")
    width = int(keys.get("conv_kernel_size") or 2)
    channels = (keys.size("num_attention_heads") + kv_heads) * dim
    return (_convolution(channels, width), State("recurrent", kv_heads * dim // 2))


def _unfinished(keys: Keys, name: str) -> tuple[State, ...]:
    """DeepSeek V4: tokens of an incomplete compressed row, and those that the next row overlaps."""
    rates = keys.get("compress_rates") or {}
    dim, index = keys.size("head_dim"), keys.size("index_head_dim")
    if name == "heavily_compressed_attention":
        rate = int(keys.get("compress_rate_hca") or rates.get(name) or 128)
        return (State("unfinished rows", 2 * (rate - 1) * dim),)
    rate = int(keys.get("compress_rate_csa") or rates.get(name) or 4)
    return (
        State("unfinished rows", 2 * (rate - 1) * 2 * (dim + index)),
        State("overlap", 2 * rate * (dim + index)),
    )
