"""Sparse reading in a step of a `PagedKVCache` that keeps the bounds of its keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.access import Access, writes
from numkv.attention.options import check_options
from numkv.caches.paged.key_bounds import BlockBounds
from numkv.caches.paged.trees import Tree
from numkv.errors import NotSupported
from numkv.sparse.attention import are_numbered, attend_by_head, attend_to_choice
from numkv.sparse.bounds import scores_of
from numkv.sparse.choice import check_counts, chosen
from numkv.storage.pool import Pool
from numkv.targets.base import Array

Ints = NDArray[np.int64]


class _Read(NamedTuple):
    """What a step's queries may read in the layers of a group."""

    blocks: NDArray[np.int32]
    """Blocks of all sequences with queries."""
    counts: Ints
    """Rows of theirs that hold tokens."""
    written: NDArray[np.bool_]
    """Which of them the step writes to."""
    table: Array
    """A row of blocks for each query, on the target."""
    lens: Array
    """How many tokens each query sees."""
    on_host: Ints
    """The same on the host."""


class SparseStep:
    """The part of `Step` that reads sparsely."""

    _store: Any
    _access: Access

    def _begin_bounds(self: Any, tables: list[NDArray[np.int32]], lens: Ints) -> None:
        """Note which blocks the step writes to, and from which row on."""
        bounds: BlockBounds | None = self._store.bounds
        if bounds is None:
            return
        size, starts = self._store.block_size, lens - self.new_lens
        self._host_tables, self._host_lens = tables, lens
        self._reads: dict[int, _Read] = {}
        begin = starts // size
        counts = np.where(self.new_lens > 0, -(-lens // size) - begin, 0)
        seq = np.arange(len(lens)).repeat(counts)
        within = np.arange(len(seq)) - (np.cumsum(counts) - counts)[seq]
        logical = begin[seq] + within
        first = np.maximum(starts[seq] - logical * size, 0)
        for table in tables:
            bounds.lower(table[seq, logical], first)

    def _read(self: Any, group: int) -> _Read:
        """The blocks that the queries of a group's layers may read, looked up once a step."""
        found: _Read | None = self._reads.get(group)
        if found is not None:
            return found
        table, lens, size = self._host_tables[group], self._host_lens, self._store.block_size
        counts = np.where(self.new_lens > 0, -(-lens // size), 0)
        seq = np.arange(len(lens)).repeat(counts)
        logical = np.arange(len(seq)) - (np.cumsum(counts) - counts)[seq]
        rows = np.minimum(lens[seq] - logical * size, size)
        written = logical >= ((lens - self.new_lens) // size)[seq]
        on_target: tuple[Array, Array] = self._tables[group], self._lens
        seen = self._places + 1
        if not self._one_each:
            of_token = np.arange(len(lens)).repeat(self.new_lens)
            index = self._store.target.index
            on_target = index(table[of_token], np.int32), index(seen, np.int64)
        found = self._reads[group] = _Read(table[seq, logical], rows, written, *on_target, seen)
        return found

    @writes
    def sparse_attention(
        self: Any,
        layer: int,
        q: Any,
        *,
        most_blocks: int,
        first: int = 1,
        newest: int = 1,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        sinks: Any = None,
        return_lse: bool = False,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Attend with the new tokens' queries to the blocks in which the most can be, exactly over these.

        For a cache that was made with ``key_bounds=True``. Each kv head chooses for each query, by Quest's bound; see
        `numkv.sparse`. Blocks are bounded here, as far as they have changed since.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array (num_tokens, num_q_heads, head_dim)
            Queries of all sequences, one after another. Of several of a sequence each chooses for itself, as if it came
            alone, and reads for itself: for drafts; a prompt is faster by `attention`.
        most_blocks : int
            Blocks to read; all of a query that sees no more, with the result of `attention`, on the CPU and for one
            query a sequence to the bit.
        first, newest : int
            How many of the first and of the newest blocks are read whatever their bounds; of the newest one at least.
        sm_scale, logits_soft_cap, sinks, return_lse, out, stream
            See `numkv.decode_attention`.

        Returns
        -------
        out : array (num_tokens, num_q_heads, head_dim_v)
            In q's dtype.
        lse : float32 array (num_tokens, num_q_heads)
            Natural log of the sum of exponentials over the chosen blocks; only with `return_lse`.

        Raises
        ------
        NumkvError
            If the layer has no rows of the new tokens yet.
        NotSupported
            If the cache keeps no bounds; if the step has a tree, or lies in `StepBuffers`; or if the layer has a window
            or chunks that reach over more than `most_blocks`. Shorter ones are read whole, as by `attention`.
        DimensionMismatch
            If `most_blocks` is less than `first` and `newest` together, or a shape does not fit.
        UnsupportedDType, IndexError, ValueError
            See `numkv.decode_attention`.
        """
        pool, group = self._layer(layer)
        store = self._store
        if store.bounds is None:
            raise NotSupported(
                "sparse_attention: expected a cache that keeps bounds of its keys, got one without; make it with "
                "key_bounds=True"
            )
        if self._buffers is not None:
            raise NotSupported(
                "sparse_attention: expected a step with tables of its own, got one that lies in StepBuffers, as which "
                "blocks are to be bounded is found on the host"
            )
        Tree.refuse(self._tree, "sparse_attention")
        counts = check_counts("most_blocks", most_blocks, first, newest)
        with self._on(stream, q):
            asked = sm_scale, logits_soft_cap, sinks, return_lse, out
            if self._reads_all(group, layer, counts[0], sinks):
                return self._attend_here(layer, pool, group, q, *asked)
            return self._attend_sparsely(layer, pool, group, q, counts, asked)

    def _reads_all(self: Any, group: int, layer: int, most: int, sinks: Any) -> bool:
        """Whether `attention` is all there is to do; refuse windows that would have to be cut."""
        of, size = self._store.groups[group], self._store.block_size
        if of.chunk or of.window >= 0:
            tokens = of.chunk or of.window + 1
            blocks = (tokens - 2) // size + 2  # wherever they begin
            if blocks > most:
                kind = "chunks" if of.chunk else "a window"
                raise NotSupported(
                    f"sparse_attention: expected a layer without a window, or one within `most_blocks`, got layer "
                    f"{int(layer)} with {kind} of {tokens} tokens, up to {blocks} blocks, and {most}; call `attention`"
                )
            return True
        # The same bits as those of a choice of all blocks, so that nothing depends on the batch.
        whole = self._one_each and sinks is None and self._longest <= most * size
        return bool(whole and self._store.target.values_on_host)

    def _attend_sparsely(
        self: Any, layer: int, pool: Pool, group: int, q: Any, counts: tuple[int, int, int], asked: Any
    ) -> Any:  # fmt: skip
        """Bound, choose and attend, on the stream of the call."""
        self._captured("sparse_attention")
        q = self._check_queries(layer, pool, q)
        sm_scale, cap, sinks, return_lse, out = asked
        options = check_options(sm_scale, cap, -1, sinks, return_lse, out)
        number, size = int(self._store.layers.sources[layer]), self._store.block_size
        read: _Read = self._read(group)
        low, high = self._store.bounds.update(
            self._store.places[number][0], pool, read.blocks, read.counts, read.written
        )
        scores = scores_of(pool, q, low, high, read.table, read.lens, size, options)
        tables, lens = chosen(pool.target, scores, read.table, read.lens, size, counts)
        if are_numbered(pool):
            return attend_to_choice(pool, tables, lens, q, options)
        # As many for all heads: all blocks are full but for the newest one, which is always read.
        used = -(-read.on_host // size)
        tokens = read.on_host - np.maximum(used - counts[0], 0) * size
        return attend_by_head(pool, tables, pool.target.index(tokens, np.int64), q, options)
