"""A call of each function, and of methods that take arrays, with all of its array arguments by name."""

import numpy as np

import numkv

HEADS, TOKENS, DIM = 2, 6, 32
rng = np.random.default_rng(0)


def rows(*shape):
    return rng.standard_normal(shape, dtype=np.float32)


def contiguous(kind="fp32"):
    layer = numkv.ContiguousLayer(TOKENS, HEADS, DIM, kind=kind)
    layer.append(rows(TOKENS, HEADS, DIM), rows(TOKENS, HEADS, DIM))
    return layer


def buffers(kind):
    layer = contiguous(kind)
    scales = {} if kind == "fp32" else {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
    return {"k": layer.k, "v": layer.v} | scales


def attention(kind="fp32", **more):
    return {"q": rows(1, 2 * HEADS, DIM), "seq_lens": np.array([TOKENS])} | buffers(kind) | more


def paged(kind="fp32", **more):
    of = buffers(kind)
    of = {"k_pool": of.pop("k"), "v_pool": of.pop("v")} | of
    return {"q": rows(1, 2 * HEADS, DIM), "block_table": np.zeros((1, 1), np.int32),
            "seq_lens": np.array([TOKENS])} | of | more  # fmt: skip


def appended(kind="fp32", tokens=3):
    of = paged(kind)
    del of["q"], of["block_table"], of["seq_lens"]
    return of | {"k": rows(tokens, HEADS, DIM), "v": rows(tokens, HEADS, DIM),
                 "slot_mapping": np.arange(tokens) % TOKENS}  # fmt: skip


def written(kind="fp32", tokens=3):
    of = appended(kind, tokens)
    del of["k"], of["v"]
    return of | {
        "qkv": rows(tokens, 4 * HEADS * DIM), "positions": np.arange(tokens), "cos": rows(8000, DIM // 2),
        "sin": rows(8000, DIM // 2), "q_norm_weight": rows(DIM), "k_norm_weight": rows(DIM),
        "q_out": np.empty((tokens, 2 * HEADS, DIM), np.float32),
    }  # fmt: skip


def write(**arguments):
    return numkv.paged_write(**arguments, num_q_heads=2 * HEADS, qk_mode=1)


def new_rows(tokens=2):
    cache = np.zeros((1, HEADS, TOKENS, DIM), np.float32)
    return {"k_new": rows(1, HEADS, tokens, DIM), "v_new": rows(1, HEADS, tokens, DIM),
            "k_cache": cache, "v_cache": cache.copy(), "cache_offsets": np.zeros(1, np.int64)}  # fmt: skip


def new_kv(*shape):
    return {"k": rows(*shape), "v": rows(*shape)}


STARTS = {"cu_seqlens_q": np.array([0, 1])}
MANY = 1200  # too many tokens for the shorter path of small calls
CALLS = {
    "decode_attention": (numkv.decode_attention, attention()),
    "decode_attention int8": (numkv.decode_attention, attention("int8")),
    "decode_attention int4": (numkv.decode_attention, attention("int4")),
    "decode_attention out": (numkv.decode_attention, attention(out=rows(1, 4, DIM))),
    "prefill_attention": (numkv.prefill_attention, attention(**STARTS)),
    "paged_decode_attention": (numkv.paged_decode_attention, paged()),
    "paged_decode_attention int8": (numkv.paged_decode_attention, paged("int8")),
    "paged_prefill_attention": (numkv.paged_prefill_attention, paged(**STARTS)),
    "paged_append": (numkv.paged_append, appended()),
    "paged_append int8": (numkv.paged_append, appended("int8")),
    "paged_append int4": (numkv.paged_append, appended("int4")),
    "paged_append, many": (numkv.paged_append, appended(tokens=MANY)),
    "paged_write": (write, written()),
    "paged_write int8": (write, written("int8")),
    "paged_write, many": (write, written(tokens=MANY)),
    "append": (numkv.append, new_rows()),
    "merge_states": (
        numkv.merge_states,
        {"o_a": rows(3, 4, DIM), "lse_a": rows(3, 4), "o_b": rows(3, 4, DIM), "lse_b": rows(3, 4)},
    ),
    "ContiguousLayer.append": (lambda **a: contiguous_room().append(**a), new_kv(2, HEADS, DIM)),
    "PagedLayer.append": (lambda **a: numkv.PagedLayer(4, 4, HEADS, DIM).append(**a), new_kv(2, HEADS, DIM)),
    "KVCache.append": (lambda **a: numkv.KVCache(1, HEADS, DIM).append(0, **a), new_kv(2, HEADS, DIM)),
    "KVCache.append, a token": (lambda **a: numkv.KVCache(1, HEADS, DIM).append(0, **a), new_kv(HEADS, DIM)),
    "ContiguousLayer.decode_attention": (
        lambda **a: contiguous().decode_attention(**a), {"q": rows(2, 4, DIM), "out": rows(2, 4, DIM)},
    ),
}  # fmt: skip


def contiguous_room():
    return numkv.ContiguousLayer(TOKENS, HEADS, DIM, kind="int8")
