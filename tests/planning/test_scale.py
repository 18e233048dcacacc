"""The model of sharded decode steps: what it adds up to, and what it must not do."""

import itertools
import math

import pytest
from demo_models import run

from numkv.cli import main
from numkv.planning.scale import Load, Network, best_sharding, cost_of, shardings

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
    alone, sent, _ = cost_of(load, network, 2, 1, 2)
    assert alone.merge == 0  # by heads outputs stand side by side, in the queries' dtype
    assert sent == queries + new + 2 * 4 * 8 * 2


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


def test_the_command_prints_table_and_picture(capsys, tmp_path):
    sizes = ("--layers", 4, "--kv-heads", 2, "--head-dim", 64, "--context", 65536)
    output = run(capsys, "plan", *sizes, "--nodes", 8, 1024, "--latency", "1ms", "--batch", 8)
    assert "8 sequences of 65,536 tokens, fp16" in output
    rows = [line.split()[0] for line in output.splitlines() if "×" in line and "%" in line]
    assert rows == ["8", "1,024"]
    assert "heads pay" in output or "heads stop paying" in output
    tight = run(capsys, "plan", *sizes, "--nodes", 1, "--memory", "1MB")
    assert "rows do not fit" in tight
    assert main(["plan", *map(str, sizes), "--nodes", "8", "--latency", "fast"]) == 2
    assert "--latency" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    picture = tmp_path / "nodes.svg"
    run(capsys, "plan", *sizes, "--nodes", 8, 64, "--picture", picture)
    assert picture.stat().st_size > 1000
