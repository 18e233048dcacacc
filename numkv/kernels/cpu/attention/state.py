"""What attention keeps in memory: the record of a call, the state of each thread, and the scratch memory of a worker.

The driver and the steps of engines are kernels of their own, which know nothing of each other's types. What they hand
over is one address, that of a thread's state::

    record of a call    arrays as `numkv.kernels.cpu.vectors.arrays` describes them, options, where steps and sizes are
    state of a thread   where the record is, then sizes and places of scratch memory, the item, the turn

Who reads a state takes named tuples of numbers out of it, which cost no more than the loads of what is used.

Of scratch memory there is one list of what it holds and how many floats of each, from which all offsets follow.
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
from numkv.kernels.cpu.attention.offsets import SPARE_INTS, STATE_AT, STATE_INTS, TABLE, TileLayout
from numkv.kernels.cpu.attention.plan import MISSING
from numkv.kernels.cpu.attention.records import (
    AMX_QUERY_ROWS,
    INT4_SPAN,
    KV_TILE,
    LOG2_E,
    MANY_QUERY_ROWS,
    PANEL,
    QUERY_ROWS,
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

#: Floats in a cache line.
LINE = 16
# Floats that query rows on their way to a matrix unit, and its sums, take for a moment.
SPARE = 768
# Query rows that vector code takes at once, at most.
_UNROLL = ROW_UNROLL[0]


class Sizes(NamedTuple):
    """What the sizes of a call follow from."""

    dim: int
    dim_v: int
    #: Elements of a K row, second codes of channels included.
    k_dim: int
    #: Q heads of a kv head.
    group: int
    #: Query rows, and their floats and those of output rows, in whole vectors.
    max_rows: int
    pad_dim: int
    pad_v: int
    #: Spans of 128 elements that rows begin.
    k_spans: int
    v_spans: int
    #: Scales of a K row and of a V row.
    k_groups: int
    v_groups: int
    #: Of many query rows: floats from row to row of K and of V, whose columns then lie in different sets of a cache.
    many_step: int
    many_step_v: int


class Scratch(NamedTuple):
    """Floats of a worker: how many there are of each, or where they begin."""

    #: Query rows, and output rows.
    queries: int
    outputs: int
    #: Of query rows: the online softmax's maxima and sums, and the scales of rows as integers.
    maxima: int
    sums: int
    query_scales: int
    scores: int
    #: Scales of the tile's tokens, and of INT4 their groups' minima too; or what `gather_channels` puts down.
    key_scales: int
    value_scales: int
    #: Where channels of K have scales: what is added to the scores of each query row.
    channel_addends: int
    #: What rescales earlier sums, and scales of weights as integers.
    rescale: int
    prob_scales: int
    #: Sums of groups of query rows as integers.
    query_sums: int
    #: Of INT4 V rows: sums of minima with scales of weights, and weights of groups.
    prob_sums: int
    group_probs: int
    #: Query rows interleaved, and how many were interleaved together.
    interleaved: int
    unrolls: int
    #: For a matrix unit: V rows, scores, what it adds up, which tokens rows see, scales of a block of query rows, K
    #: rows where they have to be moved, packed queries, and transposed output rows.
    amx_values: int
    amx_scores: int
    amx_spare: int
    amx_bounds: int
    amx_scales: int
    amx_keys: int
    amx_queries: int
    amx_outputs: int
    #: For many query rows: these by panels, side by side; K rows and V rows of a tile as floats; scores of a panel, and
    #: which tokens its rows see.
    many_queries: int
    many_keys: int
    many_values: int
    many_scores: int
    many_bounds: int
    #: Up to here, whole cache lines.
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
    """`Sizes`, where parts of a worker's scratch memory begin as `Scratch` has them, and how many floats it has.

    `extents` are the elements of a K row and of a V row, and the q heads of a kv head.
    """
    dim, dim_v, group = extents
    rows_at_most = AMX_QUERY_ROWS if use_amx else MANY_QUERY_ROWS if by_panels else QUERY_ROWS
    k_group, v_group = kind(k_kind).group_size, kind(v_kind).group_size
    k_packed, by_channel = k_in_integers and k_group > 0, kind(k_kind).group_tokens > 0
    k_dim = dim + kind(k_kind).fine_channels
    pad_k = KV_TILE if use_amx else INT4_SPAN if k_packed else 4 * LANES if k_in_integers else LANES
    pad_v = KV_TILE if use_amx else LANES
    if in_pairs:  # two elements to a lane
        pad_k, pad_v = max(pad_k, 2 * LANES), max(pad_v, 2 * LANES)
    # Whole groups are read, if not written; and every table begins where a cache line does.
    rows = (max(rows_at_most, group) + _UNROLL + LINE - 1) // LINE * LINE
    sizes = Sizes(
        dim,
        dim_v,
        k_dim,
        group,
        rows,
        _up(k_dim, pad_k),
        _up(dim_v, pad_v),
        -(-dim // INT4_SPAN),
        -(-dim_v // INT4_SPAN),
        -(-dim // k_group) if k_group > 0 else 1,
        -(-dim_v // v_group) if v_group > 0 else 1,
        _up(dim, LANES) + LINE,
        _up(dim_v, LANES) + LINE,
    )
    # Scales are put down by fours; a K tile of bf16 takes most.
    k_scales, v_scales = _up(sizes.k_groups, 4), _up(sizes.v_groups, 4)
    keys = _up(dim, KV_TILE) * KV_TILE // 2 if use_amx else 0
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
        amx_values=sizes.pad_v * (KV_TILE // 2) if use_amx else 0,
        amx_scores=2 * rows * KV_TILE if use_amx else 0,
        amx_spare=SPARE if use_amx else 0,
        amx_bounds=2 * AMX_ROWS if use_amx else 0,
        amx_scales=AMX_ROWS if use_amx else 0,
        amx_keys=keys,
        amx_queries=blocks * (3 * keys // 4),
        amx_outputs=blocks * AMX_ROWS * sizes.pad_v,
        many_queries=(rows // PANEL + 1) * PANEL * sizes.pad_dim if by_panels else 0,
        many_keys=KV_TILE * sizes.many_step if by_panels else 0,
        many_values=KV_TILE * sizes.many_step_v if by_panels else 0,
        many_scores=KV_TILE * PANEL if by_panels else 0,
        many_bounds=2 * PANEL if by_panels else 0,
        end=LINE,
    )
    places = itertools.accumulate(parts, initial=0)
    return np.array([*sizes, *places], np.int64)


def _up(number: int, unit: int) -> int:
    """The least multiple of a unit that is no less than a number."""
    return -(-number // unit) * unit


# The record of a call: arrays, then numbers.
(
    Q, K, K_SCALE, V, V_SCALE, BLOCK_TABLE, SEQ_LENS, Q_STARTS, RANGES, SEEN, SINKS, OUT, LSE, FLOATS, INTS, NUMBERS,
) = (TABLE_ROW * i for i in range(16))  # fmt: skip
#: Rows of a mask are ranges with more columns; `SEEN` has of them the two that say what is seen without gaps.
MASK = RANGES
#: The kernel's flags; the softmax scale and the soft cap as bits of float64; the window; where parts are among floats;
#: where sizes are: `Sizes`, places of a worker as `Scratch`, the floats that a worker has, and the table of steps.
FLAGS, SCALE, CAP, WINDOW, PARTS_AT, SIZES_AT = range(NUMBERS, NUMBERS + 6)
FLOATS_EACH = len(Sizes._fields) + len(Scratch._fields)
STEPS = FLOATS_EACH + 1

# The table of steps has numbers first: query rows that vector code takes at once, and those of an item at most; from
# how many on `ATTEND_MANY` takes them; how many tokens of K and of V share scales, 0 if they have none.
AT_ONCE, MOST_ROWS, MANY_FROM, K_SCALED, V_SCALED = range(5)
#: Steps of a thread, of an item, of a turn. Each takes the state's address; `steps` says what they do.
LOAD, LOAD_MANY, GATHER, ATTEND, ATTEND_MANY, PICK, LEAVE, STORE, END = range(5, 14)
#: Steps that these call: few query rows by vector code, 1, 2, 4 or 8 of them, and what masks and caps do to scores.
FEW, OF_1, OF_2, OF_4, OF_8, ADJUST = range(14, 20)
#: Those of many query rows.
PUT_KEYS, PUT_VALUES, MULTIPLY, ADJUST_MANY, WEIGH = range(20, 25)
#: Those of groups of several heads.
NEXT_HEAD, SPREAD, NUM_STEPS = range(25, 28)
#: What the table has for a step that has nothing to do.
NOTHING = -1

# The state of a thread: where the call's record is and its steps are, and how output rows lie, which is the engine's.
CALL, _STEPS, _LIE = range(3)
SIZES = 3
PLACES = SIZES + len(Sizes._fields)
_ITEM = PLACES + len(Scratch._fields)
_TURN = _ITEM + len(Item._fields)
_LAYOUT = _TURN + len(Turn._fields)
assert _LAYOUT + len(TileLayout._fields) <= STATE_INTS

item_of, put_item = tuple_reader(Item, _ITEM), tuple_writer(_ITEM)
turn_of, put_turn = tuple_reader(Turn, _TURN), tuple_writer(_TURN)
layout_in, put_layout = tuple_reader(TileLayout, _LAYOUT), tuple_writer(_LAYOUT)
sizes_of, places_of = tuple_reader(Sizes, SIZES), tuple_reader(Scratch, PLACES)
_pairs_at = array_reader(types.int64, 2)


@inlined
def call_of(state):
    """The address of the call's record."""
    return int_at(state, np.int64(CALL))


@inlined
def lie_of(state):
    """How output rows lie; 0 to begin with."""
    return int_at(state, np.int64(_LIE))


@inlined
def put_lie(state, lie):
    """Say how output rows lie."""
    put_int(state, np.int64(_LIE), lie)


@inlined
def begin_state(state, call):
    """Say where the call's record is, and its steps."""
    put_int(state, np.int64(CALL), call)
    put_int(state, np.int64(_STEPS), int_at(int_at(call, np.int64(SIZES_AT)), np.int64(STEPS)))


@inlined
def number_of(state, index):
    """A number of the table of steps."""
    return int_at(int_at(state, np.int64(_STEPS)), np.int64(index))


@inlined
def has_slopes(state):
    """Whether slopes of q heads follow the sinks."""
    call = call_of(state)
    return int_at(call, np.int64(SINKS + SHAPE)) > int_at(call, np.int64(Q + SHAPE + 1))


@inlined
def seen_of(state):
    """Which tokens queries see without gaps."""
    call = call_of(state)
    return Visibility(_pairs_at(call, np.int64(SEEN)), int_at(call, np.int64(WINDOW)))


@inlined
def mask_of(state):
    """Rows of `numkv.rows.mask`, or ranges."""
    return _pairs_at(call_of(state), np.int64(MASK))


@inlined
def soft_cap_of(state):
    """The soft cap of scores, or 0."""
    return float_at(call_of(state), np.int64(CAP))


@inlined
def scale_of(state):
    """What scores are multiplied with. They are in base 2, unless a soft cap comes first."""
    call = call_of(state)
    scale = float_at(call, np.int64(SCALE))
    return scale if float_at(call, np.int64(CAP)) > 0 else scale * LOG2_E


@inlined
def spare_of(state):
    """Integers that the engine keeps: they lie before the state."""
    return ints_from(state - np.int64(8 * SPARE_INTS), np.int64(SPARE_INTS))


@inlined
def offsets_of(state):
    """A thread's tables, which lie before all that."""
    return ints_from(state - np.int64(8 * STATE_AT), np.int64(STATE_AT))


def floats_reader(compute: str) -> Callable[..., Any]:
    """``floats_of(state)``: the floats of all threads, for what attention computes in."""
    read = array_reader(getattr(types, float_type(compute)), 1, "C")

    @inlined
    def floats_of(state):
        return read(call_of(state), np.int64(FLOATS))

    return floats_of


def make_tile_of(k_kind: str, v_kind: str) -> Callable[..., Any]:
    """``tile_of(state)`` for storage kinds of K and of V: the turn's `Tile`."""
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
        )  # fmt: skip

    return tile_of


def make_scales_of(k_kind: str, v_kind: str) -> Callable[..., Any]:
    """``scales_of(state)``: the scales of K and of V, as these kinds have them."""
    k_scale_at, v_scale_at = array_reader(*SCALES[k_kind]), array_reader(*SCALES[v_kind])

    @inlined
    def scales_of(state):
        call = call_of(state)
        return k_scale_at(call, np.int64(K_SCALE)), v_scale_at(call, np.int64(V_SCALE))

    return scales_of


@intrinsic
def run_step(typing_context, state, step, numbers):
    """Call a step of the engine, by its number in the table of steps: with the state's address and other numbers.

    Returns what the step does, an int64. A step that there is not is 0 in the table, and returns 0; then its bit is set
    in the plan, no further items are handed out, and whoever has begun the call makes the step and begins it again. One
    that has nothing to do is -1.
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
