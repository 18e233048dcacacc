"""Attention in steps of a `PagedKVCache` whose sequences begin with the same blocks: these are read once for all."""

from __future__ import annotations

from typing import Any

import numpy as np

from numkv.attention.cascade import Prefix, attend_cascade
from numkv.attention.options import AttentionOptions
from numkv.errors import NotSupported
from numkv.numbers import check_size
from numkv.storage.pool import Pool
from numkv.targets.base import Array


def attend_shared(
    step: Any, group: int, shared_len: Any, pool: Pool, block_table: Array, q: Array, lens: Array, starts: Array,
    options: AttentionOptions,
) -> Any:  # fmt: skip
    """Attend with a step's queries, to the first `shared_len` tokens apart; the rest are arguments of `attend`.

    Layers with a window attend to all tokens at once. Which sequences share their blocks is looked up once a step.
    """
    shared = check_size("shared_len", shared_len, 0)
    if step._buffers is not None:
        raise NotSupported("`shared_len`: expected 0 for a step that lies in StepBuffers")
    if options.window_left >= 0:
        return attend_cascade(pool, block_table, q, lens, starts, options, 0, [])
    first = min(
        (end - n for end, n in zip(step._ends, step.new_lens.tolist(), strict=True) if n),
        default=shared,
    )
    if shared > first:
        raise IndexError(
            f"`shared_len`: expected at most the {first} tokens before a sequence's new ones, got {shared}"
        )
    key = group, shared
    if key not in step._prefixes:
        step._prefixes[key] = _prefixes(step, pool.target.to_host(block_table), shared)
    return attend_cascade(pool, block_table, q, lens, starts, options, shared, step._prefixes[key])


def _prefixes(step: Any, table: Any, shared: int) -> list[Prefix]:
    """Which tokens of a step see which prefix."""
    blocks = -(-shared // step._store.block_size)
    found: dict[bytes, list[int]] = {}
    of: dict[bytes, int] = {}
    first = 0
    for seq, n in enumerate(step.new_lens.tolist()):
        if n:
            key = table[seq, :blocks].tobytes()
            of.setdefault(key, seq)
            found.setdefault(key, []).extend(range(first, first + n))
        first += n
    return [Prefix(of[key], np.array(tokens)) for key, tokens in found.items()]
