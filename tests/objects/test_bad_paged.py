"""Bad arguments of the paged functions: one form of message, nothing changed."""

import numpy as np
import pytest
from messages import about
from walked import each

import numkv

F32, F16, I32, I64 = np.float32, np.float16, np.int32, np.int64
MISMATCH, DTYPE = numkv.DimensionMismatch, numkv.UnsupportedDType
TABLE = np.array([[2, 0, -9], [3, 99, 99]], I32)


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


def decode_arguments():
    return {
        "q": ones(2, 4, 8),
        "k_pool": ones(4, 2, 5, 8),
        "v_pool": ones(4, 2, 5, 6),
        "block_table": TABLE,
        "seq_lens": np.array([7, 5], I32),
    }


def prefill_arguments():
    return decode_arguments() | {"q": ones(5, 4, 8), "cu_seqlens_q": np.array([0, 2, 5], I32)}


def append_arguments():
    return {
        "k": ones(3, 2, 8), "v": ones(3, 2, 6), "k_pool": ones(4, 2, 5, 8),
        "v_pool": ones(4, 2, 5, 6), "slot_mapping": np.array([0, 19, 3], I64),
    }  # fmt: skip


FUNCTIONS = {
    "decode": (numkv.paged_decode_attention, decode_arguments),
    "prefill": (numkv.paged_prefill_attention, prefill_arguments),
    "append": (numkv.paged_append, append_arguments),
}
CODES = ones(4, 2, 5, 8, dtype=np.int8)
SCALE = ones(4, 2, 5)
POOLS = [  # of every function: what to change, what is named, error
    ({"k_pool": ones(4, 2, 5)}, "k_pool", MISMATCH),
    ({"k_pool": ones(4, 2, 5, 8, dtype=I32)}, "k_pool", DTYPE),
    ({"k_pool": ones(4, 2, 5, 8, dtype=np.int32)}, "k_pool", DTYPE),
    ({"v_pool": ones(4, 2, 4, 6)}, "v_pool", MISMATCH),
    ({"v_pool": ones(3, 2, 5, 6)}, "v_pool", MISMATCH),
    ({"v_pool": ones(4, 1, 5, 6)}, "v_pool", MISMATCH),
    ({"k_pool": CODES}, "k_scale", MISMATCH),
    ({"k_pool": CODES, "v_scale": SCALE}, "k_scale", MISMATCH),
    ({"v_pool": CODES}, "v_scale", MISMATCH),
    ({"k_pool": CODES, "k_scale": ones(4, 2, 6)}, "k_scale", MISMATCH),
    ({"k_pool": CODES, "k_scale": ones(4, 2, 5, 1)}, "k_scale", MISMATCH),
    ({"k_pool": CODES, "k_scale": ones(4, 2, 5, dtype=F16)}, "k_scale", DTYPE),
    ({"k_scale": SCALE}, "k_scale", numkv.NotSupported),
    ({"v_scale": SCALE}, "v_scale", numkv.NotSupported),
]
ATTENTION = [
    ({"q": ones(2, 4, 7)}, "q", MISMATCH),
    ({"q": ones(2, 3, 8)}, "q", MISMATCH),
    ({"q": ones(4, 8)}, "q", MISMATCH),
    ({"q": ones(2, 4, 8, dtype=I32)}, "q", DTYPE),
    ({"block_table": TABLE[0]}, "block_table", MISMATCH),
    ({"block_table": TABLE.astype(I64)}, "block_table", DTYPE),
    ({"block_table": TABLE.astype(F32)}, "block_table", DTYPE),
    ({"seq_lens": np.array([7], I32)}, "seq_lens", MISMATCH),
    ({"seq_lens": np.array([7, 5], F32)}, "seq_lens", DTYPE),
    ({"sinks": ones(3)}, "sinks", MISMATCH),
    ({"out": ones(2, 4, 8)}, "out", MISMATCH),
    ({"out": ones(2, 4, 6, dtype=F16)}, "out", DTYPE),
]
CASES = (
    [(which, *row) for which in FUNCTIONS for row in POOLS]
    + [("decode", *row) for row in ATTENTION]
    + [("prefill", *row) for row in ATTENTION if "q" not in row[0] or row[0]["q"].ndim == 2]
    + [
        ("decode", {"block_table": TABLE[:1]}, "block_table", MISMATCH),
        ("prefill", {"cu_seqlens_q": np.array([0, 5], I32)}, "cu_seqlens_q", MISMATCH),
        ("prefill", {"cu_seqlens_q": np.array([0, 2, 5], F32)}, "cu_seqlens_q", DTYPE),
        ("append", {"k": ones(3, 2, 7)}, "k", MISMATCH),
        ("append", {"k": ones(3, 1, 8)}, "k", MISMATCH),
        ("append", {"k": ones(3, 2, 8, dtype=F16)}, "k", DTYPE),
        ("append", {"v": ones(2, 2, 6)}, "v", MISMATCH),
        ("append", {"slot_mapping": np.array([0, 1], I64)}, "slot_mapping", MISMATCH),
        ("append", {"slot_mapping": np.array([0, 1, 2], np.uint64)}, "slot_mapping", DTYPE),
    ]
)


def call(which, to, **changes):
    function, arguments = FUNCTIONS[which]
    made = arguments() | changes
    return function(**{n: to(x) if isinstance(x, np.ndarray) else x for n, x in made.items()})


@pytest.mark.parametrize("which", FUNCTIONS)
def test_the_arguments_are_good(target, to, which):
    call(which, to)


@each("which, changes, name, error", CASES)
def test_arguments(target, to, which, changes, name, error):
    with pytest.raises(error, match=about(name)):
        call(which, to, **changes)


VALUES = [
    ("decode", {"seq_lens": np.array([16, 5], I32)}, "seq_lens"),
    ("decode", {"seq_lens": np.array([7, -1], I32)}, "seq_lens"),
    ("decode", {"seq_lens": np.array([11, 5], I32)}, "block_table"),
    ("decode", {"seq_lens": np.array([7, 6], I32)}, "block_table"),
    ("decode", {"block_table": np.array([[4, 0], [3, 0]], I32)}, "block_table"),
    ("decode", {"block_table": np.array([[2, 0], [-1, 0]], I32)}, "block_table"),
    ("prefill", {"seq_lens": np.array([16, 5], I32)}, "seq_lens"),
    ("prefill", {"seq_lens": np.array([1, 5], I32)}, "seq_lens|cu_seqlens_q|q"),
    ("prefill", {"seq_lens": np.array([7, 6], I32)}, "block_table"),
    ("prefill", {"cu_seqlens_q": np.array([0, 6, 5], I32)}, "cu_seqlens_q|q"),
    ("prefill", {"cu_seqlens_q": np.array([1, 2, 5], I32)}, "cu_seqlens_q"),
    ("prefill", {"cu_seqlens_q": np.array([0, 2, 4], I32)}, "cu_seqlens_q"),
]
TYPED = (numkv.NumkvError, IndexError, ValueError)


@pytest.mark.parametrize(("which", "changes", "message"), VALUES)
def test_values_are_looked_at(target, to, host, which, changes, message):
    """On the CPU always, on CUDA when asked to; a result under way is not written to."""
    tokens = len(FUNCTIONS[which][1]()["q"])
    place = to(np.full((tokens, 4, 6), 7, F32))
    options = {"validate": True} if target == "cuda" else {}
    with pytest.raises(TYPED, match=message):
        call(which, to, out=place, **changes, **options)
    assert np.all(host(place) == 7)


@pytest.mark.parametrize(("which", "changes", "message"), VALUES)
def test_bad_values_on_cuda_touch_nothing_out_of_range(which, changes, message):
    """Unasked, the device is not waited for; the simulator would report a wild access."""
    from numkv import targets

    cuda = targets.get("cuda")
    out = cuda.to_host(call(which, cuda.asarray, **changes))
    assert out.shape == (len(FUNCTIONS[which][1]()["q"]), 4, 6)


@pytest.mark.parametrize("name", ["k_pool", "v_pool", "k_scale"])
def test_a_read_only_pool_is_refused(name):
    arguments = append_arguments() | {
        "k_pool": CODES.copy(), "v_pool": ones(4, 2, 5, 6), "k_scale": SCALE.copy(),
    }  # fmt: skip
    arguments[name].setflags(write=False)
    with pytest.raises(numkv.NotSupported, match=about(name)):
        numkv.paged_append(**arguments)


def test_lists_will_do_on_the_cpu():
    """For lengths and slots; a block table is an int32 array."""
    arguments = decode_arguments()
    out = numkv.paged_decode_attention(**arguments | {"seq_lens": [7, 5]})
    assert np.array_equal(out, numkv.paged_decode_attention(**arguments))
    made = append_arguments()
    made["k"][:] = 3
    numkv.paged_append(**made | {"slot_mapping": [0, 19, -1]})
    assert np.count_nonzero(made["k_pool"] == 3) == 2 * 2 * 8


@pytest.mark.parametrize("which", FUNCTIONS)
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_arrays_of_two_targets(where, which):
    """The pool, k_pool, says which target it is."""
    from numkv import targets

    cuda = targets.get("cuda").asarray
    function, arguments = FUNCTIONS[which]
    made = arguments()
    for name in set(made) - {"k_pool"}:
        moved = {n: cuda(x) if (n == name) == (where == "cpu") else x for n, x in made.items()}
        with pytest.raises((numkv.NumkvError, TypeError), match=about(name)):
            function(**moved)
