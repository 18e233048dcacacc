"""The states that layers keep beside rows: convolutions and recurrences."""

from __future__ import annotations

import math

from numkv.planning.description import State
from numkv.planning.keys import Keys

_FP32 = "float32"
_MAMBA_1 = ("mamba", "falcon_mamba", "jamba", "phi4flash")
_DELTA_HEADS = ("kimi_linear", "bailing_hybrid", "glm5_next_text")


def states_of(keys: Keys, layer_type: str) -> tuple[State, ...]:
    """States of a layer.

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
    Sizes and dtypes are those that transformers keeps: recurrences in float32, convolutions in the model's dtype.
    """
    if layer_type == "conv":
        return (_convolution(keys.size("hidden_size"), int(keys.get("conv_L_cache", 3))),)
    if layer_type in ("compressed_sparse_attention", "heavily_compressed_attention"):
        return _unfinished(keys, layer_type)
    if layer_type not in ("linear_attention", "hybrid", "hybrid_sliding"):
        return ()
    family = keys.model_type
    if family in ("inkling_text", "inkling2_text"):
        return _inkling(keys)
    if family == "zaya":
        return _zaya(keys)
    if family == "recurrent_gemma":
        width = int(keys.get("lru_width") or keys.size("hidden_size"))
        return (
            _convolution(keys.size("hidden_size"), int(keys.get("conv1d_width", 4)) - 1),
            State("recurrent", width, _FP32),
        )
    if family == "rwkv":
        hidden = keys.size("hidden_size")
        inner = int(keys.get("attention_hidden_size") or hidden)
        return (State("shift", 2 * hidden), State("recurrent", 3 * inner, _FP32))
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
    if family == "zamba":
        inner = keys.size("mamba_expand", 2) * keys.size("hidden_size")
        return (
            _convolution(inner, keys.size("mamba_d_conv", 4)),
            _recurrence(inner * keys.size("mamba_d_state", 16)),
        )
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
    """Mamba 2: heads, and B and C of each group behind the same convolution."""
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
        heads = int(keys.said("linear_num_heads") or keys.size("num_attention_heads"))
        dim = int(keys.said("linear_head_dim") or keys.size("head_dim"))
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


def _inkling(keys: Keys) -> tuple[State, ...]:
    """Short convolutions over K, V, what attention gives and what the feed-forward part gives."""
    width = int(keys.get("conv_kernel_size") or keys.get("sconv_kernel_size") or 4)
    rows = keys.size("num_key_value_heads") * keys.size("head_dim")
    return (State("convolution", 2 * (rows + keys.size("hidden_size")) * width, _FP32),)


def _zaya(keys: Keys) -> tuple[State, ...]:
    """A convolution over Q and K, and half of the last token's value."""
    dim = keys.size("head_dim")
    kv_heads = keys.size("num_key_value_heads")
    width = int(keys.get("conv_kernel_size") or 2)
    channels = (keys.size("num_attention_heads") + kv_heads) * dim
    return (_convolution(channels, width), State("recurrent", kv_heads * dim // 2))


def _unfinished(keys: Keys, name: str) -> tuple[State, ...]:
    """DeepSeek V4: tokens that do not fill a compressed row yet, and those that the next one overlaps."""
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
