"""The model of sharded decode steps: what it adds up to, and what it must not do."""

import itertools
import json
import math
import re

import pytest
from demo_models import run

from numkv.cli import main
from numkv.cli.output import Size
from numkv.planning import needs_of
from numkv.planning.scale import Load, Network, best_sharding, cost_of, shardings
from perf import ray_steps

LOAD = Load(32, 32, 8, 128, 128, row_bytes=512, batch=64, context=131_072)
NODES = [8, 16, 32, 64, 128, 256, 512, 1024]


def test_the_parts_of_a_step_by_hand():
    """One layer, two parts and two columns, numbers that are easy to add."""
    load = Load(1, 4, 3, 8, 8, row_bytes=64, batch=2, context=101, word=2)
    network = Network(0.5, 0.25, 100.0, 1000.0, 1e9)
    cost, sent, memory = cost_of(load, network, 2, 2, 2)
    assert memory == 2 * 51 * 2 * 64  # of three heads a node has two, of 101 tokens 51
    assert cost.latency == 0.5
    assert cost.messages == 4 * 0.25
    queries, new, partial = 2 * 4 * 8 * 2, 2 * 3 * 16 * 2, 2 * 4 * 9 * 4
    assert sent == 2 * queries + new + 2 * partial
    assert cost.network == sent / 100
    assert cost.read == memory / 1000
    assert cost.merge == 6 * partial / 1000
    assert math.isclose(cost.total, 0.5 + 1 + cost.network + cost.read + cost.merge)
    assert cost_of(load._replace(weights=3000), network, 2, 2, 2)[0] == cost._replace(weights=3.0)
    alone, sent, _ = cost_of(load, network, 2, 1, 2)
    assert alone.merge == 0  # by heads outputs stand side by side, in the queries' dtype
    assert sent == queries + new + 2 * 4 * 8 * 2


def test_the_fit_finds_the_numbers_that_steps_were_made_with():
    shapes = list(itertools.product((1, 8), (1024, 8192), (2, 4), ("heads", "context")))
    counted = [ray_steps.costs(*shape) for shape in shapes]
    for network in (Network(3e-4, 2e-3, 1e8, 5e9), Network(0.0, 1e-3, 1e9, 2e9)):
        factors = (
            network.latency,
            network.message,
            1 / network.bandwidth,
            1 / network.memory_bandwidth,
        )
        seconds = [
            sum(
                f * n
                for f, n in zip(
                    factors, (c.latency, c.messages, c.network, c.read + c.merge), strict=True
                )
            )
            for c in counted
        ]
        found = ray_steps.fitted(counted, seconds)
        assert found[:4] == pytest.approx(network[:4], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("nodes", NODES)
def test_ways_use_the_nodes_there_are_and_their_memory(nodes):
    network = Network(memory=8e9)
    for way in shardings(LOAD, network, nodes):
        assert way.nodes <= nodes
        assert way.memory <= network.memory
        assert way.heads <= LOAD.kv_heads
        assert way.groups <= LOAD.batch


def test_more_nodes_are_never_slower():
    rates = [best_sharding(LOAD, Network(memory=1e12), n).tokens_per_second for n in NODES]
    assert all(b >= 0.99 * a for a, b in itertools.pairwise(rates))


def test_what_decides():
    """Slow messages let one node do all; a network that costs nothing uses every node; long contexts need columns."""
    slow = best_sharding(LOAD, Network(message=1e3, memory=1e15), 64)
    assert (slow.heads, slow.context) == (1, 1)
    free = best_sharding(LOAD, Network(0.0, 0.0, 1e18, 1e9, 1e15), 1024)
    assert free.nodes == 1024
    long = LOAD._replace(batch=1, context=8 << 20)
    assert best_sharding(long, Network(memory=16e9), 1024, heads_only=True) is None
    assert best_sharding(long, Network(memory=16e9), 1024).context > 1


#: As published beside the models; what a plan has no use for is left out.
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32,
        "num_hidden_layers": 62, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_attention_heads": 128, "num_hidden_layers": 61, "num_key_value_heads": 128, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "vocab_size": 129280, "max_position_embeddings": 163840, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip


def planned(capsys, tmp_path, config, *options):
    """The rows of the table as cells by heading, and all that was printed."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    output = run(capsys, "plan", tmp_path / "config.json", *options)
    lines = [re.split(r"  +", line.strip()) for line in output.splitlines()]
    names = next(line for line in lines if line[0] == "nodes")
    return [
        dict(zip(names, x, strict=True)) for x in lines if len(x) == len(names) and x[0].isdecimal()
    ], output


def test_llama_on_nodes(capsys, tmp_path):
    """Rows: 32 layers of 8 heads of K and V of 128 in 2 bytes, 131,072 bytes a token; a sequence of 131,072 tokens
    17.18 GB, on 4 nodes by heads 4.29 GB each.

    Weights: a layer has 4096 * (32 + 2 * 8) * 128 + 32 * 128 * 4096 = 41,943,040 numbers of attention, 3 * 4096 * 14336
    = 176,160,768 of the MLP and 2 * 4096 of norms; 32 of them 6,979,584,000. Embeddings and output 2 * 128256 * 4096 =
    1,050,673,152, the last norm 4096: 8,030,261,248 in 2 bytes, 16.06 GB.
    """
    options = (
        "--nodes", 4, "--batch", 1, "--memory", "5GB", "--kind", "bf16", "--message", "0us",
        "--memory-bandwidth", "20GB",
    )  # fmt: skip
    ((row,), output) = planned(capsys, tmp_path, LLAMA, *options)
    assert row["groups × heads × context"] == "1 × 4 × 1"
    assert row["memory/node"] == "4.29 GB"
    assert "bf16, 32 query heads" in output
    assert "weights, 16.1 GB" in output
    assert needs_of(LLAMA).weight_bytes == 16_060_522_496
    # 16.06 GB of weights and 4.29 GB of rows at 20 GB/s: 803 and 215 ms; and some for latency.
    assert 1017 < float(row["ms/step"].replace(",", "")) < 1080


def test_windows_of_gemma_on_nodes(capsys, tmp_path):
    """Of 62 layers each sixth sees all: 10. A token has 16 heads of K and V of 128 in 2 bytes, 8,192 bytes a layer. All
    layers that see all: 10 * 131,072 * 8,192 = 10.74 GB; windows: 52 * 1,024 * 8,192 = 0.44 GB; so 11.17 GB a sequence,
    64 of them 715 GB, on 16 nodes by heads 44.7 GB each. By context windows are kept whole: 62 * 131,072 * 8,192 = 66.6
    GB a sequence.

    Weights: a layer has 5376 * 64 * 128 + 32 * 128 * 5376 = 66,060,288, 3 * 5376 * 21504 = 346,816,512, 4 * 5376 + 2 *
    128 for norms; 62 of them 25,599,710,720; embeddings, which are the output too, 262208 * 5376 = 1,409,630,208, a
    norm 5376: 27,009,346,304 in 2 bytes, 54.0 GB.
    """
    options = ("--nodes", 16, "--memory", "80GB", "--kind", "bf16", "--context", 131072)
    ((row,), output) = planned(capsys, tmp_path, GEMMA, *options)
    assert row["groups × heads × context"].endswith("× 1")
    assert "weights, 54.0 GB" in output
    load = Load(62, 32, 16, 128, 128, 512, 64, 131072, (1024,) * 52)
    assert cost_of(load, Network(), 16, 1, 64)[2] * 16 == 64 * (10_737_418_240 + 436_207_616)
    assert cost_of(load, Network(), 1, 2, 1)[2] * 2 == 62 * 131072 * 8192
    needs = needs_of(GEMMA)
    assert (needs.weight_bytes, needs.q_heads) == (54_018_692_608, 32)
    assert needs.sequence_bytes(131072, "bf16") == 10_737_418_240 + 436_207_616


def test_deepseek_on_nodes_is_refused_by_name(capsys, tmp_path):
    """Sharded caches keep no latents; with K and V of all heads a token has 128 * (192 + 128) * 2 * 61 bytes."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    assert main(["plan", str(tmp_path), "--nodes", "8"]) == 2
    assert "latents; --expanded plans" in capsys.readouterr().err
    options = (
        "--expanded",
        "--nodes",
        128,
        "--batch",
        1,
        "--context",
        1000,
        "--memory",
        "6GB",
        "--message",
        "0us",
    )
    ((row,), output) = planned(capsys, tmp_path, DEEPSEEK, *options)
    assert "128 query heads" in output
    assert "weights are not counted" in output  # experts, in 8 bits
    heads, context = map(int, row["groups × heads × context"].split(" × ")[1:])
    assert row["memory/node"] == Size(128 * 320 * 2 * 61 * 1000 // heads // context, True).text()


@pytest.mark.parametrize("name", ["--bandwidth", "--memory-bandwidth"])
def test_bandwidths_are_not_0(capsys, name):
    sizes = ["--layers", "2", "--kv-heads", "2", "--head-dim", "8", "--nodes", "2"]
    assert main(["plan", *sizes, name, "0"]) == 2
    assert "expected bandwidths of a byte or more a second, got 0" in capsys.readouterr().err


def test_a_network_beside_which_the_rest_is_tiny(capsys):
    """The rest of a step is no difference of two long times, which would be 0 here."""
    sizes = ["--layers", "2", "--kv-heads", "2", "--head-dim", "8", "--nodes", "1"]
    fast = ["--memory-bandwidth", "1000PB", "--latency", "0us", "--message", "0us"]
    assert "inf" not in run(capsys, "plan", *sizes, "--context", "8", *fast, "--bandwidth", "1")


def test_the_command_prints_table_and_picture(capsys, tmp_path):
    sizes = ("--layers", 4, "--kv-heads", 2, "--head-dim", 64, "--context", 65536)
    output = run(capsys, "plan", *sizes, "--nodes", 8, 1024, "--latency", "1ms", "--batch", 8)
    assert "8 sequences of 65,536 tokens, fp16" in output
    rows = [line.split()[0] for line in output.splitlines() if "×" in line and "%" in line]
    assert rows == ["8", "1,024"]
    assert "head parts pay" in output or "head parts do not pay" in output
    tight = run(capsys, "plan", *sizes, "--nodes", 1, "--memory", "1MB")
    assert "rows do not fit" in tight
    assert main(["plan", *map(str, sizes), "--nodes", "8", "--latency", "fast"]) == 2
    assert "--latency" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    picture = tmp_path / "nodes.svg"
    run(capsys, "plan", *sizes, "--nodes", 8, 64, "--picture", picture)
    assert picture.stat().st_size > 1000
