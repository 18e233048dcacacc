"""A library in a process of its own: ``python -m perf.worker MODULE``.

It reads commands from standard input, one JSON object a line, and answers each with one on standard output. What a
library prints itself goes to standard error. The other end is `perf.workers`.
"""

import gc
import importlib
import itertools
import json
import os
import sys
import time

import numpy as np

from perf.peers import CALLS, LARGEST_ERROR, OURS, STANDS_FOR, CannotRun
from perf.shapes import Shape, problem_of

#: Calls that do not count precede those that do, for so many seconds and once over all layers: threads wake up, and
#: memory that has lain idle, which virtual machines read slowly the first time, is touched.
SETTLE = 0.03
#: But no longer than this: calls so slow do not wait for memory.
SETTLE_MOST = 0.5
#: A process that uses less than this share of one core is asleep.
ASLEEP = 0.02


def reason_of(error):
    """One line that says what went wrong."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = said[-1] if said else "no message"
    return text if isinstance(error, CannotRun) else f"{type(error).__name__}: {text[:200]}"


def checked(make, problem, kind):
    """A contestant and its error; `CannotRun` if the result of its first or last layer is wrong."""
    contestant = make(problem)
    most = contestant.largest_error or LARGEST_ERROR[kind]
    for layer in {0, contestant.layers - 1}:
        error = problem.error(contestant.floats(contestant.run(layer)))
        if not error <= most:
            raise CannotRun(f"wrong result, its relative error is {error:.1e}")
    return contestant, error


def turn(run, layers, first, seconds, clock=time.perf_counter):
    """Times of one call after another, until `seconds` are over, and the layer that is next."""
    layer = itertools.cycle((*range(first, layers), *range(first)))
    start = clock()
    for called in itertools.count(1):
        run(next(layer))
        spent = clock() - start
        if spent >= SETTLE_MOST or (called >= layers and spent >= min(SETTLE, seconds)):
            break
    times, start = [], clock()
    while True:
        before = clock()
        run(next(layer))
        now = clock()
        times.append(now - before)
        if now - start >= seconds:
            return times, next(layer)


def fall_asleep(most=2.0, step=0.01, clock=time.perf_counter, used=time.process_time):
    """Wait until this process's threads spin no more; the seconds that it took."""
    start = clock()
    while True:
        before, at = used(), clock()
        time.sleep(step)
        if used() - before <= ASLEEP * (clock() - at):
            return at - start
        if clock() - start > most:
            return clock() - start


class Commands:
    """What a worker does; every public method is a command."""

    def __init__(self, library):
        self._library = library
        self._problem = None
        self._contestants = {}
        self._next = {}

    def hello(self):
        return {"name": self._library.NAME, "versions": self._library.versions()}

    def problem(self, shape, prefill, seed, expected=None):
        """The rows of a shape, the same in every process; `expected` is a file with the right result."""
        self.free()
        self._problem = problem_of(Shape(*shape), prefill, seed)
        if expected:
            self._problem.expected = np.load(expected)

    def forms(self, kind):
        return list(self._forms(kind))

    def make(self, kind, form):
        """Make a contestant and check its result."""
        try:
            contestant, error = self._checked(kind, form)
        except Exception as why:  # whatever a library throws, the report says it
            return {"reason": reason_of(why)}
        self._contestants[form] = contestant
        return {
            "error": error,
            "bytes": contestant.bytes,
            "layers": contestant.layers,
            "pieces": contestant.pieces,
        }

    def turn(self, form, seconds):
        """Call a contestant for so long, then sleep until its threads do."""
        contestant = self._contestants[form]
        first = self._next.get(form, 0)
        gc.collect()
        gc.disable()
        try:
            times, self._next[form] = turn(contestant.run, contestant.layers, first, seconds)
        finally:
            gc.enable()
        return {"times": [t / contestant.calls for t in times], "awake": fall_asleep()}

    def free(self):
        """Let go of all contestants."""
        self._contestants.clear()
        self._next.clear()
        if self._problem:
            self._problem.forget_layers()
        gc.collect()

    def probe(self):
        """The machine's read bandwidth in bytes a second: `perf.bandwidth` only."""
        rate = self._library.read() * 1e9
        fall_asleep()
        return rate

    def probe_pieces(self, size):
        """How many times as long pieces of so many bytes take in shuffled order as in order."""
        cost = self._library.shuffled_pieces(size)
        fall_asleep()
        return cost

    def _checked(self, kind, form):
        """A contestant and its error; one of `CALLS` checks itself."""
        make = self._forms(kind)[form]
        return (make(), 0.0) if kind == CALLS else checked(make, self._problem, kind)

    def _forms(self, kind):
        if kind == CALLS:
            return self._library.CALLS
        what = "prefill" if self._problem.flops else "decode"
        if self._library.NAME != OURS:
            kind = STANDS_FOR.get(kind, kind)
        return getattr(self._library, what)(kind)


def answer(commands, line):
    """What a line asks for, as a line."""
    asked = json.loads(line)
    said = getattr(commands, asked.pop("do"))(**asked)
    return json.dumps(said)


def main(module):
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what libraries print must not get between the replies
    try:
        commands = Commands(importlib.import_module(module))
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), file=replies, flush=True)
        return
    # Each turn collects garbage: that need not look at all that was imported every time.
    gc.collect()
    gc.freeze()
    print(json.dumps(commands.hello()), file=replies, flush=True)
    for line in requests:
        print(answer(commands, line), file=replies, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
