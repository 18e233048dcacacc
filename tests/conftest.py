"""What every test shares: the simulator switch, targets, seeded random numbers.

The same tests run on the compiled CPU kernels and on the CUDA kernels, in one process. Without a
GPU the latter run in Numba's simulator, which has to be chosen before Numba is imported; an
environment variable that is already set is left alone (``NUMBA_ENABLE_CUDASIM=0`` asks for a GPU,
or for the compile tests, which need none).
"""

import ctypes
import gc
import importlib.util
import os
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def has_gpu() -> bool:
    """Return whether there is a driver with a device, and the package that compiles for it."""
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

# Products of NumPy and PyTorch on one thread: matrices of tests are small, and the threads of processes that share two
# cores wait for each other. Numba's threads do not go by these.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Programs that tests run do not report compilations: their times depend on the machine's load.
os.environ.setdefault("NUMKV_PROGRESS", "0")

sys.path.insert(0, str(TESTS))

import numpy as np  # noqa: E402  (after the switch)
import pytest  # noqa: E402

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
PLAIN = "plain_simulator" in sys.modules  # Numba's own, as users have it
if SIMULATED and not PLAIN:
    import simulator

    simulator.install()

import kernels_by_day  # noqa: E402

kernels_by_day.watch()

import reference  # noqa: E402


def pytest_addoption(parser) -> None:
    """Add the options for longer runs, and for runs on the reference."""
    parser.addoption(
        "--nightly", action="store_true",
        help="run tests marked nightly too; hypothesis draws many examples, others in each run",
    )  # fmt: skip
    parser.addoption("--slow", action="store_true", help="run tests marked slow too")
    parser.addoption(
        "--reference", action="store_true",
        help="run all tests, those of kernels too, on tests/reference instead of kernels",
    )  # fmt: skip
    parser.addoption(
        "--ledger", help="a file to append each test's CPU time to; see tests/ledger.py"
    )


def pytest_configure(config) -> None:
    """Choose how hard hypothesis tries, before tests are imported."""
    import profiles

    profiles.settings.load_profile("nightly" if config.getoption("nightly") else "everyday")
    if config.getoption("ledger"):
        import ledger

        has_workers = bool(config.getoption("numprocesses", None))
        config.pluginmanager.register(
            ledger.Ledger(config.getoption("ledger"), has_workers=has_workers)
        )


# ---------------------------------------------------------------- what runs where

# Files whose tests take long, the longest first, so that at the end both workers have something to do.
LONGEST = [
    "objects/test_paged_channel", "kernels/test_channel", "kernels/test_attention", "kernels/test_coding",
    "kernels/test_compress", "store/test_network", "kernels/test_attention_int4", "objects/test_channel_caches",
    "kernels/test_attention_integers", "kernels/test_attention_sight", "demo/test_cli", "files/test_damage",
    "fuzz/test_table", "kernels/test_mass",
]  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the options
def pytest_cmdline_main(config) -> None:
    """Run the whole suite in two workers, each file in one of them; they share compiled kernels on disk."""
    option = config.option
    if not config.pluginmanager.hasplugin("xdist") or hasattr(config, "workerinput"):
        return
    part = config.args_source is config.ArgsSource.ARGS or option.keyword
    watched = option.usepdb or option.capture == "no"
    if option.numprocesses is None and not part and not watched and (os.cpu_count() or 1) > 1:
        option.numprocesses = 2
    if option.numprocesses and option.dist == "no":
        option.dist, option.loadscopereorder = "loadfile", False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items) -> None:
    """Leave out the tests of nightly runs; where there are workers, begin with the longest files."""
    nightly = config.getoption("nightly")
    for item in items:
        if is_of_slow_kind(item):
            item.add_marker("slow")
    left_out = [
        item
        for item in items
        if not nightly and (is_nightly(item) or (is_slow(item) and not config.getoption("slow")))
    ]
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]
    if hasattr(config, "workerinput"):
        order = {name: i for i, name in enumerate(LONGEST)}
        sizes = Counter(item.path for item in items)

        def when(item):
            """Of files that it does not know those with many tests first; each worker has to list them alike."""
            place = place_of(item)
            return order.get(place, len(order)), -sizes[item.path], place

        items.sort(key=when)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Have the second worker collect from the end: for half of the files it finds the first one's bytecode."""
    with reference.standing_in(is_on_reference(collector)):
        report = yield
    of = getattr(collector.config, "workerinput", {})
    if of.get("workerid") == "gw1" and isinstance(collector, pytest.Directory):
        report.result.reverse()
    return report


#: Tests that need packages which the default run does without, and so may compile what it does not.
MAY_COMPILE_MORE = ("tensors", "transformers_models", "ray")


#: Tests of code above kernels, by folder or file: daily runs use `tests/reference`, unless they are marked `kernels`.
ABOVE_KERNELS = (
    "objects", "files", "store", "sharded", "demo", "site",
    "test_layouts", "test_layouts_of_codes", "test_show", "test_table",
)  # fmt: skip


def is_on_reference(node) -> bool:
    """Whether a test, or a file of tests while it is imported, runs on the reference instead of kernels."""
    option = node.config.option
    by_day = not option.nightly and is_above_kernels(node)
    return option.reference or (by_day and node.get_closest_marker("kernels") is None)


def is_above_kernels(node) -> bool:
    """Whether a test is of code above kernels."""
    return not {node.path.parent.name, node.path.stem}.isdisjoint(ABOVE_KERNELS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Choose kernels or the reference for the targets' operations, also for fixtures that several tests share."""
    with reference.standing_in(is_on_reference(item)):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail a daily test that compiles a slow kernel which is not on the list."""
    result = yield
    option = item.config.option
    found = kernels_by_day.unlisted()
    if (
        found
        and not (option.nightly or option.slow)
        and item.path.parent.name not in MAY_COMPILE_MORE
    ):
        pytest.fail(f"{found} take seconds to compile; see tests/kernels_by_day.py")
    return result


def place_of(item) -> str:
    """A test's file, as `LONGEST` names it."""
    return item.path.relative_to(TESTS).with_suffix("").as_posix()


def is_nightly(item) -> bool:
    """Whether a test is for nightly runs only: it is marked so, or asks for a kind that another one stands for.

    Most tests of kernels in the simulator are for all runs, as it compiles nothing.
    """
    from kinds import LIKE_OTHERS_IN_SIMULATOR, is_like_others

    params = item.callspec.params if hasattr(item, "callspec") else {}
    target, place = params.get("target"), place_of(item)
    if target == "cuda" and SIMULATED:
        if is_like_others(place, params.values(), LIKE_OTHERS_IN_SIMULATOR):
            return True
        if not is_above_kernels(item):
            return False
    if target is not None and is_like_others(place, params.values()):
        return True
    return item.get_closest_marker("nightly") is not None


def is_slow(item) -> bool:
    """Whether a test is left to CI and nightly runs."""
    return item.get_closest_marker("slow") is not None


def is_of_slow_kind(item) -> bool:
    """Whether a test asks of the CPU for a kind that slow tests compile."""
    from kinds import LEFT_TO_CI, is_like_others

    params = item.callspec.params if hasattr(item, "callspec") else {}
    kinds = params.values()
    return params.get("target") == "cpu" and is_like_others(place_of(item), kinds, LEFT_TO_CI)


def pytest_collection() -> None:
    """Stop the garbage collector while tests are collected: nearly all of these objects live to the end."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exempt the collected tests from garbage collection: each collection would go through all of them."""
    gc.enable()
    gc.collect()
    gc.freeze()


# ---------------------------------------------------------------- fixtures


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
    if SIMULATED and not PLAIN:
        simulator.seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Random numbers that are the same in every run of a test."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system with little room, such as "64k", and return its folder: ``small_disk(room)``."""
    place = tmp_path / "disk"

    def mount(room: str) -> Path:
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", place]
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        if mounted.returncode:
            pytest.skip(f"mounting is forbidden here: {mounted.stderr.strip()}")
        return place

    yield mount
    if place.is_mount():
        subprocess.run(["umount", place], check=True)
