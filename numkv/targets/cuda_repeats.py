"""An object's calls on CUDA that repeat: the launches of the first one, made again; see `numkv.kernels.cuda.replays`.

An object has buffers of its own, and numbers that move on. So it stores its calls itself, by the caller's arguments.
Each time it checks its own state, and passes the differences: pointers of its tables, and numbers. Where its buffers
are replaced it begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numkv.arrays import Array
from numkv.kernels.cuda import memory, streams
from numkv.kernels.cuda.replays import Replay
from numkv.kernels.cuda.uploads import pointer_of_length
from numkv.targets.cuda_calls import find, given_of, keep, returned

#: Layouts of calls that an object keeps.
MOST_REPLAYS = 1024


class _Missed:
    """What a call gives that was not made."""

    def __repr__(self) -> str:
        return "no call"


MISSED = _Missed()


class Call:
    """A call of an object.

    Attributes
    ----------
    replay : Replay or None
        The same call as it was made before; None where there was none, or where it has to go the long way.
    """

    __slots__ = ("_accept", "_arrays", "_kept", "_key", "_place", "_pointers", "replay")

    def __init__(
        self, key: Any, place: streams.Place, pointers: list[int], arrays: tuple[Any, ...],
        replay: Replay | None, kept: dict[Any, Replay], accept: Callable[[Any, str], Array],
    ) -> None:  # fmt: skip
        self._key, self._place, self._pointers, self._arrays = key, place, pointers, arrays
        self.replay, self._kept, self._accept = replay, kept, accept

    def run(self, own: Sequence[int] = (), numbers: Sequence[int] = ()) -> Any:
        """Make the call as before.

        Parameters
        ----------
        own : sequence of int
            Pointers of the object's arrays that differ from call to call, in the order in which `long` took them.
        numbers : sequence of int
            What is different beside them, by `numkv.kernels.cuda.launches.Number.which`.

        Returns
        -------
        object
            What the call returns; `MISSED`, and nothing has happened, where arrays may overlap anew.
        """
        replay: Any = self.replay
        pointers = self._pointers
        held = replay.run(self._place, [*pointers, *own] if own else pointers, numbers)
        if held is None:
            return MISSED
        return returned(replay, held, self._arrays, self._accept)

    def length(self, length: int) -> int | None:
        """The pointer of an array of one element, this length, on the call's stream; None if there is none yet."""
        return pointer_of_length(self._place, length)

    def long(
        self, function: Callable[[], Any], own: Callable[[], Sequence[Array]], note: Callable[[], Any],
        written: frozenset[int] = frozenset(), after: Any = None,
    ) -> Any:  # fmt: skip
        """Make the call by a function, and keep it if launches are all that it takes.

        Parameters
        ----------
        function : function
            Does it, and gives what the call returns.
        own, note : function
            Asked afterwards, on the call's stream: the object's arrays that differ from call to call, and what the
            object wants to know of a call that is kept.
        written : set of int
            Which of the arrays given it writes to.
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

    #: What `Call.run` returns of a call that it has not made.
    missed = MISSED

    def __init__(self, accept: Callable[[Any, str], Array]) -> None:
        self._accept = accept
        self._kept: dict[Any, Replay] = {}

    @staticmethod
    def pointer(x: Array) -> int:
        """Return where an array lies."""
        return memory.pointer_of(x)

    def find(
        self, what: tuple[Any, ...], arrays: tuple[Any, ...], own: Any, after: Any = None
    ) -> Call:
        """A call by its method, layer and options, and by the arrays that a caller passed; see `cuda_calls.find`.

        Of `after` see `numkv.targets.base.Target.on`.
        """
        key, replay, place, pointers = find(self._kept, what, arrays, own)
        # What objects do is not for graphs, or not like this.
        if (after is not None and after is not place) or (place.handle and place.capturing()):
            key = replay = None
        return Call(key, place, pointers, arrays, replay, self._kept, self._accept)
