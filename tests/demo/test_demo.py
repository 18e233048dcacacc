"""The demo: checkpoints, tokenizers, the forward pass, sampling and evaluation."""

import hashlib
import itertools
import json
import math
import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from demo_models import SIZES, TOKENS, reference_logits, write_checkpoint
from safetensors.numpy import save_file

import numkv
from numkv.demo import BUNDLED_MODEL, blas
from numkv.demo.cache import CacheChoice, LayerCache, Sharing
from numkv.demo.checkpoint import load_weights
from numkv.demo.config import CheckpointError, ModelConfig
from numkv.demo.evaluate import Document, evaluate, held_out
from numkv.demo.generate import Replay, Sampler, generate
from numkv.demo.model import Model
from numkv.demo.rotary import rotary_tables
from numkv.demo.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer

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


def test_every_kind_of_cache_computes(tmp_path):
    config, weights = write_checkpoint(tmp_path)
    expected = reference_logits(config, weights, TOKENS)
    model = Model.load(tmp_path)
    tolerances = {"fp64": 2e-5, "fp32": 2e-5, "fp16": 5e-3, "bf16": 5e-2, "int8": 0.1}
    for kind, atol in tolerances.items():
        logits = model.start(16, CacheChoice(kind)).forward(TOKENS)
        np.testing.assert_allclose(logits, expected, atol=atol, err_msg=kind)
    for kinds in ("fp16/fp32", "int8/fp16", "fp32/int8"):
        apart = model.start(16, CacheChoice.parse(kinds)).forward(TOKENS)
        np.testing.assert_allclose(apart, expected, atol=0.1, err_msg=kinds)


@pytest.mark.parametrize("kinds", ["fp16", "fp64", "int8", "fp32/bf16", "int8/fp16"])
def test_bytes_per_token_are_those_of_the_layers(tmp_path, kinds):
    write_checkpoint(tmp_path)
    choice = CacheChoice.parse(kinds)
    assert choice.label == kinds
    assert choice.has_scales == ("int8" in kinds)
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


# ---------------------------------------------------------------- blocks and batches


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("kinds", ["fp32", "int8/fp16"])
def test_blocks_do_not_matter(tmp_path, target, kinds, block_size):
    """To the last bit on the CPU, where contiguous and paged caches have one kernel."""
    write_checkpoint(tmp_path)
    model = Model.load(tmp_path)
    tokens = TOKENS if target == "cpu" else TOKENS[:4]
    contiguous = CacheChoice.parse(kinds, target)
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
        batch.hidden(sessions, range(12), [6, 6])
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
    # Three full blocks; of a prompt that is nothing else, the last token is computed again.
    assert [session.num_reused for session in sessions] == [0, 6, 4, 0]
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
    functions = blas._openblas()
    if functions is None:
        pytest.skip("NumPy is not linked with OpenBLAS here")
    before = functions[0]()
    with blas.blas_threads_for(weights):
        assert functions[0]() == 1
    assert functions[0]() == before
    monkeypatch.setattr(blas, "_SMALL", 1)
    with blas.blas_threads_for(weights):
        assert functions[0]() == before


# ---------------------------------------------------------------- rotation


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters", "type"])
def test_llama3_scaling(spelling):
    """Against the rule said frequency by frequency, as in the Llama 3.1 release."""
    content = {"model_type": "llama", **SIZES}
    if spelling == "rope_parameters":
        content["rope_parameters"] = {**LLAMA3, "rope_theta": content.pop("rope_theta")}
    elif spelling == "rope_scaling":
        content["rope_scaling"] = LLAMA3
    else:
        content["rope_scaling"] = {**LLAMA3, "type": "llama3"}
        del content["rope_scaling"]["rope_type"]
    config = ModelConfig.from_dict(content)
    assert config.rope_theta == 1000.0
    expected = []
    for j in range(4):
        frequency = 1000.0 ** (-2 * j / 8)
        wavelength = 2 * math.pi / frequency
        if wavelength > 16 / 1.0:
            frequency /= 8
        elif wavelength > 16 / 4.0:
            smooth = (16 / wavelength - 1.0) / (4.0 - 1.0)
            frequency = (1 - smooth) * frequency / 8 + smooth * frequency
        expected.append(frequency)
    cos, sin = rotary_tables(config, 64)
    assert cos.shape == sin.shape == (64, 4)
    angles = np.outer(np.arange(64), expected)
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-5)


def test_defaults():
    content = {"model_type": "llama", **SIZES, "hidden_size": 32}
    for key in ("rope_theta", "head_dim", "num_key_value_heads", "bos_token_id", "eos_token_id"):
        del content[key]
    config = ModelConfig.from_dict(content)
    assert (config.rope_theta, config.head_dim, config.num_kv_heads) == (10000.0, 8, 4)
    assert (config.bos_token, config.eos_tokens) == (None, ())
    assert ModelConfig.from_dict({**content, "model_type": "qwen3"}).head_dim == 128


def test_end_tokens(tmp_path):
    write_checkpoint(tmp_path)
    assert ModelConfig.read(tmp_path).eos_tokens == (0,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert ModelConfig.read(tmp_path).eos_tokens == (3, 4)


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
def test_stored_dtypes(tmp_path, dtype):
    _, weights = write_checkpoint(tmp_path, dtype=dtype)
    loaded = load_weights(tmp_path, ModelConfig.read(tmp_path))
    assert loaded.output is loaded.embedding
    assert loaded.embedding.dtype == np.float32
    stored = weights["model.embed_tokens.weight"].astype(np.float32)
    np.testing.assert_array_equal(loaded.embedding, stored)
    k_rows = loaded.layers[1].qkv[32:48]
    stored = weights["model.layers.1.self_attn.k_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(k_rows, stored)
    assert loaded.num_parameters == sum(x.size for x in weights.values())


def test_shards(tmp_path):
    _, weights = write_checkpoint(tmp_path, tie_word_embeddings=False)
    seen = []
    whole = load_weights(tmp_path, ModelConfig.read(tmp_path), lambda *n: seen.append(n))
    assert seen[-1] == (len(weights), len(weights))
    (tmp_path / "model.safetensors").unlink()
    names, weight_map = sorted(weights), {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i}.safetensors"
        save_file({name: weights[name].astype(np.float32) for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    sharded = load_weights(tmp_path, ModelConfig.read(tmp_path))
    np.testing.assert_array_equal(sharded.output, whole.output)
    np.testing.assert_array_equal(sharded.layers[1].gate_up, whole.layers[1].gate_up)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-1"):
        Model.load(tmp_path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map"):
        Model.load(tmp_path)
    index.unlink()
    with pytest.raises(FileNotFoundError, match="neither"):
        Model.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"model_type": "gpt2"}, numkv.NotSupported, "gpt2"),
        ({"attention_bias": True}, numkv.NotSupported, "attention_bias"),
        ({"use_sliding_window": True}, numkv.NotSupported, "use_sliding_window"),
        ({"quantization_config": {"bits": 4}}, numkv.NotSupported, "quantization_config"),
        ({"hidden_act": "gelu"}, numkv.NotSupported, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn"}}, numkv.NotSupported, "yarn"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, numkv.NotSupported, "partial"),
        ({"rope_scaling": {"rope_type": "llama3"}}, CheckpointError, "factor"),
        ({"hidden_size": None}, CheckpointError, "hidden_size is missing"),
        ({"hidden_size": "24"}, CheckpointError, "positive integer, got '24'"),
        ({"num_key_value_heads": 3}, CheckpointError, "evenly"),
        ({"head_dim": 7}, CheckpointError, "odd"),
        ({"vocab_size": 300}, CheckpointError, "no tokenizer.json"),
        ({"intermediate_size": 41}, CheckpointError, r"expected shape \(41, 24\), got \(40, 24\)"),
        ({"num_hidden_layers": 3}, CheckpointError, "layers.2.* is missing"),
        ({"num_hidden_layers": 1}, CheckpointError, "no place"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, changes, error, match):
    config, _ = write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(error, match=match):
        Model.load(tmp_path)


def test_broken_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        Model.load(tmp_path)
    _, weights = write_checkpoint(tmp_path)
    stored = {name: x.astype(np.float32) for name, x in weights.items()}
    stored["model.norm.weight"] = np.ones(24, np.int8)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm.*float dtype, got int8"):
        Model.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        Model.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        Model.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected an object"):
        Model.load(tmp_path)


def test_harmless_extra_tensors(tmp_path):
    _, weights = write_checkpoint(tmp_path)
    stored = {name: x.astype(np.float32) for name, x in weights.items()}
    stored["lm_head.weight"] = np.zeros((256, 24), np.float32)
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    save_file(stored, tmp_path / "model.safetensors")
    weights = Model.load(tmp_path).weights
    assert weights.output is weights.embedding


# ---------------------------------------------------------------- tokenizers

TEXT = "naïve – 日本 🎉\n"


def test_bytes_stream_whole_characters():
    tokenizer = ByteTokenizer(bos_token=0)
    tokens = tokenizer.encode(TEXT)
    assert tokens == [0, *TEXT.encode()]
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokens[1:]]
    assert "".join(pieces) + stream.finish() == TEXT
    assert "\ufffd" not in "".join(pieces)
    stream.push(0xE2)
    assert stream.finish() == "\ufffd"


def json_tokenizer(path, texts=(TEXT * 20,)):
    """A small byte-level BPE, as Qwen and Llama 3 use."""
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers library is an extra")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    backend.save(str(path))


def test_tokenizer_json_streams_whole_characters(tmp_path):
    json_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    for text in (TEXT, "ab é ŵ " * 3 + "🎈"):
        tokens, stream = tokenizer.encode(text), tokenizer.stream()
        pieces = [stream.push(token) for token in tokens]
        assert "".join(pieces) + stream.finish() == text
        assert "\ufffd" not in "".join(pieces)
    stream = tokenizer.stream()
    assert [stream.push(token) for token in tokenizer.encode("🎉")[:1]] == [""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_tokenizer_json_must_fit_the_model(tmp_path):
    json_tokenizer(tmp_path / "tokenizer.json")
    write_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="the model knows 256"):
        Model.load(tmp_path)
    write_checkpoint(tmp_path, vocab_size=280)
    tokens = Model.load(tmp_path).tokenizer.encode(TEXT)
    assert len(tokens) < len(TEXT.encode())


def test_broken_tokenizer_json(tmp_path):
    pytest.importorskip("tokenizers", reason="the tokenizers library is an extra")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        JsonTokenizer(tmp_path / "tokenizer.json")


def test_tokenizers_library_is_optional(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    config = ModelConfig.from_dict({"model_type": "llama", **SIZES})
    assert isinstance(load_tokenizer(tmp_path, config), ByteTokenizer)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(numkv.NotSupported, match="pip install tokenizers"):
        load_tokenizer(tmp_path, config)


# ---------------------------------------------------------------- generating


def test_sampler():
    logits = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    assert Sampler().choose(logits) == 1
    assert Sampler(temperature=5.0, top_k=1).choose(logits) == 1
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


# ---------------------------------------------------------------- evaluation


def expected_bits(config, weights, texts, context):
    """Windows of `context` inputs every half context; each byte scored in the first that has it."""
    bits = size = 0
    for text in texts:
        tokens = [0, *text.encode()]
        size += len(tokens) - 1
        for target in range(1, len(tokens)):
            begin = 0
            while target > begin + context:
                begin += context // 2
            logits = reference_logits(config, weights, tokens[begin:target])[-1]
            p = np.exp(logits - logits.max())
            bits -= np.log2(p[tokens[target]] / p.sum())
    return bits / size


def test_evaluate(tmp_path):
    config, weights = write_checkpoint(tmp_path)
    texts = ["def f(x):\n    return x + 1\n", "é", "import os\n"]
    documents = [Document(str(i), text) for i, text in enumerate(texts)]
    caches = {"same": CacheChoice("fp32"), "coarse": CacheChoice("bf16", block_size=4)}
    seen = []
    reference, same, coarse = evaluate(
        Model.load(tmp_path), documents, caches, context=8, progress=lambda *n: seen.append(n)
    )
    size = sum(len(text.encode()) for text in texts)
    assert [s.label for s in (reference, same, coarse)] == ["reference", "same", "coarse"]
    assert all((s.num_tokens, s.num_bytes) == (size, size) for s in (reference, same, coarse))
    assert seen[-1][0] == seen[-1][1]
    expected = expected_bits(config, weights, texts, 8)
    assert reference.bits_per_byte == pytest.approx(expected, abs=1e-5)
    assert same.bits_per_byte == reference.bits_per_byte
    assert (same.kl_divergence, same.agreement) == (0, 1)
    assert 1e-9 < coarse.kl_divergence < 1e-3
    assert coarse.agreement > 0.9
    assert coarse.bits_per_byte == pytest.approx(expected, abs=1e-2)


def test_evaluate_refuses(tmp_path):
    write_checkpoint(tmp_path)
    model = Model.load(tmp_path)
    for context in (1, 65):
        with pytest.raises(ValueError, match="context"):
            evaluate(model, [Document("", "text")], {}, context=context)
    with pytest.raises(ValueError, match="documents"):
        evaluate(model, [Document("", "")], {})


def test_held_out(tmp_path):
    texts = {"a.py": b"import b\n", "b.py": b"x = 1\n"}
    entries = [{"name": n, "sha256": hashlib.sha256(t).hexdigest()} for n, t in texts.items()]
    listing = tmp_path / "heldout.json"
    listing.write_text(json.dumps({"python": "3.11.7", "modules": entries}))
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    found = held_out(listing, tmp_path)
    assert found.is_reference
    assert [(d.name, d.text.encode()) for d in found.documents] == list(texts.items())
    assert str(found) == "2 held-out modules, exactly those of Python 3.11.7"
    (tmp_path / "a.py").write_bytes(b"import c\n")
    (tmp_path / "b.py").unlink()
    found = held_out(listing, tmp_path)
    assert not found.is_reference
    assert (found.changed, found.missing) == (("a.py",), ("b.py",))
    assert "not the reference text of Python 3.11.7; 1 differ; missing: b.py" in str(found)


# ---------------------------------------------------------------- the bundled model


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
