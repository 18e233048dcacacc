"""Partial results of columns, merged in the order of columns: whichever comes first, the result is the same."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.attention import merge_states


class Partial(NamedTuple):
    """Attention over the tokens of one column."""

    rows: NDArray[np.int64] | None
    """Of which queries; None: of all."""
    out: NDArray[Any]
    lse: NDArray[np.float32] | None


def merged(
    parts: list[Partial], shape: tuple[int, ...], dtype: Any, sinks: Any, whole: bool
) -> tuple[NDArray[Any], Any]:
    """Merge what columns return.

    Parameters
    ----------
    parts : list of Partial
        In the order of columns.
    shape : tuple of int
        Of the result.
    dtype : dtype
        Of the result.
    sinks : array (num_q_heads,), optional
        Logits that take part without a value; they are no column's.
    whole : bool
        Whether there is one column, whose result stays as it is.

    Returns
    -------
    out : array
    lse : float32 array or None
    """
    if whole and parts:
        return np.array(parts[0].out), parts[0].lse
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    out: Any = np.zeros(shape, wide)
    lse: Any = np.full(shape[:2], -np.inf, np.float32)
    if not shape[0]:
        return out.astype(dtype), lse
    for part in parts:
        assert part.lse is not None
        own = np.asarray(part.out, wide)
        if part.rows is None or len(part.rows) == shape[0]:
            out, lse = merge_states(out, lse, own, part.lse)
        else:
            out[part.rows], lse[part.rows] = merge_states(
                out[part.rows], lse[part.rows], own, part.lse
            )
    if sinks is not None:
        of_sinks = np.broadcast_to(np.asarray(sinks, np.float32), shape[:2])
        out, lse = merge_states(out, lse, np.zeros_like(out), np.ascontiguousarray(of_sinks))
    return out.astype(dtype), lse
