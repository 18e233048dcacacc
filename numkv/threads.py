"""How many threads a call may use on the CPU: each Python thread's own choice.

Every operation obeys: appends and writes, copies, attention, merges, compression. On CUDA it changes nothing. Results
are the same, to the last bit, whatever the number. Calls too small to share use one thread in any case.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numba

from numkv.kernels.cpu.threads import Choice, choices
from numkv.kernels.cpu.threads import num_threads as _in_force
from numkv.numbers import check_size


def set_num_threads(n: int | None) -> None:
    """Choose how many threads calls of this Python thread may use on the CPU.

    A new Python thread starts without a choice. A forked child keeps the choice of the thread that forked. Inside of
    `num_threads` the choice lasts until that ends.

    Parameters
    ----------
    n : int or None
        At least 1, at most as many as Numba has (the environment variable ``NUMBA_NUM_THREADS``, or else as many as
        there are cores). None follows ``numba.get_num_threads()``, which is the default.

    Raises
    ------
    DimensionMismatch
        If `n` is out of range.
    TypeError
        If it is no integer.
    """
    choices()[-1].number = _checked(n)


def get_num_threads() -> int:
    """Return the number of threads that calls of this Python thread may use on the CPU.

    Returns
    -------
    int
        The chosen number, or else ``numba.get_num_threads()``. It is 1 in a forked child that cannot use its parent's
        threads, as with GNU OpenMP.
    """
    return _in_force()


def num_threads(n: int | None) -> contextlib.AbstractContextManager[None]:
    """Choose how many threads calls of this Python thread may use on the CPU, for as long as a ``with`` block lasts.

    The choice belongs to the Python thread that enters the block. If blocks end in another order than they began,
    as those of generators can, the innermost one that has not ended counts. A block of an asynchronous task counts
    for all tasks of its thread: let none of them wait inside of it.

    Parameters
    ----------
    n : int or None
        As for `set_num_threads`.

    Returns
    -------
    context manager
        For one ``with`` block, or to decorate functions.

    Raises
    ------
    DimensionMismatch
        If `n` is out of range.
    TypeError
        If it is no integer.
    """
    return _choosing(_checked(n))


@contextlib.contextmanager
def _choosing(n: int | None) -> Iterator[None]:
    mine, choice = choices(), Choice(n)
    mine.append(choice)
    try:
        yield
    finally:
        mine.remove(choice)


def _checked(n: int | None) -> int | None:
    return None if n is None else check_size("n", n, 1, numba.config.NUMBA_NUM_THREADS)
