"""What benchmarks share: a timer that probes the machine around each line, and the table at the end."""

import os
import time

import numpy as np
import pytest

import numkv

_lines: list[tuple[str, float, float, str, float, float]] = []
_ratios: list[tuple[str, str, float, float]] = []
_notes: list[str] = []


def pytest_addoption(parser):
    parser.addoption(
        "--once", action="store_true",
        help="one benchmark of each file, for as short as it can be: does its set-up run, and its check hold?",
    )  # fmt: skip


def pytest_configure(config):
    if config.getoption("once"):
        config.option.benchmark_max_time = config.option.benchmark_calibration_precision = 0.01
        config.option.benchmark_min_rounds = 1


def pytest_collection_modifyitems(config, items):
    if config.getoption("once"):
        first = {}
        for item in items:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            if params.get("target") != "cuda":
                first.setdefault(item.path, item)
        config.hook.pytest_deselected(items=[x for x in items if first[x.path] is not x])
        items[:] = first.values()
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        for item in items:
            item.add_marker(pytest.mark.skip(reason="the simulator's times mean nothing"))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def target(request):
    """Where an operation runs: a `numkv.targets.Target`. The CUDA half needs a GPU; the simulator is never timed."""
    try:
        return numkv.targets.get(request.param)
    except numkv.NotSupported as error:
        pytest.skip(f"no GPU: {error}")


@pytest.fixture
def to(target):
    """Put a NumPy array on the target."""
    return target.asarray


@pytest.fixture
def finished(request):
    """``finished(run)``: `run`, and on CUDA the wait until the device has done what it started."""
    if "target" not in request.fixturenames or request.getfixturevalue("target").name == "cpu":
        return lambda run: run
    from numba import cuda

    def wait_for(run):
        def both():
            run()
            cuda.synchronize()

        return both

    return wait_for


@pytest.fixture
def rounds(pytestconfig):
    """``rounds(n)``: so many rounds, or the one that ``--once`` asks for."""
    return (lambda n: 1) if pytestconfig.getoption("once") else (lambda n: n)


@pytest.fixture
def measure(benchmark, request, finished, rounds):
    """``measure(run, bytes, probe)``: time `run` and compare its GB/s with the `probe` of the machine or its GPU."""
    from perf import bandwidth

    on = request.getfixturevalue("target").name if "target" in request.fixturenames else "cpu"

    def timed(run, size, probe):
        run = finished(run)
        if not benchmark.enabled:
            benchmark(run)
            return
        of = getattr(bandwidth if on == "cpu" else bandwidth.Cuda, probe)
        before = of()
        benchmark.pedantic(run, rounds=rounds(15), iterations=1, warmup_rounds=2)
        after = of()
        median = benchmark.stats.stats.median
        rate = size / median / 1e9
        benchmark.extra_info.update(
            {
                "bytes": size,
                "GB/s": rate,
                f"{probe} GB/s": [before, after],
                "numkv": numkv.__version__,
            }
        )
        _lines.append((request.node.nodeid, median, rate, probe, before, after))

    return timed


@pytest.fixture
def note():
    """``note(text)``: print a line at the end, after pytest-benchmark's own table, which has rounds only."""
    return _notes.append


@pytest.fixture
def host_time(benchmark, note, request, rounds):
    """``host_time(run, setup)``: time `run` 105 times and note what a call costs."""

    def timed(run, setup=None):
        if not benchmark.enabled:
            if setup is not None:
                setup()
            benchmark(run)
            return
        benchmark.pedantic(run, setup=setup, rounds=rounds(100), iterations=1, warmup_rounds=5)
        stats = benchmark.stats.stats
        cost = f"{stats.median * 1e6:9.1f} us a call (best {stats.min * 1e6:.1f})"
        note(f"{request.node.name:48} {cost}")

    return timed


@pytest.fixture
def side_by_side(benchmark, request, finished, rounds):
    """``side_by_side(what, run, other, limit)``: put the time of `run`, in times of that of `other`, into the table.

    They run in turns, so that whatever else the machine does meets both alike. `run` has been measured before, which
    says how often; it takes seconds at most.
    """

    def noted(what, run, other, limit):
        run, other = finished(run), finished(other)
        if not benchmark.enabled:
            other()
            return
        times = {run: [], other: []}
        turns = max(20, min(300, int(1.5 / benchmark.stats.stats.median) // 2))
        for n in range(2 * rounds(turns)):
            for one in list(times)[:: 1 if n % 2 else -1]:
                start = time.perf_counter()
                one()
                times[one].append(time.perf_counter() - start)
        ratio = np.median(times[run]) / np.median(times[other])
        benchmark.extra_info[what] = ratio
        _ratios.append((request.node.nodeid, what, ratio, limit))

    return noted


def pytest_terminal_summary(terminalreporter):
    write = terminalreporter.write_line
    if _ratios:
        terminalreporter.section("side by side")
        for name, what, ratio, limit in _ratios:
            mark = "" if ratio <= limit else f"   above {limit:.2f}"
            write(f"{name.split('/')[-1]:60} {what} {ratio:.3f}{mark}")
    if _notes:
        terminalreporter.section("notes")
        for text in _notes:
            write(text)
    if not _lines:
        return
    terminalreporter.section("share of the machine's bandwidth")
    write(f"{'benchmark':52} {'median':>11} {'GB/s':>7} {'share':>6}   probe before/after")
    for name, median, rate, probe, before, after in _lines:
        share = rate / ((before + after) / 2)
        write(
            f"{name.split('/')[-1]:52} {median * 1e6:8.1f} us {rate:7.1f} {share:6.2f}   "
            f"{probe} {before:.1f}/{after:.1f} GB/s"
        )
