"""``python -m perf compile``: what the first calls of a process cost, with no kernels on disk.

CPU seconds of one process, in units of a small Numba function that is compiled in the same process: so figures of one
machine can be held against another's. A layer of 4 kv heads of 64 with 16 q heads; of each kind the first token, then
the first prompt of 40 tokens. Then the demo's first text, cold and once more, and what whoever has edited a row's
arithmetic waits for: the test of INT8's rows, with all kernels out of date.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ["fp16", "int8", "bf16"]
_HEADS, _DIM, _PROMPT = (16, 4), 64, 40


def unit():
    """CPU seconds of one small compilation, the fastest of four; the first one sets Numba up."""
    import numba

    def score(rows, weights, chosen):
        best, total = -1.0, 0.0
        for number in chosen:
            row = rows[number]
            for i in range(row.size):
                product = row[i] * weights[i]
                total += product if product > 0 else -0.5 * product
            part = row[1:].max() + weights[:2].sum()
            ordered = row.copy()
            ordered.sort()
            best = max(best, part / (1 + ordered[0]))
        return best + total

    def once():
        reals = numba.types.float64
        signature = (reals[:, ::1], reals[::1], numba.types.int64[::1])
        began = time.process_time()
        numba.njit(signature)(score)
        return time.process_time() - began

    return min(once() for _ in range(4))


def first_calls(kinds):
    """CPU seconds of each kind's first token and first prompt, in one process."""
    import numpy as np

    import numkv

    q_heads, heads = _HEADS
    found = []
    for kind in kinds:
        layer = numkv.ContiguousLayer(512, heads, _DIM, kind=kind)
        for tokens in (1, _PROMPT):
            rows = np.ones((tokens, heads, _DIM), np.float32)
            q = np.ones((tokens, q_heads, _DIM), np.float32)
            began = time.process_time()
            layer.append(rows, rows)
            layer.decode_attention(q)
            found.append(time.process_time() - began)
    return found


DEMO = ["numkv", "--tokens", "16"]
#: Without what imports PyTorch or starts processes.
EDIT = [
    "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "cpu",
    "tests/kernels/test_append_int8.py::test_ties_go_to_the_even_code",
]  # fmt: skip


def user_seconds(module, environment):
    """User seconds of a module that is run with arguments, and of its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "-m", *module]
    subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def empty():
    """An environment in which nothing has been compiled yet."""
    folder = tempfile.mkdtemp()
    return os.environ | {
        "XDG_CACHE_HOME": folder, "NUMBA_CACHE_DIR": folder, "NUMKV_PROGRESS": "0", "PYTHONPATH": str(ROOT),
    }  # fmt: skip


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m perf compile", description=__doc__)
    parser.add_argument(
        "kinds", nargs="*", default=KINDS, help=f"kinds, one after another ({' '.join(KINDS)})"
    )
    parser.add_argument("--no-demo", action="store_true", help="first calls only")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.here:
        of_unit = unit()
        print(of_unit, *first_calls(options.kinds))
        return
    command = [sys.executable, "-m", "perf", "compile", "--here", *options.kinds]
    done = subprocess.run(
        command, cwd=ROOT, env=empty(), stdout=subprocess.PIPE, text=True, check=True
    )
    of_unit, *seconds = map(float, done.stdout.split())
    print(f"One unit is {of_unit:.2f} CPU seconds here.\n")
    print("| first calls of a process without kernels on disk | units |\n|---|---|")
    for i, kind in enumerate(options.kinds):
        token, prompt = (x / of_unit for x in seconds[2 * i : 2 * i + 2])
        after = f", after {' and '.join(options.kinds[:i])}" if i else ""
        print(f"| {kind}{after}: append and decode of a token | {token:.1f} |")
        print(f"| {kind}: then a prompt of {_PROMPT} tokens | {prompt:.1f} |")
    if not options.no_demo:
        environment = empty()
        cold, warm = (user_seconds(DEMO, environment) for _ in range(2))
        print(
            f"| `python -m numkv --tokens 16`: cold, of {cold:.1f} user s | {cold / of_unit:.1f} |"
        )
        print(f"| ... once more, of {warm:.1f} user s | {warm / of_unit:.1f} |")
        edit = user_seconds(EDIT, empty())
        print(
            f"| an edit of a row's arithmetic until its test tells, {edit:.1f} user s | {edit / of_unit:.1f} |"
        )


if __name__ == "__main__":
    main()
