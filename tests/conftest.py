"""What every test shares: the simulator switch, targets, seeded random numbers.

The same tests run on the compiled CPU kernels and on the CUDA kernels, in one process. Without a
GPU the latter run in Numba's simulator, which has to be chosen before Numba is imported; an
environment variable that is already set is left alone (``NUMBA_ENABLE_CUDASIM=0`` asks for a GPU,
or for the compile tests, which need none).
"""

import ctypes
import importlib.util
import os
import platform
import subprocess
import sys
import zlib
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def has_gpu() -> bool:
    """Is there a driver with a device, and the package that compiles for it?"""
    if importlib.util.find_spec("numba_cuda") is None:
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        and count.value > 0
    )


if "NUMBA_ENABLE_CUDASIM" not in os.environ and not has_gpu():
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

sys.path.insert(0, str(TESTS))

import numpy as np  # noqa: E402  (after the switch)
import pytest  # noqa: E402

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
if SIMULATED:
    import simulator

    simulator.install()


def pytest_addoption(parser) -> None:
    """Have a run that takes longer and looks further."""
    parser.addoption(
        "--nightly", action="store_true",
        help="run the tests marked so too, and have hypothesis draw many examples, others in each run",
    )  # fmt: skip


def pytest_configure(config) -> None:
    """Choose how hard hypothesis tries, before tests are imported."""
    import profiles

    profiles.settings.load_profile("nightly" if config.getoption("nightly") else "everyday")


def pytest_collection_modifyitems(config, items) -> None:
    """Leave out what only nightly runs compile."""
    if not config.getoption("nightly"):
        config.hook.pytest_deselected(items=[item for item in items if is_nightly(item)])
        items[:] = [item for item in items if not is_nightly(item)]


def is_nightly(item) -> bool:
    """Whether a test is for nightly runs only: it is marked so, and not for the simulator, which compiles nothing."""
    target = item.callspec.params.get("target") if hasattr(item, "callspec") else None
    return item.get_closest_marker("nightly") is not None and (target != "cuda" or not SIMULATED)


@pytest.fixture(scope="session", autouse=True)
def on_other_cpus(request, tmp_path_factory):
    """Processes that check attention on other CPUs: started before the first test, if any test asks for them."""
    import other_cpus

    processes = {}
    wanted = any(item.path.name == "test_simd_widths.py" for item in request.session.items)
    if wanted and platform.machine() == "x86_64":
        processes = {
            cpu: other_cpus.start(cpu, tmp_path_factory.mktemp(cpu)) for cpu in other_cpus.LANES
        }
    yield processes
    for process in processes.values():
        process.kill()
        process.communicate()


# Tests from which on another process helps to compile.
MANY = 1000


@pytest.fixture(scope="session", autouse=True)
def compiled_ahead(request):
    """Where many tests run, a process that compiles kernels for them, on another core if there is one.

    Those of quantised caches first, as the tests come to them last.
    """
    if len(request.session.items) < MANY or (os.cpu_count() or 1) < 2:
        yield
        return
    kinds = ["int4", "int8", "bf16", "fp16", "int8/int4", "fp64"]
    command = [sys.executable, "-m", "numkv", "warmup", "--rotate", "--residual", "--kind", *kinds]
    process = subprocess.Popen(
        command, cwd=TESTS.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    yield
    process.kill()
    process.wait()


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def target(request) -> str:
    """The name of the target a test runs on."""
    return request.param


@pytest.fixture(scope="session")
def to(target):
    """Put a NumPy array on the target."""
    from numkv import targets

    return targets.get(target).asarray


@pytest.fixture(scope="session")
def host(target):
    """Bring an array of the target back as NumPy, with the dtype a user sees."""
    from numkv import targets

    return targets.get(target).to_host


@pytest.fixture(autouse=True)
def order_of_threads(request) -> None:
    """The order in which simulated threads take turns: another in each test, the same in every run of it."""
    if SIMULATED:
        simulator.seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Random numbers that are the same in every run of a test."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
