"""Interrupts at every place where they can come: an object is what it was before a call, or what it is after it.

A trace function sends a real signal, whose handler raises, before a line of Python in numkv. The subjects are those of
`fault_subjects.py`: every class that holds tokens, and each of its methods.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import processes
import pytest
from fault_subjects import SUBJECTS
from interrupts import Interrupt, raising_signals, walk
from numba import types
from numba.core.registry import CPUDispatcher

import numkv
from numkv.interrupts import opened, signals_deferred
from numkv.kernels import builder

#: Functions over a caller's arrays, which own nothing that could be left half done, and files, which are replaced.
STATEFUL = [name for name, subject in SUBJECTS.items() if subject.of is not None]
BY_DAY = 2


@pytest.fixture
def raising():
    with raising_signals() as handler:
        yield handler


def walk_subject(name, call, samples=None):
    subject = SUBJECTS[name]
    prepare, do = subject.split(call)

    def make():
        made = subject.make()
        prepare(made)
        return made

    walk(make, do, subject.see, samples=samples, name=f"{name}: {call}")


@pytest.mark.parametrize("name", STATEFUL)
def test_a_signal_at_a_line(name, raising):
    for call in SUBJECTS[name].calls:
        walk_subject(name, call, BY_DAY)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "call"), [(name, call) for name in STATEFUL for call in SUBJECTS[name].calls]
)
def test_a_signal_at_every_line(name, call, raising):
    walk_subject(name, call)


LOOP = """
    import random
    count, broken, random_ = 0, [], random.Random({seed})
    rows = np.ones((64, 1, 8), np.float32)
    cache = numkv.PagedKVCache(2, 1, 8, num_blocks=48, block_size=4, kind="fp32")
    single = numkv.KVCache(3, 1, 8, kind="fp32")

    def once():
        known = cache.sequences
        a = cache.add(range(random_.randrange(12)))
        n = random_.randrange(1, 9)
        step = cache.reserve([a], [n])
        for layer in range(2):
            step.append(layer, rows[:n], rows[:n])
        cache.commit(step, [random_.randrange(n + 1)])
        b = cache.fork(a)
        step = cache.reserve([a, b], [1, 2])
        cache.rollback(step) if n % 2 else [step.append(i, rows[:3], rows[:3]) for i in range(2)]
        if step.open:
            cache.commit(step)
        cache.truncate(a, cache.length(a) // 2)
        cache.compact(b, range(0, cache.length(b), 2)) if n == 3 else None
        cache.remove(a)
        cache.remove(b)
        for layer in range(3):
            single.append(layer, rows[:n], rows[:n])
        single.advance(n)
        single.compact(range(0, len(single), 2))
        single.truncate(len(single) // 2)
        single.clear()

    def handler(number, frame):
        global count
        count += 1
        raise KeyboardInterrupt

    for _ in range(10):
        once()
    signal.signal(signal.SIGALRM, handler)
    while count < {signals} and not broken:
        try:
            signal.setitimer(signal.ITIMER_REAL, random_.uniform(1e-5, 4e-3))
            while True:
                once()
        except KeyboardInterrupt:
            pass
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            for step in cache.open_steps:
                cache.rollback(step)
            for seq in cache.sequences:
                cache.remove(seq)
            cache.check()
            assert cache.num_free == 48, cache.num_free
            lengths = [len(single.k(layer)) for layer in range(3)]
            single.check()
            assert min(lengths) >= len(single), lengths
            single.clear()
        except Exception as error:
            broken.append(f"{{type(error).__name__}}: {{error}}")
    print(json.dumps([count, broken]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("signals", [200, pytest.param(5000, marks=pytest.mark.nightly)])
def test_real_signals_leave_nothing_broken(signals):
    count, broken = processes.run(LOOP.format(signals=signals, seed=signals))
    assert broken == []
    assert count >= signals


# ---------------------------------------------------------------- the section itself


def test_a_signal_waits_for_the_end_of_the_outermost_section(raising):
    done = []
    with pytest.raises(Interrupt), signals_deferred:
        with signals_deferred:
            signal.raise_signal(signal.SIGUSR1)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


def test_every_handler_runs_once_in_order_and_none_is_lost(raising):
    seen = []
    numbers = [signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP]

    def handler(number, frame):
        seen.append((number, frame.f_code.co_name))
        if number == signal.SIGUSR2:
            raise KeyError(number)

    before = [signal.signal(number, handler) for number in numbers]
    try:
        with pytest.raises(KeyError), signals_deferred:
            for number in (*numbers, signal.SIGUSR2):
                signal.raise_signal(number)
            assert seen == []
            assert signal.getsignal(signal.SIGTERM) is not handler
        name = "test_every_handler_runs_once_in_order_and_none_is_lost"
        assert seen == [(number, name) for number in numbers]
        assert [signal.getsignal(number) for number in numbers] == [handler] * 3
    finally:
        for number, each in zip(numbers, before, strict=True):
            signal.signal(number, each)


def test_an_error_inside_is_the_context_of_what_a_handler_raises(raising):
    with pytest.raises(Interrupt) as found, signals_deferred:
        signal.raise_signal(signal.SIGUSR1)
        raise KeyError("inside")
    assert isinstance(found.value.__context__, KeyError)


def test_a_section_that_is_opened_again(raising):
    done = []
    with pytest.raises(Interrupt), signals_deferred:
        signal.raise_signal(signal.SIGUSR1)
        done.append("held")
        with opened():
            done.append("opened")
    assert done == ["held"]
    with pytest.raises(Interrupt), signals_deferred, opened():
        with signals_deferred:
            signal.raise_signal(signal.SIGUSR1)
            done.append("held again")
        done.append("opened")
    assert done == ["held", "held again"]
    with signals_deferred, opened():
        pass
    with opened():
        pass
    with pytest.raises(Interrupt), signals_deferred:
        signal.raise_signal(signal.SIGUSR1)
        try:
            with opened():
                pass
        except Interrupt:  # what undoes a change is in the section again
            signal.raise_signal(signal.SIGUSR1)
            done.append("undone")
    assert done[-1] == "undone"


def test_a_handler_that_the_section_itself_sets_stays(raising):
    def other(number, frame):
        pass

    with signals_deferred:
        signal.signal(signal.SIGUSR1, other)
    assert signal.getsignal(signal.SIGUSR1) is other
    signal.signal(signal.SIGUSR1, raising)


def test_other_threads_hold_nothing_back(raising):
    inside, done = threading.Event(), threading.Event()

    def work():
        with signals_deferred:
            inside.set()
            done.wait(20)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(20)
    try:
        with pytest.raises(Interrupt):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        done.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_of_another_thread_is_not_in_the_section_of_the_main_one():
    code = """
import os, signal, threading
from numkv.interrupts import signals_deferred
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
def fork():
    child = os.fork()
    if not child:
        signal.raise_signal(signal.SIGUSR1)
        os._exit(0 if seen == [1] and held.depth == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    result.append("sound")
result = []
with signals_deferred:
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
print(result)
"""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout == "['sound']\n"


def plus_one(x):
    return x + 1


def test_a_kernel_is_compiled_before_a_handler_runs(raising, monkeypatch):
    """Numba loads its registries meanwhile; interrupted there, it compiles nothing for the rest of the process."""
    compiled, real = [], CPUDispatcher.compile

    def compile_with_a_signal(self, signature):
        signal.raise_signal(signal.SIGUSR1)
        made = real(self, signature)
        compiled.append(signature)
        return made

    monkeypatch.setattr(CPUDispatcher, "compile", compile_with_a_signal)
    with pytest.raises(Interrupt):
        builder.build(plus_one, (types.int64,), label="plus one")
    assert compiled == [(types.int64,)]
    with contextlib.suppress(Interrupt):
        builder.build(plus_one, (types.int64,), label="plus one")
    assert signals_deferred.depth == 0


def test_steps_that_nobody_holds_can_be_rolled_back():
    cache = numkv.PagedKVCache(1, 1, 8, num_blocks=8, block_size=4, kind="fp32")
    a, b = cache.add(), cache.add()
    first, second = cache.reserve([a], [3]), cache.reserve([b], [1])
    assert cache.open_steps == (first, second)
    rows = np.ones((3, 1, 8), np.float32)
    first.append(0, rows, rows)
    cache.commit(first)
    assert cache.open_steps == (second,)
    for step in cache.open_steps:
        cache.rollback(step)
    assert cache.open_steps == ()
    cache.remove(b)
    cache.check()
