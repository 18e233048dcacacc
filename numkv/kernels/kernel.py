"""How a CPU kernel is made: one way to compile, one disk cache that knows all the sources.

Numba's own disk cache stamps only the file that defines a function, so editing a row function would leave
stale kernels behind that go on computing the old thing. Kernels made here are stamped with a digest of every
source under ``kernels`` and ``rows`` instead.

A kernel is compiled for one explicit signature, so that C-ordered and strided arrays, ints and NumPy scalars all
use the same machine code, and compilation never starts in the middle of a call with odd arguments.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.core.caching import FunctionCache

__all__ = ["SCALES", "WORDS", "array", "build", "cache_stats", "source_digest"]

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

    def __init__(self, py_func: Callable[..., Any], *options: Any) -> None:
        super().__init__(py_func)
        self._cache_file._source_stamp = source_digest()
        self._options = options

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return super()._index_key(sig, codegen), self._options

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_no_cache(str(error))


@functools.cache
def _warn_no_cache(reason: str) -> None:
    warnings.warn(
        f"numkv cannot keep compiled kernels on disk ({reason}); every process compiles them again. "
        "Set NUMBA_CACHE_DIR to a writable folder.",
        RuntimeWarning,
        stacklevel=2,
    )


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
        What is being compiled, for the log.
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
        dispatcher._cache = _KernelCache(py_func, flags)
    except RuntimeError as error:  # no folder to cache in
        _warn_no_cache(str(error))
    log.info("loading %s", label)
    started = time.perf_counter()
    dispatcher.compile(signature)
    dispatcher.disable_compile()
    hit = sum(dispatcher.stats.cache_hits.values()) > 0
    _stats["hits" if hit else "misses"] += 1
    if not hit:
        log.info("compiled %s in %.1f s", label, time.perf_counter() - started)
    return dispatcher
