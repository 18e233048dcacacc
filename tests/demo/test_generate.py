"""Sampling and generating."""

import numpy as np
import pytest
from demo_models import TOKENS, reference_logits, write_checkpoint

from numkv.demo.generate import Replay, Sampler, generate
from numkv.demo.model import Model


def test_sampler():
    logits = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    assert Sampler().choose(logits) == 1
    assert Sampler(temperature=5.0, top_k=1).choose(logits) == 1
    assert Sampler(temperature=1e-320, top_k=2).choose(-100 * logits) == 0
    assert Sampler(temperature=1e-320, top_k=2).choose(100 - logits) == 0
    draws = {seed: [Sampler(1.0, seed=seed).choose(logits)] for seed in (1, 2)}
    for seed, drawn in draws.items():
        again = Sampler(1.0, seed=seed)
        assert [again.choose(logits)] == drawn
    sampler = Sampler(1.0)
    shares = np.bincount([sampler.choose(logits) for _ in range(4000)], minlength=3) / 4000
    np.testing.assert_allclose(shares, [0.1, 0.6, 0.3], atol=0.03)
    sampler = Sampler(1.0, top_k=2)
    shares = np.bincount([sampler.choose(logits) for _ in range(4000)], minlength=3) / 4000
    np.testing.assert_allclose(shares, [0, 2 / 3, 1 / 3], atol=0.03)


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_k": -1}])
def test_bad_sampling_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Sampler(**options)


def continued(model, prompt, limit, chooser, stop=()):
    sessions, logits = model.batch([16]).prefill([prompt])
    return list(generate(sessions, logits, [limit], [chooser], stop))


def test_generate_is_greedy_argmax(tmp_path):
    config, weights = write_checkpoint(tmp_path)
    model = Model.load(tmp_path)
    steps = continued(model, TOKENS, 5, Sampler())
    assert steps.pop().token is None
    expected = list(TOKENS)
    for step in steps:
        logits = reference_logits(config, weights, expected)[-1]
        np.testing.assert_allclose(step.logits, logits, atol=2e-5)
        expected.append(int(logits.argmax()))
    tokens = [step.token for step in steps]
    assert tokens == expected[len(TOKENS) :]
    stopped = [step.token for step in continued(model, TOKENS, 5, Sampler(), {tokens[2]})]
    assert stopped == [*tokens[: tokens.index(tokens[2])], None]


def test_replay_repeats(tmp_path):
    write_checkpoint(tmp_path)
    model = Model.load(tmp_path)
    steps = continued(model, TOKENS, 2, Replay([7, 8]))
    assert [step.token for step in steps] == [7, 8, None]
    np.testing.assert_allclose(
        steps[1].logits, model.start(16).forward([*TOKENS, 7])[-1], atol=1e-5
    )
    assert [step.token for step in continued(model, TOKENS, 0, Replay([]))] == [None]
