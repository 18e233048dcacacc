"""What to keep: functions of lengths and weights, and the tally of weights."""

import naive
import numpy as np
import pytest
import tolerances
from messages import about

import numkv
from numkv.compaction import eviction
from numkv.compaction.eviction import AttentionTally, heavy_hitters, max_pool

F32 = np.float32


@pytest.mark.parametrize(
    ("length", "first", "recent", "keep"),
    [
        (10, 2, 3, [0, 1, 7, 8, 9]),
        (5, 2, 3, [0, 1, 2, 3, 4]),
        (4, 2, 3, [0, 1, 2, 3]),
        (1, 2, 3, [0]),
        (0, 2, 3, []),
        (6, 0, 2, [4, 5]),
        (6, 2, 0, [0, 1]),
        (6, 0, 0, []),
        (6, 9, 0, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_first_and_recent(length, first, recent, keep):
    got = eviction.first_and_recent(length, first, recent)
    assert got.dtype == np.int64
    assert got.tolist() == keep


@pytest.mark.parametrize("bad", [(-1, 0, 0), (3, -1, 0), (3, 0, -1)])
def test_first_and_recent_takes_sizes(bad):
    with pytest.raises(numkv.DimensionMismatch):
        eviction.first_and_recent(*bad)


WEIGHTS = [9.0, 1.0, 5.0, 5.0, 2.0, 5.0, 0.0, 8.0]


@pytest.mark.parametrize(
    ("keep", "first", "recent", "expected"),
    [
        (3, 0, 0, [0, 2, 7]),
        (4, 0, 2, [0, 2, 6, 7]),
        (5, 3, 1, [0, 1, 2, 3, 7]),
        (2, 1, 1, [0, 7]),
        (2, 0, 2, [6, 7]),
        (0, 0, 0, []),
        (8, 0, 0, list(range(8))),
        (99, 3, 3, list(range(8))),
    ],
)
def test_heavy_hitters(keep, first, recent, expected):
    assert eviction.heavy_hitters(WEIGHTS, keep, first, recent).tolist() == expected


def test_heads_are_summed(rng):
    weights = rng.random((3, 20)).astype(F32)
    got = eviction.heavy_hitters(weights, 8, num_first=1, num_recent=2)
    heaviest = np.argsort(-weights.astype(np.float64).sum(axis=0)[1:18])[:5] + 1
    assert got.tolist() == sorted([0, *heaviest, 18, 19])


def test_max_pool(rng):
    weights = rng.random((2, 9))
    for size in (1, 3, 7, 21):
        want = [
            [row[max(0, j - size // 2) : j + size // 2 + 1].max() for j in range(9)]
            for row in weights
        ]
        assert eviction.max_pool(weights, size).tolist() == want
        assert eviction.max_pool(weights[1], size).tolist() == want[1]
    assert eviction.max_pool(np.zeros((2, 0)), 3).shape == (2, 0)
    for bad in (2, 0, -1):
        with pytest.raises(ValueError, match="kernel_size"):
            eviction.max_pool(weights, bad)


def test_seen_by_recent(rng):
    """Pooled by head before heads are summed, and the newest tokens lend nothing to their neighbours."""
    weights = np.array([[0, 0, 4, 0, 0, 0, 1, 0, 9, 9.0], [0, 0, 0, 0, 5, 0, 0, 0, 9, 9]])
    got = eviction.seen_by_recent(weights, 5, num_recent=2, kernel_size=3)
    # Pooled sums of the first eight: 0 4 4 9 5 6 1 1.
    assert got.tolist() == [3, 4, 5, 8, 9]
    assert eviction.seen_by_recent(weights, 4, num_recent=2).tolist() == [2, 4, 8, 9]
    assert eviction.seen_by_recent(weights, 5, 2, 3, num_first=1).tolist() == [0, 3, 5, 8, 9]
    assert eviction.seen_by_recent(weights, 2, num_recent=2, kernel_size=5).tolist() == [8, 9]
    assert eviction.seen_by_recent(weights[0, :3], 5, num_recent=4).tolist() == [0, 1, 2]


@pytest.mark.parametrize("choose", [eviction.heavy_hitters, eviction.seen_by_recent])
def test_what_is_no_weight(choose):
    for bad, error in (
        (np.zeros((1, 2, 3)), numkv.DimensionMismatch),
        (np.float64(3), numkv.DimensionMismatch),
        (np.array(["a", "b"]), numkv.UnsupportedDType),
        (np.zeros((2, 0), [("a", np.float32), ("b", np.int32)]), numkv.UnsupportedDType),
    ):
        with pytest.raises(error, match=about("weights")):
            choose(bad, 1, num_recent=1)
    for bad, index in (([0, np.nan, 1], (1,)), ([[0, 1, 2], [0, 1, -np.inf]], (1, 2))):
        with pytest.raises(numkv.NonFiniteInput) as found:
            choose(bad, 1, num_recent=1)
        assert found.value.index == index
    with pytest.raises(ValueError, match="num_keep"):
        choose(WEIGHTS, 3, num_first=2, num_recent=2)


# ---------------------------------------------------------------- the tally


def test_a_tally(target, to, rng):
    """Tokens are added, dropped and added again; new ones begin at 0."""
    tally = numkv.AttentionTally(2)
    want = np.zeros((2, 0))
    for step, tokens in enumerate((3, 4, 4, 9, 5, 6, 40)):
        if step == 4:
            tally.compact([0, 3, 5])
            want = want[:, [0, 3, 5]]
        if step == 6:
            tally.truncate(4)
            want = want[:, :4]
        new = rng.random((2, tokens)).astype(F32)
        tally.add(to(new))
        want = np.pad(want, ((0, 0), (0, tokens - want.shape[1]))) + new
        assert len(tally) == tokens
        assert np.array_equal(tally.weights, want)
    assert tally.weights.dtype == np.float64
    assert repr(tally) == "AttentionTally(num_kv_heads=2, len=40)"


def test_a_tally_refuses():
    tally = numkv.AttentionTally(2)
    tally.add(np.ones((2, 3)))
    for bad, error in (
        (np.ones((2, 2)), numkv.DimensionMismatch),
        (np.ones((1, 3)), numkv.DimensionMismatch),
        (np.ones(3), numkv.DimensionMismatch),
        (np.full((2, 3), np.nan), numkv.NonFiniteInput),
    ):
        with pytest.raises(error, match="weights"):
            tally.add(bad)
    for keep, error in (([3], IndexError), ([1, 0], ValueError), ([[0]], numkv.DimensionMismatch)):
        with pytest.raises(error, match="keep"):
            tally.compact(keep)
    with pytest.raises(IndexError):
        tally.truncate(4)
    with pytest.raises(numkv.DimensionMismatch):
        numkv.AttentionTally(0)
    assert np.array_equal(tally.weights, np.ones((2, 3)))


def test_all_together(target, to, host, rng):
    """A layer and its tally drop the same tokens: the weights of what is left are those that were added."""
    layer = numkv.PagedLayer(8, 4, 2, 8, kind="int8", target=target)
    tally = numkv.AttentionTally(2)
    added = {}  # by the key's own number, which is its value row
    for step in range(12):
        v = np.full((1, 2, 8), step + 1, F32)
        layer.append(to(rng.standard_normal((1, 2, 8)).astype(F32)), to(v))
        weights = layer.attention_weights(to(rng.standard_normal((1, 4, 8)).astype(F32)))
        tally.add(weights)
        numbers = _numbers(layer, host)
        for j, number in enumerate(numbers):
            added[number] = added.get(number, 0) + host(weights)[:, j].astype(np.float64)
        if layer.seq_len > 6:
            keep = eviction.heavy_hitters(tally.weights, 5, num_first=1, num_recent=2)
            layer.compact(keep)
            tally.compact(keep)
    numbers = _numbers(layer, host)
    assert numbers[0] == 1
    assert numbers[-2:] == [11, 12]
    assert len(set(numbers)) == layer.seq_len == len(tally) <= 6
    want = np.array([added[number] for number in numbers]).T
    np.testing.assert_allclose(tally.weights, want, rtol=1e-12)


def _numbers(layer, host):
    v, scale = host(layer.v), host(layer.v_scale)
    at = [(layer.block_indices[j // 4], j % 4) for j in range(layer.seq_len)]
    return [round(float(v[b, 0, p, 0] * scale[b, 0, p])) for b, p in at]


# ---------------------------------------------------------------- by score, in every cache of several layers

LAYERS, HEADS, DIM = 2, 2, 8


class InKVCache:
    """One sequence: weights of a layer's last rows, and all layers keep the same tokens."""

    def __init__(self, target, shift):
        self.cache, self.shift = (
            numkv.KVCache(LAYERS, HEADS, DIM, kind="fp32", target=target),
            shift,
        )

    def go_on(self, k, v, q):
        found = []
        for layer in range(LAYERS):
            self.cache.append(layer, k[layer], v[layer])
            out, lse = self.cache.decode_attention(layer, q[layer], return_lse=True)
            found.append((out, self.cache.attention_weights(layer, q[layer], lse=lse)))
        self.cache.advance(len(k[0]))
        return found

    def compact(self, keep):
        self.cache.compact(keep, shift=self.shift)


class InPagedKVCache:
    """A sequence among others: weights of the step's tokens, before it is committed."""

    def __init__(self, target, shift):
        self.cache, self.shift = (
            numkv.PagedKVCache(
                LAYERS, HEADS, DIM, num_blocks=20, block_size=2, kind="fp32", target=target
            ),
            shift,
        )
        self.seq = self.cache.add()

    def go_on(self, k, v, q):
        step = self.cache.reserve([self.seq], [len(k[0])])
        found = []
        for layer in range(LAYERS):
            step.append(layer, k[layer], v[layer])
            out, lse = step.attention(layer, q[layer], return_lse=True)
            # Of all the step's sequences.
            weights = step.attention_weights(layer, q[layer], lse=lse)
            found.append((out, weights.reshape(weights.shape[1:])))
        self.cache.commit(step)
        return found

    def compact(self, keep):
        self.cache.compact(self.seq, keep, shift=self.shift)
        self.cache.check()


class InCells:
    """A sequence of a multi-sequence cache, which turns keys by the shift that it was made with."""

    def __init__(self, target, shift):
        self.cache, self.length = numkv.CausalCache(shift), 0
        self.cache.init("fp32", 2, 16, 8, target)

    def go_on(self, k, v, q):
        n = len(k[0])
        self.cache.start_forward(numkv.Batch(self.length + np.arange(n), [7] * n))
        found = []
        for layer in range(LAYERS):
            self.cache.put(layer, k[layer], v[layer])
            out, lse = self.cache.decode_attention(layer, q[layer], return_lse=True)
            found.append((out, self.cache.attention_weights(layer, q[layer], lse=lse)[7]))
        self.length += n
        return found

    def compact(self, keep):
        # A column of the weights is a stored token; `keep` names positions.
        self.cache.compact(7, self.cache.positions(7)[keep])
        self.length = len(keep)


class InChildren(InCells):
    """Children that keep the same tokens; here they see all that they keep."""

    def __init__(self, target, shift):
        children = numkv.CausalCache(window_left=11, shift=shift), numkv.CausalCache(shift)
        self.cache, self.length = numkv.WrapperCache(*children, layer_types=[0, 1]), 0
        self.cache.init("fp32", 2, 16, 8, target)

    def compact(self, keep):
        self.cache.compact(7, self.cache.caches[1].positions(7)[keep])
        self.length = len(keep)


def rotated(raw, positions):
    cos, sin = naive.rope_tables(32, DIM, base=100.0, dtype=np.float64)
    return np.array(
        [naive.rope(x, cos[p], sin[p], False) for x, p in zip(raw, positions, strict=True)]
    )


def looked_at(q, keys):
    """How much attention each key gets from the newest tokens' queries, by kv head."""
    weights = np.zeros((HEADS, len(keys)))
    for i, of_token in enumerate(q):
        seen = keys[: len(keys) - len(q) + i + 1]
        for h, x in enumerate(of_token):
            exps = np.exp(seen[:, h // 2] @ x / np.sqrt(DIM))
            weights[h // 2, : len(seen)] += exps / exps.sum()
    return weights


def best(scores, candidates, n):
    return sorted(sorted(candidates, key=lambda i: -scores[i])[:n])


@pytest.mark.parametrize("family", [InKVCache, InPagedKVCache, InCells, InChildren])
def test_by_score_in_every_cache(target, to, host, rng, family):
    """Heavy hitters while tokens come, then what the last ones look at; attention is that to the kept tokens alone."""
    turning = numkv.rope_shift(*naive.rope_tables(32, DIM, base=100.0))
    cache, tally = family(target, turning), numkv.AttentionTally(LAYERS * HEADS)
    raw, values = (np.zeros((LAYERS, 0, HEADS, DIM)) for _ in "kv")
    sums = np.zeros((LAYERS * HEADS, 0))
    for new in (5, 1, 1, 1, 1, 3):
        x, v = rng.standard_normal((2, LAYERS, new, HEADS, DIM)).astype(F32)
        q = rng.standard_normal((LAYERS, new, 2 * HEADS, DIM)).astype(F32)
        length = raw.shape[1]
        k = np.array([rotated(rows, length + np.arange(new)) for rows in x]).astype(F32)
        found = cache.go_on(*([to(rows) for rows in part] for part in (k, v, q)))
        # What a float64 softmax over the kept tokens says, at the positions where they stand now.
        raw, values = np.concatenate([raw, x], 1), np.concatenate([values, v], 1)
        keys = np.array([rotated(rows, range(length + new)) for rows in raw])
        want = np.concatenate([looked_at(q[layer], keys[layer]) for layer in range(LAYERS)])
        for layer, (out, _) in enumerate(found):
            rows = (keys[layer].transpose(1, 0, 2)[None], values[layer].transpose(1, 0, 2)[None])
            right, _ = naive.attention(q[layer], *rows, [length + new], [0, new])
            tolerances.assert_rows_close(host(out), right, 3e-5)
        weights = np.concatenate([host(of_layer) for _, of_layer in found])
        np.testing.assert_allclose(weights, want, rtol=1e-4)
        tally.add(weights)
        sums = np.pad(sums, ((0, 0), (0, new))) + want
        n = length + new
        if new == 3:
            keep = eviction.seen_by_recent(weights, num_keep=6, num_recent=3)
            right = best(want.sum(0), range(n - 3), 3) + list(range(n - 3, n))
        elif n > 5:
            keep = eviction.heavy_hitters(tally.weights, num_keep=5, num_first=1, num_recent=2)
            right = [0, *best(sums.sum(0), range(1, n - 2), 2), n - 2, n - 1]
        else:
            continue
        assert keep.tolist() == right
        cache.compact(keep)
        tally.compact(keep)
        raw, values, sums = raw[:, keep], values[:, keep], sums[:, keep]


# ---------------------------------------------------------------- odd arguments


def test_neighbours_that_there_are_not_cost_nothing():
    weights = np.array([[1.0, 3.0, 2.0]])
    for kernel_size in (5, 7, 2**62 + 1, 2**63 - 1):
        assert max_pool(weights, kernel_size).tolist() == [[3, 3, 3]]
    assert max_pool(np.zeros((2, 0)), 2**62 + 1).shape == (2, 0)


def test_sums_beyond_float64(rng):
    """A sum over heads that overflows is the heaviest; a tally refuses one, and is what it was."""
    huge = np.full((2, 3), 1e308)
    huge[:, 1] = 1
    assert heavy_hitters(huge, 2).tolist() == [0, 2]
    tally = AttentionTally(2)
    tally.add(huge)
    with pytest.raises(numkv.NonFiniteInput, match="`weights`: expected sums"):
        tally.add(np.concatenate([huge, huge], axis=1))
    assert np.array_equal(tally.weights, huge)
    with pytest.raises(numkv.NonFiniteInput, match="`weights`"):
        heavy_hitters(np.full((1, 3), np.longdouble("1e400")), 1)


def test_one_call_at_a_time_changes_a_tally():
    class Weights:
        """Weights that change the tally when they are asked for."""

        def __init__(self, tally):
            self.tally = tally

        @property
        def __array_interface__(self):
            self.tally.truncate(0)

    tally = AttentionTally(1)
    tally.add([[1.0, 2.0]])
    with pytest.raises(numkv.NumkvError, match="truncate: this AttentionTally is being changed"):
        tally.add(Weights(tally))
    assert tally.weights.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    "weights",
    [
        ["1"],
        [[1.0], [1.0, 2.0]],
        np.empty(0, np.complex64),
        np.ma.array([1.0]),
        None,
        [1j],
        3.0,
        [object()],
    ],
    ids=lambda x: repr(x)[:8],
)
def test_weights_that_are_none(weights):
    for call in (
        lambda: heavy_hitters(weights, 1),
        lambda: max_pool(weights, 1),
        lambda: AttentionTally(1).add(weights),
    ):
        with pytest.raises(numkv.NumkvError, match="`weights`: expected"):
            call()


def test_more_tokens_than_memory_holds():
    for sizes in ((2**62, 2**62, 0), (2**62, 1, 2**61)):
        with pytest.raises(numkv.DimensionMismatch, match="`length`"):
            eviction.first_and_recent(*sizes)
    assert eviction.first_and_recent(2**62, 1, 1).tolist() == [0, 2**62 - 1]
