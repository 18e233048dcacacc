"""Replays of repeated calls: the launches of the first one, made again with other pointers.

The host sees no values of device arrays. A call's launches therefore depend only on shapes, strides, dtypes and
options. The first call is recorded, with the places of its arrays' pointers among the arguments of its launches. The
next call of the same form makes the same launches. It only checks that written arrays do not overlap the others, as in
the first call.

An object's own buffers stay in the launches. Numbers such as a length change. Each replay therefore sets the arguments
that are a `numkv.kernels.cuda.launches.Number`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from numkv.kernels.cuda import memory
from numkv.kernels.cuda.launches import core_launch
from numkv.kernels.cuda.streams import Place, Recording, failed

# More bytes than there are addresses.
_ANYWHERE = 1 << 64


class Given(NamedTuple):
    """An array that is passed to a call."""

    pointer: int
    nbytes: int  #: from its first to its last byte; 0 if it has no elements


class Made(NamedTuple):
    """An array that a call makes."""

    scratch: int  #: index among the call's own allocations
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any


class _Again(NamedTuple):
    """A launch to replay."""

    code: Any
    config: Any
    args: list[Any]
    given: list[tuple[int, int]]  #: for each pointer: its index in `args`, and the array's index
    scratch: list[tuple[int, int]]  #: the same for the call's own allocations
    numbers: list[tuple[int, int]]  #: the same for numbers that differ from call to call


class Replay:
    """A call that can be replayed at its place.

    Attributes
    ----------
    results : list of int or Made
        The call's results: indices of passed arrays, and arrays that it makes.
    note : object
        Data of the owner of the replay.
    """

    __slots__ = ("_apart", "_clear", "_held", "_launches", "_scratch", "note", "results")

    def __init__(
        self, launches: list[_Again], scratch: list[int], apart: list[tuple[int, int, int, int, int]],
        clear: list[tuple[int, int, int]], held: list[Any], results: Sequence[Any],
    ) -> None:  # fmt: skip
        self._launches, self._scratch, self._apart, self._clear = launches, scratch, apart, clear
        self._held, self.results = held, results
        self.note: Any = None

    def run(
        self, place: Place, pointers: Sequence[int], numbers: Sequence[int] = ()
    ) -> list[Any] | None:
        """Make the launches with arrays at `pointers`, and with these `numbers`.

        Returns
        -------
        list or None
            The memory that the call allocated. None, without any launch, if arrays may overlap in a new way.
        """
        for i, j, of_i, of_j, before in self._apart:
            distance = pointers[j] - pointers[i]
            if distance != before and -of_j < distance < of_i:
                return None
        for i, low, high in self._clear:
            if low < pointers[i] < high:
                return None
        held = [memory.take(place, n) for n in self._scratch]
        for code, config, args, given, scratch, varying in self._launches:
            args = args.copy()
            for at, i in given:
                args[at] = pointers[i]
            for at, i in varying:
                args[at] = numbers[i]
            for at, i in scratch:
                args[at] = int(held[i].device_pointer)
            try:
                core_launch(place.stream, config, code, *args)
            except Exception as error:
                raise failed("a launch", error) from error
        return held


def replay_of(
    recording: Recording,
    given: Sequence[Given | None],
    written: frozenset[int],
    results: Sequence[Any],
    place: Place,
    foreign: int | None = None,
) -> Replay | None:
    """Return the `Replay` of a recorded call, or None if launches alone do not reproduce it.

    Parameters
    ----------
    recording : Recording
        The recorded call.
    given : sequence of Given or None
        Its arrays; None for arguments that are no arrays.
    written : set of int
        Indices of the arrays that the call writes to.
    results : sequence of array
        Arrays that the call returned.
    place : Place
        The place of the call.
    foreign : int, optional
        For an object's call: the number of first arrays that must not overlap the object's buffers.
    """
    if recording.spoiled or not recording.launches:
        return None
    where = {
        x.pointer: i for i, x in reversed(list(enumerate(given))) if x is not None and x.nbytes
    }
    scratch, held = list(recording.scratch), []
    launches = []
    for kernel, blocks, threads, shared_bytes, args in recording.launches:
        pointers, own = [], []
        arrays, numbers = kernel.places(args)
        for at, x in arrays:
            pointer = memory.pointer_of(x)
            if pointer in where:
                pointers.append((at, where[pointer]))
            elif pointer in recording.scratch:
                own.append((at, scratch.index(pointer)))
            elif any(g and g.pointer <= pointer < g.pointer + g.nbytes for g in given):
                return None  # a part of an array
            else:
                held.append(x)  # equal in every call
        config = kernel.config(blocks, threads, shared_bytes)
        code = kernel.loaded(place.device)
        launches.append(_Again(code, config, kernel.flat(args), pointers, own, numbers))
    apart = []
    for i, x in enumerate(given):
        for j, y in enumerate(given):
            if i >= j or x is None or y is None or not (x.nbytes and y.nbytes):
                continue
            if x.pointer == y.pointer:  # the arguments do not distinguish the two
                apart.append((i, j, _ANYWHERE, _ANYWHERE, 0))
            elif i in written or j in written:
                apart.append((i, j, x.nbytes, y.nbytes, y.pointer - x.pointer))
    clear = []
    for begin, nbytes in {memory.pointer_of(x): x.alloc_size for x in held if x.size}.items():
        for i, x in enumerate(given[: foreign or 0]):
            if x is not None and x.nbytes:
                if begin - x.nbytes < x.pointer < begin + nbytes:
                    return None
                clear.append((i, begin - x.nbytes, begin + nbytes))
    returned: list[Any] = []
    for x in results:
        pointer = memory.pointer_of(x)
        if pointer in where:
            returned.append(where[pointer])
        elif pointer in recording.scratch:
            returned.append(Made(scratch.index(pointer), x.shape, x.strides, x.dtype))
        else:
            return None
    sizes = [recording.scratch[p] for p in scratch]
    return Replay(launches, sizes, apart, clear, held, returned)
