"""`MultiSequenceCache`: the protocol of all multi-sequence caches.

Its life is ``set_config``, ``init``, passes and changes, ``close``. A pass begins with `start_forward`, then each layer
puts its rows and attends. Changes (`start_forward`, `remove`, `compact`, `copy_prefix`) are planned first and then
committed, so that a `numkv.WrapperCache` can plan for all its children before it changes one::

    public method: check arguments -> _plan_...: raise, or return what to do -> _commit_...: do it, without fail
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.attention.options import AttentionOptions, check_options
from numkv.caches.multi.checks import check_integer, check_position, check_sequence
from numkv.caches.multi.config import Batch, CacheConfig, Setup
from numkv.cells.cells import Rows, read_rows
from numkv.cells.compiled import LAST_POSITION
from numkv.checks import check_index, check_kept, check_size
from numkv.errors import NotSupported, NumkvError
from numkv.kinds import Kind, kinds_of
from numkv.targets.base import Array

__all__ = ["MultiSequenceCache"]


class MultiSequenceCache(ABC):
    """What all multi-sequence caches have in common: their life, and changes that are planned and then committed.

    A subclass plans with ``_plan_…``, which raises or returns what to do and changes nothing, and does it with
    ``_commit_…``, which cannot fail. `numkv.WrapperCache` plans for all its children before it commits any.
    """

    def __init__(self) -> None:
        self._config: CacheConfig | None = None
        self._state = "new"

    # -- its life

    def set_config(self, config: CacheConfig) -> None:
        """Set how `get` lays out what it returns; once, and before `init`.

        Parameters
        ----------
        config : CacheConfig
            The configuration.

        Raises
        ------
        NumkvError
            If a configuration is set already, or after `init` or `close`.
        """
        self._check_configurable()
        if not isinstance(config, CacheConfig):
            raise TypeError(f"`config`: expected a CacheConfig, got {type(config).__name__}")
        self._take_config(config)

    def _check_configurable(self) -> None:
        if self._state != "new":
            raise NumkvError(
                f"set_config: expected a cache before init, got one after {self._after()}; "
                "make a new one"
            )
        if self._config is not None:
            raise NumkvError(f"set_config: this cache has {self._config} already; make a new one")

    def _take_config(self, config: CacheConfig) -> None:
        self._config = config

    def init(
        self,
        kind: str | Kind,
        max_sequences: int,
        capacity: int,
        max_batch: int,
        target: str = "cpu",
        *,
        k_kind: str | Kind | None = None,
        v_kind: str | Kind | None = None,
        rotate: bool = False,
    ) -> None:
        """Size the cache; once. Memory for K and V is allocated layer by layer, at the first `put`.

        Parameters
        ----------
        kind : str or Kind
            Storage kind.
        max_sequences : int
            Sequences that the cache has room for; their ids are not bounded by it.
        capacity : int
            Tokens of a sequence.
        max_batch : int
            Tokens of a batch.
        target : {"cpu", "cuda"}
            Where the buffers are and the kernels run.
        k_kind, v_kind : str or Kind, optional
            Storage kinds of K and of V where they shall differ from `kind`.
        rotate : bool
            Whether a Hadamard rotation is applied to rows before they are stored; see `numkv.ContiguousLayer`. What
            `get` returns is rotated back.

        Raises
        ------
        NumkvError
            If it was called before, or after `close`.
        ValueError
            If a size is too small or there is no such target.
        UnsupportedDType, NotSupported
            If there is no such kind, or the target cannot be had here.
        """
        self._check_new()
        kinds = kinds_of(kind, k_kind, v_kind)
        sizes = (
            check_size("max_sequences", max_sequences, 1),
            check_size("capacity", capacity, 1),
            check_size("max_batch", max_batch),
        )
        setup = Setup(*kinds, *sizes, targets.get(target), bool(rotate))
        self._commit_init(self._plan_init(setup))

    def _check_new(self) -> None:
        if self._state != "new":
            raise NumkvError(
                f"init: expected a new cache, got one after {self._after()}; make a new one"
            )

    def close(self) -> None:
        """Release all memory; the cache cannot be used afterwards."""
        self._state = "closed"

    def __enter__(self) -> Self:
        if self._state == "closed":
            raise self._not_ready()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _after(self) -> str:
        return "close" if self._state == "closed" else "init"

    def _check_ready(self) -> None:
        if self._state != "ready":
            raise self._not_ready()

    def _not_ready(self) -> NumkvError:
        if self._state == "closed":
            return NumkvError(f"{type(self).__name__}: used after close; make a new one")
        return NumkvError(f"{type(self).__name__}: used before init; call init first")

    # -- changes

    def start_forward(self, batch: Batch, reserve: bool = False) -> None:
        """Begin a pass: make room for the tokens of a batch.

        Parameters
        ----------
        batch : Batch
            The tokens, in the order in which `put` and `decode_attention` take their rows.
        reserve : bool
            Whether the pass only allocates the memory that a pass takes: `put` allocates the layers' buffers and writes
            nothing, `get` shows all cells, and no token gets a cell.

        Raises
        ------
        CacheFull
            If there is no room for all tokens; nothing has changed, and nothing is evicted.
        IndexError
            If a sequence is negative, a position is outside ``[0, 2**31)``, or `multimodal` names no token.
        DimensionMismatch, UnsupportedDType
            If positions and sequences are not as many, or no integers.
        """
        if self._state != "ready":
            raise self._not_ready()
        rows = read_rows(batch.positions, batch.sequences)
        items = tuple([check_index("multimodal", i, len(rows.positions)) for i in batch.multimodal])
        self._commit_forward(self._plan_forward(rows, items, reserve))

    def remove(self, seq: int, begin: int, end: int | None = None) -> None:
        """Remove tokens from a sequence; those after them move up, and their keys are shifted with them.

        Parameters
        ----------
        seq : int
            The sequence; one that is not known has no tokens to remove.
        begin : int
            First position to remove.
        end : int, optional
            Position after the last to remove; None: to the end.

        Raises
        ------
        NotSupported
            If keys have to move and there is no shift, or if a token that has to move is shared with another
            sequence; nothing has changed. When nothing has to move it does not fail.
        ValueError
            If `end` is below `begin`.
        IndexError
            If `seq` or `begin` is negative, or the shift's tables are too short.
        Exception
            Whatever the shift raises; nothing has changed.
        """
        self._check_ready()
        seq, begin = check_sequence("seq", seq), check_position("begin", begin)
        if end is not None:
            end = check_integer("end", end)
            if end < begin:
                raise ValueError(f"`end`: expected a position from {begin} up, got {end}")
        self._commit_remove(self._plan_remove(seq, begin, end))

    def compact(self, seq: int, keep: Any) -> None:
        """Keep some tokens of a sequence only: that of position ``keep[i]`` moves to position i, its key with it.

        Cells of the other tokens are released; no row moves to another cell. Keys are moved by the cache's shift.

        Parameters
        ----------
        seq : int
            The sequence.
        keep : array-like of int (n,)
            Positions to keep, in order. A position that a sliding window has evicted counts in the order, so that the
            caches of a `WrapperCache` stay in step; any other that the sequence does not have is an error.

        Raises
        ------
        IndexError
            If `seq` is negative, a position is not the sequence's, or the shift's tables are too short.
        ValueError
            If positions do not rise.
        NotSupported
            If keys have to move and there is no shift, or if a token that has to move is shared with another
            sequence.
        DimensionMismatch, UnsupportedDType
            If `keep` is no row of integers.
        Exception
            Whatever the shift raises.

        Notes
        -----
        Nothing has changed after an error. When nothing has to move, no shift is needed.
        """
        self._check_ready()
        seq, keep = check_sequence("seq", seq), check_kept("keep", keep, LAST_POSITION + 1)
        self._commit_compact(self._plan_compact(seq, keep))

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        """Make a sequence of the first positions of another; no K or V is copied.

        What a sliding window has evicted is not copied: ask `can_resume` afterwards.

        Parameters
        ----------
        src : int
            The sequence to copy from; one that is not known has no positions.
        dst : int
            The sequence to copy to; what it had before is dropped.
        length : int
            Positions below this are copied.

        Raises
        ------
        IndexError
            If a sequence is negative.
        DimensionMismatch
            If `length` is negative.
        NotSupported
            If the cache has no sequences.
        """
        self._check_ready()
        src, dst = check_sequence("src", src), check_sequence("dst", dst)
        self._commit_copy(self._plan_copy(src, dst, check_size("length", length)))

    @abstractmethod
    def can_resume(self, seq: int, pos: int) -> bool:
        """Whether a sequence can go on with a token at a position: all that it would attend to is still stored."""

    def set_scales(self, layer: int, k: Any = None, v: Any = None) -> None:
        """Set the scales of a layer's kv heads, for kinds that have such: a value is its 8-bit float times the scale.

        Parameters
        ----------
        layer : int
            Which layer; it need not have been put.
        k, v : float or float32 array (num_kv_heads,), optional
            Finite scales above 0 of K and of V, on the host; None leaves them as they are, which is 1 at first.

        Raises
        ------
        NumkvError
            If rows are stored, which are stored by the present scales.
        NotSupported
            If the kind has no scales of heads.
        DimensionMismatch, UnsupportedDType, ValueError
            If they are no such scales. For a layer that was never put, the first `put` checks the number of heads.
        IndexError
            If `layer` is negative, or `layer_types` of a `WrapperCache` does not list it.

        Notes
        -----
        Nothing has changed after an error.
        """
        self._check_ready()
        self._set_scales(check_position("layer", layer), k, v)

    @abstractmethod
    def put(self, layer: int, k: Any, v: Any, *, check_finite: bool = True) -> None:
        """Write a layer's rows."""

    @abstractmethod
    def get(self, layer: int) -> tuple[Array, Array, Array]:
        """K, V and the mask of a layer."""

    def decode_attention(
        self,
        layer: int,
        q: Any,
        *,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        sinks: Any = None,
        return_lse: bool = False,
        out: Any = None,
    ) -> Any:
        """Attend with queries straight from the stored rows: no mask is made.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array (num_tokens, num_q_heads, head_dim)
            A query for each token, in the order of the batch; for an encoder's rows any number of queries.
        sm_scale, logits_soft_cap, sinks, return_lse, out
            See `numkv.decode_attention`.

        Returns
        -------
        out : array (num_tokens, num_q_heads, head_dim_v)
            In q's dtype. Where nothing is visible, in a reserved pass, it is 0 (and -inf).
        lse : float32 array (num_tokens, num_q_heads)
            Natural log of the sum of exponentials; only with `return_lse`.

        Raises
        ------
        DimensionMismatch
            If there is not a query for each token of the batch, or a shape does not fit.
        IndexError
            If the layer was never put, or `layer_types` of a `WrapperCache` does not list it.
        NumkvError
            Before `start_forward`.
        UnsupportedDType, NotSupported, ValueError
            See `numkv.decode_attention`.
        """
        self._check_ready()
        options = check_options(sm_scale, logits_soft_cap, -1, sinks, return_lse, out)
        return self._attend(layer, q, options)

    def attention_weights(
        self,
        layer: int,
        q: Any,
        *,
        lse: Any = None,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
    ) -> dict[int, Array]:
        """How much attention each token of the batch's sequences gets from the batch's queries.

        Parameters
        ----------
        layer, q, lse, sm_scale, logits_soft_cap
            See `CellCache.attention_weights`.

        Raises
        ------
        NotSupported
            If the cache does not hold sequences of tokens.
        """
        raise NotSupported(
            f"{type(self).__name__}: expected a cache of tokens, whose weights say which of them to keep; "
            "this one holds rows that stay or go together"
        )

    @abstractmethod
    def _set_scales(self, layer: int, k: Any, v: Any) -> None: ...

    @abstractmethod
    def _attend(self, layer: int, q: Any, options: AttentionOptions) -> Any: ...

    @abstractmethod
    def _plan_init(self, setup: Setup) -> Any: ...

    @abstractmethod
    def _commit_init(self, plan: Any) -> None: ...

    @abstractmethod
    def _plan_forward(self, rows: Rows, items: tuple[int, ...], reserve: bool) -> Any: ...

    @abstractmethod
    def _commit_forward(self, plan: Any) -> None: ...

    @abstractmethod
    def _plan_remove(self, seq: int, begin: int, end: int | None) -> Any: ...

    @abstractmethod
    def _commit_remove(self, plan: Any) -> None: ...

    @abstractmethod
    def _plan_compact(self, seq: int, keep: NDArray[np.int64]) -> Any: ...

    @abstractmethod
    def _commit_compact(self, plan: Any) -> None: ...

    @abstractmethod
    def _plan_copy(self, src: int, dst: int, length: int) -> Any: ...

    @abstractmethod
    def _commit_copy(self, plan: Any) -> None: ...
