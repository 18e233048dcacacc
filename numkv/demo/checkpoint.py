"""Reads the weights of a Qwen3 or Llama checkpoint in Hugging Face format into float32 arrays.

A checkpoint is a folder with ``config.json`` and either ``model.safetensors`` or several files
listed in ``model.safetensors.index.json``. Tensors may be stored as bfloat16, float16, float32 or
float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from numkv.errors import NotSupported, NumkvError
from numkv.files.container import DTYPES, Entry, read_header
from numkv.planning.keys import read_json
from numkv.snapshots.fields import Damaged


class CheckpointError(NumkvError, ValueError):
    """A checkpoint is incomplete, or has parts that do not fit its configuration."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling of low rotary frequencies to a longer context.

    Attributes
    ----------
    factor : float
        Divisor of frequencies of long wavelength.
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
        The model's context length.
    rms_norm_eps, rope_theta : float
        Constants of the norms and of RoPE.
    rope_scaling : Llama3Scaling or None
        Scaling of RoPE.
    tied_embeddings : bool
        Whether the output matrix is the embedding.
    bos_token : int or None
        First token of every text.
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
            If an entry is missing or invalid.
        NotSupported
            If this forward pass does not support the model.
        """
        content = read_json(directory / "config.json", CheckpointError)
        generation = directory / "generation_config.json"
        if generation.is_file():
            ends = read_json(generation, CheckpointError).get("eos_token_id")
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
    """Raise `NotSupported` for variants of the families that the forward pass does not support."""
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


Array = NDArray[np.float32]
Progress = Callable[[int, int], None]


def no_progress(done: int, total: int) -> None:
    """Report nothing: what functions call that are given no function to report their progress."""


_FLOATS = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("<f2")} | {
    name: DTYPES[name] for name in ("F32", "F64")
}
#: Tensors that may stay unused.
_OTHERS = {name: np.dtype(x) for name, x in {
    "BOOL": "u1", "I16": "<i2", "U32": "<u4", "U64": "<u8", "F8_E4M3": "u1", "F8_E5M2": "u1",
}.items()}  # fmt: skip


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one decoder layer; matrices are ``(outputs, inputs)``.

    Attributes
    ----------
    input_norm, post_norm : ndarray
        Scales ``(hidden_size,)`` of the norms before attention and before the feed-forward network.
    qkv : ndarray
        ``((num_q_heads + 2 * num_kv_heads) * head_dim, hidden_size)``: the projections of q, k and
        v in one matrix.
    q_norm, k_norm : ndarray or None
        Scales ``(head_dim,)`` of the norms of every head (Qwen3).
    o : ndarray
        ``(hidden_size, num_q_heads * head_dim)``.
    gate_up : ndarray
        ``(2 * intermediate_size, hidden_size)``: the gate's rows, then the up projection's.
    down : ndarray
        ``(hidden_size, intermediate_size)``.
    """

    input_norm: Array
    qkv: Array
    q_norm: Array | None
    k_norm: Array | None
    o: Array
    post_norm: Array
    gate_up: Array
    down: Array


@dataclass(frozen=True)
class Weights:
    """All weights of a decoder.

    Attributes
    ----------
    embedding : ndarray
        ``(vocab_size, hidden_size)``.
    layers : tuple of LayerWeights
        All layers, in order.
    norm : ndarray
        Scales ``(hidden_size,)`` of the last norm.
    output : ndarray
        ``(vocab_size, hidden_size)``; the embedding itself if the two are tied.
    """

    embedding: Array
    layers: tuple[LayerWeights, ...]
    norm: Array
    output: Array

    @property
    def num_parameters(self) -> int:
        """Numbers in all weights, a tied matrix counted once."""
        arrays = [self.embedding, self.norm]
        if self.output is not self.embedding:
            arrays.append(self.output)
        arrays += [a for layer in self.layers for a in vars(layer).values() if a is not None]
        return sum(a.size for a in arrays)


class _TensorFiles:
    """The tensors of a folder by name; each is taken once, and `finish` rejects unused ones."""

    def __init__(self, directory: Path, progress: Progress) -> None:
        index = directory / "model.safetensors.index.json"
        single = directory / "model.safetensors"
        if single.is_file():
            names = [single.name]
        elif index.is_file():
            weight_map = read_json(index, CheckpointError).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{index}: weight_map is missing")
            names = sorted(set(weight_map.values()))
        else:
            raise FileNotFoundError(f"{directory}: neither {single.name} nor {index.name} is there")
        self._owner: dict[str, tuple[Path, int, Entry]] = {}
        for name in names:
            path = directory / name
            if not path.is_file():
                raise FileNotFoundError(f"{path}: this shard of the checkpoint is missing")
            try:
                with path.open("rb") as file:
                    found = read_header(file.fileno(), DTYPES | _OTHERS | _FLOATS)
            except Damaged as error:
                raise CheckpointError(f"{path}: not a safetensors file ({error})") from None
            for tensor, entry in found.entries.items():
                self._owner[tensor] = path, found.data + entry.begin, entry
        self._total = len(self._owner)
        self._progress = progress

    def take(self, name: str, shape: tuple[int, ...], out: Array | None = None) -> Array:
        """Read tensor `name` as float32, into `out` if given."""
        if name not in self._owner:
            raise CheckpointError(f"checkpoint: tensor {name} is missing")
        path, begin, stored = self._owner.pop(name)
        if stored.shape != shape:
            raise CheckpointError(
                f"checkpoint: tensor {name}: expected shape {shape}, got {stored.shape}"
            )
        if stored.dtype not in _FLOATS.values():
            raise CheckpointError(
                f"checkpoint: tensor {name}: expected a float dtype, got {stored.dtype}"
            )
        if out is None:
            out = np.empty(shape, np.float32)
        content = np.fromfile(path, np.uint8, stored.end - stored.begin, offset=begin)
        out[...] = content.view(stored.dtype).reshape(shape)
        self._progress(self._total - len(self._owner), self._total)
        return out

    def take_stacked(self, names: list[str], rows: list[int], columns: int) -> Array:
        """Read several matrices of `columns` columns as one, the rows of each below the other's."""
        stacked = np.empty((sum(rows), columns), np.float32)
        begin = 0
        for name, count in zip(names, rows, strict=True):
            self.take(name, (count, columns), out=stacked[begin : begin + count])
            begin += count
        return stacked

    def finish(self, tied: bool) -> None:
        """Raise an error if a relevant tensor was not taken."""
        left = sorted(
            name
            for name in self._owner
            if not name.endswith("rotary_emb.inv_freq") and not (tied and name == "lm_head.weight")
        )
        if left:
            raise CheckpointError(
                f"checkpoint: {len(left)} tensors have no place in this architecture, "
                f"{left[0]} among them"
            )


def load_weights(directory: Path, config: ModelConfig, progress: Progress = no_progress) -> Weights:
    """Read the weights of a checkpoint.

    Parameters
    ----------
    directory : pathlib.Path
        Folder of the checkpoint.
    config : ModelConfig
        Its configuration, which every tensor is checked against.
    progress : callable, optional
        Called with the number of tensors read and their total.

    Returns
    -------
    Weights
        Everything in float32.

    Raises
    ------
    FileNotFoundError
        If a file is missing.
    CheckpointError
        If a tensor is missing, of another shape, or has no place in the architecture.
    """
    files = _TensorFiles(directory, progress)
    table = (config.vocab_size, config.hidden_size)
    embedding = files.take("model.embed_tokens.weight", table)
    layers = tuple(
        _load_layer(files, config, f"model.layers.{i}.") for i in range(config.num_layers)
    )
    norm = files.take("model.norm.weight", (config.hidden_size,))
    output = embedding if config.tied_embeddings else files.take("lm_head.weight", table)
    files.finish(config.tied_embeddings)
    return Weights(embedding, layers, norm, output)


def _load_layer(files: _TensorFiles, config: ModelConfig, prefix: str) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    q_norm = k_norm = None
    if config.has_qk_norm:
        q_norm = files.take(prefix + "self_attn.q_norm.weight", (config.head_dim,))
        k_norm = files.take(prefix + "self_attn.k_norm.weight", (config.head_dim,))
    qkv_names = [f"{prefix}self_attn.{x}_proj.weight" for x in "qkv"]
    gate_up_names = [f"{prefix}mlp.{x}_proj.weight" for x in ("gate", "up")]
    return LayerWeights(
        input_norm=files.take(prefix + "input_layernorm.weight", (hidden,)),
        qkv=files.take_stacked(qkv_names, [q_rows, kv_rows, kv_rows], hidden),
        q_norm=q_norm,
        k_norm=k_norm,
        o=files.take(prefix + "self_attn.o_proj.weight", (hidden, q_rows)),
        post_norm=files.take(prefix + "post_attention_layernorm.weight", (hidden,)),
        gate_up=files.take_stacked(gate_up_names, [inner, inner], hidden),
        down=files.take(prefix + "mlp.down_proj.weight", (hidden, inner)),
    )
