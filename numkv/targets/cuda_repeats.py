"""Replays of an object's repeated calls on CUDA; see `numkv.kernels.cuda.replays`.

An object's buffers and numbers change between calls. So it stores its calls itself, by the caller's arguments. For each
replay it checks its own state, and passes the differences: pointers of its tables, and numbers. When its buffers are
replaced, it discards its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numkv.arrays import Array
from numkv.kernels.cuda import memory, streams
from numkv.kernels.cuda.replays import Replay
from numkv.kernels.cuda.uploads import pointer_of_length
from numkv.targets.cuda_calls import find, given_of, keep, returned

#: Most layouts of calls that an object stores.
MOST_REPLAYS = 1024


#: The result of a call that was not replayed.
MISSED = object()


class Call:
    """A call of an object.

    Attributes
    ----------
    replay : Replay or None
        The earlier equal call; None if there is none, or it cannot be replayed.
    """

    __slots__ = ("_accept", "_arrays", "_kept", "_key", "_place", "_pointers", "replay")

    def __init__(
        self, key: Any, place: streams.Place, pointers: list[int], arrays: tuple[Any, ...],
        replay: Replay | None, kept: dict[Any, Replay], accept: Callable[[Any, str], Array],
    ) -> None:  # fmt: skip
        self._key, self._place, self._pointers, self._arrays = key, place, pointers, arrays
        self.replay, self._kept, self._accept = replay, kept, accept

    def run(self, own: Sequence[int] = (), numbers: Sequence[int] = ()) -> Any:
        """Replay the call.

        Parameters
        ----------
        own : sequence of int
            Pointers of the object's arrays that differ from call to call, in the order of `long`.
        numbers : sequence of int
            Other differences, in the order of `numkv.kernels.cuda.launches.Number.which`.

        Returns
        -------
        object
            The result of the call; `MISSED`, without any effect, if arrays may overlap now.
        """
        replay: Any = self.replay
        pointers = self._pointers
        held = replay.run(self._place, [*pointers, *own] if own else pointers, numbers)
        if held is None:
            return MISSED
        return returned(replay, held, self._arrays, self._accept)

    def length(self, length: int) -> int | None:
        """Return the pointer of a cached array of this length on the call's stream; None if there is none."""
        return pointer_of_length(self._place, length)

    def long(
        self, function: Callable[[], Any], own: Callable[[], Sequence[Array]], note: Callable[[], Any],
        written: frozenset[int] = frozenset(), after: Any = None,
    ) -> Any:  # fmt: skip
        """Make the call in full, and store it for replay if it consists of launches only.

        Parameters
        ----------
        function : function
            Makes the call, and returns its result.
        own, note : function
            Called afterwards, on the call's stream. They return the object's arrays that differ from call to call, and
            a note that the object stores with the call.
        written : set of int
            Indices of the arrays that the call writes to.
        after : object
            See `numkv.targets.base.Target.on`.
        """
        with streams.on(self._place, after):
            if self._key is None:
                return function()
            with streams.recorded() as recording:
                result = function()
            if not recording.spoiled:
                theirs, ours = (given_of(x, self._accept) for x in (self._arrays, tuple(own())))
                given = None if theirs is None or ours is None else theirs + ours
                how = recording, given, written, self._place
                keep(self._kept, MOST_REPLAYS, self._key, *how, result, note(), len(self._arrays))
        return result


class Repeats:
    """The calls of one object."""

    __slots__ = ("_accept", "_kept")

    #: The result of `Call.run` for a call that was not replayed.
    missed = MISSED

    def __init__(self, accept: Callable[[Any, str], Array]) -> None:
        self._accept = accept
        self._kept: dict[Any, Replay] = {}

    @staticmethod
    def pointer(x: Array) -> int:
        """Return the address of an array."""
        return memory.pointer_of(x)

    def find(
        self, what: tuple[Any, ...], arrays: tuple[Any, ...], own: Any, after: Any = None
    ) -> Call:
        """Look up a call by its method, layer, options and the caller's arrays; see `cuda_calls.find`.

        For `after` see `numkv.targets.base.Target.on`.
        """
        key, replay, place, pointers = find(self._kept, what, arrays, own)
        # An object's calls are not captured by graphs, or not in this form.
        if (after is not None and after is not place) or (place.handle and place.capturing()):
            key = replay = None
        return Call(key, place, pointers, arrays, replay, self._kept, self._accept)
