"""The process that `perf.neighbour` measures: it does the steps that its argument lists, and prints what was measured.

It imports numkv and PyTorch only when a step says so.
"""

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from statistics import median

from perf.peers import cores

MOMENTS = {"before": "not yet", "after": "yes", "set": "yes, torch.set_num_threads"}


def _median_time(call, seconds):
    """Median time of a call, after one that does not count."""
    call()
    times, start = [], time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    return median(times)


def _numpy_product():
    import numpy as np

    a = np.ones((1024, 1024), np.float32)
    return lambda: a @ a


def _torch_product(size=1024):
    import torch

    a = torch.ones(size, size)
    return lambda: a @ a


def _torch_attention():
    import torch

    rows = torch.ones(3, 1, 32, 512, 128)
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(*rows, is_causal=True)


def _decode():
    import numpy as np

    import numkv

    k, v = np.ones((2, 1, 8, 4096, 128), np.float16)
    q = np.ones((1, 32, 128), np.float32)
    return lambda: numkv.decode_attention(q, k, v, [4096])


def openmp():
    """Of each OpenMP runtime that is loaded: whether regions nest, and how deep."""
    lines = Path("/proc/self/maps").read_text().splitlines() if os.name == "posix" else []
    found = {}
    for path in sorted({line.split()[-1] for line in lines if "/" in line}):
        name = Path(path).name
        if not name.startswith(("libgomp", "libomp", "libiomp")):
            continue
        library = ctypes.CDLL(path)
        whose = "torch's " if "torch" in path else ""
        found[whose + name] = [library.omp_get_nested(), library.omp_get_max_active_levels()]
    return found


def _measured(seconds):
    calls = {"NumPy product": _numpy_product}
    if "torch" in sys.modules:
        calls |= {"torch attention": _torch_attention, "torch product": _torch_product}
    times = {name: _median_time(make(), seconds) for name, make in calls.items()}
    return {"times": times, "openmp": openmp()}


def child(steps, seconds):
    """Do the steps; what was measured, by step."""
    found = {}
    for step in steps:
        if step in ("torch", "numkv"):
            __import__(step)
        elif step == "start":
            _decode()()
        elif step in MOMENTS:
            if step == "set":
                sys.modules["torch"].set_num_threads(cores())
            found[step] = _measured(seconds)
        else:
            call = {"decode": _decode, "product": lambda: _torch_product(512)}[step]()
            found[step] = _median_time(call, seconds)
    return found


if __name__ == "__main__":
    print(json.dumps(child(*json.loads(sys.argv[1]))))
