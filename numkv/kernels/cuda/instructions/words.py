"""Arithmetic on single words: pairs of 16-bit floats, bytes in another order."""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from numkv.kernels.cuda.instructions.emit import F32, I32, intrinsic, operation

exp2_approx = operation(
    "exp2_approx", "ex2.approx.ftz.f32 $0, $1;", "f", {"x": "f"},
    "``exp2(x)``, off by 2**-22 of it at most; results below 2**-126 are 0.",
)  # fmt: skip

log2_approx = operation(
    "log2_approx", "lg2.approx.f32 $0, $1;", "f", {"x": "f"},
    "``log2(x)``, off by 2**-22 of it at most, or by 2**-22 where `x` is between 1/2 and 2.",
)  # fmt: skip

_PAIR = "Two float32 as a word of two {}, to nearest: ``array([low, high]).astype({}).view(uint32)[0]``."
pack_bf16 = operation(
    "pack_bf16", "cvt.rn.bf16x2.f32 $0, $2, $1;", "r", {"low": "f", "high": "f"},
    _PAIR.format("bfloat16", "bfloat16"),
)  # fmt: skip
pack_fp16 = operation(
    "pack_fp16", "cvt.rn.f16x2.f32 $0, $2, $1;", "r", {"low": "f", "high": "f"},
    _PAIR.format("float16", "float16") + " What is above 65,504 becomes infinite.",
)  # fmt: skip

split_bf16 = operation(
    "split_bf16",
    "{ .reg .b32 %split<2>; cvt.rn.bf16x2.f32 $0, $3, $2; shl.b32 %split0, $0, 16; and.b32 %split1, $0, -65536; "
    "sub.f32 %split0, $2, %split0; sub.f32 %split1, $3, %split1; cvt.rn.bf16x2.f32 $1, %split1, %split0; }",
    "rr", {"low": "f", "high": "f"},
    """Two float32 as a word of two bfloat16, and a word of what these leave: together they have 16 bits.

    ``x = array([low, high]); a = x.astype(bfloat16); b = (x - a).astype(bfloat16)``
    """, early=True,
)  # fmt: skip

_FMA = "``a * b + c`` of words of two {}, each rounded once."
fma_bf16x2 = operation(
    "fma_bf16x2", "fma.rn.bf16x2 $0, $1, $2, $3;", "r", {"a": "r", "b": "r", "c": "r"},
    _FMA.format("bfloat16"),
)  # fmt: skip
fma_fp16x2 = operation(
    "fma_fp16x2", "fma.rn.f16x2 $0, $1, $2, $3;", "r", {"a": "r", "b": "r", "c": "r"},
    _FMA.format("float16"),
)  # fmt: skip


@intrinsic
def permute_bytes(typing_context: Any, a: Any, b: Any, which: Any) -> Any:
    """Four bytes of `a` (0 to 3) and `b` (4 to 7): byte ``i`` is the one that hexadecimal digit ``i`` of `which` names.

    ``concatenate([a.view(uint8), b.view(uint8)])[[which >> 4 * i & 7 for i in range(4)]].view(uint32)``
    """

    def codegen(context, builder, sig, args):
        of = ir.FunctionType(I32, [I32, I32, I32])
        return builder.call(
            cgutils.get_or_insert_function(builder.module, of, "llvm.nvvm.prmt"), args
        )

    return types.uint32(*[types.uint32] * 3), codegen


@functools.cache
def permute_bytes_as(which: int) -> Any:
    """`permute_bytes` by a constant, which is a part of the instruction: ``permute(a, b)``."""
    text = f"prmt.b32 $0, $1, $2, {which};"
    return operation(f"permute_bytes_as_{which:x}", text, "r", {"a": "r", "b": "r"}, "")


select_bits = operation(
    "select_bits", "lop3.b32 $0, $1, $2, $3, 0xEA;", "r", {"x": "r", "mask": "r", "bits": "r"},
    "``x & mask | bits``, in one instruction.",
)  # fmt: skip


@intrinsic
def unpack_fp16(typing_context: Any, word: Any) -> Any:
    """The two float16 of a word as float32: ``word.view(float16).astype(float32)``."""

    def codegen(context, b, sig, args):
        pair = b.bitcast(args[0], ir.VectorType(ir.HalfType(), 2))
        parts = [b.fpext(b.extract_element(pair, ir.Constant(I32, i)), F32) for i in range(2)]
        return context.make_tuple(b, sig.return_type, parts)

    return types.UniTuple(types.float32, 2)(types.uint32), codegen


keep = operation(
    "keep", "mov.b32 $0, $1;", "r", {"x": "r"},
    "`x`, in a register: where a loop needs it, the compiler would rather compute it anew each time.", memory=True,
)  # fmt: skip
keep_address = operation(
    "keep_address",
    "mov.b64 $0, $1;",
    "l",
    {"x": "l"},
    "`keep` of an address of global memory.",
    memory=True,
)
