"""Calls like earlier ones: arrays for tensors that are as they say now, whatever tensors there were before."""

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import numkv
from numkv.storage import user_buffers
from numkv.storage.user_buffers import array_at

torch = pytest.importorskip("torch")

import numkv.torch as on_tensors  # noqa: E402
from numkv.torch import call_cache  # noqa: E402
from numkv.torch.call_cache import CallCache  # noqa: E402
from numkv.torch.tensors import array_of, converter  # noqa: E402

pytestmark = pytest.mark.skipif(call_cache._guards is None, reason="this PyTorch has no such check")


def taught(*tensors):
    """Forms of which one is that of these tensors."""
    calls = CallCache()
    calls.learn(list(tensors), [array_of(x, "x") for x in tensors])
    return calls


def same(found, wanted):
    """Whether arrays are those of the tensors: memory, shape, steps and dtype."""
    arrays = [array_of(x, "x") for x in wanted]
    return len(found) == len(arrays) and all(
        (a.shape, a.dtype) == (b.shape, b.dtype)
        and (not a.size or (a.ctypes.data, a.strides) == (b.ctypes.data, b.strides))
        for a, b in zip(found, arrays, strict=True)
    )


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "int32", "int8", "uint8", "bool"]
)  # fmt: skip
def test_arrays_are_where_tensors_are(dtype):
    dtype = getattr(torch, dtype)
    made = torch.arange(48).remainder(2).to(dtype).reshape(2, 4, 6)
    forms = (made, made[:, 1:], made.transpose(0, 1), made[..., :3], made[:0], made[0, 0, 0])
    for x in (*forms, made[:1].expand(5, 4, 6)):
        calls = taught(x, made)
        assert same(calls.arrays([x, made]), (x, made))
        other = torch.empty_strided(x.shape, x.stride(), dtype=dtype).fill_(1)
        again = calls.arrays([other, made])
        assert same(again, (other, made))
        assert np.all(again[0].astype(np.float32) == 1)


def test_memory_is_not_kept():
    x = torch.zeros(3, 4)
    calls = taught(x)
    assert calls.arrays([x]) is not None
    assert sys.getrefcount(x) == 2
    gone, storage = weakref.ref(x), weakref.ref(x.untyped_storage())
    del x
    gc.collect()
    assert gone() is None
    assert storage() is None


def test_other_forms_are_not_known():
    x = torch.zeros(2, 4, 4)
    calls = taught(x)
    others = (
        x[:1], x.mT, x[..., :2], x.to(torch.float64), x.to(torch.int32), x.to("meta"), x.to_sparse(),
        torch._neg_view(x), x.clone().requires_grad_(), torch.nn.Parameter(x), torch.nn.Parameter(x, False),
        torch._efficientzerotensor(x.shape), torch.complex(x, x), None, 3, x.numpy(),
    )  # fmt: skip
    for other in others:
        assert calls.arrays([other]) is None
    assert calls.arrays([x, x]) is None
    assert calls.arrays([]) is None
    assert same(calls.arrays([x.clone()]), [x]) is False  # another address


def test_a_tensor_that_comes_twice():
    x, y = torch.zeros(2, 3), torch.ones(2, 3)
    calls = taught(x, x, y)
    assert same(calls.arrays([x, x, y]), (x, x, y))
    assert same(calls.arrays([y, x, x]), (y, x, x))
    assert calls.arrays([x, x, y[:1]]) is None


def test_one_tensor_whose_memory_changes():
    """Each line does to a tensor what leaves an earlier array pointing elsewhere, or to memory that is gone."""

    def grow(x):
        x.resize_(64, 8)

    def swap(x):
        x.data = torch.full((4, 8), 2.0)

    def swap_and_turn(x):
        x.data = torch.full((8, 8), 2.0)[:, ::2].T

    def turn(x):
        x.data = x.data.reshape(4, 8).T.reshape(4, 8)

    def set_other(x):
        x.set_(torch.full((4, 8), 3.0))

    def set_later(x):
        x.set_(torch.arange(99.0).untyped_storage(), 7, (4, 8), (8, 1))

    def transpose(x):
        x.t_()

    def widen(x):
        x.data = x.data.to(torch.float64)

    def halve(x):
        x.data = x.data.to(torch.bfloat16)

    def squeeze(x):
        x.unsqueeze_(0)

    def stride(x):
        x.as_strided_((4, 8), (1, 1))

    for change in (
        grow,
        swap,
        swap_and_turn,
        turn,
        set_other,
        set_later,
        transpose,
        widen,
        halve,
        squeeze,
        stride,
    ):
        for mode in (torch.enable_grad, torch.inference_mode):
            with mode():
                x = torch.zeros(4, 8)
                calls = CallCache()
                # By address and form alone, as `numpy` itself would forbid the storage to grow.
                calls.learn([x], [array_at(x.data_ptr(), (4, 8), np.dtype(np.float32), None)])
                assert calls.arrays([x]) is not None
                change(x)
                found = calls.arrays([x])
                assert found is None or same(found, [x]), change
    x = torch.zeros(4, 8)
    address, calls = x.data_ptr(), taught(x)
    calls.arrays([x])
    del x
    for _ in range(20):  # whoever gets the memory or the identity next
        y = torch.zeros(2, 16)
        assert calls.arrays([y]) is None
        z = torch.full((4, 8), 5.0)
        assert same(calls.arrays([z]), [z])
        if address in (y.data_ptr(), z.data_ptr()):
            break


def test_gradients_are_refused_in_calls_like_earlier_ones():
    q, k = torch.randn(1, 4, 32), torch.randn(1, 2, 8, 32)
    learnt, lens = q.clone().requires_grad_(), torch.tensor([5])
    for _ in range(3):
        with torch.no_grad():
            wanted = on_tensors.decode_attention(learnt, k, k, lens)
        with pytest.raises(numkv.NotSupported, match=r"`q`.*requires_grad"):
            on_tensors.decode_attention(learnt, k, k, lens)
        with pytest.raises(numkv.NotSupported, match=r"`q`.*meta"):
            on_tensors.decode_attention(q.to("meta"), k, k, lens)
        assert torch.equal(on_tensors.decode_attention(q, k, k, lens), wanted)
    q.requires_grad_()  # the very tensor that was taken
    with pytest.raises(numkv.NotSupported, match=r"`q`.*requires_grad"):
        on_tensors.decode_attention(q, k, k, lens)


def test_modes_take_turns():
    x = torch.zeros(3)
    convert = converter(("x",), keeps=False)
    for _ in range(3):
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                for y in (x, torch.ones(3), torch.ones(2)):
                    assert same(convert((y,), {})[0], [y])
    with pytest.raises(Exception, match=r"vmap|functorch|storage|numpy|data pointer"):
        torch.func.vmap(lambda y: (convert((y,), {}), y)[1])(torch.zeros(2, 3))


def test_arguments_keep_their_places():
    convert = converter(("a", "b", "c", "d"), keeps=False)
    x, y, z = torch.zeros(2), torch.ones(3), torch.ones(4, dtype=torch.bfloat16)
    cases = [
        ((x, y), {}), ((x, 1, y), {}), ((1, x, y), {}), ((x, y, 1), {}), ((1, x), {"d": y}), ((x, 1), {"d": y}),
        ((), {"c": 1, "d": x}), ((x,), {"b": None, "c": y, "d": z}), ((x, y, z, x, y), {}), ((1, 2), {}),
        ((x,), {"b": z}),
    ]  # fmt: skip
    for _ in range(2):
        for args, kwargs in cases:
            arrays, named = convert(args, dict(kwargs))
            assert list(named) == list(kwargs)
            for a, b in zip((*arrays, *named.values()), (*args, *kwargs.values()), strict=True):
                assert same([a], [b]) if isinstance(b, torch.Tensor) else a is b or b is y


def test_subclasses_and_parameters_go_by_themselves():
    class Named(torch.Tensor):
        pass

    x = torch.zeros(3)
    mine, weight = x.as_subclass(Named), torch.nn.Parameter(torch.ones(3), False)
    convert = converter(("a", "b"), keeps=False)
    for _ in range(3):
        for args in ((x, x), (mine, x), (weight, mine), (weight, weight)):
            assert same(convert(args, {})[0], args)


def test_forms_and_addresses_are_bounded():
    calls = CallCache()
    for n in range(200):
        x = torch.zeros(n + 1)
        if calls.arrays([x]) is None:
            calls.learn([x], [x.numpy()])
    assert len(calls._known[1]) <= call_cache._MOST_FORMS
    wide = torch.zeros(5000)
    for n in range(4900):
        x = wide[n : n + 7]
        if calls.arrays([x]) is None:
            calls.learn([x], [x.numpy()])
    assert max(len(known.arrays) for known in calls._known[1]) <= call_cache._MOST_ADDRESSES


def test_without_the_check_of_pytorch(monkeypatch):
    monkeypatch.setattr(call_cache, "_guards", None)
    convert = converter(("x",), keeps=False)
    x = torch.zeros(3)
    for _ in range(3):
        assert same(convert((x,), {})[0], [x])
    assert taught(x).arrays([x]) is None


def test_threads_share_forms():
    convert = converter(("x", "y"), keeps=False)

    def work(seed):
        for n in range(200):
            x, y = torch.full((1 + (n + seed) % 3, 4), float(seed)), torch.full((5,), float(n))
            a, b = convert((x, y), {})[0]
            if not (same([a, b], [x, y]) and np.all(a == seed) and np.all(b == n)):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


def test_pools_are_known_again_and_scales_of_heads_are_not(monkeypatch):
    monkeypatch.setattr(user_buffers, "_pools", {})
    # Calls without options go a shorter way, without pools.
    q, lens = torch.randn(2, 4, 32), torch.tensor([5, 3])
    k = torch.ones(2, 2, 8, 32)
    eight, scale = k.to(torch.float8_e4m3fn), torch.ones(2)
    for _ in range(4):
        on_tensors.decode_attention(q, k, k, lens, window_left=7)
        on_tensors.decode_attention(q, eight, eight, lens, k_scale=scale, v_scale=scale)
    assert len(user_buffers._pools) == 1
    scale *= 3  # read anew in each call
    found = on_tensors.decode_attention(q, eight, eight, lens, k_scale=scale, v_scale=scale)
    assert torch.allclose(found, torch.full_like(found, 3.0))
    scale[1] = -1
    with pytest.raises(ValueError, match="scale"):
        on_tensors.decode_attention(q, eight, eight, lens, k_scale=scale, v_scale=scale)
    k.fill_(2)
    for options in ({}, {"window_left": 7}):
        found = on_tensors.decode_attention(q, k, k, lens, **options)
        assert torch.allclose(found, torch.full_like(q, 2))
    with pytest.raises(numkv.NotSupported, match="k_scale"):
        on_tensors.decode_attention(q, k, k, lens, k_scale=scale)
    codes, scales = torch.ones(2, 2, 8, 32, dtype=torch.int8), torch.ones(2, 2, 8)
    for n in (1.0, 2.0, 3.0):
        scales.fill_(n)
        found = on_tensors.decode_attention(q, codes, codes, lens, k_scale=scales, v_scale=scales)
        assert torch.allclose(found, torch.full_like(q, n))
    rows = torch.ones(1, 2, 32)
    for _ in range(3):  # written to: the two may not be one
        with pytest.raises(numkv.NotSupported, match="own"):
            on_tensors.paged_append(rows, rows, k, k, torch.tensor([1]))
