"""The forward pass of the demo, and its bundled model."""

from dataclasses import replace

import numpy as np
import pytest
from demo_models import TOKENS, reference_logits, write_checkpoint
from safetensors.numpy import save_file

import numkv
from numkv.demo import BUNDLED_MODEL
from numkv.demo.cache import CacheChoice, LayerCache
from numkv.demo.evaluate import Document, evaluate, held_out
from numkv.demo.model import Model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


# ---------------------------------------------------------------- the forward pass


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_are_the_references(tmp_path, target, model_type, tied):
    config, weights = write_checkpoint(tmp_path, model_type, tie_word_embeddings=tied)
    tokens = TOKENS if target == "cpu" else TOKENS[:4]
    logits = Model.load(tmp_path).start(16, target=target).forward(tokens)
    assert logits.dtype == np.float32
    expected = reference_logits(config, weights, tokens)
    np.testing.assert_allclose(logits, expected, atol=1e-4 if target == "cuda" else 2e-5)


def test_chunks_do_not_matter(tmp_path, target):
    write_checkpoint(tmp_path)
    model = Model.load(tmp_path)
    tokens = TOKENS if target == "cpu" else TOKENS[:5]
    whole = model.start(16, target=target).forward(tokens)
    one_by_one = model.start(16, target=target)
    steps = np.array([one_by_one.step(token) for token in tokens])
    np.testing.assert_allclose(steps, whole, atol=1e-5)
    seen = []
    chunked = model.start(16, target=target)
    last = chunked.prefill(tokens, lambda done, total: seen.append((done, total)), chunk=2)
    np.testing.assert_allclose(last, whole[-1], atol=1e-5)
    assert seen == [(min(n, len(tokens)), len(tokens)) for n in range(2, len(tokens) + 2, 2)]
    assert chunked.num_tokens == one_by_one.num_tokens == len(tokens)


def test_rewind_forgets(tmp_path):
    write_checkpoint(tmp_path)
    session = Model.load(tmp_path).start(16)
    expected = session.forward(TOKENS)
    session.rewind(3)
    assert session.num_tokens == 3
    np.testing.assert_allclose(session.forward(TOKENS[3:]), expected[3:], atol=1e-5)


@pytest.mark.parametrize(
    ("kinds", "atol"),
    [
        ("fp32", 2e-5), ("fp16", 5e-3), ("int8", 0.1),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("fp64", 2e-5), ("bf16", 5e-2), ("int8/fp16", 0.1), ("fp16/fp32", 0.1), ("fp32/int8", 0.1),
            )
        ),
    ],
)  # fmt: skip
def test_every_kind_of_cache_computes(tmp_path, kinds, atol):
    config, weights = write_checkpoint(tmp_path)
    expected = reference_logits(config, weights, TOKENS)
    choice = CacheChoice.parse(kinds)
    logits = Model.load(tmp_path).start(16, choice).forward(TOKENS)
    np.testing.assert_allclose(logits, expected, atol=atol)


@pytest.mark.parametrize("kinds", ["fp16", "fp64", "int8", "fp32/bf16", "int8/fp16"])
def test_bytes_per_token_are_those_of_the_layers(tmp_path, kinds):
    write_checkpoint(tmp_path)
    choice = CacheChoice.parse(kinds)
    assert choice.label == kinds
    model = Model.load(tmp_path)
    layers = model.start(16, choice).batch.cache.layers
    assert {layer.nbytes for layer in layers} == {16 * choice.bytes_per_token(2, 8)}
    paged = model.start(16, replace(choice, block_size=4)).batch.cache
    assert paged.nbytes == len(layers) * layers[0].nbytes
    assert choice.bytes_per_token(2, 8, 4) < choice.bytes_per_token(2, 8)


def test_a_large_gate_does_not_warn(tmp_path):
    _, weights = write_checkpoint(tmp_path)
    weights["model.layers.0.mlp.gate_proj.weight"] *= -1e4
    save_file({n: x.astype(np.float32) for n, x in weights.items()}, tmp_path / "model.safetensors")
    assert np.isfinite(Model.load(tmp_path).start(16).forward(TOKENS)).all()


def test_bad_tokens_and_full_caches_change_nothing(tmp_path):
    write_checkpoint(tmp_path)
    session = Model.load(tmp_path).start(4)
    session.forward([1, 2, 3])
    for bad in ([256], [-1]):
        with pytest.raises(IndexError, match="tokens"):
            session.forward(bad)
    with pytest.raises(numkv.CacheFull):
        session.forward([1, 2])
    with pytest.raises(ValueError, match="tokens"):
        session.prefill([])
    assert session.num_tokens == 3


def test_a_step_that_fails_half_way_changes_nothing(tmp_path):
    write_checkpoint(tmp_path)
    model = Model.load(tmp_path)
    expected = model.start(8).forward([1, 2, 3])

    class Failing(numkv.ContiguousLayer):
        broken = False

        def decode_attention(self, *arguments, **options):
            if self.broken:
                raise RuntimeError("broken")
            return super().decode_attention(*arguments, **options)

    layers = [Failing(8, 2, 8, kind="fp32") for _ in range(2)]
    session = model.start(8, lambda *_: LayerCache(layers))
    session.forward([1, 2])
    layers[1].broken = True
    with pytest.raises(RuntimeError, match="broken"):
        session.forward([5, 6])
    assert [layer.seq_len for layer in layers] == [2, 2]
    layers[1].broken = False
    np.testing.assert_allclose(session.forward([3])[0], expected[2], atol=1e-5)


# ---------------------------------------------------------------- the bundled model


@pytest.mark.slow
def test_bundled_model_is_small_and_good():
    model = Model.load()
    assert model.weights.num_parameters <= 4_900_000
    assert model.config.max_context >= 2048
    assert model.config.num_q_heads >= 4 * model.config.num_kv_heads
    document = next(d for d in held_out().documents if d.name == "sched.py")
    (score,) = evaluate(model, [Document(document.name, document.text[:3000])], {})
    assert score.bits_per_byte < 1.9


@pytest.mark.parametrize("folder", ["bundled", "llama3"])
def test_logits_match_transformers(tmp_path, folder):
    reason = "compares with transformers, which needs torch; neither is a dependency"
    transformers = pytest.importorskip("transformers", reason=reason)
    torch = pytest.importorskip("torch", reason=reason)
    path = BUNDLED_MODEL
    if folder == "llama3":
        path = tmp_path
        write_checkpoint(path, "llama", rope_scaling=LLAMA3, tie_word_embeddings=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = Model.load(path)
    text = "".join(d.text for d in held_out().documents)
    tokens = model.tokenizer.encode(text)[: model.config.max_context]
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0].numpy()
    logits = model.start().forward(tokens)
    difference = np.abs(logits - expected).max()
    print(f"largest difference of {logits.size} logits from transformers': {difference:.2e}")
    assert difference < 1e-4
