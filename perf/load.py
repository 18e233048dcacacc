"""CPU use of other processes beside workers, and the workers' peak memory."""

import contextlib
import os
import time
from pathlib import Path

from numkv.bench.rounds import Load


def _seconds_of(pid):
    """Return the CPU seconds of all threads of a process; 0 if it has ended."""
    with contextlib.suppress(OSError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def peak_memory(pid, proc="/proc"):
    """Return the peak bytes of memory of a process; 0 if the system does not report them."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(proc, str(pid), "status").read_text().splitlines()
        return int(next(x for x in lines if x.startswith("VmHWM:")).split()[1]) * 1024
    return 0


def beside(pids):
    """Return a `Load` that does not count this process and the processes `pids`; 0 if the system does not report it."""
    own = {*pids, os.getpid()}
    return Load(own=lambda: sum(map(_seconds_of, own)), thread=time.perf_counter)


def beside_children():
    """Return a `Load` that does not count this process and its children that end meanwhile."""
    return Load(own=lambda: sum(os.times()[:4]), thread=time.perf_counter)
