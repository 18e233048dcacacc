"""Emitting LLVM: types, loops, branches by the number of rows, memory on the stack, the arguments of an intrinsic."""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numkv.kernels.cpu.vectors.features import ROW_UNROLL

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT, DOUBLE, HALF = ir.FloatType(), ir.DoubleType(), ir.HalfType()


def data_of(context, builder, array_type, value):
    """Return the address of an array's first element."""
    return context.make_array(array_type)(context, builder, value).data


def unpack(context, builder, types_, values):
    """Convert the arguments of an intrinsic for its emitter.

    An array becomes the address of its first element, a named tuple an object with an attribute for each field. Others
    are unchanged.
    """
    return [_unpacked(context, builder, *pair) for pair in zip(types_, values, strict=True)]


def _unpacked(context, builder, type_, value):
    if isinstance(type_, types.Array):
        return data_of(context, builder, type_, value)
    if isinstance(type_, types.BaseNamedTuple):
        fields = cgutils.unpack_tuple(builder, value, len(type_.fields))
        return SimpleNamespace(
            **dict(zip(type_.fields, unpack(context, builder, type_.types, fields), strict=True))
        )
    return value


def emits(returns=types.void, **given):
    """Make an intrinsic of a function that emits its code, called with a builder and the results of `unpack`.

    Arrays and tuples may be of any type. All other arguments are int64, unless `given` has another type for their
    names. The intrinsic returns the type `returns`.
    """

    def decorate(emit):
        builder, *parameters = inspect.signature(emit).parameters.values()

        def define(typing_context, *arguments):
            def codegen(context, b, sig, args):
                found = emit(b, *unpack(context, b, sig.args, args))
                return context.get_dummy_value() if returns is types.void else found

            taken = [
                x if isinstance(x, (types.Array, types.BaseTuple)) else given.get(p.name, types.int64)
                for p, x in zip(parameters, arguments, strict=True)
            ]  # fmt: skip
            return returns(*taken), codegen

        functools.update_wrapper(define, emit)
        define.__signature__ = inspect.Signature([builder, *parameters])
        return intrinsic(define)

    return decorate


def for_rows(builder, rows, emit, most=ROW_UNROLL[0], numbers=ROW_UNROLL):
    """Emit code for each number of rows of `numbers` up to `most`; that of `rows`, known at run time, runs.

    `rows` is one of these numbers. Where it is a constant, there is no code for others.
    """
    if isinstance(rows, ir.Constant):
        emit(int(rows.constant))
        return

    def among(numbers):
        if len(numbers) == 1:
            emit(numbers[0])
            return
        half = len(numbers) // 2
        few = builder.icmp_signed("<", rows, I64(numbers[half]))
        with builder.if_else(few) as (of_few, of_many):
            with of_few:
                among(numbers[:half])
            with of_many:
                among(numbers[half:])

    among(sorted(n for n in numbers if n <= most))


def numbers_taken(rows, most):
    """How many of so many rows may be taken, up to `most`: those that nothing smaller of `ROW_UNROLL` would take."""
    if not isinstance(rows, ir.Constant):
        return range(1, most + 1)
    count = int(rows.constant)
    return range(max((n for n in ROW_UNROLL if n < count), default=0) + 1, count + 1)


def steps(builder, start, stop, step):
    """A loop over ``range(start, stop, step)`` for emitting its body; gives the index."""
    return cgutils.for_range_slice(builder, start, stop, I64(step), I64)


def scratch_floats(builder, element, size):
    """Return the address of memory for `size` numbers on the stack, from the beginning of a cache line on.

    It has no values yet: Numba's `alloca_once` would fill it with zeros in every call.
    """
    with builder.goto_entry_block():
        place = builder.alloca(ir.ArrayType(element, size))
    place.align = 64
    return builder.bitcast(place, I8.as_pointer())


def keep_in_memory(builder, pointer):
    """Force data to be read from memory again, where LLVM would keep it, or parts of it, in registers."""
    signature = ir.FunctionType(ir.VoidType(), [pointer.type])
    nothing = ir.InlineAsm(signature, "", "r,~{memory}", side_effect=True)
    builder.call(nothing, [pointer])


def opaque_number(builder, value):
    """The same int64, of which LLVM knows nothing: loops of so many turns are not taken apart."""
    signature = ir.FunctionType(I64, [I64])
    return builder.call(ir.InlineAsm(signature, "", "=r,0"), [value])


def as_bytes(builder, pointer):
    """The same address, as one of bytes."""
    return builder.bitcast(pointer, I8.as_pointer())
