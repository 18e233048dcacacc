"""What a `PagedKVCache` does about rows that a kernel has found to be NaN or infinite, after the call was over.

Of several tokens of a sequence that were not finite sometimes only the first is reported, so whatever comes after it
counts as if it were not finite either, until the sequence is truncated before it. On the CPU nothing is ever reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.blocks.pool import BlockPool
from numkv.caches.history import LONG_AGO, History, first_kept
from numkv.errors import NonFiniteInput


class _Fork(NamedTuple):
    """A sequence that was made of another one, of which rows that both have may yet be reported."""

    calls: int  #: of the cache, before
    child: int
    length: int  #: tokens that the child began with
    history: History  #: of the other one, so far


class BadRows:
    """Of sequences with rows that were NaN or infinite, the first such position, and the error."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, NonFiniteInput]] = {}
        self._histories: dict[int, History] = {}
        self._forks: dict[int, tuple[_Fork, ...]] = {}

    def __bool__(self) -> bool:
        """Whether any sequence has such rows, as far as has been reported."""
        return bool(self._first)

    def __contains__(self, seq: int) -> bool:
        """Whether a sequence has such rows, as far as has been reported."""
        return seq in self._first

    def tell(self, seq: int, position: int, error: NonFiniteInput, call: int) -> None:
        """Note what a kernel found in a token that had this position when call number `call` was made."""
        for fork in self._forks.get(seq, ()):
            if call <= fork.calls:
                there = fork.history.now(position, call)
                if there is not None and there < fork.length:
                    self.tell(fork.child, there, error, call)
        history = self._histories.get(seq)
        now = position if history is None else history.now(position, call)
        if now is not None:
            self._note(seq, now, error)

    def _note(self, seq: int, position: int, error: NonFiniteInput) -> None:
        known = self._first.get(seq)
        if known is None or position < known[0]:
            self._first[seq] = position, error

    def refuse(self, seq: int, length: int) -> None:
        """Refuse to go on with a sequence of so many tokens if one of them was reported."""
        if not self._first:
            return
        position, error = self._first.get(seq, (length, None))
        if error is not None and position < length:
            raise NonFiniteInput(
                f"{error}; truncate sequence {seq} to {position} tokens, or roll its step back",
                error.index,
            )
        self._first.pop(seq, None)

    # -- what becomes of sequences

    def keep(self, seq: int, kept: int | NDArray[np.int64], calls: int) -> None:
        """Forget tokens that are dropped, also of those of which something may yet be reported.

        Parameters
        ----------
        seq : int
            The sequence.
        kept : int or int64 array (1, n)
            How many tokens it keeps, or which.
        calls : int
            Calls of the cache's watch so far.
        """
        known = self._first.pop(seq, None)
        if known is not None and (now := first_kept(known[0], kept)) is not None:
            self._first[seq] = now, known[1]
        if calls:
            self._histories.setdefault(seq, History()).add(calls, kept)

    def fork(self, seq: int, child: int, length: int, calls: int) -> None:
        """Let a sequence begin with the first tokens of another one."""
        known = self._first.get(seq)
        if known is not None and known[0] < length:
            self._first[child] = known
        if calls:
            self._forks = {
                parent: recent
                for parent, forks in self._forks.items()
                if (recent := tuple(of for of in forks if calls - of.calls < LONG_AGO))
            }
            so_far = self._histories.get(seq, History()).copy()
            mine = _Fork(calls, child, length, so_far)
            self._forks[seq] = (*self._forks.get(seq, ()), mine)

    def remove(self, seq: int) -> None:
        """Forget a sequence; what was forked from it may yet have reports."""
        self._first.pop(seq, None)
        self._histories.pop(seq, None)

    def clear(self) -> None:
        """Forget all sequences."""
        self._first, self._histories, self._forks = {}, {}, {}

    def copy(self) -> BadRows:
        """What is known, for a copy of the cache."""
        made = BadRows()
        made._first = dict(self._first)
        return made

    def spread(self, states: Mapping[int, Any], blocks: BlockPool) -> None:
        """Tell sequences that share a block with a bad row, and let nobody find it as a prefix any more.

        Parameters
        ----------
        states : mapping of int to SequenceState
            All sequences.
        blocks : BlockPool
            The books of their blocks.
        """
        for seq, (position, error) in list(self._first.items()):
            state = states.get(seq)
            if state is None or position >= state.length:
                continue
            index = position // blocks.block_size
            for group, table in enumerate(state.tables):
                behind = table[index:][table[index:] >= 0]
                blocks.forget(behind[blocks.is_cached(behind)])
                if not len(table) > index or table[index] < 0:
                    continue
                for other, its in states.items():
                    of = its.tables[group]
                    if len(of) > index and of[index] == table[index] and position < its.length:
                        self._note(other, position, error)
