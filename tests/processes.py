"""Run scripts in processes of their own, for tests that would disturb pytest's process."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: Seconds after which a test's process or thread is taken to hang: it may have to compile on a busy machine.
PATIENCE = 900

#: Numba's threading layers on this machine; the dynamic linker finds TBB.
LAYERS = ["omp", "workqueue"]
with contextlib.suppress(ImportError):
    importlib.import_module("numba.np.ufunc.tbbpool")
    LAYERS.append("tbb")

#: The first of them in every run, the others in CI.
EACH_LAYER = [LAYERS[0], *(pytest.param(layer, marks=pytest.mark.slow) for layer in LAYERS[1:])]

# Numba prints this at a fork while threads of TBB are busy.
_TBB_SAYS = "Unable to join threads to shut down before fork(). This can break multithreading in child processes.\n"

# Every script can call `problem(tokens, kv_heads, dim)` and `decode(problem)`, and do so from a signal handler.
COMMON = """
import contextlib, json, os, signal, sys, threading, time
import numpy as np
import numkv

def problem(tokens, kv_heads, dim, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((1, 2 * kv_heads, dim), dtype=np.float32)
    k, v = rng.standard_normal((2, 1, kv_heads, tokens, dim), dtype=np.float32)
    return q, k, v, [tokens]

def decode(problem):
    return numkv.decode_attention(*problem)

@contextlib.contextmanager
def signals(seconds, call):
    # Call from a handler of SIGALRM, time and again, so many seconds after the last call: handlers would pile up where
    # calls take longer than an interval. A signal that arrives as the block ends may be handled after the timer is
    # stopped: if it started the timer again, that would end the process, which has no handler any more as it exits.
    over = False

    def handler(*_):
        call()
        if not over:
            signal.setitimer(signal.ITIMER_REAL, seconds)

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
"""


def run(script: str, *, timeout: float = PATIENCE, common: str = COMMON, **environment: str):
    """Run a script and return its last line, read as JSON; it must succeed and write nothing to stderr."""
    settings = os.environ | {"PYTHONPATH": str(ROOT), "NUMKV_PROGRESS": "0"} | environment
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", common + textwrap.dedent(script)],
        capture_output=True, text=True, env=settings, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr[-3000:]}"
    said = done.stderr.replace(_TBB_SAYS, "").strip()
    assert not said, said[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
