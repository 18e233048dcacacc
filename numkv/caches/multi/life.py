"""`CacheLife`: from ``set_config`` and ``init`` to ``close``, and the copies of a multi-sequence cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

from numkv import targets
from numkv.access import Access, drops, reads, whole
from numkv.caches.multi.checks import MOST_POSITIONS
from numkv.caches.multi.config import CacheConfig, Setup
from numkv.errors import NumkvError
from numkv.kinds import Kind, kinds_of
from numkv.numbers import check_flag, check_size
from numkv.targets.streamed import on_stream


class CacheLife(ABC):
    """How a multi-sequence cache comes to be, is copied, cleared and closed."""

    def __init__(self) -> None:
        self._config: CacheConfig | None = None
        self._state = "new"
        # Who is changing it; that of a `numkv.WrapperCache` is its children's too.
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
        self._check_new()
        kinds = kinds_of(kind, k_kind, v_kind)
        setup = Setup(
            *kinds, _size("max_sequences", max_sequences, 1), _size("capacity", capacity, 1),
            _size("max_batch", max_batch), targets.get(target), check_flag("rotate", rotate),
        )  # fmt: skip
        self._commit_init(self._plan_init(setup))

    def _check_new(self) -> None:
        if self._state != "new":
            raise NumkvError(
                f"init: expected a new cache, got one after {self._after()}; make a new one"
            )

    @abstractmethod
    def _plan_init(self, setup: Setup) -> Any: ...

    @abstractmethod
    def _commit_init(self, plan: Any) -> None: ...

    @drops
    def close(self) -> None:
        """Release all memory; the cache cannot be used afterwards."""
        self._close()

    @abstractmethod
    def _close(self) -> None: ...

    @drops
    def clear(self) -> None:
        """Drop all tokens, and end the pass; the buffers of layers and the scales of heads stay.

        Raises
        ------
        NumkvError
            Before `init` and after `close`.
        """
        self._check_ready()
        self._clear()

    @abstractmethod
    def _clear(self) -> None: ...

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

    # -- copies

    @on_stream
    @reads
    def copy(self, *, stream: Any = None) -> Self:
        """A cache of its own with the same content, in the same pass if one is on; only the shift function is shared.

        ``copy.copy`` and ``copy.deepcopy`` make the same. A cache on the CPU can be pickled too, if its shift can: a
        function of a module, or a `numkv.rope_shift`.

        Parameters
        ----------
        stream : object, optional
            See `numkv.paged_decode_attention`.

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

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    @abstractmethod
    def _copied(self, access: Access) -> Self: ...

    @reads
    def __getstate__(self) -> dict[str, Any]:
        return self._pickled()

    @abstractmethod
    def _pickled(self) -> dict[str, Any]:
        """What a pickle holds: nothing that changes when the cache does."""

    # -- its proof

    @on_stream
    @reads
    def check(self, *, stream: Any = None) -> None:
        """Look for a contradiction in what the cache knows of itself.

        Which cell has which position for which sequences, how often it is owned, the shapes of the buffers, and that
        scales of stored rows are finite: they may not be where NaN or infinity was put with ``check_finite=False``.
        On CUDA it waits for the device.

        Parameters
        ----------
        stream : object, optional
            See `numkv.paged_decode_attention`.

        Raises
        ------
        NumkvError
            If there is one; it says which.
        NonFiniteInput
            On CUDA, if rows that were quantised held NaN or infinity, and are still stored.
        """
        self._check_ready()
        self._refuse_told()
        self._check()

    @abstractmethod
    def _refuse_told(self) -> None:
        """Wait for what has been launched, and refuse to go on if rows were NaN or infinite."""

    @abstractmethod
    def _check(self) -> None: ...


def _size(name: str, n: Any, least: int = 0) -> int:
    """Take a size; their product is refused later, before memory is taken."""
    return check_size(name, n, least, MOST_POSITIONS)
