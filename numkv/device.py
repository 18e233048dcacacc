"""For your own kernels: where a row lies, and how to load and store it, in ``@njit`` and in ``@cuda.jit``.

The functions here take the arrays of a `CacheArrays`, which ``.arrays`` of a layer or a cache gives::

    from numba import njit
    from numkv import device

    load = device.load_row("int8")      # or cache.kind

    @njit
    def sum_of_keys(arrays, seq, head, out):
        row = np.empty_like(out)
        for position in range(arrays.context_lens[seq]):
            slot = device.slot_of(arrays.block_table[seq], position, arrays.k.shape[2])
            if load(arrays.k, arrays.k_scale, slot, head, row):
                out += row

In a ``@cuda.jit`` kernel the same calls load a row into a ``cuda.local.array``; a thread loads or stores a row by
itself, or an element of it.

Functions of one kind are the same objects in every call, so that a kernel that is made again compiles no more. They
never touch memory outside the buffers: where a slot, a head or the length of a row does not fit, they say so by what
they return. Slots are ``block * block_size + offset``; -1, as for a token that is left out, is such a slot.

Rows are what is stored. With ``rotate=True`` that is rotated rows: see `numkv.storage.Rotation`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from numkv.arrays import CacheArrays
from numkv.kinds import Kind, refuse_channels
from numkv.kinds import kind as named
from numkv.rows import address
from numkv.rows.codec import element_codec, elements_in, row_codec

__all__ = ["CacheArrays", "is_finite", "load_element", "load_row", "slot_of", "store_row"]


@register_jitable
def slot_of(block_table, position, block_size):  # type: ignore[no-untyped-def]
    """Flat slot of a token of a sequence, or -1 where the sequence has no block for it.

    Parameters
    ----------
    block_table : int array (max_blocks,)
        The sequence's blocks: a row of `CacheArrays.block_table`.
    position : int
        The token's position in its sequence; any number.
    block_size : int
        Tokens in a block: ``arrays.k.shape[2]``.

    Returns
    -------
    int64
        ``block * block_size + offset``; -1 for a position before the first or past the last block of the table, or
        whose block is negative.
    """
    position = np.int64(position)
    if position < 0 or position >= block_table.shape[0] * np.int64(block_size):
        return np.int64(-1)
    if block_table[position // block_size] < 0:
        return np.int64(-1)
    return address.slot_of(block_table, position, block_size)


@register_jitable
def is_finite(row):  # type: ignore[no-untyped-def]
    """Return whether all elements of a row are finite as float32, so that a quantised kind can store it.

    Parameters
    ----------
    row : float array (dim,)
        A row that is to be stored.

    Returns
    -------
    bool
    """
    for d in range(row.shape[0]):
        bits = np.uint32(np.float32(row[d]).view(np.uint32) & np.uint32(0x7F800000))
        if bits == np.uint32(0x7F800000):
            return False
    return True


def load_row(kind: str | Kind) -> Callable[..., bool]:
    """Get the function that loads a stored row as floats.

    Parameters
    ----------
    kind : str or Kind
        Kind of the buffer: ``cache.kind`` for K, ``cache.v_kind`` for V.

    Returns
    -------
    function
        ``load(words, scales, slot, head, out) -> bool``. `words` and `scales` are ``arrays.k`` and ``arrays.k_scale``,
        or those of V. `out`, a float array ``(dim,)``, receives the row. It is computed in float32, or float64 for
        fp64, and converted to the dtype of `out`. The function returns False if there is no such slot or head, or if
        `out` has another length than a row; `out` is all NaN then.

    Raises
    ------
    UnsupportedDType
        If there is no such kind.
    """
    return _load_row(named(kind).name)


def load_element(kind: str | Kind) -> Callable[..., Any]:
    """Get the function that loads one element of a stored row.

    Parameters
    ----------
    kind : str or Kind
        Kind of the buffer.

    Returns
    -------
    function
        ``value(words, scales, slot, head, d) -> float32``, of fp64 float64; see `load_row`. NaN if there is no such
        slot, head or element.

    Raises
    ------
    UnsupportedDType
        If there is no such kind.
    """
    return _load_element(named(kind).name)


def store_row(kind: str | Kind) -> Callable[..., bool]:
    """Get the function that stores a row of floats.

    Parameters
    ----------
    kind : str or Kind
        Kind of the buffer.

    Returns
    -------
    function
        ``store(x, words, scales, slot, head) -> bool`` writes the float array `x` ``(dim,)`` to the buffer, and the
        scales computed from it. It rounds to nearest or quantises as `append` does, in float32 (in float64 for fp64).
        Scales of heads, of fp8 kinds, are read. It returns False and writes nothing if there is no such slot or head,
        or if `x` has another length than a row. For a quantised kind it does so, too, if an element is not finite:
        see `is_finite`.

    Raises
    ------
    UnsupportedDType
        If there is no such kind.
    NotSupported
        If a row cannot be stored by itself: scales of channels belong to many tokens.
    """
    refuse_channels("`kind`", named(kind))
    return _store_row(named(kind).name)


# Kernels of numkv take whole rows of a pool from the functions of `numkv.rows`, which trust their callers. Those below
# are for others' code, and check. They take a row's place and not the row, as CUDA lets no function return an array.


@functools.cache
def _load_row(name: str) -> Callable[..., bool]:
    of = named(name)
    elements = elements_in(of)  # type: ignore[no-untyped-call]
    _, load = row_codec(name, of.compute.name)  # type: ignore[no-untyped-call]
    load_at = _at(of, load)

    @register_jitable
    def load_row_of_kind(words, scales, slot, head, out):  # type: ignore[no-untyped-def]
        if not _holds(words, slot, head) or out.shape[0] != elements(words.shape[3]):
            for d in range(out.shape[0]):
                out[d] = np.float32(np.nan)
            return False
        slot, size = np.int64(slot), np.int64(words.shape[2])
        load_at(words, scales, slot // size, head, slot % size, out)
        return True

    return load_row_of_kind


@functools.cache
def _load_element(name: str) -> Callable[..., Any]:
    of = named(name)
    elements, REAL = elements_in(of), of.compute.type  # type: ignore[no-untyped-call]
    value, _ = element_codec(name, of.compute.name)  # type: ignore[no-untyped-call]

    @register_jitable
    def of_row(words, scales, d):  # type: ignore[no-untyped-def]
        return value(words, scales, d, elements(words.shape[0]))

    value_at = _at(of, of_row)

    @register_jitable
    def load_element_of_kind(words, scales, slot, head, d):  # type: ignore[no-untyped-def]
        if not _holds(words, slot, head) or d < 0 or d >= elements(words.shape[3]):
            return REAL(np.nan)
        slot, size = np.int64(slot), np.int64(words.shape[2])
        return REAL(value_at(words, scales, slot // size, head, slot % size, d))

    return load_element_of_kind


@functools.cache
def _store_row(name: str) -> Callable[..., bool]:
    of = named(name)
    elements, QUANTISED = elements_in(of), of.has_scales  # type: ignore[no-untyped-call]
    store, _ = row_codec(name, of.compute.name)  # type: ignore[no-untyped-call]

    @register_jitable
    def of_row(words, scales, x):  # type: ignore[no-untyped-def]
        store(x, words, scales)

    store_at = _at(of, of_row)

    @register_jitable
    def store_row_of_kind(x, words, scales, slot, head):  # type: ignore[no-untyped-def]
        if not _holds(words, slot, head) or x.shape[0] != elements(words.shape[3]):
            return False
        if QUANTISED and not is_finite(x):
            return False
        slot, size = np.int64(slot), np.int64(words.shape[2])
        store_at(words, scales, slot // size, head, slot % size, x)
        return True

    return store_row_of_kind


@register_jitable
def _holds(words, slot, head):  # type: ignore[no-untyped-def]
    """Return whether a buffer has a slot and a head."""
    slots = words.shape[0] * np.int64(words.shape[2])
    return slot >= 0 and slot < slots and head >= 0 and head < words.shape[1]


def _at(of: Kind, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the words and the scales of a row, and of something more, as one of its place in a buffer."""
    if of.scales_per == "none":

        @register_jitable
        def at(words, scales, block, head, offset, more):  # type: ignore[no-untyped-def]
            return function(words[block, head, offset], scales, more)

    elif of.scales_per == "head":

        @register_jitable
        def at(words, scales, block, head, offset, more):  # type: ignore[no-untyped-def]
            return function(words[block, head, offset], scales[head : head + 1], more)

    elif of.scales_per == "row":

        @register_jitable
        def at(words, scales, block, head, offset, more):  # type: ignore[no-untyped-def]
            row = scales[block, head, offset : offset + 1]
            return function(words[block, head, offset], row, more)

    else:
        SHARING = max(1, of.group_tokens)  # tokens that share scales

        @register_jitable
        def at(words, scales, block, head, offset, more):  # type: ignore[no-untyped-def]
            row = scales[block, head, offset // SHARING]
            return function(words[block, head, offset], row, more)

    return at
