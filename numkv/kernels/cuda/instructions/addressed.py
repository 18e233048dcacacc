"""Chunks of rows that are read by the address of the row, so that loops over a row compute no indices.

In the simulator, which has no addresses, a row's number stands for one.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from numkv.kernels.cuda.instructions.chunks import _put_floats, _simulated_load_chunk
from numkv.kernels.cuda.instructions.emit import intrinsic
from numkv.kernels.cuda.streams import SIMULATED
from numkv.kinds import kind as kind_of


def _simulated_row_address(array, a, b, c):
    return (int(a) * array.shape[1] + int(b)) * array.shape[2] + int(c)


def _simulated_load_chunk_at(KIND, WIDTH, array, row, d, floats, at):
    a, rest = divmod(int(row), array.shape[1] * array.shape[2])
    b, c = divmod(rest, array.shape[2])
    _simulated_load_chunk(KIND, WIDTH, array, a, b, c, d, floats, at)


def _row_address(typing_context: Any, array: Any, a: Any, b: Any, c: Any) -> Any:
    """The address of ``array[a, b, c, 0]``, as int64."""

    def codegen(context, builder, sig, args):
        source = context.make_array(sig.args[0])(context, builder, args[0])
        address = builder.ptrtoint(source.data, ir.IntType(64))
        for i in range(3):
            index = context.cast(builder, args[1 + i], sig.args[1 + i], types.int64)
            step = builder.extract_value(source.strides, i)
            address = builder.add(address, builder.mul(index, step))
        return address

    return types.int64(array, a, b, c), codegen


def _load_chunk_at(
    typing_context: Any, KIND: Any, WIDTH: Any, array: Any, row: Any, d: Any, floats: Any, at: Any
) -> Any:
    """Put `WIDTH` elements, from word `d` of the row at address `row` on, as floats at ``floats[at:]``.

    As `numkv.kernels.cuda.instructions.load_chunk`, which see; `array` only says what a word is.
    """
    if not (isinstance(KIND, types.StringLiteral) and isinstance(WIDTH, types.IntegerLiteral)):
        return None
    kind, width, to_type = KIND.literal_value, WIDTH.literal_value, floats.dtype

    def codegen(context, b, sig, args):
        to = context.make_array(sig.args[5])(context, b, args[5])
        word_bytes = sig.args[2].dtype.bitwidth // 8
        size = kind_of(kind).words_per_row(width) * word_bytes
        first = context.cast(b, args[4], sig.args[4], types.int64)
        address = b.add(args[3], b.mul(first, ir.Constant(ir.IntType(64), word_bytes)))
        at_ = context.cast(b, args[6], sig.args[6], types.int64)
        _put_floats(context, b, kind, address, size, to_type, to, at_)
        return context.get_dummy_value()

    return types.void(KIND, WIDTH, array, types.int64, d, floats, at), codegen


if SIMULATED:
    row_address, load_chunk_at = _simulated_row_address, _simulated_load_chunk_at
else:
    row_address, load_chunk_at = intrinsic(_row_address), intrinsic(_load_chunk_at)
