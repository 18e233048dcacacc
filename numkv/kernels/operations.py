"""Operations: what kernels do, the same on every target. Name, parameters and docstring of each are here, once."""

from __future__ import annotations

from numkv.arrays import Array
from numkv.kernels.operations_of_choice import OperationsOfChoice
from numkv.kernels.operations_of_codes import OperationsOfCodes
from numkv.kernels.small_calls import SmallCalls

#: New rows, their kind, the pool that they go to, its kind, and its scales.
Side = tuple[Array, str, Array, str, Array]


class Operations(OperationsOfCodes, OperationsOfChoice, SmallCalls):
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
        raise NotImplementedError

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
            On CUDA a number of `numkv.kernels.cuda.late`: rows that are to be quantised and hold NaN or infinity are
            stored as zeros, and reported under it. 0 for none; the CPU's callers look themselves.
        """
        raise NotImplementedError

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
        raise NotImplementedError

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
        raise NotImplementedError

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
        raise NotImplementedError

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
        raise NotImplementedError

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
        """Write what queries see, and numbers of q heads, as `attend` takes them.

        Parameters
        ----------
        seq_lens : int64 array (num_seqs,)
            Tokens in the cache; at most `capacity` of them count.
        q_starts : int64 array (num_seqs + 1,)
            Where each sequence's queries start.
        ranges : int64 array (num_tokens, 2) or (0, 2)
            Tokens ``[low, high)`` that each query sees, any numbers; cut to the sequence's length. Empty for none.
        bits : uint32 array (num_tokens, words) or (0, 0)
            Which of its sequence's newest tokens, of which there are as many as queries, each query sees: token
            ``32 * w + i`` of them by bit i of word w. Empty for none.
        causal : int
            Whether queries see no later tokens, where neither of these says what they see: 0 or 1.
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
        raise NotImplementedError

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
            Scales of quantised pools, float32 ``(num_blocks, num_kv_heads, block_size)``, of INT4 words with an axis of
            groups more; of 8-bit floats float32 ``(num_kv_heads,)``, of other float pools empty arrays.
        block_table : int32 array (num_seqs, max_blocks)
            Physical block of each logical block; with `by_slot`, the slot of each token, ``block * block_size +
            offset``. Entries before the first and after the last token that a query of the sequence sees are never
            looked up.
        seq_lens : int64 array (num_seqs,)
            Tokens in the cache, the queries' own included. Not used with `ranges`.
        q_starts : int64 array (num_seqs + 1,)
            Where each sequence's queries start.
        ranges : int64 array (num_tokens, 2) or (0, 2)
            Tokens ``[low, high)`` of its sequence that each query sees, in place of causality and the window; they end
            where the row of `block_table` does, and an empty range gives 0 and -inf (with a sink: the sink). Empty for
            none. Or rows of `numkv.rows.mask`, of more numbers, from `fill_mask`: then kernels of their own know gaps
            and biases.
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
            Log of the sum of exponentials; on CUDA ``(0, 0)`` where nobody asks for it.
        """
        raise NotImplementedError

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
        raise NotImplementedError

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
        raise NotImplementedError

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
        raise NotImplementedError

    @staticmethod
    def rotate_rows(
        x: Array, x_kind: str, signs: Array, inverse: bool, out: Array, out_kind: str
    ) -> None:
        """Rotate rows, or turn rotated rows back.

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
        raise NotImplementedError

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
            Tokens ``[low, high)`` of its sequence that each query sees, below its length; none: causality and the
            window say it.
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
        raise NotImplementedError

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
        raise NotImplementedError

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
        raise NotImplementedError

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
            Whether latents are normalised; whether rotary parts are rotated; whether pairs are neighbours; what the
            mean square gets added; `width`, the elements of a latent.
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
        raise NotImplementedError

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
            Row of `cos` and `sin` for each token; on CUDA a token with a row outside them is left out altogether. Not
            read where nothing is rotated.
        q_out, k_pool, k_kind, k_scale, v_pool, v_kind, v_scale
            See `write_rows`.
        slot_mapping : int64 array (num_tokens,)
            ``block * block_size + offset`` of each token; -1 leaves K and V out, as does, on CUDA, any slot outside
            the pool.
        look
            See `append_both`.
        """
        raise NotImplementedError

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
        raise NotImplementedError
