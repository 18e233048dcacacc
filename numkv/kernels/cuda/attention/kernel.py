"""The general attention kernel on CUDA: its sizes, its steps, and the driver that loops over a block's items.

Steps are closures over sizes and kinds. All of them are in this file, as the simulator defines ``cuda`` in a kernel's
own file only. Gaps and biases of `numkv.rows.mask` are added to scores (`make_sight`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types
from numba.extending import register_jitable

from numkv.kernels.cuda.attention.items import (
    COUNTS,
    FIELDS,
    ItemRows,
    batch_of,
    make_items,
    make_locate,
)
from numkv.kernels.cuda.attention.splits import PART_EXTRA
from numkv.kernels.cuda.instructions import load_chunk, row_address
from numkv.kernels.cuda.launches import THREADS
from numkv.kernels.cuda.simd import WIDTH, ceil_div, column_of, natural, reader
from numkv.kernels.cuda.streams import SIMULATED
from numkv.kinds import kind
from numkv.rows.convert import codec
from numkv.rows.mask import COLUMNS, PLAIN_END, POSITION, is_seen, position_of
from numkv.rows.softmax import LN_2, LOG2_E, finish


class Mask(NamedTuple):
    """The further arguments of a masked call."""

    rows: Any  #: of `numkv.rows.mask`
    heads: Any  #: sinks and slopes of q heads
    num_q_heads: Any


def make_sight(MASKED, COMPUTE):
    """``has_gaps(mask, rows, end)`` and ``mask_score(mask, rows, r, token, score)``; if not `MASKED` they do nothing.

    The first returns whether some rows of an item may not see all tokens before `end` that others see. The second
    returns a score with its bias, and -inf for a token in a gap of row `r` of the item.
    """
    F = np.float32 if COMPUTE == "float32" else np.float64
    UNMASKED = not MASKED

    @register_jitable
    def has_gaps(mask, rows, end):
        if MASKED:
            return mask.rows.shape[1] > COLUMNS and end > mask.rows[rows.token[0], PLAIN_END]
        return False

    @register_jitable
    def mask_score(mask, rows, r, token, score):
        if UNMASKED:
            return score
        query = rows.token[r]
        if token < rows.begin[r] or token >= rows.end[r]:
            return F(-np.inf)
        if mask.rows.shape[1] > COLUMNS and not is_seen(mask.rows, query, token):
            return F(-np.inf)
        if mask.heads.shape[0] > mask.num_q_heads:
            slope = F(mask.heads[mask.num_q_heads + rows.head[r]]) * F(LOG2_E)
            position = token
            if mask.rows.shape[1] > COLUMNS:
                position = position_of(mask.rows, query, token)
            score -= slope * F(abs(mask.rows[query, POSITION] - position))
        return score

    return has_gaps, mask_score


# Threads that score a token together: with 16 bytes each, a team reads 128 bytes of a row at once.
TEAM = 2 if SIMULATED else 8
# Tokens that a team scores at once, so that enough reads are under way; also rows of V that a thread reads ahead.
AT_ONCE = {"float32": 4, "float64": 2}
# Query rows of an item, as many as the group has or registers allow. For each choice, the blocks that should fit on a
# multiprocessor: of fp32, and of kinds that are converted as they are read, which need more registers. With fewer
# registers than that leaves, the loops would spill.
ROW_CHOICES = {1: 5, 4: 4, 8: 3}
CONVERTED_ROW_CHOICES = {1: 4, 4: 3, 8: 2}
# Shared memory for q rows: half of a block's default. The other arrays fit into the other half.
Q_BYTES = 24 * 1024
# Elements between the rows of two chunks of q in shared memory.
Q_PAD = 4
# Elements of V that a thread reads at once. The sums of 16 elements would not fit into registers. So where K's chunks
# have 16, V's have half of that, and twice as many rows are read ahead.
V_WIDTHS = {name: min(8, width) for name, width in WIDTH.items()}


class AttentionSizes(NamedTuple):
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
    """Return the choices of query rows of an item, and how many blocks then share a multiprocessor."""
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


def sizes_of(k_kind: str, v_kind: str, compute: str, rows: int, columns: int) -> AttentionSizes:
    """The sizes of an attention kernel.

    Parameters
    ----------
    k_kind, v_kind : str
        Kinds of K and V.
    compute : {"float32", "float64"}
        The dtype that it computes in.
    rows : int
        Query rows of an item: one of `ROW_CHOICES`.
    columns : int
        Chunks of an output row that a thread computes.
    """
    tile, tokens = tile_of(compute), AT_ONCE[compute]
    k_width, v_width = WIDTH[k_kind], V_WIDTHS[v_kind]
    # A team's lanes write their sums a few banks apart. In the end the same memory stores the teams' output sums, for
    # some of the rows at a time.
    part_step = rows * tile + max(1, 32 // TEAM)
    parts = max(TEAM * part_step, THREADS * v_width)
    return AttentionSizes(
        rows=rows,
        columns=columns,
        tile=tile,
        k_width=k_width,
        tokens=tokens,
        q_step=rows * k_width + Q_PAD,  # so that the lanes of a team read different banks
        part_step=part_step,
        parts=parts,
        # The same for all rows, so the order of sums is, too.
        searchers=min(4, THREADS // max(ROW_CHOICES)),
        tokens_each=max(1, tile // THREADS),
        row_step=max(1, THREADS // tile),
        v_width=v_width,
        v_tokens=tokens * (WIDTH[v_kind] // v_width),
        v_step=tokens,
        rows_at_once=min(rows, parts // (THREADS * v_width)),
    )


def q_bytes(k_kind: str, dim: int, rows: int, itemsize: int) -> int:
    """Return the shared memory for the query rows of an item."""
    width = WIDTH[k_kind]
    return ceil_div(dim, width) * (rows * width + Q_PAD) * itemsize


class ItemState(NamedTuple):
    """The online softmax of a thread, in registers: each query row's maximum and weighted V, and sums of some rows."""

    maxima: Any
    totals: Any  #: of the tokens and rows that the thread takes in the softmax
    sums: Any  #: [column, row, element of the chunk]


class Places(NamedTuple):
    """The places of the tokens of two KV tiles, this one and the next, in shared memory."""

    blocks: Any  #: -1 for tokens that do not count
    offsets: Any
    k_rows: Any  #: addresses of rows, where these are read by address
    v_rows: Any
    lost: Any  #: whether a block of the item lies outside the pool


class VTeam(NamedTuple):
    """A thread's place in the teams that read V rows, which have a lane for each chunk, unlike K's."""

    lane: Any
    team: Any
    lanes: Any
    teams: Any
    chunks: Any  #: of a V row


def by_address(name, wide):
    """Return whether rows are read by address: not if words have several elements or scales are by channel."""
    return wide and not kind(name).is_packed and not kind(name).group_tokens


def _float(COMPUTE):
    return np.float32 if COMPUTE == "float32" else np.float64


def make_load_queries(Q_KIND, K_KIND, COMPUTE, SIZES):
    """Make the function that stores an item's query rows in shared memory, scaled, also by the scale of K's head."""
    F, ROWS, K_WIDTH, Q_STEP = _float(COMPUTE), SIZES.rows, SIZES.k_width, SIZES.q_step
    BY_HEAD = kind(K_KIND).scales_per == "head"
    load, _ = codec(Q_KIND, COMPUTE)
    column = column_of(K_KIND, K_WIDTH)

    @register_jitable
    def load_queries(q, rows, item, scale, k_scale, q_rows, thread):
        dim = q.shape[2]
        if BY_HEAD:
            scale *= F(k_scale[item.head])
        chunks = (dim + K_WIDTH - 1) // K_WIDTH
        i = thread
        while i < chunks * K_WIDTH:
            c, e = i // K_WIDTH, i % K_WIDTH
            d = column(c, e, dim)
            for r in range(ROWS):
                x = F(0)
                if r < item.rows and d < dim:
                    x = scale * load(q[natural(rows.token[r]), natural(rows.head[r]), natural(d)])
                q_rows[c * Q_STEP + r * K_WIDTH + e] = x
            i = natural(i + THREADS)

    return load_queries


def make_scores(K_KIND, COMPUTE, SIZES, WIDE):
    """Make the function that scores a KV tile: each lane of a team stores a part of every dot product in `partial`."""
    F, ROWS, TILE, TOKENS = _float(COMPUTE), SIZES.rows, SIZES.tile, SIZES.tokens
    K_WIDTH, Q_STEP, PART_STEP = SIZES.k_width, SIZES.q_step, SIZES.part_step
    SCORES, TEAMS = ROWS * TOKENS, THREADS // TEAM
    # Elements of the innermost loops, which the compiler unrolls whole; it would not with more.
    K_STEP = min(K_WIDTH, 8)
    read = reader(K_KIND, COMPUTE, K_WIDTH, WIDE)
    ADDRESSED = by_address(K_KIND, WIDE)

    @register_jitable
    def add_products(scores, q_rows, at, floats, first):
        """Add the products of `K_STEP` elements of each token, from the chunk's element `first` on."""
        for n in range(K_STEP):
            e = first + n
            for r in range(ROWS):
                x = q_rows[at + r * K_WIDTH + e]
                for i in range(TOKENS):
                    scores[r * TOKENS + i] = cuda.fma(
                        x, floats[i * K_WIDTH + e], scores[r * TOKENS + i]
                    )

    @register_jitable
    def score_tile(k, k_scale, g, places, at, q_rows, dim, partial, scores, floats, own, thread):
        lane, team = thread % TEAM, thread // TEAM
        chunks = (dim + K_WIDTH - 1) // K_WIDTH
        for i in range(SCORES):
            scores[i] = F(0)
        if ADDRESSED:
            for i in range(TOKENS):
                own[i] = places.k_rows[at + team + i * TEAMS]
        c = lane
        while c < chunks:
            for i in range(TOKENS):
                if ADDRESSED:
                    load_chunk(K_KIND, K_WIDTH, k, own[i], c * K_WIDTH, floats, i * K_WIDTH)
                else:
                    # Tokens that do not count read slot 0: whatever it stores, the score is masked.
                    block = max(places.blocks[at + team + i * TEAMS], 0)
                    offset = places.offsets[at + team + i * TEAMS]
                    read(k, k_scale, block, g, offset, c, floats, i * K_WIDTH)
            add_products(scores, q_rows, c * Q_STEP, floats, 0)
            if K_WIDTH > K_STEP:
                add_products(scores, q_rows, c * Q_STEP, floats, K_STEP)
            c = natural(c + TEAM)
        for r in range(ROWS):
            for i in range(TOKENS):
                partial[lane * PART_STEP + r * TILE + team + i * TEAMS] = scores[r * TOKENS + i]

    return score_tile


def make_mask(K_SCALED, COMPUTE, SIZES, MASKED):
    """Make the function that adds the parts of scores up, caps and masks them."""
    F, ROWS, TILE = _float(COMPUTE), SIZES.rows, SIZES.tile
    PART_STEP, ROW_STEP, TOKENS_EACH = SIZES.part_step, SIZES.row_step, SIZES.tokens_each
    ROWS_EACH = ceil_div(ROWS, ROW_STEP)

    has_gaps, mask_score = make_sight(MASKED, COMPUTE)

    @register_jitable
    def mask_scores(partial, k_factors, soft_cap, ragged, rows, places, at, tile, p, mask, thread):
        for m in range(TOKENS_EACH):
            j = thread % TILE + m * THREADS
            for n in range(ROWS_EACH):
                r = thread // TILE + n * ROW_STEP
                if r < ROWS:
                    score = F(0)
                    for i in range(TEAM):
                        score += partial[i * PART_STEP + r * TILE + j]
                    if K_SCALED:
                        score *= k_factors[m]
                    if soft_cap > F(0):
                        score = soft_cap * F(math.tanh(score / soft_cap))
                        score *= F(LOG2_E)
                    score = mask_score(mask, rows, r, tile + j, score)
                    if ragged:
                        seen = rows.begin[r] <= tile + j and tile + j < rows.end[r]
                        if places.blocks[at + j] < 0 or not seen:
                            score = F(-np.inf)
                    p[j * ROWS + r] = score

    return mask_scores, has_gaps


def make_softmax(V_SCALED, COMPUTE, SIZES):
    """Make the function that turns scores into probabilities relative to the running maxima."""
    F, ROWS, TILE, SEARCHERS = _float(COMPUTE), SIZES.rows, SIZES.tile, SIZES.searchers
    COLUMNS, V_WIDTH = SIZES.columns, SIZES.v_width
    ROW_STEP, TOKENS_EACH = SIZES.row_step, SIZES.tokens_each
    MAXIMA = ROWS * SEARCHERS

    @register_jitable
    def softmax(p, peaks, state, v_factors, v_scales, thread):
        if thread < MAXIMA:
            top = F(-np.inf)
            for n in range(TILE // SEARCHERS):
                j = n * SEARCHERS + thread % SEARCHERS
                top = max(top, p[j * ROWS + thread // SEARCHERS])
            peaks[thread] = top
        cuda.syncthreads()
        for r in range(ROWS):
            top = state.maxima[r]
            for i in range(SEARCHERS):
                top = max(top, peaks[r * SEARCHERS + i])
            # A row that has seen no token keeps its maximum of -inf; subtracting 0 avoids inf - inf.
            base = top if top > F(-np.inf) else F(0)
            shrink = F(math.exp2(state.maxima[r] - base))
            state.maxima[r] = top
            for n in range(COLUMNS):
                for e in range(V_WIDTH):
                    state.sums[(n * ROWS + r) * V_WIDTH + e] *= shrink
            if r % ROW_STEP == thread // TILE:
                for m in range(TOKENS_EACH):
                    j = thread % TILE + m * THREADS
                    weight = F(math.exp2(p[j * ROWS + r] - base))
                    p[j * ROWS + r] = weight
                    # An explicit fma, so that compilers cannot fuse in one place only.
                    grown = cuda.fma(state.totals[r // ROW_STEP], shrink, weight)
                    state.totals[r // ROW_STEP] = grown
                    shrink = F(1)
        for m in range(TOKENS_EACH):
            if V_SCALED and thread < TILE:
                v_scales[thread % TILE + m * THREADS] = v_factors[m]

    return softmax


def make_accumulate(V_KIND, V_SCALED, COMPUTE, SIZES, WIDE):
    """Make the function that adds a KV tile's V rows, weighted, to the sums of each thread."""
    ROWS, COLUMNS, TILE = SIZES.rows, SIZES.columns, SIZES.tile
    V_WIDTH, V_TOKENS, V_STEP = SIZES.v_width, SIZES.v_tokens, SIZES.v_step
    read = reader(V_KIND, COMPUTE, V_WIDTH, WIDE)
    ADDRESSED = by_address(V_KIND, WIDE)

    @register_jitable
    def add_rows(state, n, p, v_scales, j, floats, first):
        """Add the weighted chunks of `V_STEP` rows, from the one of token ``j + first`` on, to column `n`."""
        for r in range(ROWS):
            for m in range(V_STEP):
                i = first + m
                weight = p[(j + i) * ROWS + r]
                if V_SCALED:
                    weight *= v_scales[j + i]
                for e in range(V_WIDTH):
                    s = (n * ROWS + r) * V_WIDTH + e
                    state.sums[s] = cuda.fma(weight, floats[i * V_WIDTH + e], state.sums[s])

    @register_jitable
    def add_visible(state, n, p, v_scales, j, floats):
        """Add the weighted chunk of token `j` to the sums of those rows that see it."""
        for r in range(ROWS):
            weight = p[j * ROWS + r]
            if weight != 0:
                if V_SCALED:
                    weight *= v_scales[j]
                for e in range(V_WIDTH):
                    s = (n * ROWS + r) * V_WIDTH + e
                    state.sums[s] = cuda.fma(weight, floats[e], state.sums[s])

    @register_jitable
    def accumulate(v, v_scale, g, places, at, ragged, p, v_scales, state, floats, own):
        j = natural(own.team * V_TOKENS if own.team < own.teams else np.int64(TILE))
        while j < TILE:
            for n in range(COLUMNS):
                # Threads beyond the last chunk read it too; their sums are ignored.
                c = min(own.lane + n * THREADS, own.chunks - 1)
                if ragged:
                    # Not all rows see all of these tokens, and a weight of 0 would not hide a NaN.
                    for i in range(V_TOKENS):
                        block, offset = places.blocks[at + j + i], places.offsets[at + j + i]
                        if block >= 0:
                            read(v, v_scale, block, g, offset, c, floats, 0)
                            add_visible(state, n, p, v_scales, j + i, floats)
                else:
                    for i in range(V_TOKENS):
                        if ADDRESSED:
                            row = places.v_rows[at + j + i]
                            load_chunk(V_KIND, V_WIDTH, v, row, c * V_WIDTH, floats, i * V_WIDTH)
                        else:
                            block, offset = places.blocks[at + j + i], places.offsets[at + j + i]
                            read(v, v_scale, block, g, offset, c, floats, i * V_WIDTH)
                    add_rows(state, n, p, v_scales, j, floats, 0)
                    if V_TOKENS > V_STEP:
                        add_rows(state, n, p, v_scales, j, floats, V_STEP)
            j = natural(j + own.teams * V_TOKENS)

    return accumulate


def make_store(Q_KIND, V_KIND, COMPUTE, SIZES):
    """Make the functions that add up over the teams, normalise, and store rows or a split's parts of them."""
    F = _float(COMPUTE)
    ROWS, COLUMNS, V_WIDTH = SIZES.rows, SIZES.columns, SIZES.v_width
    ROWS_AT_ONCE, BY_HEAD = SIZES.rows_at_once, kind(V_KIND).scales_per == "head"
    TILE, ROW_STEP, ROWS_EACH = SIZES.tile, SIZES.row_step, ceil_div(SIZES.rows, SIZES.row_step)
    SEARCHERS = SIZES.searchers
    MAXIMA, OWN_TOKENS = ROWS * SEARCHERS, min(SIZES.tile, THREADS)
    _, store = codec(Q_KIND, COMPUTE)
    column = column_of(V_KIND, V_WIDTH)

    @register_jitable
    def store_totals(
        state, item, rows, v_scale, sinks, lse, parts, p, peaks, tops, factors, thread
    ):
        """Store each row's log of its sum of exponentials, and the factors of its sums."""
        dim = parts.shape[3] - PART_EXTRA  # padded
        if thread == 0:
            for r in range(ROWS):
                tops[r] = state.maxima[r]
        for n in range(ROWS_EACH):
            r = thread // TILE + n * ROW_STEP
            if r < ROWS and thread // TILE < ROW_STEP:
                p[(thread % TILE) * ROWS + r] = state.totals[n]
        cuda.syncthreads()
        if thread < MAXIMA:
            total = F(0)
            for n in range(OWN_TOKENS // SEARCHERS):
                j = n * SEARCHERS + thread % SEARCHERS
                total += p[j * ROWS + thread // SEARCHERS]
            peaks[thread] = total
        cuda.syncthreads()
        if thread < item.rows:
            h = natural(rows.head[thread])
            total = F(0)
            for i in range(SEARCHERS):
                total += peaks[thread * SEARCHERS + i]
            if item.splits > 1:
                factors[thread] = F(1)
                parts[0, 0, rows.part[thread] + item.split, dim] = tops[thread]
                parts[0, 0, rows.part[thread] + item.split, dim + 1] = total
            else:
                sink = F(sinks[h]) * F(LOG2_E) if sinks.shape[0] > 0 else F(-np.inf)
                factor, log_sum = finish(tops[thread], total, sink, F(LN_2))
                factors[thread] = F(factor)
                if lse.shape[0] > 0:
                    lse[rows.token[thread], h] = log_sum
            if BY_HEAD:
                factors[thread] *= F(v_scale[item.head])

    @register_jitable
    def store_rows(state, item, rows, out, parts, partial, factors, own, thread):
        """Store the rows' weighted sums of V: the result, or a split's part of it."""
        dim = out.shape[2]
        for n in range(COLUMNS):
            for r0 in range(0, ROWS, ROWS_AT_ONCE):
                if n + r0 > 0:
                    cuda.syncthreads()
                for i in range(ROWS_AT_ONCE):
                    for e in range(V_WIDTH):
                        if r0 + i < ROWS:
                            partial[(i * V_WIDTH + e) * THREADS + thread] = state.sums[
                                (n * ROWS + r0 + i) * V_WIDTH + e
                            ]
                cuda.syncthreads()
                i = own.team if own.team < own.teams else np.int64(ROWS_AT_ONCE * V_WIDTH)
                while i < ROWS_AT_ONCE * V_WIDTH:
                    r = natural(r0 + i // V_WIDTH)
                    d = column(own.lane + n * THREADS, i % V_WIDTH, dim)
                    if r < item.rows and d < dim:
                        x = F(0)
                        m = natural(own.lane)
                        while m < own.teams * own.lanes:
                            x += partial[i * THREADS + m]
                            m = natural(m + own.lanes)
                        x *= factors[r]
                        if item.splits > 1:
                            parts[0, 0, natural(rows.part[r] + item.split), natural(d)] = x
                        else:
                            out[natural(rows.token[r]), natural(rows.head[r]), natural(d)] = store(
                                x
                            )
                    i = natural(i + own.teams)

    return store_totals, store_rows


def make_read_factors(K_SCALED, V_SCALED, COMPUTE, SIZES):
    """Make the function that reads the scales of a thread's tokens in the softmax."""
    F, TILE, TOKENS_EACH = _float(COMPUTE), SIZES.tile, SIZES.tokens_each

    @register_jitable
    def read_factors(k_scale, v_scale, g, places, at, k_factors, v_factors, thread):
        if K_SCALED or V_SCALED:
            for m in range(TOKENS_EACH):
                j = thread % TILE + m * THREADS
                k_factors[m], v_factors[m] = F(0), F(0)
                block, offset = places.blocks[at + j], places.offsets[at + j]
                if block >= 0:
                    if K_SCALED:
                        k_factors[m] = F(k_scale[block, g, offset])
                    if V_SCALED:
                        v_factors[m] = F(v_scale[block, g, offset])

    return read_factors


def make_locate_rows(K_KIND, V_KIND, SIZES, WIDE):
    """Make the function that looks up the places of a KV tile's tokens, and the addresses of their rows."""
    TILE, ROUNDS = SIZES.tile, SIZES.tokens_each
    K_ADDRESSED, V_ADDRESSED = by_address(K_KIND, WIDE), by_address(V_KIND, WIDE)
    locate = make_locate(TILE)

    @register_jitable
    def locate_rows(places, block_table, by_slot, shift, k, v, item, tile, thread):
        locate(places, block_table, by_slot, shift, k, item, tile, thread)
        for n in range(ROUNDS):
            if thread + n * THREADS < TILE:
                at = (tile & TILE) + thread + n * THREADS
                # Tokens that do not count read slot 0: their scores are masked, and their V rows are never added.
                block = natural(max(places.blocks[at], np.int32(0)))
                offset = natural(places.offsets[at])
                if K_ADDRESSED:
                    places.k_rows[at] = row_address(k, block, item.head, offset)
                if V_ADDRESSED:
                    places.v_rows[at] = row_address(v, block, item.head, offset)

    return locate_rows


@register_jitable
def v_team(thread, dim_v, V_WIDTH, TILE):
    """A thread's place in the teams that read V rows."""
    chunks = (dim_v + V_WIDTH - 1) // V_WIDTH
    lanes = natural(min(chunks, THREADS))
    teams = natural(min(THREADS // lanes, TILE))
    return VTeam(natural(thread % lanes), natural(thread // lanes), lanes, teams, chunks)


def make_attention(Q_KIND, K_KIND, V_KIND, COMPUTE, ROWS, COLUMNS, WIDE, MASKED=False):
    """The attention kernel.

    Parameters
    ----------
    Q_KIND, K_KIND, V_KIND, COMPUTE : str
        Kinds of q and the output, of K and of V, and the float type that it computes in.
    ROWS : int
        Query rows of an item.
    COLUMNS : int
        Chunks of an output row that a thread computes; 1 unless the head dim is huge.
    WIDE, MASKED : bool
        Whether all rows of K and V can be read in chunks of 16 bytes; whether `ranges` are rows of `numkv.rows.mask`.
    """
    F, REAL = _float(COMPUTE), getattr(types, COMPUTE)
    SIZES = sizes_of(K_KIND, V_KIND, COMPUTE, ROWS, COLUMNS)
    TILE, V_WIDTH, TOKENS_EACH = SIZES.tile, SIZES.v_width, SIZES.tokens_each
    K_SCALED, V_SCALED = (kind(name).scales_per == "row" for name in (K_KIND, V_KIND))
    PARTS, PROBABILITIES, PLACES = SIZES.parts, ROWS * TILE, 2 * TILE
    MAXIMA, V_SCALES = ROWS * SIZES.searchers, TILE if V_SCALED else 1
    K_PLACES, V_PLACES = (PLACES if by_address(name, WIDE) else 1 for name in (K_KIND, V_KIND))
    TOTALS, TOKENS = ceil_div(ROWS, SIZES.row_step), SIZES.tokens
    SCORES, K_FLOATS = ROWS * SIZES.tokens, SIZES.tokens * SIZES.k_width
    V_FLOATS, SUMS = SIZES.v_tokens * V_WIDTH, COLUMNS * ROWS * V_WIDTH
    count_items, add_counts, items_before, put_item, find_item, describe_rows = make_items(ROWS)
    locate_rows = make_locate_rows(K_KIND, V_KIND, SIZES, WIDE)
    load_queries = make_load_queries(Q_KIND, K_KIND, COMPUTE, SIZES)
    read_factors = make_read_factors(K_SCALED, V_SCALED, COMPUTE, SIZES)
    score_tile = make_scores(K_KIND, COMPUTE, SIZES, WIDE)
    mask_scores, has_gaps = make_mask(K_SCALED, COMPUTE, SIZES, MASKED)
    softmax = make_softmax(V_SCALED, COMPUTE, SIZES)
    accumulate = make_accumulate(V_KIND, V_SCALED, COMPUTE, SIZES, WIDE)
    store_totals, store_rows = make_store(Q_KIND, V_KIND, COMPUTE, SIZES)

    def kernel(
        q, k, k_scale, v, v_scale, block_table, seq_lens, q_starts, ranges, options, sinks, out, lse,
        parts,
    ):  # fmt: skip
        by_slot, shift, _, _, _, _, _, _, scale, soft_cap = options
        batch = batch_of(q, k, block_table, seq_lens, q_starts, ranges, options)
        thread = natural(cuda.threadIdx.x)
        own = v_team(thread, out.shape[2], V_WIDTH, TILE)
        mask = Mask(ranges, sinks, q.shape[1])

        q_rows = cuda.shared.array(0, REAL)  # [chunk, row, element of the chunk]
        partial = cuda.shared.array(PARTS, F)
        if SIMULATED:
            p = cuda.shared.array(PROBABILITIES, F)  # [token, row]: scores, then probabilities
            peaks = cuda.shared.array(MAXIMA, F)
        else:  # so that several are read at once
            p = cuda.shared.array(PROBABILITIES, F, alignment=16)
            peaks = cuda.shared.array(MAXIMA, F, alignment=16)
        tops = cuda.shared.array(ROWS, F)
        factors = cuda.shared.array(ROWS, F)
        v_scales = cuda.shared.array(V_SCALES, F)  # of the tile's tokens
        counts = cuda.shared.array(COUNTS, np.int32)
        found = cuda.shared.array(FIELDS, np.int32)
        row_token = cuda.shared.array(ROWS, np.int64)
        row_head = cuda.shared.array(ROWS, np.int64)
        row_begin = cuda.shared.array(ROWS, np.int64)
        row_end = cuda.shared.array(ROWS, np.int64)
        row_part = cuda.shared.array(ROWS, np.int64)
        rows = ItemRows(row_token, row_head, row_begin, row_end, row_part)
        blocks = cuda.shared.array(PLACES, np.int32)
        offsets = cuda.shared.array(PLACES, np.int32)
        lost = cuda.shared.array(1, np.int32)
        k_rows = cuda.shared.array(K_PLACES, np.int64)
        v_rows = cuda.shared.array(V_PLACES, np.int64)
        places = Places(blocks, offsets, k_rows, v_rows, lost)

        scores = cuda.local.array(SCORES, F)
        k_floats = cuda.local.array(K_FLOATS, F)
        v_floats = cuda.local.array(V_FLOATS, F)
        k_factors = cuda.local.array(TOKENS_EACH, F)
        v_factors = cuda.local.array(TOKENS_EACH, F)
        maxima = cuda.local.array(ROWS, F)
        totals = cuda.local.array(TOTALS, F)
        own_rows = cuda.local.array(TOKENS, np.int64)
        sums = cuda.local.array(SUMS, F)
        state = ItemState(maxima, totals, sums)

        count = count_items(batch, counts, thread)
        cuda.syncthreads()
        add_counts(counts, thread)
        cuda.syncthreads()
        before, items = items_before(batch, counts, count, thread)
        for number in range(np.int64(cuda.blockIdx.x), items, np.int64(cuda.gridDim.x)):
            put_item(batch, number, before, count, found, thread)
            if thread == 0:
                lost[0] = 0
            cuda.syncthreads()
            item = find_item(found)
            g, tile = item.head, item.begin - item.begin % TILE
            describe_rows(batch, item, rows, thread)
            locate_rows(places, block_table, by_slot, shift, k, v, item, tile, thread)
            cuda.syncthreads()
            load_queries(q, rows, item, scale, k_scale, q_rows, thread)
            for r in range(ROWS):
                maxima[r] = F(-np.inf)
            for i in range(TOTALS):
                totals[i] = F(0)
            for i in range(SUMS):
                sums[i] = F(0)
            cuda.syncthreads()
            while tile < item.end:
                at = tile & TILE
                ragged = tile < item.all_begin or tile + TILE > item.all_end or lost[0] != 0
                ragged = ragged or has_gaps(mask, rows, tile + TILE)
                # On their way while K is read.
                read_factors(k_scale, v_scale, g, places, at, k_factors, v_factors, thread)
                score_tile(
                    k, k_scale, g, places, at, q_rows, q.shape[2], partial, scores, k_floats, own_rows, thread
                )  # fmt: skip
                cuda.syncthreads()
                mask_scores(partial, k_factors, soft_cap, ragged, rows, places, at, tile, p, mask, thread)  # fmt: skip
                # The places of the next tile's tokens; all threads are done with the tile before this one.
                locate_rows(places, block_table, by_slot, shift, k, v, item, tile + TILE, thread)
                cuda.syncthreads()
                softmax(p, peaks, state, v_factors, v_scales, thread)
                cuda.syncthreads()
                accumulate(v, v_scale, g, places, at, ragged, p, v_scales, state, v_floats, own)
                tile += TILE
            cuda.syncthreads()
            store_totals(
                state, item, rows, v_scale, sinks, lse, parts, p, peaks, tops, factors, thread
            )  # fmt: skip
            store_rows(state, item, rows, out, parts, partial, factors, own, thread)

    return kernel
