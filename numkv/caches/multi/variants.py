"""The caches of cells: causal, with a sliding window, in chunks."""

from __future__ import annotations

from numkv.caches.multi.cell_cache import CellCache
from numkv.caches.multi.checks import MOST_POSITIONS
from numkv.caches.multi.forward_pass import UNLIMITED
from numkv.caches.multi.saved import SavedChunked, SavedSliding
from numkv.compaction.key_shift import Shift
from numkv.drawing.page import drawn
from numkv.numbers import check_size


@drawn
class CausalCache(CellCache):
    """Every token attends to its sequence up to itself.

    Parameters
    ----------
    shift : callable, optional
        ``shift(layer, keys, offsets) -> keys`` moves keys ``(n, num_kv_heads, head_dim)`` to other positions, by the
        offset of each, int32 ``(n,)``; see `numkv.rope_shift`. Without it `remove` can only remove a sequence's last
        tokens.

    Notes
    -----
    Threads: several may read at the same time, and beside a `put` of another layer. One at a time may `put`, begin a
    pass or change the cache; a second one, and a shift function that calls its own cache, gets `NumkvError`. So does a
    reader that was overtaken by a change, or by a `put` of its layer.

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


@drawn
class SlidingWindowCache(CellCache):
    """Every token attends to itself and a number of earlier positions; older tokens are evicted.

    Eviction happens at the next `start_forward`, for all sequences.

    Parameters
    ----------
    window_left : int
        Earlier positions that a token attends to; 0: only itself; -1: all.
    memory : int, optional
        Positions that are kept before a sequence's next token, to resume from; `window_left` if None.
    shift : callable, optional
        See `CausalCache`.
    num_sink_tokens : int
        Positions from 0 on that are never evicted, and that every later token attends to beside its window: attention
        sinks (Xiao et al., arXiv:2309.17453). Positions stay those that tokens were given.

    Raises
    ------
    ValueError
        If `window_left` is below -1, or `memory` negative. A memory below the window is refused by `init`.
    DimensionMismatch
        If `num_sink_tokens` is negative.
    TypeError
        If they are no integers, or `shift` is no function.

    Notes
    -----
    Threads: see `CausalCache`.
    """

    __saved__ = SavedSliding

    def __init__(
        self,
        window_left: int,
        memory: int | None = None,
        shift: Shift | None = None,
        num_sink_tokens: int = 0,
    ) -> None:
        super().__init__(shift)
        # More positions than there are do no more than all of them, and an int64 may not hold them.
        self._window = min(UNLIMITED, check_size("window_left", window_left, -1))
        self._memory = None if memory is None else min(UNLIMITED, check_size("memory", memory))
        self._num_sinks = min(UNLIMITED, check_size("num_sink_tokens", num_sink_tokens))

    @property
    def num_sink_tokens(self) -> int:
        """Positions from 0 on that are never evicted nor hidden."""
        return self._num_sinks

    def _options(self) -> str:
        memory = "" if self._memory is None else f"memory={self._memory}, "
        sinks = f"num_sink_tokens={self._num_sinks}, " if self._num_sinks else ""
        return f"window_left={self._window}, {memory}{sinks}"


@drawn
class ChunkedCache(CellCache):
    """Every token attends to the tokens of its own chunk up to itself; nothing is evicted.

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
    TypeError
        If it is no integer, or `shift` is no function.

    Notes
    -----
    Threads: see `CausalCache`.
    """

    __saved__ = SavedChunked

    def __init__(self, chunk_size: int, shift: Shift | None = None) -> None:
        super().__init__(shift)
        self._chunk = min(MOST_POSITIONS, check_size("chunk_size", chunk_size, 1))

    def _options(self) -> str:
        return f"chunk_size={self._chunk}, "


CELL_CACHES = (CausalCache, SlidingWindowCache, ChunkedCache)
