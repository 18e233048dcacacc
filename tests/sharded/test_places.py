"""Where tokens are placed, found and moved to."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paged_caches import check_attention
from sharded_caches import grow, make, one, same

import numkv
from numkv.ray.sequences import (
    Sequence,
    columns_of_tokens,
    counts,
    cut,
    joined,
    kept_after_loss,
    place,
    visible,
)
from numkv.ray.shard import Shard
from numkv.store import PrefixStore

runs = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=8)


@given(runs, st.integers(0, 40), st.integers(-1, 9))
def test_what_queries_see_adds_up(given_runs, first, window):
    """Over all columns each query sees itself and as many earlier tokens as its window has."""
    of_token = columns_of_tokens(given_runs)
    positions = np.arange(min(first, len(of_token)), len(of_token))
    seen = [visible(given_runs, column, positions, window) for column in range(4)]
    for i, at in enumerate(positions):
        low = 0 if window < 0 else max(0, at - window)
        for column in range(4):
            own = np.flatnonzero(of_token == column)
            wanted = own[(own >= low) & (own <= at)]
            np.testing.assert_array_equal(own[slice(*seen[column][i])], wanted)


@given(runs, st.integers(0, 45))
def test_runs_are_cut_and_joined(given_runs, length):
    of_token = columns_of_tokens(given_runs)
    np.testing.assert_array_equal(columns_of_tokens(cut(given_runs, length)), of_token[:length])
    both = joined(cut(given_runs, length))
    np.testing.assert_array_equal(columns_of_tokens(both), of_token[:length])
    assert all(a[0] != b[0] for a, b in itertools.pairwise(both))


@given(
    st.lists(st.integers(1, 9), max_size=6), st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.integers(1, 3), st.integers(1, 4),
)  # fmt: skip
def test_places_are_blocks_that_are_free(steps, free, block_size, stripe):
    """No column gets more than it has; there is no place only where blocks are too few for all."""
    left, runs = list(free), ()
    for n in steps:
        before, length = list(left), sum(count for _, count in runs)
        found = place(runs, n, block_size, stripe * block_size, left)
        needs = -(-(length + n) // block_size) - -(-length // block_size)
        if found is None:
            assert needs > sum(before)
            assert left == before
            return
        runs = joined(runs, found)
        assert sum(counts(found).values()) == n
        assert sum(before) - sum(left) == needs
        assert min(left) >= 0
        assert all(count % block_size == 0 for _, count in runs[:-1])


@given(runs, st.integers(0, 3), st.integers(0, 12))
def test_what_is_kept_after_a_loss(given_runs, column, found):
    state = Sequence(runs=joined(given_runs))
    own = np.flatnonzero(columns_of_tokens(state.runs) == column)
    wanted = state.length if found >= len(own) else own[found]
    assert kept_after_loss(state, {column: found}) == wanted


def test_sequences_go_where_most_blocks_are_free():
    cache = make((1, 3, 64))
    for n in (9, 4, 2, 3):
        grow(cache, {cache.add(): np.arange(n)})
    assert [cache.runs(seq)[0][0] for seq in cache.sequences] == [0, 1, 2, 2]


def test_a_sequence_moves_to_another_column():
    cache = make((2, 2, 64))
    a, b = cache.add(), cache.add()
    grow(cache, {a: np.arange(9), b: np.arange(5)})
    cache.move(a, 1)
    assert cache.runs(a) == ((1, 9),)
    cache.check()
    for seq, n in ((a, 12), (b, 6)):
        grow(cache, {seq: np.arange(n)})
        check_attention(cache, same, np.asarray, seq, np.arange(n))
    with pytest.raises(numkv.NotSupported, match="without tokens of sequence"):
        cache.move(a, 1)
    with pytest.raises(IndexError, match="to"):
        cache.move(a, 2)


def test_moves_take_numbers_as_other_calls_do():
    cache = make((1, 2, 64))
    seq = cache.add()
    grow(cache, {seq: np.arange(5)})
    ((column, _),) = cache.runs(seq)
    for source, error in (("x", TypeError), (True, TypeError), (-1, IndexError), (2, IndexError)):
        with pytest.raises(error, match="`source`"):
            cache.move(seq, 1 - column, source)
    with pytest.raises(TypeError, match="`most`"):
        cache.balance(1.5)
    with pytest.raises(numkv.DimensionMismatch, match="`most`"):
        cache.balance(-1)
    cache.move(np.array(seq), np.array(1 - column), np.array(column))
    assert cache.runs(seq) == ((1 - column, 5),)
    check_attention(cache, same, np.asarray, seq, np.arange(5))
    cache.check()


def test_a_column_that_is_full_takes_nothing():
    cache = make((1, 2, 64), num_blocks=8)
    a, b = cache.add(), cache.add()
    grow(cache, {a: np.arange(12), b: np.arange(12)})
    with pytest.raises(numkv.CacheFull):
        cache.move(a, 1)
    assert cache.runs(a) == ((0, 12),)
    cache.check()
    check_attention(cache, same, np.asarray, a, np.arange(12))


def test_balance_moves_until_columns_are_alike():
    cache = make((1, 2, 64), num_blocks=64)
    seqs = [cache.add() for _ in range(6)]
    for seq in seqs:
        grow(cache, {seq: np.arange(8)})
    for seq in seqs:
        if cache.runs(seq)[0][0] == 1:
            cache.remove(seq)
    assert cache.balance(9) == 1
    assert sorted(cache.runs(seq)[0][0] for seq in cache.sequences) == [0, 0, 1]
    cache.check()


@pytest.mark.parametrize("layout", [(2, 1, None), (1, 2, 4), (2, 2, 2)], ids=str)
def test_prompts_share_blocks(layout):
    """By context too: a block is found in the column where it was stored."""
    cache = make(layout, num_blocks=64)
    prompt = np.arange(21) % 9
    a = cache.add(prompt)
    grow(cache, {a: prompt})
    b, c, d = (
        cache.add(prompt),
        cache.add([*prompt[:10], 77, 78]),
        cache.add(prompt, extra={"x": 1}),
    )
    assert [cache.cached_len(s) for s in (b, c, d)] == [20, 10, 0]
    for seq, text in ((b, prompt), (c, np.array([*prompt[:10], 77, 78]))):
        grow(cache, {seq: text})
        check_attention(cache, same, np.asarray, seq, text)
    cache.remove(a)
    e = cache.add([*prompt, 5])
    assert cache.cached_len(e) == 20
    cache.check()


@pytest.mark.parametrize("layout", [(2, 1, None), (1, 2, 4)], ids=str)
def test_another_cache_finds_prompts_in_the_store(layout, tmp_path):
    prompt = np.arange(21) % 9
    store = {"place": tmp_path, "mark": "tests"}
    first = make(layout, store=store)
    grow(first, {first.add(prompt): prompt})
    assert first.flush() == 0
    second = make((layout[0], 2 * layout[1], layout[2]) if layout[1] > 1 else layout, store=store)
    seq = second.add(prompt)
    assert second.cached_len(seq) == 20
    grow(second, {seq: prompt})
    check_attention(second, same, np.asarray, seq, prompt)
    second.check()
    if layout[0] == 1:  # the heads are all there: a cache of one process finds them too
        from numkv.store import PrefixStore

        with PrefixStore(tmp_path, mark="tests") as prefixes:
            whole = one(store=prefixes)
            assert whole.cached_len(whole.add(prompt)) == 20


def test_forks_share_and_part():
    for layout in ((2, 1, None), (1, 2, 2)):
        cache = make(layout)
        a = cache.add()
        grow(cache, {a: np.arange(7)})
        b = cache.fork(a)
        grow(cache, {a: np.arange(9), b: np.array([0, 1, 2, 3, 4, 5, 6, 50])})
        check_attention(cache, same, np.asarray, a, np.arange(9))
        check_attention(cache, same, np.asarray, b, np.array([0, 1, 2, 3, 4, 5, 6, 50]))
        cache.check()


@pytest.mark.nightly
def test_scales_of_heads_are_divided_among_shards():
    for layout in ((2, 1, None), (1, 2, 2)):
        caches = make(layout, kind="fp8_e4m3"), one(kind="fp8_e4m3")
        outs = []
        for cache in caches:
            cache.set_scales(0, k=np.array([0.5, 2.0], np.float32), v=np.float32(0.25))
            outs.append(grow(cache, {cache.add(): np.arange(6)})[0])
        np.testing.assert_allclose(outs[0], outs[1], rtol=1e-5, atol=1e-5)
        with pytest.raises(numkv.NumkvError, match="without sequences"):
            caches[0].set_scales(0, k=1.0)


def test_blocks_that_were_evicted_are_found_where_they_are_computed_again():
    cache = make((1, 2, 64), num_blocks=12)
    prompt = np.arange(9)
    first = cache.add(prompt)
    grow(cache, {first: prompt})
    ((old, _),) = cache.runs(first)
    cache.remove(first)
    others = [cache.add(), cache.add()]
    for seq in others:  # they fill both columns
        grow(cache, {seq: np.arange(100, 124)}, salt=1, named=False)
    again = cache.add(prompt)
    assert cache.cached_len(again) == 0
    cache.remove(next(seq for seq in others if cache.runs(seq)[0][0] != old))
    grow(cache, {again: prompt})
    ((new, _),) = cache.runs(again)
    assert new != old
    assert cache.cached_len(cache.add(prompt)) == 8
    cache.check()


def test_shards_of_another_version_are_refused():
    """They may understand messages in another way."""
    shard = make()._shards._spec(0)
    with pytest.raises(
        numkv.NotSupported, match=rf"expected numkv 9\.9 .* got {numkv.__version__}"
    ):
        Shard(shard._replace(version="9.9"))


@pytest.mark.parametrize("layout", [(1, 1, None), (2, 1, None)], ids=str)
@pytest.mark.parametrize("store", [{}, {"mark": None}], ids=str)
def test_a_store_without_a_mark_is_refused(layout, store, tmp_path):
    """By heads, too, where marks of shards have their heads in addition: other models would share blocks."""
    with pytest.raises(TypeError, match="mark"):
        make(layout, store={"place": tmp_path, **store})


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("store", "a folder"),
        ("store", PrefixStore),
        ("limits", 8),
        ("limits", {"messages": 8}),
        ("transport", "auto"),
    ],
    ids=str,
)
def test_arguments_of_other_types_are_refused_by_name(name, given, tmp_path):
    if given is PrefixStore:  # what a PagedKVCache takes
        given = PrefixStore(tmp_path, mark="a")
    options = {"shards" if name == "transport" else name: given}
    with pytest.raises(TypeError, match=f"`{name}`: expected .* got {type(given).__name__}"):
        make((2, 1, None), **options)
