"""Saving and loading beside the disk alone: ``python -m perf files``.

A `numkv.KVCache` is saved and loaded, with checksums, in turns with the same bytes written and read plainly: written
in large pieces and brought to the disk by ``fsync``, read in large pieces into one buffer, after the system was told to
forget them (``posix_fadvise``). Each is done in several rounds, and the best of each counts, as the disk and the cores
may have others to serve. A ratio of 1 is the speed of the disk; above that, the disk was busier in its own turns.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import numkv
from perf.load import beside
from perf.report import table

PIECE = 8 << 20
HEADS, DIM, LAYERS = 8, 128, 32
GOAL = 0.5


def filled(size, kind):
    """A cache of about so many bytes, all of them tokens."""
    of_token = LAYERS * numkv.kind(kind).bytes_per_token(HEADS, DIM)
    tokens = max(1, round(size / of_token))
    cache = numkv.KVCache(LAYERS, HEADS, DIM, max_seq_len=tokens, kind=kind)
    rows = np.random.default_rng(0).standard_normal((tokens, HEADS, DIM), np.float32)
    for layer in range(LAYERS):
        cache.append(layer, rows, np.roll(rows, layer, 0))
    cache.advance(tokens)
    return cache


def memory(path):
    """The bytes of a file, in pieces: what the disk alone writes."""
    with open(path, "rb") as file:
        return [memoryview(x) for x in iter(lambda: file.read(PIECE), b"")]


def write(path, pieces):
    """The bytes, and nothing else."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for piece in pieces:
        rest = piece
        while len(rest):
            rest = rest[os.write(descriptor, rest) :]
    os.fsync(descriptor)
    os.close(descriptor)


def read(path, buffer):
    """The bytes, into one buffer."""
    descriptor = os.open(path, os.O_RDONLY)
    while os.readv(descriptor, [buffer]):
        pass
    os.close(descriptor)


def forget(path):
    """Have the system read a file from the disk the next time."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def seconds(call):
    """How long a call takes; what it returns is dropped after that."""
    start = time.perf_counter()
    result = call()
    took = time.perf_counter() - start
    del result
    return took


def measure(folder, size, kind, rounds):
    """Seconds of each, by name, for each round; and the bytes of the file."""
    cache = filled(size, kind)
    saved, plain = folder / "saved", folder / "plain"
    numkv.save(saved, cache)
    pieces, buffer = memory(saved), memoryview(bytearray(PIECE))
    times = {"write": [], "save": [], "read": [], "load": []}
    for turn in range(rounds):
        for path in (saved, plain):
            path.unlink(missing_ok=True)
        times["write"].append(seconds(lambda: write(plain, pieces)))
        times["save"].append(seconds(lambda: numkv.save(saved, cache)))
        forget(plain), forget(saved)
        reads = [("read", lambda: read(plain, buffer)), ("load", lambda: numkv.load(saved))]
        # A rented disk may serve the first gigabyte faster than the second.
        for name, call in reads if turn % 2 else reads[::-1]:
            times[name].append(seconds(call))
    return times, saved.stat().st_size


def main(argv):
    """``python -m perf files``."""
    parser = argparse.ArgumentParser(prog="python -m perf files", description=__doc__)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure; /tmp")
    parser.add_argument("--bytes", type=float, default=2**30, help="of the cache (2**30)")
    parser.add_argument("--kind", default="bf16", help="storage kind (bf16)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    load = beside([])
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        times, size = measure(Path(folder), options.bytes, options.kind, options.rounds)
    best = {name: min(found) for name, found in times.items()}
    rows = []
    for ours, plain in (("save", "write"), ("load", "read")):
        speeds = [f"{size / best[name] / 1e9:.2f}" for name in (ours, plain)]
        rows.append([ours, *speeds, f"{best[plain] / best[ours]:.2f}"])
    print(f"a cache of {size / 2**30:.2f} GiB in {options.kind}, best of {options.rounds} rounds")
    print(table(["", "GB/s", "the disk alone", "ratio"], rows, (1, 2, 3)))
    print(f"other processes used {load.of_others():.0%} of the cores")
    return int(min(best["write"] / best["save"], best["read"] / best["load"]) < GOAL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
