"""How much of the machine's cores others use: timings on a busy machine say little."""

import contextlib
import os
import time
from pathlib import Path

from perf.peers import cores

#: More than this share of all cores is worth a warning.
MOST = 0.05


def _machine(stat="/proc/stat"):
    """Seconds that all cores have been busy since the start, what the host took among them; None if not known."""
    try:
        numbers = [int(x) for x in Path(stat).read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    _, _, _, idle, waiting, *_ = numbers
    return (sum(numbers) - idle - waiting) / os.sysconf("SC_CLK_TCK")


def _process(pid):
    """Seconds of all threads of a process; 0 where it is gone."""
    with contextlib.suppress(OSError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def peak_memory(pid, proc="/proc"):
    """Bytes of memory that a process had at its peak; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(proc, str(pid), "status").read_text().splitlines()
        return int(next(x for x in lines if x.startswith("VmHWM:")).split()[1]) * 1024
    return 0


def of_children(_pid=None):
    """Seconds of this process and of all that it started and that have ended."""
    return sum(os.times()[:4])


class Load:
    """Measures from its making on; `pids` are the processes that are not others."""

    def __init__(self, pids, clock=time.perf_counter, machine=_machine, process=_process):
        self._pids = {*pids, os.getpid()}
        self._clock, self._machine, self._process = clock, machine, process
        self._start = self._now()

    def _now(self):
        return self._clock(), self._machine(), sum(map(self._process, self._pids))

    def of_others(self):
        """The share of all cores that others have used since; None if the system does not say."""
        (start, busy, own), (now, busy_now, own_now) = self._start, self._now()
        if busy is None or busy_now is None:
            return None
        used = (busy_now - busy) - (own_now - own)
        return max(0.0, used / (now - start) / cores())
