"""Reading a `ShardedKVCache`: what it is, attention to committed tokens, and the checks of arguments."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.access import writes
from numkv.attention.attend import check_group
from numkv.attention.options import check_options
from numkv.caches.layer_spec import LayerSpec
from numkv.errors import DimensionMismatch, NumkvError
from numkv.numbers import check_index
from numkv.ray.books import Sequence
from numkv.ray.merging import Partial, merged
from numkv.ray.placing import Run, counts, visible
from numkv.ray.step import host_rows, side_by_side
from numkv.ray.whole import WholeShardedCache


class ReadableShards(WholeShardedCache):
    """The reading half of `ShardedKVCache`."""

    # -- what it is

    @property
    def num_layers(self) -> int:
        """Layers."""
        return self._model.num_layers

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer keeps, on all shards; see `numkv.PagedKVCache.layers`."""
        return self._model.layers

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._model.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of each shard."""
        return int(self._arguments["num_blocks"])

    @property
    def num_shards(self) -> int:
        """Shards."""
        return self._layout.num_shards

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences, in the order in which they came."""
        return tuple(self._sequences)

    @property
    def messages(self) -> tuple[int, ...]:
        """Messages to each shard so far."""
        return tuple(channel.sent for channel in self._channels)

    def __len__(self) -> int:
        return len(self._sequences)

    def __repr__(self) -> str:
        layout = self._layout
        return (
            f"ShardedKVCache(sequences={len(self)}, num_layers={self.num_layers}, heads={layout.parts}, "
            f"context={layout.columns}, blocks={self.num_blocks}, block_size={self.block_size}, "
            f"kind={self.rows.k_kind})"
        )

    def length(self, seq: int) -> int:
        """Committed tokens of a sequence."""
        return self._sequence(seq).length

    def cached_len(self, seq: int) -> int:
        """Tokens of a sequence that came from the prefix cache, or the store, when it was added."""
        return self._sequence(seq).cached

    def runs(self, seq: int) -> tuple[Run, ...]:
        """Where the tokens of a sequence are.

        Parameters
        ----------
        seq : int
            The sequence.

        Returns
        -------
        tuple of (int, int)
            Columns, and how many tokens each holds there, in order.
        """
        return self._sequence(seq).runs

    # -- reading

    @writes
    def decode_attention(
        self, layer: int, sequences: Iterable[int], q: Any, *, sm_scale: float | None = None,
        logits_soft_cap: float = 0.0, sinks: Any = None, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        """Attend with the query of the newest committed token of any sequences.

        Parameters
        ----------
        layer, sequences, q, sm_scale, logits_soft_cap, sinks, return_lse
            See `numkv.PagedKVCache.decode_attention`.

        Returns
        -------
        array or tuple of array
            See `numkv.PagedKVCache.decode_attention`.

        Raises
        ------
        ShardLost
            If a shard was lost.
        NumkvError, IndexError
            See `numkv.PagedKVCache.decode_attention`.
        """
        layer = check_index("layer", layer, self.num_layers)
        seqs = list(itertools.islice(map(self._number, sequences), 2**31))
        states = [self._sequence(seq) for seq in seqs]
        q = host_rows("q", q, (len(seqs), "num_q_heads", self.rows.head_dim))
        self._check_q_heads(q.shape[1])
        asked: dict[str, Any] = {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap}
        sinks = self._check_options(asked, sinks, q.shape[1])
        sent = self._for_shards(q)
        columns = sorted({c for state in states for c in counts(state.runs)})
        tickets, parts = [], []
        for column in columns:
            rows = np.flatnonzero([column in counts(state.runs) for state in states])
            here, ranges = [seqs[i] for i in rows], None
            if self._is_split:
                ends = [np.array([states[i].length - 1]) for i in rows]
                window = self._windows[layer]
                ranges = np.concatenate(
                    [visible(states[i].runs, column, at, window) for i, at in zip(rows, ends, strict=True)]
                )  # fmt: skip
            else:
                asked["return_lse"] = True
            for part, shard in enumerate(self._layout.shards_of(column)):
                heads = self._layout.q_heads(part, q.shape[1])
                own = {**asked}
                if sinks is not None and not self._is_split:
                    own["sinks"] = sinks[heads]
                tickets.append(
                    self._channels[shard].send(
                        "look", layer, here, sent[rows][:, heads], ranges, own
                    )
                )
            parts.append(rows)
        self._gather(tickets)
        values = [ticket.value for ticket in tickets]
        each = self._layout.parts
        found = [
            Partial(rows, *side_by_side(values[i * each : (i + 1) * each]))
            for i, rows in enumerate(parts)
        ]
        shape = (*q.shape[:2], self.rows.head_dim_v)
        whole = not self._is_split and bool(found) and len(found[0].out) == len(seqs)
        out, lse = merged(found, shape, q.dtype, sinks if self._is_split else None, whole)
        return (out, lse) if return_lse else out

    # -- checks

    def _check_q_heads(self, num_q_heads: int) -> None:
        check_group(num_q_heads, self.rows.num_kv_heads)

    def _check_options(self, asked: dict[str, Any], sinks: Any, num_q_heads: int) -> Any:
        """Check options before anything is sent; sinks as an array."""
        check_options(**asked)
        if sinks is None:
            return None
        wide = np.float64 if self._widest == np.float64 else np.float32
        given = np.asarray(sinks, wide)
        if given.shape != (num_q_heads,):
            raise DimensionMismatch(
                f"`sinks`: expected ({num_q_heads},), got {given.shape}", num_q_heads, given.shape
            )
        if given.size and not given.max() < np.inf:
            raise ValueError("`sinks`: expected finite numbers, or -inf for no sink")
        return given

    @property
    def _widest(self) -> Any:
        """The dtype of K or V where that is float64, else float32."""
        wide = any(kind.name == "fp64" for kind in (self.rows.k_kind, self.rows.v_kind))
        return np.dtype(np.float64 if wide else np.float32)

    def _for_shards(self, q: NDArray[Any]) -> NDArray[Any]:
        """Queries as shards get them: partial results are not rounded to 16 bits."""
        if self._is_split and q.dtype.itemsize < 4:
            return q.astype(np.float32)
        return q

    @staticmethod
    def _number(seq: Any) -> int:
        try:
            if isinstance(seq, bool):
                raise TypeError
            return operator.index(seq)
        except TypeError:
            raise TypeError(
                f"`seq`: expected the number of a sequence, got {type(seq).__name__}; pass what `add` returned"
            ) from None

    def _numbers(self, sequences: Any) -> tuple[int, ...]:
        seqs = tuple(map(self._number, itertools.islice(iter(sequences), len(self) + 1)))
        if len(set(seqs)) != len(seqs):
            raise ValueError(f"`sequences`: expected each sequence once, got {seqs[:8]}")
        return seqs

    def _sequence(self, seq: Any) -> Sequence:
        found = self._sequences.get(self._number(seq))
        if found is None:
            raise IndexError(f"`seq`: expected one of the cache's sequences, got {seq}")
        return found

    def _idle(self, seq: int) -> Sequence:
        found = self._sequence(seq)
        if found.step is not None:
            raise NumkvError(
                f"`seq`: expected sequence {seq} to have no open step; commit it or roll it back first"
            )
        return found
