"""Sparse reading beside dense attention: ``python -m perf sparse``.

- *recall*: the bundled model reads a held-out module; each of the last tokens attends to the blocks that its query
  chooses (`Step.sparse_attention`), in every layer, and what it says of the next byte is compared with dense attention.
- *speed*: attention of a decode step in one layer, choice and bounds included, in turns with dense attention, over
  contexts.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

import numkv
from numkv.demo.evaluate import held_out
from numkv.demo.model import Model
from numkv.demo.network import Network
from perf.load import beside
from perf.report import table

SIZE = 16


class SparseStep:
    """A step of a `PagedKVCache` whose attention reads `top` blocks; it notes what it has left out."""

    def __init__(self, step, top, notes):
        self.step, self.top, self.notes = step, top, notes

    def write(self, layer, *args, **options):
        return self.step.write(layer, *args, **options)

    def attention(self, layer, q):
        out, lse = self.step.sparse_attention(layer, q, most_blocks=self.top, return_lse=True)
        dense, whole = self.step.attention(layer, q, return_lse=True)
        error = np.linalg.norm(out - dense, axis=-1) / np.linalg.norm(dense, axis=-1)
        self.notes.append((np.exp(lse - whole).mean(), error.mean()))
        return out


def recall(tokens, last, tops):
    """Rows of what `top` blocks catch of a context of `tokens`, of the bundled model on a held-out text."""
    model, document = Model.load(), held_out().documents[0]
    text = np.frombuffer(document.text.encode()[: tokens + last], np.uint8).astype(np.int64)
    of, rows = model.config, []
    network = Network(of, model.weights, len(text), "cpu")
    for top in (None, *tops):
        spec = numkv.LayerSpec(of.num_kv_heads, of.head_dim, kind="fp32", key_bounds=True)
        cache = numkv.PagedKVCache(
            layers=[spec] * of.num_layers, num_blocks=-(-len(text) // SIZE), block_size=SIZE
        )
        seq, notes, bits = cache.add(), [], []
        step = cache.reserve([seq], tokens)
        network.hidden(text[:tokens], step)
        cache.commit(step)
        for i in range(tokens, len(text) - 1):
            step = cache.reserve([seq], 1)
            wrapped = step if top is None else SparseStep(step, top, notes)
            logits = network.logits(network.hidden(text[i : i + 1], wrapped))[0].astype(np.float64)
            cache.commit(step)
            largest = logits.max()
            total = largest + np.log(np.exp(logits - largest).sum())
            bits.append((total - logits[text[i + 1]]) / np.log(2))
        found = np.mean(notes, 0) if notes else (1.0, 0.0)
        rows.append((top, np.mean(bits), *found))
    return rows


def step_of(context, heads, dim, layers, rng):
    """A step of a cache in bf16 that keeps bounds, whose new token is the last of so many."""
    specs = [numkv.LayerSpec(heads, dim, kind="bf16", key_bounds=True)] * layers
    cache = numkv.PagedKVCache(layers=specs, num_blocks=-(-context // SIZE), block_size=SIZE)
    seq = cache.add()
    for n in (*[4096] * ((context - 1) // 4096), (context - 1) % 4096, 1):
        step = cache.reserve([seq], n)
        for layer in range(layers):
            step.append(layer, *rng.standard_normal((2, n, heads, dim), np.float32))
        if n > 1 or cache.length(seq) + 1 < context:
            cache.commit(step)
    return step


def speed(context, tokens, seconds, group=4, heads=8, dim=128):
    """Seconds of dense and of sparse decode over `context` tokens: medians of rounds in turns, bf16."""
    rng = np.random.default_rng(0)
    layers = max(1, min(8, (1 << 29) // (context * heads * dim * 4)))
    step = step_of(context, heads, dim, layers, rng)
    q = rng.standard_normal((1, heads * group, dim), np.float32)

    def dense(layer):
        step.attention(layer, q)

    def chosen(layer):
        step.sparse_attention(layer, q, most_blocks=tokens // SIZE)

    times, until = {dense: [], chosen: []}, time.perf_counter() + seconds
    for layer in range(layers):
        dense(layer), chosen(layer)
    while time.perf_counter() < until:
        for call in times:
            start = time.perf_counter()
            for layer in range(layers):
                call(layer)
            times[call].append((time.perf_counter() - start) / layers)
    return median(times[dense]), median(times[chosen])


def main(argv=None):
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(prog="python -m perf sparse", description=__doc__)
    parser.add_argument(
        "--tokens", type=int, default=1500, help="context of the recall (default 1500)"
    )
    parser.add_argument(
        "--last", type=int, default=200, help="tokens that are compared (default 200)"
    )
    parser.add_argument("--tops", default="8,16,32,64", help="blocks of 16 tokens that are read")
    parser.add_argument("--contexts", default="8192,32768,131072", help="contexts of the speed")
    parser.add_argument("--read", default="1024,2048", help="tokens that are read of them")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each line")
    parser.add_argument("--out", type=Path, help="also write the page there")
    options = parser.parse_args(argv)
    load = beside([])
    blocks, rows = -(-options.tokens // SIZE), []
    tops = [int(x) for x in options.tops.split(",")]
    for top, bits, mass, error in recall(options.tokens, options.last, tops):
        name = "all" if top is None else f"{top} of {blocks}"
        rows.append([name, f"{bits:.3f}", f"{mass:.3f}", f"{error:.3f}"])
    page = [
        f"Recall of the bundled model, {options.tokens} tokens of context, the next {options.last}:", "",
        table(["blocks read", "bits per byte", "share of the softmax", "error of a row"], rows, {1, 2, 3}), "",
    ]  # fmt: skip
    rows = []
    for context in (int(x) for x in options.contexts.split(",")):
        for read in (int(x) for x in options.read.split(",")):
            dense, chosen = speed(context, read, options.seconds)
            times = [f"{x * 1e6:.0f}" for x in (dense, chosen)]
            rows.append([f"{context:,}", f"{read:,}", *times, f"{dense / chosen:.2f}"])
    page += [
        "A decode step of one layer, bf16, 32 q heads over 8 kv heads of 128, choice included:", "",
        table(["context", "tokens read", "dense, us", "sparse, us", "times as fast"], rows, {0, 1, 2, 3, 4}), "",
    ]  # fmt: skip
    page.append(f"Other programs used {load.of_others():.0%} of the cores meanwhile.")
    text = "\n".join(page)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
