"""Operations of small calls: K and V, and the checks, in one compiled function; a part of `numkv.kernels.operations`.

What one token costs is the call, and checks in Python cost more than the token. A target that gains nothing by such
functions has none.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any


class Checks(enum.IntEnum):
    """What a compiled function is to check before it writes."""

    CHECKED = 0
    """Nothing: the caller has checked all."""
    LOOK = 1
    """That the arguments fit one another."""
    LOOK_FOR_NAN = 2
    """That, and that what is to be quantised holds neither NaN nor infinity."""


class SmallCalls:
    """Functions for small calls; each is made once, for kinds, and called many times."""

    @staticmethod
    def small_append(rows_kind: str, pool_kind: str, by_slot: bool) -> Callable[..., int] | None:
        """The function that appends K and V of a small call, checks included.

        Parameters
        ----------
        rows_kind, pool_kind : str
            Kinds of new rows and of pools, the same for K and V.
        by_slot : bool
            Whether the place of each token is given; else a block table and the first token's position.

        Returns
        -------
        callable or None
            ``append(k, v, k_pool, v_pool, k_scale, v_scale, places, start, room, look) -> int``: tokens written, or
            -1, with nothing written, where anything is not as it should be; the general way then does it, or says
            what is wrong. Arrays of another type or rank raise ``TypeError``, with nothing written either. `places`
            are int64 slots, or the int32 block table of one sequence, whose first new token has position `start` and
            which has room for `room` more; `look` says whether rows that are to be quantised are searched for NaN and
            infinity. None where the target has no such way.
        """
        raise NotImplementedError

    @staticmethod
    def small_copy(rows_kind: str) -> Callable[..., bool] | None:
        """The function that copies new rows of K and V of a small call into contiguous caches, checks included.

        Parameters
        ----------
        rows_kind : str
            Float kind of rows and caches.

        Returns
        -------
        callable or None
            ``copy(k_new, v_new, k_cache, v_cache, offsets) -> bool``: whether all was as it should be, and was done.
            See `small_append`.
        """
        raise NotImplementedError

    @staticmethod
    def small_write(
        qkv_kind: str, k_kind: str, v_kind: str, compute: Any, table: Any, by_slot: bool
    ) -> Callable[..., int] | None:
        """The function that does the fused write of a small call, checks included.

        Parameters
        ----------
        qkv_kind, k_kind, v_kind : str
            Kinds of projections and pools.
        compute, table : numpy.dtype
            What is computed in, and dtype of the tables of angles.
        by_slot : bool
            See `small_append`.

        Returns
        -------
        callable or None
            ``write(qkv, cos, sin, normalise, rotate, interleaved, q_weight, k_weight, eps, angles, first_angle, q_out,
            k_pool, k_scale, v_pool, v_scale, places, start, room, checks, 0, 0, 1) -> int``; see `write_rows` and
            `small_append`. `checks` is one of `Checks`; the last three say that it runs on this thread.
        """
        raise NotImplementedError

    @staticmethod
    def small_decode(q_kind: str, k_kind: str, v_kind: str) -> Callable[..., Any] | None:
        """The function that attends with one query token over one sequence which is not split.

        Parameters
        ----------
        q_kind : str
            Kind of queries and output.
        k_kind, v_kind : str
            Kinds of pools.

        Returns
        -------
        callable or None
            ``decode(q, k, k_scale, v, v_scale, block_table, seq_lens, length, dim_v, scale) -> array or None``: the
            output, in words like those of `q`, or None, with nothing done, where the sequence is empty or long.
            `length` is what `seq_lens` has. All has been checked; see `Operations.attend`. There is neither a window, a
            cap nor a sink. None where the target has no such way.
        """
        raise NotImplementedError

    @staticmethod
    def append_attend(
        q_kind: str, rows_kind: str, k_kind: str, v_kind: str, by_address: bool = False
    ) -> Any:
        """The function that writes new rows of K and V and attends with the queries of their tokens, checks included.

        Parameters
        ----------
        q_kind, rows_kind : str
            Kinds of queries and output, and of new rows.
        k_kind, v_kind : str
            Kinds of pools.
        by_address : bool
            Whether calls bring addresses in place of arrays: of rows without gaps, of the sizes that the step has.

        Returns
        -------
        object or None
            A `numkv.kernels.cpu.attention.bound.BoundKernel`. None where the target has no such way.
        """
        raise NotImplementedError
