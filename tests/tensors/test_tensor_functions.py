"""numkv's functions on tensors: what the oracle says, as tensors, without copies and without gradients."""

from concurrent.futures import ThreadPoolExecutor

import naive
import numpy as np
import pytest
import tolerances

import numkv

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import numkv.torch as on_tensors  # noqa: E402

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
LENS = [5, 32]


def tensor(rng, shape, kind="fp32"):
    return torch.from_numpy(rng.standard_normal(shape)).to(DTYPES[kind])


def plain(x):
    return x.to(torch.float64).numpy()


def problem(rng, kind="fp32"):
    """q, k, v of two sequences, and their lengths."""
    shapes = [(2, 8, 64), (2, 4, 32, 64), (2, 4, 32, 64)]
    return [*(tensor(rng, shape, kind) for shape in shapes), torch.tensor(LENS)]


def expected(q, k, v, lens):
    """Decode attention by the oracle: the rows of each sequence."""
    found = []
    for b, n in enumerate(lens.tolist()):
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // k.shape[1])
            rows = (plain(x)[b, g, :n] for x in (k, v))
            found.append(naive.attention_row(plain(q)[b, h], *rows, 64**-0.5, 0.0, None)[0])
    return np.stack(found).reshape(q.shape)


@pytest.mark.parametrize("kind", DTYPES)
def test_decode(rng, kind):
    args = problem(rng, kind)
    result = on_tensors.decode_attention(*args)
    assert result.dtype == DTYPES[kind]
    bound = tolerances.attention(kind, kind)
    tolerances.assert_rows_close(plain(result), expected(*args), bound)
    out = torch.full_like(result, 7)
    assert on_tensors.decode_attention(*args, out=out) is out
    assert torch.equal(out, result)
    again, lse = on_tensors.decode_attention(*args, out=out, return_lse=True)
    assert again is out
    assert lse.dtype == torch.float32
    assert lse.shape == (2, 8)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_strided_tensors_are_read_where_they_are(rng, kind):
    q, k, v, lens = problem(rng, kind)
    wide = tensor(rng, (2, 32, 4, 64), kind).transpose(1, 2)  # tokens before heads
    wide.copy_(k)
    rows = tensor(rng, (2, 4, 32, 128), kind)[..., :64]
    rows.copy_(v)
    queries = tensor(rng, (8, 2, 64), kind).transpose(0, 1)
    queries.copy_(q)
    same = on_tensors.decode_attention(q, k, v, lens)
    assert torch.equal(on_tensors.decode_attention(queries, wide, rows, lens.int()), same)
    out = torch.zeros((8, 2, 64), dtype=q.dtype).transpose(0, 1)
    assert on_tensors.decode_attention(q, k, v, lens, out=out) is out
    assert torch.equal(out, same)


def test_every_function_gives_what_numkv_gives(rng):
    q, k, v, lens = problem(rng)
    new = tensor(rng, (2, 4, 64))
    starts, table = torch.tensor([0, 1, 2]), torch.tensor([[0], [1]], dtype=torch.int32)
    slots, offsets = torch.tensor([6, 40]), torch.tensor([3, 9])
    qkv, tables = tensor(rng, (2, 16 * 64)), tensor(rng, (4, 16)).abs() + 1
    lse = tensor(rng, (2, 8))

    calls = [
        ("prefill_attention", (q, k, v, lens, starts), {}),
        ("paged_decode_attention", (q, k, v, table, lens), {"window_left": 3}),
        ("paged_prefill_attention", (q, k, v, table, lens, starts), {"logits_soft_cap": 5.0}),
        ("attention_weights", (q, k, lens), {}),
        ("merge_states", (q, lse, q * 2, lse + 1), {}),
        ("paged_append", (new, new, k, v, slots), {}),
        ("append", (new[:, :, None], new[:, :, None], k, v, offsets), {}),
        (
            "paged_write",
            (qkv, k, v, slots),
            {"num_q_heads": 8, "qk_mode": 0, "positions": None},
        ),
        (
            "paged_write",
            (qkv, k, v, slots),
            {"num_q_heads": 8, "qk_mode": 1, "positions": torch.tensor([1, 3]), "cos": tables,
             "sin": tables, "q_norm_weight": torch.ones(64), "k_norm_weight": torch.ones(64)},
        ),
    ]  # fmt: skip
    for name, args, options in calls:
        mine = [x.clone() for x in args]
        arrays = [x.numpy().copy() for x in args]
        named = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        found = getattr(on_tensors, name)(*mine, **options)
        wanted = getattr(numkv, name)(*arrays, **named)
        pairs = zip(mine, arrays, strict=True)
        assert all(np.array_equal(a.numpy(), b) for a, b in pairs), name  # what was written
        if wanted is None:
            assert found is None
            assert any(not np.array_equal(a, b.numpy()) for a, b in zip(arrays, args, strict=True))
            continue
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        found = found if isinstance(found, tuple) else (found,)
        assert all(isinstance(x, torch.Tensor) for x in found)
        assert all(np.array_equal(a.numpy(), b) for a, b in zip(found, wanted, strict=True)), name


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_floats(rng, dtype):
    q, k, v, lens = problem(rng)
    dtype = getattr(torch, dtype)
    small_k, small_v = k.to(dtype), v.to(dtype)
    result = on_tensors.decode_attention(q, small_k, small_v, lens)
    wanted = expected(q, small_k.float(), small_v.float(), lens)
    tolerances.assert_rows_close(plain(result), wanted, 1e-5)


def test_codes_with_scales(rng):
    q, k, v, lens = problem(rng)
    (codes_k, scale_k), (codes_v, scale_v) = (naive.int8_quantise(plain(x)) for x in (k, v))
    result = on_tensors.decode_attention(
        q, torch.from_numpy(codes_k), torch.from_numpy(codes_v), lens,
        k_scale=torch.from_numpy(scale_k), v_scale=torch.from_numpy(scale_v),
    )  # fmt: skip
    stored = [
        torch.from_numpy(naive.int8_dequantise(*x))
        for x in ((codes_k, scale_k), (codes_v, scale_v))
    ]
    wanted = expected(q, *stored, lens)
    tolerances.assert_rows_close(plain(result), wanted, tolerances.attention("int8", "fp32"))


def test_gradients_are_refused_rather_than_lost(rng):
    q, k, v, lens = problem(rng)
    same = on_tensors.decode_attention(q, k, v, lens)
    learnt = q.clone().requires_grad_()
    for args, name in (((learnt, k, v, lens), "q"), ((q, learnt[:, None, :4] * 1, v, lens), "k")):
        with pytest.raises(numkv.NotSupported, match=f"`{name}`.*requires_grad"):
            on_tensors.decode_attention(*args)
    with pytest.raises(numkv.NotSupported, match="`sinks`"):
        on_tensors.decode_attention(q, k, v, lens, sinks=torch.zeros(8, requires_grad=True))
    with torch.no_grad():
        assert torch.equal(on_tensors.decode_attention(learnt, k, v, lens), same)
    with torch.inference_mode():
        made = torch.zeros_like(q) + learnt
        result = on_tensors.decode_attention(made, k, v, lens)
        assert result.is_inference()
        assert torch.equal(result, same)
    assert torch.equal(on_tensors.decode_attention(torch.nn.Parameter(q, False), k, v, lens), same)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")  # of torch.func.jvp
def test_tensors_that_cannot_be_taken_are_named(rng):
    q, k, v, lens = problem(rng)
    meta = q.to("meta")
    with pytest.raises(numkv.NotSupported, match=r"`q`.*meta"):
        on_tensors.decode_attention(meta, k, v, lens)
    with pytest.raises(numkv.NotSupported, match=r"`q`.*sparse"):
        on_tensors.decode_attention(q.to_sparse(), k, v, lens)
    negated = torch.complex(torch.zeros_like(q), q).conj().imag
    assert negated.is_neg()
    with pytest.raises(numkv.NotSupported, match=r"`q`.*negated"):
        on_tensors.decode_attention(negated, k, v, lens)
    with pytest.raises(numkv.NotSupported, match=r"`q`.*within torch\.func\.vmap"):
        torch.vmap(lambda x: on_tensors.decode_attention(x, k, v, lens))(q[None])
    beside = pytest.raises(numkv.NotSupported, match=r"`q`.*within torch\.func\.vmap")
    with beside:  # `q` is a plain tensor there, and v is not
        torch.func.jvp(lambda x: on_tensors.decode_attention(q, k, x, lens), (v,), (v,))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(q)
    with pytest.raises(numkv.NotSupported, match=r"`q`.*got a FakeTensor within"):
        on_tensors.decode_attention(fake, k, v, lens)
    with pytest.raises(
        numkv.NotSupported, match=r"a step of \d+ bytes along it; pass a contiguous copy of q$"
    ):
        on_tensors.decode_attention(q.mT.contiguous().mT, k, v, lens)
    with pytest.raises(numkv.UnsupportedDType, match="`k`"):
        on_tensors.decode_attention(q, k.to(torch.int64), v, lens)
    with pytest.raises(numkv.DimensionMismatch, match="`q`"):
        on_tensors.decode_attention(q[:, None], k, v, lens)
    with pytest.raises(IndexError, match="seq_lens"):
        on_tensors.decode_attention(q, k, v, lens + 1)


def test_lists_and_arrays_are_taken_too(rng):
    q, k, v, lens = problem(rng)
    same = on_tensors.decode_attention(q, k, v, lens)
    assert torch.equal(on_tensors.decode_attention(q, k, v, LENS), same)
    assert torch.equal(on_tensors.decode_attention(q.numpy(), k.numpy(), v, lens.numpy()), same)


def test_several_threads(rng):
    problems = [problem(rng, kind) for kind in ("fp32", "bf16") for _ in range(4)]
    alone = [on_tensors.decode_attention(*args) for args in problems]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            together = pool.map(lambda args: on_tensors.decode_attention(*args), problems)
            assert all(map(torch.equal, alone, together))
