"""How many threads a Python thread's calls may use: who chooses, for whom it holds, and what follows from it."""

import asyncio
import inspect
import os
import threading

import numba
import numpy as np
import processes
import pytest
from several_threads import in_threads

import numkv
from numkv.kernels.cpu import threads

MOST = numba.config.NUMBA_NUM_THREADS
NUMBERS = [1, MOST]


@pytest.fixture(autouse=True)
def no_choice():
    """Begin and end without a choice."""
    assert len(threads.choices()) == 1
    numkv.set_num_threads(None)
    yield
    numkv.set_num_threads(None)
    assert len(threads.choices()) == 1


def test_numba_decides_by_default():
    before = numba.get_num_threads()
    assert numkv.get_num_threads() == before
    numba.set_num_threads(1)
    try:
        assert numkv.get_num_threads() == 1
        numkv.set_num_threads(MOST)
        assert numkv.get_num_threads() == MOST
        numkv.set_num_threads(None)
        assert numkv.get_num_threads() == 1
    finally:
        numba.set_num_threads(before)


@pytest.mark.parametrize("set_it", [numkv.set_num_threads, numkv.num_threads])
@pytest.mark.parametrize(
    ("n", "error"),
    [
        (0, numkv.DimensionMismatch), (-1, numkv.DimensionMismatch), (2**70, numkv.DimensionMismatch),
        (MOST + 1, numkv.DimensionMismatch), (1.0, TypeError), (True, TypeError), ("1", TypeError),
    ],
)  # fmt: skip
def test_other_numbers_are_refused_when_they_are_said(set_it, n, error):
    with pytest.raises(error, match=r"^`n`: expected an integer"):
        set_it(n)
    assert numkv.get_num_threads() == numba.get_num_threads()


def test_integers_of_numpy_will_do():
    numkv.set_num_threads(np.int8(1))
    assert numkv.get_num_threads() == 1
    with numkv.num_threads(np.array(MOST)):
        assert numkv.get_num_threads() == MOST


def test_a_block_ends_with_what_was_before_it():
    numkv.set_num_threads(MOST)
    with numkv.num_threads(1):
        assert numkv.get_num_threads() == 1
        with numkv.num_threads(None):
            assert numkv.get_num_threads() == numba.get_num_threads()
            numkv.set_num_threads(MOST)  # until this block ends
            assert numkv.get_num_threads() == MOST
        assert numkv.get_num_threads() == 1
    assert numkv.get_num_threads() == MOST
    with pytest.raises(KeyError), numkv.num_threads(1):
        raise KeyError
    assert numkv.get_num_threads() == MOST


def test_a_block_decorates_functions():
    @numkv.num_threads(1)
    def inside(again):
        return [numkv.get_num_threads()] + (inside(False) if again else [])

    assert inside(True) == inside(True) == [1, 1]
    assert numkv.get_num_threads() == numba.get_num_threads()


def test_blocks_end_in_any_order():
    def generator(n):
        with numkv.num_threads(n):
            yield

    numkv.set_num_threads(MOST)
    first, second = generator(1), generator(MOST)
    next(first), next(second)
    first.close()
    assert numkv.get_num_threads() == MOST
    third = generator(1)
    next(third)
    second.close()
    assert numkv.get_num_threads() == 1
    third.close()
    assert numkv.get_num_threads() == MOST


def test_a_block_belongs_to_the_thread_that_enters_it():
    """A generator begun in one thread, ended in another: neither of them keeps anything of it."""

    def generator():
        with numkv.num_threads(1):
            yield

    running, found = generator(), []
    next(running)
    numkv_says = [numkv.get_num_threads()]

    def end_it():
        found.append(numkv.get_num_threads())
        numkv.set_num_threads(1)
        running.close()
        found.append(numkv.get_num_threads())

    in_threads(end_it)
    assert numkv_says == [1]
    assert found == [MOST, 1]
    assert numkv.get_num_threads() == numba.get_num_threads()


def test_tasks_of_a_thread_share_its_choice():
    """As it is documented: a task that waits inside of a block leaves its choice to the others."""
    seen = []

    async def choose():
        with numkv.num_threads(1):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        seen.append(numkv.get_num_threads())

    async def look():
        await asyncio.sleep(0)
        seen.append(numkv.get_num_threads())

    async def both():
        await asyncio.gather(choose(), look())

    asyncio.run(both())
    assert seen == [1, numba.get_num_threads()]


def test_threads_start_without_a_choice_and_keep_their_own():
    numkv.set_num_threads(1)
    ready, found = threading.Barrier(len(NUMBERS)), {}

    def choose(n):
        assert numkv.get_num_threads() == MOST
        numkv.set_num_threads(n)
        ready.wait()
        found[n] = numkv.get_num_threads()

    in_threads(*[lambda n=n: choose(n) for n in NUMBERS])
    assert found == {n: n for n in NUMBERS}
    assert numkv.get_num_threads() == 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("layer", processes.LAYERS)
def test_children_go_on_with_the_choice(layer):
    """With GNU OpenMP on one thread, once there were threads: those are not to be had."""
    found = processes.run(
        """
        import warnings
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

        def in_child():
            pid = os.fork()
            if not pid:
                ours = numkv.get_num_threads()
                numkv.set_num_threads(None)
                os._exit(10 * ours + numkv.get_num_threads())
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

        numkv.set_num_threads(2)
        found = [in_child()]
        decode(problem(6000, 4, 64))
        print(json.dumps([*found, in_child()]))
        """,
        NUMBA_THREADING_LAYER=layer,
        NUMBA_NUM_THREADS="3",
    )
    assert found == [23, 11 if layer == "omp" else 23]


def test_every_operation_of_the_cpu_asks(monkeypatch):
    """Whatever launches threads is told by this module how many: nothing else in the kernels asks Numba."""
    asked = [
        path
        for path in processes.ROOT.glob("numkv/**/*.py")
        if "numba.get_num_threads(" in path.read_text().replace("``numba.get_num_threads()``", "")
    ]
    assert [path.name for path in asked] == ["threads.py"]
    assert inspect.getsource(threads).count("numba.get_num_threads()") == 1  # where they start
    assert inspect.getsource(threads).count("_state.count()") == 1


def test_large_calls_obey(rng, monkeypatch):
    given = []
    in_turn = threads.in_turn
    module = __import__("numkv.kernels.cpu.attention", fromlist=["attend"])

    def noted(call, *args):
        given.append(args[-2])
        return in_turn(call, *args)

    q, (k, v) = (
        rng.standard_normal((1, 256, 64), np.float32),  # so many that there is much to merge
        rng.standard_normal((2, 1, 4, 5000, 64), np.float32),
    )
    numkv.decode_attention(q, k, v, [5000])  # a launch that lacks a kernel is repeated
    monkeypatch.setattr(module, "in_turn", noted)
    results = []
    for n in NUMBERS:
        with numkv.num_threads(n):
            results.append(numkv.decode_attention(q, k, v, [5000]))
    assert given == list(NUMBERS)
    assert np.array_equal(results[0], results[-1])
