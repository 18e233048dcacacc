"""Functions of integers, compiled straight from their source, without Numba's type inference.

Integers control a kernel: the next item, the places of its rows, whether arrays fit. Nearly all of them are int64, so
their types are simple. A walk over the source here replaces seconds of Numba's inference, in a fiftieth of the time.
`emitted` makes an intrinsic of such a function, with all the functions that it calls; `as_kernel` makes a kernel. They
stay functions in Python that Numba can compile. It does so if indices are checked (``NUMBA_BOUNDSCHECK=1``), or if
source files have changed since their import.

Such functions may have:

- Numbers and booleans, by Numba's rules; arrays, with indices that are not negative, and slices; tuples and named
  tuples of these; constants.
- ``if``, ``while``, ``for`` over a ``range`` or a tuple, ``break``, ``continue``, ``return`` anywhere; arithmetic,
  comparisons, ``and``, ``or``, ``not``, conditional expressions.
- Calls of such functions, of intrinsics, of named tuples, of NumPy's types, of ``min``, ``max`` and ``len``, and of all
  else that Numba has code for.
- ``np.empty`` of one axis outside of loops, freed where its function ends.

A variable has one type, but an assignment outside of branches and loops may change it. Constants stay constants as long
as they can. For numbers other than int64, Numba defines the type of a result.

Anything else raises `TypeError` when the kernel is made.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import operator
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typeconv import Conversion
from numba.extending import intrinsic

from numkv.kernels.cpu.vectors.arrays import array_value
from numkv.kernels.cpu.vectors.emit import I64

#: Operators by their nodes in Python's syntax tree: the function, and the instruction for two int64.
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
        """Return the place in the source that is being emitted, for messages."""
        raise NotImplementedError

    def fail(self, what: str) -> TypeError:
        """Return the error for what cannot be emitted."""
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
        """Return whether a value is true: a boolean, or of a constant Python's own."""
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
        """Load the value in a place."""
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
        """Return the address of an element of an array."""
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
        """Return the part of an array at an index that has fewer numbers than the array axes, whole slices and None."""
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
        sizes, steps = [size for size, _ in kept], [stride for _, stride in kept]
        found = array_value(self.context, b, type_, at, sizes, steps, source.itemsize)
        return Leaf(type_, found)

    def slice(self, value: Leaf, begin: Any, end: Any) -> Leaf:
        """Part of a 1-d array."""
        source = self.array(value)
        begin = self.int(0 if begin is None else begin)
        size = self.b.extract_value(source.shape, 0)
        stride = self.b.extract_value(source.strides, 0)
        size = self.b.sub(size if end is None else self.int(end), begin)
        data = self.b.add(self.b.ptrtoint(source.data, I64), self.b.mul(begin, stride))
        lies = data, [size], [stride], source.itemsize
        return Leaf(value.type, array_value(self.context, self.b, value.type, *lies))

    def arithmetic(self, op: str, left: Any, right: Any) -> Any:
        """Emit an operator on two numbers."""
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
        """Return whether two numbers compare so."""
        if op not in _COMPARISONS:
            raise self.fail(op)
        of_constants, sign = _COMPARISONS[op]
        if not (isinstance(left, Leaf) or isinstance(right, Leaf)):
            return bool(of_constants(left, right))
        if not (_is_int(left) and _is_int(right)):
            return self.by_numba(of_constants, left, right)
        return Leaf(types.boolean, self.b.icmp_signed(sign, self.int(left), self.int(right)))

    def both(self, left: Any, right: Any) -> Any:
        """Return whether two values are true."""
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
        """Emit an intrinsic for these arguments."""
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
    """Return whether a value is an int64, or a number that becomes one in company."""
    if isinstance(value, Leaf):
        return value.type in (types.int64, types.int32, types.boolean)
    return isinstance(value, int | np.int64)


#: Turns of a loop over a range of constants that are emitted one by one, at most: indices of shapes are constants then.
_UNROLLED = 4
_INTRINSIC = type(intrinsic(lambda typing_context: None))


@functools.cache
def _source(code: Any) -> Any:
    """The syntax tree of a function, names that are assigned once where it is certain that they are, all of those."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(code))).body
    assert isinstance(tree, ast.FunctionDef)
    stored: dict[str, int] = {argument.arg: 1 for argument in tree.args.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            stored[node.id] = stored.get(node.id, 0) + 1
    above = {argument.arg for argument in tree.args.args}
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            above |= {node.id for target in statement.targets for node in ast.walk(target)
                      if isinstance(node, ast.Name)}  # fmt: skip
    once = {name for name, count in stored.items() if count == 1}
    return tree, above & once, once


class _Frame:
    """A function that is being emitted: its variables, and where ``return``, ``break`` and ``continue`` go."""

    def __init__(self, function: Any, fixed: set[str], once: set[str]) -> None:
        self.function, self.fixed, self.once = function, set(fixed), once
        self.values: dict[str, Any] = {}
        self.memory: list[Slot] = []
        self.depth = 0  # of branches and loops
        self.returns: list[tuple[Any, Any]] = []  # blocks that end so, and what they return
        self.loops: list[tuple[Any, Any]] = []
        self.exit: Any = None
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.free = {name: cell.cell_contents for name, cell in cells}


class Emitter(Values):
    """Emits functions into the one that a builder is at."""

    def __init__(self, context: Any, b: Any) -> None:
        super().__init__(context, b)
        self.frame: _Frame = None  # type: ignore[assignment]
        self.line = 0

    # ---------------------------------------------------------------- functions

    def call(self, function: Any, arguments: Sequence[Any]) -> Any:
        """Emit a function's body; return its result."""
        function = getattr(function, "py_func", function)
        tree, fixed, once = _source(function.__code__)
        outer, self.frame = self.frame, _Frame(function, fixed, once)
        try:
            names = [argument.arg for argument in tree.args.args]
            for name, value in zip(names, arguments, strict=True):
                self.assign(name, value)
            *before, last = tree.body
            if isinstance(last, ast.Return) and not any(
                isinstance(node, ast.Return) for one in before for node in ast.walk(one)
            ):
                self.block(before)
                found = None if last.value is None else self.eval(last.value)
                self.free()
                return found
            self.frame.exit = self.b.append_basic_block()
            self.block(tree.body)
            self.go(self.frame.exit)
            self.b.position_at_end(self.frame.exit)
            found = self.joined(self.frame.returns)
            self.free()
            return found
        finally:
            self.frame = outer

    def empty(self, size: Any, dtype: Any) -> Leaf:
        """A new 1-d array, which is there until the function ends that makes it."""
        of = numba.from_dtype(np.dtype(dtype))
        type_, size = types.Array(of, 1, "C"), self.int(size)
        itemsize = I64(of.bitwidth // 8)
        align = self.context.get_constant(types.uint32, 64)
        memory = self.context.nrt.meminfo_alloc_aligned(self.b, self.b.mul(size, itemsize), align)
        data = self.context.nrt.meminfo_data(self.b, memory)
        lies = data, [size], [itemsize], itemsize, memory
        found = Leaf(type_, array_value(self.context, self.b, type_, *lies))
        place = self.slot(found)
        self.b.store(found.value, place.pointer)
        self.frame.memory.append(place)
        return found

    def free(self) -> None:
        """Free a function's arrays; none if it ended before making them."""
        for place in self.frame.memory:
            made = self.b.load(place.pointer)
            self.context.nrt.decref(self.b, place.type, made)
            self.b.store(ir.Constant(made.type, None), place.pointer)

    def where(self) -> str:
        """Which line of which function is being emitted."""
        code = self.frame.function.__code__
        return f"{code.co_qualname}, line {code.co_firstlineno + self.line - 1}"

    # ---------------------------------------------------------------- values

    def assign(self, name: str, value: Any) -> None:
        """Give a variable a value."""
        frame = self.frame
        if name in frame.fixed:
            frame.values[name] = value
            return
        # Where nothing goes back or round, a name may come to stand for another type.
        if name not in frame.values or frame.depth == 0:
            frame.values[name] = self.slot(value)
        self.put(frame.values[name], value)

    # ---------------------------------------------------------------- statements

    def go(self, block: Any) -> None:
        """Go on at a block, unless this one has ended."""
        if not self.b.block.is_terminated:
            self.b.branch(block)

    def block(self, statements: Sequence[ast.stmt]) -> None:
        """Emit statements until one ends the block."""
        for statement in statements:
            if self.b.block.is_terminated:
                return
            self.statement(statement)

    def inner(self, statements: Sequence[ast.stmt]) -> None:
        """Emit statements of a branch or a loop."""
        self.frame.depth += 1
        self.block(statements)
        self.frame.depth -= 1

    def statement(self, node: ast.stmt) -> None:
        self.line = node.lineno
        if isinstance(node, ast.Expr):
            if not isinstance(node.value, ast.Constant):
                self.eval(node.value)
        elif isinstance(node, ast.Assign):
            value = self.eval(node.value)
            for target in node.targets:
                self.store(target, value)
        elif isinstance(node, ast.AugAssign):
            found = self.eval(_as_read(node.target)), self.eval(node.value)
            self.store(node.target, self.arithmetic(type(node.op).__name__, *found))
        elif isinstance(node, ast.If):
            self.branch(node)
        elif isinstance(node, ast.While):
            self.loop(lambda: self.truth(self.eval(node.test)), lambda: self.inner(node.body))
        elif isinstance(node, ast.For):
            self.iterate(node)
        elif isinstance(node, ast.Return):
            value = None if node.value is None else self.eval(node.value)
            self.frame.returns.append((self.b.block, value))
            self.b.branch(self.frame.exit)
        elif isinstance(node, ast.Break | ast.Continue):
            self.b.branch(self.frame.loops[-1][isinstance(node, ast.Continue)])
        elif not isinstance(node, ast.Pass):
            raise self.fail(type(node).__name__)

    def store(self, target: ast.expr, value: Any) -> None:
        """Assign a value to a name, to several, or to an element of an array."""
        if isinstance(target, ast.Name):
            self.assign(target.id, value)
        elif isinstance(target, ast.Tuple):
            parts = value.fields if isinstance(value, Record) else value
            for one, part in zip(target.elts, parts, strict=True):
                self.store(one, part)
        elif isinstance(target, ast.Subscript):
            array = self.eval(target.value)
            place = self.element(array, self.eval(target.slice))
            self.b.store(self.leaf(value, array.type.dtype).value, place)
        else:
            raise self.fail(type(target).__name__)

    def branch(self, node: ast.If) -> None:
        test = self.truth(self.eval(node.test))
        if isinstance(test, bool):
            self.block(node.body if test else node.orelse)
            return
        then, after = self.b.append_basic_block(), self.b.append_basic_block()
        other = self.b.append_basic_block() if node.orelse else after
        self.b.cbranch(test.value, then, other)
        reached = other is after
        for start, statements in ((then, node.body), (other, node.orelse)):
            if start is after:
                continue
            self.b.position_at_end(start)
            self.inner(statements)
            reached |= not self.b.block.is_terminated
            self.go(after)
        self.b.position_at_end(after)
        if not reached:
            self.b.unreachable()

    def loop(
        self, test: Callable[[], Any], body: Callable[[], None], advance: Callable[[], Any] = lambda: None
    ) -> None:  # fmt: skip
        """A loop while a test holds; between turns `advance` is emitted."""
        head, inside, later, after = (self.b.append_basic_block() for _ in range(4))
        self.b.branch(head)
        self.b.position_at_end(head)
        holds = test()
        if isinstance(holds, bool):
            self.b.branch(inside if holds else after)
        else:
            self.b.cbranch(holds.value, inside, after)
        self.b.position_at_end(inside)
        self.frame.loops.append((after, later))
        body()
        self.frame.loops.pop()
        self.go(later)
        self.b.position_at_end(later)
        advance()
        self.b.branch(head)
        self.b.position_at_end(after)

    def iterate(self, node: ast.For) -> None:
        call, items = node.iter, None
        if isinstance(call, ast.Call) and self.eval(call.func) is range:
            numbers = [self.eval(argument) for argument in call.args]
            if all(isinstance(x, int) for x in numbers) and len(range(*numbers)) <= _UNROLLED:
                items = tuple(range(*numbers))
            else:
                self.count(node, numbers)
                return
        else:
            items = self.eval(call)
        if not isinstance(items, tuple):
            raise self.fail("a loop over neither a range nor a tuple")
        if not any(isinstance(x, ast.Break) for one in node.body for x in ast.walk(one)):
            targets = {x.id for x in ast.walk(node.target) if isinstance(x, ast.Name)}
            self.frame.fixed |= targets & self.frame.once
        after = self.b.append_basic_block()
        for item in items:
            later = self.b.append_basic_block()
            self.frame.depth += 1
            self.store(node.target, item)
            self.frame.loops.append((after, later))
            self.block(node.body)
            self.frame.loops.pop()
            self.frame.depth -= 1
            self.go(later)
            self.b.position_at_end(later)
        self.b.branch(after)
        self.b.position_at_end(after)

    def count(self, node: ast.For, numbers: list[Any]) -> None:
        """A loop over a range."""
        start, stop, step = {1: (0, *numbers, 1), 2: (*numbers, 1), 3: numbers}[len(numbers)]
        b, at = self.b, self.slot(self.leaf(start, types.int64))
        self.put(at, start)
        stop, by = self.int(stop), self.int(step)

        def test() -> Any:
            i = b.load(at.pointer)
            up = b.icmp_signed("<", i, stop)
            if isinstance(step, int):
                return Leaf(types.boolean, up if step > 0 else b.icmp_signed(">", i, stop))
            down = b.icmp_signed(">", i, stop)
            return Leaf(types.boolean, b.select(b.icmp_signed(">", by, I64(0)), up, down))

        def body() -> None:
            self.frame.depth += 1
            self.store(node.target, self.loaded(at))
            self.block(node.body)
            self.frame.depth -= 1

        self.loop(test, body, lambda: b.store(b.add(b.load(at.pointer), by), at.pointer))

    # ---------------------------------------------------------------- expressions

    def eval(self, node: ast.expr) -> Any:
        found = getattr(self, f"eval_{type(node).__name__.lower()}", None)
        if found is None:
            raise self.fail(type(node).__name__)
        return found(node)

    def eval_constant(self, node: ast.Constant) -> Any:
        return node.value

    def eval_name(self, node: ast.Name) -> Any:
        frame = self.frame
        if node.id in frame.values:
            value = frame.values[node.id]
            return value if node.id in frame.fixed else self.loaded(value)
        for names in (frame.free, frame.function.__globals__, vars(builtins)):
            if node.id in names:
                return names[node.id]
        raise self.fail(f"{node.id}, which has no value yet")

    def eval_tuple(self, node: ast.Tuple) -> Any:
        return tuple(self.eval(one) for one in node.elts)

    def eval_attribute(self, node: ast.Attribute) -> Any:
        value = self.eval(node.value)
        if isinstance(value, Record):
            return value.fields[value.kind._fields.index(node.attr)]
        if isinstance(value, Leaf):
            if not isinstance(value.type, types.Array):
                raise self.fail(f"{node.attr} of {value.type}")
            if node.attr == "ndim":
                return value.type.ndim
            of = self.array(value)
            if node.attr == "itemsize":
                return Leaf(types.int64, of.itemsize)
            numbers = {"shape": of.shape, "strides": of.strides}[node.attr]
            return tuple(
                Leaf(types.int64, self.b.extract_value(numbers, axis))
                for axis in range(value.type.ndim)
            )
        return getattr(value, node.attr)

    def eval_subscript(self, node: ast.Subscript) -> Any:
        value = self.eval(node.value)
        if isinstance(node.slice, ast.Slice):
            lower, upper = (
                None if end is None else self.eval(end) for end in (node.slice.lower, node.slice.upper)
            )  # fmt: skip
            return self.slice(value, lower, upper)
        index = self.eval(node.slice)
        if isinstance(value, Record | tuple):
            return (value.fields if isinstance(value, Record) else value)[index]
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) != value.type.ndim or None in parts:
            return self.view(value, parts)
        return Leaf(value.type.dtype, self.b.load(self.element(value, index)))

    def eval_slice(self, node: ast.Slice) -> Any:
        return slice(*(None if end is None else self.eval(end) for end in (node.lower, node.upper)))

    def eval_binop(self, node: ast.BinOp) -> Any:
        return self.arithmetic(type(node.op).__name__, self.eval(node.left), self.eval(node.right))

    def eval_unaryop(self, node: ast.UnaryOp) -> Any:
        value = self.eval(node.operand)
        if isinstance(node.op, ast.Not):
            truth = self.truth(value)
            if not isinstance(truth, Leaf):
                return not truth
            return Leaf(types.boolean, self.b.not_(truth.value))
        change = {ast.USub: operator.neg, ast.Invert: operator.invert}[type(node.op)]
        return self.by_numba(change, value) if isinstance(value, Leaf) else change(value)

    def eval_compare(self, node: ast.Compare) -> Any:
        values = [self.eval(one) for one in (node.left, *node.comparators)]
        found: Any = True
        for op, left, right in zip(node.ops, values, values[1:], strict=False):
            found = self.both(found, self.compared(type(op).__name__, left, right))
        return found

    def eval_boolop(self, node: ast.BoolOp) -> Any:
        is_or = isinstance(node.op, ast.Or)
        found = self.truth(self.eval(node.values[0]))
        for one in node.values[1:]:
            if not isinstance(found, Leaf):
                if found is is_or:
                    return found
                found = self.truth(self.eval(one))
                continue
            place = self.slot(found)
            self.put(place, found)
            wanted = self.b.not_(found.value) if is_or else found.value
            with self.b.if_then(wanted):
                self.put(place, self.truth(self.eval(one)))
            found = self.loaded(place)
        return found

    def eval_ifexp(self, node: ast.IfExp) -> Any:
        test = self.truth(self.eval(node.test))
        if isinstance(test, bool):
            return self.eval(node.body if test else node.orelse)
        then, other, after = (self.b.append_basic_block() for _ in range(3))
        self.b.cbranch(test.value, then, other)
        values = []
        for start, arm in ((then, node.body), (other, node.orelse)):
            self.b.position_at_end(start)
            value = self.eval(arm)
            values.append((self.b.block, value))
            self.b.branch(after)
        self.b.position_at_end(after)
        return self.joined(values)

    def eval_call(self, node: ast.Call) -> Any:
        if node.keywords:
            raise self.fail("arguments by name")
        arguments = [self.eval(one) for one in node.args]
        if isinstance(node.func, ast.Attribute) and node.func.attr == "view":
            value, (of,) = self.eval(node.func.value), arguments
            if isinstance(value, Leaf):
                return self.bits(value, numba.from_dtype(np.dtype(of)))
        callee = self.eval(node.func)
        if isinstance(callee, type) and issubclass(callee, np.number):
            (value,) = arguments
            of = numba.from_dtype(np.dtype(callee))
            return self.leaf(value, of) if isinstance(value, Leaf) else callee(value)
        if callee in (min, max):
            return functools.reduce(functools.partial(self.extreme, callee), arguments)
        if callee is np.empty:
            if self.frame.loops:
                raise self.fail("an array that is made in a loop")
            return self.empty(*arguments)
        if callee is len:
            (value,) = arguments
            if isinstance(value, Leaf):
                shape = self.array(value).shape
                return Leaf(types.int64, self.b.extract_value(shape, 0))
            return len(value.fields if isinstance(value, Record) else value)
        if isinstance(callee, type) and hasattr(callee, "_fields"):
            if len(arguments) != len(callee._fields):
                raise self.fail(f"{len(arguments)} fields of {callee.__name__}")
            return Record(callee, arguments)
        if isinstance(callee, _INTRINSIC):
            return self.intrinsic(callee, arguments)
        if inspect.isfunction(getattr(callee, "py_func", callee)) and not hasattr(callee, "alone"):
            return self.call(callee, arguments)
        return self.by_numba(callee, *arguments)


def _as_read(target: Any) -> Any:
    """The target of an augmented assignment as it is read."""
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load(), lineno=target.lineno)
    return target


#: Make a function part of each caller, before types are known: the machine code is that of one long kernel, and is
#: compiled once. `numba.extending.register_jitable` would compile it by itself first, and LLVM would call large ones.
inlined: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.njit(inline="always")


def emitted(function: Callable[..., Any], result: Any = types.int64) -> Any:
    """Make an intrinsic of a function of integers, for use in kernels.

    Parameters
    ----------
    function : function
        A function as the module's docstring defines; its source must be available.
    result : numba type
        The type that it returns: a number, a tuple of numbers, or `types.none`.
    """

    def define(typing_context: Any, *arguments: Any) -> Any:
        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            given = [wrapped(context, b, *pair) for pair in zip(sig.args, args, strict=True)]
            found = Emitter(context, b).call(function, given)
            return Emitter(context, b).packed(found, result).value

        return result(*arguments), codegen

    parameters = inspect.signature(function).parameters.values()
    first = inspect.Parameter("typing_context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    define.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
    define.__name__ = function.__name__
    return intrinsic(define)


def as_kernel(function: Callable[..., Any], result: Any) -> Callable[..., Any]:
    """Make a kernel of a function of integers, with its parameters, as Numba would."""
    emit = emitted(function, result)
    names = ", ".join(inspect.signature(function).parameters)
    # In the function's own file, by which Numba finds the folder for compiled kernels.
    code = compile(f"lambda {names}: _emit({names})", function.__code__.co_filename, "eval")
    kernel: Callable[..., Any] = eval(code, {"_emit": emit, "__name__": function.__module__})
    kernel.__name__, kernel.__qualname__ = function.__name__, function.__qualname__
    return kernel


def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that Numba compiles by itself, as it has flags of its own."""
    function.alone = True  # type: ignore[attr-defined]
    return function
