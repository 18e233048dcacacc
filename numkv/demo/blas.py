"""How many threads NumPy's matrix products take."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from numkv.demo.checkpoint import Weights

#: Models below this number of parameters have matrices too small to share among threads.
_SMALL = 100_000_000
#: OpenBLAS as NumPy's wheels build it, and as Linux distributions do.
_SPELLINGS = ("scipy_openblas_{}64_", "openblas_{}64_", "openblas_{}")


@contextlib.contextmanager
def blas_threads_for(weights: Weights) -> Iterator[None]:
    """Compute the matrix products of a small model on one thread.

    OpenBLAS's threads wait for their next piece of work by spinning, just when numkv's kernels want
    the cores; with small matrices that costs more than the threads save, up to a factor of 30 on a
    busy machine. NumPy has no setting for it, and the environment variable is read when NumPy is
    imported, so OpenBLAS itself is asked. With another BLAS, or where the user has set the
    variable, nothing is changed.

    Parameters
    ----------
    weights : Weights
        The model's weights.
    """
    functions = _openblas()
    if (
        functions is None
        or weights.num_parameters >= _SMALL
        or "OPENBLAS_NUM_THREADS" in os.environ
    ):
        yield
        return
    get_threads, set_threads = functions
    before = get_threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(before)


def _openblas() -> tuple[Callable[[], int], Callable[[int], Any]] | None:
    """OpenBLAS's functions that get and set the number of threads."""
    try:
        path = importlib.import_module("numpy._core._multiarray_umath").__file__
        # Symbols are looked up in the libraries that this one is linked with, too.
        library = ctypes.CDLL(path)
    except (ImportError, OSError):  # a NumPy built in some other way
        return None
    for spelling in _SPELLINGS:
        with contextlib.suppress(AttributeError):
            return (
                getattr(library, spelling.format("get_num_threads")),
                getattr(library, spelling.format("set_num_threads")),
            )
    return None
