"""Whether arrays share memory: compared with NumPy's exact search, which takes too long to be asked in calls."""

import functools

import numba
import numpy as np
import pytest
from numba import types
from numpy.lib.stride_tricks import as_strided

from numkv import targets
from numkv.checks import check_writable
from numkv.errors import NotSupported
from numkv.kernels.cpu import overlap
from numkv.kernels.cpu.vectors.arrays import table_of
from numkv.targets.memory import Memory, may_overlap

ARRAY = types.Array(types.float32, 3, "A")


def answers(a, b):
    """Whether the spans meet, the arrays lie apart all the same, and `a` has a place for each element."""
    of_both = table_of((a, b))
    overlap.find_spans(of_both)
    meet, apart = overlap.meet(of_both, 0, 1), overlap.interleave(of_both, 0, 1)
    return meet, apart, overlap.has_own_places(of_both, 0)


@functools.cache
def compiled_answers():
    """Compiled when it is needed: whoever collects the tests imports this file."""
    return numba.njit([types.UniTuple(types.boolean, 3)(ARRAY, ARRAY)])(answers)


def compiled(a, b):
    return compiled_answers()(a, b)


def memory(x):
    return Memory(x.__array_interface__["data"][0], x.shape, x.strides, x.itemsize)


def views(rng, room):
    """A strided view somewhere in a buffer: random sizes, steps of any sign, often regular ones."""
    while True:
        shape = tuple(int(n) for n in rng.integers(0, 4, 3))
        steps = rng.choice([-12, -4, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12, 24], 3)
        reach = [int(s) * max(0, n - 1) for s, n in zip(steps, shape, strict=True)]
        low, high = sum(min(0, r) for r in reach), sum(max(0, r) for r in reach)
        if high - low < len(room):
            first = int(rng.integers(-low, len(room) - high))
            return as_strided(room[first:], shape, tuple(4 * int(s) for s in steps))


@pytest.mark.slow
def test_what_shares_memory_is_never_said_to_lie_apart(rng):
    room = np.zeros(100, np.float32)
    told_apart = shared = 0
    for _ in range(4000):
        a, b = views(rng, room), views(rng, room)
        truth = np.shares_memory(a, b)
        meet, apart, own = compiled(a, b)
        shared += truth
        assert targets.get("cpu").share_memory(a, b) == truth
        assert may_overlap(memory(a), memory(b)) >= truth
        assert may_overlap(memory(a), memory(b)) == (meet and not apart)
        assert (meet and not apart) >= truth
        told_apart += meet and apart and a.size > 0 and b.size > 0
        assert not own or len(np.unique(places_of(a, room))) == a.size
    assert told_apart > 50
    assert shared > 100


def places_of(view, room):
    """Where each element of a view lies in a buffer."""
    numbers = np.arange(room.size)
    first = (memory(view).address - memory(room).address) // 4
    return as_strided(numbers[first:], view.shape, tuple(2 * s for s in view.strides))


def test_elements_with_places_of_their_own(rng):
    """`check_writable` says what the compiled function says; ordinary arrays, however they are turned, pass."""
    room = np.zeros(100, np.float32)
    refused = 0
    for _ in range(1000):
        a = views(rng, room)
        own = compiled(a, a)[2] or not a.size
        try:
            check_writable("x", a)
        except NotSupported:
            refused += 1
            assert not own
        else:
            assert own or a.flags.c_contiguous
            assert len(np.unique(places_of(a, room))) == a.size
    assert refused > 100
    whole = np.zeros((3, 4, 5), np.float32)
    for x in (whole, whole[::-1, ::2, 1:4], whole.transpose(2, 0, 1), whole[:, ::-2, ::-1].T):
        check_writable("x", x)
        assert compiled(x, x)[2]


NEIGHBOURS = {
    "blocks": ((3, 2, 4, 5), np.s_[:, 0], np.s_[:, 1]),
    "heads": ((3, 4, 2, 5), np.s_[:, :, 0], np.s_[:, :, 1]),
    "rows": ((3, 4, 5), np.s_[..., :2], np.s_[..., 2:]),
    "backwards": ((6, 4, 5), np.s_[::-2], np.s_[4::-2]),
}


@pytest.mark.parametrize("layout", NEIGHBOURS)
def test_neighbours_in_one_buffer(to, target, layout):
    shape, *cuts = NEIGHBOURS[layout]
    room, here = to(np.zeros(shape, np.float32)), targets.get(target)
    a, b = (room[cut] for cut in cuts)
    assert not here.share_memory(a, b)
    assert not here.share_memory(b, a)
    assert here.share_memory(a, room)
    assert here.share_memory(a, a)
    assert here.same_memory(a, room[cuts[0]])
    assert not here.same_memory(a, b)
