"""What the CPU has for which Numba compiles: its instructions, the width of its vectors, how many rows they take."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys

import llvmlite.binding as llvm
from numba import config

__all__ = [
    "ACCUMULATORS",
    "ADD_PAIRS",
    "AMX_ROWS",
    "FEATURES",
    "HAS_HALF",
    "INT4_INTEGERS",
    "LANES",
    "LOCALITY",
    "MANY_ROWS",
    "MANY_VECTORS",
    "ROW_UNROLL",
    "has_amx",
    "row_unroll",
]

_AVX2_CPUS = {"haswell", "broadwell", "skylake", "alderlake", "core-avx2", "x86-64-v3",
              "znver1", "znver2", "znver3"}  # fmt: skip
_AVX512_CPUS = {"skylake-avx512", "cascadelake", "icelake-client", "icelake-server",
                "sapphirerapids", "x86-64-v4", "znver4", "znver5"}  # fmt: skip
_NO_VNNI_CPUS = {"skylake-avx512", "x86-64-v4"}
# Of Linux: ask for the right to use a part of the CPU's state, and the number of AMX tiles' data.
_ARCH_PRCTL, _ASK, _TILE_DATA = 158, 0x1023, 18


def _cpu_name() -> str:
    """LLVM's name of the CPU that Numba compiles for."""
    asked: str = config.CPU_NAME or "host"
    return llvm.get_host_cpu_name() if asked == "host" else asked


def _cpu_features() -> set[str]:
    """Names of the features of the CPU that Numba compiles for, as far as they matter here."""
    if config.CPU_FEATURES:
        return {name[1:] for name in config.CPU_FEATURES.split(",") if name.startswith("+")}
    if config.CPU_NAME in (None, "", "host"):
        return {name for name, there in llvm.get_host_cpu_features().items() if there}
    # Another CPU, asked for by name: LLVM does not say what it has.
    if config.CPU_NAME in _AVX512_CPUS:
        names = {"avx512f", "avx512bw", "avx2", "f16c", "sse2"}
        return names if config.CPU_NAME in _NO_VNNI_CPUS else names | {"avx512vnni"}
    return {"avx2", "f16c", "sse2"} if config.CPU_NAME in _AVX2_CPUS else set()


llvm.initialize_native_asmparser()  # for the instructions that are written as text

#: Names of the CPU's features, as LLVM has them.
FEATURES = _cpu_features()
#: How near rows are brought ahead of time, as LLVM counts: 0 is past all caches but the first ("non-temporal": rows are
#: used once), 2 into the second. AMD's Zen is given the first; Intel's Xeons read faster with the second.
LOCALITY = 0 if _cpu_name().startswith("znver") else 2
#: Float32 lanes of a vector: the CPU's full width (float64 vectors have half as many).
LANES = 16 if "avx512f" in FEATURES else 8 if "avx2" in FEATURES or "avx" in FEATURES else 4
_REGISTERS = 32 if LANES == 16 or platform.machine() in ("aarch64", "arm64") else 16
#: Vector registers that accumulators may take: about half of what there is.
ACCUMULATORS = 16 if LANES == 16 else 8
#: Sums of many query rows that stay in registers, beside what is multiplied: rows of numbers that are repeated in all
#: lanes, by vectors. AVX-512 and NEON have 32 registers, AVX2 and SSE 16.
MANY_ROWS, MANY_VECTORS = 8 if _REGISTERS == 32 else 4, 2
#: Products of 16-bit integers, added in pairs: by lanes of the sums, the instruction where there is one.
ADD_PAIRS = {
    lanes: name
    for lanes, feature, name in (
        (16, "avx512bw", "llvm.x86.avx512.pmaddw.d.512"),
        (8, "avx2", "llvm.x86.avx2.pmadd.wd"),
        (4, "sse2", "llvm.x86.sse2.pmadd.wd"),
    )
    if feature in FEATURES
}
#: Whether INT4 rows are multiplied as integers: bytes fill vectors of 512 bits.
INT4_INTEGERS = LANES == 16 and "avx512bw" in FEATURES
#: Whether half floats are widened by an instruction.
HAS_HALF = bool({"f16c", "avx512f", "fullfp16", "fp-armv8", "neon"} & FEATURES)
#: Rows of an AMX tile: query rows that a matrix unit takes at once.
AMX_ROWS = 16
#: How many query rows vector code takes at once, as far as there are lanes for them.
ROW_UNROLL = (8, 4, 2, 1)


def row_unroll(compute: str) -> int:
    """How many query rows vector code takes at once at most, by the float type it computes in."""
    return min(ROW_UNROLL[0], LANES // 2 if compute == "float64" else LANES)


@functools.cache
def has_amx() -> bool:
    """Whether there is a matrix unit that this process may use; Linux wants to be asked first."""
    needed = {"amx-tile", "amx-bf16", "amx-int8", "avx512vnni", "avx512bw", "avx512dq"}
    if not (needed <= FEATURES and sys.platform == "linux" and platform.machine() == "x86_64"):
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return bool(syscall(_ARCH_PRCTL, _ASK, _TILE_DATA) == 0)
