"""The entries of a `config.json`, found under the names and in the places that families use."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from numkv.errors import NumkvError


class ConfigError(NumkvError, ValueError):
    """A config that cannot be read, or lacks the sizes of a model's cache."""


# Names of an entry in the families; names that only decoders have come first.
_NAMES = {
    "num_hidden_layers": (
        "decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers",
        "num_blocks", "num_transformer_layers", "nlayers",
    ),
    "num_attention_heads": (
        "decoder_attention_heads", "num_decoder_attention_heads", "num_attention_heads", "n_head", "n_heads",
        "num_heads", "attention_heads", "num_query_heads",
    ),
    "hidden_size": ("hidden_size", "d_model", "n_embd", "embed_dim", "emb_dim", "embedding_dim", "model_dim"),
    "head_dim": (
        "head_dim", "attention_head_dim", "d_kv", "kv_channels", "dim_head", "d_head", "attention_head_size",
        "size_per_head",
    ),
    "num_key_value_heads": (
        "num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "kv_n_heads", "num_attention_groups",
        "multi_query_group_num", "num_query_groups",
    ),
    "sliding_window": ("sliding_window", "sliding_window_size", "attention_window_size", "window_size"),
    "max_position_embeddings": (
        "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx",
        "max_target_positions",
    ),
    "layer_types": ("layer_types", "layers_block_type"),
    "mamba_d_conv": ("mamba_d_conv", "conv_kernel", "d_conv"),
    "mamba_d_state": ("mamba_d_state", "state_size", "ssm_state_size", "d_state"),
    "mamba_expand": ("mamba_expand", "expand"),
    "mamba_n_heads": ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"),
    "mamba_d_head": ("mamba_d_head", "mamba_head_dim", "mamba_headdim"),
    "mamba_n_groups": ("mamba_n_groups", "mamba_ngroups", "n_groups"),
}  # fmt: skip

# Entries with the decoder's config, in models that also read images or sound.
_INSIDE = (
    "text_config", "llm_config", "language_config", "lm_config", "language_model_config", "text_model_config",
    "decoder", "generator", "decoder_config",
)  # fmt: skip
_OUTER = ("thinker_config",)  # which contain a decoder's config again
_SHARED = ("dtype", "torch_dtype", "is_encoder_decoder")  # found in the outer config

_SUSPECT = re.compile(
    r"slid|window|chunk|mamba|ssm|state_size|conv|lora_rank|latent|^index|_kv|kv_|layer_type|block_type|block_config|pattern|"
    r"period|interval|linear_|recurrent|local|global|compress|hybrid|cross_att|attn_layer|attention_layer|layer_ids|sparse_att|"
    r"per_layer|yoco|share|memory|landmark|sink|attn_type|attention_type|num_heads_per"
)
_HARMLESS = re.compile(
    r"drop|init|norm|bias|rope|rotary|moe|mlp|expert|ffn|chunk_size_feed_forward|vision|audio|image|token_id|loss|"
    r"max_window_layers|use_cache|quant|tie_|dtype|_eps|local_rank|kv_cache|embedding|parallel|input_layernorm"
)


_MOST = 2**40  # of anything: what is more is no size
MOST_LAYERS = 100_000
# Families without a class in transformers; their files have all entries.
_OTHERS = ("deci", "nemotron_nas", "openelm", "phi4flash")


def is_suspect(name: str) -> bool:
    """Return whether an entry of this name may mean that a layer stores other rows than K and V of every token."""
    return bool(_SUSPECT.search(name) and not _HARMLESS.search(name) and not name.startswith("_"))


@functools.cache
def _families() -> Any:
    """Return the defaults of transformers' config classes, by `model_type`; made by ``python -m tools.families``."""
    return json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))


class Keys:
    """A decoder's entries, with the defaults of its family.

    Parameters
    ----------
    content : mapping
        Entries of the file.
    where : str
        Name of the file in errors.
    filled : mapping, optional
        Defaults of the outer model, where they differ from those of the decoder's family.

    Attributes
    ----------
    model_type : str
        The family; "" if the file does not name one.
    known : bool
        Whether the defaults of the family are known.
    """

    def __init__(
        self, content: Mapping[str, Any], where: str, filled: Mapping[str, Any] | None = None
    ) -> None:
        self._content = dict(content)
        self._where = where
        self._seen: set[str] = set()
        self.model_type = str(content.get("model_type") or "").replace("-", "_")
        defaults = _families()["families"].get(self.model_type)
        self.known = defaults is not None or self.model_type in _OTHERS
        self._defaults: dict[str, Any] = {**(defaults or {}), **(filled or {})}

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry under any of its names, or its family's default.

        Parameters
        ----------
        name : str
            Its present name.
        default : object
            Value for an entry that is missing or None.

        Returns
        -------
        object
        """
        names = _NAMES.get(name, (name,))
        self._seen.update(names)
        for source in (self._content, self._defaults):
            found = [source[one] for one in names if one in source]
            if found:  # null in the file overrides the default
                return next((value for value in found if value is not None), default)
        return default

    def written(self, name: str) -> Any:
        """Return an entry of the file under exactly this name, or None."""
        self._seen.add(name)
        return self._content.get(name)

    def size(self, name: str, default: int | None = None) -> int:
        """Return an entry that is a positive integer.

        Parameters
        ----------
        name : str
            Its present name.
        default : int, optional
            Value for a missing entry.

        Returns
        -------
        int

        Raises
        ------
        ConfigError
            If it is no positive integer.
        """
        found = self.get(name, default)
        if isinstance(found, bool) or not isinstance(found, int) or not 0 < found <= _MOST:
            raise self.error(f"{name}: expected a positive integer, got {found!r}")
        return found

    def num_layers(self) -> int:
        """Return the number of layers.

        Returns
        -------
        int

        Raises
        ------
        ConfigError
            If it is no positive integer, or more than `MOST_LAYERS`.
        """
        n = self.size("num_hidden_layers")
        self.check_layers(n)
        return n

    def check_layers(self, n: int) -> None:
        """Refuse more than `MOST_LAYERS` layers, whichever entries they come from."""
        if n > MOST_LAYERS:
            raise self.error(f"num_hidden_layers: expected at most {MOST_LAYERS}, got {n}")

    def peek(self, name: str) -> Any:
        """Return an entry of the file under exactly this name, without marking it as read."""
        return self._content.get(name)

    def error(self, what: str) -> ConfigError:
        """Return an error that names the file."""
        return ConfigError(f"{self._where}: {what}")

    def changed(self, changes: Mapping[str, Any]) -> Keys:
        """Return a copy with other entries, such as those of one layer; both share the record of read entries."""
        other = Keys({**self._content, **changes}, self._where)
        other._seen, other._defaults = self._seen, self._defaults
        return other

    def not_understood(self) -> Iterator[str]:
        """Yield names of unread entries that may mean that a layer stores other rows."""
        for name, value in self._content.items():
            if value and name not in self._seen and name not in self._defaults and is_suspect(name):
                yield name


def open_config(config: str | Path | Mapping[str, Any]) -> tuple[Keys, Mapping[str, Any]]:
    """Read a config, and find the decoder in it.

    Parameters
    ----------
    config : path or mapping
        A ``config.json``, the folder it is in, or its content.

    Returns
    -------
    keys : Keys
        The decoder's entries.
    outer : mapping
        The content of the whole file.

    Raises
    ------
    ConfigError
        If it is no config.
    OSError
        If the file does not exist.
    """
    if isinstance(config, Mapping):
        where, outer = "config", config
    else:
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        where, outer = str(path), read_json(path)
    content: Mapping[str, Any] = outer
    filled: dict[str, Any] = {}
    while inside := next(
        (n for n in (*_OUTER, *_INSIDE) if isinstance(content.get(n), Mapping)), None
    ):
        kind, more = _inside(content)
        shared = {n: more[n] for n in _SHARED if n in more}
        shared |= {n: content[n] for n in _SHARED if content.get(n) is not None}
        content = {"model_type": kind, **shared, **content[inside]}
        content = {**content, "model_type": content["model_type"] or kind}
    kind, more = _inside(content)
    # A flat file of a model whose class now has an inner decoder.
    if content is outer and kind is not None:
        content, filled = {**content, "model_type": kind}, more
    return Keys(content, where, filled), outer


def _inside(content: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return the family of a model's inner decoder, and the model's defaults for it."""
    name = str(content.get("model_type") or "").replace("-", "_")
    kind, more = _families()["inside"].get(name, (None, {}))
    return kind, more


def read_json(path: Path, refusal: type[NumkvError] = ConfigError) -> dict[str, Any]:
    """Read a JSON file that must contain an object.

    Parameters
    ----------
    path : pathlib.Path
        The file.
    refusal : type of NumkvError
        Class of the error for a file that is not a JSON object.

    Returns
    -------
    dict
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise refusal(f"{path}: not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise refusal(f"{path}: expected an object, got {type(found).__name__}")
    return found
