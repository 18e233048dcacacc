"""Arrays in kernels: a row of a strided array, an array without reference counts, addresses, numbers in even steps."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numkv.kernels.cpu.vectors.emit import I32, I64, data_of, steps

#: Numbers that `fill_ramp` writes at once.
RAMP = 8


@intrinsic
def row_of(typing_context, array, index):
    """One row of an array whose last axis is contiguous, whatever its other strides: a 1-d C array that shares memory.

    The caller keeps `array` alive, and `index` (one number for each axis but the last) in range.
    """
    row_type = types.Array(array.dtype, 1, "C", readonly=not array.mutable)

    def codegen(context, b, sig, args):
        source = context.make_array(sig.args[0])(context, b, args[0])
        at = b.ptrtoint(source.data, I64)
        for axis, i in enumerate(cgutils.unpack_tuple(b, args[1])):
            at = b.add(at, b.mul(i, b.extract_value(source.strides, axis)))
        row = context.make_array(row_type)(context, b)
        context.populate_array(
            row,
            data=b.inttoptr(at, source.data.type),
            shape=[b.extract_value(source.shape, array.ndim - 1)],
            strides=[source.itemsize],
            itemsize=source.itemsize,
            meminfo=None,
        )
        return row._getvalue()

    return row_type(array, types.UniTuple(types.int64, array.ndim - 1)), codegen


@intrinsic
def without_refcount(typing_context, array):
    """The same array without its owner: as no references are counted, slices of it cost nothing.

    The caller keeps `array` alive.
    """

    def codegen(context, b, sig, args):
        source = context.make_array(sig.args[0])(context, b, args[0])
        source.meminfo = ir.Constant(source.meminfo.type, None)
        source.parent = ir.Constant(source.parent.type, None)
        return source._getvalue()

    return array(array), codegen


@intrinsic
def address_of(typing_context, array):
    """Where an array's first element is, as a number."""

    def codegen(context, b, sig, args):
        return b.ptrtoint(data_of(context, b, sig.args[0], args[0]), I64)

    return types.int64(array), codegen


@intrinsic
def fill_ramp(typing_context, array, at, count, start, step):
    """Put ``start + i * step`` for i in ``range(count)`` into an int64 array.

    Up to `RAMP` - 1 numbers more are written. Numba's own loop does not vectorise, as an index that might be negative
    would count from the end.
    """
    i8 = types.int64

    def codegen(context, b, sig, args):
        data = data_of(context, b, sig.args[0], args[0])
        _, at, count, start, step = args
        iota = ir.Constant(_NUMBERS, [ir.Constant(I64, i) for i in range(RAMP)])
        first = b.add(_splat(b, start), b.mul(iota, _splat(b, step)))
        with steps(b, I64(0), count, RAMP) as (i, _):
            value = b.add(first, _splat(b, b.mul(i, step)))
            b.store(value, _numbers_at(b, data, b.add(at, i)), align=8)
        return context.get_dummy_value()

    return types.void(array, i8, i8, i8, i8), codegen


@intrinsic
def fill_shifted(typing_context, array, at, count, source, shift):
    """``array[at : at + count] = array[source : source + count] + shift``, of an int64 array; the two do not overlap.

    `count` is rounded up to whole `RAMP`.
    """
    i8 = types.int64

    def codegen(context, b, sig, args):
        data = data_of(context, b, sig.args[0], args[0])
        _, at, count, source, shift = args
        shift = _splat(b, shift)
        with steps(b, I64(0), count, RAMP) as (i, _):
            value = b.load(_numbers_at(b, data, b.add(source, i)), align=8)
            b.store(b.add(value, shift), _numbers_at(b, data, b.add(at, i)), align=8)
        return context.get_dummy_value()

    return types.void(array, i8, i8, i8, i8), codegen


_NUMBERS = ir.VectorType(I64, RAMP)


def _splat(builder, x):
    """A number in all lanes."""
    first = builder.insert_element(ir.Constant(_NUMBERS, ir.Undefined), x, I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, RAMP), None))


def _numbers_at(builder, data, at):
    """The address of `RAMP` numbers, the first of which is number `at`."""
    return builder.bitcast(builder.gep(data, [at]), _NUMBERS.as_pointer())
