"""Sizes and records that the parts of attention share.

A record is a named tuple of numbers and of arrays without reference counts. It costs nothing in compiled code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numkv.kernels.cpu.vectors.features import LANES, SCORE_VECTORS

#: The most tokens of a KV tile: its scores stay in L1, and V rows are fetched while K rows are used.
KV_TILE = 256
#: Tiles are whole units of so many tokens. Tiles of keys by channel have one, as do those of many query rows on a
#: matrix unit or by panels.
TILE_UNIT = 64
#: Query rows of an item: many enough to use a tile's K rows often after one read, and few enough to stay in L1 and L2.
QUERY_ROWS = 64
#: The same on a matrix unit, which needs K and V repacked: more rows share that cost.
AMX_QUERY_ROWS = 256
#: Query rows that are multiplied with a tile and weighted before the next: their scores stay in L1.
PANEL = SCORE_VECTORS * LANES
#: Query rows of an item where vector code widens K and V once for many of them. A power of two, as are many groups of
#: q heads.
MANY_QUERY_ROWS = 256
#: Query rows of a sequence up to which vector code is as fast as a matrix unit, or faster.
FEW_ROWS = 8
#: Bits of the kernel's `flags`: blocks of one token, whose block table names slots.
BY_SLOT = 1
#: The computing dtype if queries, K and V are bf16 and the CPU multiplies pairs of them: float32, with weights rounded
#: to bf16 before the product with V. Otherwise the dtype is a float type's name.
PAIRS = "pairs of bf16"
#: Elements of INT4 that are processed at once: four quantisation groups.
INT4_SPAN = 128


def float_type(compute: str) -> str:
    """The float type of scores, sums and results."""
    return "float32" if compute == PAIRS else compute


class Item(NamedTuple):
    """A unit of work: some kv heads of a sequence, a block of its query tokens, a part of its KV range.

    Query rows are (token, q head of the group). Scratch memory stores those of one kv head after another.
    """

    seq: int
    #: The first query token among those of all sequences, and how many tokens there are.
    first_token: int
    tokens: int
    #: Query rows of a kv head.
    rows: int
    #: Kv heads ``[first_head, end_head)``.
    first_head: int
    end_head: int
    #: Position of the first query token.
    position: int
    #: Tokens of the sequence ``[begin, end)`` that this item attends to.
    begin: int
    end: int
    #: The index of the first token's parts among those of all splits; -1 if the KV range is not split.
    part: int
    #: 1 if the sequence has enough query rows for a matrix unit.
    is_large: int


class Visibility(NamedTuple):
    """Which tokens a query sees: ranges of its own, or causality and a window."""

    ranges: Any
    window_left: int


class TileRows(NamedTuple):
    """K or V rows of a KV tile: token t's starts at ``words[offsets[t]]``."""

    words: Any
    offsets: Any
    #: Elements of a row.
    dim: int
    #: Where the tokens' scales are in scratch memory, and how many a token has.
    scales_at: int
    groups: int


class Turn(NamedTuple):
    """A KV tile of one kv head as the driver passes it: addresses of tables, see `offsets`."""

    #: The first token, and the kv head.
    start: int
    head: int
    #: Tables of where tokens' K and V rows start; the tables of their scales are `SCALES_ON` numbers further on.
    keys_at: int
    values_at: int
    #: Extents of this tile's V rows and of the next tile's K rows.
    v_extents_at: int
    k_extents_at: int
    #: The same tables of the next tile.
    next_keys_at: int
    next_values_at: int
    #: Elements from one token's K row to the next within a block.
    k_step: int
    #: Tokens of the tile, in whole units.
    count: int


class Tile(NamedTuple):
    """A KV tile of one kv head, as steps read it."""

    #: The first token, and the kv head.
    start: int
    head: int
    keys: TileRows
    values: TileRows
    #: Extents of this tile's V rows and of the next tile's K rows, for a `PrefetchStream`.
    v_extents: Any
    k_extents: Any
    #: The next tile's K rows.
    next_keys: TileRows
    #: Elements from one token's K row to the next within a block.
    k_step: int
    #: Tokens of the tile, in whole units.
    count: int


class QueryPlaces(NamedTuple):
    """Where query rows are in scratch memory: interleaved, with scales and sums of groups if they are integers.

    If K has scales by channel, each row also has a number that is added to its scores.
    """

    at: int
    scales_at: int
    sums_at: int
    addends_at: int


class WeightPlaces(NamedTuple):
    """Where probabilities as integers are in scratch memory, and the numbers that all of them share."""

    at: int
    #: Scales of rows (INT8); sums of minima and scales of groups (INT4).
    scales_at: int


class Outputs(NamedTuple):
    """Where output rows are in scratch memory, `step` floats apart, and the factors that rescale them."""

    at: int
    step: int
    rescale_at: int


class SoftmaxState(NamedTuple):
    """Where the online softmax stores the rows' maxima, their sums and the factors that rescale earlier sums."""

    maxima_at: int
    sums_at: int
    rescale_at: int


class AmxScales(NamedTuple):
    """Where scales are in scratch memory: of query rows, K rows and V rows to be read, of weights to be written."""

    queries_at: int
    keys_at: int
    values_at: int
    weights_at: int
