"""Quantise token groups by channel, on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from numkv.kernels.builder import SCALES, WORDS, array, build
from numkv.kernels.cpu.threads import ON_THREADS, run, workers_for
from numkv.kernels.cpu.vectors.arrays import row_of
from numkv.kernels.cpu.vectors.launch import on_threads
from numkv.kernels.operations import Operations, implements
from numkv.kinds import kind
from numkv.rows.channel import TOKENS, channel_coder, channel_finder, fine_code, put_widest
from numkv.rows.convert import bf16_to_float32, codec


def make_quantise_groups(SRC, DST):
    """The kernel that takes rows of kind `SRC` and gives codes of kind `DST`; a group of a head is a piece of work.

    All channels of a row are taken at once, so that loops over them become vector code.
    """
    load, _ = codec(SRC)
    EACH, FINE = kind(DST).unit[0], kind(DST).fine_channels
    find, code_of = channel_finder(8 // EACH), channel_coder(8 // EACH)

    @register_jitable
    def widen(row, low, high, odd):
        """The smallest and largest element of each channel, and whether one is not finite, with those of a row."""
        for d in range(len(low)):
            x = np.float32(load(row[d]))
            low[d] = x if x < low[d] else low[d]
            high[d] = x if x > high[d] else high[d]
            odd[d] |= np.int32(x - x != np.float32(0))

    @register_jitable
    def encode(row, codes, step, zero):
        """A row's codes, by the scales of its channels."""
        for d in range(len(step)):
            codes[d] = np.int8(code_of(np.float32(load(row[d])), step[d], zero[d]))

    @register_jitable
    def pack(codes, words):
        """Codes of 4 bits, two to a byte."""
        for j in range(len(words)):
            low, high = np.int32(codes[2 * j]), np.int32(codes[2 * j + 1])
            words[j] = np.uint8(np.int32(low + np.int32(high * np.int32(16))) + np.int32(136))

    def kernel(rows, groups, pool, scale, to_groups, launch, worker, workers):
        if launch != 0:
            on_threads(launch, workers)
            return
        heads, dim = np.int64(rows.shape[1]), np.int64(rows.shape[3])
        each, to_each = rows.shape[2] // TOKENS, pool.shape[2] // TOKENS
        low, high = np.empty(dim, np.float32), np.empty(dim, np.float32)
        odd = np.empty(dim, np.int32)
        codes = np.empty(dim + FINE, np.int8)
        items = len(groups) * heads
        for item in range(items * worker // workers, items * (worker + 1) // workers):
            i, h = item // heads, item % heads
            a, b = groups[i], to_groups[i]
            block, at = a // each, a % each * TOKENS
            to_block, to = b // to_each, b % to_each * TOKENS
            scales = row_of(scale, (to_block, h, b % to_each))
            low[:], high[:], odd[:] = np.inf, -np.inf, 0
            for t in range(TOKENS):
                widen(row_of(rows, (block, h, at + t)), low, high, odd)
            for d in range(dim):
                step, zero = find(low[d], high[d], odd[d] == 0)
                scales[d], scales[dim + d] = step, zero
                low[d], high[d] = bf16_to_float32(step), bf16_to_float32(zero)
            if FINE:
                put_widest(scales, dim)
            for t in range(TOKENS):
                row, words = row_of(rows, (block, h, at + t)), row_of(pool, (to_block, h, to + t))
                if EACH == 1:
                    encode(row, words, low, high)
                else:
                    encode(row, codes, low, high)
                    for f in range(FINE):
                        d = np.int64(scales[2 * dim + f])
                        fine = fine_code(np.float32(load(row[d])), low[d], high[d])
                        codes[dim + f] = np.int8(fine - np.int32(8))
                    pack(codes, words)

    return kernel


def signature_of_groups(src: str, dst: str) -> tuple[Any, ...]:
    """Types of the arguments of the kernel that quantises groups."""
    groups = array(types.int64, 1)
    return (
        array(WORDS[src], 4), groups, array(WORDS[dst], 4, out=True), array(*SCALES[dst], out=True),
        groups, *ON_THREADS,
    )  # fmt: skip


@functools.cache
def groups_kernel(src: str, dst: str) -> Any:
    """Return the kernel that quantises groups of rows of kind `src`."""
    signature = signature_of_groups(src, dst)
    label = f"quantise_groups, {src} to {dst}"
    return build(make_quantise_groups, signature, args=(src, dst), label=label)


@implements(Operations.quantise_groups)
def quantise_groups(rows, rows_kind, groups, pool, pool_kind, scale, to_groups):
    size = len(groups) * rows.shape[1] * TOKENS * rows.shape[3]
    run(
        groups_kernel(rows_kind, pool_kind), workers_for(size), rows, groups, pool, scale, to_groups
    )  # fmt: skip
