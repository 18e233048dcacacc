"""What models keep, family by family: configs as their files have them, and facts of the models worked out by hand."""

from collections import Counter

from walked import each

from numkv.planning import needs_of

LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
GPT = {"n_embd": 768, "n_head": 12, "n_layer": 12}
SLIDES, FULL = "sliding_attention", "full_attention"


def sizes(layers, heads, kv_heads, hidden, **more):
    return {
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "hidden_size": hidden, **more,
    }  # fmt: skip


# Name: model_type, other entries, {(kv heads, dim of K, dim of V, limit): layers}, and of the rest what there is:
# float32 numbers of states, numbers in the model's dtype, layers that share another's rows, rows of another text.
FAMILIES = {
    "llama 3.1 8b": ("llama", sizes(32, 32, 8, 4096), {(8, 128, 128, None): 32}),
    "llama 2 7b": (
        "llama",
        {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096},
        {(32, 128, 128, None): 32},
    ),
    "mistral 7b v0.1": ("mistral", sizes(32, 32, 8, 4096, sliding_window=4096), {(8, 128, 128, 4096): 32}),
    "mistral 7b v0.3": ("mistral", sizes(32, 32, 8, 4096, sliding_window=None), {(8, 128, 128, None): 32}),
    "mixtral": ("mixtral", sizes(32, 32, 8, 4096, sliding_window=None), {(8, 128, 128, None): 32}),
    "qwen2 0.5b": (
        "qwen2",
        sizes(24, 14, 2, 896, use_sliding_window=False, sliding_window=32768, max_window_layers=24),
        {(2, 64, 64, None): 24},
    ),
    "qwen2 with windows from layer 20 on": (
        "qwen2",
        sizes(24, 14, 2, 896, use_sliding_window=True, sliding_window=128, max_window_layers=20),
        {(2, 64, 64, None): 20, (2, 64, 64, 128): 4},
    ),
    "qwen3 0.6b": ("qwen3", sizes(28, 16, 8, 1024, head_dim=128), {(8, 128, 128, None): 28}),
    "qwen3 30b a3b": ("qwen3_moe", sizes(48, 32, 4, 2048, head_dim=128), {(4, 128, 128, None): 48}),
    "gemma 2b": ("gemma", sizes(18, 8, 1, 2048, head_dim=256), {(1, 256, 256, None): 18}),
    "gemma 2 2b": (
        "gemma2",
        sizes(26, 8, 4, 2304, head_dim=256, sliding_window=4096),
        {(4, 256, 256, 4096): 13, (4, 256, 256, None): 13},
    ),
    "gemma 3 4b, of whose decoder the file says little": (
        "gemma3",
        {"text_config": {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}},
        {(4, 256, 256, 1024): 29, (4, 256, 256, None): 5},
    ),
    "gemma 3 1b": (
        "gemma3_text",
        sizes(26, 4, 1, 1152, head_dim=256, sliding_window=512, sliding_window_pattern=6),
        {(1, 256, 256, 512): 22, (1, 256, 256, None): 4},
    ),
    "gemma 3n e2b": (
        "gemma3n",
        {"text_config": sizes(30, 8, 2, 2048, head_dim=256, sliding_window=512, num_kv_shared_layers=10)},
        {(2, 256, 256, 512): 16, (2, 256, 256, None): 4},
        {"shared": 10},
    ),
    "gemma 4": (
        "gemma4_text",
        sizes(12, 8, 4, 2304, head_dim=256, global_head_dim=512, num_global_key_value_heads=2, attention_k_eq_v=True,
              sliding_window=512, num_kv_shared_layers=0),
        {(4, 256, 256, 512): 10, (2, 512, 512, None): 2},
    ),
    "gpt-oss 20b": (
        "gpt_oss",
        sizes(24, 64, 8, 2880, head_dim=64, sliding_window=128, layer_types=[SLIDES, FULL] * 12),
        {(8, 64, 64, 128): 12, (8, 64, 64, None): 12},
    ),
    "llama 4 scout": (
        "llama4",
        {"text_config": sizes(48, 40, 8, 5120, head_dim=128, attention_chunk_size=8192,
                              no_rope_layers=[1, 1, 1, 0] * 12)},
        {(8, 128, 128, 8192): 36, (8, 128, 128, None): 12},
    ),
    "cohere 2": (
        "cohere2",
        sizes(32, 32, 8, 4096, sliding_window=4096, sliding_window_pattern=4),
        {(8, 128, 128, 4096): 24, (8, 128, 128, None): 8},
    ),
    "olmo 3": (
        "olmo3",
        sizes(32, 32, 32, 4096, sliding_window=4096),
        {(32, 128, 128, 4096): 24, (32, 128, 128, None): 8},
    ),
    "exaone 4 32b": (
        "exaone4",
        sizes(64, 40, 8, 5120, head_dim=128, sliding_window=4096, sliding_window_pattern="LLLG"),
        {(8, 128, 128, 4096): 48, (8, 128, 128, None): 16},
    ),
    "phi 3 mini": ("phi3", sizes(32, 32, 32, 3072, sliding_window=2047), {(32, 96, 96, 2047): 32}),
    "starcoder 2": ("starcoder2", sizes(30, 24, 2, 3072, sliding_window=4096), {(2, 128, 128, 4096): 30}),
    "smollm 3": (
        "smollm3",
        sizes(36, 16, 4, 2048, use_sliding_window=False, sliding_window=None),
        {(4, 128, 128, None): 36},
    ),
    "gpt 2": ("gpt2", GPT, {(12, 64, 64, None): 12}),
    "starcoder, one kv head": (
        "gpt_bigcode",
        {"n_embd": 6144, "n_head": 48, "n_layer": 40, "multi_query": True},
        {(1, 128, 128, None): 40},
    ),
    "falcon 7b": (
        "falcon",
        {"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "multi_query": True},
        {(1, 64, 64, None): 32},
    ),
    "falcon 40b": (
        "falcon",
        {"hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8, "num_hidden_layers": 60,
            "new_decoder_architecture": True},
        {(8, 64, 64, None): 60},
    ),
    "bloom": ("bloom", {"hidden_size": 1024, "n_head": 16, "n_layer": 24}, {(16, 64, 64, None): 24}),
    "mpt": ("mpt", {"d_model": 4096, "n_heads": 32, "n_layers": 32}, {(32, 128, 128, None): 32}),
    "dbrx": (
        "dbrx",
        {"d_model": 6144, "n_heads": 48, "n_layers": 40, "attn_config": {"kv_n_heads": 8}},
        {(8, 128, 128, None): 40},
    ),
    "gpt neo": (
        "gpt_neo",
        {"hidden_size": 2048, "num_heads": 16, "num_layers": 24, "window_size": 256, "attention_types": [[["global",
            "local"], 12]]},
        {(16, 128, 128, None): 12, (16, 128, 128, 256): 12},
    ),
    "deepseek v3": ("deepseek_v3", sizes(61, 128, 128, 7168, **LATENT), {(1, 576, 0, None): 61}),
    "kimi k2": ("deepseek_v3", sizes(61, 64, 64, 7168, **LATENT), {(1, 576, 0, None): 61}),
    "minicpm 3": (
        "minicpm3",
        sizes(62, 40, 40, 2560, kv_lora_rank=256, qk_rope_head_dim=32, qk_nope_head_dim=64),
        {(1, 288, 0, None): 62},
    ),
    "deepseek v3.2": (
        "deepseek_v32",
        sizes(61, 128, 128, 7168, index_head_dim=128, index_n_heads=64, **LATENT),
        {(1, 576, 0, None): 61, (1, 128, 0, None): 61},
    ),
    "longcat flash: two attentions a layer": (
        "longcat_flash",
        {"num_layers": 28, "hidden_size": 6144, "num_attention_heads": 64, **LATENT},
        {(1, 576, 0, None): 56},
    ),
    "mimo v2 flash": (
        "mimo_v2_flash",
        sizes(12, 64, 4, 4096, head_dim=192, v_head_dim=128, sliding_window=128),
        {(4, 192, 128, None): 3, (8, 192, 128, 128): 9},
    ),
    "mamba 130m": (
        "mamba",
        {"hidden_size": 768, "num_hidden_layers": 24, "state_size": 16, "conv_kernel": 4, "expand": 2,
            "intermediate_size": 1536},
        {},
        {"fp32": 24 * 1536 * 16, "own": 24 * 1536 * 4},
    ),
    "mamba 2 2.7b": (
        "mamba2",
        {"hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80, "head_dim": 64, "state_size": 128,
            "n_groups": 1, "conv_kernel": 4},
        {},
        {"fp32": 64 * 80 * 64 * 128, "own": 64 * (5120 + 256) * 4},
    ),
    "jamba": (
        "jamba",
        sizes(32, 32, 8, 4096, attn_layer_period=8, attn_layer_offset=4, mamba_d_state=16, mamba_d_conv=4,
            mamba_expand=2),
        {(8, 128, 128, None): 4},
        {"fp32": 28 * 8192 * 16, "own": 28 * 8192 * 4},
    ),
    "bamba": (
        "bamba",
        sizes(32, 32, 8, 4096, attn_layer_indices=[9, 18, 27], mamba_n_heads=128, mamba_d_head="auto",
            mamba_d_state=128, mamba_n_groups=1),
        {(8, 128, 128, None): 3},
        {"fp32": 29 * 128 * 64 * 128, "own": 29 * (8192 + 256) * 4},
    ),
    "granite 4": (
        "granitemoehybrid",
        sizes(40, 12, 4, 1536, layer_types=["mamba" if i % 10 != 5 else "attention" for i in range(40)],
            mamba_n_heads=48,
              mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4),
        {(4, 128, 128, None): 4},
        {"fp32": 36 * 48 * 64 * 128, "own": 36 * (3072 + 256) * 4},
    ),
    "nemotron-h": (
        "nemotron_h",
        sizes(8, 32, 8, 4096, head_dim=128, hybrid_override_pattern="M-M*-EM-", mamba_num_heads=128, mamba_head_dim=64,
              n_groups=8, ssm_state_size=128, conv_kernel=4),
        {(8, 128, 128, None): 1},
        {"fp32": 3 * 128 * 64 * 128, "own": 3 * (8192 + 2048) * 4},
    ),
    "falcon h1": (
        "falcon_h1",
        sizes(36, 8, 2, 2048, head_dim=128, mamba_d_ssm=3072, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=256,
              mamba_n_groups=1, mamba_d_conv=4),
        {(2, 128, 128, None): 36},
        {"fp32": 36 * 48 * 64 * 256, "own": 36 * (3072 + 512) * 4},
    ),
    "zamba 2 1.2b": (
        "zamba2",
        sizes(6, 32, 32, 2048, layers_block_type=["mamba", "hybrid"] * 3, mamba_expand=2, n_mamba_heads=64,
            mamba_ngroups=1,
              mamba_d_state=128, mamba_d_conv=4),
        {(32, 128, 128, None): 3},
        {"fp32": 6 * 64 * 64 * 128, "own": 6 * (4096 + 256) * 4},
    ),
    "recurrent gemma 2b": (
        "recurrent_gemma",
        sizes(26, 10, 1, 2560, lru_width=2560, conv1d_width=4, attention_window_size=2048),
        {(1, 256, 256, 2048): 8},
        {"fp32": 18 * 2560, "own": 18 * 2560 * 3},
    ),
    "lfm 2 1.2b": (
        "lfm2",
        sizes(16, 32, 8, 2048, full_attn_idxs=[2, 5, 8, 10, 12, 14], conv_L_cache=3),
        {(8, 64, 64, None): 6},
        {"own": 10 * 2048 * 3},
    ),
    "qwen3-next 80b": (
        "qwen3_next",
        sizes(48, 16, 2, 2048, head_dim=256, full_attention_interval=4, linear_num_key_heads=16,
            linear_num_value_heads=32,
              linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4),
        {(2, 256, 256, None): 12},
        {"fp32": 36 * 32 * 128 * 128, "own": 36 * (2 * 2048 + 4096) * 4},
    ),
    "qwen3.5": (
        "qwen3_5",
        {"text_config": sizes(32, 16, 4, 4096, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32)},
        {(4, 256, 256, None): 8},
        {"fp32": 24 * 32 * 128 * 128, "own": 24 * 8192 * 4},
    ),
    "kimi linear": (
        "kimi_linear",
        sizes(4, 32, 32, 2304, linear_attn_config={"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 128,
                                                  "num_heads": 32, "short_conv_kernel_size": 4}, **LATENT),
        {(1, 576, 0, None): 1},
        {"fp32": 3 * 32 * 128 * 128, "own": 3 * 3 * 4096 * 4},
    ),
    "minimax text 01": (
        "minimax",
        sizes(8, 64, 8, 6144, head_dim=128, attn_type_list=[0, 0, 0, 0, 0, 0, 0, 1]),
        {(8, 128, 128, None): 1},
        {"own": 7 * 64 * 128 * 128},
    ),
    "phi 4 mini flash: the upper half reads layer 17": (
        "phi4flash",
        sizes(32, 40, 20, 2560, mb_per_layer=2, sliding_window=512, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2),
        {(20, 64, 64, 512): 8, (20, 64, 64, None): 1},
        {"fp32": 9 * 5120 * 16, "own": 9 * 5120 * 4, "shared": 7},
    ),
    "openelm: lists of heads": (
        "openelm",
        {"num_transformer_layers": 4, "model_dim": 1280, "head_dim": 64, "num_kv_heads": [3, 3, 4, 5],
            "num_query_heads": [12, 12, 16, 20]},
        {(3, 64, 64, None): 2, (4, 64, 64, None): 1, (5, 64, 64, None): 1},

    ),
    "decilm: blocks": (
        "deci",
        sizes(3, 64, None, 8192, block_configs=[
            {"attention": {"n_heads_in_group": 8}}, {"attention": {"no_op": True}},
                {"attention": {"n_heads_in_group": 16}}]),
        {(8, 128, 128, None): 1, (4, 128, 128, None): 1},

    ),
    "t5 base": (
        "t5",
        {"d_model": 768, "d_kv": 64, "num_heads": 12, "num_layers": 12, "num_decoder_layers": 6,
            "is_encoder_decoder": True},
        {(12, 64, 64, None): 6},
        {"source": {(12, 64, 64): 6}},
    ),
    "whisper large v3 turbo": (
        "whisper",
        {"d_model": 1280, "encoder_layers": 32, "decoder_layers": 4, "decoder_attention_heads": 20,
            "num_hidden_layers": 32},
        {(20, 64, 64, None): 4},
        {"source": {(20, 64, 64): 4}},
    ),
    "bart large": (
        "bart",
        {"d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "decoder_attention_heads": 16,
            "num_hidden_layers": 12},
        {(16, 64, 64, None): 12},
        {"source": {(16, 64, 64): 12}},
    ),
    "llama 3.2 vision": (
        "mllama",
        {"text_config": sizes(40, 32, 8, 4096, cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38])},
        {(8, 128, 128, None): 32},
        {"source": {(8, 128, 128): 8}},
    ),
    "a config of layers apart": (
        "gemma4_text",
        sizes(2, 8, 4, 2304, head_dim=256, sliding_window=512, layer_types=[SLIDES, FULL],
              per_layer_config={"01": {"head_dim": 128, "num_key_value_heads": 1}}, num_kv_shared_layers=0),
        {(4, 256, 256, 512): 1, (1, 128, 128, None): 1},
    ),
}  # fmt: skip


def facts_of(needs):
    """Rows, states and shared layers of a plan, in the words of the table."""
    rows = Counter((r.heads, r.dim, r.dim_v, r.limit) for r in needs.rows if not r.of_source)
    source = Counter((r.heads, r.dim, r.dim_v) for r in needs.rows if r.of_source)
    states = [state for layer in needs.layers for state in layer.states]
    return {
        "rows": dict(rows),
        "source": dict(source),
        "fp32": sum(state.numbers for state in states if state.dtype == "float32"),
        "own": sum(state.numbers for state in states if state.dtype is None),
        "shared": sum(layer.shares is not None for layer in needs.layers),
    }


@each("name", FAMILIES)
def test_what_a_family_keeps(name):
    family, entries, rows, *rest = FAMILIES[name]
    more = dict(*rest)
    needs = needs_of({"model_type": family, **entries})
    expected = {"rows": rows, "source": {}, "fp32": 0, "own": 0, "shared": 0, **more}
    assert facts_of(needs) == expected
    assert needs.remarks == ()


@each("name", FAMILIES)
def test_bytes_are_those_of_the_facts(name):
    """Added up anew, as bf16, of a sequence before and after its windows are full."""
    family, entries, rows, *rest = FAMILIES[name]
    more = dict(*rest)
    needs = needs_of({"model_type": family, **entries})
    state = 4 * more.get("fp32", 0) + 2 * more.get("own", 0)
    for tokens in (0, 1, 100, 5000):
        kept = sum(
            count * heads * (dim + dim_v) * 2 * (tokens if limit is None else min(tokens, limit))
            for (heads, dim, dim_v, limit), count in rows.items()
        )
        across = sum(n * h * (k + v) * 2 * 7 for (h, k, v), n in more.get("source", {}).items())
        assert needs.sequence_bytes(tokens, "bf16", source_tokens=7) == state + kept + across
        grown = sum(
            count * heads * (dim + dim_v) * 2
            for (heads, dim, dim_v, limit), count in rows.items()
            if limit is None or tokens < limit
        )
        assert needs.bytes_per_token("bf16", tokens=tokens) == grown


def test_there_are_many_families():
    assert len({family for family, *_ in FAMILIES.values()}) > 45


def test_layers_that_share_name_their_source():
    needs = needs_of(
        {
            "model_type": "gemma3n_text",
            **sizes(10, 8, 2, 2048, head_dim=256, num_kv_shared_layers=4),
        }
    )
    # sliding but for layers 4 and 9, of which the last four keep nothing of their own
    assert [layer.shares for layer in needs.layers] == [None] * 6 + [5, 5, 5, 4]


def test_latents_expanded():
    config = {"model_type": "deepseek_v3", **sizes(2, 128, 128, 7168, **LATENT)}
    needs = needs_of(config, expanded=True)
    assert facts_of(needs)["rows"] == {(128, 192, 128, None): 2}
    assert needs.bytes_per_token("bf16") == 2 * 128 * 320 * 2
    assert needs_of(config).bytes_per_token("bf16") == 2 * 576 * 2


def test_compressed_rows_of_deepseek_v4():
    config = {
        "model_type": "deepseek_v4", **sizes(2, 64, 1, 4096, head_dim=512, index_head_dim=128, sliding_window=128),
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        "compress_rates": {"heavily_compressed_attention": 128, "compressed_sparse_attention": 4},
    }  # fmt: skip
    needs = needs_of(config)
    assert needs.remarks == ()
    window, coarse, fine = 2 * 128 * 512, 1024 // 128 * 512, 1024 // 4 * (512 + 128)
    state = 2 * 127 * 512 + 2 * 3 * 2 * 640 + 2 * 4 * 640
    assert needs.sequence_bytes(1024, "bf16") == 2 * (window + coarse + fine + state)
