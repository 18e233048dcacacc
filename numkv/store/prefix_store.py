"""`PrefixStore`: where caches of several processes and machines keep the full blocks of their prefixes."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Any, NoReturn, Self

from numkv.checks import Mark, check_mark
from numkv.errors import NotSupported
from numkv.keywords import explains
from numkv.numbers import check_size
from numkv.store.engine import Engine
from numkv.store.objects import Section
from numkv.store.places import check_bound, check_timeout, place_of
from numkv.store.records import Event, StoreStats

#: Bytes of the host tier by default.
_HOST_BYTES = 256 << 20
#: Seconds without any answer of a network by default.
_PATIENCE = 0.3


@explains
class PrefixStore:
    """Full blocks under their content names, in a folder or any fsspec file system, for ``PagedKVCache(store=…)``.

    `PagedKVCache.add` searches a prompt's blocks in the cache's own pool, then in the host memory of this object,
    then in the place. `PagedKVCache.commit` makes a thread write full blocks. Any number of caches, processes and
    machines may use one place. A block is found only for the same tokens, extra keys, mark, RoPE and layers (sizes,
    kinds, windows, chunks, sources, states). It equals the stored one to the bit. States are written if they are
    checkpoints at the end of full blocks; a prefix ends at one of these.

    Parameters
    ----------
    place : path-like or str
        A folder, which is made when something is written; a URL such as ``"s3://bucket/prefixes"``, which needs the
        extra ``store``; or a path within `file_system`.
    mark : str or mapping
        Everything that decides rows in addition to tokens: the model and its revision, as a text, or texts, numbers
        and None by name. A model with other weights needs another mark.
    rope : str or mapping, optional
        The base and scaling of RoPE, if `mark` does not include them.
    max_nbytes : int, optional
        Most bytes of all objects in `place`, those of other marks too. The least recently used objects are deleted
        first. Each writing process may exceed the bound by a sixteenth. A disk that is full earlier evicts nothing, and
        writes fail. By default there is no bound.
    host_nbytes : int
        Bytes of the host tier: blocks that pools have evicted, and blocks that wait to be written.
    durable : bool
        Whether each block is fsynced before it counts as written. If not, a power cut may lose the newest blocks; a
        killed process loses none that counted as written.
    file_system : fsspec.AbstractFileSystem, optional
        The file system of `place`.
    timeout : float or None
        Seconds without any answer after which a lookup on a network continues without the store. A slow store that
        answers is read to the end. The store is then probed from time to time. None means no timeout.
    local : path-like, optional
        A folder of this machine with copies of the objects read and written last, so that each is requested from the
        network once.
    local_nbytes : int, optional
        Most bytes of these copies; None means no bound.
    on_event : callable, optional
        Called with a `PrefixFound` in `add`, and in a thread of the store with a `BlocksWritten`, `BlocksDropped`,
        `StoreSilent` or `StoreAnswers`. Its exceptions are logged and not raised. It may not flush or close.

    Raises
    ------
    NotSupported
        If a URL needs a package that is not installed.
    DimensionMismatch, TypeError, ValueError
        If an argument is invalid.

    Notes
    -----
    A block that cannot be written or read never fails a call of the cache. It is counted (`stats`), reported
    (`on_event`), logged under ``numkv.store``, and computed anew. A network that does not answer delays one lookup by
    `timeout` seconds. Later lookups skip it until the store's own probe is answered. Blocks to write wait meanwhile, in
    the pool or, within `host_nbytes`, in the host tier.

    Checksums detect damage, not malice: give write access to `place` only to trusted users.

    On a file system of fsspec the objects written longest ago are deleted first, as it stores no time of reading.

    Examples
    --------
    >>> import numpy as np, numkv, tempfile
    >>> from numkv.store import PrefixStore
    >>> folder = tempfile.TemporaryDirectory()
    >>> def cache():
    ...     store = PrefixStore(folder.name, mark={"model": "mine"}, rope={"base": 1e6})
    ...     return numkv.PagedKVCache(1, 2, 8, num_blocks=8, block_size=4, store=store)
    >>> first, second, prompt = cache(), cache(), list(range(11))
    >>> seq = first.add(prompt)
    >>> step = first.reserve([seq], 11)
    >>> step.append(0, np.ones((11, 2, 8), np.float32), np.ones((11, 2, 8), np.float32))
    >>> first.commit(step, token_ids=prompt)
    >>> first.store.flush()  # how many blocks could not be written
    0
    >>> second.cached_len(second.add(prompt))
    8
    >>> second.store.stats().found_in_store
    2
    >>> folder.cleanup()
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        mark: Mark,
        rope: Mark | None = None,
        max_nbytes: int | None = None,
        host_nbytes: int = _HOST_BYTES,
        durable: bool = False,
        file_system: Any = None,
        timeout: float | None = _PATIENCE,
        local: str | os.PathLike[str] | None = None,
        local_nbytes: int | None = None,
        on_event: Callable[[Event], object] | None = None,
    ) -> None:
        if mark is None:
            raise TypeError(
                "`mark`: expected a text, or facts by name, got None; name the model of these blocks"
            )
        self._mark, self._rope = check_mark("mark", mark), check_mark("rope", rope)
        for name, given in (("mark", self._mark), ("rope", self._rope)):
            try:
                json.dumps(given, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                raise ValueError(f"`{name}`: expected Unicode text, got {given!r}") from None
        most, host = check_bound(max_nbytes), check_size("host_nbytes", host_nbytes, 0, 2**62)
        if on_event is not None and not callable(on_event):
            raise TypeError(
                f"`on_event`: expected a function or None, got {type(on_event).__name__}"
            )
        where = place_of(place, durable, file_system, timeout, local, local_nbytes)
        self._max_nbytes, self._host_nbytes = most, host
        self._engine = Engine(where, most, host, on_event)

    # -- properties

    @property
    def place(self) -> str:
        """Return the place of objects."""
        return repr(self._engine.place)

    @property
    def mark(self) -> Any:
        """Return the user's mark of the model."""
        return self._mark

    @property
    def rope(self) -> Any:
        """Return the user's description of RoPE."""
        return self._rope

    @property
    def max_nbytes(self) -> int | None:
        """Return the most bytes of all objects; None without a bound."""
        return self._max_nbytes

    @property
    def host_nbytes(self) -> int:
        """Return the most bytes of the host tier."""
        return self._host_nbytes

    @property
    def closed(self) -> bool:
        """Return whether the store is closed."""
        return self._engine.closed

    def __repr__(self) -> str:
        now = self.stats()
        return (
            f"<PrefixStore: {self.place}, {now.waiting} blocks waiting, {now.host_blocks} in the host tier"
            f"{', closed' if self.closed else ''}>"
        )

    def stats(self) -> StoreStats:
        """Return the counts of this object's work; see `StoreStats`.

        Returns
        -------
        StoreStats
        """
        return self._engine.stats()

    # -- flush and close

    def flush(self, timeout: float | None = None) -> int:
        """Wait until all blocks that were committed before are written.

        Parameters
        ----------
        timeout : float, optional
            The most seconds to wait.

        Returns
        -------
        int
            Blocks that are not in the store. They were dropped or failed since the last `flush`, or wait for a place
            that does not answer. With 0, all committed blocks are in the store, until they are evicted.

        Raises
        ------
        TimeoutError
            If they are not written by then; the store continues to write them.
        NumkvError
            If it is called by `on_event`, in a thread that writes.
        """
        return self._engine.flush(check_timeout(timeout))

    def close(self, timeout: float | None = None) -> int:
        """Write all waiting blocks, and close. Caches that use the store continue without it.

        Parameters
        ----------
        timeout : float, optional
            The most seconds to wait.

        Returns
        -------
        int
            See `flush`.

        Raises
        ------
        TimeoutError, NumkvError
            See `flush`; the store is not closed then.
        """
        return self._engine.close(check_timeout(timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise NotSupported(
            "a PrefixStore cannot be copied or pickled: make one with the same arguments where it is needed"
        )

    def __tier__(self) -> tuple[Engine, Callable[[dict[str, Any], int, int], Section]]:
        """Return the engine, and the function that makes the section of a cache's blocks."""
        return self._engine, functools.partial(Section.of, self._mark, self._rope)
