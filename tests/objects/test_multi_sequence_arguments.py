"""Arguments of multi-sequence caches of odd types and sizes: taken as what they mean, or refused by name."""

import itertools
from fractions import Fraction

import naive_cells
import numpy as np
import pytest
from cell_numbers import CACHES, Numbers, make, numbers, ready
from walked import each

import numkv

F32 = np.float32
#: What a refusal may be; it names the argument.
REFUSED = (numkv.NumkvError, IndexError, ValueError, TypeError)
HUGE = 10**5000  # more digits than Python writes out
NO_INTEGERS = [1.0, float("nan"), "1", [1], True, np.float32(1), object()]


class Indexed:
    """An integer of somebody else's."""

    def __index__(self):
        return 0


def named(name):
    return f"`{name}`"


def calls(cache, to):
    """By argument: a call that takes it, what it may be beside integers, and whether any size will do."""
    k, v = (to(x) for x in numbers([1, 2]))
    q = to(np.ones((2, 1, 1), F32))
    return {
        "put layer": lambda x: cache.put(x, k, v),
        "get layer": lambda x: cache.get(x),
        "decode layer": lambda x: cache.decode_attention(x, q),
        "weights layer": lambda x: cache.attention_weights(x, q),
        "arrays layer": lambda x: cache.arrays(x),
        "scales layer": lambda x: cache.set_scales(x, 1.0),
        "remove seq": lambda x: cache.remove(x, 0),
        "remove begin": lambda x: cache.remove(0, x),
        "remove end": lambda x: cache.remove(0, 0, x),
        "compact seq": lambda x: cache.compact(x, []),
        "copy_prefix src": lambda x: cache.copy_prefix(x, 1, 1),
        "copy_prefix dst": lambda x: cache.copy_prefix(0, x, 1),
        "copy_prefix length": lambda x: cache.copy_prefix(0, 1, x),
        "can_resume seq": lambda x: cache.can_resume(x, 0),
        "can_resume pos": lambda x: cache.can_resume(0, x),
        "positions seq": lambda x: cache.positions(x),
    }


CALLS = list(calls(None, lambda x: x))


@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_index(target, to, call):
    """Refused by name, and nothing has changed; so are ids that an int64 does not hold."""
    pair, name = ready(target, shift=True), call.split()[1]
    bad = [*NO_INTEGERS, -1, -HUGE]
    if name in ("layer", "seq", "src", "dst"):
        bad += [2**63, HUGE]
    if name == "end":
        bad.remove(-1)  # below the beginning, another error
    else:
        bad.append(None)
    for x in bad:
        with pair.refused(REFUSED, match=named(name)):
            calls(pair.cache, to)[call](x)


@pytest.mark.parametrize("name", CACHES)
def test_positions_after_all_others(target, to, name):
    """Numbers that no token can have are after all that have one."""
    pair = ready(target, name=name)
    cache = pair.cache
    for x in (2**31, 2**63, HUGE):
        cache.remove(0, x)
        cache.remove(0, x, x + 1)
        cache.remove(0, x, None)
        assert cache.can_resume(0, x) == (name != "sliding")
    pair.check(0)
    cache.copy_prefix(0, 2**63 - 1, 2**63 - 1)
    assert cache.sequences == [0, 2**63 - 1]
    assert cache.positions(2**63 - 1).tolist() == [0, 1]
    cache.start_forward(numkv.Batch([2], [2**63 - 1]))
    cache.remove(0, 0, HUGE)
    assert cache.positions(0).tolist() == []
    cache.check()


def test_integers_of_others_are_integers(target, to):
    pair = ready(target)
    cache = pair.cache
    for zero in (0, np.int8(0), np.uint64(0), Indexed()):
        k, _, _ = cache.get(zero)
        assert len(k) == 2
        assert cache.positions(zero).tolist() == [0, 1]
        cache.decode_attention(zero, to(np.ones((2, 1, 1), F32)))
        assert cache.arrays(zero) is cache.arrays(0)
    cache.put(np.uint8(200), *map(to, numbers([3, 4])))
    assert len(cache.get(200)[0]) == 2


# ---------------------------------------------------------------- making


@each("name", ["max_sequences", "capacity", "max_batch"])
@each("value", [*NO_INTEGERS, None, -1, 2**31 + 1, 2**63, HUGE])
@each("make_cache", [numkv.CausalCache, numkv.EncoderCache])
def test_sizes(make_cache, name, value):
    """The cache can still be initialised."""
    cache, sizes = make_cache(), {"max_sequences": 1, "capacity": 4, "max_batch": 4}
    with pytest.raises(REFUSED, match=named(name)):
        cache.init("fp32", **(sizes | {name: value}))
    cache.init("fp32", **sizes)


def test_more_cells_than_numbers_of_cells():
    """Refused before memory is taken, by the product of the sizes, or with what eviction leaves."""
    for cache, sizes in (
        (numkv.CausalCache(), (2**16, 2**16, 4)),
        (numkv.CausalCache(window_left=2**20), (2**20, 2**21, 4)),
        (numkv.CausalCache(window_left=2), (1, 2**20, 2**31)),
    ):
        with pytest.raises(numkv.DimensionMismatch, match=r"`capacity`.*2\*\*31 cells"):
            cache.init("fp32", *sizes)
        with pytest.raises(numkv.NumkvError, match="init"):
            cache.num_cells  # noqa: B018
    cache = numkv.CausalCache()
    cache.set_config(numkv.CacheConfig(padding=2**31 - 1))
    with pytest.raises(numkv.DimensionMismatch, match="`capacity`"):
        cache.init("fp32", 2, 2**30, 4)


@pytest.mark.parametrize("rows", [(0, 2**40, 8), (0, 1, 2**45)])
def test_rows_that_no_memory_holds(rows):
    """An array of none of them says nothing of what a layer would take."""
    empty = np.empty(rows, F32)
    cache = numkv.CausalCache()
    cache.init("fp32", 1, 1000, 4)
    cache.start_forward(numkv.Batch([], []))
    with pytest.raises(numkv.DimensionMismatch, match=r"2\^47 bytes"):
        cache.put(0, empty, empty)
    assert cache.nbytes == 0


@pytest.mark.parametrize("value", [*NO_INTEGERS, -1, 2**31, HUGE], ids=range(10))
def test_padding(value):
    with pytest.raises(REFUSED, match="`padding`"):
        numkv.CacheConfig(padding=value)


def test_small_integers_of_numpy_do_not_overflow():
    cache = numkv.CausalCache()
    cache.set_config(numkv.CacheConfig(padding=np.uint8(3)))
    cache.init("fp32", np.uint8(20), np.uint8(20), np.uint8(4))
    assert cache.num_cells == 402
    cache.start_forward(numkv.Batch(np.arange(200, dtype=np.uint8), np.zeros(200, np.int8)))
    sliding = numkv.CausalCache(window_left=np.uint8(200), memory=np.uint8(250))
    sliding.init("fp32", 2, 1000, np.uint8(200))
    assert sliding.num_cells == 700


def test_defaults_of_a_configuration():
    assert numkv.CacheConfig(None, None, None) == numkv.CacheConfig()
    for bad in (2, "yes", 0.5, [True]):
        with pytest.raises(TypeError, match="`permuted_v`"):
            numkv.CacheConfig(permuted_v=bad)
    for bad in (3, "fp31", "int8", float("nan"), [], np.float16):
        with pytest.raises(numkv.UnsupportedDType, match="`mask_dtype`"):
            numkv.CacheConfig(mask_dtype=bad)


@pytest.mark.parametrize(
    ("name", "make_cache"),
    [
        ("window_left", lambda x: numkv.CausalCache(window_left=x)),
        ("memory", lambda x: numkv.CausalCache(window_left=0, memory=x)),
        ("chunk_size", lambda x: numkv.CausalCache(chunk_size=x)),
    ],
)
def test_windows_and_chunks(name, make_cache):
    for bad in [*NO_INTEGERS, -2, HUGE, *([None] if name == "window_left" else [])]:
        with pytest.raises(REFUSED, match=named(name)):
            make_cache(bad)


@pytest.mark.parametrize("name", ["sliding", "chunked"])
@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**40, 2**63 - 1])
def test_windows_wider_than_there_are_positions(target, name, size):
    told = {"window": -1} if name == "sliding" else {"chunk": size}
    options = {"window_left" if name == "sliding" else "chunk_size": size}
    pair = make(target, name, options, (1, 8, 4), **told)
    last = 2**31 - 2
    pair.step([1, 2], [0, last], [0, 0], [1, 2], "0x / 00")
    assert pair.cache.can_resume(0, 2**31)


@pytest.mark.parametrize(
    "make_cache", [numkv.CausalCache, lambda shift: numkv.CausalCache(shift=shift, chunk_size=2)]
)
def test_a_shift_is_a_function(make_cache):
    for bad in (3, "rope", [print]):
        with pytest.raises(TypeError, match="`shift`"):
            make_cache(bad)


def test_children_and_their_types():
    for bad in (3, None, numkv.CausalCache):
        with pytest.raises(TypeError, match="`caches`"):
            numkv.WrapperCache(bad)
    child = numkv.CausalCache()
    for bad in (3, [0.0], ["0"], [None], [False]):
        with pytest.raises(TypeError, match="`layer_types`"):
            numkv.WrapperCache(child, layer_types=bad)
    for bad in ([HUGE], [-HUGE]):
        with pytest.raises(IndexError, match="`layer_types`"):
            numkv.WrapperCache(child, layer_types=bad)
    with pytest.raises(ValueError, match="`layer_types`"):
        numkv.WrapperCache(child, layer_types=itertools.repeat(0))
    wrapper = numkv.WrapperCache(child, layer_types=iter([0, np.int8(0)]))
    wrapper.init("fp32", 1, 4, 4)
    for bad in NO_INTEGERS:
        with pytest.raises(TypeError, match="`i`"):
            wrapper.set_layer_type(bad)


@pytest.mark.parametrize("bad", [2, "yes", 0.0, [], np.ones(2)])
def test_flags(target, to, bad):
    cache = numkv.CausalCache()
    with pytest.raises(TypeError, match="`rotate`"):
        cache.init("fp32", 1, 4, 4, target, rotate=bad)
    pair = ready(target)
    with pair.refused(TypeError, match="`reserve`"):
        pair.cache.start_forward(numkv.Batch([2], [0]), reserve=bad)
    with pair.refused(TypeError, match="`check_finite`"):
        pair.cache.put(0, *map(to, numbers([3, 4])), check_finite=bad)


def test_none_is_the_default(target, to):
    cache = numkv.CausalCache(None)
    cache.init("int8", 1, 8, 4, target, k_kind=None, v_kind=None, rotate=None)
    cache.start_forward(numkv.Batch([0, 1], [0, 0], None), reserve=None)
    cache.put(0, *map(to, numbers([1, 2])), check_finite=None)
    with pytest.raises(numkv.NonFiniteInput):
        cache.put(0, *map(to, numbers([1, np.nan])), check_finite=None)
        cache.check()  # on CUDA it says it
    cache.set_causal(None)
    assert cache.positions(0).tolist() == [0, 1]


# ---------------------------------------------------------------- batches


class Raises:
    """What NumPy makes no array of."""

    def __array__(self, dtype=None, copy=None):
        raise ValueError("no")

    def __iter__(self):
        raise ZeroDivisionError

    def __len__(self):
        return 2


NO_ROW_OF_INTEGERS = [
    [0.0, 1.0], [0, np.nan], ["0", "1"], [None, None], [True, False], [0, [1]], [[0, 1]], 0, None,
    [0, 2**63], [0, 2**64], [0, -1], np.array([0, 2**63], np.uint64), [0, HUGE], {0, 1}, iter([0, 1]),
    np.ma.masked_array([0, 1], [False, True]), np.ma.masked_array([0, 1]), Raises(),
    np.array([0, 1], "M8[s]"), np.array([0, 1j]), np.array([(0,), (1,)], [("x", "i8")]),
]  # fmt: skip


@each("name", ["positions", "sequences"])
@each("bad", NO_ROW_OF_INTEGERS)
def test_rows_of_a_batch(name, bad):
    pair = ready("cpu")
    batch = numkv.Batch(**({"positions": [2, 3], "sequences": [0, 0]} | {name: bad}))
    for reserve in (False, True):
        with pair.refused(REFUSED, match=f"`{name}`|`sequences`"):
            pair.cache.start_forward(batch, reserve=reserve)
    pair.cache.check()


@pytest.mark.parametrize(
    "given",
    [
        [2, 3], (2, 3), np.array([2, 3], np.int8), np.array([2, 3], np.uint64), np.array([2, 3], ">i8"),
        np.array([3, 2])[::-1], np.array([2, 9, 3, 9])[::2], np.frombuffer(b"\0\2\0\0\0\3\0\0\0", "<i4", offset=1),
        range(2, 4),
    ],
    ids=range(9),
)  # fmt: skip
def test_integers_of_any_layout(given):
    pair = ready("cpu")
    pair.cache.start_forward(numkv.Batch(given, [0, 0]))
    assert pair.cache.positions(0).tolist() == [0, 1, 2, 3]
    pair.cache.start_forward(numkv.Batch([0, 0], given))
    assert pair.cache.sequences == [0, 2, 3]


@pytest.mark.parametrize("bad", [[2, 3], "ab", 3, None])
def test_what_is_no_batch(target, bad):
    pair = ready(target)
    with pair.refused(TypeError, match="`batch`"):
        pair.cache.start_forward(bad)


@pytest.mark.parametrize("bad", [3, [0.0], "0", ["0"], [None], [True], [2], [-1], [HUGE]])
def test_indices_of_tokens(target, bad):
    pair = ready(target)
    with pair.refused(REFUSED, match="`multimodal`"):
        pair.cache.start_forward(numkv.Batch([2, 3], [0, 0], bad))
    with pair.refused(REFUSED, match="`except_indices`"):
        pair.cache.set_causal(bad)


def test_iterables_that_end_badly(target):
    """One that raises, one that goes on for ever, and one that calls the cache it is for."""
    pair = ready(target)

    def calls_it():
        pair.cache.start_forward(numkv.Batch([7], [0]))
        yield 0

    for bad, error in (
        ((1 // 0 for _ in [0]), ZeroDivisionError),
        (itertools.repeat(0), numkv.DimensionMismatch),
        (calls_it(), numkv.NumkvError),
    ):
        with pair.refused(error):
            pair.cache.set_causal(bad)
    assert pair.cache.positions(0).tolist() == [0, 1]
    pair.set_causal(0, [0])
    pair.shows([1, 2], "00 / 00")


# ---------------------------------------------------------------- rows and queries


def odd(x, how):
    """The same numbers in another layout, or something else beside them."""
    if how == "read-only":
        x = x.copy()
        x.flags.writeable = False
    elif how == "reversed":
        x = np.ascontiguousarray(x[::-1])[::-1]
    elif how == "strided":
        x = np.repeat(x, 2, 0)[::2]
    elif how == "byte order":
        x = x.astype(">f4")
    elif how == "unaligned":
        x = np.frombuffer(b"\0" + x.tobytes(), F32, offset=1).reshape(x.shape)
    elif how == "last axis":
        x = np.repeat(x, 2, -1)[..., ::2]
    elif how == "records":
        record = np.zeros(x.shape[:-1], np.dtype([("flag", "u1"), ("x", F32, x.shape[-1:])]))
        record["x"] = x
        x = record["x"]
    return x


FINE = ["read-only", "reversed", "strided"]
BAD = ["byte order", "unaligned", "last axis", "records"]


@pytest.mark.parametrize("how", [*FINE, *BAD])
@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_layouts_of_rows_and_queries(how, kind):
    cache = numkv.CausalCache()
    cache.init(kind, 1, 8, 4)
    plain = cache.copy()
    rng = np.random.default_rng(0)
    k, v, q = (rng.standard_normal((2, 2, 4), F32) for _ in range(3))
    for one in (cache, plain):
        one.start_forward(numkv.Batch([0, 1], [0, 0]))
        one.put(0, k, v)
    if how in FINE:
        cache.put(0, odd(k, how), odd(v, how))
        got, want = cache.decode_attention(0, odd(q, how)), plain.decode_attention(0, q)
        assert np.array_equal(got, want)
        return
    before = cache.decode_attention(0, q)
    for name, call in (
        ("k", lambda: cache.put(0, odd(k, how), v)), ("v", lambda: cache.put(0, k, odd(v, how))),
        ("q", lambda: cache.decode_attention(0, odd(q, how))),
        ("q", lambda: cache.attention_weights(0, odd(q, how))),
    ):  # fmt: skip
        with pytest.raises(numkv.NumkvError, match=named(name)):
            call()
    assert np.array_equal(cache.decode_attention(0, q), before)


def test_one_row_of_an_encoder(target, to, host):
    """By head, as one token's rows elsewhere."""
    cache = numkv.EncoderCache()
    cache.init("fp32", 1, 8, 4, target)
    cache.start_forward(numkv.Batch([0], [0], [0]))
    k, v = np.arange(8, dtype=F32).reshape(2, 4), np.arange(6, dtype=F32).reshape(2, 3)
    cache.put(0, to(k), to(v))
    for got, want in zip(cache.get(0), (k, v), strict=False):
        assert np.array_equal(host(got)[0], want)
    for bad in (np.ones((3, 4), F32), np.ones((2, 2, 2), F32)):
        with pytest.raises(numkv.DimensionMismatch, match=r"`[kv]`"):
            cache.put(0, to(k), to(bad))
    assert cache.layers[0] == numkv.LayerSpec(2, 4, head_dim_v=3, kind="fp32")


# ---------------------------------------------------------------- hostile shifts


def hostile(target, cache):
    """Shift functions that break the rules, by what they do."""
    from numkv import targets

    on = targets.get(target)

    def to(x):
        return on.asarray(np.ascontiguousarray(x))

    def turned(keys, dtype=F32):
        return to(on.to_host(keys).astype(dtype))

    return {
        "nothing": lambda layer, keys, offsets: None,
        "a list": lambda layer, keys, offsets: [0],
        "fewer": lambda layer, keys, offsets: to(on.to_host(keys)[:-1]),
        "wider": lambda layer, keys, offsets: to(np.repeat(on.to_host(keys), 2, 2)),
        "integers": lambda layer, keys, offsets: turned(keys, np.int32),
        "another byte order": lambda layer, keys, offsets: on.to_host(keys).astype(">f4"),
        "an error": lambda layer, keys, offsets: 1 // 0,
        "remove": lambda layer, keys, offsets: cache[0].remove(0, 1) or keys,
        "compact": lambda layer, keys, offsets: cache[0].compact(0, [0]) or keys,
        "start_forward": lambda layer, keys, offsets: (
            cache[0].start_forward(numkv.Batch([9], [0])) or keys
        ),
        "put": lambda layer, keys, offsets: cache[0].put(0, keys, keys) or keys,
        "close": lambda layer, keys, offsets: cache[0].close() or keys,
        "clear": lambda layer, keys, offsets: cache[0].clear() or keys,
        "get": lambda layer, keys, offsets: cache[0].get(0) and keys,
        "copy": lambda layer, keys, offsets: cache[0].copy() and keys,
    }


@pytest.mark.parametrize("how", hostile("cpu", None))
def test_a_shift_that_breaks_the_rules(target, how):
    """It is told so, and nothing has changed, in `remove` and in `compact`."""
    place = []
    cache = numkv.CausalCache(hostile(target, place)[how])
    cache.init("fp32", 1, 8, 8, target)
    place.append(cache)
    pair = Numbers(cache, naive_cells.Cells(1, 8, 8), target=target)
    assert pair.start_forward([0, 1, 2, 3], [0] * 4)
    pair.put(0, *numbers([1, 2, 3, 4]))
    error = ZeroDivisionError if how == "an error" else numkv.NumkvError
    with pair.refused(error):
        cache.remove(0, 1, 2)
    with pair.refused(error):
        cache.compact(0, [0, 2, 3])
    cache.check()
    assert cache.positions(0).tolist() == [0, 1, 2, 3]
    assert pair.start_forward([4], [0])  # it goes on


def test_a_shift_that_swallows_the_refusal(target, to):
    """The change that it is called by goes on as planned."""
    refused = []

    def shift(layer, keys, offsets):
        for call in (lambda: cache.remove(0, 0, 1), lambda: cache.copy_prefix(0, 1, 1)):
            with pytest.raises(numkv.NumkvError, match="inside of"):
                call()
            refused.append(call)
        return keys

    cache = numkv.CausalCache(shift)
    cache.init("fp32", 1, 8, 8, target)
    cache.start_forward(numkv.Batch([0, 1, 2, 3], [0] * 4))
    cache.put(0, *map(to, numbers([1, 2, 3, 4])))
    cache.remove(0, 1, 2)
    assert len(refused) == 2
    assert cache.positions(0).tolist() == [0, 1, 2]
    assert cache.sequences == [0]
    cache.check()


def test_a_shift_that_gives_back_what_it_got(target, to, host):
    """Its input, changed in place and kept: copies, as the cache's rows are its own."""
    kept = []

    def shift(layer, keys, offsets):
        kept.append(keys)
        return keys

    cache = numkv.CausalCache(shift)
    cache.init("fp32", 1, 8, 8, target)
    cache.start_forward(numkv.Batch([0, 1, 2], [0] * 3))
    cache.put(0, *map(to, numbers([1, 2, 3])))
    cache.remove(0, 0, 1)
    kept[0][:] = 9
    cache.start_forward(numkv.Batch([2], [0]))
    shown = host(cache.get(0)[0])[:, 0, 0]
    assert shown[1:3].tolist() == [2, 3]


def test_a_shift_of_a_wrappers_child_that_calls_the_wrapper(target, to):
    """The wrapper and its children are one cache."""

    def shift(layer, keys, offsets):
        wrapper.remove(0, 2)
        return keys

    children = numkv.CausalCache(lambda layer, keys, offsets: keys), numkv.CausalCache(shift)
    wrapper = numkv.WrapperCache(*children, layer_types=[0, 1])
    wrapper.init("fp32", 1, 8, 8, target)
    wrapper.start_forward(numkv.Batch([0, 1, 2], [0] * 3))
    for layer in range(2):
        wrapper.put(layer, *map(to, numbers([1, 2, 3])))
    for cache in (wrapper, children[1]):
        with pytest.raises(numkv.NumkvError, match="inside of"):
            cache.remove(0, 0, 1)
    assert [x.tolist() for x in wrapper.positions(0)] == [[0, 1, 2]] * 2
    wrapper.check()


def test_a_shift_that_cannot_be_pickled():
    import pickle

    cache = numkv.CausalCache(lambda layer, keys, offsets: keys)
    cache.init("fp32", 1, 8, 8)
    with pytest.raises(numkv.NumkvError, match="`shift`"):
        pickle.dumps(cache)
    rope = numkv.CausalCache(numkv.rope_shift(np.ones((4, 2), F32), np.zeros((4, 2), F32)))
    rope.init("fp32", 1, 8, 8)
    rope.start_forward(numkv.Batch([0, 1], [0, 0]))
    rope.put(0, np.ones((2, 1, 4), F32), np.ones((2, 1, 4), F32))
    other = pickle.loads(pickle.dumps(rope))
    other.remove(0, 0, 1)
    assert other.positions(0).tolist() == [0]
    assert rope.positions(0).tolist() == [0, 1]


@pytest.mark.parametrize("scales", [[[1.0], [1.0, 2.0]], Fraction(10**400)], ids=["ragged", "huge"])
def test_scales_that_are_none(scales):
    cache = numkv.CausalCache()
    cache.init("fp8_e4m3", 1, 8, 4)
    for name in "kv":
        with pytest.raises(numkv.UnsupportedDType, match=f"`{name}`: expected"):
            cache.set_scales(0, **{name: scales})
    cache.set_scales(0, 2.0, 0.5)
