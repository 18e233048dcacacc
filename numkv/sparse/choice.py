"""Blocks chosen by their scores, and checks of blocks and tables whose values may lie on a device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numkv import targets
from numkv.arrays import Array
from numkv.attention.attend import check_blocks
from numkv.checks import check_array, check_integers
from numkv.errors import DimensionMismatch
from numkv.numbers import check_flag, check_size
from numkv.targets.base import Target
from numkv.targets.call import Call

_INT32 = (np.dtype(np.int32),)


def check_numbers(target: Target, name: str, x: Array, end: int) -> None:
    """Look whether numbers are in ``[0, end)``; on CUDA that waits."""
    on_host = target.to_host(x)
    bad = (on_host < 0) | (on_host >= end)
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise IndexError(
            f"`{name}`: expected numbers in [0, {end}), got {on_host[at]} at index {at}"
        )


def check_table(
    target: Target, block_table: Any, seq_lens: Any, num_seqs: int, block_size: int, num_blocks: int,
    validate: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """A block table and lengths as kernels take them; values are looked at on the CPU, on CUDA if asked for."""
    table = check_integers(target, "block_table", block_table, (num_seqs, "max_blocks"), _INT32)
    lens = target.index(check_integers(target, "seq_lens", seq_lens, (num_seqs,)), np.int64)
    if target.values_on_host or validate:
        look_at_table(
            target.to_host(table), target.to_host(lens).astype(np.int64), block_size, num_blocks, "block_table"
        )  # fmt: skip
    return table, lens


def look_at_table(table: Any, lens: Any, block_size: int, num_blocks: int, name: str) -> None:
    """Refuse lengths that the rows of a table have no room for, and blocks that are in no pool."""
    capacity = table.shape[1] * block_size
    bad = (lens < 0) | (lens > capacity)
    if bad.any():
        b = int(np.flatnonzero(bad)[0])
        raise IndexError(
            f"`seq_lens`: expected lengths in [0, {capacity}], got {lens[b]} for row {b} of `{name}`"
        )
    check_blocks(name, table, lens, block_size, num_blocks, "in row")


def too_many_parts(num_blocks: int, heads: int) -> DimensionMismatch:
    """The error for pools whose parts int32 cannot number."""
    most = np.iinfo(np.int32).max
    return DimensionMismatch(
        f"`k_pool`: expected at most {most} parts (blocks times kv heads), which int32 can number, got "
        f"{num_blocks * heads}",
        expected=most,
        actual=num_blocks * heads,
    )


_CALL = Call("scores block_table seq_lens", "block_size top first newest validate")
_FLOAT32 = np.dtype(np.float32)


class BlockChoice(NamedTuple):
    """Blocks that are to be read.

    Attributes
    ----------
    tables : int32 array (num_seqs, num_kv_heads, top)
        The blocks of each kv head in the order of the sequence, then -1.
    seq_lens : int64 array (num_seqs, num_kv_heads)
        Tokens in them.
    """

    tables: Array
    seq_lens: Array


def choose_blocks(
    scores: Any, block_table: Any, seq_lens: Any, block_size: int, top: int, *, first: int = 1,
    newest: int = 1, validate: bool | None = False,
) -> BlockChoice:  # fmt: skip
    """Choose blocks of each sequence for each kv head: the first, the newest, and the best of the rest.

    Parameters
    ----------
    scores : float32 array (num_seqs, num_kv_heads, max_blocks)
        Scores of each block: those of `KeyBounds.scores`, or a model's own. NaN counts as inf.
    block_table : int32 array (num_seqs, max_blocks)
        Blocks of each sequence.
    seq_lens : int32 or int64 array (num_seqs,)
        Its tokens.
    block_size : int
        Tokens in a block.
    top : int
        Blocks to choose; all of a sequence that has no more.
    first, newest : int
        Numbers of first and of newest blocks that are always included. At least one newest block is, as it may be
        part full.
    validate
        See `numkv.paged_decode_attention`.

    Returns
    -------
    BlockChoice
        Among equal scores the earlier block is chosen, so that the choice depends on the sequence alone.

    Raises
    ------
    DimensionMismatch
        If `top` is less than `first` and `newest` together, or a shape does not fit.
    IndexError
        If a length is more than the table has room for, or a block is negative.
    """
    target = targets.of(scores)
    if target.chooses_stream:
        arrays, asked = (scores, block_table, seq_lens), (block_size, top, first, newest, validate)
        return BlockChoice(*target.run(choose_blocks, _CALL, arrays, asked))
    scores = check_array(
        target, "scores", scores, (_FLOAT32,), ("num_seqs", "num_kv_heads", "max_blocks")
    )
    num_seqs, heads, columns = (int(n) for n in scores.shape)
    size = check_size("block_size", block_size, 1)
    counts = check_counts("top", top, first, newest)
    table, lens = check_table(
        target, block_table, seq_lens, num_seqs, size, 2**31 - 1, check_flag("validate", validate)
    )  # fmt: skip
    if int(table.shape[1]) != columns:
        raise DimensionMismatch(
            f"`scores`: expected one for each column of `block_table`, {int(table.shape[1])}, got {columns}",
            expected=int(table.shape[1]),
            actual=columns,
        )
    return BlockChoice(*chosen(target, scores, table, lens, size, counts))


def check_counts(
    name: str, top: Any, first: Any, newest: Any, least_first: int = 0
) -> tuple[int, int, int]:
    """How many blocks are chosen, and how many of the first and of the newest ones whatever their scores."""
    first, newest = max(least_first, check_size("first", first)), check_size("newest", newest, 1)
    top = check_size(name, top, 1)
    if top < first + newest:
        raise DimensionMismatch(
            f"`{name}`: expected at least {first + newest} blocks, {first} first and {newest} newest ones, got {top}",
            expected=first + newest,
            actual=top,
        )
    return top, first, newest


def chosen(
    target: Target, scores: Array, table: Array, lens: Array, size: int, counts: tuple[int, int, int]
) -> tuple[Array, Array]:  # fmt: skip
    """Blocks by checked scores, tables, lengths and `check_counts`: their tables and lengths."""
    num_seqs, heads, columns = (int(n) for n in scores.shape)
    top, first, newest = counts
    top = min(top, columns)
    tables = target.empty((num_seqs, heads, top), np.dtype(np.int32))
    of_heads = target.empty((num_seqs, heads), np.dtype(np.int64))
    if num_seqs and heads:
        newest = min(newest, top)
        target.ops.choose_blocks(
            scores, table, lens, size, min(first, top - newest), newest, tables, of_heads
        )
    return tables, of_heads
