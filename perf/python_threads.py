"""Two Python threads that call numkv at once, each with one thread of Numba's: ``python -m perf threads``.

Each has a K and V of its own of 1 MB, so that caches serve both cores, and calls that take 1 ms or more; the same
calls are also made one after the other. The ratio of the two times says how much two threads gain: 2 at best.
A hash that Python computes outside its lock shows what the machine's cores give.

Then a server: Python threads that each decode a layer after another, with all of Numba's threads for whoever calls. The
throughput of 2 and of 8 of them is compared with that of one thread that makes the same calls.
"""

import argparse
import hashlib
import subprocess
import sys
import threading
import time
from statistics import median

from perf.load import beside_children
from perf.peers import FLOATS, cores
from perf.report import table
from perf.workers import ROOT, environment

SIZE = 1 << 20  # bytes of K, and of V
DIM = 128
Q_HEADS = 4
SHORTEST = 1e-3  # seconds of a call
KINDS = ("fp32", "bf16", "int8")
SERVER_LENGTHS = (1024, 8192)  # tokens of a sequence, of 8 kv heads
SERVERS = (2, 8)


def _time(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _prompt(kind, queries):
    """A call of `queries` tokens over rows of a kind, with K and V of its own."""
    import numpy as np

    import numkv

    dtype = np.dtype(FLOATS.get(kind, np.int8))
    length = SIZE // (DIM * dtype.itemsize)
    rng = np.random.default_rng(0)
    rows, scales = rng.standard_normal((2, 1, 1, length, DIM), np.float32), {}
    if kind in FLOATS:
        k, v = rows.astype(dtype)
    else:
        k, v = np.clip(100 * rows, -127, 127).astype(dtype)
        scales = {f"{x}_scale": np.full(k.shape[:-1], 0.01, np.float32) for x in "kv"}
    q = rng.standard_normal((queries, Q_HEADS, DIM), np.float32)
    return lambda: numkv.prefill_attention(q, k, v, [length], [0, queries], **scales)


def long_enough(make, amount=1):
    """The least power of two with which a call takes long enough."""
    while True:
        call = make(amount)
        call()
        if median(_time(call) for _ in range(5)) >= SHORTEST:
            return amount
        amount *= 2


def _repeat(call, times):
    for _ in range(times):
        call()


def _at_once(calls, times):
    threads = [threading.Thread(target=_repeat, args=(call, times)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def gain(calls, seconds, rounds, by_turns=False):
    """The time of the calls one after the other / at once, each in a thread; median over rounds. And that of one.

    One after the other: each often, with its memory in caches, or `by_turns`, so that they share caches as at once.
    """
    one = median(_time(call) for call in calls for _ in range(5))
    times = max(1, round(seconds / one / len(calls)))
    ratios = []
    for _ in range(rounds):
        if by_turns:
            in_turn = _time(lambda: [call() for _ in range(times) for call in calls])
        else:
            in_turn = _time(lambda: [_repeat(call, times) for call in calls])
        ratios.append(in_turn / _time(lambda: _at_once(calls, times)))
    return median(ratios), one


def _hash(amount):
    data = bytes(amount << 16)
    return lambda: hashlib.sha256(data).digest()


def child(seconds, rounds):
    """Measure and print."""
    rows = []
    for name, make in {
        "sha256": _hash,
        **{f"attention, {kind}": lambda n, kind=kind: _prompt(kind, n) for kind in KINDS},
    }.items():
        amount = long_enough(make)
        ratio, one = gain([make(amount) for _ in range(2)], seconds, rounds)
        what = f"{name}, {amount} queries" if name != "sha256" else name
        rows.append([what, f"{one * 1e3:.2f}", f"{ratio:.2f}"])
    print(table(["call", "ms", "in turn / at once"], rows, (1, 2)))


def _step(length):
    """A call that decodes one token over `length` tokens, with K and V of its own."""
    import numpy as np

    import numkv

    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 1, 8, length, DIM), np.float32)
    q = rng.standard_normal((1, 32, DIM), np.float32)
    return lambda: numkv.decode_attention(q, k, v, [length])


def server(seconds, rounds):
    """Measure and print: Python threads that decode at once, and the same calls in one thread."""
    rows = []
    for length in SERVER_LENGTHS:
        for number in SERVERS:
            ratio, one = gain([_step(length) for _ in range(number)], seconds, rounds, True)
            rows.append([f"{number} threads, {length} tokens", f"{one * 1e3:.2f}", f"{ratio:.2f}"])
    print(table(["decode in fp32", "ms", "in turn / at once"], rows, (1, 2)))


def main(argv):
    """``python -m perf threads``."""
    parser = argparse.ArgumentParser(prog="python -m perf threads", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.3, help="of calls in a round (0.3)")
    options = parser.parse_args(argv)
    values = [*map(str, vars(options).values())]
    load, status = beside_children(), 0
    for part, threads in (("gains", 1), ("server", cores())):
        command = [sys.executable, "-m", "perf.python_threads", part, *values]
        status |= subprocess.run(command, env=environment(threads), cwd=ROOT).returncode
        print()
    print(f"other processes used {load.of_others():.0%} of the cores")
    return status


if __name__ == "__main__":
    {"gains": child, "server": server}[sys.argv[1]](
        rounds=int(sys.argv[2]), seconds=float(sys.argv[3])
    )
