"""`CausalCache`: many sequences in one set of cells.

The tables of the reference system's own tests, with masks drawn as text: ``0`` is visible, ``x`` is not, a group is
a row of the batch. Every table is run past the oracle too. Here a token's K is one number and its V is that number
and its opposite, which every kind stores as it is.
"""

import naive
import naive_cells
import numpy as np
import pytest
from cell_numbers import LAST, make, numbers
from cell_problems import draw

import numkv

F32, F16 = np.float32, np.float16
storages = pytest.mark.parametrize(
    ("kind", "permuted"),
    [("fp32", False), ("fp16", True), ("int8", False), ("int8", True)],
    ids=["fp32", "fp16-permuted", "int8", "int8-permuted"],
)


# ---------------------------------------------------------------- the reference system's own tests


@storages
def test_store(target, to, host, kind, permuted):
    """Three heads of two numbers; K and V are the same."""
    cache = numkv.CausalCache()
    cache.set_config(numkv.CacheConfig(permuted_v=permuted))
    cache.init(kind, 1, 16, 16, target)
    rows = np.array(
        [[[100 * i + 10 * j + t for i in (1, 2)] for j in (1, 2, 3)] for t in (1, 2, 3, 4, 5)], F32
    )
    assert rows[0].ravel().tolist() == [111, 211, 121, 221, 131, 231]
    for part, positions, mask in (
        (rows[:4], [0, 1, 2, 3], "0xxx / 00xx / 000x / 0000"),
        (rows[4:], [4], "00000"),
    ):
        cache.start_forward(numkv.Batch(positions, [0] * len(positions)))
        cache.put(0, to(part), to(part))
        k, v, got = (host(x) for x in cache.get(0))
        want = naive_cells.as_stored(rows[: positions[-1] + 1], kind)
        assert draw(got) == mask
        assert np.allclose(k.astype(F32), want, rtol=1e-6, atol=0)
        assert np.allclose(
            v.astype(F32), want.transpose(1, 2, 0) if permuted else want, rtol=1e-6, atol=0
        )
        assert np.abs(k.astype(F32) - rows[: len(k)]).max() <= 231 / 254


@storages
def test_sliding_window(target, kind, permuted):
    pair = make(target, "sliding", kind=kind, config={"permuted_v": permuted})
    pair.step([1, 2, 3, 4], [0, 1, 2, 3], [0] * 4, [1, 2, 3, 4], "0xxx / 00xx / x00x / xx00")
    pair.step([5, 6], [4, 5], [0, 0], [5, 6, 3, 4], "0xx0 / 00xx")


@storages
def test_chunks(target, kind, permuted):
    pair = make(target, "chunked", kind=kind, config={"permuted_v": permuted})
    pair.step([1, 2, 3, 4], [0, 1, 2, 3], [0] * 4, [1, 2, 3, 4], "0xxx / 00xx / xx0x / xx00")
    pair.step([5, 6, 7], [4, 5, 6], [0] * 3, [1, 2, 3, 4, 5, 6, 7], "xxxx0xx / xxxx00x / xxxxxx0")
    pair.step([8, 9], [7, 8], [0] * 2, list(range(1, 10)), "xxxxxx00x / xxxxxxxx0")


@storages
def test_sequences(target, kind, permuted):
    """Ids are not bounded by `max_sequences`."""
    pair = make(target, kind=kind, config={"permuted_v": permuted})
    pair.step([1, 2, 3, 4], [0, 1, 0, 1], [0, 0, 1, 1], [1, 2, 3, 4], "0xxx / 00xx / xx0x / xx00")
    pair.step([5, 6], [2, 2], [0, 1], [1, 2, 3, 4, 5, 6], "00xx0x / xx00x0")


@storages
def test_remove(target, kind, permuted):
    """K moves with its position, V does not."""
    pair = make(target, kind=kind, shift=True, config={"permuted_v": permuted})
    pair.step([1, 2, 3, 4], [0, 1, 0, 1], [0, 0, 1, 1], [1, 2, 3, 4], "0xxx / 00xx / xx0x / xx00")
    assert pair.change("remove", 0, 1)
    pair.step([5, 6], [1, 2], [0, 1], [1, 5, 3, 4, 6], "00xxx / xx000")
    assert pair.change("remove", 0, 0, 1)
    pair.step(
        [7, 8], [1, 2], [0, 0], [7, 4, 3, 4, 6, 8], "00xxxx / 00xxx0", v_shown=[7, 5, 3, 4, 6, 8]
    )


def test_can_resume(target):
    pair = make(target, "sliding", {"window_left": 4}, window=4)
    pair.step(
        [1, 2, 3, 4, 5], range(5), [0] * 5, [1, 2, 3, 4, 5],
        "0xxxx / 00xxx / 000xx / 0000x / 00000",
    )  # fmt: skip
    assert [pair.cache.can_resume(0, p) for p in range(5)] == [True] * 5
    pair.step([6], [5], [0], [6, 2, 3, 4, 5], "00000")
    assert [pair.cache.can_resume(0, p) for p in range(6)] == [False] * 5 + [True]


# ---------------------------------------------------------------- more facts


@storages
def test_padding(target, kind, permuted):
    pair = make(target, sizes=(1, 6, 6), kind=kind, config={"padding": 4, "permuted_v": permuted})
    assert pair.cache.num_cells == 8
    pair.step([1, 2], [0, 1], [0, 0], [1, 2, 0, 0], "0xxx / 00xx")
    pair.step(
        [3, 4, 5], [2, 3, 4], [0] * 3, [1, 2, 3, 4, 5, 0, 0, 0],
        "000xxxxx / 0000xxxx / 00000xxx",
    )  # fmt: skip


def test_a_range_that_begins_further_on(target):
    """`get` shows the cells of the batch's sequences, rounded to the padding at both ends."""
    pair = make(target, sizes=(2, 6, 6), config={"padding": 2})
    pair.step([1, 2, 3], [0, 1, 2], [0] * 3, [1, 2, 3, 0], "0xxx / 00xx / 000x")
    pair.step([4, 5], [0, 1], [1] * 2, [3, 4, 5, 0], "x0xx / x00x")
    pair.step([6], [2], [1], [3, 4, 5, 6], "x000")


@pytest.mark.parametrize("dtype", naive.DTYPES)
def test_mask_dtypes(target, dtype):
    pair = make(target, config={"mask_dtype": dtype})
    pair.step([1, 2], [0, 1], [0, 0], [1, 2], "0x / 00")


def test_full(target, host):
    pair = make(target, sizes=(1, 4, 2))
    pair.step([1, 2, 3], [0, 1, 2], [0] * 3, [1, 2, 3], "0xx / 00x / 000")
    # Cells, free ones, and the size of the batch.
    with pair.refused(numkv.CacheFull, match=r"(?s)(?=.*\b4\b)(?=.*\b1\b)(?=.*\b2\b)"):
        pair.cache.start_forward(numkv.Batch([3, 4], [0, 0]))
    pair.step([4], [3], [0], [1, 2, 3, 4], "0000")


def test_full_does_not_evict(target):
    """Three tokens' room is not made by letting go of two."""
    pair = make(target, "sliding", sizes=(1, 16, 2))
    pair.step([1, 2], [0, 1], [0, 0], [1, 2], "0x / 00")
    assert pair.cache.can_resume(0, 1)
    assert not pair.start_forward([9, 10, 11, 12], [0] * 4)
    assert pair.cache.can_resume(0, 1)
    pair.shows([1, 2], "0x / 00")
    pair.step([3], [2], [0], [3, 2], "00")


def test_set_causal(target):
    pair = make(target)
    rows = ([1, 2, 3, 4], [0, 1, 2, 3], [0] * 4, [1, 2, 3, 4], "0xxx / 00xx / 000x / 0000")
    pair.step(*rows)
    pair.set_causal(0, [1, 2])
    pair.shows([1, 2, 3, 4], "0xxx / 0000 / 0000 / 0000")
    pair.set_causal(0, (2, 1))
    pair.shows([1, 2, 3, 4], "0xxx / 0000 / 0000 / 0000")
    pair.set_causal(0, np.array([0]))
    pair.shows([1, 2, 3, 4], "0000 / 00xx / 000x / 0000")
    pair.set_causal(0)
    pair.shows([1, 2, 3, 4], "0xxx / 00xx / 000x / 0000")
    pair.set_causal(0, [0, 1])
    pair.step([5, 6], [4, 5], [0, 0], [1, 2, 3, 4, 5, 6], "00000x / 000000")


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("sliding", "0000x / 00xxx / x000x / xx00x / xxxx0"),
        ("chunked", "0000x / 00xxx / xx00x / xx00x / xxxx0"),
    ],
)
def test_set_causal_lifts_nothing_else(target, name, mask):
    """Not the window, the chunk or the sequence, which bound what is behind; ahead all is visible."""
    pair = make(target, name)
    assert pair.start_forward([0, 1, 2, 3, 0], [0, 0, 0, 0, 1])
    pair.put(0, *numbers([1, 2, 3, 4, 5]))
    pair.set_causal(0, [0, 2])
    pair.shows([1, 2, 3, 4, 5], mask)


def test_the_window_still_hides_what_is_behind(target):
    pair = make(target, "sliding", {"window_left": 1, "memory": 16}, window=1, memory=16)
    pair.step([1, 2, 3], [0, 1, 2], [0] * 3, [1, 2, 3], "0xx / 00x / x00")
    pair.step([4, 5], [3, 4], [0, 0], [1, 2, 3, 4, 5], "xx00x / xxx00")
    pair.set_causal(0, [0])
    pair.shows([1, 2, 3, 4, 5], "xx000 / xxx00")


def test_reserve(target, host):
    pair = make(target, sizes=(1, 8, 8))
    assert pair.start_forward([0, 1], [0, 0], reserve=True)
    with pytest.raises(IndexError):
        pair.cache.get(0)
    pair.put(0, *numbers([7, 8]))
    pair.shows([0] * 8, "xxxxxxxx / xxxxxxxx")
    pair.step([1, 2], [0, 1], [0, 0], [1, 2], "0x / 00")
    assert pair.start_forward([1, 1, 5], [0, 3, 0], reserve=True)
    pair.put(0, *numbers([7, 8, 9]))
    pair.shows([1, 2] + [0] * 6, "00xxxxxx / xxxxxxxx / 00xxxxxx")
    pair.step([3], [2], [0], [1, 2, 3], "000")


def test_reserve_evicts_nothing(target):
    pair = make(target, "sliding", sizes=(1, 16, 2))
    pair.step([1, 2], [0, 1], [0, 0], [1, 2], "0x / 00")
    assert pair.start_forward([9, 10], [0, 0], reserve=True)
    assert pair.cache.can_resume(0, 1)
    pair.shows([1, 2, 0], "xxx / xxx")


def test_twice_the_same_position(target):
    pair = make(target)
    pair.step([1, 2], [0, 0], [0, 0], [1, 2], "00 / 00")


def test_positions_out_of_order(target):
    pair = make(target)
    pair.step([1, 2, 3], [5, 0, 3], [0] * 3, [1, 2, 3], "000 / x0x / x00")
    pair.step([4, 5], [4, 1], [0, 0], [1, 2, 3, 4, 5], "x0000 / x0xx0")
    assert np.sort(np.asarray(pair.cache.positions(0))).tolist() == [0, 1, 3, 4, 5]


def test_the_first_free_cells_are_taken(target):
    """Wherever they are; and the range has holes and other sequences in it."""
    pair = make(target, sizes=(3, 4, 4))
    pair.step([1, 2, 3], [0, 0, 0], [0, 1, 2], [1, 2, 3], "0xx / x0x / xx0")
    assert pair.change("remove", 1, 0)
    assert pair.change("remove", 0, 0)
    pair.step([4, 5, 6], [0, 1, 1], [4, 4, 2], [4, 5, 3, 6], "0xxx / 00xx / xx00")


@pytest.mark.parametrize("ids", [[0, 10**12, 3], [7, 2**62, 0]])
def test_ids_are_any_integers(target, ids):
    pair = make(target)
    a, b, c = ids
    pair.step([1, 2, 3], [0, 0, 0], [a, b, c], [1, 2, 3], "0xx / x0x / xx0")
    pair.step([4], [1], [b], [2, 3, 4], "0x0")
    assert pair.change("copy_prefix", b, 10**15, 1)
    pair.step([5], [1], [10**15], [2, 3, 4, 5], "0xx0")


def test_positions_come_as_lists_ranges_and_arrays(target):
    pair = make(target)
    pair.step([1], (0,), (0,), [1], "0")
    pair.step([2], range(1, 2), np.array([0]), [1, 2], "00")
    pair.step([3], np.array([2], np.int32), [np.int64(0)], [1, 2, 3], "000")
    pair.step([4], np.array([3], np.uint8), np.array([0], np.uint16), [1, 2, 3, 4], "0000")


def test_the_last_position(target):
    """Sums around the largest position do not wrap."""
    pair = make(target, "sliding", sizes=(2, 16, 2))
    pair.step([1, 2], [LAST - 1, LAST], [0, 0], [1, 2], "0x / 00")
    assert pair.cache.can_resume(0, LAST)
    pair.step([3], [0], [1], [3], "0")
    pair.step([4], [1], [1], [3, 4], "00")
    pair.step([5], [LAST], [0], [1, 2, 3, 4, 5], "00xx0")
    with pair.refused((IndexError, ValueError, numkv.NumkvError)):
        pair.cache.start_forward(numkv.Batch([LAST + 1], [0]))


def test_chunks_at_the_last_position(target):
    pair = make(target, "chunked")
    pair.step([1, 2, 3], [LAST - 2, LAST - 1, LAST], [0] * 3, [1, 2, 3], "0xx / x0x / x00")


# ---------------------------------------------------------------- cells


SIZES = [(1, 16, 16), (2, 16, 2), (2, 2, 2)]


@pytest.mark.parametrize(
    ("window", "memory", "cells"),
    [
        (-1, None, (16, 32, 4)), (1, None, (17, 6, 4)), (1, 3, (19, 8, 4)), (4, 5, (21, 12, 4)),
        (15, None, (31, 32, 4)), (16, None, (16, 32, 4)), (0, None, (16, 4, 4)),
        (0, 2, (18, 6, 4)),
    ],
)  # fmt: skip
def test_num_cells(window, memory, cells):
    for sizes, n in zip(SIZES, cells, strict=True):
        cache = numkv.CausalCache(window_left=window, memory=memory)
        cache.init("fp32", *sizes)
        assert cache.num_cells == n
        assert naive_cells.num_cells(window, memory, *sizes, 1)[0] == n


@pytest.mark.parametrize(("padding", "sizes", "n"), [(256, (1, 16, 16), 256), (4, (1, 6, 6), 8)])
@pytest.mark.parametrize("name", ["causal", "chunked"])
def test_num_cells_are_padded(name, padding, sizes, n):
    pair = make("cpu", name, sizes=sizes, config={"padding": padding})
    assert pair.cache.num_cells == len(pair.cells(0).positions) == n


@pytest.mark.parametrize("sizes", SIZES)
def test_memory_below_the_window(sizes):
    with pytest.raises(ValueError, match="memory"):
        numkv.CausalCache(window_left=4, memory=2).init("fp32", *sizes)
    with pytest.raises(ValueError, match="memory"):
        numkv.CausalCache(window_left=-1, memory=2).init("fp32", *sizes)


def test_an_unlimited_window_is_a_causal_cache(target):
    pair = make(target, "sliding", {"window_left": -1}, sizes=(1, 4, 4), window=-1)
    pair.step([1, 2, 3, 4], range(4), [0] * 4, [1, 2, 3, 4], "0xxx / 00xx / 000x / 0000")
    assert not pair.start_forward([4], [0])
    assert pair.cache.can_resume(0, 2)


def test_a_window_of_none_sees_only_itself(target):
    pair = make(target, "sliding", {"window_left": 0}, sizes=(1, 16, 3), window=0)
    assert pair.cache.num_cells == 3
    pair.step([1, 2, 3], [0, 1, 2], [0] * 3, [1, 2, 3], "0xx / x0x / xx0")
    pair.step([4, 5], [3, 4], [0, 0], [4, 5], "0x / x0")
    assert pair.cache.can_resume(0, 5)
    assert not pair.cache.can_resume(0, 6)


def test_memory_keeps_more_than_the_window(target):
    """What is kept can be resumed from; what is shown is what the window reaches."""
    pair = make(target, "sliding", {"window_left": 1, "memory": 3}, sizes=(1, 16, 2), memory=3)
    assert pair.cache.num_cells == 5
    pair.step([1, 2], [0, 1], [0, 0], [1, 2], "0x / 00")
    pair.step([3, 4], [2, 3], [0, 0], [2, 3, 4], "00x / x00")
    pair.step([5], [4], [0], [5, 2, 3, 4], "0xx0")
    assert [p for p in range(9) if pair.cache.can_resume(0, p)] == [2, 3, 4, 5]
    assert pair.change("remove", 0, 3)
    pair.step([6], [3], [0], [6, 2, 3], "0x0")


def test_a_sequence_that_is_not_in_the_batch_keeps_its_end(target):
    """Eviction is for all, each by its own last position; room for one more is kept of each."""
    pair = make(target, "sliding", {"window_left": 1}, sizes=(2, 16, 2), window=1)
    pair.step([1, 2], [0, 0], [0, 1], [1, 2], "0x / x0")
    pair.step([3], [1], [0], [1, 2, 3], "0x0")
    pair.step([4], [2], [0], [3, 4], "00")
    pair.step([5], [1], [1], [5, 2], "00")
    pair.probe()
    for _ in range(6):
        last = pair.model.children[0].positions_of(0)[-1]
        assert pair.start_forward([last + 1], [0])
    assert pair.cache.can_resume(1, 2)


def test_eviction_goes_by_the_lowest_position_of_a_batch(target):
    """Wherever in the batch that is, and in however many runs."""
    for positions, sequences in (([4, 3], [0, 0]), ([4, 0, 3], [0, 1, 0])):
        pair = make(target, "sliding", sizes=(2, 16, 3))
        for p in (0, 1, 2):
            assert pair.start_forward([p], [0])
        assert pair.start_forward(positions, sequences)
        pair.put(0, *numbers(positions))
        pair.check(0)
        pair.probe()
        assert pair.model.children[0].positions_of(0) == [1, 2, 3, 4]


def test_a_copy_is_evicted_by_its_own_end(target):
    """At the next pass, though it was in none itself."""
    pair = make(target, "sliding", {"window_left": 1, "memory": 2}, sizes=(2, 16, 6), memory=2)
    pair.step([1, 2, 3, 4], range(4), [0] * 4, [1, 2, 3, 4], "0xxx / 00xx / x00x / xx00")
    assert pair.change("copy_prefix", 0, 1, 4)
    assert pair.start_forward([0], [2])
    pair.probe()
    assert pair.model.children[0].positions_of(1) == [2, 3]
