"""Three descriptions of where a batch's tokens lie in a paged pool, and conversions between them.

====================  ===========================================================================================
block table           ``block_table (num_seqs, max_blocks)`` with ``seq_lens``: vLLM, FlashAttention
CSR                   ``kv_indptr``, ``kv_indices``, ``kv_last_page_len``: FlashInfer
slots                 ``slot_mapping (num_tokens,)``, ``block * block_size + offset``: where new tokens are written
====================  ===========================================================================================

All arrays are NumPy arrays on the host; entries of a block table past a sequence's length are never read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.checks import check_integers
from numkv.errors import DimensionMismatch
from numkv.numbers import check_size

Ints = NDArray[np.int32]


#: Tokens in a block with which slots are int64, whatever block of int32 they are in.
_MOST_TOKENS = 2**31 - 1


def _check_table(
    block_table: Any, seq_lens: Any, block_size: Any
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return the table, the lengths, and the number of tokens in a block."""
    cpu = targets.get("cpu")
    size = check_size("block_size", block_size, 1, _MOST_TOKENS)
    table = check_integers(cpu, "block_table", block_table, ("num_seqs", "max_blocks"))
    lens = check_integers(cpu, "seq_lens", seq_lens, (table.shape[0],)).astype(np.int64)
    capacity = table.shape[1] * size
    if lens.size and not (lens.min() >= 0 and lens.max() <= capacity):
        raise IndexError(
            f"`seq_lens`: expected lengths in [0, {capacity}], what the block table has room for, "
            f"got [{lens.min()}, {lens.max()}]"
        )
    return table.astype(np.int64), lens, size


def block_table_to_csr(block_table: Any, seq_lens: Any, block_size: int) -> tuple[Ints, Ints, Ints]:
    """Block table to CSR.

    Parameters
    ----------
    block_table : int array (num_seqs, max_blocks)
        Physical block of each logical block.
    seq_lens : int array (num_seqs,)
        Tokens of each sequence.
    block_size : int
        Tokens in a block.

    Returns
    -------
    kv_indptr : int32 array (num_seqs + 1,)
        Prefix sums of the sequences' numbers of blocks.
    kv_indices : int32 array (kv_indptr[-1],)
        Their blocks, one sequence after another.
    kv_last_page_len : int32 array (num_seqs,)
        Tokens in each sequence's last block, 1 to `block_size`; 0 for an empty sequence.

    Raises
    ------
    IndexError
        If a length is negative or more than the table has room for.
    DimensionMismatch, UnsupportedDType
        If an array has another shape or dtype.

    Examples
    --------
    >>> from numkv.blocks import block_table_to_csr
    >>> indptr, indices, last = block_table_to_csr([[7, 2], [5, -1]], [17, 3], 16)
    >>> indptr.tolist(), indices.tolist(), last.tolist()
    ([0, 2, 3], [7, 2, 5], [1, 3])
    """
    table, lens, size = _check_table(block_table, seq_lens, block_size)
    blocks = -(-lens // size)
    indptr = np.concatenate([[0], np.cumsum(blocks)]).astype(np.int32)
    used = np.arange(table.shape[1]) < blocks[:, None]
    last = lens - np.maximum(blocks - 1, 0) * size
    return indptr, table[used].astype(np.int32), last.astype(np.int32)


def csr_to_block_table(
    kv_indptr: Any, kv_indices: Any, kv_last_page_len: Any, block_size: int, *, fill: int = -1
) -> tuple[Ints, Ints]:
    """CSR to block table.

    Parameters
    ----------
    kv_indptr : int array (num_seqs + 1,)
        Prefix sums of the sequences' numbers of blocks.
    kv_indices : int array (kv_indptr[-1],)
        Their blocks.
    kv_last_page_len : int array (num_seqs,)
        Tokens in each sequence's last block; ignored for a sequence without blocks.
    block_size : int
        Tokens in a block.
    fill : int
        What entries past a sequence's blocks are set to.

    Returns
    -------
    block_table : int32 array (num_seqs, max_blocks)
        As wide as the longest sequence needs.
    seq_lens : int32 array (num_seqs,)
        Tokens of each sequence.

    Raises
    ------
    DimensionMismatch
        If `kv_indptr` are not prefix sums that end with the number of indices.
    IndexError
        If a last block holds less than one token or more than `block_size`, or a block is no int32.
    UnsupportedDType
        If an array has another dtype.
    """
    cpu = targets.get("cpu")
    size = check_size("block_size", block_size, 1, _MOST_TOKENS)
    filler = check_size("fill", fill, -(2**31), 2**31 - 1)
    last = check_integers(cpu, "kv_last_page_len", kv_last_page_len, ("num_seqs",)).astype(np.int64)
    indptr = check_integers(cpu, "kv_indptr", kv_indptr, (len(last) + 1,)).astype(np.int64)
    indices = check_integers(cpu, "kv_indices", kv_indices, ("num_blocks",))
    blocks = np.diff(indptr)
    if indptr[0] != 0 or (blocks < 0).any() or indptr[-1] != len(indices):
        raise DimensionMismatch(
            "`kv_indptr`: expected prefix sums that start with 0, never fall and end with the number of "
            f"`kv_indices`, {len(indices)}, got {indptr.tolist()}",
            expected=len(indices),
            actual=int(indptr[-1]),
        )
    if indices.dtype != np.int32 and len(indices):
        least, most = int(indices.min()), int(indices.max())
        if least < -(2**31) or most >= 2**31:
            raise IndexError(
                f"`kv_indices`: expected blocks that are int32, got {least if least < 0 else most}"
            )
    some = blocks > 0
    if ((last < 1) | (last > size))[some].any():
        raise IndexError(
            f"`kv_last_page_len`: expected numbers in [1, {size}], got {last.tolist()}"
        )
    table = np.full((len(last), int(blocks.max(initial=0))), filler, np.int32)
    table[np.arange(table.shape[1]) < blocks[:, None]] = indices
    return table, np.where(some, (blocks - 1) * size + last, 0).astype(np.int32)


def slot_mapping(
    block_table: Any, seq_lens: Any, block_size: int, *, new_lens: Any = None
) -> NDArray[np.int64]:
    """Slots of the sequences' newest tokens, for `numkv.paged_append`.

    Parameters
    ----------
    block_table : int array (num_seqs, max_blocks)
        Physical block of each logical block.
    seq_lens : int array (num_seqs,)
        Tokens of each sequence, the new ones included.
    block_size : int
        Tokens in a block.
    new_lens : int array (num_seqs,), optional
        How many of them are new; one each if None.

    Returns
    -------
    int64 array (num_tokens,)
        ``block * block_size + offset`` of each new token, one sequence after another.

    Raises
    ------
    IndexError
        If a length is negative or more than the table has room for, or a sequence has more new tokens than tokens.
    DimensionMismatch, UnsupportedDType
        If an array has another shape or dtype.

    Examples
    --------
    >>> from numkv.blocks import slot_mapping
    >>> slot_mapping([[7, 2], [5, -1]], [17, 3], 16, new_lens=[2, 1]).tolist()
    [127, 32, 82]
    """
    table, lens, size = _check_table(block_table, seq_lens, block_size)
    if new_lens is None:
        new = np.ones_like(lens)
    else:
        cpu = targets.get("cpu")
        new = check_integers(cpu, "new_lens", new_lens, (len(lens),)).astype(np.int64)
    if ((new < 0) | (new > lens)).any():
        raise IndexError(
            f"`new_lens`: expected numbers in [0, seq_len] for lengths {lens.tolist()}, got {new.tolist()}"
        )
    sequence = np.repeat(np.arange(len(lens)), new)
    within = np.arange(len(sequence)) - np.repeat(np.cumsum(new) - new, new)
    position = (lens - new)[sequence] + within
    slots: NDArray[np.int64] = table[sequence, position // size] * size + position % size
    return slots
