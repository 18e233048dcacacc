"""Write the defaults of transformers' config classes, for `numkv.planning`.

``python -m tools.families`` writes ``numkv/planning/families.json`` from the installed transformers. By `model_type` it
has the default of each entry that concerns a cache (null without one), and the inner decoder of models that also read
images or sound. tests/transformers_models/test_plans.py compares the file with transformers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import warnings
from pathlib import Path
from typing import Any

from numkv.planning.keys import is_suspect

FILE = Path(__file__).resolve().parents[1] / "numkv" / "planning" / "families.json"

_CONCERNS = re.compile(
    r"head|kv|layer|slid|window|chunk|mamba|conv|state|ssm|lora_rank|index|period|pattern|block|hidden_size|d_model|n_embd|"
    r"embed|emb_dim|lru|shar|interval|expand|local|global|compress|width|^d_inner|^intermediate_size$|attn_type|attention_types|"
    r"_factor$|group|_cycles|alibi|new_decoder|multi_query|decoder|attn_config|ple_|ngram|cross_attention|attention_k_eq|is_causal|mtp"
)
_NOT = re.compile(
    r"drop|init|norm|bias|^rope|rope_(?!head)|rotary|moe|mlp|expert|ffn|feed_forward|vision|audio|image|token|router|multiplier|"
    r"output_|vocab|tie_|problem|label|max_pos|partial|a_log|dt_|time_step|encoder_hash|speech|t2u|scaling|_act"
)


def _plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, (bool, int, float, str))
        or (
            isinstance(value, (list, tuple, dict))
            and len(value) <= 12
            and "architectures" not in value
        )
    )


def differing(decoder: Any) -> dict[str, Any]:
    """Return a model's defaults for its inner decoder, where they differ from the decoder's class."""
    own, filled = decoder.to_dict(), defaults_of(type(decoder))
    found = {name: own[name] for name in filled if name in own and own[name] != filled[name]}
    types = found.pop("layer_types", None)
    count = (
        {"num_hidden_layers": found["num_hidden_layers"]} if "num_hidden_layers" in found else {}
    )
    if types is not None and types != getattr(type(decoder)(**count), "layer_types", None):
        found["layer_types"] = types
    return found


def defaults_of(cls: Any) -> dict[str, Any]:
    """Return the defaults of a class, before it computes entries from others."""
    found = {}
    for field in dataclasses.fields(cls):
        concerns = _CONCERNS.search(field.name) and not _NOT.search(field.name)
        if not concerns and field.name != "attn_config":
            if is_suspect(field.name):  # known, but never read
                found[field.name] = None
            continue
        default = field.default
        if default is dataclasses.MISSING:
            default = (
                None if field.default_factory is dataclasses.MISSING else field.default_factory()
            )
        if isinstance(default, (list, tuple)):
            default = list(default)
        found[field.name] = default if _plain(default) else None
    with contextlib.suppress(Exception):  # a class that needs arguments
        found |= {name: None for name in cls().to_dict() if name not in found and is_suspect(name)}
    return dict(sorted(found.items()))


def families() -> dict[str, Any]:
    """Return the table."""
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    names: dict[str, None] = {}
    for mapping in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ"):
        names |= dict.fromkeys(getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES"))
    found: dict[str, Any] = {}
    inside = {}
    for name in names:
        outer = CONFIG_MAPPING[name]
        try:
            whole = outer()
            made = whole.get_text_config(decoder=True)
            decoder = type(made)
        except Exception:  # it needs arguments: use its own entries
            made, decoder = None, outer
        kind = decoder.model_type.replace("-", "_")
        found[kind] = defaults_of(decoder)
        if made is not None and (decoder is not outer or name != outer.model_type):
            more = differing(made) if decoder is not outer else {}
            if whole.is_encoder_decoder and decoder is not outer:
                more["is_encoder_decoder"] = True
            inside[name.replace("-", "_")] = [kind, dict(sorted(more.items()))]
    return {
        "transformers": transformers.__version__,
        "families": dict(sorted(found.items())),
        "inside": dict(sorted(inside.items())),
    }


def text_of(table: dict[str, Any]) -> str:
    """Return the JSON text with one line for each family."""
    lines = [f'{{"transformers": {json.dumps(table["transformers"])},']
    for part in ("families", "inside"):
        rows = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in table[part].items()]
        lines.append(
            f'"{part}": {{\n' + ",\n".join(rows) + ("\n}," if part == "families" else "\n}}")
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(text_of(families()), encoding="utf-8")
