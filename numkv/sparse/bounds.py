"""`KeyBounds`: the smallest and the largest key of each block of a pool."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from numkv import targets
from numkv.arrays import Array
from numkv.attention.attend import check_queries
from numkv.attention.options import CheckedOptions
from numkv.checks import check_array, check_integers
from numkv.errors import DimensionMismatch
from numkv.kinds import float_kind
from numkv.numbers import check_bytes, check_flag, check_number, check_size
from numkv.sparse.choice import check_numbers, check_table
from numkv.storage.pool import Pool
from numkv.storage.user_buffers import PAGED, stored_pool
from numkv.targets.base import Target
from numkv.targets.call import Call

_FLOAT32 = np.dtype(np.float32)
_UPDATE = Call("k_pool blocks counts low high k_scale", "validate", "low high")
_SCORES = Call("q low high block_table seq_lens", "block_size sm_scale validate")


class KeyBounds:
    """The smallest and the largest element of each key channel, for every block of a pool.

    They bound the score of a query with any key of a block (Tang et al., "Quest", arXiv:2406.10774). Bounds are
    computed from the keys as stored, for every storage kind. They take ``8 * head_dim`` bytes for each block and kv
    head. That is an eighth of the memory of a block of 16 tokens in bf16.

    Parameters
    ----------
    num_blocks : int
        Blocks of the pool.
    num_kv_heads : int
        KV heads of the pool.
    head_dim : int
        Elements of a key vector.
    target : {"cpu", "cuda"}
        The target of the pool.

    Attributes
    ----------
    low, high : float32 array (num_blocks, num_kv_heads, head_dim)
        The lower and upper bounds. Blocks that were never updated have inf and -inf, so they are not chosen.

    Raises
    ------
    DimensionMismatch
        If a size is less than 1.

    Examples
    --------
    >>> import numpy as np, numkv.sparse
    >>> k_pool = np.arange(2 * 1 * 4 * 2, dtype=np.float32).reshape(2, 1, 4, 2)
    >>> bounds = numkv.sparse.KeyBounds(2, 1, 2)
    >>> bounds.update(k_pool, blocks=[0, 1], counts=[4, 2])
    >>> bounds.high[:, 0].tolist()
    [[6.0, 7.0], [10.0, 11.0]]
    >>> bounds.scores(np.ones((1, 2, 2), np.float32), [[0, 1]], [6], 4, sm_scale=1.0).tolist()
    [[[13.0, 21.0]]]
    """

    def __init__(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, *, target: str = "cpu"
    ) -> None:
        sizes = {"num_blocks": num_blocks, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        sizes = {name: check_size(name, size, 1) for name, size in sizes.items()}
        check_bytes(sizes, 4)
        shape, to = tuple(sizes.values()), targets.get(target)
        self._target = to
        self.low: Array = to.asarray(np.full(shape, np.inf, np.float32))
        self.high: Array = to.asarray(np.full(shape, -np.inf, np.float32))

    @property
    def nbytes(self) -> int:
        """Return the bytes of the bounds."""
        return 8 * math.prod(self.low.shape)

    def update(
        self, k_pool: Any, blocks: Any, counts: Any, *, k_scale: Any = None,
        validate: bool | None = False,
    ) -> None:  # fmt: skip
        """Recompute the bounds of some blocks. Call it for each block that was written to, before `scores`.

        Parameters
        ----------
        k_pool : array (num_blocks, num_kv_heads, block_size, head_dim)
            The pool's keys; see `numkv.paged_decode_attention`.
        blocks : int32 or int64 array (n,)
            The blocks; each occurs once.
        counts : int32 or int64 array (n,)
            Tokens in each block, in its first slots. The other slots are not read.
        k_scale : array, optional
            Scales of the keys; see `numkv.paged_decode_attention`.
        validate : bool
            On CUDA, also check the values of `blocks` and `counts`. This waits for the device.

        Raises
        ------
        IndexError
            If a block is not in the pool, or a count not in ``[0, block_size]``.
        DimensionMismatch, UnsupportedDType, NotSupported
            As `numkv.paged_decode_attention`; also if the pool has other sizes.
        """
        _update(k_pool, blocks, counts, self.low, self.high, k_scale, validate)

    def scores(
        self, q: Any, block_table: Any, seq_lens: Any, block_size: int, *, sm_scale: float | None = None,
        validate: bool | None = False,
    ) -> Array:  # fmt: skip
        """Compute an upper bound of the scores of each sequence's query with the keys of each of its blocks.

        Parameters
        ----------
        q : array (num_seqs, num_q_heads, head_dim)
            The newest token's query of each sequence; fp16, bf16, fp32 or fp64.
        block_table : int32 array (num_seqs, max_blocks)
            Blocks of each sequence.
        seq_lens : int32 or int64 array (num_seqs,)
            Tokens of each sequence.
        block_size : int
            Tokens in a block.
        sm_scale : float, optional
            Factor of the scores; None for ``1 / sqrt(head_dim)``.
        validate
            See `numkv.paged_decode_attention`.

        Returns
        -------
        float32 array (num_seqs, num_kv_heads, max_blocks)
            The largest bound among the q heads of each kv head's group. It is -inf past a length, and inf where a key
            of the block or the query has a NaN.

        Raises
        ------
        IndexError
            If a length is more than the table has room for, or a block has no bounds here.
        DimensionMismatch, UnsupportedDType
            If an array has another shape or dtype.
        """
        return _scores(
            q, self.low, self.high, block_table, seq_lens, block_size, sm_scale, validate
        )

    def __repr__(self) -> str:
        blocks, heads, dim = self.low.shape
        return f"KeyBounds(num_blocks={blocks}, num_kv_heads={heads}, head_dim={dim}, target={self._target.key})"


def _update(
    k_pool: Any, blocks: Any, counts: Any, low: Any, high: Any, k_scale: Any = None,
    validate: bool | None = False,
) -> None:  # fmt: skip
    """See `KeyBounds.update`."""
    target = targets.of(k_pool)
    if target.chooses_stream:
        arrays = (k_pool, blocks, counts, low, high, k_scale)
        target.run(_update, _UPDATE, arrays, (validate,))
        return
    validate = check_flag("validate", validate)
    pool = stored_pool(target, PAGED, k_pool, k_pool, (k_scale, k_scale))
    shape = (int(pool.k.shape[0]), int(pool.k.shape[1]), pool.head_dim)
    if tuple(low.shape) != shape:
        raise DimensionMismatch(
            f"`k_pool`: expected as many blocks, kv heads and elements as there are bounds for, {tuple(low.shape)}, "
            f"got {shape}",
            expected=tuple(low.shape),
            actual=shape,
        )
    low = check_array(target, "low", low, (_FLOAT32,), shape)
    high = check_array(target, "high", high, (_FLOAT32,), shape)
    blocks = check_integers(target, "blocks", blocks, ("n",))
    counts = check_integers(target, "counts", counts, (int(blocks.shape[0]),))
    if target.values_on_host or validate:
        check_numbers(target, "blocks", blocks, shape[0])
        check_numbers(target, "counts", counts, int(pool.k.shape[2]) + 1)
    if not blocks.shape[0]:
        return
    target.ops.key_bounds(
        pool.k, pool.k_kind.name, pool.k_scale, target.index(blocks, np.int64),
        target.index(counts, np.int64), low, high,
    )  # fmt: skip


def _scores(
    q: Any, low: Any, high: Any, block_table: Any, seq_lens: Any, block_size: Any,
    sm_scale: float | None = None, validate: bool | None = False,
) -> Array:  # fmt: skip
    """See `KeyBounds.scores`."""
    target: Target = targets.of(low)
    if target.chooses_stream:
        arrays, asked = (q, low, high, block_table, seq_lens), (block_size, sm_scale, validate)
        found: Array = target.run(_scores, _SCORES, arrays, asked)
        return found
    num_blocks, heads, dim = (int(n) for n in low.shape)
    q = check_queries(target, q, heads, dim, "num_seqs")
    size = check_size("block_size", block_size, 1)
    scale = 1 / math.sqrt(dim) if sm_scale is None else check_number("sm_scale", sm_scale)
    table, lens = check_table(
        target, block_table, seq_lens, int(q.shape[0]), size, num_blocks, check_flag("validate", validate)
    )  # fmt: skip
    if not q.shape[1] and q.shape[0] and table.shape[1]:
        raise DimensionMismatch(
            "`q`: expected a q head for each kv head, got none", expected=heads, actual=0
        )
    return _bounded(target, q, low, high, table, lens, size, scale)


def scores_of(
    pool: Pool, q: Array, low: Array, high: Array, table: Array, lens: Array, size: int, options: CheckedOptions
) -> Array:  # fmt: skip
    """Compute upper bounds of the scores of checked queries, from the bounds of a pool's stored keys."""
    scale = options.scale(pool.head_dim)
    if pool.k_rotation is not None:
        q = pool.k_rotation.forward(pool.target, q)
    return _bounded(pool.target, q, low, high, table, lens, size, scale)


def _bounded(
    target: Target, q: Array, low: Array, high: Array, table: Array, lens: Array, size: int, scale: float
) -> Array:  # fmt: skip
    """Compute `KeyBounds.scores` of checked arguments."""
    out = target.empty((int(q.shape[0]), int(low.shape[1]), int(table.shape[1])), _FLOAT32)
    if 0 not in out.shape and q.shape[1]:
        words, of_q = target.words(q), float_kind(q.dtype).name
        target.ops.block_scores(words, of_q, low, high, table, lens, size, scale, out)
    return out
