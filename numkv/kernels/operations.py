"""Operations: the interface of kernels, the same on every target, with each name, parameters and docstring once.

A file of kernels marks a host function by `implements`; `load` gathers what the files of a target implement. The files
have the same names under every target.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np

from numkv.arrays import Array

#: New rows, their kind, the pool that they go to, its kind, and its scales.
Side = tuple[Array, str, Array, str, Array]


class Operations(Protocol):
    """The operations of a target; see `numkv.targets.Target.ops`.

    Arrays are the target's own, and hold words: 16-bit floats as ``uint16``, INT4 codes two to a ``uint8``. Arguments
    have been checked by the caller.
    """

    @staticmethod
    def append_rows(
        rows: Array,
        rows_kind: str,
        pool: Array,
        pool_kind: str,
        scale: Array,
        block_table: Array,
        start: int,
    ) -> None:
        """Append the rows of one sequence.

        Parameters
        ----------
        rows : array (num_tokens, num_kv_heads, head_dim)
            New K or V rows, in the words of `rows_kind`.
        rows_kind : str
            Their kind.
        pool : array (num_blocks, num_kv_heads, block_size, head_dim)
            Where they go, in the words of `pool_kind`; of INT4 ``head_dim / 2`` of them.
        pool_kind : str
            Its kind.
        scale : array
            Scales of a quantised pool, float32 ``(num_blocks, num_kv_heads, block_size)``, of INT4 words with an axis
            of groups more; of a float pool an empty array.
        block_table : int32 array (max_blocks,)
            The sequence's blocks.
        start : int
            Position of the first new token.
        """

    @staticmethod
    def append_both(k: Side, v: Side, block_table: Array, start: int, look: int = 0) -> None:
        """Append the rows of K and V of one sequence: `append_rows` of each, on CUDA in one launch.

        Parameters
        ----------
        k, v : tuple
            Of each `rows`, `rows_kind`, `pool`, `pool_kind` and `scale`, as `append_rows` takes them.
        block_table, start
            See `append_rows`.
        look : int
            On CUDA a number of `numkv.kernels.cuda.late`, or 0. Rows to be quantised that have NaN or infinity are
            stored as zeros, and reported under this number. On the CPU the callers check.
        """

    @staticmethod
    def scatter_both(k: Side, v: Side, slot_mapping: Array, look: int = 0) -> None:
        """Put each row of K and V into its slot: `scatter_rows` of each, on CUDA in one launch.

        Parameters
        ----------
        k, v, look
            See `append_both`.
        slot_mapping
            See `scatter_rows`.
        """

    @staticmethod
    def copy_both(
        k_new: Array, k_cache: Array, v_new: Array, v_cache: Array, offsets: Array
    ) -> None:
        """Copy rows of K and V into caches: `copy_rows` of each, on CUDA in one launch.

        Parameters
        ----------
        k_new, k_cache
            See `copy_rows`.
        v_new, v_cache
            The same of V, in words as wide.
        offsets
            See `copy_rows`.
        """

    @staticmethod
    def copy_rows(new: Array, cache: Array, offsets: Array) -> None:
        """Copy rows into a cache at an offset per sequence; rows outside the cache are skipped.

        Parameters
        ----------
        new : array (batch, num_heads, new_len, head_dim)
            Rows, in words (int8, uint16, float32 or float64) that are copied bit by bit.
        cache : array (batch, num_heads, max_cache_len, head_dim)
            The cache, in the same words.
        offsets : int64 array (batch,)
            Row of each sequence that its first new row goes to; any value.
        """

    @staticmethod
    def scatter_rows(
        rows: Array, rows_kind: str, pool: Array, pool_kind: str, scale: Array, slot_mapping: Array
    ) -> None:
        """Put each row into its slot.

        Parameters
        ----------
        rows : array (num_tokens, num_kv_heads, head_dim)
            K or V rows, in the words of `rows_kind`.
        rows_kind : str
            Their kind.
        pool : array (num_blocks, num_kv_heads, block_size, head_dim)
            Where they go, in the words of `pool_kind`; of INT4 ``head_dim / 2`` of them.
        pool_kind : str
            Its kind.
        scale : array
            Scales of a quantised pool, float32 ``(num_blocks, num_kv_heads, block_size)``, of INT4 words with an axis
            of groups more; of a float pool an empty array.
        slot_mapping : int64 array (num_tokens,)
            ``block * block_size + offset`` of each row; -1 skips it, as does, on CUDA, any slot outside the pool.
        """

    @staticmethod
    def fill_mask(
        seq_lens: Array,
        q_starts: Array,
        ranges: Array,
        bits: Array,
        causal: int,
        window_left: int,
        first: int,
        capacity: int,
        sinks: Array,
        slopes: Array,
        rows: Array,
        heads: Array,
    ) -> None:
        """Write the masks of queries, and numbers of q heads, for `attend`.

        Parameters
        ----------
        seq_lens : int64 array (num_seqs,)
            Tokens in the cache; at most `capacity` of them count.
        q_starts : int64 array (num_seqs + 1,)
            Where each sequence's queries start.
        ranges : int64 array (num_tokens, 2) or (0, 2)
            Tokens ``[low, high)`` that each query sees, any numbers; cut to the sequence's length. Empty for none.
        bits : uint32 array (num_tokens, words) or (0, 0)
            The newest tokens of its sequence that each query sees; there are as many as queries. Bit i of word w is
            token ``32 * w + i`` of them. Empty for none.
        causal : int
            Whether queries see no later tokens, if neither of these is passed: 0 or 1.
        window_left : int
            Earlier tokens that a query sees; -1 for all, and with `ranges`.
        first : int
            The first token that any query sees; 0 with `ranges` and `bits`.
        capacity : int
            Tokens for which a sequence has room.
        sinks, slopes : array (num_q_heads,) or (0,)
            Extra scores in the denominator, and slopes of biases, in the float type that attention computes in.
        rows : int64 array (num_tokens, 2) or (num_tokens, 4 + words)
            Takes ranges, or rows of `numkv.rows.mask`.
        heads : array (2 * num_q_heads,) or (0,)
            Takes sinks, or -inf where there are none, and slopes.
        """

    @staticmethod
    def attend(
        q: Array,
        q_kind: str,
        k: Array,
        k_kind: str,
        k_scale: Array,
        v: Array,
        v_kind: str,
        v_scale: Array,
        block_table: Array,
        seq_lens: Array,
        q_starts: Array,
        ranges: Array,
        by_slot: int,
        sm_scale: float,
        logits_soft_cap: float,
        window_left: int,
        sinks: Array,
        out: Array,
        lse: Array,
    ) -> None:
        """Attend over a paged pool.

        Parameters
        ----------
        q : array (num_tokens, num_q_heads, head_dim)
            Query rows of all sequences, in the words of `q_kind`.
        q_kind : str
            Their kind.
        k, v : array (num_blocks, num_kv_heads, block_size, head_dim)
            Pools, in their kinds' words.
        k_kind, v_kind : str
            Names of their kinds.
        k_scale, v_scale : array
            Scales of quantised pools, float32 ``(num_blocks, num_kv_heads, block_size)``; for INT4 words, with an axis
            of groups more. 8-bit floats have float32 ``(num_kv_heads,)``, other float pools empty arrays.
        block_table : int32 array (num_seqs, max_blocks)
            Physical block of each logical block; with `by_slot`, the slot of each token, ``block * block_size +
            offset``. Entries before the first and after the last token that a query of the sequence sees are never
            looked up.
        seq_lens : int64 array (num_seqs,)
            Tokens in the cache, the queries' own included. Not used with `ranges`.
        q_starts : int64 array (num_seqs + 1,)
            Where each sequence's queries start.
        ranges : int64 array (num_tokens, 2) or (0, 2)
            Tokens ``[low, high)`` of its sequence that each query sees, in place of causality and the window. They end
            with the row of `block_table`. An empty range gives 0 and -inf (with a sink: the sink). Empty for none. Or
            rows of `numkv.rows.mask`, of more numbers, from `fill_mask`: then special kernels handle gaps and biases.
        by_slot : int
            Whether `block_table` holds slots: 0 or 1.
        sm_scale, logits_soft_cap : float
            Scale of the scores; their cap, or 0.
        window_left : int
            Earlier tokens that a query sees; -1 for all, and with `ranges`.
        sinks : array (num_q_heads,) or (0,)
            Extra scores in the denominator: float64 if any of the kinds is fp64, else float32. With rows of a mask
            perhaps ``(2 * num_q_heads,)``: sinks, or -inf for none, and slopes of q heads. Then a slope times the
            distance of token and query is taken from each score, after the cap.
        out : array (num_tokens, num_q_heads, head_dim_v)
            Result, in the words of `q_kind`.
        lse : float32 array (num_tokens, num_q_heads)
            Log of the sum of exponentials; on CUDA ``(0, 0)`` if it is not asked for.
        """

    @staticmethod
    def copy_blocks(source: Array, source_ids: Array, to: Array, to_ids: Array) -> None:
        """Copy blocks.

        Parameters
        ----------
        source, to : array (num_blocks, ...)
            Buffers of the same dtype whose blocks have the same shape; they may be one. K, V or scales.
        source_ids, to_ids : int32 array (n,)
            Which blocks, and where they go. No block of `to_ids` is among `source_ids` where the buffers are one.
        """

    @staticmethod
    def copy_tokens(source: Array, source_slots: Array, to: Array, to_slots: Array) -> None:
        """Copy the rows of tokens, of all heads, pair by pair.

        Parameters
        ----------
        source, to : array (num_blocks, num_kv_heads, block_size, head_dim) or (num_blocks, num_kv_heads, block_size)
            Buffers of the same dtype, heads and head dim; they may be one array. K, V or scales.
        source_slots, to_slots : int64 array (n,)
            ``block * block_size + offset`` of each token, and of where it goes; no slot is written to twice. Where the
            buffers are one, no pair writes to a slot that a later pair reads.
        """

    @staticmethod
    def quantise_groups(
        rows: Array,
        rows_kind: str,
        groups: Array,
        pool: Array,
        pool_kind: str,
        scale: Array,
        to_groups: Array,
    ) -> None:
        """Quantise token groups of 64 tokens by channel: see `numkv.rows.channel`.

        Parameters
        ----------
        rows : array (num_blocks, num_kv_heads, block_size, head_dim)
            Blocks of rows, in the words of `rows_kind`; their block size is a multiple of 64.
        rows_kind : str
            Their kind, a float kind.
        groups : int64 array (n,)
            Which token groups: ``block * (block_size // 64) + number`` of each.
        pool : array (num_blocks, num_kv_heads, block_size, words)
            Takes the codes, in the words of `pool_kind`.
        pool_kind : str
            Its kind, one whose scales belong to channels.
        scale : array (num_blocks, num_kv_heads, block_size // 64, 2 * head_dim)
            Takes scales and zero points, in words.
        to_groups : int64 array (n,)
            Where each goes, counted as `groups`; none comes twice. On CUDA groups outside of either are skipped.
        """

    @staticmethod
    def first_non_finite(rows: Array, kind: str) -> int:
        """Find the first element that is NaN or infinite; on CUDA this waits for the device.

        Parameters
        ----------
        rows : array (num_tokens, num_heads, head_dim)
            Rows, in the words of `kind`.
        kind : str
            Their kind.

        Returns
        -------
        int
            Its flat index, or -1.
        """

    @staticmethod
    def rotate_rows(
        x: Array, x_kind: str, signs: Array, inverse: bool, out: Array, out_kind: str
    ) -> None:
        """Rotate rows, or rotate them back.

        Parameters
        ----------
        x : array (num_tokens, num_heads, head_dim)
            Rows, in the words of `x_kind`; on CUDA one row as floats fits 48 KiB.
        x_kind : str
            Their float kind.
        signs : float32 array (head_dim,)
            1 or -1 for each element.
        inverse : bool
            Whether to turn back.
        out : array (num_tokens, num_heads, head_dim)
            Takes the rows, in the words of `out_kind`; it may be `x` itself. The arithmetic is float32, or float64
            where either kind is fp64, and is rounded into `out_kind` once (from float64 to 16 bits by way of float32).
        out_kind : str
            Its float kind.
        """

    @staticmethod
    def attention_weights(
        q: Array,
        q_kind: str,
        k: Array,
        k_kind: str,
        k_scale: Array,
        block_table: Array,
        seq_lens: Array,
        q_starts: Array,
        ranges: Array,
        by_slot: int,
        lse: Array,
        sm_scale: float,
        logits_soft_cap: float,
        window_left: int,
        weights: Array,
    ) -> None:
        """Sum up the attention that each cached token gets; in float32, whatever the kinds.

        Parameters
        ----------
        q : array (num_tokens, num_q_heads, head_dim)
            Query rows of all sequences, in the words of `q_kind`.
        q_kind : str
            Their kind.
        k : array (num_blocks, num_kv_heads, block_size, head_dim)
            Pool of keys, in the words of `k_kind`.
        k_kind : str
            Their kind.
        k_scale : array
            Scales, as in `attend`.
        block_table : int32 array (num_seqs, max_blocks)
            Physical block of each logical block; with `by_slot`, the slot of each token, ``block * block_size +
            offset``. Entries of tokens that no query sees are never looked up, but for tokens between two ranges.
        seq_lens : int64 array (num_seqs,)
            Tokens in the cache, the queries' own included.
        q_starts : int64 array (num_seqs + 1,)
            Where each sequence's queries start.
        ranges : int64 array (num_tokens, 2) or (0, 2)
            Tokens ``[low, high)`` of its sequence that each query sees, below its length. If empty, causality and the
            window hold.
        by_slot : int
            Whether `block_table` holds slots.
        lse : float32 array (num_tokens, num_q_heads)
            Log of each query row's sum of exponentials.
        sm_scale, logits_soft_cap : float
            Scale of the scores; their cap, or 0.
        window_left : int
            Earlier tokens that a query sees; -1 for all, and with `ranges`.
        weights : float32 array (num_seqs, num_kv_heads, columns)
            Result, for the first `columns` tokens of each sequence; 0 for those that no query sees.
        """

    @staticmethod
    def merge_states(
        o_a: Array, lse_a: Array, o_b: Array, lse_b: Array, kind: str, out: Array, lse: Array
    ) -> None:
        """Merge two partial results.

        Parameters
        ----------
        o_a, o_b : array (num_tokens, num_q_heads, head_dim_v)
            Normalised outputs, in the words of `kind`.
        lse_a, lse_b : float32 array (num_tokens, num_q_heads)
            Their natural logs of sums of exponentials.
        kind : str
            Float kind of the outputs.
        out : array (num_tokens, num_q_heads, head_dim_v)
            Takes the merged output, in the words of `kind`.
        lse : float32 array (num_tokens, num_q_heads)
            Takes the merged log.
        """

    @staticmethod
    def shift_rows(
        pool: Array,
        kind: str,
        scale: Array,
        slots: Array,
        offset: int,
        cos: Array,
        sin: Array,
        interleaved: bool,
    ) -> None:
        """Rotate the K rows of some slots by the angles of an offset.

        Parameters
        ----------
        pool : array (num_blocks, num_kv_heads, block_size, head_dim)
            Keys, in the words of `kind`; changed in place. They are rotated in float32, in float64 where `kind` is
            fp64, and rounded or quantised once.
        kind : str
            Their kind.
        scale : array
            Scales of a quantised pool, which change too: float32 ``(num_blocks, num_kv_heads, block_size)``, of INT4
            words with an axis of groups more. Of a float pool an empty array.
        slots : int64 array (n,)
            ``block * block_size + offset`` of each row's token, each slot at most once; on CUDA those outside the pool
            are skipped.
        offset : int
            By how many positions the keys move; ``abs(offset)`` is a row of the tables.
        cos, sin : float32 array (num_positions, rotary_dim / 2)
            Tables of angles. Elements from ``rotary_dim`` on are not rotated.
        interleaved : bool
            Which elements are pairs: 2i and 2i + 1, or i and ``i + rotary_dim / 2``.
        """

    @staticmethod
    def scatter_latents(
        rows: Array,
        rows_kind: str,
        cos: Array,
        sin: Array,
        how: tuple[bool, bool, bool, float, int],
        weight: Array,
        positions: Array,
        pool: Array,
        pool_kind: str,
        scale: Array,
        slot_mapping: Array,
        look: int = 0,
    ) -> None:
        """Normalise the first part of new rows, rotate what follows, and write them.

        Parameters
        ----------
        rows : array (num_tokens, num_kv_heads, head_dim)
            Latents with their rotary parts, in the words of `rows_kind`.
        rows_kind : str
            Their kind.
        cos, sin
            See `write_rows`; elements ``width`` to ``width + rotary_dim`` of a row are rotated.
        how : tuple
            Whether latents are normalised; whether rotary parts are rotated; whether pairs are neighbours; the eps of
            the mean square; `width`, the elements of a latent.
        weight : array (width,)
            Norm weight in the computing dtype: float64 if one of the kinds is fp64, else float32.
        positions
            See `scatter_write`.
        pool, pool_kind, scale
            See `append_rows`.
        slot_mapping
            See `scatter_write`.
        look
            See `append_both`.
        """

    @staticmethod
    def scatter_write(
        qkv: Array,
        qkv_kind: str,
        cos: Array,
        sin: Array,
        mode: tuple[bool, bool, bool],
        q_weight: Array,
        k_weight: Array,
        eps: float,
        positions: Array,
        q_out: Array,
        k_pool: Array,
        k_kind: str,
        k_scale: Array,
        v_pool: Array,
        v_kind: str,
        v_scale: Array,
        slot_mapping: Array,
        look: int = 0,
    ) -> None:
        """Split, normalise, rotate and write the new tokens of many sequences.

        Parameters
        ----------
        qkv, qkv_kind, cos, sin, mode, q_weight, k_weight, eps
            See `write_rows`.
        positions : int64 array (num_tokens,)
            Row of `cos` and `sin` for each token; on CUDA a token with a row outside them is skipped entirely. Not read
            without rotation.
        q_out, k_pool, k_kind, k_scale, v_pool, v_kind, v_scale
            See `write_rows`.
        slot_mapping : int64 array (num_tokens,)
            ``block * block_size + offset`` of each token; -1 skips K and V, as does, on CUDA, any slot outside the
            pool.
        look
            See `append_both`.
        """

    @staticmethod
    def write_rows(
        qkv: Array,
        qkv_kind: str,
        cos: Array,
        sin: Array,
        mode: tuple[bool, bool, bool],
        q_weight: Array,
        k_weight: Array,
        eps: float,
        first_angle: int,
        q_out: Array,
        k_pool: Array,
        k_kind: str,
        k_scale: Array,
        v_pool: Array,
        v_kind: str,
        v_scale: Array,
        block_table: Array,
        start: int,
        look: int = 0,
    ) -> None:
        """Split, normalise, rotate and write one sequence's new tokens.

        Parameters
        ----------
        qkv : array (num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim)
            Fused projections, in the words of `qkv_kind`.
        qkv_kind : str
            Their kind.
        cos, sin : float32 or float64 array (num_positions, rotary_dim / 2)
            Tables of angles, of one dtype.
        mode : tuple of bool
            Whether q and k are normalised; whether they are rotated; whether pairs are neighbours.
        q_weight, k_weight : array (head_dim,)
            Norm weights in the computing dtype: float64 if any of the kinds is fp64, else float32.
        eps : float
            Added to the mean square.
        first_angle : int
            Row of `cos` and `sin` for the first token.
        q_out : array (num_tokens, num_q_heads, head_dim)
            Takes q, in the words of `qkv_kind`.
        k_pool, v_pool : array (num_blocks, num_kv_heads, block_size, head_dim)
            Take k and v.
        k_kind, v_kind : str
            Their kinds.
        k_scale, v_scale : array
            Take the scales of quantised pools, float32 ``(num_blocks, num_kv_heads, block_size)``, of INT4 words with
            an axis of groups more; of float pools empty arrays.
        block_table : int32 array (max_blocks,)
            The sequence's blocks.
        start : int
            Position of the first new token.
        look
            See `append_both`.
        """

    # -- small calls

    @staticmethod
    def small_append(rows_kind: str, pool_kind: str, by_slot: bool) -> Callable[..., int] | None:
        """Return the function that appends K and V of a small call, checks included.

        Parameters
        ----------
        rows_kind, pool_kind : str
            Kinds of new rows and of pools, the same for K and V.
        by_slot : bool
            Whether the place of each token is given; else a block table and the first token's position.

        Returns
        -------
        callable or None
            ``append(k, v, k_pool, v_pool, k_scale, v_scale, places, start, room, look) -> int``. It returns the tokens
            written. If a check fails, it writes nothing and returns -1; the general path then writes, or raises. Arrays
            of another type or rank raise ``TypeError``, and nothing is written. `places` are int64 slots, or the int32
            block table of one sequence. Its first new token has position `start`, and it has room for `room` more. If
            `look`, rows to be quantised are checked for NaN and infinity. None if the target has no such function.
        """

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

    @staticmethod
    def small_write(
        qkv_kind: str, k_kind: str, v_kind: str, compute: Any, table: Any, by_slot: bool
    ) -> Callable[..., int] | None:
        """Return the function for the fused write of a small call, checks included.

        Parameters
        ----------
        qkv_kind, k_kind, v_kind : str
            Kinds of projections and pools.
        compute, table : numpy.dtype
            The computing dtype, and the dtype of the tables of angles.
        by_slot : bool
            See `small_append`.

        Returns
        -------
        callable or None
            ``write(qkv, cos, sin, normalise, rotate, interleaved, q_weight, k_weight, eps, angles, first_angle, q_out,
            k_pool, k_scale, v_pool, v_scale, places, start, room, checks, 0, 0, 1) -> int``; see `write_rows` and
            `small_append`. `checks` is one of `Checks`; the last three make it run on this thread.
        """

    @staticmethod
    def append_attend(
        q_kind: str, rows_kind: str, k_kind: str, v_kind: str, by_address: bool = False,
        in_full: tuple[str, str] | None = None,
    ) -> Any:  # fmt: skip
        """Return the function that writes new rows of K and V and attends with their tokens' queries, checks included.

        Parameters
        ----------
        q_kind, rows_kind : str
            Kinds of queries and output, and of new rows.
        k_kind, v_kind : str
            Kinds of pools.
        by_address : bool
            Whether calls pass addresses instead of arrays: of rows without gaps, of the step's sizes.
        in_full : tuple of str, optional
            Of keys by channel the kinds in which K and V of the newest tokens are in full.

        Returns
        -------
        object or None
            A `numkv.kernels.cpu.attention.bound.BoundKernel`. None where the target has no such way.
        """

    # -- choice of blocks

    @staticmethod
    def key_bounds(
        k: Array, k_kind: str, k_scale: Array, blocks: Array, counts: Array, low: Array, high: Array
    ) -> None:
        """Find the smallest and the largest element of each column of some blocks' keys.

        Parameters
        ----------
        k : array (num_blocks, num_kv_heads, block_size, head_dim)
            Pool of keys, in the words of `k_kind`.
        k_kind : str
            Their kind.
        k_scale : array
            Scales, as in `attend`.
        blocks : int array (n,)
            Which blocks; a number that is no block is skipped.
        counts : int array (n,)
            How many of a block's first rows count. A block without rows gets bounds that no score passes.
        low, high : float32 array (num_blocks, num_kv_heads, head_dim)
            Take the bounds of these blocks: infinite ones in a column that has a NaN.
        """

    @staticmethod
    def block_scores(
        q: Array,
        q_kind: str,
        low: Array,
        high: Array,
        block_table: Array,
        seq_lens: Array,
        block_size: int,
        sm_scale: float,
        scores: Array,
    ) -> None:
        """Bound the scores that a query can have with any key of each block, for the largest of a kv head's q heads.

        Parameters
        ----------
        q : array (num_seqs, num_q_heads, head_dim)
            A query for each sequence, in the words of `q_kind`.
        q_kind : str
            Their kind.
        low, high
            Bounds; see `key_bounds`.
        block_table : int32 array (num_seqs, max_blocks)
            Blocks of each sequence.
        seq_lens : int array (num_seqs,)
            Tokens of each.
        block_size : int
            Tokens in a block.
        sm_scale : float
            What scores are multiplied by.
        scores : float32 array (num_seqs, num_kv_heads, max_blocks)
            Takes the bounds; -inf past a length, inf where there is a NaN.
        """

    @staticmethod
    def choose_blocks(
        scores: Array,
        block_table: Array,
        seq_lens: Array,
        block_size: int,
        first: int,
        newest: int,
        tables: Array,
        lens: Array,
    ) -> None:
        """Choose blocks for each kv head: the first, the newest, and those of the rest with the highest scores.

        Parameters
        ----------
        scores : float32 array (num_seqs, num_kv_heads, max_blocks)
            The score of each block; NaN counts as inf. Of equal ones the earlier block is chosen.
        block_table, seq_lens, block_size
            See `block_scores`.
        first, newest : int
            Blocks at the beginning and at the end that are chosen whatever their scores; one at the end at least.
        tables : int32 array (num_seqs, num_kv_heads, top)
            Takes the chosen blocks, in the order of the sequence, then -1.
        lens : int64 array (num_seqs, num_kv_heads)
            Takes the tokens in them.
        """

    @staticmethod
    def tables_of_heads(tables: Array, num_kv_heads: int, out: Array) -> None:
        """Number the (block, kv head) parts of a pool in the tables of heads.

        Parameters
        ----------
        tables : int32 array (num_seqs, num_heads, max_blocks)
            Blocks of each head.
        num_kv_heads : int
            Kv heads of a block: `num_heads`, or 1 if each block belongs to one head.
        out : int32 array (num_seqs * num_heads, max_blocks)
            Receives ``block * num_kv_heads + head``, or for blocks of one head the block; -1 for entries without a
            block.
        """

    # -- compressed heads

    @staticmethod
    def attend_codes(
        q: Array, q_kind: str, book: Codebook, stored: StoredCodes, options: CodesOptions, out: Array, lse: Array
    ) -> None:  # fmt: skip
        """Attend with queries over encoded keys and values, on the codes.

        Parameters
        ----------
        q : array (num_queries, num_q_heads, head_dim)
            Queries of the newest tokens, at most as many as are stored, in the words of `q_kind`. Several adjacent q
            heads share a head of the codes. Queries are ordered by sequence. A query of a sequence without tokens gets
            zeros, and -inf.
        q_kind : str
            Their kind.
        book : Codebook
            The codebook of the codes.
        stored : StoredCodes
            Keys and values.
        options : CodesOptions
            The options of scores. Queries see no later tokens.
        out : float32 array (num_queries, num_q_heads, head_dim)
            Takes the result.
        lse : float32 array (num_queries, num_q_heads) or (0, 0)
            Takes the natural logs of the sums of exponentials, if it is not empty.
        """

    @staticmethod
    def decode_rows(
        codes: Array, scales: Array, begin: int, levels: Array, back: Array, out: Array
    ) -> None:
        """Turn codes back into rows.

        Parameters
        ----------
        codes : uint8 array (num_heads, capacity, row_bytes)
            Codes.
        scales : float32 array (num_heads, capacity)
            Their scales.
        begin : int
            First token to decode.
        levels : float32 array (2 ** bits,)
            The codebook.
        back : float32 array (num_heads, head_dim, head_dim)
            The rotations' transposes.
        out : float32 array (num_heads, num_tokens, head_dim)
            Takes the rows.
        """

    @staticmethod
    def encode_rows(
        rows: Array,
        rows_kind: str,
        rotation: Array,
        edges: Array,
        levels: Array,
        sketch: Array,
        codes: Array,
        scales: Array,
        signs: Array,
        residuals: Array,
        start: int,
        slots: Array | None = None,
    ) -> None:
        """Encode rows of several heads.

        Parameters
        ----------
        rows : array (num_tokens, num_heads, head_dim)
            Finite numbers, in the words of `rows_kind`.
        rows_kind : str
            Their kind.
        rotation : float32 array (num_heads, head_dim, head_dim)
            A row is turned by multiplying it with its head's matrix from the right.
        edges, levels : float32 array (2 ** bits - 1,), (2 ** bits,)
            The codebook, in rising order.
        sketch : float32 array (num_heads, head_dim, projections)
            Directions in the columns, for turned rows; ``projections`` may be 0.
        codes : uint8 array (num_heads, capacity, row_bytes)
            Takes the codes; see `numkv.rows.codes`.
        scales : float32 array (num_heads, capacity)
            Takes the scales.
        signs : uint8 array (num_heads, capacity, sign_bytes)
            Takes the signs of the sketch.
        residuals : float32 array (num_heads, capacity)
            Receives the norms of the remainders; ignored without a sketch.
        start : int
            Where the first token goes, and the others behind it.
        slots : int64 array (num_tokens,), optional
            Where each token goes instead.
        """

    @staticmethod
    def score_codes(
        q: Array, q_kind: str, book: Codebook, stored: StoredCodes, options: CodesOptions, out: Array
    ) -> None:  # fmt: skip
        """Estimate the inner products of queries and encoded keys, on the codes.

        Parameters
        ----------
        q, q_kind, book, stored, options
            See `attend_codes`.
        out : float32 array (num_queries, num_q_heads, end - begin)
            Takes the scores; -inf where a query does not see a token.
        """


class Checks(enum.IntEnum):
    """The checks of a compiled function before it writes."""

    CHECKED = 0
    """Nothing: the caller has checked all."""
    LOOK = 1
    """That the arguments fit one another."""
    LOOK_FOR_NAN = 2
    """That, and that what is to be quantised holds neither NaN nor infinity."""


class Codebook(NamedTuple):
    """What codes of some heads mean; see `Operations.encode_rows`.

    Attributes
    ----------
    rotation, back : float32 array (num_heads, head_dim, head_dim)
        The rotations, and their transposes.
    levels, v_levels : float32 array (2 ** bits,)
        Levels of keys, and of values.
    sketch : float32 array (num_heads, head_dim, projections)
        Directions of the sketch.
    """

    rotation: Array
    back: Array
    levels: Array
    v_levels: Array
    sketch: Array


class Sequences(NamedTuple):
    """Several sequences whose tokens lie in blocks: token t of one in its block ``t // block_size``. On the host.

    Attributes
    ----------
    lengths : int64 array (num_seqs,)
        Tokens of each.
    query_lens : int64 array (num_seqs,)
        Queries of each, those of its newest tokens.
    blocks : int64 array
        The blocks of all, one sequence after the other; block b has the tokens from ``b * block_size`` of the buffers.
    starts : int64 array (num_seqs,)
        Where each sequence's blocks start.
    block_size : int
        Tokens of a block: a multiple of 128.
    """

    lengths: np.ndarray[Any, np.dtype[np.int64]]
    query_lens: np.ndarray[Any, np.dtype[np.int64]]
    blocks: np.ndarray[Any, np.dtype[np.int64]]
    starts: np.ndarray[Any, np.dtype[np.int64]]
    block_size: int


class StoredCodes(NamedTuple):
    """Encoded keys and values of a sequence, or of several; see `Operations.encode_rows`.

    Attributes
    ----------
    k_codes, k_scales, signs, residuals
        Keys.
    v_codes, v_scales
        Values, which have no sketch.
    begin, end : int
        The tokens of one sequence, at least one.
    sequences : Sequences, optional
        Which tokens instead, for attention.
    """

    k_codes: Array
    k_scales: Array
    signs: Array
    residuals: Array
    v_codes: Array
    v_scales: Array
    begin: int
    end: int
    sequences: Sequences | None = None


class CodesOptions(NamedTuple):
    """The options of scores; see `numkv.decode_attention`.

    Attributes
    ----------
    sm_scale : float
        What scores are multiplied by.
    logits_soft_cap : float
        The bound that they approach then, or 0.
    window_left : int
        Earlier tokens that a query sees, or -1 for all.
    """

    sm_scale: float
    logits_soft_cap: float = 0.0
    window_left: int = -1


Spec = TypeVar("Spec", bound=Callable[..., Any])

#: Files of kernels that every target has.
FILES = (
    "append", "attention", "channel", "choice", "compress", "copy", "finite", "hadamard", "latents", "mask", "mass",
    "merge", "shift", "write",
)  # fmt: skip

#: Names of all operations.
NAMES = tuple(sorted(name for name in dir(Operations) if not name.startswith("_")))


def implements(spec: Spec) -> Callable[[Callable[..., Any]], Spec]:
    """Mark a target's implementation of an operation: it takes the docstring; parameters are compared.

    Parameters
    ----------
    spec : function
        A method of `Operations`.

    Raises
    ------
    TypeError
        If the parameters are not those of `spec`.
    """
    want = _parameters(spec)

    def mark(function: Callable[..., Any]) -> Spec:
        if _parameters(function) != want:
            raise TypeError(f"{function.__qualname__}: expected the parameters {want}")
        function.__doc__ = inspect.getdoc(spec)
        function.operation = spec.__name__  # type: ignore[attr-defined]
        return function  # type: ignore[return-value]

    return mark


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.default) for parameter in found]


def operations_in(module: ModuleType) -> dict[str, Any]:
    """The operations that a module marks as its own, by their names."""
    return {
        found.operation: found
        for found in vars(module).values()
        if callable(found) and "operation" in getattr(found, "__dict__", ())
    }


@functools.cache
def load(target: str) -> Operations:
    """The operations of a target.

    Parameters
    ----------
    target : {"cpu", "cuda"}
        Name of the target; ``"cuda"`` imports Numba's CUDA target.
    """
    found: dict[str, Any] = {}
    for file in FILES:
        found |= operations_in(importlib.import_module(f"numkv.kernels.{target}.{file}"))
    missing = set(NAMES) ^ found.keys()
    if missing:
        raise TypeError(
            f"numkv.kernels.{target}: expected all operations and no others, differs in {missing}"
        )
    return cast(Operations, SimpleNamespace(**found))
