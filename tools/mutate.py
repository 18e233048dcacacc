"""Mutation tests: change one thing in the source at a time, and run the tests of that file.

    python tools/mutate.py --count 120                 a random choice of mutants, spread over the files
    python tools/mutate.py --files numkv/rows/int4.py  all mutants of some files
    python tools/mutate.py --again                     survivors so far, with the present tests
    python tools/mutate.py --report                    results so far, and the changes of the survivors

A mutant reverses a comparison, adds or subtracts 1 of a constant, exchanges ``and`` and ``or``, or ``+`` and ``-``,
negates a condition, moves the bound of a slice, or removes a statement. It is caught if a test fails, if the tests
need more than `SECONDS` of processor time, or if they hang. Processor time does not depend on the machine's load.

The work is done in a copy of the tree in a temporary folder. Results are appended to a file of JSON lines (``--log``),
so that a stopped run can continue. A mutant is identified by its file, function, line of text and change.
`tools/mutate_tests.py` lists the tests of each file. The tests of the unchanged file run first and must pass in time.
For files of kernels, that time includes compilation; other files use kernels on disk.
"""

import argparse
import ast
import collections
import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from mutate_tests import EQUIVALENT, tests_of

ROOT = Path(__file__).resolve().parents[1]
#: Most processor seconds for the tests of a mutant.
SECONDS = 60
#: Seconds of the clock after which tests without processor time count as hanging.
HANGS = 900
FOLDERS = ("rows", "kernels", "blocks", "cells", "storage", "caches/paged")
#: Files on which kernels on disk depend: `numkv.kernels.disk_cache`.
_SOURCES = ("blocks", "cells", "kernels", "rows")
#: Files without mutants: code for CUDA alone, and vector code that is LLVM text.
LEFT_OUT = (
    "kernels/cuda",
    "kernels/cpu/attention/llvm",
    "kernels/cpu/vectors",
    "kernels/operations",
)

TURNED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
SIGN = {"<": ast.Lt, "<=": ast.LtE, ">": ast.Gt, ">=": ast.GtE, "==": ast.Eq, "!=": ast.NotEq}


@dataclass(frozen=True)
class Mutant:
    """A file with one piece of text replaced."""

    file: str
    function: str
    line: int
    #: First and last character of the replaced text.
    begin: int
    end: int
    change: str
    new: str
    text: str

    @property
    def key(self):
        """Return its identity, which does not depend on the line's number."""
        parts = (self.file, self.function, self.text, self.change, self.new)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


class Finder:
    """Finds the places of mutants in a file."""

    def visit(self, node):
        """Visit a node by its own method, or visit its children."""
        getattr(self, METHODS.get(type(node), "visit_all"))(node)

    def __init__(self, file, source):
        self.file, self.source = file, source
        self.lines = source.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.names, self.found = [], []

    def place(self, node):
        """Return the first and last character of a node; columns of `ast` count bytes."""
        rows = (node.lineno - 1, node.col_offset), (node.end_lineno - 1, node.end_col_offset)
        return [
            self.starts[row] + len(self.lines[row].encode()[:column].decode())
            for row, column in rows
        ]

    def add(self, node, change, new, place=None):
        begin, end = place or self.place(node)
        line = self.source.count("\n", 0, begin) + 1
        column = begin - self.starts[line - 1]
        text = f"{self.lines[line - 1].strip()} @{column}"
        name = ".".join(self.names)
        self.found.append(Mutant(self.file, name, line, begin, end, change, new, text))

    def part(self, node):
        return self.source[slice(*self.place(node))]

    def visit_all(self, node):
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_comment"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.visit(child)

    def visit_function(self, node):
        self.names.append(node.name)
        self.visit_all(node)
        self.names.pop()

    def leave_alone(self, node):
        """Skip messages, imports and exports."""

    def visit_assign(self, node):
        if any(isinstance(t, ast.Name) and t.id.startswith("__") for t in node.targets):
            return
        if all(isinstance(t, (ast.Attribute, ast.Subscript)) for t in node.targets):
            self.add(node, "left out", "pass")
        self.visit_all(node)

    def visit_aug_assign(self, node):
        self.add(node, "left out", "pass")
        self.visit_all(node)

    def visit_expr(self, node):
        if isinstance(node.value, ast.Constant):  # a docstring
            return
        if isinstance(node.value, ast.Call):
            self.add(node, "left out", "pass")
        self.visit_all(node)

    def visit_test(self, node):
        self.add(node.test, "negated", f"(not ({self.part(node.test)}))")
        self.visit_all(node)

    def between(self, left, right):
        """Return the place between two operands, without parentheses."""
        begin, end = self.place(left)[1], self.place(right)[0]
        text = self.source[begin:end]
        bare = text.strip(" ()\\\n")
        at = begin + text.index(bare)
        return bare, (at, at + len(bare))

    def visit_compare(self, node):
        operands = [node.left, *node.comparators]
        for i, operator in enumerate(node.ops):
            sign, place = self.between(*operands[i : i + 2])
            if SIGN.get(sign) is type(operator):
                self.add(node, "compared otherwise", TURNED[type(operator)], place)
        self.visit_all(node)

    def visit_bool_op(self, node):
        sign, place = self.between(*node.values[:2])
        if len(node.values) == 2 and sign in ("and", "or"):
            self.add(node, "and, or", "or" if sign == "and" else "and", place)
        self.visit_all(node)

    def visit_bin_op(self, node):
        sign, place = self.between(node.left, node.right)
        if sign in "+-" and not isinstance(node.left, (ast.Constant, ast.JoinedStr)):
            self.add(node, "plus, minus", "-" if sign == "+" else "+", place)
        self.visit_all(node)

    def visit_constant(self, node):
        if type(node.value) is int:
            for by in (1, -1):
                self.add(node, f"constant {by:+d}", f"({node.value + by})")

    def visit_slice(self, node):
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant):
                self.add(bound, "slice bound +1", f"({self.part(bound)}) + 1")
        self.visit_all(node)


#: Methods by type of node.
METHODS = {
    ast.FunctionDef: "visit_function", ast.ClassDef: "visit_function", ast.Raise: "leave_alone",
    ast.JoinedStr: "leave_alone", ast.Import: "leave_alone", ast.ImportFrom: "leave_alone", ast.Assert: "leave_alone",
    ast.Assign: "visit_assign", ast.AugAssign: "visit_aug_assign", ast.Expr: "visit_expr", ast.If: "visit_test",
    ast.While: "visit_test", ast.IfExp: "visit_test", ast.Compare: "visit_compare", ast.BoolOp: "visit_bool_op",
    ast.BinOp: "visit_bin_op", ast.Constant: "visit_constant", ast.Slice: "visit_slice",
}  # fmt: skip


def mutants_of(file):
    """Return all mutants of a file, given by its path from the root."""
    finder = Finder(file, (ROOT / file).read_text())
    finder.visit(ast.parse(finder.source))
    return finder.found


def files():
    """Return the files that are mutated."""
    found = sorted(p for folder in FOLDERS for p in (ROOT / "numkv" / folder).rglob("*.py"))
    names = [path.relative_to(ROOT).as_posix() for path in found]
    return [n for n in names if not n.startswith(tuple(f"numkv/{part}" for part in LEFT_OUT))]


def choose(chosen, seed):
    """Return all mutants of some files in random order, alternating between files."""
    rng = random.Random(seed)
    queues = []
    for file in chosen:
        queue = mutants_of(file)
        rng.shuffle(queue)
        queues.append(queue)
    rng.shuffle(queues)
    while queues:
        for queue in queues:
            if queue:
                yield queue.pop()
        queues = [queue for queue in queues if queue]


def makes_kernels(file):
    """Return whether a change of a file compiles kernels again."""
    return file.split("/")[1] in _SOURCES


class Workplace:
    """A copy of the tree, in which one file at a time is replaced."""

    def __init__(self, folder):
        self.folder = folder
        #: Tests of files without kernels whose kernels are compiled already.
        self.warm: set[tuple[str, ...]] = set()
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file() and not name.startswith("perf/results"):
                (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, folder / "tree" / name)

    def test(self, file, source, seconds):
        """Run the tests of a file with another source; return the outcome and the processor time."""
        tree = self.folder / "tree"
        before = (tree / file).read_text()
        (tree / file).write_text(source)
        kernels = self.folder / ("new" if makes_kernels(file) else "kept")
        shutil.rmtree(self.folder / "new", ignore_errors=True)
        try:
            return self._run(tests_of(file), seconds, kernels)
        finally:
            (tree / file).write_text(before)

    def _run(self, tests, seconds, kernels):
        settings = os.environ | {
            "PYTHONPATH": str(self.folder / "tree"), "PYTHONDONTWRITEBYTECODE": "1",
            "NUMBA_CACHE_DIR": str(kernels), "NUMKV_PROGRESS": "0",
        }  # fmt: skip

        def limit():
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))

        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests],
            cwd=self.folder / "tree", env=settings, preexec_fn=limit, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            output = process.communicate(timeout=HANGS)[0]
            hangs = False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, hangs = process.communicate()[0], True
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # processes of a test that was killed
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        code = process.returncode
        if hangs:
            outcome = "hangs"
        elif code == -signal.SIGXCPU or (code == -signal.SIGKILL and spent >= seconds):
            outcome = "too slow"
        elif code == 0:
            outcome = "survived"
        elif code == 1:
            outcome = "caught"
        elif code < 0:
            outcome = f"caught by signal {-code}"
        else:
            outcome = "caught" if code == 2 else f"no tests: status {code}"  # 2: not even imported
        return outcome, spent, output


def judged(path):
    """Return the results in the log by key; later lines replace earlier ones."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["key"]: line for line in map(json.loads, lines)}


def keep(path, **line):
    """Append a line to the log."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def check_unchanged(place, file, log):
    """Return whether the tests of an unchanged file pass in time; print it once."""
    key = f"{file} {tests_of(file)}"
    known = judged(log).get(key)
    source = (place.folder / "tree" / file).read_text()
    tests = tuple(tests_of(file))
    if not makes_kernels(file) and tests not in place.warm:  # each time: the folder is a new one
        place.test(file, source, 10 * SECONDS)
        place.warm.add(tests)
    if known is None:
        outcome, spent, output = place.test(file, source, SECONDS)
        known = {"key": key, "file": file, "unchanged": outcome, "seconds": round(spent, 1)}
        keep(log, **known)
        print(f"{file}, unchanged: {outcome}, {spent:.0f} s", flush=True)
        if outcome != "survived":
            print(output[-2000:])
    return known["unchanged"] == "survived"


def run(mutants, log, count, again=frozenset()):
    """Run the tests of some mutants that are not in the log, or are to be tested `again`."""
    done = {key for key, line in judged(log).items() if "outcome" in line} - again
    with tempfile.TemporaryDirectory(prefix="numkv-mutants-") as folder:
        place = Workplace(Path(folder))
        for mutant in mutants:
            if count <= 0:
                return
            if (
                mutant.key in done
                or not tests_of(mutant.file)
                or not check_unchanged(place, mutant.file, log)
            ):
                continue
            done.add(mutant.key)
            source = (place.folder / "tree" / mutant.file).read_text()
            changed = source[: mutant.begin] + mutant.new + source[mutant.end :]
            try:
                ast.parse(changed)
            except SyntaxError:
                continue
            started = time.monotonic()
            outcome, spent, output = place.test(mutant.file, changed, SECONDS)
            failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
            keep(
                log, key=mutant.key, file=mutant.file, line=mutant.line, function=mutant.function, change=mutant.change,
                old=source[mutant.begin : mutant.end], new=mutant.new, text=mutant.text, outcome=outcome,
                seconds=round(spent, 1), clock=round(time.monotonic() - started), by=failed[:1],
            )  # fmt: skip
            count -= 1
            print(
                f"{outcome:10} {mutant.file}:{mutant.line} {mutant.change}: {mutant.text}",
                flush=True,
            )


def report(log):
    """Print the results; return whether a survivor has no explanation."""
    lines = [line for line in judged(log).values() if "outcome" in line]
    by_room = collections.defaultdict(collections.Counter)
    for line in lines:
        room = "/".join(line["file"].split("/")[1:3]).removesuffix(".py")
        kind = line["outcome"].split(" by ")[0]
        by_room[room][kind] += 1
    kinds = ["caught", "too slow", "hangs", "survived"]
    print(f"{'':24}" + "".join(f"{kind:>10}" for kind in kinds))
    for room in sorted(by_room):
        print(f"{room:24}" + "".join(f"{by_room[room][kind]:10}" for kind in kinds))
    total = sum(by_room.values(), collections.Counter())
    print(f"{f'all {len(lines)}':24}" + "".join(f"{total[kind]:10}" for kind in kinds))
    print(f"{sum(line['seconds'] for line in lines):.0f} s of processor time")
    unexplained = 0
    for line in lines:
        if line["outcome"] == "survived":
            why = EQUIVALENT.get(line["key"])
            unexplained += why is None
            print(
                f"\n{line['key']} {line['file']}:{line['line']} {line['function']}, {line['change']}"
            )
            print(f"    {line['text'].rpartition(' @')[0]}\n    {line['old']!r} -> {line['new']!r}")
            print(f"    {'no explanation' if why is None else why}")
    print(f"\nsurvivors without an explanation: {unexplained}")
    return unexplained > 0


def main():
    """Read the arguments and go."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--count", type=int, default=100, help="mutants to judge (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: %(default)s)")
    parser.add_argument("--files", nargs="+", help="mutate these alone")
    parser.add_argument(
        "--log", type=Path, default=Path("mutants.jsonl"), help="results (default: %(default)s)"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="judge the survivors again, and those that were too slow",
    )
    parser.add_argument(
        "--report", action="store_true", help="print the results so far, and test nothing"
    )
    arguments = parser.parse_args()
    if not arguments.report:
        mutants = choose(arguments.files or files(), arguments.seed)
        again = set()
        if arguments.again:
            lines = judged(arguments.log).items()
            again = {key for key, line in lines if line.get("outcome") in ("survived", "too slow")}
            again -= EQUIVALENT.keys()
            mutants = [mutant for mutant in mutants if mutant.key in again]
            arguments.count = len(mutants)
        run(mutants, arguments.log, arguments.count, again)
    return report(arguments.log)


if __name__ == "__main__":
    sys.exit(main())
