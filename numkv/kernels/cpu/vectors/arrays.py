"""Arrays in kernels: a row of a strided array, an array without reference counts, addresses, scales, loops."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from numkv.kernels.cpu.vectors.emit import DOUBLE, I32, I64, emits, steps

#: Numbers that `fill_ramp` writes at once.
RAMP = 8


def array_value(context, b, of, data, shape, strides, itemsize, memory=None):
    """An array of a Numba type that lies at a pointer, or an address; with `memory` it counts references."""
    found = context.make_array(of)(context, b)
    place = b.inttoptr if isinstance(data.type, ir.IntType) else b.bitcast
    context.populate_array(
        found, data=place(data, found.data.type), shape=shape, strides=strides, itemsize=itemsize, meminfo=memory
    )  # fmt: skip
    return found._getvalue()


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
        size = b.extract_value(source.shape, array.ndim - 1)
        return array_value(context, b, row_type, at, [size], [source.itemsize], source.itemsize)

    return row_type(array, types.UniTuple(types.int64, array.ndim - 1)), codegen


@intrinsic
def without_refcount(typing_context, array):
    """The same array without its owner: as no references are counted, slices of it cost nothing.

    The caller keeps `array` alive.
    """

    def codegen(context, b, sig, args):
        source = context.make_array(sig.args[0])(context, b, args[0])
        shape, steps = source.shape, source.strides
        return array_value(context, b, sig.args[0], source.data, shape, steps, source.itemsize)

    return array(array), codegen


@emits(types.int64)
def address_of(b, array):
    """Where an array's first element is, as a number."""
    return b.ptrtoint(array, I64)


@register_jitable
def by_row(scale):
    """A view ``(num_blocks, num_kv_heads, block_size, n)`` of scales of heads, of rows or of groups, for `row_of`.

    Scales of heads repeat themselves, by steps of 0. Of an empty array nothing may be read.
    """
    if scale.ndim == 1:
        return scale[None, :, None, None]
    if scale.ndim == 3:
        return scale[:, :, :, None]
    return scale


@emits()
def clear(b, x, first, end):
    """``x[first:end] = 0``, of floats that lie one after another."""
    size = b.mul(b.sub(end, first), I64(8 if x.type.pointee == DOUBLE else 4))
    cgutils.memset(b, b.gep(x, [first]), size, 0)


@register_jitable
def multiply(x, factor, target):
    """``target[: len(x)] = factor * x``: a loop that stands alone, over arrays that begin with rows, is vector code."""
    for i in range(len(x)):
        target[i] = factor * x[i]


@emits()
def fill_ramp(b, array, at, count, start, step):
    """Put ``start + i * step`` for i in ``range(count)`` into an int64 array.

    Up to `RAMP` - 1 numbers more are written. Numba's own loop does not vectorise, as an index that might be negative
    would count from the end.
    """
    iota = ir.Constant(_NUMBERS, [ir.Constant(I64, i) for i in range(RAMP)])
    first = b.add(_splat(b, start), b.mul(iota, _splat(b, step)))
    with steps(b, I64(0), count, RAMP) as (i, _):
        value = b.add(first, _splat(b, b.mul(i, step)))
        b.store(value, _numbers_at(b, array, b.add(at, i)), align=8)


@emits()
def fill_shifted(b, array, at, count, source, shift):
    """``array[at : at + count] = array[source : source + count] + shift``, of an int64 array; the two do not overlap.

    `count` is rounded up to whole `RAMP`.
    """
    shift = _splat(b, shift)
    with steps(b, I64(0), count, RAMP) as (i, _):
        value = b.load(_numbers_at(b, array, b.add(source, i)), align=8)
        b.store(b.add(value, shift), _numbers_at(b, array, b.add(at, i)), align=8)


_NUMBERS = ir.VectorType(I64, RAMP)


def _splat(builder, x):
    """A number in all lanes."""
    first = builder.insert_element(ir.Constant(_NUMBERS, ir.Undefined), x, I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, RAMP), None))


def _numbers_at(builder, data, at):
    """The address of `RAMP` numbers, the first of which is number `at`."""
    return builder.bitcast(builder.gep(data, [at]), _NUMBERS.as_pointer())
