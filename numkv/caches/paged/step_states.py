"""States in a step of a `PagedKVCache`: what layers read that keep some, and what they write."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.access import Access, whole
from numkv.caches.paged.states import StateSlots
from numkv.caches.paged.store import BlockStore
from numkv.checks import check_array
from numkv.errors import DimensionMismatch, NotSupported, NumkvError
from numkv.numbers import check_index
from numkv.targets.base import Array
from numkv.targets.streamed import on_stream


class StepState(NamedTuple):
    """The states of a layer in a step.

    Attributes
    ----------
    arrays : tuple of array
        In all slots, ``(num_states, *shape)``, on the target.
    read : int32 array (num_seqs,)
        The slot that has the state before the step, of each of its sequences; on the host.
    write : int32 array (num_seqs,)
        The slot that takes the state after it. That of a sequence without tokens is `read` too, and zeros.
    """

    arrays: tuple[Array, ...]
    read: NDArray[np.int32]
    write: NDArray[np.int32]


class StateStep:
    """The part of `Step` that concerns states."""

    _store: BlockStore
    _access: Access
    open: bool
    sequences: tuple[int, ...]
    _written: NDArray[np.bool_]

    def _begin_states(self, read: list[int], write: NDArray[np.int32] | None) -> None:
        self._slots_written = self._store.without_states.copy()
        if write is not None:
            before = np.array(read, np.int32)
            self._state_slots = np.where(before < 0, write, before).astype(np.int32), write

    def _states(self, layer: int) -> tuple[StateSlots, int]:
        if not self.open:
            raise NumkvError("expected an open step, got one that was committed or rolled back")
        number, slots = check_index("layer", layer, self._store.num_layers), self._store.states
        if slots is None or number not in slots.shapes:
            raise NotSupported(f"`layer`: expected one that keeps states, got layer {number}")
        return slots, number

    def state(self, layer: int) -> StepState:
        """The arrays of a layer's states, with the slots to read and to write; for your own kernels.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        StepState
            ``x[write[i]] = f(x[read[i]])`` is a step of sequence i. Write to the slots of `write`, all of them and no
            others, and say `mark_written`; `read_state` and `write_state` do it for you.

        Raises
        ------
        NumkvError
            If the step has ended.
        NotSupported
            If the layer keeps no states.
        IndexError
            If there is no such layer.
        """
        slots, number = self._states(layer)
        read, write = self._state_slots
        return StepState(slots.arrays[number], read.copy(), write.copy())

    @on_stream
    def read_state(self, layer: int, *, stream: Any = None) -> tuple[Array, ...]:
        """Copies of a layer's states as they were before the step.

        Parameters
        ----------
        layer : int
            Which layer.
        stream : object, optional
            See `numkv.paged_decode_attention`.

        Returns
        -------
        tuple of array (num_seqs, *shape)
            One for each array of the layer; zeros for a sequence without tokens.

        Raises
        ------
        NumkvError, NotSupported, IndexError
            See `state`.
        """
        slots, number = self._states(layer)
        return tuple(slots.gathered(slots.arrays[number], self._state_slots[0]))

    @on_stream
    @whole
    def write_state(self, layer: int, *states: Any, stream: Any = None) -> None:
        """Write a layer's states as they are after the step's tokens.

        Parameters
        ----------
        layer : int
            Which layer.
        *states : array (num_seqs, *shape)
            One for each array of the layer, of its dtype.
        stream : object, optional
            See `numkv.paged_decode_attention`.

        Raises
        ------
        DimensionMismatch, UnsupportedDType
            If an array has another shape or dtype, or there are more or fewer; nothing is written.
        NumkvError, NotSupported, IndexError
            See `state`.
        """
        slots, number = self._states(layer)
        shapes = slots.shapes[number]
        if len(states) != len(shapes):
            raise DimensionMismatch(
                f"`states`: expected {len(shapes)} arrays, which layer {number} keeps, got {len(states)}",
                expected=len(shapes),
                actual=len(states),
            )
        checked = [
            check_array(
                slots.target, "states", x, (np.dtype(of.dtype),), (len(self.sequences), *of.shape)
            )
            for x, of in zip(states, shapes, strict=True)
        ]
        slots.scatter(checked, slots.arrays[number], self._state_slots[1])
        self._slots_written[number] = True

    @whole
    def mark_written(self, layer: int | None = None) -> None:
        """Say that all rows and states of new tokens have been written: by a kernel of your own, or by a CUDA graph.

        Parameters
        ----------
        layer : int, optional
            In which layer; in all of them if None.

        Raises
        ------
        NumkvError
            If the step has ended.
        IndexError
            If there is no such layer.
        NotSupported
            If the cache keeps tokens in full precision, whose rows are written beside others.
        """
        self._store.refuse_residual("mark_written", "write by `append` or `write`")
        every = slice(None)
        number = every if layer is None else check_index("layer", layer, self._store.num_layers)
        if not self.open:
            raise NumkvError("expected an open step, got one that was committed or rolled back")
        self._written[number] = self._slots_written[number] = True
