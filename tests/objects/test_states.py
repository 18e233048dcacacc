"""States of sequences in a `PagedKVCache`, beside a model that is a fold over tokens."""

import pickle

import ml_dtypes
import numpy as np
import pytest
from layer_lists import paged_kv_cache

import numkv

BF16 = np.dtype(ml_dtypes.bfloat16)
#: Layer 0 keeps two arrays and no rows, layer 2 rows and an array.
STATES = {0: [((2, 3), "float32"), ((4,), BF16)], 2: [((5,), np.int32)]}
ROWS = 1, 2  # layers with rows


def make(*, slots=(40,), num_blocks=64, **options):
    return paged_kv_cache(
        3, [None, 1, 1], 8, num_blocks=num_blocks, block_size=2, kind="fp32", states=STATES,
        state_slots=numkv.StateSlots(*slots), **options,
    )  # fmt: skip


def fold(states, token):
    """What a recurrent model makes of one more token: depends on all of them and on their order."""
    a, b, c = states
    return (
        (a * np.float32(0.5) + np.float32(token)).astype(np.float32),
        (b.astype(np.float32) * 0.25 + token).astype(BF16),
        (c * 31 + token).astype(np.int32),
    )


def of_text(text):
    """The definition: the states after a text."""
    found = np.zeros((2, 3), np.float32), np.zeros(4, BF16), np.zeros(5, np.int32)
    for token in text:
        found = fold(found, token)
    return found


def rows(text):
    """K, which is V: of a token the sum of all up to it."""
    return np.repeat(np.cumsum(text).astype(np.float32), 8).reshape(-1, 1, 8)


def run(cache, seqs, texts, before, *, to=np.asarray, host=np.asarray, named=True, commit=True):
    """A step of the model: it reads states and rows, and writes those of new tokens."""
    step = cache.reserve(seqs, [len(t) for t in texts])
    read = [host(x) for layer in STATES for x in step.read_state(layer)]
    new = []
    for i, text in enumerate(texts):
        states = tuple(x[i] for x in read)
        for token in text:
            states = fold(states, token)
        new.append(states)
    new = [to(np.stack(x)) for x in zip(*new, strict=True)]
    step.write_state(0, *new[:2])
    step.write_state(2, new[2])
    grown = [rows([*old, *text])[len(old) :] for old, text in zip(before, texts, strict=True)]
    for layer in ROWS:
        step.append(layer, to(np.concatenate(grown)), to(np.concatenate(grown)))
    ids = [token for text in texts for token in text]
    if commit:
        cache.commit(step, token_ids=ids if named else None)
    else:
        cache.rollback(step)
    cache.check()


def states_of(cache, seq, host=np.asarray):
    """What a step reads, which is rolled back."""
    step = cache.reserve([seq], [0])
    found = tuple(host(x)[0].copy() for layer in STATES for x in step.read_state(layer))
    cache.rollback(step)
    return found


def check(cache, texts, host=np.asarray):
    for seq, text in texts.items():
        assert cache.length(seq) == len(text)
        for got, want in zip(states_of(cache, seq, host), of_text(text), strict=True):
            assert got.dtype == want.dtype
            assert got.tobytes() == want.tobytes()
    cache.check()


def test_steps_forks_rollbacks_and_prefixes(target, to, host):
    cache = make(target=target)
    both = {"to": to, "host": host}
    a, b = cache.add(), cache.add()
    run(cache, [a, b], [[1, 2, 3, 4], [5]], [[], []], **both)
    check(cache, {a: [1, 2, 3, 4], b: [5]}, host)
    run(cache, [a], [[9, 9]], [[1, 2, 3, 4]], **both, commit=False)
    c = cache.fork(a)
    run(cache, [c, a], [[7], [6, 6]], [[1, 2, 3, 4]] * 2, **both)
    texts = {a: [1, 2, 3, 4, 6, 6], b: [5], c: [1, 2, 3, 4, 7]}
    check(cache, texts, host)
    d = cache.add([1, 2, 3, 4, 6, 8, 8])
    assert cache.cached_len(d) == 4  # up to the last checkpoint: none of its rows' parts go further
    check(cache, {**texts, d: [1, 2, 3, 4]}, host)
    cache.truncate(a, 4)
    check(cache, {**texts, a: [1, 2, 3, 4]}, host)
    e = cache.swap_in(cache.swap_out(c))
    check(cache, {e: texts[c]}, host)
    for seq in cache.sequences:
        cache.remove(seq)
    cache.check()
    assert cache.states.stats().used == 0
    assert cache.cached_len(cache.add([1, 2, 3, 4, 6, 6, 0])) == 6


def test_a_fork_that_fails_keeps_no_slot(target, to, host, monkeypatch):
    cache = make(target=target)
    seq = cache.add()
    run(cache, [seq], [[1, 2, 3]], [[]], to=to, host=host)
    before = cache.states.ref_count(range(40)).tolist()

    def fail(states):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(cache, "_publish", fail)
        cache.fork(seq)
    assert cache.states.ref_count(range(40)).tolist() == before
    cache.check()


def test_truncation_goes_to_checkpoints_only():
    cache = make(slots=(40, 4))
    seq = cache.add()
    text = []
    for piece in ([1, 2], [3, 4], [5, 6, 7, 8], [9, 1, 1, 1, 1]):  # at 4 and 8, not at 12
        run(cache, [seq], [piece], [text], named=len(text) < 4)
        text = text + piece
    for wrong, nearest in ((2, "0 and 4"), (6, "4 and 8"), (12, "8 and 13")):
        with pytest.raises(numkv.NotSupported, match=f"nearest ones are {nearest}"):
            cache.truncate(seq, wrong)
        check(cache, {seq: text})
    cache.truncate(seq, 13)
    cache.truncate(seq, 8)  # which has no name that anybody else knows
    check(cache, {seq: text[:8]})
    cache.truncate(seq, 4)
    check(cache, {seq: text[:4]})
    cache.truncate(seq, 0)
    check(cache, {seq: []})
    run(cache, [seq], [[7]], [[]])
    check(cache, {seq: [7]})


def test_a_prefix_goes_as_far_as_its_last_checkpoint():
    """Checkpoints that are evicted, and steps that end between them, shorten prefixes."""
    cache = make(slots=(4, 4))
    a = cache.add()
    run(cache, [a], [[1, 2, 3, 4]], [[]])
    run(cache, [a], [[5, 6, 7, 8, 9, 9]], [[1, 2, 3, 4]])
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9]
    b = cache.add(prompt)
    assert cache.cached_len(b) == 4
    assert cache.blocks.miss_reason == "absent"
    cache.remove(a)
    c = cache.add([0, 0])
    run(cache, [c], [[0, 0, 0]], [[]])
    run(cache, [b, c], [[1], [2]], [[1, 2, 3, 4], [0, 0, 0]])
    run(cache, [b, c], [[1], [2]], [[1, 2, 3, 4, 1], [0, 0, 0, 2]])  # takes the last slots
    with pytest.raises(numkv.NotSupported, match="0 and 6"):
        cache.truncate(b, 4)
    assert cache.cached_len(cache.add(prompt)) == 0
    check(cache, {b: [1, 2, 3, 4, 1, 1], c: [0, 0, 0, 2, 2]})


def test_full_slots_are_an_error_that_changes_nothing():
    cache = make(slots=(3,))
    seqs = [cache.add(), cache.add()]
    run(cache, seqs, [[1], [2]], [[], []])
    used = cache.blocks.stats().used, cache.states.stats().used
    with pytest.raises(numkv.CacheFull):
        cache.reserve(seqs, 1)
    assert (cache.blocks.stats().used, cache.states.stats().used) == used
    check(cache, dict(zip(seqs, [[1], [2]], strict=True)))


def test_what_states_do_not_allow():
    cache = make()
    seq = cache.add()
    run(cache, [seq], [[1, 2, 3]], [[]])
    with pytest.raises(numkv.NotSupported, match="states are of all tokens"):
        cache.compact(seq, [0, 1])
    step = cache.reserve([seq], 2)
    zeros = np.zeros((2, 1, 8), np.float32)
    for layer in ROWS:
        step.append(layer, zeros, zeros)
    with pytest.raises(numkv.NumkvError, match="got none in layer 0 and others"):
        cache.commit(step)
    step.mark_written()
    with pytest.raises(numkv.NotSupported, match="all tokens of a sequence or none"):
        cache.commit(step, [1])
    with pytest.raises(numkv.NotSupported, match="layer 0, which has none"):
        step.append(0, zeros, zeros)
    with pytest.raises(numkv.NotSupported, match="layer 1"):
        step.read_state(1)
    good = np.zeros((1, 2, 3), np.float32), np.zeros((1, 4), BF16)
    with pytest.raises(numkv.DimensionMismatch, match="expected 2 arrays"):
        step.write_state(0, good[0])
    with pytest.raises(numkv.UnsupportedDType, match="states"):
        step.write_state(0, good[0].astype(np.float64), good[1])
    with pytest.raises(numkv.DimensionMismatch, match="states"):
        step.write_state(0, good[0][:, :1], good[1])
    cache.rollback(step)
    with pytest.raises(numkv.NumkvError, match="open step"):
        step.state(0)
    check(cache, {seq: [1, 2, 3]})


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"states": {0: [1]}}, TypeError, "states"),
        ({"states": {0: [((0,), "float32")]}}, numkv.DimensionMismatch, "states"),
        ({"states": {0: [((1,), "complex64")]}}, numkv.UnsupportedDType, "states"),
        ({"states": {0: 5}}, TypeError, "states"),
        ({"state_slots": None}, TypeError, "state_slots"),
        ({"state_slots": 5}, TypeError, "state_slots"),
        ({"state_slots": numkv.StateSlots(4, 3)}, ValueError, "checkpoint_every"),
        ({"states": None}, TypeError, "state_slots"),
        ({"num_kv_heads": [None] * 3}, ValueError, "layers"),
        ({"shares": {1: 0}}, ValueError, "shares"),
    ],
)
def test_odd_arguments(options, error, name):
    given = {
        "num_kv_heads": [None, 1, 1], "head_dim": 8, "num_blocks": 8, "block_size": 2, "states": STATES,
        "state_slots": numkv.StateSlots(4),
    }  # fmt: skip
    with pytest.raises(error, match=name):
        paged_kv_cache(3, **given | options)
    for numbers in ((-1,), (4, 0)):
        with pytest.raises(numkv.DimensionMismatch):
            numkv.StateSlots(*numbers)


def test_arrays_for_ones_own_kernels():
    cache = make()
    a, b = cache.add(), cache.add()
    run(cache, [b], [[4]], [[]])
    step = cache.reserve([a, b], 1)
    state = step.state(0)
    assert state.read[0] == state.write[0] != state.write[1] != state.read[1]
    assert state.arrays[0].shape == (40, 2, 3)
    assert (state.arrays[0][state.read[0]] == 0).all()
    for layer in STATES:
        for x in step.state(layer).arrays:
            x[state.write] = x[state.read] + 1
        step.mark_written(layer)
    for layer in ROWS:
        step.append(layer, *[np.zeros((2, 1, 8), np.float32)] * 2)
    cache.commit(step)
    found = states_of(cache, b)
    assert found[0].tolist() == (of_text([4])[0] + 1).tolist()
    assert found[2].tolist() == [5] * 5


def test_bytes_copies_pickles_and_files(tmp_path):
    cache = make(slots=(10,))
    slot = 6 * 4 + 4 * 2 + 5 * 4
    without = numkv.PagedKVCache(2, 1, 8, num_blocks=64, block_size=2, kind="fp32")
    assert cache.nbytes == without.nbytes + 10 * slot
    budget = paged_kv_cache(
        3, [None, 1, 1], 8, max_nbytes=cache.nbytes, block_size=2, kind="fp32", states=STATES,
        state_slots=numkv.StateSlots(10),
    )  # fmt: skip
    assert budget.num_blocks == 64
    seqs = [cache.add(), cache.add()]
    run(cache, seqs, [[1, 2, 3, 4], [5]], [[], []])
    seqs.append(cache.fork(seqs[0]))
    texts = dict(zip(seqs, [[1, 2, 3, 4], [5], [1, 2, 3, 4]], strict=True))
    numkv.save(tmp_path / "cache", cache)
    numkv.save(tmp_path / "sequences", [cache.swap_out(seq) for seq in seqs])
    for other in (cache.copy(), pickle.loads(pickle.dumps(cache)), numkv.load(tmp_path / "cache")):
        check(other, texts)
        run(other, [seqs[0]], [[9]], [texts[seqs[0]]])
        assert states_of(other, seqs[0])[2].tolist() == of_text([1, 2, 3, 4, 9])[2].tolist()
    check(cache, texts)
    other = make(slots=(4,))
    for one in numkv.load(tmp_path / "sequences"):
        other.swap_in(one)
    check(other, texts)
    swapped = cache.swap_out(seqs[0])
    assert swapped.nbytes == sum(x.nbytes for part in swapped.buffers for x in part) + slot
    with pytest.raises(numkv.DimensionMismatch):
        numkv.PagedKVCache(3, 1, 8, num_blocks=8, block_size=2, kind="fp32").swap_in(swapped)
    cache.clear()
    assert cache.states.stats().used == 0
    cache.check()


def test_any_calls_in_any_order():
    rng = np.random.default_rng(3)
    cache, texts = make(slots=(20,), num_blocks=80), {}
    cut = full = hits = 0
    for turn in range(250):
        one = int(rng.choice(list(texts))) if texts else None
        action = rng.choice(["add", "grow", "grow", "grow", "fork", "cut", "remove", "swap"])
        try:
            if action == "add" or one is None:
                prompt = rng.integers(0, 2, rng.integers(0, 9)).tolist()
                seq = cache.add(prompt)
                texts[seq] = prompt[: cache.cached_len(seq)]
                hits += cache.cached_len(seq) > 0
            elif action == "grow":
                some = [int(s) for s in rng.permutation(list(texts))[: rng.integers(1, 3)]]
                new = [rng.integers(0, 2, rng.integers(0, 5)).tolist() for _ in some]
                commit = rng.random() < 0.8
                run(
                    cache, some, new, [texts[s] for s in some], named=rng.random() < 0.9, commit=commit
                )  # fmt: skip
                for seq, text in zip(some, new if commit else [[]] * len(some), strict=True):
                    texts[seq] = texts[seq] + text
            elif action == "fork":
                texts[cache.fork(one)] = texts[one]
            elif action == "cut":
                length = int(rng.integers(0, len(texts[one]) + 1))
                cache.truncate(one, length)
                cut += 0 < length < len(texts[one])
                texts[one] = texts[one][:length]
            elif action == "swap":
                texts[cache.swap_in(cache.swap_out(one))] = texts[one]
            else:
                cache.remove(one)
                del texts[one]
        except numkv.CacheFull:
            full += 1
            cache.remove(one)
            del texts[one]
        except numkv.NotSupported:
            assert action == "cut"
        cache.check()
        if turn % 5 == 0 and cache.states.num_free:
            check(cache, texts)
    assert min(cut, full, hits) > 2
