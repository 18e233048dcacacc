"""Streams and CUDA graphs by the driver's own functions, for tests on the stub."""

import contextlib

from cuda.bindings import driver

GLOBAL, THREAD_LOCAL, RELAXED = (driver.CUstreamCaptureMode(mode) for mode in range(3))


def ask(name, *args):
    error, *found = getattr(driver, name)(*args)
    assert error == driver.CUresult.CUDA_SUCCESS, (name, error)
    return found[0] if found else None


def new_stream(device=0):
    """The pointer of a new stream."""
    from numba import cuda

    with cuda.gpus[device]:
        return int(ask("cuStreamCreate", 1))


class Graph:
    """What `captured` gives: a graph, once the capture has ended."""

    def __init__(self):
        self.exec = None

    def launch(self, stream):
        ask("cuGraphLaunch", self.exec, stream)

    def destroy(self):
        ask("cuGraphExecDestroy", self.exec)


@contextlib.contextmanager
def captured(stream, mode=GLOBAL):
    """Capture what is launched on a stream within, where calls run; a graph that can be launched afterwards."""
    import numkv

    made = Graph()
    ask("cuStreamBeginCapture", stream, mode)
    try:
        with numkv.on_stream(stream):
            yield made
    except BaseException:
        driver.cuStreamEndCapture(stream)
        raise
    graph = ask("cuStreamEndCapture", stream)
    made.exec = ask("cuGraphInstantiate", graph, 0)
    ask("cuGraphDestroy", graph)
