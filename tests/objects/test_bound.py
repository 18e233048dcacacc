"""Bound calls: the same, bit by bit, as append and attention one after the other, and right against float64."""

import os

import naive
import numba
import numpy as np
import processes
import pytest
import tolerances
from layer_lists import paged_kv_cache

import numkv

pytestmark = pytest.mark.kernels

HEADS, GROUP, DIM = 2, 4, 32
Q_HEADS = HEADS * GROUP
KINDS = [
    ("fp32", "fp32"),
    ("bf16", "bf16"),
    ("int8", "fp32"),
    pytest.param("int8", "bf16", marks=pytest.mark.nightly),
    pytest.param("int4", "fp32", marks=pytest.mark.nightly),
    pytest.param("fp8_e4m3", "fp32", marks=pytest.mark.nightly),
]


def rows(rng, tokens, heads=HEADS, kind="fp32"):
    return rng.standard_normal((tokens, heads, DIM), np.float32).astype(numkv.kind(kind).dtype)


def same(a, b):
    a, b = (np.ascontiguousarray(x) for x in (a, b))
    return a.dtype == b.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8))


def one_step(rng, bound, a, b, tokens, kind, **options):
    """A step of two caches, one of them by bound calls; whether the compiled function did it."""
    step = bound.begin(tokens)
    at_once = all(step._ready.values())
    for layer in reversed(range(a.num_layers)):
        q, k, v = rows(rng, tokens, Q_HEADS, kind), *(rows(rng, tokens, HEADS, kind) for _ in "kv")
        out = step(layer, q, k, v)
        b.append(layer, k, v)
        assert same(out, b.decode_attention(layer, q, **options))
    assert step.unwritten_layers == []
    for cache in (a, b):
        cache.advance(tokens)
    return at_once


def two_caches(rng, kind, of_rows, tokens, **options):
    made = [numkv.KVCache(2, HEADS, DIM, kind=kind, **options) for _ in "ab"]
    x = rows(rng, tokens, HEADS, of_rows)
    for cache in made:
        for layer in range(2):
            cache.append(layer, x, x[::-1].copy())
        cache.advance(tokens)
    return made


def assert_same_rows(a, b):
    for layer in range(a.num_layers):
        assert same(a.k(layer), b.k(layer))
        assert same(a.v(layer), b.v(layer))
    a.check()


@pytest.mark.parametrize(("kind", "of_rows"), KINDS)
def test_a_cache_gives_what_two_calls_give(rng, kind, of_rows):
    """It grows from 16 tokens on, and beyond what one split takes."""
    a, b = two_caches(rng, kind, of_rows, 14)
    bound = a.bind(Q_HEADS, of_rows)
    for tokens in (1, 1, 1, 3, 1, 1021, 1):
        at_once = one_step(rng, bound, a, b, tokens, of_rows)
        assert at_once == (tokens < 100)
    assert_same_rows(a, b)


def test_it_is_right(rng):
    cache = numkv.KVCache(1, HEADS, DIM)
    bound = cache.bind(
        Q_HEADS, sm_scale=0.3, logits_soft_cap=4.0, window_left=5, sinks=np.ones(Q_HEADS)
    )
    given = []
    for tokens in (7, 1, 3, 1):
        q, k, v = rows(rng, tokens, Q_HEADS), rows(rng, tokens), rows(rng, tokens)
        given.append((k, v))
        out = bound.begin(tokens)(0, q, k, v)
        cache.advance(tokens)
        k, v = (np.concatenate(x).swapaxes(0, 1)[None] for x in zip(*given, strict=True))
        expected, _ = naive.attention(
            q, k, v, [k.shape[2]], [0, tokens], sm_scale=0.3, logits_soft_cap=4.0, window_left=5,
            sinks=np.ones(Q_HEADS),
        )  # fmt: skip
        tolerances.assert_rows_close(out, expected, tolerances.attention("fp32", "fp32"))


def test_layers_have_windows_and_sinks_of_their_own(rng):
    a, b = two_caches(rng, "fp32", "fp32", 40)
    sinks = rng.standard_normal((2, Q_HEADS)).astype(np.float32)
    bound = a.bind(Q_HEADS, window_left=[-1, 6], sinks=sinks)
    given, sinks = sinks.copy(), sinks.__imul__(0)  # what is bound is a copy
    for tokens in (1, 2):
        step = bound.begin(tokens)
        for layer, window in ((0, -1), (1, 6)):
            q, k, v = rows(rng, tokens, Q_HEADS), rows(rng, tokens), rows(rng, tokens)
            b.append(layer, k, v)
            expected = b.decode_attention(layer, q, window_left=window, sinks=given[layer])
            assert same(step(layer, q, k, v), expected)
        a.advance(tokens)
        b.advance(tokens)


@pytest.mark.parametrize(
    "options", [{"rotate": True}, {"full_precision": numkv.FullPrecision(3, 1)}], ids=str
)
def test_what_one_call_does_not_take_goes_in_two(rng, options):
    a, b = two_caches(rng, "int8", "fp32", 9, **options)
    bound = a.bind(Q_HEADS)
    for tokens in (1, 2, 1):
        assert not one_step(rng, bound, a, b, tokens, "fp32")
    assert_same_rows(a, b)


def test_on_every_target(rng, target, to):
    cache = numkv.KVCache(1, HEADS, DIM, kind="int8", target=target)
    twin = numkv.KVCache(1, HEADS, DIM, kind="int8", target=target)
    bound = cache.bind(Q_HEADS)
    for tokens in (3, 1):
        q, k, v = (
            to(x) for x in (rows(rng, tokens, Q_HEADS), rows(rng, tokens), rows(rng, tokens))
        )
        out = bound.begin(tokens)(0, q, k, v)
        twin.append(0, k, v)
        expected = twin.decode_attention(0, q)
        cache.advance(tokens)
        twin.advance(tokens)
        host = numkv.targets.get(target).to_host
        assert same(host(out), host(expected))


def contiguous(kind):
    return numkv.ContiguousLayer(1200, HEADS, DIM, kind=kind)


def paged(kind):
    return numkv.PagedLayer(100, 16, HEADS, DIM, kind=kind)


@pytest.mark.parametrize("make", [contiguous, paged])
@pytest.mark.parametrize(("kind", "of_rows"), KINDS[:4])
@pytest.mark.parametrize(("first", "window"), [(3, -1), (1000, -1), (40, 21)])
def test_a_layer_gives_what_two_calls_give(rng, make, kind, of_rows, first, window):
    a, b = make(kind), make(kind)
    x = rows(rng, first, HEADS, of_rows)
    for layer in (a, b):
        layer.append(x, x)
    bound = a.bind(Q_HEADS, of_rows, window_left=window)
    for i in range(40):
        tokens = 1 + (i % 7 == 3)
        q, k, v = (
            rows(rng, tokens, Q_HEADS, of_rows),
            *(rows(rng, tokens, HEADS, of_rows) for _ in "kv"),
        )
        b.append(k, v)
        assert same(bound(q, k, v), b.decode_attention(q, window_left=window))
        assert len(a) == len(b)
    assert same(a.k, b.k) or make is paged
    a.check()


@pytest.mark.parametrize(("kind", "of_rows"), KINDS[:4])
@pytest.mark.parametrize("windows", [None, [-1, 40]], ids=["", "windows"])
def test_a_paged_cache_gives_what_two_calls_give(rng, kind, of_rows, windows):
    """Ragged steps; sequences that get nothing, that share blocks, that are split, and long ones in two calls."""
    a, b = (paged_kv_cache(2, HEADS, DIM, num_blocks=400, kind=kind, windows=windows) for _ in "ab")
    sequences = [[cache.add() for _ in range(4)] for cache in (a, b)]
    bound = a.bind(Q_HEADS, of_rows)
    for lens in ([1100, 30, 2, 0], [1, 1, 1, 1], [4, 0, 2, 1], "fork", [1, 1, 1, 1]):
        if lens == "fork":
            for cache, seqs in zip((a, b), sequences, strict=True):
                seqs[2] = cache.fork(seqs[1])
            continue
        steps = [cache.reserve(seqs, lens) for cache, seqs in zip((a, b), sequences, strict=True)]
        step, tokens = bound.begin(steps[0]), sum(lens)
        assert all(step._ready.values()) == (tokens < 100)
        for layer in range(2):
            q, k, v = (
                rows(rng, tokens, Q_HEADS, of_rows),
                *(rows(rng, tokens, HEADS, of_rows) for _ in "kv"),
            )
            steps[1].append(layer, k, v)
            assert same(step(layer, q, k, v), steps[1].attention(layer, q))
        a.commit(steps[0])
        b.commit(steps[1])
    q = rows(rng, 4, Q_HEADS, of_rows)
    for layer in range(2):
        found = [
            c.decode_attention(layer, seqs, q) for c, seqs in zip((a, b), sequences, strict=True)
        ]
        assert same(*found)
    a.check()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_goes_on_alone():
    """What was planned for two threads runs on one after a fork, where GNU OpenMP has none."""
    found = processes.run(
        """
        import warnings
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        rng = np.random.default_rng(0)
        k, v, q = (rng.standard_normal((n, h, 32), np.float32) for n, h in ((2000, 2), (2000, 2), (1, 128)))
        layer = numkv.ContiguousLayer(3000, 2, 32, kind="fp32")
        layer.append(k, v)
        bound = layer.bind(128)
        expected = bound(q, k[:1], v[:1])
        cache = numkv.KVCache(1, 2, 32)
        cache.append(0, k, v)
        cache.advance(2000)
        step = cache.bind(128).begin()
        workers = bound._ready.workers
        layer.truncate(2000)
        pid = os.fork()
        if not pid:
            signal.alarm(300)
            outs = bound(q, k[:1], v[:1]), step(0, q, k[:1], v[:1])
            os._exit(0 if all(np.array_equal(out, expected) for out in outs) else 3)
        print(json.dumps([workers > 1, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]))
        """
    )
    assert found == [numba.config.NUMBA_NUM_THREADS > 1, 0]
