"""``torch.ops.numkv``: operators that PyTorch's own checks accept, and that compile without breaks."""

import pytest

import numkv

torch = pytest.importorskip("torch")

import numkv.torch as on_tensors  # noqa: E402
from numkv.torch import operators  # noqa: E402

OPS = torch.ops.numkv


def operands(seed=0):
    made = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 8, 64, generator=made, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 4, 32, 64, generator=made, dtype=torch.bfloat16) for _ in range(2))
    return q, k, v, torch.tensor([5, 32])


def cases():
    q, k, v, lens = operands()
    starts, table = torch.tensor([0, 1, 2]), torch.tensor([[0], [1]], dtype=torch.int32)
    new, slots = k[:, :, 0].clone(), torch.tensor([6, 40])
    inputs = {
        "decode_attention": (q, k, v, lens),
        "prefill_attention": (q, k, v, lens, starts),
        "paged_decode_attention": (q, k, v, table, lens),
        "paged_prefill_attention": (q, k, v, table, lens, starts),
    }
    options = {"sm_scale": 0.2, "window_left": 7, "logits_soft_cap": 9.0, "sinks": torch.zeros(8)}
    for name, args in inputs.items():
        yield getattr(OPS, name).default, args, {}
        yield getattr(OPS, name).lse, args, options
        yield getattr(OPS, name).out, args, {"out": torch.empty_like(q)}
        yield getattr(OPS, name).lse_out, args, {**options, "out": torch.empty_like(q)}
    yield OPS.append.default, (new[:, :, None], new[:, :, None], k, v, torch.tensor([1, 2])), {}
    yield OPS.paged_append.default, (new, new, k, v, slots), {}
    qkv = torch.randn(2, 16 * 64, dtype=torch.bfloat16)
    heads = {"num_q_heads": 8, "qk_mode": 0}
    yield OPS.paged_write.default, (qkv, k, v, slots), heads
    yield OPS.paged_write.out, (qkv, k, v, slots), {**heads, "q_out": torch.empty_like(q)}
    yield OPS.merge_states.default, (q, torch.zeros(2, 8), q * 2, torch.ones(2, 8)), {}
    yield OPS.attention_weights.default, (q, k, lens), {}
    codes, scale = torch.ones(2, 4, 32, 64, dtype=torch.int8), torch.ones(2, 4, 32)
    yield (
        OPS.decode_attention.default,
        (q, codes, codes, lens),
        {"k_scale": scale, "v_scale": scale},
    )
    packed = torch.ones(2, 4, 32, 32, dtype=torch.uint8)
    scales = torch.ones(2, 4, 32, 2, dtype=torch.bfloat16)
    yield (
        OPS.decode_attention.default,
        (q, packed, packed, lens),
        {"k_scale": scales, "v_scale": scales},
    )


CASES = list(cases())
IDS = ["-".join([str(op).partition(".")[2], *options]) for op, _, options in CASES]


@pytest.mark.parametrize(("operator", "args", "options"), CASES, ids=IDS)
def test_operators_pass_the_checks_of_pytorch(operator, args, options):
    done = torch.library.opcheck(operator, args, options)
    assert set(done.values()) == {"SUCCESS"}


def test_every_function_has_a_case():
    assert {str(op).split(".")[1] for op, _, _ in CASES} == set(operators.calls)


def steps(q, k, v, new, slots, lens):
    """One decode step: rows are appended, and attended to."""
    on_tensors.paged_append(new, new, k, v, slots)
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    out = on_tensors.paged_decode_attention(q * 2, k, v, table, lens, window_left=None)
    other, lse = on_tensors.decode_attention(q, k, v, lens, return_lse=True)
    merged, _ = on_tensors.merge_states(out, lse, other, lse)
    taken = torch.empty_like(q)
    on_tensors.decode_attention(q, k, v, lens, out=taken)
    both = torch.empty_like(q)
    found, lse = on_tensors.decode_attention(q, k, v, lens, out=both, return_lse=True)
    qkv, split = torch.cat([q, new, new], 1).flatten(1), torch.empty_like(q)
    on_tensors.paged_write(qkv, k, v, slots, num_q_heads=8, qk_mode=0, q_out=split)
    return out + 1, merged, taken, found + both, lse, split


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # PyTorch's own, of its own
@pytest.mark.filterwarnings("ignore::DeprecationWarning:importlib")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_in_one_graph(backend):
    torch._dynamo.reset()
    q, k, v, lens = operands()
    new, slots = torch.randn(2, 4, 64).to(torch.bfloat16), torch.tensor([4, 63])
    caches = [(k.clone(), v.clone()) for _ in range(2)]
    compiled = torch.compile(steps, fullgraph=True, backend=backend)
    found = compiled(q, *caches[0], new, slots, lens)
    wanted = steps(q, *caches[1], new, slots, lens)
    assert all(map(torch.equal, found, wanted))
    assert all(map(torch.equal, *caches))
    assert not torch.equal(caches[0][0], k)  # rows were appended


def test_a_compiled_call_refuses_outputs_as_a_plain_one_does():
    q, k, v, lens = operands()
    qkv, slots = torch.randn(2, 16 * 64, dtype=torch.bfloat16), torch.tensor([4, 63])

    def attend(out):
        return on_tensors.decode_attention(q, k, v, lens, out=out, return_lse=True)

    def write(out):
        return on_tensors.paged_write(qkv, k, v, slots, num_q_heads=8, qk_mode=0, q_out=out)

    for call in (attend, write):
        torch._dynamo.reset()
        for run in (call, torch.compile(call, backend="eager")):
            for out, error in (
                (torch.zeros(2, 8, 64), numkv.UnsupportedDType),
                (torch.zeros(3, 2, 8, 64).to(q), numkv.DimensionMismatch),
                (torch.zeros(1, 8, 64).to(q), numkv.DimensionMismatch),
            ):
                with pytest.raises(error, match="out`: expected bfloat16"):
                    run(out)
                assert not out.any()


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False}, {"alibi_slopes": torch.arange(8) / 8}, {"ranges": torch.tensor([[0, 3], [2, 20]])},
        {"mask": torch.full((2, 1), 7, dtype=torch.int32), "return_lse": True}, {"sinks": [0.5] * 8},
        {"sinks": (0.5,) * 8, "return_lse": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_compiled_call_takes_what_a_plain_one_does(options):
    """Options without an operator, where the graph ends, and lists by name."""
    q, k, v, _ = operands()

    def call(q, k, v):
        return on_tensors.prefill_attention(
            q, k, v, seq_lens=[5, 32], cu_seqlens_q=[0, 1, 2], **options
        )

    torch._dynamo.reset()
    found, wanted = torch.compile(call, backend="eager")(q, k, v), call(q, k, v)
    assert all(map(torch.equal, found, wanted))


def test_operators_refuse_gradients():
    q, k, v, lens = operands()
    with pytest.raises(numkv.NotSupported, match="`q`"):
        OPS.decode_attention(q.clone().requires_grad_(), k, v, lens)
    with torch.no_grad():
        OPS.decode_attention(q.clone().requires_grad_(), k, v, lens)


def test_a_compiled_call_refuses_gradients_as_a_plain_one_does():
    q, k, v, lens = operands()
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: on_tensors.decode_attention(q, k, v, lens), backend="eager")
    with pytest.raises(numkv.NotSupported, match=r"^`q`: .*torch\.no_grad\(\)$"):
        compiled(q.clone().requires_grad_())


def test_graphs_break_at_methods_of_caches():
    def token(cache, step, paged, q, k):
        cache.append(0, k * 1, k * 2)
        out = cache.decode_attention(0, q + 1)
        cache.advance()
        new = paged.reserve([0], [1])
        new.append(0, k, k)
        other = new.attention(0, q) + 1
        paged.commit(new)
        return out + step(0, q, k, k), other, cache.k(0) * 2

    results = []
    torch._dynamo.reset()
    for run in (token, torch.compile(token, backend="eager")):
        cache, bound = (on_tensors.KVCache(1, 4, 64, kind="bf16") for _ in range(2))
        paged = on_tensors.PagedKVCache(1, 4, 64, num_blocks=4, block_size=4, kind="bf16")
        assert paged.add() == 0
        found = []
        for seed in range(3):
            q, k, *_ = operands(seed)
            step = bound.bind(num_q_heads=8, kind="bf16").begin()
            with torch.inference_mode(seed == 2):
                found += run(cache, step, paged, q[:1], k[:1, :, 0])
            bound.advance()
        results.append(found)
    assert all(map(torch.equal, *results))


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch", "ignore:`torch.jit.trace` is deprecated:FutureWarning"
)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_traced_call_is_no_constant():
    q, k, v, lens = operands()
    cache = on_tensors.KVCache(1, 4, 64, kind="bf16")
    for call in (
        lambda x: on_tensors.decode_attention(x, k, v, lens),
        lambda x: cache.append(0, x[:1, :4], x[:1, :4]),
    ):
        with pytest.raises(numkv.NotSupported, match=r"under torch\.jit\.trace"):
            torch.jit.trace(call, (q,))


def test_errors_come_through_operators():
    q, k, v, lens = operands()
    with pytest.raises(IndexError, match="seq_lens"):
        OPS.decode_attention(q, k, v, lens + 100)


# -- on CUDA


def test_kernels_for_cuda_run_on_the_stream_that_pytorch_has_current():
    from numkv.kernels.cuda import streams

    found = []
    kernel = operators._on_its_stream(lambda: found.append(streams.named()))
    with numkv.on_stream(0):
        kernel()
        found.append(streams.named())
    assert found == [None, 0]


def test_every_operator_has_a_kernel_for_cuda():
    for operator, _, _ in CASES:
        name = f"{operator._schema.name}.{operator._overloadname}".removesuffix(".default")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"), name
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"), name


@pytest.mark.parametrize(("operator", "args", "options"), CASES, ids=IDS)
def test_shapes_of_operators_on_fake_tensors_of_a_cuda_device(operator, args, options):
    """Results are on the device, of the shapes and dtypes that they have on the CPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def there(x):
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

    want = operator(*args, **options)
    with FakeTensorMode():
        found = operator(*map(there, args), **{n: there(x) for n, x in options.items()})
    if want is None:
        assert found is None
        return
    for x, y in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, want)), strict=True):
        assert (x.device.type, x.shape, x.dtype) == ("cuda", y.shape, y.dtype)
