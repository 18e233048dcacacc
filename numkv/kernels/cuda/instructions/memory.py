"""Addresses, copies from global to shared memory that go on behind the program, and accesses of up to 16 bytes."""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import types

from numkv.kernels.cuda.instructions.emit import I32, I64, intrinsic, operation


@intrinsic
def shared_address(typing_context: Any, array: Any) -> Any:
    """Where a shared array starts, in bytes of shared memory: int32."""

    def codegen(context, b, sig, args):
        data = context.make_array(sig.args[0])(context, b, args[0]).data
        pointer = ir.PointerType(data.type.pointee, addrspace=3)
        return b.ptrtoint(b.addrspacecast(data, pointer), I32)

    return types.int32(array), codegen


@intrinsic
def global_address(typing_context: Any, array: Any) -> Any:
    """Where an array in global memory starts: int64, ``array.ctypes.data``."""

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
    """An operation that starts `count` copies, of rows that a table in shared memory says the places of.

    ``copy(to, table, source)``: ``cp_async_16(to + i * step, source + shared[table + i * table_step])`` for ``i <
    count``; the table has int64. If `sized`, ``copy(to, table, source, sizes, most)``: `cp_async_16_or_zeros`, of sizes
    that another table has, of int32, half as far apart; ``& most``, which is left out if not
    `most`. The table starts `table_from` bytes after `table`, copies go to `to_from` bytes after `to`.
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
    """An operation that starts to copy `count` words of a row that a table in shared memory says the place of.

    ``copy(to, table, source, size)``: ``shared[to + 4 * i] = memory[place + 4 * i]``, words, for ``i < count``, with
    ``place = source + shared[table]``, int64; all addresses are multiples of 4. Where ``shared[size]``, int32, is 0,
    words become 0 and nothing is read; else it is 16. The copies go through the first-level cache.
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
    """An operation that is `count` times `cp_async_16`, for rows whose chunks are in another order for each of eight.

    ``cp_async_16((to ^ rows * i % 8 * 16) + i * step, source + i * source_step)`` for ``i < count``. Steps of shared
    memory are part of the instructions, so that only sources, and what differs by the order, are computed.
    """
    text = "{ .reg .b64 %source; .reg .b32 %to;\n"
    turns = list(dict.fromkeys(rows * i % 8 for i in range(count)))
    # In the order of sources, as each is the one before plus a step; `%to` of a turn is computed where it comes.
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
    """Wait until all groups of this thread's copies have arrived, but for the last `groups`, a constant."""
    if not isinstance(groups, types.IntegerLiteral):
        return None
    text = f"cp.async.wait_group {groups.literal_value};"

    def codegen(context, b, sig, args):
        nothing = ir.FunctionType(ir.VoidType(), [])
        b.call(ir.InlineAsm(nothing, text, "~{memory}", side_effect=True), [])
        return context.get_dummy_value()

    return types.void(groups), codegen


def _shared(words: int) -> tuple[Any, Any]:
    """The functions that load and store some words of shared memory at once."""
    vector = {1: "", 2: ".v2", 4: ".v4"}[words]
    size, names = 4 * words, list("abcd"[:words])
    loaded = ", ".join(f"${i}" for i in range(words))
    stored = ", ".join(f"${i + 1}" for i in range(words))
    load = operation(
        f"load_shared_{size}", f"ld.shared{vector}.b32 {{{loaded}}}, [${words}];", "r" * words, {"address": "r"},
        f"The {size} bytes of shared memory at an address, a multiple of {size}, as words.", memory=True,
    )  # fmt: skip
    store = operation(
        f"store_shared_{size}", f"st.shared{vector}.b32 [$0], {{{stored}}};", "",
        {"address": "r"} | dict.fromkeys(names, "r"),
        f"Put words into the {size} bytes of shared memory at an address, a multiple of {size}.", memory=True,
    )  # fmt: skip
    return load, store


@functools.cache
def load_shared_8_steps(count: int, step: int) -> Any:
    """An operation that is `count` times `load_shared_8`, each `step` bytes after the one before."""
    text = "".join(
        f"ld.shared.v2.b32 {{${2 * i}, ${2 * i + 1}}}, [${2 * count}+{i * step}];\n"
        for i in range(count)
    )
    name = f"load_shared_8_{count}_steps_of_{step}"
    return operation(name, text, "r" * (2 * count), {"address": "r"}, "", memory=True, early=True)


@functools.cache
def load_shared_pairs(count: int, step: int) -> Any:
    """An operation that puts `count` pairs of float32, each `step` bytes after the one before, into a local array.

    ``load(address, floats)``: ``floats[2 * i : 2 * i + 2] = shared[address + i * step :][:8]``.
    """
    text = "".join(
        f"ld.shared.v2.f32 {{${2 * i}, ${2 * i + 1}}}, [${2 * count}+{i * step}];\n"
        for i in range(count)
    )
    name = f"load_shared_{count}_pairs_of_{step}"
    return operation(
        name, text, "f" * (2 * count), {"address": "r"}, "", memory=True, early=True, into=True
    )


@functools.cache
def load_shared_4_from(offset: int) -> Any:
    """`load_shared_4`, of ``address + offset``; the offset is a part of the instruction."""
    text = f"ld.shared.b32 $0, [$1+{offset}];"
    return operation(f"load_shared_4_from_{offset}", text, "r", {"address": "r"}, "", memory=True)


@functools.cache
def load_shared_16_from(offset: int) -> Any:
    """`load_shared_16`, of ``address + offset``; the offset is a part of the instruction."""
    text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];"
    return operation(
        f"load_shared_16_from_{offset}", text, "rrrr", {"address": "r"}, "", memory=True
    )


@functools.cache
def store_shared_16_at(offset: int) -> Any:
    """`store_shared_16`, at ``address + offset``; the offset is a part of the instruction."""
    text = f"st.shared.v4.b32 [$0+{offset}], {{$1, $2, $3, $4}};"
    operands = {"address": "r"} | dict.fromkeys("abcd", "r")
    return operation(f"store_shared_16_at_{offset}", text, "", operands, "", memory=True)


@functools.cache
def load_shared_4_floats_from(offset: int) -> Any:
    """The four float32 of shared memory at ``address + offset``, a multiple of 16, at once."""
    text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{offset}];"
    return operation(
        f"load_shared_4_floats_from_{offset}", text, "ffff", {"address": "r"}, "", memory=True
    )


@functools.cache
def load_shared_floats(offsets: tuple[int, ...]) -> Any:
    """An operation that gives the float32 of shared memory at constant offsets from an address, multiples of 4."""
    text = "".join(f"ld.shared.f32 ${i}, [${len(offsets)}+{x}];\n" for i, x in enumerate(offsets))
    name = "load_shared_floats_" + "_".join(map(str, offsets))
    return operation(name, text, "f" * len(offsets), {"address": "r"}, "", memory=True, early=True)


@functools.cache
def store_shared_pairs(offsets: tuple[int, ...]) -> Any:
    """An operation that puts pairs of float32 into shared memory at constant offsets from an address, multiples of 8.

    ``store(address, floats)``: ``shared[address + offsets[i] :][:8] = floats[2 * i : 2 * i + 2]``, of a local array.
    """
    text = "".join(
        f"st.shared.v2.f32 [$0+{x}], {{${2 * i + 1}, ${2 * i + 2}}};\n"
        for i, x in enumerate(offsets)
    )
    name = "store_shared_pairs_" + "_".join(map(str, offsets))
    return operation(name, text, "", {"address": "r"}, "", memory=True, floats=2 * len(offsets))


@functools.cache
def load_shared_quad(offset: int) -> Any:
    """An operation that gives the four float32 of shared memory at an address plus `offset`, a multiple of 16."""
    text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{offset}];"
    return operation(f"load_shared_quad_{offset}", text, "ffff", {"address": "r"}, "", memory=True)


load_shared_4, store_shared_4 = _shared(1)
load_shared_8, store_shared_8 = _shared(2)
load_shared_16, store_shared_16 = _shared(4)

_VECTOR = ir.VectorType(I32, 4)


def _vector_at(b: Any, address: Any) -> Any:
    return b.inttoptr(address, ir.PointerType(_VECTOR, addrspace=1))


@intrinsic
def load_global_16(typing_context: Any, address: Any) -> Any:
    """The 16 bytes of global memory at an address, a multiple of 16, as four words.

    ``memory[address : address + 16].view(uint32)``; the compiler may do it earlier, if nothing is stored between.
    """

    def codegen(context, b, sig, args):
        found = b.load(_vector_at(b, args[0]))
        found.align = 16
        parts = [b.extract_element(found, ir.Constant(I32, i)) for i in range(4)]
        return context.make_tuple(b, sig.return_type, parts)

    return types.UniTuple(types.uint32, 4)(types.int64), codegen


@intrinsic
def store_global_16(typing_context: Any, address: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Put four words into the 16 bytes of global memory at an address, a multiple of 16.

    ``memory[address : address + 16].view(uint32)[:] = a, b, c, d``
    """

    def codegen(context, builder, sig, args):
        value = ir.Constant(_VECTOR, ir.Undefined)
        for i, word in enumerate(args[1:]):
            value = builder.insert_element(value, word, ir.Constant(I32, i))
        builder.store(value, _vector_at(builder, args[0]), align=16)
        return context.get_dummy_value()

    return types.void(types.int64, *[types.uint32] * 4), codegen


def _global(size: int) -> Any:
    """The function that loads a word, or a half of one, of global memory."""
    of = ir.IntType(8 * size)

    def typed(typing_context: Any, address: Any) -> Any:
        def codegen(context, b, sig, args):
            found = b.load(b.inttoptr(args[0], ir.PointerType(of, addrspace=1)))
            found.align = size
            return b.zext(found, I32) if size < 4 else found

        return types.uint32(types.int64), codegen

    typed.__name__ = typed.__qualname__ = f"load_global_{size}"
    typed.__doc__ = (
        f"The {size} bytes of global memory at an address, a multiple of {size}, as a word: uint32."
    )
    return intrinsic(typed)


load_global_2, load_global_4 = _global(2), _global(4)
