"""What layers that are not alike cost: steps, attention to rows in pages, states, and parts of blocks of prefixes.

The same model is kept once in a buffer for each layer of a group, and once in pages, which a layer of another kind
beside it brings about; its rows then lie a page apart.
"""

import numpy as np
import pytest

import numkv

SIZE, HEADS, DIM = 16, 4, 64


def make(pages):
    """Eight layers in bf16; in pages there is a ninth, in int8."""
    of_eight, ninth = (numkv.LayerSpec(HEADS, DIM, kind=kind) for kind in ("bf16", "int8"))
    layers = [of_eight] * 8 + [ninth] * pages
    return numkv.PagedKVCache(layers=layers, max_nbytes=340_000_000, block_size=SIZE)


def step_of(cache, seqs, n, ids=None):
    """A step's bookkeeping alone: its rows count as written, though they are not."""
    step = cache.reserve(seqs, n)
    step.mark_written()
    cache.commit(step, token_ids=ids)


@pytest.mark.parametrize("pages", [False, True], ids=["alike", "pages"])
def test_step(host_time, pages):
    """Reserve and commit of a token for each of 8 sequences of 1,000 tokens."""
    cache = make(pages)
    seqs = [cache.add() for _ in range(8)]
    step_of(cache, seqs, 1000)
    host_time(lambda: step_of(cache, seqs, 1))
    cache.check()


@pytest.mark.parametrize("pages", [False, True], ids=["alike", "pages"])
def test_attention(host_time, rng, pages):
    """Decode of 8 sequences of 4,000 tokens in one layer after another, so that rows come from memory."""
    cache = make(pages)
    seqs = [cache.add() for _ in range(8)]
    step_of(cache, seqs, 4000)
    q = rng.standard_normal((8, 4 * HEADS, DIM)).astype(np.float32)
    host_time(lambda: [cache.decode_attention(layer, seqs, q) for layer in range(8)])


@pytest.mark.parametrize("states", [False, True], ids=["rows", "states"])
def test_states(host_time, states):
    """A step of 8 sequences of a model with 6 layers of states of 64 KiB each, beside 2 with rows: no copy."""
    first = numkv.LayerSpec(states=[((16, 32, 32), "float32")] if states else ())
    layers = [first] * 6 + [numkv.LayerSpec(HEADS, DIM, kind="bf16")] * 2
    slots = numkv.StateSlots(64) if states else None
    cache = numkv.PagedKVCache(layers=layers, num_blocks=1024, block_size=SIZE, state_slots=slots)
    seqs = [cache.add() for _ in range(8)]
    host_time(lambda: step_of(cache, seqs, 1))
    cache.check()


@pytest.mark.parametrize("part", [0, 15])
def test_add(host_time, rng, part):
    """Add a prompt of 1,024 tokens and `part` more that is cached, where 200 sequences have other ones."""
    cache = make(False)
    prompt = rng.integers(0, 150_000, 1024 + 16).astype(np.int32)
    step_of(cache, [cache.add()], 1024, prompt[:1024])
    for n in range(200):
        step_of(cache, [cache.add(np.append(prompt[:1024], n))], 1, [n])
    step_of(cache, [cache.add(prompt[:1025])], 16, prompt[1024:])
    text = np.append(prompt[: 1024 + part], 149_999)
    seqs = [cache.add(text)]
    assert cache.cached_len(seqs[0]) == 1024 + part

    def fresh():
        while seqs:
            cache.remove(seqs.pop())

    host_time(lambda: seqs.append(cache.add(text)), fresh)
