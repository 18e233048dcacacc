"""Python threads that launch at once: two pools of threads for all of them, and nobody's result, error or time lost."""

import os

import processes
import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the helper is a POSIX thread")
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


@LINUX
@pytest.mark.parametrize("layer", processes.EACH_LAYER)
def test_eight_python_threads_start_two_pools_at_most(layer):
    pool, helpers = (5, 5) if layer == "omp" else (6, 0)
    found = processes.run(
        """
        before = tasks()
        decode(x)
        one = tasks()
        found = [all_at_once(8, decode_often, before + 8 + MOST) - before - 8 for _ in range(2)]
        print(json.dumps([one - before, *found]))
        """,
        common=COMMON + f"MOST = {pool + helpers}\n",
        NUMBA_THREADING_LAYER=layer,
        NUMBA_NUM_THREADS="6",
    )
    one, eight, later = found
    assert one <= pool  # five beside the caller with OpenMP
    assert eight <= pool + helpers  # the helper and four beside it
    assert later <= pool + helpers


@LINUX
def test_a_pool_of_its_own_goes_to_the_next_thread_when_its_owner_ends():
    found = processes.run(
        """
        from numkv.kernels.cpu import threads
        owners = []

        def work():
            decode(x)
            owners.append(threads._state.owner == threading.get_ident())

        before = tasks()
        for _ in range(3):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        work()
        print(json.dumps([owners, threads._state.share, tasks(before + 3) - before]))
        """,
        common=COMMON,
        NUMBA_THREADING_LAYER="omp",
        NUMBA_NUM_THREADS="4",
    )
    assert found == [[True] * 4, 0, 3]  # one after the other: no helper, and one pool at the end


@LINUX
def test_threads_that_are_not_of_python_own_no_pool():
    """They would seem to end with each call of Python's, and leave one pool after another."""
    found = processes.run(
        """
        import ctypes
        process = ctypes.CDLL(None)
        ready, go = threading.Barrier(5), threading.Event()

        @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        def work(_):
            for _ in range(5):
                decode(x)
            ready.wait()
            go.wait()

        before = tasks()
        for _ in range(4):
            thread = ctypes.c_ulong()
            process.pthread_create(ctypes.byref(thread), None, work, None)
            process.pthread_detach(thread)
        ready.wait()
        found = tasks(before + 4 + 3) - before - 4
        go.set()
        tasks(before + 3)  # they are gone before Python is
        print(json.dumps(found))
        """,
        common=COMMON,
        NUMBA_THREADING_LAYER="omp",
        NUMBA_NUM_THREADS="4",
    )
    assert found <= 3  # the helper and its pool of three workers


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
        def handler(*_):
            check(3, 100)
            signal.setitimer(signal.ITIMER_REAL, 0.002)  # or handlers would pile up where it takes longer than this

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps([wrong, len(calls) >= 9 * 150]))
        """,
        NUMBA_THREADING_LAYER=layer,
        NUMBA_NUM_THREADS="4",
    )  # fmt: skip
    assert found == [[], True]


def test_errors_of_signal_handlers_come_after_the_call():
    """A handler that raises while a call is shared: scratch memory that is in use is lent to nobody."""
    found = processes.run(
        """
        from numkv.kernels.cpu import threads
        owner = threading.Thread(target=lambda: (decode(x), stop.wait()), daemon=True)
        stop = threading.Event()
        owner.start()
        while not threads._state.owner:
            time.sleep(0.001)

        class Stop(BaseException):
            pass

        def handler(*_):
            raise Stop

        problems = [problem(40_000, 2, 64, seed=i) for i in range(2)]
        expected = [decode(p) for p in problems]
        assert threads._state.share
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
        stop.set()
        owner.join()
        print(json.dumps([wrong, stopped > 20]))
        """,
        common=COMMON,
        NUMBA_THREADING_LAYER="omp",
    )
    assert found == [0, True]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("layer", processes.EACH_LAYER)
def test_children_of_busy_threads(layer):
    """Forks from the owner of a pool and from another thread, while the helper has something to do."""
    found = processes.run(
        """
        import warnings
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        expected, stop, found = decode(x), threading.Event(), []

        def child():
            pid = os.fork()
            if not pid:
                signal.alarm(300)
                os._exit(0 if np.array_equal(decode(x), expected) else 1)
            found.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

        def keep_busy():
            while not stop.is_set():
                decode(x)

        def fork_often():
            for _ in range(5):
                decode(x)
                child()

        threads = [threading.Thread(target=keep_busy) for _ in range(2)]
        for thread in threads:
            thread.start()
        fork_often()
        other = threading.Thread(target=fork_often)
        other.start()
        other.join()
        stop.set()
        for thread in threads:
            thread.join()
        print(json.dumps(found))
        """,
        common=COMMON,
        NUMBA_THREADING_LAYER=layer,
    )
    assert found == [0] * 10


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
