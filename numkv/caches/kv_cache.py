"""`KVCache`: the K and V of one sequence in all layers, growing as tokens come."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.attention.options import check_options
from numkv.caches.layer_scales import pools_of_layers, with_scales_of_layers
from numkv.caches.stored_rows import StoredRows, by_row
from numkv.checks import check_index, check_kept, check_size
from numkv.compaction.key_shift import RopeShift
from numkv.errors import CacheFull, DimensionMismatch, NumkvError
from numkv.kinds import Kind, kinds_of
from numkv.storage import jit_views
from numkv.storage.pool import Pool
from numkv.storage.tables import one_block_each
from numkv.targets.base import Array

__all__ = ["KVCache"]

# Tokens that a cache without a bound makes room for at first.
_FIRST_CAPACITY = 16


class KVCache(StoredRows):
    """One sequence's keys and values, for all layers of a model.

    Each step appends the new tokens' rows to every layer, attends, and then advances once.

    Parameters
    ----------
    num_layers : int
        Layers of the model.
    num_kv_heads : int
        Kv heads of each layer.
    head_dim : int
        Elements of a K row, and of a V row unless `head_dim_v` says otherwise.
    max_seq_len : int, optional
        Tokens that the buffers are made for, once; `append` beyond raises `CacheFull`. Without it they grow by
        doubling, and views taken before a growth show the old memory.
    kind : str or Kind
        Storage kind.
    target : {"cpu", "cuda"}
        Where the buffers are and the kernels run.
    head_dim_v : int, optional
        Elements of a V row.
    k_kind, v_kind : str or Kind, optional
        Storage kinds of K and of V, where they differ from `kind`.
    rotate : bool
        Whether rows are rotated before they are stored; see `numkv.ContiguousLayer`. The
        rotation is undone in rows that are read; codes and scales are those of rotated rows.
    residual_window : int
        Newest tokens that are kept in full precision, beside a quantised kind; see `numkv.caches.full_precision`.
    num_sink_tokens : int
        First tokens that are kept in full precision too.

    Raises
    ------
    NotSupported
        If tokens should stay in full precision but neither kind is quantised.
    DimensionMismatch, UnsupportedDType
        If a size is too small, or there is no such kind.

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
        residual_window: int = 0,
        num_sink_tokens: int = 0,
    ) -> None:
        of_k, of_v = kinds_of(kind, k_kind, v_kind)
        layers = check_size("num_layers", num_layers)
        heads = check_size("num_kv_heads", num_kv_heads, 1)
        dim = check_size("head_dim", head_dim, 1)
        dim_v = dim if head_dim_v is None else check_size("head_dim_v", head_dim_v, 1)
        self._bound = None if max_seq_len is None else check_size("max_seq_len", max_seq_len)
        # Layer i has block i, of as many tokens as the buffers hold.
        shape = (layers, heads, 0 if self._bound is None else self._bound)
        pool = with_scales_of_layers(
            Pool.allocate(targets.get(target), shape, dim, dim_v, of_k, of_v, bool(rotate))
        )
        rows = np.zeros(layers, np.int64)  # appended to each layer; shared with .jit
        tables = [np.array([layer], np.int32) for layer in range(layers)]
        self._length = np.zeros(1, np.int64)  # advanced past; shared with .jit
        # Whether the buffers that .jit has are the cache's own.
        self._current = np.ones(1, np.int64)
        super().__init__(pool, rows, tables, residual_window, num_sink_tokens, self._bound)
        self._pools, self._room = pools_of_layers(pool), shape[2]
        ids = one_block_each(self._target.name, layers)
        self._device_tables = [ids[layer : layer + 1] for layer in range(layers)]

    def _move(self, capacity: int) -> None:
        """Move what is stored into buffers for `capacity` tokens."""
        old, layers = self._pool, self.num_layers
        kinds = (old.k_kind, old.v_kind)
        shape = (layers, self._heads, capacity)
        made = Pool.allocate(old.target, shape, self.head_dim, self.head_dim_v, *kinds, old.rotate)
        new = with_scales_of_layers(made, old)
        copy_rows = old.target.ops.copy_rows
        if layers and self._lengths.max() > 0:
            start = old.target.index(np.zeros(layers), np.int64)
            copy_rows(old.k, new.k, start)
            copy_rows(old.v, new.v, start)
            for before, after in ((old.k_buffer, new.k_buffer), (old.v_buffer, new.v_buffer)):
                if before.kind.has_scales:
                    copy_rows(by_row(before.scales), by_row(after.scales), start)
        self._pool, self._pools, self._room = new, pools_of_layers(new), capacity
        self._current[0] = 0  # for views that `jit` gave so far
        self._current = np.ones(1, np.int64)
        self._struct = None

    # -- what it is

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self._lengths)

    @property
    def head_dim_v(self) -> int:
        """Elements of a V row."""
        return self._pool.head_dim_v

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
        """Tokens that the buffers hold now."""
        return int(self._pool.k.shape[2])

    @property
    def is_empty(self) -> bool:
        """Whether the length is 0; rows may already have been appended."""
        return len(self) == 0

    def __len__(self) -> int:
        return int(self._length[0])

    def __repr__(self) -> str:
        return (
            f"KVCache(len={len(self)}, num_layers={self.num_layers}, num_kv_heads={self._heads}, "
            f"head_dim={self.head_dim}, head_dim_v={self.head_dim_v}, kind={self._storage()}, "
            f"target={self.target}, capacity={self.capacity}, nbytes={self.nbytes})"
        )

    @property
    def jit(self) -> Any:
        """The jitclass instance over this cache's memory; see `numkv.storage.jit_views`.

        A cache that grows gets new buffers: ask again then. An instance from before neither appends nor advances, and
        raises where rows are loaded.

        With ``rotate=True`` it takes and gives rotated rows, as they are stored. A cache that keeps tokens in full
        precision has none (`NotSupported`): some of its tokens are not in these buffers.
        """
        return self._view(self._make_struct)

    def _make_struct(self) -> Any:
        if not self._target.has_jit_views:
            table = np.arange(self.num_layers, dtype=np.int32)
            return jit_views.host_struct("int64")(table, self._lengths)
        pool = self._pool
        make = jit_views.cache_struct(pool.k_kind.name, pool.v_kind.name)
        books = (self._lengths, self._length, self._current)
        return make(pool.k, pool.v, pool.k_scale, pool.v_scale, *books)

    def _bad_length(self, layer: int, length: int, most: int) -> str:
        return (
            f"`jit.context_lens`: expected numbers of rows in [0, {most}], got {length} for layer {layer}; "
            "compiled code has to stay within the capacity"
        )

    # -- writing

    def _make_room(self, layer: int, start: int, tokens: int) -> None:
        if start + tokens <= self.capacity:
            return
        if self._bound is not None:
            raise CacheFull(
                f"expected room for {tokens} more tokens in layer {layer}, got "
                f"{self._bound - start} of max_seq_len {self._bound}; truncate, or make the "
                "cache larger"
            )
        self._move(max(start + tokens, 2 * self.capacity, _FIRST_CAPACITY))

    def _block_table(self, layer: int) -> Array:
        return self._device_tables[layer]

    def append(self, layer: int, k: Any, v: Any, *, check_finite: bool = True) -> None:
        """Append the rows of one token or of several to a layer; the length stays.

        Parameters
        ----------
        layer : int
            Which layer.
        k : array (num_kv_heads, head_dim), (num_kv_heads * head_dim,) or (num_tokens, num_kv_heads, head_dim)
            Keys, in the kind's own dtype or in float32; for int8 and int4 in fp32, fp16 or bf16.
        v : array (num_kv_heads, head_dim_v), (num_kv_heads * head_dim_v,) or (num_tokens, num_kv_heads, head_dim_v)
            Values of the same tokens.
        check_finite : bool
            Whether rows that will be quantised are checked for NaN and infinity first.

        Raises
        ------
        CacheFull
            If `max_seq_len` leaves no room; nothing is written.
        NonFiniteInput
            If rows to be quantised hold NaN or infinity; nothing is written.
        IndexError
            If there is no such layer.
        DimensionMismatch, UnsupportedDType, NotSupported
            If an array has another shape, dtype, layout or target.
        """
        layer = check_index("layer", layer, self.num_layers)
        if self._full_precision is None:
            rows = (k, v)
            if type(k) is type(v) is np.ndarray and k.ndim == v.ndim == 2:
                rows = (k[None], v[None])
            if self._append_small(layer, *rows, check_finite):
                return
        k = self._token_rows("k", k, self.head_dim)
        v = self._token_rows("v", v, self.head_dim_v)
        self._append(layer, k, v, check_finite)

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

    def set_scales(self, layer: int, k: Any = None, v: Any = None) -> None:
        """Set the scales of a layer in fp8; they are 1 at first.

        A stored element is the row's element divided by the scale of its kv head, and rounded: a scale of
        ``max(|x|) / 448`` (for fp8_e5m2 57,344) uses the range of the kind.

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
        length = len(self) + check_size("n", n)
        if self.num_layers and length > self._lengths.min():
            layer = int(self._lengths.argmin())
            raise NumkvError(
                f"`n`: expected at most {self._lengths[layer] - len(self)}, the rows appended to layer "
                f"{layer} since the last advance, got {n}; append to every layer first"
            )
        self._length[0] = length

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
        self._keep(check_index("length", length, len(self), inclusive=True))

    def _keep(self, length: int) -> None:
        np.minimum(self._lengths, length, out=self._lengths)
        self._length[0] = length
        if self._full_precision is not None:
            self._full_precision.truncate(length)

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
        length, layers = len(self), self.num_layers
        if layers and self._lengths.max() > length:
            layer = int(self._lengths.argmax())
            raise NumkvError(
                f"compact: expected no rows beyond the {length} advanced past, got "
                f"{self._lengths[layer]} in layer {layer}; advance, or truncate({length})"
            )
        kept = check_kept("keep", keep, length, ndim=2 if np.ndim(keep) == 2 else 1)
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

    def clear(self) -> None:
        """Drop all tokens; memory and geometry stay."""
        self._keep(0)

    def copy(self) -> Self:
        """A deep copy that shares no memory.

        Returns
        -------
        KVCache
        """
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new._lengths, new._length = self._lengths.copy(), self._length.copy()
        new._current = self._current.copy()  # the original's jit view stays in use
        new._move(self.capacity)
        if self._full_precision is not None:
            new._full_precision = self._full_precision.copy()
        return new

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    # -- attention

    def decode_attention(
        self,
        layer: int,
        q: Any,
        *,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        window_left: int = -1,
        sinks: Any = None,
        return_lse: bool = False,
        out: Any = None,
    ) -> Any:
        """Attend over all rows appended to a layer; the queries are those of the last ones.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array (num_q_heads, head_dim) or (num_tokens, num_q_heads, head_dim)
            Queries; each sees its own position and earlier ones.
        sm_scale, logits_soft_cap, window_left, sinks, return_lse, out
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
            If there are more queries than rows, or a shape does not fit.
        IndexError
            If there is no such layer.
        UnsupportedDType, NotSupported, ValueError
            See `numkv.decode_attention`.
        """
        layer = check_index("layer", layer, self.num_layers)
        target = self._target
        q = target.accept(q, "q")
        single = len(q.shape) == 2
        if single:
            q = q.reshape((1, *q.shape))
            if out is not None:
                out = target.accept(out, "out")
                out = out.reshape((1, *out.shape))
        options = check_options(sm_scale, logits_soft_cap, window_left, sinks, return_lse, out)
        result = self._attend(layer, q, options)
        if not single:
            return result
        return (result[0][0], result[1][0]) if return_lse else result[0]

    def attention_weights(
        self,
        layer: int,
        q: Any,
        *,
        lse: Any = None,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        window_left: int = -1,
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
        sm_scale, logits_soft_cap, window_left
            See `numkv.decode_attention`.

        Returns
        -------
        float32 array (num_kv_heads, tokens)
            Sums over the queries and the q heads of a GQA group; see `numkv.attention_weights`. Rows not yet advanced
            are included.

        Raises
        ------
        DimensionMismatch
            If there are more queries than rows, or a shape does not fit.
        IndexError
            If there is no such layer.
        UnsupportedDType, NotSupported, ValueError
            See `numkv.decode_attention`.
        """
        layer = check_index("layer", layer, self.num_layers)
        target = self._target
        q = target.accept(q, "q")
        if len(q.shape) == 2:
            q = q.reshape((1, *q.shape))
            if lse is not None:
                lse = target.accept(lse, "lse")
                lse = lse.reshape((1, *lse.shape))
        return self._mass(layer, q, check_options(sm_scale, logits_soft_cap, window_left), lse)
