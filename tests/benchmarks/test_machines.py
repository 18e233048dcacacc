"""`python -m perf machines`: what it makes of times, without taking any."""

import pytest

pytest.importorskip("numba")
from perf import machines
from perf.peers import CannotRun


class Build:
    """Stands for a process; a call takes `time` seconds, or cannot run."""

    bytes, error, pid = 100, 1e-7, 0

    def __init__(self, time):
        self.time, self.freed = time, False

    def problem(self, **_):
        pass

    def only(self, kind, form):
        if self.time is None:
            raise CannotRun("no such instruction")
        return self

    def turn(self, seconds):
        return [9.0, self.time, 0.0]  # the median counts

    def free(self):
        self.freed = True


def test_shares_and_ratios():
    builds = {"native": Build(2.0), "haswell": Build(4.0), "knl": Build(None)}
    found, reasons = machines.measure(builds, lambda: 100.0, {}, "fp32", 3, 0.1)
    assert found == {"native": (2.0, 0.5, 1.0, 1e-7), "haswell": (4.0, 0.25, 2.0, 1e-7)}
    assert reasons == {"knl": "no such instruction"}
    assert all(build.freed for build in builds.values())
    rows = machines.rows_of("A", "fp32", found, reasons)
    assert rows[1] == ["A", "fp32", "haswell", "4000000", "0.25", "2.00", "1.0e-07"]
    assert {len(row) for row in rows} == {7}


def test_a_name_comes_without_this_machines_features():
    assert machines.variables_of("native") == {}
    assert machines.variables_of("haswell") == {
        "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "",
    }  # fmt: skip
    without = machines.variables_of("native-without-amx")
    assert without["NUMBA_CPU_NAME"] == "host"
    assert "+amx" not in without["NUMBA_CPU_FEATURES"]
    assert without["NUMBA_CPU_FEATURES"]
