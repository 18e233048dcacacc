"""All LLVM and PTX code of CUDA kernels, as named operations.

Each operation documents its result by a line of NumPy. Drawings show how values move between the threads of a warp. A
kernel that needs more composes operations (`numkv.kernels.cuda.widen`) or adds one here. A port to another compiler
rewrites this file alone. In order:

- addresses, asynchronous copies from global to shared memory, accesses of up to 16 bytes,
- arithmetic with a rounding mode or a selection,
- operations that the 32 threads of a warp execute together,
- loads of 16 bytes of a row as floats (`load_chunk`); plain indexing of small words never reads as much at once.

Addresses are plain integers, in bytes: 64 bits for global memory, 32 bits for shared memory. Constants that are added
to them become part of instructions.

The simulator runs `row_address` and `load_chunk` alone, with a row's number as its address. Other operations raise
there. The PTX interpreter runs all of them (`tests/compile/test_instructions.py`).

Thread ``l`` of a warp belongs to group ``g = l // 4``, at place ``t = l % 4``. The drawing shows the matrices of
`mma_bf16` and `mma_fp16` in the warp's registers. A word has two adjacent elements, the first in its low half::

    A, 16 x 16, by rows             B, 16 x 8, by columns     C and D, 16 x 8

              k 0-7   k 8-15                  n 0-7                     n 0-7
    m  0-7     a0       a2          k 0-7      b0             m  0-7    c0, c1
    m 8-15     a1       a3          k 8-15     b1             m 8-15    c2, c3

    a0 = A[g, 2t : 2t + 2]          b0 = B[2t : 2t + 2, g]      c0 = C[g, 2t]         c2 = C[g + 8, 2t]
    a1 = A[g + 8, 2t : 2t + 2]      b1 = B[2t + 8 : 2t + 10, g] c1 = C[g, 2t + 1]     c3 = C[g + 8, 2t + 1]
    a2 = A[g, 2t + 8 : 2t + 10]
    a3 = A[g + 8, 2t + 8 : 2t + 10]

D of one product, packed in pairs, is therefore half of an A. It is also a B of D's transpose. Softmax weights thus stay
in their registers.

`ldmatrix_x4` loads four 8 x 8 matrices of 16-bit elements. Threads ``8 i`` to ``8 i + 7`` pass the addresses of the
eight rows of matrix ``i``, 16 bytes each. Result word ``i`` of every thread is from matrix ``i``::

    plain: row g, elements 2t and 2t + 1             _trans: rows 2t and 2t + 1, element g

             e 0   1   2   3   4   5   6   7                 e 0   1   2 ...  7
    row 0    l0      l1      l2      l3              row 0   l0  l4  l8 ... l28
    row 1    l4      l5      l6      l7              row 1   l0  l4  l8 ... l28
    ...                                              row 2   l1  l5  l9 ... l29
    row 7    l28     l29     l30     l31             ...

The plain form loads A of a matrix stored by rows, and B of one stored by columns (K, where a row is a token).
``_trans`` loads the other cases (V). Layouts are those of NVIDIA's "Parallel Thread Execution ISA", sections on ``mma``
and ``ldmatrix``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from numkv.kernels.cuda.streams import SIMULATED
from numkv.kinds import kind as kind_of
from numkv.kinds import kinds
from numkv.rows import code6
from numkv.rows.code4 import LEVELS, code4_level
from numkv.rows.convert import codec

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()

#: Types of operands and results, by the letter of their register: words, addresses of global memory, floats.
NUMBA = {"r": types.uint32, "l": types.int64, "f": types.float32}
LLVM = {"r": I32, "l": I64, "f": F32}

#: A bit for each lane of a warp.
EVERYONE = 0xFFFFFFFF


def intrinsic(typed: Callable[..., Any]) -> Any:
    """Decorate a function that emits LLVM, as Numba does; in the simulator, return a function that raises."""
    if not SIMULATED:
        from numba.cuda.extending import intrinsic as decorate

        return decorate(typed)

    def missing(*args: Any) -> Any:
        raise NotImplementedError(f"the simulator has no {typed.__name__}")

    return missing


def _named(typed: Callable[..., Any], name: str, doc: str, *parameters: str) -> Any:
    """Return the `intrinsic` of a function that emits LLVM, with a name, a docstring and parameters of its own."""
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = ("typing_context", *parameters)
    typed.__signature__ = inspect.Signature([inspect.Parameter(n, either) for n in names])  # type: ignore[attr-defined]
    typed.__name__ = typed.__qualname__ = name
    typed.__doc__ = doc
    return intrinsic(typed)


def operation(
    name: str, text: str, results: str, operands: dict[str, str], doc: str, *, together: bool = False,
    memory: bool = False, early: bool = False, into: bool = False, floats: int = 0,
) -> Any:  # fmt: skip
    """Make a function for kernels from one or a few instructions.

    Parameters
    ----------
    name : str
        Name of the function.
    text : str
        PTX; ``$0`` and so on are the results, then the operands.
    results : str
        A letter for each result: ``r`` is a word (uint32), ``f`` a float32. Several results form a tuple.
    operands : dict of str to str
        Names and letters of the operands; ``l`` is an address of global memory (int64).
    doc : str
        Docstring of the function.
    together : bool
        Whether all threads of a warp must execute it together. The compiler then does not move it across branches.
    memory : bool
        Whether it reads or writes memory, or orders accesses.
    early : bool
        Whether it writes results before it has read all operands. They then never share registers.
    into : bool
        Whether results go to the first elements of a local array, the last argument, in place of a tuple.
    floats : int
        Number of further operands: the first elements of a local array of float32, the last argument.
    """
    letters = [*operands.values(), *("f" * floats)]
    constraints = ",".join([*(f"={'&' * early}{r}" for r in results), *letters])
    if memory:
        constraints += ",~{memory}" if constraints else "~{memory}"
    outcome = [LLVM[r] for r in results]
    whole = outcome[0] if len(results) == 1 else ir.LiteralStructType(outcome)
    returned = (
        types.void
        if not results
        else NUMBA[results]
        if len(results) == 1
        else types.UniTuple(NUMBA[results[0]], len(results))
    )

    def typed(typing_context: Any, *args: Any) -> Any:
        if len(args) != len(operands) + (into or floats > 0):
            return None

        def codegen(context: Any, b: Any, sig: Any, values: Any) -> Any:
            of = ir.FunctionType(whole if results else ir.VoidType(), [LLVM[x] for x in letters])
            parts = []
            if floats:
                data = context.make_array(sig.args[-1])(context, b, values[-1]).data
                parts = [b.load(b.gep(data, [ir.Constant(I64, i)])) for i in range(floats)]
            assembly = ir.InlineAsm(of, text, constraints, side_effect=memory)
            found = b.call(
                assembly,
                [*values[: len(operands)], *parts],
                attrs=("convergent",) if together else (),
            )
            if into:
                data = context.make_array(sig.args[-1])(context, b, values[-1]).data
                for i in range(len(results)):
                    b.store(b.extract_value(found, i), b.gep(data, [ir.Constant(I64, i)]))
            if not results or into:
                return context.get_dummy_value()
            if len(results) == 1:
                return found
            parts = [b.extract_value(found, i) for i in range(len(results))]
            return context.make_tuple(b, sig.return_type, parts)

        given = [NUMBA[x] for x in operands.values()]
        from_array = into or floats > 0
        return (types.void(*given, args[-1]) if from_array else returned(*given)), codegen

    return _named(typed, name, doc, *operands, *(["array"] if into or floats else []))


@intrinsic
def shared_address(typing_context: Any, array: Any) -> Any:
    """Return the address of a shared array, in bytes of shared memory: int32."""

    def codegen(context, b, sig, args):
        data = context.make_array(sig.args[0])(context, b, args[0]).data
        pointer = ir.PointerType(data.type.pointee, addrspace=3)
        return b.ptrtoint(b.addrspacecast(data, pointer), I32)

    return types.int32(array), codegen


@intrinsic
def global_address(typing_context: Any, array: Any) -> Any:
    """Return the address of an array in global memory: int64, ``array.ctypes.data``."""

    def codegen(context, b, sig, args):
        return b.ptrtoint(context.make_array(sig.args[0])(context, b, args[0]).data, I64)

    return types.int64(array), codegen


cp_async_16 = operation(
    "cp_async_16", "cp.async.cg.shared.global [$0], [$1], 16;", "", {"to": "r", "source": "l"},
    """Start to copy 16 bytes from global to shared memory; both addresses are multiples of 16.

    ``shared[to : to + 16] = memory[source : source + 16]``, not before `cp_async_wait` says so, for this thread; a
    barrier says so for others. The copy passes the first-level cache by.
    """, memory=True,
)  # fmt: skip

cp_async_16_or_zeros = operation(
    "cp_async_16_or_zeros", "cp.async.cg.shared.global [$0], [$1], 16, $2;", "",
    {"to": "r", "source": "l", "size": "r"},
    """`cp_async_16` of the first `size` bytes, 0 to 16; the others become zeros. Where `size` is 0 nothing is read.

    ``shared[to : to + 16] = [*memory[source : source + size], *zeros(16 - size)]``
    """, memory=True,
)  # fmt: skip


@functools.cache
def cp_async_16_rows(
    count: int, table_step: int, step: int, sized: bool, table_from: int = 0, to_from: int = 0, most: bool = True
) -> Any:  # fmt: skip
    """Make an operation that starts `count` copies of rows, whose places are in a table in shared memory.

    ``copy(to, table, source)`` is ``cp_async_16(to + i * step, source + shared[table + i * table_step])`` for ``i <
    count``. The table has int64. With `sized` it is ``copy(to, table, source, sizes, most)``, and copies are
    `cp_async_16_or_zeros`. Sizes come from another table of int32, whose steps are half as long. Each size is
    ``size & most``. Without `most`, this argument and the mask are left out. The table starts `table_from` bytes after
    `table`. Copies go to `to_from` bytes after `to`.
    """
    text = "{ .reg .b64 %row_source; .reg .b32 %row_size;\n"
    for i in range(count):
        text += f"ld.shared.b64 %row_source, [$1+{table_from + i * table_step}]; "
        text += "add.s64 %row_source, %row_source, $2;\n"
        size = ""
        if sized:
            text += f"ld.shared.b32 %row_size, [$3+{i * table_step // 2}];\n"
            text += "and.b32 %row_size, %row_size, $4;\n" * most
            size = ", %row_size"
        text += f"cp.async.cg.shared.global [$0+{to_from + i * step}], [%row_source], 16{size};\n"
    operands = {"to": "r", "table": "r", "source": "l"} | (
        {"sizes": "r"} | ({"most": "r"} if most else {}) if sized else {}
    )
    name = f"cp_async_16_{count}_rows_of_{table_step}_{step}" + "_sized" * sized
    name += f"_from_{table_from}_{to_from}" + "_most" * most
    return operation(name, text.rstrip() + " }", "", operands, "", memory=True)


@functools.cache
def cp_async_4_words(count: int) -> Any:
    """Make an operation that starts to copy `count` words of a row, whose place is in a table in shared memory.

    ``copy(to, table, source, size)`` is ``shared[to + 4 * i] = memory[place + 4 * i]``, in words, for ``i < count``.
    There ``place = source + shared[table]``, an int64. All addresses are multiples of 4. ``shared[size]``, an int32, is
    16 or 0. With 0 the words become 0, and global memory is not read. The copies go through the first-level cache.
    """
    text = (
        "{ .reg .b64 %word_source; .reg .b32 %word_size;\nld.shared.b64 %word_source, [$1]; "
        "add.s64 %word_source, %word_source, $2;\n"
        "ld.shared.b32 %word_size, [$3]; shr.u32 %word_size, %word_size, 2;\n"
    )
    for i in range(count):
        text += f"cp.async.ca.shared.global [$0+{4 * i}], [%word_source+{4 * i}], 4, %word_size;\n"
    operands = {"to": "r", "table": "r", "source": "l", "size": "r"}
    return operation(
        f"cp_async_4_{count}_words", text.rstrip() + " }", "", operands, "", memory=True
    )


cp_async_commit = operation(
    "cp_async_commit", "cp.async.commit_group;", "", {},
    "Make a group of the copies that this thread has started since the last one; it may have none.", memory=True,
)  # fmt: skip


@functools.cache
def cp_async_16_steps(count: int, rows: int, step: int) -> Any:
    """Make an operation of `count` times `cp_async_16`, where the order of a row's chunks differs within eight rows.

    ``cp_async_16((to ^ rows * i % 8 * 16) + i * step, source + i * source_step)`` for ``i < count``. Steps of shared
    memory are part of the instructions. Only the sources and the reordered offsets are computed.
    """
    text = "{ .reg .b64 %source; .reg .b32 %to;\n"
    turns = list(dict.fromkeys(rows * i % 8 for i in range(count)))
    # In the order of sources, because each is the previous one plus a step. `%to` of a turn is computed at first use.
    for i in range(count):
        text += "mov.b64 %source, $1;\n" if i == 0 else "add.s64 %source, %source, $2;\n"
        turn = turns.index(rows * i % 8)
        name = f"%to{turn}"
        if i < len(turns):
            text += f"xor.b32 {name}, $0, {16 * turns[turn]};\n"
        text += f"cp.async.cg.shared.global [{name}+{i * step}], [%source], 16;\n"
    text = text.replace(".reg .b32 %to;", f".reg .b32 %to<{len(turns)}>;").rstrip() + " }"
    return operation(
        f"cp_async_16_{count}_steps_of_{rows}_{step}", text, "", {"to": "r", "source": "l", "source_step": "l"}, "",
        memory=True,
    )  # fmt: skip


@intrinsic
def cp_async_wait(typing_context: Any, groups: Any) -> Any:
    """Wait until all but the last `groups` groups of this thread's copies have arrived; `groups` is a constant."""
    if not isinstance(groups, types.IntegerLiteral):
        return None
    text = f"cp.async.wait_group {groups.literal_value};"

    def codegen(context, b, sig, args):
        nothing = ir.FunctionType(ir.VoidType(), [])
        b.call(ir.InlineAsm(nothing, text, "~{memory}", side_effect=True), [])
        return context.get_dummy_value()

    return types.void(groups), codegen


def _loads(
    opcode: str, width: int, of: str, offsets: tuple[int, ...], doc: str, *, into: bool, together: bool = False,
) -> Any:  # fmt: skip
    """Make an operation that loads `width` results at each of `offsets` from an address of shared memory."""
    text = ""
    for i, offset in enumerate(offsets):
        found = ", ".join(f"${width * i + j}" for j in range(width))
        text += f"{opcode} {{{found}}}, [${width * len(offsets)}+{offset}];\n"
    name = "_".join(map(str, (opcode.replace(".", "_"), *offsets)))
    # Results must not share a register with the address, which later loads still need.
    return operation(
        name, text, of * (width * len(offsets)), {"address": "r"}, doc, together=together, memory=True,
        early=len(offsets) > 1, into=into,
    )  # fmt: skip


@functools.cache
def load_shared(size: int, *offsets: int, of: str = "r", into: bool = False) -> Any:
    """Make an operation that loads from shared memory: ``shared[address + offset :][:size]`` for each of `offsets`.

    Parameters
    ----------
    size : {4, 8, 16}
        Bytes that each instruction loads; addresses are multiples of it.
    offsets : int
        Bytes from the operation's address to those of the loads. They are parts of the instructions.
    of : {"r", "f"}
        Whether the results are words, or float32.
    into : bool
        Whether results go to a local array: ``load(address, array)``.
    """
    vector = {4: "", 8: ".v2", 16: ".v4"}[size]
    opcode = f"ld.shared{vector}.{'b32' if of == 'r' else 'f32'}"
    doc = f"The {size} bytes of shared memory at an address, a multiple of {size}."
    return _loads(opcode, size // 4, of, offsets, doc, into=into)


@functools.cache
def store_shared(size: int, offset: int = 0) -> Any:
    """Make an operation that stores words to the `size` bytes of shared memory at ``address + offset``."""
    vector, names = {4: "", 8: ".v2", 16: ".v4"}[size], list("abcd"[: size // 4])
    stored = ", ".join(f"${i + 1}" for i in range(len(names)))
    return operation(
        f"store_shared_{size}_{offset}", f"st.shared{vector}.b32 [$0+{offset}], {{{stored}}};", "",
        {"address": "r"} | dict.fromkeys(names, "r"),
        f"Put words into the {size} bytes of shared memory at an address, a multiple of {size}.", memory=True,
    )  # fmt: skip


@functools.cache
def store_shared_pairs(offsets: tuple[int, ...]) -> Any:
    """Make an operation that stores pairs of float32 to shared memory at constant offsets, multiples of 8.

    ``store(address, floats)``: ``shared[address + offsets[i] :][:8] = floats[2 * i : 2 * i + 2]``, of a local array.
    """
    text = "".join(
        f"st.shared.v2.f32 [$0+{x}], {{${2 * i + 1}, ${2 * i + 2}}};\n"
        for i, x in enumerate(offsets)
    )
    name = "store_shared_pairs_" + "_".join(map(str, offsets))
    return operation(name, text, "", {"address": "r"}, "", memory=True, floats=2 * len(offsets))


load_shared_4, load_shared_8, load_shared_16 = (load_shared(size, 0) for size in (4, 8, 16))
store_shared_4, store_shared_8, store_shared_16 = (store_shared(size) for size in (4, 8, 16))


def _global(words: int) -> tuple[Any, Any]:
    """Make the functions that load and store some words of global memory at once."""
    vector, size = ir.VectorType(I32, words), 4 * words

    def at(b: Any, address: Any) -> Any:
        return b.inttoptr(address, ir.PointerType(vector, addrspace=1))

    def load(typing_context: Any, address: Any) -> Any:
        def codegen(context, b, sig, args):
            found = b.load(at(b, args[0]))
            found.align = size
            parts = [b.extract_element(found, ir.Constant(I32, i)) for i in range(words)]
            return context.make_tuple(b, sig.return_type, parts)

        return types.UniTuple(types.uint32, words)(types.int64), codegen

    def store(typing_context: Any, address: Any, *values: Any) -> Any:
        def codegen(context, b, sig, args):
            value = ir.Constant(vector, ir.Undefined)
            for i, word in enumerate(args[1:]):
                value = b.insert_element(value, word, ir.Constant(I32, i))
            b.store(value, at(b, args[0]), align=size)
            return context.get_dummy_value()

        return types.void(types.int64, *[types.uint32] * words), codegen

    return (
        _named(
            load, f"load_global_{size}",
            f"""Load the {size} bytes of global memory at an address, a multiple of {size}, as {words} words.

            ``memory[address : address + {size}].view(uint32)``. The compiler may move the load up, but never past a
            store.
            """, "address",
        ),
        _named(
            store, f"store_global_{size}",
            f"""Store {words} words to the {size} bytes of global memory at an address, a multiple of {size}.

            ``memory[address : address + {size}].view(uint32)[:] = a, b, …``
            """, "address", *"abcd"[:words],
        ),
    )  # fmt: skip


load_global_8, store_global_8 = _global(2)
load_global_16, store_global_16 = _global(4)


def _global_word(size: int) -> Any:
    """Make the function that loads a word, or half a word, of global memory."""
    of = ir.IntType(8 * size)

    def typed(typing_context: Any, address: Any) -> Any:
        def codegen(context, b, sig, args):
            found = b.load(b.inttoptr(args[0], ir.PointerType(of, addrspace=1)))
            found.align = size
            return b.zext(found, I32) if size < 4 else found

        return types.uint32(types.int64), codegen

    doc = (
        f"The {size} bytes of global memory at an address, a multiple of {size}, as a word: uint32."
    )
    return _named(typed, f"load_global_{size}", doc, "address")


load_global_2, load_global_4 = _global_word(2), _global_word(4)


@intrinsic
def store_global(typing_context: Any, address: Any, value: Any) -> Any:
    """Store a number to global memory at an address, a multiple of its size.

    ``memory[address : address + value.nbytes].view(value.dtype)[0] = value``
    """

    def codegen(context, b, sig, args):
        b.store(args[1], b.inttoptr(args[0], ir.PointerType(args[1].type, addrspace=1)))
        return context.get_dummy_value()

    return types.void(types.int64, value), codegen


def _called(b: Any, name: str, *values: Any) -> Any:
    """Call a function of NVVM whose result and arguments are of one type."""
    of = ir.FunctionType(values[0].type, [x.type for x in values])
    return b.call(cgutils.get_or_insert_function(b.module, of, name), values)


def _of_nvvm(name: str, called: str, of: Any, parameters: str, doc: str) -> Any:
    """Make a function of NVVM over numbers of type `of`; unlike inline PTX, it accepts constants as immediates."""
    names = parameters.split()

    def typed(typing_context, *args):
        def codegen(context, b, sig, values):
            return _called(b, called, *values)

        return of(*[of] * len(names)), codegen

    return _named(typed, name, doc, *names)


@intrinsic
def other_float(typing_context: Any, x: Any, lanes: Any) -> Any:
    """Compute `shuffle_xor` of a float32, or of a float64 as two words: ``x[arange(32) ^ lanes]``."""

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


greater_float = _of_nvvm(
    "greater_float", "llvm.nvvm.fmax.f", types.float32, "a b",
    "The greater one of two float32; the other one where one is NaN: ``fmax(a, b)``.",
)  # fmt: skip
smaller_float = _of_nvvm(
    "smaller_float", "llvm.nvvm.fmin.f", types.float32, "a b",
    "The smaller one of two float32; the other one where one is NaN: ``fmin(a, b)``.",
)  # fmt: skip


exp2_approx = operation(
    "exp2_approx", "ex2.approx.ftz.f32 $0, $1;", "f", {"x": "f"},
    "``exp2(x)``, off by 2**-22 of it at most; results below 2**-126 are 0.",
)  # fmt: skip

log2_approx = operation(
    "log2_approx", "lg2.approx.f32 $0, $1;", "f", {"x": "f"},
    "``log2(x)``, off by 2**-22 of it at most, or by 2**-22 where `x` is between 1/2 and 2.",
)  # fmt: skip

_PAIR_OF = "Two float32 as a word of two {}, to nearest: ``array([low, high]).astype({}).view(uint32)[0]``."
pack_bf16 = operation(
    "pack_bf16", "cvt.rn.bf16x2.f32 $0, $2, $1;", "r", {"low": "f", "high": "f"},
    _PAIR_OF.format("bfloat16", "bfloat16"),
)  # fmt: skip
pack_fp16 = operation(
    "pack_fp16", "cvt.rn.f16x2.f32 $0, $2, $1;", "r", {"low": "f", "high": "f"},
    _PAIR_OF.format("float16", "float16") + " What is above 65,504 becomes infinite.",
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

fma_fp16x2 = operation(
    "fma_fp16x2", "fma.rn.f16x2 $0, $1, $2, $3;", "r", {"a": "r", "b": "r", "c": "r"},
    "``a * b + c`` of words of two float16, each rounded once.",
)  # fmt: skip


permute_bytes = _of_nvvm(
    "permute_bytes", "llvm.nvvm.prmt", types.uint32, "a b which",
    """Pick four bytes of `a` (0 to 3) and `b` (4 to 7): hexadecimal digit ``i`` of `which` selects byte ``i``.

    ``concatenate([a.view(uint8), b.view(uint8)])[[which >> 4 * i & 7 for i in range(4)]].view(uint32)``
    """,
)  # fmt: skip


@functools.cache
def permute_bytes_as(which: int) -> Any:
    """Make `permute_bytes` by a constant, which is a part of the instruction: ``permute(a, b)``."""
    text = f"prmt.b32 $0, $1, $2, {which};"
    return operation(f"permute_bytes_as_{which:x}", text, "r", {"a": "r", "b": "r"}, "")


select_bits = operation(
    "select_bits", "lop3.b32 $0, $1, $2, $3, 0xEA;", "r", {"x": "r", "mask": "r", "bits": "r"},
    "``x & mask | bits``, in one instruction.",
)  # fmt: skip


@intrinsic
def unpack_fp16(typing_context: Any, word: Any) -> Any:
    """Unpack the two float16 of a word to float32: ``word.view(float16).astype(float32)``."""

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


def _mma(of: str, called: str) -> Any:
    operands = dict.fromkeys(["a0", "a1", "a2", "a3", "b0", "b1"], "r")
    operands |= dict.fromkeys(["c0", "c1", "c2", "c3"], "f")
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{of}.{of}.f32 "
    text += "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    doc = f"``D = A @ B + C``, A and B of {called}, C and D of float32; its four of D. Layouts are drawn above."
    return operation(f"mma_{called}", text, "ffff", operands, doc, together=True)


mma_bf16, mma_fp16 = _mma("bf16", "bf16"), _mma("f16", "fp16")


@functools.cache
def ldmatrix(matrices: int, *offsets: int, trans: bool = False, into: bool = False) -> Any:
    """Make an operation that loads 2 or 4 matrices at each of `offsets` from an address; see `load_shared`."""
    word = "M[[2t, 2t + 1], g]" if trans else "M[g, [2t, 2t + 1]]"
    doc = f"{matrices} matrices ``M`` of 8 x 8 elements of shared memory, of each ``{word}``; drawn above."
    opcode = f"ldmatrix.sync.aligned.m8n8.x{matrices}{'.trans' * trans}.shared.b16"
    return _loads(opcode, matrices, "r", offsets, doc, into=into, together=True)


ldmatrix_x4, ldmatrix_x4_trans = ldmatrix(4, 0), ldmatrix(4, 0, trans=True)
ldmatrix_x2, ldmatrix_x2_trans = ldmatrix(2, 0), ldmatrix(2, 0, trans=True)


def _shuffle(name: str, mode: str, of: str, doc: str) -> Any:
    operands = {"x": of, "lanes" if mode == "bfly" else "lane": "r"}
    text = f"shfl.sync.{mode}.b32 $0, $1, $2, 31, -1;"
    return operation(name, text, of, operands, doc, together=True)


_XOR = "What thread ``l ^ lanes`` of the warp has: ``x[arange(32) ^ lanes]``; of a {}."
_IDX = (
    "What thread `lane` of the warp has, which may be another one for each: ``x[lane]``; of a {}."
)
shuffle_xor = _shuffle("shuffle_xor", "bfly", "r", _XOR.format("word"))
shuffle_xor_float = _shuffle("shuffle_xor_float", "bfly", "f", _XOR.format("float32"))
shuffle = _shuffle("shuffle", "idx", "r", _IDX.format("word"))
shuffle_float = _shuffle("shuffle_float", "idx", "f", _IDX.format("float32"))


@functools.cache
def shuffle_xor_by(lanes: int, of: str = "r") -> Any:
    """Make `shuffle_xor` by a constant, which is a part of the instruction; of a word, or of a float32 (``"f"``)."""
    text = f"shfl.sync.bfly.b32 $0, $1, {lanes}, 31, -1;"
    return operation(f"shuffle_xor_{of}_by_{lanes}", text, of, {"x": of}, "", together=True)


transpose = operation(
    "transpose", "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "r", {"x": "r"},
    """A matrix of 8 x 8 elements of 16 bits, in the warp's registers, turned: what `ldmatrix_x4_trans` makes of plain.

    ``M[[2t, 2t + 1], g]`` where `x` is ``M[g, [2t, 2t + 1]]``.
    """, together=True,
)  # fmt: skip


#: Kinds whose elements share words: INT4, CODE4 and CODE6.
PACKED = frozenset(k.name for k in kinds(by_channel=True) if k.is_packed)


@functools.cache
def loader(KIND, COMPUTE="float32"):
    """Return the function that converts a word to float, without scales; packed kinds are not supported."""
    return codec("fp32" if kind_of(KIND).has_scales else KIND, COMPUTE)[0]


def _put_floats(context, b, kind, address, size, as_float, to, at):
    """Load `size` bytes of global memory, and store their elements as floats in the array `to`, from `at` on."""
    real = ir.DoubleType() if as_float == types.float64 else F32
    if kind == "code6":
        values = _code6_floats(b, address, size)
    else:
        vector = ir.VectorType(I32, size // 4)
        values = _floats_of(context, b, kind, _load_vector(b, address, vector, size))
    for i, value in enumerate(values):
        if value.type != real:
            convert = b.fpext if as_float == types.float64 else b.fptrunc
            value = convert(value, real)
        b.store(value, b.gep(to.data, [b.add(at, ir.Constant(I64, i))]))


def _load_vector(b, address, type_, size):
    """Load from global memory; array pointers are generic, but all of them point there."""
    pointer = b.addrspacecast(
        b.inttoptr(address, type_.as_pointer()), ir.PointerType(type_, addrspace=1)
    )
    found = b.load(pointer)
    found.align = size
    return found


def _floats_of(context, b, kind, chunk):
    """Yield a chunk's elements as LLVM floats, like `rows.convert`, but with the GPU's own fp16 conversion."""
    if kind == "int4":
        for shift in (0, 4):  # the low nibbles, then the high ones
            for i in range(chunk.type.count):
                yield from _int4_floats(b, b.extract_element(chunk, ir.Constant(I32, i)), shift)
        return
    if kind in ("bf16", "int8", "code4"):
        part = {"bf16": _bf16_floats, "int8": _int8_floats, "code4": _code4_floats}[kind]
        for i in range(chunk.type.count):
            yield from part(b, b.extract_element(chunk, ir.Constant(I32, i)))
        return
    if kind in ("fp8_e4m3", "fp8_e5m2"):  # GPUs before sm_89 have no conversion
        load = loader(kind)
        elements = b.bitcast(chunk, ir.VectorType(ir.IntType(8), 4 * chunk.type.count))
        for i in range(4 * chunk.type.count):
            word = b.extract_element(elements, ir.Constant(I32, i))
            yield context.compile_internal(b, load, types.float32(types.uint8), [word])
        return
    element, count = {
        "fp16": (ir.HalfType(), 8), "fp32": (F32, 4), "fp64": (ir.DoubleType(), 2)
    }[kind]  # fmt: skip
    elements = b.bitcast(chunk, ir.VectorType(element, count))
    for i in range(count):
        value = b.extract_element(elements, ir.Constant(I32, i))
        yield b.fpext(value, F32) if kind == "fp16" else value


def _bf16_floats(b, pair):
    """Yield the floats of two bfloat16: each is the upper half of a float32."""
    yield b.bitcast(b.shl(pair, ir.Constant(I32, 16)), F32)
    yield b.bitcast(b.and_(pair, ir.Constant(I32, 0xFFFF0000)), F32)


def _int8_floats(b, codes):
    """Return the floats of four int8, without the GPU's conversion instruction.

    On some devices that instruction is several times slower than arithmetic. ``code + 128`` is a byte. As the last byte
    of the float 2**23, it adds its value to it.
    """
    bytes_ = b.xor(codes, ir.Constant(I32, 0x80808080))
    return _byte_floats(b, bytes_, 2.0**23 + 128)


def _int4_floats(b, codes, shift):
    """Return the floats of the codes in four bytes' nibbles, from bit `shift` on."""
    nibbles = b.and_(b.lshr(codes, ir.Constant(I32, shift)), ir.Constant(I32, 0x0F0F0F0F))
    return _byte_floats(b, nibbles, 2.0**23)


def _code4_floats(b, codes):
    """Yield the levels of eight codes of `numkv.rows.code4`; one permutation of bytes looks up four magnitudes."""
    low, high = (
        ir.Constant(I32, sum(x << 8 * i for i, x in enumerate(part)))
        for part in (LEVELS[:4], LEVELS[4:])
    )
    for first in range(0, 8, 4):
        here = b.lshr(codes, ir.Constant(I32, 4 * first))
        numbers = b.and_(here, ir.Constant(I32, 0x7777))
        for i, size in enumerate(_byte_floats(b, _permute(b, low, high, numbers), 2.0**23)):
            sign = b.and_(b.shl(here, ir.Constant(I32, 28 - 4 * i)), ir.Constant(I32, 0x80000000))
            yield b.bitcast(b.or_(b.bitcast(size, I32), sign), F32)


def _code6_floats(b, address, size):
    """Yield the levels of 8 or 16 codes of `numkv.rows.code6`, from three loads of 2 or 4 bytes each."""
    each = size // 3
    a, c, e = (
        b.zext(_load_vector(b, b.add(address, ir.Constant(I64, each * i)), ir.IntType(8 * each), each), I32)
        for i in range(3)
    )  # fmt: skip

    def shifted(low, right, high, left):
        return b.or_(b.lshr(low, ir.Constant(I32, right)), b.shl(high, ir.Constant(I32, left)))

    # Units have three bytes each. The byte above them is ignored.
    if each == 2:
        units = [shifted(a, 0, c, 16), shifted(c, 8, e, 8)]
    else:
        units = [a, shifted(a, 24, c, 8), shifted(c, 16, e, 16), b.lshr(e, ir.Constant(I32, 8))]
    for unit in units:
        yield from _unit_floats(b, unit)


def _unit_floats(b, unit):
    """Yield the levels of the four codes of CODE6 in the lower three bytes of a word."""

    def masked(word, left, mask):
        return b.and_(b.shl(word, ir.Constant(I32, left)), ir.Constant(I32, mask))

    codes = masked(unit, 0, 63)
    for i in range(1, 4):  # a byte for each
        codes = b.or_(codes, masked(unit, 2 * i, 63 << 8 * i))
    # A permutation of bytes looks up four magnitudes in a table of eight. The code's upper bits select the table.
    numbers = masked(codes, 0, 0x07070707)
    numbers = b.or_(numbers, b.lshr(numbers, ir.Constant(I32, 4)))
    numbers = _permute(b, numbers, ir.Constant(I32, 0), ir.Constant(I32, 0x4420))
    found = []
    for first in range(0, 32, 8):
        low, high = (
            ir.Constant(I32, sum(x << 8 * i for i, x in enumerate(code6.LEVELS[at : at + 4])))
            for at in (first, first + 4)
        )
        found.append(_permute(b, low, high, numbers))
    for left in (4, 3):  # bits 3 and 4 of codes become sign bits, which then fill their bytes
        upper = _permute(
            b, b.shl(codes, ir.Constant(I32, left)), ir.Constant(I32, 0), ir.Constant(I32, 0xBA98)
        )
        found = [
            b.xor(x, b.and_(upper, b.xor(x, y)))
            for x, y in zip(found[::2], found[1::2], strict=True)
        ]
    for i, size in enumerate(_byte_floats(b, found[0], 2.0**23)):
        sign = masked(codes, 26 - 8 * i, 0x80000000)
        yield b.bitcast(b.or_(b.bitcast(size, I32), sign), F32)


def _permute(b, low, high, numbers):
    """Pick four of eight bytes, those of `low` first; nibble i of `numbers` selects byte i of the result."""
    return _called(b, "llvm.nvvm.prmt", low, high, numbers)


def _byte_floats(b, bytes_, offset):
    """Yield four bytes as floats: each becomes the last byte of the float 2**23, less `offset`."""
    for i in range(4):
        # Bytes 0 to 3 are those of `bytes_`, 4 to 7 those of the constant. The top nibble selects the top byte.
        bits = _permute(b, bytes_, ir.Constant(I32, 0x4B000000), ir.Constant(I32, 0x7440 + i))
        yield b.fsub(b.bitcast(bits, F32), ir.Constant(F32, offset))


def _simulated_row_address(array, a, b, c):
    return (int(a) * array.shape[1] + int(b)) * array.shape[2] + int(c)


def _simulated_load_chunk(KIND, WIDTH, array, row, d, floats, at):
    load = loader(KIND, floats.dtype.name)
    row = array[np.unravel_index(int(row), array.shape[:3])]
    if KIND == "code4":
        for i in range(WIDTH):
            floats[at + i] = code4_level(int(row[d + i // 2]) >> 4 * (i % 2))
        return
    if KIND == "code6":
        for i in range(WIDTH):
            first = d + i // 4 * 3
            unit = sum(int(row[first + j]) << 8 * j for j in range(3))
            floats[at + i] = code6.code6_level(unit >> 6 * (i % 4) & 63)
        return
    if KIND in PACKED:
        for i in range(WIDTH // 2):
            floats[at + i] = int(row[d + i]) & 15
            floats[at + WIDTH // 2 + i] = int(row[d + i]) >> 4
        return
    for i in range(WIDTH):
        floats[at + i] = load(row[d + i])


def _row_address(typing_context: Any, array: Any, a: Any, b: Any, c: Any) -> Any:
    """Return the address of ``array[a, b, c, 0]``, as int64."""

    def codegen(context, builder, sig, args):
        source = context.make_array(sig.args[0])(context, builder, args[0])
        address = builder.ptrtoint(source.data, I64)
        for i in range(3):
            index = context.cast(builder, args[1 + i], sig.args[1 + i], types.int64)
            step = builder.extract_value(source.strides, i)
            address = builder.add(address, builder.mul(index, step))
        return address

    return types.int64(array, a, b, c), codegen


def _load_chunk(
    typing_context: Any, KIND: Any, WIDTH: Any, array: Any, row: Any, d: Any, floats: Any, at: Any
) -> Any:
    """Load `WIDTH` elements, from word `d` of the row at address `row` on, as floats to ``floats[at:]``.

    The elements take 4, 8 or 16 aligned bytes; CODE6 takes 6 or 12. Packed kinds start at word `d`. INT4 has
    ``WIDTH / 2`` words, and yields codes, first those of all low nibbles. CODE4 and CODE6 yield levels in their order.
    `floats` is a local array. It stays in registers if `at` is constant after loops are unrolled. `array` only provides
    the type of a word.
    """
    if not (isinstance(KIND, types.StringLiteral) and isinstance(WIDTH, types.IntegerLiteral)):
        return None
    kind, width, to_type = KIND.literal_value, WIDTH.literal_value, floats.dtype

    def codegen(context, b, sig, args):
        to = context.make_array(sig.args[5])(context, b, args[5])
        word_bytes = sig.args[2].dtype.bitwidth // 8
        size = kind_of(kind).words_per_row(width) * word_bytes
        first = context.cast(b, args[4], sig.args[4], types.int64)
        address = b.add(args[3], b.mul(first, ir.Constant(I64, word_bytes)))
        at_ = context.cast(b, args[6], sig.args[6], types.int64)
        _put_floats(context, b, kind, address, size, to_type, to, at_)
        return context.get_dummy_value()

    return types.void(KIND, WIDTH, array, types.int64, d, floats, at), codegen


if SIMULATED:
    row_address, load_chunk = _simulated_row_address, _simulated_load_chunk
else:
    row_address, load_chunk = intrinsic(_row_address), intrinsic(_load_chunk)
