"""The fast path of decode attention: its results are those of the general path bit by bit; other calls are left to it.

That the general path is right is tested in `tests/kernels`; calls that ask for the lse take it.
"""

import threading

import ml_dtypes
import numpy as np
import pytest

import numkv
from numkv.attention import fast_path
from numkv.kernels.cpu.attention.plan import MAX_SPLITS, MIN_SPLIT

HEADS, GROUP, DIM, BLOCK = 2, 3, 32, 16
KINDS = ("fp32", "bf16", "int8", "int4")
Q_DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


@pytest.fixture
def ways(monkeypatch):
    """Whether each call since then took the fast path."""
    found, decode = [], fast_path.decode

    def seen(*args):
        done = decode(*args)
        found.append(done is not None)
        return done

    monkeypatch.setattr(fast_path, "decode", seen)
    return found


def stored(rng, kind, capacity=64, length=50, dim=DIM):
    """What `decode_attention` takes for one sequence, without queries."""
    layer = numkv.ContiguousLayer(capacity, HEADS, dim, kind=kind)
    layer.append(*(rng.standard_normal((length, HEADS, dim), np.float32) for _ in "kv"))
    scales = (
        {"k_scale": layer.k_scale, "v_scale": layer.v_scale} if layer.spec.kind.has_scales else {}
    )
    return {"k": layer.k, "v": layer.v, "seq_lens": np.array([length]), **scales}


def paged(given, order):
    """The same as a paged pool, whose block `order[i]` is the sequence's i-th one."""

    def cut(x):
        blocks = x[0].reshape(HEADS, -1, BLOCK, *x.shape[3:]).swapaxes(0, 1)
        pool = np.zeros((max(order) + 1, *blocks.shape[1:]), x.dtype)
        pool[order] = blocks
        return pool

    made = {name: x if name == "seq_lens" else cut(x) for name, x in given.items()}
    made["k_pool"], made["v_pool"] = made.pop("k"), made.pop("v")
    return {**made, "block_table": np.array([order], np.int32)}


def queries(rng, dtype=np.float32, heads=HEADS * GROUP, dim=DIM):
    return rng.standard_normal((1, heads, dim), np.float32).astype(dtype)


def attend(q, k, v):
    """One query ``(heads, 1, dim)`` in float64 over k, v ``(kv heads, tokens, dim)``."""
    k, v = (np.repeat(x.astype(np.float64), len(q) // len(x), axis=0) for x in (k, v))
    scores = (q @ k.swapaxes(1, 2))[:, 0] / np.sqrt(q.shape[2])
    p = np.exp(scores - scores.max(1, keepdims=True))
    return np.einsum("ht,htd->hd", p / p.sum(1, keepdims=True), v)


def is_same(one, other):
    return one.dtype == other.dtype and np.array_equal(one.view(np.uint8), other.view(np.uint8))


@pytest.mark.parametrize("dtype", Q_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_the_general_path(rng, ways, kind, dtype):
    given, q = stored(rng, kind), queries(rng, dtype)
    in_blocks = paged(given, [5, 0, 3, 1])
    for options in ({}, {"sm_scale": 0.3}):
        wanted, _ = numkv.decode_attention(q, **given, **options, return_lse=True)
        assert is_same(numkv.decode_attention(q, **given, **options), wanted)
        assert is_same(numkv.paged_decode_attention(q, **in_blocks, **options), wanted)
    assert ways == [True] * 4


def batch(rng, kind, lengths):
    """What `decode_attention` takes for sequences of these lengths, without queries."""
    each = [stored(rng, kind, length=n) for n in lengths]
    return {name: np.concatenate([of[name] for of in each]) for name in each[0]}


def pooled(given, order):
    """The same as a paged pool, whose block `order[b, i]` is the i-th one of sequence b."""
    apart = [paged({name: x[b : b + 1] for name, x in given.items()}, [*range(order.shape[1])])
             for b in range(len(order))]  # fmt: skip
    made = {"block_table": order.astype(np.int32), "seq_lens": given["seq_lens"]}
    for name in apart[0].keys() - made.keys():
        pool = np.zeros((order.max() + 1, *apart[0][name].shape[1:]), apart[0][name].dtype)
        for blocks, of in zip(order, apart, strict=True):
            pool[blocks] = of[name]
        made[name] = pool
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_the_general_path(rng, ways, kind):
    """Sequences of other lengths, an empty one among them, which share no row with their neighbours."""
    given = batch(rng, kind, [50, 0, 1, 64])
    in_blocks = pooled(given, rng.permutation(20)[:16].reshape(4, 4))
    q = np.concatenate([queries(rng) for _ in range(4)])
    wanted, _ = numkv.decode_attention(q, **given, return_lse=True)
    assert is_same(numkv.decode_attention(q, **given), wanted)
    assert is_same(numkv.paged_decode_attention(q, **in_blocks), wanted)
    for b in range(4):
        alone = {name: x[b : b + 1] for name, x in given.items()}
        assert is_same(numkv.decode_attention(q[b : b + 1], **alone), wanted[b : b + 1])
    assert not wanted[1].any()
    assert ways == [True] * 6


def test_a_batch_in_which_some_sequences_are_split(rng, ways):
    given = {"k": rng.standard_normal((3, HEADS, 3000, DIM), np.float32)}
    given |= {"v": given["k"][:, ::-1], "seq_lens": np.array([3000, 5, MIN_SPLIT + 1])}
    q = np.concatenate([queries(rng) for _ in range(3)])
    wanted, _ = numkv.decode_attention(q, **given, return_lse=True)
    assert is_same(numkv.decode_attention(q, **given), wanted)
    for b, n in enumerate(given["seq_lens"]):
        expected = attend(q[b][:, None], given["k"][b, :, :n], given["v"][b, :, :n])
        np.testing.assert_allclose(wanted[b], expected, rtol=0, atol=1e-5)
    assert ways == [True]


def test_an_empty_sequence(rng, ways):
    given = stored(rng, "fp32") | {"seq_lens": np.array([0])}
    assert not numkv.decode_attention(queries(rng), **given).any()
    assert ways == [True]


@pytest.mark.parametrize("length", [1, 50, MIN_SPLIT, MIN_SPLIT + 1, 3 * MIN_SPLIT - 5])
def test_several_threads_and_splits_and_none(rng, ways, length):
    """Around the work from which on there are threads, in caches with room to spare."""
    given = stored(rng, "fp32", capacity=3 * MIN_SPLIT, length=length, dim=256)
    q = queries(rng, heads=16, dim=256)
    wanted, _ = numkv.decode_attention(q, **given, return_lse=True)
    assert is_same(numkv.decode_attention(q, **given), wanted)
    expected = attend(q[0][:, None], given["k"][0, :, :length], given["v"][0, :, :length])
    np.testing.assert_allclose(wanted[0], expected, rtol=0, atol=1e-5)
    assert ways == [True]


def test_more_tokens_than_the_most_splits_of_the_least_length(rng, ways):
    length = (MAX_SPLITS + 2) * MIN_SPLIT + 7
    given, q = stored(rng, "fp32", length, length, 8), queries(rng, dim=8)
    wanted, _ = numkv.decode_attention(q, **given, return_lse=True)
    assert is_same(numkv.decode_attention(q, **given), wanted)
    expected = attend(q[0][:, None], given["k"][0], given["v"][0])
    np.testing.assert_allclose(wanted[0], expected, rtol=0, atol=1e-5)
    assert ways == [True]


def test_layers_give_the_same(rng):
    given, q = stored(rng, "bf16"), queries(rng, np.float16)
    layer = numkv.PagedLayer(8, BLOCK, HEADS, DIM, kind="bf16")
    layer.append(*(given[x][0, :, :50].swapaxes(0, 1) for x in "kv"))
    wanted, _ = layer.decode_attention(q, return_lse=True)
    assert is_same(layer.decode_attention(q), wanted)
    assert is_same(numkv.decode_attention(q, **given), wanted)


def test_views_are_taken_as_they_lie(rng, ways):
    given, q = stored(rng, "fp32"), queries(rng)
    wanted = numkv.decode_attention(q, **given)
    wide = np.full((2, 5, 200, DIM), np.nan, np.float32)
    some = wide[1:, 1:5:2, 3:131:2]
    some[:] = given["k"]
    apart = np.full((1, HEADS * GROUP, 2 * DIM), np.nan, np.float32)
    apart[..., :DIM] = q
    lens = np.array([7, 50])[1:]
    found = numkv.decode_attention(apart[..., :DIM], some, given["v"], lens)
    assert is_same(found, wanted)
    assert ways == [True, True]


def test_nan_stays_in_its_head(rng, ways):
    given, q = stored(rng, "fp32"), queries(rng)
    wanted = numkv.decode_attention(q, **given)
    given["k"][0, 1, 3, 0] = given["v"][0, :, 50:] = np.nan
    found = numkv.decode_attention(q, **given)
    assert is_same(found[:, :GROUP], wanted[:, :GROUP])
    assert np.isnan(found[:, GROUP:]).all()
    assert ways == [True, True]


def odd(x):
    """The same elements at an odd address."""
    memory = np.zeros(x.nbytes + 1, np.uint8)
    made = memory[1:].view(x.dtype).reshape(x.shape)
    made[:] = x
    return made


@pytest.mark.parametrize("dtype", Q_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_written_in_place(rng, ways, kind, dtype):
    given, q = stored(rng, kind), queries(rng, dtype)
    in_blocks = paged(given, [5, 0, 3, 1])
    wanted = numkv.decode_attention(q, **given)
    out = np.full_like(q, np.nan)
    assert numkv.decode_attention(q, **given, out=out) is out
    assert is_same(out, wanted)
    memory = np.full((3, *q.shape), np.nan, dtype)
    numkv.paged_decode_attention(q, **in_blocks, out=memory[1])
    assert is_same(memory[1], wanted)
    assert np.isnan(memory[::2].astype(np.float32)).all()
    assert numkv.decode_attention(q, **given, out=q) is q
    assert is_same(q, wanted)
    assert ways == [True] * 4


def _read_only(x):
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    "out_of",
    [
        lambda q, given: given["k"].reshape(-1)[: q.size].reshape(q.shape),
        lambda q, given: given["v"].reshape(-1)[-q.size :].reshape(q.shape),
        lambda q, given: np.zeros(q.shape, np.float64),
        lambda q, given: np.zeros(q.shape[1:], q.dtype),
        lambda q, given: np.zeros((*q.shape[:2], 2 * DIM), q.dtype)[..., ::2],
        lambda q, given: _read_only(np.zeros_like(q)),
        lambda q, given: q[:, ::-1],
        lambda q, given: odd(q),
        lambda q, given: q.tolist(),
    ],
)
def test_outputs_that_are_wrong_are_refused_as_ever(rng, ways, out_of):
    q, given = queries(rng), stored(rng, "fp32")
    wanted, before = numkv.decode_attention(q, **given), {n: x.copy() for n, x in given.items()}
    out, said = out_of(q, given), []
    for more in ({}, {"return_lse": True}):
        with pytest.raises((numkv.NumkvError, TypeError, ValueError)) as caught:
            numkv.decode_attention(q, **given, out=out, **more)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert all(is_same(given[name], x) for name, x in before.items())
    assert is_same(numkv.decode_attention(q, **given), wanted)
    assert ways == [True, False, True]


def test_an_output_in_the_memory_of_scales_or_lengths_is_refused(rng):
    given, q = stored(rng, "int8", capacity=4096), queries(rng)
    for name in ("k_scale", "v_scale"):
        with pytest.raises(numkv.NotSupported, match=name):
            out = given[name].reshape(-1)[: q.size].reshape(q.shape)
            numkv.decode_attention(q, **given, out=out)
    memory = np.zeros(q.shape, np.float32)
    lens = memory.reshape(-1)[:2].view(np.int64)
    lens[:] = 50
    with pytest.raises(numkv.NotSupported, match="seq_lens"):
        numkv.decode_attention(q, **given | {"seq_lens": lens}, out=memory)


@pytest.mark.parametrize(
    "change",
    [
        {"seq_lens": np.array([50], np.int32)},
        {"seq_lens": [50]},
        {"window_left": 3},
        {"logits_soft_cap": 2.0},
        {"sinks": np.zeros(HEADS * GROUP, np.float32)},
        {"causal": False},
    ],
    ids=lambda change: "-".join(change),
)
def test_other_calls_take_the_general_path(rng, ways, change):
    given, q = stored(rng, "fp32") | change, queries(rng)
    wanted, _ = numkv.decode_attention(q, **given, return_lse=True)
    assert is_same(numkv.decode_attention(q, **given), wanted)
    assert not any(ways)


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (IndexError, {"seq_lens": np.array([65])}),
        (IndexError, {"seq_lens": np.array([-1])}),
        (numkv.DimensionMismatch, {"seq_lens": np.array([50, 50])}),
        (
            numkv.DimensionMismatch,
            {"q": np.zeros((0, 6, DIM), np.float32), "seq_lens": np.zeros(0, int)},
        ),
        (
            numkv.DimensionMismatch,
            {"q": np.zeros((2, 6, DIM), np.float32), "seq_lens": np.array([9, 9])},
        ),
        (numkv.DimensionMismatch, {"q": np.zeros((1, 6, DIM - 1), np.float32)}),
        (numkv.DimensionMismatch, {"q": np.zeros((1, 5, DIM), np.float32)}),
        (numkv.DimensionMismatch, {"q": np.zeros((6, DIM), np.float32)}),
        (numkv.DimensionMismatch, {"q": np.float32(1)}),
        (numkv.NotSupported, {"q": np.zeros((1, 6, 2 * DIM), np.float32)[..., ::2]}),
        (numkv.NotSupported, {"q": odd(np.zeros((1, 6, DIM), np.float32))}),
        (numkv.NotSupported, {"k": odd(np.zeros((1, HEADS, 64, DIM), np.float32))}),
        (numkv.UnsupportedDType, {"k": np.zeros((1, HEADS, 64, DIM), ">f4")}),
        (numkv.DimensionMismatch, {"v": np.zeros((1, HEADS, 63, DIM), np.float32)}),
        (numkv.NotSupported, {"k_scale": np.ones((1, HEADS, 64), np.float32)}),
        (ValueError, {"sm_scale": float("nan")}),
    ],
)
def test_what_is_wrong_is_said_as_ever(rng, error, change):
    given = {"q": queries(rng), **stored(rng, "fp32"), **change}
    said = []
    for options in ({}, {"return_lse": True}):
        with pytest.raises(error) as caught:
            numkv.decode_attention(**given, **options)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_scales_are_checked(rng):
    given, q = stored(rng, "int8"), queries(rng)
    for bad in (given["k_scale"][:, :, :63], given["k_scale"][0], None):
        with pytest.raises(numkv.DimensionMismatch):
            numkv.decode_attention(q, **{**given, "k_scale": bad})
    apart = np.repeat(given["k_scale"], 2, axis=2)[:, :, ::2]
    with pytest.raises(numkv.NotSupported):
        numkv.decode_attention(q, **{**given, "k_scale": apart})


@pytest.mark.parametrize("bad", [-1, 6])
def test_blocks_are_checked(rng, bad):
    given, q = paged(stored(rng, "fp32"), [5, 0, 3, 1]), queries(rng)
    given["block_table"][0, 3] = bad
    with pytest.raises(IndexError):
        numkv.paged_decode_attention(q, **given)
    given["seq_lens"] = np.array([3 * BLOCK])
    numkv.paged_decode_attention(q, **given)


@pytest.mark.parametrize("length", [700, 2000])
def test_threads_at_once(rng, length):
    given, some = stored(rng, "fp32", 2048, length, 128), [queries(rng, dim=128) for _ in range(4)]
    wanted = [numkv.decode_attention(q, **given) for q in some]
    wrong = []

    def work(i):
        for _ in range(50):
            if not is_same(numkv.decode_attention(some[i], **given), wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(some))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
