"""Compiled kernels stay on disk, and go stale with the sources they were made of.

Each test works on its own copy of the package, with its own cache folder.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "numkv"

SETUP = """
import json
import numpy as np
import numkv
from numkv.kernels import builder
rows = np.full((1, 2, 4), 1.0, np.float32)
cache = numkv.KVCache(1, 2, 4, kind="bf16")
many = rows.repeat(20_000, 0)  # too many for the kernel of small calls, which takes longer to compile
cache.append(0, many, many)
result = float(cache.k(0)[0, 0, 0])
"""
EVERY_KERNEL = """
out = cache.decode_attention(0, rows)
numkv.merge_states(out, rows[:, :, 0].copy(), out, rows[:, :, 0].copy())
new = np.ones((1, 2, 1, 4), np.float32)
old = np.zeros((1, 2, 3, 4), np.float32)
numkv.append(new, new, old, old.copy(), np.array([1]))
layer = numkv.ContiguousLayer(4, 2, 4, kind="fp16")
layer.append(rows, rows)
weight, table = np.ones(4, np.float32), np.ones((4, 2), np.float32)
layer.write(np.ones((1, 24), np.float32), num_q_heads=2, cos=table, sin=table, qk_mode=1,
            q_norm_weight=weight, k_norm_weight=weight)
"""
REPORT = "print(json.dumps(builder.cache_stats() | {'result': result}))"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with a copy of the package and warm kernels."""
    folder = tmp_path_factory.mktemp("cache")
    leave = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.pyc")
    shutil.copytree(PACKAGE, folder / "numkv", ignore=leave)
    return folder


def run(folder: Path, *parts: str, told: str | None = None, cache: Path | None = None) -> dict:
    """Run a script on the copied package; returns cache counts and the row it stored.

    With `told` what is compiled is told, and has to be as often as something is; without, nothing is.
    """
    environment = (
        os.environ
        | {
            "PYTHONPATH": str(folder),
            "NUMBA_CACHE_DIR": str(cache or folder / "kernels"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        | ({"NUMKV_PROGRESS": told} if told else {})
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([SETUP, *parts, REPORT])],
        capture_output=True, text=True, cwd=folder, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert done.stderr.count("numkv: compiling ") == (found["misses"] if told == "1" else 0)
    assert told == "1" or not done.stderr
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "least"),
    [([], 1), ([EVERY_KERNEL], 4)],
    ids=["append", "every kernel"],
)
def test_a_second_process_compiles_nothing(tmp_path, workplace, kernels, least):
    first = run(workplace, *kernels, told="1", cache=tmp_path)
    assert first["misses"] >= least
    assert first["hits"] == 0
    second = run(workplace, *kernels, told="1", cache=tmp_path)
    assert second == {"hits": first["misses"], "misses": 0, "result": 1.0}


def edited(path: Path, old: str, new: str):
    source = path.read_text()
    assert source.count(old) == 1, f"{path.name} no longer holds {old!r}"
    path.write_text(source.replace(old, new))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["kernels/cpu/append.py", "kernels/cpu/vectors/vectors.py", "rows/rope.py"]
)
def test_an_edit_of_any_source_compiles_again(workplace, name):
    warm = run(workplace)
    with (workplace / "numkv" / name).open("a") as file:
        file.write("\n# edited\n")
    again = run(workplace)
    assert again["misses"] == warm["hits"] + warm["misses"] > 0
    assert again["result"] == 1.0
    assert run(workplace)["misses"] == 0


@pytest.mark.slow
def test_results_follow_an_edited_row_function(workplace):
    assert run(workplace)["result"] == 1.0
    edited(
        workplace / "numkv" / "rows" / "convert.py",
        '"""The bfloat16 word nearest to `x`."""\n',
        '"""The bfloat16 word nearest to `x` + 2."""\n    x = np.float32(x) + np.float32(2)\n',
    )
    again = run(workplace)
    assert again["misses"] > 0
    assert again["result"] == 3.0


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(workplace):
    """Kernels are then compiled in every process, with one warning."""
    blocked = workplace / "blocked"
    blocked.write_text("a file where the folder should be")
    script = "import os; os.environ['NUMBA_CACHE_DIR'] = " + repr(str(blocked / "x")) + "\n" + SETUP
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", script + REPORT],
        capture_output=True, text=True, cwd=workplace, check=False,
        env=os.environ | {"PYTHONPATH": str(workplace), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["result"] in (1.0, 3.0)
