"""First tokens that a `CausalCache` with a window neither evicts nor hides."""

import copy
import pickle

import naive
import numpy as np
import pytest
import tolerances

import numkv

HEADS, DIM, SINKS, WINDOW = 2, 8, 3, 4
F32 = np.float32


def make(target="cpu", kind="fp32", *, memory=None, capacity=64, max_sequences=2, **options):
    cache = numkv.CausalCache(window_left=WINDOW, memory=memory, num_sink_tokens=SINKS, **options)
    cache.init(kind, max_sequences=max_sequences, capacity=capacity, max_batch=8, target=target)
    return cache


class Plain:
    """Rows by sequence and position, and what is evicted."""

    def __init__(self, memory=WINDOW + 1, kind="fp32"):  # of several sequences one more is kept
        self.memory, self.kind, self.rows, self.rng = memory, kind, {}, np.random.default_rng(1)

    def batch(self, positions, sequences):
        oldest = {}
        for p, s in zip(positions, sequences, strict=True):
            oldest[s] = min(p, oldest.get(s, p))
        for s, own in self.rows.items():
            first = oldest.get(s, max(own, default=-1) + 1) - self.memory
            self.rows[s] = {p: x for p, x in own.items() if p < SINKS or p >= first}
        new = self.rng.standard_normal((2, len(positions), HEADS, DIM), F32)
        for i, (p, s) in enumerate(zip(positions, sequences, strict=True)):
            self.rows.setdefault(s, {})[p] = new[:, i]
        return new

    def seen(self, seq, position):
        own = self.rows[seq]
        return [p for p in sorted(own) if p <= position and (p < SINKS or p >= position - WINDOW)]

    def attended(self, seq, position, q):
        x = np.stack([self.rows[seq][p] for p in self.seen(seq, position)])
        if self.kind in naive.CODES:
            x = naive.dequantise(*naive.quantise(x, self.kind))
        k, v = (x[:, i].swapaxes(0, 1)[None] for i in (0, 1))
        return naive.attention(q[None], k, v, [len(x)])[0][0]


def step(cache, plain, positions, sequences, to=np.asarray, host=np.asarray):
    """One batch: every token attends as it should, by attention and by what `get` shows."""
    new = plain.batch(positions, sequences)
    cache.start_forward(numkv.Batch(positions, sequences))
    cache.put(0, *(to(np.ascontiguousarray(x)) for x in new))
    q = np.random.default_rng(len(positions)).standard_normal((len(positions), 2 * HEADS, DIM), F32)
    out, lse = (host(x) for x in cache.decode_attention(0, to(q), return_lse=True))
    mask = host(cache.get(0)[2])
    for i, (p, s) in enumerate(zip(positions, sequences, strict=True)):
        want = plain.attended(s, p, q[i])
        tolerances.assert_rows_close(out[i], want, tolerances.attention(plain.kind, "fp32"))
        assert (mask[i] == 0).sum() == len(plain.seen(s, p))
    if plain.kind == "fp32":
        k, v, _ = (host(x) for x in cache.get(0))
        for i in range(len(positions)):
            shown = mask[i] == 0
            of = (x[shown].swapaxes(0, 1)[None] for x in (k, v))
            got = naive.attention(q[i][None], *of, [shown.sum()])[0][0]
            tolerances.assert_rows_close(out[i], got, 1e-5)
    for s, own in plain.rows.items():
        assert cache.positions(s).tolist() == sorted(own)
    cache.check()
    return q, out, lse


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_a_prompt_and_what_follows(target, to, host, kind):
    """Two sequences of which one runs ahead; the window slides past the first tokens."""
    cache, plain = make(target, kind), Plain(kind=kind)
    step(cache, plain, [*range(7), 0], [0] * 7 + [1], to, host)
    step(cache, plain, [7, 8, 1, 2], [0, 0, 1, 1], to, host)
    for p in range(9, 12):
        step(cache, plain, [p], [0], to, host)
    assert cache.positions(0).tolist() == [0, 1, 2, *range(6, 12)]


@pytest.mark.parametrize("memory", [None, 6])
def test_any_batches(memory):
    rng = np.random.default_rng(2)
    cache, plain = make(memory=memory, max_sequences=3), Plain(memory or WINDOW + 1)
    ends = dict.fromkeys(range(3), 0)
    for turn in range(60):
        chosen = np.sort(rng.integers(0, 3, rng.integers(1, 9))).tolist()
        positions = []
        for s in chosen:
            positions.append(ends[s])
            ends[s] += 1
        step(cache, plain, positions, chosen)
        if turn % 20 == 7:
            cache.copy_prefix(0, 1, 2)
            plain.rows[1] = {p: x for p, x in plain.rows[0].items() if p < 2}
            ends[1] = 2
        if turn % 20 == 13:
            cache.remove(2, 5)
            plain.rows[2] = {p: x for p, x in plain.rows[2].items() if p < 5}
            ends[2] = max(plain.rows[2], default=-1) + 1
            cache = copy.copy(cache)
    assert cache.num_free > 0


def test_a_result_does_not_depend_on_the_batch():
    """In bits: whether another sequence of the batch sees its sinks apart from its window or not."""
    for dtype in (np.float16, F32):
        q = np.random.default_rng(4).standard_normal((2, 2 * HEADS, DIM)).astype(dtype)
        outs = []
        for chosen in ([0, 1], [0], [1]):
            cache, plain = make(memory=6), Plain(6)
            step(cache, plain, list(range(8)), [0] * 8)
            step(cache, plain, [0, 1], [1, 1])
            row = np.ones((len(chosen), HEADS, DIM), F32)
            cache.start_forward(numkv.Batch([[8, 2][s] for s in chosen], chosen))
            cache.put(0, row, row)
            outs.append(cache.decode_attention(0, q[chosen]))
        assert outs[0].tobytes() == outs[1].tobytes() + outs[2].tobytes()


def test_weights_are_those_of_what_is_seen():
    cache, plain = make(memory=12), Plain(12)
    positions = list(range(8))
    step(cache, plain, positions, [0] * 8)
    q = np.random.default_rng(8).standard_normal((8, 2 * HEADS, DIM), F32)
    found = cache.attention_weights(0, q)[0]
    want = np.zeros((HEADS, 8))
    for p in positions:
        seen = plain.seen(0, p)
        k = np.stack([plain.rows[0][x][0] for x in seen]).astype(np.float64)
        for h in range(2 * HEADS):
            scores = np.exp(k[:, h // 2] @ q[p, h].astype(np.float64) / np.sqrt(DIM))
            want[h // 2, seen] += scores / scores.sum()
    assert np.allclose(found, want, atol=1e-5)


def test_positions_within_the_cache_by_a_shift():
    """What is evicted is removed: keys behind it turn back by as many positions."""
    rates = np.array([1.0, 0.3, 0.1, 0.01])
    angles = np.arange(32)[:, None] * rates
    cos, sin = (f(angles).astype(F32) for f in (np.cos, np.sin))
    cache, plain = make(shift=numkv.rope_shift(cos, sin)), Plain()
    for positions in (range(6), range(6, 12), [12]):
        step(cache, plain, list(positions), [0] * len(positions))
    assert cache.positions(0).tolist() == [0, 1, 2, *range(7, 13)]
    cache.remove(0, SINKS, 7)
    assert cache.positions(0).tolist() == list(range(9))
    row = np.ones((1, HEADS, DIM), F32)
    cache.start_forward(numkv.Batch([9], [0]))
    cache.put(0, row, row)
    k, _, mask = cache.get(0)
    shown = k[mask[0] == 0]
    turned = []
    for p, x in sorted(plain.rows[0].items()):
        a, b = x[0, :, :4].astype(np.float64), x[0, :, 4:].astype(np.float64)
        c, s = (f(4 * rates * (p >= SINKS)) for f in (np.cos, np.sin))
        turned.append(np.concatenate([a * c + b * s, b * c - a * s], -1))
    want = [*turned[:3], *turned[5:], row[0]]  # positions 3 and 4, which were 7 and 8, are hidden
    found = {tuple(np.round(x.reshape(-1), 4)) for x in shown}
    assert found == {tuple(np.round(np.asarray(x, F32).reshape(-1), 4)) for x in want}


def test_compaction_counts_what_the_window_has_evicted():
    """Positions agree with those of a cache beside it without a window; what was never there is an error."""
    angles = np.arange(32)[:, None] * np.array([1.0, 0.3, 0.1, 0.01])
    cos, sin = (f(angles).astype(F32) for f in (np.cos, np.sin))
    cache, plain = make(shift=numkv.rope_shift(cos, sin)), Plain()
    for positions in (range(6), range(6, 12), [12]):
        step(cache, plain, list(positions), [0] * len(positions))
    assert cache.positions(0).tolist() == [0, 1, 2, *range(7, 13)]
    for keep in ([0, 13], [0, 2, 5, 20]):
        with pytest.raises(IndexError, match=f"got {keep[-1]}"):
            cache.compact(0, keep)
    cache.compact(0, [0, 2, 5, 6, 8, 12])
    assert cache.positions(0).tolist() == [0, 1, 4, 5]
    cache.copy_prefix(0, 1, 3)
    cache.compact(1, [0, 1, 2])
    assert cache.positions(1).tolist() == [0, 1]
    cache.compact(0, [0, 1, 2, 4, 5])  # position 2 has been 5, which is no sink
    assert cache.positions(0).tolist() == [0, 1, 3, 4]
    cache.check()


def test_copies_pickles_and_files(tmp_path):
    cache, plain = make("cpu", "int8"), Plain(kind="int8")
    step(cache, plain, list(range(8)), [0] * 8)
    step(cache, plain, [8, 9, 0], [0, 0, 1])
    numkv.save(tmp_path / "cache", cache)
    others = [numkv.load(tmp_path / "cache"), copy.copy(cache), pickle.loads(pickle.dumps(cache))]
    assert "num_sink_tokens=3" in repr(cache)
    for other in others:
        assert other.num_sink_tokens == SINKS
        own = copy.deepcopy(plain)
        step(other, own, [10, 1], [0, 1])
        assert other.positions(0).tolist() == [0, 1, 2, *range(5, 11)]
        assert other.can_resume(0, 11)
        assert not other.can_resume(0, 8)


def test_odd_arguments():
    with pytest.raises(numkv.DimensionMismatch, match="num_sink_tokens"):
        numkv.CausalCache(window_left=4, num_sink_tokens=-1)
    with pytest.raises(TypeError, match="num_sink_tokens"):
        numkv.CausalCache(window_left=4, num_sink_tokens=1.5)
    cache = make(capacity=12, max_sequences=1)
    assert cache.num_cells == SINKS + WINDOW + 8
    row = np.ones((8, HEADS, DIM), F32)
    for begin in (0, 8, 16):  # there is room for as many batches as one likes
        cache.start_forward(numkv.Batch(range(begin, begin + 8), [0] * 8))
        cache.put(0, row, row)
    assert cache.positions(0).tolist() == [0, 1, 2, *range(12, 24)]
