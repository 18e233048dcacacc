"""Who decodes in bf16 on a CPU with Intel's matrix unit: the unit, or vector code.

``python -m perf amx`` times both in one process, in turns, over layers that come from memory, and prints the median of
the ratios of each shape. It takes a minute, most of it to compile. If vector code is faster somewhere, the least and
the most query rows that the unit takes as few are `AMX_FEW` in `numkv/kernels/cpu/attention/records.py`;
``NUMKV_AMX_DECODE=0`` leaves all of them to vector code without an edit.
"""

import argparse
import time
from statistics import median

import ml_dtypes
import numpy as np

from perf.shapes import SHAPES, Shape, cold_layers, labelled

#: Shapes beside those of the race: other groups and head dims.
MORE = {
    "G": Shape(1, 64, 8, 128, 8192),
    "H": Shape(1, 16, 1, 128, 32768),
    "I": Shape(1, 32, 8, 256, 8192),
}
EVERY = SHAPES | MORE


NAMES = ("vector code", "matrix unit")


def engines():
    """A function that has later calls decode by an engine of `NAMES`; None where there is no unit."""
    from numkv.kernels.cpu import attention
    from numkv.kernels.cpu.attention.engines import MANY_ROWS, ROWS_OF_ALL_SIZES, use_amx

    if use_amx("bf16", "bf16", "float32") != ROWS_OF_ALL_SIZES:
        return None
    kernels, find = {}, attention._kernel
    for name, rows in zip(NAMES, (MANY_ROWS, ROWS_OF_ALL_SIZES), strict=True):
        attention._use_amx = lambda *kinds, rows=rows: rows
        find.cache_clear()
        kernels[name] = find("bf16", "bf16", "float32")

    def choose(name):
        attention._kernel = lambda *kinds: kernels[name]

    return choose


def time_shape(shape, choose, seconds):
    """Times of a layer by engine, in seconds, a median for each round; and how far apart the results are."""
    import numkv

    rng = np.random.default_rng(0)
    rows = (shape.batch, shape.kv_heads, shape.length, shape.dim)
    count = cold_layers(4 * int(np.prod(rows)))
    first = [rng.standard_normal(rows, np.float32).astype(ml_dtypes.bfloat16) for _ in range(2)]
    layers = [[x.copy() for x in first] for _ in range(count)]
    q = rng.standard_normal((shape.batch, shape.q_heads, shape.dim), np.float32)
    lens = np.full(shape.batch, shape.length, np.int32)
    times, results = {name: [] for name in NAMES}, {}
    for name in NAMES:
        choose(name)
        results[name] = numkv.decode_attention(q, *layers[0], lens)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[NAMES[0]]) < 3:
        for name in NAMES:
            choose(name)
            each = []
            for k, v in layers:
                start = time.perf_counter()
                numkv.decode_attention(q, k, v, lens)
                each.append(time.perf_counter() - start)
            times[name].append(median(each))
    vector, unit = (results[name] for name in NAMES)
    return times, float(np.linalg.norm(vector - unit) / np.linalg.norm(vector))


def main(argv=None):
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(prog="python -m perf amx", description=__doc__)
    parser.add_argument("--shapes", default=",".join(EVERY), help="letters, with commas")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each shape (3)")
    options = parser.parse_args(argv)
    letters = options.shapes.split(",")
    if not set(letters) <= EVERY.keys():
        parser.error(f"--shapes: expected some of {','.join(EVERY)}, got {options.shapes!r}")
    choose = engines()
    if choose is None:
        print("no matrix unit that this process may use, or NUMKV_AMX_DECODE=0")
        return 1
    print("| shape | vector code (us) | matrix unit (us) | times as fast | apart |")
    print("|---|---|---|---|---|")
    for letter in letters:
        times, apart = time_shape(EVERY[letter], choose, options.seconds)
        vector, unit = (times[name] for name in NAMES)
        ratio = median(a / b for a, b in zip(vector, unit, strict=True))
        print(
            f"| {labelled(letter)} | {1e6 * median(vector):,.0f} | {1e6 * median(unit):,.0f} | {ratio:.2f} "
            f"| {apart:.0e} |",
            flush=True,
        )
    return 0
