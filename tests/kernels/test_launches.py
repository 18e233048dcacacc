"""How CUDA kernels are launched: one signature for widths of integers, files on disk, streams, late reports."""

import numpy as np
import pytest
from layer_lists import paged_kv_cache

import numkv
from numkv import targets
from numkv.kernels import disk_cache

F32, I32, I64 = np.float32, np.int32, np.int64


@pytest.fixture
def there():
    return targets.get("cuda")


def appended(there, slots):
    """A pool of one kv head after an append of three rows."""
    pools = [there.asarray(np.full((2, 1, 4, 8), 7, F32)) for _ in range(2)]
    rows = there.asarray(np.arange(24, dtype=F32).reshape(3, 1, 8))
    numkv.paged_append(rows, rows, *pools, slots)
    return there.to_host(pools[0])


@pytest.mark.parametrize("dtype", [I32, I64])
def test_slots_of_both_widths(there, dtype):
    """Kernels are made for one type of indices, and read both."""
    got = appended(there, there.asarray(np.array([5, -1, 2], dtype)))
    expected = np.full((2, 1, 4, 8), 7, F32)
    expected[1, 0, 1], expected[0, 0, 2] = np.arange(8), np.arange(16, 24)
    assert np.array_equal(got, expected)


def test_a_kernel_refuses_arrays_of_another_type(there):
    """What it would read as something else."""
    with pytest.raises(TypeError, match="append for CUDA: expected"):
        numkv.targets.get("cuda").ops.append_rows(
            there.asarray(np.ones((1, 1, 8), np.float64)), "fp32", there.asarray(np.ones((1, 1, 1, 8), F32)),
            "fp32", there.empty((0, 0, 0), F32), there.asarray(np.zeros(1, I32)), 0,
        )  # fmt: skip


class Stream:
    """A stream of some library."""

    def __cuda_stream__(self):
        return 0, 42


@pytest.mark.parametrize(
    "stream", [0, 1, 42, np.int64(7), Stream()], ids=["0", "1", "42", "int64", "object"]
)
def test_streams_that_are_taken(there, stream):
    with numkv.on_stream(stream):
        got = appended(there, there.asarray(np.array([5, -1, 2], I64)))
    assert got[1, 0, 1, 3] == 3


@pytest.mark.parametrize(
    "stream",
    ["0", -1, True, 1.5, object(), [0]],
    ids=["str", "-1", "True", "1.5", "object", "list"],
)
def test_what_is_no_stream(stream):
    with pytest.raises(numkv.NotSupported, match=r"`stream`: expected a stream of numba\.cuda"):
        numkv.on_stream(stream)


def calls_on(target):
    """Public calls of functions and objects, with arrays of a target."""
    there = targets.get(target)
    rows, q = there.asarray(np.ones((1, 1, 8), F32)), there.asarray(np.ones((1, 2, 8), F32))
    pool = [there.asarray(np.zeros((2, 1, 4, 8), F32)) for _ in range(2)]
    table, one = there.asarray(np.zeros((1, 1), I32)), there.asarray(np.ones(1, I64))
    starts, zero = there.asarray(np.array([0, 1], I64)), there.asarray(np.zeros(1, I64))
    lens = there.asarray(np.array([1, 1], I64))
    two, lse = there.asarray(np.ones((2, 2, 8), F32)), there.asarray(np.ones((1, 2), F32))
    qkv = there.asarray(np.ones((1, 32), F32))
    layer = numkv.ContiguousLayer(8, 1, 8, kind="fp32", target=target)
    cache = numkv.KVCache(1, 1, 8, kind="fp32", target=target)
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8}
    pages = paged_kv_cache(**sizes, num_blocks=4, kind="fp32", target=target)
    step = pages.reserve([pages.add()], 1)
    new = [there.asarray(np.ones((2, 1, 1, 8), F32)) for _ in range(2)]
    plan = numkv.AppendPlan.select(numkv.AppendDescriptor(2, 1, 1, 4, 8, 8, F32), target=target)
    offsets = there.asarray(np.zeros(2, I64))
    args = numkv.AppendArgs(*new, *pool, offsets)
    return {
        "append": lambda: numkv.append(*new, *pool, offsets),
        "plan": lambda: plan.run(args),
        "decode": lambda: numkv.decode_attention(two, *pool, lens),
        "prefill": lambda: numkv.prefill_attention(two, *pool, lens, there.asarray(np.arange(3))),
        "merge": lambda: numkv.merge_states(q, lse, q, lse),
        "paged_append": lambda: numkv.paged_append(rows, rows, *pool, zero),
        "paged_write": lambda: numkv.paged_write(qkv, *pool, zero, num_q_heads=2, qk_mode=0),
        "paged_decode": lambda: numkv.paged_decode_attention(q, *pool, table, one),
        "paged_prefill": lambda: numkv.paged_prefill_attention(q, *pool, table, one, starts),
        "layer append": lambda: layer.append(rows, rows),
        "layer write": lambda: layer.write(qkv, num_q_heads=2, qk_mode=0),
        "layer decode": lambda: layer.decode_attention(q),
        "cache append": lambda: cache.append(0, rows, rows),
        "cache decode": lambda: cache.decode_attention(0, q),
        "step append": lambda: step.append(0, rows, rows),
        "step write": lambda: step.write(0, qkv, num_q_heads=2, qk_mode=0),
        "step attention": lambda: step.mark_written(0) or step.attention(0, q),
        "step weights": lambda: step.mark_written(0) or step.attention_weights(0, q),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(calls_on("cpu")))
def test_every_call_runs_on_a_stream(target, name):
    """On CUDA; calls on the CPU take no notice of it."""
    call = calls_on(target)[name]
    call()
    with numkv.on_stream(0):
        call()


# ---------------------------------------------------------------- what kernels report later


def bad_rows(there, kind, rows=3, dim=8):
    """Pools of a kind, rows of which one holds infinity, and their scales."""
    made = numkv.kinds.kind(kind)
    pools = [
        there.asarray(np.full((2, 1, 4, made.words_per_row(dim)), 77, made.word)) for _ in "kv"
    ]
    shape = made.scale_shape((2, 1, 4), dim)
    scales = {f"{n}_scale": there.asarray(np.ones(shape, made.scale_dtype)) for n in "kv"}
    x = np.arange(rows * dim, dtype=F32).reshape(rows, 1, dim)
    x[1, 0, 5] = np.inf
    return pools, x, scales


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_bad_row_is_stored_as_zeros_and_said_by_a_later_call(there, kind):
    (k_pool, v_pool), x, scales = bad_rows(there, kind)
    good = there.asarray(np.where(np.isfinite(x), x, 0))
    slots = there.asarray(np.array([0, 1, 2], I64))
    numkv.paged_append(good, there.asarray(x), k_pool, v_pool, slots, **scales)
    with pytest.raises(numkv.NonFiniteInput, match="`v`") as caught:
        numkv.paged_append(good, good, k_pool, v_pool, slots, **scales)
    assert caught.value.index == (1, 0, 5)
    scale = there.to_host(scales["v_scale"]).astype(F32)[0, 0, :4].reshape(4, -1)[:, 0]
    assert scale[1] == 0
    assert scale[0] > 0
    assert scale[2] > 0
    assert scale[3] == 1
    table, lens = there.asarray(np.zeros((1, 1), I32)), there.asarray(np.array([3], I64))
    q = there.asarray(np.zeros((1, 1, 8), F32))
    out = there.to_host(numkv.paged_decode_attention(q, k_pool, v_pool, table, lens, **scales))
    assert np.allclose(out[0, 0], (x[0, 0] + x[2, 0]) / 3, atol=0.7)  # zeros count as a third row
    numkv.paged_append(good, good, k_pool, v_pool, slots, **scales)  # it is said once


def test_without_a_check_nothing_is_said(there):
    (k_pool, v_pool), x, scales = bad_rows(there, "int8")
    slots, rows = there.asarray(np.array([0, 1, 2], I64)), there.asarray(x)
    for _ in range(2):
        numkv.paged_append(rows, rows, k_pool, v_pool, slots, check_finite=False, **scales)


def test_a_layer_goes_on_when_the_bad_token_is_truncated(there):
    layer = numkv.ContiguousLayer(8, 1, 8, kind="int8", target="cuda")
    _, x, _ = bad_rows(there, "int8")
    good = there.asarray(np.ones((1, 1, 8), F32))
    layer.append(good, good)
    layer.append(there.asarray(x), there.asarray(x))
    for call in (lambda: layer.append(good, good), layer.check):
        with pytest.raises(numkv.NonFiniteInput, match="truncate to 2 tokens") as caught:
            call()
        assert caught.value.index == (1, 0, 5)
    other = numkv.ContiguousLayer(8, 1, 8, kind="int8", target="cuda")
    other.append(good, good)  # what one has done is not said to others
    layer.truncate(2)
    layer.append(good, good)
    layer.check()
    assert np.isfinite(there.to_host(layer.v)).all()


def test_a_cache_does_not_advance_past_a_bad_token(there):
    cache = numkv.KVCache(2, 1, 8, kind="int8", target="cuda")
    _, x, _ = bad_rows(there, "int8")
    good = there.asarray(np.where(np.isfinite(x), x, 0))
    cache.append(0, good, good)
    cache.append(1, good, there.asarray(x))
    with pytest.raises(numkv.NonFiniteInput, match="truncate to 1 tokens"):
        cache.advance(3)
    cache.truncate(0)
    for layer in range(2):
        cache.append(layer, good, good)
    cache.advance(3)


# ---------------------------------------------------------------- files


def test_what_a_file_holds(tmp_path, monkeypatch):
    """Machine code that Numba's dispatcher does not load comes back as it was, or not at all."""
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    disk_cache._warn.cache_clear()
    path = disk_cache.path_of(test_what_a_file_holds, "make_it", ("a", "b"))
    assert path != disk_cache.path_of(test_what_a_file_holds, "make_it", ("a", "c"))
    assert disk_cache.load(path, bytes) is None
    disk_cache.save(path, b"entry\0code")
    assert disk_cache.load(path, bytes) == b"entry\0code"
    assert disk_cache.kernel_files(path.parent) == [path]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert disk_cache.load(path, bytes) is None
    disk_cache.save(path, b"entry\0code")
    assert disk_cache.load(path, bytes) == b"entry\0code"


# ---------------------------------------------------------------- other libraries


class Tensor:
    """What a tensor on the device looks like whose gradient is recorded."""

    __module__ = "torch"
    is_cuda = requires_grad = True
    dtype = "torch.float32"
    shape = (1, 1, 8)


def test_a_tensor_that_requires_grad_is_refused_by_name(there):
    pools = [there.asarray(np.zeros((2, 1, 4, 8), F32)) for _ in range(2)]
    rows, slots = there.asarray(np.ones((1, 1, 8), F32)), there.asarray(np.zeros(1, I64))
    with pytest.raises(numkv.NotSupported, match=r"`v`: .*requires_grad=True; pass v\.detach\(\)"):
        numkv.paged_append(rows, Tensor(), *pools, slots)
