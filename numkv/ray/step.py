"""`ShardedStep`: new tokens on their way through the layers of a sharded cache, and `Attending`, a layer's result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from numkv.access import Access, writes
from numkv.errors import DimensionMismatch, NotSupported, NumkvError, UnsupportedDType
from numkv.kinds import QUERY_DTYPES
from numkv.numbers import check_index
from numkv.ray.channel import Ticket
from numkv.ray.merging import Partial, merged
from numkv.ray.placing import Run, columns_of_tokens, counts, joined, visible
from numkv.writing.fused_write import QKMode
from numkv.writing.paged import paged_write

Ints = NDArray[np.int64]


class Part(NamedTuple):
    """What one column has to do with a step."""

    column: int
    seqs: list[int]
    """The step's sequences that have tokens here, or get some."""
    new_lens: list[int]
    """How many tokens each of them gets here."""
    rows: Ints | None
    """Which of the step's tokens they have: whose queries come here; None: all."""
    kept: Ints | None
    """Which of the step's tokens are stored here; None: all."""
    starts: Ints | None
    """Where queries of each sequence start among `rows`; None where the step's own tokens are the queries."""
    ranges: dict[int, Ints]
    """What each query sees here, by window."""


def host_rows(name: str, x: Any, shape: tuple[int | str, ...]) -> NDArray[Any]:
    """An array on the host, of a float dtype that rows and queries may have.

    Raises
    ------
    DimensionMismatch, UnsupportedDType
        If it is none, or has another shape; a text in `shape` stands for any number.
    """
    rows = np.asarray(x)
    if rows.dtype not in QUERY_DTYPES:
        raise UnsupportedDType(f"`{name}`: expected a float dtype, got {rows.dtype}")
    fits = rows.ndim == len(shape) and all(
        isinstance(n, str) or n == m for n, m in zip(shape, rows.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(map(str, shape))
        raise DimensionMismatch(
            f"`{name}`: expected ({wanted}), got {rows.shape}", expected=shape, actual=rows.shape
        )
    return rows


class Attending:
    """Attention of a layer that shards are computing; made by `ShardedStep.submit`."""

    def __init__(
        self,
        step: ShardedStep,
        tickets: list[list[Ticket]],
        q: NDArray[Any],
        asked: tuple[Any, bool],
    ) -> None:
        self._step, self._tickets = step, tickets
        self._q, self._asked = q, asked
        self._found: tuple[tuple[Any, Any], bool] | None = None

    def result(self) -> Any:
        """Wait for it.

        Returns
        -------
        out : array (num_tokens, num_q_heads, head_dim_v)
            In q's dtype.
        lse : float32 array (num_tokens, num_q_heads)
            Only if it was asked for.

        Raises
        ------
        ShardLost
            If a shard was lost.
        NumkvError
            What a shard raised. After both the step is rolled back on all shards.
        """
        if self._found is None:
            step, sinks, return_lse = self._step, *self._asked
            step._cache._gather([ticket for column in self._tickets for ticket in column], step)
            values = [[ticket.value for ticket in column] for column in self._tickets]
            parts = [
                Partial(part.rows, *side_by_side(of_column))
                for part, of_column in zip(step._attended if values else (), values, strict=True)
            ]
            whole = not step._cache._is_split
            shape = (*self._q.shape[:2], step._cache.rows.head_dim_v)
            self._found = merged(parts, shape, self._q.dtype, sinks, whole), return_lse
            self._tickets = []
        (out, lse), return_lse = self._found
        return (out, lse) if return_lse else out


def side_by_side(values: list[Any]) -> tuple[Any, Any]:
    """Output and lse of all heads of a column."""
    if isinstance(values[0], tuple):
        outs, lses = zip(*values, strict=True)
    else:
        outs, lses = tuple(values), None
    out = outs[0] if len(outs) == 1 else np.concatenate(outs, 1)
    if lses is None:
        return out, None
    return out, lses[0] if len(lses) == 1 else np.concatenate(lses, 1)


class ShardedStep:
    """New tokens of some sequences; made by `ShardedKVCache.reserve`.

    Attributes
    ----------
    open : bool
        Whether it has neither been committed nor rolled back.
    sequences : tuple of int
        Its sequences.
    new_lens : int64 array (num_seqs,)
        How many tokens each of them gets.
    positions : int64 array (num_tokens,)
        Position of each new token in its sequence.

    Notes
    -----
    `append_attend`, and `append` or `write` followed by `attention`, are one message to each shard and layer. `submit`
    is the first of these without the waiting.
    """

    def __init__(
        self,
        cache: Any,
        number: int,
        sequences: dict[int, tuple[tuple[Run, ...], list[Run]]],
        new_lens: Ints,
    ) -> None:
        self._cache, self.number = cache, number
        self.sequences, self.new_lens = tuple(sequences), new_lens
        self.open, self._rolled_back = True, False
        self._access = Access()
        self.pieces = {seq: new for seq, (_, new) in sequences.items()}
        lengths = [sum(n for _, n in runs) for runs, _ in sequences.values()]
        self.positions = np.concatenate(
            [np.empty(0, np.int64)]
            + [np.arange(at, at + n) for at, n in zip(lengths, new_lens.tolist(), strict=True)]
        )
        self.parts = _parts(sequences, new_lens, cache._windows, cache._is_split)
        self._attended = [part for part in self.parts if part.rows is None or len(part.rows)]
        self._written = np.zeros(cache.num_layers, np.bool_)
        self._held: dict[int, tuple[Any, Any, bool]] = {}
        self.tickets: list[Ticket] = []

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return len(self.positions)

    @property
    def columns(self) -> set[int]:
        """Columns that it writes to or reads."""
        return {part.column for part in self.parts}

    @property
    def unwritten_layers(self) -> list[int]:
        """Layers without rows of the new tokens so far; none if there are no new tokens."""
        missing: list[int] = np.flatnonzero(~self._written).tolist() if self.num_tokens else []
        return missing

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotSupported("a ShardedStep cannot be copied or pickled: commit it or roll it back")

    def __repr__(self) -> str:
        state = "open" if self.open else "ended"
        return f"<ShardedStep: {state}, {self.num_tokens} new tokens of {len(self.sequences)} sequences>"

    # -- rows

    @writes
    def append(self, layer: int, k: Any, v: Any, *, check_finite: bool = True) -> None:
        """Note ready rows of the new tokens; they are sent with the layer's queries, or by `commit`.

        Parameters
        ----------
        layer, k, v, check_finite
            See `numkv.Step.append`.

        Raises
        ------
        DimensionMismatch, UnsupportedDType, IndexError, NumkvError
            If they do not fit; nothing is noted.
        """
        number = self._check_layer(layer)
        k, v = self._check_rows(k, v)
        self._held[number] = k.copy(), v.copy(), bool(check_finite)
        self._written[number] = True

    @writes
    def write(
        self, layer: int, qkv: Any, *, num_q_heads: int, cos: Any = None, sin: Any = None, qk_mode: QKMode | int,
        q_norm_weight: Any = None, k_norm_weight: Any = None, eps: float = 1e-6, check_finite: bool = True,
    ) -> NDArray[Any]:  # fmt: skip
        """Split and normalise the new tokens' projections, apply RoPE, and note K and V, in this process.

        Parameters
        ----------
        layer, qkv, num_q_heads, cos, sin, qk_mode, q_norm_weight, k_norm_weight, eps, check_finite
            See `numkv.Step.write`.

        Returns
        -------
        array (num_tokens, num_q_heads, head_dim)
            q, in qkv's dtype.

        Raises
        ------
        DimensionMismatch, UnsupportedDType, NotSupported, IndexError, ValueError
            See `numkv.Step.write`; nothing is noted.
        """
        number, cache, n = self._check_layer(layer), self._cache, self.num_tokens
        qkv = np.asarray(qkv)
        if qkv.ndim != 2 or len(qkv) != n:
            raise DimensionMismatch(
                f"`qkv`: expected rows of the step's {n} tokens, got {qkv.shape}", n, qkv.shape
            )
        wide = np.float64 if np.float64 in (qkv.dtype, cache._widest) else np.float32
        k, v = (
            np.empty((1, cache.rows.num_kv_heads, max(n, 1), dim), wide)
            for dim in (cache.rows.head_dim, cache.rows.head_dim_v)
        )
        q: NDArray[Any] = paged_write(
            qkv, k, v, np.arange(n), num_q_heads=num_q_heads, positions=self.positions, cos=cos, sin=sin,
            qk_mode=qk_mode, q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight, eps=eps,
        )  # fmt: skip
        k, v = (np.ascontiguousarray(x[0, :, :n].swapaxes(0, 1)) for x in (k, v))
        self._held[number] = k, v, bool(check_finite)
        self._written[number] = True
        return q

    @writes
    def attention(
        self, layer: int, q: Any, *, sm_scale: float | None = None, logits_soft_cap: float = 0.0,
        sinks: Any = None, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        """Attend with the new tokens' queries, each to itself and earlier tokens, within the layer's window.

        Parameters
        ----------
        layer, q, sm_scale, logits_soft_cap, sinks, return_lse
            See `numkv.Step.attention`.

        Returns
        -------
        out : array (num_tokens, num_q_heads, head_dim_v)
            In q's dtype.
        lse : float32 array (num_tokens, num_q_heads)
            Only with `return_lse`.

        Raises
        ------
        ShardLost, NumkvError
            See `Attending.result`.
        """
        number = self._check_layer(layer)
        rows = self._held.get(number)
        options = sm_scale, logits_soft_cap, sinks, return_lse
        return self._submit(number, rows, q, options).result()

    @writes
    def append_attend(
        self,
        layer: int,
        k: Any,
        v: Any,
        q: Any,
        *,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        sinks: Any = None,
        return_lse: bool = False,
        check_finite: bool = True,
    ) -> Any:
        """Append rows of a layer and attend: one message to each shard.

        Parameters
        ----------
        layer, k, v, check_finite
            See `numkv.Step.append`.
        q, sm_scale, logits_soft_cap, sinks, return_lse
            See `numkv.Step.attention`.

        Returns
        -------
        array or tuple of array
            See `attention`.

        Raises
        ------
        ShardLost, NumkvError
            See `Attending.result`.
        """
        rows = (*self._check_rows(k, v), bool(check_finite))
        options = sm_scale, logits_soft_cap, sinks, return_lse
        return self._submit(self._check_layer(layer), rows, q, options).result()

    @writes
    def submit(
        self,
        layer: int,
        k: Any,
        v: Any,
        q: Any,
        *,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        sinks: Any = None,
        return_lse: bool = False,
        check_finite: bool = True,
    ) -> Attending:
        """`append_attend` without waiting: what does not need the result can be computed, or sent, meanwhile.

        Parameters
        ----------
        layer, k, v, q, sm_scale, logits_soft_cap, sinks, return_lse, check_finite
            See `append_attend`.

        Returns
        -------
        Attending
            Its `result` waits.

        Notes
        -----
        Where as much as may be is on its way to a shard already, this waits for the oldest answer.
        """
        rows = (*self._check_rows(k, v), bool(check_finite))
        options = sm_scale, logits_soft_cap, sinks, return_lse
        return self._submit(self._check_layer(layer), rows, q, options)

    # -- messages

    def _submit(self, layer: int, rows: Any, q: Any, options: tuple[Any, ...]) -> Attending:
        """Send rows and queries of a layer."""
        cache = self._cache
        sm_scale, cap, sinks, return_lse = options
        q = host_rows("q", q, (self.num_tokens, "num_q_heads", cache.rows.head_dim))
        cache._check_q_heads(q.shape[1])
        asked: dict[str, Any] = {"sm_scale": sm_scale, "logits_soft_cap": cap}
        sinks = cache._check_options(asked, sinks, q.shape[1])
        sent = cache._for_shards(q)
        if not cache._is_split:
            asked["return_lse"] = bool(return_lse)
        tickets = []
        if self.num_tokens:
            tickets = [
                self._send(part, layer, rows, sent, asked, None if cache._is_split else sinks)
                for part in self._attended
            ]
            self.tickets += [ticket for column in tickets for ticket in column]
        self._held.pop(layer, None)
        self._written[layer] |= rows is not None
        own = sinks if cache._is_split else None
        return Attending(self, tickets, q, (own, bool(return_lse)))

    def _send(
        self, part: Part, layer: int, rows: Any, q: Any, asked: dict[str, Any], sinks: Any
    ) -> list[Ticket]:
        """Send one column's share of a layer."""
        cache = self._cache
        window = cache._windows[layer]
        if q is not None and part.rows is not None:
            q = q[part.rows]
        if rows is not None:
            k, v, check_finite = rows
            if part.kept is not None:
                rows = (k[part.kept], v[part.kept], check_finite)
        tickets = []
        for index, shard in enumerate(cache._layout.shards_of(part.column)):
            own, queries, options = rows, None, asked
            if own is not None:
                heads = cache._layout.kv_heads(index)
                own = (own[0][:, heads], own[1][:, heads], own[2])
            if q is not None:
                heads = cache._layout.q_heads(index, q.shape[1])
                queries = q[:, heads]
                if sinks is not None:
                    options = {**asked, "sinks": sinks[heads]}
            tickets.append(
                cache._channels[shard].send(
                    "layer", self.number, layer, window, own, queries, options
                )
            )
        return tickets

    def _send_held(self) -> None:
        """Send rows whose layers were not attended to."""
        for layer, rows in list(self._held.items()):
            for part in self.parts:
                if part.kept is None or len(part.kept):
                    self.tickets += self._send(part, layer, rows, None, {}, None)
        self._held.clear()

    def _end(self) -> None:
        """Take no more rows."""
        self.open = False
        self._held.clear()
        self.tickets = []

    def _check_layer(self, layer: int) -> int:
        if not self.open:
            raise NumkvError("expected an open step, got one that was committed or rolled back")
        return check_index("layer", layer, self._cache.num_layers)

    def _check_rows(self, k: Any, v: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        cache, n = self._cache, self.num_tokens
        return (
            host_rows("k", k, (n, cache.rows.num_kv_heads, cache.rows.head_dim)),
            host_rows("v", v, (n, cache.rows.num_kv_heads, cache.rows.head_dim_v)),
        )


def _parts(
    sequences: dict[int, tuple[tuple[Run, ...], list[Run]]],
    new_lens: Ints,
    windows: Sequence[int],
    is_split: bool,
) -> list[Part]:
    """What each column has to do with new tokens of some sequences."""
    if not is_split:
        return [Part(0, list(sequences), new_lens.tolist(), None, None, None, {})]
    ends = np.cumsum(new_lens)
    found = []
    own = [counts(runs) for runs, _ in sequences.values()]
    new = [counts(pieces) for _, pieces in sequences.values()]
    of_token = np.concatenate(
        [np.empty(0, np.int64)] + [columns_of_tokens(pieces) for _, pieces in sequences.values()]
    )
    for column in sorted({c for has in (*own, *new) for c in has}):
        seqs, lens, rows = [], [], [np.empty(0, np.int64)]
        ranges: dict[int, list[Ints]] = {w: [np.empty((0, 2), np.int64)] for w in set(windows)}
        for i, (seq, (runs, pieces)) in enumerate(sequences.items()):
            if column not in own[i] and column not in new[i]:
                continue
            n, end = int(new_lens[i]), int(ends[i])
            seqs.append(seq)
            lens.append(new[i].get(column, 0))
            rows.append(np.arange(end - n, end))
            length = sum(count for _, count in runs)
            after, positions = joined(runs, pieces), np.arange(length, length + n)
            for window, parts in ranges.items():
                parts.append(visible(after, column, positions, window))
        starts = np.cumsum([0, *(len(x) for x in rows[1:])])
        found.append(
            Part(
                column, seqs, lens, np.concatenate(rows), np.flatnonzero(of_token == column), starts,
                {window: np.concatenate(parts) for window, parts in ranges.items()},
            )
        )  # fmt: skip
    return found
