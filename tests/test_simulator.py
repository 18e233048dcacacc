"""The simulated threads of `simulator`: races are found and found again, errors and barriers are Numba's."""

import os

import numpy as np
import pytest

if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
    pytest.skip("kernels run on a GPU, not in the simulator", allow_module_level=True)

import simulator
from numba import cuda, float32, int64

N = 8


def launch(kernel, *arrays, blocks=1, threads=N, shared_bytes=0):
    """Run a kernel over arrays of the host, which it may write to."""
    cuda.jit(kernel)[blocks, threads, 0, shared_bytes](*arrays)
    return arrays[-1]


def reverse(barrier):
    """A kernel that turns an array round, with a barrier before it reads what other threads have written."""

    def kernel(x, out):
        kept = cuda.shared.array(N, float32)
        i = cuda.threadIdx.x
        kept[i] = x[i]
        if barrier:
            cuda.syncthreads()
        out[i] = kept[N - 1 - i]

    return kernel


def rotate(barrier):
    """A kernel that rotates an array N times, with a barrier before it overwrites what others have yet to read."""

    def kernel(x, out):
        kept = cuda.shared.array(N, float32)
        i = cuda.threadIdx.x
        out[i] = x[i]
        for _ in range(N):
            kept[i] = out[i]
            cuda.syncthreads()
            out[i] = kept[(i + 1) % N]
            if barrier:
                cuda.syncthreads()

    return kernel


X = np.arange(1, N + 1, dtype=np.float32)


@pytest.mark.parametrize(("kernel", "expected"), [(reverse, X[::-1]), (rotate, X)])
def test_a_missing_barrier_shows(kernel, expected):
    for number in range(20):
        simulator.seed(number)
        assert np.array_equal(launch(kernel(barrier=True), X, np.zeros_like(X)), expected)
        assert not np.array_equal(launch(kernel(barrier=False), X, np.zeros_like(X)), expected)


@pytest.mark.parametrize("kernel", [reverse, rotate])
def test_a_race_comes_again_with_its_seed(kernel):
    def results():
        for number in range(20):
            simulator.seed(number)
            yield launch(kernel(barrier=False), X, np.zeros_like(X)).tobytes()

    first = list(results())
    assert list(results()) == first
    assert len(set(first)) > 1


def test_what_nobody_has_written_is_poison():
    def kernel(floats, ints):
        i = cuda.threadIdx.x
        for a, array in enumerate((cuda.local.array(2, float32), cuda.shared.array(2, np.float64))):
            floats[i, a] = array[1]
        for a, array in enumerate((cuda.local.array((1, 2), np.int8), cuda.shared.array(2, int64))):
            ints[i, a] = array[..., 1].item()

    floats, ints = np.zeros((N, 2)), np.zeros((N, 2), np.int64)
    launch(kernel, floats, ints)
    assert np.isnan(floats).all()
    assert (ints == [127, 2**63 - 1]).all()


def test_shared_arrays_belong_to_a_block_and_local_ones_to_a_thread():
    def kernel(out):
        a, b = cuda.shared.array(N, int64), cuda.shared.array(N, int64)
        own = cuda.local.array(1, int64)
        i = cuda.threadIdx.x
        out[1, cuda.blockIdx.x, i] = a[i]
        a[i], b[i], own[0] = i, 10 * i, 100 * i
        cuda.syncthreads()
        j = (i + 1) % N
        out[0, cuda.blockIdx.x, i] = a[j] + b[j] + own[0]

    i = np.arange(N)
    found, unwritten = launch(kernel, np.zeros((2, 3, N), np.int64), blocks=3)
    assert (found == 11 * ((i + 1) % N) + 100 * i).all()
    assert (unwritten == 2**63 - 1).all()


def test_dynamic_shared_memory():
    def kernel(out):
        kept = cuda.shared.array(0, np.dtype(np.float32))
        i = cuda.threadIdx.x
        out[cuda.blockIdx.x, 0, i] = kept[i]
        kept[i] = i
        cuda.syncthreads()
        out[cuda.blockIdx.x, 1, i] = kept[N - 1 - i] + len(kept)

    for unwritten, found in launch(kernel, np.zeros((2, 2, N)), blocks=2, shared_bytes=4 * N):
        assert np.isnan(unwritten).all()
        assert found.tolist() == [N + N - 1 - i for i in range(N)]


def test_places_in_the_grid():
    def kernel(out):
        t, b = cuda.threadIdx, cuda.blockIdx
        x, y, z = cuda.grid(3)
        out[x, y, z] = 100 * b.x + 10 * b.y + cuda.laneid
        assert (x, y, z) == (2 * b.x + t.x, 3 * b.y + t.y, t.z)

    found = launch(kernel, np.full((4, 6, 2), -1), blocks=(2, 2), threads=(2, 3, 2))
    for (x, y, z), value in np.ndenumerate(found):
        assert value == 100 * (x // 2) + 10 * (y // 3) + x % 2 + 2 * (y % 3) + 6 * z


def test_threads_that_have_ended_are_not_waited_for():
    def kernel(out):
        kept = cuda.shared.array(1, int64)
        i = cuda.threadIdx.x
        if i == 0:
            kept[0] = 5
            return
        cuda.syncthreads()
        out[i] = kept[0]

    assert launch(kernel, np.zeros(4, np.int64), threads=4).tolist() == [0, 5, 5, 5]


def test_votes():
    def kernel(out):
        i = cuda.threadIdx.x
        out[i, 0] = cuda.syncthreads_count(i % 2)
        out[i, 1] = cuda.syncthreads_and(i < N)
        out[i, 2] = cuda.syncthreads_and(i != 3)
        out[i, 3] = cuda.syncthreads_or(i == 3)
        out[i, 4] = cuda.syncthreads_or(i == N)

    assert (launch(kernel, np.zeros((N, 5), np.int64)) == [N // 2, 1, 0, 1, 0]).all()


def test_an_error_says_whose_it_is_and_ends_the_launch():
    reached, left = [], []

    def kernel(out):
        i = cuda.threadIdx.x
        try:
            cuda.syncthreads()
            if i == 2:
                out[N + 1] = i
            cuda.syncthreads()
            reached.append(i)
        finally:
            left.append(i)

    with pytest.raises(IndexError, match=r"tid=\[2, 0, 0\] ctaid=\[0, 0, 0\]: index 9 .*size 8"):
        launch(kernel, np.zeros(N), blocks=2)
    assert reached == []
    assert sorted(left) == list(range(N))
    assert np.array_equal(launch(reverse(barrier=True), X, np.zeros_like(X)), X[::-1])


def test_an_error_without_words_says_whose_it_is():
    def kernel(out):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError, match=r"^tid=\[0, 0, 0\] ctaid=\[0, 0, 0\]$"):
        launch(kernel, np.zeros(1), threads=1)


def test_arrays_have_attributes_and_fields():
    records = np.zeros(2, [("shape", np.int64), ("level", np.float32)])

    def kernel(x, records, out):
        assert (x.shape, x.ndim, x.size, x.dtype) == ((2, 4), 2, 8, np.float32)
        row = x[1]
        assert row.shape == (4,)
        row[3] = 5
        records.level[1] = 7
        records[0].level = x[1, 3]
        assert records.shape == (2,)
        out[0] = row[1:].sum()

    x = np.zeros((2, 4), np.float32)
    assert launch(kernel, x, records, np.zeros(1), threads=1)[0] == 5
    assert x[1, 3] == 5
    assert records["level"].tolist() == [5, 7]
