"""Prove that two versions of numkv give the same results, to the last bit.

    python tools/same_results.py BEFORE [AFTER] [--on host haswell simulator] [--only 'attention:*']

BEFORE and AFTER are git commits, or folders that hold a source tree; AFTER is the working tree if it is left out. Each
runs the calls of `tools/results.py` in a process of its own, with kernels compiled anew, and AFTER loads the files that
BEFORE has written. The names of results that differ are printed, and the exit status is 1 if there are any, if one side
lacks a result, or if a case has ended with an error that it does not expect. What BEFORE cannot have, such as a kind
that is new, is allowed by ``--allow-new '*fp8*'``. With ``--keep FOLDER`` the results of commits are kept there, and
taken from there the next time.

The simulator needs the package greenlet. On two cores each environment takes minutes for each side.
"""

import argparse
import contextlib
import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tools" / "results.py"

#: Target and settings of Numba for each environment.
ENVIRONMENTS = {
    "host": ("cpu", {}),
    # Without the features of the machine, as on a real one.
    "haswell": ("cpu", {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""}),
    "simulator": ("cuda", {"NUMBA_ENABLE_CUDASIM": "1"}),
}


def git(*args):
    """What a git command says."""
    return subprocess.run(
        ["git", *args], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


@contextlib.contextmanager
def tree(version):
    """The folder of a version, and its commit if it is one."""
    if Path(version).is_dir():
        yield Path(version).resolve(), None
        return
    commit = git("rev-parse", "--verify", f"{version}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="numkv-") as folder:
        git("worktree", "add", "--detach", f"{folder}/tree", commit)
        try:
            yield Path(folder) / "tree", commit
        finally:
            git("worktree", "remove", "--force", f"{folder}/tree")


def run(source, on, ours, theirs, only):
    """Run the cases over a source tree; results and files go to `ours`, files are loaded from `theirs`."""
    target, settings = ENVIRONMENTS[on]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")} | settings
    ours.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="numkv-kernels-") as kernels:
        environment |= {
            "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", "NUMBA_CACHE_DIR": kernels,
            "NUMBA_NUM_THREADS": "2", "NUMKV_PROGRESS": "0",
        }  # fmt: skip
        command = [sys.executable, "-W", "ignore::DeprecationWarning", CASES, target, ours, theirs]
        subprocess.run([*command, "--only", only], check=True, env=environment, cwd=kernels)
    found = read(ours)
    if Path(found["package"]) != source / "numkv":
        sys.exit(f"expected numkv of {source}, got {found['package']}")


def read(folder):
    """Results that a run has written."""
    return json.loads((folder / "results.json").read_text())


def kept(folder, commit, on, only):
    """Where the results of a commit are kept; those of other cases or another machine lie elsewhere."""
    machine = Path("/proc/cpuinfo")
    known = machine.read_text().split("\n\n")[0] if machine.exists() else ""
    model = "".join(line for line in known.splitlines() if line.startswith(("model name", "flags")))
    key = hashlib.sha256(CASES.read_bytes() + f"{sys.version}{model}{only}".encode()).hexdigest()
    return folder.resolve() / f"{commit[:12]}-{on}-{key[:12]}"


def compare(before, after, allow_new):
    """Print what differs; returns how many results do."""
    ours, theirs = before["results"], after["results"]
    different = []
    for name in dict.fromkeys([*ours, *theirs]):
        if name not in ours:
            if not any(fnmatch.fnmatch(name, pattern) for pattern in allow_new):
                different.append(f"{name}: only after")
        elif name not in theirs:
            different.append(f"{name}: only before")
        elif ours[name] != theirs[name]:
            told = (
                f": {ours[name]!r}, then {theirs[name]!r}"
                if ": " in ours[name] + theirs[name]
                else ""
            )
            different.append(name + told)
    for line in different:
        print("  differs:", line)
    for name in dict.fromkeys([*before["broken"], *after["broken"]]):
        print("  ends with an error:", name)
    refused = sum(": " in value for value in ours.values())
    print(
        f"  {len(before['seconds'])} cases with {len(ours)} results before, of them {refused} errors; "
        f"{len(after['seconds'])} with {len(theirs)} after; {len(different)} results differ",
        flush=True,
    )
    return len(different) + len(before["broken"]) + len(after["broken"])


def main():
    """Compare two versions in each environment."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", help="commit or folder")
    parser.add_argument("after", nargs="?", default=str(ROOT), help="commit or folder")
    parser.add_argument("--on", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    parser.add_argument("--only", default="*", metavar="PATTERN", help="names of cases")
    parser.add_argument("--allow-new", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the results of commits")
    args = parser.parse_args()
    wrong = 0
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="numkv-results-")))
        (before, commit), (after, _) = (
            stack.enter_context(tree(version)) for version in (args.before, args.after)
        )
        for on in args.on:
            first, started = scratch / on / "before", time.perf_counter()
            known = kept(args.keep, commit, on, args.only) if args.keep and commit else None
            if known and (known / "results.json").exists():
                first = known
            else:
                run(before, on, first, first, args.only)
                if known:
                    shutil.copytree(first, known)
            middle = time.perf_counter()
            run(after, on, scratch / on / "after", first, args.only)
            print(f"{on}: {middle - started:.0f} s and {time.perf_counter() - middle:.0f} s")
            wrong += compare(read(first), read(scratch / on / "after"), args.allow_new)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
