"""What numkv takes the CPU for: this one, another by name, a list of features, a 64-bit ARM."""

import platform
import subprocess
import sys

import pytest
from numba import config

from numkv.kernels.cpu.vectors import features
from numkv.kernels.cpu.vectors.features import instructions_of

on_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names x86 CPUs")

AVX = {"avx", "ssse3"}
AVX2 = AVX | {"avx2", "f16c", "fma"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
ICE_LAKE = AVX512 | {"avx512vnni", "avx512vbmi", "avx512vbmi2", "gfni"}
CPUS = {
    "x86-64": set(),
    "x86-64-v2": {"ssse3"},
    "sandybridge": AVX,
    "ivybridge": AVX | {"f16c"},
    "haswell": AVX2,
    "x86-64-v3": AVX2,
    "znver3": AVX2,
    "alderlake": AVX2 | {"avxvnni", "gfni"},
    "x86-64-v4": AVX512,
    "skylake-avx512": AVX512,
    "cascadelake": AVX512 | {"avx512vnni"},
    "cooperlake": AVX512 | {"avx512vnni", "avx512bf16"},
    "icelake-server": ICE_LAKE,
    "znver4": ICE_LAKE | {"avx512bf16"},
    "sapphirerapids": ICE_LAKE | {"avx512bf16", "avxvnni"},
}


@on_x86
@pytest.mark.parametrize("cpu", CPUS)
def test_of_a_name(cpu):
    assert instructions_of(cpu, "") == CPUS[cpu]


@on_x86
def test_of_a_name_with_features_more_and_less():
    assert instructions_of("x86-64", "+avx2,+fma") == AVX | {"avx2", "fma"}
    assert instructions_of("haswell", "-fma,+amx-tile") == AVX | {"avx2", "f16c", "amx-tile"}
    # Without the first of them the others are gone, too.
    assert instructions_of("icelake-server", "-avx512f") == AVX2 | {"gfni"}


@on_x86
def test_settings_of_numba(monkeypatch):
    host = features._cpu_features()
    assert "sse2" in host
    monkeypatch.setattr(config, "CPU_NAME", "haswell")
    # Numba adds this machine's features to a name by itself.
    assert features._cpu_features() == host
    monkeypatch.setattr(config, "CPU_FEATURES", "")
    assert features._cpu_features() == AVX2 | {"sse2"}
    monkeypatch.setattr(config, "CPU_FEATURES", "-avx2")
    assert "avx2" not in features._cpu_features()


@on_x86
def test_avx_switched_off(monkeypatch):
    monkeypatch.setattr(config, "ENABLE_AVX", 0)
    assert not {"avx512f", "avx512bw", "avx512vnni"} & features._cpu_features()


def test_every_arm_has_neon(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(config, "CPU_FEATURES", "+dotprod")
    assert features._cpu_features() == {"neon", "dotprod"}


COUNT = """
from numkv.kernels import builder
from numkv.kernels.cpu.attention.driver import plan_kernel
plan_kernel()
print(builder.cache_stats())
"""


@on_x86
@pytest.mark.slow
def test_kernels_on_disk_are_those_of_one_cpu(tmp_path):
    """A folder that several machines see: none takes another's machine code."""

    def misses(cpu, of_features=""):
        environment = {
            "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(filter(None, sys.path)),
            "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": of_features,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", COUNT],
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        )
        return {"{'hits': 0, 'misses': 1}": 1, "{'hits': 1, 'misses': 0}": 0}[done.stdout.strip()]

    assert misses("x86-64") == 1
    assert misses("x86-64-v2") == 1
    assert misses("x86-64", "+sse4.2") == 1
    assert misses("x86-64") == 0
