"""Arrays whose elements do not lie at multiples of their size, as fields of packed records: refused by name.

Kernels count steps in elements, so such an array would be read at other places than it lies, and beyond its end.
"""

import numpy as np
import pytest

import numkv
from numkv.errors import NotSupported

HEADS, TOKENS, DIM = 2, 6, 32
rng = np.random.default_rng(0)


def packed(x):
    """The same content as a field of records that are a byte longer."""
    rest = x.shape[-1:] if x.ndim > 1 else ()
    record = np.dtype([("flag", np.uint8), ("x", x.dtype, rest)])
    records = np.zeros(x.shape[: x.ndim - len(rest)], record)
    records["x"] = x
    found = records["x"]
    assert any(step % x.itemsize for step in found.strides)
    return found


def shifted(x):
    """The same content from an odd address on."""
    room = np.zeros(x.nbytes + 1, np.uint8)
    found = room[1:].view(x.dtype).reshape(x.shape)
    found[...] = x
    return found


def backwards(x):
    """Rows of packed records in falling order: a negative step that is no multiple."""
    return packed(x)[::-1]


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
MANY = 1200  # tokens that go the general way
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


#: Small inputs that are copied rather than refused, as they are converted anyway.
COPIED = {"q_norm_weight", "k_norm_weight"}

CASES = [
    pytest.param(call, name, id=f"{call}: {name}")
    for call, (_, arguments) in CALLS.items()
    for name, x in arguments.items()
    if x.itemsize > 1
]


@pytest.mark.parametrize("odd", [packed, shifted, backwards])
@pytest.mark.parametrize(("call", "name"), CASES)
def test_each_array_is_refused_by_name(call, name, odd):
    function, arguments = CALLS[call]
    plain = {n: x.copy() for n, x in arguments.items()}
    function(**plain)  # fine; and what kernels are there no longer matters
    given = {n: x.copy() for n, x in arguments.items()}
    given[name] = odd(given[name])
    before = {n: x.copy() for n, x in given.items()}
    if name in COPIED:
        function(**given)
        return
    with pytest.raises(NotSupported, match=f"`{name}`: expected .* (contiguous|multiples of)"):
        function(**given)
    for n, x in given.items():  # nothing was written
        np.testing.assert_array_equal(x, before[n], err_msg=n)


@pytest.mark.parametrize("odd", [packed, shifted, backwards])
def test_a_layer_that_refuses_has_taken_no_blocks(odd):
    layer = numkv.PagedLayer(4, 4, HEADS, DIM, kind="fp32")
    cos, sin = rows(64, DIM // 2), rows(64, DIM // 2)
    for name in ("qkv", "cos", "sin", "q_out"):
        arguments = {"qkv": rows(3, 4 * HEADS * DIM), "cos": cos, "sin": sin,
                     "q_out": np.empty((3, 2 * HEADS, DIM), np.float32)}  # fmt: skip
        arguments[name] = odd(arguments[name])
        with pytest.raises(NotSupported, match=f"`{name}`"):
            layer.write(**arguments, num_q_heads=2 * HEADS, qk_mode=2)
        assert layer.seq_len == 0
        assert list(layer.block_indices) == []


def test_steps_of_whole_elements_are_served():
    """What looks alike but is fine: other fields of the same size, falling order, steps of 0, one token."""
    layer = contiguous()
    q = rows(1, 2 * HEADS, DIM)
    expected = numkv.decode_attention(q, layer.k, layer.v, [TOKENS])
    record = np.dtype([("flag", np.float32), ("x", np.float32, (DIM,))])
    records = np.zeros((1, HEADS, TOKENS), record)
    records["x"] = layer.k
    assert np.array_equal(numkv.decode_attention(q, records["x"], layer.v, [TOKENS]), expected)
    turned = layer.k[:, :, ::-1].copy()[:, :, ::-1]
    assert np.array_equal(numkv.decode_attention(q, turned, layer.v, [TOKENS]), expected)
    same = np.broadcast_to(layer.k[:, :, :1], layer.k.shape)
    assert np.array_equal(
        numkv.decode_attention(q, same, layer.v, [TOKENS]),
        numkv.decode_attention(q, same.copy(), layer.v, [TOKENS]),
    )
    # An axis of one element has no step that matters.
    odd = np.lib.stride_tricks.as_strided(q, q.shape, (13, *q.strides[1:]))
    assert np.array_equal(numkv.decode_attention(odd, layer.k, layer.v, [TOKENS]), expected)
