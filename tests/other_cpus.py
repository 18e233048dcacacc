"""Checks of attention in processes that compile for another CPU."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: Names of CPUs, as LLVM has them, and how many floats their vectors have.
LANES = {"haswell": 8, "x86-64": 4, "sandybridge": 8, "skylake-avx512": 16, "alderlake": 8}
#: Kinds whose code differs from that of the CPUs above.
KINDS = {
    "haswell": ("fp16", "int8", "int4", "code4", "code6"),
    "x86-64": ("fp16", "int8", "int4", "code4", "code6"),
    "sandybridge": ("fp16",),  # neither multiply-add nor integers of 256 bits
    # Products of bytes and words are added by two instructions.
    "skylake-avx512": ("int8", "int4", "code4", "code6"),
    "alderlake": ("int8", "int4"),  # dot products in vectors of 256 bits
}

SCRIPT = """
import sys
sys.path.insert(0, "tests")
import numpy as np
import paged_problems
from numkv.kernels.cpu.vectors import features
from problems import Shape
lanes = int(sys.argv[1])
assert features.LANES == lanes, features.LANES
rng = np.random.default_rng(0)
for kind in sys.argv[2:]:
    dim = 40 if kind == "code6" else 34
    for shape in (Shape(6, 2, 96, (70, 33)), Shape(7, 1, dim, (41,), new=(3,)), Shape(8, 1, 64, (1100,))):
        problem = paged_problems.make(rng, shape, kind, block_size=16)
        problem.check(lambda x: x, lambda x: x)
    problem.check(lambda x: x, lambda x: x, window_left=500, logits_soft_cap=5.0)
print("right")
"""


def start(cpu, cache):
    """Start the checks for a CPU, with compiled kernels in the folder `cache`; they print "right" in the end."""
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(LANES[cpu]), *KINDS[cpu]],
        env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
