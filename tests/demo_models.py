"""Small random checkpoints for the demo and the command line, the architecture in float64, and a command's output."""

import json
import math

import numpy as np
from safetensors.numpy import save_file

SIZES = {
    "vocab_size": 256,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": True,
}
TOKENS = [0, 72, 105, 33, 200, 7, 7, 255, 31]


def tensors_of(config, seed=0):
    """Random float64 weights under their Hugging Face names."""
    rng = np.random.default_rng(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (q_rows, hidden),
            prefix + "self_attn.k_proj.weight": (kv_rows, hidden),
            prefix + "self_attn.v_proj.weight": (kv_rows, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, q_rows),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
        if config["model_type"] == "qwen3":
            shapes[prefix + "self_attn.q_norm.weight"] = (dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (dim,)
    return {
        name: 1 + rng.normal(size=shape) / 4
        if len(shape) == 1
        else rng.normal(size=shape) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }


def write_checkpoint(folder, model_type="qwen3", dtype=np.float32, **changes):
    """Write a small random checkpoint; returns its configuration and weights as stored."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": model_type, **SIZES, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: x.astype(dtype) for name, x in tensors_of(config).items()}
    save_file(stored, folder / "model.safetensors")
    return config, {name: x.astype(np.float64) for name, x in stored.items()}


def reference_logits(config, weights, tokens):
    """The architecture in float64, a head and a position at a time."""
    dim, eps = config["head_dim"], config["rms_norm_eps"]
    num_heads, num_kv = config["num_attention_heads"], config["num_key_value_heads"]
    frequency = config["rope_theta"] ** (-np.arange(0, dim, 2) / dim)

    def norm(x, name):
        return x / np.sqrt((x**2).mean() + eps) * weights[name]

    def rotated(x, position):
        a, b = x[: dim // 2], x[dim // 2 :]
        cos, sin = np.cos(position * frequency), np.sin(position * frequency)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin])

    keys, values, logits = {}, {}, []
    for position, token in enumerate(tokens):
        x = weights["model.embed_tokens.weight"][token]
        for i in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{i}."
            attention = prefix + "self_attn."
            y = norm(x, prefix + "input_layernorm.weight")
            q, k, v = (
                (weights[f"{attention}{name}_proj.weight"] @ y).reshape(-1, dim) for name in "qkv"
            )
            if config["model_type"] == "qwen3":
                q = [norm(head, attention + "q_norm.weight") for head in q]
                k = [norm(head, attention + "k_norm.weight") for head in k]
            for g in range(num_kv):
                keys.setdefault((i, g), []).append(rotated(k[g], position))
                values.setdefault((i, g), []).append(v[g])
            mixed = []
            for h in range(num_heads):
                g = h // (num_heads // num_kv)
                scores = np.array(keys[i, g]) @ rotated(q[h], position) / math.sqrt(dim)
                p = np.exp(scores - scores.max())
                mixed.append(p / p.sum() @ np.array(values[i, g]))
            x = x + weights[attention + "o_proj.weight"] @ np.concatenate(mixed)
            y = norm(x, prefix + "post_attention_layernorm.weight")
            gate = weights[prefix + "mlp.gate_proj.weight"] @ y
            up = weights[prefix + "mlp.up_proj.weight"] @ y
            x = x + weights[prefix + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        output = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        logits.append(output @ norm(x, "model.norm.weight"))
    return np.array(logits)


def run(capsys, *arguments):
    """Run a command that must succeed; returns what it printed."""
    from numkv.cli import main

    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def cells(output, label):
    """The cells of the table row that starts with `label`."""
    return next(line.split() for line in output.splitlines() if line.split()[:1] == [label])
