"""States: blocks of numbers that some layers store for each sequence, instead of rows or in addition to them.

A state is a recurrent layer's summary of all tokens so far (Mamba, a gated delta rule, a convolution). numkv never
reads its numbers. All states of a sequence at one moment are a *slot*. A step reads one slot and writes another. So
rollbacks, forks and checkpoints copy nothing: a slot that ends a step is never written to again. Slots have a
`BlockPool` of their own. Checkpoints are registered under the hashes of prefixes, and stay until they are evicted, the
least recently used ones first.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.blocks.pool import BlockPool
from numkv.caches.layer_spec import StateShape
from numkv.errors import DimensionMismatch, NotSupported, NumkvError
from numkv.numbers import check_bytes
from numkv.snapshots.regions import clear_blocks, copy_blocks, gathered_blocks
from numkv.targets.base import Array, Target

Ints = NDArray[np.int64]


class Checkpoint(NamedTuple):
    """States that a step has ended with, where others are to find them."""

    slot: int
    name: bytes
    length: int
    tokens: NDArray[np.int32] | None
    """Ids of the last block of tokens, where the name is that of a prefix; else nobody else knows it."""


class StateMemory:
    """Slots for the states of all layers, and their block pool.

    Parameters
    ----------
    target : Target
        Where they lie.
    shapes : mapping of int to tuple of StateShape
        The arrays of each layer.
    num_slots : int
        Slots.
    every : int
        Tokens from one checkpoint to the next; a multiple of the block size.
    block_pool : BlockPool, optional
        Of slots that there are already.

    Attributes
    ----------
    block_pool : BlockPool
        References to slots, and the checkpoints in them.
    pages : list of array
        The bytes of each array in all slots, uint8 ``(num_slots, n)``.
    arrays : dict of int to tuple of array
        Of each layer the states in all slots, ``(num_slots, *shape)``.
    """

    def __init__(
        self, target: Target, shapes: Mapping[int, tuple[StateShape, ...]], num_slots: int, every: int,
        block_pool: BlockPool | None = None,
    ) -> None:  # fmt: skip
        self.target, self.shapes, self.every = target, dict(shapes), every
        self.block_pool = BlockPool(num_slots, 1) if block_pool is None else block_pool
        check_bytes({"num_slots": num_slots, "states": self.slot_nbytes(shapes)}, 1)
        flat = [shape for of_layer in self.shapes.values() for shape in of_layer]
        self.pages = [target.zeros((num_slots, shape.nbytes), np.uint8) for shape in flat]
        views = iter(
            target.column(pages, 0, shape.shape, np.dtype(shape.dtype))
            for pages, shape in zip(self.pages, flat, strict=True)
        )
        self.arrays: dict[int, tuple[Array, ...]] = {
            layer: tuple(itertools.islice(views, len(of_layer)))
            for layer, of_layer in self.shapes.items()
        }
        self._unnamed = itertools.count()

    @staticmethod
    def slot_nbytes(shapes: Mapping[int, tuple[StateShape, ...]]) -> int:
        """Bytes of the states of one sequence."""
        return sum(shape.nbytes for of_layer in shapes.values() for shape in of_layer)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.block_pool.num_blocks * self.slot_nbytes(self.shapes)

    # -- slots

    def clear(self, slots: NDArray[np.int32]) -> None:
        """Make the states in some slots zeros: those of sequences without tokens."""
        clear_blocks(self.target, self.pages, slots)

    def out(self, slot: int) -> tuple[tuple[np.ndarray[Any, Any], ...], ...]:
        """Copies of the states in a slot in host memory, layer after layer."""
        found = iter(self.gathered(self.pages, np.array([slot], np.int32)))
        return tuple(
            tuple(
                np.array(self.target.to_host(next(found)))[0].view(shape.dtype).reshape(shape.shape)
                for shape in of_layer
            )
            for of_layer in self.shapes.values()
        )

    def put(self, slot: int, states: Sequence[Sequence[np.ndarray[Any, Any]]]) -> None:
        """Fill a slot with what `out` gave."""
        flat = [x for of_layer in states for x in of_layer]
        for pages, x in zip(self.pages, flat, strict=True):
            row = np.ascontiguousarray(x).reshape(-1).view(np.uint8)[None]
            self.scatter([self.target.asarray(row)], [pages], np.array([slot], np.int32))

    def gathered(self, arrays: Sequence[Any], slots: NDArray[np.int32]) -> list[Any]:
        """Copies of what slots have in some of the arrays, elsewhere on the target."""
        return gathered_blocks(self.target, arrays, slots)

    def scatter(
        self, values: Sequence[Any], arrays: Sequence[Any], slots: NDArray[np.int32]
    ) -> None:
        """Copy values to slots in some of the arrays."""
        if self.target.values_on_host:
            for x, new in zip(arrays, values, strict=True):
                x[slots] = new
        else:
            copy_blocks(self.target, values, np.arange(len(slots)), arrays, slots)

    def copy(self) -> StateMemory:
        """The same slots and block pool once more, in memory of their own."""
        made = StateMemory(
            self.target, self.shapes, self.block_pool.num_blocks, self.every, self.block_pool.copy()
        )
        every = np.arange(self.block_pool.num_blocks, dtype=np.int32)
        if len(every):
            made.scatter(self.pages, made.pages, every)
        return made

    # -- checkpoints

    def is_checkpoint(self, length: int) -> bool:
        """Return whether the states after so many tokens are kept."""
        return length > 0 and length % self.every == 0

    def new_name(self) -> bytes:
        """A name for a checkpoint of tokens whose ids are not known: no other one of these slots has it.

        A copy counts from 0 again, but slots have been taken since.
        """
        taken = self.block_pool.stats().allocations
        return sha256(f"state {next(self._unnamed)} {taken}".encode()).digest()

    def register(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Have slots found by names, but for names that other slots have."""
        if checkpoints:
            slots, names, lengths, _ = zip(*checkpoints, strict=True)
            self.block_pool.register(slots, _names(names), np.array(lengths).reshape(-1, 1))

    def forget(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Undo `register`."""
        if checkpoints:
            self.block_pool.forget([each.slot for each in checkpoints])

    def find(self, names: Sequence[bytes], lengths: Sequence[int]) -> NDArray[np.int32]:
        """Return the slots of checkpoints; negative numbers for missing ones."""
        if not names:
            return np.empty(0, np.int32)
        return self.block_pool.find_each(_names(names), np.array(lengths, np.int32).reshape(-1, 1))

    def present(self, chain: NDArray[np.uint8], block_size: int) -> NDArray[np.bool_]:
        """After which numbers of blocks of a prompt, from 0 on, there is a checkpoint; 0 needs none.

        Parameters
        ----------
        chain : uint8 array (n, 32)
            Names of the blocks.
        block_size : int
            Tokens in a block.
        """
        fits = np.zeros(len(chain) + 1, np.bool_)
        fits[0] = True
        step = self.every // block_size
        numbers = np.arange(step, len(chain) + 1, step)
        if len(numbers):
            lengths = (numbers * block_size).astype(np.int32)
            fits[numbers] = (
                self.block_pool.find_each(chain[numbers - 1], lengths.reshape(-1, 1)) >= 0
            )
        return fits

    def restore(self, marks: Sequence[tuple[int, bytes]], length: int, present: int) -> int:
        """Return the slot of the checkpoint at a length, or raise an error that lists the others."""
        slots = self.find([name for _, name in marks], [n for n, _ in marks])
        there = {n: int(slot) for (n, _), slot in zip(marks, slots, strict=True) if slot >= 0}
        if length in there:
            return there[length]
        below = max((n for n in there if n < length), default=0)
        above = min((n for n in there if n > length), default=present)
        raise NotSupported(
            f"`length`: expected a length at which there is a checkpoint of the sequence's states, got {length} of "
            f"{present}; the nearest ones are {below} and {above}"
        )


def _names(names: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(bytearray().join(names), np.uint8).reshape(len(names), 32)


def check_content(shapes: Mapping[int, tuple[StateShape, ...]], states: Any) -> None:
    """Check states in host memory, as `StateMemory.out` gives them."""
    wanted = [[(x.shape, x.dtype) for x in of_layer] for of_layer in shapes.values()]
    try:
        found = [
            [(tuple(x.shape), np.dtype(x.dtype).name) for x in of_layer] for of_layer in states
        ]
    except (TypeError, AttributeError):
        raise NumkvError(
            "`swapped`: expected arrays as states; it is damaged, make it anew"
        ) from None
    if found != wanted:
        raise DimensionMismatch(
            f"`swapped`: expected states {wanted}, got {found}", expected=wanted, actual=found
        )


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
