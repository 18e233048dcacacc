"""`numkv plan`: what it prints of sizes and of configs."""

import json
import textwrap

import pytest
from demo_models import SIZES, cells, run

import numkv
from numkv.cli import main
from numkv.planning import needs_of


def test_plan_by_sizes(capsys):
    options = ("--layers", 36, "--kv-heads", 8, "--head-dim", 128)
    output = run(capsys, "plan", *options, "--memory", "1.125GiB", "--tokens", "1,024")
    assert cells(output, "fp16") == ["fp16", "4,096", "147,456", "8,192", "144", "MiB"]
    assert cells(output, "fp32")[3] == "4,096"
    labels = [line.split()[0] for line in output.splitlines()[4 : 4 + len(numkv.kinds.kinds())]]
    assert labels == [kind.name for kind in numkv.kinds.kinds()]
    assert cells(output, "int8")[1] == f"{8 * 2 * (128 + 4):,}"
    assert "scales of int8 are counted" in output
    output = run(capsys, "plan", *options, "--head-dim-v", 64, "--kind", "bf16")
    assert "scales" not in output
    assert cells(output, "bf16")[2] == f"{36 * 8 * (128 + 64) * 2:,}"


def test_plan_writes_sizes_in_the_units_of_the_memory(capsys):
    options = (
        "--layers",
        4,
        "--kv-heads",
        4,
        "--head-dim",
        64,
        "--context",
        4096,
        "--kind",
        "fp16",
    )
    output = run(capsys, "plan", *options, "--memory", "100MB", "--tokens", 1000)
    assert "tokens in 100 MB" in output
    assert cells(output, "fp16")[2:] == ["4,096", "24,414", "4.10", "MB"]
    assert "how many fit in 100 MB:" in output
    assert "16.8 MB: 5" in output
    assert "iB" not in output
    output = run(capsys, "plan", *options, "--memory", "100MiB")
    assert "16 MiB: 6" in output
    assert "MB" not in output
    nodes = run(
        capsys, "plan", *options, "--nodes", 8, "--memory", "100GB", "--bandwidth", "1.25GB"
    )
    assert "a node has 100 GB and" in nodes
    assert "travels at 1.25 GB/s" in nodes
    assert "iB" not in nodes
    assert "1.25 GB/s" in run(capsys, "plan", *options, "--nodes", 8, "--bandwidth", "1.25GB")


def test_plan_lists_the_kinds_that_can_store_such_rows(capsys):
    options = ("--layers", 1, "--kv-heads", 1, "--head-dim", 127)
    output = run(capsys, "plan", *options)
    assert cells(output, "int8")[1] == f"{2 * (127 + 4)}"
    assert "int4" not in output
    assert main(["plan", *map(str, options), "--kind", "int4"]) == 2
    assert "multiple of 2" in capsys.readouterr().err


def test_plan_of_layers_that_differ(tmp_path, capsys):
    path = tmp_path / "config.json"
    types = ["sliding_attention", "full_attention", "linear_attention", "sliding_attention"]
    sizes = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 4}
    config = {
        **SIZES,
        **sizes,
        "model_type": "qwen3_next",
        "layer_types": types,
        "sliding_window": 512,
    }
    path.write_text(json.dumps({**config, "linear_value_head_dim": 4, "num_hidden_layers": 4}))
    output = run(capsys, "plan", path, "--kind", "bf16", "--context", 256, 1024, "--memory", "1MiB")
    assert "2 layers of 2 key/value heads of 8, the last 512 tokens" in output
    assert "1 layer of 2 key/value heads of 8\n" in output
    assert (
        "1 layer with a convolution state of 96 numbers in bfloat16 and a recurrent state of 32"
        in output
    )
    # 64 bytes a token and layer; states of 2 * 96 + 4 * 32 bytes
    state, first = 320, cells(output, "bf16")
    assert first[1:4] == ["192", "64", f"{(2**20 - state - 2 * 512 * 64) // 64:,}"]
    second = next(line for line in output.split("One sequence")[1].splitlines() if "bf16" in line)
    assert f": {2**20 // (256 * 192 + state)}" in second
    assert second.endswith(f": {2**20 // (2 * 512 * 64 + 1024 * 64 + state)}")
    assert "States take 320 B" in output
    assert "NOT KNOWN" not in output
    assert main(["plan", str(path), "--layers", "3"]) == 2
    assert "--layers is for models whose layers are all equal" in capsys.readouterr().err
    changed = run(capsys, "plan", path, "--kind", "bf16", "--kv-heads", 4)
    assert cells(changed, "bf16")[1] == "384"


def test_plan_names_what_it_does_not_know(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {**SIZES, "model_type": "odd", "global_memory": 3, "layer_types": ["what", "full"]}
        )
    )
    output = run(capsys, "plan", path, "--kind", "bf16")
    assert "NOT KNOWN: `model_type` 'odd'" in output
    assert "NOT KNOWN: `layer_types` 'what'" in output
    assert "NOT KNOWN: `global_memory`" in output
    assert cells(output, "bf16")[2] == "128"  # as if all were plain


@pytest.mark.parametrize("name", ["my-own", "class", "numkv"])
def test_the_lines_of_unknown_types_are_python(name, tmp_path, capsys):
    """Whatever a file calls its layers: the name of a type is no name of a variable."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SIZES, "model_type": "odd", "layer_types": [name, "full"]}))
    code = textwrap.dedent(
        run(capsys, "plan", path, "--kind", "bf16", "--memory", "1MiB").partition("As a cache:")[2]
    )
    made = {"numkv": numkv}
    exec(code, made)
    assert len(made["cache"].layers) == 2


def test_plan_of_latents_blocks_and_cross_attention(tmp_path, capsys):
    path = tmp_path / "config.json"
    latent = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    path.write_text(json.dumps({**SIZES, **latent, "model_type": "deepseek_v3"}))
    output = run(
        capsys, "plan", path, "--kind", "bf16", "int8/bf16", "--block-size", 16, "--tokens", 17
    )
    assert "2 layers of latents of 40" in output
    assert cells(output, "bf16")[1:3] == ["80", "160"]
    assert cells(output, "bf16")[-2:] == ["5", "KiB"]  # 32 tokens
    assert cells(output, "int8/bf16")[1] == "44"
    assert "rounded up to blocks of 16 tokens" in output
    expanded = run(capsys, "plan", path, "--kind", "bf16", "--expanded")
    assert cells(expanded, "bf16")[1] == f"{4 * (16 + 8) * 2}"
    path.write_text(
        json.dumps({"model_type": "t5", "d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2})
    )
    output = run(capsys, "plan", path, "--kind", "bf16", "--tokens", 1)
    assert cells(output, "bf16")[1:4] == ["128", "256", "256"]
    assert "give --source-tokens" in output
    output = run(capsys, "plan", path, "--kind", "bf16", "--tokens", 1, "--source-tokens", 3)
    assert cells(output, "bf16")[-2:] == ["1", "KiB"]


def test_plan_counts_bounds_of_keys(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SIZES, "model_type": "llama"}))
    of = needs_of(path)
    options = ("plan", path, "--kind", "bf16", "--block-size", 16)
    output = run(capsys, *options, "--key-bounds", "--context", 32, "--memory", "1MiB")
    planned = of.sequence_bytes(32, "bf16", block_size=16, key_bounds=True)
    assert planned > of.sequence_bytes(32, "bf16", block_size=16)
    assert f"{2**20 // planned:,}" in output
    assert "Bounds of keys" in output
    for wrong in ((*options[:-2], "--key-bounds"), (*options, "--key-bounds", "--nodes", 8)):
        assert main([str(x) for x in wrong]) == 2
        assert "--key-bounds" in capsys.readouterr().err


def test_plan_of_a_model_that_never_grows(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2}))
    output = run(capsys, "plan", path, "--kind", "bf16")
    assert cells(output, "bf16")[1:] == ["0", "0", "any", "number"]
    assert main(["plan", str(path), "--config", str(path)]) == 2
    assert "one config, got two" in capsys.readouterr().err
    assert main(["plan", str(path), "--head-dim", "8", "--kv-heads", "1"]) == 0


def test_plan_by_config(tiny, tmp_path, capsys):
    for path in (tiny, tiny / "config.json"):
        assert cells(run(capsys, "plan", "--config", path), "bf16")[2] == "128"
    assert cells(run(capsys, "plan", "--config", tiny, "--layers", 4), "bf16")[2] == "256"
    other = {"model_type": "gemma3", "text_config": {**SIZES, "head_dim": None}}
    (tmp_path / "config.json").write_text(json.dumps(other))
    assert cells(run(capsys, "plan", "--config", tmp_path), "bf16")[2] == "96"


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"model_type": "llama", "num_hidden_layers": 6}, "[full] * 6"),
        ({"model_type": "gpt_oss", "num_hidden_layers": 6}, "[sliding, full] * 3"),
        (
            {"model_type": "gemma3_text", "num_hidden_layers": 16},
            "([sliding] * 5 + [full]) * 2 + [sliding] * 4",
        ),
        ({"model_type": "qwen3_next", "num_hidden_layers": 8}, "([linear] * 3 + [full]) * 2"),
        ({"model_type": "llama4_text", "num_hidden_layers": 4}, "[chunked] * 3 + [full]"),
    ],
)
def test_plan_prints_the_lines_that_make_the_cache(config, layers, tmp_path, capsys):
    """They run, and make the layers that the config describes."""
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 256, **config}
        )
    )
    printed = run(capsys, "plan", path, "--kind", "int8/fp16", "--memory", "3MB")
    code = textwrap.dedent(printed.partition("As a cache:\n\n")[2])
    assert f"layers = {layers}\n" in code
    names = {"numkv": numkv}
    if "linear" in code:
        code = code.replace("StateSlots(64)", "StateSlots(1)").replace("3_000_000", "30_000_000")
    exec(code, names)
    expected = numkv.LayerSpec.for_model(
        needs_of(json.loads(path.read_text())), kind="int8", v_kind="fp16"
    )
    assert names["cache"].layers == tuple(expected)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "llama"}, "int8_channel"),
        ({"model_type": "gemma3_text", "sliding_window": 65}, "int8_channel"),
        ({"model_type": "gemma3_text", "sliding_window": 64}, "int8"),
    ],
)
def test_plan_prints_the_lines_of_the_safe_kind(config, kind, tmp_path, capsys):
    """Keys by channel, but for layers whose window is no longer than a group of tokens; the lines run."""
    path = tmp_path / "config.json"
    sizes = {
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 256,
    }
    path.write_text(json.dumps(sizes | config))
    names = {"numkv": numkv}
    printed = run(capsys, "plan", path, "--memory", "3MB")
    exec(textwrap.dedent(printed.partition("As a cache:\n\n")[2]), names)
    assert {str(of.kind) for of in names["cache"].layers} == {kind}
    assert all(of.rotate == (kind == "int8") for of in names["cache"].layers)


def test_plan_says_why_there_is_no_line(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "deepseek_v32", "num_hidden_layers": 3}))
    assert "that keep latents and index keys; describe these by hand" in run(capsys, "plan", path)


@pytest.mark.parametrize("kind", [(), ("--kind", "int8")])
def test_plan_prints_the_lines_of_latents(kind, tmp_path, capsys):
    path = tmp_path / "config.json"
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 3, "kv_lora_rank": 48}
    path.write_text(json.dumps(config))
    printed = run(capsys, "plan", path, *kind, "--memory", "3MB")
    names = {"numkv": numkv}
    exec(textwrap.dedent(printed.partition("As a cache:\n\n")[2]), names)
    stored = kind[1] if kind else "bf16"
    expected = numkv.LayerSpec(1, 48 + 64, head_dim_v=48, kind=stored, v_kind="latent")
    assert names["cache"].layers == (expected,) * 3


def test_plan_takes_rotated_kinds(capsys):
    options = ("--layers", 2, "--kv-heads", 2, "--head-dim", 64, "--kind")
    printed = run(capsys, "plan", *options, "int4+rotate", "int4")
    assert cells(printed, "int4+rotate")[1:] == cells(printed, "int4")[1:]
    assert 'numkv.LayerSpec(2, 64, kind="int4", rotate=True)' in printed
    assert main(["plan", *map(str, options), "int4+window64"]) == 2
    assert "expected a kind, or one with +rotate, got 'int4+window64'" in capsys.readouterr().err
