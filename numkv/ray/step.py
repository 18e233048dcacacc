"""`ShardedStep`, the new tokens of a forward pass, and `Attending`, the pending result of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from numkv.access import Access, writes
from numkv.attention import merge_states
from numkv.attention.attend import check_group
from numkv.checks import host_array
from numkv.errors import DimensionMismatch, NotSupported, NumkvError, UnsupportedDType
from numkv.kinds import QUERY_DTYPES
from numkv.numbers import check_flag, check_index
from numkv.ray.sequences import Run, columns_of_tokens, counts, joined, visible
from numkv.ray.transport import Ticket
from numkv.writing.fused_write import QKMode
from numkv.writing.paged import paged_write


class Partial(NamedTuple):
    """The attention result of one column."""

    rows: NDArray[np.int64] | None
    """Indices of its queries; None for all."""
    out: NDArray[Any]
    lse: NDArray[np.float32] | None


def merged(
    parts: list[Partial], shape: tuple[int, ...], dtype: Any, sinks: Any, is_split: bool
) -> tuple[NDArray[Any], Any]:
    """Merge the results of columns by lse, in the order of columns, whatever the order of their replies.

    Parameters
    ----------
    parts : list of Partial
        Results, in the order of columns.
    shape : tuple of int
        Shape of the merged output.
    dtype : dtype
        Dtype of the merged output.
    sinks : array (num_q_heads,), optional
        Sink logits, which belong to no column.
    is_split : bool
        Whether tokens are divided among columns; if not, the only result is returned unchanged.

    Returns
    -------
    out : array
    lse : float32 array or None
    """
    if not is_split and parts and len(parts[0].out) == shape[0]:
        return np.array(parts[0].out), parts[0].lse
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    out: Any = np.zeros(shape, wide)
    lse: Any = np.full(shape[:2], -np.inf, np.float32)
    if not shape[0]:
        return out.astype(dtype), lse
    for part in parts:
        rows = slice(None) if part.rows is None else part.rows
        own = np.asarray(part.out, wide)
        out[rows], lse[rows] = merge_states(out[rows], lse[rows], own, part.lse)
    if sinks is not None:
        of_sinks = np.broadcast_to(np.asarray(sinks, np.float32), shape[:2])
        out, lse = merge_states(out, lse, np.zeros_like(out), np.ascontiguousarray(of_sinks))
    return out.astype(dtype), lse


Ints = NDArray[np.int64]


class Part(NamedTuple):
    """The share of one column in a step."""

    column: int
    seqs: list[int]
    """Sequences of the step with old or new tokens in this column."""
    new_lens: list[int]
    """Number of new tokens of each of them in this column."""
    rows: Ints | None
    """Indices of the step's tokens whose queries attend to this column; None for all."""
    kept: Ints | None
    """Indices of the step's tokens that are stored in this column; None for all."""
    starts: Ints | None
    """Start of each sequence's queries among `rows`; None if the step's own tokens are the queries."""
    ranges: dict[int, Ints]
    """Visible range of each query in this column, by window."""


def host_rows(name: str, x: Any, shape: tuple[int | str, ...]) -> NDArray[Any]:
    """Return rows or queries as a host array of a float dtype.

    Raises
    ------
    DimensionMismatch, UnsupportedDType
        If the dtype or the shape differs; a text in `shape` stands for any number.
    """
    rows = host_array(name, x)
    if rows.dtype not in QUERY_DTYPES:
        raise UnsupportedDType(f"`{name}`: expected a float dtype, got {rows.dtype}")
    fits = rows.ndim == len(shape) and all(
        isinstance(n, str) or n == m for n, m in zip(shape, rows.shape, strict=True)
    )
    if not fits:
        wanted, got = ", ".join(map(str, shape)), rows.shape
        raise DimensionMismatch(f"`{name}`: expected ({wanted}), got {got}", shape, got)
    return rows


class Queries:
    """Checked queries of a layer, and the options that shards receive with them.

    Parameters
    ----------
    shards : Shards
        Shards of the cache.
    q : array (num_tokens, num_q_heads, head_dim)
        The queries.
    num_tokens : int
        Expected number of queries.
    options : tuple
        `sm_scale`, `logits_soft_cap`, `sinks` and `return_lse`, as for attention.
    """

    def __init__(self, shards: Any, q: Any, num_tokens: int, options: tuple[Any, ...]) -> None:
        sm_scale, cap, sinks, return_lse = options
        self.q = q = host_rows("q", q, (num_tokens, "num_q_heads", shards.rows.head_dim))
        check_group(q.shape[1], shards.rows.num_kv_heads)
        self.return_lse, self._shards = check_flag("return_lse", return_lse), shards
        self._options: dict[str, Any] = {"sm_scale": sm_scale, "logits_soft_cap": cap}
        self.sinks = shards.check_options(self._options, sinks, q.shape[1])
        # Partial results are not rounded to 16 bits.
        self._sent = q.astype(np.float32) if shards.is_split and q.dtype.itemsize < 4 else q
        if not shards.is_split:
            self._options["return_lse"] = self.return_lse

    def of(self, part: int, rows: Ints | None) -> tuple[NDArray[Any], dict[str, Any]]:
        """Return the queries of a part's heads, all or some, and the options for its shards."""
        heads, options = self._shards.layout.q_heads(part, self.q.shape[1]), self._options
        if self.sinks is not None and not self._shards.is_split:
            options = {**options, "sinks": self.sinks[heads]}
        return (self._sent if rows is None else self._sent[rows])[:, heads], options


class Attending:
    """The pending attention of a layer; made by `ShardedStep.submit`."""

    def __init__(
        self,
        shards: Any,
        queries: Queries,
        columns: list[tuple[Ints | None, list[Ticket]]],
        step: ShardedStep | None,
    ) -> None:
        self._shards, self._queries, self._columns, self._step = shards, queries, columns, step
        self._found: tuple[Any, Any] | None = None

    def result(self) -> Any:
        """Wait for the result.

        Returns
        -------
        out : array (num_tokens, num_q_heads, head_dim_v)
            Output in q's dtype.
        lse : float32 array (num_tokens, num_q_heads)
            Only with `return_lse`.

        Raises
        ------
        ShardLost
            If a shard was lost.
        NumkvError
            The error of a shard. After either error the step is rolled back on all shards.
        """
        queries, shards = self._queries, self._shards
        if self._found is None:
            shards.gather([x for _, tickets in self._columns for x in tickets], self._step)
            parts = [
                Partial(rows, *_side_by_side([ticket.value for ticket in tickets]))
                for rows, tickets in self._columns
            ]
            shape = (*queries.q.shape[:2], shards.rows.head_dim_v)
            sinks = queries.sinks if shards.is_split else None
            self._found = merged(parts, shape, queries.q.dtype, sinks, shards.is_split)
            self._columns = []
        return self._found if queries.return_lse else self._found[0]


def _side_by_side(values: list[Any]) -> tuple[Any, Any]:
    """Concatenate the heads' outputs and lse of a column's shards."""
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
        Whether it was neither committed nor rolled back.
    sequences : tuple of int
        Its sequences.
    new_lens : int64 array (num_seqs,)
        Number of new tokens of each sequence.
    positions : int64 array (num_tokens,)
        Position of each new token in its sequence.

    Notes
    -----
    `append_attend`, or `append` or `write` followed by `attention`, sends one message per shard and layer. `submit` is
    `append_attend` without waiting.
    """

    def __init__(
        self,
        shards: Any,
        number: int,
        sequences: dict[int, tuple[tuple[Run, ...], list[Run]]],
        new_lens: Ints,
    ) -> None:
        self.shards, self.number = shards, number
        self.sequences, self.new_lens = tuple(sequences), new_lens
        self.open, self.rolled_back = True, False
        self._access = Access()
        self.pieces = {seq: new for seq, (_, new) in sequences.items()}
        lengths = [sum(n for _, n in runs) for runs, _ in sequences.values()]
        self.positions = np.concatenate(
            [np.empty(0, np.int64)]
            + [np.arange(at, at + n) for at, n in zip(lengths, new_lens.tolist(), strict=True)]
        )
        self.parts = _parts(sequences, new_lens, shards.windows, shards.is_split)
        self._attended = [part for part in self.parts if part.rows is None or len(part.rows)]
        self._written = np.zeros(shards.model.num_layers, np.bool_)
        self._held: dict[int, tuple[Any, Any, bool]] = {}
        self.tickets: list[Ticket] = []

    @property
    def num_tokens(self) -> int:
        """Return the number of new tokens of all sequences."""
        return len(self.positions)

    @property
    def columns(self) -> set[int]:
        """Return the columns that the step writes to or reads."""
        return {part.column for part in self.parts}

    @property
    def unwritten_layers(self) -> list[int]:
        """Return the layers that still lack rows of the new tokens; none if there are no new tokens."""
        return np.flatnonzero(~self._written).tolist() if self.num_tokens else []

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotSupported("a ShardedStep cannot be copied or pickled: commit it or roll it back")

    def __repr__(self) -> str:
        state = "open" if self.open else "ended"
        return f"<ShardedStep: {state}, {self.num_tokens} new tokens of {len(self.sequences)} sequences>"

    # -- rows

    @writes
    def append(self, layer: int, k: Any, v: Any, *, check_finite: bool = True) -> None:
        """Record finished rows of the new tokens; they are sent with the layer's queries, or by `commit`.

        Parameters
        ----------
        layer, k, v, check_finite
            See `numkv.Step.append`.

        Raises
        ------
        DimensionMismatch, UnsupportedDType, IndexError, NumkvError
            If they do not fit; nothing is recorded.
        """
        number = self._check_layer(layer)
        k, v, check_finite = self._check_rows(k, v, check_finite)
        self._held[number] = k.copy(), v.copy(), check_finite
        self._written[number] = True

    @writes
    def write(
        self, layer: int, qkv: Any, *, num_q_heads: int, cos: Any = None, sin: Any = None, qk_mode: QKMode | int,
        q_norm_weight: Any = None, k_norm_weight: Any = None, eps: float = 1e-6, check_finite: bool = True,
    ) -> NDArray[Any]:  # fmt: skip
        """Split and normalise the new tokens' projections, apply RoPE, and record K and V, in this process.

        Parameters
        ----------
        layer, qkv, num_q_heads, cos, sin, qk_mode, q_norm_weight, k_norm_weight, eps, check_finite
            See `numkv.Step.write`.

        Returns
        -------
        array (num_tokens, num_q_heads, head_dim)
            Queries in qkv's dtype.

        Raises
        ------
        DimensionMismatch, UnsupportedDType, NotSupported, IndexError, ValueError
            See `numkv.Step.write`; nothing is recorded.
        """
        number, of, n = self._check_layer(layer), self.shards.rows, self.num_tokens
        qkv, check_finite = host_array("qkv", qkv), check_flag("check_finite", check_finite, True)
        if qkv.ndim != 2 or len(qkv) != n:
            raise DimensionMismatch(
                f"`qkv`: expected rows of the step's {n} tokens, got {qkv.shape}", n, qkv.shape
            )
        wide = np.float64 if np.float64 in (qkv.dtype, self.shards.widest) else np.float32
        k, v = (
            np.empty((1, of.num_kv_heads, max(n, 1), dim), wide)
            for dim in (of.head_dim, of.head_dim_v)
        )
        q: NDArray[Any] = paged_write(
            qkv, k, v, np.arange(n), num_q_heads=num_q_heads, positions=self.positions, cos=cos, sin=sin,
            qk_mode=qk_mode, q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight, eps=eps,
        )  # fmt: skip
        k, v = (np.ascontiguousarray(x[0, :, :n].swapaxes(0, 1)) for x in (k, v))
        self._held[number] = k, v, check_finite
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
            Output in q's dtype.
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
        rows = self._check_rows(k, v, check_finite)
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
        """Start `append_attend` without waiting, so that the caller can compute or send other work meanwhile.

        Parameters
        ----------
        layer, k, v, q, sm_scale, logits_soft_cap, sinks, return_lse, check_finite
            See `append_attend`.

        Returns
        -------
        Attending
            The pending result; `Attending.result` waits.

        Notes
        -----
        If the pending messages to a shard reach its `Limits`, this call waits for the oldest reply.
        """
        rows = self._check_rows(k, v, check_finite)
        options = sm_scale, logits_soft_cap, sinks, return_lse
        return self._submit(self._check_layer(layer), rows, q, options)

    # -- messages

    def _submit(self, layer: int, rows: Any, q: Any, options: tuple[Any, ...]) -> Attending:
        """Send rows and queries of a layer."""
        queries = Queries(self.shards, q, self.num_tokens, options)
        columns = []
        if self.num_tokens:
            columns = [(x.rows, self._send(x, layer, rows, queries)) for x in self._attended]
            self.tickets += [ticket for _, tickets in columns for ticket in tickets]
        self._held.pop(layer, None)
        self._written[layer] |= rows is not None
        return Attending(self.shards, queries, columns, self)

    def _send(self, part: Part, layer: int, rows: Any, queries: Queries | None) -> list[Ticket]:
        """Send one column's share of a layer."""
        shards, tickets = self.shards, []
        window = shards.windows[layer]
        if rows is not None and part.kept is not None:
            k, v, check_finite = rows
            rows = k[part.kept], v[part.kept], check_finite
        for index, shard in enumerate(shards.layout.shards_of(part.column)):
            own, heads = rows, shards.layout.kv_heads(index)
            if own is not None:
                own = (own[0][:, heads], own[1][:, heads], own[2])
            q, options = (None, {}) if queries is None else queries.of(index, part.rows)
            sent = shards.channels[shard].send("layer", self.number, layer, window, own, q, options)
            tickets.append(sent)
        return tickets

    def send_held(self) -> None:
        """Send rows whose layers were not attended to."""
        for layer, rows in list(self._held.items()):
            for part in self.parts:
                if part.kept is None or len(part.kept):
                    self.tickets += self._send(part, layer, rows, None)
        self._held.clear()

    def end(self) -> None:
        """Mark the step as ended."""
        self.open = False
        self._held.clear()
        self.tickets = []

    def _check_layer(self, layer: int) -> int:
        if not self.open:
            raise NumkvError("expected an open step, got one that was committed or rolled back")
        return check_index("layer", layer, self.shards.model.num_layers)

    def _check_rows(self, k: Any, v: Any, check_finite: Any) -> tuple[Any, Any, bool]:
        of, n = self.shards.rows, self.num_tokens
        return (
            host_rows("k", k, (n, of.num_kv_heads, of.head_dim)),
            host_rows("v", v, (n, of.num_kv_heads, of.head_dim_v)),
            check_flag("check_finite", check_finite, True),
        )


def _parts(
    sequences: dict[int, tuple[tuple[Run, ...], list[Run]]],
    new_lens: Ints,
    windows: Sequence[int],
    is_split: bool,
) -> list[Part]:
    """Return the share of each column in a step."""
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
