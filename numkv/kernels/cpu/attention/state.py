"""Attention's memory: the record of a call, the state of each thread, and the scratch memory of a worker.

The driver and the steps of engines are separate kernels. None depends on another's types. They pass one address, that
of a thread's state::

    record of a call    arrays as `numkv.kernels.cpu.vectors.arrays` describes them, options, places of steps and sizes
    state of a thread   address of the record, then sizes and places of scratch memory, the item, the turn

Readers of a state receive named tuples of numbers. Only the used fields are loaded.

One list (`Scratch`) has the contents of scratch memory and the floats of each part. All offsets follow from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numkv.kernels.builder import SCALES, WORDS
from numkv.kernels.cpu.attention.offsets import SPARE_INTS, STATE_INTS, TABLE
from numkv.kernels.cpu.attention.plan import MISSING
from numkv.kernels.cpu.attention.records import (
    AMX_QUERY_ROWS,
    INT4_SPAN,
    KV_TILE,
    MANY_QUERY_ROWS,
    PANEL,
    QUERY_ROWS,
    TILE_UNIT,
    Item,
    Tile,
    TileRows,
    Turn,
    Visibility,
    float_type,
)
from numkv.kernels.cpu.vectors.arrays import (
    SHAPE,
    TABLE_ROW,
    array_reader,
    float_at,
    int_at,
    ints_from,
    put_int,
    tuple_reader,
    tuple_writer,
)
from numkv.kernels.cpu.vectors.emit import I64
from numkv.kernels.cpu.vectors.emitted import inlined
from numkv.kernels.cpu.vectors.features import AMX_ROWS, LANES, ROW_UNROLL
from numkv.kinds import kind
from numkv.rows.softmax import LOG2_E

#: Floats in a cache line.
LINE = 16
# Floats for query rows on their way to a matrix unit, and for its sums.
SPARE = 768
# The most query rows that vector code computes at once.
_UNROLL = ROW_UNROLL[0]


class Sizes(NamedTuple):
    """The sizes of a call."""

    dim: int
    dim_v: int
    #: Elements of a K row, second codes of channels included.
    k_dim: int
    #: Q heads of a kv head.
    group: int
    #: Query rows; floats of a query row and of an output row, in whole vectors.
    max_rows: int
    pad_dim: int
    pad_v: int
    #: Spans of 128 elements that rows begin.
    k_spans: int
    v_spans: int
    #: Scales of a K row and of a V row.
    k_groups: int
    v_groups: int
    #: With many query rows: floats from row to row of K and of V, so that columns lie in different cache sets.
    many_step: int
    many_step_v: int


class Scratch(NamedTuple):
    """A worker's scratch memory: the floats of each part, or the places where parts begin."""

    #: Query rows, and output rows.
    queries: int
    outputs: int
    #: Per query row: the online softmax's maxima and sums, and the scales of rows as integers.
    maxima: int
    sums: int
    query_scales: int
    scores: int
    #: Scales of the tile's tokens, for INT4 also their groups' minima; or the records of `gather_channels`.
    key_scales: int
    value_scales: int
    #: With scales of K's channels: the number that is added to each query row's scores.
    channel_addends: int
    #: Factors that rescale earlier sums, and scales of weights as integers.
    rescale: int
    prob_scales: int
    #: Sums of groups of query rows as integers.
    query_sums: int
    #: For INT4 V rows: sums of minima with scales of weights, and weights of groups.
    prob_sums: int
    group_probs: int
    #: Interleaved query rows, and how many were interleaved together.
    interleaved: int
    unrolls: int
    #: For a matrix unit: V rows, scores, its sums, the visible tokens of rows, scales of a block of query rows, K
    #: rows that need moving, packed queries, and transposed output rows.
    amx_values: int
    amx_scores: int
    amx_spare: int
    amx_bounds: int
    amx_scales: int
    amx_keys: int
    amx_queries: int
    amx_outputs: int
    #: For many query rows: the rows by panels, side by side; K rows and V rows of a tile as floats; scores of a panel,
    #: and the visible tokens of its rows.
    many_queries: int
    many_keys: int
    many_values: int
    many_scores: int
    many_bounds: int
    #: All parts before this are whole cache lines.
    end: int


def lay_out(
    k_kind: str,
    v_kind: str,
    k_in_integers: bool,
    use_amx: bool,
    by_panels: bool,
    in_pairs: bool,
    extents: tuple[int, int, int],
) -> np.ndarray[Any, Any]:
    """Return `Sizes`, the places of a worker's scratch memory in the order of `Scratch`, and its floats in all.

    `extents` are the elements of a K row and of a V row, and the q heads of a kv head.
    """
    dim, dim_v, group = extents
    rows_at_most = AMX_QUERY_ROWS if use_amx else MANY_QUERY_ROWS if by_panels else QUERY_ROWS
    k_group, v_group = kind(k_kind).group_size, kind(v_kind).group_size
    k_packed, by_channel = k_in_integers and k_group > 0, kind(k_kind).group_tokens > 0
    k_dim = dim + kind(k_kind).fine_channels
    pad_k = (
        TILE_UNIT if use_amx else INT4_SPAN if k_packed else 4 * LANES if k_in_integers else LANES
    )
    pad_v = TILE_UNIT if use_amx else LANES
    if in_pairs:  # two elements to a lane
        pad_k, pad_v = max(pad_k, 2 * LANES), max(pad_v, 2 * LANES)
    # Reads cover whole groups of rows, even where writes do not. Every table begins at a cache line.
    rows = (max(rows_at_most, group) + _UNROLL + LINE - 1) // LINE * LINE
    sizes = Sizes(
        dim, dim_v, k_dim, group, rows, _up(k_dim, pad_k), _up(dim_v, pad_v), -(-dim // INT4_SPAN),
        -(-dim_v // INT4_SPAN), -(-dim // k_group) if k_group > 0 else 1, -(-dim_v // v_group) if v_group > 0 else 1,
        _up(dim, LANES) + LINE, _up(dim_v, LANES) + LINE,
    )  # fmt: skip
    # Scales are stored in fours. A K tile of bf16 takes the most memory.
    k_scales, v_scales = _up(sizes.k_groups, 4), _up(sizes.v_groups, 4)
    keys = _up(dim, TILE_UNIT) * TILE_UNIT // 2 if use_amx else 0
    blocks = max(1, rows_at_most // group) * ((group + AMX_ROWS - 1) // AMX_ROWS)
    blocks = blocks + rows_at_most // AMX_ROWS if use_amx else 0
    parts = Scratch(
        queries=rows * sizes.pad_dim,
        outputs=rows * sizes.pad_v,
        maxima=rows,
        sums=rows,
        query_scales=rows,
        scores=AMX_ROWS * KV_TILE,
        key_scales=2 * _up(sizes.pad_dim, LINE) + LINE if by_channel else 2 * KV_TILE * k_scales,
        value_scales=2 * KV_TILE * v_scales,
        channel_addends=LINE if by_channel else 0,
        rescale=rows,
        prob_scales=rows,
        query_sums=rows * 16 * sizes.k_spans,
        prob_sums=LINE * 4 * sizes.v_spans,
        group_probs=_UNROLL * (KV_TILE // 2 * 4) * sizes.v_spans,
        interleaved=2 * rows * sizes.pad_dim,
        unrolls=2 * rows,
        amx_values=sizes.pad_v * (TILE_UNIT // 2) if use_amx else 0,
        amx_scores=2 * rows * TILE_UNIT if use_amx else 0,
        amx_spare=SPARE if use_amx else 0,
        amx_bounds=2 * AMX_ROWS if use_amx else 0,
        amx_scales=AMX_ROWS if use_amx else 0,
        amx_keys=keys,
        amx_queries=blocks * (3 * keys // 4),
        amx_outputs=blocks * AMX_ROWS * sizes.pad_v,
        many_queries=(rows // PANEL + 1) * PANEL * sizes.pad_dim if by_panels else 0,
        many_keys=TILE_UNIT * sizes.many_step if by_panels else 0,
        many_values=TILE_UNIT * sizes.many_step_v if by_panels else 0,
        many_scores=TILE_UNIT * PANEL if by_panels else 0,
        many_bounds=2 * PANEL if by_panels else 0,
        end=LINE,
    )
    places = itertools.accumulate(parts, initial=0)
    return np.array([*sizes, *places], np.int64)


def _up(number: int, unit: int) -> int:
    """Round up to a multiple of a unit."""
    return -(-number // unit) * unit


# The record of a call: arrays, then numbers.
(
    Q, K, K_SCALE, V, V_SCALE, BLOCK_TABLE, SEQ_LENS, Q_STARTS, RANGES, SEEN, SINKS, OUT, LSE, FLOATS, INTS, NUMBERS,
) = (TABLE_ROW * i for i in range(16))  # fmt: skip
#: A mask is an array of ranges with more columns. `SEEN` views the two that bound the tokens visible without gaps.
MASK = RANGES
#: The kernel's flags; the softmax scale and the soft cap as bits of float64; the window; the place of parts among the
#: floats; the place of sizes. These are `Sizes`, a worker's `Scratch`, a worker's floats, and the table of steps.
FLAGS, SCALE, CAP, WINDOW, PARTS_AT, SIZES_AT = range(NUMBERS, NUMBERS + 6)
FLOATS_EACH = len(Sizes._fields) + len(Scratch._fields)
STEPS = FLOATS_EACH + 1

# The table of steps starts with numbers: query rows that vector code computes at once, the most query rows of an item,
# the fewest rows for `ATTEND_MANY`, how many tokens of K and of V share scales (0 without scales), the most tokens of a
# tile, and whether tiles of large sequences have one unit.
AT_ONCE, MOST_ROWS, MANY_FROM, K_SCALED, V_SCALED, LONGEST, SHORT_IF_LARGE = range(7)
#: Steps of a thread, of an item, of a turn. Each accepts the state's address; see `steps` for their work.
LOAD, LOAD_MANY, GATHER, ATTEND, ATTEND_MANY, PICK, LEAVE, STORE, END = range(7, 16)
#: Steps that these call: vector code for few query rows (1, 2, 4 or 8), and masks and soft caps of scores.
FEW, OF_1, OF_2, OF_4, OF_8, ADJUST = range(16, 22)
#: Steps for many query rows.
PUT_KEYS, PUT_VALUES, MULTIPLY, ADJUST_MANY, WEIGH = range(22, 27)
#: The step of a call whose sequences were split: it accepts the address of the call's record, and threads.
MERGE, NUM_STEPS = 27, 28
#: The table's entry for a step without work.
NOTHING = -1

# The state of a thread: the addresses of the call's record and of its steps, and the engine's layout of output rows.
CALL, _STEPS, _LIE = range(3)
SIZES = 3
PLACES = SIZES + len(Sizes._fields)
_ITEM = PLACES + len(Scratch._fields)
_TURN = _ITEM + len(Item._fields)
assert _TURN + len(Turn._fields) <= STATE_INTS

item_of, put_item = tuple_reader(Item, _ITEM), tuple_writer(_ITEM)
turn_of, put_turn = tuple_reader(Turn, _TURN), tuple_writer(_TURN)
sizes_of, places_of = tuple_reader(Sizes, SIZES), tuple_reader(Scratch, PLACES)
_pairs_at = array_reader(types.int64, 2)


@inlined
def call_of(state):
    """Return the address of the call's record."""
    return int_at(state, np.int64(CALL))


@inlined
def lie_of(state):
    """Return the layout of output rows, a number of the engine's; 0 at first."""
    return int_at(state, np.int64(_LIE))


@inlined
def put_lie(state, lie):
    """Set the layout of output rows."""
    put_int(state, np.int64(_LIE), lie)


@inlined
def begin_state(state, call):
    """Set the addresses of the call's record and of its steps."""
    put_int(state, np.int64(CALL), call)
    put_int(state, np.int64(_STEPS), int_at(int_at(call, np.int64(SIZES_AT)), np.int64(STEPS)))


@inlined
def number_of(state, index):
    """Return a number of the table of steps."""
    return int_at(int_at(state, np.int64(_STEPS)), np.int64(index))


@inlined
def has_slopes(state):
    """Return whether slopes of q heads follow the sinks."""
    call = call_of(state)
    return int_at(call, np.int64(SINKS + SHAPE)) > int_at(call, np.int64(Q + SHAPE + 1))


@inlined
def seen_of(state):
    """Return the tokens that queries see without gaps."""
    call = call_of(state)
    return Visibility(_pairs_at(call, np.int64(SEEN)), int_at(call, np.int64(WINDOW)))


@inlined
def mask_of(state):
    """Return the rows of a mask (`numkv.rows.mask`), or ranges."""
    return _pairs_at(call_of(state), np.int64(MASK))


@inlined
def soft_cap_of(state):
    """Return the soft cap of scores, or 0."""
    return float_at(call_of(state), np.int64(CAP))


@inlined
def scale_of(state):
    """Return the factor of scores. It includes log2(e), for base 2, unless a soft cap comes first."""
    call = call_of(state)
    scale = float_at(call, np.int64(SCALE))
    return scale if float_at(call, np.int64(CAP)) > 0 else scale * LOG2_E


@inlined
def spare_of(state):
    """Return the engine's own integers, which lie before the state."""
    return ints_from(state - np.int64(8 * SPARE_INTS), np.int64(SPARE_INTS))


def floats_reader(compute: str) -> Callable[..., Any]:
    """Make ``floats_of(state)``: the floats of all threads, in the computing dtype."""
    read = array_reader(getattr(types, float_type(compute)), 1, "C")

    @inlined
    def floats_of(state):
        return read(call_of(state), np.int64(FLOATS))

    return floats_of


def make_tile_of(k_kind: str, v_kind: str) -> Callable[..., Any]:
    """Make ``tile_of(state)`` for storage kinds of K and of V: it returns the turn's `Tile`."""
    keys_at, values_at = array_reader(WORDS[k_kind], 4), array_reader(WORDS[v_kind], 4)
    FULL = np.int64(TABLE)

    @inlined
    def tile_of(state):
        call, turn, at, sizes = call_of(state), turn_of(state), places_of(state), sizes_of(state)
        k, v = keys_at(call, np.int64(K)), values_at(call, np.int64(V))
        return Tile(
            turn.start, turn.head,
            TileRows(k, ints_from(turn.keys_at, FULL), sizes.k_dim, at.key_scales, sizes.k_groups),
            TileRows(v, ints_from(turn.values_at, FULL), sizes.dim_v, at.value_scales, sizes.v_groups),
            ints_from(turn.v_extents_at, FULL), ints_from(turn.k_extents_at, FULL),
            TileRows(k, ints_from(turn.next_keys_at, FULL), sizes.k_dim, at.key_scales, sizes.k_groups), turn.k_step,
            turn.count,
        )  # fmt: skip

    return tile_of


def make_scales_of(k_kind: str, v_kind: str) -> Callable[..., Any]:
    """Make ``scales_of(state)``: it returns the arrays of scales of K and of V for these kinds."""
    k_scale_at, v_scale_at = array_reader(*SCALES[k_kind]), array_reader(*SCALES[v_kind])

    @inlined
    def scales_of(state):
        call = call_of(state)
        return k_scale_at(call, np.int64(K_SCALE)), v_scale_at(call, np.int64(V_SCALE))

    return scales_of


@intrinsic
def run_step(typing_context, state, step, numbers):
    """Call a step of the engine by its number in the table of steps, with the state's address and other numbers.

    It returns the step's result, an int64. A step that is not compiled yet is 0 in the table. Then this returns 0, sets
    the step's bit in the plan, and no further items are handed out. The host compiles the step and restarts the call. A
    step without work is -1 in the table and returns 0.
    """
    count = len(numbers.types)
    signature = (types.int64,) * (1 + count)

    def codegen(context, b, sig, args):
        def field(record, index):
            return b.gep(b.inttoptr(record, I64.as_pointer()), [index])

        state, step, numbers = args
        address = b.load(field(b.load(field(state, I64(_STEPS))), step))
        found = cgutils.alloca_once_value(b, I64(0))
        with b.if_else(b.icmp_signed(">", address, I64(0)), likely=True) as (there, missing):
            with there:
                convention = context.call_conv
                function = convention.get_function_type(types.int64, signature)
                values = [state, *cgutils.unpack_tuple(b, numbers, count)]
                status, value = convention.call_function(
                    b, b.inttoptr(address, function.as_pointer()), types.int64, signature, values
                )
                with cgutils.if_unlikely(b, status.is_error):
                    convention.return_status_propagate(b, status)
                b.store(value, found)
            with missing, b.if_then(b.icmp_signed("==", address, I64(0))):
                call = b.load(field(state, I64(CALL)))
                ints = b.load(field(call, I64(INTS)))
                b.atomic_rmw("or", field(ints, I64(MISSING)), b.shl(I64(1), step), "monotonic")
                b.atomic_rmw("xchg", field(ints, I64(0)), I64(1 << 62), "monotonic")
        return b.load(found)

    return types.int64(types.int64, types.int64, numbers), codegen
