"""The shape of a Qwen3 or Llama model, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numkv.errors import NotSupported, NumkvError


class CheckpointError(NumkvError, ValueError):
    """A checkpoint lacks something, or holds something that does not fit its configuration."""


@dataclass(frozen=True)
class Llama3Scaling:
    """How Llama 3.1 stretches the low rotary frequencies to a longer context.

    Attributes
    ----------
    factor : float
        What frequencies of long wavelength are divided by.
    low_freq_factor, high_freq_factor : float
        Wavelengths above ``original / low`` are divided, those below ``original / high`` are kept,
        and those in between are blended.
    original_max_position_embeddings : int
        Context of the model before stretching.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a decoder; numkv's words, not those of ``config.json``.

    Attributes
    ----------
    architecture : str
        ``"qwen3"`` (norms on every q and k head) or ``"llama"``.
    vocab_size, hidden_size, intermediate_size, num_layers : int
        Sizes of the decoder.
    num_q_heads, num_kv_heads, head_dim : int
        Sizes of its attention.
    max_context : int
        Positions that the model was made for.
    rms_norm_eps, rope_theta : float
        Constants of the norms and of the rotation.
    rope_scaling : Llama3Scaling or None
        How the rotation is stretched.
    tied_embeddings : bool
        Whether the output matrix is the embedding.
    bos_token : int or None
        Token that every text starts with.
    eos_tokens : tuple of int
        Tokens that end a text.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tied_embeddings: bool
    bos_token: int | None
    eos_tokens: tuple[int, ...]

    @property
    def has_qk_norm(self) -> bool:
        """Whether every q and k head is normalised before it is rotated."""
        return self.architecture == "qwen3"

    @classmethod
    def read(cls, directory: Path) -> ModelConfig:
        """Read ``config.json`` (and the end tokens of ``generation_config.json``) in `directory`.

        Parameters
        ----------
        directory : pathlib.Path
            Folder of a checkpoint.

        Returns
        -------
        ModelConfig

        Raises
        ------
        FileNotFoundError
            If there is no ``config.json``.
        CheckpointError
            If an entry is missing or makes no sense.
        NotSupported
            If the model is none that this forward pass computes.
        """
        content = read_json(directory / "config.json")
        generation = directory / "generation_config.json"
        if generation.is_file():
            ends = read_json(generation).get("eos_token_id")
            content = {
                **content,
                "eos_token_id": content.get("eos_token_id") if ends is None else ends,
            }
        return cls.from_dict(content)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> ModelConfig:
        """Make a configuration from the content of a ``config.json``; see `read`.

        Parameters
        ----------
        content : dict
            Entries under their Hugging Face names, in the spelling of any version.

        Returns
        -------
        ModelConfig
        """
        architecture = content.get("model_type")
        if architecture not in ("qwen3", "llama"):
            raise NotSupported(
                f"config.json: model_type {architecture!r} is not supported, "
                "only 'qwen3' and 'llama'"
            )
        _refuse_variants(content)
        num_q_heads = _positive_int(content, "num_attention_heads")
        hidden_size = _positive_int(content, "hidden_size")
        default_head_dim = 128 if architecture == "qwen3" else hidden_size // num_q_heads
        # Newer files keep theta and the scaling together in rope_parameters, older ones apart.
        rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
        ends = content.get("eos_token_id")
        config = cls(
            architecture=architecture,
            vocab_size=_positive_int(content, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive_int(content, "intermediate_size"),
            num_layers=_positive_int(content, "num_hidden_layers"),
            num_q_heads=num_q_heads,
            num_kv_heads=_positive_int(content, "num_key_value_heads", num_q_heads),
            head_dim=_positive_int(content, "head_dim", default_head_dim),
            max_context=_positive_int(content, "max_position_embeddings"),
            rms_norm_eps=float(content.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta", content.get("rope_theta", 10000.0))),
            rope_scaling=_rope_scaling(rope),
            tied_embeddings=bool(content.get("tie_word_embeddings", False)),
            bos_token=content.get("bos_token_id"),
            eos_tokens=tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
        )
        if config.num_q_heads % config.num_kv_heads:
            raise CheckpointError(
                f"config.json: {config.num_q_heads} attention heads do not share "
                f"{config.num_kv_heads} key-value heads evenly"
            )
        if config.head_dim % 2:
            raise CheckpointError(
                f"config.json: head_dim {config.head_dim} is odd; rotation needs pairs"
            )
        return config


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object.

    Parameters
    ----------
    path : pathlib.Path
        The file.

    Returns
    -------
    dict

    Raises
    ------
    CheckpointError
        If the file is no JSON, or no object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected an object, got {type(content).__name__}")
    return content


def _positive_int(content: dict[str, Any], key: str, default: int | None = None) -> int:
    value = content.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json: {key} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"config.json: {key}: expected a positive integer, got {value!r}")
    return value


def _refuse_variants(content: dict[str, Any]) -> None:
    """Raise `NotSupported` for members of the families that the forward pass does not compute."""
    for key in ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config"):
        if content.get(key):
            raise NotSupported(f"config.json: {key} = {content[key]!r} is not supported")
    activation = content.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise NotSupported(f"config.json: hidden_act {activation!r} is not supported, only 'silu'")


def _rope_scaling(rope: dict[str, Any]) -> Llama3Scaling | None:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotSupported("config.json: a partial_rotary_factor other than 1 is not supported")
    if rope_type == "default":
        return None
    if rope_type != "llama3":
        raise NotSupported(
            f"config.json: rope scaling {rope_type!r} is not supported, only 'default' and 'llama3'"
        )
    try:
        return Llama3Scaling(
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise CheckpointError(f"config.json: rope scaling 'llama3' lacks {error}") from None
