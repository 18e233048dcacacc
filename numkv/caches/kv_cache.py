"""`KVCache`: the K and V of one sequence in all layers, growing as tokens come."""

from __future__ import annotations

import functools
from typing import Any, Self

import numpy as np

from numkv import targets
from numkv.attention.attend import attend, check_queries, too_many_queries
from numkv.attention.mass import weigh
from numkv.attention.options import check_options
from numkv.caches.full_precision import Residual, no_jit
from numkv.checks import check_index, check_kept, check_size
from numkv.compaction.key_shift import RopeShift
from numkv.compaction.moves import plan_moves
from numkv.errors import CacheFull, DimensionMismatch, NotSupported, NumkvError
from numkv.kinds import Kind, kinds_of
from numkv.storage import jit_views
from numkv.storage.pool import Pool
from numkv.storage.tables import one_block_each, one_length, one_sequence
from numkv.targets.base import Array
from numkv.writing import fast_path

__all__ = ["KVCache"]

# Tokens that a cache without a bound makes room for at first.
_FIRST_CAPACITY = 16


@functools.lru_cache(maxsize=1024)
def _host_table(layer: int) -> np.ndarray[Any, Any]:
    """The block table of a layer, on the host: its one block."""
    return np.array([layer], np.int32)


class KVCache:
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
        Storage kinds of K and of V where they shall differ from `kind`.
    rotate : bool
        Whether rows are rotated before they are stored; see `numkv.ContiguousLayer`. Rows that are read are turned
        back, codes and scales are those of rotated rows.
    residual_window : int
        Newest tokens that are kept in full precision, beside a quantised kind; see `numkv.caches.full_precision`.
    num_sink_tokens : int
        First tokens that are kept so too.

    Raises
    ------
    NotSupported
        If tokens are to be kept in full precision beside a kind that quantises nothing.
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
        self._target = targets.get(target)
        self._k_kind, self._v_kind = kinds_of(kind, k_kind, v_kind)
        layers = check_size("num_layers", num_layers)
        self._heads = check_size("num_kv_heads", num_kv_heads, 1)
        self._k_dim = check_size("head_dim", head_dim, 1)
        self._v_dim = self._k_dim if head_dim_v is None else check_size("head_dim_v", head_dim_v, 1)
        self._rotate = bool(rotate)
        self._bound = None if max_seq_len is None else check_size("max_seq_len", max_seq_len)
        self._rows = np.zeros(layers, np.int64)  # appended to each layer; shared with .jit
        self._length = np.zeros(1, np.int64)  # advanced past; shared with .jit
        self._struct: Any = None
        # Whether the buffers that .jit has are the cache's own.
        self._current = np.ones(1, np.int64)
        self._pool = self._make_pool(0 if self._bound is None else self._bound)
        self._residual = Residual.make(
            self._pool, layers, residual_window, num_sink_tokens, self._bound
        )

    def _make_pool(self, capacity: int) -> Pool:
        """Buffers for `capacity` tokens: a block for each layer."""
        shape = (len(self._rows), self._heads, capacity)
        kinds = (self._k_kind, self._v_kind)
        return Pool.allocate(self._target, shape, self._k_dim, self._v_dim, *kinds, self._rotate)

    def _move(self, capacity: int) -> None:
        """Move what is stored into buffers for `capacity` tokens."""
        old, new = self._pool, self._make_pool(capacity)
        layers, copy_rows = len(self._rows), self._target.ops.copy_rows
        if layers and self._rows.max() > 0:
            start = self._target.index(np.zeros(layers), np.int64)
            copy_rows(old.k, new.k, start)
            copy_rows(old.v, new.v, start)
            for scale, to in ((old.k_scale, new.k_scale), (old.v_scale, new.v_scale)):
                if scale.size:
                    copy_rows(_by_row(scale), _by_row(to), start)
        self._pool = new
        self._current[0] = 0  # of what `jit` gave so far
        self._current = np.ones(1, np.int64)
        self._struct = None

    # -- what it is

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self._rows)

    @property
    def num_kv_heads(self) -> int:
        """Kv heads of each layer."""
        return self._heads

    @property
    def head_dim(self) -> int:
        """Elements of a K row."""
        return self._k_dim

    @property
    def head_dim_v(self) -> int:
        """Elements of a V row."""
        return self._v_dim

    @property
    def entry_size(self) -> int:
        """Elements of K that one token has in one layer: ``num_kv_heads * head_dim``."""
        return self._heads * self._k_dim

    @property
    def kind(self) -> Kind:
        """Storage kind of K, and of V unless `v_kind` differs."""
        return self._k_kind

    @property
    def v_kind(self) -> Kind:
        """Storage kind of V."""
        return self._v_kind

    @property
    def rotate(self) -> bool:
        """Whether rows are rotated before they are stored."""
        return self._rotate

    @property
    def target(self) -> str:
        """Name of the target."""
        return self._target.name

    @property
    def max_seq_len(self) -> int | None:
        """The bound given at the start, or None."""
        return self._bound

    @property
    def capacity(self) -> int:
        """Tokens that the buffers hold now."""
        return int(self._pool.k.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of the K and V buffers, scales and full-precision tokens included."""
        return self._pool.nbytes + (0 if self._residual is None else self._residual.nbytes)

    @property
    def residual_window(self) -> int:
        """Newest tokens of each layer that are kept in full precision."""
        return 0 if self._residual is None else self._residual.window

    @property
    def num_sink_tokens(self) -> int:
        """First tokens of each layer that are kept in full precision."""
        return 0 if self._residual is None else self._residual.num_sinks

    @property
    def is_empty(self) -> bool:
        """Whether the length is 0; rows may already have been appended."""
        return len(self) == 0

    def __len__(self) -> int:
        return int(self._length[0])

    def __repr__(self) -> str:
        kinds = str(self._k_kind)
        if self._v_kind is not self._k_kind:
            kinds += f"/{self._v_kind}"
        if self._rotate:
            kinds += ", rotate=True"
        if self._residual is not None:
            kinds += f", {self._residual}"
        return (
            f"KVCache(len={len(self)}, num_layers={self.num_layers}, num_kv_heads={self._heads}, "
            f"head_dim={self._k_dim}, head_dim_v={self._v_dim}, kind={kinds}, "
            f"target={self.target}, capacity={self.capacity}, nbytes={self.nbytes})"
        )

    @property
    def jit(self) -> Any:
        """The jitclass instance over this cache's memory; see `numkv.storage.jit_views`.

        A cache that grows gets new buffers: ask again then. An instance from before neither appends nor advances, and
        raises where rows are loaded.

        With ``rotate=True`` it takes and gives rows as they are stored: rotated. A cache that keeps tokens in full
        precision has none (`NotSupported`): the buffers are not all of it.
        """
        if self._residual is not None:
            raise NotSupported(no_jit(self._residual))
        if self._struct is None:
            if self._target.has_jit_views:
                make = jit_views.cache_struct(self._k_kind.name, self._v_kind.name)
                pool = self._pool
                self._struct = make(
                    pool.k,
                    pool.v,
                    pool.k_scale,
                    pool.v_scale,
                    self._rows,
                    self._length,
                    self._current,
                )
            else:
                table = np.arange(self.num_layers, dtype=np.int32)
                self._struct = jit_views.host_struct("int64")(table, self._rows)
        return self._struct

    def _rows_of(self, layer: int) -> int:
        """Rows of a layer, which compiled code may have written: checked against the memory that there is."""
        rows = int(self._rows[layer])
        if not 0 <= rows <= self.capacity:
            raise NumkvError(
                f"`jit.context_lens`: expected numbers of rows in [0, {self.capacity}], got {rows} for layer {layer}; "
                "compiled code has to stay within the capacity"
            )
        return rows

    # -- writing

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
            Whether rows that are to be quantised are looked at first.

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
        if self._residual is None and self._append_at_once(layer, k, v, check_finite):
            return
        k = self._token_rows("k", k, self._k_dim)
        v = self._token_rows("v", v, self._v_dim)
        k, v = self._pool.check_rows(k, v, check_finite=check_finite)
        tokens, start = int(k.shape[0]), self._rows_of(layer)
        if start + tokens > self.capacity:
            if self._bound is not None:
                raise CacheFull(
                    f"expected room for {tokens} more tokens in layer {layer}, got "
                    f"{self._bound - start} of max_seq_len {self._bound}; truncate, or make the "
                    "cache larger"
                )
            self._move(max(start + tokens, 2 * self.capacity, _FIRST_CAPACITY))
        table = one_block_each(self._target.name, self.num_layers)[layer]
        if self._residual is None:
            self._pool.append(k, v, table, start)
        else:
            self._residual.append(self._pool, layer, k, v, table, start)
        self._rows[layer] = start + tokens

    def _append_at_once(self, layer: int, k: Any, v: Any, look: bool) -> bool:
        """Append where that is a matter of one compiled call, or return False."""
        if not (type(k) is type(v) is np.ndarray):
            return False
        if k.ndim == v.ndim == 2:
            k, v = k[None], v[None]
        start = self._rows_of(layer)
        table = _host_table(layer)
        tokens = fast_path.pool_append(self._pool, k, v, table, start, self.capacity - start, look)
        if tokens >= 0:
            self._rows[layer] = start + tokens
        return tokens >= 0

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
        if self.num_layers and length > self._rows.min():
            layer = int(self._rows.argmin())
            raise NumkvError(
                f"`n`: expected at most {self._rows[layer] - len(self)}, the rows appended to layer "
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
        length = check_index("length", length, len(self), inclusive=True)
        np.minimum(self._rows, length, out=self._rows)
        self._length[0] = length
        if self._residual is not None:
            for layer in range(self.num_layers):
                self._residual.truncate(layer, length)

    def compact(self, keep: Any, shift: RopeShift | None = None) -> None:
        """Keep some tokens only, and move them to the front: token ``keep[i]`` becomes token i.

        Rows move as they are stored, bit for bit. With `shift`, the keys of tokens that move are turned to their new
        positions; quantised ones are quantised once more.

        Parameters
        ----------
        keep : array-like of int (n,) or (num_layers, n)
            Tokens to keep, in order, on the host: the same in all layers, or as many in each.
        shift : RopeShift, optional
            What `numkv.rope_shift` made of the model's tables. Without it keys stay as they are: for models without
            rotation, and for methods that go on counting positions from those that tokens had.

        Raises
        ------
        NumkvError
            If rows have been appended and not yet advanced.
        IndexError
            If there is no such token, or the shift's tables are too short.
        ValueError
            If indices do not rise.
        DimensionMismatch, UnsupportedDType, TypeError
            If `keep` has another shape or is no integers, the shift rotates more elements than a key has, or it is
            something else.

        Notes
        -----
        Nothing has changed after an error. Memory stays as it is.
        """
        length, layers = len(self), self.num_layers
        if layers and self._rows.max() > length:
            layer = int(self._rows.argmax())
            raise NumkvError(
                f"compact: expected no rows beyond the {length} advanced past, got "
                f"{self._rows[layer]} in layer {layer}; advance, or truncate({length})"
            )
        kept = check_kept("keep", keep, length, ndim=2 if np.ndim(keep) == 2 else 1)
        n = kept.shape[-1]
        if kept.ndim == 2 and len(kept) != layers:
            raise DimensionMismatch(
                f"`keep`: expected ({n},) or a row for each layer, ({layers}, {n}), got {kept.shape}",
                expected=(layers, n),
                actual=kept.shape,
            )
        old = np.broadcast_to(kept, (layers, n))
        new = np.broadcast_to(np.arange(n), (layers, n))
        first = np.arange(layers)[:, None] * self.capacity
        moved = old != new
        if self._residual is not None:
            moved &= self._residual.is_quantised(old)
        moves = plan_moves(
            self._pool, shift, (first + old)[moved], (first + new)[moved], (new - old)[moved]
        )
        if self._residual is not None:
            moves += self._residual.plan_moves(old, shift)
        for move in moves:
            move()
        self.truncate(n)

    def clear(self) -> None:
        """Drop all tokens; memory and geometry stay."""
        self._rows[:] = 0
        self._length[0] = 0
        if self._residual is not None:
            for layer in range(self.num_layers):
                self._residual.truncate(layer, 0)

    # -- reading

    def quantised_tokens(self, layer: int) -> range:
        """Positions of a layer's tokens that are quantised: all of a quantised kind, but for those in full precision.

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
        layer = check_index("layer", layer, self.num_layers)
        rows = self._rows_of(layer)
        if self._residual is not None:
            return range(*self._residual.quantised(layer, rows))
        return range(rows if self._k_kind.has_scales or self._v_kind.has_scales else 0)

    def k(self, layer: int) -> Array:
        """Keys of a layer, rows not yet advanced included.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        array (tokens, num_kv_heads, head_dim)
            For float kinds a view in the kind's dtype, valid until the cache grows; for quantised kinds a float32 copy,
            and with ``rotate=True`` too (of fp64 float64). With full-precision tokens always such a copy, in which they
            are as they were appended.

        Raises
        ------
        IndexError
            If there is no such layer.
        """
        return self._read("k", layer)

    def k_codes(self, layer: int) -> Array:
        """Codes of a layer's keys, as stored (with ``rotate=True`` of rotated rows); see `k_scales`.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        array (tokens, num_kv_heads, head_dim)
            A view, valid until the cache grows: of int8 the codes, of int4 two of them to a byte
            ``(tokens, num_kv_heads, head_dim / 2)``, in the order that `numkv.rows.int4` says. Only those of
            `quantised_tokens` mean anything.

        Raises
        ------
        NotSupported
            If the kind stores floats.
        IndexError
            If there is no such layer.
        """
        layer = self._quantised("k", layer)
        return self._target.token_major(self._pool.k[layer, :, : self._rows_of(layer)])

    def k_scales(self, layer: int) -> Array:
        """Scales of a layer's keys: what makes values of the codes, for each token and head.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        array
            A view, valid until the cache grows: of int8 float32 ``(tokens, num_kv_heads)``, of int4 bfloat16
            ``(tokens, num_kv_heads, groups)`` for groups of 32 elements.

        Raises
        ------
        NotSupported
            If the kind stores floats.
        IndexError
            If there is no such layer.
        """
        layer = self._quantised("k", layer)
        return self._scales("k", layer)

    def v(self, layer: int) -> Array:
        """Values of a layer, rows not yet advanced included.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        array (tokens, num_kv_heads, head_dim_v)
            For float kinds a view in the kind's dtype, valid until the cache grows; for quantised kinds a float32 copy,
            and with ``rotate=True`` too (of fp64 float64). With full-precision tokens always such a copy, in which they
            are as they were appended.

        Raises
        ------
        IndexError
            If there is no such layer.
        """
        return self._read("v", layer)

    def v_codes(self, layer: int) -> Array:
        """Codes of a layer's values, as stored (with ``rotate=True`` of rotated rows); see `v_scales`.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        array (tokens, num_kv_heads, head_dim_v)
            A view, valid until the cache grows: of int8 the codes, of int4 two of them to a byte
            ``(tokens, num_kv_heads, head_dim_v / 2)``, in the order that `numkv.rows.int4` says. Only those of
            `quantised_tokens` mean anything.

        Raises
        ------
        NotSupported
            If the kind stores floats.
        IndexError
            If there is no such layer.
        """
        layer = self._quantised("v", layer)
        return self._target.token_major(self._pool.v[layer, :, : self._rows_of(layer)])

    def v_scales(self, layer: int) -> Array:
        """Scales of a layer's values: what makes values of the codes, for each token and head.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        array
            A view, valid until the cache grows: of int8 float32 ``(tokens, num_kv_heads)``, of int4 bfloat16
            ``(tokens, num_kv_heads, groups)`` for groups of 32 elements.

        Raises
        ------
        NotSupported
            If the kind stores floats.
        IndexError
            If there is no such layer.
        """
        layer = self._quantised("v", layer)
        return self._scales("v", layer)

    def _scales(self, which: str, layer: int) -> Array:
        scale = self._pool.scales(which)
        rows = self._target.token_major(_by_row(scale)[layer, :, : self._rows_of(layer)])
        return rows if len(scale.shape) == 4 else rows[:, :, 0]

    def _quantised(self, which: str, layer: int) -> int:
        kind = self._k_kind if which == "k" else self._v_kind
        if not kind.has_scales:
            raise NotSupported(
                f"expected a quantised kind, got {kind}, which has neither codes nor scales; "
                f"read {which}(layer)"
            )
        return check_index("layer", layer, self.num_layers)

    def _read(self, which: str, layer: int) -> Array:
        layer = check_index("layer", layer, self.num_layers)
        length = self._rows_of(layer)
        rows = self._pool.rows(which, layer, slice(0, length))
        if self._residual is not None:
            rows = self._residual.overlay(self._pool, which, layer, rows, length)
        return self._target.token_major(rows)

    def copy(self) -> Self:
        """A deep copy that shares no memory.

        Returns
        -------
        KVCache
        """
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new._rows, new._length = self._rows.copy(), self._length.copy()
        new._move(self.capacity)
        if self._residual is not None:
            new._residual = self._residual.copy()
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
        q = check_queries(target, q, self._heads, self._k_dim, "num_tokens")
        tokens, length = int(q.shape[0]), self._rows_of(layer)
        if tokens > length and tokens != 1:
            raise too_many_queries(tokens, length)
        table = one_block_each(target.name, self.num_layers)[layer : layer + 1]
        options = check_options(sm_scale, logits_soft_cap, window_left, sinks, return_lse, out)
        if self._residual is not None:
            result = self._residual.attend(self._pool, table, layer, q, length, options)
        else:
            lens = one_length(target.name, length)
            result = attend(self._pool, table, q, lens, one_sequence(target.name, tokens), options)
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
        """How much attention each row of a layer gets from the queries of the last ones.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array (num_q_heads, head_dim) or (num_tokens, num_q_heads, head_dim)
            Queries; each sees its own position and earlier ones.
        lse : float32 array of q's shape without its last axis, optional
            What `decode_attention` returned with ``return_lse=True`` for these queries and options; computed if None,
            which costs as much as that call.
        sm_scale, logits_soft_cap, window_left
            See `numkv.decode_attention`.

        Returns
        -------
        float32 array (num_kv_heads, tokens)
            Sums over the queries and the q heads of a group; see `numkv.attention_weights`. Rows not yet advanced are
            included.

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
        q = check_queries(target, q, self._heads, self._k_dim, "num_tokens")
        tokens, length = int(q.shape[0]), self._rows_of(layer)
        if tokens > length and tokens != 1:
            raise too_many_queries(tokens, length)
        table = one_block_each(target.name, self.num_layers)[layer : layer + 1]
        options = check_options(sm_scale, logits_soft_cap, window_left)
        if self._residual is not None:
            weights = self._residual.weigh(self._pool, table, layer, q, length, options, lse)
        else:
            lens = one_length(target.name, length)
            starts = one_sequence(target.name, tokens)
            weights = weigh(self._pool, table, q, lens, starts, length, options, lse=lse)
        return weights.reshape((self._heads, length))


def _by_row(scale: Array) -> Array:
    """Scales with an axis for those of a row, also where a row has one."""
    return scale if len(scale.shape) == 4 else scale.reshape((*scale.shape, 1))
