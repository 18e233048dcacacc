"""``python -m perf``: numkv beside other libraries, each in a process of its own, and the machine's read bandwidth.

It takes at most ten minutes on two cores, with ``--full`` an hour. Writes a Markdown report and a picture.
``python -m perf against COMMIT`` is this tree's numkv against another's; ``amx``, ``compile``, ``files``, ``install``,
``machines``, ``neighbour``, ``prefixes``, ``sparse`` and ``threads`` do other things: see perf/README.md.
"""

import argparse
import datetime
import importlib
import itertools
import platform
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from numkv.bench.rounds import MOST
from numkv.cli.output import cpu_name
from perf import bars, envs, fairness, report
from perf.load import peak_memory
from perf.peers import LARGEST_ERROR, OURS, PEERS, RACED, cores, threads
from perf.race import race, rounds_of, share
from perf.shapes import (
    COLD,
    MOST_LAYERS,
    PREFILL,
    PREFILL_KINDS,
    SHAPES,
    Problems,
    causal_flops,
    labelled,
)
from perf.workers import Died, Library, Missing, Worker

KINDS = list(LARGEST_ERROR)
#: The shapes of ten minutes.
SHORT = [*"ABCDEFP"]
#: What the race is compared on with each library alone: a shape and a kind.
CHECKED, CHECKED_IN_SHORT = "C/bf16,C/int8,P/fp32", "C/int8"
#: Modules of other commands, and what they are told first.
COMMANDS = {
    "against": "against",
    "amx": "machines --cpus native,native-without-amx --shapes P,L8,L4,G,H --kinds bf16,int8",
    "compile": "compile",
    "files": "files",
    "install": "envs",
    "machines": "machines",
    "neighbour": "neighbour",
    "prefixes": "prefixes",
    "sparse": "sparse",
    "threads": "python_threads",
}


def _some_of(names):
    names = list(names)

    def parsed(text):
        chosen = text.split(",")
        if not set(chosen) <= set(names):
            raise argparse.ArgumentTypeError(f"expected some of {','.join(names)}, got {text!r}")
        return chosen

    return {"type": parsed, "default": names, "metavar": ",".join(names)}


def _places(text):
    if text == "none":
        return []
    places = [tuple(x.split("/")) for x in text.split(",")]
    if not all(len(x) == 2 and x[0] in SHAPES | PREFILL and x[1] in KINDS for x in places):
        raise argparse.ArgumentTypeError(
            f"expected shapes and kinds as {CHECKED}, or none, got {text!r}"
        )
    return places


def parse(argv=None):
    """The options of a command line."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument(
        "--full", action="store_true", help="all shapes, 1 second for each contestant, more checks"
    )
    full = first.parse_known_args(argv)[0].full
    parser = argparse.ArgumentParser(prog="python -m perf", description=__doc__, parents=[first])
    parser.add_argument(
        "--shapes",
        **(_some_of(SHAPES | PREFILL) | ({} if full else {"default": SHORT})),
        help=f"P is prefill, the others decode ({','.join(SHORT)})",
    )
    parser.add_argument("--kinds", **(_some_of(KINDS) | {"default": RACED}))
    parser.add_argument("--peers", **_some_of(PEERS))
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.0 if full else 0.25,
        help="for each contestant, shape and kind (0.25)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=600.0 if full else 20.0,
        help="seconds for a shape and kind, until rounds with other load count too (20)",
    )
    parser.add_argument(
        "--check",
        type=_places,
        default=_places(CHECKED if full else CHECKED_IN_SHORT),
        metavar=CHECKED,
        help="where to compare the race with each library alone, of what is raced; or none",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(argv)


def load(names, start=Library):
    """The libraries' processes by name, and why some are missing."""
    found, missing = {}, {}
    for name in names:
        try:
            found[name] = start(name)
        except (Died, Missing, OSError) as error:
            missing[name] = envs.explained(name, str(error))
    return found, missing


@dataclass
class Measured:
    """How lines are measured: seconds for each contestant, and for a line at most; what probes, and its process."""

    seconds: float
    patience: float
    probe: Worker
    rng: np.random.Generator


def at_once(call, libraries):
    """What ``call(library)`` gives, or how it fails, of each; as many at a time as there are cores."""

    def tried(library):
        try:
            return call(library)
        except (Died, Missing) as error:
            return error

    with ThreadPoolExecutor(cores()) as pool:
        return list(pool.map(tried, libraries))


def measure(libraries, letter, kind, how, flops=0):
    """Race all that there are for this kind of the problem that the libraries have: a `report.Line`."""
    rows, contestants = [], {}
    line = report.Line(letter, kind, rows)
    made_of = at_once(lambda library: library.contestants(kind), libraries)
    for library, forms in zip(libraries, made_of, strict=True):
        if isinstance(forms, Exception):
            forms = {"": str(forms)}
        for form, made in forms.items():
            row = report.Row(library.name, form, flops=flops, peer=library.peer)
            if isinstance(made, str):
                row.reason = made
            else:
                contestants[row.name], row.error, row.bytes = made, made.error, made.bytes
                line.pieces.update({size: [] for size in made.pieces})
            rows.append(row)
    if not contestants:
        return line

    def probe():
        rate = how.probe.ask("probe")
        for size, costs in line.pieces.items():
            costs.append(how.probe.ask("probe_pieces", size=size))
        return rate

    pids = [how.probe.pid, *(library.pid for library in libraries)]
    result = race(
        contestants, how.seconds, probe, how.rng, rounds_of(how.seconds), pids, how.patience
    )
    line.probes = [x.probe for x in result.rounds]
    line.others = fmean(x.others for x in result.rounds)
    line.left_out, line.noisy = 0 if result.all_count else result.left_out, result.noisy
    for row in rows:
        row.reason = row.reason or result.lost.get(row.name, "")
    for row in line.ran:
        row.seconds = result.seconds(row.name)
        row.share = share(result, row.name, row.bytes)
        faster = result.ratio(row.name, line.ours.name) if line.ours else None
        row.ratio = 1 / faster.middle if faster else None
    return line


def give(libraries, problem):
    """Tell all libraries the problem; those that die of it are left out, and the reasons returned."""
    said = at_once(lambda library: library.problem(**problem), libraries)
    told = list(zip(libraries, said, strict=True))
    lost = {library.peer: str(why) for library, why in told if isinstance(why, Exception)}
    return [library for library in libraries if library.peer not in lost], lost


def show(line):
    """Print a line as soon as it is there."""
    print(f"\n{labelled(line.shape)}, {line.kind}")
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
    if line.left_out:
        print(f"  {line.left_out} rounds left out, in which something else ran")
    if line.noisy:
        print(
            f"  NOISY: OTHER PROCESSES USED {line.others:.0%} OF THE CORES: repeat it on a quiet machine"
        )
    sys.stdout.flush()


def unused(path):
    """The path, or with a number where there is a report already."""
    names = (path.with_stem(f"{path.stem}-{n}") for n in itertools.count(2))
    return next(x for x in itertools.chain([path], names) if not x.exists())


def told(options, libraries, missing, probe):
    """Paragraphs: on what, with which versions, how, and who is missing."""
    versions = ", ".join(library.versions for library in libraries)
    paragraphs = [
        f"{cpu_name()}, {cores()} cores, {platform.system()}; Python {platform.python_version()}, "
        f"NumPy {np.__version__}, {versions}. {threads()} threads for each. Read bandwidth: {probe.versions}.",
        f"`python -m perf --seconds {options.seconds:g}`: each library in a process of its own, of which one runs at a "
        f"time while the others sleep; turns in random order, "
        f"{rounds_of(options.seconds)} rounds without other load, where slow contestants sit rounds out; "
        f"each goes through as many separate layers as make {COLD >> 20} MB, at most {MOST_LAYERS}. Results were "
        "compared with float64 before. ONNX Runtime and OpenVINO append the newest row in the operation itself; vLLM's "
        "8-bit caches are fp8, llama.cpp's q8_0 and q4_0.",
    ]
    if missing:
        reasons = "; ".join(f"{name} ({why})" for name, why in missing.items())
        paragraphs.append(f"Not there: {reasons}.")
    return paragraphs


def to_compare(line):
    """What the check compares: the fastest form of each library in a line, numkv's contiguous one, by peer."""
    rows = [*line.best_of_each.values()]
    if line.ours:
        rows = [line.ours, *(row for row in rows if row.peer != OURS)]
    return {
        row.peer: fairness.Compared(line.shape, line.kind, row.library, row.form) for row in rows
    }


def main(argv=None):
    """Do what the options say; the report is written after every line, the picture at the end."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        module, *first = COMMANDS[argv[0]].split()
        sys.exit(importlib.import_module(f"perf.{module}").main([*first, *argv[1:]]))
    options = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(run(options, Problems(folder)))


def run(options, problems):
    """The race and the check; the exit status."""
    started = time.perf_counter()
    found, missing = load([OURS, *options.peers])
    for name, why in missing.items():
        print(f"{name} is not there: {why}", file=sys.stderr)
    probe = Worker("perf.bandwidth")
    libraries = list(found.values())
    paragraphs = told(options, libraries, missing, probe)

    today = datetime.date.today().isoformat()
    options.out.mkdir(parents=True, exist_ok=True)
    path = unused(options.out / f"{today}-{report.slug(cpu_name())}-{cores()}-cores-peers.md")
    title = f"{today}: numkv beside others, {cores()} cores of {cpu_name()}"
    decode, prefill, compared = [], [], []

    def write(pictures=()):
        decode.sort(key=lambda line: (KINDS.index(line.kind), line.shape))
        text = report.document(
            title, paragraphs, SHAPES | PREFILL, decode, prefill, compared, pictures
        )
        path.write_text(text, encoding="utf-8")

    rng = np.random.default_rng(0)
    how = Measured(options.seconds, options.patience, probe, rng)
    for letter in options.shapes:
        is_prefill = letter in PREFILL
        there, lost = give(libraries, problems[letter])
        for name, why in lost.items():
            print(f"{name} does not run on {letter}: {why}", file=sys.stderr)
        for kind in options.kinds:
            if is_prefill and kind not in PREFILL_KINDS:
                continue
            flops = causal_flops(PREFILL[letter]) if is_prefill else 0
            line = measure(there, letter, kind, how, flops)
            line.rows += [report.Row(name, "", reason=why) for name, why in lost.items()]
            (prefill if is_prefill else decode).append(line)
            show(line)
            write()
    everybody = (probe, *libraries)
    peak = sum(peak_memory(worker.pid) for worker in everybody)
    for worker in everybody:
        worker.close()
    minutes = (time.perf_counter() - started) / 60
    print(f"\n{minutes:.1f} minutes; the processes took {peak / 1e9:.1f} GB at their peaks")
    if not decode + prefill:
        sys.exit(f"nothing to measure: prefill runs in {' and '.join(PREFILL_KINDS)}")

    for line in decode + prefill:
        if (line.shape, line.kind) in options.check:
            print(f"\nthe race beside each alone: {labelled(line.shape)}, {line.kind}")
            check = fairness.Check(
                line.kind,
                to_compare(line),
                problems[line.shape],
                Library,
                lambda: Worker("perf.bandwidth"),
                options.seconds / 2,
                rng,
            )
            compared += check.run()
            write()
    for one in compared:
        ratio = report.number(one.ratio)
        print(f"  {one.shape} {one.kind:5} {one.name:52} {ratio:>5}  {one.verdict}")

    if decode:
        try:
            write(report.draw_all(decode, path.with_suffix(".svg")))
        except ImportError as error:
            print(f"no picture: {error}", file=sys.stderr)
    found = bars.verdicts(decode + prefill)
    print(f"\n{bars.head_count(found)}", *bars.misses(found), sep="\n  ")
    print(f"\nwritten: {path}")
    if any(x.noisy for x in decode + prefill) or any(x.others > MOST for x in compared):
        print("OTHER PROCESSES USED THE CORES TOO: do not quote these figures", file=sys.stderr)
    unfair = [one for one in compared if not one.fair]
    if unfair:
        print("THE RACE IS NOT FAIR, see above: do not quote its figures", file=sys.stderr)
    elif not compared:
        print("the race was not checked: no line of --check was raced", file=sys.stderr)
    return int(bool(unfair))


if __name__ == "__main__":
    main()
