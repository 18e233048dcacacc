"""Run the real PTX of every CUDA kernel on small inputs, and compare with the oracle; also without its barriers.

    NUMBA_ENABLE_CUDASIM=0 python -m tools.cuda.interpret [--cases REGEX] [--mutants] [--keep FILE.json] [--seconds N]
        [--page perf/results/NAME.md]

Runs the cases of ``tests/ptx_cases.py`` on the interpreter (`tools.cuda.ptx_machine`), with the linker's code of each
kernel for sm_90. A case passes if its result is within the bounds of the tests and its kernels have no errors: races
between barriers, uninitialised reads of registers and of shared and local memory, divergent barriers, stray and
misaligned accesses. With ``--mutants``, each barrier of each launched kernel, and each wait for copies, is removed in
turn, and the case must fail. A removal that no case has detected yet is tried again in the next case of the kernel.

All cases take half an hour. With ``--keep`` each result is recorded at once, and later runs with the same kernels skip
it. ``--seconds`` ends a run in time; repeat it until all cases have run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from numkv.kernels.operations import FILES
from tools.cuda import pages, ptx_device, resources
from tools.cuda.ptx_program import Program

__all__ = ["Mutant", "Outcome", "all_cases", "mutants", "run_case"]

#: Blocks of a launch.
MOST_BLOCKS = 3

TESTS = Path(__file__).resolve().parents[2] / "tests"


@dataclass
class Outcome:
    """The result of a case."""

    name: str
    error: str  #: empty if it passed
    seconds: float
    kernels: list[str] = field(default_factory=list)  #: that it launched
    warp_instructions: int = 0  #: of all launches
    barriers: int = 0


@dataclass
class Mutant:
    """A kernel without one of its barriers."""

    case: str
    kernel: str
    barrier: int  #: its index among the program's barriers
    barriers: int
    caught: str  #: the error that detected it; empty if it was not detected
    name: str = ""  #: the kernel's whole name


def all_cases() -> dict[str, Any]:
    """Return the cases of the tests, by name."""
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    import ptx_cases

    few_blocks()
    return ptx_cases.cases()


def few_blocks() -> None:
    """Make numkv launch as few blocks as in the simulator, so that each processes several items."""
    for file in (*FILES, "attention.splits"):
        importlib.import_module(f"numkv.kernels.cuda.{file}")
    for name, module in list(sys.modules.items()):
        if name.startswith("numkv.kernels.cuda") and hasattr(module, "MAX_BLOCKS"):
            module.MAX_BLOCKS = MOST_BLOCKS  # type: ignore[attr-defined]


def run_case(device: ptx_device.Device, case: Any) -> Outcome:
    """Run a case, with the same random numbers in every run."""
    device.forget()
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    start, error = time.perf_counter(), ""
    try:
        case.run(rng)
    except Exception as problem:  # a mutant may raise anything
        error = f"{type(problem).__name__}: {problem}"
    try:
        device.check()
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    done = device.launches
    return Outcome(
        case.name, error, time.perf_counter() - start, sorted({ptx_device.short(d.name) for d in done}),
        sum(d.run.warp_instructions for d in done), sum(d.run.barriers for d in done),
    )  # fmt: skip


def _without(name: str, barrier: int) -> Callable[[str, Program], Program]:
    made: dict[int, Program] = {}

    def change(kernel: str, program: Program) -> Program:
        if kernel != name:
            return program
        if id(program) not in made:
            made[id(program)] = program.without(program.barriers()[barrier])
        return made[id(program)]

    return change


def mutants(device: ptx_device.Device, case: Any, known: set[str]) -> list[Mutant]:
    """Leave out each barrier of each kernel of a case that passes.

    Barriers in `known` stay, because other cases have detected their removal. Those detected here are added to it.
    """
    programs: dict[str, Program] = {}

    def note(kernel: str, program: Program) -> Program:
        programs[kernel] = program
        return program

    device.change = note
    try:
        whole = run_case(device, case)
        if whole.error:
            raise RuntimeError(f"{case.name} fails as it is: {whole.error}")
        found = []
        for kernel, program in programs.items():
            count = len(program.barriers())
            for barrier in range(count):
                which = f"{kernel} {barrier}"
                if which in known:
                    continue
                device.change = _without(kernel, barrier)
                error = run_case(device, case).error
                found.append(
                    Mutant(case.name, ptx_device.short(kernel), barrier, count, error, kernel)
                )
                if error:
                    known.add(which)
        return found
    finally:
        device.change = None
        device.forget()


def case_table(outcomes: list[Outcome]) -> str:
    """Return a table with a line for each case."""
    rows = []
    for outcome in outcomes:
        verdict = (
            "right"
            if not outcome.error
            else outcome.error.replace("|", "/").replace("\n", " ")[:200]
        )
        rows.append(
            [
                outcome.name,
                ", ".join(outcome.kernels),
                f"{outcome.warp_instructions:,}",
                f"{outcome.barriers:,}",
                verdict,
            ]
        )
    return pages.table(
        ["case", "kernels", "warp instructions", "barriers", "result"], rows, left={0, 1, 4}
    )


def mutant_table(found: list[Mutant]) -> str:
    """Return a table with a line for each kernel, with the barriers whose removal no case detected."""
    by_kernel: dict[tuple[str, str], list[Mutant]] = {}
    for mutant in found:
        by_kernel.setdefault((mutant.case, mutant.kernel), []).append(mutant)
    rows = []
    for (case, kernel), those in by_kernel.items():
        missed = [f"barrier {m.barrier + 1}" for m in those if not m.caught]
        races = sum("race" in m.caught for m in those)
        rows.append(
            [
                kernel,
                case,
                str(len(those)),
                str(len(those) - len(missed)),
                str(races),
                ", ".join(missed),
            ]
        )
    heads = [
        "kernel",
        "case",
        "left out",
        "caught",
        "of these as races",
        "missed by no case",
    ]
    return pages.table(heads, rows, left={0, 1, 5})


class Kept:
    """Results of earlier runs, in a file; dropped if the kernels have changed."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.sources = path, resources.digest()
        self.outcomes: dict[str, Outcome] = {}
        self.mutants: dict[str, list[Mutant]] = {}
        self.known: set[str] = set()  #: barriers whose removal was detected
        if path is None or not path.exists():
            return
        kept = json.loads(path.read_text())
        if kept["sources"] == self.sources:
            self.outcomes = {name: Outcome(**of) for name, of in kept["outcomes"].items()}
            self.mutants = {
                name: [Mutant(**of) for of in those] for name, those in kept["mutants"].items()
            }
            self.known = set(kept["known"])

    def add_mutants(self, case: str, found: list[Mutant]) -> None:
        """Record a case's mutants; those that earlier cases did not detect now count for this case."""
        again = {(m.name, m.barrier) for m in found}
        for name, those in self.mutants.items():
            self.mutants[name] = [m for m in those if m.caught or (m.name, m.barrier) not in again]
        self.mutants[case] = found

    def write(self) -> None:
        """Write the file."""
        if self.path is not None:
            outcomes = {name: asdict(outcome) for name, outcome in self.outcomes.items()}
            found = {name: [asdict(m) for m in those] for name, those in self.mutants.items()}
            known = {"sources": self.sources, "known": sorted(self.known)}
            self.path.write_text(json.dumps(known | {"outcomes": outcomes, "mutants": found}))


def run_cases(
    device: ptx_device.Device, cases: list[Any], with_mutants: bool, kept: Kept, seconds: float
) -> int:
    """Run the cases without a result and print each one; return how many did not run in time."""
    end, left = time.monotonic() + seconds, 0
    for case in cases:
        if case.name in kept.outcomes and (case.name in kept.mutants or not with_mutants):
            continue
        if time.monotonic() > end:
            left += 1
            continue
        outcome = kept.outcomes[case.name] = run_case(device, case)
        verdict = "ok  " if not outcome.error else "FAIL"
        print(f"{verdict} {case.name} {outcome.seconds:.1f} s {outcome.error}", flush=True)
        if with_mutants and not outcome.error:
            kept.add_mutants(case.name, mutants(device, case, kept.known))
            for mutant in kept.mutants[case.name]:
                verdict = mutant.caught[:90] if mutant.caught else "NOT CAUGHT"
                which = f"{mutant.kernel} without barrier {mutant.barrier + 1} of {mutant.barriers}"
                print(f"     {which}: {verdict}", flush=True)
        kept.write()
    return left


def main(arguments: list[str] | None = None) -> int:
    """Run cases and mutants; return 1 if a case fails or too few mutants are caught, 3 if cases remain."""
    parse = argparse.ArgumentParser(
        prog="python -m tools.cuda.interpret", description=(__doc__ or "").partition("\n")[0]
    )
    parse.add_argument("--cases", default="", help="a regular expression: those only")
    parse.add_argument("--everyday", action="store_true", help="those only that CI runs")
    parse.add_argument("--mutants", action="store_true", help="leave out barriers, too")
    parse.add_argument("--keep", type=Path, help="a file of what earlier runs found, and this one")
    parse.add_argument("--seconds", type=float, default=1e9, help="begin no case after so long")
    parse.add_argument("--page", type=Path, help="write a Markdown page")
    given = parse.parse_args(arguments)
    device = ptx_device.start()
    chosen = [
        case
        for case in all_cases().values()
        if re.search(given.cases, case.name) and (case.everyday or not given.everyday)
    ]
    kept = Kept(given.keep)
    left = run_cases(device, chosen, given.mutants, kept, given.seconds)
    outcomes = [kept.outcomes[case.name] for case in chosen if case.name in kept.outcomes]
    found = [m for case in chosen for m in kept.mutants.get(case.name, []) if given.mutants]
    failed = sum(bool(outcome.error) for outcome in outcomes)
    caught = sum(bool(mutant.caught) for mutant in found)
    summary = f"{len(outcomes) - failed} of {len(outcomes)} cases are right."
    if left:
        summary += f" {left} have not run."
    if found:
        summary += f" {caught} of {len(found)} missing barriers are caught ({100 * caught / len(found):.0f} %)."
    print(summary)
    if given.page:
        parts = [summary, "## Cases", case_table(outcomes)]
        parts += ["## Kernels with a barrier left out", mutant_table(found)] if found else []
        pages.write(given.page, "CUDA kernels on an interpreter of PTX", __doc__ or "", *parts)
    if failed or caught < 0.8 * len(found):
        return 1
    return 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
