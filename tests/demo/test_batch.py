"""Texts in blocks and in batches."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from demo_models import TOKENS, write_checkpoint

import numkv
from numkv.demo import network
from numkv.demo.cache import CacheChoice, Sharing
from numkv.demo.generate import Sampler, generate
from numkv.demo.model import Model


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("kinds", ["fp32", pytest.param("int8/fp16", marks=pytest.mark.nightly)])
def test_blocks_do_not_matter(tmp_path, target, kinds, block_size):
    """To the last bit on the CPU, where contiguous and paged caches have one kernel."""
    write_checkpoint(tmp_path)
    model = Model.load(tmp_path)
    tokens = TOKENS if target == "cpu" else TOKENS[:4]
    contiguous = replace(CacheChoice.parse(kinds), target=target)
    logits = []
    for choice in (contiguous, replace(contiguous, block_size=block_size)):
        session = model.start(16, choice, target)
        session.forward([9, 9])
        session.rewind(0)
        logits.append(np.array([*session.forward(tokens[:-1]), session.step(tokens[-1])]))
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4 if target == "cuda" else 0)


def test_full_blocks_and_bad_tokens_change_nothing(tmp_path):
    write_checkpoint(tmp_path)
    model = Model.load(tmp_path)
    batch = model.batch([4, 5], CacheChoice(block_size=2))
    sessions, logits = batch.prefill([[1, 2], [3]])
    assert logits.shape == (2, 256)
    with pytest.raises(IndexError, match="tokens"):
        batch.step(sessions, [7, 256])
    with pytest.raises(numkv.CacheFull):
        batch.hidden([s.seq for s in sessions], range(12), [6, 6])
    assert [session.num_tokens for session in sessions] == [2, 1]
    batch.cache.check()


def test_several_texts_need_blocks(tmp_path):
    write_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="block_size"):
        Model.load(tmp_path).batch([4, 4])


def test_texts_of_a_batch_are_those_alone(tmp_path, target):
    """Within rounding: NumPy multiplies a matrix with one row in another order than with several."""
    write_checkpoint(tmp_path)
    model = Model.load(tmp_path)
    prompts = [TOKENS[:5], [*TOKENS[:4], 9], [8]]
    length = 5 if target == "cpu" else 2
    choice = CacheChoice("int8", target=target, block_size=2)
    batch = model.batch([5 + length] * 3, choice, target)
    sessions, first = batch.prefill(prompts)
    limits = [length, 1, length]
    chosen = list(generate(sessions, first, limits, [Sampler() for _ in prompts]))
    assert [step.text for step in chosen[:4]] == [0, 1, 1, 2]  # the end of 1 leaves 0 and 2 alone
    for text, prompt in enumerate(prompts):
        mine = [step for step in chosen if step.text == text]
        assert [step.token is None for step in mine] == [False] * limits[text] + [True]
        alone = model.start(5 + length, choice, target)
        np.testing.assert_allclose(mine[0].logits, alone.prefill(prompt), atol=1e-4)
        for step, after in itertools.pairwise(mine[:-1]):
            np.testing.assert_allclose(after.logits, alone.step(step.token), atol=1e-4)
    batch.cache.check()


def test_a_shared_prefix_is_stored_once(tmp_path, target):
    write_checkpoint(tmp_path)
    model = Model.load(tmp_path)
    prompts = [[*TOKENS[:6], 1], [*TOKENS[:6], 2, 3], TOKENS[:6], [50]]
    batch = model.batch([12] * 4, CacheChoice("fp16", target=target, block_size=2), target)
    seen = []
    sessions, _ = batch.prefill(prompts, lambda *n: seen.append(n))
    # Three full blocks; of a prompt that is nothing else two and a part, as its last token is computed again.
    assert [session.num_reused for session in sessions] == [0, 6, 5, 0]
    assert seen == [(7, 22), (15, 22), (21, 22), (22, 22)]
    assert [session.num_tokens for session in sessions] == [7, 8, 6, 1]
    batch.step(sessions[:2], [5, 5])
    batch.cache.check()
    sharing = Sharing.of(batch.cache)
    assert sharing == Sharing(num_tokens=24, num_stored=14, num_blocks=8, num_shared=3)


def test_small_models_take_one_blas_thread(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    write_checkpoint(tmp_path)
    weights = Model.load(tmp_path).weights
    functions = network._openblas()
    if functions is None:
        pytest.skip("NumPy is not linked with OpenBLAS here")
    before = functions[0]()
    with network.blas_threads_for(weights):
        assert functions[0]() == 1
    assert functions[0]() == before
    monkeypatch.setattr(network, "_SMALL", 1)
    with network.blas_threads_for(weights):
        assert functions[0]() == before
