"""A text that outlives its context."""

import numpy as np
import pytest
from demo_models import write_checkpoint

import numkv
from numkv.cli import main
from numkv.demo.cache import CacheChoice
from numkv.demo.model import Batch, Model
from numkv.demo.network import Network
from numkv.demo.stream import ShiftingCache, num_to_discard


@pytest.mark.parametrize(
    ("context", "keep", "tokens", "gone"),
    [
        (2048, 5, 2048, 1021), (2048, 2047, 2048, 1), (2048, 0, 2048, 1024), (2048, 5, 5000, 3973),
        (2048, 2047, 5000, 2953), (2048, 5, 512, 0), (10, 2, 10, 4),
    ],
)  # fmt: skip
def test_num_to_discard(context, keep, tokens, gone):
    assert num_to_discard(context, keep, tokens) == gone


def session(model, context, keep, choice):
    cache = ShiftingCache(model.config, context, keep, choice)
    return cache, Batch(Network(model.config, model.weights, context, choice.target), cache).start()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Random models of one and of two layers."""
    found = {}
    for layers in (1, 2):
        folder = tmp_path_factory.mktemp("model")
        write_checkpoint(folder, eos_token_id=None, num_hidden_layers=layers)
        found[layers] = Model.load(folder)
    return found


@pytest.fixture
def model(models):
    return models[2]


def test_without_a_shift_it_is_any_other_cache(model, target):
    tokens = [1, 5, 2, 7, 3, 3, 0]
    choice = CacheChoice("fp32", target=target)
    _, mine = session(model, 16, 4, choice)
    other = model.start(16, choice, target)
    np.testing.assert_allclose(mine.forward(tokens), other.forward(tokens), atol=2e-5)
    mine.rewind(3)
    other.rewind(3)
    np.testing.assert_allclose(mine.step(4), other.step(4), atol=2e-5)


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8"])
def test_a_shifted_text_is_one_that_never_had_the_middle(models, target, kind):
    """With one layer, K and V of a token depend on nothing before it, so the two are the same."""
    model = models[1]
    choice = CacheChoice(kind, target=target)
    cache, mine = session(model, 12, 3, choice)
    tokens = np.random.default_rng(0).integers(0, 8, 14).tolist()
    mine.prefill(tokens[:12])
    shifted = mine.step(tokens[12])
    (shift,) = cache.shifts
    assert (shift.num_tokens, shift.begin, shift.end) == (12, 3, 7)
    assert mine.num_tokens == 9
    _, fresh = session(model, 12, 3, choice)
    expected = fresh.forward(tokens[:3] + tokens[7:13])[-1]
    bound = {"fp32": 2e-5, "fp16": 5e-3, "int8": 0.1}[kind]
    np.testing.assert_allclose(shifted, expected, atol=bound)


def test_more_new_tokens_than_there_can_be_room_for(model):
    cache, mine = session(model, 8, 3, CacheChoice("fp32"))
    mine.forward([1, 2, 3, 4])
    with pytest.raises(numkv.CacheFull, match="at most 5 new tokens"):
        mine.forward([0] * 6)
    assert mine.num_tokens == 4
    assert cache.shifts == []


def test_the_command(tmp_path, capsys):
    write_checkpoint(tmp_path, eos_token_id=None)
    options = ["--context", "16", "--keep", "4", "--tokens", "40", "--kind", "int8/fp16"]
    assert main(["stream", "--model", str(tmp_path), "--prompt", "def f", *options]) == 0
    output = capsys.readouterr().out
    assert "in the cache before the first shift: 16 tokens" in output
    assert "and after it: 10 tokens, the last 6 shifted" in output
    assert "[… 6 tokens dropped …]" in output
    assert "40 tokens" in output
    least = ["--prompt", "d", "--context", "2", "--keep", "0", "--tokens", "1"]
    assert main(["stream", "--model", str(tmp_path), *least]) == 0
    assert "first shift" not in capsys.readouterr().out
    assert main(["stream", "--model", str(tmp_path), "--context", "8", "--keep", "8"]) == 2
    assert "--keep" in capsys.readouterr().err
