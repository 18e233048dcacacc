"""Plans beside caches: what numkv's own objects allocate, and what becomes of configs that say little or nonsense."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from layer_lists import paged_kv_cache

import numkv
from numkv.planning import ConfigError, LayerNeeds, ModelNeeds, Rows, State, needs_of

SIZES = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 128,
}  # fmt: skip
KINDS = [("bf16", None), ("int8", None), ("int4", None), ("int8", "fp16"), ("fp32", "int4")]


@pytest.mark.parametrize(("k_kind", "v_kind"), KINDS)
def test_a_layer_of_a_plan_is_a_contiguous_layer(k_kind, v_kind):
    needs = needs_of({**SIZES, "v_head_dim": 64})
    rows = needs.layers[0].rows[0]
    layer = numkv.ContiguousLayer(
        num_kv_heads=rows.heads, head_dim=rows.dim, head_dim_v=rows.dim_v, capacity=37, k_kind=k_kind,
        v_kind=v_kind or k_kind,
    )  # fmt: skip
    assert needs.sequence_bytes(37, k_kind, v_kind) == len(needs.layers) * layer.nbytes


@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize("window", [None, 24])
def test_the_blocks_of_a_plan_are_those_of_a_paged_cache(kind, window):
    """The most blocks that a sequence holds while it grows by single tokens, in a cache with windows."""
    size = 4
    config = {
        **SIZES,
        "model_type": "gemma2",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": window,
    }
    if window is None:
        config |= {"model_type": "llama"}
    needs = needs_of(config)
    windows = [
        -1 if layer.rows[0].limit is None else layer.rows[0].limit - 1 for layer in needs.layers
    ]
    assert windows == ([-1] * 4 if window is None else [23, -1, 23, -1])
    cache = paged_kv_cache(
        4,
        2,
        32,
        num_blocks=64,
        block_size=size,
        kind=kind,
        windows=windows,
    )
    of_block = cache.nbytes / cache.num_blocks
    seq = cache.add()
    most = 0
    row = np.ones((1, 2, 32), np.float32)
    for length in range(1, 61):
        step = cache.reserve([seq], [1])
        most = max(most, cache.stats().pool.used)
        for layer in range(4):
            step.append(layer, row, row)
        cache.commit(step)
        planned = needs.sequence_bytes(length, kind, block_size=size)
        assert cache.stats().pool.used * of_block <= planned
    assert most * of_block == needs.sequence_bytes(60, kind, block_size=size)


def test_bounds_of_keys_are_what_a_cache_keeps():
    """Of K and V; latents and the text that is read have none."""
    needs = needs_of({**SIZES, "model_type": "llama", "num_hidden_layers": 3, "head_dim": 32})
    cache = paged_kv_cache(3, 2, 32, num_blocks=8, block_size=4, kind="int8", key_bounds=True)
    with_bounds = [
        needs.sequence_bytes(n, "int8", block_size=4, key_bounds=True) for n in (0, 1, 4, 29)
    ]
    assert with_bounds == [n * cache.nbytes // 8 for n in (0, 1, 1, 8)]
    assert needs.tokens_in(cache.nbytes, "int8", block_size=4, key_bounds=True) == 32
    with pytest.raises(ValueError, match="`key_bounds`"):
        needs.sequence_bytes(4, "int8", key_bounds=True)
    for rows in (Rows("latents", 1, 40, 0), Rows("keys and values", 2, 8, 8, of_source=True)):
        assert rows.bounds_bytes() == 0


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_windows_in_blocks_leave_room_for_the_next_token(window, size):
    """By definition: the blocks of what the newest token sees, and of the token that comes."""
    rows = Rows("keys and values", 1, 8, 8, window)
    most = 0
    for length in range(1, 40):
        # Of the token before, whose window is not given back yet.
        first = max(0, length - 1 - window)
        most = max(most, -(-length // size) - first // size)
        assert rows.kept(length, size) >= most * size
    assert rows.kept(39, size) == most * size


def test_tokens_in_is_the_most_that_fit():
    needs = needs_of({**SIZES, "model_type": "gemma2", "head_dim": 32, "sliding_window": 16})
    for memory in (0, 511, 512, 10_000, 65_536, 10**6):
        for size in (None, 1, 16):
            n = needs.tokens_in(memory, "bf16", block_size=size)
            assert n == 0 or needs.sequence_bytes(n, "bf16", block_size=size) <= memory
            assert needs.sequence_bytes(n + 1, "bf16", block_size=size) > memory


def test_equal_layers_are_counted_together(monkeypatch):
    """A plan of many layers computes the bytes of a row as often as one of a single layer."""
    calls, row_bytes = [], Rows.row_bytes
    monkeypatch.setattr(Rows, "row_bytes", lambda *args: (calls.append(0), row_bytes(*args))[1])
    one, limited = (Rows("keys and values", 2, 8, 8, limit) for limit in (None, 16))
    few, many = (
        ModelNeeds("", (LayerNeeds("a", (one,)), LayerNeeds("b", (limited, limited))) * n)
        for n in (1, 500)
    )
    counted = [few.sequence_bytes(20, "int8"), few.bytes_per_token("int8", tokens=16)]
    once = len(calls)
    assert [many.sequence_bytes(20, "int8"), many.bytes_per_token("int8", tokens=16)] == [
        500 * n for n in counted
    ]
    assert len(calls) == 2 * once
    assert many.tokens_in(500 * counted[0], "int8") == few.tokens_in(counted[0], "int8") == 20


def test_models_that_never_grow():
    needs = needs_of({"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64})
    assert needs.bytes_per_token("bf16") == 0
    assert needs.tokens_in(needs.state_bytes(), "bf16") is None
    assert needs.tokens_in(needs.state_bytes() - 1, "bf16") == 0
    slides = needs_of({**SIZES, "model_type": "mistral", "sliding_window": 8})
    assert slides.tokens_in(10**6, "bf16") is None
    assert slides.tokens_in(2 * 2 * 2 * 32 * 2 * 7, "bf16") == 7


def test_states_have_the_dtype_of_the_model_or_their_own():
    layers = (LayerNeeds("linear_attention", (), (State("a", 10), State("b", 3, "float32"))),)
    assert ModelNeeds("", layers).state_bytes() == 32
    assert ModelNeeds("", layers, "float32").state_bytes() == 52


# ---------------------------------------------------------------- what is not understood


def test_unknown_types_of_layers_are_named_and_counted_as_full():
    needs = needs_of({**SIZES, "layer_types": ["full_attention", "quantum_attention"]})
    assert needs.bytes_per_token("bf16") == needs_of(SIZES).bytes_per_token("bf16")
    assert "`layer_types` 'quantum_attention'" in " ".join(needs.remarks)


def test_unknown_families_are_named_and_so_are_their_strange_entries():
    config = {
        **SIZES,
        "model_type": "llamadillo",
        "memory_tokens": 64,
        "shell_attention_window": 8,
        "dropout": 0.5,
    }
    remarks = " ".join(needs_of(config).remarks)
    assert "`model_type` 'llamadillo'" in remarks
    assert "`memory_tokens`" in remarks
    assert "`shell_attention_window`" in remarks
    assert "dropout" not in remarks
    del config["model_type"]
    assert "`model_type` missing" in " ".join(needs_of(config).remarks)


def test_an_entry_that_is_not_of_a_family_is_named():
    assert needs_of({**SIZES, "sliding_window": 64}).remarks == (
        "`sliding_window`: not understood, and left out of account",
    )
    assert needs_of({**SIZES, "sliding_window": None}).remarks == ()


@pytest.mark.parametrize(
    ("entries", "limits"),
    [
        ({"sliding_window": 8}, [8, 8, 8, 8]),
        ({"sliding_window": 8, "sliding_window_pattern": 2}, [8, None, 8, None]),
        ({"sliding_window": 8, "use_sliding_window": False}, [None] * 4),
        ({"sliding_window": 8, "max_window_layers": 3}, [None, None, None, 8]),
        ({"attention_chunk_size": 8}, [8] * 4),
        ({"attention_chunk_size": 8, "no_rope_layers": [1, 0, 1, 0]}, [8, None, 8, None]),
        ({"layer_types": ["sliding", "full", "local", "global"], "sliding_window": 8}, [8, None, 8, None]),
        ({"sliding_window": [8, 4, 2, 1]}, [8, 4, 2, 1]),
    ],
)  # fmt: skip
def test_unknown_families_by_entries_that_mean_the_same_everywhere(entries, limits):
    needs = needs_of({**SIZES, "model_type": "new", "num_hidden_layers": 4, **entries})
    assert [layer.rows[0].limit for layer in needs.layers] == limits
    assert len(needs.remarks) == 1


def test_old_names(tmp_path):
    old = {"n_head": 4, "n_layer": 2, "n_embd": 128, "num_kv_heads": 2}
    needs = needs_of({"model_type": "old", **old})
    assert needs.bytes_per_token("bf16") == needs_of(SIZES).bytes_per_token("bf16")
    assert (
        needs_of({"model_type": "old", **old, "num_kv_heads": None, "multi_query": True})
        .rows[0]
        .heads
        == 1
    )


def test_files_folders_and_mappings_are_the_same(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    assert needs_of(tmp_path) == needs_of(str(tmp_path / "config.json")) == needs_of(SIZES)


def test_the_decoder_is_found_inside():
    inside = {
        "model_type": "qwen2_5_omni",
        "thinker_config": {"text_config": {**SIZES, "model_type": "qwen2"}},
    }
    assert len(needs_of(inside).layers) == 2
    assert needs_of({"model_type": "anything", "llm_config": SIZES}).remarks == ()
    flat = {**SIZES, "model_type": "qwen2_vl"}  # as files of this family are
    assert (len(needs_of(flat).layers), needs_of(flat).remarks) == (2, ())


@pytest.mark.parametrize("wrong", ["many", 0, -1, 2.5, True, [], {}])
@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads"])
def test_nonsense_is_an_error_that_names_the_entry(key, wrong):
    with pytest.raises(ConfigError, match=key):
        needs_of({**SIZES, key: wrong})


def test_ranks_and_contexts_that_are_none():
    for wrong in ("many", -1, 2.5, True, [1], {"a": 1}):
        with pytest.raises(ConfigError, match="kv_lora_rank: expected a positive integer, got"):
            needs_of({**SIZES, "kv_lora_rank": wrong})
        assert needs_of({**SIZES, "max_position_embeddings": wrong}).context is None


@pytest.mark.parametrize(
    "wrong",
    [
        {}, {"model_type": "blt"}, {"model_type": "reformer"}, {**SIZES, "num_attention_heads": 4096},
        {**SIZES, "block_configs": [{}]}, {**SIZES, "model_type": "mistral", "sliding_window": "wide"},
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_an_error(wrong):
    with pytest.raises(numkv.NumkvError):
        needs_of(wrong)


@pytest.mark.parametrize(
    "many",
    [
        {"model_type": "gpt_neo", "attention_types": [[["global"], 10**11]]},
        {"model_type": "gpt_neo", "attention_types": [[["global"] * 10**5, 10**5]]},
        {"model_type": "hrm_text", "H_cycles": 10**11},
        {"model_type": "llama", "layer_types": ["full_attention"] * 100_001},
    ],
)
def test_more_layers_than_any_model_has_are_an_error(many):
    """From whatever entry: before they fill the memory."""
    with pytest.raises(ConfigError, match="num_hidden_layers: expected at most 100000, got"):
        needs_of(many)


@pytest.mark.parametrize("dense", [-5, 40, 10**11])
def test_no_pattern_makes_more_layers_than_there_are(dense):
    needs = needs_of(
        {"model_type": "cohere2_moe", "num_hidden_layers": 8, "first_k_dense_replace": dense}
    )
    assert len(needs.layers) == 8


@pytest.mark.parametrize("sources", [[-1, -1, -1], [0, 0, 1], [0, 2, 2], ["a", 1, 2], [0, 0, 9]])
def test_layers_can_share_rows_of_earlier_layers_only(sources):
    """As in transformers, where others are an error: rows that no layer stores would count as none."""
    config = {**SIZES, "num_hidden_layers": 3, "kv_source_layers": sources}
    with pytest.raises(ConfigError, match="to read an earlier one's rows, got"):
        needs_of(config)
    assert [x.shares for x in needs_of({**config, "kv_source_layers": [0, 0, 0]}).layers] == [
        None,
        0,
        0,
    ]


@pytest.mark.parametrize("text", ["", "[]", "{", "3", '"a"', "nul", "[" * 100_000, "\x00"])
def test_files_that_are_no_configs(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        needs_of(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError):
        needs_of(path)
    with pytest.raises(OSError, match="nowhere"):
        needs_of(tmp_path / "nowhere")


@pytest.mark.slow
def test_a_config_with_random_entries_gives_a_plan_or_says_what_is_wrong():
    """Whatever one entry of any family becomes, nothing but errors of numkv's come out."""
    from numkv.planning import keys

    rng = np.random.default_rng(0)
    families = keys._families()["families"]
    values = [
        None,
        0,
        1,
        7,
        -3,
        2.5,
        "auto",
        "",
        [],
        [1],
        {},
        {"a": 1},
        True,
        False,
        math.nan,
        10**30,
        ["x"] * 99,
        "LG",
    ]
    seen = 0
    for _ in range(4000):
        family = list(families)[rng.integers(len(families))]
        names = [
            *families[family],
            "layer_types",
            "per_layer_config",
            "text_config",
            "linear_attn_config",
        ]
        entries = {
            names[rng.integers(len(names))]: values[rng.integers(len(values))] for _ in range(2)
        }
        try:
            needs = needs_of({"model_type": family, **entries})
            seen += 1
            assert needs.sequence_bytes(100, "bf16") >= 0
        except numkv.NumkvError:
            pass
    assert seen > 1000


def test_the_page_about_plans_runs():
    page = Path(__file__).parents[2] / "docs" / "plans.md"
    found = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    assert found
    for block in found:
        exec(compile(block, str(page), "exec"), {})


def test_reading_a_config_imports_neither_torch_nor_transformers():
    code = "import sys; from numkv.cli import main; "
    code += "main(['plan', '--layers', '1', '--kv-heads', '1', '--head-dim', '8']); "
    code += f"from numkv.planning import needs_of; needs_of({SIZES!r}); "
    code += "assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
