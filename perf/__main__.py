"""``python -m perf``: numkv beside other libraries and the machine's own read bandwidth, in one process.

Writes a Markdown report and a picture.
"""

import argparse
import datetime
import importlib
import itertools
import os
import platform
import sys
from pathlib import Path

import llvmlite
import numba
import numpy as np

from numkv.kinds import kinds
from perf import bandwidth, report
from perf.peers import LARGEST_ERROR, PEERS, CannotRun, numkv_
from perf.race import ROUNDS, race
from perf.shapes import COLD, MOST_LAYERS, PREFILL, SHAPES, Decode, Prefill

KINDS = [k.name for k in kinds() if k.name in LARGEST_ERROR]
PREFILL_KINDS = ("fp32", "bf16")


def _some_of(names):
    names = list(names)

    def parsed(text):
        chosen = text.split(",")
        if not set(chosen) <= set(names):
            raise argparse.ArgumentTypeError(f"expected some of {','.join(names)}, got {text!r}")
        return chosen

    return {"type": parsed, "default": names, "metavar": ",".join(names)}


def parse(argv=None):
    """The options of a command line."""
    parser = argparse.ArgumentParser(prog="python -m perf", description=__doc__)
    parser.add_argument(
        "--shapes", **_some_of(SHAPES | PREFILL), help="P is prefill, the others decode"
    )
    parser.add_argument("--kinds", **_some_of(KINDS))
    parser.add_argument("--peers", **_some_of(PEERS))
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="for each contestant, shape and kind (2)"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(argv)


def load(names):
    """The peers' modules, and why some are missing."""
    found, missing = [], {}
    for name in names:
        try:
            found.append(importlib.import_module(f"perf.peers.{PEERS[name]}"))
        except ImportError as error:
            missing[name] = str(error)
    return found, missing


def reason_of(error):
    """One line that says what went wrong."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = said[-1] if said else "no message"
    return text if isinstance(error, CannotRun) else f"{type(error).__name__}: {text[:200]}"


def checked(make, problem, kind):
    """A contestant and its error; `CannotRun` if the result of its first or last layer is wrong."""
    contestant = make(problem)
    for layer in {0, contestant.layers - 1}:
        error = problem.error(contestant.floats(contestant.run(layer)))
        if not error <= LARGEST_ERROR[kind]:
            raise CannotRun(f"wrong result, its relative error is {error:.1e}")
    return contestant, error


def measure(libraries, letter, kind, problem, seconds, rng):
    """Check all that there are for this kind of problem, then race them: a `report.Line`."""
    rows, contestants = [], {}
    what = "prefill" if isinstance(problem, Prefill) else "decode"
    for library in libraries:
        for form, make in getattr(library, what)(kind).items():
            row = report.Row(library.NAME, form, flops=problem.flops)
            try:
                contestants[row.name], row.error = checked(make, problem, kind)
            except Exception as error:  # whatever a library throws, the report says it
                row.reason = reason_of(error)
            rows.append(row)
    line = report.Line(letter, kind, rows)
    result = race(contestants, seconds, lambda: bandwidth.read() * 1e9, rng)
    line.probes = result.probes
    for row in line.ran:
        row.bytes = contestants[row.name].bytes
        row.seconds = result.seconds(row.name)
        row.share = result.share(row.name, row.bytes)
        row.ratio = result.ratio(row.name, line.ours.name) if line.ours else None
    return line


def show(line):
    """Print a line as soon as it is there."""
    print(f"\n{line.shape} {line.kind}")
    for row in line.rows:
        if row.reason:
            print(f"  {row.name:52} does not run: {row.reason}")
            continue
        rate = (
            f"{row.flops / row.seconds / 1e9:5.0f} GFLOP/s"
            if row.flops
            else f"share {report.number(row.share):>7}"
        )
        print(
            f"  {row.name:52} {row.seconds * 1e6:10.1f} us  {rate}  "
            f"{report.number(row.ratio):>7} of numkv's time  error {row.error:.1e}"
        )
    sys.stdout.flush()


def cpu():
    """The processor's name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.split(":")[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def unused(path):
    """The path, or with a number where there is a report already."""
    names = (path.with_stem(f"{path.stem}-{n}") for n in itertools.count(2))
    return next(x for x in itertools.chain([path], names) if not x.exists())


def told(options, libraries, missing):
    """Paragraphs: on what, with which versions, how, and who is missing."""
    versions = [library.versions() for library in libraries]
    versions += [f"{x.__name__} {x.__version__}" for x in (np, numba, llvmlite)]
    paragraphs = [
        f"{cpu()} ({llvmlite.binding.get_host_cpu_name()} to LLVM), {os.cpu_count()} cores, {platform.system()}; "
        f"Python {platform.python_version()}, {', '.join(versions)}. "
        f"{numba.get_num_threads()} threads for each; Numba's threading layer is {numba.threading_layer()}.",
        f"`python -m perf --seconds {options.seconds:g}`: turns in random order, {ROUNDS} rounds in one process, where "
        "slow contestants sit rounds out; each goes through as many separate layers as make "
        f"{COLD >> 20} MB, at most {MOST_LAYERS}. Results were compared with float64 before. ONNX Runtime and OpenVINO "
        "append the newest row in the operation itself.",
    ]
    if missing:
        reasons = "; ".join(f"{name} ({why})" for name, why in missing.items())
        paragraphs.append(f"Not there: {reasons}.")
    return paragraphs


def main(argv=None):
    """Do what the options say; the report is written after every line, the picture at the end."""
    options = parse(argv)
    bandwidth.read()  # Numba starts its threads, before it could take another library's runtime
    peers, missing = load(options.peers)
    libraries = [numkv_, *peers]
    for name, why in missing.items():
        print(f"{name} is not there: {why}", file=sys.stderr)
    paragraphs = told(options, libraries, missing)

    today = datetime.date.today().isoformat()
    options.out.mkdir(parents=True, exist_ok=True)
    path = unused(options.out / f"{today}-{report.slug(cpu())}-{os.cpu_count()}-cores-peers.md")
    title = f"{today}: numkv beside others, {os.cpu_count()} cores of {cpu()}"
    decode, prefill = [], []

    def write(picture=None):
        decode.sort(key=lambda line: (KINDS.index(line.kind), line.shape))
        shapes = SHAPES | PREFILL
        text = report.document(title, paragraphs, shapes, decode, prefill, picture)
        path.write_text(text, encoding="utf-8")

    rng = np.random.default_rng(0)
    for letter in options.shapes:
        is_prefill = letter in PREFILL
        problem = Prefill(PREFILL[letter], rng) if is_prefill else Decode(SHAPES[letter], rng)
        for kind in options.kinds:
            if is_prefill and kind not in PREFILL_KINDS:
                continue
            line = measure(libraries, letter, kind, problem, options.seconds, rng)
            (prefill if is_prefill else decode).append(line)
            show(line)
            write()
    if not decode + prefill:
        sys.exit(f"nothing to measure: prefill runs in {' and '.join(PREFILL_KINDS)}")
    if decode:
        try:
            report.draw(decode, path.with_suffix(".svg"))
        except ImportError as error:
            print(f"no picture: {error}", file=sys.stderr)
        else:
            write(path.with_suffix(".svg").name)
    print(f"\nwritten: {path}")


if __name__ == "__main__":
    main()
