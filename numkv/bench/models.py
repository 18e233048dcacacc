"""Models with random weights, made from a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from numkv.errors import NotSupported

#: Config class and sizes. The second has 4 layers with the attention of a model of 8 billion weights, and little else,
#: so that attention dominates a step.
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-0.5b": (
        "Qwen2Config",
        {
            "num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
            "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True, "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
        },
    ),
    "8b": (
        "LlamaConfig",
        {
            "num_hidden_layers": 4, "hidden_size": 4096, "intermediate_size": 512, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 1000, "rope_theta": 5e5,
        },
    ),
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def config_of(model: str, layers: int | None = None) -> Any:
    """Return the config of a preset, or of a ``config.json`` or the folder it is in.

    Parameters
    ----------
    model : str
        Name or path.
    layers : int, optional
        Number of layers, if it differs from the config's.

    Raises
    ------
    NotSupported
        If transformers cannot read the config.
    OSError
        If the file does not exist.
    """
    if model in PRESETS:
        name, sizes = PRESETS[model]
        config = getattr(transformers, name)(**sizes)
    else:
        path = Path(model).expanduser()
        path = path / "config.json" if path.is_dir() else path
        path.stat()
        try:
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        except Exception as error:  # of whichever of its libraries met the damage
            reason = str(error).strip().split("\n")[0]
            raise NotSupported(
                f"{path}: no config that transformers can read ({reason})"
            ) from error
    text = config.get_text_config(decoder=True)
    if layers is not None:
        text.num_hidden_layers = min(layers, text.num_hidden_layers)
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[: text.num_hidden_layers]
    return text


def build(config: Any, dtype: str, seed: int) -> Any:
    """Return a model with random weights, which are equal for equal seeds."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    return model.eval().requires_grad_(False)


def num_parameters(model: Any) -> int:
    """Return the number of weights of a model, tied ones counted once."""
    return sum(p.numel() for p in model.parameters())


def num_kv_heads(config: Any) -> int:
    """Return the number of kv heads; by default that of query heads."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def head_dim(config: Any) -> int:
    """Return the elements of a row of K; by default the hidden size by the number of heads."""
    found = getattr(config, "head_dim", None)
    return int(found or config.hidden_size // config.num_attention_heads)
