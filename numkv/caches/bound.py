"""Bound calls: new rows of a layer appended and its queries answered in one call, checked once, when it is bound.

A model makes two calls for each layer and token, `append` and attention, and both look at everything anew: buffers,
scales, options, the length. Here that is done once for each cache (`bind`) and once for each step (`begin`); what is
left for a layer is one compiled function, which looks at the four arrays that are new::

    bound = cache.bind(num_q_heads, "bf16")
    step = bound.begin()                        # one new token; or begin(n), or begin(cache.reserve(...))
    for layer in range(cache.num_layers):
        out = step(layer, q, k, v)              # as append and attention, bit by bit
    cache.advance()                             # or cache.commit(...), as ever

What the compiled function does not take (a rotated cache, tokens in full precision, long prompts, CUDA, an array that
is not as it was bound) goes the ordinary ways, which append and attend, or say what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from numkv.access import Access, writes
from numkv.attention.attend import check_group, check_own_memory, check_sinks
from numkv.attention.options import AttentionOptions, check_options
from numkv.checks import check_array, check_writable
from numkv.errors import DimensionMismatch, NotSupported, NumkvError, UnsupportedDType
from numkv.kinds import QUERY_DTYPES, Kind
from numkv.kinds import kind as named
from numkv.numbers import check_flag, check_index, check_size
from numkv.storage.buffer import source_dtypes
from numkv.storage.pool import Pool
from numkv.targets.base import Array

_UINT16 = np.dtype(np.uint16)
_empty, _array = np.empty, np.ndarray


class Rows(NamedTuple):
    """What is bound: the arrays of every call but for how many tokens they have."""

    #: Of q, of new rows, and of the output.
    kind: Kind
    num_q_heads: int
    check_finite: bool

    @classmethod
    def check(cls, pool: Pool, num_q_heads: Any, kind: Any, check_finite: Any) -> Rows:
        """Check what a caller binds for a pool."""
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


# Layouts of arrays that are remembered as checked.
_MOST_SEEN = 1024


class _Ready(NamedTuple):
    """What a call hands over for a layer: addresses of its record and of its step's; the objects are to be kept."""

    layer: int
    step: int
    workers: int
    shape: tuple[int, ...]  # of the output
    kernel: Any
    layer_record: Any
    step_record: Any


def options_of_layers(
    pools: Sequence[Pool],
    rows: Rows,
    sm_scale: Any,
    logits_soft_cap: Any,
    windows: Sequence[Any],
    sinks: Any,
) -> list[AttentionOptions]:
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
        options = check_options(sm_scale, logits_soft_cap, window, None)
        if of_layer is not None:
            wide = "fp64" in (rows.kind.name, pool.k_kind.name, pool.v_kind.name)
            compute = np.dtype(np.float64 if wide else np.float32)
            checked = check_sinks(pool.target, of_layer, compute, num_q_heads, True)
            if pool.target.values_on_host:
                checked = np.array(checked)  # which the caller may change
            options = options._replace(sinks=checked)
        found.append(options)
    return found


class Bound:
    """What bound caches and layers have in common: pools, options and records of layers.

    Parameters
    ----------
    pools : sequence of Pool
        Of each layer.
    rows : Rows
        What is bound.
    options : list of AttentionOptions
        Of each layer.
    """

    def __init__(self, pools: Sequence[Pool], rows: Rows, options: list[AttentionOptions]) -> None:
        self._rows, self._options = rows, options
        self._pools = list(pools)
        self._heads = [rows.num_q_heads] * len(options)
        self._layers: Sequence[int] = range(len(options))  # that are called in a step
        # Of the last step the layers that are left and the memory, which the next one takes if there are none.
        self._begun: list[tuple[dict[int, Any], list[Any]]] = []
        self._kernel: Any = None
        self._records: list[Any] = []
        self._seen: set[Any] = set()  # layouts of arrays that have been checked

    @property
    def kind(self) -> Kind:
        """Kind of q, k, v and the output."""
        return self._rows.kind

    @property
    def num_q_heads(self) -> int:
        """Q heads; of the first layer with rows where these differ."""
        return self._rows.num_q_heads

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotSupported(
            f"a {type(self).__name__} cannot be copied or pickled: bind the copy of the cache"
        )

    def __repr__(self) -> str:
        layers = len(self._options)
        return f"<{type(self).__name__}: layers={layers}, kind={self.kind}, num_q_heads={self.num_q_heads}>"

    # -- for subclasses

    def _bind(self, marks: Sequence[Any], parts: Sequence[Any], lives: Any) -> None:
        """Make the records of all layers, if there is a compiled function for them."""
        self._records = []
        self._kernel = kernel = self._kernel_of(self._pools[0]) if self._pools else None
        if kernel is not None:
            each = zip(self._pools, parts, self._options, marks, strict=True)
            self._records = [
                self._record(kernel, pool, arrays, options, mark, lives)
                for pool, arrays, options, mark in each
            ]

    def _kernel_of(self, pool: Pool) -> Any:
        """The compiled function for layers of a pool, if there is one."""
        if not pool.target.values_on_host or pool.rotate:
            return None
        kind = self._rows.kind.name
        return pool.target.ops.append_attend(kind, kind, pool.k_kind.name, pool.v_kind.name)

    def _kernel_at(self, number: int) -> Any:
        """The compiled function for layers of one of a step's plans."""
        return self._kernel

    def _record(
        self, kernel: Any, pool: Pool, arrays: Sequence[Any], options: AttentionOptions, mark: Any, lives: Any
    ) -> Any:  # fmt: skip
        """The record of a layer with these buffers."""
        return kernel.layer(
            *arrays, np.empty(0, kernel.compute) if options.sinks is None else options.sinks,
            (options.scale(pool.head_dim), options.logits_soft_cap, options.window_left),
            self._rows.check_finite, mark, lives,
        )  # fmt: skip

    def _fits_one_call(self, num_tokens: int) -> bool:
        """Whether a step's rows are so few that one compiled call takes them."""
        if self._kernel is None or not num_tokens:
            return False
        pool = self._pools[0]
        of_token = max(self._rows.num_q_heads, int(pool.k.shape[1])) * max(
            pool.head_dim, pool.head_dim_v
        )
        small: bool = num_tokens * of_token < pool.target.small_call
        return small

    def _checked(
        self, layer: int, tokens: int, q: Any, k: Any, v: Any, out: Any
    ) -> tuple[Any, ...]:
        """See `_check`; on CUDA arrays like those of an earlier call stay as they are, for who uses them to check."""
        if not self._pools or self._pools[layer].target.values_on_host:
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
        """Check arrays of a call that goes the ordinary way; they come back as the target's own."""
        pool, dtypes = self._pools[layer], (self.kind.dtype,)
        target, rows = pool.target, (tokens, int(pool.k.shape[1]))
        q, out = self._check_queries(layer, tokens, q, out)
        k = check_array(target, "k", k, dtypes, (*rows, pool.head_dim))
        v = check_array(target, "v", v, dtypes, (*rows, pool.head_dim_v))
        first = self._rows.check_finite and pool.looks_first
        return q, *pool.check_rows(k, v, check_finite=first), out

    def _check_queries(self, layer: int, tokens: int, q: Any, out: Any) -> tuple[Any, Any]:
        """Check queries, and the array that takes the output, if there is one."""
        pool, dtypes, heads = self._pools[layer], (self.kind.dtype,), self._heads[layer]
        q = check_array(pool.target, "q", q, dtypes, (tokens, heads, pool.head_dim))
        if out is not None:
            out = check_array(pool.target, "out", out, dtypes, (tokens, heads, pool.head_dim_v))
            check_writable("out", out)
            check_own_memory(pool.target, out, q, pool, {})
        return q, out

    def _extents(self, num_seqs: int, num_tokens: int, max_blocks: int) -> tuple[int, ...]:
        """What the memory of a step is made for."""
        pool = self._pools[0]
        return (
            num_seqs, num_tokens, max_blocks, self._rows.num_q_heads, int(pool.k.shape[1]), pool.head_dim,
            pool.head_dim_v,
        )  # fmt: skip

    def _spare(self) -> list[Any]:
        """Memory of the last step, if all its layers have been called; popped by one step alone."""
        try:
            left, memory = self._begun.pop()
        except IndexError:
            return []
        return [] if left else list(memory)

    def _memory(self, spare: list[Any], num_seqs: int, num_tokens: int, max_blocks: int) -> Any:
        """Memory for a step: of the last one where that has the same extents."""
        extents = self._extents(num_seqs, num_tokens, max_blocks)
        while spare:
            found = spare.pop()
            if found.extents == extents:
                return found
        return self._kernel.step(*extents)


class BoundAttention(Bound):
    """A cache's layers bound to the arrays and options of a model; made by the caches' `bind`.

    `begin` begins a step and gives the object that is called for each layer. Whatever happens to the cache between
    steps, a growth included, the next `begin` finds it; the cache does not know of what is bound to it.

    Parameters
    ----------
    pools, rows, options
        See `Bound`.

    Notes
    -----
    A call appends and attends, and counts as one call of a writer (see `numkv.KVCache`, `numkv.Step` on threads). It
    cannot be copied or pickled, as it belongs to its cache.
    """

    # -- what a subclass says

    def begin(self, new: Any) -> BoundStep:
        """Begin a step.

        Parameters
        ----------
        new : int or Step
            Of a `numkv.KVCache` how many new tokens there are, 1 if it is left out; of a `numkv.PagedKVCache` what its
            `reserve` returned.

        Returns
        -------
        BoundStep
            Called for each layer.
        """
        raise NotImplementedError

    def _append(self, step: BoundStep, layer: int, k: Array, v: Array) -> None:
        """Append checked rows the ordinary way."""
        raise NotImplementedError

    def _attend(self, step: BoundStep, layer: int, q: Array, out: Any) -> Any:
        """Attend the ordinary way."""
        raise NotImplementedError

    def _ended(self, step: BoundStep, layer: int) -> str:
        """What to say of a layer that has no call left."""
        raise NotImplementedError


def run_compiled(
    kernel: Any, dtype: np.dtype[Any], ready: Any, q: Any, k: Any, v: Any, out: Any
) -> int:
    """Do a call in compiled code, or nothing: then the number is not 0."""
    if not (
        type(q) is type(k) is type(v) is type(out) is _array and q.dtype == k.dtype == v.dtype == out.dtype == dtype
    ):  # fmt: skip
        return -1
    if dtype.itemsize == 2:
        q, k, v, out = q.view(_UINT16), k.view(_UINT16), v.view(_UINT16), out.view(_UINT16)
    layer, step, workers = ready[:3]
    try:
        if workers == 1:
            failed: int = kernel.call(layer, step, q, k, v, out, 0)
        else:
            failed = kernel.launched(kernel.call, workers, layer, step, q, k, v, out)
    except TypeError:  # another rank, read-only or unaligned
        return -1
    return failed


class BoundStep:
    """New tokens on their way through the layers of a bound cache; made by `BoundAttention.begin`.

    Parameters
    ----------
    bound : BoundAttention
        What made it.
    access : Access
        Of the cache, or of the step that it belongs to.
    num_tokens : int
        New tokens, of all sequences.
    memory : list
        The step's records, for each group of layers; none, or None for a group, where calls go the ordinary ways.
    group_of : sequence of int
        Group of each layer.
    written : bool array (num_layers,) or None
        Takes which layers have been called.
    of : object
        What `bound` wants to know of the step.

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
        self, bound: BoundAttention, access: Access, num_tokens: int, memory: list[Any], group_of: Sequence[int],
        written: Any, of: Any,
    ) -> None:  # fmt: skip
        self._bound, self._of, self.num_tokens = bound, of, num_tokens
        self._access = access
        self._dtype = bound._rows.kind.dtype
        # Layers that are still to be called; of each a `_Ready`, or None where it goes the ordinary way.
        self._ready: dict[int, _Ready | None] = dict.fromkeys(bound._layers)
        plans: list[Any] = [
            x and (x, x.address, x.workers, (num_tokens, x.extents.num_q_heads, x.extents.dim_v), bound._kernel_at(n))
            for n, x in enumerate(memory)
        ]  # fmt: skip
        for layer in bound._layers if memory else ():
            of_layer, plan = bound._records[layer], plans[group_of[layer]]
            if of_layer is not None and plan is not None:
                of_step, address, workers, shape, kernel = plan
                self._ready[layer] = _Ready(
                    of_layer.address, address, workers, shape, kernel, of_layer, of_step
                )
        self._written = written  # of each layer, if the cache wants to know
        bound._begun[:] = [(self._ready, memory)]

    @writes
    def __call__(
        self, layer: int, q: Any, k: Any, v: Any, out: Any = None, *, stream: Any = None
    ) -> Any:
        """Append the rows of the step's new tokens to a layer, and attend with their queries.

        The same, bit by bit, as the cache's `append` and attention one after the other: each query sees itself, earlier
        new tokens and what is cached, as far as the bound window goes.

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
        stream : object, optional
            See `numkv.paged_decode_attention`.

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
        if ready is not None and stream is None:
            result = _empty(ready.shape, self._dtype) if out is None else out
            if not run_compiled(ready.kernel, self._dtype, ready, q, k, v, result):
                if self._written is not None:
                    self._written[layer] = True
                del self._ready[layer]
                return result
        return self._in_two_calls(layer, q, k, v, out, stream)

    def _in_two_calls(self, layer: Any, q: Any, k: Any, v: Any, out: Any, stream: Any) -> Any:
        """Append and attend the ordinary ways, all checks first."""
        bound = self._bound
        number = check_index("layer", layer, len(bound._options))
        if number not in self._ready:
            raise NumkvError(bound._ended(self, number))
        pool, after = bound._pools[number], getattr(self._of, "_place", None)
        with pool.target.on(stream, q, k, v, pool.k, after=after):
            pool.target.refuse_capture("BoundStep")
            q, k, v, checked = bound._checked(number, self.num_tokens, q, k, v, out)
            bound._append(self, number, k, v)
            found = bound._attend(self, number, q, checked)
        del self._ready[number]
        return found if out is None else out

    @property
    def unwritten_layers(self) -> list[int]:
        """Layers that have not been called yet."""
        return sorted(self._ready)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotSupported("a BoundStep cannot be copied or pickled: end it, and copy the cache")

    def __repr__(self) -> str:
        return f"<BoundStep: {self.num_tokens} new tokens, {len(self._ready)} layers to be called>"
