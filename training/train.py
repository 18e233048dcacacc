"""Train the bundled demo model: a small byte-level decoder of the Qwen3 architecture.

The matrices are trained with Muon, everything else with AdamW.  The learning rate warms
up, stays, and falls linearly to zero over the last part of the run; the run is measured
in wall-clock minutes, so a faster machine simply sees more text.  Most of the run uses
short windows, the last part windows of the full context.

Run ``python training/train.py --minutes 67``; see ``training/README.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from corpus import CORPUS_JSON, HELDOUT_JSON, load_documents, load_held_out, stdlib_root
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MODEL_DIR = HELDOUT_JSON.parent
SEPARATOR = 0
PHASES = ((0.0, 256), (0.4, 512), (0.5, 1024), (0.8, 2048))
"""Progress of the run from which on windows have a given length."""
MICRO_BATCH = 4096
"""Bytes per forward and backward pass; few enough for the processor's cache."""
BLOCK = 256
"""Queries per block of attention."""


@dataclass(frozen=True)
class Config:
    """Shape of the model, under the names of the Hugging Face configuration."""

    vocab_size: int = 256
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def to_hugging_face(self) -> dict[str, Any]:
        """Return the content of ``config.json``."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **asdict(self),
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "rope_scaling": None,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": self.num_hidden_layers,
            "tie_word_embeddings": True,
            "bos_token_id": SEPARATOR,
            "eos_token_id": SEPARATOR,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply half-split rotary position embedding to ``(batch, length, heads, dim)``."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal grouped-query attention, in blocks of queries.

    A block of queries meets only the keys up to its end, and the query heads of a group
    are one matrix, so that all the work is in large products.  On a CPU this is faster
    than ``scaled_dot_product_attention``.

    Parameters
    ----------
    query : Tensor
        Shape ``(batch, heads, length, dim)``.
    key, value : Tensor
        Shape ``(batch, key-value heads, length, dim)``.

    Returns
    -------
    Tensor
        Shape of `query`.
    """
    batch, heads, length, dim = query.shape
    query = query.reshape(batch, key.shape[1], -1, length, dim) * dim**-0.5
    mixed = []
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        block = query[:, :, :, start:end].flatten(2, 3)
        scores = (block @ key[:, :, :end].mT).float()
        scores = scores.view(batch, key.shape[1], -1, end - start, end)
        hidden = torch.ones(end - start, end, dtype=torch.bool).triu(start + 1)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1).to(value.dtype)
        output = weights.flatten(2, 3) @ value[:, :, :end]
        mixed.append(output.view(batch, heads, end - start, dim))
    return torch.cat(mixed, dim=2)


class Attention(nn.Module):
    """Causal grouped-query attention with a norm on every query and key head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query = config.num_attention_heads * config.head_dim
        key = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend from every position to itself and the ones before it."""
        batch, length, _ = x.shape
        shape = (batch, length, -1, self.head_dim)
        value = self.v_proj(x).view(shape)
        query = rotate(self.q_norm(self.q_proj(x).view(shape)), cos, sin).to(value.dtype)
        key = rotate(self.k_norm(self.k_proj(x).view(shape)), cos, sin).to(value.dtype)
        mixed = attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """SwiGLU feed-forward network."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's output for every position."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add the attention and the feed-forward network to the residual stream."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The whole model; the output matrix is the embedding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        frequency = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angle = torch.outer(torch.arange(config.max_position_embeddings).float(), frequency)
        self.register_buffer("cos", angle.cos()[:, None, :], persistent=False)
        self.register_buffer("sin", angle.sin()[:, None, :], persistent=False)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        for block in self.layers:
            for name, parameter in block.named_parameters():
                if parameter.ndim == 2:
                    nn.init.normal_(parameter, std=0.5 * parameter.shape[1] ** -0.5)
                    if name.endswith(("o_proj.weight", "down_proj.weight")):
                        nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the byte after every position."""
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of windows of ``length + 1`` bytes."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


class Muon:
    """Momentum whose update of each matrix is orthogonalised.

    The momentum is brought near the closest (semi-)orthogonal matrix by a few
    Newton-Schulz steps in bfloat16; matrices of equal shape are stacked.

    Parameters
    ----------
    parameters : list of Tensor
        Matrices to train.
    momentum : float
        Decay of the gradient average (Nesterov).
    weight_decay : float
        Decoupled decay, relative to the learning rate.
    """

    COEFFICIENTS = (3.4445, -4.7750, 2.0315)
    STEPS = 5

    def __init__(self, parameters: list[Tensor], momentum: float, weight_decay: float) -> None:
        self.momentum = momentum
        self.weight_decay = weight_decay
        shapes: dict[torch.Size, list[Tensor]] = {}
        for parameter in parameters:
            shapes.setdefault(parameter.shape, []).append(parameter)
        self.stacks = list(shapes.values())
        self.averages = [torch.zeros((len(s), *s[0].shape)) for s in self.stacks]

    def orthogonalised(self, update: Tensor) -> Tensor:
        """Return a stack of matrices with all singular values near one."""
        a, b, c = self.COEFFICIENTS
        tall = update.shape[1] > update.shape[2]
        x = (update.mT if tall else update).contiguous()
        x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
        for _ in range(self.STEPS):
            gram = x @ x.mT
            x = a * x + (b * gram + c * (gram @ gram)) @ x
        return (x.mT if tall else x).float()

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update every matrix from its gradient with the learning rate `rate`."""
        for stack, average in zip(self.stacks, self.averages, strict=True):
            gradient = torch.stack([parameter.grad for parameter in stack])
            average.lerp_(gradient, 1 - self.momentum)
            update = self.orthogonalised(gradient.lerp(average, self.momentum))
            scale = rate * max(1.0, update.shape[1] / update.shape[2]) ** 0.5
            for parameter, change in zip(stack, update, strict=True):
                parameter.mul_(1 - rate * self.weight_decay).sub_(scale * change)


class Stream:
    """Endless training windows from the groups of the corpus.

    Each group is a stream of its shuffled documents, separated by a zero byte and
    shuffled again on every pass; a window comes from a group chosen by weight.

    Parameters
    ----------
    groups : dict
        Texts of each group.
    weights : dict
        Probability of each group.
    seed : int
        Seed of the shuffling and of the choice of groups.
    """

    def __init__(
        self, groups: dict[str, list[bytes]], weights: dict[str, float], seed: int
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.names = list(weights)
        self.weights = [weights[name] for name in self.names]
        self.groups = groups
        self.texts = {name: np.zeros(0, np.uint8) for name in self.names}
        self.starts = dict.fromkeys(self.names, 0)

    def window(self, size: int) -> np.ndarray:
        """Return the next `size` bytes of a randomly chosen group."""
        name = self.names[self.random.choice(len(self.names), p=self.weights)]
        start = self.starts[name]
        if start + size > len(self.texts[name]):
            order = self.random.permutation(len(self.groups[name]))
            text = b"".join(b"\0" + self.groups[name][i] for i in order)
            self.texts[name] = np.frombuffer(text, np.uint8)
            start = int(self.random.integers(size))
        self.starts[name] = start + size - 1
        return self.texts[name][start : start + size]

    def batch(self, count: int, length: int) -> Tensor:
        """Return `count` windows of ``length + 1`` bytes."""
        windows = np.stack([self.window(length + 1) for _ in range(count)])
        return torch.from_numpy(windows.astype(np.int64))


def held_out_windows(text: bytes, length: int, stride: int) -> Iterator[tuple[Tensor, int]]:
    """Cut a document into overlapping windows in which every byte is scored once.

    Parameters
    ----------
    text : bytes
        The document; a separator is put before it.
    length, stride : int
        Size of a window and distance between the starts of two.

    Yields
    ------
    window : Tensor
        Bytes of the window and the one after it.
    skip : int
        How many leading predictions an earlier window has scored already.
    """
    tokens = torch.tensor(list(bytes([SEPARATOR]) + text))
    scored = 0
    for start in range(0, len(text), stride):
        window = tokens[start : start + length + 1]
        yield window, scored - start
        scored = start + len(window) - 1
        if scored == len(text):
            return


@torch.no_grad()
def bits_per_byte(model: Decoder, documents: dict[str, bytes]) -> dict[str, float]:
    """Measure the model on the held-out modules in full-context windows.

    The windows have 2048 bytes and start every 1024, so all but the first 2048 bytes of
    a document are predicted from at least 1024 bytes of context.

    Parameters
    ----------
    model : Decoder
        The model, evaluated in the type of its weights.
    documents : dict
        Contents of the held-out modules.

    Returns
    -------
    dict
        Bits per byte of each module, and of all bytes together as ``"all"``.
    """
    length = model.config.max_position_embeddings
    bits: dict[str, float] = {}
    for name, text in documents.items():
        total = 0.0
        for window, skip in held_out_windows(text, length, length // 2):
            logits = model(window[None, :-1])[0, skip:]
            total += F.cross_entropy(logits, window[1 + skip :], reduction="sum").item()
        bits[name] = total / math.log(2)
    sizes = {name: len(text) for name, text in documents.items()}
    result = {name: bits[name] / sizes[name] for name in documents}
    result["all"] = sum(bits.values()) / sum(sizes.values())
    return result


@torch.no_grad()
def sample(model: Decoder, prompt: bytes, count: int, temperature: float, seed: int) -> bytes:
    """Continue `prompt` by up to `count` bytes."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([[SEPARATOR, *prompt]])
    for _ in range(count):
        logits = model(tokens[:, -model.config.max_position_embeddings :])[0, -1]
        chance = torch.softmax(logits / temperature, dim=-1)
        choice = torch.multinomial(chance, 1, generator=generator)
        tokens = torch.cat((tokens, choice[None]), dim=1)
    return bytes(tokens[0, 1:].tolist())


def export(model: Decoder, directory: Path) -> None:
    """Write ``config.json`` and ``model.safetensors`` (bfloat16), each atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"model.{name}": parameter.detach().bfloat16().contiguous()
        for name, parameter in model.named_parameters()
    }
    weights = directory / "model.safetensors.part"
    save_file(tensors, weights, metadata={"format": "pt"})
    config = directory / "config.json.part"
    config.write_text(json.dumps(model.config.to_hugging_face(), indent=2) + "\n")
    for part in (config, weights):
        part.chmod(0o644)
        os.replace(part, part.with_suffix(""))


def load_export(directory: Path) -> Decoder:
    """Load an exported model, in float32 from the bfloat16 weights."""
    content = json.loads((directory / "config.json").read_text())
    model = Decoder(Config(**{key: content[key] for key in asdict(Config())}))
    tensors = load_file(directory / "model.safetensors")
    model.load_state_dict({key.removeprefix("model."): t.float() for key, t in tensors.items()})
    return model.eval()


def rate_factor(progress: float, warmup: float, decay: float) -> float:
    """Return the learning rate at `progress` in [0, 1], relative to its peak."""
    return min(1.0, (progress + 1e-3) / warmup, max(0.0, (1 - progress) / decay))


def train(arguments: argparse.Namespace) -> None:
    """Train for the given minutes, with checkpoints and exports on the way."""
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    corpus = json.loads(CORPUS_JSON.read_text())
    groups = load_documents(stdlib_root(), corpus)
    held_out = load_held_out(stdlib_root(), json.loads(HELDOUT_JSON.read_text()))
    weights = {"library": arguments.library, "docs": arguments.docs}
    weights["tests"] = 1.0 - sum(weights.values())

    model = Decoder(Config())
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    others = [p for n, p in model.named_parameters() if p.ndim == 1 or "layers" not in n]
    muon = Muon(matrices, momentum=0.95, weight_decay=arguments.weight_decay)
    adam = torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.97), weight_decay=0.0)
    step, elapsed, seen = 0, 0.0, 0
    if arguments.checkpoint.exists():
        state = torch.load(arguments.checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        for average, saved in zip(muon.averages, state["muon"], strict=True):
            average.copy_(saved)
        step, elapsed, seen = state["step"], state["elapsed"], state["seen"]
    stream = Stream(groups, weights, seed=arguments.seed + step)
    compiled = torch.compile(model, dynamic=False) if arguments.compile else model
    count = sum(p.numel() for p in model.parameters())
    print(f"{count} parameters, corpus {corpus['bytes']}, starting at step {step}", flush=True)

    budget = arguments.minutes * 60
    started = time.monotonic() - elapsed
    saved_at = elapsed
    recent: list[float] = []
    while True:
        progress = elapsed / budget
        length = max(size for start, size in PHASES if progress >= start)
        factor = rate_factor(progress, warmup=0.01, decay=arguments.decay)
        for _ in range(arguments.accumulate):
            windows = stream.batch(MICRO_BATCH // length, length)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(compiled, windows) / arguments.accumulate
            loss.backward()
            recent.append(loss.item() * arguments.accumulate / math.log(2))
        muon.step(arguments.muon_rate * factor)
        adam.param_groups[0]["lr"] = arguments.adam_rate * factor
        adam.step()
        model.zero_grad(set_to_none=True)
        step += 1
        seen += arguments.accumulate * MICRO_BATCH
        elapsed = time.monotonic() - started
        if step % 50 == 0:
            print(
                f"step {step} {elapsed / 60:.2f} min {seen / 1e6:.1f} MB length {length} "
                f"rate {factor:.3f} train {sum(recent) / len(recent):.4f}",
                flush=True,
            )
            recent.clear()
        done = elapsed >= budget
        if done or elapsed - saved_at >= arguments.save_minutes * 60:
            saved_at = elapsed
            state = {
                "model": model.state_dict(),
                "adam": adam.state_dict(),
                "muon": muon.averages,
                "step": step,
                "elapsed": elapsed,
                "seen": seen,
            }
            part = arguments.checkpoint.with_suffix(".part")
            torch.save(state, part)
            os.replace(part, arguments.checkpoint)
            export(model, arguments.out)
        if done:
            print(f"held-out bits per byte: {evaluate(arguments.out, held_out)}", flush=True)
            return


def evaluate(directory: Path, held_out: dict[str, bytes]) -> str:
    """Return the measurement of an exported model as text."""
    result = bits_per_byte(load_export(directory), held_out)
    return ", ".join(f"{name} {value:.4f}" for name, value in result.items())


def main() -> int:
    """Train, or only measure an export with ``--evaluate``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=67.0, help="length of the run")
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="where to export")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--evaluate", action="store_true", help="measure --out and sample")
    parser.add_argument("--prompt", default="import os\n\n\ndef ", help="start of the sample")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--decay", type=float, default=0.4, help="part of falling rate")
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=0.003)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--library", type=float, default=0.7, help="share of the sources")
    parser.add_argument("--docs", type=float, default=0.05, help="share of the documents")
    parser.add_argument("--save-minutes", type=float, default=4.0)
    arguments = parser.parse_args()
    if arguments.evaluate:
        held_out = load_held_out(stdlib_root(), json.loads(HELDOUT_JSON.read_text()))
        print(evaluate(arguments.out, held_out))
        model = load_export(arguments.out)
        text = sample(model, arguments.prompt.encode(), 400, 0.7, arguments.seed)
        print(text.decode("utf-8", errors="replace"))
    else:
        train(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
