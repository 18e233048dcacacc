"""`numkv.planning` beside transformers: types of layers, defaults, and what caches of tiny models hold."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from decoder_models import FAMILIES as TINY  # noqa: E402
from transformers.cache_utils import get_layer_types_and_kwargs  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from numkv.errors import NotSupported  # noqa: E402
from numkv.planning import needs_of  # noqa: E402

transformers.logging.set_verbosity_error()
CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
OTHERS = {
    **modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
REFUSED = {"blt", "reformer", "xlnet", "pi0"}
CANNOT_BE_MADE = {"gemma4_assistant"}  # of nothing
# Where transformers' function for types of layers does not tell what the model keeps.
OWN_TYPES = {
    "gpt_neo": "its cache keeps all tokens of local layers",
    "rwkv": "a cache of its own",
    "xlstm": "a cache of its own",
    "pp_formulanet": "counts the encoder's layers",
    "gemma4_unified_assistant": "raises an error",
    "unlimited_ocr": "the prompt is kept whole",
    "deepseek_v4": "windows are told by the layers",
}


def written(config):
    """A config as its file has it."""
    return json.loads(json.dumps(config.to_dict(), default=str))


@pytest.mark.parametrize("name", [*CAUSAL, *(n for n in OTHERS if n not in CAUSAL)])
def test_types_and_windows_of_default_configs(name):
    """From the whole file, and from a file that says nothing but the model's type."""
    if name in CANNOT_BE_MADE:
        pytest.skip("transformers cannot make its config of nothing")
    config = CONFIG_MAPPING[name]()
    if name in REFUSED:
        with pytest.raises(NotSupported):
            needs_of(written(config))
        return
    needs = needs_of(written(config))
    assert needs_of({"model_type": name}).layers == needs.layers
    if name in OWN_TYPES:
        return
    types, arguments = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    planned = [
        "dummy" if layer.shares is not None or layer.type == "none" else layer.type
        for layer in needs.layers
    ]
    assert planned == types
    limits = [max((rows.limit or 0 for rows in layer.rows), default=0) for layer in needs.layers]
    assert limits == [given.get("sliding_window") or 0 for given in arguments]


#: Classes that leave the number of layers to a list, or that take any and fill it in otherwise.
LISTED = (
    "nemotron_h",
    "hrm_text",
    "zamba2",
    "gpt_neo",
    "nemo_speechlm",
    "mllama",
    "mllama_text_model",
    "longcat_flash",
    "prophetnet",
)


@pytest.mark.parametrize("count", [5, 12])
@pytest.mark.parametrize(
    "name", [n for n in CAUSAL if n not in REFUSED | CANNOT_BE_MADE | set(OWN_TYPES)]
)
def test_patterns_of_layers_of_other_lengths(name, count):
    cls = type(CONFIG_MAPPING[name]().get_text_config(decoder=True))
    if cls.model_type in LISTED or "num_hidden_layers" in cls.attribute_map:
        pytest.skip("the number of layers goes by another name, or by a list")
    changes = {"num_hidden_layers": count}
    if "num_kv_shared_layers" in cls().to_dict():
        changes["num_kv_shared_layers"] = 0
    config = cls(**changes)
    types, _ = get_layer_types_and_kwargs(config)
    needs = needs_of({"model_type": config.model_type, **changes})
    assert [layer.type for layer in needs.layers] == types


def test_the_table_of_defaults_is_that_of_this_transformers():
    path = Path(__file__).parents[2] / "tools" / "families.py"
    spec = importlib.util.spec_from_file_location("tools_families", path)
    tool = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tool
    spec.loader.exec_module(tool)
    stored = json.loads(tool.FILE.read_text())
    if stored["transformers"] != transformers.__version__:
        pytest.skip(f"the table was made with transformers {stored['transformers']}")
    assert tool.text_of(tool.families()) == tool.FILE.read_text()


# ---------------------------------------------------------------- what caches of tiny models hold

TOKENS = 24
_GROWING = ("keys", "values", "indexer_keys", "idx_keys", "compressed_kv")
_FIXED = ("conv_states", "recurrent_states")
_LAYERS = dict.fromkeys(
    (
        "num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers",
        "num_blocks",
    ),
    4,
)  # fmt: skip
_HEADS = dict.fromkeys(
    (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
        "encoder_attention_heads", "attention_heads",
    ),
    4,
)  # fmt: skip
_WIDTHS = dict.fromkeys(
    (
        "hidden_size", "n_embd", "d_model", "embedding_dim", "emb_dim", "embed_dim", "lru_width",
        "word_embed_proj_dim",
    ),
    64,
)  # fmt: skip
_DIMS = dict.fromkeys(
    (
        "head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim", "mamba_d_head", "mamba_d_state",
        "mamba_head_dim", "ssm_state_size", "state_size", "linear_key_head_dim", "linear_value_head_dim",
        "linear_head_dim", "kv_channels", "d_kv", "dim_head", "d_head", "mamba_chunk_size",
    ),
    16,
)  # fmt: skip
_WINDOWS = dict.fromkeys(
    (
        "sliding_window",
        "sliding_window_size",
        "attention_window_size",
        "attention_chunk_size",
        "window_size",
    ),
    8,
)
_SMALL = {
    **_LAYERS, **_HEADS, **_WIDTHS, **_DIMS, **_WINDOWS, "num_key_value_heads": 2, "vocab_size": 64,
    "intermediate_size": 96, "ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "dim_ff": 96, "d_inner": 96,
    "intermediate_size_mlp": 96, "max_position_embeddings": 512, "n_positions": 512, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "index_n_heads": 2, "index_topk": 4, "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2, "moe_topk": 2,
    "n_group": 1, "topk_group": 1, "shared_expert_intermediate_size": 32, "moe_num_shared_experts": 1,
    "shared_intermediate_size": 32, "mamba_n_heads": 8, "mamba_num_heads": 8, "n_mamba_heads": 2, "mamba_dt_rank": 8,
    "mamba_d_ssm": 128, "use_mamba_kernels": False, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_num_heads": 4, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
}  # fmt: skip
_LINEAR = ["linear_attention", "full_attention"] * 2
_CHANGES = {
    "codegen": {"rotary_dim": 16}, "gptj": {"rotary_dim": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "falcon": {"multi_query": True, "new_decoder_architecture": False},
    "gpt_neo": {"attention_types": [[["global"], 4]]},
    "kimi_linear": {
        "layer_types": _LINEAR, "num_experts_per_token": 2, "num_expert_group": 1, "first_k_dense_replace": 4,
    },
    "bailing_hybrid": {
        "layer_group_size": 2, "num_experts_per_token": 2, "num_expert_group": 1, "first_k_dense_replace": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "zamba": {"layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"]},
    "deepseek_v4": {
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2, "o_groups": 2,
        "o_lora_rank": 16, "num_key_value_heads": 1,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
}  # fmt: skip
#: Families of which no tiny model can be made or run by these sizes, or whose cache is not made of layers.
NOT_MEASURED = {
    "bert-generation", "bigbird_pegasus", "big_bird", "blenderbot", "blenderbot-small", "blt",
    "camembert", "cohere_compass_text", "cpmant", "data2vec-text", "electra", "ernie", "gemma4_assistant",
    "inkling2_text", "marian", "mbart", "megatron-bert", "minimax", "moss_transcribe_diarize",
    "musicgen", "musicgen_melody", "mvp", "openai-gpt", "pegasus", "phi4_multimodal", "plbart", "qwen4_exp",
    "qwen4_exp_text", "recurrent_gemma", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert",
    "roformer", "rwkv", "whisper", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xlstm", "xmod", "bert",
}  # fmt: skip
#: Families whose cache in transformers keeps more than has to be kept, and why.
KEEPS_MORE = {
    "dots3_note": "index keys in float32", "dots3_note_text": "index keys in float32",
}  # fmt: skip
BY_DAY = [
    "llama", "gemma3_text", "gemma4_text", "gemma3n_text", "llama4_text", "deepseek_v3", "deepseek_v32", "jamba",
    "bamba", "qwen3_next", "lfm2", "falcon_h1", "mamba2", "zamba2", "nemotron_h", "mimo_v2_flash",
]  # fmt: skip


def tiny_config(name):
    """A config of a family with small sizes, as those of the other tests have them where they do."""
    default = CONFIG_MAPPING[name]().get_text_config(decoder=True)
    cls = type(default)
    keys = set(default.to_dict()) | set(cls.attribute_map.values())
    given = {k: v for k, v in _SMALL.items() if k in keys and k not in cls.attribute_map}
    if "q_lora_rank" in given and default.q_lora_rank is None:
        del given["q_lora_rank"]
    given |= next((more for kind, more in TINY.values() if kind == cls.__name__), {})
    if "kv_lora_rank" in keys:
        given |= {"head_dim": 8, "num_key_value_heads": 4}
    given |= _CHANGES.get(name, {})
    return cls(**given)


def held_by(layer):
    """Bytes of the rows and of the states in one layer of a cache; a tensor that stands twice counts once."""
    sums = {"rows": 0, "states": 0}
    seen = set()
    for name, value in vars(layer).items():
        found = (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, list)
            else [value]
        )
        part = "rows" if name in _GROWING else "states" if name in _FIXED else None
        for x in found:
            if part and isinstance(x, torch.Tensor) and x.data_ptr() not in seen:
                seen.add(x.data_ptr())
                sums[part] += x.numel() * x.element_size()
    return sums["rows"], sums["states"]


def planned_for(needs, layer):
    """The same by the plan: transformers gives the oldest token of a window back before the next one comes."""
    rows = 0
    for one in layer.rows:
        if not one.of_source:
            tokens = TOKENS if one.limit is None else min(TOKENS, one.limit - 1)
            rows += tokens // one.tokens_per_row * one.heads * (one.dim + one.dim_v) * 2
    states = [s for s in layer.states if s.what in ("convolution", "recurrent")]
    return rows, sum(math.prod((s.numbers, 4 if s.dtype == "float32" else 2)) for s in states)


def _slow(name):
    return pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly)


@pytest.mark.parametrize("name", [_slow(name) for name in CAUSAL if name not in NOT_MEASURED])
def test_a_plan_is_what_the_cache_of_a_tiny_model_holds(name):
    config = tiny_config(name)
    torch.manual_seed(0)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config)
    except ValueError:  # the model with pictures, of which this is the decoder's config
        model = getattr(transformers, CAUSAL[name])(config)
    model = model.eval().to(torch.bfloat16)
    ids = torch.randint(3, 60, (1, TOKENS))
    with torch.no_grad():
        first = model(input_ids=ids[:, :-1], use_cache=True)
        key = "past_key_values" if "past_key_values" in first else "cache_params"
        cache = model(input_ids=ids[:, -1:], use_cache=True, **{key: first[key]})[key]
    needs = needs_of(written(config))
    layers = cache.layers
    assert len(layers) == len(needs.layers)
    held = [held_by(layer) for layer in layers]
    planned = [planned_for(needs, layer) for layer in needs.layers]
    if name in KEEPS_MORE:
        assert all(a[0] >= b[0] for a, b in zip(held, planned, strict=True))
        assert held != planned  # or it belongs into the list no more
    else:
        assert held == planned
