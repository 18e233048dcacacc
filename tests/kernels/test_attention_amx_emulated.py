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
@pytest.mark.parametrize("name", ["test_attention_amx", "test_attention_amx_few"])
def test_on_an_emulated_unit(name):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "amx_emulator"]
    ended = subprocess.run(
        [*command, str(TESTS / "kernels" / f"{name}.py")], env=amx_emulator.environment(),
        cwd=TESTS.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "skipped" not in ended.stdout


def test_who_decodes(monkeypatch):
    monkeypatch.delenv(engines.AMX_DECODE, raising=False)
    monkeypatch.setattr(engines, "has_amx", lambda: True)
    monkeypatch.setattr(engines, "FEATURES", {"avx512bf16"})
    use = engines.use_amx
    assert use("bf16", "bf16", "float32") == engines.ROWS_OF_ALL_SIZES
    assert use("bf16", "int8", "float32") == use("int8", "int8", "float32") == engines.MANY_ROWS
    assert use("bf16", "bf16", "float64") == use("fp16", "bf16", "float32") == 0
    monkeypatch.setenv(engines.AMX_DECODE, "0")
    assert use("bf16", "bf16", "float32") == engines.MANY_ROWS
    monkeypatch.delenv(engines.AMX_DECODE)
    monkeypatch.setattr(engines, "FEATURES", set())
    assert use("bf16", "bf16", "float32") == engines.MANY_ROWS
    monkeypatch.setattr(engines, "has_amx", lambda: False)
    assert use("bf16", "bf16", "float32") == 0
