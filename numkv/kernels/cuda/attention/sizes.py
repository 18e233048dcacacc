"""How much of everything attention on CUDA takes at once."""

from __future__ import annotations

from typing import NamedTuple

from numkv.kernels.cuda.launches import THREADS
from numkv.kernels.cuda.simd import WIDTH, ceil_div
from numkv.kernels.cuda.streams import SIMULATED

# Threads that score a token together: with 16 bytes each, a team reads 128 bytes of a row at once.
TEAM = 2 if SIMULATED else 8
# Tokens that a team scores at once, so that enough reads are under way; also rows of V that a thread reads ahead.
AT_ONCE = {"float32": 4, "float64": 2}
# Query rows of an item, as many as the group has or as registers allow, and for each choice how many blocks shall fit
# on a multiprocessor: of fp32, and of what is converted as it is read, which takes more registers. With fewer than that
# leaves, the loops would spill.
ROW_CHOICES = {1: 5, 4: 4, 8: 3}
CONVERTED_ROW_CHOICES = {1: 4, 4: 3, 8: 2}
# Shared memory for q rows: half of what a block has without asking. The other arrays fit into the other half.
Q_BYTES = 24 * 1024
# Elements between the rows of two chunks of q in shared memory.
Q_PAD = 4
# Elements of V that a thread reads at once. As many sums as 16 elements need would not fit into registers: where K's
# chunks have 16, those of V have half of that, and twice as many rows are read ahead.
V_WIDTHS = {name: min(8, width) for name, width in WIDTH.items()}


class Sizes(NamedTuple):
    """Constants of an attention kernel."""

    rows: int  #: query rows of an item
    columns: int  #: chunks of an output row that a thread takes
    tile: int  #: tokens of a KV tile
    k_width: int  #: elements of K that a thread reads at once
    tokens: int  #: tokens of K that a team scores at once
    q_step: int  #: elements from one chunk of q in shared memory to the next
    part_step: int  #: elements from one lane's partial sums to the next
    parts: int  #: elements of the memory for partial sums
    searchers: int  #: threads that look for the maximum of one row, and add up its probabilities
    tokens_each: int  #: tokens that a thread takes in the softmax
    row_step: int  #: a thread takes one token of every so many rows there
    v_width: int  #: elements of V that a thread reads at once
    v_tokens: int  #: rows of V that a thread reads ahead
    v_step: int  #: of these, how many are added in one unrolled loop
    rows_at_once: int  #: rows whose sums are added up over the teams at once


def row_choices(k_kind: str, v_kind: str, compute: str) -> dict[int, int]:
    """Numbers of query rows that items may have, and how many blocks then share a multiprocessor."""
    if k_kind == v_kind == "fp32" and compute == "float32":
        return ROW_CHOICES
    if compute == "float64" and max(WIDTH[k_kind], WIDTH[v_kind]) > WIDTH["bf16"]:
        return {
            n: 2 for n in CONVERTED_ROW_CHOICES if n < 8
        }  # 16 elements of 8 rows in float64 would spill
    return CONVERTED_ROW_CHOICES


def tile_of(compute: str) -> int:
    """Tokens of a KV tile: as many as a block scores at once."""
    return THREADS // TEAM * AT_ONCE[compute]


def sizes_of(k_kind: str, v_kind: str, compute: str, rows: int, columns: int) -> Sizes:
    """The sizes of an attention kernel.

    Parameters
    ----------
    k_kind, v_kind : str
        Kinds of K and V.
    compute : {"float32", "float64"}
        What it computes in.
    rows : int
        Query rows of an item: one of `ROW_CHOICES`.
    columns : int
        Chunks of an output row that a thread takes.
    """
    tile, tokens = tile_of(compute), AT_ONCE[compute]
    k_width, v_width = WIDTH[k_kind], V_WIDTHS[v_kind]
    # A team's lanes write their sums a few banks apart. The same memory takes the teams' output sums in the end, for
    # some of the rows at a time.
    part_step = rows * tile + max(1, 32 // TEAM)
    parts = max(TEAM * part_step, THREADS * v_width)
    return Sizes(
        rows=rows,
        columns=columns,
        tile=tile,
        k_width=k_width,
        tokens=tokens,
        q_step=rows * k_width + Q_PAD,  # so that the lanes of a team read different banks
        part_step=part_step,
        parts=parts,
        # The same for all rows: so is the order of sums.
        searchers=min(4, THREADS // max(ROW_CHOICES)),
        tokens_each=max(1, tile // THREADS),
        row_step=max(1, THREADS // tile),
        v_width=v_width,
        v_tokens=tokens * (WIDTH[v_kind] // v_width),
        v_step=tokens,
        rows_at_once=min(rows, parts // (THREADS * v_width)),
    )


def q_bytes(k_kind: str, dim: int, rows: int, itemsize: int) -> int:
    """Shared memory that the query rows of an item take."""
    width = WIDTH[k_kind]
    return ceil_div(dim, width) * (rows * width + Q_PAD) * itemsize
