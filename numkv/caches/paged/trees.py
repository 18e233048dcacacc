"""Steps whose new tokens are trees of drafts: each token's mask and position, and the path that is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.attention.tree import depths_of, tree_mask
from numkv.caches.paged.arguments import check_count
from numkv.caches.paged.store import BlockStore, Ints
from numkv.checks import check_integers, host_array
from numkv.errors import NotSupported
from numkv.targets.base import Array, Target


class Tree:
    """The trees of a step's sequences.

    Parameters
    ----------
    parents : array-like of int (num_tokens,)
        See `numkv.tree_mask`.
    new_lens : int64 array (num_seqs,)
        How many tokens each sequence gets.
    into : object
        Where the step's tables lie: refused, as no graph knows masks.

    Attributes
    ----------
    depths : int64 array (num_tokens,)
        How many tokens of the tree come before each.
    moved : dict of int to int
        For each kept token, by its number in the step, the number of the token whose place it has now.
    """

    def __init__(self, parents: Any, new_lens: Ints, into: Any) -> None:
        if into is not None:
            raise NotSupported("`parents`: expected None for a step that lies in StepBuffers")
        starts = np.zeros(len(new_lens) + 1, np.int64)
        np.cumsum(new_lens, out=starts[1:])
        self._starts: list[int] = starts.tolist()
        self._bits = tree_mask(parents, starts)
        self.depths = depths_of(parents, starts)
        self._parents: list[int] = np.asarray(parents).tolist()
        self.moved: dict[int, int] = {}
        self._mask: Array | None = None
        self._slots: list[NDArray[np.int64]] = []

    @staticmethod
    def refuse(tree: Tree | None, name: str) -> None:
        """Refuse operations that do not support masks, for a step with a tree."""
        if tree is not None:
            raise NotSupported(f"{name}: expected a step without a tree, got one")

    def put(self, target: Target, slots: list[NDArray[np.int64]]) -> None:
        """Take the tokens' slots in every group, and put the mask on the target."""
        self._slots, self._mask = slots, target.asarray(self._bits)

    def seen(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options of a call with the tree's mask."""
        for name in ("mask", "ranges"):
            if given.get(name) is not None:
                raise NotSupported(
                    f"`{name}`: expected None, as the step's tree says what its tokens see, got an array"
                )
        return {**given, "mask": self._mask}

    def order_of(self, paths: Any, new_lens: Ints) -> tuple[Ints, Ints]:
        """Check paths; return how many tokens each sequence keeps, and all tokens with those of paths first."""
        try:
            numbers = list(paths)
        except TypeError:
            raise TypeError(
                f"`paths`: expected a path for each sequence, got {type(paths).__name__}"
            ) from None
        count = len(new_lens)
        check_count("paths", f"a path for each of {count} sequences", count, len(numbers))
        order: Ints = np.arange(self._starts[-1])
        keep: Ints = np.zeros(len(new_lens), np.int64)
        for i, (first, n) in enumerate(zip(self._starts, new_lens.tolist(), strict=False)):
            path = host_array("paths", numbers[i])
            path = path if path.size else path.astype(np.int64)
            steps = check_integers(targets.get("cpu"), "paths", path, ("tokens",)).tolist()
            parent = -1
            for token in steps:
                if not 0 <= token < n or self._parents[first + token] != parent:
                    raise IndexError(
                        f"`paths`: expected tokens of sequence {i}'s tree from its root on, each the parent of the "
                        f"next, got {steps}"
                    )
                parent = token
            rest = np.setdiff1d(np.arange(n), steps)
            order[first : first + n] = first + np.concatenate([np.array(steps, np.int64), rest])
            keep[i] = len(steps)
        return keep, order

    def move(self, store: BlockStore, order: Ints, written: NDArray[np.bool_]) -> None:
        """Give the tokens that come first in an order the first places; all layers are `written`, but meanwhile."""
        to = np.arange(len(order))
        changed = (order > to).nonzero()[0]  # those of paths move down, the others may be lost
        self.moved = dict(zip(order.tolist(), to.tolist(), strict=True))
        if not len(changed):
            return
        written[:] = False  # an interrupt leaves rows that nobody can tell apart
        for pool, groups in store.parts:
            source, dest = (
                store.target.index(np.concatenate([self._slots[g][i] for g in groups]), np.int64)
                for i in (order[changed], changed)
            )
            pool.copy_slots(source, dest, pool)
        written[:] = True  # as `commit` has found
