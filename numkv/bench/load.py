"""How much of the machine's cores others use: timings on a busy machine say little."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

#: A share of the cores above which a round does not count.
MOST = 0.05
#: Seconds that the system's clock, which counts hundredths, needs for a share to mean anything.
_SHORTEST = 0.2


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _busy_seconds(stat: str = "/proc/stat") -> float | None:
    """Seconds that all cores have been busy since the start, what the host took among them; None if not known."""
    try:
        numbers = [int(x) for x in Path(stat).read_text().split("\n", 1)[0].split()[1:9]]
        _, _, _, idle, waiting, *_ = numbers
        return (sum(numbers) - idle - waiting) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None


class Load:
    """Measures from its making on.

    Parameters
    ----------
    clock, busy, own, thread : callable
        Seconds: of the wall, of all cores (or None), of this process, and of this thread.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        busy: Callable[[], float | None] = _busy_seconds,
        own: Callable[[], float] = time.process_time,
        thread: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock, self._busy, self._own, self._thread = clock, busy, own, thread
        self._start = self._now()

    def _now(self) -> tuple[float, float | None, float, float]:
        return self._clock(), self._busy(), self._own(), self._thread()

    def of_others(self) -> float:
        """The share of all cores that others have used since.

        Where the system does not say, it is the share of the time in which this thread, which never sleeps, did not
        run. Of a fraction of a second nothing is known, and it is 0.
        """
        start, busy, own, thread = self._start
        now, busy_now, own_now, thread_now = self._now()
        passed = now - start
        if passed < _SHORTEST:
            return 0.0
        if busy is None or busy_now is None:
            return max(0.0, 1 - (thread_now - thread) / passed)
        used = (busy_now - busy) - (own_now - own)
        return max(0.0, used / passed / num_cores())
