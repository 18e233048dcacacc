"""Scales of K and V: those of a tile's tokens are put side by side; those of a head join queries and outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from numkv.kernels.cpu.attention.engines import in_integers
from numkv.kernels.cpu.attention.llvm.scales import make_gather_groups, make_gather_scales
from numkv.kernels.cpu.attention.offsets import TABLE
from numkv.kernels.cpu.attention.records import KV_TILE, float_type
from numkv.kernels.cpu.attention.state import (
    floats_reader,
    make_scales_of,
    places_of,
    sizes_of,
    turn_of,
)
from numkv.kernels.cpu.vectors.emitted import inlined
from numkv.kernels.cpu.vectors.prefetch import prefetch
from numkv.kernels.cpu.vectors.records import ints_from
from numkv.kinds import kind as kind_named


@functools.cache
def make_gather(kind: str, compute: str, by_group: bool = False) -> Callable[..., Any]:
    """``gather(floats, to_at, scale, offsets, next_offsets, groups)`` for a storage kind, of INT4 perhaps by group.

    It puts down the scales of a tile's tokens, which start at `offsets`, and prefetches those of the next tile.
    """
    found = kind_named(kind)
    gather_scales = make_gather_scales(compute)
    gather_groups = make_gather_groups(compute, by_group)

    @inlined
    def prefetch_scales(scale, offsets, groups):
        # Tokens whose scales make a cache line.
        line = max(1, 64 // (groups * scale.itemsize))
        for i in range(0, KV_TILE, line):
            prefetch(scale, offsets[i])

    @inlined
    def of_rows(floats, to_at, scale, offsets, next_offsets, groups):
        gather_scales(floats, to_at, scale, offsets)
        prefetch_scales(scale, next_offsets, groups)

    @inlined
    def of_groups(floats, to_at, scale, offsets, next_offsets, groups):
        gather_groups(floats, to_at, scale, offsets, groups)
        prefetch_scales(scale, next_offsets, groups)

    @inlined
    def nothing(floats, to_at, scale, offsets, next_offsets, groups):
        pass

    if not found.has_scales:
        return nothing
    return of_groups if found.group_size else of_rows


@functools.cache
def make_of_head(kind: str, compute: str) -> Callable[..., Any]:
    """``of_head(factor, scale, head)``: for a storage kind: a factor times the scale of a kv head."""
    F = np.float32 if compute == "float32" else np.float64

    @inlined
    def scaled(factor, scale, head):
        return F(factor * scale[head])

    @inlined
    def unscaled(factor, scale, head):
        return F(factor)

    return scaled if kind_named(kind).scales_per == "head" else unscaled


def make_gather_turn(K_KIND, V_KIND, COMPUTE):
    """The step `GATHER`: the scales of a turn's tokens, and those of the next turn ahead of time."""
    gather_k = make_gather(K_KIND, float_type(COMPUTE), in_integers(K_KIND, COMPUTE))
    gather_v = make_gather(V_KIND, float_type(COMPUTE))
    floats_of, scales_of = floats_reader(COMPUTE), make_scales_of(K_KIND, V_KIND)

    def gather(state):
        floats, at = floats_of(state), places_of(state)
        sizes, turn = sizes_of(state), turn_of(state)
        k_scale, v_scale = scales_of(state)
        gather_k(
            floats, at.key_scales, k_scale, _scales_by(turn.keys_at), _scales_by(turn.next_keys_at),
            sizes.k_groups,
        )  # fmt: skip
        gather_v(
            floats, at.value_scales, v_scale, _scales_by(turn.values_at), _scales_by(turn.next_values_at),
            sizes.v_groups,
        )  # fmt: skip
        return 0

    return gather


@inlined
def _scales_by(rows_at):
    """Where the scales of tokens start whose rows' table is there."""
    return ints_from(rows_at + np.int64(8 * 2 * TABLE), np.int64(TABLE))
