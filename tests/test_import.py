"""What `import numkv` brings in: nothing heavy, nothing optional, no compilation."""

import os
import subprocess
import sys

import pytest

HEAVY = ["numba.cuda", "numba_cuda", "torch", "transformers", "tokenizers", "cupy", "pytest"]


def modules_after(statement: str) -> set[str]:
    """Names of the modules that a fresh process holds after a statement."""
    environment = {n: v for n, v in os.environ.items() if n != "NUMBA_ENABLE_CUDASIM"}
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys; print(*sys.modules)"],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def loaded():
    return modules_after("import numkv")


@pytest.mark.parametrize("name", HEAVY)
def test_import_leaves_out(loaded, name):
    beside = modules_after("import numba, numpy, ml_dtypes") if name in loaded else set()
    assert name not in loaded - beside


def test_import_compiles_nothing():
    script = "import numkv; from numkv.kernels import builder; print(builder.cache_stats())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "{'hits': 0, 'misses': 0}"


def test_the_cpu_target_does_not_load_the_cuda_one():
    loaded = modules_after(
        "import numkv, numpy as np\n"
        "cache = numkv.KVCache(1, 1, 2)\n"
        "cache.append(0, np.ones(2, np.float32), np.ones(2, np.float32))"
    )
    assert not {m for m in loaded if m.startswith(("numba.cuda.simulator", "numkv.kernels.cuda"))}


def test_asking_for_cuda_without_a_gpu_says_so():
    if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
        pytest.skip("this machine may have a GPU")
    script = (
        "import numkv\n"
        "try:\n"
        "    numkv.KVCache(1, 1, 2, target='cuda')\n"
        "except numkv.NumkvError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    assert done.stdout.startswith("NotSupported ")
    assert "cuda" in done.stdout.lower()
