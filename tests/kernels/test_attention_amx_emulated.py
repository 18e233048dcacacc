"""Attention on a matrix unit where there is none: the tests of the unit, in a process with an emulated one."""

import subprocess
import sys

import amx_emulator
import pytest

from numkv.kernels.cpu.attention import engines
from numkv.kernels.cpu.vectors.features import has_amx

TESTS = amx_emulator.TESTS


@pytest.mark.slow
@pytest.mark.skipif(bool(amx_emulator.missing()), reason=amx_emulator.missing())
@pytest.mark.skipif(has_amx(), reason="there is a unit")
def test_on_an_emulated_unit():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "amx_emulator"]
    ended = subprocess.run(
        [*command, str(TESTS / "kernels" / "test_attention_amx.py")], env=amx_emulator.environment(),
        cwd=TESTS.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "skipped" not in ended.stdout


def test_what_a_unit_is_used_for(monkeypatch):
    monkeypatch.setattr(engines, "has_amx", lambda: True)
    use = engines.use_amx
    assert use("bf16", "bf16", "float32")
    assert use("bf16", "int8", "float32")
    assert not use("bf16", "bf16", "float64")
    assert not use("fp16", "bf16", "float32")
    monkeypatch.setattr(engines, "has_amx", lambda: False)
    assert not use("bf16", "bf16", "float32")
