"""Features of the CPU for which Numba compiles: its instructions, the width of its vectors, rows at once.

LLVM does not report the instructions of a CPU that Numba gets by name, so small functions probe them. Each is compiled
for that CPU, and its assembly shows the instructions that LLVM chose. The functions are plain LLVM, which compiles for
every CPU. An instruction that LLVM code names explicitly would end the process on a CPU without it.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import re
import sys

import llvmlite.binding as llvm
from numba import config
from numba.core.codegen import get_host_cpu_features

# For each feature: types of two operands and of the result, the operation, and the instruction that proves it.
_SUM = "%r = {} %a, %b"
_PROBES = {
    "avx": ("<8 x float>", "<8 x float>", _SUM.format("fadd <8 x float>"), r"%ymm"),
    "avx2": ("<8 x i32>", "<8 x i32>", _SUM.format("add <8 x i32>"), r"vpaddd\b.*%ymm"),
    "fma": ("float", "float", "%r = call float @llvm.fma.f32(float %a, float %a, float %b)", "vfmadd"),
    "f16c": ("<8 x half>", "<8 x float>", "%r = fpext <8 x half> %a to <8 x float>", "vcvtph2ps"),
    "avx512f": ("<16 x float>", "<16 x float>", _SUM.format("fadd <16 x float>"), "%zmm"),
    "avx512bw": ("<32 x i16>", "<32 x i16>", _SUM.format("add <32 x i16>"), r"vpaddw\b.*%zmm"),
    "avx512dq": ("<8 x i64>", "<8 x i64>", _SUM.format("mul <8 x i64>"), r"vpmullq\b.*%zmm"),
    "avx512vl": (
        "<4 x i64>", "<4 x i64>",
        "%r = call <4 x i64> @llvm.umin.v4i64(<4 x i64> %a, <4 x i64> %b)", r"vpminuq\b.*%ymm",
    ),
    "avx512bf16": (
        "<16 x float>", "<16 x bfloat>", "%r = fptrunc <16 x float> %a to <16 x bfloat>", "vcvtneps2bf16",
    ),
    "avx512vbmi": (
        "<64 x i8>", "<64 x i8>",
        "%r = shufflevector <64 x i8> %a, <64 x i8> %b, <64 x i32> <"
        + ", ".join(f"i32 {37 * i % 64}" for i in range(64)) + ">", r"vperm(b|[it]2b)\b",
    ),
    "ssse3": (
        "<16 x i8>", "<16 x i8>",
        "%r = shufflevector <16 x i8> %a, <16 x i8> %a, <16 x i32> <"
        + ", ".join(f"i32 {7 * i % 16}" for i in range(16)) + ">", r"pshufb\b",
    ),
    "avx512vbmi2": (
        "<32 x i16>", "<32 x i16>",
        "%r = call <32 x i16> @llvm.fshl.v32i16(<32 x i16> %a, <32 x i16> %b, <32 x i16> %b)", r"vpshldvw\b",
    ),
    "gfni": ("<16 x i8>", "<16 x i8>", "%r = call <16 x i8> @llvm.bitreverse.v16i8(<16 x i8> %a)", "gf2p8affine"),
    **{
        name: (
            f"<{n} x i8>", "i32",
            f"%x = zext <{n} x i8> %a to <{n} x i32>\n%y = sext <{n} x i8> %b to <{n} x i32>\n"
            f"%z = mul nsw <{n} x i32> %x, %y\n"
            f"%r = call i32 @llvm.vector.reduce.add.v{n}i32(<{n} x i32> %z)", shown,
        )
        for name, n, shown in (
            ("avx512vnni", 64, r"vpdpbusd\b.*%zmm"), ("avxvnni", 32, r"\{vex\}\s+vpdpbusd\b.*%ymm"),
        )
    },
}  # fmt: skip


def instructions_of(cpu: str, features: str) -> set[str]:
    """Return the features of x86-64, in LLVM's names, that code for a CPU is compiled with.

    Parameters
    ----------
    cpu : str
        LLVM's name of a CPU.
    features : str
        Further features that it has or lacks, in LLVM's notation: ``+avx2,-fma``.

    Returns
    -------
    set of str
        Those that matter to vector code here, and those that `features` adds.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    functions, declared = [], set()
    for name, (operand, result, code, _) in _PROBES.items():
        functions.append(
            f"define void @{name}(ptr %p, ptr %q) {{\n%a = load {operand}, ptr %p\n%b = load {operand}, ptr %q\n"
            f"{code}\nstore {result} %r, ptr %p\nret void\n}}\n"
        )
        for result_type, function, given in re.findall(r"call (.*?) (@llvm\.[\w.]+)\((.*)\)", code):
            types = ", ".join(part.rsplit(" ", 1)[0] for part in given.split(", "))
            declared.add(f"declare {result_type} {function}({types})\n")
    module = llvm.parse_assembly("".join([*sorted(declared), *functions]))
    target = llvm.Target.from_triple("x86_64-unknown-linux-gnu")
    assembly = target.create_target_machine(cpu=cpu, features=features).emit_assembly(module)
    bodies = {name: assembly.partition(f"\n{name}:")[2].partition("ret")[0] for name in _PROBES}
    found = {name for name, probe in _PROBES.items() if re.search(probe[-1], bodies[name])}
    added = {name[1:] for name in features.split(",") if name.startswith("+")}
    return found | (added - _PROBES.keys())


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

    For any name, Numba adds this machine's features, unless features are passed, too.
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
#: LLVM's locality of prefetched rows. 0 bypasses all caches but L1 ("non-temporal": rows are used once), 2 fetches into
#: L2. Zen 5 uses 0. An L1 cache of 32 KiB, as in earlier Zens, is too small for the K and V rows of a tile, and dropped
#: rows come from memory again. Intel's Xeons are also faster with 2.
LOCALITY = 0 if _cpu_name() == "znver5" else 2
#: Float32 lanes of a vector: the CPU's full width (float64 vectors have half as many).
LANES = 16 if "avx512f" in FEATURES else 8 if "avx2" in FEATURES or "avx" in FEATURES else 4
#: Vector registers.
REGISTERS = 32 if LANES == 16 or platform.machine() in ("aarch64", "arm64") else 16
#: Vector registers for accumulators: about half of all.
ACCUMULATORS = 16 if LANES == 16 else 8
#: Sums of many query rows that stay in registers, in addition to the factors: rows of numbers that are repeated in all
#: lanes, by vectors. Of scores these are K rows by vectors of query rows, of weighted V rows query rows by vectors of
#: columns. AVX-512 and NEON have 32 registers. AVX2 and SSE have 16, of which sums take 12: with 8, each product waits
#: for the one before it.
SCORE_ROWS, SCORE_VECTORS = (8, 2) if REGISTERS == 32 else (4, 3)
SUM_ROWS, SUM_VECTORS = (8 if REGISTERS == 32 else 6), 2
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
#: Products of bytes, one without a sign and one with it, neighbours added to 16 bits: by lanes of 32 bits, likewise.
ADD_BYTES = {
    lanes: name
    for lanes, feature, name in (
        (16, "avx512bw", "llvm.x86.avx512.pmaddubs.w.512"),
        (8, "avx2", "llvm.x86.avx2.pmadd.ub.sw"),
    )
    if feature in FEATURES
}
#: Whether INT4 rows are multiplied as integers.
INT4_INTEGERS = LANES in ADD_BYTES
#: Whether products are added to sums by an instruction, rounded once; without it they are rounded by themselves.
HAS_FMA = bool({"fma", "avx512f", "neon"} & FEATURES)
#: Instructions that multiply integers and add products to sums of 32 bits, of bytes by fours and of words in pairs, as
#: LLVM's text: AVX-512 VNNI, or AVX-VNNI, whose code has no masks. None where there are none.
DOT_PRODUCTS = (
    "vpdp{} $2, $1, $0"
    if LANES == 16 and "avx512vnni" in FEATURES
    else "{{vex}} vpdp{} $2, $1, $0"
    if LANES == 8 and "avxvnni" in FEATURES
    else None
)
#: Whether products of bytes are added by fours at once, with registers for sums of low and of high bytes.
HAS_FOURS = LANES == 16 and DOT_PRODUCTS is not None
#: Whether products of bf16 are added in pairs by an instruction, which takes as long as one of float32.
HAS_BF16_PAIRS = LANES == 16 and "avx512bf16" in FEATURES
#: Whether half floats are widened by an instruction.
HAS_HALF = bool({"f16c", "avx512f", "fullfp16", "fp-armv8", "neon"} & FEATURES)
#: Rows of an AMX tile: query rows that a matrix unit takes at once.
AMX_ROWS = 16
#: How many query rows vector code takes at once, as far as there are lanes for them.
ROW_UNROLL = (8, 4, 2, 1)


def row_unroll(compute: str) -> int:
    """Return how many query rows vector code takes at once at most, by the float type it computes in."""
    return min(ROW_UNROLL[0], LANES // 2 if compute == "float64" else LANES)


@functools.cache
def has_amx() -> bool:
    """Return whether there is a matrix unit that this process may use; Linux wants to be asked first."""
    needed = {"amx-tile", "amx-bf16", "amx-int8", "avx512vnni", "avx512bw", "avx512dq"}
    if not (needed <= FEATURES and sys.platform == "linux" and platform.machine() == "x86_64"):
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return bool(syscall(_ARCH_PRCTL, _ASK, _TILE_DATA) == 0)
