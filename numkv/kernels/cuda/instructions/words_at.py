"""Single words and pairs of them in global memory; constants added to addresses become part of instructions."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from numkv.kernels.cuda.instructions.emit import I32, intrinsic

_PAIR = ir.VectorType(I32, 2)


@intrinsic
def load_word_at(typing_context: Any, address: Any) -> Any:
    """``memory[address : address + 4].view(uint32)[0]``; the address is a multiple of 4."""

    def codegen(context, b, sig, args):
        found = b.load(b.inttoptr(args[0], ir.PointerType(I32, addrspace=1)))
        found.align = 4
        return found

    return types.uint32(types.int64), codegen


@intrinsic
def load_pair_at(typing_context: Any, address: Any) -> Any:
    """``memory[address : address + 8].view(uint32)``; the address is a multiple of 8."""

    def codegen(context, b, sig, args):
        found = b.load(b.inttoptr(args[0], ir.PointerType(_PAIR, addrspace=1)))
        found.align = 8
        parts = [b.extract_element(found, ir.Constant(I32, i)) for i in range(2)]
        return context.make_tuple(b, sig.return_type, parts)

    return types.UniTuple(types.uint32, 2)(types.int64), codegen


@intrinsic
def store_word_at(typing_context: Any, address: Any, x: Any) -> Any:
    """``memory[address : address + 4].view(uint32)[0] = x``; the address is a multiple of 4."""

    def codegen(context, b, sig, args):
        b.store(args[1], b.inttoptr(args[0], ir.PointerType(I32, addrspace=1)), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint32), codegen


@intrinsic
def store_pair_at(typing_context: Any, address: Any, x: Any, y: Any) -> Any:
    """``memory[address : address + 8].view(uint32)[:] = x, y``; the address is a multiple of 8."""

    def codegen(context, b, sig, args):
        value = ir.Constant(_PAIR, ir.Undefined)
        for i, word in enumerate(args[1:]):
            value = b.insert_element(value, word, ir.Constant(I32, i))
        b.store(value, b.inttoptr(args[0], ir.PointerType(_PAIR, addrspace=1)), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint32, types.uint32), codegen
