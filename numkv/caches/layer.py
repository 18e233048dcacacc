"""Layers: the K and V of one sequence in one layer, written and attended to in place."""

from __future__ import annotations

import contextlib
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from numkv.access import drops, reads, whole, writes
from numkv.arrays import CacheArrays
from numkv.attention.options import IN_A_WINDOW, AttentionOptions, check_options
from numkv.caches.bound import BoundLayer, Rows, ToBind, options_of_layers
from numkv.caches.full_precision import staged
from numkv.caches.layer_spec import FullPrecision, LayerSpec
from numkv.caches.single import SingleSequence
from numkv.checks import check_kept
from numkv.compaction.key_shift import RopeShift
from numkv.compaction.moves import slots_of
from numkv.errors import CacheFull, NotSupported, NumkvError
from numkv.interrupts import signals_deferred
from numkv.keywords import explained
from numkv.kinds import Kind
from numkv.numbers import check_flag, check_index, check_size
from numkv.storage import jit_views
from numkv.storage.own_kernels import cache_arrays
from numkv.storage.pool import Pool
from numkv.storage.tables import one_block_each
from numkv.targets.base import Array
from numkv.targets.streamed import streamed
from numkv.writing import fast_path
from numkv.writing.fused_write import Projection, QKMode
from numkv.writing.latents import LatentRows

# The upper bound of RoPE's positions.
_MOST_POSITIONS = 2**62


class Layer(SingleSequence):
    """The common part of contiguous and paged layers: a block table over buffers, and a length."""

    def __init__(
        self, pool: Pool, block_table: NDArray[np.int32], capacity: int,
        full_precision: FullPrecision | None = None,
    ) -> None:  # fmt: skip
        # The blocks ``(max_blocks,)``, on the host. New blocks are written into the array. When blocks are released,
        # the array is replaced, so that readers keep theirs.
        self._ids = block_table
        self._capacity = self._room = capacity
        context_lens = np.zeros(1, np.int32)  # shared with compiled code
        super().__init__(pool, context_lens, full_precision, capacity)

    def _derive(self) -> None:
        super()._derive()
        self._pools, self._tables = [self._pool], [self._ids]
        self._table = self._ids.copy()  # what compiled code can reach; it has to stay as `_ids` is
        self._table_view = self._table.view()
        self._table_view.flags.writeable = False
        self._version = 0  # of `_ids`
        self._on_target: tuple[int, Array] = (-1, None)

    # -- what it is

    @property
    def spec(self) -> LayerSpec:
        """The layer's description: sizes and kinds of rows, rotation, tokens in full precision."""
        return self._spec()

    @property
    def num_kv_heads(self) -> int:
        """Kv heads."""
        return self._heads

    @property
    def head_dim(self) -> int:
        """Elements of a K row."""
        return self._head_dim

    @property
    def capacity(self) -> int:
        """Number of tokens for which there is room."""
        return self._capacity

    @property
    def seq_len(self) -> int:
        """Tokens in the layer. Setting it moves the length only; it must stay in ``[0, capacity]``.

        A paged layer allocates and frees blocks with it. With full-precision tokens the length cannot grow this way:
        they are not in the buffers.
        """
        return self._stored(0)

    @seq_len.setter
    @drops
    def seq_len(self, length: int) -> None:
        length = check_index("seq_len", length, self._capacity, inclusive=True)
        if self._full_precision is not None and length > self._stored(0):
            raise NotSupported(
                f"`seq_len`: expected at most {self._stored(0)}, the tokens of a layer that keeps "
                f"some in full precision, got {length}; append their rows"
            )
        self._take_room(length)
        self._truncate(length)

    def _stored(self, layer: int) -> int:
        length, most = int(self._lengths[0]), self._room
        if not 0 <= length <= most:
            raise NumkvError(self._bad_length(layer, length, most))
        if self._shown and not self._is_table_sound():
            raise NumkvError(
                f"`jit.block_table`: expected the layer's own, {self._ids.tolist()}, got {self._table.tolist()}; "
                "compiled code may read it, not write it"
            )
        return length

    def _is_table_sound(self) -> bool:
        """Return whether the table that compiled code can reach is as it should be."""
        return bool((self._table == self._ids).all())

    def _bad_length(self, layer: int, length: int, most: int) -> str:
        return (
            f"`context_lens`: expected a length in [0, {most}], the tokens that the layer has memory for, "
            f"got {length}; write a right one, or set `seq_len`"
        )

    def _cut(self, length: int) -> None:
        self._reports.keep(0, length)
        self._lengths[0] = length
        self._table[:] = self._ids
        if self._full_precision is not None:
            self._full_precision.truncate(length)

    def __len__(self) -> int:
        return self.seq_len

    @property
    def k(self) -> Array:
        """The K buffer ``(num_blocks, num_kv_heads, block_size, head_dim)`` in the kind's dtype.

        A contiguous layer has one block, of its capacity. Quantised kinds have codes. int4 and code4 store two a byte,
        ``(num_blocks, num_kv_heads, block_size, head_dim / 2)``, code6 eight in three int16. Codes of tokens outside
        `quantised_tokens` are undefined. With ``rotate=True`` rows are as stored, that is rotated;
        `numkv.storage.Rotation` has the inverse.
        """
        return self._pool.values("k")

    @property
    def v(self) -> Array:
        """The V buffer, like `k`."""
        return self._pool.values("v")

    @property
    def k_scale(self) -> Array:
        """Scales of K; of float kinds an empty array.

        Of int8 and codes of codebooks float32 ``(num_blocks, num_kv_heads, block_size)``, of int4 bfloat16
        ``(num_blocks, num_kv_heads, block_size, ceil(head_dim / 32))``, of fp8 float32 ``(num_kv_heads,)``, which
        `set_scales` sets.
        """
        return self._pool.scales("k")

    @property
    def v_scale(self) -> Array:
        """Scales of V, like `k_scale`."""
        return self._pool.scales("v")

    @property
    def context_lens(self) -> np.ndarray[Any, Any]:
        """The length as an int32 array of one element, shared with `jit` and, on the CPU, with `arrays`.

        A length written here is checked when the layer is used next: it must stay in ``[0, capacity]``, and within the
        blocks that a paged layer has.
        """
        return self._lengths

    @property
    def quantised_tokens(self) -> range:
        """Positions of the tokens that are quantised: all of a quantised kind, but for those in full precision."""
        return self._quantised(0)

    @property
    def jit(self) -> Any:
        """The jitclass instance over this layer's memory, for your own ``@njit`` functions.

        Its methods are in `numkv.storage.jit_views`. With ``rotate=True`` it takes and gives rotated rows, as
        they are stored. A layer that keeps tokens in full precision has none (`NotSupported`): some of its tokens are
        not in these buffers. It belongs to this layer for good, as buffers are never replaced; a copy has its own.
        """
        return self._view(self._make_struct)

    @property
    def arrays(self) -> CacheArrays:
        """The arrays of this layer for your own kernels, ``@njit`` or ``@cuda.jit``; see `numkv.device`.

        There is one sequence: ``block_table`` is ``(1, max_blocks)`` and ``context_lens`` int32 ``(1,)``. On the CPU
        they are this layer's own: code that stores rows may move the length within the memory, see `reserve`. On CUDA
        they are copies, which are made when they have changed since. A layer that keeps tokens in
        full precision has none (`NotSupported`).
        """
        self._check_all_in_buffers("arrays")
        self._shown = True
        if self._target.values_on_host:
            return cache_arrays(self._pool, self._table_view[None], self._lengths)
        table = self._uploads.of("block_table", self._ids[None])
        return cache_arrays(self._pool, table, self._uploads.of("context_lens", self._lengths))

    def _make_struct(self) -> Any:
        if not self._target.has_jit_views:
            return jit_views.make(jit_views.host_struct("int32"), self._table, self._lengths)
        pool = self._pool
        struct = jit_views.layer_struct(pool.k_kind.name, pool.v_kind.name)
        buffers = pool.k, pool.v, pool.k_scale, pool.v_scale
        return jit_views.make(struct, *buffers, self._table, self._lengths)

    # -- writing

    def _check_room(self, start: int, tokens: int) -> None:
        if start + tokens > self._capacity:
            raise CacheFull(
                f"expected room for {tokens} more tokens, got {self._capacity - start} of "
                f"capacity {self._capacity}; truncate, or make the layer larger"
            )

    @whole
    def reserve(self, n: int) -> None:
        """Have memory for more tokens, without appending them.

        A paged layer allocates blocks for them now and keeps them until `truncate`, `free` or a new `seq_len`. So
        your own code can store rows there and increase the length. A contiguous layer has all of its memory from the
        beginning.

        Parameters
        ----------
        n : int
            Tokens beyond `seq_len`.

        Raises
        ------
        CacheFull
            If there is no room for all of them; nothing has changed.
        NonFiniteInput
            On CUDA, if rows that were quantised held NaN or infinity: truncate first.
        """
        n, start = check_size("n", n), self._stored(0)
        self._check_room(start, n)
        self._refuse_bad()
        self._take_room(start + n)

    def _make_room(self, layer: int, start: int, tokens: int) -> None:
        self._check_room(start, tokens)
        self._take_room(start + tokens)

    def _block_table(self, layer: int) -> Array:
        version, table = self._on_target
        if version != self._version:
            version = self._version  # before the table, which may be newer then, and never is older
            table = self._target.index(self._ids[None], np.int32)
            self._on_target = version, table
        return table

    def _ready_table(self, layer: int) -> int | None:
        if self._on_target[0] != self._version:
            return None
        return super()._ready_table(layer)

    @writes
    def append(self, k: Any, v: Any = None, *, check_finite: bool = True) -> None:
        """Append ready rows: no norm, no RoPE.

        Parameters
        ----------
        k, v : array (num_tokens, num_kv_heads, head_dim)
            New rows, in the kind's own dtype or in float32 (rounded to nearest, ties to even); for kinds of codes in
            fp32, fp16 or bf16. No `v` where V is a part of K (``v_kind="latent"``).
        check_finite : bool
            Whether rows to be quantised are checked for NaN and infinity. The CPU checks before it writes. CUDA
            checks while it writes, and stores zeros; later calls raise until these tokens are truncated.

        Raises
        ------
        CacheFull
            If there is no room for all of them; nothing is written.
        NonFiniteInput
            See `check_finite`; on the CPU nothing is written.
        DimensionMismatch, UnsupportedDType, NotSupported
            If an array has another shape, dtype, layout or target.
        """
        if not self._append_small(0, k, v, check_finite):
            self._append(0, k, v, check_finite)

    @explained
    def bind(
        self,
        num_q_heads: int,
        kind: str | Kind = "fp32",
        *,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = 0.0,
        window_left: int | None = -1,
        sinks: Any = None,
        check_finite: bool | None = True,
    ) -> BoundLayer:
        """Bind the layer to a model's arrays and options: append and attention then are one call.

        Parameters
        ----------
        num_q_heads, kind, sm_scale, logits_soft_cap, window_left, sinks, check_finite
            See `numkv.KVCache.bind`.

        Returns
        -------
        BoundLayer
            ``bound(q, k, v)`` appends and attends.

        Raises
        ------
        DimensionMismatch, UnsupportedDType, NotSupported, ValueError, TypeError
            If an argument does not fit the layer.
        """
        pool = self._pool
        rows = Rows.check(pool, num_q_heads, kind, check_finite)
        asked = sm_scale, logits_soft_cap, [window_left], sinks
        (options,) = options_of_layers([pool], rows, *asked)
        arrays = pool.k, pool.k_scale, pool.v, pool.v_scale
        layer = ToBind(pool, rows.num_q_heads, arrays, mark=self._lengths, **self._bound_in_full)
        return BoundLayer(
            layer, self._access, self._now, self._append_attend, rows, options, self._newest_groups
        )

    def _now(self) -> tuple[int, int, NDArray[np.int32], int]:
        """What bound calls go by; see `BoundLayer`."""
        return self._stored(0), self._room, self._ids, self._version

    @streamed
    @drops
    def set_scales(self, k: Any = None, v: Any = None) -> None:
        """Set the scales of a layer in fp8; they are 1 at first.

        A stored element is the row's element divided by the scale of its kv head, and rounded. A scale of ``max(|x|)
        / 448`` (for fp8_e5m2 57,344) uses the range of the kind.

        Parameters
        ----------
        k, v : float or float32 array (num_kv_heads,), optional
            Scales of K and of V, in host memory: one for all kv heads, or one for each. None leaves them as they are.

        Raises
        ------
        NumkvError
            If the layer, or a pool that it shares, is not empty.
        NotSupported
            If the kind is no fp8 kind.
        ValueError
            If a scale is not finite and above 0.
        DimensionMismatch, UnsupportedDType
            If an array has another shape or dtype.
        """
        self._set_scales(0, k, v)

    @writes
    def write(
        self,
        qkv: Any,
        *,
        num_q_heads: int,
        cos: Any = None,
        sin: Any = None,
        qk_mode: QKMode | int,
        q_norm_weight: Any = None,
        k_norm_weight: Any = None,
        eps: float = 1e-6,
        pos_offset: int | None = None,
        q_out: Any = None,
        check_finite: bool = True,
    ) -> Array:
        """Split fused projections, apply RMS norm and RoPE to q and k, and write K and V, in one pass.

        Parameters
        ----------
        qkv : array (num_tokens, (num_q_heads + num_kv_heads) * head_dim + num_kv_heads * head_dim_v)
            All q heads, then all k heads, then all v heads of each token; any float dtype.
        num_q_heads : int
            Q heads in `qkv`.
        cos, sin : float32 or float64 array (num_positions, rotary_dim / 2)
            RoPE tables, a row per position. With ``rotary_dim < head_dim`` RoPE covers the first dims. None is fine for
            ``QKMode.COPY``.
        qk_mode : QKMode or int
            What happens to q and k.
        q_norm_weight, k_norm_weight : array (head_dim,), optional
            Weights of the RMS norm; needed by the modes that normalise.
        eps : float
            Added to the mean square, inside the root.
        pos_offset : int, optional
            Row of `cos` and `sin` for the first token; `seq_len` if None. Where K and V go is always `seq_len`.
        q_out : array (num_tokens, num_q_heads, head_dim), optional
            Takes q; of qkv's dtype.
        check_finite
            See `append`; of projections, k, v or both are quantised.

        Returns
        -------
        array (num_tokens, num_q_heads, head_dim)
            q, ready for `decode_attention`, in qkv's dtype.

        Raises
        ------
        CacheFull
            If there is no room for all tokens; nothing is written.
        NonFiniteInput
            If projections to be quantised hold NaN or infinity, at ``.index`` of `qkv`; nothing is written.
        IndexError
            If `cos` and `sin` have no row for a position.
        DimensionMismatch, UnsupportedDType, NotSupported, ValueError
            If an argument is missing, or has another shape, dtype, layout, value or target.
        """
        pool = self._pool
        if pos_offset is not None:
            pos_offset = check_index("pos_offset", pos_offset, _MOST_POSITIONS)
        if self._full_precision is None:
            start = self._stored(0)
            tokens, q = fast_path.pool_write(
                pool, qkv, num_q_heads, cos, sin, qk_mode, q_norm_weight, k_norm_weight, eps, q_out,
                fast_path.NOT_BY_SLOT, start if pos_offset is None else pos_offset, self._ids, start,
                self._room - start, check_finite,
            )  # fmt: skip
            if tokens >= 0:
                self._lengths[0] = start + tokens
                return q
        given = (
            qkv, num_q_heads, cos, sin, qk_mode, q_norm_weight, k_norm_weight, eps, q_out
        )  # fmt: skip
        if self._again is not None:
            return self._write_again(given, pos_offset, check_finite)
        with self._target.on(qkv, pool.k):
            p = Projection.check(pool, *given)
            self._write_here("write", p, pos_offset, check_finite)
            return p.q_out

    def _write_again(
        self, given: tuple[Any, ...], pos_offset: int | None, check_finite: bool
    ) -> Array:
        """Write as an earlier call did, or in the general way what `Projection.check` takes after the pool."""
        qkv, num_q_heads, cos, sin, qk_mode, q_weight, k_weight, eps, q_out = given
        kinds = type(num_q_heads), type(qk_mode), type(eps)
        what = "write", kinds, num_q_heads, qk_mode, eps, check_finite
        arrays = (qkv, cos, sin, q_weight, k_weight, q_out)
        call = self._again.find(what, arrays, self._pool.k)
        start, replay, table = self._stored(0), call.replay, self._ready_table(0)
        if replay is not None and table is not None:
            tokens, positions, looked_at = replay.note
            first = start if pos_offset is None else pos_offset
            if start + tokens <= self._room and (positions < 0 or first + tokens <= positions):
                look = self._look(0, start, looked_at)
                q = call.run((table,), (start, look, first))
                if q is not self._again.missed:
                    self._lengths[0] = start + tokens
                    return q
        made: list[Projection] = []

        def write() -> Array:
            made.append(Projection.check(self._pool, *given))
            self._write_here("write", made[0], pos_offset, check_finite)
            return made[0].q_out

        def note() -> tuple[int, int, Any]:
            p = made[0]
            return p.num_tokens, int(p.cos.shape[0]) if p.rotates else -1, self._reports.latest

        q_written = frozenset({5})
        found: Array = call.long(write, lambda: (self._block_table(0),), note, q_written)
        return found

    def _write_here(
        self, name: str, p: Projection | LatentRows, pos_offset: int | None, check_finite: bool
    ) -> None:
        """Write projections, checked but for their number and positions, on the stream of the call."""
        pool = self._pool
        self._target.refuse_capture(f"{type(self).__name__}.{name}")
        self._refuse_bad()
        tokens, start = p.num_tokens, self._stored(0)
        self._check_room(start, tokens)
        first = start if pos_offset is None else pos_offset
        p.check_positions(first)
        check_finite = check_flag("check_finite", check_finite, True)
        first_look = check_finite and pool.looks_first
        if first_look:
            p.check_finite(pool)
        self._reports.look_for_nothing()
        marker = self._marker(start) if check_finite and not first_look else None
        with signals_deferred:
            self._write_checked(p, start, first, marker)

    def _write_checked(
        self, p: Projection | LatentRows, start: int, first: int, marker: Any
    ) -> None:
        """Write projections for which nothing but the memory may be missing."""
        pool, number, tokens, room = self._pool, self._target.number, p.num_tokens, self._room
        self._take_room(start + tokens)
        try:
            if isinstance(p, LatentRows):
                look, new = 0 if marker is None else p.watch(pool, marker), np.arange(tokens)
                of_each = self._slots(start + new), first + new
                slots, positions = (self._target.index(x, np.int64) for x in of_each)
                p.scatter(pool, slots, positions, look)
                self._lengths[0] = start + tokens
            elif self._full_precision is None:
                table = self._ids if pool.target.values_on_host else self._block_table(0)[0]
                look = 0 if marker is None else p.watch(pool, marker)
                p.write(pool, table, number(start, 0), number(first, 2), look)
                self._lengths[0] = start + tokens
            else:  # by way of unrounded floats, which then go the way of `append`
                staging = self._full_precision.staging(tokens)
                p.write(staging, one_block_each(self._target.device_key, 1)[0], 0, first)

                def watch(k: Array, v: Array, skipped: int) -> int:
                    return (
                        0
                        if marker is None
                        else p.watch_rows(pool, k, v, marker._replace(skipped=skipped))
                    )

                k, v = staged(staging, tokens)
                self._store(0, k, v, start, watch)
        except BaseException:
            self._unmake_room(0, start, room)
            raise

    @whole
    def write_latents(
        self,
        rows: Any,
        *,
        qk_mode: QKMode | int,
        cos: Any = None,
        sin: Any = None,
        norm_weight: Any = None,
        eps: float = 1e-6,
        pos_offset: int | None = None,
        check_finite: bool = True,
    ) -> None:
        """Apply RMS norm to new latents and RoPE to the keys behind them, and write both as one row, in one pass.

        Parameters
        ----------
        rows : array (num_tokens, num_kv_heads, head_dim)
            Projections of the model: `head_dim_v` elements of the latent, then the rotary key; any float dtype.
        qk_mode : QKMode or int
            The operation: modes that normalise do so to the latent, modes that rotate do so to the key.
        cos, sin : float32 or float64 array (num_positions, rotary_dim / 2)
            RoPE tables, a row per position; at most ``head_dim - head_dim_v`` elements are rotated, the first ones
            behind the latent. None is fine for ``QKMode.COPY``.
        norm_weight : array (head_dim_v,), optional
            Weight of the RMS norm; needed by the modes that normalise.
        eps : float
            Added to the mean square, inside the root.
        pos_offset : int, optional
            Row of `cos` and `sin` for the first token; `seq_len` if None. Where rows go is always `seq_len`.
        check_finite
            See `append`.

        Raises
        ------
        NotSupported
            If the layer has a V of its own.
        CacheFull
            If there is no room for all tokens; nothing is written.
        NonFiniteInput
            If rows to be quantised hold NaN or infinity, at ``.index`` of `rows`; nothing is written.
        IndexError
            If `cos` and `sin` have no row for a position.
        DimensionMismatch, UnsupportedDType, ValueError
            If an argument is missing, or has another shape, dtype, layout, value or target.
        """
        if pos_offset is not None:
            pos_offset = check_index("pos_offset", pos_offset, _MOST_POSITIONS)
        with self._target.on(rows, self._pool.k):
            p = LatentRows.check(self._pool, rows, qk_mode, cos, sin, norm_weight, eps)
            self._write_here("write_latents", p, pos_offset, check_finite)

    @drops
    def truncate(self, length: int) -> None:
        """Drop the tokens from position `length` on; a paged layer gives back the blocks that it then does not need.

        Parameters
        ----------
        length : int
            New length, at most `seq_len`.

        Raises
        ------
        IndexError
            If `length` is negative or above `seq_len`.
        """
        self._truncate(check_index("length", length, self._stored(0), inclusive=True))

    def _truncate(self, length: int) -> None:
        self._give_back(length, self._shorter(length))
        self._cut(length)

    @streamed
    @drops
    def compact(self, keep: Any, shift: RopeShift | None = None) -> None:
        """Keep some tokens only, and move them to the front: token ``keep[i]`` becomes token i.

        Rows move as they are stored, bit for bit. With `shift`, RoPE moves the keys of these tokens to their
        new positions; quantised keys are quantised once more.

        Parameters
        ----------
        keep : array-like of int (n,)
            Tokens to keep, in order, on the host; see `numkv.compaction.eviction` for what chooses them.
        shift : RopeShift, optional
            What `numkv.rope_shift` made of the model's tables. Without it keys stay as they are: for models without
            RoPE, and for methods that keep the positions that tokens had.

        Raises
        ------
        IndexError
            If there is no such token, or the shift's tables are too short.
        ValueError
            If indices do not rise.
        DimensionMismatch, UnsupportedDType, TypeError
            If `keep` is no row of integers, the shift covers more elements than a key has, or `shift` is something
            else.

        Notes
        -----
        Nothing has changed after an error. The next token's position is ``seq_len`` with a shift, and one after the
        last token's without.
        """
        kept = check_kept("keep", keep, self._stored(0))[None]
        length = kept.shape[1]
        shorter = self._shorter(length)
        self._compact(kept, shift)
        # Blocks whose pool is busy stay the layer's, for tokens to come.
        with contextlib.suppress(NumkvError):
            self._give_back(length, shorter)

    def _slots(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return slots_of(self._ids, tokens, max(1, int(self._pool.k.shape[2])))

    # -- attention

    @reads
    def decode_attention(
        self,
        q: Any,
        *,
        out: Any = None,
        return_lse: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> Any:
        """Attend with the newest tokens' queries: each sees itself and earlier positions.

        Parameters
        ----------
        q : array (num_tokens, num_q_heads, head_dim)
            Queries of the last `num_tokens` cached positions.
        out, return_lse, **options
            See `numkv.decode_attention`.

        Returns
        -------
        out : array (num_tokens, num_q_heads, head_dim)
            In q's dtype. One query on an empty layer gives 0 (and -inf).
        lse : float32 array (num_tokens, num_q_heads)
            Natural log of the sum of exponentials; only with `return_lse`.

        Raises
        ------
        DimensionMismatch
            If there are several queries, more than cached tokens, or a shape does not fit.
        UnsupportedDType, NotSupported, ValueError
            See `numkv.decode_attention`.
        """
        return self._attend_with(0, q, check_options(options, return_lse, out))

    @streamed
    @reads
    def attention_weights(
        self, q: Any, *, lse: Any = None, **options: Unpack[AttentionOptions]
    ) -> Array:
        """Sum the attention that each token gets from the newest tokens' queries.

        Parameters
        ----------
        q : array (num_tokens, num_q_heads, head_dim)
            Queries of the last `num_tokens` cached positions.
        lse : float32 array (num_tokens, num_q_heads), optional
            What `decode_attention` returned with ``return_lse=True`` for these queries and options. Computed if None,
            which costs as much as that call.
        **options
            `sm_scale`, `logits_soft_cap` and `window_left`: see `numkv.AttentionOptions`.

        Returns
        -------
        float32 array (num_kv_heads, seq_len)
            Sums over the queries and the q heads of a GQA group; see `numkv.attention_weights`.

        Raises
        ------
        DimensionMismatch
            If there are several queries, more than cached tokens, or a shape does not fit.
        UnsupportedDType, NotSupported, ValueError
            See `numkv.decode_attention`.
        """
        return self._mass(0, q, check_options(options, takes=IN_A_WINDOW), lse)

    @reads
    def key_error(self, q: Any, *, sm_scale: float | None = None) -> NDArray[np.float64]:
        """Estimate how far quantising the keys moves the scores of queries, without the exact keys.

        Parameters
        ----------
        q : array (num_queries, num_q_heads, head_dim)
            Any queries of the layer, such as those of the newest tokens.
        sm_scale : float, optional
            Scale of the scores; ``1 / sqrt(head_dim)`` if None.

        Returns
        -------
        float64 array (num_queries, num_q_heads)
            The root mean square of the errors of scores, over its tokens; tokens in full precision have
            none. A tenth is little, 1 changes which token is attended to. See `numkv.storage.key_error`.

        Raises
        ------
        NotSupported
            If keys are not quantised by scales of rows or groups.
        DimensionMismatch, UnsupportedDType, ValueError, TypeError
            If an argument does not fit.
        """
        return self._key_error(0, q, sm_scale)
