"""Bad arrays: every argument of every function, one form of message, nothing changed."""

import ml_dtypes
import naive
import numpy as np
import pytest
from capsules import Capsule
from messages import about
from walked import each

import numkv

MISMATCH, DTYPE, ANY = numkv.DimensionMismatch, numkv.UnsupportedDType, numkv.NumkvError
F32, F16, I32, I64 = np.float32, np.float16, np.int32, np.int64


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


def decode_arguments():
    return {
        "q": ones(2, 4, 8),
        "k": ones(2, 2, 6, 8),
        "v": ones(2, 2, 6, 8),
        "seq_lens": np.array([3, 6], I32),
    }


def prefill_arguments():
    return decode_arguments() | {"q": ones(5, 4, 8), "cu_seqlens_q": np.array([0, 2, 5], I32)}


SHARED = [  # argument, bad array, error
    ("q", ones(2, 4, 7), MISMATCH),
    ("q", ones(4, 8), MISMATCH),
    ("q", ones(2, 3, 8), MISMATCH),
    ("q", ones(2, 4, 8, dtype=I32), DTYPE),
    ("k", ones(2, 6, 8), MISMATCH),
    ("k", ones(2, 2, 6, 8, dtype=I64), DTYPE),
    ("v", ones(2, 2, 5, 8), MISMATCH),
    ("v", ones(2, 1, 6, 8), MISMATCH),
    ("v", ones(2, 6, 8), MISMATCH),
    ("v", ones(2, 2, 6, 8, dtype=np.bool_), DTYPE),
    ("seq_lens", np.array([3, 6], np.uint32), DTYPE),
    ("seq_lens", np.array([3, 6], F32), DTYPE),
    ("seq_lens", np.array([3, 6, 1], I32), MISMATCH),
    ("seq_lens", np.array([[3, 6]], I32), MISMATCH),
    ("sinks", ones(3), MISMATCH),
    ("sinks", ones(1, 4), MISMATCH),
    ("sinks", ones(4, dtype=np.complex64), DTYPE),
    ("out", ones(2, 4, 9), MISMATCH),
    ("out", ones(4, 8), MISMATCH),
    ("out", ones(2, 4, 8, dtype=F16), DTYPE),
]
PREFILL_ONLY = [
    ("cu_seqlens_q", np.array([0, 2, 5], F32), DTYPE),
    ("cu_seqlens_q", np.array([0, 5], I32), MISMATCH),
    ("cu_seqlens_q", np.array([[0, 2, 5]], I32), MISMATCH),
]
CALLS = [("decode", *row) for row in [*SHARED, ("q", ones(3, 4, 8), MISMATCH)]] + [
    ("prefill", *row) for row in SHARED[2:] + PREFILL_ONLY if row[0] != "out"
]
FUNCTIONS = {
    "decode": (numkv.decode_attention, decode_arguments),
    "prefill": (numkv.prefill_attention, prefill_arguments),
}


def call(which, to, **changes):
    function, arguments = FUNCTIONS[which]
    made = arguments() | changes
    moved = {n: to(x) if isinstance(x, np.ndarray) else x for n, x in made.items()}
    return function(**moved)


@each("which, name, array, error", CALLS)
def test_attention_arguments(target, to, which, name, array, error):
    with pytest.raises(error, match=about(name)):
        call(which, to, **{name: array})


@pytest.mark.parametrize("which", FUNCTIONS)
@pytest.mark.parametrize(("k", "named"), [(ones(2, 2, 6, 9), "q"), (ones(1, 2, 6, 8), "v")])
def test_the_cache_decides_on_the_sizes(target, to, which, k, named):
    """Where k disagrees with the others, these are the ones that are named."""
    with pytest.raises(MISMATCH, match=about(named)):
        call(which, to, k=k)


@pytest.mark.parametrize("which", FUNCTIONS)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_strided_last_axis_is_refused(target, to, which, name):
    *shape, last = FUNCTIONS[which][1]()[name].shape
    function, arguments = FUNCTIONS[which]
    moved = {n: to(x) for n, x in arguments().items()}
    moved[name] = to(ones(*shape, 2 * last))[..., ::2]
    with pytest.raises(ANY, match=about(name)):
        function(**moved)


def test_a_read_only_out_is_refused():
    place = np.zeros((2, 4, 8), F32)
    place.setflags(write=False)
    with pytest.raises(ANY, match=about("out")):
        call("decode", lambda x: x, out=place)


VALUES = [
    ("decode", {"seq_lens": np.array([3, 7], I32)}, "seq_lens"),
    ("decode", {"seq_lens": np.array([-1, 6], I32)}, "seq_lens"),
    ("decode", {"seq_lens": np.array([2**31 - 1, 6], I32)}, "seq_lens"),
    ("prefill", {"seq_lens": np.array([3, 7], I32)}, "seq_lens"),
    ("prefill", {"seq_lens": np.array([1, 6], I32)}, "seq_lens|cu_seqlens_q|q"),
    ("prefill", {"seq_lens": np.array([0, 6], I32)}, "seq_lens|cu_seqlens_q|q"),
    ("prefill", {"cu_seqlens_q": np.array([1, 2, 5], I32)}, "cu_seqlens_q"),
    ("prefill", {"cu_seqlens_q": np.array([0, 2, 4], I32)}, "cu_seqlens_q"),
    ("prefill", {"cu_seqlens_q": np.array([0, 2, 6], I32)}, "cu_seqlens_q"),
    ("prefill", {"cu_seqlens_q": np.array([0, 6, 5], I32)}, "cu_seqlens_q|q"),
    ("prefill", {"cu_seqlens_q": np.array([0, -1, 5], I32)}, "cu_seqlens_q"),
    ("prefill", {"cu_seqlens_q": np.array([-1, 2, 5], I32)}, "cu_seqlens_q"),
]
TYPED = (numkv.NumkvError, IndexError, ValueError)


@pytest.mark.parametrize(("which", "changes", "message"), VALUES)
def test_values_are_looked_at(target, to, host, which, changes, message):
    """On the CPU always, on CUDA when asked to; a result under way is not written to."""
    shape = FUNCTIONS[which][1]()["q"].shape
    place = to(np.full(shape, 7, F32))
    options = {"validate": True} if target == "cuda" else {}
    with pytest.raises(TYPED, match=message):
        call(which, to, out=place, **changes, **options)
    assert np.all(host(place) == 7)


@pytest.mark.parametrize(("which", "changes", "message"), VALUES)
def test_bad_values_on_cuda_touch_nothing_out_of_range(which, changes, message):
    """Unasked, the device is not waited for; the simulator would report a wild access."""
    from numkv import targets

    cuda = targets.get("cuda")
    out = call(which, cuda.asarray, **changes)
    assert cuda.to_host(out).shape == FUNCTIONS[which][1]()["q"].shape


@pytest.mark.parametrize("which", FUNCTIONS)
@pytest.mark.parametrize(
    ("name", "value"),
    [("window_left", -2), ("logits_soft_cap", -1.0), ("logits_soft_cap", np.nan)],
)
def test_options_are_looked_at(target, to, which, name, value):
    with pytest.raises(ValueError, match=f"^`{name}`: expected .*got"):
        call(which, to, **{name: value})


# ---------------------------------------------------------------- merge_states

MERGE = [
    ("lse_a", ones(2, 4), MISMATCH),
    ("o_b", ones(2, 3, 9), MISMATCH),
    ("o_b", ones(2, 3, 8, dtype=F16), ANY),
    ("lse_b", ones(3, 3), MISMATCH),
    ("lse_b", ones(2, 3, dtype=F16), DTYPE),
    ("o_a", ones(2, 3, 8, dtype=I32), DTYPE),
]


@pytest.mark.parametrize(("name", "array", "error"), MERGE)
def test_merge_arguments(target, to, name, array, error):
    arguments = {
        "o_a": ones(2, 3, 8), "lse_a": ones(2, 3), "o_b": ones(2, 3, 8), "lse_b": ones(2, 3),
    } | {name: array}  # fmt: skip
    with pytest.raises(error, match=about(name)):
        numkv.merge_states(*(to(x) for x in arguments.values()))


# ---------------------------------------------------------------- other targets, other things


def device(x):
    from numkv import targets

    return targets.get("cuda").asarray(x)


@pytest.mark.parametrize("name", ["q", "k", "v", "seq_lens"])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_arrays_of_two_targets(where, name):
    """The cache, k, says which target it is; where k itself is the odd one, others are named."""
    arguments = decode_arguments()
    moved = {n: device(x) if (n == name) == (where == "cpu") else x for n, x in arguments.items()}
    with pytest.raises(ANY, match=about("q|v|seq_lens" if name == "k" else name)):
        numkv.decode_attention(**moved)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_objects_refuse_arrays_of_the_other_target(where):
    other = device if where == "cpu" else (lambda x: x)
    cache = numkv.KVCache(1, 2, 4, target=where)
    layer = numkv.ContiguousLayer(4, 2, 4, target=where)
    rows = other(ones(1, 2, 4))
    for call_it in (lambda: cache.append(0, rows, rows), lambda: layer.append(rows, rows)):
        with pytest.raises((numkv.NumkvError, TypeError), match=about("k")):
            call_it()
    with pytest.raises((numkv.NumkvError, TypeError), match=about("q")):
        layer.decode_attention(other(ones(1, 2, 4)))
    assert layer.seq_len == 0


THINGS = [None, 3, 2.5, "rows", [[1.0] * 4] * 2, object()]


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: type(thing).__name__)
def test_things_that_are_no_arrays(thing):
    cache = numkv.KVCache(1, 2, 4)
    with pytest.raises((numkv.NumkvError, TypeError), match=about("k")):
        cache.append(0, thing, ones(2, 4))
    with pytest.raises((numkv.NumkvError, TypeError), match=about("seq_lens")):
        numkv.decode_attention(**decode_arguments() | {"seq_lens": thing})


# ---------------------------------------------------------------- arrays of other libraries


class Interface:
    """An array known only by its ``__array_interface__``."""

    def __init__(self, x):
        self.kept, self.__array_interface__ = x, x.__array_interface__


@pytest.mark.parametrize("wrap", [Interface, Capsule])
def test_foreign_arrays_are_used_without_a_copy(rng, wrap):
    new, cache = rng.standard_normal((1, 2, 3, 4), F32), np.zeros((1, 2, 8, 4), F32)
    offsets = np.array([2], I64)
    numkv.append(*(wrap(x) for x in (new, new, cache, cache.copy(), offsets)))
    assert np.array_equal(cache[:, :, 2:5], new)
    q, lens = rng.standard_normal((1, 2, 4), F32), np.array([5], I32)
    out = numkv.decode_attention(*(wrap(x) for x in (q, cache, cache, lens)))
    assert np.array_equal(out, numkv.decode_attention(q, cache, cache, lens))


def test_a_bfloat16_array_that_dlpack_does_not_hand_over():
    """As JAX has them on the CPU: NumPy's DLPack knows no bfloat16, `__array__` gives it without a copy."""

    class Array(Capsule):
        def __dlpack__(self, **options):
            raise BufferError("Unsupported dtype in DLTensor.")

        def __array__(self, dtype=None, copy=None):
            return self.kept

    rows = np.linspace(-3, 3, 8, dtype=F32).reshape(1, 2, 4).astype(ml_dtypes.bfloat16)
    cache = numkv.KVCache(1, 2, 4, kind="bf16")
    cache.append(0, Array(rows), Array(rows))
    assert np.array_equal(cache.k(0), rows)


def test_a_torch_bfloat16_tensor():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rows = torch.linspace(-3, 3, 8, dtype=torch.bfloat16).reshape(1, 2, 4)
    cache = numkv.KVCache(1, 2, 4, kind="bf16")
    cache.append(0, rows, rows)
    assert np.array_equal(cache.k(0).astype(F32), rows.to(torch.float32).numpy())


@pytest.mark.parametrize("lens", [[2.5, 6.0], ["3", "6"], [[3, 6]], [3, 7], [3, None]], ids=repr)
def test_lists_of_something_else(lens):
    """A list of ints will do for lengths; nothing is cut to fit."""
    arguments = decode_arguments()
    assert np.array_equal(
        numkv.decode_attention(**arguments | {"seq_lens": [3, 6]}),
        numkv.decode_attention(**arguments),
    )
    with pytest.raises((*TYPED, TypeError), match="seq_lens"):
        numkv.decode_attention(**arguments | {"seq_lens": lens})


def test_byte_order_matters():
    rows = ones(2, 4).astype(">f4")
    with pytest.raises(DTYPE, match=about("k")):
        numkv.KVCache(1, 2, 4).append(0, rows, rows)


def test_wrong_kinds_for_a_cache():
    """Rows come in the kind's own dtype or in float32, nothing else."""
    for kind, dtype in naive.DTYPES.items():
        for other, wrong in naive.DTYPES.items():
            if other in (kind, "fp32"):
                continue
            cache = numkv.KVCache(1, 1, 2, kind=kind)
            rows = np.ones((1, 2)).astype(wrong)
            with pytest.raises(DTYPE, match=rf"^`k`: expected .*{dtype.name}.*got {wrong.name}"):
                cache.append(0, rows, rows)
