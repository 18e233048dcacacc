"""Multi-sequence caches against their oracle: any calls in any order, on every cache, kind and configuration.

Every call goes to both. After each, or only at the end, all cells are compared: which position of which sequences each
holds, told by what tokens at every position see of them, and its rows.
"""

import functools

import naive
import naive_cells
import numpy as np
from cell_problems import Pair, plus, plus_one
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from profiles import machine

import numkv

F32 = np.float32
HEADS, Q_HEADS, DIM, DIM_V = 2, 4, 4, 3
LAYERS = 3
KINDS = [(kind, kind) for kind in (*naive.DTYPES, "int8")] + [("fp32", "int8"), ("int8", "fp16")]
IDS = [0, 1, 2, 10**12]
FAR = 96  # positions stay below


@functools.cache
def tables(rotary):
    return naive.rope_tables(FAR, rotary, base=50.0)


def make_shift(name, target):
    """A shift for numkv and one for the oracle."""
    if name is None:
        return None, None
    if name == "plus":
        return plus(target), plus_one
    rotary, interleaved = name

    def oracle(key, offset):
        return naive_cells.rotate(key, offset, *tables(rotary), interleaved)

    return numkv.rope_shift(*tables(rotary), interleaved=interleaved), oracle


SHIFTS = st.sampled_from([(4, False), (4, True), (2, False), "plus", None])
WINDOWS = st.sampled_from([(0, None), (1, None), (2, None), (1, 3), (3, 4), (0, 2), (-1, None)])


class CacheModel(RuleBasedStateMachine):
    """A cache does what a list of cells does, or nothing at all."""

    target, variants = "cpu", ["causal", "sliding", "chunked", "wrapper"]
    most = 5  # tokens of a batch

    def child(self, variant, data):
        """A cache, and what the oracle must know of it."""
        shift, oracle = make_shift(data.draw(SHIFTS), self.target)
        if variant == "causal":
            return numkv.CausalCache(shift), {"shift": oracle}
        if variant == "chunked":
            chunk = data.draw(st.integers(1, 4))
            return numkv.CausalCache(shift=shift, chunk_size=chunk), {
                "shift": oracle,
                "chunk": chunk,
            }
        window, memory = data.draw(WINDOWS)
        made = numkv.CausalCache(shift=shift, window_left=window, memory=memory)
        return made, {"shift": oracle, "window": window, "memory": memory}

    @initialize(data=st.data())
    def begin(self, data):
        """Draw a cache and its configuration."""
        draw = data.draw
        variant = draw(st.sampled_from(self.variants))
        parts = ["sliding", "causal"] if variant == "wrapper" else [variant]
        children = [self.child(part, data) for part in parts]
        types, options = None, {}
        if variant == "wrapper":
            types, options["switch"] = [0, 1, 0], draw(st.booleans())
            cache = numkv.WrapperCache(
                *(made for made, _ in children),
                layer_types=None if options["switch"] else types,
            )
        else:
            cache = children[0][0]
        config = {
            "padding": draw(st.sampled_from([1, 1, 2, 4])),
            "permuted_v": draw(st.booleans()),
            "mask_dtype": draw(st.sampled_from(list(naive.DTYPES))),
        }
        k_kind, v_kind = draw(st.sampled_from(KINDS))
        sizes = draw(st.integers(1, 3)), draw(st.integers(4, 16)), draw(st.integers(1, self.most))
        cache.set_config(numkv.CacheConfig(**config))
        cache.init("fp32", *sizes, self.target, k_kind=k_kind, v_kind=v_kind)
        padding = config.pop("padding")
        cells = [
            naive_cells.Cells(*sizes, **told, padding=padding, loss=naive_cells.loss(k_kind))
            for _, told in children
        ]
        self.pair = Pair(
            cache, *cells, target=self.target, k_kind=k_kind, v_kind=v_kind, types=types,
            **config, **options,
        )  # fmt: skip
        self.probing = draw(st.booleans())
        for first in (0, 2):  # something to begin with
            if self.pair.start_forward([first, first + 1], [0, 0]):
                for layer in range(LAYERS):
                    self.pair.put(layer, *self.rows(2, first + layer))

    # -- what a call is made of

    def rows(self, n, seed):
        """K and V: small whole numbers, which every float kind can hold and add offsets to."""
        rng = np.random.default_rng(seed)
        return (rng.integers(-8, 9, (n, HEADS, d)).astype(F32) for d in (DIM, DIM_V))

    def tokens(self, data):
        """A batch: mostly what comes next, sometimes any position."""
        n = data.draw(st.integers(1, self.most))
        sequences = data.draw(st.lists(st.sampled_from(IDS[:3]), min_size=n, max_size=n))
        if data.draw(st.booleans()):
            sequences.sort()
        following = {s: max(self.stored(s), default=-1) + 1 for s in IDS}
        positions = []
        for seq in sequences:
            jump = data.draw(st.sampled_from([0] * 12 + [-3, -1, 1, 2, 9]))
            positions.append(min(max(following[seq] + jump, 0), FAR - 1))
            following[seq] = positions[-1] + 1
        return positions, sequences

    def look(self, n):
        """Compare what a pass shows and attends to; keys are large, so queries are small."""
        q = np.random.default_rng(n).standard_normal((n, Q_HEADS, DIM)).astype(F32) / 8
        for layer in range(LAYERS):
            if self.pair.check(layer) is not None:
                self.pair.attends(layer, q)

    # -- rules

    def forward(self, positions, sequences, seed, reserve=False, skip=None):
        """A pass, whose tokens may find no room; a layer may be left out."""
        if not self.pair.start_forward(positions, sequences, reserve):
            return
        for layer in range(LAYERS):
            if layer != skip:
                self.pair.put(layer, *self.rows(len(positions), seed + layer))
        self.look(len(positions))

    @rule(
        data=st.data(),
        reserve=st.sampled_from([False] * 5 + [True]),
        skip=st.sampled_from([None] * 5 + [0, 1]),
        seed=st.integers(0, 99),
    )
    def any_batch(self, data, reserve, skip, seed):
        self.forward(*self.tokens(data), seed, reserve, skip)

    @rule(seq=st.sampled_from(IDS), n=st.integers(1, 5), seed=st.integers(0, 99))
    def prefill(self, seq, n, seed):
        """Several tokens of one sequence."""
        first = max(self.stored(seq), default=-1) + 1
        n = min(n, self.most, FAR - first)
        if n > 0:
            self.forward(list(range(first, first + n)), [seq] * n, seed)

    @rule(seed=st.integers(0, 99))
    def decode(self, seed):
        """A token for each of some sequences."""
        sequences = sorted(self.pair.model.known())[-self.most :]
        positions = [max(self.stored(s)) + 1 for s in sequences]
        if positions and max(positions) < FAR:
            self.forward(positions, sequences, seed)

    @precondition(lambda self: self.pair.passing)
    @rule(data=st.data(), layer=st.integers(0, LAYERS - 1))
    def set_causal(self, data, layer):
        """Some of the batch see what comes after them; of one child only."""
        n = len(self.pair.model.children[0].batch)
        excepted = data.draw(st.lists(st.integers(0, n - 1), max_size=3))
        self.pair.set_causal(layer, excepted)
        self.look(n)

    @precondition(lambda self: self.pair.passing)
    @rule(layer=st.integers(0, LAYERS - 1), seed=st.integers(0, 99))
    def put_again(self, layer, seed):
        """What was put is replaced."""
        n = len(self.pair.model.children[0].batch)
        self.pair.put(layer, *self.rows(n, seed))
        self.look(n)

    def stored(self, seq):
        """Positions of a sequence in any of the caches."""
        return sorted({p for child in self.pair.model.children for p in child.positions_of(seq)})

    def one(self, data):
        """A sequence, mostly one that is there, and a position, mostly one that it has."""
        seq = data.draw(st.sampled_from(sorted(self.pair.model.known()) * 3 + IDS))
        return seq, data.draw(st.sampled_from(self.stored(seq) * 3 + [0, 3]))

    @rule(data=st.data(), by=st.integers(1, 3), more=st.sampled_from([0, 1, 1, 50]))
    def copy_prefix(self, data, by, more):
        src, position = self.one(data)
        dst = IDS[(IDS.index(src) + by) % len(IDS)]
        assert self.pair.change("copy_prefix", src, dst, position + more)

    @rule(data=st.data(), length=st.sampled_from([1, 1, 2, 2, 3, 0, 1000, None]))
    def remove(self, data, length):
        """Something in the middle, or the end, or nothing."""
        seq, begin = self.one(data)
        self.pair.change("remove", seq, begin, None if length is None else begin + length)

    @rule(data=st.data(), share=st.sampled_from([False, False, False, True]))
    def shorten(self, data, share):
        """Something that has a token after it, of a sequence that may have just been copied."""
        long = [s for s in self.pair.model.known() if len(set(self.stored(s))) > 1]
        if not long:
            return
        seq = data.draw(st.sampled_from(sorted(long)))
        stored = self.stored(seq)
        begin = data.draw(st.integers(0, stored[-1] - 1))
        if share:
            self.pair.change("copy_prefix", seq, IDS[IDS.index(seq) - 1], begin)
        self.pair.change("remove", seq, begin, data.draw(st.integers(begin + 1, stored[-1])))

    @rule(which=st.integers(0, 8))
    def refuse(self, which):
        """A bad call changes nothing."""
        cache, refused = self.pair.cache, self.pair.refused
        calls = [
            (IndexError, lambda: cache.remove(-1, 0)),
            (ValueError, lambda: cache.remove(0, 2, 1)),
            (IndexError, lambda: cache.copy_prefix(-1, 0, 1)),
            (IndexError, lambda: cache.copy_prefix(0, -1, 1)),
            (IndexError, lambda: cache.can_resume(-1, 0)),
            (IndexError, lambda: cache.start_forward(numkv.Batch([0], [-1]))),
            (numkv.DimensionMismatch, lambda: cache.start_forward(numkv.Batch([0, 1], [0]))),
        ]
        if which < len(calls):
            error, call = calls[which]
            with refused(error):
                call()
        elif self.pair.passing:
            self.pair.cells(0)
            n = len(self.pair.model.children[0].batch) + 1
            k, v = (self.pair.to(x) for x in self.rows(n, 0))
            with refused(numkv.DimensionMismatch):
                cache.put(0, k, v)

    # -- after each of them

    @invariant()
    def resumes(self):
        if hasattr(self, "pair"):
            for seq in IDS:
                for position in range(20):
                    want = self.pair.model.can_resume(seq, position)
                    assert self.pair.cache.can_resume(seq, position) is want

    @invariant()
    def same_cells(self):
        if hasattr(self, "pair") and self.probing:
            self.pair.probe(self.most)

    def teardown(self):
        if hasattr(self, "pair"):
            self.pair.probe(self.most)
            self.pair.cache.close()


class CausalModel(CacheModel):
    variants = ["causal"]


class SlidingModel(CacheModel):
    variants = ["sliding"]


class ChunkedModel(CacheModel):
    variants = ["chunked"]


class WrapperModel(CacheModel):
    variants = ["wrapper"]


class CudaModel(CacheModel):
    target, most = "cuda", 3


TestCausal = machine(CausalModel)
TestSliding = machine(SlidingModel, share=0.7)
TestChunked = machine(ChunkedModel, share=0.7)
TestWrapper = machine(WrapperModel)
TestCuda = machine(CudaModel, share=0.4)
