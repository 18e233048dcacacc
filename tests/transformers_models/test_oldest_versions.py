"""The oldest PyTorch and transformers that the project file names pass the tests, in an environment of their own."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What they compare with was made with one later version: transformers' own caches, and defaults of its configs.
OTHERS = ("test_bench", "test_plans", "test_oldest_versions")


@pytest.mark.nightly
def test_the_oldest_pair(tmp_path):
    """It takes gigabytes from the package index, as PyTorch's usual build for Linux brings CUDA."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    oldest = [re.sub(r">=([\d.]+).*", r"==\1.0", what) for what in extras["transformers"]]
    assert len(oldest) == 2
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    packages = [*oldest, *project["dependencies"], *extras["test"], "peft"]
    subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    done = subprocess.run(
        [
            python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/tensors", "tests/transformers_models",
            *(f"--ignore=tests/transformers_models/{name}.py" for name in OTHERS),
        ],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
