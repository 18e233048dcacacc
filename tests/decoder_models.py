"""Tiny decoders with random weights, of many families of transformers, and prompts for them."""

import torch
import transformers

VOCABULARY = 64
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GPT = {
    "vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_ROUTED = {
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_OF_ENCODER_DECODERS = {
    "d_model": 64, "encoder_layers": 4, "decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 96,
    "is_decoder": True, "is_encoder_decoder": False,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "num_key_value_heads": 4, **_ROUTED,
}  # fmt: skip
_EXPERTS_OF_KIMI = {"num_experts_per_token": 2, "num_expert_group": 1, "first_k_dense_replace": 4}
_SLIDING_EVERY_OTHER = ["sliding_attention", "full_attention"] * 2

# By family: config class, and what differs from the sizes above.
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "mistral_sliding": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_sliding": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 8, "layer_types": _SLIDING_EVERY_OTHER, "query_pre_attn_scalar": 16},
    ),
    "phi3": ("Phi3Config", {"sliding_window": 9}),
    "phi": ("PhiConfig", {}),
    "gpt_oss": (
        "GptOssConfig",
        dict(head_dim=16, sliding_window=8, layer_types=_SLIDING_EVERY_OTHER, **_EXPERTS),
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": 8, "layer_types": _SLIDING_EVERY_OTHER}),
    "cohere": ("CohereConfig", {}),
    "cohere2": ("Cohere2Config", {"sliding_window": 8, "layer_types": _SLIDING_EVERY_OTHER}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 8}),
    "glm": ("GlmConfig", {"head_dim": 16}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "granite": ("GraniteConfig", {}),
    "mixtral": ("MixtralConfig", dict(sliding_window=8, **_EXPERTS)),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt2": ("GPT2Config", _GPT),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "stablelm": ("StableLmConfig", {}),
    "persimmon": ("PersimmonConfig", {}),
    "nemotron": ("NemotronConfig", {"head_dim": 16}),
    "helium": ("HeliumConfig", {"head_dim": 16}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16}),
    "smollm3": ("SmolLM3Config", {}),
    "exaone4": ("Exaone4Config", {"sliding_window": 8, "layer_types": _SLIDING_EVERY_OTHER}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16}),
    "arcee": ("ArceeConfig", {"head_dim": 16}),
    "llama4": (
        "Llama4TextConfig",
        {
            "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2, "attention_chunk_size": 8,
            "interleave_moe_layer_step": 2, "no_rope_layers": [1, 1, 0, 1],
        },
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "head_dim": 16, "sliding_window": 8, "layer_types": _SLIDING_EVERY_OTHER, "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 8,
            "altup_num_inputs": 2, "activation_sparsity_pattern": None,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "layer_types": _SLIDING_EVERY_OTHER,
            "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "conv_L_cache": 3},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1,
            "use_mamba_kernels": False, "mamba_d_state": 8, "mamba_dt_rank": 8,
        },
    ),
    "bamba": (
        "BambaConfig",
        {
            "attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
            "mamba_chunk_size": 16,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["linear_attention", "full_attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 16,
            "mamba_d_state": 16, "mamba_chunk_size": 16, "num_local_experts": 2, "shared_intermediate_size": 32,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "head_dim": 16, "layers_block_type": ["mamba", "attention", "mlp", "attention"], "mamba_num_heads": 8,
            "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        {
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_d_state": 16, "n_mamba_heads": 8,
            "mamba_headdim": 16, "mamba_ngroups": 1, "chunk_size": 16, "num_mem_blocks": 1,
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "minimax_m2": ("MiniMaxM2Config", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "afmoe": (
        "AfmoeConfig",
        {
            "head_dim": 16, "sliding_window": 8, "moe_intermediate_size": 32, "num_experts": 4,
            "num_experts_per_tok": 2, "num_shared_experts": 1, "layer_types": _SLIDING_EVERY_OTHER,
        },
    ),
    "apertus": ("ApertusConfig", {}),
    "aria_text": ("AriaTextConfig", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    "bart": ("BartConfig", _OF_ENCODER_DECODERS),
    "bert": ("BertConfig", {"is_decoder": True}),
    "biogpt": ("BioGptConfig", {}),
    "bitnet": ("BitNetConfig", {}),
    "dots1": ("Dots1Config", dict(head_dim=16, sliding_window=8, **_ROUTED)),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    ),
    "flex_olmo": ("FlexOlmoConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": ("Glm4MoeConfig", dict(head_dim=16, **_ROUTED)),
    "gpt_bigcode": ("GPTBigCodeConfig", _GPT),
    "granitemoeshared": ("GraniteMoeSharedConfig", dict(shared_intermediate_size=32, **_EXPERTS)),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", {"head_dim": 16}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        },
    ),
    "modernbert_decoder": (
        "ModernBertDecoderConfig",
        {"local_attention": 8, "layer_types": _SLIDING_EVERY_OTHER},
    ),
    "nanochat": ("NanoChatConfig", {}),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        {
            "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        },
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": ("PhimoeConfig", dict(sliding_window=8, **_EXPERTS)),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "vaultgemma": (
        "VaultGemmaConfig",
        {"head_dim": 16, "sliding_window": 8, "layer_types": _SLIDING_EVERY_OTHER, "query_pre_attn_scalar": 16},
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            "head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16,
            "mamba_chunk_size": 16,
        },
    ),
}  # fmt: skip


# Families with latent attention whose latents transformers can store too.
LATENT_FAMILIES = {
    "deepseek_v2": ("DeepseekV2Config", {**_LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3Config", _LATENT),
    "youtu": ("YoutuConfig", _LATENT),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", _LATENT),
    "minicpm3": ("MiniCPM3Config", _LATENT),
    "longcat_flash": (
        "LongcatFlashConfig",
        _LATENT | {
            "head_dim": 8, "num_layers": 2, "ffn_hidden_size": 96, "zero_expert_num": 1, "moe_topk": 2,
            "expert_ffn_hidden_size": 32,
        },
    ),
    "axk1": ("AXK1Config", _LATENT),
    "kimi_linear": (
        "KimiLinearConfig",
        _LATENT | _EXPERTS_OF_KIMI | {"layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "bailing_hybrid": (
        "BailingHybridConfig", _LATENT | _EXPERTS_OF_KIMI | {"layer_group_size": 2},
    ),
}  # fmt: skip
FAMILIES |= LATENT_FAMILIES


def make(family, dtype=torch.float32, **changes):
    """A model of a family in eval mode; sharpened, so that the best token leads."""
    name, different = FAMILIES[family]
    sizes = {} if different.get("n_embd") else _SIZES
    config = getattr(transformers, name)(**{**sizes, **different, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "conv" not in name and "router" not in name:
                weight.normal_(0, 0.12)
            elif "sinks" in name:
                weight.normal_(0, 1)
        head = model.get_output_embeddings().weight
        head.normal_(0, 1)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts(lengths, side="left", seed=0):
    """Token ids and mask of a batch of prompts, padded on one side."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        part = slice(width - length, width) if side == "left" else slice(0, length)
        ids[row, part] = torch.randint(2, VOCABULARY, (length,), generator=generator)
        mask[row, part] = 1
    return {"input_ids": ids, "attention_mask": mask}
