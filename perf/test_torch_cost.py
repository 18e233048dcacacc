"""What `numkv.torch` costs beyond the same call on NumPy arrays, and what its operators do: tiny calls, in turns.

64 tokens, 8 q heads on 2 kv heads of 64. Each contestant goes through layers of its own, and through several new rows
and queries, as a model does; a round is a turn of each, and each one's least turn counts.
"""

import time
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

import numkv

torch = pytest.importorskip("torch")

import numkv.torch as on_tensors  # noqa: E402

TOKENS, Q_HEADS, HEADS, DIM = 64, 8, 2, 64
LAYERS, STEPS, ROUNDS = 4, 4, 60
KINDS = ["fp32", "bf16", "int8"]
# What is beside NumPy, in order, and how many microseconds more a call may take.
BESIDE = {"tensors": 5.0, "no_grad": 12.0, "inference_mode": 12.0}


def as_tensor(x):
    """A tensor on an array's memory."""
    if isinstance(x, np.ndarray):
        if x.dtype == numkv.kind("bf16").dtype:
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x)
    return x


def as_it_is(x):
    """What the contestant of NumPy takes."""
    return x


def calls_of(make, lib, convert):
    """The calls of a contestant: one for each layer and step, over memory of its own."""
    rng = np.random.default_rng(0)
    return [call for _ in range(LAYERS) for call in make(lib, convert, rng)]


def turn(calls, reset):
    if reset is not None:
        reset()
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) / len(calls) * 1e6


def compare(name, benchmark, note, contestants):
    """Time contestants in turns; each is calls, a context to be in, and what it does before."""
    for calls, context, reset in contestants:  # compiles, and learns
        with context():
            for _ in range(3):
                turn(calls, reset)
    if not benchmark.enabled:
        benchmark(lambda: None)
        return
    times = [[] for _ in contestants]
    for n in range(ROUNDS):
        for i in range(len(contestants))[:: 1 if n % 2 else -1]:
            calls, context, reset = contestants[i]
            with context():
                times[i].append(turn(calls, reset))
    base, *others = (min(x) for x in times)
    more = {what: x - base for what, x in zip(BESIDE, others, strict=False)}
    over = {
        what: f"  above {most:g}" if more.get(what, 0) > most else ""
        for what, most in BESIDE.items()
    }
    cells = [f"{what} {x:+.1f}{over[what]}" for what, x in more.items()]
    note(f"{name:44} NumPy {base:6.1f} us a call, {', '.join(cells)}")
    benchmark.extra_info.update({"us beyond NumPy": more})
    benchmark.pedantic(
        lambda: [call() for call in contestants[1][0]], setup=contestants[1][2], rounds=3
    )


def rows_of(rng, kind, *shape):
    """Rows in what a model computes in: bf16 beside bf16 and int8."""
    made = rng.standard_normal(shape).astype(np.float32)
    return made.astype(numkv.kind("bf16").dtype) if kind != "fp32" else made


def buffers(rng, kind, *shape):
    """K and V of a kind, and their scales by name."""
    layer = numkv.PagedPool(shape[0], shape[2], shape[1], shape[3], kind=kind).pool
    found = [layer.values(x) if kind != "int8" else getattr(layer, x) for x in "kv"]
    for x in found:
        x[:] = rng.integers(-9, 9, x.shape)
    scales = {}
    if kind == "int8":
        scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        for x in scales.values():
            x[:] = 0.1
    return found, scales


def function(name, arguments):
    """A maker of calls of a function: `arguments` gives those that stay, and those of a step, for one layer."""

    def make(kind, of):
        def made(lib, convert, rng):
            call = of(lib, name)
            always, options, new = arguments(rng, kind)
            always = [None if x is None else convert(x) for x in always]
            options = {n: convert(x) for n, x in options.items()}
            for _ in range(STEPS):
                fresh = {i: convert(x) for i, x in new().items()}
                args = [fresh.get(i, x) for i, x in enumerate(always)]
                named = {**options, **{n: x for n, x in fresh.items() if isinstance(n, str)}}
                yield lambda args=args, named=named: call(*args, **named)

        return made

    return make


def _decode(rng, kind):
    (k, v), scales = buffers(rng, kind, 1, HEADS, TOKENS, DIM)
    return (
        [None, k, v, np.array([TOKENS])],
        scales,
        lambda: {0: rows_of(rng, kind, 1, Q_HEADS, DIM)},
    )


def _decode_out(rng, kind):
    always, options, new = _decode(rng, kind)
    return always, options, lambda: {**new(), "out": rows_of(rng, kind, 1, Q_HEADS, DIM)}


def _prefill(rng, kind):
    always, options, _ = _decode(rng, kind)
    return [*always, np.array([0, 2])], options, lambda: {0: rows_of(rng, kind, 2, Q_HEADS, DIM)}


def _paged(rng, kind):
    (k, v), scales = buffers(rng, kind, 8, HEADS, 16, DIM)
    table = np.array([[3, 1, 6, 4]], np.int32)
    new = lambda: {0: rows_of(rng, kind, 1, Q_HEADS, DIM)}  # noqa: E731
    return [None, k, v, table, np.array([TOKENS])], scales, new


def _paged_append(rng, kind):
    (k, v), scales = buffers(rng, kind, 8, HEADS, 16, DIM)
    new = lambda: {i: rows_of(rng, kind, 1, HEADS, DIM) for i in range(2)}  # noqa: E731
    return [None, None, k, v, np.array([5])], scales, new


def _append(rng, kind):
    (k, v), _ = buffers(rng, kind, 1, HEADS, TOKENS, DIM)
    new = lambda: {i: rows_of(rng, kind, 1, HEADS, 1, DIM) for i in range(2)}  # noqa: E731
    return [None, None, k, v, np.array([5])], {}, new


def _paged_write(rng, kind):
    (k, v), scales = buffers(rng, kind, 8, HEADS, 16, DIM)
    cos, sin = (rng.standard_normal((TOKENS, DIM // 2)).astype(np.float32) for _ in range(2))
    weight = np.ones(DIM, np.float32)
    options = {
        "num_q_heads": Q_HEADS, "qk_mode": 1, "positions": np.array([5]), "cos": cos, "sin": sin,
        "q_norm_weight": weight, "k_norm_weight": weight, **scales,
    }  # fmt: skip
    new = lambda: {0: rows_of(rng, kind, 1, (Q_HEADS + 2 * HEADS) * DIM)}  # noqa: E731
    return [None, k, v, np.array([5])], options, new


def _merge(rng, kind):
    lse = np.zeros((1, Q_HEADS), np.float32)
    new = lambda: {i: rows_of(rng, kind, 1, Q_HEADS, DIM) for i in (0, 2)}  # noqa: E731
    return [None, lse, None, lse + 1], {}, new


def _weights(rng, kind):
    always, options, new = _decode(rng, kind)
    always[2:3] = []
    return always, {n: x for n, x in options.items() if n == "k_scale"}, new


FUNCTIONS = {
    "decode_attention": _decode,
    "decode_attention(out=)": _decode_out,
    "prefill_attention": _prefill,
    "paged_decode_attention": _paged,
    "paged_append": _paged_append,
    "paged_write": _paged_write,
    "append": _append,
    "merge_states": _merge,
    "attention_weights": _weights,
}


def eager(lib, name):
    return getattr(lib, name)


def operator(lib, name):
    found = getattr(torch.ops.numkv, name)
    if name.endswith("attention"):
        return lambda *args, out=None, **options: (
            found.default(*args, **options) if out is None else found.out(*args, out=out, **options)
        )
    return found.default


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(benchmark, note, name, kind):
    if kind == "int8" and name in ("append", "merge_states"):
        pytest.skip("of floats only")
    make = function(name.partition("(")[0], FUNCTIONS[name])
    contestants = [
        (calls_of(make(kind, of), lib, convert), context, None)
        for of, lib, convert, context in (
            (eager, numkv, as_it_is, nullcontext),
            (eager, on_tensors, as_tensor, nullcontext),
            (operator, on_tensors, as_tensor, torch.no_grad),
            (operator, on_tensors, as_tensor, torch.inference_mode),
        )
    ]
    compare(f"{name}, {kind}", benchmark, note, contestants)


# -- methods


def each(resets):
    for reset in resets:
        reset()


def _rows(rng, kind, convert, *heads):
    return [[convert(rows_of(rng, kind, 1, h, DIM)) for h in heads] for _ in range(STEPS)]


def layer_append(lib, convert, rng, kind):
    layer = lib.ContiguousLayer(TOKENS * 4, HEADS, DIM, kind=kind)
    calls = [
        lambda k=k, v=v: layer.append(k, v) for k, v in _rows(rng, kind, convert, HEADS, HEADS)
    ]
    return calls, layer.clear


def layer_decode(lib, convert, rng, kind):
    layer = lib.ContiguousLayer(TOKENS, HEADS, DIM, kind=kind)
    k = convert(rows_of(rng, kind, TOKENS, HEADS, DIM))
    layer.append(k, k)
    return [
        lambda q=q: layer.decode_attention(q) for (q,) in _rows(rng, kind, convert, Q_HEADS)
    ], None


def layer_write(lib, convert, rng, kind):
    layer = lib.ContiguousLayer(TOKENS, HEADS, DIM, kind=kind)
    cos, sin = (
        convert(rng.standard_normal((TOKENS, DIM // 2)).astype(np.float32)) for _ in range(2)
    )
    weight = convert(np.ones(DIM, np.float32))

    def call(qkv, q_out):
        layer.write(
            qkv, num_q_heads=Q_HEADS, cos=cos, sin=sin, qk_mode=1, q_norm_weight=weight, k_norm_weight=weight,
            q_out=q_out,
        )  # fmt: skip

    given = _rows(rng, kind, convert, Q_HEADS + 2 * HEADS, Q_HEADS)
    return [partial(call, x.reshape(1, -1), o) for x, o in given], layer.clear


def layer_bound(lib, convert, rng, kind):
    layer = lib.ContiguousLayer(TOKENS * 4, HEADS, DIM, kind=kind)
    k = convert(rows_of(rng, kind, TOKENS - 1, HEADS, DIM))
    layer.append(k, k)
    bound = layer.bind(Q_HEADS, "fp32" if kind == "fp32" else "bf16")
    calls = [lambda x=x: bound(*x) for x in _rows(rng, kind, convert, Q_HEADS, HEADS, HEADS)]
    return calls, lambda: layer.truncate(TOKENS - 1)


def cache_append(lib, convert, rng, kind):
    cache = lib.KVCache(1, HEADS, DIM, max_seq_len=TOKENS * 4, kind=kind)
    calls = [
        lambda k=k, v=v: cache.append(0, k, v) for k, v in _rows(rng, kind, convert, HEADS, HEADS)
    ]
    return calls, lambda: cache.truncate(0)


def cache_decode(lib, convert, rng, kind):
    cache = lib.KVCache(1, HEADS, DIM, max_seq_len=TOKENS, kind=kind)
    k = convert(rows_of(rng, kind, TOKENS, HEADS, DIM))
    cache.append(0, k, k)
    return [
        lambda q=q: cache.decode_attention(0, q) for (q,) in _rows(rng, kind, convert, Q_HEADS)
    ], None


def cache_bound(lib, convert, rng, kind):
    cache = lib.KVCache(STEPS, HEADS, DIM, max_seq_len=TOKENS, kind=kind)
    k = convert(rows_of(rng, kind, TOKENS - 1, HEADS, DIM))
    for layer in range(STEPS):
        cache.append(layer, k, k)
    cache.advance(TOKENS - 1)
    bound, steps = cache.bind(Q_HEADS, "fp32" if kind == "fp32" else "bf16"), []

    def begin():
        cache.truncate(TOKENS - 1)
        steps[:] = [bound.begin()]

    rows = _rows(rng, kind, convert, Q_HEADS, HEADS, HEADS)
    return [lambda i=i, x=x: steps[0](i, *x) for i, x in enumerate(rows)], begin


def _step(lib, convert, rng, kind):
    cache = lib.PagedKVCache(1, HEADS, DIM, num_blocks=8, kind=kind)
    seq = cache.add()
    k = convert(rows_of(rng, kind, TOKENS - 1, HEADS, DIM))
    step = cache.reserve([seq], TOKENS - 1)
    step.append(0, k, k)
    cache.commit(step)
    step = cache.reserve([seq], 1)
    step.append(0, k[:1], k[:1])
    return cache, seq, step


def step_append(lib, convert, rng, kind):
    _, _, step = _step(lib, convert, rng, kind)
    return [
        lambda k=k, v=v: step.append(0, k, v) for k, v in _rows(rng, kind, convert, HEADS, HEADS)
    ], None


def step_attention(lib, convert, rng, kind):
    _, _, step = _step(lib, convert, rng, kind)
    return [lambda q=q: step.attention(0, q) for (q,) in _rows(rng, kind, convert, Q_HEADS)], None


def paged_decode(lib, convert, rng, kind):
    cache, seq, step = _step(lib, convert, rng, kind)
    cache.commit(step)
    return [
        lambda q=q: cache.decode_attention(0, [seq], q)
        for (q,) in _rows(rng, kind, convert, Q_HEADS)
    ], None


METHODS = {
    "ContiguousLayer.append": layer_append,
    "ContiguousLayer.decode_attention": layer_decode,
    "ContiguousLayer.write(q_out=)": layer_write,
    "ContiguousLayer.bind(…)()": layer_bound,
    "KVCache.append": cache_append,
    "KVCache.decode_attention": cache_decode,
    "KVCache.bind(…).begin()()": cache_bound,
    "Step.append": step_append,
    "Step.attention": step_attention,
    "PagedKVCache.decode_attention": paged_decode,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METHODS)
def test_method(benchmark, note, name, kind):
    contestants = []
    for lib, convert in ((numkv, as_it_is), (on_tensors, as_tensor)):
        rng = np.random.default_rng(0)
        made = [METHODS[name](lib, convert, rng, kind) for _ in range(LAYERS)]
        resets = [reset for _, reset in made if reset is not None]
        contestants.append(
            (
                [call for calls, _ in made for call in calls],
                nullcontext,
                partial(each, resets) if resets else None,
            )
        )
    compare(f"{name}, {kind}", benchmark, note, contestants)
