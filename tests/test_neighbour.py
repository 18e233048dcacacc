"""Numkv leaves its host process as it was: nested OpenMP regions, numbers of threads, the environment."""

import sys

import processes
import pytest

STATE = """
import ctypes, os
from numba.np.ufunc import omppool

def state():
    openmp = ctypes.CDLL(omppool.__file__)
    return {name: getattr(openmp, "omp_get_" + name)()
            for name in ("nested", "max_active_levels", "max_threads", "dynamic")}
"""

# Work enough for threads; returns the threading layer.
WORK = """
import numba
from numkv.kernels.cpu import threads
decode(problem(6000, 4, 64))
assert threads.num_threads() == numba.get_num_threads()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Numba's OpenMP layer is another one here")
@pytest.mark.parametrize("first", ["import numkv", "", "numba.get_num_threads"])
def test_openmp_is_as_it_was(first):
    """Before and after; a host that had started Numba's threads itself keeps what Numba did."""
    found = processes.run(
        "import numba, numba.np.ufunc.parallel\n"
        + ("numba.get_num_threads()\n" if first == "numba.get_num_threads" else "")
        + STATE
        + "before = state()\n"
        + WORK
        + "print(json.dumps([before, state(), numba.threading_layer()]))",
        common=processes.COMMON
        if first
        else processes.COMMON.replace("import numkv\n", STATE + "import numkv\n"),
        NUMBA_THREADING_LAYER="omp",
    )
    before, after, layer = found
    assert layer == "omp"
    assert after == before
    if first != "numba.get_num_threads":
        assert after["max_active_levels"] == 1
        assert after["nested"] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="Numba's OpenMP layer is another one here")
def test_settings_of_the_host_stay():
    found = processes.run(
        STATE
        + "openmp = ctypes.CDLL(omppool.__file__)\n"
        + "openmp.omp_set_max_active_levels(3)\nopenmp.omp_set_num_threads(1)\n"
        + "before = state()\n"
        + WORK
        + "print(json.dumps([before, state()]))",
        NUMBA_THREADING_LAYER="omp",
        OMP_NUM_THREADS="5",
    )
    assert found[0] == found[1]
    assert found[0]["max_active_levels"] == 3
    assert found[0]["max_threads"] == 1


@pytest.mark.parametrize("layer", processes.LAYERS)
def test_the_environment_and_settings_of_python_stay(layer):
    found = processes.run(
        """
        import signal, gc, locale, numpy, warnings
        def host():
            return [dict(os.environ), [str(signal.getsignal(s)) for s in signal.valid_signals()], numpy.geterr(),
                    str(warnings.filters), sys.getrecursionlimit(), sys.getswitchinterval(), gc.get_threshold()]
        before = host()
        """
        + processes.textwrap.indent(WORK, " " * 8)
        + """
        after = host()
        print(json.dumps([a for a, b in zip(after, before) if a != b]))
        """,
        NUMBA_THREADING_LAYER=layer,
    )
    assert found == []


def test_no_threads_are_started_by_an_import():
    found = processes.run(
        """
        small = decode(problem(16, 2, 32))
        from numba.np.ufunc import parallel
        print(json.dumps([parallel._is_initialized, threading.active_count()]))
        """
    )
    assert found == [False, 1]
