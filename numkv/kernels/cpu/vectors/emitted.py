"""Functions of integers, emitted as they are written: part of a kernel without Numba's type inference.

What drives a kernel is integers: which item comes next, where its rows lie, whether arrays fit. Nearly all of these are
int64, so little about their types is to be found out, and what Numba takes seconds for is a walk over the source here,
a fiftieth of that. `emitted` makes an intrinsic of such a function, with all the functions that it calls; `as_kernel`
makes a kernel. They stay functions in Python that Numba compiles as well: where indices are to be checked
(``NUMBA_BOUNDSCHECK=1``), or source files are no longer those that were imported, it does.

What they may have
    Numbers and booleans, to which Numba's rules apply; arrays, whose elements are read and written by indices that are
    not negative, and of which parts are taken; tuples and named tuples of these; constants.
    ``if``, ``while``, ``for`` over a ``range`` or a tuple, ``break``, ``continue``, ``return`` anywhere; arithmetic,
    comparisons, ``and``, ``or``, ``not``, conditional expressions.
    Calls of such functions, of intrinsics, of named tuples, of NumPy's types, of ``min``, ``max`` and ``len``, and
    whatever else Numba has code for; ``np.empty`` of one axis outside of loops, freed where its function ends.
    A variable has one type, but for assignments that are in no branch and no loop: there it may get another.

Else there is a `TypeError` where the kernel is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numba
from numba import types
from numba.extending import intrinsic

from numkv.kernels.cpu.vectors.emitted_source import Emitter
from numkv.kernels.cpu.vectors.emitted_values import wrapped

#: Make a function part of each caller, before types are known: the machine code is that of one long kernel, and is
#: compiled once. `numba.extending.register_jitable` would compile it by itself first, and LLVM would call large ones.
inlined: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.njit(inline="always")


def emitted(function: Callable[..., Any], result: Any = types.int64) -> Any:
    """The intrinsic that stands for a function of integers in kernels.

    Parameters
    ----------
    function : function
        It takes what the module says; its source has to be at hand.
    result : numba type
        What it returns: a number, a tuple of them, or `types.none`.
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
    """A kernel that is a function of integers and nothing else, with its parameters, as Numba compiles it."""
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
