"""`KVCache`: the K and V of one sequence in all layers, growing as tokens come."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from numkv import structs, targets
from numkv.attention import Pool, attend, check_queries, one_block_each, too_many_queries
from numkv.checks import check_array, check_index, check_size
from numkv.errors import CacheFull, DimensionMismatch, NumkvError
from numkv.kinds import Kind, kind_of_dtype
from numkv.layers import kinds_of
from numkv.targets import Array

__all__ = ["KVCache"]

_FLOAT32 = np.dtype(np.float32)
# Tokens that a cache without a bound makes room for at first.
_FIRST_CAPACITY = 16


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
    ) -> None:
        self._target = targets.get(target)
        self._k_kind, self._v_kind = kinds_of(kind, k_kind, v_kind)
        layers = check_size("num_layers", num_layers)
        self._heads = check_size("num_kv_heads", num_kv_heads, 1)
        self._k_dim = check_size("head_dim", head_dim, 1)
        self._v_dim = self._k_dim if head_dim_v is None else check_size("head_dim_v", head_dim_v, 1)
        self._bound = None if max_seq_len is None else check_size("max_seq_len", max_seq_len)
        self._rows = np.zeros(layers, np.int64)  # appended to each layer; shared with .jit
        self._length = np.zeros(1, np.int64)  # advanced past; shared with .jit
        self._k_dtypes = tuple(dict.fromkeys((self._k_kind.dtype, _FLOAT32)))
        self._v_dtypes = tuple(dict.fromkeys((self._v_kind.dtype, _FLOAT32)))
        self._struct: Any = None
        self._k_words: Array = None
        self._v_words: Array = None
        self._allocate(0 if self._bound is None else self._bound)

    def _allocate(self, capacity: int) -> None:
        """Make buffers for `capacity` tokens and move what is stored into them."""
        target, layers = self._target, len(self._rows)
        k = target.zeros((layers, self._heads, capacity, self._k_dim), self._k_kind.dtype)
        v = target.zeros((layers, self._heads, capacity, self._v_dim), self._v_kind.dtype)
        k_words, v_words = target.words(k), target.words(v)
        if layers and self._rows.max() > 0:
            start = target.index(np.zeros(layers), np.int64)
            target.ops.copy_rows(self._k_words, k_words, start)
            target.ops.copy_rows(self._v_words, v_words, start)
        self._k, self._v, self._k_words, self._v_words = k, v, k_words, v_words
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
        return int(self._k.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of the K and V buffers."""
        return int(self._k.nbytes + self._v.nbytes)

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
        return (
            f"KVCache(len={len(self)}, num_layers={self.num_layers}, num_kv_heads={self._heads}, "
            f"head_dim={self._k_dim}, head_dim_v={self._v_dim}, kind={kinds}, "
            f"target={self.target}, capacity={self.capacity}, nbytes={self.nbytes})"
        )

    @property
    def jit(self) -> Any:
        """The jitclass instance over this cache's memory; ask again after a growth. See `numkv.structs`."""
        if self._struct is None:
            if self._target.name == "cpu":
                make = structs.cache_struct(self._k_kind.name, self._v_kind.name)
                self._struct = make(self._k_words, self._v_words, self._rows, self._length)
            else:
                table = np.arange(self.num_layers, dtype=np.int32)
                self._struct = structs.host_struct("int64")(table, self._rows)
        return self._struct

    # -- writing

    def append(self, layer: int, k: Any, v: Any) -> None:
        """Append the rows of one token or of several to a layer; the length stays.

        Parameters
        ----------
        layer : int
            Which layer.
        k : array (num_kv_heads, head_dim), (num_kv_heads * head_dim,) or (num_tokens, num_kv_heads, head_dim)
            Keys, in the kind's own dtype or in float32.
        v : array (num_kv_heads, head_dim_v), (num_kv_heads * head_dim_v,) or (num_tokens, num_kv_heads, head_dim_v)
            Values of the same tokens.

        Raises
        ------
        CacheFull
            If `max_seq_len` leaves no room; nothing is written.
        IndexError
            If there is no such layer.
        DimensionMismatch, UnsupportedDType, NotSupported
            If an array has another shape, dtype, layout or target.
        """
        layer = check_index("layer", layer, self.num_layers)
        k = self._check_rows("k", k, self._k_dtypes, self._k_dim)
        v = self._check_rows("v", v, self._v_dtypes, self._v_dim)
        tokens, start = int(k.shape[0]), int(self._rows[layer])
        if v.shape[0] != tokens:
            raise DimensionMismatch(
                f"`v`: expected as many tokens as `k`, {tokens}, got {v.shape[0]}",
                expected=tokens,
                actual=int(v.shape[0]),
            )
        if start + tokens > self.capacity:
            if self._bound is not None:
                raise CacheFull(
                    f"expected room for {tokens} more tokens in layer {layer}, got "
                    f"{self._bound - start} of max_seq_len {self._bound}; truncate, or make the "
                    "cache larger"
                )
            self._allocate(max(start + tokens, 2 * self.capacity, _FIRST_CAPACITY))
        target = self._target
        table = one_block_each(target.name, self.num_layers)[layer]
        for rows, words, to in ((k, self._k_words, self._k_kind), (v, self._v_words, self._v_kind)):
            source = kind_of_dtype(rows.dtype)
            assert source is not None
            target.ops.append_rows(target.words(rows), source.name, words, to.name, table, start)
        self._rows[layer] = start + tokens

    def _check_rows(self, name: str, x: Any, dtypes: tuple[Any, ...], dim: int) -> Array:
        x = self._target.accept(x, name)
        if len(x.shape) == 1:
            x = check_array(self._target, name, x, dtypes, (self._heads * dim,))
            return x.reshape((1, self._heads, dim))
        if len(x.shape) == 2:
            x = check_array(self._target, name, x, dtypes, (self._heads, dim))
            return x.reshape((1, self._heads, dim))
        return check_array(self._target, name, x, dtypes, ("num_tokens", self._heads, dim))

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

    def clear(self) -> None:
        """Drop all tokens; memory and geometry stay."""
        self._rows[:] = 0
        self._length[0] = 0

    # -- reading

    def k(self, layer: int) -> Array:
        """Keys of a layer, rows not yet advanced included.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        array (tokens, num_kv_heads, head_dim)
            A view, in the kind's dtype; valid until the cache grows.

        Raises
        ------
        IndexError
            If there is no such layer.
        """
        layer = check_index("layer", layer, self.num_layers)
        return self._target.token_major(self._k[layer, :, : int(self._rows[layer])])

    def v(self, layer: int) -> Array:
        """Values of a layer, rows not yet advanced included.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        array (tokens, num_kv_heads, head_dim_v)
            A view, in the kind's dtype; valid until the cache grows.

        Raises
        ------
        IndexError
            If there is no such layer.
        """
        layer = check_index("layer", layer, self.num_layers)
        return self._target.token_major(self._v[layer, :, : int(self._rows[layer])])

    def copy(self) -> Self:
        """A deep copy that shares no memory.

        Returns
        -------
        KVCache
        """
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new._rows, new._length = self._rows.copy(), self._length.copy()
        new._allocate(self.capacity)
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
        tokens, length = int(q.shape[0]), int(self._rows[layer])
        if tokens > length and tokens != 1:
            raise too_many_queries(tokens, length)
        pool = Pool(target, self._k_words, self._v_words, self._k_kind, self._v_kind)
        result = attend(
            pool, one_block_each(target.name, self.num_layers)[layer : layer + 1], q,
            target.index(np.array([length]), np.int64),
            target.index(np.array([0, tokens]), np.int64), sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap, window_left=window_left, sinks=sinks,
            return_lse=return_lse, out=out,
        )  # fmt: skip
        if not single:
            return result
        return (result[0][0], result[1][0]) if return_lse else result[0]
