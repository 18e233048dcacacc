"""Calls that begin before another one has ended: from finalisers and signal handlers, and from other threads."""

import gc
import importlib
import threading
import time

import numpy as np
import processes
import pytest

import numkv
from numkv.kernels.scratch import Workspaces


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [200, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_finalisers_and_signal_handlers_attend_in_the_middle_of_a_call(rounds):
    """Calls, each with an unreachable object whose finaliser attends to something else, then signals."""
    found = processes.run(
        f"""
        outer, inner = problem(2200, 2, 64), problem(4200, 3, 32, seed=1)
        expected = decode(outer), decode(inner)
        wrong, nested = 0, 0

        def attend_inside():
            global wrong, nested
            nested += 1
            wrong += not np.array_equal(decode(inner), expected[1])

        class Session:
            def __init__(self):
                self.me = self
            def __del__(self):
                attend_inside()

        import gc
        for i in range({rounds}):
            gc.set_threshold(1 + i % 199)  # so that objects go at one place and another
            Session()
            wrong += not np.array_equal(decode(outer), expected[0])
        gc.collect()
        finalised, nested = nested, 0

        with signals(0.01, attend_inside):
            while nested < 50:
                wrong += not np.array_equal(decode(outer), expected[0])
        print(json.dumps([wrong, finalised]))
        """
    )
    assert found == [0, rounds]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [500, pytest.param(3000, marks=pytest.mark.nightly), 20_000])
def test_a_call_at_every_line_of_a_call(tokens):
    """What a signal handler can do: attend before any line of Python in the kernels' own modules."""
    found = processes.run(
        f"""
        outer, inner = problem({tokens}, 2, 32), problem(9000, 3, 64, seed=1)
        expected = decode(outer), decode(inner)
        wrong, lines = [], set()

        def at_line(frame, event, arg):
            if event == "line":
                lines.add((frame.f_code.co_name, frame.f_lineno))
                if not np.array_equal(decode(inner), expected[1]):
                    wrong.append([frame.f_code.co_name, frame.f_lineno])
            return at_line

        def at_call(frame, event, arg):
            return at_line if "numkv" in frame.f_code.co_filename else None

        sys.settrace(at_call)
        got = decode(outer)
        sys.settrace(None)
        print(json.dumps([wrong, bool(np.array_equal(got, expected[0])), len(lines)]))
        """
    )
    assert found[:2] == [[], True]
    assert found[2] > 30


@pytest.mark.slow
@pytest.mark.parametrize("layer", processes.EACH_LAYER)
def test_threads_and_signals_on_every_layer(layer):
    """Large calls, which start threads, from three Python threads and a signal handler at once."""
    found = processes.run(
        """
        problems = [problem(6000 + 500 * i, 4, 64, seed=i) for i in range(4)]
        expected = [decode(x) for x in problems]
        wrong = []

        def work(i, rounds):
            for _ in range(rounds):
                if not np.array_equal(decode(problems[i]), expected[i]):
                    wrong.append(i)

        with signals(0.05, lambda: work(3, 1)):
            threads = [threading.Thread(target=work, args=(i, 30)) for i in (1, 2)]
            for thread in threads:
                thread.start()
            work(0, 30)
            for thread in threads:
                thread.join()
        print(json.dumps(wrong))
        """,
        NUMBA_THREADING_LAYER=layer,
    )
    assert found == []


@pytest.mark.slow
def test_two_python_threads_are_inside_a_kernel_at_once(rng):
    """Short calls begin and end all the while that another thread is in one long call."""
    tokens, queries = 40_000, 600
    k, v = rng.standard_normal((2, 1, 1, tokens, 64), dtype=np.float32)
    q = rng.standard_normal((queries, 8, 64), dtype=np.float32)
    short = q[:1], k[:, :, :16], v[:, :, :16], [16]
    expected = numkv.decode_attention(*short)
    numkv.prefill_attention(q[:10], k, v, [tokens], [0, 10])

    def tenths_of_a_long_call():
        """Those of its middle eight tenths in which a short call ended."""
        span, ends = [], []

        def one_long_call():
            span.append(time.perf_counter())
            numkv.prefill_attention(q, k, v, [tokens], [0, queries])
            span.append(time.perf_counter())

        thread = threading.Thread(target=one_long_call)
        thread.start()
        while len(span) < 2:
            assert np.array_equal(numkv.decode_attention(*short), expected)
            ends.append(time.perf_counter())
        thread.join()
        begin, end = span
        return {int(10 * (t - begin) / (end - begin)) for t in ends if begin < t < end} & set(
            range(1, 9)
        )

    # A lock would let short calls through at the begin or the end of the long one only. A busy machine may stop this
    # thread for most of a long call, so any of them will do.
    assert any(len(tenths_of_a_long_call()) >= 3 for _ in range(20))


def test_scratch_memory_is_lent_to_one_call_at_a_time():
    workspaces = Workspaces(np.empty, most_kept=4096)
    first = workspaces.borrow()
    second = workspaces.borrow()
    assert first is not second
    assert first.nbytes == 0
    kept = first.take("float32", 100)
    assert first.nbytes == 400
    assert first.take("float32", 50) is kept
    assert first.take("int64", 50) is not kept
    assert not np.shares_memory(kept, second.take("float32", 100))
    workspaces.give_back(first)
    workspaces.give_back(second)
    assert workspaces.borrow() is second
    second.take("float32", 5000)
    workspaces.give_back(second)  # too large to keep
    assert workspaces.borrow() is first
    assert workspaces.borrow() not in (first, second)


@pytest.mark.slow
def test_scratch_memory_of_a_large_call_is_freed(rng):
    attention = importlib.import_module("numkv.kernels.cpu.attention")
    q, k, v = (
        rng.standard_normal(shape, dtype=np.float32)
        for shape in ((1, 8192, 64), *[(1, 1, 8, 64)] * 2)
    )
    numkv.decode_attention(q, k, v, [8])
    gc.collect()
    kept = sum(x.nbytes for x in attention._workspaces._free)
    assert kept <= attention._workspaces._most_kept * len(attention._workspaces._free)
