"""How a CPU kernel is made: one way to compile, one disk cache that knows all the sources.

Numba's own disk cache stamps only the file that defines a function, so editing a row function would leave
stale kernels behind that go on computing the old thing. Kernels made here are stamped with a digest of every
source under ``kernels`` and ``rows`` instead.

A kernel is compiled for one explicit signature, so that C-ordered and strided arrays, ints and NumPy scalars all
use the same machine code, and compilation never starts in the middle of a call with odd arguments.

Compiling takes seconds, so whoever waits is told what for: by the logger ``numkv.kernels``, at level INFO, or where
nobody listens to that, by lines on stderr; see `tell`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

import numba
from numba import types
from numba.core.caching import FunctionCache

__all__ = ["PROGRESS", "SCALES", "WORDS", "array", "build", "cache_stats", "source_digest", "tell"]

log = logging.getLogger("numkv.kernels")

#: Numba types of the words that storage kinds lie in.
WORDS = {
    "fp64": types.float64,
    "fp32": types.float32,
    "fp16": types.uint16,
    "bf16": types.uint16,
    "int8": types.int8,
    "int4": types.uint8,
}
#: Numba types and ranks of their scales: of a row's or of its groups'. Float kinds come with an empty array.
SCALES = {kind: (types.uint16, 4) if kind == "int4" else (types.float32, 3) for kind in WORDS}

#: Environment variable: 1 tells of compilations on stderr, 0 does not; otherwise they are told to who sits there.
PROGRESS = "NUMKV_PROGRESS"

_PACKAGE = Path(__file__).resolve().parent.parent
_stats = {"hits": 0, "misses": 0}


def array(dtype: Any, ndim: int, *, out: bool = False) -> types.Array:
    """The Numba type of a kernel's array argument: any strides, read-only unless `out`."""
    return types.Array(dtype, ndim, "A", readonly=not out)


def cache_stats() -> dict[str, int]:
    """How many kernels this process loaded from the disk cache (hits) and compiled (misses).

    Returns
    -------
    dict
        ``{"hits": int, "misses": int}``.
    """
    return dict(_stats)


@functools.cache
def source_digest() -> str:
    """Digest of every source file that kernels are made of."""
    digest = hashlib.sha256()
    for folder in ("kernels", "rows"):
        for path in sorted((_PACKAGE / folder).rglob("*.py")):
            digest.update(path.relative_to(_PACKAGE).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


class _KernelCache(FunctionCache):
    """Numba's cache of compiled functions, stamped with `source_digest`; never a reason to fail.

    Numba's own key does not know of the options of a build, so one source built in two ways would get one entry.
    """

    def __init__(self, py_func: Callable[..., Any], label: str, *options: Any) -> None:
        super().__init__(py_func)
        self._cache_file._source_stamp = source_digest()
        self._label = label
        self._options = options

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return super()._index_key(sig, codegen), self._options

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with self._alone():
            found = super().load_overload(sig, target_context)
        if found is None:
            tell(self._label)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            with self._alone():
                super().save_overload(sig, data)
        except OSError as error:
            _warn_no_cache(str(error))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes out, where the system can and the folder is there and writable.

        Numba writes an index, then the file that it names by a number. Two processes that compile at the same time can
        choose the same number, and one that reads between the two finds what the file held before.
        """
        with contextlib.ExitStack() as stack:
            if fcntl is not None:
                with contextlib.suppress(OSError):
                    path = Path(self.cache_path) / ".numkv-lock"
                    lock = stack.enter_context(path.open("a"))
                    fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@functools.cache
def _warn_no_cache(reason: str) -> None:
    warnings.warn(
        f"numkv cannot keep compiled kernels on disk ({reason}); every process compiles them again. "
        "Set NUMBA_CACHE_DIR to a writable folder.",
        RuntimeWarning,
        stacklevel=2,
    )


def tell(label: str) -> None:
    """Say that a kernel is being compiled, before it is.

    There is always a record of level INFO by the logger ``numkv.kernels``. If nobody listens to that, and stderr is a
    terminal or Python is interactive, as in a notebook, there is a line on stderr. The environment variable
    ``NUMKV_PROGRESS`` has that line written wherever stderr goes (``1``) or nowhere (``0``).

    Parameters
    ----------
    label : str
        What is being compiled.
    """
    log.info("compiling %s", label)
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        return
    with contextlib.suppress(AttributeError, OSError, ValueError):  # stderr may be None or closed
        if _is_watched():
            _write(f"compiling {label}")
            _explain()


def _is_watched() -> bool:
    """Whether lines on stderr are wanted."""
    choice = os.environ.get(PROGRESS)
    if choice in ("0", "1"):
        return choice == "1"
    return hasattr(sys, "ps1") or sys.stderr.isatty()


@functools.cache
def _explain() -> None:
    _write(
        "compiled kernels stay on disk, but for those of CUDA; `numkv warmup` makes them ahead of time, "
        f"{PROGRESS}=0 hides these lines"
    )


def _write(line: str) -> None:
    sys.stderr.write(f"numkv: {line}\n")
    sys.stderr.flush()


def build(
    py_func: Callable[..., Any],
    signature: Any,
    *,
    label: str,
    fastmath: bool | set[str] = False,
) -> Callable[..., Any]:
    """Compile `py_func` for `signature`, or load it from the disk cache.

    Parameters
    ----------
    py_func : function
        The kernel. It may close over ints, strings and plain module-level functions, not over intrinsics or
        dispatchers: those would miss the disk cache in every process.
    signature : tuple of numba types
        Types of the arguments.
    label : str
        What is being compiled, for who waits.
    fastmath : bool or set of str
        LLVM fast-math flags. Kernels with vector code leave it False: the flags would reach that code too.

    Returns
    -------
    callable
        The compiled function; calls with other types raise ``TypeError``.
    """
    dispatcher = numba.njit(nogil=True, fastmath=fastmath, error_model="numpy")(py_func)
    try:
        flags = tuple(sorted(fastmath)) if isinstance(fastmath, set) else fastmath
        dispatcher._cache = _KernelCache(py_func, label, flags)
    except RuntimeError as error:  # no folder to cache in
        _warn_no_cache(str(error))
        tell(label)
    started = time.perf_counter()
    dispatcher.compile(signature)
    dispatcher.disable_compile()
    hit = sum(dispatcher.stats.cache_hits.values()) > 0
    _stats["hits" if hit else "misses"] += 1
    if not hit:
        log.info("compiled %s in %.1f s", label, time.perf_counter() - started)
    return dispatcher
