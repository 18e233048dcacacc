"""Run a kernel on several threads, without harm to the host process.

A kernel that can share its work has `ON_THREADS` as its last arguments, ``launch, worker, workers``. If `launch` is not
0, it only calls `on_threads`, which runs it once for each worker. Otherwise it does the part of one worker: rows ``[n *
worker // workers, n * (worker + 1) // workers)``, or the items of `next_item`. So one build serves large calls, and
small ones, which neither start threads nor wait for any. No row depends on another, so results do not depend on the
number of workers.

How many there may be is each Python thread's own choice (`choices`), else Numba's.

The threads are Numba's. Five things that Numba leaves open are settled here:

- With OpenMP, Numba's start switches nested regions on and sets the number of threads, for the whole thread that asked.
  PyTorch may share that OpenMP, and its matrix products then open a team inside a team. `start` puts both back.
- GNU OpenMP's threads wait for each other in a busy loop of up to 300,000 turns, which take milliseconds. If another
  program has one of the cores meanwhile, the one it keeps from running is the one that is waited for. Where numkv is
  the first to load that OpenMP, its threads sleep after `SPINS` turns, unless the user chose otherwise.
- The ``workqueue`` layer ends the process when two Python threads launch at once: they take turns. The other layers
  take any number of launches.
- GNU OpenMP cannot run after a fork: it would end the child, or hang. There, kernels run on one thread.
- A fork in the middle of a compilation, or while threads are started, would leave the child with a lock that is never
  released. So forks wait until that is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numba
from numba import types
from numba.core.compiler_lock import global_compiler_lock
from numba.np.ufunc import parallel

from numkv.errors import NotSupported
from numkv.kernels.cpu.vectors.launch import thread_launcher

#: Numba types of a kernel's last arguments: ``launch, worker, workers``.
ON_THREADS = (types.int64, types.int64, types.int64)

# Elements below which one thread does all work. Appending float32 rows to fp16, int8 and fp32 caches on a 2-core
# machine, least times with one thread and with two, in microseconds:
#
# - 1 << 14 elements: 8 and 6, 8 and 6, 5 and 5.
# - 1 << 16 elements: 28 and 16, 31 and 18, 14 and 10.
# - 1 << 18 elements: 97 and 52, 120 and 63, 51 and 32.
#
# These threads had just worked; sleeping ones wake more slowly. So two threads must save at least 4 us.
SERIAL_ELEMENTS = 1 << 16


#: Turns of the loop in which GNU OpenMP's threads wait before they sleep. They outlast the gap between the calls of two
#: layers; 2,000 do not, which slows short calls (shape F of `python -m perf`). They are far shorter than the
#: scheduler's time slice for another program (`python -m perf neighbour`).
SPINS = 20_000


class Choice:
    """A number of threads that a Python thread has chosen, or None for Numba's."""

    __slots__ = ("number",)

    def __init__(self, number: int | None = None) -> None:
        self.number = number


class _Mine(threading.local):
    """The state of one Python thread."""

    def __init__(self) -> None:
        #: Its choices: the last one counts.
        self.choices = [Choice()]


class _State:
    """The state of Numba's threads in this process."""

    def __init__(self) -> None:
        self.launch = 0  # the address of what shares out calls, once threads have been started
        # How many threads the Python thread has that asks. Numba's own function takes two locks first, one of them of
        # the system: to see that threads have been started.
        self.count: Callable[[], int] = numba.get_num_threads
        self.turn: threading.RLock | None = (
            None  # held by the thread that launches, where only one may
        )
        self.alone = False  # in a forked child whose parent's threads cannot be had
        self.starting = threading.RLock()


_state = _State()
_mine = _Mine()


def choices() -> list[Choice]:
    """Return the calling thread's list of choices, of which the last one counts: never empty, and mutable."""
    return _mine.choices


def start() -> None:
    """Start Numba's threads, unless they have been, and leave the host process as it was."""
    if _state.launch:
        return
    with _state.starting:
        if _state.launch:
            return
        with _openmp_as_it_was():
            try:
                numba.get_num_threads()
            except ValueError as error:  # no layer loads
                said = " ".join(str(error).split())
                raise NotSupported(
                    f"NUMBA_THREADING_LAYER: expected a layer of Numba that loads here, got "
                    f"{numba.config.THREADING_LAYER!r}: {said}; unset the variable before Python starts"
                ) from error
        if numba.threading_layer() == "workqueue":
            # Of the same thread, a call inside another one's Python part may go first: no kernel runs at that moment.
            _state.turn = threading.RLock()
        _state.count = getattr(parallel, "_get_num_threads", numba.get_num_threads)
        _state.launch = thread_launcher()


@contextlib.contextmanager
def _openmp_as_it_was() -> Iterator[None]:
    """Restore the settings that the start of Numba's OpenMP layer changes: nested regions, and threads of a team."""
    settings = [
        (getattr(library, f"omp_get_{get}"), getattr(library, f"omp_set_{put}"))
        for library in _openmps()
        for get, put in _SETTINGS
    ]
    before = [get() for get, _ in settings]
    try:
        yield
    finally:
        for (get, put), value in zip(settings, before, strict=True):
            if get() != value:
                put(value)


# How settings are read and written, in the order in which they are put back: allowing nested regions sets levels.
_SETTINGS = (
    ("nested", "nested"), ("max_active_levels", "max_active_levels"), ("max_threads", "num_threads"),
)  # fmt: skip


def _started_layer() -> str | None:
    """The threading layer that Numba has started, if any."""
    try:
        name: str = parallel.threading_layer()
    except ValueError:
        return None
    return name


def _openmps() -> list[Any]:
    """The OpenMP libraries that Numba may start; none if it does not start one, or has done so already."""
    chosen = str(numba.config.THREADING_LAYER).lower()
    if _started_layer() is not None or chosen in ("tbb", "workqueue"):
        return []
    try:
        with _short_waits():
            from numba.np.ufunc import omppool
    except ImportError:
        return []
    # The one that the layer is linked with, or one that another module has made visible to all, as PyTorch does.
    libraries = [ctypes.CDLL(omppool.__file__), ctypes.CDLL(None)]
    return [library for library in libraries if hasattr(library, "omp_set_max_active_levels")]


@contextlib.contextmanager
def _short_waits() -> Iterator[None]:
    """Bound the waiting of a GNU OpenMP that is loaded meanwhile, which reads these variables once."""
    if "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ:
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]


def num_threads() -> int:
    """How many threads a kernel may have that the calling Python thread runs; they are started when Numba is asked."""
    if _state.alone:
        return 1
    chosen = _mine.choices[-1].number
    if chosen is not None:
        return chosen
    if not _state.launch:
        start()
    return _state.count()


def workers_for(work: int, least: int = SERIAL_ELEMENTS) -> int:
    """Return how many threads are to do so much work, such as elements to move: one if it is less than the `least`."""
    return 1 if work < least else num_threads()


def run(kernel: Callable[..., Any], workers: int, *args: Any) -> Any:
    """Run a kernel with so many workers, at most `num_threads`; return its result."""
    if workers == 1:
        return kernel(*args, 0, 0, 1)
    start()
    if _state.turn is None:
        return kernel(*args, _state.launch, 0, workers)
    with _state.turn:
        return kernel(*args, _state.launch, 0, workers)


def offer() -> tuple[int, int]:
    """Return the most threads that may run, and `launch`, for a call that decides itself whether it uses threads.

    `launch` is 0 if none have been started, as small calls do not need any.
    """
    launch = 0 if _state.alone else _state.launch
    if launch or _state.alone:
        return num_threads(), launch
    return _mine.choices[-1].number or numba.config.NUMBA_NUM_THREADS, 0


def in_turn(call: Callable[..., Any], *args: Any) -> Any:
    """Return what `call` returns, which may launch kernels, by an `offer` among its arguments."""
    if _state.turn is None:
        return call(*args)
    with _state.turn:
        return call(*args)


def launched(call: Callable[..., Any], workers: int, *args: Any) -> Any:
    """What `call` returns, which launches kernels itself: its last argument is their `launch`.

    That is 0 for one worker, and in a forked child, which has this thread alone: a plan may be from before the fork.
    """
    if workers == 1 or _state.alone:
        return call(*args, 0)
    start()
    if _state.turn is None:
        return call(*args, _state.launch)
    with _state.turn:
        return call(*args, _state.launch)


def _before_fork() -> None:
    # In this order, as a thread that starts threads does not compile.
    global_compiler_lock.acquire()
    _state.starting.acquire()


def _after_fork_in_parent() -> None:
    _state.starting.release()
    global_compiler_lock.release()


def _after_fork_in_child() -> None:
    """The parent's threads are not there, nor those that hold its locks."""
    if _started_layer() == "omp":
        _state.alone = True
    if _state.turn is not None:
        _state.turn = threading.RLock()
    _state.starting = threading.RLock()
    global_compiler_lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
