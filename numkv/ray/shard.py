"""`Shard`: one part of a sharded cache, a `PagedKVCache` of some heads that executes messages.

It runs in a process of its own, or in the caller's. Messages have numbers. The next one is executed. The last one, sent
again, gets the same reply without a second execution. Any other is rejected, because a message was lost.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv._version import __version__
from numkv.attention.attend import attend
from numkv.attention.options import check_options
from numkv.caches import PagedKVCache, SwappedSequence
from numkv.caches.paged.step import Step
from numkv.errors import NotSupported, NumkvError
from numkv.ray.messages import Answer, Message, Operation, packed, unpacked
from numkv.store.prefix_store import PrefixStore
from numkv.threads import num_threads

#: Operations that cannot fail on a working shard. No call waits for them: they are sent with other messages.
BOOKKEEPING = frozenset({"add", "fork", "remove", "truncate", "commit", "rollback"})


class ShardSpec(NamedTuple):
    """The arguments of a shard; it pickles."""

    cache: dict[str, Any]
    """Arguments of `PagedKVCache`."""
    store: dict[str, Any] | None
    """Arguments of `PrefixStore`."""
    version: str = __version__
    """The caller's version of numkv."""


class _Open(NamedTuple):
    """An open step."""

    step: Step
    starts: Any
    """Where queries of each sequence start; None: the step's own tokens are the queries."""
    ranges: dict[int, Any]
    """Visible ranges of the queries, by window."""


class Shard:
    """Some heads of every layer, and some tokens of every sequence.

    Parameters
    ----------
    spec : ShardSpec
        The shard's arguments.
    threads : int, optional
        Threads of the shard's computations on the CPU.
    """

    def __init__(self, spec: ShardSpec, threads: int | None = None) -> None:
        if spec.version != __version__:
            raise NotSupported(
                f"expected numkv {spec.version} on all nodes, as in the caller's process, got {__version__}; install "
                "one version"
            )
        self._threads = threads
        store = None if spec.store is None else PrefixStore(**spec.store)
        self.cache = PagedKVCache(**spec.cache, store=store)
        self._column = self.cache.__column__()
        self._target = targets.get(self.cache.target)
        self._seqs: dict[int, int] = {}
        self._steps: dict[int, _Open] = {}
        self._last = Answer(0, self.cache.num_free, None)

    def handle(self, message: Message) -> Answer:
        """Execute a message.

        Parameters
        ----------
        message : tuple
            See `numkv.ray.messages`.

        Returns
        -------
        Answer
            The reply, which may be an error; nothing is raised.
        """
        if self._threads is None:
            return self._handled(*message)
        # The setting belongs to the Python thread, which may differ each time.
        with num_threads(self._threads):
            return self._handled(*message)

    def _handled(self, number: int, operations: list[Operation]) -> Answer:
        """Execute a message, in the order of numbers; after an error only bookkeeping, which others rely on."""
        if number == self._last.number:
            return self._last
        if number != self._last.number + 1:
            error = NumkvError(f"expected message {self._last.number + 1}, got {number}")
            return Answer(number, 0, None, error, "lost")
        value, reason, failed = None, None, ""
        for name, arguments in operations:
            if failed and name not in BOOKKEEPING:
                continue
            try:
                value = getattr(self, f"_do_{name}")(*unpacked(arguments))
            except Exception as error:
                reason, failed = error.with_traceback(None), name
        self._last = Answer(number, self.cache.num_free, packed(value), reason, failed)
        return self._last

    # -- sequences

    def _do_add(self, seq: int) -> None:
        self._seqs[seq] = self.cache.add()

    def _do_find(self, seq: int, tokens: NDArray[np.int32], names: Any, extra: Any) -> int:
        """Add a sequence with the stored part of its prefix; blocks are found by their names, or by tokens."""
        if seq in self._seqs:
            self._do_remove(seq)
        cache = self.cache
        if names is None:
            self._seqs[seq] = cache.add(tokens, extra=extra)
        else:
            self._seqs[seq] = self._column.add(tokens, names)
        return cache.length(self._seqs[seq])

    def _do_fork(self, seq: int, new: int) -> None:
        self._seqs[new] = self.cache.fork(self._seqs[seq])

    def _do_remove(self, seq: int) -> None:
        local = self._seqs.pop(seq, None)  # a new shard may not know it
        if local is not None:
            self.cache.remove(local)

    def _do_truncate(self, seq: int, length: int) -> None:
        self.cache.truncate(self._seqs[seq], length)

    def _do_shorten(self, seq: int, length: int) -> None:
        """Truncate a sequence where that may fail: the caller waits for the reply."""
        self._do_truncate(seq, length)

    def _do_swap_out(self, seq: int) -> SwappedSequence:
        return self.cache.swap_out(self._seqs[seq])

    def _do_swap_in(self, seq: int, swapped: SwappedSequence) -> None:
        self._seqs[seq] = self.cache.swap_in(swapped)

    # -- steps

    def _do_reserve(
        self, number: int, seqs: list[int], lens: Any, starts: Any, ranges: Any
    ) -> None:
        step = self.cache.reserve([self._seqs[seq] for seq in seqs], lens)
        index = self._target.index
        if starts is not None:
            starts = index(starts, np.int64)
            ranges = {window: index(x, np.int64) for window, x in ranges.items()}
        self._steps[number] = _Open(step, starts, ranges)

    def _do_layer(
        self, number: int, layer: int, window: int, rows: Any, q: Any, options: dict[str, Any]
    ) -> Any:
        """Append rows of a layer, and attend."""
        step, starts, ranges = self._steps[number]
        place = self._target
        if rows is not None:
            k, v, check_finite = rows
            step.append(layer, place.asarray(k), place.asarray(v), check_finite=check_finite)
        if q is None:
            return None
        if starts is None:
            return self._on_host(step.attention(layer, place.asarray(q), **options))
        return self._attended(step.__rows__(layer), q, starts, ranges[window], options)

    def _do_look(self, layer: int, seqs: list[int], q: Any, ranges: Any, options: Any) -> Any:
        """Attend to committed tokens."""
        cache, place = self.cache, self._target
        local = [self._seqs[seq] for seq in seqs]
        if ranges is None:
            return self._on_host(cache.decode_attention(layer, local, place.asarray(q), **options))
        starts, ranges = (place.index(x, np.int64) for x in (np.arange(len(local) + 1), ranges))
        return self._attended(self._column.rows(layer, local), q, starts, ranges, options)

    def _attended(
        self, rows: Any, q: Any, starts: Any, ranges: Any, options: dict[str, Any]
    ) -> Any:
        """Attend to a part of the tokens, with lse, as results of columns are merged."""
        asked, (pool, table, lens) = check_options(options, return_lse=True), rows
        found = attend(pool, table, self._target.asarray(q), lens, starts, asked, ranges=ranges)
        return self._on_host(found)

    def _on_host(self, found: Any) -> Any:
        if isinstance(found, tuple):
            return tuple(np.asarray(self._target.to_host(x)) for x in found)
        return np.asarray(self._target.to_host(found))

    def _do_commit(self, number: int, accepted: Any, ids: Any, named: Any) -> None:
        """Commit a step; `named` are names and tokens of blocks that are full now, by sequence."""
        step = self._steps.pop(number).step
        self.cache.commit(step, accepted, token_ids=ids)
        for seq, *blocks in named:
            self._column.register(self._seqs[seq], *blocks)

    def _do_rollback(self, number: int) -> None:
        found = self._steps.pop(number, None)  # a step may end before the message that begins it
        if found is not None:
            self.cache.rollback(found.step)

    # -- the cache as a whole

    def _do_sync(self) -> None:
        """Execute all earlier operations, and reply."""

    def _do_clear(self) -> None:
        self._seqs.clear()
        self.cache.clear()

    def _do_set_scales(self, layer: int, k: Any, v: Any) -> None:
        self.cache.set_scales(layer, k, v)

    def _do_stats(self) -> Any:
        return self.cache.stats()

    def _do_check(self) -> dict[int, int]:
        """Verify the block accounting; return the length of each sequence."""
        self.cache.check()
        return {seq: self.cache.length(local) for seq, local in self._seqs.items()}

    def _do_flush(self, timeout: float | None) -> int:
        return 0 if self.cache.store is None else self.cache.store.flush(timeout)
