"""Kernels that run on several threads: every worker once, whoever asks, with the same result."""

import threading

import numba
import numpy as np
import pytest
from numba import types

from numkv.kernels.cpu.threads import ON_THREADS, run, workers_for
from numkv.kernels.cpu.vectors.launch import next_item, on_threads

WORKERS = [1, numba.get_num_threads()]
I8 = types.Array(types.int64, 1, "C")


@numba.njit([types.void(I8, I8, I8, types.int64, *ON_THREADS)], nogil=True)
def shared(out, runs, taken, add, launch, worker, workers):
    """Each worker writes its own part of `out`, and takes items from a counter, the first of `taken`."""
    if launch != 0:
        on_threads(launch, workers)
        return
    runs[worker] += 1
    for i in range(len(out) * worker // workers, len(out) * (worker + 1) // workers):
        out[i] += i * i + add
    while True:
        item = next_item(taken)
        if item >= len(taken) - 1:
            break
        taken[1 + item] += 1


@numba.njit(parallel=True)
def with_prange(x):
    total = 0
    for i in numba.prange(len(x)):
        total += x[i]
    return total


def check(workers, size, add=3):
    """Run it; every element, worker and item has its turn once."""
    out, runs, taken = (
        np.zeros(size, np.int64),
        np.zeros(workers, np.int64),
        np.zeros(201, np.int64),
    )
    run(shared, workers, out, runs, taken, add)
    assert (out == np.arange(size) ** 2 + add).all()
    assert (runs == 1).all()
    assert (taken[1:] == 1).all()
    # Each worker asks once more than it gets.
    assert taken[0] == 200 + workers


@pytest.mark.parametrize("workers", WORKERS)
def test_every_worker_runs_once(workers):
    for size in (0, 1, 7, 1000):
        check(workers, size)


def test_from_two_python_threads_at_once():
    errors = []
    ready = threading.Barrier(2)

    def work(add):
        try:
            ready.wait()
            for i in range(200):
                check(WORKERS[-1], 300 + i, add)
        except BaseException as error:
            errors.append(error)

    both = [threading.Thread(target=work, args=(add,)) for add in (5, 11)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert errors == []


def test_before_and_after_numba_runs_loops_of_its_own():
    x = np.arange(10000)
    for _ in range(3):
        check(WORKERS[-1], 100)
        assert with_prange(x) == x.sum()
    check(WORKERS[-1], 100)


def test_an_error_leaves_the_threads_usable():
    with pytest.raises(TypeError):
        run(shared, WORKERS[-1], "no array", np.zeros(1), np.zeros(1), 0)
    check(WORKERS[-1], 100)


def test_few_elements_are_for_one_thread():
    assert workers_for(1000) == 1
    assert workers_for(10**7) == numba.get_num_threads()
