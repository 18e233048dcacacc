"""Python threads that launch at once: pools that end with them, and nobody's result or error lost."""

import os

import processes
import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
LINUX = pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="/proc is Linux's")

COMMON = (
    processes.COMMON
    + """
x = problem(6000, 4, 64)

def tasks(most=0):
    # Threads of this process, once no more than `most` are left or a minute is over: those that end take a moment.
    end = time.monotonic() + (60 if most else 0.2)
    while (found := len(os.listdir("/proc/self/task"))) > most and time.monotonic() < end:
        time.sleep(0.01)
    return found

def all_at_once(number, call, most):
    # Call in so many Python threads; how many threads there are while these are still alive.
    ready, go = threading.Barrier(number + 1), threading.Event()

    def work():
        call()
        ready.wait()
        go.wait()

    threads = [threading.Thread(target=work) for _ in range(number)]
    for thread in threads:
        thread.start()
    ready.wait()
    found = tasks(most)
    go.set()
    for thread in threads:
        thread.join()
    return found

def decode_often():
    for _ in range(20):
        decode(x)
"""
)


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize("layer", processes.EACH_LAYER)
def test_pools_end_with_the_python_threads_that_have_them(layer):
    """With OpenMP each has one; other layers have one for all."""
    of_each, of_all = (3, 0) if layer == "omp" else (0, 4)
    found = processes.run(
        """
        before = tasks()
        most = before + 8 * (1 + OF_EACH) + OF_ALL
        found = []
        for _ in range(2):
            found.append(all_at_once(8, decode_often, most) - most)
            found.append(tasks(before + OF_ALL) - before - OF_ALL)
        print(json.dumps(found))
        """,
        common=COMMON + f"OF_EACH, OF_ALL = {of_each}, {of_all}\n",
        NUMBA_THREADING_LAYER=layer,
        NUMBA_NUM_THREADS="4",
    )
    assert max(found) <= 0


@pytest.mark.slow
@LINUX
def test_threads_that_are_not_of_python():
    """They launch, and leave no pool behind."""
    found = processes.run(
        """
        import ctypes
        process, expected, got = ctypes.CDLL(None), decode(x), []
        done = threading.Semaphore(0)

        @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        def work(_):
            got.extend(np.array_equal(decode(x), expected) for _ in range(5))
            done.release()

        before = tasks()
        for _ in range(4):
            thread = ctypes.c_ulong()
            process.pthread_create(ctypes.byref(thread), None, work, None)
            process.pthread_detach(thread)
        for _ in range(4):
            done.acquire()
        print(json.dumps([got, tasks(before) - before]))
        """,
        common=COMMON,
        NUMBA_THREADING_LAYER="omp",
        NUMBA_NUM_THREADS="4",
    )
    assert found == [[True] * 20, 0]


@pytest.mark.parametrize("layer", processes.EACH_LAYER)
def test_every_worker_runs_once_whoever_launches(layer):
    """Kernels of rows and of items, of several numbers of workers, from eight threads and a signal handler at once."""
    found = processes.run(
        """
        import numba
        from numba import types
        from numkv.kernels.cpu.threads import ON_THREADS, run
        from numkv.kernels.cpu.vectors.launch import next_item, on_threads
        I8 = types.Array(types.int64, 1, "C")

        @numba.njit([types.void(I8, I8, I8, *ON_THREADS)], nogil=True)
        def kernel(out, runs, taken, launch, worker, workers):
            if launch != 0:
                on_threads(launch, workers)
                return
            runs[worker] += 1
            for i in range(len(out) * worker // workers, len(out) * (worker + 1) // workers):
                out[i] += i * i
            while True:
                item = next_item(taken)
                if item >= len(taken) - 1:
                    break
                taken[1 + item] += 1

        wrong, calls = [], []

        def check(workers, size):
            out, runs, taken = (np.zeros(n, np.int64) for n in (size, workers, 201))
            run(kernel, workers, out, runs, taken)
            if not ((out == np.arange(size) ** 2).all() and (runs == 1).all() and (taken[1:] == 1).all()
                    and taken[0] == 200 + workers):
                wrong.append((workers, size))
            calls.append(workers)

        def work():
            for i in range(150):
                check(1 + i % 4, 10_000 * (i % 3) + i)

        check(4, 100)  # starts Numba's threads, which imports modules
        with signals(0.002, lambda: check(3, 100)):
            threads = [threading.Thread(target=work) for _ in range(8)]
            for thread in threads:
                thread.start()
            work()
            for thread in threads:
                thread.join()
        print(json.dumps([wrong, len(calls) >= 9 * 150]))
        """,
        NUMBA_THREADING_LAYER=layer,
        NUMBA_NUM_THREADS="4",
    )  # fmt: skip
    assert found == [[], True]


@pytest.mark.slow
def test_errors_of_signal_handlers_come_after_the_call():
    """A handler that raises while a call is shared: scratch memory that is in use is lent to nobody."""
    found = processes.run(
        """
        class Stop(BaseException):
            pass

        def handler(*_):
            raise Stop

        problems = [problem(40_000, 2, 64, seed=i) for i in range(2)]
        expected = [decode(p) for p in problems]
        signal.signal(signal.SIGALRM, handler)
        wrong = stopped = 0
        begun = time.monotonic()
        while (passed := time.monotonic() - begun) < 2 or (stopped <= 20 and passed < 300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.00007 * (stopped % 50))
                while True:
                    for p, result in zip(problems, expected):
                        wrong += not np.array_equal(decode(p), result)
            except Stop:
                stopped += 1
        print(json.dumps([wrong, stopped > 20]))
        """,
        common=COMMON,
        NUMBA_THREADING_LAYER="omp",
    )
    assert found == [0, True]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("layer", processes.EACH_LAYER)
def test_64_threads_at_once_and_forks_beside_them(layer):
    """The main thread forks and one of them; nobody's result is another's, and no child hangs."""
    found = processes.run(
        """
        import warnings
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        problems = [x, problem(5000, 4, 64, seed=1)]
        expected = [decode(p) for p in problems]
        ready, stop, statuses, wrong = threading.Barrier(65), threading.Event(), [], []

        def decode_both():
            return all(np.array_equal(decode(p), e) for p, e in zip(problems, expected))

        def fork_often():
            for _ in range(5):
                decode_both()
                pid = os.fork()
                if not pid:
                    signal.alarm(300)
                    os._exit(0 if decode_both() else 1)
                statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

        def work():
            ready.wait()
            while not stop.is_set():
                if not decode_both():
                    wrong.append(True)

        threads = [threading.Thread(target=work) for _ in range(63)]
        threads.append(threading.Thread(target=lambda: (ready.wait(), fork_often())))
        for thread in threads:
            thread.start()
        ready.wait()
        fork_often()
        threads[-1].join()
        stop.set()
        for thread in threads:
            thread.join()
        print(json.dumps([statuses, wrong]))
        """,
        common=COMMON,
        NUMBA_THREADING_LAYER=layer,
        NUMBA_NUM_THREADS="4",
    )
    assert found == [[0] * 10, []]


@pytest.mark.slow
@pytest.mark.parametrize("layer", processes.EACH_LAYER)
def test_a_process_ends_while_its_threads_are_in_calls(layer):
    found = processes.run(
        """
        decode(x)
        for _ in range(3):
            threading.Thread(target=lambda: [decode(x) for _ in iter(int, 1)], daemon=True).start()
        time.sleep(0.3)
        print(json.dumps("over"), flush=True)
        """,
        common=COMMON,
        NUMBA_THREADING_LAYER=layer,
    )
    assert found == "over"
