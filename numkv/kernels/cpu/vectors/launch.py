"""Running a kernel on several threads, and handing out items to them."""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numkv.kernels.cpu.vectors.emit import I8, I32, I64, emits


def thread_launcher() -> int:
    """Return the address of the function that shares out calls among Numba's threads, which have been started."""
    address: int = llvm.address_of_symbol("numba_parallel_for")
    return address


@intrinsic
def on_threads(typing_context, launch, workers):
    """Run the calling kernel on several threads: once for each worker, with the same arguments.

    The kernel's last arguments are ``launch, worker, workers``. It is called again with 0 for `launch` and a worker
    from ``range(workers)``. `launch` is the address that `numkv.kernels.cpu.threads.run` passes. Calls are distributed
    among Numba's threads as for ``prange``, but Numba would compile a ``prange`` in a second function.
    """

    def codegen(context, b, sig, args):
        kernel, pointer = b.function, I8.as_pointer()
        kernel.attributes.add("noinline")
        # Numba's calling convention: places for the result and for an error, then the arguments in pieces.
        result, error, *pieces = kernel.args
        pieces = [*pieces[:-3], args[1]]
        record_type = ir.LiteralStructType([piece.type for piece in pieces])
        record = cgutils.alloca_once(b, record_type)
        for i, piece in enumerate(pieces):
            b.store(piece, b.gep(record, [I32(0), I32(i)], inbounds=True))

        numbers = I64.as_pointer()
        call_type = ir.FunctionType(
            ir.VoidType(), [pointer.as_pointer(), numbers, numbers, pointer]
        )
        call = ir.Function(b.module, call_type, f"{kernel.name}.part")
        call.linkage = "internal"
        inner = ir.IRBuilder(call.append_basic_block())
        starts, counts, _, data = call.args
        fields = inner.bitcast(data, record_type.as_pointer())
        pieces = [inner.load(inner.gep(fields, [I32(0), I32(i)])) for i in range(len(pieces))]
        places = [cgutils.alloca_once(inner, place.type.pointee) for place in (result, error)]
        first = inner.ptrtoint(inner.load(starts), I64)
        with cgutils.for_range(inner, inner.load(counts)) as loop:
            worker = inner.add(first, loop.index)
            inner.call(kernel, [*places, *pieces[:-1], I64(0), worker, pieces[-1]])
        inner.ret_void()

        launch_type = ir.FunctionType(
            ir.VoidType(), [pointer, pointer.as_pointer(), numbers, numbers, pointer, I64, I64, I32]
        )
        # One "array" whose elements are a byte: where a thread's part of it starts is its first worker.
        starts = cgutils.alloca_once_value(b, ir.Constant(pointer, None))
        counts = cgutils.alloca_once_value(b, args[1])
        steps = cgutils.alloca_once_value(b, I64(1))
        b.call(
            b.inttoptr(args[0], launch_type.as_pointer()),
            [b.bitcast(call, pointer), starts, counts, steps, b.bitcast(record, pointer), I64(0),
             I64(1), b.trunc(args[1], I32)],
        )  # fmt: skip
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@emits(types.int64)
def next_item(b, counter):
    """Take the next number of a counter that all threads share (an int64 array of one element)."""
    return b.atomic_rmw("add", counter, I64(1), "monotonic")
