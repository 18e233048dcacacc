"""This tree's numkv against that of another commit or folder: ``python -m perf against COMMIT_OR_PATH``.

Each tree has a process of its own, which takes numkv from that tree and everything else from this one's `perf`; one
runs at a time while the other sleeps. Three groups of lines: attention, on the shapes, kinds and layouts of
``python -m perf``; calls for one token; and starts of fresh processes with compiled kernels on disk. A round is one
turn of each, which is first changing from round to round; ratios are formed within a round and the median over rounds
counts. What differs by more than 3 % is measured again, in fresh processes, before it is said to differ: the median
over all its runs counts then. perf/README.md says more.
"""

import argparse
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean, median

import numpy as np

from numkv.bench.rounds import MOST
from perf import envs
from perf.calls import CALLS as ONE_TOKEN
from perf.load import beside, beside_children
from perf.peers import CALLS, INT8_BESIDE, LARGEST_ERROR, OURS, CannotRun, numkv_, threads
from perf.report import table
from perf.shapes import PREFILL, PREFILL_KINDS, SHAPES, Problems
from perf.workers import ROOT, Died, Library, Missing, environment

#: A line differs if its ratio is further from 1 than this, either way.
TOLERANCE = 0.03
ROUNDS = 12
FEWEST_ROUNDS = 6
#: Starts get so many times the seconds of other lines: each is but one figure, and they are few.
MORE_FOR_STARTS = 10

ATTENTION, STARTS = "attention", "starts"
GROUPS = {ATTENTION: "attention", CALLS: "one-token calls", STARTS: "cold starts"}

_FIRST_CALLS = """
import numpy as np
import numkv
cache, row = numkv.KVCache(1, 8, 128, kind={kind!r}), np.ones((8, 128), np.float32)
cache.append(0, row, row)
cache.advance()
cache.decode_attention(0, row)
"""
#: What fresh processes run.
SCRIPTS = {
    "import": "import numkv",
    **{
        f"import, append, attention {kind}": _FIRST_CALLS.format(kind=kind)
        for kind in ("fp16", "int8")
    },
}


# ------------------------------------------------------------------ lines and ratios


@dataclass
class Run:
    """A line in one pair of processes: the median times of the turns, in seconds, by round."""

    other: list[float] = field(default_factory=list)
    this: list[float] = field(default_factory=list)

    @property
    def ratios(self):
        return [mine / theirs for mine, theirs in zip(self.this, self.other, strict=True)]

    @property
    def ratio(self):
        return median(self.ratios)


@dataclass
class Line:
    """What is timed, where it stands in `perf`, and what came out; `letter` is that of a shape."""

    group: str
    letter: str
    kind: str
    form: str
    runs: list[Run] = field(default_factory=list)
    reason: str = ""  # why it does not run
    others: float = 0.0  # the share of the cores that other processes used, at most

    @property
    def name(self):
        where = f"{self.letter}/{self.kind}" if self.group == ATTENTION else ""
        return f"{where} {self.form}".strip()

    @property
    def ran(self):
        return bool(self.runs) and not self.reason

    @property
    def ratio(self):
        """The time of this tree / that of the other: the median over the runs."""
        return median(run.ratio for run in self.runs)

    @property
    def spread(self):
        """Between which ratios the middle half of all rounds lies."""
        every = [x for run in self.runs for x in run.ratios]
        return tuple(float(x) for x in np.quantile(every, [0.25, 0.75]))

    def seconds(self, tree):
        """Median time of a call in a tree, "this" or "other"."""
        return median(itertools.chain.from_iterable(getattr(run, tree) for run in self.runs))

    @property
    def differs(self):
        return self.ran and not 1 / (1 + TOLERANCE) <= self.ratio <= 1 + TOLERANCE

    @property
    def slower(self):
        return self.differs and self.ratio > 1


def every_line():
    """All lines there are."""
    lines = []
    for letter, kind in itertools.product(SHAPES, LARGEST_ERROR):
        forms = [form for form in numkv_.decode(kind) if form != INT8_BESIDE]
        lines += [Line(ATTENTION, letter, kind, form) for form in forms]
    for letter, kind in itertools.product(PREFILL, PREFILL_KINDS):
        lines += [Line(ATTENTION, letter, kind, form) for form in numkv_.prefill(kind)]
    lines += [Line(CALLS, "", CALLS, name) for name in ONE_TOKEN]
    return lines + [Line(STARTS, "", "", name) for name in SCRIPTS]


def in_turns(contestants, seconds, rounds=ROUNDS, fewest=FEWEST_ROUNDS):
    """Time "other" and "this", a dict of contestants, for about so many seconds each: a `Run`.

    The order is A B B A, and so on; those whose calls are slow have fewer rounds, but an even number.
    """
    run, spent = Run(), 0.0
    for n in range(rounds):
        if n % 2 == 0 and n >= fewest and spent >= 2 * seconds:
            break
        order = ["other", "this"] if n % 2 == 0 else ["this", "other"]
        for tree in order:
            times = contestants[tree].turn(seconds / rounds)
            getattr(run, tree).append(median(times))
            spent += sum(times)
    return run


# ------------------------------------------------------------------ trees


def _git(*args):
    done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True)
    if done.returncode:
        raise LookupError((done.stderr.strip().splitlines() or ["git fails"])[-1])
    return done.stdout.strip()


def _described(folder):
    """A folder, with its commit where it is a repository."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return f"{folder} ({done.stdout.strip()})"
    return str(folder)


def _copy(tree, to):
    """The package alone, without what was compiled."""
    shutil.copytree(tree / "numkv", to / "numkv", ignore=shutil.ignore_patterns("__pycache__"))


@contextlib.contextmanager
def both_trees(other):
    """Temporary trees, by "this" and "other", and what they are: this one as it is now, and a commit or folder.

    Copies, so that edits meanwhile change nothing, and both lie alike.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="numkv-against-")))
        folder = folder.resolve()
        trees = {"this": folder / "this", "other": folder / "other"}
        _copy(ROOT, trees["this"])
        told = {"this": _described(ROOT)}
        given = Path(other)
        if (given / "numkv" / "__init__.py").is_file():
            _copy(given, trees["other"])
            told["other"] = _described(given.resolve())
        else:
            commit = _git(
                "rev-parse", "--verify", "--quiet", "--end-of-options", f"{other}^{{commit}}"
            )
            _git("worktree", "add", "--detach", "--quiet", str(trees["other"]), commit)
            stack.callback(_git, "worktree", "remove", "--force", str(trees["other"]))
            told["other"] = f"{other} ({_git('describe', '--always', commit)})"
        yield trees, told


def variables_of(tree):
    """What a tree's processes find in their environment: compiled kernels are kept beside the trees."""
    return {"NUMKV_PERF_TREE": str(tree), "NUMBA_CACHE_DIR": str(tree.parent / "kernels")}


class Start:
    """Fresh processes of a tree that run a script; a turn is one of them, whatever the seconds."""

    def __init__(self, tree, script):
        path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
        self._env = environment(threads()) | variables_of(tree) | {"PYTHONPATH": path}
        self._script, self._folder = script, tree.parent
        file = Path(self._out(f"{script}\nprint(numkv.__file__)").splitlines()[-1])
        if file.resolve().parent != tree / "numkv":
            raise CannotRun(f"expected numkv out of {tree}, got {file}")

    def _out(self, script):
        # -P, as the working directory is not to be imported from.
        command = [envs.this(), "-P", "-c", script]
        done = subprocess.run(
            command, env=self._env, cwd=self._folder, capture_output=True, text=True
        )
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise CannotRun(said[-1][:200])
        return done.stdout

    def turn(self, seconds):
        start = time.perf_counter()
        self._out(self._script)
        return [time.perf_counter() - start]


# ------------------------------------------------------------------ measuring


class Pair:
    """Both trees' processes; what is not timed they do at the same time."""

    def __init__(self, trees, problems, start=Library):
        self._problems, self._letter, self._kind = problems, "", ""
        self._libraries = {}
        try:
            for name, tree in trees.items():
                self._libraries[name] = start(OURS, "perf.tree", variables=variables_of(tree))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self):
        return [library.pid for library in self._libraries.values()]

    def contestants(self, line):
        """Those of a line, by tree; layouts of the same shape and kind share the rows in memory."""
        problem = None
        if line.letter and line.letter != self._letter:
            problem, self._letter = self._problems[line.letter], line.letter
        new_kind, self._kind = line.kind != self._kind, line.kind

        def make(tree):
            library = self._libraries[tree]
            try:
                if problem:
                    library.problem(**problem)
                elif new_kind:
                    library.free()
                return library.only(line.kind, line.form)
            except (CannotRun, Died, Missing) as error:
                raise CannotRun(f"{tree}: {error}") from None

        with ThreadPoolExecutor(len(self._libraries)) as pool:
            made = list(pool.map(make, self._libraries))
        return dict(zip(self._libraries, made, strict=True))

    def close(self):
        for library in self._libraries.values():
            library.close()


def add_run(line, contestants, seconds, load, say):
    """Time a line once more; ``contestants()`` makes those of both trees, ``load()`` watches the machine."""
    try:
        made = contestants()
        watched = load()
        run = in_turns(made, seconds)
    except (CannotRun, Died) as error:
        line.reason = str(error)
        say(f"  {line.name:40} does not run: {line.reason}")
        return
    line.runs.append(run)
    line.others = max(line.others, watched.of_others())
    say(f"  {line.name:40} {run.ratio:.3f}")


def measure(lines, trees, problems, seconds, say):
    """Time lines once, all in the same fresh processes but for the starts."""
    warm = [line for line in lines if line.group != STARTS]
    if warm:
        with contextlib.closing(Pair(trees, problems)) as pair:
            for line in warm:
                made = lambda line=line: pair.contestants(line)  # noqa: E731
                add_run(line, made, seconds, lambda: beside(pair.pids), say)
    for line in lines:
        if line.group == STARTS:
            script = SCRIPTS[line.form]
            made = lambda s=script: {name: Start(tree, s) for name, tree in trees.items()}  # noqa: E731
            add_run(line, made, MORE_FOR_STARTS * seconds, beside_children, say)


def repeated(lines, repeat, measure, say):
    """Measure all lines, then up to `repeat` times those that differ so far; ``measure(lines)`` adds a run to each."""
    measure(lines)
    for n in range(repeat):
        suspects = [line for line in lines if line.differs]
        if not suspects:
            break
        say(f"\n{len(suspects)} beyond {TOLERANCE:.0%}, run {n + 2} of at most {repeat + 1}:")
        measure(suspects)


# ------------------------------------------------------------------ what came out


def micro(seconds):
    """A time in microseconds, of which the short ones have decimals."""
    return f"{seconds * 1e6:,.{2 if seconds < 1e-4 else 0}f}"


def verdict(line):
    """What is said of a line beside its figures."""
    if line.differs:
        return "SLOWER" if line.slower else "faster"
    return "not confirmed" if len(line.runs) > 1 else ""


def lines_table(lines):
    """All lines, as a Markdown table."""
    header = ["line", "other, µs", "this, µs", "this / other", "middle half", "runs", "verdict"]
    rows = []
    for line in lines:
        if not line.ran:
            rows.append([line.name, f"does not run: {line.reason}", *[""] * (len(header) - 2)])
            continue
        low, high = line.spread
        rows.append(
            [
                line.name,
                *(micro(line.seconds(tree)) for tree in ("other", "this")),
                f"{line.ratio:.3f}",
                f"{low:.3f} to {high:.3f}",
                str(len(line.runs)),
                verdict(line),
            ]
        )
    return table(header, rows, range(1, 6))


def means_table(lines):
    """Geometric means of this / other, by group and of all."""
    ran = [line for line in lines if line.ran]
    groups = {told: [x for x in ran if x.group == group] for group, told in GROUPS.items()}
    rows = [
        [told, f"{geometric_mean(x.ratio for x in some):.3f}", str(len(some))]
        for told, some in {**groups, "all": ran}.items()
        if some
    ]
    return table(["this / other", "geometric mean", "lines"], rows, (1, 2))


def conclusions(lines):
    """Sentences: which lines differ, which do not run, and whether the machine was quiet."""
    said = []
    different = [line for line in lines if line.differs]
    for line in sorted(different, key=lambda x: x.ratio, reverse=True):
        times = "one run" if len(line.runs) == 1 else f"the median of {len(line.runs)} runs"
        said.append(f"{verdict(line)}: {line.name}, {line.ratio:.3f} in {times}")
    if not different:
        said.append(f"no line differs by more than {TOLERANCE:.0%}")
    said += [f"DOES NOT RUN: {x.name}: {x.reason}" for x in lines if not x.ran]
    most = max((x.others for x in lines), default=0.0)
    busy = [line for line in lines if line.others > MOST]
    if busy:
        said.append(
            f"OTHER PROCESSES USED UP TO {most:.0%} OF THE CORES in {len(busy)} of {len(lines)} lines: "
            "repeat it on a quiet machine"
        )
    return said


# ------------------------------------------------------------------ the program


def _regex(text):
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, {error}") from None


def parse(argv):
    parser = argparse.ArgumentParser(prog="python -m perf against", description=__doc__)
    parser.add_argument("other", metavar="COMMIT_OR_PATH", help="a commit, or a folder with numkv")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="for each tree and line (0.5); starts get more"
    )
    parser.add_argument(
        "--lines", type=_regex, metavar="REGEX", default="", help="only lines whose name has this"
    )
    parser.add_argument(
        "--repeat", type=int, default=3, help="how often to repeat what differs, at most (3)"
    )
    return parser.parse_args(argv)


def main(argv):
    """``python -m perf against``; the exit status is 1 if a line is slower or does not run."""
    options = parse(argv)
    lines = [line for line in every_line() if re.search(options.lines, line.name)]
    if not lines:
        sys.exit(f"no line's name has {options.lines.pattern!r} in it")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the worktree would stay
    started = time.perf_counter()
    say = lambda x: print(x, file=sys.stderr, flush=True)  # noqa: E731
    with contextlib.ExitStack() as stack:
        try:
            trees, told = stack.enter_context(both_trees(options.other))
        except (LookupError, OSError) as error:
            sys.exit(f"expected a commit or a folder with numkv, got {options.other!r}: {error}")
        problems = Problems(stack.enter_context(tempfile.TemporaryDirectory()))
        say(f"this: {told['this']}; other: {told['other']}\n\nthis / other:")
        once = lambda some: measure(some, trees, problems, options.seconds, say)  # noqa: E731
        repeated(lines, options.repeat, once, say)
    minutes = (time.perf_counter() - started) / 60
    print(f"\nthis: {told['this']}\nother: {told['other']}\n{minutes:.1f} minutes\n")
    print(lines_table(lines), means_table(lines), "\n".join(conclusions(lines)), sep="\n\n")
    return int(any(line.slower or not line.ran for line in lines))
