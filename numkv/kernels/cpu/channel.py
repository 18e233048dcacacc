"""Quantise token groups by channel, on the CPU."""

from __future__ import annotations

import functools
from typing import Any

from numba import types

from numkv.kernels.builder import SCALES, WORDS, array, build
from numkv.kernels.cpu.threads import ON_THREADS, run, workers_for
from numkv.kernels.cpu.vectors.launch import on_threads
from numkv.kernels.operations import Operations, implements
from numkv.kinds import kind
from numkv.rows.channel import TOKENS, channel_storer
from numkv.rows.convert import codec


def make_quantise_groups(SRC, DST):
    """The kernel that takes rows of kind `SRC` and gives codes of kind `DST`; a group of a head is a piece of work."""
    load, _ = codec(SRC)
    EACH = kind(DST).unit[0]
    store = channel_storer(8 // EACH, load)

    def kernel(rows, groups, pool, scale, to_groups, launch, worker, workers):
        if launch != 0:
            on_threads(launch, workers)
            return
        heads, dim = rows.shape[1], rows.shape[3]
        each, to_each = rows.shape[2] // TOKENS, pool.shape[2] // TOKENS
        items = len(groups) * heads
        for item in range(items * worker // workers, items * (worker + 1) // workers):
            i, h = item // heads, item % heads
            a, b = groups[i], to_groups[i]
            at, to = a % each * TOKENS, b % to_each
            source = rows[a // each, h, at : at + TOKENS]
            codes = pool[b // to_each, h, to * TOKENS : (to + 1) * TOKENS]
            scales = scale[b // to_each, h, to]
            for d in range(0, dim, EACH):
                store(source, codes, scales, d)

    return kernel


@functools.cache
def _quantise_groups(src: str, dst: str) -> Any:
    groups = array(types.int64, 1)
    signature = (
        array(WORDS[src], 4), groups, array(WORDS[dst], 4, out=True), array(*SCALES[dst], out=True),
        groups, *ON_THREADS,
    )  # fmt: skip
    label = f"quantise_groups, {src} to {dst}"
    return build(make_quantise_groups, signature, args=(src, dst), label=label)


@implements(Operations.quantise_groups)
def quantise_groups(rows, rows_kind, groups, pool, pool_kind, scale, to_groups):
    size = len(groups) * rows.shape[1] * TOKENS * rows.shape[3]
    run(
        _quantise_groups(rows_kind, pool_kind), workers_for(size), rows, groups, pool, scale, to_groups
    )  # fmt: skip
