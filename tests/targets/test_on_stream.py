"""`numkv.on_stream`: which stream a thread's calls run on; in the simulator, which has one, so by pointers alone."""

import subprocess
import sys
import threading

import numpy as np
import pytest

import numkv
from numkv import targets
from numkv.kernels.cuda import streams
from numkv.targets import cuda_calls


@pytest.fixture(autouse=True)
def real_pointers(monkeypatch):
    """Have the simulator keep streams apart."""
    targets.get("cuda")
    monkeypatch.setattr(cuda_calls, "SIMULATED", False)


def test_the_innermost_stream_holds_and_the_outer_one_comes_back():
    outer = numkv.on_stream(7)
    with outer:
        assert streams.current() is streams.place(0, 7)
        with numkv.on_stream(8):
            assert streams.named() == 8
            with outer, outer:  # entered again
                assert streams.named() == 7
            with numkv.on_stream(None):
                assert streams.named() is None
                assert streams.current() is streams.place(0, 0)
            assert streams.named() == 8
        assert streams.named() == 7
    assert streams.named() is None


def test_an_error_leaves_the_stream():
    with pytest.raises(ZeroDivisionError), numkv.on_stream(7):
        _ = 1 / 0
    assert streams.named() is None
    assert streams.current() is streams.place(0, 0)


def test_each_thread_has_its_own():
    context, met = numkv.on_stream(7), threading.Barrier(2, timeout=30)
    found = {}

    def one(number, stream):
        before = streams.named()
        with context, numkv.on_stream(stream):
            met.wait()
            inside = streams.named()
            met.wait()
        found[number] = before, inside, streams.named()

    with numkv.on_stream(3):
        threads = [threading.Thread(target=one, args=(i, 10 + i)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert streams.named() == 3
    assert found == {0: (None, 10, None), 1: (None, 11, None)}


def test_a_call_within_a_call_runs_where_that_does_unless_it_says_otherwise():
    cuda = targets.get("cuda")
    assert cuda.chooses_stream
    with numkv.on_stream(7), cuda.on():
        assert not cuda.chooses_stream
        here = streams.current()
        assert here is cuda.place() is streams.place(0, 7)
        with cuda.on():
            assert streams.current() is here
        with numkv.on_stream(8):  # in a function of the user's that numkv calls, say
            assert cuda.chooses_stream
            with cuda.on(default=here):
                assert streams.current() is streams.place(0, 8)
        assert streams.current() is here
    there = streams.place(0, 9)
    with cuda.on(default=there):
        assert streams.current() is there


def test_a_stream_lives_as_long_as_its_context():
    class Stream:
        def __cuda_stream__(self):
            return 0, 42

        def __del__(self):
            gone.append(True)

    gone = []
    context = numkv.on_stream(Stream())
    with context:
        assert streams.named() == 42
        assert not gone
    del context
    assert gone


@pytest.mark.parametrize(
    "stream", ["0", -1, 2**64, True, 1.5, object(), [0]], ids=lambda x: type(x).__name__
)
def test_what_is_no_stream(stream):
    with pytest.raises(numkv.NotSupported, match=r"^`stream`: expected a stream of numba\.cuda"):
        numkv.on_stream(stream)


def test_calls_on_the_cpu_take_no_notice():
    layer, rows = numkv.ContiguousLayer(8, 1, 8, kind="fp32"), np.ones((1, 1, 8), np.float32)
    with numkv.on_stream(7):
        layer.append(rows, rows)
        assert np.array_equal(layer.decode_attention(rows), rows)
        layer.compact([0])


def test_where_there_is_no_cuda_a_stream_is_refused_and_none_is_not():
    code = """
import numkv
from numkv.targets import cuda_loading
def missing():
    raise numkv.NotSupported('target "cuda" is not here')
cuda_loading.load_cuda = missing
with numkv.on_stream(None):
    pass
try:
    numkv.on_stream(3)
except numkv.NotSupported as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == 'target "cuda" is not here\n'
