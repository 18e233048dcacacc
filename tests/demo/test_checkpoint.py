"""Checkpoints: configuration, rotation, stored dtypes, files that are broken."""

import json
import math

import ml_dtypes
import numpy as np
import pytest
from demo_models import SIZES, write_checkpoint
from safetensors.numpy import save_file

import numkv
from numkv.demo.checkpoint import CheckpointError, ModelConfig, load_weights
from numkv.demo.model import Model
from numkv.demo.network import rotary_tables

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


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
    for damaged in ("{", "[" * 100_000):
        (tmp_path / "config.json").write_text(damaged)
        with pytest.raises(CheckpointError, match="not valid JSON"):
            Model.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected an object"):
        Model.load(tmp_path)


def test_damaged_weights_are_refused_by_name(tmp_path):
    """Cut off, too long, headers that lie; whatever dtype tensors have that nobody takes is fine."""
    write_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    name = next(x for x in header if x != "__metadata__")
    lies = [
        {"dtype": "F31"}, {"shape": [-1, 24]}, {"shape": [2**62, 2**62]}, {"data_offsets": [0, 2**40]},
        {"dtype": "F64"},
    ]  # fmt: skip
    headers = [json.dumps(header | {name: header[name] | lie}).encode() for lie in lies]
    for bad in (
        data[:9], data[: start - 1], data[:-1], data + b"x", (2**63).to_bytes(8, "little") + data[8:],
        *(len(x).to_bytes(8, "little") + x + data[start:] for x in (*headers, b"[" * 5000, b"\xff{}")),
    ):  # fmt: skip
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: not a safetensors file"):
            Model.load(tmp_path)
    path.write_bytes(data)
    Model.load(tmp_path)


def test_harmless_extra_tensors(tmp_path):
    _, weights = write_checkpoint(tmp_path)
    stored = {name: x.astype(np.float32) for name, x in weights.items()}
    stored["lm_head.weight"] = np.zeros((256, 24), np.float32)
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.uint64)
    save_file(stored, tmp_path / "model.safetensors")
    weights = Model.load(tmp_path).weights
    assert weights.output is weights.embedding
