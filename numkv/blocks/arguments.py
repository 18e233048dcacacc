"""Arguments of a pool of blocks, checked: ids, names, and sizes whose books fit into memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.blocks.prefix import DIGEST_SIZE, token_ids
from numkv.blocks.records import Ids
from numkv.checks import host_array
from numkv.errors import DimensionMismatch, UnsupportedDType
from numkv.numbers import check_size, memory_of_machine

#: Blocks that a pool can have: their ids and the heads of two lists are int32.
_MOST_BLOCKS = 2**31 - 3

#: Most bytes of an array.
_MOST_BYTES = 2**62

#: What a block's place in lists and tables takes at most, in bytes that are written when the pool is made.
_BOOKS_OF_BLOCK = 40


def pool_sizes(num_blocks: Any, block_size: Any) -> tuple[int, int]:
    """Check the sizes of a pool before any memory is taken.

    Parameters
    ----------
    num_blocks, block_size : int
        Blocks, and tokens in a block.

    Returns
    -------
    num_blocks, block_size : int
    """
    blocks = check_size("num_blocks", num_blocks)
    size = check_size("block_size", block_size, 1)
    most = min(_MOST_BLOCKS, memory_of_machine() // _BOOKS_OF_BLOCK)
    if blocks > most:
        raise DimensionMismatch(
            f"`num_blocks`: expected at most {most}, whose ids are int32 and whose books fit into this machine's "
            f"memory, got {blocks}; take larger blocks",
            expected=most,
            actual=blocks,
        )
    most = _MOST_BYTES // (4 * max(1, blocks))
    if size > most:
        raise DimensionMismatch(
            f"`block_size`: expected at most {most} tokens in each of {blocks} blocks, got {size}; "
            "take smaller blocks",
            expected=most,
            actual=size,
        )
    return blocks, size


def block_ids(ids: Any, num_blocks: int) -> Ids:
    """Take ids of blocks as int32; their range is checked here only where the conversion could hide it.

    Parameters
    ----------
    ids : array-like of int (n,)
        The argument.
    num_blocks : int
        Blocks in the pool.
    """
    x = ids if type(ids) is np.ndarray else host_array("ids", ids)
    if x.ndim != 1:
        raise DimensionMismatch(
            f"`ids`: expected int32 (n,), got {x.dtype} {x.shape}; pass a list of blocks",
            expected=("n",),
            actual=x.shape,
        )
    if x.dtype == np.int32:
        return x if x.flags.aligned else x.copy()
    if x.dtype.kind not in "iu":
        raise UnsupportedDType(f"`ids`: expected integers, got {x.dtype}; pass block ids")
    outside = np.flatnonzero((x < 0) | (x >= num_blocks))
    if len(outside):
        id_in_range(x, int(outside[0]), num_blocks)
    return x.astype(np.int32)


def id_in_range(ids: NDArray[Any], position: int, num_blocks: int) -> int:
    """The id at a position; raises if it is out of range."""
    block = int(ids[position])
    if not 0 <= block < num_blocks:
        raise IndexError(f"`ids`: expected indices in [0, {num_blocks}), got {block} at {position}")
    return block


def block_names(
    digests: Any, tokens: Any, block_size: int, n: int | None = None
) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Take names as words and token ids in one row.

    Parameters
    ----------
    digests : uint8 array (n, 32)
        Names.
    tokens : array-like of int (n, block_size) or flat
        Token ids; of a flat prompt less than a block may be left over.
    block_size : int
        Tokens in a block.
    n : int, optional
        How many names there must be.
    """
    names = host_array("digests", digests)
    if names.dtype != np.uint8:
        raise UnsupportedDType(
            f"`digests`: expected uint8 (n, {DIGEST_SIZE}), got {names.dtype} {names.shape}; "
            "pass what block_digests returns"
        )
    expected = "n" if n is None else n
    if names.ndim != 2 or names.shape[1] != DIGEST_SIZE or n not in (None, len(names)):
        raise DimensionMismatch(
            f"`digests`: expected uint8 ({expected}, {DIGEST_SIZE}), got {names.dtype} "
            f"{names.shape}; pass one digest per block",
            expected=(expected, DIGEST_SIZE),
            actual=names.shape,
        )
    words = np.ascontiguousarray(names).view(np.uint64)
    if not words.flags.aligned:  # bytes may begin anywhere, words may not
        words = names.copy().view(np.uint64)
    ids = token_ids(tokens)
    flat = ids.ndim == 1 and len(ids) // block_size == len(names)
    if not flat and ids.shape != (len(names), block_size):
        raise DimensionMismatch(
            f"`tokens`: expected int32 ({len(names)}, {block_size}) or flat, got {ids.dtype} "
            f"{ids.shape}; pass the tokens of all {len(names)} blocks",
            expected=(len(names), block_size),
            actual=ids.shape,
        )
    return words, ids.reshape(-1)
