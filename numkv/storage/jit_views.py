"""jitclasses over the buffers of layers and caches, for a user's own ``@njit`` functions.

They share memory with the objects that made them: either side sees rows that the other appends. They check their
arguments before anything is written. Rows of another shape raise `DimensionMismatch`, NaN and infinity for a quantised
kind `NonFiniteInput`. Loads of missing positions, layers and heads raise `IndexError`. An append without room returns
False, so that a loop can end on it. The checks for concurrent writers (`numkv.access`) do not cover compiled code: let
one thread write at a time.

Compiling them takes seconds in every process, as Numba caches no jitclass on disk. So an object makes its own at the
first use of ``.jit``. No kernel of numkv accepts one, as a function with a jitclass argument never hits Numba's disk
cache either.

Rows are appended and loaded as they are stored. An object with ``rotate=True`` stores rotated rows: rotate yours with
`numkv.storage.hadamard.Rotation` before an append, and rotate loaded rows back.

On CUDA they have the host side only (block table and lengths). Device buffers are on the object.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types
from numba.experimental import jitclass
from numba.extending import register_jitable

from numkv.device import is_finite, load_row, store_row
from numkv.device import slot_of as checked_slot_of
from numkv.errors import DimensionMismatch, NonFiniteInput, NumkvError
from numkv.kernels.builder import SCALES, WORDS, compiled
from numkv.kinds import kind
from numkv.rows.codec import elements_in

GROWN = "the cache has grown since `jit` was asked for; ask again"
NO_LAYER = "`layer`: expected an index in [0, num_layers)"
NO_POSITION = "`position`: expected an index in [0, length), a token that is stored"
NO_HEAD = "`head`: expected an index in [0, num_kv_heads)"
NO_BLOCK = "`block_table`: expected a block of the pool for each stored token; compiled code may not write it"
NOT_A_ROW = "`out`: expected as many elements as a row has"
NOT_ROWS = "append: expected rows (num_kv_heads, head_dim) of one token"
NOT_FINITE = "append: expected finite numbers for storage in a quantised kind, got NaN or infinity; mask them"


_compiled: set[Any] = set()


def make(struct: Any, *fields: Any) -> Any:
    """Return an instance of a jitclass, which is compiled at the first use, with the notice of kernels."""
    if struct in _compiled:
        return struct(*fields)
    with compiled(f"{struct.__name__}, for functions of yours"):
        found = struct(*fields)
    _compiled.add(struct)
    return found


def _scales(kind):
    """The Numba type of the scales of a kind's buffer."""
    dtype, ndim = SCALES[kind]
    return types.Array(dtype, ndim, "C")


def _rows_check(name):
    """The function that refuses rows ``(num_kv_heads, dim)`` of a token that a buffer of a kind does not take."""
    elements, QUANTISED = elements_in(kind(name)), kind(name).has_scales

    @register_jitable
    def check(words, rows):
        if rows.shape[0] != words.shape[1] or rows.shape[1] != elements(words.shape[3]):
            raise DimensionMismatch(NOT_ROWS)
        if QUANTISED:
            for h in range(rows.shape[0]):
                if not is_finite(rows[h]):
                    raise NonFiniteInput(NOT_FINITE)

    return check


def _load_check(name):
    """The function that refuses to load a row that is not there."""
    elements = elements_in(kind(name))

    @register_jitable
    def check(words, position, length, head, out):
        if position < 0 or position >= length:
            raise IndexError(NO_POSITION)
        if head < 0 or head >= words.shape[1]:
            raise IndexError(NO_HEAD)
        if len(out) != elements(words.shape[3]):
            raise DimensionMismatch(NOT_A_ROW)

    return check


def _scales_of_layer(name):
    """The function that finds a layer's scales of heads; scales of rows lie by layer as it is."""
    if kind(name).scales_per == "head":

        @register_jitable
        def of(scale, layer, num_heads):
            return scale[layer * num_heads : (layer + 1) * num_heads]

    else:

        @register_jitable
        def of(scale, layer, num_heads):
            return scale

    return of


@functools.cache
def layer_struct(k_kind, v_kind):
    """The jitclass of one layer of one sequence.

    Parameters
    ----------
    k_kind, v_kind : str
        Kinds of its buffers.

    Returns
    -------
    jitclass
        Fields:

        - ``k``, ``v``: ``(num_blocks, num_kv_heads, block_size, head_dim)``, in words.
        - ``k_scale``, ``v_scale``: ``(num_blocks, num_kv_heads, block_size)``; for INT4 words, with an axis of groups
          more.
        - ``block_table``: int32 ``(max_blocks,)``; ``context_lens``: int32 ``(1,)``.

        Property ``length``; methods ``append``, ``slot``, ``load_k``, ``load_v``.
    """
    store_k, load_k_row, check_k, check_load_k = _functions(k_kind)
    store_v, load_v_row, check_v, check_load_v = _functions(v_kind)

    class LayerStruct:
        def __init__(self, k, v, k_scale, v_scale, block_table, context_lens):
            self.k = k
            self.v = v
            self.k_scale = k_scale
            self.v_scale = v_scale
            self.block_table = block_table
            self.context_lens = context_lens

        @property
        def length(self):
            """Tokens in the layer."""
            return np.int64(self.context_lens[0])

        def slot(self, position):
            """Flat slot of the token at `position`, ``block * block_size + offset``; -1 if there is no block for it."""
            return checked_slot_of(self.block_table, position, self.k.shape[2])

        def append(self, k_row, v_row):
            """Append one token's K and V, floats ``(num_kv_heads, head_dim)``; False if there is no room.

            For a paged layer, only blocks that it already has count as room: see `numkv.PagedLayer.reserve`.
            """
            check_k(self.k, k_row)
            check_v(self.v, v_row)
            slot = self.slot(self.length)
            if slot < 0 or slot >= np.int64(self.k.shape[0]) * self.k.shape[2]:
                return False
            for h in range(self.k.shape[1]):
                store_k(k_row[h], self.k, self.k_scale, slot, h)
                store_v(v_row[h], self.v, self.v_scale, slot, h)
            self.context_lens[0] += 1
            return True

        def load_k(self, position, head, out):
            """Put the K row of a stored token and kv head into `out`, floats ``(head_dim,)``."""
            check_load_k(self.k, position, self.length, head, out)
            if not load_k_row(self.k, self.k_scale, self.slot(position), head, out):
                raise NumkvError(NO_BLOCK)

        def load_v(self, position, head, out):
            """Put the V row of a stored token and kv head into `out`, floats ``(head_dim_v,)``."""
            check_load_v(self.v, position, self.length, head, out)
            if not load_v_row(self.v, self.v_scale, self.slot(position), head, out):
                raise NumkvError(NO_BLOCK)

    return jitclass(
        [
            ("k", WORDS[k_kind][:, :, :, ::1]),
            ("v", WORDS[v_kind][:, :, :, ::1]),
            ("k_scale", _scales(k_kind)),
            ("v_scale", _scales(v_kind)),
            ("block_table", types.int32[::1]),
            ("context_lens", types.int32[::1]),
        ]
    )(LayerStruct)


def _functions(name):
    """Return the functions that store and load a row of a kind, and those that check rows before."""
    return store_row(name), load_row(name), _rows_check(name), _load_check(name)


@functools.cache
def cache_struct(k_kind, v_kind):
    """The jitclass of a `numkv.KVCache`.

    Parameters
    ----------
    k_kind, v_kind : str
        Kinds of its buffers.

    Returns
    -------
    jitclass
        Fields:

        - ``k``, ``v``: ``(num_layers, num_kv_heads, capacity, head_dim)``, in words.
        - ``k_scale``, ``v_scale``: ``(num_layers, num_kv_heads, capacity)``. For INT4 words, with an axis of groups
          more; for fp8 ``(num_layers * num_kv_heads,)``.
        - ``context_lens``: int64 ``(num_layers,)``, the rows appended to each layer.
        - ``lengths``: int64 ``(1,)``, the tokens advanced.
        - ``current``: int64 ``(1,)``, 0 once the cache has grown out of these buffers.

        Property ``length``; methods ``append``, ``advance``, ``load_k``, ``load_v``.
    """
    store_k, load_k_row, check_k, check_load_k = _functions(k_kind)
    store_v, load_v_row, check_v, check_load_v = _functions(v_kind)
    k_scales_of, v_scales_of = _scales_of_layer(k_kind), _scales_of_layer(v_kind)

    class CacheStruct:
        def __init__(self, k, v, k_scale, v_scale, context_lens, lengths, current):
            self.k = k
            self.v = v
            self.k_scale = k_scale
            self.v_scale = v_scale
            self.context_lens = context_lens
            self.lengths = lengths
            self.current = current

        @property
        def length(self):
            """Tokens advanced past."""
            return self.lengths[0]

        def append(self, layer, k_row, v_row):
            """Append one token's K and V, floats ``(num_kv_heads, head_dim)``.

            False if there is no room, no such layer, or the cache has grown since `jit` was asked for.
            """
            check_k(self.k, k_row)
            check_v(self.v, v_row)
            if self.current[0] == 0 or layer < 0 or layer >= len(self.context_lens):
                return False
            position, capacity = self.context_lens[layer], np.int64(self.k.shape[2])
            if position < 0 or position >= capacity:
                return False
            slot, heads = layer * capacity + position, self.k.shape[1]
            k_scale = k_scales_of(self.k_scale, layer, heads)
            v_scale = v_scales_of(self.v_scale, layer, heads)
            for h in range(heads):
                store_k(k_row[h], self.k, k_scale, slot, h)
                store_v(v_row[h], self.v, v_scale, slot, h)
            self.context_lens[layer] += 1
            return True

        def advance(self, n):
            """Move the length by `n` tokens; False if a layer has not got them all, or the cache has grown since."""
            if self.current[0] == 0 or n < 0:
                return False
            for layer in range(len(self.context_lens)):
                if n > self.context_lens[layer] - self.lengths[0]:
                    return False
            self.lengths[0] += n
            return True

        def load_k(self, layer, position, head, out):
            """Put the K row of a stored token and kv head of a layer into `out`, floats ``(head_dim,)``."""
            length, slot = self._place(layer, position)
            check_load_k(self.k, position, length, head, out)
            load_k_row(self.k, k_scales_of(self.k_scale, layer, self.k.shape[1]), slot, head, out)

        def load_v(self, layer, position, head, out):
            """Put the V row of a stored token and kv head of a layer into `out`, floats ``(head_dim_v,)``."""
            length, slot = self._place(layer, position)
            check_load_v(self.v, position, length, head, out)
            load_v_row(self.v, v_scales_of(self.v_scale, layer, self.v.shape[1]), slot, head, out)

        def _place(self, layer, position):
            if self.current[0] == 0:
                raise NumkvError(GROWN)
            if layer < 0 or layer >= len(self.context_lens):
                raise IndexError(NO_LAYER)
            capacity = np.int64(self.k.shape[2])
            return min(self.context_lens[layer], capacity), layer * capacity + position

    return jitclass(
        [
            ("k", WORDS[k_kind][:, :, :, ::1]),
            ("v", WORDS[v_kind][:, :, :, ::1]),
            ("k_scale", _scales(k_kind)),
            ("v_scale", _scales(v_kind)),
            ("context_lens", types.int64[::1]),
            ("lengths", types.int64[::1]),
            ("current", types.int64[::1]),
        ]
    )(CacheStruct)


@functools.cache
def cells_struct():
    """The jitclass of the cells of a multi-sequence cache, on the host; see `numkv.cells`.

    Returns
    -------
    jitclass
        Fields ``positions`` and ``num_sequences`` int32 ``(num_cells,)``: the position of each cell, and how many
        sequences hold it (0: it is free); property ``num_cells``.
    """

    class CellsStruct:
        def __init__(self, positions, num_sequences):
            self.positions = positions
            self.num_sequences = num_sequences

        @property
        def num_cells(self):
            """Cells in all."""
            return np.int64(len(self.positions))

    ints = types.int32[::1]
    return jitclass([("positions", ints), ("num_sequences", ints)])(CellsStruct)


@functools.cache
def host_struct(lens_dtype):
    """The jitclass of the host side of a CUDA object.

    Parameters
    ----------
    lens_dtype : {"int32", "int64"}
        Dtype of its lengths.

    Returns
    -------
    jitclass
        Fields ``block_table`` int32 ``(max_blocks,)`` and ``context_lens`` ``(n,)``.
    """

    class HostStruct:
        def __init__(self, block_table, context_lens):
            self.block_table = block_table
            self.context_lens = context_lens

    lens = getattr(types, lens_dtype)[::1]
    return jitclass([("block_table", types.int32[::1]), ("context_lens", lens)])(HostStruct)
