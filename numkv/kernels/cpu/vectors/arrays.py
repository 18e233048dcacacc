"""Arrays in kernels: a row of a strided array, an array without reference counts, addresses, scales, loops.

**Records** are rows of int64 that describe arrays once, so that a call passes one address instead of many arrays.
Arguments are most of the cost of a call of one token. A record has numbers, the bits of floats, and arrays as
`TABLE_ROW` numbers. These are the address of the first element, the bytes of an element, the number of axes, and their
sizes and strides in bytes. The maker of a record keeps its arrays alive.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic, register_jitable

from numkv.kernels.cpu.vectors.emit import DOUBLE, I32, I64, emits, steps

#: Numbers that `fill_ramp` writes at once.
RAMP = 8


def array_value(context, b, of, data, shape, strides, itemsize, memory=None):
    """Return an array of a Numba type at a pointer or an address; with `memory` it counts references."""
    found = context.make_array(of)(context, b)
    place = b.inttoptr if isinstance(data.type, ir.IntType) else b.bitcast
    context.populate_array(
        found, data=place(data, found.data.type), shape=shape, strides=strides, itemsize=itemsize, meminfo=memory
    )  # fmt: skip
    return found._getvalue()


@intrinsic
def row_of(typing_context, array, index):
    """Return one row of an array with a contiguous last axis and any other strides: a 1-d C array on its memory.

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
    """Return the same array without its owner: no references are counted, so slices cost nothing.

    The caller keeps `array` alive.
    """

    def codegen(context, b, sig, args):
        source = context.make_array(sig.args[0])(context, b, args[0])
        shape, steps = source.shape, source.strides
        return array_value(context, b, sig.args[0], source.data, shape, steps, source.itemsize)

    return array(array), codegen


@emits(types.int64)
def address_of(b, array):
    """Return where an array's first element is, as a number."""
    return b.ptrtoint(array, I64)


@register_jitable
def by_row(scale):
    """A view ``(num_blocks, num_kv_heads, block_size, n)`` of scales of heads, of rows or of groups, for `row_of`.

    Scales of heads repeat themselves, by steps of 0. The view of an empty array must not be read.
    """
    if scale.ndim == 1:
        return scale[None, :, None, None]
    if scale.ndim == 3:
        return scale[:, :, :, None]
    return scale


@emits()
def clear(b, x, first, end):
    """``x[first:end] = 0``, for contiguous floats."""
    size = b.mul(b.sub(end, first), I64(8 if x.type.pointee == DOUBLE else 4))
    cgutils.memset(b, b.gep(x, [first]), size, 0)


@register_jitable
def multiply(x, factor, target):
    """``target[: len(x)] = factor * x``: a loop that stands alone, over arrays that begin with rows, is vector code."""
    for i in range(len(x)):
        target[i] = factor * x[i]


@register_jitable
def add_multiple(x, factor, target):
    """``target[: len(x)] += factor * x``, likewise."""
    for i in range(len(x)):
        target[i] += factor * x[i]


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
    """Return the address of `RAMP` numbers, the first of which is number `at`."""
    return builder.bitcast(builder.gep(data, [at]), _NUMBERS.as_pointer())


#: Axes of an array in a record, at most.
MOST_AXES = 4

#: An array's row in a record: address, bytes of an element, number of axes, their sizes and strides in bytes, and room
#: for the first address and the one after the last.
ADDRESS, ITEMSIZE, AXES, SHAPE = range(4)
STRIDES = SHAPE + MOST_AXES
LOW, HIGH, TABLE_ROW = range(STRIDES + MOST_AXES, STRIDES + MOST_AXES + 3)


def describe(record: np.ndarray[Any, Any], at: int, x: np.ndarray[Any, Any]) -> None:
    """Describe an array in a record, from index `at` on."""
    record[at : at + SHAPE] = x.ctypes.data, x.itemsize, x.ndim
    for axis in range(x.ndim):
        record[at + SHAPE + axis] = x.shape[axis]
        record[at + STRIDES + axis] = x.strides[axis]


def describe_dense(
    record: np.ndarray[Any, Any], at: int, shape: tuple[int, ...], itemsize: int
) -> None:
    """Describe an array without gaps in a record; calls set its address at index `at`."""
    stride = itemsize
    record[at + ITEMSIZE], record[at + AXES] = itemsize, len(shape)
    for axis in reversed(range(len(shape))):
        record[at + SHAPE + axis] = shape[axis]
        record[at + STRIDES + axis] = stride
        stride *= shape[axis]


def _field(b, record, index):
    """Return the address of a number of a record."""
    return b.gep(b.inttoptr(record, I64.as_pointer()), [index])


@emits(types.int64)
def int_at(b, record, index):
    """Return a number of the record at an address."""
    return b.load(_field(b, record, index))


@emits(types.float64)
def float_at(b, record, index):
    """Return a float64 whose bits are in the record at an address."""
    return b.bitcast(b.load(_field(b, record, index)), DOUBLE)


def array_reader(dtype, ndim, layout="A"):
    """The function that takes an array of a Numba dtype and a rank out of a record: ``read(record, index)``."""
    array_type = types.Array(dtype, ndim, layout)

    @intrinsic
    def read(typing_context, record, index):
        def codegen(context, b, sig, args):
            fields = _field(b, *args)

            def number(i):
                return b.load(b.gep(fields, [I64(i)]))

            shape, steps = (
                [number(first + axis) for axis in range(ndim)] for first in (SHAPE, STRIDES)
            )
            itemsize = I64(context.get_abi_sizeof(context.get_data_type(dtype)))
            return array_value(context, b, array_type, number(ADDRESS), shape, steps, itemsize)

        return array_type(types.int64, types.int64), codegen

    return read


@emits()
def put_number(b, address, size, number):
    """Store a number at an address as an integer of 8 or 4 bytes; nowhere if the size is 0."""
    for of in (I64, I32):
        with b.if_then(b.icmp_signed("==", size, I64(of.width // 8))):
            value = number if of is I64 else b.trunc(number, of)
            b.store(value, b.inttoptr(address, of.as_pointer()))


@emits(types.int64)
def number_at(b, address, size):
    """Return the integer of 8 or 4 bytes at an address."""
    found = cgutils.alloca_once(b, I64)
    for of in (I64, I32):
        with b.if_then(b.icmp_signed("==", size, I64(of.width // 8))):
            value = b.load(b.inttoptr(address, of.as_pointer()))
            b.store(value if of is I64 else b.sext(value, I64), found)
    return b.load(found)


@intrinsic
def table_of(typing_context, arrays):
    """Return a table on the stack that describes each array of a tuple: int64 ``(len(arrays), TABLE_ROW)``.

    It is valid until the calling function returns.
    """
    table_type = types.Array(types.int64, 2, "C")

    def codegen(context, b, sig, args):
        memory = cgutils.alloca_once(b, I64, I64(TABLE_ROW * len(arrays.types)))
        _put_rows(context, b, memory, arrays, args[0])
        shape, steps = [I64(len(arrays.types)), I64(TABLE_ROW)], [I64(8 * TABLE_ROW), I64(8)]
        return array_value(context, b, table_type, memory, shape, steps, I64(8))

    return table_type(arrays), codegen


def _put_rows(context, b, memory, arrays, values):
    """Describe each array of a tuple in a row of a table."""
    values = cgutils.unpack_tuple(b, values)
    for number, (array_type, x) in enumerate(zip(arrays.types, values, strict=True)):
        of = context.make_array(array_type)(context, b, x)
        numbers = {
            ADDRESS: b.ptrtoint(of.data, I64), ITEMSIZE: of.itemsize, AXES: I64(array_type.ndim)
        }  # fmt: skip
        for axis in range(array_type.ndim):
            numbers[SHAPE + axis] = b.extract_value(of.shape, axis)
            numbers[STRIDES + axis] = b.extract_value(of.strides, axis)
        for at, value in numbers.items():
            b.store(value, b.gep(memory, [I64(TABLE_ROW * number + at)]))


@intrinsic
def record_of(typing_context, arrays, numbers):
    """Return the address of a record on the stack: a row of each array of a tuple, then int64 and the bits of float64.

    It is valid until the calling function returns.
    """

    def codegen(context, b, sig, args):
        size = TABLE_ROW * len(arrays.types)
        memory = cgutils.alloca_once(b, I64, I64(size + len(numbers.types)))
        _put_rows(context, b, memory, arrays, args[0])
        for i, value in enumerate(cgutils.unpack_tuple(b, args[1])):
            b.store(b.bitcast(value, I64), b.gep(memory, [I64(size + i)]))
        return b.ptrtoint(memory, I64)

    return types.int64(arrays, numbers), codegen


@emits()
def put_int(b, record, index, number):
    """Store a number in the record at an address."""
    b.store(number, _field(b, record, index))


@emits()
def copy_ints(b, source, target, count):
    """Copy numbers from one address to another."""
    with cgutils.for_range(b, count) as loop:
        b.store(b.load(_field(b, source, loop.index)), _field(b, target, loop.index))


@intrinsic
def ints_from(typing_context, address, size):
    """The int64 array of some size that begins at an address."""
    array_type = types.Array(types.int64, 1, "C")

    def codegen(context, b, sig, args):
        return array_value(
            context, b, array_type, _field(b, args[0], I64(0)), [args[1]], [I64(8)], I64(8)
        )

    return array_type(types.int64, types.int64), codegen


def tuple_reader(record_type, index):
    """The function that takes a named tuple of int64 out of a record: ``read(record)``, from number `index` on."""
    tuple_type = types.NamedUniTuple(types.int64, len(record_type._fields), record_type)

    @intrinsic
    def read(typing_context, record):
        def codegen(context, b, sig, args):
            numbers = [b.load(_field(b, args[0], I64(index + i))) for i in range(tuple_type.count)]
            return context.make_tuple(b, tuple_type, numbers)

        return tuple_type(types.int64), codegen

    return read


def tuple_writer(index):
    """The function that puts a named tuple of int64 into a record, from `index` on: ``write(record, numbers)``."""

    @emits()
    def write(b, record, numbers):
        for i, number in enumerate(vars(numbers).values()):
            b.store(number, _field(b, record, I64(index + i)))

    return write


def kernel_caller(signature, result=types.none, symbol=None):
    """The function that calls a compiled kernel by its address: ``call(address, arguments)``.

    `signature` are the Numba types that the kernel was built for; `arguments`, a tuple, are of these dtypes and ranks.
    The kernel is not compiled again, so results are equal bit for bit. With a `symbol`, which links to the kernel
    (`provide_symbol`), it is ``call(None, arguments)``.
    """

    def shape_of(x):
        return (x.dtype, x.ndim) if isinstance(x, types.Array) else types.unliteral(x)

    @intrinsic
    def call(typing_context, address, arguments):
        given = [shape_of(x) for x in arguments.types]
        wanted = [shape_of(x) for x in signature]
        if given != wanted:
            raise TypingError(f"expected arguments {wanted}, got {given}")

        def codegen(context, b, sig, args):
            convention = context.call_conv
            function = convention.get_function_type(result, signature)
            if symbol is None:
                kernel = b.inttoptr(args[0], function.as_pointer())
            else:
                kernel = cgutils.get_or_insert_function(b.module, function, symbol)
            values = cgutils.unpack_tuple(b, args[1])
            status, found = convention.call_function(b, kernel, result, signature, values)
            with cgutils.if_unlikely(b, status.is_error):
                convention.return_status_propagate(b, status)
            return context.get_dummy_value() if result is types.none else found

        return result(address, arguments), codegen

    return call


def kernel_address(kernel: Any) -> int:
    """Return the address of a kernel's machine code, made by `numkv.kernels.builder.build`; keep the kernel alive."""
    (build,) = kernel.overloads.values()
    address: int = build.library.get_pointer_to_function(build.fndesc.llvm_func_name)
    if not address:
        raise RuntimeError(f"{build.fndesc.llvm_func_name}: expected machine code, got none")
    return address


def provide_symbol(symbol: str, kernel: Any) -> None:
    """Register a kernel under a name for code that is linked from now on; keep the kernel alive."""
    llvm.add_symbol(symbol, kernel_address(kernel))
