"""CPU time of a test run: ``python -m pytest --ledger FILE``, then ``python tests/ledger.py FILE``.

Each process appends a line of JSON for each test: CPU seconds of the test with its fixtures, and of these the seconds
of compiling, of the simulator, and of child processes that have ended. CPU time, unlike wall time, does not depend on
the machine's load. Begin without kernels on disk to count compiling too.
"""

import contextlib
import functools
import json
import os
import sys
from collections import Counter, defaultdict
from pathlib import Path


def _own() -> float:
    times = os.times()
    return times.user + times.system


def _children() -> float:
    times = os.times()
    return times.children_user + times.children_system


class Ledger:
    """The plugin of a run with ``--ledger``."""

    def __init__(self, path, *, has_workers: bool) -> None:
        self._path = Path(path)
        self._has_workers = has_workers  # children that write their own lines
        self._depth = 0
        self._label = ""
        self._last = 0.0, 0.0
        self._spent = defaultdict(float)
        self._compiled = []

    def pytest_sessionstart(self) -> None:
        """Time the compiler and the simulator."""
        from numba.core.dispatcher import Dispatcher

        from numkv.kernels import builder

        self._watch(Dispatcher, "compile", "compiling")
        if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
            from numba.cuda.simulator.kernel import FakeCUDAKernel

            self._watch(FakeCUDAKernel, "__call__", "simulator")
        tell = builder.tell

        def labelled(label):
            self._label = label
            return tell(label)

        builder.tell = labelled

    def _watch(self, owner, name, kind) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(this, *args, **kwargs):
            if self._depth:
                return function(this, *args, **kwargs)
            self._depth, self._label, started = 1, "", _own()
            try:
                return function(this, *args, **kwargs)
            finally:
                self._depth, spent = 0, _own() - started
                self._spent[kind] += spent
                if kind == "compiling" and spent > 0.02:
                    what = self._label or f"{this.py_func.__module__}.{this.py_func.__qualname__}"
                    self._compiled.append((what, round(spent, 2)))

        setattr(owner, name, timed)

    def pytest_collection_finish(self) -> None:
        """Write the time of importing and collecting."""
        self._write("collection")

    def pytest_runtest_logfinish(self, nodeid) -> None:
        """Write a test's line."""
        if not self._has_workers:
            self._write(nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the time after the last test."""
        self._write("end")

    def _write(self, nodeid) -> None:
        own, children = _own(), 0.0 if self._has_workers else _children()
        line = {
            "test": nodeid,
            "own": round(own - self._last[0], 3),
            "children": round(children - self._last[1], 3),
            **{kind: round(spent, 3) for kind, spent in self._spent.items()},
            "compiled": self._compiled,
        }
        self._last = own, children
        self._spent.clear()
        self._compiled = []
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def main(paths) -> None:
    """Print the sums and the largest times."""
    lines = [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]
    sums, files, tests, kernels = Counter(), defaultdict(Counter), Counter(), defaultdict(list)
    for line in lines:
        parts = {kind: line.get(kind, 0.0) for kind in ("compiling", "simulator", "children")}
        parts["else"] = line["own"] - parts["compiling"] - parts["simulator"]
        sums.update(parts)
        sums["tests"] += "::" in line["test"]
        files[line["test"].split("::")[0]].update(parts)
        tests[line["test"]] += line["own"] + line["children"]
        for what, spent in line["compiled"]:
            kernels[what].append(spent)
    print(f"{sums.pop('tests')} tests, {sum(sums.values()):.0f} s of CPU time:", end=" ")
    print(", ".join(f"{kind} {spent:.0f}" for kind, spent in sums.most_common()))
    print("\ncompiled")
    for what, spent in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:150]:
        print(f"{sum(spent):8.1f}  {len(spent):3}  {what}")
    print("\nfiles: all, compiling, simulator, children, else")
    for name, parts in sorted(files.items(), key=lambda item: -item[1].total())[:120]:
        split = "".join(
            f"{parts[kind]:8.1f}" for kind in ("compiling", "simulator", "children", "else")
        )
        print(f"{parts.total():8.1f}{split}  {name}")
    print("\ntests")
    for name, spent in tests.most_common(150):
        print(f"{spent:8.1f}  {name}")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(sys.argv[1:])
