"""Attention over latents beside PyTorch's, and beside the machine's limits.

    python -m perf.latents [--kinds fp32,bf16,int8] [--rounds 7]

128 absorbed query heads on rows of 512 + 64 numbers. In each round every contestant attends once, after a probe of the
machine's multiply-adds; ratios are formed within a round, and their medians are printed. Who takes very long is timed
in the first round alone. PyTorch's contestants, where it is installed, have the rows in float32 or bfloat16:

=========  ====================================================================================
bmm        two matrix products and a softmax between them
sdpa       ``scaled_dot_product_attention`` over the row as one kv head (``enable_gqa``)
expanded   the same over K and V of each head, made before and not timed: 128 heads of 192 and 128
=========  ====================================================================================

Every result is compared with float64 first.
"""

import argparse
import time

import numpy as np

import numkv
from perf import bandwidth
from perf.arithmetic import multiply_adds_per_second

HEADS, LATENT, ROTARY, NOPE, HEAD_V = 128, 512, 64, 128, 128
DIM = LATENT + ROTARY
SCALE = (NOPE + ROTARY) ** -0.5
SHAPES = [(1, 4096), (8, 4096), (1, 16384), (8, 16384)]
#: Rows of all heads, expanded, take at most so many bytes.
MOST_EXPANDED = 400 << 20
#: Who takes so many times as long as numkv is timed once.
TOO_SLOW = 20
#: Distance from float64 over the rows before they are stored.
ERROR = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2, "int8": 2e-2, "int4": 0.3}


def expected(q, rows):
    """Attention in float64, of one sequence."""
    scores = q.astype(np.float64) @ rows.T.astype(np.float64) * SCALE
    p = np.exp(scores - scores.max(1, keepdims=True))
    return p @ rows[:, :LATENT].astype(np.float64) / p.sum(1, keepdims=True)


def numkv_call(kind, rows, q):
    """A call of numkv over rows ``(batch, tokens, 576)`` in a paged cache."""
    batch, tokens = rows.shape[:2]
    layer = numkv.LayerSpec(1, DIM, kind=kind, head_dim_v=LATENT, v_kind="latent")
    cache = numkv.PagedKVCache(layers=[layer], num_blocks=batch * -(-tokens // 64), block_size=64)
    seqs = [cache.add() for _ in range(batch)]
    step = cache.reserve(seqs, tokens)
    step.append(0, rows.reshape(-1, 1, DIM))
    cache.commit(step)
    return lambda: cache.decode_attention(0, seqs, q, sm_scale=SCALE), cache.nbytes


def torch_calls(kind, rows, q):
    """PyTorch's calls over the same rows, by name."""
    try:
        import torch
    except ImportError:
        return {}
    attend, dtype = (
        torch.nn.functional.scaled_dot_product_attention,
        getattr(torch, {"fp32": "float32", "fp16": "float16"}.get(kind, "bfloat16")),
    )
    k, queries = torch.from_numpy(rows).to(dtype), torch.from_numpy(q).to(dtype)
    v = k[..., :LATENT]

    def bmm():
        p = torch.softmax(torch.bmm(queries, k.transpose(1, 2)) * SCALE, -1)
        return torch.bmm(p, v)

    def sdpa():
        out = attend(queries[:, :, None], k[:, None], v[:, None], scale=SCALE, enable_gqa=True)
        return out[:, :, 0]

    found = {"bmm": bmm, "sdpa": sdpa}
    batch, tokens = rows.shape[:2]
    if batch * tokens * HEADS * (NOPE + ROTARY + HEAD_V) * k.element_size() <= MOST_EXPANDED:
        shapes = (tokens, NOPE + ROTARY), (tokens, HEAD_V), (1, NOPE + ROTARY)
        keys, values, q_of_heads = (
            torch.empty(batch, HEADS, *shape, dtype=dtype).normal_() for shape in shapes
        )
        found["expanded"] = lambda: attend(q_of_heads, keys, values, scale=SCALE)
    return found


def race(kind, batch, tokens, rounds, rng):
    """One line of the table."""
    rows = rng.standard_normal((batch, tokens, DIM), np.float32)
    q = rng.standard_normal((batch, HEADS, DIM), np.float32)
    own, nbytes = numkv_call(kind, rows, q)
    want = expected(q[0], rows[0])
    error = np.linalg.norm(own()[0] - want) / np.linalg.norm(want)
    assert error < ERROR[kind], error
    others = torch_calls(kind, rows, q)
    for name, call in others.items():
        found = call()
        if name != "expanded":
            error = np.linalg.norm(found[0].float().numpy() - want) / np.linalg.norm(want)
            assert error < max(0.03, ERROR[kind]), (name, error)
    multiply_adds, seconds, shares = batch * tokens * HEADS * (DIM + LATENT), [], []
    ratios = {name: [] for name in others}
    for _ in range(rounds):
        peak, taken = multiply_adds_per_second(), {}
        for name, call in (("numkv", own), *others.items()):
            if name in ratios and ratios[name][:1] > [TOO_SLOW]:
                continue
            begin = time.perf_counter()
            call()
            taken[name] = time.perf_counter() - begin
        seconds.append(taken["numkv"])
        shares.append(multiply_adds / taken["numkv"] / peak)
        for name in ratios.keys() & taken.keys():
            ratios[name].append(taken[name] / taken["numkv"])
    of_bandwidth = nbytes / np.median(seconds) / (bandwidth.read() * 1e9)
    cells = [
        f"{np.median(seconds) * 1e3:7.1f} ms",
        f"{np.median(shares):.2f}",
        f"{of_bandwidth:.3f}",
    ]
    cells += [f"{name} {np.median(x):.1f}" for name, x in ratios.items()]
    print(f"{kind:5} batch {batch} tokens {tokens:5}  " + "  ".join(cells), flush=True)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default="fp32,bf16,int8")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shapes", default=",".join(f"{b}x{n}" for b, n in SHAPES))
    asked, rng = parser.parse_args(), np.random.default_rng(0)
    print(
        "time, share of float32 multiply-adds, share of read bandwidth; PyTorch's time over numkv's"
    )
    for kind in asked.kinds.split(","):
        for shape in asked.shapes.split(","):
            race(kind, *map(int, shape.split("x")), asked.rounds, rng)


if __name__ == "__main__":
    main()
