"""Play random calls of everything public, with arguments right and wrong, between guard pages.

    python -m tests.fuzz --calls 1000000 --minutes 30 --jobs 2      a night's run
    python -m tests.fuzz --seed 7 --from 123456                     the episode of that call again, up to it

Prints what came of the calls, and every defect with how it is played again; the exit status is 1 if there is one.
`--only Attention,Layers` plays some scenes only.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

#: Calls of an episode; `fuzz.episodes` has the same, but loads numkv.
CALLS = 100
#: Episodes that a worker plays before it says what came of them.
AT_ONCE = 10
#: Seconds that one call may take, which may have to compile kernels.
PATIENCE = 600


class Report:
    """What came of all calls.

    Attributes
    ----------
    defects : list of tuple
        Number of the call, kind, callable, what happened.
    """

    def __init__(self) -> None:
        self.accepted = 0
        self.refused: Counter[str] = Counter()
        self.defects: list[tuple[int, str, str, str]] = []
        self.lock = threading.Lock()

    def add(self, told: dict) -> None:
        """Add what a worker tells."""
        with self.lock:
            self.accepted += told["accepted"]
            self.refused.update(told["refused"])
            self.defects += [tuple(d) for d in told["defects"]]

    @property
    def calls(self) -> int:
        """How many there were."""
        return self.accepted + sum(self.refused.values()) + len(self.defects)


class Worker:
    """A child process, started anew when it has died."""

    def __init__(self, folder: str, name: str, only: str, report: Report) -> None:
        self.progress, self.errors = f"{folder}/{name}.progress", f"{folder}/{name}.errors"
        Path(self.progress).write_bytes(bytes(1 << 12))
        self.only, self.report = only, report
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the process, and wait until it can play."""
        environment = os.environ | {"PYTHONHASHSEED": "0"}
        program = f"import sys; sys.path.insert(0, {str(TESTS)!r}); from fuzz import worker; worker.main(*sys.argv[1:])"
        with open(self.errors, "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, self.progress, self.only],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
            )  # fmt: skip
        if self.process.stdout.readline().strip() != "ready":
            raise RuntimeError(Path(self.errors).read_text()[-2000:])

    def play(self, seed: int, first: int, many: int) -> None:
        """Play episodes; those that kill the process are left out after the call that did."""
        from fuzz.worker import read_progress

        end = first + many
        while first < end:
            if self.process is None:
                self.start()
            self.process.stdin.write(f"{seed} {first} {end - first}\n")
            self.process.stdin.flush()
            line = self.wait()
            if line:
                self.report.add(json.loads(line))
                return
            number, text = read_progress(self.progress)
            status = self.process.poll()
            kind = "hang" if status is None else "crash"
            self.stop()
            why = f"{PATIENCE} s" if kind == "hang" else f"status {status}"
            frames = Path(self.errors).read_text().splitlines()[:12]
            detail = f"{text} -> {why} {' | '.join(f.strip() for f in frames)}"[:1500]
            self.report.add(
                {
                    "accepted": 0,
                    "refused": {},
                    "defects": [(number, kind, text.split(":")[0], detail)],
                }
            )
            before = number // CALLS - first
            if before > 0:  # play again what came before it, of which nothing has been told
                self.play(seed, first, before)
            first = number // CALLS + 1

    def wait(self) -> str:
        """The next line, or nothing if the process has died or plays one call for too long."""
        from fuzz.worker import read_progress

        since, known = time.monotonic(), read_progress(self.progress)[0]
        while True:
            ready, _, _ = select.select([self.process.stdout], [], [], 1.0)
            if ready:
                line = self.process.stdout.readline()
                if not line:
                    self.process.wait()
                return line
            now = read_progress(self.progress)[0]
            if now != known:
                since, known = time.monotonic(), now
            elif time.monotonic() - since > PATIENCE:
                return ""

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def run(seed: int, calls: int, minutes: float, jobs: int, only: str = "", first: int = 0) -> Report:
    """Play calls in child processes until there are enough of them, or the time is up.

    Parameters
    ----------
    seed : int
        What all calls follow from.
    calls : int
        How many.
    minutes : float
        When to end at the latest, but for what has begun.
    jobs : int
        Processes at once.
    only : str
        Scenes to play, by commas; all if empty.
    first : int
        Episode to begin with.

    Returns
    -------
    Report
    """
    report = Report()
    chunks = iter(range(first, first + -(-calls // CALLS), AT_ONCE))
    last = first + -(-calls // CALLS)
    lock, end = threading.Lock(), time.monotonic() + 60 * minutes

    def work(name: str) -> None:
        worker = Worker(folder, name, only, report)
        try:
            while time.monotonic() < end:
                with lock:
                    at = next(chunks, None)
                if at is None:
                    return
                worker.play(seed, at, min(AT_ONCE, last - at))
        finally:
            worker.stop()

    with tempfile.TemporaryDirectory() as folder:
        threads = [threading.Thread(target=work, args=(str(i),)) for i in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return report


def tell(report: Report, seed: int, seconds: float) -> None:
    """Print what came of a run."""
    from fuzz import SHORT

    refused = sum(report.refused.values())
    print(
        f"seed {seed}: {report.calls:,} calls in {seconds:.0f} s ({report.calls / seconds:,.0f} a second); "
        f"{report.accepted:,} accepted, {refused:,} refused"
    )
    print(
        "refused:", ", ".join(f"{name} {n:,}" for name, n in report.refused.most_common()) or "none"
    )
    kinds = Counter(kind for _, kind, _, _ in report.defects)
    print(
        f"defects: {len(report.defects):,}",
        *(f"{kind} {n:,}" for kind, n in kinds.most_common()),
        sep=", ",
    )
    groups: dict[tuple[str, str, str], list[tuple[int, str]]] = {}
    for number, kind, name, detail in sorted(report.defects):
        words, _, error = detail.partition(" -> ")
        odd = ";".join(word.partition("=")[0].strip() for word in words.split("; "))
        key = (
            kind,
            name,
            f"{odd} {error.split(':')[0]}" if ";" not in odd else error.split(":")[0],
        )
        groups.setdefault(key, []).append((number, detail))
    for (kind, name, _), found in sorted(groups.items()):
        print(f"- {kind}: {name}, {len(found)} times; call {found[0][0]}: {found[0][1]}")
    if report.defects:
        short = f"{SHORT}=1 " if os.environ.get(SHORT) else ""
        print(f"again: {short}python -m tests.fuzz --seed {seed} --from CALL")


def main() -> int:
    """Parse the arguments, play, print."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument(
        "--calls", type=int, help="how many; 20,000, or with --from those of its episode"
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--from",
        type=int,
        default=None,
        dest="first",
        help="number of a call: begin with its episode",
    )
    parser.add_argument("--only", default="", help="scenes, by commas")
    options = parser.parse_args()
    first, calls, jobs = 0, options.calls or 20_000, options.jobs
    if options.first is not None:
        first, calls, jobs = options.first // CALLS, options.calls or CALLS, 1
    begun = time.monotonic()
    report = run(options.seed, calls, options.minutes, jobs, options.only, first)
    tell(report, options.seed, time.monotonic() - begun)
    return 1 if report.defects else 0


if __name__ == "__main__":
    sys.exit(main())
