"""Count the functions through which queries pass in `Step.attention`, and those that return an array.

    python tools/stops.py [--names]

A stop is a function of numkv that receives the queries or a view of them; a return is a stop that returns an array.
Calls of many sorts are followed on the CPU. The output has the most stops and returns of one call, and all functions of
all calls.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

import numkv

ROOT = Path(numkv.__file__).resolve().parent
CODES = {"kind": "int8", "full_precision": numkv.FullPrecision(window=8, num_sink_tokens=2)}
SINKS = np.zeros(4, np.float32)
SLOPES = np.ones(4, np.float32)
#: Options of layers, tokens of a sequence's step, and options of the call.
CALLS = {
    "plain": ({}, 1, {}),
    "prompt": ({}, 20, {}),
    "every option": ({"window_left": 9}, 3, {"sinks": SINKS, "out": True, "alibi_slopes": SLOPES, "return_lse": True}),
    "not causal": ({}, 3, {"causal": False, "logits_soft_cap": 2.0}),
    "rotated": ({"kind": "int4", "rotate": True}, 1, {}),
    "shared": ({}, 1, {"shared_len": 16, "sinks": SINKS}),
    "codes and full precision": (CODES, 1, {}),
    "the same, with options": (CODES, 3, {"sinks": SINKS, "out": True, "return_lse": True}),
}  # fmt: skip


def follow(layer, tokens, options):
    """Return the functions that receive the queries of one call, and those of them that return an array."""
    rows = np.random.default_rng(0).standard_normal((3, 40, 4, 64)).astype(np.float32)
    cache = numkv.PagedKVCache(layers=[numkv.LayerSpec(2, 64, **layer)], num_blocks=64)
    first = cache.add()
    step = cache.reserve([first], [40])
    step.append(0, rows[0, :, :2], rows[1, :, :2])
    cache.commit(step)
    step = cache.reserve([first, cache.fork(first)], [tokens, tokens])
    step.append(0, rows[0, : 2 * tokens, :2], rows[1, : 2 * tokens, :2])
    q = rows[2, : 2 * tokens]
    if "out" in options:
        options = {**options, "out": np.empty_like(q)}
    step.attention(0, q, **options)  # compiles
    frames, stops, returns = [], [], []

    def watch(frame, event, given):
        code = frame.f_code
        if not code.co_filename.startswith(str(ROOT)):
            return
        place = f"{code.co_filename.split(':')[0].removeprefix(str(ROOT))[1:]}: {code.co_name}"
        if event == "call":
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            taken = [frame.f_locals.get(name) for name in names]
            taken += [each for x in taken if isinstance(x, (tuple, list)) for each in x]
            if any(isinstance(x, np.ndarray) and np.may_share_memory(x, q) for x in taken):
                frames.append(frame)
                stops.append(place)
        elif event == "return" and frame in frames:
            found = given if isinstance(given, tuple) else (given,)
            if any(isinstance(x, np.ndarray) for x in found):
                returns.append(place)

    sys.setprofile(watch)
    try:
        step.attention(0, q, **options)
    finally:
        sys.setprofile(None)
    return stops, returns


def main():
    """Follow every call, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--names", action="store_true", help="name the functions of each call")
    names = parser.parse_args().names
    met = set(), set()
    for label, call in CALLS.items():
        found = follow(*call)
        print(f"{label:26}{len(found[0]):4} stops{len(found[1]):4} returns")
        for of_all, own in zip(met, found, strict=True):
            of_all.update(own)
        if names:
            print(*(f"    {place}" for place in found[0]), sep="\n")
    print(f"{'functions of all together':26}{len(met[0]):4}      {len(met[1]):4}")


if __name__ == "__main__":
    main()
