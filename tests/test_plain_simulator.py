"""CUDA kernels in the simulator that users get, Numba's own; the other tests have `tests/simulator.py`."""

import ast
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import processes
import pytest

from numkv.kinds import kinds

ROOT = Path(__file__).resolve().parent.parent

EACH_KIND = """
from numkv import targets

on = targets.get("cuda")
found = {}
rng = np.random.default_rng(0)
k, v = rng.standard_normal((2, 5, 1, 32)).astype(np.float32)
q = rng.standard_normal((1, 2, 32)).astype(np.float32)
for kind in os.environ["KINDS"].split():
    cache = numkv.KVCache(1, 1, 32, max_seq_len=8, kind=kind, target="cuda")
    for rows in (slice(0, 4), slice(4, 5)):
        cache.append(0, on.asarray(k[rows]), on.asarray(v[rows]))
    cache.advance(5)
    scores = q[0] @ k[:, 0].T / np.sqrt(32)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    expected = weights / weights.sum(1, keepdims=True) @ v[:, 0]
    got = on.to_host(cache.decode_attention(0, on.asarray(q))).astype(np.float64)[0]
    found[kind] = float(abs(got - expected).max())
print(json.dumps(found))
"""


FIRST = [
    "bf16",
    "int8",
    "code6",
    "int4",
]  # a float; scales of rows, and of groups; codes of several bytes
OTHERS = [x.name for x in kinds() if x.name not in FIRST]


@pytest.mark.slow
@pytest.mark.parametrize("names", [FIRST, OTHERS], ids=["some", "others"])
def test_every_kind(names):
    found = processes.run(EACH_KIND, NUMBA_ENABLE_CUDASIM="1", KINDS=" ".join(names))
    assert list(found) == names
    for kind, error in found.items():
        # Rows are normal, so the widest step of a kind's codes is what the bound follows.
        bound = {"fp64": 1e-6, "fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2, "int8": 3e-2, "code6": 0.1}
        assert error < bound.get(kind, 0.4), kind


@pytest.mark.nightly
def test_every_operation():
    """A case of each test of a kernel."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "plain_simulator", "-p", "no:cacheprovider", "tests/kernels"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]


def test_each_shared_array_has_a_line_of_its_own():
    """By its line Numba's simulator tells one from another."""
    for path in sorted((ROOT / "numkv" / "kernels" / "cuda").rglob("*.py")):
        calls = [
            node.func
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
        ]
        lines = Counter(x.lineno for x in calls if ast.unparse(x).endswith("shared.array"))
        twice = [line for line, count in lines.items() if count > 1]
        assert not twice, f"{path}:{twice[:1]}: two shared arrays on one line; put them on two"
