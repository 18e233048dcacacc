"""Interrupts before lines of what changes a whole `NumkvCache`."""

import pytest
from interrupts import raising_signals, walk

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from numkv.transformers import NumkvCache, use  # noqa: E402

SIZES = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 20,
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return use(LlamaForCausalLM(LlamaConfig(**SIZES)).eval(), kind="int8")


def see(cache):
    found = []
    for layer in cache.layers:
        metadata, pool = layer.metadata, layer.pool
        tokens = [
            pool.k[block].tobytes()
            for block in metadata.table[:, : -(-metadata.columns // metadata.block_size)].reshape(
                -1
            )
        ]
        found.append([metadata.columns, metadata.lengths.tolist(), tokens])
    return found


CALLS = {
    "crop": lambda c: c.crop(-3),
    "reorder_cache": lambda c: c.reorder_cache(torch.tensor([2, 0, 0])),
    "batch_repeat_interleave": lambda c: c.batch_repeat_interleave(2),
    "batch_select_indices": lambda c: c.batch_select_indices(torch.tensor([1])),
    "reset": lambda c: c.reset(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_signal_at_a_line(model, call):
    def make():
        cache = NumkvCache(model.config, kind="int8")
        with torch.no_grad():
            model(torch.arange(21).reshape(3, 7) % 20, past_key_values=cache)
        return cache

    with raising_signals():
        walk(make, CALLS[call], see, samples=30, name=call)
