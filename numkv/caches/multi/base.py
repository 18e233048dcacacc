"""`MultiSequenceCache`: the protocol of all multi-sequence caches.

Its life is ``set_config``, ``init``, passes and changes, ``close``. A pass begins with `start_forward`, then each layer
puts its rows and attends. Changes (`start_forward`, `remove`, `compact`, `copy_prefix`) are planned first and then
committed, so that a `numkv.WrapperCache` can plan for all its children before it changes one::

    public method: check arguments -> _plan_...: raise, or return a commit -> the commit changes the cache, without fail

Public methods are marked for `numkv.access` here, and in no subclass. They call methods with an underscore, which each
cache that has rows has, a `LayeredCache`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.access import Access, drops, reads, whole
from numkv.arrays import CacheArrays, owned
from numkv.attention.options import (
    SCORES,
    WITH_SINKS,
    AttentionOptions,
    CheckedOptions,
    check_options,
)
from numkv.caches.multi.arguments import (
    MOST_POSITIONS,
    Batch,
    CacheConfig,
    Setup,
    check_indices,
    check_integer,
    check_layer,
    check_position,
    check_sequence,
)
from numkv.cells.cells import Rows, read_rows
from numkv.cells.compiled import LAST_POSITION
from numkv.checks import check_kept
from numkv.errors import NumkvError
from numkv.kinds import Kind, kinds_of
from numkv.numbers import check_flag, check_size
from numkv.targets.base import Array, Target
from numkv.targets.streamed import streamed

#: A planned change, which cannot fail.
Commit = Callable[[], None]


class WithRows(Protocol):
    """What public methods call of a cache with rows, a `LayeredCache`, once arguments are checked."""

    def _plan_init(self, setup: Setup) -> Commit: ...
    def _plan_forward(self, rows: Rows, items: tuple[int, ...], reserve: bool) -> Commit: ...
    def _plan_remove(self, seq: int, begin: int, end: int | None) -> Commit: ...
    def _plan_compact(self, seq: int, keep: NDArray[np.int64]) -> Commit: ...
    def _plan_copy(self, src: int, dst: int, length: int) -> Commit: ...
    def _can_resume(self, seq: int, pos: int) -> bool: ...
    def _set_scales(self, layer: int, k: Any, v: Any) -> None: ...
    def _put(self, layer: int, k: Any, v: Any, check_finite: bool) -> None: ...
    def _get(self, layer: int) -> tuple[Array, Array, Array]: ...
    def _attend(self, layer: int, q: Any, options: CheckedOptions) -> Any: ...
    def _weights(
        self, layer: int, q: Any, options: CheckedOptions, lse: Any
    ) -> dict[int, Array]: ...
    def _cache_arrays(self, layer: int) -> CacheArrays: ...
    def _clear(self) -> None: ...
    def _close(self) -> None: ...
    def _refuse_reported(self) -> None: ...
    def _check(self) -> None: ...


class MultiSequenceCache(ABC):
    """The common part of all multi-sequence caches: changes that are planned and then committed, and passes.

    A `LayeredCache` plans with ``_plan_…``, which changes nothing and raises, or returns a function that makes the
    change and cannot fail. A `numkv.WrapperCache` has all its children plan before any of them changes.

    Notes
    -----
    Several threads may read at the same time: `get`, `decode_attention`, `attention_weights`, `arrays`, and properties.
    They may do so during a `put` of another layer. One thread at a time may write (`put`) or change the cache:
    `start_forward`, `set_causal`, `remove`, `compact`, `copy_prefix`, `clear`, `close`. A second one gets `NumkvError`
    and changes nothing. So does a shift function that calls its own cache. A reader gets `NumkvError`, too, if a change
    or a `put` of its own layer overtakes it. No call blocks. A `numkv.WrapperCache` and its children are one cache in
    this respect.
    """

    # -- changes

    @drops
    def start_forward(self, batch: Batch, reserve: bool = False) -> None:
        """Begin a pass: make room for the tokens of a batch.

        Parameters
        ----------
        batch : Batch
            The tokens, in the order in which `put` and `decode_attention` take their rows.
        reserve : bool
            Whether the pass only allocates memory: `put` allocates the layers' buffers and writes nothing. `get`
            shows all cells, and no token gets a cell.

        Raises
        ------
        CacheFull
            If there is no room for all tokens; nothing has changed, and nothing is evicted.
        NonFiniteInput
            On CUDA, if a sequence has tokens whose rows were to be quantised and held NaN or infinity: remove them.
        IndexError
            If a sequence is outside ``[0, 2**63)``, a position is outside ``[0, 2**31)``, or `multimodal` names no
            token.
        DimensionMismatch, UnsupportedDType, NotSupported
            If positions and sequences are not as many, no integers, or masked.
        TypeError
            If an argument is of no type that it may have.
        """
        self._check_ready()
        self.__runs_on__()[0].refuse_capture("start_forward")
        if not isinstance(batch, Batch):
            raise TypeError(f"`batch`: expected a Batch, got {type(batch).__name__}")
        rows = read_rows(batch.positions, batch.sequences)
        items = check_indices("multimodal", batch.multimodal, len(rows.positions))
        reserve = check_flag("reserve", reserve)
        self._change(lambda of: of._plan_forward(rows, items, reserve))
        self._started()

    @streamed
    @drops
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
            If `seq` is outside ``[0, 2**63)``, `begin` is negative, or the shift's tables are too short.
        Exception
            Whatever the shift raises; nothing has changed.
        """
        self._check_ready()
        seq, begin = check_sequence("seq", seq), check_position("begin", begin)
        if end is not None:
            end = check_integer("end", end)
            if end < begin:
                raise ValueError(f"`end`: expected a position from {begin} up, got {end}")
        self._change(lambda of: of._plan_remove(seq, begin, end))

    @streamed
    @drops
    def compact(self, seq: int, keep: Any) -> None:
        """Keep some tokens of a sequence only: that of position ``keep[i]`` moves to position i, its key with it.

        Cells of the other tokens are released; no row moves to another cell. Keys are moved by the cache's shift.

        Parameters
        ----------
        seq : int
            The sequence.
        keep : array-like of int (n,)
            Positions to keep, in order. A position that a sliding window has evicted counts in the order, so that the
            caches of a `WrapperCache` agree. Any other position that the sequence lacks is an error.

        Raises
        ------
        IndexError
            If `seq` is outside ``[0, 2**63)``, a position is not the sequence's, or the shift's tables are too short.
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
        self._change(lambda of: of._plan_compact(seq, keep))

    @drops
    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        """Make a sequence of the first positions of another; no K or V is copied.

        Tokens that a sliding window has evicted are not copied: call `can_resume` afterwards.

        Parameters
        ----------
        src : int
            The sequence to copy from; one that is not known has no positions.
        dst : int
            The sequence to copy to; its former tokens are dropped.
        length : int
            Positions below this are copied.

        Raises
        ------
        IndexError
            If a sequence is outside ``[0, 2**63)``.
        DimensionMismatch
            If `length` is negative.
        NotSupported
            If the cache has no sequences.
        """
        self._check_ready()
        src, dst = check_sequence("src", src), check_sequence("dst", dst)
        length = check_size("length", length)
        self._change(lambda of: of._plan_copy(src, dst, length))

    @reads
    def can_resume(self, seq: int, pos: int) -> bool:
        """Return whether a sequence can go on with a token at a position: whether all tokens in its sight are stored.

        Parameters
        ----------
        seq : int
            The sequence.
        pos : int
            Position of the next token.

        Returns
        -------
        bool
            Always true if nothing is ever evicted. For a `numkv.WrapperCache`, whether it holds in all children.

        Raises
        ------
        IndexError
            If `seq` is outside ``[0, 2**63)``, or `pos` is negative.
        """
        self._check_ready()
        seq, pos = check_sequence("seq", seq), check_position("pos", pos)
        return all(of._can_resume(seq, pos) for of in self._holders())

    @streamed
    @whole
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
            If `layer` is outside ``[0, 2**63)``, or `layer_types` of a `WrapperCache` does not list it.

        Notes
        -----
        Nothing has changed after an error.
        """
        of, layer = self._at(layer)
        of._set_scales(layer, k, v)

    # -- a pass

    @streamed
    @whole
    def put(self, layer: int, k: Any, v: Any, *, check_finite: bool = True) -> None:
        """Write a layer's rows of the batch; the first call for a layer allocates it.

        Parameters
        ----------
        layer : int
            Which layer: any integer from 0 up, below ``2**63``.
        k : array (num_tokens, num_kv_heads, head_dim)
            Keys in the order of the batch, in the kind's own dtype or in float32; for int8 in fp32, fp16 or bf16.
        v : array (num_tokens, num_kv_heads, head_dim_v)
            Values of the same tokens.
        check_finite : bool
            Whether rows to be quantised are checked for NaN and infinity. The CPU checks before it writes. CUDA
            checks while it writes, and stores zeros; later calls with these sequences raise until the tokens are
            removed.

        Raises
        ------
        DimensionMismatch
            If there is not a row for each token of the batch, or a shape is not the layer's.
        NonFiniteInput
            See `check_finite`; on the CPU nothing is written.
        UnsupportedDType, NotSupported
            If an array has another dtype, layout or target.
        IndexError
            If `layer` is no such integer, or `layer_types` of a `numkv.WrapperCache` does not list it.
        TypeError
            If `layer` is no integer, or `check_finite` neither True nor False.
        NumkvError
            Before `start_forward`.
        """
        of, layer = self._at(layer)
        of._put(layer, k, v, check_flag("check_finite", check_finite, True))

    @streamed
    @reads
    def get(self, layer: int) -> tuple[Array, Array, Array]:
        """K, V and the mask of the cells that this batch may attend to.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        k : array (n, num_kv_heads, head_dim)
            Keys of adjacent cells, those of other sequences included. Float kinds return a view in the kind's dtype,
            which shows later changes. Quantised kinds and ``rotate=True`` return a float32 copy (float64 for fp64).
        v : array (n, num_kv_heads, head_dim_v), with ``permuted_v`` (num_kv_heads, head_dim_v, n)
            Values, likewise.
        mask : array (num_tokens, n)
            0 where a token attends to a cell, else minus infinity; one array for all layers of a pass.

        Raises
        ------
        IndexError
            If the layer was never put, or `layer_types` of a `numkv.WrapperCache` does not list it.
        NumkvError
            Before `start_forward`.
        """
        of, layer = self._at(layer)
        return of._get(layer)

    @streamed
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
        """Attend with queries straight from the stored rows: no mask is made.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array (num_tokens, num_q_heads, head_dim)
            A query for each token, in the order of the batch; for an encoder's rows any number of queries.
        out, return_lse
            See `numkv.decode_attention`.
        **options
            `sm_scale`, `logits_soft_cap` and `sinks`: see `numkv.AttentionOptions`.

        Returns
        -------
        out : array (num_tokens, num_q_heads, head_dim_v)
            In q's dtype. Without visible tokens, in a reserved pass, it is 0 (and -inf).
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
        of, layer = self._at(layer)
        return of._attend(layer, q, check_options(options, return_lse, out, takes=WITH_SINKS))

    @streamed
    @reads
    def attention_weights(
        self,
        layer: int,
        q: Any,
        *,
        lse: Any = None,
        **options: Unpack[AttentionOptions],
    ) -> dict[int, Array]:
        """How much attention each token of the batch's sequences gets from the batch's queries.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array (num_tokens, num_q_heads, head_dim)
            A query for each token, in the order of the batch.
        lse : float32 array (num_tokens, num_q_heads), optional
            What `decode_attention` returned with ``return_lse=True`` for these queries and options; computed if None,
            which costs as much as that call.
        **options
            `sm_scale` and `logits_soft_cap`: see `numkv.AttentionOptions`.

        Returns
        -------
        dict of int to float32 array (num_kv_heads, n)
            For each sequence of the batch, a column for each stored token, in the order of ``positions(seq)``, which
            `compact` accepts. The numbers are sums over the sequence's queries and the q heads of a group. See
            `numkv.attention_weights`.

        Raises
        ------
        DimensionMismatch
            If there is not a query for each token of the batch, or a shape does not fit.
        IndexError
            If the layer was never put, or `layer_types` of a `numkv.WrapperCache` does not list it.
        NumkvError
            Before `start_forward`.
        NotSupported
            If the layer's cache does not hold sequences of tokens.
        UnsupportedDType, NotSupported, ValueError
            See `numkv.decode_attention`.
        """
        of, layer = self._at(layer)
        return of._weights(layer, q, check_options(options, takes=SCORES), lse)

    # -- for your own kernels

    @streamed
    @reads
    def arrays(self, layer: int) -> CacheArrays:
        """A layer's arrays, for your own ``@njit`` functions and ``@cuda.jit`` kernels; see `numkv.device`.

        Every cell is a block of one token, so that kernels for paged caches fit: ``k`` is the layer's buffer seen as
        ``(num_cells, num_kv_heads, 1, words_per_row)``. It is strided, as heads lie ``num_cells`` rows apart.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        CacheArrays
            On the cache's target, in words; on the CPU the buffers are the cache's own memory. ``block_table`` has a
            row for each of `sequences`, in that order: the cells of its tokens, in order of position. ``context_lens``,
            int64, has their numbers. ``slots`` has the cells of the batch's tokens, in its order; none outside of a
            pass, or in a reserved one. In an `EncoderCache` the table has one row, for its rows. It is the same object
            as long as no cells and no buffers have changed, so call it each time. With ``rotate=True`` rows are stored
            rotated.

        Raises
        ------
        IndexError
            If the layer was never put, or `layer_types` of a `numkv.WrapperCache` does not list it.
        NumkvError
            Before `init` and after `close`.
        """
        of, layer = self._at(layer)
        return of._cache_arrays(layer)

    def _at(self, layer: Any) -> tuple[WithRows, int]:
        """Return the cache that has a layer's rows, and the layer's number; refused unless the cache is ready."""
        self._check_ready()
        number = check_layer("layer", layer)
        return self._holder(number), number

    def _holder(self, layer: int) -> Any:
        """Return the `LayeredCache` that has a layer's rows: this cache, or a child of a `numkv.WrapperCache`."""
        return self

    def _holders(self) -> Sequence[WithRows]:
        """Return all caches that have rows: this one, or the children of a `numkv.WrapperCache`, and theirs."""
        own: Any = self
        return (own,)

    def _change(self, plan: Callable[[WithRows], Commit]) -> None:
        """Plan a change of all caches that have rows, which may raise, and then make it."""
        for commit in [plan(of) for of in self._holders()]:
            commit()

    def _every(self) -> tuple[MultiSequenceCache, ...]:
        """Return this cache, and of a `numkv.WrapperCache` the children, and theirs."""
        return (self,)

    def _enter(self, state: str) -> None:
        """Take a state, ``"ready"`` or ``"closed"``."""
        for cache in self._every():
            cache._state = state

    def _started(self) -> None:
        """Forget what holds for one pass; here that is nothing."""
        return

    @abstractmethod
    def __runs_on__(self) -> tuple[Target, Any]: ...

    # -- from `set_config` and `init` to `close`, and copies

    def __init__(self) -> None:
        self._config: CacheConfig | None = None
        self._state = "new"
        # The current writer; a `numkv.WrapperCache` shares it with its children.
        self._access = Access()

    @whole
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
        TypeError
            If it is no `CacheConfig`.
        """
        for cache in self._every():
            cache._check_configurable()
        if not isinstance(config, CacheConfig):
            raise TypeError(f"`config`: expected a CacheConfig, got {type(config).__name__}")
        for cache in self._every():
            cache._config = config

    def _check_configurable(self) -> None:
        if self._state != "new":
            raise NumkvError(
                f"set_config: expected a cache before init, got one after {self._after()}; "
                "make a new one"
            )
        if self._config is not None:
            raise NumkvError(f"set_config: this cache has {self._config} already; make a new one")

    @whole
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
            If a size is too small, or if there would be ``2**31`` cells or more; or there is no such target.
        TypeError
            If a size is no integer, or `rotate` neither True nor False.
        UnsupportedDType, NotSupported
            If there is no such kind, or the target cannot be had here.
        """
        for cache in self._every():
            cache._check_new()
        kinds = kinds_of(kind, k_kind, v_kind)
        setup = Setup(
            *kinds, _size("max_sequences", max_sequences, 1), _size("capacity", capacity, 1),
            _size("max_batch", max_batch), targets.get(target), check_flag("rotate", rotate),
        )  # fmt: skip
        self._change(lambda of: of._plan_init(setup))
        self._enter("ready")

    def _check_new(self) -> None:
        if self._state != "new":
            raise NumkvError(
                f"init: expected a new cache, got one after {self._after()}; make a new one"
            )

    @drops
    def close(self) -> None:
        """Release all memory; the cache cannot be used afterwards."""
        for of in self._holders():
            of._close()
        self._enter("closed")

    @drops
    def clear(self) -> None:
        """Drop all tokens, and end the pass; the buffers of layers and the scales of heads stay.

        Raises
        ------
        NumkvError
            Before `init` and after `close`.
        """
        self._check_ready()
        for of in self._holders():
            of._clear()
        self._started()

    def __enter__(self) -> Self:
        if self._state == "closed":
            raise self._not_ready()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __drawn__(self) -> tuple[str, Any]:
        """For a drawing: ``"new"``, ``"ready"`` or ``"closed"``, and its cells if it has some."""
        return self._state, None

    def _after(self) -> str:
        return "close" if self._state == "closed" else "init"

    def _check_ready(self) -> None:
        if self._state != "ready":
            raise self._not_ready()

    def _not_ready(self) -> NumkvError:
        if self._state == "closed":
            return NumkvError(f"{type(self).__name__}: used after close; make a new one")
        return NumkvError(f"{type(self).__name__}: used before init; call init first")

    # -- copies

    @streamed
    @reads
    def copy(self) -> Self:
        """A cache of its own with the same content, in the same pass if one is on; only the shift function is shared.

        ``copy.copy`` and ``copy.deepcopy`` make the same. A cache on the CPU can be pickled too, if its shift can: a
        function of a module, or a `numkv.rope_shift`.

        Returns
        -------
        cache
            Of the same class, on the same target.

        Raises
        ------
        NumkvError
            Before `init` and after `close`.
        """
        self._check_ready()
        return self._copied(Access())

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    @abstractmethod
    def _copied(self, access: Access) -> Self: ...

    @reads
    def __getstate__(self) -> dict[str, Any]:
        return self._pickled()

    @abstractmethod
    def _pickled(self) -> dict[str, Any]:
        """Return the state of a pickle, a copy that later changes of the cache do not reach."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(owned(state))

    # -- its proof

    @streamed
    @reads
    def check(self) -> None:
        """Verify the cache's bookkeeping.

        Verifies positions, sequences and owners of cells, shapes of buffers, and that scales of stored rows are
        finite. They may not be finite where NaN or infinity was put with ``check_finite=False``. On CUDA it waits for
        the device.

        Raises
        ------
        NumkvError
            If it is inconsistent; the message names the contradiction.
        NonFiniteInput
            On CUDA, if rows that were quantised held NaN or infinity, and are still stored.
        """
        self._check_ready()
        for of in self._holders():
            of._refuse_reported()
        for of in self._holders():
            of._check()


def _size(name: str, n: Any, least: int = 0) -> int:
    """Take a size; their product is refused later, before memory is taken."""
    return check_size(name, n, least, MOST_POSITIONS)
