"""The README is executed: its Python examples run, its test command is the one CI calls."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def blocks(*languages: str) -> list[str]:
    """Fenced code of the README, by language."""
    text = README.read_text()
    return [
        body
        for lang, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
        if lang in languages
    ]


def test_there_are_examples():
    assert blocks("python")


@pytest.mark.parametrize("number", range(len(blocks("python")) if README.exists() else 0))
def test_examples_run(number, tmp_path):
    """Each example on its own, as someone would paste it."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", blocks("python")[number]],
        capture_output=True, text=True, cwd=tmp_path, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def commands() -> list[str]:
    lines = "\n".join(blocks("sh", "bash", "console", "shell", "")).splitlines()
    return [line.removeprefix("$ ").strip() for line in lines if line.strip()]


def test_ci_runs_the_readmes_test_command():
    tests = [line for line in commands() if "pytest" in line and "perf" not in line]
    assert tests, "the README says how to run the tests"
    assert any(line in (ROOT / ".ci" / "run").read_text() for line in tests)


def test_links_to_files_are_not_dead():
    for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", README.read_text()):
        assert (ROOT / link).exists(), link
