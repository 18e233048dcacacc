"""The operations of sparse reading: which blocks are worth reading; see `numkv.kernels.operations`."""

from __future__ import annotations

from numkv.arrays import Array


class OperationsOfChoice:
    """Those of a target's operations that bound the keys of blocks, and choose blocks by a query."""

    @staticmethod
    def key_bounds(
        k: Array,
        k_kind: str,
        k_scale: Array,
        blocks: Array,
        counts: Array,
        low: Array,
        high: Array,
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
        raise NotImplementedError

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
        raise NotImplementedError

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
        """Choose blocks for each kv head: the first, the newest, and of the rest those with the highest scores.

        Parameters
        ----------
        scores : float32 array (num_seqs, num_kv_heads, max_blocks)
            What speaks for each block; NaN counts as inf. Of equal ones the earlier block is chosen.
        block_table, seq_lens, block_size
            See `block_scores`.
        first, newest : int
            Blocks at the beginning and at the end that are chosen whatever their scores; one at the end at least.
        tables : int32 array (num_seqs, num_kv_heads, top)
            Takes the chosen blocks, in the order of the sequence, then -1.
        lens : int64 array (num_seqs, num_kv_heads)
            Takes the tokens in them.
        """
        raise NotImplementedError

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
            Takes ``block * num_kv_heads + head``, or for blocks of one head the block; -1 for what is no block.
        """
        raise NotImplementedError
