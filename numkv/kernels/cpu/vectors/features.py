"""What the CPU has for which Numba compiles: its instructions, the width of its vectors, how many rows they take."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys

import llvmlite.binding as llvm
from numba import config
from numba.core.codegen import get_host_cpu_features

from numkv.kernels.cpu.vectors.instructions import instructions_of

# What every CPU of an architecture has.
_ALWAYS = {"x86_64": {"sse2"}, "AMD64": {"sse2"}, "aarch64": {"neon"}, "arm64": {"neon"}}
# Of Linux: ask for the right to use a part of the CPU's state, and the number of AMX tiles' data.
_ARCH_PRCTL, _ASK, _TILE_DATA = 158, 0x1023, 18


def _cpu_name() -> str:
    """LLVM's name of the CPU that Numba compiles for."""
    asked: str = config.CPU_NAME or "host"
    return llvm.get_host_cpu_name() if asked == "host" else asked


def _cpu_features() -> set[str]:
    """Names of the features of the CPU that Numba compiles for, as far as they matter here.

    Whatever name is asked for, Numba adds what this machine has, unless its features are given, too.
    """
    always = _ALWAYS.get(platform.machine(), set())
    if config.CPU_FEATURES is None and config.ENABLE_AVX:
        return always | {name for name, there in llvm.get_host_cpu_features().items() if there}
    features = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    if "sse2" in always:
        return always | instructions_of(_cpu_name(), features)
    return always | {name[1:] for name in features.split(",") if name.startswith("+")}


llvm.initialize_native_asmparser()  # for the instructions that are written as text

#: Names of the CPU's features, as LLVM has them.
FEATURES = _cpu_features()
#: How near rows are brought ahead of time, as LLVM counts: 0 is past all caches but the first ("non-temporal": rows are
#: used once), 2 into the second. Zen 5 is given the first. A first cache of 32 KiB, as Zen had before, does not hold
#: the K and V rows of a tile, and what it drops comes from memory again; Intel's Xeons read faster with the second too.
LOCALITY = 0 if _cpu_name() == "znver5" else 2
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
#: Whether products are added to sums by an instruction, rounded once; without it they are rounded by themselves.
HAS_FMA = bool({"fma", "avx512f", "neon"} & FEATURES)
#: Whether products of bytes are added by fours at once.
HAS_FOURS = LANES == 16 and "avx512vnni" in FEATURES
#: Whether products of bf16 are added in pairs by an instruction, which takes as long as one of float32.
HAS_BF16_PAIRS = LANES == 16 and "avx512bf16" in FEATURES
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
