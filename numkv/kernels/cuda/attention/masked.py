"""What gaps and biases change in the attention kernel on CUDA: scores of a KV tile. See `numkv.rows.mask`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

from numkv.kernels.cuda.attention.splits import LOG2_E
from numkv.rows.mask import COLUMNS, PLAIN_END, POSITION, is_seen, position_of


class Mask(NamedTuple):
    """What a masked call has beside the rest."""

    rows: Any  #: of `numkv.rows.mask`
    heads: Any  #: sinks and slopes of q heads
    num_q_heads: Any


def make_sight(MASKED, COMPUTE):
    """``has_gaps(mask, rows, end)`` and ``mask_score(mask, rows, r, token, score)``; if not `MASKED` they do nothing.

    The first says whether some rows of an item may not see all tokens before `end` that others see. The second is a
    score with its bias, and -inf for a token in a gap of what row `r` of the item sees.
    """
    F = np.float32 if COMPUTE == "float32" else np.float64
    TO_BASE_2 = LOG2_E

    @register_jitable
    def has_gaps(mask, rows, end):
        return mask.rows.shape[1] > COLUMNS and end > mask.rows[rows.token[0], PLAIN_END]

    @register_jitable
    def mask_score(mask, rows, r, token, score):
        query = rows.token[r]
        if token < rows.begin[r] or token >= rows.end[r]:
            return F(-np.inf)
        if mask.rows.shape[1] > COLUMNS and not is_seen(mask.rows, query, token):
            return F(-np.inf)
        if mask.heads.shape[0] > mask.num_q_heads:
            slope = F(mask.heads[mask.num_q_heads + rows.head[r]]) * F(TO_BASE_2)
            position = token
            if mask.rows.shape[1] > COLUMNS:
                position = position_of(mask.rows, query, token)
            score -= slope * F(abs(mask.rows[query, POSITION] - position))
        return score

    @register_jitable
    def has_none(mask, rows, end):
        return False

    @register_jitable
    def leave(mask, rows, r, token, score):
        return score

    return (has_gaps, mask_score) if MASKED else (has_none, leave)
