"""Compiling ahead of time."""

import subprocess
import sys

import numpy as np
import pytest
from processes import PATIENCE

import numkv
from numkv.cli import main
from numkv.kernels.builder import cache_stats

pytestmark = pytest.mark.kernels

CHECK = """
import numpy as np, numkv
from numkv.kernels.builder import cache_stats
layer = numkv.PagedLayer(4, 3, 2, 48, kind="fp16")
layer.append(*np.ones((2, 5, 2, 48), np.float32))
layer.decode_attention(np.ones((5, 6, 48), np.float16))
long = numkv.ContiguousLayer(1200, 2, 48, kind="fp16")
long.append(*np.ones((2, 1100, 2, 48), np.float32))
long.decode_attention(np.ones((1, 6, 48), np.float16))
print(cache_stats())
"""


@pytest.mark.slow
def test_what_is_warm_is_not_compiled_again(tmp_path):
    """Other sizes than those of the warm-up, in another process."""
    env = {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(filter(None, sys.path))}
    options = {"capture_output": True, "text": True, "env": env, "timeout": PATIENCE}
    first = subprocess.run([sys.executable, "-m", "numkv", "warmup"], **options, check=True)
    assert "kernels compiled, 0 there already" in first.stdout
    second = subprocess.run([sys.executable, "-c", CHECK], **options, check=True)
    assert "'misses': 0" in second.stdout
    assert "'hits': 0" not in second.stdout


@pytest.mark.nightly
def test_processes_put_kernels_on_disk_for_this_one(tmp_path):
    code = "import numkv; print(numkv.warmup(['fp16', 'bf16'], dtypes=['fp16'], processes=2))"
    env = {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=PATIENCE, check=True
    )  # fmt: skip
    assert "'misses': 0" in run.stdout
    assert "'hits': 0" not in run.stdout


def test_processes_are_a_number_of_them():
    for wrong, error in ((0, numkv.DimensionMismatch), ("2", TypeError)):
        with pytest.raises(error, match="processes"):
            numkv.warmup([], processes=wrong)


@pytest.mark.slow
def test_kinds_apart_and_quantised(capsys):
    found = numkv.warmup([("int8", "fp16")])
    again = numkv.warmup([("int8", "fp16")])
    assert sum(found.values()) > 0 or sum(again.values()) == 0
    assert again["misses"] == 0
    assert main(["warmup", "--kind", "int8/fp16"]) == 0
    assert "0 kernels compiled" in capsys.readouterr().out
    assert main(["warmup", "--kind", "fp17"]) == 2


def test_rotated_and_full_precision_tokens(capsys):
    """A cache of one step after another, as a prompt and token by token, loads no further kernel."""
    numkv.warmup(["int8"], rotate=True, residual=True)
    before = cache_stats()
    for options in (
        {},
        {"rotate": True},
        {"rotate": True, "full_precision": numkv.FullPrecision(2)},
    ):
        layer = numkv.PagedLayer(4, 3, 2, 48, kind="int8", **options)
        for tokens in (5, 1, 1):
            layer.append(*np.ones((2, tokens, 2, 48), np.float32))
            layer.decode_attention(np.ones((1, 6, 48), np.float32))
        q = layer.write(np.ones((1, 10 * 48), np.float32), num_q_heads=6, qk_mode=0)
        layer.decode_attention(q)
    assert cache_stats() == before
    assert main(["warmup", "--kind", "int8", "--rotate", "--residual"]) == 0
    assert "0 kernels compiled" in capsys.readouterr().out
