"""Attention on CPUs with narrower vectors: Numba is told of another CPU, in a process of its own.

Vectors of 256 bits take INT8 as integers and INT4 as floats; those of 128 bits know no half floats and no products of
16-bit integers.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
sys.path.insert(0, "tests")
import numpy as np
import naive, paged_problems, tolerances
from numkv.kernels.cpu import simd
from problems import Shape
assert simd.LANES == LANES, simd.LANES
rng = np.random.default_rng(0)
for kind in ("fp16", "int8", "int4"):
    for shape in (Shape(6, 2, 96, (70, 33)), Shape(7, 1, 34, (41,), new=(3,)), Shape(8, 1, 64, (1100,))):
        problem = paged_problems.make(rng, shape, kind, block_size=16)
        problem.check(lambda x: x, lambda x: x)
    problem.check(lambda x: x, lambda x: x, window_left=500, logits_soft_cap=5.0)
print("right")
"""


@pytest.mark.parametrize(("cpu", "lanes"), [("haswell", 8), ("x86-64", 4)])
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names x86 CPUs")
def test_other_cpus(cpu, lanes, tmp_path):
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("LANES, simd", f"{lanes}, simd")],
        env=environment, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "right"
