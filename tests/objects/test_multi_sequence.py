"""`CausalCache`, `SlidingWindowCache`, `ChunkedCache`: many sequences in one set of cells.

The tables of the reference system's own tests, with masks drawn as text: ``0`` is visible, ``x`` is not, a group is
a row of the batch. Every table is run past the oracle too. Here a token's K is one number and its V is that number
and its opposite, which every kind stores as it is.
"""

import itertools

import naive
import naive_cells
import numpy as np
import pytest
import tolerances
from cell_problems import Pair, draw, plus, plus_one
from messages import about

import numkv

F32, F16 = np.float32, np.float16
LAST = 2**31 - 1  # the largest position
CACHES = {  # by name: how numkv makes it, and what the oracle is told
    "causal": (numkv.CausalCache, (), {}),
    "sliding": (numkv.SlidingWindowCache, (1,), {"window": 1}),
    "chunked": (numkv.ChunkedCache, (2,), {"chunk": 2}),
}
storages = pytest.mark.parametrize(
    ("kind", "permuted"),
    [("fp32", False), ("fp16", True), ("int8", False), ("int8", True)],
    ids=["fp32", "fp16-permuted", "int8", "int8-permuted"],
)


def numbers(values):
    """Rows of K and of V of tokens that are numbers."""
    k = np.array(values, F32).reshape(-1, 1, 1)
    return k, np.concatenate([k, -k], axis=2)


class Numbers(Pair):
    """A cache whose tokens are numbers."""

    def step(self, values, positions, sequences, shown, mask, v_shown=None, layer=0):
        """One pass: the numbers that `get` shows, and the mask."""
        assert self.start_forward(positions, sequences)
        self.put(layer, *numbers(values))
        self.shows(shown, mask, v_shown, layer)

    def shows(self, shown, mask, v_shown=None, layer=0):
        k, v, got = self.check(layer)
        assert draw(got) == draw(self.cells(layer).mask()) == mask
        assert np.allclose(k[:, 0, 0].astype(F32), shown, rtol=1e-6, atol=0)
        _, want = numbers(shown if v_shown is None else v_shown)
        assert np.allclose(v.astype(F32), want, rtol=1e-6, atol=0)


def make(
    target, name="causal", args=None, sizes=(1, 16, 16), *, kind="fp32", shift=False, config=None,
    **told,
):  # fmt: skip
    """A cache of `CACHES`, with other arguments if given, initialised, beside its oracle."""
    make_cache, default, defaults = CACHES[name]
    cache = make_cache(*(default if args is None else args), shift=plus(target) if shift else None)
    config = config or {}
    if config:
        cache.set_config(numkv.CacheConfig(**config))
    cache.init(kind, *sizes, target)
    cells = naive_cells.Cells(
        *sizes, **(defaults | told), padding=config.get("padding", 1),
        shift=plus_one if shift else None,
    )  # fmt: skip
    mask_dtype = config.get("mask_dtype", "fp32")
    return Numbers(
        cache, cells, target=target, k_kind=kind, mask_dtype=mask_dtype,
        permuted_v=config.get("permuted_v", False),
    )  # fmt: skip


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
    pair = make(target, "sliding", (4,), window=4)
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
    pair = make(target, "sliding", (1, 16), window=1, memory=16)
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
        cache = numkv.SlidingWindowCache(window_left=window, memory=memory)
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
        numkv.SlidingWindowCache(4, 2).init("fp32", *sizes)
    with pytest.raises(ValueError, match="memory"):
        numkv.SlidingWindowCache(-1, 2).init("fp32", *sizes)


def test_an_unlimited_window_is_a_causal_cache(target):
    pair = make(target, "sliding", (-1,), sizes=(1, 4, 4), window=-1)
    pair.step([1, 2, 3, 4], range(4), [0] * 4, [1, 2, 3, 4], "0xxx / 00xx / 000x / 0000")
    assert not pair.start_forward([4], [0])
    assert pair.cache.can_resume(0, 2)


def test_a_window_of_none_sees_only_itself(target):
    pair = make(target, "sliding", (0,), sizes=(1, 16, 3), window=0)
    assert pair.cache.num_cells == 3
    pair.step([1, 2, 3], [0, 1, 2], [0] * 3, [1, 2, 3], "0xx / x0x / xx0")
    pair.step([4, 5], [3, 4], [0, 0], [4, 5], "0x / x0")
    assert pair.cache.can_resume(0, 5)
    assert not pair.cache.can_resume(0, 6)


def test_memory_keeps_more_than_the_window(target):
    """What is kept can be resumed from; what is shown is what the window reaches."""
    pair = make(target, "sliding", (1, 3), sizes=(1, 16, 2), memory=3)
    assert pair.cache.num_cells == 5
    pair.step([1, 2], [0, 1], [0, 0], [1, 2], "0x / 00")
    pair.step([3, 4], [2, 3], [0, 0], [2, 3, 4], "00x / x00")
    pair.step([5], [4], [0], [5, 2, 3, 4], "0xx0")
    assert [p for p in range(9) if pair.cache.can_resume(0, p)] == [2, 3, 4, 5]
    assert pair.change("remove", 0, 3)
    pair.step([6], [3], [0], [6, 2, 3], "0x0")


def test_a_sequence_that_is_not_in_the_batch_keeps_its_end(target):
    """Eviction is for all, each by its own last position; room for one more is kept of each."""
    pair = make(target, "sliding", (1,), sizes=(2, 16, 2), window=1)
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
    pair = make(target, "sliding", (1, 2), sizes=(2, 16, 6), memory=2)
    pair.step([1, 2, 3, 4], range(4), [0] * 4, [1, 2, 3, 4], "0xxx / 00xx / x00x / xx00")
    assert pair.change("copy_prefix", 0, 1, 4)
    assert pair.start_forward([0], [2])
    pair.probe()
    assert pair.model.children[0].positions_of(1) == [2, 3]


# ---------------------------------------------------------------- remove


def filled(target, name="causal", sizes=(2, 16, 16), n=4, **options):
    """Keys 10, 20, … of sequence 0, and a mark beside them in layer 1."""
    pair = make(target, name, sizes=sizes, **options)
    assert pair.start_forward(list(range(n)), [0] * n)
    for layer in (0, 1):
        pair.put(layer, *numbers(10.0 * np.arange(1, n + 1) + layer))
    return pair


def test_without_a_shift_keys_cannot_move(target):
    """And nothing is taken out before that is found."""
    pair = filled(target)
    assert not pair.change("remove", 0, 1, 2)
    pair.shows([10, 20, 30, 40], "0xxx / 00xx / 000x / 0000")
    pair.probe()
    assert pair.change("remove", 0, 0)
    pair.step([5], [0], [0], [5], "0")


@pytest.mark.parametrize(
    ("begin", "end", "left"),
    [(5, 7, 4), (3, 4, 3), (2, 9, 2), (2, LAST, 2), (0, 4, 0), (1, 1, 4), (0, 0, 4), (2, None, 2),
     (9, None, 4), (0, None, 0), (4, 4, 4)],
)  # fmt: skip
def test_when_nothing_has_to_move_removal_works(target, begin, end, left):
    pair = filled(target)
    assert pair.change("remove", 0, begin, end)
    pair.probe()
    assert pair.model.children[0].positions_of(0) == list(range(left))
    assert np.asarray(pair.cache.positions(0)).tolist() == list(range(left))


@pytest.mark.parametrize(("begin", "end"), [(0, 2), (0, None), (3, 3), (LAST, LAST)])
def test_removing_from_a_sequence_that_is_not_there(target, begin, end):
    pair = filled(target)
    assert pair.change("remove", 3, begin, end)
    pair.probe()


def test_end_is_optional_and_named(target):
    pair = filled(target)
    pair.cache.remove(0, 3, end=None)
    pair.cache.remove(seq=0, begin=2)
    pair.model.remove(0, 2)
    pair.passing = False
    pair.probe()


def test_a_gap_is_closed(target):
    """A hole in the positions is removed like tokens are: what is after it moves."""
    pair = make(target, shift=True)
    pair.step([10, 20, 30], [0, 5, 6], [0] * 3, [10, 20, 30], "0xx / 00x / 000")
    assert pair.change("remove", 0, 1, 3)
    pair.step([40], [5], [0], [10, 18, 28, 40], "0000", v_shown=[10, 20, 30, 40])
    assert pair.model.children[0].positions_of(0) == [0, 3, 4, 5]


def test_shared_cells_do_not_move(target):
    pair = filled(target, shift=True)
    assert pair.change("copy_prefix", 0, 1, 4)
    assert not pair.change("remove", 0, 1, 2)
    assert not pair.change("remove", 1, 0, 1)
    pair.probe()
    assert pair.change("remove", 0, 1)  # none moves: its own claim goes, the cells stay
    pair.step([50], [1], [0], [10, 20, 30, 40, 50], "0xxx0")
    pair.probe()
    assert pair.change("remove", 1, 1, 2)  # now its own
    pair.probe()


def test_shared_cells_that_stay(target, host):
    """Before the hole or inside it, cells may be shared."""
    calls = []
    where = plus(target)

    def shift(layer, keys, offsets):
        calls.append((layer, host(keys).astype(F32).ravel().tolist(), host(offsets)))
        return where(layer, keys, offsets)

    cache = numkv.CausalCache(shift)
    cache.init("fp32", 2, 16, 16, target)
    pair = Numbers(cache, naive_cells.Cells(2, 16, 16, shift=plus_one), target=target)
    assert pair.start_forward([0, 1, 2, 3], [0] * 4)
    pair.put(0, *numbers([10, 20, 30, 40]))
    assert pair.change("copy_prefix", 0, 1, 1)
    assert pair.change("remove", 0, 1, 2)
    [(layer, keys, offsets)] = calls
    assert (layer, keys, offsets.tolist()) == (0, [30, 40], [-1, -1])
    assert offsets.dtype == np.int32
    assert pair.start_forward([0, 1, 2], [0] * 3, reserve=True)
    k, _, mask = pair.check(0)
    assert k[[0, 2, 3], 0, 0].tolist() == [10, 29, 39]
    assert [row[:4] for row in draw(mask).split(" / ")] == ["0xxx", "0x0x", "0x00"]


def test_removed_in_the_middle_of_a_window(target):
    """Eviction goes by the positions that came of it."""
    pair = make(target, "sliding", (2, 4), sizes=(1, 16, 4), shift=True, window=2, memory=4)
    pair.step([1, 2, 3, 4], range(4), [0] * 4, [1, 2, 3, 4], "0xxx / 00xx / 000x / x000")
    assert pair.change("remove", 0, 1, 2)
    pair.step([5], [3], [0], [5, 2, 3], "000", v_shown=[5, 3, 4])
    pair.probe()


def test_one_removal_after_the_other(target):
    pair = filled(target, n=6, shift=True)
    for begin, end in ((1, 2), (0, 1), (2, 3)):
        assert pair.change("remove", 0, begin, end)
        pair.probe()
    assert pair.model.children[0].positions_of(0) == [0, 1, 2]
    shown, v_shown = [90, 20, 28, 38, 48, 57], [90, 20, 30, 40, 50, 60]
    pair.step([90], [3], [0], shown, "0x00x0", v_shown)


# ---------------------------------------------------------------- copy_prefix


def test_a_prefix_is_shared(target):
    """No cell is taken for it, and a cell is free when nobody holds it."""
    pair = make(target, sizes=(1, 4, 4))
    pair.step([1, 2, 3], [0, 1, 2], [0] * 3, [1, 2, 3], "0xx / 00x / 000")
    assert pair.change("copy_prefix", 0, 1, 2)
    pair.step([4], [2], [1], [1, 2, 3, 4], "00x0")
    assert not pair.start_forward([3], [0])
    assert pair.change("remove", 0, 0)
    pair.step([5], [3], [1], [1, 2, 5, 4], "0000")


def test_a_copy_replaces_what_was_there(target):
    pair = make(target, sizes=(1, 4, 4))
    pair.step([1, 2, 3], [0, 0, 1], [0, 1, 1], [1, 2, 3], "0xx / x0x / x00")
    assert pair.change("copy_prefix", 0, 1, 9)
    pair.step([4, 5, 6], [1, 2, 3], [1] * 3, [1, 4, 5, 6], "00xx / 000x / 0000")


@pytest.mark.parametrize(("src", "length"), [(0, 0), (7, 4), (7, 0)])
def test_a_copy_of_nothing(target, src, length):
    """The destination is emptied."""
    pair = make(target)
    pair.step([1, 2, 3], [0, 0, 1], [0, 1, 1], [1, 2, 3], "0xx / x0x / x00")
    assert pair.change("copy_prefix", src, 1, length)
    pair.probe()
    pair.step([4], [0], [1], [4], "0")


def test_a_copy_goes_by_position(target):
    pair = make(target)
    pair.step([1, 2, 3], [4, 0, 2], [0] * 3, [1, 2, 3], "000 / x0x / x00")
    assert pair.change("copy_prefix", 0, 1, 3)
    pair.step([4], [9], [1], [2, 3, 4], "000")


def test_a_copy_in_a_window(target):
    """Only what is stored is shared: ask `can_resume`."""
    pair = make(target, "sliding", (1, 2), sizes=(2, 16, 4), window=1, memory=2)
    pair.step([1, 2, 3, 4], range(4), [0] * 4, [1, 2, 3, 4], "0xxx / 00xx / x00x / xx00")
    pair.step([5], [4], [0], [5, 2, 3, 4], "0xx0")
    assert pair.change("copy_prefix", 0, 1, 4)
    assert [pair.cache.can_resume(1, p) for p in range(6)] == [False] * 3 + [True, True, False]
    pair.step([6], [4], [1], [6, 3, 4], "0x0")
    pair.probe()


def test_evicted_when_the_last_holder_lets_go(target):
    """A shared cell stays for the sequence that still needs it."""
    pair = make(target, "sliding", (1,), sizes=(2, 16, 2), window=1)
    pair.step([1, 2], [0, 1], [0, 0], [1, 2], "0x / 00")
    assert pair.change("copy_prefix", 0, 1, 2)
    for p in (2, 3, 4):
        assert pair.start_forward([p], [0])
        pair.put(0, *numbers([p + 1]))
        pair.probe()
    assert pair.cache.can_resume(1, 2)
    pair.step([9], [2], [1], [2, 9], "00")


@pytest.mark.parametrize("name", ["causal", "chunked"])
def test_everything_can_be_resumed_without_a_memory(target, name):
    pair = make(target, name)
    for seq, position in itertools.product((0, 5), (0, 3, 1000)):
        assert pair.cache.can_resume(seq, position) is True


def test_resuming_what_is_not_known(target):
    pair = make(target, "sliding")
    assert pair.cache.can_resume(0, 0) is False
    pair.step([1], [0], [0], [1], "0")
    assert pair.cache.can_resume(0, 1) is True
    assert pair.change("remove", 0, 0)
    assert pair.cache.can_resume(0, 0) is False


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(
    "kinds", [("fp64", "fp64"), ("bf16", "bf16"), ("fp16", "int8"), ("int8", "fp32")], ids="-".join
)
def test_kinds_and_head_dims(target, rng, kinds):
    """K and V have their own kinds and their own widths; rows come in the kind's own dtype or in float32."""
    k_kind, v_kind = kinds
    cache = numkv.CausalCache()
    cache.init("fp32", 1, 8, 4, target, k_kind=k_kind, v_kind=v_kind)
    cells = naive_cells.Cells(1, 8, 4)
    pair = Pair(cache, cells, target=target, k_kind=k_kind, v_kind=v_kind)
    for positions, sources in (([0, 1, 2], ("fp32", "fp32")), ([3], kinds)):
        assert pair.start_forward(positions, [0] * len(positions))
        rows = [
            naive.round_to(
                rng.standard_normal((len(positions), 2, d)), "fp16" if s == "int8" else s
            )
            for d, s in zip((4, 6), sources, strict=True)
        ]
        pair.put(3, *rows)
        pair.check(3)


def test_layers_are_their_own(target, rng):
    """They are made when first put, in any order, with sizes of their own."""
    cache = numkv.CausalCache()
    cache.init("fp32", 1, 8, 4, target)
    pair = Pair(cache, naive_cells.Cells(1, 8, 4), target=target)
    shapes = {7: (1, 2), 0: (3, 4), 1000: (2, 1)}
    for t in range(2):
        assert pair.start_forward([t], [0])
        for layer, (heads, dim) in shapes.items():
            pair.put(layer, *rng.standard_normal((2, 1, heads, dim), F32))
    for layer in (*shapes, 1, 6):
        pair.check(layer)


def test_a_layer_that_begins_late(target):
    """What was never written is zero."""
    pair = make(target)
    pair.step([1, 2], [0, 1], [0, 0], [1, 2], "0x / 00")
    pair.step([3], [2], [0], [0, 0, 3], "000", layer=1)


def test_get_shows_memory_not_copies():
    pair = make("cpu")
    pair.step([1, 2], [0, 1], [0, 0], [1, 2], "0x / 00")
    (k, v, mask), again = pair.cache.get(0), pair.cache.get(0)
    assert all(np.shares_memory(a, b) for a, b in zip((k, v, mask), again, strict=True))
    k[1, 0, 0] = 9
    assert again[0][1, 0, 0] == 9


def test_a_batch_of_nobody(target, to, rng):
    """Shows nothing, changes nothing."""
    pair = ready(target)
    pair.cache.start_forward(numkv.Batch([], []))
    pair.cache.put(0, to(np.empty((0, 1, 1), F32)), to(np.empty((0, 1, 2), F32)))
    k, v, mask = pair.cache.get(0)
    assert (k.shape[0], v.shape[0], mask.shape) == (0, 0, (0, 0))
    out = pair.cache.decode_attention(0, to(np.empty((0, 1, 1), F32)))
    assert out.shape == (0, 1, 2)
    pair.probe()


def test_strided_rows_are_taken(rng):
    pair = make("cpu")
    wide = rng.standard_normal((2, 3, 6), F32)
    assert pair.start_forward([0, 1], [0, 0])
    pair.put(0, wide[:, 1:2, 2:4], wide[:, ::2, :3][:, :1])
    pair.check(0)


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("name", CACHES)
def test_attention(target, rng, name):
    """Batches of several sequences, in runs and interleaved, after evictions, copies and removals."""
    _, args, told = CACHES[name]
    cache = CACHES[name][0](*args, shift=plus(target))
    sizes = (3, 12, 8)
    cache.init("fp32", *sizes, target)
    pair = Pair(cache, naive_cells.Cells(*sizes, shift=plus_one, **told), target=target)

    def forward(positions, sequences):
        n = len(positions)
        assert pair.start_forward(positions, sequences)
        pair.put(0, *rng.integers(-4, 5, (2, n, 2, 4)).astype(F32))
        return pair.attends(0, rng.standard_normal((n, 4, 4), F32))

    forward([0, 1, 2, 3, 0, 1], [0, 0, 0, 0, 1, 1])
    forward([4, 2, 5, 0], [0, 1, 0, 2])
    pair.set_causal(0, [0, 1])
    pair.attends(0, rng.standard_normal((4, 4, 4), F32))
    assert pair.change("remove", 0, 4, 5)
    assert pair.change("copy_prefix", 0, 5, 4)
    forward([5, 5], [0, 5])
    assert pair.start_forward([5, 0, 1], [0, 9, 1], reserve=True)
    pair.attends(0, rng.standard_normal((3, 4, 4), F32))


def test_attention_options(target, to, host, rng):
    cache = numkv.CausalCache()
    cache.init("fp16", 2, 8, 8, target, v_kind="fp32")
    pair = Pair(cache, naive_cells.Cells(2, 8, 8), target=target, k_kind="fp16", v_kind="fp32")
    assert pair.start_forward([0, 0, 1, 2, 1], [3, 1, 1, 1, 3])
    pair.put(0, rng.standard_normal((5, 2, 4), F32), rng.standard_normal((5, 2, 6), F32))
    q = rng.standard_normal((5, 6, 4), F32)
    sinks = rng.standard_normal(6).astype(F32)
    pair.attends(0, q, sm_scale=0.3, logits_soft_cap=2.0, sinks=sinks)
    pair.attends(0, q.astype(F16))
    plain = cache.decode_attention(0, to(q))
    place = to(np.zeros((5, 6, 6), F32))
    assert cache.decode_attention(0, to(q), out=place) is place
    assert np.array_equal(host(place), host(plain))


def test_a_row_that_sees_nothing(target, to, host, rng):
    """0 and minus infinity, or the sink."""
    pair = make(target)
    pair.step([1, 2], [0, 1], [0, 0], [1, 2], "0x / 00")
    assert pair.start_forward([0, 0, 5], [0, 4, 7], reserve=True)
    q = rng.standard_normal((3, 2, 1), F32)
    pair.attends(0, q)
    pair.attends(0, q, sinks=np.array([0.5, -2], F32))
    out, lse = pair.cache.decode_attention(0, to(q), return_lse=True)
    assert np.all(host(out)[1:] == 0)
    assert np.all(host(lse)[1:] == -np.inf)
    assert np.all(host(lse)[0] > -np.inf)


def test_what_is_hidden_is_not_read(target, to, host, rng):
    """NaN in another sequence's rows, and in those that were let go of."""
    cache = numkv.CausalCache()
    cache.init("fp32", 2, 8, 8, target)
    rows, q = rng.standard_normal((3, 1, 4), F32), rng.standard_normal((2, 1, 4), F32)
    bad = to(np.full((3, 1, 4), np.nan, F32))
    cache.start_forward(numkv.Batch([0, 1, 2], [1, 1, 2]))
    cache.put(0, bad, bad)
    cache.remove(1, 1)
    cache.start_forward(numkv.Batch([0, 1], [0, 0]))
    cache.put(0, to(rows[:2]), to(rows[:2]))
    want, _ = naive_cells.attention(q, rows[:2], rows[:2], [[0, -np.inf], [0, 0]])
    tolerances.assert_rows_close(host(cache.decode_attention(0, to(q))), want, 1e-5)
    cache.remove(2, 0)
    cache.start_forward(numkv.Batch([2], [0]))
    cache.put(0, to(rows[2:]), to(rows[2:]))
    want, _ = naive_cells.attention(q[:1], rows, rows, [[0, 0, 0]])
    tolerances.assert_rows_close(host(cache.decode_attention(0, to(q[:1]))), want, 1e-5)


def test_a_sequence_does_not_depend_on_the_others(target, to, host, rng):
    """Bit for bit, whatever else is in the cache and in the batch."""
    rows, q = rng.standard_normal((2, 5, 2, 4), F32), rng.standard_normal((2, 4, 4), F32)

    def run(others):
        cache = numkv.CausalCache()
        cache.init("fp32", 4, 16, 16, target)
        for positions, part in (([0, 1, 2], np.s_[:3]), ([3, 4], np.s_[3:])):
            n = len(positions)
            cache.start_forward(
                numkv.Batch(
                    [*others, *positions, *others], [3] * len(others) + [0] * n + [2] * len(others)
                )
            )
            other = np.full((len(others), 2, 4), 5, F32)
            k, v = (to(np.concatenate([other, x, other])) for x in rows[:, part])
            cache.put(0, k, v)
        pad = np.ones((len(others), 4, 4), F32)
        out = host(cache.decode_attention(0, to(np.concatenate([pad, q, pad]))))
        return out[len(others) : len(others) + 2]

    assert np.array_equal(run([]), run([0, 1, 2]))


# ---------------------------------------------------------------- what can go wrong


def ready(target, **options):
    pair = make(target, **({"sizes": (1, 8, 4)} | options))
    pair.step([1, 2], [0, 1], [0, 0], [1, 2], "0x / 00")
    return pair


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


MISMATCH, DTYPE = numkv.DimensionMismatch, numkv.UnsupportedDType
NEVER = [  # rows that no layer of a batch of two takes
    (ones(3, 1, 1), ones(3, 1, 2), MISMATCH, "k"),
    (ones(1, 1, 1), ones(2, 1, 2), MISMATCH, "k"),
    (ones(2, 1, 1), ones(3, 1, 2), MISMATCH, "v"),
    (ones(2, 1, 1), ones(2, 2, 2), MISMATCH, "v"),
    (ones(2, 1), ones(2, 1, 2), MISMATCH, "k"),
    (ones(2, 1, 1), ones(2, 2), MISMATCH, "v"),
    (ones(2, 1, 1, dtype=F16), ones(2, 1, 2), DTYPE, "k"),
    (ones(2, 1, 1), ones(2, 1, 2, dtype=np.int32), DTYPE, "v"),
]
NOT_HERE = [  # rows that a layer with one head of K of 1 and of V of 2 does not take
    (ones(2, 2, 1), ones(2, 2, 2), MISMATCH, "k"),
    (ones(2, 1, 3), ones(2, 1, 2), MISMATCH, "k"),
    (ones(2, 1, 1), ones(2, 1, 1), MISMATCH, "v"),
]


@pytest.mark.parametrize("reserve", [False, True])
@pytest.mark.parametrize(("k", "v", "error", "name"), NEVER + NOT_HERE)
def test_bad_rows(target, to, k, v, error, name, reserve):
    """Nothing is written, and no layer is made; a reserved pass looks as well."""
    pair = ready(target)
    assert pair.start_forward([0, 1], [0, 0], reserve=reserve)
    with pair.refused(error, match=about(name)):
        pair.cache.put(0, to(k), to(v))
    pair.check(0)
    if any(k is row[0] for row in NEVER):
        with pytest.raises(error, match=about(name)):
            pair.cache.put(1, to(k), to(v))
        with pytest.raises(IndexError):
            pair.cache.get(1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "kinds", [("int8", "int8"), ("fp32", "int8"), ("int8", "fp16")], ids="-".join
)
def test_rows_to_be_quantised_are_looked_at(target, to, kinds, bad):
    cache = numkv.CausalCache()
    cache.init("fp32", 1, 8, 4, target, k_kind=kinds[0], v_kind=kinds[1])
    pair = Numbers(
        cache, naive_cells.Cells(1, 8, 4), target=target, k_kind=kinds[0], v_kind=kinds[1]
    )
    pair.step([1, 2], [0, 1], [0, 0], [1, 2], "0x / 00")
    name = "k" if kinds[0] == "int8" else "v"
    rows = dict(zip("kv", numbers([3, 4]), strict=True))
    rows[name][1, 0, 0] = bad
    with pair.refused(numkv.NonFiniteInput, match=f"^`{name}`"):
        cache.put(0, to(rows["k"]), to(rows["v"]))
    with pytest.raises(numkv.NonFiniteInput) as caught:
        cache.put(1, to(rows["k"]), to(rows["v"]))
    assert caught.value.index == (1, 0, 0)
    with pytest.raises(IndexError):
        cache.get(1)
    cache.put(1, *map(to, numbers([5, 6])), check_finite=False)
    as_stored = naive_cells.as_stored
    pair.model.children[0].put(1, *map(as_stored, numbers([5, 6]), kinds))
    pair.shows([5, 6], "0x / 00", layer=1)


def calls(cache, to):
    """What needs a pass."""
    k, v = (to(x) for x in numbers([1]))
    return [
        lambda: cache.put(0, k, v),
        lambda: cache.get(0),
        lambda: cache.decode_attention(0, to(np.ones((1, 1, 1), F32))),
    ]


def life(cache, to):
    """Everything that a cache does."""
    return [
        lambda: cache.start_forward(numkv.Batch([0], [0])),
        lambda: cache.remove(0, 0),
        lambda: cache.copy_prefix(0, 1, 1),
        lambda: cache.can_resume(0, 0),
        lambda: cache.set_causal([]),
        *calls(cache, to),
    ]


@pytest.mark.parametrize("name", CACHES)
def test_before_start_forward(target, to, name):
    pair = make(target, name)
    for call in calls(pair.cache, to):
        with pytest.raises(numkv.NumkvError, match="start_forward"):
            call()
    with pytest.raises((numkv.NumkvError, IndexError)):
        pair.cache.set_causal([0])


@pytest.mark.parametrize("name", CACHES)
def test_before_init(to, target, name):
    make_cache, args, _ = CACHES[name]
    for call in life(make_cache(*args), to):
        with pytest.raises(numkv.NumkvError, match="init"):
            call()


@pytest.mark.parametrize("name", CACHES)
def test_after_close(target, to, name):
    pair = make(target, name)
    pair.step([1], [0], [0], [1], "0")
    pair.cache.close()
    again = [
        lambda: pair.cache.init("fp32", 1, 4, 4),
        lambda: pair.cache.set_config(numkv.CacheConfig()),
    ]
    for call in (*life(pair.cache, to), *again):
        with pytest.raises(numkv.NumkvError, match="close"):
            call()


@pytest.mark.parametrize("name", CACHES)
def test_context_manager(name):
    make_cache, args, _ = CACHES[name]
    cache = make_cache(*args)
    with cache as entered:
        assert entered is cache
        cache.init("fp32", 1, 4, 4)
        cache.start_forward(numkv.Batch([0], [0]))
    with pytest.raises(numkv.NumkvError, match="close"):
        cache.start_forward(numkv.Batch([1], [0]))
    with pytest.raises(ZeroDivisionError), make_cache(*args) as cache:
        cache.init("fp32", 1, 4, 4)
        raise ZeroDivisionError
    with pytest.raises(numkv.NumkvError, match="close"):
        cache.start_forward(numkv.Batch([1], [0]))


def test_configured_once():
    cache = numkv.CausalCache()
    cache.set_config(numkv.CacheConfig(padding=4))
    with pytest.raises(numkv.NumkvError):
        cache.set_config(numkv.CacheConfig(padding=8))
    cache.init("fp32", 1, 6, 4)
    assert cache.num_cells == 8
    with pytest.raises(numkv.NumkvError):
        cache.set_config(numkv.CacheConfig())
    late = numkv.CausalCache()
    late.init("fp32", 1, 6, 4)
    with pytest.raises(numkv.NumkvError):
        late.set_config(numkv.CacheConfig(padding=4))
    assert late.num_cells == 6


def test_initialised_once(target):
    pair = ready(target)
    with pair.refused(numkv.NumkvError):
        pair.cache.init("fp16", 1, 4, 4, target)


def test_a_failed_init_can_be_tried_again():
    cache = numkv.CausalCache()
    for args, error in (
        (("fp8", 1, 4, 4), numkv.UnsupportedDType),
        (("fp32", -1, 4, 4), ValueError),
        (("fp32", 1, -4, 4), ValueError),
        (("fp32", 1, 4, -4), ValueError),
        (("fp32", 1, 4, 4, "tpu"), ValueError),
    ):
        with pytest.raises(error):
            cache.init(*args)
    cache.init("fp32", 1, 4, 4)
    assert cache.num_cells == 4


def test_bad_configurations():
    for bad in ({"padding": -1}, {"mask_dtype": "int8"}, {"mask_dtype": "fp31"}):
        with pytest.raises((ValueError, numkv.NumkvError)):
            numkv.CausalCache().set_config(numkv.CacheConfig(**bad))
    config = numkv.CacheConfig()
    assert (config.padding, config.permuted_v, str(config.mask_dtype)) == (1, False, "fp32")


def test_bad_windows_and_chunks():
    for window in (-2, -100):
        with pytest.raises(ValueError, match="window_left"):
            numkv.SlidingWindowCache(window)
    for chunk in (0, -1):
        with pytest.raises(ValueError, match="chunk_size"):
            numkv.ChunkedCache(chunk)


@pytest.mark.parametrize(
    ("positions", "sequences", "multimodal", "error"),
    [
        ([2], [-1], (), IndexError),
        ([2, 3], [0, -7], (), IndexError),
        ([2, 3], [0], (), numkv.DimensionMismatch),
        ([2], [0, 0], (), numkv.DimensionMismatch),
        ([-1], [0], (), (IndexError, ValueError)),
        ([2], [0], [1], IndexError),
        ([2], [0], [-1], IndexError),
        ([2.5], [0], (), (TypeError, ValueError)),
        ([2], ["a"], (), (TypeError, ValueError)),
    ],
)
def test_bad_batches(target, positions, sequences, multimodal, error):
    """Also in a reserved pass."""
    pair = ready(target)
    for reserve in (False, True):
        with pair.refused(error):
            pair.cache.start_forward(numkv.Batch(positions, sequences, multimodal), reserve=reserve)
    pair.step([3], [2], [0], [1, 2, 3], "000")


def test_bad_numbers(target, to):
    pair = ready(target, shift=True)
    cache = pair.cache
    k, v = (to(x) for x in numbers([1, 2]))
    for call in (
        lambda: cache.remove(-1, 0),
        lambda: cache.remove(-1, 0, 1),
        lambda: cache.copy_prefix(-1, 1, 1),
        lambda: cache.copy_prefix(0, -1, 1),
        lambda: cache.can_resume(-1, 0),
        lambda: cache.set_causal([2]),
        lambda: cache.set_causal([-1]),
        lambda: cache.set_causal([0, 2]),
        lambda: cache.put(-1, k, v),
        lambda: cache.get(-1),
        lambda: cache.get(5),
        lambda: cache.decode_attention(-1, to(np.ones((2, 1, 1), F32))),
        lambda: cache.decode_attention(5, to(np.ones((2, 1, 1), F32))),
    ):
        with pair.refused(IndexError):
            call()
    for begin, end in ((2, 1), (1, 0), (5, 2)):
        with pair.refused(ValueError):
            cache.remove(0, begin, end)
        with pair.refused(ValueError):  # of a sequence that is not there, too
            cache.remove(9, begin, end)
    with pair.refused((IndexError, ValueError)):
        cache.remove(0, -1)
    with pair.refused((IndexError, ValueError)):
        cache.copy_prefix(0, 1, -1)


@pytest.mark.parametrize(
    ("q", "error"),
    [
        (ones(1, 1, 1), MISMATCH),
        (ones(3, 1, 1), MISMATCH),
        (ones(2, 1, 2), MISMATCH),
        (ones(2, 1), MISMATCH),
        (ones(2, 1, 1, dtype=np.int32), DTYPE),
    ],
)
def test_bad_queries(target, to, q, error):
    pair = ready(target)
    with pair.refused(error, match=about("q")):
        pair.cache.decode_attention(0, to(q))


def test_queries_of_a_fraction_of_the_heads(target, to):
    cache = numkv.CausalCache()
    cache.init("fp32", 1, 4, 4, target)
    cache.start_forward(numkv.Batch([0], [0]))
    cache.put(0, to(np.ones((1, 2, 4), F32)), to(np.ones((1, 2, 4), F32)))
    with pytest.raises(numkv.DimensionMismatch, match=about("q")):
        cache.decode_attention(0, to(np.ones((1, 3, 4), F32)))


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_arrays_of_the_other_target(where):
    from numkv import targets

    pair = ready(where)
    other = targets.get({"cpu": "cuda", "cuda": "cpu"}[where]).asarray
    with pair.refused((numkv.NumkvError, TypeError), match=about("k")):
        pair.cache.put(0, *(other(x) for x in numbers([3, 4])))
    with pair.refused((numkv.NumkvError, TypeError), match=about("q")):
        pair.cache.decode_attention(0, other(np.ones((2, 1, 1), F32)))


@pytest.mark.parametrize("name", CACHES)
def test_repr_says_what_it_is(target, name):
    pair = make(target, name, sizes=(2, 11, 3), kind="bf16")
    text = repr(pair.cache)
    assert text.startswith(CACHES[name][0].__name__)
    for part in ("bf16", target, str(pair.cache.num_cells)):
        assert part in text
    assert CACHES[name][0].__name__ in repr(CACHES[name][0](*CACHES[name][1]))


def test_jit(target):
    """Positions and numbers of sequences of all cells, on the host; free cells have none."""
    pair = ready(target)
    assert pair.change("copy_prefix", 0, 1, 1)
    assert pair.start_forward([5], [1])
    cells = pair.cache.jit
    assert cells.num_sequences.tolist() == [2, 1, 1] + [0] * 5
    assert cells.positions[:3].tolist() == [0, 1, 5]
    assert cells.positions.dtype == cells.num_sequences.dtype == np.int32
    pair.put(0, *numbers([7]))
    layer = pair.cache.layer_jit(0)  # a block whose tokens are the cells
    assert layer.block_table.tolist() == [0]
    if target == "cpu":
        assert layer.k[0, 0, :3, 0].tolist() == [1, 2, 7]
        assert layer.v[0, 0, :3, 1].tolist() == [-1, -2, -7]
    with pytest.raises(IndexError):
        pair.cache.layer_jit(1)
