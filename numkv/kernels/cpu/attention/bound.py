"""Append and attend for a layer in one compiled call: it writes rows of K and V, then attends with the queries.

Two records (`numkv.kernels.cpu.vectors.arrays`) hold the arguments that calls share. One has the buffers and options of
a layer, and lasts while the layer is bound. The other has the plan of a step, which all layers share.

The kernel here checks the arrays that are new in each call and writes rows as `numkv.kernels.cpu.append` does. Then it
calls attention's driver. Every caller uses that one driver and its steps, so results are equal bit for bit.

Keys by channel store their newest token groups in full precision, in another pool. New rows are written there. Groups
that are then complete are quantised, and attention over the two parts is merged. Other kernels do both. The part in
full has records of its own, to which those of the layer and the step point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import register_jitable

from numkv.kernels.builder import SCALES, WORDS
from numkv.kernels.cpu.append import token_writer
from numkv.kernels.cpu.attention.driver import attend_to, merge_parts
from numkv.kernels.cpu.attention.offsets import WORKER_INTS
from numkv.kernels.cpu.attention.plan import plan_of, plan_size
from numkv.kernels.cpu.attention.state import OUT, Q
from numkv.kernels.cpu.attention.store import PART_EXTRA
from numkv.kernels.cpu.channel import signature_of_groups
from numkv.kernels.cpu.merge import signature_of_states
from numkv.kernels.cpu.overlap import lie_well
from numkv.kernels.cpu.vectors.arrays import (
    TABLE_ROW,
    address_of,
    array_reader,
    by_row,
    copy_ints,
    describe,
    describe_dense,
    float_at,
    int_at,
    kernel_caller,
    number_at,
    put_number,
    record_of,
    row_of,
    table_of,
    without_refcount,
)
from numkv.kernels.scratch import aligned
from numkv.kinds import kind
from numkv.rows.codebook import as_it_is
from numkv.rows.codec import elements_in
from numkv.rows.convert import codec
from numkv.rows.quantize import finite_row

# Indices of numbers in a layer's record, and of its arrays.
_SCALE, _CAP, _WINDOW, _LOOK, _MARK, _MARK_SIZE, _LIVES, _LAYER_IN_FULL = range(8)
_K, _K_SCALE, _V, _V_SCALE, _SINKS = (8 + TABLE_ROW * i for i in range(5))
_LAYER_SIZE = 8 + TABLE_ROW * 5
# The same of a step's.
(
    _TOKENS, _Q_HEADS, _WORKERS, _PARTS, _PARTS_AT, _BEFORE, _AFTER, _SIZES, _STEP_IN_FULL, _READS_CODES, _QUANTISE,
    _MERGE_STATES,
) = range(12)  # fmt: skip
(
    _TABLE, _LENS, _STARTS, _SLOTS, _RANGES, _LSE, _FLOATS, _INTS, _QUERIES, _RESULTS, _GROUPS, _TO_GROUPS,
) = (12 + TABLE_ROW * i for i in range(12))  # fmt: skip
# The arrays of a call that passes addresses.
_Q_GIVEN, _K_GIVEN, _V_GIVEN, _OUT_GIVEN = (12 + TABLE_ROW * i for i in range(12, 16))
_STEP_SIZE = 12 + TABLE_ROW * 16


@register_jitable
def _fits(rows, tokens, heads, dim):
    """Return whether rows have the bound shape and a layout that kernels accept."""
    return (
        rows.shape[0] == tokens and rows.shape[1] == heads and rows.shape[2] == dim
        and rows.strides[2] == rows.itemsize
    )  # fmt: skip


@register_jitable
def _is_dense(rows):
    """Return whether rows follow each other without gaps."""
    return (
        rows.strides[1] == rows.shape[2] * rows.strides[2]
        and rows.strides[0] == rows.shape[1] * rows.strides[1]
    )  # fmt: skip


def make_append_attend_at(Q_KIND, ROWS_KIND, K_KIND, V_KIND, COMPUTE, FULL_K, FULL_V):
    """`make_append_attend` for addresses instead of arrays: rows without gaps, of the step's sizes.

    Asking a tensor for its address takes less time than making an array on its memory. The caller is responsible for
    the address.
    """
    kernel_of_arrays = register_jitable(
        make_append_attend(Q_KIND, ROWS_KIND, K_KIND, V_KIND, COMPUTE, FULL_K, FULL_V)
    )
    queries_at, rows_at = array_reader(WORDS[Q_KIND], 3), array_reader(WORDS[ROWS_KIND], 3)

    def kernel(layer, step, q, k, v, out, launch):
        put_number(step + 8 * _Q_GIVEN, 8, q)
        put_number(step + 8 * _K_GIVEN, 8, k)
        put_number(step + 8 * _V_GIVEN, 8, v)
        put_number(step + 8 * _OUT_GIVEN, 8, out)
        return kernel_of_arrays(
            layer, step, queries_at(step, _Q_GIVEN), rows_at(step, _K_GIVEN), rows_at(step, _V_GIVEN),
            queries_at(step, _OUT_GIVEN), launch,
        )  # fmt: skip

    return kernel


def make_append_attend(Q_KIND, ROWS_KIND, K_KIND, V_KIND, COMPUTE, FULL_K, FULL_V):
    """Make the kernel that checks and writes rows of K and V, then attends with the queries.

    ``kernel(layer, step, q, k, v, out, launch) -> int``, where `layer` and `step` are addresses of records. It returns:

    - 0 on success.
    - -1 if an array differs from what was bound; nothing has been done.
    - -2 if the layer has another length or other buffers; nothing has been done.
    - -3 if a step of attention has to be compiled first. Rows have been written by then, and nothing else. The general
      way writes the same rows again.

    `FULL_K` and `FULL_V` are the kinds of the newest tokens' K and V if keys are stored by channel, else those of K and
    V.
    """
    all_finite = finite_row(ROWS_KIND)
    put_k, put_v = token_writer(ROWS_KIND, FULL_K), token_writer(ROWS_KIND, V_KIND)
    put_full_v = token_writer(ROWS_KIND, FULL_V)
    OF_K, OF_V = kind(K_KIND), kind(V_KIND)
    K_CODES, V_CODES = OF_K.has_scales, OF_V.has_scales
    elements_k, elements_v = elements_in(OF_K), elements_in(OF_V)
    BY_CHANNEL = OF_K.group_tokens > 0
    # Parts are merged in float32.
    TAKEN = "fp32" if BY_CHANNEL else Q_KIND
    load_query, store_result = codec(Q_KIND, COMPUTE) if BY_CHANNEL else (as_it_is, as_it_is)
    real = getattr(types, COMPUTE)
    k_at, v_at = array_reader(WORDS[K_KIND], 4), array_reader(WORDS[V_KIND], 4)
    k_scale_at, v_scale_at = array_reader(*SCALES[K_KIND]), array_reader(*SCALES[V_KIND])
    reals_at, floats_at = array_reader(real, 1), array_reader(types.float32, 2)
    ints_at, pairs_at = array_reader(types.int64, 1), array_reader(types.int64, 2)
    table_at, rows_at = array_reader(types.int32, 2), array_reader(WORDS[TAKEN], 3)
    full_k_at, full_v_at = array_reader(WORDS[FULL_K], 4), array_reader(WORDS[FULL_V], 4)
    full_k_scale_at, full_v_scale_at = (array_reader(*SCALES[x]) for x in (FULL_K, FULL_V))
    quantise = kernel_caller(signature_of_groups(FULL_K, K_KIND)) if BY_CHANNEL else None
    merge_states = kernel_caller(signature_of_states("fp32"))

    @register_jitable
    def has_bad(rows):
        for t in range(rows.shape[0]):
            for h in range(rows.shape[1]):
                if not all_finite(row_of(rows, (np.int64(t), np.int64(h)))):
                    return True
        return False

    @register_jitable
    def write(rows, pool, scale, slots, put, x):
        scales = by_row(scale)
        for t in range(rows.shape[0]):
            put(rows, t, pool, scales, slots[t], x)

    @register_jitable
    def take(q, queries):
        """Return queries in the form that attention accepts."""
        for t in range(q.shape[0]):
            for h in range(q.shape[1]):
                row = row_of(q, (np.int64(t), np.int64(h)))
                for d in range(len(row)):
                    queries[t, h, d] = load_query(row[d])

    @register_jitable
    def attended(layer, step, asking, k, k_scale, v, v_scale, given, launch):
        """Attend over a part with the queries of a step or of `given`; return whether all steps were compiled.

        Results are those of the part's step; `given` may be the address of a record of other queries and results.
        """
        ranges, ints = pairs_at(step, _RANGES), ints_at(step, _INTS)
        lens, starts, sinks = ints_at(step, _LENS), ints_at(step, _STARTS), reals_at(layer, _SINKS)
        floats, lse = reals_at(step, _FLOATS), floats_at(step, _LSE)
        workers, parts_at = int_at(step, _WORKERS), int_at(step, _PARTS_AT)
        plan = plan_of(ints, len(lens))
        plan.next_item[0] = plan.next_row[0] = 0
        plan.missing[0] = 0
        call = record_of(
            (rows_at(asking, _QUERIES), k, k_scale, v, v_scale, table_at(step, _TABLE), lens, starts, ranges, ranges,
             sinks, rows_at(step, _RESULTS), lse, floats, ints),
            (np.int64(0), float_at(layer, _SCALE), float_at(layer, _CAP), int_at(layer, _WINDOW), parts_at,
             int_at(step, _SIZES)),
        )  # fmt: skip
        if given != 0:
            copy_ints(given, call + 8 * Q, np.int64(TABLE_ROW))
            copy_ints(given + 8 * TABLE_ROW, call + 8 * OUT, np.int64(TABLE_ROW))
        attend_to(None, (call, launch, np.int64(0), workers))
        if plan.missing[0] != 0:
            return False
        if int_at(step, _PARTS):
            merge_parts(call, launch, workers)
        return True

    def kernel(layer, step, q, k, v, out, launch):
        q, out = without_refcount(q), without_refcount(out)
        k, v = without_refcount(k), without_refcount(v)
        k_pool, k_scale = k_at(layer, _K), k_scale_at(layer, _K_SCALE)
        v_pool, v_scale = v_at(layer, _V), v_scale_at(layer, _V_SCALE)
        tokens, q_heads, heads = int_at(step, _TOKENS), int_at(step, _Q_HEADS), k_pool.shape[1]
        dim, dim_v = elements_k(k_pool.shape[3]), elements_v(v_pool.shape[3])
        if not (_fits(q, tokens, q_heads, dim) and _fits(out, tokens, q_heads, dim_v)):
            return -1
        if not (_fits(k, tokens, heads, dim) and _fits(v, tokens, heads, dim_v)):
            return -1
        arrays, outputs = (k_pool, v_pool, k_scale, v_scale, k, v, out), (out, q)
        if not _is_dense(out) or not lie_well(None, (table_of(arrays), np.int64(4), np.int64(4))):
            return -1
        if not lie_well(None, (table_of(outputs), np.int64(1), np.int64(1))):
            if address_of(out) != address_of(q) or dim != dim_v or not _is_dense(q):
                return -1
        if int_at(layer, _LOOK):
            if (K_CODES and has_bad(k)) or (V_CODES and has_bad(v)):
                return -1

        mark, mark_size = int_at(layer, _MARK), int_at(layer, _MARK_SIZE)
        if int_at(int_at(layer, _LIVES), 0) == 0:
            return -2
        if mark_size > 0 and number_at(mark, mark_size) != int_at(step, _BEFORE):
            return -2

        slots = ints_at(step, _SLOTS)
        x = np.empty(heads * max(dim, dim_v), np.float32)
        write(v, v_pool, v_scale, slots, put_v, x)
        # Results that overwrote the queries would leave none for a call that has to start again.
        apart = BY_CHANNEL or address_of(out) == address_of(q)
        given = np.int64(0)
        if apart:
            take(q, rows_at(step, _QUERIES))
        else:
            given = record_of((q, out), ())
        results = rows_at(step, _RESULTS)
        if BY_CHANNEL:
            other, also = int_at(layer, _LAYER_IN_FULL), int_at(step, _STEP_IN_FULL)
            full_k, full_k_scale = full_k_at(other, _K), full_k_scale_at(other, _K_SCALE)
            full_v, full_v_scale = full_v_at(other, _V), full_v_scale_at(other, _V_SCALE)
            full_slots, groups = ints_at(also, _SLOTS), ints_at(step, _GROUPS)
            write(k, full_k, full_k_scale, full_slots, put_k, x)
            write(v, full_v, full_v_scale, full_slots, put_full_v, x)
            if len(groups):
                quantise(
                    int_at(step, _QUANTISE),
                    (full_k, groups, k_pool, k_scale, ints_at(step, _TO_GROUPS), np.int64(0), np.int64(0), np.int64(1)),
                )  # fmt: skip
            if not attended(
                other, also, step, full_k, full_k_scale, full_v, full_v_scale, np.int64(0), np.int64(0)
            ):  # fmt: skip
                return -3
            coded, of_codes = results, floats_at(step, _LSE)
            results, lse = rows_at(also, _RESULTS), floats_at(also, _LSE)
            if int_at(step, _READS_CODES):
                if not attended(
                    layer, step, step, k_pool, k_scale, v_pool, v_scale, np.int64(0), launch
                ):  # fmt: skip
                    return -3
                merge_states(
                    int_at(step, _MERGE_STATES), (results, lse, coded, of_codes, results, lse)
                )
        else:
            write(k, k_pool, k_scale, slots, put_k, x)
            if not attended(layer, step, step, k_pool, k_scale, v_pool, v_scale, given, launch):
                return -3
        if apart:
            for t in range(tokens):
                for h in range(q_heads):
                    for d in range(dim_v):
                        out[t, h, d] = store_result(results[t, h, d])
        put_number(mark, mark_size, int_at(step, _AFTER))
        return 0

    return kernel


class BoundKernel(NamedTuple):
    """The compiled function for some kinds, and the functions that make its records."""

    #: ``call(layer, step, q, k, v, out, launch) -> int``; see `make_append_attend` and `make_append_attend_at`.
    call: Callable[..., int]
    #: Bytes of an element of q and the output, and of new rows.
    itemsizes: tuple[int, int]
    #: Dtypes that attention computes in, and in which it takes queries.
    compute: str
    taken: Any
    #: The most threads that can run.
    most_threads: int
    #: ``sizes(dim, dim_v, group)``: see `numkv.kernels.cpu.attention.steps.Steps`.
    sizes: Callable[[int, int, int], tuple[int, int, Any]]
    #: ``plan(step, window_left, block_size)``: see `StepRecord.plan`. Returns the numbers of workers and of parts to
    #: merge; the step that merges is there then.
    plan: Callable[[StepRecord, int, int], tuple[int, int]]
    #: Tokens of a KV tile: a plan without a window stays valid while the number of tiles does.
    kv_tile: int
    #: ``launched(call, workers, *args)``: what `call` returns, with its `launch`.
    launched: Callable[..., int]
    #: Whether ranges give the tokens that queries see, as the tokens are in two parts.
    by_ranges: bool = False
    #: For keys by channel, the kernel of the part in full, with the addresses of the kernels that quantise token groups
    #: and merge parts; else None.
    in_full: BoundKernel | None = None
    addresses: Callable[[], tuple[int, int]] | None = None

    def layer(self, *of_layer: Any) -> LayerRecord:
        """Return a `LayerRecord`."""
        return LayerRecord(self, *of_layer)

    def step(self, *extents: int) -> StepRecord:
        """Return a `StepRecord`; for its arguments see `Extents`."""
        return StepRecord(self, Extents(*extents))


class LayerRecord:
    """The record of one layer for calls, and the arrays that the record points to.

    Parameters
    ----------
    kernel : BoundKernel
        The compiled function that uses the record.
    k, k_scale, v, v_scale : array
        Buffers, in words; see `numkv.kernels.operations.Operations.attend`.
    sinks : array (num_q_heads,) or (0,)
        In the computing dtype.
    options : tuple of float, float and int
        ``sm_scale``, ``logits_soft_cap`` and ``window_left``.
    look : bool
        Whether rows to be quantised are checked for NaN and infinity.
    mark : array (1,) or None
        A length of 8 or 4 bytes. A call does nothing unless it equals the step's `before`, and ends by setting it to
        `after`.
    lives : int64 array (1,)
        0 once the cache has replaced these buffers.
    """

    __slots__ = ("_arrays", "_in_full", "_kernel", "_of_part", "address", "in_full")

    def __init__(
        self, kernel: BoundKernel, k: Any, k_scale: Any, v: Any, v_scale: Any, sinks: Any,
        options: tuple[float, float, int], look: bool, mark: Any, lives: Any,
    ) -> None:  # fmt: skip
        record = np.zeros(_LAYER_SIZE, np.int64)
        record[_SCALE : _CAP + 1].view(np.float64)[:] = options[:2]
        record[_WINDOW], record[_LOOK] = options[2], look
        if mark is not None:
            record[_MARK], record[_MARK_SIZE] = mark.ctypes.data, mark.itemsize
        record[_LIVES] = lives.ctypes.data
        self._of_part = sinks, (*options[:2], -1), lives
        if kernel.in_full is not None:  # the part in full is the first one: it has the sinks
            sinks, record[_WINDOW] = np.empty(0, kernel.compute), -1
        for at, x in ((_K, k), (_K_SCALE, k_scale), (_V, v), (_V_SCALE, v_scale), (_SINKS, sinks)):
            describe(record, at, x)
        self._kernel, self._arrays = kernel, (record, k, k_scale, v, v_scale, sinks, mark, lives)
        self.address: int = record.ctypes.data
        #: The pool of the newest tokens if keys are stored by channel; set by `keep_in_full`.
        self.in_full: Any = None

    def keep_in_full(self, pool: Any) -> None:
        """Make calls write and read the newest tokens of keys by channel in this `numkv.storage.pool.Pool`."""
        sinks, options, lives = self._of_part
        arrays = pool.k, pool.k_scale, pool.v, pool.v_scale
        of = self._kernel.in_full
        assert of is not None
        self._in_full = LayerRecord(of, *arrays, sinks, options, False, None, lives)
        self._arrays[0][_LAYER_IN_FULL] = self._in_full.address
        self.in_full = pool


class Extents(NamedTuple):
    """The sizes for which a step's memory is made; steps of equal extents share it."""

    num_seqs: int
    num_tokens: int
    max_blocks: int
    num_q_heads: int
    num_kv_heads: int
    dim: int
    dim_v: int


class StepRecord:
    """The plan of a step for layers of one window, and the memory in which they compute, one after another.

    Attributes
    ----------
    block_table, seq_lens, q_starts, slots, ranges : array
        To be filled before `plan`; ``ranges`` ``(num_tokens, 2)`` of keys by channel, else ``(0, 2)``.
    in_full : StepRecord or None
        The part in full precision, if keys are stored by channel; see `part_in_full`.
    address : int
        The address of its record.
    workers : int
        Threads that a call uses.
    """

    __slots__ = (
        "_kernel", "_memory", "_record", "_scratch", "_sizes", "address", "block_table", "extents", "in_full",
        "q_starts", "ranges", "seq_lens", "slots", "workers",
    )  # fmt: skip

    def __init__(self, kernel: BoundKernel, extents: Extents) -> None:
        num_seqs, num_tokens, max_blocks, q_heads, heads, dim, dim_v = extents
        self._kernel, self.extents = kernel, extents
        self.workers = 1
        of_plan = plan_size(num_seqs) + kernel.most_threads * WORKER_INTS
        ints = aligned(np.empty, (of_plan,), np.int64)
        self.block_table = np.empty((num_seqs, max_blocks), np.int32)
        self.seq_lens, self.slots = np.empty(num_seqs, np.int64), np.empty(num_tokens, np.int64)
        self.q_starts = np.empty(num_seqs + 1, np.int64)
        lse = np.empty((num_tokens, q_heads), np.float32)
        ranges = self.ranges = np.empty((num_tokens if kernel.by_ranges else 0, 2), np.int64)
        record = self._record = np.zeros(_STEP_SIZE, np.int64)
        record[_TOKENS], record[_Q_HEADS] = num_tokens, q_heads
        self._memory = {
            _TABLE: self.block_table, _LENS: self.seq_lens, _STARTS: self.q_starts, _SLOTS: self.slots,
            _RANGES: ranges, _LSE: lse, _INTS: ints,
        }  # fmt: skip
        for at, x in self._memory.items():
            describe(record, at, x)
        of_q, of_rows = kernel.itemsizes
        for at, rows_heads, width, itemsize in (
            (_Q_GIVEN, q_heads, dim, of_q), (_K_GIVEN, heads, dim, of_rows), (_V_GIVEN, heads, dim_v, of_rows),
            (_OUT_GIVEN, q_heads, dim_v, of_q),
        ):  # fmt: skip
            describe_dense(record, at, (num_tokens, rows_heads, width), itemsize)
        for at, width in ((_QUERIES, dim), (_RESULTS, dim_v)):
            rows = self._memory[at] = aligned(np.empty, (num_tokens, q_heads, width), kernel.taken)
            describe(record, at, rows)
        record[_SIZES], self._scratch, self._sizes = kernel.sizes(dim, dim_v, q_heads // heads)
        self.address: int = record.ctypes.data
        self.in_full: StepRecord | None = None
        if kernel.addresses is not None:
            record[_QUANTISE], record[_MERGE_STATES] = kernel.addresses()

    def part_in_full(self, max_blocks: int) -> StepRecord:
        """Return the record of the part in full, in so many blocks a sequence. The caller fills its arrays, too."""
        if self.in_full is None or self.in_full.extents.max_blocks != max_blocks:
            of = self._kernel.in_full
            assert of is not None
            self.in_full = StepRecord(of, self.extents._replace(max_blocks=max_blocks))
            self._record[_STEP_IN_FULL] = self.in_full.address
        return self.in_full

    def quantise(self, groups: Any, to_groups: Any, reads_codes: bool) -> None:
        """Set which token groups calls quantise after writing rows, and whether queries read any codes."""
        for at, x in ((_GROUPS, groups), (_TO_GROUPS, to_groups)):
            self._memory[at] = x
            describe(self._record, at, x)
        self._record[_READS_CODES] = reads_codes

    def plan(self, window_left: int, block_size: int, before: int, after: int) -> None:
        """Plan the attention of a step from its lengths and tables. See `LayerRecord` for the mark."""
        record, kernel = self._record, self._kernel
        if kernel.by_ranges:
            window_left = -1
        self.workers, parts = kernel.plan(self, window_left, block_size)
        parts_at = self.workers * self._scratch
        size = parts_at + parts * (self.extents.dim_v + PART_EXTRA)
        if _FLOATS not in self._memory or self._memory[_FLOATS].size < size:
            self._memory[_FLOATS] = aligned(np.empty, (size,), kernel.compute)
            describe(record, _FLOATS, self._memory[_FLOATS])
        record[_WORKERS : _AFTER + 1] = self.workers, parts, parts_at, before, after

    def move(self, before: int, after: int) -> None:
        """Reuse a plan for other lengths with as many KV tiles. See `LayerRecord` for the mark."""
        self._record[_BEFORE], self._record[_AFTER] = before, after

    def ints(self) -> Any:
        """Return the memory of the plan."""
        return self._memory[_INTS]
