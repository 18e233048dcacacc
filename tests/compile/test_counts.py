"""The counts of executed instructions, for a call whose accesses can be told by hand."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    pytest.skip("the simulator is on: compile in a process without it", allow_module_level=True)
if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("numba-cuda is not installed (extra: cuda)", allow_module_level=True)


def test_a_copy_reads_and_writes_each_16_bytes_once(tmp_path):
    kept = tmp_path / "counts.json"
    command = [sys.executable, "-m", "tools.cuda.row_counts", "--lines", "^copy_tokens bf16$"]
    done = subprocess.run(
        [*command, "--keep", str(kept)], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (counts,) = json.loads(kept.read_text()).values()
    # 32 tokens of 4 heads of 128 elements of 2 bytes, 16 bytes for each of the 32 threads of a warp.
    accesses = 32 * 4 * 128 * 2 // (16 * 32)
    assert counts["wide"]["16"] == 2 * accesses
    assert counts["local"] == 0
    assert counts["instructions"] > 2 * accesses
    assert "copy_tokens bf16" in done.stdout
