"""Keys that move: `rope_shift`, a user's own shift function, and what happens when one of them fails.

A key of position p that was rotated by p must be, after its sequence's middle was removed, what it would have been had
the middle never been there: rotated by the position it has now, up to one more rounding by the storage kind.
"""

import naive
import naive_cells
import numpy as np
import pytest
import tolerances
from cell_problems import Pair, plus, plus_one

import numkv

F32 = np.float32
HEADS, DIM = 2, 8
KINDS = [*naive.DTYPES, "int8"]
every_kind = pytest.mark.parametrize("kind", KINDS)
rotations = pytest.mark.parametrize(
    ("interleaved", "rotary"),
    [(False, 8), (True, 8), (False, 4), (True, 6)],
    ids=["half", "interleaved", "half-partial", "interleaved-partial"],
)


def tables(rotary=DIM, positions=16, dtype=np.float64):
    """Tables that turn fast enough for a wrong row to show."""
    return naive.rope_tables(positions, rotary, base=100.0, dtype=dtype)


def rotated(raw, positions, rotary=DIM, interleaved=False):
    """Keys of some positions, in float64."""
    cos, sin = tables(rotary, max(positions) + 1)
    return np.stack(
        [naive.rope(x, cos[p], sin[p], interleaved) for x, p in zip(raw, positions, strict=True)]
    )


def make(target, shift, kind="fp32", oracle=None, options=None, sizes=(2, 16, 8), **told):
    made = numkv.CausalCache(shift, **(options or {}))
    made.init(kind, *sizes, target)
    cells = naive_cells.Cells(*sizes, shift=oracle, loss=naive_cells.loss(kind), **told)
    return Pair(made, cells, target=target, k_kind=kind)


def turning(rotary=DIM, interleaved=False, positions=16):
    """A shift for numkv and one for the oracle."""
    cos, sin = tables(rotary, positions)

    def oracle(key, offset):
        return naive_cells.rotate(key, offset, cos, sin, interleaved)

    f32 = tables(rotary, positions, F32)
    return numkv.rope_shift(*f32, interleaved=interleaved), oracle


def fill(pair, rng, tokens, layers=(0,), seq=0, first=0):
    """Put random keys, rotated for their positions; returns them as they were before."""
    positions = list(range(first, first + tokens))
    assert pair.start_forward(positions, [seq] * tokens)
    raws = {}
    for layer in layers:
        raws[layer], v = rng.standard_normal((2, tokens, HEADS, DIM))
        pair.put(layer, rotated(raws[layer], positions).astype(F32), v.astype(F32))
    return raws


# ---------------------------------------------------------------- keys


def without_the_middle(target, to, rng, kind, rotary, interleaved):
    """A cache that lost positions 2 to 4 of 7, un-rotated keys and values of the rest, all rows seen before."""
    cache = numkv.CausalCache(numkv.rope_shift(*tables(rotary, dtype=F32), interleaved=interleaved))
    cache.init(kind, 2, 16, 8, target)
    raw, v = rng.standard_normal((2, 8, HEADS, DIM)).astype(F32)
    cache.start_forward(numkv.Batch([*range(7), 0], [0] * 7 + [1]))
    cache.put(0, to(rotated(raw, [*range(7), 0], rotary, interleaved).astype(F32)), to(v))
    cache.start_forward(numkv.Batch([0], [0]), reserve=True)
    before = cache.get(0)[:2]
    before = [np.array(x) if isinstance(x, np.ndarray) else x.copy_to_host() for x in before]
    cache.remove(0, 2, 5)
    return cache, raw, v, before


@every_kind
@rotations
def test_keys_move(target, to, host, rng, kind, interleaved, rotary):
    """Those after the hole as if it had never been there; no value, and no other row, by a bit."""
    cache, raw, _, (k_before, v_before) = without_the_middle(
        target, to, rng, kind, rotary, interleaved
    )
    cache.start_forward(numkv.Batch([0, 3], [0, 0]), reserve=True)
    k, v, mask = (host(x) for x in cache.get(0))
    assert np.array_equal(naive.words(v), naive.words(v_before))
    moved = [5, 6]
    kept = [j for j in range(len(k)) if j not in moved]
    assert np.array_equal(naive.words(k[kept]), naive.words(k_before[kept]))
    assert np.flatnonzero(mask[1] == 0).tolist() == [0, 1, 5, 6]
    want = rotated(raw[moved], [2, 3], rotary, interleaved)
    was = rotated(raw[moved], moved, rotary, interleaved)
    bound = naive_cells.loss(kind)
    error = np.linalg.norm(k[moved].astype(np.float64) - want, axis=-1)
    assert np.all(error <= bound(was) + bound(want))
    if kind != "int8":  # dims that are not rotated stay bit for bit
        rest = np.s_[moved, :, rotary:]
        assert np.array_equal(naive.words(k[rest]), naive.words(k_before[rest]))
    assert np.linalg.norm(was - want) > 4 * np.linalg.norm(bound(was) + bound(want))


@every_kind
@rotations
def test_attends_as_if_it_had_never_been_there(target, to, host, rng, kind, interleaved, rotary):
    """The next token of the shortened sequence, against one that was computed without the middle."""
    cache, raw, v, _ = without_the_middle(target, to, rng, kind, rotary, interleaved)
    left = [0, 1, 5, 6, 7]
    last = rotated(raw[7:], [4], rotary, interleaved)
    cache.start_forward(numkv.Batch([4], [0]))
    cache.put(0, to(last.astype(F32)), to(v[7:]))
    q = rng.standard_normal((1, 2 * HEADS, DIM)).astype(F32)
    out = host(cache.decode_attention(0, to(q)))
    keys, values = rotated(raw[left], range(5), rotary, interleaved), v[left]
    want, _ = naive_cells.attention(q, keys, naive_cells.as_stored(values, kind), np.zeros((1, 5)))
    # A weight changes by no more than twice what a logit does.
    off = 2 * naive_cells.loss(kind)(keys).max() * np.linalg.norm(q, axis=-1).max() / np.sqrt(DIM)
    bound = (2 * off + tolerances.attention(kind, "fp32")) * np.linalg.norm(values, axis=-1).max()
    assert np.linalg.norm(out - want, axis=-1).max() <= bound


@every_kind
def test_every_layer_moves(target, rng, kind):
    """Each by its own width, and those that were never put not at all."""
    shift, oracle = turning(4)
    pair = make(target, shift, kind, oracle)
    assert pair.start_forward([0, 1, 2], [0] * 3)
    for layer, (heads, dim) in {5: (1, 4), 0: (2, 6)}.items():
        pair.put(layer, *rng.standard_normal((2, 3, heads, dim)).astype(F32))
    assert pair.change("remove", 0, 0, 1)
    pair.probe()


@every_kind
def test_one_removal_after_the_other(target, rng, kind):
    shift, oracle = turning()
    pair = make(target, shift, kind, oracle)
    fill(pair, rng, 6, layers=(0, 3))
    for begin, end in ((4, 5), (1, 2), (0, 2)):
        assert pair.change("remove", 0, begin, end)
        pair.probe()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"window_left": 2, "memory": 6}, {"window": 2, "memory": 6}),
        ({"chunk_size": 3}, {"chunk": 3}),
    ],
    ids=["sliding", "chunked"],
)
def test_other_caches_move_too(target, rng, options, told):
    shift, oracle = turning()
    pair = make(target, shift, "fp16", oracle, options, **told)
    fill(pair, rng, 5)
    assert pair.change("copy_prefix", 0, 1, 1)
    fill(pair, rng, 2, seq=1, first=1)
    assert pair.change("remove", 0, 1, 3)
    pair.probe()
    fill(pair, rng, 2, first=3)
    pair.probe()


def test_a_long_way(rng):
    """A thousand positions at once, in single precision."""
    cache = numkv.CausalCache(numkv.rope_shift(*naive.rope_tables(4096, DIM, dtype=F32)))
    cache.init("fp32", 1, 4, 4)
    raw = rng.standard_normal((2, HEADS, DIM))
    cos, sin = naive.rope_tables(4096, DIM, dtype=np.float64)
    keys = np.stack([naive.rope(raw[i], cos[p], sin[p], False) for i, p in enumerate((0, 4000))])
    cache.start_forward(numkv.Batch([0, 4000], [0, 0]))
    cache.put(0, keys.astype(F32), keys.astype(F32))
    cache.remove(0, 1, 4000)
    cache.start_forward(numkv.Batch([1], [0]), reserve=True)
    got = cache.get(0)[0][1]
    tolerances.assert_rotated_close(got, naive.rope(raw[1], cos[1], sin[1], False), "fp32")


# ---------------------------------------------------------------- the tables of a rotation


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("magnitude", [1.0, 1.3, 0.01])
def test_a_shift_only_turns(target, rng, magnitude, dtype):
    """Tables may scale what they rotate, as YaRN's do; a key that moves has been scaled already."""
    cos, sin = tables(dtype=dtype)
    scale = magnitude * np.linspace(1, 2, DIM // 2) if magnitude != 1 else 1
    shift = numkv.rope_shift((cos * scale).astype(dtype), (sin * scale).astype(dtype))
    pair = make(target, shift, "fp32", turning()[1])
    fill(pair, rng, 5)
    assert pair.change("remove", 0, 1, 4)
    pair.probe()


@pytest.mark.parametrize("kind", list(naive.DTYPES))
@rotations
def test_called_directly(target, to, host, rng, kind, interleaved, rotary):
    """Each key by its own offset, in either direction."""
    cos, sin = tables(rotary)
    shift = numkv.rope_shift(*tables(rotary, dtype=F32), interleaved=interleaved)
    keys = naive.round_to(rng.standard_normal((4, HEADS, DIM)), kind)
    offsets = np.array([-3, 0, 5, -15], np.int32)
    out = host(shift(0, to(keys), to(offsets)))
    assert out.shape == keys.shape
    assert out.dtype in (keys.dtype, F32)
    want = [
        naive_cells.rotate(k.astype(np.float64), int(o), cos, sin, interleaved)
        for k, o in zip(keys, offsets, strict=True)
    ]
    tolerances.assert_rotated_close(out, np.stack(want), kind)


def test_one_shift_serves_many_caches(target, rng):
    """Of any kind, on any target."""
    shift, oracle = turning()
    for kind in ("fp32", "int8"):
        for where in ("cpu", target):
            pair = make(where, shift, kind, oracle)
            fill(pair, rng, 3)
            assert pair.change("remove", 0, 0, 1)
            pair.probe()


def test_offsets_outside_the_tables(target, rng):
    """As far as the tables go, and no further; nothing moves that does not have to."""
    shift, oracle = turning(positions=4)
    pair = make(target, shift, "fp16", oracle)
    fill(pair, rng, 6, layers=(0, 1))
    with pair.refused(IndexError):
        pair.cache.remove(0, 0, 4)
    pair.probe()
    assert pair.change("remove", 0, 4, 100)
    assert pair.change("remove", 0, 0, 3)
    pair.probe()


def test_wider_than_a_head(target, rng):
    """Found before any layer changes."""
    shift, _ = turning(8)
    pair = make(target, shift, oracle=plus_one)
    assert pair.start_forward([0, 1], [0, 0])
    for layer, dim in ((0, 8), (1, 6)):
        pair.put(layer, *rng.standard_normal((2, 2, 1, dim)).astype(F32))
    with pair.refused(numkv.DimensionMismatch):
        pair.cache.remove(0, 0, 1)
    pair.probe()
    assert pair.change("remove", 0, 1)
    pair.probe()


@pytest.mark.parametrize(
    ("cos", "sin", "error"),
    [
        (np.ones((4, 2), F32), np.ones((4, 3), F32), numkv.DimensionMismatch),
        (np.ones((4, 2), F32), np.ones((3, 2), F32), numkv.DimensionMismatch),
        (np.ones(4, F32), np.ones(4, F32), numkv.DimensionMismatch),
        (np.ones((4, 2), np.int32), np.ones((4, 2), np.int32), numkv.UnsupportedDType),
        (np.ones((4, 2), F32), np.ones((4, 2), np.int64), numkv.UnsupportedDType),
        (None, None, (TypeError, numkv.NumkvError)),
    ],
)
def test_bad_tables(cos, sin, error):
    with pytest.raises(error, match=r"cos|sin"):
        numkv.rope_shift(cos, sin)


# ---------------------------------------------------------------- a user's own function


class Recorder:
    """`plus` that keeps what it was called with."""

    def __init__(self, target, host):
        self.calls, self.shift, self.host = [], plus(target), host

    def __call__(self, layer, keys, offsets):
        self.calls.append((layer, np.array(self.host(keys)), np.array(self.host(offsets))))
        return self.shift(layer, keys, offsets)


@every_kind
def test_what_a_shift_is_called_with(target, to, host, kind):
    """Keys by position in the kind's own dtype, an offset for each, in steps of at most `max_batch`."""
    shift = Recorder(target, host)
    pair = make(target, shift, kind, plus_one, sizes=(2, 16, 2))
    # Out of order, and across other sequences' cells.
    for positions, sequences in (([6, 1], [0, 0]), ([0, 0], [1, 0]), ([5, 4], [0, 0]), ([7], [0])):
        assert pair.start_forward(positions, sequences)
        for layer in (0, 4):
            keys = np.array(positions, F32)[:, None, None] * np.ones((1, HEADS, 1), F32)
            pair.put(layer, keys + layer, keys)
    assert pair.change("remove", 0, 1, 3)
    assert {layer for layer, *_ in shift.calls} == {0, 4}
    for layer in (0, 4):
        calls = [call[1:] for call in shift.calls if call[0] == layer]
        for keys, offsets in calls:
            assert 1 <= len(keys) <= 2
            assert keys.shape == (len(offsets), HEADS, 1)
            assert keys.dtype == numkv.kind(kind).dtype
            assert offsets.dtype == np.int32
            assert np.all(offsets == -2)
        order = np.concatenate([keys[:, 0, 0] for keys, _ in calls]).astype(F32)
        assert np.allclose(order, np.array([4, 5, 6, 7]) + layer, rtol=1e-6)
    pair.probe()


def test_nothing_moves_nothing_is_called(target, host, rng):
    shift = Recorder(target, host)
    pair = make(target, shift, oracle=plus_one)
    fill(pair, rng, 4)
    for begin, end in ((2, 2), (3, 9), (3, None)):
        assert pair.change("remove", 0, begin, end)
    assert pair.change("remove", 7, 0, 1)
    assert shift.calls == []


@pytest.mark.parametrize("kind", ["fp16", "bf16", "int8", "fp64"])
def test_a_shift_may_return_float32(target, to, host, kind):
    """It is rounded or quantised once."""

    def shift(layer, keys, offsets):
        return to(host(keys).astype(F32) + host(offsets)[:, None, None].astype(F32))

    pair = make(target, shift, kind, plus_one)
    assert pair.start_forward([0, 1, 2], [0] * 3)
    pair.put(0, *(np.arange(6, dtype=F32).reshape(3, 1, 2) + i for i in (0, 1)))
    assert pair.change("remove", 0, 0, 1)
    pair.probe()


class Broken(Exception):
    """What the user's function raises."""


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_an_exception_passes_through(target, host, rng, kind, when):
    """At any call, of any layer: all layers are as they were."""
    works = Recorder(target, host)

    def shift(layer, keys, offsets):
        if len(works.calls) == when:
            raise Broken
        return works(layer, keys, offsets)

    pair = make(target, shift, kind, plus_one, sizes=(2, 8, 2))
    for first in (0, 2, 4):
        fill(pair, rng, 2, layers=(0, 1), first=first)
    with pair.refused(Broken):
        pair.cache.remove(0, 1, 3)
    pair.probe()
    works.calls.clear()
    with pair.refused(Broken):
        pair.cache.remove(0, 1, 3)


def test_keys_are_the_shifts_own(rng):
    """It may work in place, even if it fails after that."""

    def shift(layer, keys, offsets):
        keys += offsets[:, None, None]
        if layer == 1 and failing:
            raise Broken
        return keys

    pair = make("cpu", shift, oracle=plus_one)
    fill(pair, rng, 4, layers=(0, 1))
    failing = True
    with pair.refused(Broken):
        pair.cache.remove(0, 1, 2)
    pair.probe()
    failing = False
    assert pair.change("remove", 0, 1, 2)
    pair.probe()


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda keys: keys[1:], numkv.DimensionMismatch),
        (lambda keys: keys[:, :, :1], numkv.DimensionMismatch),
        (lambda keys: keys.reshape(len(keys), -1), numkv.DimensionMismatch),
        (lambda keys: keys.astype(np.float64), numkv.UnsupportedDType),
        (lambda keys: keys.astype(np.int32), numkv.UnsupportedDType),
    ],
    ids=["fewer", "narrower", "flat", "float64", "int32"],
)
@pytest.mark.parametrize("kind", ["fp32", "fp16"])
def test_bad_results(target, to, host, rng, kind, spoil, error):
    """Of the last layer; the first is as it was too."""

    def shift(layer, keys, offsets):
        return keys if layer == 0 else to(np.ascontiguousarray(spoil(host(keys))))

    pair = make(target, shift, kind, plus_one)
    fill(pair, rng, 4, layers=(0, 1))
    with pair.refused(error):
        pair.cache.remove(0, 1, 2)
    pair.probe()


@pytest.mark.parametrize("thing", [None, 3, "keys"], ids=repr)
def test_results_that_are_no_arrays(target, rng, thing):
    pair = make(target, lambda layer, keys, offsets: thing, oracle=plus_one)
    fill(pair, rng, 4)
    with pair.refused((numkv.NumkvError, TypeError)):
        pair.cache.remove(0, 1, 2)
    pair.probe()
