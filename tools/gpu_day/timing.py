"""Time calls by a device's events: as they are made, and replayed from a graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

from tools.gpu_day import lines as of_lines
from tools.gpu_day.lines import Line, Peer, turns

__all__ = ["copy_bandwidth", "ours", "theirs", "timed"]

#: Calls between two events, as an event costs the driver a microsecond or two.
CALLS = 8


def timed(call: Callable[[], object], seconds: float, calls: int = CALLS) -> list[float]:
    """Return seconds of single calls on the device: means of a few calls between two events.

    Parameters
    ----------
    call : function
        Makes one call, or `calls` of them where it replays a graph.
    seconds : float
        How long to time.
    calls : int
        How many calls lie between two events.
    """
    from numba import cuda

    for _ in range(3):
        call()
    cuda.synchronize()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found) < 5:
        start, stop = cuda.event(timing=True), cuda.event(timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        found.append(cuda.event_elapsed_time(start, stop) / 1e3 / calls)
    return found


def copy_bandwidth(seconds: float, size: int) -> dict[str, float]:
    """Return the bytes that a copy within the device's memory reads and writes in a second."""
    import numpy as np
    from numba import cuda

    a, b = (cuda.device_array(size, np.uint8) for _ in range(2))
    return {"bytes_per_second": 2 * size / median(timed(lambda: b.copy_to_device(a), seconds, 1))}


def _several(calls: list[Callable[[], object]]) -> Callable[[], None]:
    """Make a function that makes `CALLS` of the calls, in turns."""
    one = turns(calls)

    def several() -> None:
        for _ in range(CALLS):
            one()

    return several


def ours(line: Line, seconds: float, cold: int) -> dict[str, Any]:
    """Return numkv's times and error of a line, with the bytes and operations that it needs."""
    from cuda.core import Device, Stream

    import numkv

    job = of_lines.numkv_calls(line, cold)
    found, several = job.checked(line), _several(job.calls)
    found |= {"bytes": line.bytes, "flops": line.flops, "eager": _spread(timed(several, seconds))}
    if line.what == "step":
        return found  # a step reads numbers of the host, which a graph would freeze
    here = Device()
    here.set_current()
    builder = here.create_stream().create_graph_builder()
    builder.begin_building()
    with numkv.on_stream(builder.stream):
        several()
    graph, default = builder.end_building().complete(), Stream.from_handle(0)
    return {**found, "graph": _spread(timed(lambda: graph.launch(default), seconds))}


def theirs(peer: Peer, line: Line, seconds: float, cold: int) -> dict[str, Any]:
    """Return another library's times and error of a line."""
    import torch

    job = peer.calls(line, cold)
    found, several = job.checked(line), _several(job.calls)
    found |= {"eager": _spread(timed(several, seconds))}
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            several()
    except Exception as error:  # some cannot be captured
        return {**found, "graph": f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"}
    return {**found, "graph": _spread(timed(graph.replay, seconds))}


def _spread(found: list[float]) -> list[float]:
    """Return the lower quartile, median and upper quartile in microseconds."""
    return [round(1e6 * x, 3) for x in quantiles(found, n=4)]
