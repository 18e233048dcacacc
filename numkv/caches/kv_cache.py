"""`KVCache`: the K and V of one sequence in all layers, growing as tokens come."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.access import drops, reads, writes
from numkv.arrays import CacheArrays
from numkv.attention.options import IN_A_WINDOW, AttentionOptions, CheckedOptions, check_options
from numkv.caches.bound import (
    BoundAttention,
    BoundStep,
    NewTokens,
    Rows,
    ToBind,
    is_number,
    of_each,
    options_of_layers,
)
from numkv.caches.layer_spec import FullPrecision, LayerSpec
from numkv.caches.saved import SavedCache
from numkv.caches.single import SingleSequence
from numkv.checks import check_kept
from numkv.compaction.key_shift import RopeShift
from numkv.drawing.page import drawn
from numkv.errors import CacheFull, DimensionMismatch, NotSupported, NumkvError
from numkv.keywords import explained
from numkv.kinds import Kind, kinds_of
from numkv.numbers import check_flag, check_index, check_size
from numkv.storage import jit_views
from numkv.storage.buffer import Buffer
from numkv.storage.own_kernels import cache_arrays
from numkv.storage.pool import Pool
from numkv.storage.tables import one_block_each, one_sequence
from numkv.targets.base import Array
from numkv.targets.streamed import streamed

_FIRST_CAPACITY = 16  # tokens that a cache without a bound makes room for at first
_ONE_BLOCK = np.zeros((1, 1), np.int32)  # the table of a sequence in one layer
_MOST_LAYERS = 2**16
_MOST_TOKENS = 2**62  # what the length is bounded by where there are no layers


@drawn
class KVCache(SingleSequence):
    """One sequence's keys and values, for all layers of a model.

    Each step appends the new tokens' rows to every layer, attends, and then advances once.

    Parameters
    ----------
    num_layers : int
        Layers of the model.
    num_kv_heads : int
        Kv heads of each layer.
    head_dim : int
        Elements of a K row, and of a V row unless `head_dim_v` is given.
    max_seq_len : int, optional
        Tokens that buffers are made for; more raise `CacheFull`. Without it they grow, and views show old memory.
    kind : str or Kind
        Storage kind.
    target : {"cpu", "cuda"}
        Where the buffers are and the kernels run.
    head_dim_v : int, optional
        Elements of a V row.
    k_kind : str or Kind, optional
        Storage kind of K, where it differs from `kind`.
    v_kind : str or Kind, optional
        Storage kind of V, where it differs from `kind`.
    rotate : bool
        Whether rows are rotated before they are stored, and back when they are read; see `numkv.ContiguousLayer`.
    full_precision : FullPrecision, optional
        Newest and first tokens that are stored in full precision, in addition to a quantised kind.

    Raises
    ------
    NotSupported
        If tokens should stay in full precision but neither kind is quantised.
    DimensionMismatch, UnsupportedDType
        If a size is too small, or there is no such kind.

    Notes
    -----
    Threads may share a cache. One writer at a time: a second one gets `NumkvError`, and nothing has changed.
    Concurrent readers of an append, a growth included, see whole tokens. If the writer drops or moves tokens
    (`truncate`, `clear`, `compact`; with full-precision tokens every append), a reader gets `NumkvError` or a right
    result. Code that works on `jit` or `arrays` is not covered by these rules: no other thread may write meanwhile.

    Examples
    --------
    >>> import numpy as np, numkv
    >>> cache = numkv.KVCache(num_layers=1, num_kv_heads=2, head_dim=8)
    >>> cache.append(0, np.ones((2, 8), np.float32), np.ones((2, 8), np.float32))
    >>> cache.advance()
    >>> len(cache), cache.k(0).shape
    (1, (1, 2, 8))
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        max_seq_len: int | None = None,
        kind: str | Kind = "fp32",
        target: str = "cpu",
        head_dim_v: int | None = None,
        k_kind: str | Kind | None = None,
        v_kind: str | Kind | None = None,
        rotate: bool = False,
        full_precision: FullPrecision | None = None,
    ) -> None:
        of_k, of_v = kinds_of(kind, k_kind, v_kind, by_channel=True)
        layers = check_size("num_layers", num_layers, 0, _MOST_LAYERS)
        heads = check_size("num_kv_heads", num_kv_heads, 1)
        dim = check_size("head_dim", head_dim, 1)
        dim_v = dim if head_dim_v is None else check_size("head_dim_v", head_dim_v, 1)
        self._bound = None if max_seq_len is None else check_size("max_seq_len", max_seq_len)
        # Layer i has block i, with the tokens of the whole capacity.
        shape = (layers, heads, of_k.whole_groups(self._bound or 0))
        made = Pool.allocate(
            targets.get(target), shape, dim, dim_v, of_k, of_v, check_flag("rotate", rotate)
        )
        pool = Pool(_with_scales(made.k_buffer), _with_scales(made.v_buffer))
        rows = np.zeros(layers, np.int64)  # appended to each layer; shared with compiled code
        self._length = np.zeros(1, np.int64)  # advanced past; shared with compiled code
        self._room = shape[2]
        super().__init__(pool, rows, full_precision, self._bound)

    __saved__ = SavedCache

    def _derive(self) -> None:
        super()._derive()
        layers = len(self._lengths)
        self._pools = _pools_of_layers(self._pool)
        self._tables = [np.array([layer], np.int32) for layer in range(layers)]
        ids = one_block_each(self._target.device_key, layers)
        self._device_tables = [ids[layer : layer + 1] for layer in range(layers)]
        self._current = np.ones(1, np.int64)  # whether the buffers of `jit` are the cache's own

    def _move(self, capacity: int) -> None:
        """Move all rows into buffers for `capacity` tokens, in one change for concurrent readers."""
        new = _moved(self._pool, capacity, bool(self._lengths.any()))
        pools, kept = _pools_of_layers(new), (self._pool, self._pools, self._struct)
        self._current[0] = 0  # for views that `jit` gave so far
        vars(self).update(
            _pool=new, _pools=pools, _room=capacity, _struct=None, _current=np.ones(1, np.int64),
            _again=None if self._again is None else self._target.repeats(),
        )  # fmt: skip
        del kept  # what is freed may call a finaliser: not in the middle

    # -- what it is

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The description of each layer: sizes and kinds of rows, rotation, tokens in full precision; all are equal."""
        return (self._spec(),) * len(self._lengths)

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self._lengths)

    @property
    def entry_size(self) -> int:
        """Elements of K that one token has in one layer: ``num_kv_heads * head_dim``."""
        return self._heads * self._head_dim

    @property
    def max_seq_len(self) -> int | None:
        """The bound given at the start, or None."""
        return self._bound

    @property
    def capacity(self) -> int:
        """Number of tokens for which the buffers have room now."""
        return int(self._pool.k.shape[2])

    @property
    def is_empty(self) -> bool:
        """Whether the length is 0; rows may already have been appended."""
        return len(self) == 0

    def __len__(self) -> int:
        length = int(self._length[0])
        if self._shown and not 0 <= length <= self._lengths.min(initial=_MOST_TOKENS):
            raise NumkvError(
                f"`lengths`: expected at most the rows of every layer, {self._lengths.tolist()}, got {length}; "
                "compiled code has to append before it advances; `clear` mends this"
            )
        return length

    def __repr__(self) -> str:
        return (
            f"KVCache(len={len(self)}, num_layers={self.num_layers}, num_kv_heads={self._heads}, "
            f"head_dim={self._head_dim}, head_dim_v={self._pool.head_dim_v}, kind={self._storage()}, "
            f"target={self.target}, capacity={self.capacity}, nbytes={self.nbytes})"
        )

    @property
    def jit(self) -> Any:
        """The jitclass instance over this cache's memory; see `numkv.storage.jit_views`.

        A cache that grows gets new buffers: ask again then, or `reserve` enough. An instance from before neither
        appends nor advances, and raises where rows are loaded.

        With ``rotate=True`` it takes and gives rotated rows, as they are stored. A cache that keeps tokens in full
        precision has none (`NotSupported`): some of its tokens are not in these buffers.
        """
        if not self._current[0]:  # an interrupted growth
            self._current, self._struct = np.ones(1, np.int64), None
        return self._view(self._make_struct)

    def arrays(self, layer: int) -> CacheArrays:
        """Get the arrays of a layer for your own kernels, ``@njit`` or ``@cuda.jit``; see `numkv.device`.

        Buffers are those of all layers: layer i has block i, of `capacity` tokens. There is one sequence, so that
        ``block_table`` is ``(1, 1)``, and ``context_lens`` int64 ``(1,)`` has the rows appended to this layer. On the
        CPU that is shared memory: code that stores rows may move it within the capacity, and `lengths` after it. On
        CUDA it is a copy, which is made when it has changed since. After a growth there are others: ask again.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        CacheArrays

        Raises
        ------
        IndexError
            If there is no such layer.
        NotSupported
            If the cache keeps tokens in full precision: they are not in these buffers.
        """
        layer = check_index("layer", layer, self.num_layers)
        self._check_all_in_buffers("arrays")
        self._shown = True
        rows = self._uploads.of(layer, self._lengths[layer : layer + 1])
        return cache_arrays(self._pools[layer], self._device_tables[layer], rows)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens advanced past, in an array of one element that `jit` shares; see ``len(cache)``.

        Your own compiled code moves it as `advance` does, once all layers have the rows. It is checked when it is
        read next.
        """
        self._check_all_in_buffers("lengths")
        self._shown = True
        return self._length

    def _make_struct(self) -> Any:
        if not self._target.has_jit_views:
            table = np.arange(self.num_layers, dtype=np.int32)
            return jit_views.make(jit_views.host_struct("int64"), table, self._lengths)
        pool = self._pool
        struct = jit_views.cache_struct(pool.k_kind.name, pool.v_kind.name)
        books = (self._lengths, self._length, self._current)
        return jit_views.make(struct, pool.k, pool.v, pool.k_scale, pool.v_scale, *books)

    def _bad_length(self, layer: int, length: int, most: int) -> str:
        return (
            f"`context_lens`: expected numbers of rows in [0, {most}], got {length} for layer {layer}; "
            "compiled code has to stay within the capacity"
        )

    # -- writing

    def _make_room(self, layer: int, start: int, tokens: int) -> None:
        if start + tokens <= (self.capacity if self._bound is None else self._bound):
            return
        if self._bound is not None:
            raise CacheFull(
                f"expected room for {tokens} more tokens in layer {layer}, got "
                f"{self._bound - start} of max_seq_len {self._bound}; truncate, or make the "
                "cache larger"
            )
        room = max(start + tokens, 2 * self.capacity, _FIRST_CAPACITY)
        self._move(self._pool.k_kind.whole_groups(room))

    @streamed
    @writes
    def reserve(self, n: int) -> None:
        """Make room for more tokens, without appending them.

        Appends of as many, and code of yours that stores rows, then find the same buffers all the way.

        Parameters
        ----------
        n : int
            Tokens beyond the rows of the layer that has most.

        Raises
        ------
        CacheFull, DimensionMismatch
            If `max_seq_len` leaves no room, or no memory can hold so many; nothing has changed.
        NonFiniteInput
            On CUDA, if rows that were quantised held NaN or infinity: truncate first.
        """
        n, rows = check_size("n", n), self._rows()
        self._refuse_bad(self._longest())
        if len(rows):
            longest = int(rows.argmax())
            self._make_room(longest, int(rows[longest]), n)

    def _block_table(self, layer: int) -> Array:
        return self._device_tables[layer]

    @writes
    def append(self, layer: int, k: Any, v: Any, *, check_finite: bool = True) -> None:  # fmt: skip
        """Append the rows of one token or of several to a layer; the length stays.

        Parameters
        ----------
        layer : int
            Which layer.
        k : array (num_kv_heads, head_dim), (num_kv_heads * head_dim,) or (num_tokens, num_kv_heads, head_dim)
            Keys, in the kind's own dtype or in float32; for kinds of codes in fp32, fp16 or bf16.
        v : array (num_kv_heads, head_dim_v), (num_kv_heads * head_dim_v,) or (num_tokens, num_kv_heads, head_dim_v)
            Values of the same tokens.
        check_finite
            See `ContiguousLayer.append`.

        Raises
        ------
        CacheFull, NonFiniteInput
            If `max_seq_len` leaves no room, or rows to be quantised hold NaN or infinity; nothing is written.
        IndexError
            If there is no such layer.
        DimensionMismatch, UnsupportedDType, NotSupported
            If an array has another shape, dtype, layout or target.
        """
        layer = check_index("layer", layer, len(self._lengths))
        rows = (k, v)
        if type(k) is type(v) is np.ndarray and k.ndim == v.ndim == 2:
            rows = (k[None], v[None])
        if not self._append_small(layer, *rows, check_finite):
            self._append(layer, k, v, check_finite)

    def _as_rows(self, k: Any, v: Any) -> tuple[Array, Array]:
        return self._token_rows("k", k, self._head_dim), self._token_rows(
            "v", v, self._pool.head_dim_v
        )

    def _token_rows(self, name: str, x: Any, dim: int) -> Array:
        """Rows of one token, flat or by head, as rows of several; others as they are."""
        x = self._target.accept(x, name)
        if len(x.shape) not in (1, 2):
            return x
        shape = (self._heads, dim) if len(x.shape) == 2 else (self._heads * dim,)
        if tuple(x.shape) != shape:
            raise DimensionMismatch(
                f"`{name}`: expected {shape}, got {x.dtype} {tuple(x.shape)}; pass one token's "
                "rows, or (num_tokens, num_kv_heads, head_dim)",
                expected=shape,
                actual=tuple(x.shape),
            )
        return x.reshape((1, self._heads, dim))

    @explained
    def bind(
        self, num_q_heads: int, kind: str | Kind = "fp32", *, sm_scale: float | None = None,
        logits_soft_cap: float | None = 0.0, window_left: int | Sequence[int] | None = -1, sinks: Any = None,
        check_finite: bool | None = True,
    ) -> BoundAttention:  # fmt: skip
        """Bind the cache to a model's arrays and options: append and attention of a layer then are one call.

        Parameters
        ----------
        num_q_heads : int
            Q heads; a multiple of the kv heads.
        kind : str or Kind
            Float kind of queries, new rows and the output. Rows of that kind must be what `append` takes.
        sm_scale, logits_soft_cap
            See `numkv.decode_attention`.
        window_left : int or sequence of int (num_layers,)
            Earlier tokens that a query sees in addition to its own, -1 for all: one number for all layers, or one for
            each.
        sinks : array (num_q_heads,) or (num_layers, num_q_heads), optional
            Sink logits of all layers, or of each; copied.
        check_finite : bool
            Whether rows that will be quantised are checked for NaN and infinity first.

        Returns
        -------
        BoundAttention
            ``begin(n)`` begins a step of n new tokens.

        Raises
        ------
        DimensionMismatch, UnsupportedDType, NotSupported, ValueError, TypeError
            If an argument does not fit the cache.

        Examples
        --------
        >>> import numpy as np, numkv
        >>> cache = numkv.KVCache(num_layers=2, num_kv_heads=2, head_dim=8)
        >>> bound, rows = cache.bind(num_q_heads=4), np.ones((1, 2, 8), np.float32)
        >>> step = bound.begin()
        >>> [step(layer, np.ones((1, 4, 8), np.float32), rows, rows).shape for layer in range(2)]
        [(1, 4, 8), (1, 4, 8)]
        >>> cache.advance()
        """
        pools = self._pools
        rows = Rows.check(self._pool, num_q_heads, kind, check_finite)
        windows = of_each("window_left", window_left, len(pools), is_number)
        options = options_of_layers(pools, rows, sm_scale, logits_soft_cap, windows, sinks)
        layers = functools.partial(self._to_bind, rows.num_q_heads)
        return BoundAttention(layers, self._begin_bound, rows, options)

    def _to_bind(self, num_q_heads: int) -> list[ToBind]:
        """Return the layers for bound calls: each with the buffers of its block."""
        found = []
        for layer, pool in enumerate(self._pools):
            arrays: list[Array] = []
            for side in (pool.k_buffer, pool.v_buffer):
                scales = side.scales[layer : layer + 1] if side.kind.has_scales else side.scales
                arrays += [side.words[layer : layer + 1], scales]
            mark = self._lengths[layer : layer + 1]
            found.append(
                ToBind(
                    pool, num_q_heads, arrays, mark=mark, lives=self._current, **self._bound_in_full
                )
            )
        return found

    @writes
    def _begin_bound(self, new: int, make: Callable[[NewTokens], BoundStep]) -> BoundStep:
        """Make room for new tokens, and begin a step of bound calls for them."""
        tokens, length, rows = check_size("new", new), len(self), self._rows()
        if len(rows):
            if rows.max() != length:
                raise NumkvError(
                    f"begin: expected no rows beyond the {length} advanced past, got {rows.max()} in layer "
                    f"{int(rows.argmax())}; advance, or truncate({length})"
                )
            self._make_room(0, length, tokens)

        def ended(layer: int) -> str:
            return (
                f"step: expected layer {layer} with {length} rows and no call so far, got one that was called in this "
                "step, or a cache that was changed since it began; call each layer once, and begin each step anew"
            )

        def two_calls(layer: int, *args: Any) -> Any:
            if self._stored(layer) != length:
                raise NumkvError(ended(layer))
            return self._append_attend(layer, *args)

        after = length + tokens
        starts, slots = one_sequence(self._target.key, tokens), np.arange(length, after)
        of_step = [_ONE_BLOCK], after, starts, [slots], self._room
        marks = length, after
        made = NewTokens(
            self._access, tokens, self._pools, *of_step, two_calls, ended, [], marks, in_full=self._newest_groups
        )  # fmt: skip
        return make(made)

    @streamed
    @drops
    def set_scales(self, layer: int, k: Any = None, v: Any = None) -> None:
        """Set the scales of a layer in fp8; they are 1 at first.

        A stored element is the row's element divided by the scale of its kv head, and rounded. A scale of ``max(|x|)
        / 448`` (for fp8_e5m2 57,344) uses the range of the kind.

        Parameters
        ----------
        layer : int
            Which layer.
        k, v : float or float32 array (num_kv_heads,), optional
            Scales of K and of V, in host memory: one for all kv heads, or one for each. None leaves them as they are.

        Raises
        ------
        NumkvError
            If rows have been appended to the layer.
        NotSupported
            If the kind is no fp8 kind.
        IndexError
            If there is no such layer.
        ValueError
            If a scale is not finite and above 0.
        DimensionMismatch, UnsupportedDType
            If an array has another shape or dtype.
        """
        self._set_scales(check_index("layer", layer, self.num_layers), k, v)

    @writes
    def advance(self, n: int = 1) -> None:
        """Move the length past tokens whose rows are in every layer.

        Parameters
        ----------
        n : int
            How many tokens.

        Raises
        ------
        NumkvError
            If a layer has fewer rows than that.
        """
        self._target.refuse_capture(f"{type(self).__name__}.advance")
        length = len(self) + check_size("n", n)
        most = int(self._lengths.min(initial=_MOST_TOKENS))
        if length > most:
            layer = int(self._lengths.argmin()) if self.num_layers else "-"
            raise NumkvError(
                f"`n`: expected at most {most - len(self)}, the rows appended to layer "
                f"{layer} since the last advance, got {n}; append to every layer first"
            )
        self._refuse_bad(self._longest())
        self._length[0] = length

    @drops
    def truncate(self, length: int) -> None:
        """Keep the first tokens only; rows appended but not advanced are dropped too.

        Parameters
        ----------
        length : int
            How many tokens to keep, at most ``len(cache)``.

        Raises
        ------
        IndexError
            If `length` is negative or above ``len(cache)``.
        """
        self._rows()
        self._cut(check_index("length", length, len(self), inclusive=True))

    def _cut(self, length: int) -> None:
        self._reports.keep(0, length)
        self._length[0] = length
        for layer, rows in enumerate(self._lengths.tolist()):  # NumPy's `clip` needs memory
            self._lengths[layer] = min(max(rows, 0), length)
        if self._full_precision is not None:
            self._full_precision.truncate(length)

    @streamed
    @drops
    def compact(self, keep: Any, shift: RopeShift | None = None) -> None:
        """Keep some tokens only, and move them to the front: token ``keep[i]`` becomes token i.

        Rows move as they are stored, bit for bit. With `shift`, RoPE moves the keys of these tokens to their
        new positions; quantised keys are quantised once more.

        Parameters
        ----------
        keep : array-like of int (n,) or (num_layers, n)
            Tokens to keep, in order, on the host: the same in all layers, or as many in each.
        shift : RopeShift, optional
            What `numkv.rope_shift` made of the model's tables. Without it keys stay as they are: for models without
            RoPE, and for methods that keep the positions that tokens had.

        Raises
        ------
        NumkvError
            If rows have been appended and not yet advanced.
        IndexError
            If there is no such token, or the shift's tables are too short.
        ValueError
            If indices do not rise.
        DimensionMismatch, UnsupportedDType, TypeError
            If `keep` has another shape or is no integers, the shift covers more elements than a key has, or `shift` is
            something else.

        Notes
        -----
        Nothing has changed after an error. Memory stays as it is.
        """
        length, layers, rows = len(self), self.num_layers, self._rows()
        if rows.max(initial=0) > length:
            layer = int(rows.argmax())
            raise NumkvError(
                f"compact: expected no rows beyond the {length} advanced past, got "
                f"{rows[layer]} in layer {layer}; advance, or truncate({length})"
            )
        kept = check_kept("keep", keep, length, ndim=None)
        n = kept.shape[-1]
        if kept.ndim == 2 and len(kept) != layers:
            raise DimensionMismatch(
                f"`keep`: expected ({n},) or a row for each layer, ({layers}, {n}), got {kept.shape}",
                expected=(layers, n),
                actual=kept.shape,
            )
        self._compact(np.broadcast_to(kept, (layers, n)), shift)

    def _slots(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.arange(self.num_layers)[:, None] * self.capacity + tokens

    def _rows(self) -> NDArray[np.int64]:
        """Return the rows of each layer, as they are now; compiled code may have written them, so they are checked."""
        rows, most = self._lengths.copy(), self._room
        if rows.min(initial=0) < 0 or rows.max(initial=0) > most:
            layer = int(np.flatnonzero((rows < 0) | (rows > most))[0])
            raise NumkvError(self._bad_length(layer, int(rows[layer]), most))
        return rows

    # -- as a whole

    def _copy_to(self, new: Self) -> None:
        length = len(self)  # first, as all others may be more by now
        rows = self._rows()
        old = self._pool
        new._length, new._lengths = np.array([length], np.int64), rows
        new._pool = _moved(old, int(old.k.shape[2]), bool(rows.any()))
        new._room = int(old.k.shape[2])
        self._begin_copy(new)

    def _values(self) -> dict[str, Any]:
        length = len(self)  # before the rows, which may be more by then
        return super()._values() | {"max_seq_len": self._bound, "length": length}

    def _take_room(self, length: int) -> None:
        if length > self.capacity:
            self._move(self._pool.k_kind.whole_groups(length))

    def _take_lengths(self, saved: Any) -> None:
        super()._take_lengths(saved)
        self._length[0] = saved.length

    def _check_books(self) -> None:
        length, rows = len(self), self._rows()
        blocks, _, size = (int(n) for n in self._pool.k.shape[:3])
        least = int(rows.min(initial=_MOST_TOKENS))
        bound = size if self._bound is None else self._pool.k_kind.whole_groups(self._bound)
        for wrong, what in (
            (not 0 <= length <= least, f"a length of at most {least} rows, got {length}"),
            (blocks != len(rows), f"a block for each of {len(rows)} layers, got {blocks}"),
            (size != self._room, f"buffers for {self._room} tokens, got {size}"),
            (size != bound, f"buffers for {bound} tokens, got {size}"),
        ):
            if wrong:
                raise NumkvError(f"check: expected {what}")

    # -- what a user reads

    def quantised_tokens(self, layer: int) -> range:
        """Positions of a layer's quantised tokens: none in float kinds, else all but those in full precision.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        range
            Rows not yet advanced included.

        Raises
        ------
        IndexError
            If there is no such layer.
        """
        return self._quantised(check_index("layer", layer, len(self._lengths)))

    @streamed
    @reads
    def k(self, layer: int) -> Array:
        """Keys of a layer, rows not yet advanced included.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        array (tokens, num_kv_heads, head_dim)
            Float kinds without scales return a view in the kind's dtype, valid until the cache grows. Other kinds and
            ``rotate=True`` return a float32 copy (float64 for fp64). So do caches with full-precision tokens; these
            are returned as appended.

        Raises
        ------
        IndexError
            If there is no such layer.
        """
        return self._read("k", layer)

    @reads
    def k_codes(self, layer: int) -> Array:
        """Codes of a layer's keys, as stored (with ``rotate=True`` of rotated rows); see `k_scales`.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        array (tokens, num_kv_heads, head_dim)
            A view, valid until the cache grows. int8 stores one code an element, int4 and code4 two a byte,
            ``(tokens, num_kv_heads, head_dim / 2)``, code6 eight in three int16. `numkv.rows.int4`,
            `numkv.rows.code4` and `numkv.rows.code6` define the order. Only codes of `quantised_tokens` are valid.

        Raises
        ------
        NotSupported
            If the kind stores floats.
        IndexError
            If there is no such layer.
        """
        return self._codes("k", layer)

    @reads
    def k_scales(self, layer: int) -> Array:
        """Scales of a layer's keys, the factors of its codes, for each token and head.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        array
            A view, valid until the cache grows. int8, code4 and code6: float32 ``(tokens, num_kv_heads)``. int4:
            bfloat16 ``(tokens, num_kv_heads, groups)``, with groups of 32 elements. fp8: float32 ``(num_kv_heads,)``.

        Raises
        ------
        NotSupported
            If the kind stores floats.
        IndexError
            If there is no such layer.
        """
        return self._scales("k", layer)

    @streamed
    @reads
    def v(self, layer: int) -> Array:
        """Values of a layer ``(tokens, num_kv_heads, head_dim_v)``; see `k`.

        Parameters
        ----------
        layer : int
            Which layer.
        """
        return self._read("v", layer)

    @reads
    def v_codes(self, layer: int) -> Array:
        """Codes of a layer's values, with `head_dim_v` in place of `head_dim`; see `k_codes`.

        Parameters
        ----------
        layer : int
            Which layer.
        """
        return self._codes("v", layer)

    @reads
    def v_scales(self, layer: int) -> Array:
        """Scales of a layer's values, with `head_dim_v` in place of `head_dim`; see `k_scales`.

        Parameters
        ----------
        layer : int
            Which layer.
        """
        return self._scales("v", layer)

    def _codes(self, which: str, layer: int) -> Array:
        layer = self._check_quantised(which, layer)
        length = self._stored(layer)  # before the pool
        return self._target.token_major(self._pool.values(which)[layer, :, :length])

    def _scales(self, which: str, layer: int) -> Array:
        kind = self._pool.buffer(which).kind
        if kind.scales_per == "head":
            return self._pools[check_index("layer", layer, len(self._lengths))].scales(which)
        layer = self._check_quantised(which, layer)
        if which == "k" and self._pool.by_channel:
            raise NotSupported(
                f"k_scales: expected rows that are stored one by one, got keys in {kind}, whose scales are those of "
                "groups of tokens; keep keys in int8 or int4"
            )
        length = self._stored(layer)  # before the pool
        scale = self._pool.scales(which)
        rows = self._target.token_major(by_row(scale)[layer, :, :length])
        return rows if len(scale.shape) == 4 else rows[:, :, 0]

    def _check_quantised(self, which: str, layer: int) -> int:
        kind = self._pool.buffer(which).kind
        if not kind.has_scales:
            raise NotSupported(
                f"expected a quantised kind, got {kind}, which has neither codes nor scales; "
                f"read {which}(layer)"
            )
        return check_index("layer", layer, len(self._lengths))

    def _read(self, which: str, layer: int) -> Array:
        layer = check_index("layer", layer, len(self._lengths))
        length = self._stored(layer)  # before the pool
        pool = self._pools[layer]
        rows = pool.rows(which, layer, slice(0, length))
        if self._full_precision is not None:
            rows = self._full_precision.overlay(pool, which, layer, rows, length)
        return self._target.token_major(rows)

    # -- attention

    @reads
    def decode_attention(
        self,
        layer: int,
        q: Any,
        *,
        out: Any = None,
        return_lse: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> Any:
        """Attend over all rows appended to a layer; the queries are those of the last ones.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array (num_q_heads, head_dim) or (num_tokens, num_q_heads, head_dim)
            Queries; each sees its own position and earlier ones.
        out, return_lse, **options
            See `numkv.decode_attention`; `out` has the rank of q.

        Returns
        -------
        out : array of q's rank
            In q's dtype. One query on an empty layer gives 0 (and -inf).
        lse : float32 array (num_q_heads,) or (num_tokens, num_q_heads)
            Natural log of the sum of exponentials; only with `return_lse`.

        Raises
        ------
        DimensionMismatch
            If there are several queries, more than rows, or a shape does not fit.
        IndexError
            If there is no such layer.
        UnsupportedDType, NotSupported, ValueError
            See `numkv.decode_attention`.
        """
        layer = check_index("layer", layer, len(self._lengths))
        checked = check_options(options, return_lse, out)
        if not self._target.chooses_stream:
            return self._attend_here(layer, q, checked)
        if self._again is not None and checked.sight is None:
            here = functools.partial(self._attend_here, layer, q, checked)
            return self._attend_again(layer, q, checked, here)
        with self._target.on(q, self._pool.k):
            return self._attend_here(layer, q, checked)

    def _attend_here(self, layer: int, q: Any, options: CheckedOptions) -> Any:
        """Attend on the stream of the call, with the queries of several tokens or with those of one, by head."""
        q = self._target.accept(q, "q")
        if len(q.shape) != 2:
            return self._attend(layer, q, options)
        if options.out is not None:
            out = self._target.accept(options.out, "out")
            options = options._replace(out=out.reshape((1, *out.shape)))
        result = self._attend(layer, q.reshape((1, *q.shape)), options)
        return (result[0][0], result[1][0]) if options.return_lse else result[0]

    @streamed
    @reads
    def attention_weights(
        self,
        layer: int,
        q: Any,
        *,
        lse: Any = None,
        **options: Unpack[AttentionOptions],
    ) -> Array:
        """Sum the attention that each row of a layer gets from the queries of the last rows.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array (num_q_heads, head_dim) or (num_tokens, num_q_heads, head_dim)
            Queries; each sees its own position and earlier ones.
        lse : float32 array of q's shape without its last axis, optional
            What `decode_attention` returned with ``return_lse=True`` for these queries and options. Computed if None,
            which costs as much as that call.
        **options
            `sm_scale`, `logits_soft_cap` and `window_left`: see `numkv.AttentionOptions`.

        Returns
        -------
        float32 array (num_kv_heads, tokens)
            Sums over the queries and the q heads of a GQA group; see `numkv.attention_weights`. Rows not yet advanced
            are included.

        Raises
        ------
        DimensionMismatch
            If there are several queries, more than rows, or a shape does not fit.
        IndexError
            If there is no such layer.
        UnsupportedDType, NotSupported, ValueError
            See `numkv.decode_attention`.
        """
        layer = check_index("layer", layer, len(self._lengths))
        checked, target = check_options(options, takes=IN_A_WINDOW), self._target
        q = target.accept(q, "q")
        if len(q.shape) == 2:
            q = q.reshape((1, *q.shape))
            if lse is not None:
                lse = target.accept(lse, "lse")
                lse = lse.reshape((1, *lse.shape))
        return self._mass(layer, q, checked, lse)

    @reads
    def key_error(
        self, layer: int, q: Any, *, sm_scale: float | None = None
    ) -> NDArray[np.float64]:
        """Estimate how far quantising the keys moves the scores of queries, without the exact keys.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array (num_queries, num_q_heads, head_dim)
            Any queries of the layer, such as those of the newest tokens.
        sm_scale : float, optional
            Scale of the scores; ``1 / sqrt(head_dim)`` if None.

        Returns
        -------
        float64 array (num_queries, num_q_heads)
            The root mean square of the errors of scores, over the layer's tokens; tokens in full precision have
            none. A tenth is little, 1 changes which token is attended to. See `numkv.storage.key_error`.

        Raises
        ------
        NotSupported
            If keys are not quantised by scales of rows or groups.
        DimensionMismatch, UnsupportedDType, IndexError, ValueError, TypeError
            If an argument does not fit.
        """
        return self._key_error(check_index("layer", layer, len(self._lengths)), q, sm_scale)


def _moved(old: Pool, capacity: int, has_rows: bool) -> Pool:
    """A pool with room for `capacity` tokens in each layer, and with all that an old one holds."""
    layers, heads = (int(n) for n in old.k.shape[:2])
    kinds, shape = (old.k_kind, old.v_kind), (layers, heads, capacity)
    made = Pool.allocate(old.target, shape, old.head_dim, old.head_dim_v, *kinds, old.rotate)
    new = Pool(_with_scales(made.k_buffer, old.k_buffer), _with_scales(made.v_buffer, old.v_buffer))
    copy_rows = old.target.ops.copy_rows
    if has_rows:
        start = old.target.index(np.zeros(layers), np.int64)
        copy_rows(old.k, new.k, start)
        copy_rows(old.v, new.v, start)
        for before, after in ((old.k_buffer, new.k_buffer), (old.v_buffer, new.v_buffer)):
            if before.kind.has_scales:
                copy_rows(by_row(before.scales), by_row(after.scales), start)
    return new


def by_row(scale: Array) -> Array:
    """Scales with an axis for those of a row, also where a row has one."""
    return scale if len(scale.shape) == 4 else scale.reshape((*scale.shape, 1))


# Scales of fp8 storage: each layer has its own for every kv head.


def _with_scales(buffer: Buffer, source: Buffer | None = None) -> Buffer:
    """Return a buffer on the same words in which each block, a layer, has scales for its own kv heads.

    Parameters
    ----------
    buffer : Buffer
        A block for each layer.
    source : Buffer, optional
        An earlier result for as many layers, whose scales are copied. Without it all are 1.

    Returns
    -------
    Buffer
        Its scales of heads are ``(num_layers * num_kv_heads,)``; of a kind without such scales it is `buffer`.
    """
    if buffer.kind.scales_per != "head":
        return buffer
    layers, heads = (int(n) for n in buffer.words.shape[:2])
    scales = np.ones(layers * heads, buffer.kind.scale_word)
    if source is not None:
        scales[:] = buffer.target.to_host(source.scales)
    return replace(buffer, scales=buffer.target.asarray(scales))


def _pools_of_layers(pool: Pool) -> list[Pool]:
    """Return the pool as each layer sees it: with its own scales of heads, where there are such."""
    layers = int(pool.k.shape[0])
    if "head" not in (pool.k_kind.scales_per, pool.v_kind.scales_per):
        return [pool] * layers
    k, v = pool.k_buffer, pool.v_buffer
    return [Pool(_of_layer(k, layer), _of_layer(v, layer)) for layer in range(layers)]


def _of_layer(buffer: Buffer, layer: int) -> Buffer:
    if buffer.kind.scales_per != "head":
        return buffer
    heads = int(buffer.words.shape[1])
    return replace(buffer, scales=buffer.scales[layer * heads : (layer + 1) * heads])
