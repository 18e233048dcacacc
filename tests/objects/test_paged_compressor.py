"""`PagedCompressor`: many sequences in one object, beside the oracle, and beside a `MultiHeadCompressor` of each."""

import copy
import importlib
import pickle

import naive_codes
import numpy as np
import pytest
import tolerances
from messages import about

import numkv
from numkv import CompressorConfig, MultiHeadCompressor, PagedCompressor
from numkv.compression.blocks import BLOCK_SIZE

HEADS, GROUP, DIM = 2, 3, 8
Q_HEADS = HEADS * GROUP
CONFIG = CompressorConfig(DIM, 4, 16, 42)
OTHER_BITS = CompressorConfig(DIM, 4, seed=42, v_bits=3)
#: None, one, a block to the token, more than a block; on the CPU also more than a split.
LENGTHS = {"cpu": [5, 0, 128, 1, 300, 1100], "cuda": [5, 0, 12, 1, 130]}
#: Sequences with no query at all, one, and several of their newest tokens.
QUERIES = {"cpu": [2, 1, 0, 1, 20, 3], "cuda": [2, 1, 0, 1, 3]}


def random(rng, *shape):
    return rng.standard_normal(shape, np.float32)


class Batch:
    """A compressor with sequences of some lengths, and one compressor for each of them."""

    def __init__(self, target, to, host, rng, lengths, config=CONFIG):
        self.to, self.host, self.rng = to, host, rng
        self.cache = PagedCompressor(HEADS, config, num_q_heads=Q_HEADS, target=target)
        self.alone = {}
        for _ in lengths:
            one = MultiHeadCompressor(HEADS, config, num_q_heads=Q_HEADS, target=target)
            self.alone[self.cache.add()] = one
        self.extend(list(self.alone), lengths)

    def extend(self, seqs, new_lens):
        x = random(self.rng, 2, sum(new_lens), HEADS, self.cache.head_dim)
        self.cache.extend(seqs, self.to(x[0]), self.to(x[1]), new_lens)
        ends = np.cumsum(new_lens)
        for seq, begin, end in zip(seqs, ends - new_lens, ends, strict=True):
            if begin < end:
                self.alone[seq].extend(self.to(x[0, begin:end]), self.to(x[1, begin:end]))

    def queries(self, query_lens):
        return random(self.rng, sum(query_lens), Q_HEADS, self.cache.head_dim)

    def attend(self, seqs, q, query_lens, **options):
        found = self.cache.attend(seqs, self.to(q), query_lens, return_lse=True, **options)
        return [self.host(x) for x in found]

    def compare(self, seqs, query_lens=None, **options):
        """Outputs, lse, codes and decoded rows are those of each sequence's own compressor, to the bit."""
        query_lens = [1] * len(seqs) if query_lens is None else query_lens
        q, at = self.queries(query_lens), 0
        out, lse = self.attend(seqs, q, query_lens, **options)
        for seq, n in zip(seqs, query_lens, strict=True):
            one, now, at = self.alone[seq], slice(at, at + n), at + n
            assert self.cache.length(seq) == len(one)
            for name in ("key_codes", "value_codes"):
                of_one, of_all = getattr(one, name), getattr(self.cache, name)(seq)
                for a, b in zip(of_all, of_one, strict=True):
                    assert self.host(a).tobytes() == self.host(b).tobytes()
            if n:
                wanted = one.attend(self.to(q[now]), return_lse=True, **options)
                for a, b in zip((out, lse), wanted, strict=True):
                    assert a[now].tobytes() == self.host(b).tobytes()
        self.cache.check()

    def expected(self, seq, q, sm_scale, cap=0.0, window_left=-1):
        """Scores, outputs and lse of a sequence in float64, from its codes."""
        cache, config = self.cache, self.cache.config
        quantiser = cache._quantiser
        rotation, sketch, levels, v_levels = (
            self.host(x)
            for x in (quantiser.rotation, quantiser.sketch, quantiser.levels, quantiser.v_levels)
        )
        rows = []
        for stored, bits, values in (
            (cache.key_codes(seq), config.bits, levels),
            (cache.value_codes(seq), config.v_bits or config.bits, v_levels),
        ):
            codes = naive_codes.unpack(self.host(stored.codes), cache.head_dim, bits)
            rows.append(naive_codes.decode(codes, self.host(stored.scales), values, rotation))
        stored = cache.key_codes(seq)
        signs = naive_codes.unpack(self.host(stored.signs), config.projections or 0, 1)
        left = self.host(stored.residuals)
        scores = np.stack(
            [naive_codes.scores(x, rows[0], rotation, sketch, signs, left, sm_scale) for x in q]
        )
        scores = naive_codes.restrict(scores, cap, window_left)
        outs, lse = zip(*(naive_codes.attend(x, rows[1]) for x in scores), strict=True)
        return scores, np.stack(outs), np.stack(lse)


@pytest.fixture(scope="module")
def filled(target, to, host):
    """What every `batch` is a copy of: the simulator takes long to fill it."""
    return Batch(target, to, host, np.random.default_rng(1), LENGTHS[target])


@pytest.fixture
def batch(filled, rng):
    copied = copy.copy(filled)
    copied.cache, copied.rng = filled.cache.copy(), rng
    copied.alone = {seq: one.copy() for seq, one in filled.alone.items()}
    return copied


OPTIONS = [{}, {"sm_scale": 0.7, "logits_soft_cap": 2.0, "window_left": 6}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("config", [CONFIG, OTHER_BITS], ids=["sketch", "other bits"])
def test_a_ragged_batch_beside_the_oracle(target, to, host, rng, options, config):
    batch = Batch(target, to, host, rng, LENGTHS[target], config)
    seqs, query_lens = list(batch.alone), QUERIES[target]
    q, at = batch.queries(query_lens), 0
    out, lse = batch.attend(seqs, q, query_lens, **options)
    plain = {
        "sm_scale": options.get("sm_scale", DIM**-0.5),
        "cap": options.get("logits_soft_cap", 0.0),
        "window_left": options.get("window_left", -1),
    }
    for seq, n, length in zip(seqs, query_lens, LENGTHS[target], strict=True):
        now, at = slice(at, at + n), at + n
        if not length:
            assert np.all(out[now] == 0)
            assert np.all(lse[now] == -np.inf)
        elif n:
            scores, wanted, wanted_lse = batch.expected(seq, q[now], **plain)
            tolerances.assert_rows_close(out[now], wanted, 3e-5)
            assert np.allclose(lse[now], wanted_lse, rtol=0, atol=2e-5)
            found = host(batch.cache.attention_scores(seq, to(q[now]), **options))
            assert np.array_equal(found == -np.inf, scores == -np.inf)
            seen = scores > -np.inf
            assert np.allclose(found[seen], scores[seen], rtol=1e-4, atol=1e-4)


def test_a_sequence_is_what_it_is_alone(target, batch):
    """In any order and company, with any number of queries."""
    seqs = list(batch.alone)
    batch.compare(seqs, QUERIES[target])
    batch.compare(seqs[::-1], window_left=3)
    batch.compare(seqs[-1:], logits_soft_cap=1.0)
    batch.extend(seqs[2:], [1] * len(seqs[2:]))  # one that begins a block, others inside one
    batch.extend([seqs[0], seqs[1]], [0, 2])
    batch.compare(seqs)
    rows = batch.cache.decode_keys(seqs[0]), batch.alone[seqs[0]].decode_keys()
    assert np.array_equal(*map(batch.host, rows))
    rows = batch.cache.decode_values(seqs[-1]), batch.alone[seqs[-1]].decode_values()
    assert np.array_equal(*map(batch.host, rows))


@pytest.mark.parametrize("numbers", [1, 700])
def test_rounds_change_nothing(target, batch, monkeypatch, numbers):
    """Where there is room for the parts of a few queries at once, or of one."""
    seqs, query_lens = list(batch.alone), QUERIES[target]
    q = batch.queries(query_lens)
    before = batch.attend(seqs, q, query_lens, window_left=9)
    compress = importlib.import_module(f"numkv.kernels.{target}.compress")
    monkeypatch.setattr(compress, "MOST_PARTS", numbers)
    after = batch.attend(seqs, q, query_lens, window_left=9)
    assert [x.tobytes() for x in after] == [x.tobytes() for x in before]


def test_threads_change_nothing(rng):
    batch = Batch("cpu", np.asarray, np.asarray, rng, [300, 2500, 40])
    q = batch.queries([40, 60, 30])
    before = batch.attend([0, 1, 2], q, [40, 60, 30])
    with numkv.num_threads(1):
        after = batch.attend([0, 1, 2], q, [40, 60, 30])
    assert [x.tobytes() for x in after] == [x.tobytes() for x in before]


def test_forks_share_blocks_until_they_part(batch):
    cache, first = batch.cache, max(batch.alone)
    capacity, twin = cache.capacity, cache.fork(first)
    batch.alone[twin] = batch.alone[first].copy()
    assert cache.capacity == capacity
    batch.compare([twin, first])
    used = int((cache._stored.references() > 0).sum())
    batch.extend([first, twin], [1, 1])
    assert int((cache._stored.references() > 0).sum()) == used + 1
    batch.compare([twin, first])
    cache.remove(first)
    del batch.alone[first]
    batch.extend([twin], [BLOCK_SIZE + 1])
    batch.compare(list(batch.alone))
    assert not cache._stored.shared


def test_a_truncated_fork_leaves_the_other_as_it_was(batch):
    cache, first = batch.cache, max(batch.alone)
    twin = cache.fork(first)
    batch.alone[twin] = batch.alone[first].copy()
    for seq, length in ((twin, BLOCK_SIZE - 3), (first, 1)):
        cache.truncate(seq, length)
        batch.alone[seq].truncate(length)
        batch.extend([seq], [4])
        batch.compare([first, twin])


def test_what_is_removed_makes_room(batch):
    cache, seqs = batch.cache, list(batch.alone)
    capacity, last = cache.capacity, max(seqs)
    length = cache.length(last)
    cache.remove(last)
    new = cache.add()
    assert new == last + 1  # numbers do not come back
    batch.alone[new] = batch.alone.pop(last)
    batch.alone[new].clear()
    batch.extend([new], [length])
    assert (cache.capacity, len(cache), cache.sequences) == (capacity, len(seqs), (*seqs[:-1], new))
    batch.compare([*seqs[:-1], new])
    cache.clear()
    assert (len(cache), cache.capacity) == (0, capacity)
    assert cache.add() == new + 1


def test_copies_and_pickles(target, batch):
    seqs = list(batch.alone)
    batch.alone[batch.cache.fork(seqs[-1])] = batch.alone[seqs[-1]].copy()
    original = batch.cache
    made = [original.copy(), copy.copy(original), copy.deepcopy(original)]
    if target == "cpu":
        made.append(pickle.loads(pickle.dumps(original)))
    for each in made:
        batch.cache = each
        batch.compare(list(batch.alone))
    before = original.length(seqs[0])
    made[0].remove(seqs[-1])
    x = batch.to(random(batch.rng, 1, HEADS, DIM))
    made[0].extend([seqs[0]], x, x)
    assert (original.length(seqs[0]), len(original)) == (before, len(batch.alone))
    batch.cache = original
    batch.compare(list(batch.alone))


def test_what_others_store_may_be_anything(batch):
    """NaN in another sequence's block, and behind a sequence's own last token."""
    cache, seqs = batch.cache, list(batch.alone)
    bad = batch.to(np.full((130, HEADS, DIM), np.nan, np.float32))
    spoiled = cache.add()
    cache.extend([spoiled], bad, bad, 130, check_finite=False)
    with pytest.raises(numkv.NumkvError, match="scales of keys are not finite"):
        cache.check()
    cache.remove(spoiled)
    batch.extend([seqs[0]], [1])
    batch.extend([seqs[3]], [2 * BLOCK_SIZE + 1])  # into blocks that held it
    batch.compare(seqs)


def test_what_it_says(target):
    cache = PagedCompressor(HEADS, OTHER_BITS, num_q_heads=Q_HEADS, target=target)
    assert repr(cache).startswith("PagedCompressor(len=0, num_heads=2, num_q_heads=6, head_dim=8,")
    assert (cache.num_heads, cache.num_q_heads, cache.num_blocks) == (HEADS, Q_HEADS, 0)
    assert (cache.block_size, cache.capacity, cache.nbytes) == (BLOCK_SIZE, 0, 0)
    assert cache.bytes_per_token == HEADS * (4 + 4 + 3 + 4)
    seq = cache.add()
    assert (len(cache), cache.sequences, cache.length(seq)) == (1, (0,), 0)


def test_no_sequences_and_no_tokens(batch):
    cache, to = batch.cache, batch.to
    nothing = to(np.empty((0, HEADS, DIM), np.float32))
    cache.extend([], nothing, nothing)
    cache.extend(list(batch.alone), nothing, nothing, 0)
    assert cache.attend([], to(np.empty((0, Q_HEADS, DIM), np.float32))).shape == (0, Q_HEADS, DIM)
    empty = cache.add()
    out, lse = cache.attend([empty], to(random(batch.rng, 1, Q_HEADS, DIM)), return_lse=True)
    assert np.all(batch.host(out) == 0)
    assert np.all(batch.host(lse) == -np.inf)
    assert batch.host(cache.decode_keys(empty)).shape == (HEADS, 0, DIM)


def row(*shape):
    return np.zeros(shape, np.float32)


X, Q = row(1, HEADS, DIM), row(1, Q_HEADS, DIM)
WRONG = [
    (lambda c: c.extend([0], X, X, 2), numkv.DimensionMismatch, "keys"),
    (lambda c: c.extend([0, 1], row(2, HEADS, DIM), X), numkv.DimensionMismatch, "values"),
    (lambda c: c.extend([0], row(1, 1, DIM), X), numkv.DimensionMismatch, "keys"),
    (lambda c: c.extend([0], row(1, HEADS, 9), X), numkv.DimensionMismatch, "keys"),
    (lambda c: c.extend([0], X, np.full_like(X, np.inf)), numkv.NonFiniteInput, "values"),
    (lambda c: c.extend([9], X, X), IndexError, "sequences"),
    (lambda c: c.extend([0], X, X, -1), IndexError, "new_lens"),
    (lambda c: c.extend([0, 0], X, X, [1, 0]), ValueError, "sequences"),
    (lambda c: c.extend([0], X, X, [1, 0]), numkv.DimensionMismatch, "new_lens"),
    (lambda c: c.extend(3, X, X), TypeError, "sequences"),
    (lambda c: c.extend([0], X, X, 1.5), TypeError, "new_lens"),
    (lambda c: c.attend([0], row(9, Q_HEADS, DIM), 9), numkv.DimensionMismatch, "query_lens"),
    (lambda c: c.attend([1], row(2, Q_HEADS, DIM), 2), numkv.DimensionMismatch, "query_lens"),
    (lambda c: c.attend([0], row(1, HEADS, DIM)), numkv.DimensionMismatch, "queries"),
    (lambda c: c.attend([0], row(1, Q_HEADS, 9)), numkv.DimensionMismatch, "queries"),
    (lambda c: c.attend([0], np.full_like(Q, np.nan)), numkv.NonFiniteInput, "queries"),
    (lambda c: c.attend([0], Q, window_left=-2), ValueError, "window_left"),
    (lambda c: c.attend([0], Q.astype(np.int32)), numkv.UnsupportedDType, "queries"),
    (lambda c: c.attention_scores(7, Q), IndexError, "seq"),
    (lambda c: c.truncate(0, 6), IndexError, "length"),
    (lambda c: c.fork(-1), IndexError, "seq"),
    (lambda c: c.remove(True), TypeError, "seq"),
    (lambda c: c.length("a"), TypeError, "seq"),
    (lambda c: PagedCompressor(2, CONFIG, num_q_heads=3), numkv.DimensionMismatch, "num_q_heads"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_errors_name_the_argument_and_change_nothing(rng, number):
    call, error, name = WRONG[number]
    batch = Batch("cpu", np.asarray, np.asarray, rng, [5, 0])
    stored = batch.cache._stored
    with pytest.raises(error, match=about(name)):
        call(batch.cache)
    assert batch.cache._stored is stored


def test_check_finds_contradictions(rng):
    cache = Batch("cpu", np.asarray, np.asarray, rng, [5, 140]).cache
    stored = cache._stored
    first, second = stored.sequences[0], stored.sequences[1]
    for wrong, said in (
        ({0: first._replace(length=129)}, "has 1 blocks for 129 tokens"),
        ({0: first._replace(blocks=np.array([99]))}, r"has blocks \[99\]"),
        ({0: first._replace(blocks=second.blocks[:1])}, "belongs to two sequences"),
        ({7: first._replace(blocks=first.blocks[:0], length=0)}, "2 have been added"),
    ):
        cache._stored = stored._replace(sequences=stored.sequences | wrong)
        with pytest.raises(numkv.NumkvError, match=said):
            cache.check()
    cache._stored = stored._replace(values=stored.keys)
    with pytest.raises(numkv.NumkvError, match="buffers of values have shape"):
        cache.check()
    cache._stored = stored
    cache.check()
