"""A decoder in NumPy: Qwen3, which is Llama with normed queries and keys, over a KV cache of numkv.

It reads the model that comes with numkv, whose tokens are bytes, and continues some Python.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

import numkv

MODEL = Path(numkv.__file__).parent / "demo" / "model"
PROMPT = "def mean(values):\n    "


def weights_of(folder):
    """The tensors of a safetensors file: a length, a header in JSON, and the bytes."""
    data = (folder / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, x in json.loads(data[8:begin]).items():
        if name != "__metadata__":
            first, end = (begin + at for at in x["data_offsets"])
            values = np.frombuffer(data[first:end], ml_dtypes.bfloat16)
            name = name.removeprefix("model.").removesuffix(".weight")
            tensors[name] = values.reshape(x["shape"]).astype(np.float32)
    return tensors


def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


class Decoder:
    """The layers of a model; all that it keeps of earlier tokens is in the cache."""

    def __init__(self, folder=MODEL):
        self.config, self.weights = (
            json.loads((folder / "config.json").read_text()),
            weights_of(folder),
        )
        self.layers, self.dim = self.config["num_hidden_layers"], self.config["head_dim"]
        self.kv_heads = self.config["num_key_value_heads"]

    def rope(self, x, positions):
        """Rotate pairs of channels by angles that grow with the position: half-split, as in Llama."""
        half = self.dim // 2
        angle = positions[:, None] * self.config["rope_theta"] ** (-np.arange(half) / half)
        cos, sin = (f(angle).astype(np.float32)[:, None] for f in (np.cos, np.sin))
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, tokens, positions, append, attend):
        """Hidden states of new tokens: their K and V go into the cache, their queries attend to it."""
        x = self.weights["embed_tokens"][tokens]
        for layer in range(self.layers):

            def linear(x, name, layer=layer):
                return x @ self.weights[f"layers.{layer}.{name}"].T

            def normed(x, name, layer=layer):
                return norm(x, self.weights[f"layers.{layer}.{name}"])

            h = normed(x, "input_layernorm")
            q, k, v = (
                linear(h, f"self_attn.{n}_proj").reshape(len(x), -1, self.dim) for n in "qkv"
            )
            q, k = normed(q, "self_attn.q_norm"), normed(k, "self_attn.k_norm")
            append(layer, self.rope(k, positions), v)
            out = attend(layer, self.rope(q, positions))
            x = x + linear(out.reshape(len(x), -1), "self_attn.o_proj")
            h = normed(x, "post_attention_layernorm")
            gate, up = linear(h, "mlp.gate_proj"), linear(h, "mlp.up_proj")
            x = x + linear(gate / (1 + np.exp(-gate)) * up, "mlp.down_proj")
        return norm(x, self.weights["norm"])

    def next_tokens(self, hidden):
        """The most probable token after each hidden state; the output matrix is the embedding."""
        return (hidden @ self.weights["embed_tokens"].T).argmax(-1)


def main(prompt=PROMPT, tokens=80, **storage):
    model = Decoder()
    cache = numkv.KVCache(model.layers, model.kv_heads, model.dim, **storage)
    new, text = np.array([0, *prompt.encode()]), []
    for _ in range(tokens):
        positions = len(cache) + np.arange(len(new))
        hidden = model.forward(new, positions, cache.append, cache.decode_attention)
        cache.advance(len(new))
        new = model.next_tokens(hidden[-1:])
        text.append(int(new[0]))
    print(prompt + bytes(text).decode(errors="replace"))
    print(f"{len(cache)} tokens, {cache.nbytes / len(cache):,.0f} bytes each")
    return text


if __name__ == "__main__":
    main(kind="fp16")
