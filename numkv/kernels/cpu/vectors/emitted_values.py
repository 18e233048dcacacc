"""Values of functions that are emitted: numbers and arrays in LLVM, tuples of them, constants of Python.

What a constant is stays one as long as it can. Numbers that are no int64 are Numba's: it says what a sum of them is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.core.typeconv import Conversion

from numkv.kernels.cpu.vectors.emit import I64

#: By the name of an operator's node in Python's syntax tree: itself, and what it is of two int64.
_ARITHMETIC: dict[str, tuple[Any, str]] = {
    "Add": (operator.add, "add"), "Sub": (operator.sub, "sub"), "Mult": (operator.mul, "mul"),
    "FloorDiv": (operator.floordiv, "div"), "Mod": (operator.mod, "rem"), "Div": (operator.truediv, ""),
    "Pow": (operator.pow, ""), "LShift": (operator.lshift, "shl"),
    "RShift": (operator.rshift, "ashr"), "BitAnd": (operator.and_, "and_"), "BitOr": (operator.or_, "or_"),
    "BitXor": (operator.xor, "xor"),
}  # fmt: skip
_COMPARISONS: dict[str, tuple[Any, str]] = {
    "Eq": (operator.eq, "=="), "NotEq": (operator.ne, "!="), "Lt": (operator.lt, "<"),
    "LtE": (operator.le, "<="), "Gt": (operator.gt, ">"), "GtE": (operator.ge, ">="),
}  # fmt: skip


_SAFE = (Conversion.exact, Conversion.promote, Conversion.safe)
_NUMBERS = (bool, int, float, np.bool_, np.number)


class Leaf:
    """A value in LLVM, and its type in Numba."""

    __slots__ = ("type", "value")

    def __init__(self, type_: Any, value: Any) -> None:
        self.type, self.value = type_, value


class Record:
    """A named tuple whose fields are values."""

    __slots__ = ("fields", "kind")

    def __init__(self, kind: Any, fields: Sequence[Any]) -> None:
        self.kind, self.fields = kind, tuple(fields)


class Slot:
    """A variable's place on the stack."""

    __slots__ = ("pointer", "type")

    def __init__(self, type_: Any, pointer: Any) -> None:
        self.type, self.pointer = type_, pointer


def wrapped(context: Any, b: Any, type_: Any, value: Any) -> Any:
    """An intrinsic's argument or result as the emitter has it."""
    if isinstance(type_, types.NoneType):
        return None
    if isinstance(type_, types.BaseTuple):
        parts = cgutils.unpack_tuple(b, value, len(type_.types))
        fields = [wrapped(context, b, *pair) for pair in zip(type_.types, parts, strict=True)]
        if isinstance(type_, types.BaseNamedTuple):
            return Record(type_.instance_class, fields)
        return tuple(fields)
    return Leaf(types.unliteral(type_), value)


class Values:
    """Makes values of values, at the place where a builder is."""

    def __init__(self, context: Any, b: Any) -> None:
        self.context, self.b = context, b
        context.refresh()

    def where(self) -> str:
        """What is being emitted."""
        raise NotImplementedError

    def fail(self, what: str) -> TypeError:
        """The error for what cannot be emitted."""
        return TypeError(f"{self.where()}: expected what can be emitted, got {what}")

    def leaf(self, value: Any, type_: Any = None) -> Leaf:
        """A value as a number of LLVM, of a type."""
        if value is None:
            value = Leaf(types.none, self.context.get_dummy_value())
        elif isinstance(value, _NUMBERS):
            of = types.int64 if type(value) is int else numba.typeof(value)
            value = Leaf(of, self.context.get_constant(of, value))
        if not isinstance(value, Leaf):
            raise self.fail(f"{value!r} for a number")
        if type_ is None or value.type == type_:
            return value
        return Leaf(type_, self.context.cast(self.b, value.value, value.type, type_))

    def int(self, value: Any) -> Any:
        """An int64 of LLVM."""
        return self.leaf(value, types.int64).value

    def truth(self, value: Any) -> Any:
        """Whether a value is true: a boolean, or of a constant Python's own."""
        return self.leaf(value, types.boolean) if isinstance(value, Leaf) else bool(value)

    def by_numba(self, callee: Any, *arguments: Any) -> Any:
        """What Numba makes of a call, for which it has code of its own."""
        context, typing = self.context, self.context.typing_context
        given = [self.leaf(x) for x in arguments]
        function = typing.resolve_value_type(callee)
        sig = typing.resolve_function_type(function, tuple(x.type for x in given), {})
        emit = context.get_function(function, sig)
        context.add_linking_libs(getattr(emit, "libs", ()))
        if isinstance(sig.args[0], types.StarArgTuple | types.StarArgUniTuple):
            given = [self.packed(tuple(given), sig.args[0])]
        values = [self.leaf(x, type_).value for x, type_ in zip(given, sig.args, strict=True)]
        return wrapped(context, self.b, sig.return_type, emit(self.b, values))

    def each(self, change: Callable[..., Any], *values: Any) -> Any:
        """The same of all numbers of values that have one structure."""
        first = values[0]
        if isinstance(first, tuple) and hasattr(first, "_fields"):  # a constant
            first = Record(type(first), first)
        if isinstance(first, Record):
            fields = (value.fields if isinstance(value, Record) else value for value in values)
            parts = zip(*fields, strict=True)
            return Record(first.kind, [self.each(change, *part) for part in parts])
        if isinstance(first, tuple):
            return tuple(self.each(change, *part) for part in zip(*values, strict=True))
        return change(*values)

    def slot(self, value: Any) -> Any:
        """A place for a value, on the stack."""

        def of(x: Any) -> Any:
            found = self.leaf(x)
            return Slot(found.type, cgutils.alloca_once(self.b, found.value.type))

        return None if value is None else self.each(of, value)

    def put(self, slot: Any, value: Any) -> None:
        """Store a value in a place."""

        def into(place: Any, x: Any) -> None:
            found = self.leaf(x)
            if self.context.typing_context.can_convert(found.type, place.type) not in _SAFE:
                raise self.fail(f"{found.type} for a variable of {place.type}")
            self.b.store(self.leaf(found, place.type).value, place.pointer)

        if slot is not None:
            self.each(into, slot, value)

    def loaded(self, slot: Any) -> Any:
        """What is in a place."""
        if slot is None:
            return None
        return self.each(lambda place: Leaf(place.type, self.b.load(place.pointer)), slot)

    def joined(self, values: list[tuple[Any, Any]]) -> Any:
        """One of several values, by the block from which this one is reached; their types are brought together."""
        if not values or values[0][1] is None:
            return None
        here, unify = self.b.block, self.context.typing_context.unify_types
        found = []
        for block, value in values:
            self.b.position_before(block.terminator)
            found.append(self.each(self.leaf, value))

        def of(*leaves: Any) -> Any:
            type_ = unify(*(x.type for x in leaves))
            if type_ is None:
                raise self.fail(
                    f"values of types that do not go together, {[x.type for x in leaves]}"
                )
            pointer = cgutils.alloca_once(self.b, self.context.get_value_type(type_))
            return Slot(type_, pointer)

        place = self.each(of, *found)
        for (block, _), value in zip(values, found, strict=True):
            self.b.position_before(block.terminator)
            self.put(place, value)
        self.b.position_at_end(here)
        return self.loaded(place)

    def array(self, value: Leaf) -> Any:
        """An array's parts: data, shape, strides."""
        return self.context.make_array(value.type)(self.context, self.b, value.value)

    def element(self, value: Any, index: Any) -> Any:
        """The address of an element of an array."""
        indices = index if isinstance(index, tuple) else (index,)
        if not (isinstance(value, Leaf) and isinstance(value.type, types.Array)):
            raise self.fail("an index of what is no array")
        if len(indices) != value.type.ndim:
            raise self.fail(f"{len(indices)} indices of {value.type}")
        of = self.array(value)
        if value.type.layout == "C" and value.type.ndim == 1:
            return self.b.gep(of.data, [self.int(index)], inbounds=True)
        at = self.b.ptrtoint(of.data, I64)
        for axis, i in enumerate(indices):
            stride = self.b.extract_value(of.strides, axis)
            at = self.b.add(at, self.b.mul(self.int(i), stride))
        return self.b.inttoptr(at, of.data.type)

    def view(self, value: Leaf, index: tuple[Any, ...]) -> Leaf:
        """The part of an array at an index that has fewer numbers than the array axes, whole slices and None."""
        b, source = self.b, self.array(value)
        sizes, steps = (cgutils.unpack_tuple(b, x) for x in (source.shape, source.strides))
        axes = zip(sizes, steps, strict=True)
        at, kept = b.ptrtoint(source.data, I64), []
        rest = value.type.ndim - sum(x is not None for x in index)
        for part in (*index, *(slice(None),) * rest):
            if part is None:
                kept.append((I64(1), I64(0)))
            elif isinstance(part, slice):
                kept.append(next(axes))
            else:
                at = b.add(at, b.mul(self.int(part), next(axes)[1]))
        type_ = value.type.copy(ndim=len(kept), layout="A")
        found = self.context.make_array(type_)(self.context, b)
        self.context.populate_array(
            found, data=b.inttoptr(at, source.data.type), shape=[size for size, _ in kept],
            strides=[stride for _, stride in kept], itemsize=source.itemsize, meminfo=None,
        )  # fmt: skip
        return Leaf(type_, found._getvalue())

    def slice(self, value: Leaf, begin: Any, end: Any) -> Leaf:
        """Part of a 1-d array."""
        source, found = self.array(value), self.context.make_array(value.type)(self.context, self.b)
        begin = self.int(0 if begin is None else begin)
        size = self.b.extract_value(source.shape, 0)
        stride = self.b.extract_value(source.strides, 0)
        size = self.b.sub(size if end is None else self.int(end), begin)
        data = self.b.add(self.b.ptrtoint(source.data, I64), self.b.mul(begin, stride))
        self.context.populate_array(
            found, data=self.b.inttoptr(data, source.data.type), shape=[size], strides=[stride],
            itemsize=source.itemsize, meminfo=None,
        )  # fmt: skip
        return Leaf(value.type, found._getvalue())

    def arithmetic(self, op: str, left: Any, right: Any) -> Any:
        """What an operator makes of two numbers."""
        if op not in _ARITHMETIC:
            raise self.fail(op)
        of_constants, name = _ARITHMETIC[op]
        if not (isinstance(left, Leaf) or isinstance(right, Leaf)):
            return of_constants(left, right)
        if not (_is_int(left) and _is_int(right) and name):
            return self.by_numba(of_constants, left, right)
        if name in ("div", "rem"):
            return self.divide(name == "rem", left, right)
        return Leaf(types.int64, getattr(self.b, name)(self.int(left), self.int(right)))

    def divide(self, rest: bool, left: Any, right: Any) -> Leaf:
        """Divide, rounding down; 0 where the divisor is 0."""
        b, x, y = self.b, self.int(left), self.int(right)
        if isinstance(right, int | np.integer) and right > 0 and right & (right - 1) == 0:
            found = b.and_(x, I64(right - 1)) if rest else b.ashr(x, I64(right.bit_length() - 1))
            return Leaf(types.int64, found)
        none = b.icmp_signed("==", y, I64(0))
        by = b.select(none, I64(1), y)
        remainder = b.srem(x, by)
        odd = b.icmp_signed("!=", remainder, I64(0))
        off = b.and_(odd, b.icmp_signed("<", b.xor(remainder, by), I64(0)))
        if rest:
            found = b.add(remainder, b.select(off, by, I64(0)))
        else:
            found = b.sub(b.sdiv(x, by), b.zext(off, I64))
        return Leaf(types.int64, b.select(none, I64(0), found))

    def compared(self, op: str, left: Any, right: Any) -> Any:
        """Whether two numbers compare so."""
        if op not in _COMPARISONS:
            raise self.fail(op)
        of_constants, sign = _COMPARISONS[op]
        if not (isinstance(left, Leaf) or isinstance(right, Leaf)):
            return bool(of_constants(left, right))
        if not (_is_int(left) and _is_int(right)):
            return self.by_numba(of_constants, left, right)
        return Leaf(types.boolean, self.b.icmp_signed(sign, self.int(left), self.int(right)))

    def both(self, left: Any, right: Any) -> Any:
        """Whether two values are true."""
        if not isinstance(left, Leaf):
            return right if left else False
        if not isinstance(right, Leaf):
            return left if right else False
        return Leaf(types.boolean, self.b.and_(left.value, right.value))

    def extreme(self, of: Any, left: Any, right: Any) -> Any:
        """The lesser or the greater of two numbers."""
        if not (isinstance(left, Leaf) or isinstance(right, Leaf)):
            return of(left, right)
        if not (_is_int(left) and _is_int(right)) or types.int32 in (_type(left), _type(right)):
            return self.by_numba(of, left, right)
        x, y = self.int(left), self.int(right)
        keep = self.b.icmp_signed("<" if of is min else ">", y, x)
        return Leaf(types.int64, self.b.select(keep, y, x))

    def bits(self, value: Leaf, type_: Any) -> Leaf:
        """A number of another type that has the same bits."""
        return Leaf(type_, self.b.bitcast(value.value, self.context.get_value_type(type_)))

    def intrinsic(self, callee: Any, arguments: list[Any]) -> Any:
        """What an intrinsic emits for these arguments."""
        given = [self.packed(value) for value in arguments]
        sig, emit = callee._defn(self.context.typing_context, *(x.type for x in given))
        found = emit(self.context, self.b, sig, [x.value for x in given])
        return wrapped(self.context, self.b, sig.return_type, found)

    def packed(self, value: Any, type_: Any = None) -> Leaf:
        """A value as intrinsics take and return it, where tuples are one; perhaps of a type."""
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            value = Record(type(value), value)
        if not isinstance(value, Record | tuple):
            return self.leaf(value, type_)
        fields = value.fields if isinstance(value, Record) else value
        wanted = [None] * len(fields) if type_ is None else type_.types
        parts = [self.packed(*pair) for pair in zip(fields, wanted, strict=True)]
        of = [x.type for x in parts]
        if isinstance(value, Record):
            if len(set(of)) == 1:
                type_ = types.NamedUniTuple(of[0], len(of), value.kind)
            else:
                type_ = types.NamedTuple(of, value.kind)
        else:
            type_ = types.Tuple(of) if type_ is None else type_
        made = self.context.make_tuple(self.b, type_, [x.value for x in parts])
        return Leaf(type_, made)


def _type(value: Any) -> Any:
    return value.type if isinstance(value, Leaf) else None


def _is_int(value: Any) -> bool:
    """Whether a value is an int64, or a number that becomes one in company."""
    if isinstance(value, Leaf):
        return value.type in (types.int64, types.int32, types.boolean)
    return isinstance(value, int | np.int64)
