"""Multi-sequence caches over cells: causal, sliding window, chunked.

All sequences share one set of cells, and all layers share the bookkeeping of `numkv.cells.Cells`: a pass begins with
`start_forward`, which gives each token of a batch a cell; then each layer puts its rows and attends::

    cache = numkv.CausalCache(shift=numkv.rope_shift(cos, sin))
    cache.init("fp16", max_sequences=4, capacity=4096, max_batch=512)
    cache.start_forward(numkv.Batch(positions, sequences))
    for layer in range(num_layers):
        cache.put(layer, k, v)
        out = cache.decode_attention(layer, q)      # or k, v, mask = cache.get(layer)

A layer's K and V are one block of as many tokens as there are cells, so a cell is a slot.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.attention.attend import attend, check_queries
from numkv.attention.mass import weigh
from numkv.attention.options import check_options
from numkv.cells import compiled as kernels
from numkv.cells.cells import Cells, Compaction, Forward, Removal, Rows, read_rows
from numkv.checks import check_array, check_index, check_kept, check_size
from numkv.compaction.key_shift import Shift, plan_shift
from numkv.errors import DimensionMismatch, NotSupported, NumkvError, UnsupportedDType
from numkv.kinds import Kind, kind, kinds_of
from numkv.storage import jit_views
from numkv.storage.pool import Pool, source_dtypes
from numkv.targets.base import Array, Target

__all__ = [
    "Batch",
    "CacheConfig",
    "CausalCache",
    "CellCache",
    "ChunkedCache",
    "MultiSequenceCache",
    "Setup",
    "SlidingWindowCache",
    "check_position",
    "check_sequence",
]

_UNLIMITED = 2**31 - 1  # more positions than there are


@dataclass(frozen=True)
class CacheConfig:
    """How a cache lays out what `get` returns.

    Attributes
    ----------
    padding : int
        The cells that `get` shows begin and end at multiples of this; 0 is 1.
    permuted_v : bool
        Whether `get` returns V as ``(num_kv_heads, head_dim_v, n)``.
    mask_dtype : str or Kind
        Float kind of the mask.

    Raises
    ------
    DimensionMismatch
        If the padding is negative.
    UnsupportedDType
        If the mask's kind is no float kind.
    """

    padding: int = 1
    permuted_v: bool = False
    mask_dtype: str | Kind = "fp32"

    def __post_init__(self) -> None:
        check_size("padding", self.padding)
        if kind(self.mask_dtype).has_scales:
            raise UnsupportedDType(
                f"`mask_dtype`: expected fp64, fp32, fp16 or bf16, got {self.mask_dtype}"
            )


@dataclass(frozen=True)
class Batch:
    """The tokens of a pass; checked by `start_forward`.

    Attributes
    ----------
    positions : array-like of int (num_tokens,)
        Position of each token in its sequence, below ``2**31``.
    sequences : array-like of int (num_tokens,)
        Sequence of each token: any integers from 0 up, below ``2**63``.
    multimodal : array-like of int
        Which tokens, by their index in the batch, stand for the items that an encoder has made rows of.
    """

    positions: Any
    sequences: Any
    multimodal: Any = ()


class Setup(NamedTuple):
    """The checked arguments of `MultiSequenceCache.init`."""

    k_kind: Kind
    v_kind: Kind
    max_sequences: int
    capacity: int
    max_batch: int
    target: Target
    rotate: bool


class MultiSequenceCache(ABC):
    """What all multi-sequence caches do: the life of one, and changes that are found first and then committed.

    A subclass finds with ``_plan_…``, which raises or returns what is to be done and changes nothing, and does it with
    ``_commit_…``, which cannot fail. `numkv.WrapperCache` finds for all its children before it commits any.
    """

    def __init__(self) -> None:
        self._config: CacheConfig | None = None
        self._state = "new"

    # -- its life

    def set_config(self, config: CacheConfig) -> None:
        """Say how `get` lays things out; once, and before `init`.

        Parameters
        ----------
        config : CacheConfig
            How.

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
        """Size the cache; once. Memory for K and V is taken layer by layer, at the first `put`.

        Parameters
        ----------
        kind : str or Kind
            Storage kind.
        max_sequences : int
            Sequences that there shall be room for; their ids are not bounded by it.
        capacity : int
            Tokens of a sequence.
        max_batch : int
            Tokens of a batch.
        target : {"cpu", "cuda"}
            Where the buffers are and the kernels run.
        k_kind, v_kind : str or Kind, optional
            Storage kinds of K and of V where they shall differ from `kind`.
        rotate : bool
            Whether rows are rotated before they are stored; see `numkv.ContiguousLayer`. What `get` shows is turned
            back.

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
        """Let all memory go; the cache is of no further use."""
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
            Whether this pass is only to show how much memory a pass takes: `put` makes the layers' buffers and writes
            nothing, `get` shows all cells, and no token takes a cell.

        Raises
        ------
        CacheFull
            If there is no room for all tokens; nothing has changed, and nothing was evicted.
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
        """Take tokens out of a sequence; those after them move up, and their keys turn with them.

        Parameters
        ----------
        seq : int
            The sequence; one that is not known has no tokens to take out.
        begin : int
            First position that goes.
        end : int, optional
            Position after the last that goes; None: to the end.

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
            end = _integer("end", end)
            if end < begin:
                raise ValueError(f"`end`: expected a position from {begin} up, got {end}")
        self._commit_remove(self._plan_remove(seq, begin, end))

    def compact(self, seq: int, keep: Any) -> None:
        """Keep some tokens of a sequence only: that of position ``keep[i]`` moves to position i, its key with it.

        Cells of the others are freed; no row moves to another cell. Keys are turned by the cache's shift.

        Parameters
        ----------
        seq : int
            The sequence.
        keep : array-like of int (n,)
            Positions to keep, in order. A position that a sliding window has let go of counts in the order, so that the
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
        seq, keep = check_sequence("seq", seq), check_kept("keep", keep, _UNLIMITED + 1)
        self._commit_compact(self._plan_compact(seq, keep))

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        """Let a sequence consist of the first positions of another; no K or V is copied.

        What a sliding window has let go of is not there to be copied: ask `can_resume` afterwards.

        Parameters
        ----------
        src : int
            Whose positions; one that is not known has none.
        dst : int
            Who gets them; what it held before is dropped.
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
        """Whether a sequence can go on with a token at a position: all that it would see is still there."""

    @abstractmethod
    def put(self, layer: int, k: Any, v: Any, *, check_finite: bool = True) -> None:
        """Write a layer's rows."""

    @abstractmethod
    def get(self, layer: int) -> tuple[Array, Array, Array]:
        """K, V and the mask of a layer."""

    @abstractmethod
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
        """Attend to a layer."""

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


def check_sequence(name: str, i: Any) -> int:
    """Take the id of a sequence."""
    return _from_0_up(name, i, "an id")


def check_position(name: str, i: Any) -> int:
    """Take a position."""
    return _from_0_up(name, i, "a position")


def _from_0_up(name: str, i: Any, what: str) -> int:
    number = _integer(name, i)
    if number < 0:
        raise IndexError(f"`{name}`: expected {what} from 0 up, got {number}")
    return number


def _integer(name: str, i: Any) -> int:
    try:
        return operator.index(i)
    except TypeError:
        raise TypeError(f"`{name}`: expected an integer, got {type(i).__name__}") from None


class _Pass:
    """A batch on its way through the layers, and what all layers share."""

    __slots__ = (
        "device", "excepted", "lens", "mask", "range", "ranges", "reserve", "rows", "slots",
        "slots_there", "table",
    )  # fmt: skip

    def __init__(self, rows: Rows, slots: NDArray[np.int64], reserve: bool) -> None:
        self.rows = rows
        self.slots = slots  # cell of each row
        self.reserve = reserve
        self.excepted: tuple[int, ...] = ()  # rows that see what comes after them, too
        self.range: tuple[int, int] | None = None  # cells that `get` shows
        self.slots_there: Array = None  # the slots on the target
        self.table: Any = None  # cells of each run's sequence, int32 (num_runs, max_len)
        self.lens: Any = None  # how many they are, int64 (num_runs,)
        self.ranges: Any = None  # which of them each row sees, int64 (num_tokens, 2)
        self.device: Any = None  # table, lens, starts and ranges on the target
        self.mask: Array = None  # on the target


class CellCache(MultiSequenceCache):
    """A cache of cells; see `CausalCache`, `SlidingWindowCache` and `ChunkedCache`."""

    #: Earlier positions that a token sees, -1 for all; positions of a chunk, 0 for no chunks; positions that are kept.
    _window = -1
    _chunk = 0
    _memory: int | None = None

    def __init__(self, shift: Shift | None = None) -> None:
        super().__init__()
        self._shift = shift
        self._cells = Cells(0)
        self._layers: dict[int, Pool] = {}
        self._pass: _Pass | None = None
        self._jit: Any = None

    # -- what it is

    @property
    def num_cells(self) -> int:
        """Tokens that the cache has room for, of all sequences; the batch's own included."""
        self._check_ready()
        return self._cells.num_cells

    @property
    def num_free(self) -> int:
        """Cells that no sequence holds."""
        self._check_ready()
        return self._cells.num_free

    @property
    def sequences(self) -> list[int]:
        """Sequences that are known; some may hold nothing."""
        self._check_ready()
        return self._cells.sequences

    @property
    def rotate(self) -> bool:
        """Whether rows are rotated before they are stored."""
        self._check_ready()
        return self._rotate

    @property
    def nbytes(self) -> int:
        """Bytes of the K and V buffers of all layers so far, scales included."""
        return sum(pool.nbytes for pool in self._layers.values())

    def positions(self, seq: int) -> NDArray[np.int32]:
        """Positions of a sequence that are stored.

        Parameters
        ----------
        seq : int
            The sequence.

        Returns
        -------
        int32 array (n,)
            In order; empty if the sequence is not known.

        Raises
        ------
        IndexError
            If `seq` is negative.
        """
        self._check_ready()
        cells = self._cells
        stored: NDArray[np.int32] = cells.positions[cells.held(check_sequence("seq", seq))]
        return stored

    def __repr__(self) -> str:
        name = type(self).__name__
        if self._state != "ready":
            return f"{name}({'closed' if self._state == 'closed' else 'before init'})"
        kinds = str(self._k_kind)
        if self._v_kind is not self._k_kind:
            kinds += f"/{self._v_kind}"
        if self._rotate:
            kinds += ", rotate=True"
        return (
            f"{name}({self._told_apart()}num_cells={self.num_cells}, num_free={self.num_free}, "
            f"sequences={len(self.sequences)}, layers={len(self._layers)}, kind={kinds}, "
            f"target={self._target.name}, nbytes={self.nbytes})"
        )

    def _told_apart(self) -> str:
        return ""

    @property
    def jit(self) -> Any:
        """The jitclass instance over the cells, on the host, for your own ``@njit`` functions.

        Fields ``positions`` and ``num_sequences``, int32 ``(num_cells,)``; see
        `numkv.storage.jit_views.cells_struct`. They are the cache's own: read them.
        """
        self._check_ready()
        if self._jit is None:
            self._jit = jit_views.cells_struct()(self._cells.positions, self._cells.num_sequences)
        return self._jit

    def layer_jit(self, layer: int) -> Any:
        """The jitclass instance over a layer's memory: one block whose tokens are the cells.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        jitclass
            See `numkv.storage.jit_views`: a ``layer_struct``, on CUDA a ``host_struct``. Its length is the number of
            cells. With ``rotate=True`` it takes and gives rows as they are stored: rotated.

        Raises
        ------
        IndexError
            If the layer was never put.
        """
        self._check_ready()
        pool = self._layer(layer)
        table, lens = np.zeros(1, np.int32), np.array([self.num_cells], np.int32)
        if not self._target.has_jit_views:
            return jit_views.host_struct("int32")(table, lens)
        make = jit_views.layer_struct(pool.k_kind.name, pool.v_kind.name)
        return make(pool.k, pool.v, pool.k_scale, pool.v_scale, table, lens)

    # -- its life

    def _plan_init(self, setup: Setup) -> tuple[Setup, CacheConfig, Cells]:
        config = self._config or CacheConfig()
        window = _UNLIMITED if self._window < 0 else self._window
        memory = window if self._memory is None else self._memory
        if memory < window:
            raise ValueError(
                f"`memory`: expected at least window_left={self._window} positions, "
                f"got {memory}; a token could not see its window"
            )
        if memory < _UNLIMITED and setup.max_sequences > 1:
            memory = max(memory, window + 1)  # room for a token that ends a sequence
        if memory >= setup.capacity:
            memory = _UNLIMITED
        if memory == _UNLIMITED:
            needed = setup.max_sequences * setup.capacity
        else:
            needed = setup.max_sequences * memory + setup.max_batch
        padding = max(1, config.padding)
        num_cells = math.ceil(needed / padding) * padding
        return setup, config, Cells(num_cells, None if memory == _UNLIMITED else memory)

    def _commit_init(self, plan: tuple[Setup, CacheConfig, Cells]) -> None:
        setup, self._config, self._cells = plan
        self._k_kind, self._v_kind, self._target = setup.k_kind, setup.v_kind, setup.target
        self._max_batch, self._rotate = setup.max_batch, setup.rotate
        self._padding = max(1, self._config.padding)
        self._permuted_v = self._config.permuted_v
        self._mask_kind = kind(self._config.mask_dtype)
        self._state = "ready"

    def close(self) -> None:
        """Let all memory go; the cache is of no further use."""
        super().close()
        self._layers.clear()
        self._pass = self._jit = None
        self._cells = Cells(0)

    # -- changes

    def _plan_forward(self, rows: Rows, items: tuple[int, ...], reserve: bool) -> Forward | Rows:
        return rows if reserve else self._cells.plan_forward(rows)

    def _commit_forward(self, plan: Forward | Rows) -> None:
        if isinstance(plan, Rows):
            nowhere = np.full(len(plan.positions), -1, np.int64)
            self._pass = _Pass(plan, nowhere, reserve=True)
            self._pass.range = (0, self._cells.num_cells)
        else:
            self._cells.commit_forward(plan)
            self._pass = _Pass(plan.rows, plan.cells, reserve=False)

    def _plan_remove(
        self, seq: int, begin: int, end: int | None
    ) -> tuple[Removal, list[Callable[[], object]]]:
        removal = self._cells.plan_removal(seq, begin, end)
        if not len(removal.moved):
            return removal, []
        if self._shift is None:
            raise NotSupported(
                f"`end`: the {len(removal.moved)} tokens of sequence {seq} from position {end} on would have "
                "to move, and this cache has no shift to turn their keys; remove to the end, or make "
                "the cache with shift=numkv.rope_shift(cos, sin)"
            )
        moves = plan_shift(
            self._shift, self._layers, removal.moved, removal.offset, max(1, self._max_batch)
        )
        return removal, moves

    def _commit_remove(self, plan: tuple[Removal, list[Callable[[], object]]]) -> None:
        removal, moves = plan
        self._settle()
        self._cells.commit_removal(removal)
        for move in moves:
            move()

    def _plan_compact(
        self, seq: int, keep: NDArray[np.int64]
    ) -> tuple[Compaction, list[Callable[[], object]]]:
        compaction = self._cells.plan_compaction(seq, keep)
        moves: list[Callable[[], object]] = []
        for moved, offset in compaction.moves:
            if self._shift is None:
                raise NotSupported(
                    f"`keep`: {sum(len(cells) for cells, _ in compaction.moves)} tokens of sequence {seq} "
                    "would have to move, and this cache has no shift to turn their keys; make the cache "
                    "with shift=numkv.rope_shift(cos, sin)"
                )
            moves += plan_shift(self._shift, self._layers, moved, offset, max(1, self._max_batch))
        return compaction, moves

    def _commit_compact(self, plan: tuple[Compaction, list[Callable[[], object]]]) -> None:
        compaction, moves = plan
        self._settle()
        self._cells.commit_compaction(compaction)
        for move in moves:
            move()

    def _plan_copy(self, src: int, dst: int, length: int) -> tuple[int, int, int]:
        return src, dst, length

    def _commit_copy(self, plan: tuple[int, int, int]) -> None:
        self._settle()
        self._cells.copy_prefix(*plan)

    def can_resume(self, seq: int, pos: int) -> bool:
        """Whether a sequence can go on with a token at a position: all that it would see is still there.

        Parameters
        ----------
        seq : int
            The sequence.
        pos : int
            Position of the next token.

        Returns
        -------
        bool
            Always true where nothing is ever evicted.

        Raises
        ------
        IndexError
            If `seq` or `pos` is negative.
        """
        self._check_ready()
        seq, pos = check_sequence("seq", seq), check_position("pos", pos)
        return self._cells.can_resume(seq, pos, self._window)

    def set_causal(self, except_indices: Iterable[int] = ()) -> None:
        """Let some tokens of this batch see those that come after them; until the next `start_forward`.

        Only causality is lifted: windows, chunks and sequences are kept apart as ever.

        Parameters
        ----------
        except_indices : iterable of int
            Which, by their index in the batch.

        Raises
        ------
        IndexError
            If there is no such token in the batch.
        NumkvError
            Before `start_forward`.
        """
        now = self._current()
        size = len(now.rows.positions)
        excepted = tuple([check_index("except_indices", i, size) for i in except_indices])
        if excepted != now.excepted:
            now.excepted = excepted
            now.ranges = now.device = now.mask = None

    # -- a pass

    def _current(self) -> _Pass:
        now = self._pass
        if now is None:
            self._check_ready()
            raise NumkvError(f"{type(self).__name__}: used before start_forward; call it first")
        return now

    def _layer(self, layer: int) -> Pool:
        pool = self._layers.get(layer)
        if pool is None:
            raise IndexError(
                f"`layer`: expected a layer that has been put, {sorted(self._layers)}, got {layer}"
            )
        return pool

    def _settle(self) -> None:
        """Before cells change: what `get` shows stays, what it is a view of is looked up again."""
        now = self._pass
        if now is not None:
            self._range(now)
            now.table = now.lens = now.ranges = now.device = now.mask = None

    def _table(self, now: _Pass) -> None:
        """Make the table of the cells of each run's sequence."""
        lists = [self._cells.held(sequence) for sequence in now.rows.sequences]
        if len(lists) == 1:
            now.table = lists[0][None, :]
            now.lens = np.array([len(lists[0])], np.int64)
        else:
            now.lens = np.array([len(x) for x in lists], np.int64)
            now.table = np.empty((len(lists), max(map(len, lists), default=0)), np.int32)
            for row, held in zip(now.table, lists, strict=True):
                row[: len(held)] = held

    def _ranges(self, now: _Pass) -> None:
        """Find which cells of the table each row sees."""
        if now.table is None:
            self._table(now)
        rows = now.rows
        if now.excepted:
            lifted = np.zeros(len(rows.positions), np.bool_)
            lifted[list(now.excepted)] = True
        else:
            lifted = _NONE_LIFTED
        now.ranges = np.empty((len(rows.positions), 2), np.int64)
        kernels.compiled("find_ranges")(
            self._cells.positions, now.table, now.lens, rows.starts, rows.positions, self._window,
            self._chunk, lifted, now.ranges,
        )  # fmt: skip

    def _range(self, now: _Pass) -> tuple[int, int]:
        """The cells that `get` shows: those of the batch's sequences, or of their windows where others are evicted."""
        if now.range is None:
            if now.table is None:
                self._table(now)
            reach = -1 if self._cells.memory is None else self._window
            rows = now.rows
            low, high = kernels.compiled("extent")(
                self._cells.positions, now.table, now.lens, rows.starts, rows.positions, reach
            )
            padding = self._padding
            now.range = (0, 0)
            if high >= 0:
                now.range = (low // padding * padding, (high // padding + 1) * padding)
        return now.range

    def _mask(self, now: _Pass) -> Array:
        """The mask on the target, made at most once for all layers."""
        if now.mask is None:
            low, high = self._range(now)
            if now.ranges is None:
                self._ranges(now)
            dtype = self._mask_kind.dtype
            mask = np.empty((len(now.rows.positions), high - low), dtype)
            word, hidden = _HIDDEN[self._mask_kind.name]
            kernels.compiled(f"fill_mask {word.name}")(
                now.table, now.rows.starts, now.ranges, low, hidden, mask.view(word)
            )
            now.mask = self._target.asarray(mask)
        return now.mask

    def put(self, layer: int, k: Any, v: Any, *, check_finite: bool = True) -> None:
        """Write a layer's rows of the batch; the first time, make the layer.

        Parameters
        ----------
        layer : int
            Which layer: any integer from 0 up.
        k : array (num_tokens, num_kv_heads, head_dim)
            Keys in the order of the batch, in the kind's own dtype or in float32; for int8 in fp32, fp16 or bf16.
        v : array (num_tokens, num_kv_heads, head_dim_v)
            Values of the same tokens.
        check_finite : bool
            Whether rows that are to be quantised are looked at first.

        Raises
        ------
        DimensionMismatch
            If there is not a row for each token of the batch, or a shape is not the layer's.
        NonFiniteInput
            If rows to be quantised hold NaN or infinity; nothing is written.
        UnsupportedDType, NotSupported
            If an array has another dtype, layout or target.
        IndexError
            If `layer` is negative.
        NumkvError
            Before `start_forward`.
        """
        now = self._current()
        size = len(now.slots)
        k = self._target.accept(k, "k")
        if len(k.shape) == 3 and k.shape[0] != size:
            raise DimensionMismatch(
                f"`k`: expected a row for each of the {size} tokens of the batch, got {k.shape[0]}; "
                "pass all tokens of start_forward",
                expected=size,
                actual=int(k.shape[0]),
            )
        pool = self._layers.get(layer)
        if pool is None:
            pool = self._make_layer(layer, k, v)
        k, v = pool.check_rows(k, v, check_finite=check_finite)
        self._layers.setdefault(layer, pool)
        if now.reserve:
            return
        if now.slots_there is None:
            now.slots_there = self._target.index(now.slots, np.int64)
        pool.scatter(k, v, now.slots_there)

    def _make_layer(self, layer: int, k: Any, v: Any) -> Pool:
        """Buffers for rows like these."""
        check_position("layer", layer)
        target, kinds = self._target, (self._k_kind, self._v_kind)
        shape = ("num_tokens", "num_kv_heads", "head_dim")
        k = check_array(target, "k", k, source_dtypes(kinds[0]), shape)
        heads = int(k.shape[1])
        v = check_array(
            target, "v", v, source_dtypes(kinds[1]), ("num_tokens", heads, "head_dim_v")
        )
        shape_of = (1, heads, self._cells.num_cells)
        dims = (int(k.shape[2]), int(v.shape[2]))
        return Pool.allocate(target, shape_of, *dims, *kinds, self._rotate)

    def get(self, layer: int) -> tuple[Array, Array, Array]:
        """K, V and the mask of the cells that this batch may see.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        k : array (n, num_kv_heads, head_dim)
            Keys of neighbouring cells, of other sequences too; for float kinds a view in the kind's dtype, for
            quantised ones a float32 copy, and with ``rotate=True`` too (of fp64 float64).
        v : array (n, num_kv_heads, head_dim_v), with ``permuted_v`` (num_kv_heads, head_dim_v, n)
            Values, likewise.
        mask : array (num_tokens, n)
            0 where a token sees a cell, else minus infinity; one array for all layers of a pass.

        Raises
        ------
        IndexError
            If the layer was never put.
        NumkvError
            Before `start_forward`.
        """
        now = self._current()
        pool = self._layer(layer)
        part = slice(*self._range(now))
        target = self._target
        k = target.token_major(pool.rows("k", 0, part))
        v = pool.rows("v", 0, part)
        v = target.dim_major(v) if self._permuted_v else target.token_major(v)
        return k, v, self._mask(now)

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
        """Attend with the batch's queries straight from the cells: no mask is made.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array (num_tokens, num_q_heads, head_dim)
            A query for each token, in the order of the batch.
        sm_scale, logits_soft_cap, sinks, return_lse, out
            See `numkv.decode_attention`.

        Returns
        -------
        out : array (num_tokens, num_q_heads, head_dim_v)
            In q's dtype. A token that sees nothing, in a reserved pass, gets 0 (and -inf).
        lse : float32 array (num_tokens, num_q_heads)
            Natural log of the sum of exponentials; only with `return_lse`.

        Raises
        ------
        DimensionMismatch
            If there is not a query for each token of the batch, or a shape does not fit.
        IndexError
            If the layer was never put.
        NumkvError
            Before `start_forward`.
        UnsupportedDType, NotSupported, ValueError
            See `numkv.decode_attention`.
        """
        now = self._current()
        pool, q = self._queries(now, layer, q)
        table, lens, starts, ranges = self._on_device(now)
        options = check_options(sm_scale, logits_soft_cap, -1, sinks, return_lse, out)
        return attend(pool, table, q, lens, starts, options, ranges=ranges, by_slot=True)

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
        layer : int
            Which layer.
        q : array (num_tokens, num_q_heads, head_dim)
            A query for each token, in the order of the batch.
        lse : float32 array (num_tokens, num_q_heads), optional
            What `decode_attention` returned with ``return_lse=True`` for these queries and options; computed if None,
            which costs as much as that call.
        sm_scale, logits_soft_cap
            See `numkv.decode_attention`.

        Returns
        -------
        dict of int to float32 array (num_kv_heads, n)
            For each sequence of the batch, a column for each token that is stored, in the order of ``positions(seq)``,
            which `compact` takes: sums over the sequence's queries and the q heads of a group. See
            `numkv.attention_weights`.

        Raises
        ------
        DimensionMismatch
            If there is not a query for each token of the batch, or a shape does not fit.
        IndexError
            If the layer was never put.
        NumkvError
            Before `start_forward`.
        UnsupportedDType, NotSupported, ValueError
            See `numkv.decode_attention`.
        """
        now = self._current()
        pool, q = self._queries(now, layer, q)
        table, lens, starts, ranges = self._on_device(now)
        counts, heads = now.lens.tolist(), int(pool.k.shape[1])
        weights = weigh(
            pool, table, q, lens, starts, max(counts, default=0),
            check_options(sm_scale, logits_soft_cap), lse=lse, ranges=ranges, by_slot=True,
        )  # fmt: skip
        found: dict[int, Array] = {}
        for run, (seq, n) in enumerate(zip(now.rows.sequences, counts, strict=True)):
            mine = weights.reshape((heads, n)) if len(counts) == 1 else weights[run, :, :n]
            if seq in found:  # its tokens are no neighbours in the batch
                both = self._target.to_host(found[seq]) + self._target.to_host(mine)
                mine = self._target.asarray(both)
            found[seq] = mine
        return found

    def _queries(self, now: _Pass, layer: int, q: Any) -> tuple[Pool, Array]:
        """The layer, and queries that are as many as the batch's tokens."""
        pool = self._layer(layer)
        q = check_queries(self._target, q, int(pool.k.shape[1]), pool.head_dim, "num_tokens")
        size = len(now.slots)
        if q.shape[0] != size:
            raise DimensionMismatch(
                f"`q`: expected a query for each of the {size} tokens of the batch, got {q.shape[0]}",
                expected=size,
                actual=int(q.shape[0]),
            )
        return pool, q

    def _on_device(self, now: _Pass) -> tuple[Array, Array, Array, Array]:
        """Table, lengths, starts and ranges, as kernels take them; made at most once for all layers."""
        if now.device is None:
            if now.ranges is None:
                self._ranges(now)
            target = self._target
            table = now.table if now.table.size else np.zeros((len(now.lens), 1), np.int32)
            now.device = (
                target.index(table, np.int32),
                target.index(now.lens, np.int64),
                target.index(now.rows.starts, np.int64),
                target.index(now.ranges, np.int64),
            )
        device: tuple[Array, Array, Array, Array] = now.device
        return device


_NONE_LIFTED = np.zeros(0, np.bool_)

#: Words of a mask, and minus infinity as one.
_HIDDEN: Mapping[str, tuple[np.dtype[Any], Any]] = {
    "fp64": (np.dtype(np.float64), np.float64(-np.inf)),
    "fp32": (np.dtype(np.float32), np.float32(-np.inf)),
    "fp16": (np.dtype(np.uint16), np.float16(-np.inf).view(np.uint16)),
    "bf16": (np.dtype(np.uint16), ml_dtypes.bfloat16(-np.inf).view(np.uint16)),
}


class CausalCache(CellCache):
    """Every token sees its sequence up to itself.

    Parameters
    ----------
    shift : callable, optional
        ``shift(layer, keys, offsets) -> keys`` turns keys ``(n, num_kv_heads, head_dim)`` to other positions, by the
        offset of each, int32 ``(n,)``; see `numkv.rope_shift`. Without it `remove` can only take out tokens that
        nothing comes after.

    Examples
    --------
    >>> import numpy as np, numkv
    >>> cache = numkv.CausalCache()
    >>> cache.init("fp32", max_sequences=2, capacity=16, max_batch=4)
    >>> cache.start_forward(numkv.Batch(positions=[0, 1, 0], sequences=[0, 0, 1]))
    >>> cache.put(0, np.ones((3, 2, 8), np.float32), np.ones((3, 2, 8), np.float32))
    >>> k, v, mask = cache.get(0)
    >>> mask
    array([[  0., -inf, -inf],
           [  0.,   0., -inf],
           [-inf, -inf,   0.]], dtype=float32)
    """


class SlidingWindowCache(CellCache):
    """Every token sees itself and a number of earlier positions; older tokens are evicted.

    Eviction happens at the next `start_forward`, for all sequences.

    Parameters
    ----------
    window_left : int
        Earlier positions that a token sees; 0: only itself; -1: all.
    memory : int, optional
        Positions that are kept before a sequence's next token, to resume from; `window_left` if None.
    shift : callable, optional
        See `CausalCache`.

    Raises
    ------
    ValueError
        If `window_left` is below -1, or `memory` negative. A memory below the window is refused by `init`.
    """

    def __init__(
        self, window_left: int, memory: int | None = None, shift: Shift | None = None
    ) -> None:
        super().__init__(shift)
        self._window = check_size("window_left", window_left, -1)
        self._memory = None if memory is None else check_size("memory", memory)

    def _told_apart(self) -> str:
        memory = "" if self._memory is None else f"memory={self._memory}, "
        return f"window_left={self._window}, {memory}"


class ChunkedCache(CellCache):
    """Every token sees the tokens of its own chunk up to itself; nothing is evicted.

    Parameters
    ----------
    chunk_size : int
        Positions of a chunk; the first begins at 0.
    shift : callable, optional
        See `CausalCache`.

    Raises
    ------
    ValueError
        If `chunk_size` is below 1.
    """

    def __init__(self, chunk_size: int, shift: Shift | None = None) -> None:
        super().__init__(shift)
        self._chunk = check_size("chunk_size", chunk_size, 1)

    def _told_apart(self) -> str:
        return f"chunk_size={self._chunk}, "
