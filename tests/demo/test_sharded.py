"""The demo's model over shards in this process, and what the command says."""

import sys

import numpy as np
import pytest
from demo_models import TOKENS, run
from sharded_caches import FaultyShards

from numkv.cli import main
from numkv.demo.cache import CacheChoice
from numkv.demo.model import Model
from numkv.demo.sharded import ShardedChoice
from numkv.ray import LocalShards

FP32 = CacheChoice("fp32", block_size=4)


def logits_of(batch):
    sessions, first = batch.prefill([TOKENS[:6], TOKENS[:9]])
    return [first, *(batch.step(sessions, [token, token]) for token in [7, 8, 9, 10, 11])]


@pytest.mark.parametrize(("by", "shards"), [("heads", 2), ("context", 3)])
def test_the_same_logits(tiny, by, shards):
    model = Model.load(tiny)
    alone = logits_of(model.batch([16, 16], FP32))
    choice = ShardedChoice(FP32, shards, by, LocalShards())
    batch = choice.batch(model, [16, 16])
    for x, y in zip(logits_of(batch), alone, strict=True):
        if by == "heads":
            np.testing.assert_array_equal(x, y)
        else:
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    assert batch.recomputed == 0
    batch.cache.check()


@pytest.mark.parametrize(
    ("by", "operation"), [("heads", "layer"), ("context", "commit"), ("heads", "find")]
)
def test_what_is_lost_is_computed_again(tiny, by, operation):
    """Also where a second shard is lost while that is done."""
    model, shards = Model.load(tiny), FaultyShards()
    alone = logits_of(model.batch([16, 16], FP32))
    batch = ShardedChoice(FP32, 2, by, shards).batch(model, [16, 16])
    shards.at(0, operation, "after", 7 if operation == "layer" else 2)
    shards.at(0, "layer", "before", 9)
    shards.at(1, "layer", "before", 20)
    for x, y in zip(logits_of(batch), alone, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    assert shards.places < 99
    assert batch.recomputed > 0
    batch.cache.check()


def test_the_command_generates_the_same_text(tiny, capsys, monkeypatch):
    monkeypatch.setattr("numkv.ray.shards.RayShards", LocalShards)
    options = ("--model", tiny, "--prompt", "def f(", "--tokens", 8, "--temperature", 0)
    alone = run(capsys, *options, "--kind", "fp32")
    for by in ("heads", "context"):
        assert main([*map(str, options), "--kind", "fp32", "--shards", "2", "--by", by]) == 0
        output = capsys.readouterr()
        assert output.out.splitlines()[0] == alone.splitlines()[0]
        assert f"2 shards by {by} got" in output.err
        assert "0 tokens were computed again" in output.err


def test_without_ray_the_command_says_what_to_install(tiny, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["--model", str(tiny), "--prompt", "a", "--tokens", "1", "--shards", "2"]) == 2
    assert "numkv[ray]" in capsys.readouterr().err
