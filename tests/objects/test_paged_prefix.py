"""Prefixes that sequences of a `PagedKVCache` share."""

import numpy as np
import pytest
from paged_caches import check_attention, fill, grow, make, started, write

import numkv
from numkv.caches.paged.prefix_match import split_at_window
from numkv.caches.paged.store import blocks_in


@pytest.fixture
def cpu():
    """`to` and `host` of tests that are about the host's bookkeeping."""
    return np.asarray, np.asarray


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_a_second_prompt_shares_the_first_ones_blocks(target, to, host, kind):
    cache = make(target=target, kind=kind)
    first = started(cache, to, PROMPT)
    used = cache.stats().pool.used
    text = PROMPT[:6] + [7, 7, 7]
    second = cache.add(text)
    assert cache.cached_len(second) == cache.length(second) == 6
    assert cache.stats().pool.used == used
    tables = [cache._sequences[s].tables[0] for s in (first, second)]
    assert np.array_equal(tables[0][:3], tables[1])
    grow(cache, to, second, text)
    check_attention(cache, to, host, first, PROMPT, kind=kind)
    check_attention(cache, to, host, second, text, kind=kind)


@pytest.mark.parametrize(
    ("length", "cached"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (8, 7), (9, 8)]
)
def test_the_last_token_is_left_to_compute(cpu, length, cached):
    """And of a block that is not needed whole, a part is copied."""
    cache = make()
    started(cache, cpu[0], PROMPT)
    assert cache.cached_len(cache.add(PROMPT[:length])) == cached
    cache.check()


def test_what_is_shared_stays_findable_without_a_sequence(cpu):
    to, host = cpu
    cache = make()
    cache.remove(started(cache, to, PROMPT))
    assert cache.stats().pool.used == 0
    seq = cache.add(PROMPT)
    assert cache.cached_len(seq) == 8
    grow(cache, to, seq, PROMPT)
    check_attention(cache, to, host, seq, PROMPT)


def test_extra_keys_keep_prompts_apart(cpu):
    to, host = cpu
    cache = make()
    extras = [None, {"adapter": 7}, {"adapter": 8}, {"salt": b"a"}, {"adapter": 7, "salt": b"a"}]
    seqs = []
    for salt, extra in enumerate(extras):
        seqs.append(cache.add(PROMPT, extra=extra))
        assert cache.cached_len(seqs[-1]) == 0
        grow(cache, to, seqs[-1], PROMPT[:4], salt=salt)
    for salt, extra in enumerate(extras):
        again = cache.add(PROMPT[:5], extra=extra)
        assert cache.cached_len(again) == 4
        for seq in (seqs[salt], again):
            check_attention(cache, to, host, seq, PROMPT[:4], salt=salt)


def test_nothing_of_the_callers_objects_is_kept(cpu):
    """What they say later is not what the cache was told."""
    to, host = cpu
    cache = make(num_blocks=40)
    started(cache, to, PROMPT, extra={"adapter": 1})
    tokens, extra = np.array(PROMPT, np.int32), {"adapter": 1}
    seq, empty = cache.add(tokens, extra=extra), cache.add(extra=extra)
    tokens[:], extra["adapter"] = 8, 2
    grow(cache, to, empty, [7, 7, 7])
    other = make()
    other.swap_in(cache.swap_out(seq))
    assert other.cached_len(other.add(PROMPT, extra={"adapter": 1})) == 8
    assert other.cached_len(other.add([8] * 9, extra={"adapter": 1})) == 0
    assert cache.cached_len(cache.add([7, 7, 7], extra={"adapter": 1})) == 2
    assert cache.cached_len(cache.add([7, 7, 7], extra={"adapter": 2})) == 0


def test_groups_never_share_with_one_another(cpu):
    """Two groups hold other layers of the same tokens; whatever the extra keys are called."""
    to, host = cpu
    cache = make(4, windows=[-1, 50, -1, 50])
    seqs = [started(cache, to, PROMPT)]
    seqs += [started(cache, to, PROMPT), cache.fork(seqs[0])]
    for group in (0, 1):
        other = cache.add(PROMPT, extra={"numkv group": group})
        assert cache.cached_len(other) == 0
    held = [set(t.tolist()) for t in cache._sequences[seqs[0]].tables]
    assert not held[0] & held[1]
    for seq in seqs:
        check_attention(cache, to, host, seq, PROMPT)


def test_without_ids_nothing_is_findable(cpu):
    to, _ = cpu
    cache = make()
    seq = started(cache, to, PROMPT[:5], named=False)
    grow(cache, to, seq, PROMPT)  # what comes before is not known, so this cannot be named
    assert cache.cached_len(cache.add(PROMPT)) == 0
    assert cache.stats().pool.cached == 0
    cache.truncate(seq, 0)
    grow(cache, to, seq, PROMPT)
    assert cache.cached_len(cache.add(PROMPT)) == 8


def test_a_block_that_fills_up_over_steps_is_findable(cpu):
    to, _ = cpu
    cache = make(block_size=4)
    seq = cache.add()
    for n in range(1, 10):
        grow(cache, to, seq, PROMPT[:n])
        assert cache.stats().pool.cached == n // 4
    assert cache.cached_len(cache.add(PROMPT)) == 8


def test_sliding_layers_need_their_window_only(cpu):
    """A long prompt is found though the sliding layers' first blocks have been given to others."""
    to, host = cpu
    cache = make(2, windows=[-1, 3], num_blocks=60)
    text = [n % 7 for n in range(41)]
    seq = cache.add()
    for n in range(2, 42, 3):
        grow(cache, to, seq, text[:n])
    table = cache._sequences[seq].tables[1]
    assert (table[:18] == -1).all()
    assert (table[18:] >= 0).all()
    squeeze = cache.add()
    fill(cache, [squeeze], 2 * (cache.num_free // 2))
    assert cache.stats().pool.evictions >= 10
    cache.remove(squeeze)
    again = cache.add(text)
    assert cache.cached_len(again) == 40
    grow(cache, to, again, text)
    check_attention(cache, to, host, again, text)
    assert cache.cached_len(cache.add(text[:30])) == 0  # its window is gone


@pytest.mark.parametrize("window", [0, 1, 2, 3, 4, 7])
def test_the_longest_prefix_that_every_group_has(cpu, monkeypatch, window):
    """Holes in the sliding group, against a search of all lengths one by one."""
    to, host = cpu
    size, blocks = 2, 10
    text = list(range(2 * blocks + 1))
    rng = np.random.default_rng(window)
    for _ in range(20):
        cache = make(2, windows=[-1, window], num_blocks=60)
        step = cache.reserve([cache.add()], [len(text)])  # registered before the window moves
        write(step, to, [text], [0])
        with monkeypatch.context() as patch:
            where = "numkv.caches.paged.reservation.split_at_window"
            patch.setattr(where, lambda store, tables, length: (tables, []))
            cache.commit(step, token_ids=text)
        state = cache._sequences[0]
        lost = rng.random((2, blocks)) < [[0.04], [0.3]]
        for table, gone in zip(state.tables, lost, strict=True):
            cache.blocks.forget(table[:blocks][gone])
        tables, behind = split_at_window(cache._store, state.tables, state.length)
        cache._exchange({0: state._replace(tables=tables)}, blocks_in(behind))
        want = max(
            n
            for n in range(blocks + 1)
            if not lost[0, :n].any()
            and not lost[1, max(0, n * size - 1 - window) // size : n].any()
        )
        seq = cache.add(text)
        assert cache.cached_len(seq) == want * size
        cache.check()
        if want:
            check_attention(cache, to, host, seq, text[: want * size])


def test_the_end_of_a_prefix_is_evicted_first(cpu):
    """In all groups alike: what one has more of than another is of no use."""
    to, host = cpu
    cache = make(2, windows=[-1, 50], num_blocks=24)
    # 4 blocks in each group, and a part of one that is no more.
    cache.remove(started(cache, to, PROMPT))
    other = cache.add()
    fill(cache, [other], 18)  # 18 blocks, of which two were cached
    assert cache.stats().pool.evictions == 2
    cache.remove(other)
    again = cache.add(PROMPT)
    assert cache.cached_len(again) == 6
    grow(cache, to, again, PROMPT)
    check_attention(cache, to, host, again, PROMPT)


@pytest.mark.parametrize("kind", ["fp32", "int8"])
@pytest.mark.parametrize("windows", [None, [-1, 3]])
def test_prefixes_are_taken_over_to_the_token(target, to, host, kind, windows):
    """Of live sequences and of cached blocks, from the beginning and later; the others stay as they are."""
    cache = make(2, block_size=4, windows=windows, kind=kind, target=target)
    texts = {started(cache, to, PROMPT): PROMPT}
    for common, rest in ((9, [8]), (6, [7, 7, 7]), (3, [0]), (7, [7, 7])):
        text = PROMPT[:common] + rest
        seq = cache.add(text)
        assert cache.cached_len(seq) == cache.length(seq) == common
        grow(cache, to, seq, text)
        texts[seq] = text
    for seq, text in texts.items():
        check_attention(cache, to, host, seq, text, kind=kind)
    cache.check()


def test_parts_of_blocks_that_are_only_cached(cpu):
    to, host = cpu
    cache = make(block_size=4)
    for salt, text in enumerate([PROMPT[:8], [*PROMPT[:4], 5, 9, 7, 7], [*PROMPT[:4], 5, 1, 1, 1]]):
        cache.remove(started(cache, to, text))
        assert salt < 3
    seq = cache.add([*PROMPT[:4], 5, 9, 7, 1, 1])
    assert cache.cached_len(seq) == 7
    cache.remove(seq)
    assert cache.cached_len(cache.add([*PROMPT[:4], 5, 3, 3])) == 5
    assert cache.cached_len(cache.add([*PROMPT[:4], 8, 9, 7])) == 4
    assert cache.cached_len(cache.add([*PROMPT[:4], 5, 9, 7], extra={"adapter": 1})) == 0


def test_a_full_pool_takes_over_full_blocks_only(cpu):
    to, _ = cpu
    cache = make(block_size=4, num_blocks=3)
    first = started(cache, to, PROMPT)
    second = cache.add(PROMPT)
    assert cache.cached_len(second) == 8
    cache.check()
    cache.remove(second)
    cache.remove(first)
    assert cache.stats().pool.used == 0


def test_what_follows_is_forgotten_with_what_is_evicted(cpu):
    """However many prompts there were: what is noted of blocks is bounded by the blocks that there are."""
    to, _ = cpu
    cache = make(1, block_size=2, num_blocks=4)
    for n in range(400):
        cache.remove(started(cache, to, [n, n, n + 1, n]))
    assert cache._store.continuations._count <= 2 * 4 + 256
    assert cache.cached_len(cache.add([399, 399, 400, 1, 1])) == 3


# ---------------------------------------------------------------- prompts that are passed once more


def passed(cache, seq, ids, num_tokens):
    """What `commit` says of ids; the step is rolled back where it is an error."""
    step = cache.reserve([seq], [num_tokens])
    for layer in range(cache.num_layers):
        step.append(layer, *np.ones((2, num_tokens, 1, 8), np.float32))
    try:
        cache.commit(step, token_ids=ids)
    except ValueError as error:
        cache.rollback(step)
        return str(error)
    return ""


def found_of(prompt, before):
    """A cache with a sequence whose prompt is found as far as `before` begins alike."""
    cache = numkv.PagedKVCache(1, 1, 8, num_blocks=32, block_size=4, kind="fp32")
    assert passed(cache, cache.add(), before, len(before)) == ""
    return cache, cache.add(prompt)


def test_a_prompt_that_is_passed_once_more_is_refused():
    prompt = np.arange(20)
    cache, seq = found_of(prompt, prompt[:9])
    assert cache.cached_len(seq) == 9
    said = passed(cache, seq, prompt, 20)
    assert "the tokens after the 9 that `add` has found for sequence 1" in said
    assert said.endswith("commit the rest, prompt[cache.cached_len(seq):]")
    assert "has found for sequence 1" in passed(cache, seq, prompt[:10], 10)  # a first part of it
    said = passed(cache, seq, prompt, 11)
    assert said.endswith(
        "`add` has found 9 tokens of sequence 1: leave them out, prompt[cache.cached_len(seq):]"
    )
    assert passed(cache, seq, prompt[:7], 11).endswith("got shape (7,)")
    assert cache.length(seq) == 9
    assert passed(cache, seq, prompt[9:], 11) == ""
    assert passed(cache, seq, prompt, 20) == ""  # what is said later may be anything
    cache.check()


def test_a_prompt_that_repeats_itself_is_not():
    """All of what is left is the beginning once more, and more than is left may be drafts."""
    prompt = np.zeros(21, np.int64)
    for ids in (prompt[12:], prompt):
        cache, seq = found_of(prompt, prompt[:12])
        assert cache.cached_len(seq) == 12
        assert passed(cache, seq, ids, len(ids)) == ""


def test_other_ids_than_those_of_the_prompt_are_taken():
    """After a truncation, in a fork, and where they are not the prompt's beginning."""
    prompt = np.arange(20)
    cache, seq = found_of(prompt, prompt[:9])
    fork = cache.fork(seq)
    assert passed(cache, fork, prompt, 20) == ""
    cache.truncate(seq, 4)
    assert passed(cache, seq, prompt[:12], 12) == ""
    cache, seq = found_of(prompt, prompt[:9])
    assert passed(cache, seq, prompt + 1, 20) == ""
    cache, seq = found_of(prompt, prompt[:9])
    assert passed(cache, seq, [0], 1) == ""  # by chance the prompt's first
