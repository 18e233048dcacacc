"""numkv as it would be compiled for lesser CPUs, beside this one's own build: ``python -m perf machines``.

Numba compiles for the CPU that ``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES`` name, and this machine runs it if it has
all of those instructions. So vectors of 256 bits and AVX-512 without VNNI are measured on a machine that has more: what
the instructions cost, not what such a machine would reach, whose memory and clock are others.
Each build is in a process of its own; they take turns, with the read bandwidth measured in every round.
"""

import argparse
import datetime
import os
import re
import sys
import tempfile

import llvmlite.binding
import numba
import numpy as np

from numkv.cli.output import cpu_name
from perf import bandwidth, envs
from perf.bars import has_feature
from perf.load import beside
from perf.peers import CONTIGUOUS, CannotRun, threads
from perf.race import race, share
from perf.report import table
from perf.shapes import Problems
from perf.workers import Died, Library

NATIVE, WITHOUT_AMX = "native", "native-without-amx"
CPUS = (NATIVE, "skylake-avx512", "haswell")
KINDS = ("fp32", "fp16", "bf16", "int8", "int4")


def variables_of(cpu):
    """What has Numba compile for a CPU, with none but the name's own features; or this CPU's but AMX."""
    if cpu == WITHOUT_AMX:
        features = re.sub(r"\+amx", "-amx", llvmlite.binding.get_host_cpu_features().flatten())
        return {"NUMBA_CPU_NAME": "host", "NUMBA_CPU_FEATURES": features}
    return {} if cpu == NATIVE else {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""}


def measure(builds, probe, problem, kind, rounds, seconds):
    """Return the seconds of a call, the share of the probe, the ratio to the native build's time and the error, by CPU.

    Also return the reasons of builds that cannot run. Numbers are medians; ratios and shares are within rounds.
    """
    made, reasons = {}, {}
    for cpu, library in builds.items():
        library.problem(**problem)
        try:
            made[cpu] = library.only(kind, CONTIGUOUS)
        except (CannotRun, Died) as why:
            reasons[cpu] = str(why)
    pids, rng, first = [x.pid for x in builds.values()], np.random.default_rng(0), next(iter(made))
    result = race(made, rounds * seconds, probe, rng, rounds, pids)
    found = {
        cpu: (result.seconds(cpu), share(result, cpu, x.bytes), 1 / result.ratio(cpu, first).middle, x.error)
        for cpu, x in made.items() if cpu not in result.lost
    }  # fmt: skip
    for library in builds.values():
        library.free()
    return found, reasons | result.lost


def rows_of(shape, kind, found, reasons):
    """The table's rows of one line."""
    rows = [
        [shape, kind, cpu, f"{t * 1e6:.0f}", f"{share:.2f}", f"{ratio:.2f}", f"{error:.1e}"]
        for cpu, (t, share, ratio, error) in found.items()
    ]
    return rows + [[shape, kind, cpu, why, "", "", ""] for cpu, why in reasons.items()]


def main(argv):
    """``python -m perf machines``."""
    parser = argparse.ArgumentParser(prog="python -m perf machines", description=__doc__)
    parser.add_argument(
        "--cpus", default=",".join(CPUS), help="LLVM's names, the native build first"
    )
    parser.add_argument("--shapes", default="A,C,E")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="of calls in a turn (0.1)")
    options = parser.parse_args(argv)
    if WITHOUT_AMX in options.cpus.split(",") and not has_feature("amx_tile"):
        print("this processor has no AMX", file=sys.stderr)
        return 1
    header = ["shape", "kind", "compiled for", "us", "of read bandwidth", "time / native", "error"]
    builds, rows, versions = {}, [], {}
    with tempfile.TemporaryDirectory() as folder:
        problems = Problems(folder)
        try:
            probe = Library(bandwidth.NAME, "perf.bandwidth", envs.this())
            builds = {
                cpu: Library("numkv", python=envs.this(), variables=variables_of(cpu))
                for cpu in options.cpus.split(",")
            }
            load = beside([probe.pid, *(library.pid for library in builds.values())])
            for shape in options.shapes.split(","):
                for kind in options.kinds.split(","):
                    line = measure(
                        builds, lambda: probe.worker.ask("probe"), problems[shape], kind,
                        options.rounds, options.seconds,
                    )  # fmt: skip
                    rows += rows_of(shape, kind, *line)
                    print(" ".join(map(str, rows[-1])), file=sys.stderr, flush=True)
            versions = builds[next(iter(builds))].versions
            others = load.of_others()
        finally:
            for library in (*builds.values(), *([probe] if "probe" in locals() else [])):
                library.close()
    cpu = f"{cpu_name()}, {numba.config.CPU_NAME or 'host'}"
    print(f"{datetime.date.today()}, {os.cpu_count()} cores, {threads()} threads, {cpu}; {versions}; "
          f"Numba {numba.__version__}\n")  # fmt: skip
    print(table(header, rows, (3, 4, 5, 6)))
    print(f"\nother processes used {others:.0%} of the cores")
    return 0
