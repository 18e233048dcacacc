"""Functions as they are emitted: statements and expressions of their source, one after another."""

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
from numba.extending import intrinsic

from numkv.kernels.cpu.vectors.emit import I64
from numkv.kernels.cpu.vectors.emitted_values import (
    Leaf,
    Record,
    Slot,
    Values,
)

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
        """Emit a function's body; returns what it returns."""
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
        found = self.context.make_array(type_)(self.context, self.b)
        self.context.populate_array(
            found, data=self.b.bitcast(data, found.data.type), shape=[size], strides=[itemsize],
            itemsize=itemsize, meminfo=memory,
        )  # fmt: skip
        place = self.slot(Leaf(type_, found._getvalue()))
        self.b.store(found._getvalue(), place.pointer)
        self.frame.memory.append(place)
        return Leaf(type_, found._getvalue())

    def free(self) -> None:
        """Free what a function has made: nothing, where it ended before."""
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
