"""Arrays whose elements do not lie at multiples of their size, as fields of packed records: refused by name.

Kernels count steps in elements, so such an array would be read at other places than it lies, and beyond its end.
"""

import itertools

import numpy as np
import pytest
from array_calls import CALLS, DIM, HEADS, TOKENS, contiguous, rows

import numkv
from numkv.errors import NotSupported

pytestmark = pytest.mark.kernels


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


#: Small inputs that are copied rather than refused, as they are converted anyway.
COPIED = {"q_norm_weight", "k_norm_weight"}


@pytest.mark.parametrize("call", CALLS)
def test_each_array_is_refused_by_name(call):
    function, arguments = CALLS[call]
    # Fine; what kernels are there no longer matters.
    function(**{n: x.copy() for n, x in arguments.items()})
    wide = [name for name, x in arguments.items() if x.itemsize > 1]
    for name, odd in itertools.product(wide, (packed, shifted, backwards)):
        given = {n: x.copy() for n, x in arguments.items()}
        given[name] = odd(given[name])
        before = {n: x.copy() for n, x in given.items()}
        if name in COPIED:
            function(**given)
            continue
        with pytest.raises(NotSupported, match=f"`{name}`: expected .* (contiguous|multiples of)"):
            function(**given)
        for n, x in given.items():  # nothing was written
            np.testing.assert_array_equal(x, before[n], err_msg=f"{name}, {odd.__name__}: {n}")


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
