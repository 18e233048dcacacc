"""Bound calls: append a layer's new rows and attend with its queries in one call, checked once, when it is bound.

A model makes two calls for each layer and token, `append` and attention. Both check all of their inputs: buffers,
scales, options, the length. Here that is done once for each cache (`bind`) and once for each step (`begin`). A layer
then needs one compiled function, which checks the four arrays that are new::

    bound = cache.bind(num_q_heads, "bf16")
    step = bound.begin()                        # one new token; or begin(n), or begin(cache.reserve(...))
    for layer in range(cache.num_layers):
        out = step(layer, q, k, v)              # as append and attention, bit by bit
    cache.advance()                             # or cache.commit(...), as ever

Other calls use the ordinary functions, which append and attend, or raise. Examples are a rotated cache, full-precision
tokens, the first token of a token group, long prompts, CUDA, and an array that differs from the bound one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from numkv.access import Access, writes
from numkv.attention.attend import check_group, check_out, check_sinks
from numkv.attention.options import CheckedOptions, check_options
from numkv.checks import check_array
from numkv.compaction.moves import slots_of
from numkv.errors import DimensionMismatch, NotSupported, NumkvError, UnsupportedDType
from numkv.kinds import QUERY_DTYPES, Kind, compute_dtype
from numkv.kinds import kind as named
from numkv.numbers import check_flag, check_index, check_size
from numkv.storage.buffer import source_dtypes
from numkv.storage.pool import Pool

_UINT16 = np.dtype(np.uint16)
_empty, _array = np.empty, np.ndarray
_ALWAYS = np.ones(1, np.int64)  # buffers that are never replaced


class Rows(NamedTuple):
    """The bound shapes and dtypes: the arrays of every call, except their numbers of tokens."""

    #: Of q, of new rows, and of the output.
    kind: Kind
    num_q_heads: int
    check_finite: bool

    @classmethod
    def check(cls, pool: Pool, num_q_heads: Any, kind: Any, check_finite: Any) -> Rows:
        """Check the arguments of a `bind` for a pool."""
        if pool.is_latent:
            raise NotSupported(
                "bind: expected a cache of K and V, got one of latents; call append or write_latents, then attention"
            )
        rows = cls(
            named(kind), check_size("num_q_heads", num_q_heads, 1), check_flag("check_finite", check_finite, True)
        )  # fmt: skip
        check_group(rows.num_q_heads, int(pool.k.shape[1]))
        taken = [
            d for d in source_dtypes(pool.k_kind)
            if d in source_dtypes(pool.v_kind) and d in QUERY_DTYPES
        ]  # fmt: skip
        if rows.kind.dtype not in taken or not rows.kind.is_query:
            raise UnsupportedDType(
                f"`kind`: expected one of {', '.join(map(str, taken)) or 'none'}, which new rows of K in {pool.k_kind} "
                f"and V in {pool.v_kind} may have, got {rows.kind}"
            )
        return rows


class ToBind(NamedTuple):
    """A layer as its cache hands it over."""

    pool: Pool
    num_q_heads: int
    arrays: Sequence[Any]  #: K, its scales, V and its scales, as the compiled function takes them
    group: int = 0  #: which of the tables of a step are its own
    at_once: bool = True  #: whether the compiled function does its calls, if there is one
    source: int | None = None  #: the layer whose rows it reads, if it has none of its own
    mark: Any = None  #: its length, which calls count up; None where the cache counts
    in_full: Any = None  #: kinds of the newest tokens' K and V where keys are stored by channel
    lives: Any = _ALWAYS  #: whether these buffers are still the cache's, in an array of one element


class NewTokens(NamedTuple):
    """The places of a step's new tokens, which a cache passes at its beginning."""

    access: Access
    num_tokens: int
    pools: Any  #: another object where buffers have been replaced
    tables: Sequence[Any]  #: blocks ``(num_seqs, max_blocks)``; these and slots of each group
    lens: Any
    starts: Any
    slots: Sequence[Any]
    block_size: int
    #: ``two_calls(layer, q, k, v, options, check_finite)`` appends and attends the ordinary ways; all is checked, and
    #: undone if it fails.
    two_calls: Callable[..., Any]
    ended: Callable[[int], str]  #: what to say of a layer that has no call left
    begun: list[Any]  #: takes the layers that are left, a dict which the cache may clear
    lengths: tuple[int, int] = (0, 0)  #: of each layer's mark, before and after
    written: Any = None  #: takes which layers have been called, if the cache wants to know
    place: Any = None
    in_full: Any = None  #: a `numkv.caches.newest_groups.NewestGroups`, if the cache has one


class PreparedCall(NamedTuple):
    """A call that only lacks its arrays: compiled code, and the addresses of its records."""

    kernel: Any
    dtype: np.dtype[Any]
    shape: tuple[int, ...]  #: of the output
    step: int
    workers: int
    layer: int
    records: tuple[Any, Any]  #: which are at these addresses

    def run(self, q: Any, k: Any, v: Any, out: Any) -> Any:
        """Append and attend; return None, with nothing changed, if the compiled code cannot do it."""
        kernel, dtype, shape, step, workers, layer, _ = self
        found = _empty(shape, dtype) if out is None else out
        if not (
            type(q) is type(k) is type(v) is type(found) is _array
            and q.dtype == k.dtype == v.dtype == found.dtype == dtype
        ):  # fmt: skip
            return None
        words = found
        if dtype.itemsize == 2:
            q, k, v, words = q.view(_UINT16), k.view(_UINT16), v.view(_UINT16), found.view(_UINT16)
        try:
            if workers == 1:
                failed = kernel.call(layer, step, q, k, v, words, 0)
            else:
                failed = kernel.launched(kernel.call, workers, layer, step, q, k, v, words)
        except TypeError:  # another rank, read-only or unaligned
            return None
        return None if failed else found


class _Plan(NamedTuple):
    """The arguments that layers share in a step: their blocks, the window, and sizes."""

    group: int
    window: int
    sizes: tuple[int, int, int, int]  #: q heads, kv heads, elements of a K row and of a V row
    kernel: Any  #: the compiled function; None where calls go the ordinary ways
    most_tokens: int  #: that one compiled call takes

    def memory(self, last: Any, num_seqs: int, num_tokens: int, max_blocks: int) -> Any:
        """Return memory for a step: that of the last step if it has the same extents."""
        extents = (num_seqs, num_tokens, max_blocks, *self.sizes)
        return last if last is not None and last.extents == extents else self.kernel.step(*extents)

    def call(self, kind: Kind, step: Any) -> tuple[Any, np.dtype[Any], tuple[int, ...], int, int]:
        """Return the common values of a step's prepared calls, by its record."""
        shape = step.extents.num_tokens, self.sizes[0], self.sizes[3]
        return self.kernel, kind.dtype, shape, step.address, step.workers


# Layouts of arrays that are remembered as checked.
_MOST_SEEN = 1024


def is_number(x: Any) -> bool:
    """Return whether a value is one for all layers, as it has no entries of its own."""
    return not (isinstance(x, (list, tuple)) or getattr(x, "ndim", 0) == 1)


def of_each(name: str, given: Any, layers: int, is_of_all: Callable[[Any], bool]) -> list[Any]:
    """Return a caller's argument for each layer, which may be one for all of them."""
    if is_of_all(given):
        return [given] * layers
    try:
        count = len(given)
    except Exception:  # something that others have words for
        return [given] * layers
    if count != layers:
        raise DimensionMismatch(
            f"`{name}`: expected one for all layers or one for each of {layers}, got {count}",
            expected=layers,
            actual=count,
        )
    return [given[layer] for layer in range(layers)]


def options_of_layers(
    pools: Sequence[Pool],
    rows: Rows,
    sm_scale: Any,
    logits_soft_cap: Any,
    windows: Sequence[Any],
    sinks: Any,
) -> list[CheckedOptions]:
    """Check options, of which windows and sinks may be each layer's own, as those of every layer."""
    found = []
    num_q_heads = rows.num_q_heads
    of_each: list[Any] = [sinks] * len(pools)
    if sinks is not None and len(pools):
        given = pools[0].target.asarray(sinks, "sinks")
        of_each = [given] * len(pools)
        if given.ndim == 2:
            if len(given) != len(pools):
                raise DimensionMismatch(
                    f"`sinks`: expected ({num_q_heads},) or a row for each layer, ({len(pools)}, {num_q_heads}), got "
                    f"{tuple(given.shape)}",
                    expected=(len(pools), num_q_heads),
                    actual=tuple(given.shape),
                )
            of_each = [given[layer] for layer in range(len(pools))]
    for pool, window, of_layer in zip(pools, windows, of_each, strict=True):
        options = check_options(
            {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap, "window_left": window}
        )
        if of_layer is not None:
            compute = compute_dtype(rows.kind.name, pool.k_kind.name, pool.v_kind.name)
            checked = check_sinks(pool.target, of_layer, compute, num_q_heads, True)
            if pool.target.values_on_host:
                checked = np.array(checked)  # which the caller may change
            options = options._replace(sinks=checked)
        found.append(options)
    return found


class Bound:
    """The common part of bound caches and layers: each layer's bound arguments, and the checks of its arrays.

    Parameters
    ----------
    layers : sequence of ToBind or None
        The layers; None for one that has no calls.
    rows : Rows
        The bound shapes and dtypes.
    options : sequence of CheckedOptions or None
        The options of each layer.
    """

    def __init__(self, layers: Sequence[Any], rows: Rows, options: Sequence[Any]) -> None:
        self._layers, self._rows, self._options = layers, rows, options
        self._seen: set[Any] = set()  # layouts of arrays that have been checked

    @property
    def kind(self) -> Kind:
        """Kind of q, k, v and the output."""
        return self._rows.kind

    @property
    def num_q_heads(self) -> int:
        """Q heads; if layers differ, those of the first layer with rows."""
        return self._rows.num_q_heads

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotSupported(
            f"a {type(self).__name__} cannot be copied or pickled: bind the copy of the cache"
        )

    def __repr__(self) -> str:
        layers = len(self._options)
        return f"<{type(self).__name__}: layers={layers}, kind={self.kind}, num_q_heads={self.num_q_heads}>"

    def _plan(self, layer: int) -> _Plan:
        """Return the `_Plan` of a layer's calls."""
        of, pool = self._layers[layer], self._layers[layer].pool
        kernel, kind = None, self.kind.name
        if of.at_once and pool.target.values_on_host and not pool.rotate:
            kernel = pool.target.ops.append_attend(
                kind, kind, pool.k_kind.name, pool.v_kind.name, in_full=of.in_full
            )
        sizes = of.num_q_heads, int(pool.k.shape[1]), pool.head_dim, pool.head_dim_v
        most = (
            0
            if kernel is None
            else (pool.target.small_call - 1) // (max(sizes[:2]) * max(sizes[2:]))
        )
        return _Plan(of.group, self._options[layer].window_left, sizes, kernel, most)

    def _record(self, layer: int, kernel: Any) -> Any:
        """Return a layer's record for its compiled function; None if it has none or reads another layer's rows."""
        of, options = self._layers[layer], self._options[layer]
        if kernel is None or of.source is not None:
            return None
        return kernel.layer(
            *of.arrays, np.empty(0, kernel.compute) if options.sinks is None else options.sinks,
            (options.scale(of.pool.head_dim), options.logits_soft_cap, options.window_left),
            self._rows.check_finite, of.mark, of.lives,
        )  # fmt: skip

    def _checked(
        self, layer: int, tokens: int, q: Any, k: Any, v: Any, out: Any
    ) -> tuple[Any, ...]:
        """See `_check`; on CUDA, arrays with a layout seen before are not checked here."""
        if self._layers[layer].pool.target.values_on_host:
            return self._check(layer, tokens, q, k, v, out)
        try:
            layout = layer, tokens, *((type(x), x.shape, x.dtype) for x in (q, k, v))
            if out is not None:
                layout = *layout, (type(out), out.shape, out.dtype)
            if layout in self._seen:
                return q, k, v, out
        except (AttributeError, TypeError):  # something that `_check` has words for
            return self._check(layer, tokens, q, k, v, out)
        checked = self._check(layer, tokens, q, k, v, out)
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen.add(layout)
        return checked

    def _check(self, layer: int, tokens: int, q: Any, k: Any, v: Any, out: Any) -> tuple[Any, ...]:
        """Check the arrays of a call of the ordinary functions; return them as arrays of the target."""
        (pool, heads, _, _, _, source, *_), dtypes = self._layers[layer], (self.kind.dtype,)
        target, rows = pool.target, (tokens, int(pool.k.shape[1]))
        if source is not None:
            for name, x in (("k", k), ("v", v)):
                if x is not None:
                    raise NotSupported(
                        f"`{name}`: expected None for layer {layer}, which reads the rows of layer {source}, got "
                        f"{type(x).__name__}"
                    )
        of_q = tokens, heads
        q = check_array(target, "q", q, dtypes, (*of_q, pool.head_dim))
        if out is not None:
            out = check_out(out, q, (pool,), {})
        if source is not None:
            return q, None, None, out
        k = check_array(target, "k", k, dtypes, (*rows, pool.head_dim))
        v = check_array(target, "v", v, dtypes, (*rows, pool.head_dim_v))
        first = self._rows.check_finite and pool.looks_first
        return q, *pool.check_rows(k, v, check_finite=first), out


class BoundAttention(Bound):
    """A cache's layers bound to the arrays and options of a model; made by the caches' `bind`.

    `begin` begins a step and returns the object to call for each layer. Whatever happens to the cache between
    steps, a growth included, the next `begin` adapts to it.

    Layers in the same blocks with as many q heads and the same window share a plan in a step. Layers whose queries
    attend within chunks, and those that read another one's rows, use the unbound path.

    Parameters
    ----------
    layers : function
        Gives a `ToBind` of each layer, or None; asked again where buffers have been replaced.
    begin : function
        ``begin(new, make)`` makes room for new tokens, as a writer, and hands `make` a `NewTokens`.
    rows, options
        See `Bound`.

    Notes
    -----
    A call appends and attends, and counts as one call of a writer (see `numkv.KVCache`, `numkv.Step` on threads). It
    cannot be copied or pickled, as it belongs to its cache.
    """

    def __init__(
        self, layers: Callable[[], list[Any]], begin: Callable[..., BoundStep], rows: Rows, options: Sequence[Any],
    ) -> None:  # fmt: skip
        super().__init__([], rows, options)
        self._layers_now, self._begin = layers, begin
        self._pools: Any = None
        self._plans: list[_Plan] = []
        #: The record of each layer that is called, and the number of its plan.
        self._records: dict[int, tuple[Any, int]] = {}
        # The last step's remaining layers and its memory, which the next step reuses if none remain.
        self._begun: list[tuple[dict[int, Any], list[Any]]] = []

    def begin(self, new: Any = 1) -> BoundStep:
        """Begin a step.

        Parameters
        ----------
        new : int or Step
            For a `numkv.KVCache` the number of new tokens; for a `numkv.PagedKVCache` the step that `reserve` returned.

        Returns
        -------
        BoundStep
            Called for each layer. Then `numkv.KVCache.advance` counts the tokens, or `numkv.KVCache.truncate` drops
            them. In a `numkv.Step`, each layer that was called counts as written. `numkv.PagedKVCache.commit` or
            `rollback` ends the step and this object.

        Raises
        ------
        NumkvError
            If rows have been appended and not yet advanced; if the step has ended, or is another cache's.
        CacheFull
            If `max_seq_len` leaves no room; nothing has changed.
        NotSupported
            If the step has a tree, or lies in `StepBuffers`.
        """
        return self._begin(new, self._begin_step)

    def _bind(self, pools: Any) -> None:
        """Make the records of all layers for the current buffers, and their plans."""
        self._layers = self._layers_now()
        plans: dict[Any, tuple[int, _Plan]] = {}
        records: dict[int, tuple[Any, int]] = {}
        for layer, of in enumerate(self._layers):
            if of is not None:
                key = of.group, of.num_q_heads, self._options[layer].window_left
                number, plan = plans.setdefault(key, (len(plans), self._plan(layer)))
                records[layer] = self._record(layer, plan.kernel), number
        # Each as a whole: steps of a paged cache may begin at once.
        self._plans, self._records = [plan for _, plan in plans.values()], records
        self._pools = pools

    def _begin_step(self, new: NewTokens) -> BoundStep:
        if new.pools is not self._pools:
            self._bind(new.pools)
        tokens, kind, spare = new.num_tokens, self._rows.kind, self._spare()
        memory: list[Any] = []
        common: list[Any] = []
        for number, plan in enumerate(self._plans):
            made = None
            if 0 < tokens <= plan.most_tokens:
                table, last = new.tables[plan.group], spare[number] if spare else None
                made = plan.memory(last, len(table), tokens, table.shape[1])
                made.block_table[:], made.seq_lens[:] = table, new.lens
                made.q_starts[:], made.slots[:] = new.starts, new.slots[plan.group]
                if new.in_full is not None:
                    start = new.lengths[0]
                    new.in_full.plan_bound(
                        made, table[0], new.block_size, start, tokens, plan.window
                    )
                made.plan(plan.window, new.block_size, *new.lengths)
            memory.append(made)
            common.append(made and plan.call(kind, made))
        ready: dict[int, PreparedCall | None] = dict.fromkeys(self._records)
        for layer, (record, number) in self._records.items():
            made = memory[number]
            if (
                record is not None
                and made is not None
                and _goes_on(new.in_full, record, layer, new.lengths[0], tokens)
            ):
                args = *common[number], record.address, (record, made)
                ready[layer] = PreparedCall._make(args)
        self._begun[:] = [(ready, memory)]
        new.begun.append(ready)
        return BoundStep(self, ready, new)

    def _spare(self) -> list[Any]:
        """Memory of the last step, if all its layers have been called; popped by one step alone."""
        try:
            left, memory = self._begun.pop()
        except IndexError:
            return []
        return [] if left or len(memory) != len(self._plans) else memory

    def _in_two_calls(self, new: NewTokens, layer: int, arrays: tuple[Any, ...]) -> Any:
        """Append and attend by the ordinary functions for a call of a `BoundStep`, all checks first."""
        pool, out = self._layers[layer].pool, arrays[3]
        with pool.target.on(*arrays[:3], pool.k, after=new.place):
            pool.target.refuse_capture("BoundStep")
            q, k, v, checked = self._checked(layer, new.num_tokens, *arrays)
            options = self._options[layer]._replace(out=checked)
            found = new.two_calls(layer, q, k, v, options, self._rows.check_finite)
        return found if out is None else out


def _goes_on(in_full: Any, record: Any, layer: int, start: int, tokens: int) -> bool:
    """Return whether a prepared call has room for its tokens in full, if any, and update its record."""
    if in_full is None:
        return True
    block = in_full.goes_on(layer, start, tokens)
    if block is not None and record.in_full is not block:
        record.keep_in_full(block)
    return block is not None


class BoundStep:
    """A step of new tokens through the layers of a bound cache; made by `BoundAttention.begin`.

    Parameters
    ----------
    bound : BoundAttention
        Its maker.
    ready : dict
        The prepared call of each layer that is still to be called; None if it uses the ordinary functions.
    new : NewTokens
        The cache's places for the new tokens.

    Attributes
    ----------
    num_tokens : int
        New tokens, of all sequences.

    Notes
    -----
    Each layer is called once, in any order; `unwritten_layers` are those that are left. The step ends with the cache's
    own methods: ``advance`` or ``truncate`` of a `numkv.KVCache`, ``commit`` or ``rollback`` of a
    `numkv.PagedKVCache`.
    """

    def __init__(
        self, bound: BoundAttention, ready: dict[int, PreparedCall | None], new: NewTokens
    ) -> None:
        self._bound, self._ready, self._new = bound, ready, new
        self.num_tokens, self._access, self._written = new.num_tokens, new.access, new.written

    @writes
    def __call__(self, layer: int, q: Any, k: Any, v: Any, out: Any = None) -> Any:
        """Append the rows of the step's new tokens to a layer, and attend with their queries.

        The result equals the cache's `append` followed by attention, bit for bit. Each query sees itself, earlier new
        tokens and cached ones, within the bound window.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array (num_tokens, num_q_heads, head_dim)
            Queries of the new tokens, of one sequence after another, in the bound kind.
        k : array (num_tokens, num_kv_heads, head_dim)
            Their keys; None for a layer that reads another one's rows, which is called after that one.
        v : array (num_tokens, num_kv_heads, head_dim_v)
            Their values; None likewise.
        out : array (num_tokens, num_q_heads, head_dim_v), optional
            Takes the output. It may be `q` itself, and else shares no memory with q or the cache.

        Returns
        -------
        array (num_tokens, num_q_heads, head_dim_v)
            The output, or `out`, in the bound kind.

        Raises
        ------
        NumkvError
            If the layer has been called in this step, the step has ended, or the cache was changed since it began.
        NonFiniteInput
            If rows to be quantised hold NaN or infinity.
        DimensionMismatch, UnsupportedDType, NotSupported, IndexError
            If an array has another shape, dtype, layout or target than was bound, or there is no such layer.

        Notes
        -----
        After an error the layer is as it was, and can be called again. Only a cache with full-precision tokens keeps
        the rows if the attention after them fails, for want of memory: end the step then.
        """
        ready = self._ready.get(layer) if type(layer) is int else None
        if ready is not None:
            found = ready.run(q, k, v, out)
            if found is not None:
                if self._written is not None:
                    self._written[layer] = True
                del self._ready[layer]
                return found
        number = check_index("layer", layer, len(self._bound._options))
        if number not in self._ready:
            raise NumkvError(self._new.ended(number))
        found = self._bound._in_two_calls(self._new, number, (q, k, v, out))
        del self._ready[number]
        return found

    @property
    def unwritten_layers(self) -> list[int]:
        """Layers that have not been called yet."""
        return sorted(self._ready)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotSupported("a BoundStep cannot be copied or pickled: end it, and copy the cache")

    def __repr__(self) -> str:
        return f"<BoundStep: {self.num_tokens} new tokens, {len(self._ready)} layers to be called>"


class BoundLayer(Bound):
    """A layer bound to the arrays and options of a model; made by the layers' `bind`.

    Each call is a step: it makes room, appends the rows and attends.

    Parameters
    ----------
    layer : ToBind
        The layer.
    access : Access
        The layer's.
    now : function
        Returns its tokens, its capacity, its blocks ``(max_blocks,)`` and the version of these.
    two_calls, in_full
        See `NewTokens`.
    rows, options
        See `Bound`.

    Notes
    -----
    It cannot be copied or pickled, as it belongs to its layer. On threads see `numkv.ContiguousLayer`: a call is one of
    a writer.
    """

    def __init__(
        self, layer: ToBind, access: Access, now: Callable[[], tuple[int, int, Any, int]],
        two_calls: Callable[..., Any], rows: Rows, options: CheckedOptions, in_full: Any = None,
    ) -> None:  # fmt: skip
        super().__init__([layer], rows, [options])
        self._in_full = in_full
        self._access, self._now, self._two_calls = access, now, two_calls
        self._of = self._plan(0)
        self._of_layer = self._record(0, self._of.kernel)
        self._block_size = int(layer.pool.k.shape[2])
        self._step: Any = None  # memory of the last call
        self._ready: Any = None
        self._planned: Any = None  # what the plan in it depends on

    @writes
    def __call__(self, q: Any, k: Any, v: Any, out: Any = None) -> Any:
        """Append new rows, and attend with the queries of their tokens.

        The same, bit by bit, as ``append(k, v)`` and ``decode_attention(q, out=out)`` with the bound options.

        Parameters
        ----------
        q : array (num_tokens, num_q_heads, head_dim)
            Queries of the new tokens, in the bound kind.
        k : array (num_tokens, num_kv_heads, head_dim)
            Their keys.
        v : array (num_tokens, num_kv_heads, head_dim_v)
            Their values.
        out : array (num_tokens, num_q_heads, head_dim_v), optional
            Takes the output. It may be `q` itself, and else shares no memory with q or the layer.

        Returns
        -------
        array (num_tokens, num_q_heads, head_dim_v)
            The output, or `out`, in the bound kind.

        Raises
        ------
        CacheFull
            If there is no room for all tokens.
        NonFiniteInput
            If rows to be quantised hold NaN or infinity.
        DimensionMismatch, UnsupportedDType, NotSupported
            If an array has another shape, dtype, layout or target than was bound.

        Notes
        -----
        Nothing has changed after an error.
        """
        start, room, ids, version = self._now()
        if type(q) is _array and q.ndim == 3:
            tokens = len(q)
            if (
                start + tokens <= room and 0 < tokens <= self._of.most_tokens
                and _goes_on(self._in_full, self._of_layer, 0, start, tokens)
            ):  # fmt: skip
                found = self._prepared(start, tokens, ids, version).run(q, k, v, out)
                if found is not None:
                    return found
        pool = self._layers[0].pool
        with pool.target.on(q, k, v, pool.k):
            q = pool.target.accept(q, "q")
            tokens = int(q.shape[0]) if len(q.shape) == 3 else 1
            q, k, v, checked = self._checked(0, tokens, q, k, v, out)
            options = self._options[0]._replace(out=checked)
            found = self._two_calls(0, q, k, v, options, self._rows.check_finite)
        return found if out is None else out

    def _prepared(self, start: int, tokens: int, ids: Any, version: int) -> PreparedCall:
        """Plan a call; what earlier calls have planned stays as far as it can."""
        plan, step, end = self._of, self._step, start + tokens
        if step is None or step.extents.num_tokens != tokens:
            self._planned = None
            step = self._step = plan.memory(None, 1, tokens, len(ids))
        # Splits depend on the number of KV tiles; with a window, which moves, on more than that.
        wanted = version, tokens, -(-end // plan.kernel.kv_tile) if plan.window < 0 else end
        step.seq_lens[0] = end
        if tokens == 1:
            block, offset = divmod(start, self._block_size)
            step.slots[0] = int(ids[block]) * self._block_size + offset
        else:
            step.slots[:] = slots_of(ids, np.arange(start, end), self._block_size)
        if self._in_full is not None:
            self._in_full.plan_bound(step, ids, self._block_size, start, tokens, plan.window)
        if wanted == self._planned:
            step.move(start, end)
        else:
            self._planned = None
            step.block_table[0], step.q_starts[0], step.q_starts[1] = ids, 0, tokens
            step.plan(plan.window, self._block_size, start, end)
            record = self._of_layer
            self._ready = PreparedCall(*plan.call(self.kind, step), record.address, (record, step))
            self._planned = wanted
        ready: PreparedCall = self._ready
        return ready
