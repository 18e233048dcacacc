"""Removing from sequences and copying prefixes, in multi-sequence caches."""

import itertools

import naive_cells
import numpy as np
import pytest
from cell_numbers import LAST, Numbers, filled, make, numbers
from cell_problems import draw, plus, plus_one

import numkv

F32, F16 = np.float32, np.float16


# ---------------------------------------------------------------- remove


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
    pair = make(
        target,
        "sliding",
        {"window_left": 2, "memory": 4},
        sizes=(1, 16, 4),
        shift=True,
        window=2,
        memory=4,
    )
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
    pair = make(
        target, "sliding", {"window_left": 1, "memory": 2}, sizes=(2, 16, 4), window=1, memory=2
    )
    pair.step([1, 2, 3, 4], range(4), [0] * 4, [1, 2, 3, 4], "0xxx / 00xx / x00x / xx00")
    pair.step([5], [4], [0], [5, 2, 3, 4], "0xx0")
    assert pair.change("copy_prefix", 0, 1, 4)
    assert [pair.cache.can_resume(1, p) for p in range(6)] == [False] * 3 + [True, True, False]
    pair.step([6], [4], [1], [6, 3, 4], "0x0")
    pair.probe()


def test_evicted_when_the_last_holder_lets_go(target):
    """A shared cell stays for the sequence that still needs it."""
    pair = make(target, "sliding", {"window_left": 1}, sizes=(2, 16, 2), window=1)
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
