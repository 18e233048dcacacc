"""Checks of blocks and tables whose values may lie on a device."""

from __future__ import annotations

from typing import Any

import numpy as np

from numkv.arrays import Array
from numkv.attention.attend import check_blocks
from numkv.checks import check_integers
from numkv.errors import DimensionMismatch
from numkv.targets.base import Target

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
