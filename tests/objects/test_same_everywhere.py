"""What every cache has, whatever it is: the same attributes, copies, `clear`, `check`, `repr` and pickles."""

import copy
import pickle

import numpy as np
import pytest

import numkv

pytestmark = pytest.mark.kernels

F32 = np.float32
HEADS, DIM, DIM_V = 2, 8, 6
TOKENS = 3


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
        return cache.num_blocks - cache.num_free

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
        return numkv.PagedKVCache(
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
    def __init__(self, cls, *args):
        self.cls, self.args = cls, args

    def make(self, target):
        cache = self.cls(*self.args)
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
        super().__init__(None)

    def make(self, target):
        children = numkv.SlidingWindowCache(4), numkv.CausalCache()
        cache = numkv.WrapperCache(*children, layer_types=[0, 1])
        cache.init("int8", 2, 16, 8, target)
        return cache

    def count(self, cache):
        return len(cache.positions(0)[1])

    def told(self, name):
        return (super().told(name),) * 2


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
    "CausalCache": OfCells(numkv.CausalCache),
    "SlidingWindowCache": OfCells(numkv.SlidingWindowCache, 4),
    "ChunkedCache": OfCells(numkv.ChunkedCache, 4),
    "EncoderCache": OfEncoder(),
    "WrapperCache": OfWrapper(),
    "HeadCompressor": OfHeadCompressor(),
    "MultiHeadCompressor": OfMultiHeadCompressor(),
    "PagedCompressor": OfPagedCompressor(),
}
MULTI = ["CausalCache", "SlidingWindowCache", "ChunkedCache", "EncoderCache", "WrapperCache"]
ATTRIBUTES = ["kind", "v_kind", "target", "num_kv_heads", "head_dim", "head_dim_v", "nbytes"]


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
    assert holding - {"SwappedSequence"} == CASES.keys()


def test_attributes(case, cache):
    for name in ATTRIBUTES[:-1]:
        got, want = getattr(cache, name), case.told(name)
        if "kind" in name:
            got = tuple(map(str, got)) if isinstance(want, tuple) else str(got)
        assert got == want, name
    sizes = cache.nbytes if isinstance(cache.nbytes, tuple) else (cache.nbytes,)
    assert all(n > 0 for n in sizes)


def test_check_finds_nothing(case, cache):
    cache.check()


def test_repr_says_what_it_is(case, cache):
    text = repr(cache)
    assert text.startswith(f"{case.name}(")
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
    other = pickle.loads(pickle.dumps(cache))
    assert seen(case, other) == before
    other.check()
    case.fill(other, case, salt=5)
    case.clear(cache)
    assert case.count(other) == 2 * count


@pytest.mark.parametrize("name", MULTI)
def test_before_init_and_after_close(target, name):
    cache = type(CASES[name].make(target))
    args = {
        "SlidingWindowCache": (4,),
        "ChunkedCache": (4,),
        "WrapperCache": (numkv.CausalCache(),),
    }
    new, closed = cache(*args.get(name, ())), CASES[name].make(target)
    closed.close()
    for made, match in ((new, "init"), (closed, "close")):
        for attribute in [*ATTRIBUTES, "sequences", "generation", "rotate"]:
            with pytest.raises(numkv.NumkvError, match=match):
                getattr(made, attribute)
        for call in (made.copy, made.clear, made.check, lambda made=made: made.positions(0)):
            with pytest.raises(numkv.NumkvError, match=match):
                call()
        assert name in repr(made)


@pytest.mark.parametrize("name", MULTI[:4])
def test_dims_before_a_put(target, name):
    cache = CASES[name].make(target)
    for attribute in ("num_kv_heads", "head_dim", "head_dim_v"):
        with pytest.raises(numkv.NumkvError, match="first put"):
            getattr(cache, attribute)
    assert cache.nbytes == 0
    assert cache.sequences == []


def test_dims_of_layers_that_differ(target, to):
    cache = numkv.CausalCache()
    cache.init("fp32", 1, 8, 4, target)
    cache.start_forward(numkv.Batch([0], [0]))
    cache.put(0, to(rows(1, 4)), to(rows(1, 6)))
    cache.put(7, to(rows(1, 2)), to(rows(1, 6)))
    assert (cache.num_kv_heads, cache.head_dim, cache.head_dim_v) == (HEADS, {0: 4, 7: 2}, 6)
