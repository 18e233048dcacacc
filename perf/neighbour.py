"""What numkv's threads do to others in its process, and what waiting threads cost on a busy machine.

``python -m perf neighbour`` times PyTorch's attention, PyTorch's matrix product and NumPy's in fresh processes: alone,
before numkv has started its threads and after, for each order of imports and each of Numba's threading layers, also
once the program has called `torch.set_num_threads`, after which PyTorch's products inside its attention no longer
keep to one thread by themselves; and a decode of numkv's and PyTorch's product under several ways for OpenMP threads to
wait, with other processes on all cores and without. All cases have a turn in each round, and factors are formed
within a round.
"""

import argparse
import contextlib
import itertools
import json
import random
import subprocess
import sys
from statistics import median

from numkv.bench.rounds import MOST
from perf.load import beside_children
from perf.neighbour_child import MOMENTS
from perf.peers import cores
from perf.report import number, table
from perf.workers import ROOT, environment

LAYERS = ("omp", "workqueue", "tbb")
#: What a process does, in this order: `start` starts numkv's threads, moments are measured.
ORDERS = {
    "torch, numkv, threads": ("torch", "numkv", "before", "start", "after", "set"),
    "numkv, torch, threads": ("numkv", "torch", "before", "start", "after", "set"),
    "numkv, threads, torch": ("numkv", "before", "start", "torch", "after", "set"),
}
ALONE = {"torch alone": ("torch", "after", "set"), "NumPy alone": ("after",)}
CALLS = ("torch attention", "torch product", "NumPy product")
#: Environments. As they come, PyTorch's threads spin as libgomp has it, 300,000 turns; numkv's as numkv sets them up.
AS_THEY_COME = "as they come"
WAITING = {
    AS_THEY_COME: {},
    "GOMP_SPINCOUNT=300000": {"GOMP_SPINCOUNT": "300000"},
    "OMP_WAIT_POLICY=active": {"OMP_WAIT_POLICY": "active"},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
    "GOMP_SPINCOUNT=20000": {"GOMP_SPINCOUNT": "20000"},
    "GOMP_SPINCOUNT=2000": {"GOMP_SPINCOUNT": "2000"},
}
#: Slower than this by the presence of numkv's threads is worth a word.
NOTABLE = 1.15


def ask(steps, seconds, **variables):
    """Do the steps in a fresh process; a string says why there is no result."""
    command = [sys.executable, "-m", "perf.neighbour_child", json.dumps([steps, seconds])]
    env = environment(cores()) | variables
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def busy(count):
    """So many processes that compute without end."""
    processes = [subprocess.Popen([sys.executable, "-c", "while 1: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def in_rounds(cases, rounds, say):
    """Results by case, a list with one of each round; ``cases[name]()`` measures."""
    results = {name: [] for name in cases}
    for n in range(rounds):
        for name in random.sample(list(cases), len(cases)):
            results[name].append(cases[name]())
        say(f"round {n + 1} of {rounds}")
    return results


def _cell(times, alone):
    """A median in ms, and the median over the rounds of the factor to alone."""
    both = [(t, a) for t, a in zip(times, alone, strict=True) if t and a]
    if not both:
        return "–"
    factor = median(t / a for t, a in both)
    return f"{median(t for t, _ in both) * 1e3:.1f} ({number(factor)})"


def _in_time(found, moment, call):
    """Times of a call at a moment, one for each round, None where there is none."""
    of = (x.get(moment) if isinstance(x, dict) else None for x in found)
    return [x["times"].get(call) if x else None for x in of]


def _compared(found, alone, moment, call):
    """Times and those alone, each with its like."""
    like = moment if call.startswith("torch") and moment == "set" else "after"
    whose = "NumPy alone" if call.startswith("NumPy") else "torch alone"
    return _in_time(found, moment, call), _in_time(alone[whose], like, call)


def worst(results, alone):
    """The largest factor once numkv's threads have started: (factor, call, where)."""
    factors = [(1.0, "", "")]
    for (layer, order), found in results.items():
        for call, moment in itertools.product(CALLS, ("after", "set")):
            times, beside = _compared(found, alone, moment, call)
            ratios = [t / a for t, a in zip(times, beside, strict=True) if t and a]
            if ratios:
                factors.append((median(ratios), call, f"{layer}: {order}; {MOMENTS[moment]}"))
    return max(factors)


def imports_table(results, alone):
    """By threading layer, order of imports and moment: times in ms, factors to alone, the state of OpenMP."""
    rows = []
    for moment in ("after", "set"):
        cells = []
        for call in CALLS:
            _, beside = _compared(alone["torch alone"], alone, moment, call)
            cells.append(_cell(beside, beside))
        label = "torch.set_num_threads" if moment == "set" else "–"
        rows.append(["–", "each alone", label, *cells, "–"])
    for (layer, order), found in results.items():
        good = [x for x in found if isinstance(x, dict)]
        if not good:
            rows.append([layer, order, "–", f"does not run: {found[0]}", "", "", ""])
            continue
        for moment, label in MOMENTS.items():
            cells = [_cell(*_compared(found, alone, moment, call)) for call in CALLS]
            state = "; ".join(
                f"{name}: nested {nested}, levels {levels}"
                for name, (nested, levels) in good[-1][moment]["openmp"].items()
            )
            rows.append([layer, order, label, *cells, state or "none loaded"])
    header = ["layer", "order", "threads started", *(f"{x}, ms (/ alone)" for x in CALLS), "OpenMP"]
    return table(header, rows, (3, 4, 5))


def imports(rounds, seconds, say):
    """Measure and print what numkv's threads do to others."""
    cases = {name: (lambda s=steps: ask(s, seconds)) for name, steps in ALONE.items()}
    for layer, (order, steps) in itertools.product(LAYERS, ORDERS.items()):
        cases[layer, order] = lambda s=steps, of=layer: ask(s, seconds, NUMBA_THREADING_LAYER=of)
    results = in_rounds(cases, rounds, say)
    alone = {name: results.pop(name) for name in ALONE}
    failed = [x for found in alone.values() for x in found if not isinstance(x, dict)]
    if failed:
        sys.exit(f"alone: {failed[0]}")
    print(imports_table(results, alone))
    factor, call, where = worst(results, alone)
    if factor > NOTABLE:
        print(f"\nSLOWED DOWN by numkv's threads: {call}, {factor:.1f} times ({where})")
    else:
        print(f"\nnothing is slowed down by numkv's threads by more than {NOTABLE - 1:.0%}")


def waiting(rounds, seconds, say):
    """Measure and print what waiting threads cost, with others on all cores and without."""

    def measure(step, load, variables):
        with busy(load):
            found = ask(["numkv" if step == "decode" else "torch", step], seconds, **variables)
        return found[step] if isinstance(found, dict) else found

    calls, loads = {"numkv decode": "decode", "torch product": "product"}, (0, cores())
    cases = {
        (how, call, load): lambda s=calls[call], n=load, v=WAITING[how]: measure(s, n, v)
        for how, call, load in itertools.product(WAITING, calls, loads)
    }
    results = in_rounds(cases, rounds, say)
    rows = []
    for how in WAITING:
        cells = [how]
        for call, load in itertools.product(calls, loads):
            found = results[how, call, load]
            if all(isinstance(x, float) for x in found):
                cells.append(_cell(found, results[AS_THEY_COME, call, load]))
            else:
                cells.append(str(next(x for x in found if not isinstance(x, float))))
        rows.append(cells)
    header = ["OpenMP threads wait"]
    header += [
        f"{call}, {'busy' if load else 'idle'}, ms (/ first row)"
        for call, load in itertools.product(calls, loads)
    ]
    print(table(header, rows, range(1, 5)))


PARTS = {"imports": imports, "waiting": waiting}


def main(argv):
    """``python -m perf neighbour``."""
    parser = argparse.ArgumentParser(prog="python -m perf neighbour", description=__doc__)
    parser.add_argument("--part", choices=PARTS, help="only this part")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each measurement (0.3)")
    options = parser.parse_args(argv)
    for name, part in PARTS.items():
        if options.part in (None, name):
            print(f"\n{name}\n", flush=True)
            load = beside_children()
            part(options.rounds, options.seconds, lambda x: print(x, file=sys.stderr, flush=True))
            others = load.of_others()
            warning = ": REPEAT IT ON A QUIET MACHINE" if others > MOST else ""
            print(f"\nother processes used {others:.0%} of the cores{warning}", flush=True)
    return 0
