"""Which instructions LLVM uses for a CPU that Numba is told of by name: it does not say, so small functions tell.

Each is compiled for that CPU, and its assembly shows what LLVM had to make it of. The functions are of plain LLVM,
which compiles for every CPU; an instruction that is named in LLVM ends the process where the CPU has none.
"""

from __future__ import annotations

import re

import llvmlite.binding as llvm

# Of each feature: types of two operands and of the result, what is done with them, and what shows that it is there.
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
    """Features of x86-64, as LLVM has them, that code for a CPU is compiled with.

    Parameters
    ----------
    cpu : str
        LLVM's name of a CPU.
    features : str
        What it has beside that, or lacks, as LLVM takes it: ``+avx2,-fma``.

    Returns
    -------
    set of str
        Those that matter to vector code here, and what else `features` adds.
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
