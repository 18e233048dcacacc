"""Accesses to global memory by address, of 8 bytes and of single values, and arithmetic that rounds or picks."""

from __future__ import annotations

import inspect
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from numkv.kernels.cuda.instructions.emit import F32, I32, intrinsic

_PAIR = ir.VectorType(I32, 2)


@intrinsic
def load_global_8(typing_context: Any, address: Any) -> Any:
    """The 8 bytes of global memory at an address, a multiple of 8, as two words.

    ``memory[address : address + 8].view(uint32)``
    """

    def codegen(context, b, sig, args):
        found = b.load(b.inttoptr(args[0], ir.PointerType(_PAIR, addrspace=1)))
        found.align = 8
        parts = [b.extract_element(found, ir.Constant(I32, i)) for i in range(2)]
        return context.make_tuple(b, sig.return_type, parts)

    return types.UniTuple(types.uint32, 2)(types.int64), codegen


@intrinsic
def store_global_8(typing_context: Any, address: Any, a: Any, b: Any) -> Any:
    """Put two words into the 8 bytes of global memory at an address, a multiple of 8.

    ``memory[address : address + 8].view(uint32)[:] = a, b``
    """

    def codegen(context, builder, sig, args):
        value = ir.Constant(_PAIR, ir.Undefined)
        for i, word in enumerate(args[1:]):
            value = builder.insert_element(value, word, ir.Constant(I32, i))
        pointer = builder.inttoptr(args[0], ir.PointerType(_PAIR, addrspace=1))
        builder.store(value, pointer, align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint32, types.uint32), codegen


def _load(name: str, of: Any, llvm: Any, doc: str) -> Any:
    def typed(typing_context, address):
        def codegen(context, b, sig, args):
            return b.load(b.inttoptr(args[0], ir.PointerType(llvm, addrspace=1)))

        return of(types.int64), codegen

    typed.__name__ = typed.__qualname__ = name
    typed.__doc__ = doc
    return intrinsic(typed)


load_global_float = _load(
    "load_global_float", types.float32, F32,
    "The float32 at an address of global memory: ``memory[address : address + 4].view(float32)[0]``.",
)  # fmt: skip
load_global_word16 = _load(
    "load_global_word16", types.uint16, ir.IntType(16),
    "The 16 bits at an address of global memory: ``memory[address : address + 2].view(uint16)[0]``.",
)  # fmt: skip


@intrinsic
def store_global(typing_context: Any, address: Any, value: Any) -> Any:
    """Put a number at an address, a multiple of its size, of global memory.

    ``memory[address : address + value.nbytes].view(value.dtype)[0] = value``
    """

    def codegen(context, b, sig, args):
        b.store(args[1], b.inttoptr(args[0], ir.PointerType(args[1].type, addrspace=1)))
        return context.get_dummy_value()

    return types.void(types.int64, value), codegen


def _of_floats(name: str, called: str, count: int, doc: str) -> Any:
    """A function of NVVM over float32: unlike text, it takes constants as they are."""

    def typed(typing_context, *args):
        def codegen(context, b, sig, values):
            of = cgutils.get_or_insert_function(
                b.module, ir.FunctionType(F32, [F32] * count), called
            )
            return b.call(of, values)

        return types.float32(*[types.float32] * count), codegen

    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = ["typing_context", *"abc"[:count]]
    typed.__signature__ = inspect.Signature([inspect.Parameter(n, either) for n in names])  # type: ignore[attr-defined]
    typed.__name__ = typed.__qualname__ = name
    typed.__doc__ = doc
    return intrinsic(typed)


@intrinsic
def other_float(typing_context: Any, x: Any, lanes: Any) -> Any:
    """`shuffle_xor` of a float32 or, in two words, a float64: ``x[arange(32) ^ lanes]``."""

    def codegen(context, b, sig, args):
        word = ir.FunctionType(I32, [I32, I32])
        asm = ir.InlineAsm(word, "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", "=r,r,r")
        count = 2 if sig.args[0] == types.float64 else 1
        vector = ir.VectorType(I32, count)
        words, found = b.bitcast(args[0], vector), ir.Constant(vector, ir.Undefined)
        for i in range(count):
            at = ir.Constant(I32, i)
            one = b.call(asm, [b.extract_element(words, at), args[1]], attrs=("convergent",))
            found = b.insert_element(found, one, at)
        return b.bitcast(found, args[0].type)

    return x(x, types.uint32), codegen


@intrinsic
def fma_between_0_and_1(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once, to nearest, and cut off at 0 and at 1; 0 for NaN: ``clip(fma(a, b, c), 0, 1)``."""

    def codegen(context, b, sig, args):
        floats = ir.FunctionType(F32, [F32] * 3)
        asm = ir.InlineAsm(floats, "fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f")
        return b.call(asm, args)

    return types.float32(types.float32, types.float32, types.float32), codegen


fma_to_zero = _of_floats(
    "fma_to_zero", "llvm.nvvm.fma.rz.f", 3, "``a * b + c``, rounded once, towards zero."
)  # fmt: skip
greater_float = _of_floats(
    "greater_float", "llvm.nvvm.fmax.f", 2,
    "The greater one of two float32; the other one where one is NaN: ``fmax(a, b)``.",
)  # fmt: skip
smaller_float = _of_floats(
    "smaller_float", "llvm.nvvm.fmin.f", 2,
    "The smaller one of two float32; the other one where one is NaN: ``fmin(a, b)``.",
)  # fmt: skip
