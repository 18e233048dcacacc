"""`PagedKVCache` against a dictionary: any calls in any order, and every sequence attends as if it were alone.

K and V of a token are random numbers that depend on the layer, on the sequence's extra key and on all tokens up to it,
so that a block that is shared by mistake, written twice or given away too early shows in some sequence's attention.
"""

import functools
import zlib
from typing import NamedTuple

import naive
import numpy as np
import pytest
import tolerances
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from layer_lists import paged_kv_cache
from profiles import machine

import numkv
from numkv import targets

HEADS, Q_HEADS, DIM = 2, 4, 8


class Kept(NamedTuple):
    """A token that stands where it did not when it was written: it goes by all tokens that were before it then."""

    prefix: tuple


@functools.lru_cache(maxsize=65536)
def row(layer: int, extra: int | None, prefix: tuple[int, ...]) -> np.ndarray:
    """K and V of the last of some tokens; one that was compacted is what it was."""
    if isinstance(prefix[-1], Kept):
        return row(layer, extra, prefix[-1].prefix)
    seed = zlib.crc32(repr((layer, extra, prefix)).encode())
    return np.random.default_rng(seed).standard_normal((2, HEADS, DIM), np.float32)


def rows(layer: int, extra: int | None, tokens: list[int], begin: int) -> np.ndarray:
    """``(2, n, heads, dim)``: K and V of the tokens from `begin` on."""
    found = [row(layer, extra, tuple(tokens[: i + 1])) for i in range(begin, len(tokens))]
    return np.stack(found, 1) if found else np.empty((2, 0, HEADS, DIM), np.float32)


def queries(n: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal((n, Q_HEADS, DIM), np.float32)


@functools.lru_cache(maxsize=16384)
def attended(kind, window, layer, extra, tokens, total, begin, end) -> np.ndarray:
    """What the last tokens of a sequence get, whose queries are those from `begin` to `end` of `total`.

    Most calls leave most sequences as they are, so the oracle need not be asked again.
    """
    q = queries(total)[begin:end]
    if not tokens:
        return np.zeros(q.shape)
    x = rows(layer, extra, tokens, 0)
    if kind == "int8":
        x = naive.int8_dequantise(*naive.int8_quantise(x))
    k, v = x.astype(np.float64).transpose(0, 2, 1, 3)[:, None]
    return naive.attention(q, k, v, [len(tokens)], [0, end - begin], window_left=window)[0]


class Sequence:
    """All that the model knows of a sequence."""

    def __init__(self, tokens, extra):
        self.tokens, self.extra = list(tokens), extra
        self.named = len(self.tokens)  # how many of the first tokens' ids the cache has been told
        self.pins = 0
        self.there = {}  # first token that the layers of a window still have the rows of


class CacheModel(RuleBasedStateMachine):
    """A cache does what a dictionary of token lists does, or nothing at all."""

    kind, target = "fp32", "cpu"
    windows = ((-1, 5, -1, 5), (-1, -1, -1, -1), (3, -1, 0, -1), (2, 2, 2, 2))

    @initialize(
        data=st.data(),
        size=st.sampled_from([1, 2, 4]),
        room=st.sampled_from([16, 40, 120]),
    )
    def begin(self, data, size, room):
        """`room`: tokens that there are blocks for, in all layers together."""
        self.layers = data.draw(st.sampled_from(self.windows))
        make = functools.partial(
            paged_kv_cache, len(self.layers), HEADS, DIM, block_size=size, kind=self.kind,
            target=self.target, windows=self.layers,
        )  # fmt: skip
        self.cache = make(num_blocks=room // size * make(num_blocks=0).num_groups)
        self.to = targets.get(self.target).asarray
        self.host = targets.get(self.target).to_host
        self.known: dict[int, Sequence] = {}
        self.history: list[tuple[list[int], int | None]] = []  # of all sequences that ever were
        self.open = None  # a step, and the tokens that it adds to each sequence
        self.orphans: list[np.ndarray] = []  # pins of sequences that were removed
        # Nothing of a fresh pool may be read before it is written.
        for pool in self.cache._pools:
            if not pool.k_kind.has_scales:
                pool.k[:] = 0xFF if pool.k.dtype.kind == "u" else np.nan
                pool.v[:] = 0xFF if pool.v.dtype.kind == "u" else np.nan

    # -- what there is

    def snapshot(self):
        """Everything that a refused call has to leave alone."""
        cache = self.cache
        states = [
            (seq, s.length, [t.tolist() for t in s.tables], s.tokens.tolist(), s.registered,
             s.reserved, s.cached, [d.tobytes() for d in s.digests], len(s.pins), s.starts[:])
            for seq, s in cache._sequences.items()
        ]  # fmt: skip
        pool = cache.blocks
        books = [x.tobytes() for x in (pool._state, pool._digests, pool._tokens, pool._table)]
        buffers = [x.tobytes() for p in cache._pools for x in map(p.target.to_host, p.arrays())]
        return states, books, buffers, cache.stats(), cache._next

    def refused(self, error, call, *args, **options):
        before = self.snapshot()
        with pytest.raises(error):
            call(*args, **options)
        assert self.snapshot() == before

    def idle(self):
        stepping = self.open[1] if self.open else {}
        return [s for s in self.known if s not in stepping]

    def one(self, data):
        return data.draw(st.sampled_from(self.idle()))

    def expect(self, layer, sequence, tokens, total, begin, end):
        window, tokens = self.layers[layer], tuple(tokens)
        return attended(self.kind, window, layer, sequence.extra, tokens, total, begin, end)

    def close(self, actual, expected):
        tolerances.assert_rows_close(
            self.host(actual), expected, tolerances.attention(self.kind, "fp32")
        )

    # -- rules

    def start(self, new):
        """Reserve and write; None if there is no room, and then nothing has happened."""
        cache = self.cache
        seqs, lens = list(new), [len(t) for t in new.values()]
        before = self.snapshot()
        try:
            step = cache.reserve(seqs, lens)
        except numkv.CacheFull:
            assert self.snapshot() == before
            size = cache.block_size
            most = sum(
                1 + -(-(len(self.known[s].tokens) + len(t)) // size)
                - -(-len(self.known[s].tokens) // size)
                for s, t in new.items()
            )  # fmt: skip
            assert cache.num_free < most * cache.num_groups
            return None
        for layer in range(cache.num_layers):
            parts = [
                rows(
                    layer, self.known[s].extra, self.known[s].tokens + t, len(self.known[s].tokens)
                )
                for s, t in new.items()
            ]
            k, v = (self.to(np.ascontiguousarray(x)) for x in np.concatenate(parts, 1))
            step.append(layer, k, v)
        return step

    def finish(self, step, new, accepted, named):
        """Attend with a step's queries, and commit it."""
        cache = self.cache
        total = sum(map(len, new.values()))
        q = queries(total)
        for layer in range(cache.num_layers):
            out = self.host(step.attention(layer, self.to(q)))
            at = 0
            for s, tokens in new.items():
                n, known = len(tokens), self.known[s]
                want = self.expect(layer, known, known.tokens + tokens, total, at, at + n)
                tolerances.assert_rows_close(
                    out[at : at + n], want, tolerances.attention(self.kind, "fp32")
                )
                at += n
        ids = [t for tokens in new.values() for t in tokens] if named else None
        if accepted == 0:
            cache.rollback(step)
        else:
            keep = [len(t) if accepted is None else min(len(t), accepted) for t in new.values()]
            cache.commit(step, None if accepted is None else keep, token_ids=ids)
            for (s, tokens), n in zip(new.items(), keep, strict=True):
                known = self.known[s]
                if named and known.named == len(known.tokens):
                    known.named += n
                known.tokens += tokens[:n]
                self.slide(known)
                kept = [i for i, t in enumerate(known.tokens) if isinstance(t, Kept)]
                self.history.append((known.tokens[: min(kept, default=None)], known.extra))
        self.refused(numkv.NumkvError, cache.commit, step)
        self.refused(numkv.NumkvError, step.attention, 0, self.to(q))

    @rule(data=st.data(), tail=st.lists(st.integers(0, 2), min_size=1, max_size=9))
    def add(self, data, tail):
        """A prompt that mostly begins as one that has been there, and its prefill."""
        extra, prompt = data.draw(st.sampled_from([None, None, 7])), []
        if self.history and data.draw(st.booleans()):
            tokens, extra = data.draw(st.sampled_from(self.history))
            prompt = tokens[: data.draw(st.integers(0, len(tokens)))]
        prompt = prompt + tail
        cache = self.cache
        seq = cache.add(prompt, extra=None if extra is None else {"adapter": extra})
        cached = cache.cached_len(seq)
        assert cached == cache.length(seq) <= len(prompt) - 1
        self.known[seq] = Sequence(prompt[:cached], extra)
        self.slide(self.known[seq])
        new = {seq: prompt[cached:]}
        step = self.start(new)
        if step is None:
            cache.remove(seq)
            del self.known[seq]
        else:
            self.finish(step, new, None, data.draw(st.sampled_from([True, True, False])))

    @precondition(lambda self: self.known and not self.open)
    @rule(
        data=st.data(),
        accepted=st.sampled_from([None, None, None, 0, 1, 2]),
        named=st.sampled_from([True, True, True, False]),
        later=st.booleans(),
    )
    def step(self, data, accepted, named, later):
        """Some tokens for some sequences; other calls may come before the commit."""
        seqs = data.draw(st.lists(st.sampled_from(list(self.known)), unique=True, min_size=1))
        new = {s: data.draw(st.lists(st.integers(0, 2), max_size=5)) for s in seqs}
        step = self.start(new)
        if step is None:
            return
        if later:
            self.open = (step, new, accepted, named)
        else:
            self.finish(step, new, accepted, named)

    @precondition(lambda self: self.open)
    @rule()
    def commit(self):
        step, new, accepted, named = self.open
        for s in new:
            for call in (self.cache.fork, self.cache.remove, self.cache.swap_out):
                self.refused(numkv.NumkvError, call, s)
            self.refused(numkv.NumkvError, self.cache.truncate, s, 0)
            self.refused(numkv.NumkvError, self.cache.compact, s, [])
            self.refused(numkv.NumkvError, self.cache.reserve, [s], [1])
        self.finish(step, new, accepted, named)
        self.open = None

    @precondition(lambda self: self.known and not self.open)
    @rule(named=st.booleans())
    def decode(self, named):
        """A token for every sequence, in one batch."""
        new = {s: [len(k.tokens) % 3] for s, k in self.known.items()}
        step = self.start(new)
        if step is not None:
            self.finish(step, new, None, named)

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def fork(self, data):
        old = self.one(data)
        self.copied(self.known[old], self.cache.fork(old))

    @precondition(lambda self: self.idle() and not self.open)
    @rule(data=st.data(), first=st.booleans(), tokens=st.lists(st.integers(0, 2), min_size=1))
    def diverge(self, data, first, tokens):
        """A fork, and one of the two goes on at once."""
        old = self.one(data)
        new = self.cache.fork(old)
        self.copied(self.known[old], new)
        new = {(old if first else new): tokens[:5]}
        step = self.start(new)
        if step is not None:
            self.finish(step, new, None, named=True)

    def copied(self, known, seq):
        self.known[seq] = Sequence(known.tokens, known.extra)
        self.known[seq].named, self.known[seq].there = known.named, known.there.copy()

    def first_seen(self, window, length):
        """The first token that the newest of some tokens sees."""
        return max(0, length - 1 - window)

    def slide(self, known):
        """Windows let go of the blocks behind them."""
        size, length = self.cache.block_size, len(known.tokens)
        for window in {w for w in self.layers if w >= 0}:
            begin = self.first_seen(window, length) // size * size
            known.there[window] = min(length, max(known.there.get(window, 0), begin))

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def truncate(self, data):
        seq = self.one(data)
        known = self.known[seq]
        length = data.draw(st.integers(0, len(known.tokens)))
        gone = any(self.first_seen(w, length) < there for w, there in known.there.items())
        if length and gone:
            self.refused(numkv.NotSupported, self.cache.truncate, seq, length)
            return
        self.cache.truncate(seq, length)
        known.tokens = known.tokens[:length]
        known.named = min(known.named, length)
        self.slide(known)

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), few=st.booleans())
    def compact(self, data, few):
        """Some tokens of a sequence; a few of the first and of the last, or any."""
        seq = self.one(data)
        known = self.known[seq]
        n = len(known.tokens)
        if few:
            ends = data.draw(st.integers(0, n)), data.draw(st.integers(0, n))
            keep = [i for i in range(n) if i < ends[0] or i >= ends[1]]
        else:
            keep = sorted(data.draw(st.sets(st.integers(0, n - 1)))) if n else []
        there = {w: sum(i < t for i in keep) for w, t in known.there.items()}
        if keep and any(self.first_seen(w, len(keep)) < t for w, t in there.items()):
            self.refused(numkv.NotSupported, self.cache.compact, seq, keep)
            return
        before = self.snapshot()
        cache, size = self.cache, self.cache.block_size
        try:
            cache.compact(seq, keep)
        except numkv.CacheFull:
            assert self.snapshot() == before
            assert cache.num_free < -(-len(keep) // size) * cache.num_groups
            return
        stay = next((i for i, j in enumerate(keep) if i != j), None)
        if stay is not None:
            known.named = min(known.named, stay // size * size)
            known.tokens = [
                Kept(tuple(known.tokens[: j + 1])) if i >= known.named else known.tokens[j]
                for i, j in enumerate(keep)
            ]
        else:
            known.tokens = known.tokens[: len(keep)]
            known.named = min(known.named, len(keep))
        known.there = there
        self.slide(known)

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def remove(self, data):
        seq = self.one(data)
        self.orphans += self.cache._sequences[seq].pins
        self.cache.remove(seq)
        del self.known[seq]
        self.refused(IndexError, self.cache.length, seq)

    @precondition(lambda self: self.idle() and len(self.orphans) < 3)
    @rule(data=st.data())
    def pin(self, data):
        seq = self.one(data)
        if self.known[seq].pins < 2:
            self.cache.pin(seq)
            self.known[seq].pins += 1

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def unpin(self, data):
        seq = self.one(data)
        if self.known[seq].pins:
            self.cache.unpin(seq)
            self.known[seq].pins -= 1
        else:
            self.refused(numkv.NumkvError, self.cache.unpin, seq)
        if self.orphans:
            self.cache.blocks.unpin(self.orphans.pop())

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), leave=st.booleans())
    def swap(self, data, leave):
        """Out and in again, with or without the sequence staying in between."""
        seq = self.one(data)
        known, swapped = self.known[seq], self.cache.swap_out(seq)
        if leave and not known.pins:
            self.cache.remove(seq)
            del self.known[seq]
        before = self.snapshot()
        try:
            self.copied(known, self.cache.swap_in(swapped))
        except numkv.CacheFull:
            assert self.snapshot() == before

    # -- after each of them

    @invariant()
    def sound(self):
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        cache.check()
        assert cache.sequences == tuple(self.known)
        assert [cache.length(s) for s in self.known] == [len(k.tokens) for k in self.known.values()]
        for seq, known in self.known.items():
            told = cache._sequences[seq].tokens
            assert told.tolist() == known.tokens[: known.named]
        assert cache.stats().num_tokens == sum(len(k.tokens) for k in self.known.values())

    @invariant()
    def attends(self):
        if not getattr(self, "known", None):
            return
        q = queries(len(self.known))
        for layer in range(self.cache.num_layers):
            out = self.cache.decode_attention(layer, self.known, self.to(q))
            want = [
                self.expect(layer, known, known.tokens, len(q), i, i + 1)[0]
                for i, known in enumerate(self.known.values())
            ]
            self.close(out, np.stack(want))

    def teardown(self):
        """Everything comes back."""
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        if self.open:
            cache.rollback(self.open[0])
        for seq, known in self.known.items():
            for _ in range(known.pins):
                cache.unpin(seq)
            cache.remove(seq)
        for ids in self.orphans:
            cache.blocks.unpin(ids)
        cache.check()
        stats = cache.stats().pool
        assert (stats.used, stats.pinned, stats.free) == (0, 0, cache.num_blocks)
        assert len(cache.blocks.allocate(cache.num_blocks)) == cache.num_blocks


class Int8Model(CacheModel):
    kind = "int8"


class CudaModel(CacheModel):
    target = "cuda"
    windows = ((-1, 2),)


TestCache = machine(CacheModel)
TestInt8Cache = machine(Int8Model, share=0.6)
TestCudaCache = machine(CudaModel, share=0.3)
