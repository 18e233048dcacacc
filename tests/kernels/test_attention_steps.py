"""Steps of attention that are compiled in the middle of a call: results are those of a call that has them all."""

import numpy as np
import pytest

import numkv
from numkv.kernels.cpu import attention
from numkv.kernels.cpu.attention import state
from numkv.kernels.cpu.attention.steps import Steps
from numkv.kernels.cpu.vectors.features import LANES

LENGTH, DIM = 300, 32


@pytest.fixture
def fresh(monkeypatch):
    """Tables of steps without any, and which have been made of them since."""
    made = []

    class Noted(Steps):
        def kernel(self, step):
            made.append(step)
            return super().kernel(step)

    tables = {}

    def steps_for(*key):
        return tables.setdefault(key, Noted(*key))

    monkeypatch.setattr(attention, "steps_for", steps_for)
    monkeypatch.setattr(attention, "_engine", attention._engine.__wrapped__)
    return made


def problem(rng, tokens=1, group=4, heads=3, block_size=16, last=None):
    """Queries and pools of two sequences, with something else in the last V row."""
    q = rng.standard_normal((2 * tokens, heads * group, DIM)).astype(np.float32)
    blocks = -(-LENGTH // block_size)
    k, v = rng.standard_normal((2, 2 * blocks, heads, block_size, DIM)).astype(np.float32)
    if last is not None:
        v[blocks - 1, :, (LENGTH - 1) % block_size] = last
    table = np.arange(2 * blocks, dtype=np.int32).reshape(2, blocks)
    return q, k, v, table, np.array([LENGTH, LENGTH - 9]), np.arange(3) * tokens


def reference(q, k, v, table, lens, starts):
    """Causal attention in float64."""
    group = q.shape[1] // k.shape[1]
    out = np.empty(q.shape)
    for b, length in enumerate(lens):
        rows_k, rows_v = (
            np.moveaxis(x[table[b]], 1, 0).reshape(x.shape[1], -1, DIM)[:, :length].astype(float)
            for x in (k, v)
        )
        tokens = range(starts[b], starts[b + 1])
        for i, t in enumerate(tokens):
            seen = length - len(tokens) + i + 1
            for h in range(q.shape[1]):
                scores = rows_k[h // group, :seen] @ q[t, h].astype(float) / np.sqrt(DIM)
                weights = np.exp(scores - scores.max())
                out[t, h] = weights @ rows_v[h // group, :seen] / weights.sum()
    return out


def attend(q, k, v, table, lens, starts, **options):
    return numkv.paged_prefill_attention(q, k, v, table, lens, starts, **options)


@pytest.mark.parametrize(
    ("tokens", "group", "steps"),
    [
        (1, 1, {state.OF_1}),
        (1, 2, {state.OF_2}),
        (1, 4, {state.OF_4}),
        (1, 9, {state.OF_8 if LANES > 4 else state.OF_4, state.OF_1}),
        (9, 4, {state.ATTEND_MANY, state.WEIGH, state.MULTIPLY}),
    ],
)
def test_a_call_compiles_what_it_needs(rng, fresh, tokens, group, steps):
    given = problem(rng, tokens, group)
    out = attend(*given)
    np.testing.assert_allclose(out, reference(*given), rtol=0, atol=2e-6)
    every = {
        state.OF_1,
        state.OF_2,
        state.OF_4,
        state.OF_8,
        state.ATTEND_MANY,
        state.WEIGH,
        state.MULTIPLY,
    }
    assert set(fresh) & every == steps
    assert len(fresh) == len(set(fresh))
    assert not {state.ADJUST, state.PICK} & set(fresh)
    # With all steps there, the same bits.
    before = len(fresh)
    np.testing.assert_array_equal(attend(*given), out)
    assert len(fresh) == before


def test_few_rows_are_asked_for_in_the_middle(rng, fresh):
    """Only in the last tile queries see different tokens, one of which is infinite: panels do not take it."""
    given = problem(rng, tokens=9, last=np.inf)
    out = attend(*given)
    assert {state.ATTEND_MANY, state.FEW} <= set(fresh)
    np.testing.assert_array_equal(attend(*given), out)
    expected = reference(*given)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)
    # Of the first sequence only the last query sees it.
    assert np.isinf(out[8]).all()
    assert np.isfinite(np.delete(out, 8, axis=0)).all()


def test_a_soft_cap_is_a_step(rng, fresh):
    given = problem(rng)
    capped = attend(*given, logits_soft_cap=5.0)
    assert state.ADJUST in fresh
    assert not np.array_equal(capped, attend(*given))


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
def test_results_over_the_queries_outlive_a_call_that_starts_again(rng, fresh, kind):
    """The first sequence's results are there before the second one needs a step that is not compiled."""
    q, k, v, table, lens, _ = problem(rng, 9, block_size=512)
    q, starts = q[:10].astype(numkv.kind(kind).dtype), np.array([0, 1, 10])
    attend(q[:1], k, v, table[:1], lens[:1], starts[:2])
    before, here = len(fresh), q.copy()
    with numkv.num_threads(1):
        attend(here, k, v, table, lens, starts, out=here)
    assert len(fresh) > before
    assert np.array_equal(here, attend(q, k, v, table, lens, starts))
