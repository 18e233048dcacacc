"""What every cache has, whatever it is: the same attributes, copies, `clear`, `check`, `repr` and pickles."""

import copy
import inspect
import pickle

import numpy as np
import pytest
import reference
from layer_lists import described, paged_kv_cache
from pickles import sent

import numkv

F32 = np.float32
HEADS, DIM, DIM_V = 2, 8, 6
TOKENS = 3
COMPRESSORS = numkv.HeadCompressor, numkv.MultiHeadCompressor, numkv.PagedCompressor


def rows(n, dim, salt=0):
    return np.random.default_rng([n, dim, salt]).standard_normal((n, HEADS, dim), F32)


class Case:
    """How a cache is made, filled and looked at; `on` has ``to`` and ``host``."""

    kind = v_kind = "int8"
    dims = (DIM, DIM_V)

    def make(self, target):
        """An empty cache."""
        raise NotImplementedError

    def fill(self, cache, on, n=TOKENS, salt=0):
        """Add tokens."""
        raise NotImplementedError

    def count(self, cache):
        """How many tokens there are."""
        return len(cache)

    def content(self, cache, on):
        """What there is to see of them, as arrays."""
        q = on.to(rows(1, DIM)[0])
        return [on.host(cache.decode_attention(q))]

    def told(self, name):
        """What an attribute is."""
        told = {"num_kv_heads": HEADS, "head_dim": self.dims[0], "head_dim_v": self.dims[1]}
        return told[name] if name in told else getattr(self, name)

    def kv(self, on, n, salt):
        return [on.to(rows(n, dim, salt)) for dim in self.dims]

    def clear(self, cache):
        """Drop the tokens."""
        cache.clear()


class OfContiguousLayer(Case):
    def make(self, target):
        return numkv.ContiguousLayer(16, HEADS, DIM, kind="int8", target=target, head_dim_v=DIM_V)

    def fill(self, cache, on, n=TOKENS, salt=0):
        cache.append(*self.kv(on, n, salt))

    def content(self, cache, on):
        return [on.host(cache.decode_attention(on.to(rows(1, DIM))))]


class OfPagedLayer(OfContiguousLayer):
    def make(self, target):
        pool = OfPagedPool().make(target)
        return numkv.PagedLayer(4, 2, HEADS, DIM, pool=pool, head_dim_v=DIM_V)


class OfPagedPool(Case):
    """The tokens of a layer on it, which a copy of the pool has too."""

    def make(self, target):
        return numkv.PagedPool(
            16, 2, HEADS, DIM, kind="int8", target=target, head_dim_v=DIM_V
        )  # fmt: skip

    def fill(self, cache, on, n=TOKENS, salt=0):
        layer = numkv.PagedLayer(4, 2, HEADS, DIM, pool=cache, head_dim_v=DIM_V)
        layer.append(*self.kv(on, n, salt))
        self.layers = [*getattr(self, "layers", []), layer]

    def count(self, cache):
        return cache.blocks.num_blocks - cache.blocks.num_free

    def clear(self, cache):
        with pytest.raises(numkv.NumkvError, match="in use"):
            cache.clear()
        for layer in self.layers:
            if layer.pool is cache:
                layer.free()
        cache.clear()

    def content(self, cache, on):
        mine = [layer for layer in self.layers if layer.pool is cache and len(layer)]
        ids = (mine or self.layers)[0].block_indices  # a copy has them under the same numbers
        both = (on.host(x)[ids].swapaxes(1, 2) for x in cache.pool.arrays())
        return [x.reshape(-1, *x.shape[2:])[:TOKENS] for x in both]


class OfKVCache(Case):
    def make(self, target):
        return numkv.KVCache(2, HEADS, DIM, kind="int8", target=target, head_dim_v=DIM_V)

    def fill(self, cache, on, n=TOKENS, salt=0):
        for layer in range(2):
            cache.append(layer, *self.kv(on, n, salt + layer))
        cache.advance(n)

    def content(self, cache, on):
        q = on.to(rows(1, DIM)[0])
        return [on.host(cache.decode_attention(layer, q)) for layer in range(2)]


class OfPagedKVCache(Case):
    def make(self, target):
        return paged_kv_cache(
            2, HEADS, DIM, num_blocks=16, block_size=2, kind="int8", target=target, head_dim_v=DIM_V
        )  # fmt: skip

    def fill(self, cache, on, n=TOKENS, salt=0):
        seq = cache.sequences[0] if cache.sequences else cache.add()
        step = cache.reserve([seq], [n])
        for layer in range(2):
            step.append(layer, *self.kv(on, n, salt + layer))
        cache.commit(step)

    def count(self, cache):
        return sum(cache.length(seq) for seq in cache.sequences)

    def content(self, cache, on):
        q = on.to(rows(1, DIM))
        return [on.host(cache.decode_attention(n, cache.sequences, q)) for n in range(2)]


class OfCells(Case):
    def __init__(self, **options):
        self.options = options

    def make(self, target):
        cache = numkv.CausalCache(**self.options)
        cache.init("int8", 2, 16, 8, target)
        return cache

    def fill(self, cache, on, n=TOKENS, salt=0):
        first = self.count(cache)
        cache.start_forward(numkv.Batch(np.arange(first, first + n), [0] * n))
        for layer in range(2):
            cache.put(layer, *self.kv(on, n, salt + layer))

    def count(self, cache):
        return len(cache.positions(0))

    def content(self, cache, on):
        """The last query of the pass that is on."""
        found = []
        for layer in range(2):
            arrays = cache.arrays(layer)
            n = len(arrays.slots)
            out = on.host(cache.decode_attention(layer, on.to(rows(n, DIM))))
            found += [out, *map(on.host, cache.get(layer))]
        return found


class OfEncoder(Case):
    def make(self, target):
        cache = numkv.EncoderCache()
        cache.init("int8", 1, 16, 8, target)
        return cache

    def fill(self, cache, on, n=TOKENS, salt=0):
        more = n + self.count(cache)
        cache.start_forward(numkv.Batch([0], [0], [0]))
        cache.put(0, *self.kv(on, more, salt))

    def count(self, cache):
        return int(cache.arrays(0).context_lens[0]) if cache.encoder_cached else 0

    def content(self, cache, on):
        q = on.to(rows(1, DIM))
        return [on.host(cache.decode_attention(0, q)), *map(on.host, cache.get(0)[:2])]


class OfWrapper(OfCells):
    """A sliding window of layer 0, and a causal cache of layer 1."""

    def __init__(self):
        super().__init__()

    def make(self, target):
        children = numkv.CausalCache(window_left=4), numkv.CausalCache()
        cache = numkv.WrapperCache(*children, layer_types=[0, 1])
        cache.init("int8", 2, 16, 8, target)
        return cache

    def count(self, cache):
        return len(cache.positions(0)[1])


class OfHeadCompressor(Case):
    kind, v_kind = "codes4+sketch16", "codes4"
    dims = (DIM, DIM)
    config = numkv.CompressorConfig(DIM, 4, 16, 42)

    def make(self, target):
        return numkv.HeadCompressor(self.config, target=target)

    def fill(self, cache, on, n=TOKENS, salt=0):
        cache.extend(*(on.to(np.ascontiguousarray(rows(n, DIM, salt + i)[:, 0])) for i in (0, 1)))

    def content(self, cache, on):
        arrays = [cache.attend(on.to(rows(1, DIM)[0, 0])), *cache.key_codes, *cache.value_codes]
        return [on.host(x) for x in arrays]

    def told(self, name):
        return 1 if name == "num_kv_heads" else super().told(name)


class OfMultiHeadCompressor(OfHeadCompressor):
    def make(self, target):
        return numkv.MultiHeadCompressor(HEADS, self.config, target=target)

    def fill(self, cache, on, n=TOKENS, salt=0):
        cache.extend(*(on.to(rows(n, DIM, salt + i)) for i in (0, 1)))

    def content(self, cache, on):
        arrays = [cache.attend(on.to(rows(1, DIM)[0])), *cache.key_codes, *cache.value_codes]
        return [on.host(x) for x in arrays]

    def told(self, name):
        return Case.told(self, name)


class OfPagedCompressor(OfMultiHeadCompressor):
    """One sequence of it."""

    def make(self, target):
        return numkv.PagedCompressor(HEADS, self.config, target=target)

    def fill(self, cache, on, n=TOKENS, salt=0):
        if not len(cache):
            cache.add()
        cache.extend(cache.sequences, *(on.to(rows(n, DIM, salt + i)) for i in (0, 1)), n)

    def count(self, cache):
        return sum(map(cache.length, cache.sequences))

    def content(self, cache, on):
        arrays = []
        for seq in cache.sequences:
            arrays += [cache.attend([seq], on.to(rows(1, DIM)))]
            arrays += [*cache.key_codes(seq), *cache.value_codes(seq)]
        return [on.host(x) for x in arrays]


CASES = {
    "ContiguousLayer": OfContiguousLayer(),
    "PagedLayer": OfPagedLayer(),
    "PagedPool": OfPagedPool(),
    "KVCache": OfKVCache(),
    "PagedKVCache": OfPagedKVCache(),
    "CausalCache": OfCells(),
    "CausalCache window": OfCells(window_left=4),
    "CausalCache chunks": OfCells(chunk_size=4),
    "EncoderCache": OfEncoder(),
    "WrapperCache": OfWrapper(),
    "HeadCompressor": OfHeadCompressor(),
    "MultiHeadCompressor": OfMultiHeadCompressor(),
    "PagedCompressor": OfPagedCompressor(),
}
MULTI = ["CausalCache", "EncoderCache", "WrapperCache"]
ATTRIBUTES = ["kind", "v_kind", "num_kv_heads", "head_dim", "head_dim_v"]
#: What a cache of many sequences has once it is made.
OF_MULTI = ["layers", "target", "nbytes", "sequences"]


@pytest.fixture(params=CASES)
def case(request, target, to, host):
    found = copy.copy(CASES[request.param])
    found.name, found.target, found.to, found.host = request.param, target, to, host
    return found


@pytest.fixture
def cache(case):
    made = case.make(case.target)
    case.fill(made, case)
    return made


def bits(arrays):
    return [(x.shape, x.dtype, x.tobytes()) for x in arrays]


def seen(case, cache):
    return bits(case.content(cache, case))


def test_every_class_is_in_the_table():
    """The public classes that hold K and V, by what they can."""
    classes = {name: getattr(numkv, name) for name in numkv.__all__}
    holding = {
        name for name, cls in classes.items() if isinstance(cls, type) and hasattr(cls, "nbytes")
    }
    assert holding - {"SwappedSequence"} == {name.split()[0] for name in CASES}


def test_attributes(case, cache):
    for name in ATTRIBUTES:
        got = getattr(cache if isinstance(cache, COMPRESSORS) else described(cache), name)
        assert (str(got) if "kind" in name else got) == case.told(name), name
    assert cache.target == case.target
    assert cache.nbytes > 0


def test_check_finds_nothing(case, cache):
    cache.check()


def test_repr_says_what_it_is(case, cache):
    text = repr(cache)
    assert text.startswith(f"{case.name.split()[0]}(")
    for part in ("int8" if case.kind == "int8" else "codes4", case.target):
        assert part in text


def test_the_copy_module_makes_copies(case, cache):
    before = seen(case, cache)
    for make in (copy.copy, copy.deepcopy):
        other = make(cache)
        assert seen(case, other) == before
        case.fill(other, case, salt=5)
        assert seen(case, cache) == before


def test_a_copy_is_equal_and_independent(case, cache):
    before = seen(case, cache)
    other = cache.copy()
    assert type(other) is type(cache)
    assert seen(case, other) == before
    other.check()
    case.fill(other, case, salt=5)
    assert case.count(other) == 2 * case.count(cache)
    changed = seen(case, other)
    assert changed != before
    assert seen(case, cache) == before
    case.fill(cache, case, salt=9)
    assert seen(case, other) == changed
    other.check()
    cache.check()


def test_clear_empties_and_keeps_memory(case, cache):
    fresh, size = case.count(cache), cache.nbytes
    before = seen(case, cache)
    case.clear(cache)
    assert (case.count(cache), cache.nbytes) == (0, size)
    cache.check()
    case.fill(cache, case)
    assert case.count(cache) == fresh
    assert seen(case, cache) == before
    assert cache.nbytes == size


def test_pickle(case, cache):
    """On the CPU; elsewhere the error says why not."""
    if case.target != "cpu":
        with pytest.raises(numkv.NumkvError, match="CPU"):
            pickle.dumps(cache)
        return
    before, count = seen(case, cache), case.count(cache)
    other = sent(cache)
    assert seen(case, other) == before
    other.check()
    case.fill(other, case, salt=5)
    case.clear(cache)
    assert case.count(other) == 2 * count


@pytest.mark.parametrize("name", MULTI)
def test_before_init_and_after_close(target, name):
    cache = type(CASES[name].make(target))
    args = (numkv.CausalCache(),) if name == "WrapperCache" else ()
    new, closed = cache(*args), CASES[name].make(target)
    closed.close()
    for made, match in ((new, "init"), (closed, "close")):
        for attribute in OF_MULTI:
            with pytest.raises(numkv.NumkvError, match=match):
                getattr(made, attribute)
        for call in (made.copy, made.clear, made.check, lambda made=made: made.positions(0)):
            with pytest.raises(numkv.NumkvError, match=match):
                call()
        assert name in repr(made)


@pytest.mark.parametrize("name", MULTI[:2])
def test_dims_before_a_put(target, name):
    cache = CASES[name].make(target)
    assert cache.layers == {}
    assert cache.nbytes == 0
    assert cache.sequences == []


def test_dims_of_layers_that_differ(target, to):
    cache = numkv.CausalCache()
    cache.init("fp32", 1, 8, 4, target)
    cache.start_forward(numkv.Batch([0], [0]))
    cache.put(0, to(rows(1, 4)), to(rows(1, 6)))
    cache.put(7, to(rows(1, 2)), to(rows(1, 6)))
    specs = {
        layer: numkv.LayerSpec(HEADS, dim, head_dim_v=6, kind="fp32")
        for layer, dim in ((0, 4), (7, 2))
    }
    assert cache.layers == specs


# ---------------------------------------------------------------- each method, on kernels as on the reference


def projected(case, n):
    return case.to(rows(n, (4 + HEADS) * DIM + HEADS * DIM_V)[:, 0].copy())


def bound(cache, case, *step, layer=()):
    """A token by a bound call."""
    made = cache.bind(4, "fp32")
    q = case.to(np.random.default_rng(4).standard_normal((1, 4, DIM), F32))
    return (
        made(q, *case.kv(case, 1, 7))
        if not layer
        else made.begin(*step)(*layer, q, *case.kv(case, 1, 7))
    )


def stepped(call, n=1):
    """A call of a step of one sequence, whose layers have been written."""

    def of_cache(c, case):
        step = c.reserve([c.sequences[0]], [n])
        for layer in range(2):
            step.append(layer, *case.kv(case, n, 3 + layer))
        return call(c, step, case)

    return of_cache


def swapped(c, case):
    (seq,) = c.sequences
    kept = c.swap_out(seq)  # where it stays as well
    c.remove(seq)
    c.swap_in(kept)


def written_by_step(c, case):
    step = c.reserve([c.sequences[0]], [2])
    q = step.write(0, projected(case, 2), num_q_heads=4, qk_mode=0)
    return [q, step.attention(0, q)]


def q_of(case, n=1):
    return case.to(np.random.default_rng(n).standard_normal((n, 4, DIM), F32))


OF_LAYER = {
    "attention_weights": lambda c, case: c.attention_weights(q_of(case)),
    "bind": bound,
    "compact": lambda c, case: c.compact([0, 2]),
    "truncate": lambda c, case: c.truncate(2),
    "write": lambda c, case: c.write(projected(case, 2), num_q_heads=4, qk_mode=0),
}
OF_CELLS = {
    "attention_weights": lambda c, case: c.attention_weights(0, case.to(rows(TOKENS, DIM))),
    "compact": lambda c, case: c.compact(0, [0, 1]),
    "copy_prefix": lambda c, case: c.copy_prefix(0, 1, 2),
    "remove": lambda c, case: c.remove(0, 2),
}
OF_COMPRESSOR = {
    "attention_scores": lambda c, case: c.attention_scores(case.to(rows(1, DIM)[0])),
    "decode_keys": lambda c, case: c.decode_keys(),
    "decode_values": lambda c, case: c.decode_values(),
    "truncate": lambda c, case: c.truncate(2),
}
#: What each class has beside what `Case.fill` and `Case.content` call.
EACH_METHOD = {
    "ContiguousLayer": OF_LAYER,
    "PagedLayer": OF_LAYER,
    "PagedPool": {},
    "KVCache": {
        "attention_weights": lambda c, case: c.attention_weights(0, q_of(case)),
        "bind": lambda c, case: bound(c, case, layer=(0,)),
        "compact": lambda c, case: c.compact([0, 2]),
        "truncate": lambda c, case: c.truncate(2),
        "k": lambda c, case: [c.k(0), c.v(1)],
    },
    "PagedKVCache": {
        "attention_weights": lambda c, case: c.attention_weights(0, c.sequences[0], q_of(case)),
        "bind": lambda c, case: bound(c, case, c.reserve([c.sequences[0]], [1]), layer=(0,)),
        "commit": stepped(lambda c, step, case: c.commit(step)),
        "compact": lambda c, case: c.compact(c.sequences[0], [0, 2]),
        "fork": lambda c, case: c.remove(c.fork(c.sequences[0])),
        "swap_in": swapped,
        "Step.attention": stepped(lambda c, step, case: step.attention(0, q_of(case))),
        "Step.attention_weights": stepped(lambda c, step, case: step.attention_weights(0, q_of(case))),
        "Step.attention, of more": stepped(lambda c, step, case: step.attention(1, q_of(case, 2)), n=2),
        "Step.write": written_by_step,
    },
    **dict.fromkeys(["CausalCache", "CausalCache window", "CausalCache chunks", "WrapperCache"], OF_CELLS),
    "EncoderCache": {"get": lambda c, case: c.get(0)},
    "HeadCompressor": OF_COMPRESSOR
    | {
        "attention_scores": lambda c, case: c.attention_scores(case.to(rows(1, DIM)[0, 0])),
        "evict_outside_window": lambda c, case: c.evict_outside_window(2),
        "push": lambda c, case: c.push(*(case.to(rows(1, DIM, salt)[0, 0]) for salt in (7, 8))),
    },
    "MultiHeadCompressor": OF_COMPRESSOR
    | {
        "evict_outside_window": lambda c, case: c.evict_outside_window(2),
        "push_token": lambda c, case: c.push_token(*(case.to(rows(1, DIM, salt)[0]) for salt in (7, 8))),
    },
    "PagedCompressor": {
        "attention_scores": lambda c, case: c.attention_scores(c.sequences[0], case.to(rows(1, DIM))),
        "decode_keys": lambda c, case: c.decode_keys(c.sequences[0]),
        "decode_values": lambda c, case: c.decode_values(c.sequences[0]),
        "fork": lambda c, case: c.truncate(c.fork(c.sequences[0]), 1),
        "truncate": lambda c, case: c.truncate(c.sequences[0], 2),
    },
}  # fmt: skip
#: What has no call there: `fill`, `content` or the tests above call it, no kernel has a part in it, or it has tests of
#: its own.
NOT_HERE = {
    "lookup",  # asks a store: tests/store/test_network.py
    "key_error",  # reads scales alone: test_key_error.py
    *("add", "append", "put", "extend", "start_forward", "reserve", "advance", "decode_attention", "attend", "get"),
    *("copy", "clear", "check", "close", "init", "arrays", "positions", "key_codes", "value_codes", "length", "v"),
    *("block_table", "cached_len", "can_resume", "pin", "unpin", "remove", "rollback", "stats", "free"),
    *("take_blocks", "like", "quantised_tokens", "set_config", "set_causal", "set_layer_type", "truncate"),
    *("k_codes", "v_codes", "k_scales", "v_scales", "swap_out"),
    *("set_scales", "write_latents", "step_buffers"),  # test_set_scales.py, test_latents.py, test_step_buffers.py
}  # fmt: skip
#: Of encoders' rows, which stay or go together.
REFUSED = {"EncoderCache": {"attention_weights", "compact", "copy_prefix"}}


def test_each_method_has_a_call():
    assert EACH_METHOD.keys() == CASES.keys()
    for name, calls in EACH_METHOD.items():
        cls = getattr(numkv, name.split()[0])
        public = {
            method
            for method in dir(cls)
            if not method.startswith("_")
            and inspect.isfunction(inspect.getattr_static(cls, method))
        }
        assert not public - calls.keys() - NOT_HERE - REFUSED.get(name, set()), name


def floats_in(case, x):
    """Arrays of floats in what a call gives."""
    if isinstance(x, (list, tuple)):
        return [y for part in x for y in floats_in(case, part)]
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        return []
    x = case.host(x)
    return [x] if x.dtype.kind == "f" else []


@pytest.mark.kernels
def test_each_method_does_on_kernels_what_it_does_on_the_reference(case):
    for call in EACH_METHOD[case.name].values():
        found = []
        for on_reference in (False, True):
            with reference.standing_in(on_reference):
                cache = case.make(case.target)
                case.fill(cache, case)
                result = call(cache, case)
                found.append(floats_in(case, [result, case.content(cache, case)]))
        assert found[0]
        for got, want in zip(*found, strict=True):
            np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02)
