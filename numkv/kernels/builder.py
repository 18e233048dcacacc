"""The builder of CPU kernels: it compiles a kernel, or loads it from the disk cache (`disk_cache`).

A kernel is compiled for one explicit signature. So C-ordered and strided arrays, ints and NumPy scalars all use the
same machine code, and odd arguments never start a compilation in the middle of a call.

Compiling takes seconds, so it is reported: by the logger ``numkv.kernels``, at level INFO, or without a listener by
lines on stderr; see `compiled`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numba
from numba import types
from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.np.numpy_support import from_dtype

from numkv.errors import NotSupported
from numkv.interrupts import signals_deferred
from numkv.kernels.cpu.vectors.emitted import as_kernel
from numkv.kernels.disk_cache import KernelCache, sources_changed, warn_no_cache
from numkv.kinds import kinds

log = logging.getLogger("numkv.kernels")

#: Numba types of the words that storage kinds lie in.
WORDS = {kind.name: from_dtype(kind.word) for kind in kinds(by_channel=True)}
#: Numba types and ranks of their scales: of heads, of rows or of rows' groups. Kinds without come with an empty array.
SCALES = {
    kind.name: (from_dtype(kind.scale_word), kind.scale_ndim) for kind in kinds(by_channel=True)
}

#: Environment variable: 1 reports every compilation on stderr, 0 none. By default each is reported on a terminal, and
#: elsewhere one line says that they take long.
PROGRESS = "NUMKV_PROGRESS"
#: Seconds of compiling in a process after which that line is written.
LONG = 3.0

_stats = {"hits": 0, "misses": 0}
_spent = 0.0  # seconds of compiling so far
_is_told = threading.Event()  # that it takes long


def array(dtype: Any, ndim: int, *, out: bool = False) -> types.Array:
    """The Numba type of a kernel's array argument: any strides, read-only unless `out`."""
    return types.Array(dtype, ndim, "A", readonly=not out)


def cache_stats() -> dict[str, int]:
    """Return how many kernels this process loaded from the disk cache (hits) and compiled (misses).

    Returns
    -------
    dict
        ``{"hits": int, "misses": int}``.
    """
    return dict(_stats)


def tell(label: str) -> bool:
    """Report that a kernel is being compiled, beforehand.

    The logger ``numkv.kernels`` always gets a record of level INFO. If it has no listener, and stderr is a terminal or
    Python is interactive, as in a notebook, there is a line on stderr. The environment variable ``NUMKV_PROGRESS``
    writes that line wherever stderr goes (``1``) or nowhere (``0``).

    Parameters
    ----------
    label : str
        The kernel's label.

    Returns
    -------
    bool
        Whether no further report is needed: it was written, or reports are switched off.
    """
    log.info("compiling %s", label)
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        return True
    with contextlib.suppress(AttributeError, OSError, ValueError):  # stderr may be None or closed
        if _is_watched():
            _write(f"compiling {label}")
            _explain()
            return True
    return os.environ.get(PROGRESS) == "0"


def _tell_once(label: str) -> None:
    """Report once, also without a terminal, that compiling takes long."""
    if not _is_told.is_set():
        _is_told.set()
        with contextlib.suppress(AttributeError, OSError, ValueError):
            _write(f"compiling kernels, now {label}; {PROGRESS}=1 names each of them")
            _explain()


def _is_watched() -> bool:
    """Return whether lines on stderr are wanted."""
    choice = os.environ.get(PROGRESS)
    if choice in ("0", "1"):
        return choice == "1"
    return hasattr(sys, "ps1") or sys.stderr.isatty()


@functools.cache
def _explain() -> None:
    _write(
        "compiled kernels stay on disk; `numkv warmup` makes those of the CPU ahead of time, "
        f"{PROGRESS}=0 hides these lines"
    )


def _write(line: str) -> None:
    sys.stderr.write(f"numkv: {line}\n")
    sys.stderr.flush()


@functools.cache
def _check_numba() -> None:
    """Refuse settings of Numba under which no kernel would run, before the first one is made."""
    if numba.config.DISABLE_JIT:
        raise NotSupported(
            "NUMBA_DISABLE_JIT: expected 0, as numkv's kernels are compiled, got 1; unset it before Python starts"
        )
    layer = str(numba.config.THREADING_LAYER).lower()
    wrong = "" if layer in _LAYERS else "there is no such layer"
    if layer in ("tbb", "safe"):
        try:
            importlib.import_module("numba.np.ufunc.tbbpool")
        except ImportError as error:
            wrong = f"which needs TBB ({error})"
    if wrong:
        raise NotSupported(
            f"NUMBA_THREADING_LAYER: expected a layer of Numba that loads here, got {layer!r}: {wrong}; install what "
            "it needs, or unset the variable before Python starts"
        )


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Pause the garbage collector, which would take a tenth of a compilation's time.

    Numba's own lock, which compilations hold anyway, keeps another thread from ending the pause.
    """
    with global_compiler_lock:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()


@contextlib.contextmanager
def _optimised_as_modules() -> Iterator[None]:
    """Skip LLVM's passes over each function as it is emitted, as they run again over the whole module.

    That saves a tenth of a kernel's compile time, and no kernel becomes slower. Leaving out more does not pay. Without
    the loop and SLP vectorisers, which find few loops here, a kernel compiles 1 or 2 % faster. If functions are
    optimised only as parts of their callers, attention takes 10 to 40 % longer. No other thread compiles meanwhile, as
    it would need the lock.
    """
    kept = getattr(CPUCodeLibrary, "_optimize_functions", None)
    if kept is None:  # a Numba that goes another way
        yield
        return

    def lay_out(library: Any, module: Any) -> None:
        module.data_layout = str(library.codegen.target_data)

    with global_compiler_lock:
        CPUCodeLibrary._optimize_functions = lay_out
        try:
            yield
        finally:
            CPUCodeLibrary._optimize_functions = kept


_LAYERS = ("default", "tbb", "omp", "workqueue", "safe", "threadsafe", "forksafe")


def build(
    function: Callable[..., Any],
    signature: Any,
    *,
    label: str,
    args: tuple[str | int | bool, ...] | None = None,
    fastmath: bool | set[str] = False,
    emit: Any = None,
) -> Callable[..., Any]:
    """Compile a kernel for `signature`, or load it from the disk cache.

    Parameters
    ----------
    function : function
        The kernel itself, a function without a closure; or with `args` the factory that makes it.
    signature : tuple of numba types
        Types of the kernel's arguments.
    label : str
        The kernel's label, for reports.
    args : tuple of str, int and bool, optional
        Arguments of the factory. With its name they identify the kernel on disk, so that it may close over anything.
    fastmath : bool or set of str
        LLVM fast-math flags. Kernels with vector code leave it False: the flags would reach that code too.
    emit : numba type, optional
        The type that the kernel returns, if `function` is one for `numkv.kernels.cpu.vectors.emitted`. Numba's type
        inference is then skipped.

    Returns
    -------
    callable
        The compiled function; calls with other types raise ``TypeError``.

    Raises
    ------
    TypeError
        If `function` has a closure and no `args`, or these are no strings and numbers.
    NotSupported
        If Numba is set not to compile, or its threading layer is not installed.
    """
    _check_numba()
    if args is None and function.__closure__:
        raise TypeError(
            f"{function.__qualname__}: expected the factory and its args, got a closure"
        )
    if args is not None and not all(isinstance(arg, str | int) for arg in args):
        raise TypeError(f"{function.__qualname__}: expected strings and numbers, got {args!r}")
    kernel = function if args is None else function(*args)
    if emit is not None and not numba.config.BOUNDSCHECK and not sources_changed():
        kernel = as_kernel(kernel, emit)
    flags = sorted(fastmath) if isinstance(fastmath, set) else fastmath
    identity = (function.__module__, function.__qualname__, repr(args), repr(flags))
    dispatcher = numba.njit(
        nogil=True, fastmath=fastmath, error_model="numpy", no_cfunc_wrapper=True
    )(kernel)
    with contextlib.ExitStack() as compiling:
        begin = functools.partial(compiling.enter_context, compiled(label))
        try:
            dispatcher._cache = KernelCache(kernel, identity, begin)
            compiling.callback(dispatcher._cache.end)
        except RuntimeError as error:  # no folder to cache in
            warn_no_cache(str(error))
            begin()
        # Numba registers its own functions while it compiles or loads. An exception in the midst of it, such as
        # KeyboardInterrupt, would leave some of them out for good: no kernel could be compiled in this process.
        with signals_deferred, _no_collections(), _optimised_as_modules():
            dispatcher.compile(signature)
    dispatcher.disable_compile()
    note(sum(dispatcher.stats.cache_hits.values()) > 0)
    return dispatcher


def note(hit: bool) -> None:
    """Count a kernel that was loaded from the disk cache, or compiled; see `cache_stats`."""
    _stats["hits" if hit else "misses"] += 1


@contextlib.contextmanager
def compiled(label: str) -> Iterator[None]:
    """Report that a kernel is being compiled, and how long it took: by `tell`, else once that compiling takes long.

    The latter comes after `LONG` seconds of compiling in this process, in the middle of a compilation. So a thread of
    its own writes it, and then ends.
    """
    global _spent
    started, timer = time.perf_counter(), None
    if not tell(label) and not _is_told.is_set():
        timer = threading.Timer(max(0.0, LONG - _spent), _tell_once, (label,))
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread is to be had, as when Python ends
            timer.start()
    try:
        yield
    finally:
        took = time.perf_counter() - started
        _spent += took
        if timer is not None:
            timer.cancel()
    log.info("compiled %s in %.1f s", label, took)
