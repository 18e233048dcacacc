"""Numkv leaves its host process as it was: nested OpenMP regions, numbers of threads, the environment."""

import shutil
import sys

import processes
import pytest

pytestmark = pytest.mark.slow  # many processes

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
        NUMBA_NUM_THREADS="2",
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
        NUMBA_NUM_THREADS="2",
        OMP_NUM_THREADS="5",
    )
    assert found[0] == found[1]
    assert found[0]["max_active_levels"] == 3
    assert found[0]["max_threads"] == 1


@pytest.mark.skipif(sys.platform != "linux", reason="Numba's OpenMP layer is another one here")
def test_another_openmp_that_all_can_see_is_as_it_was(tmp_path):
    """PyTorch brings its own and shows it to all modules: Numba's layer then starts that one."""
    system = processes.run(
        """
        from numba.np.ufunc import omppool
        from pathlib import Path
        lines = Path("/proc/self/maps").read_text().splitlines()
        print(json.dumps(next(x.split()[-1] for x in lines if "libgomp" in x)))
        """
    )
    other = shutil.copy(system, tmp_path / "libgomp-of-another.so.1")
    found = processes.run(
        f"""
        import ctypes
        other = ctypes.CDLL({str(other)!r}, ctypes.RTLD_GLOBAL)
        other.omp_set_max_active_levels(2)
        other.omp_set_num_threads(3)
        def state():
            return [other.omp_get_nested(), other.omp_get_max_active_levels(), other.omp_get_max_threads()]
        before = state()
        import numkv
        decode(problem(6000, 4, 64))
        import numba
        print(json.dumps([before, state(), numba.threading_layer()]))
        """,
        common=processes.COMMON.replace("import numkv\n", ""),
        NUMBA_THREADING_LAYER="omp",
        NUMBA_NUM_THREADS="2",
    )
    assert found[0] == found[1]
    assert found[1][1:] == [2, 3]
    assert found[2] == "omp"


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
        NUMBA_NUM_THREADS="2",
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
