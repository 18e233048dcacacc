"""How an operation becomes an instruction of PTX in the code that Numba makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from numkv.kernels.cuda.streams import SIMULATED

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()

#: What operands and results are, by the letter of their register: words, addresses of global memory, floats.
NUMBA = {"r": types.uint32, "l": types.int64, "f": types.float32}
LLVM = {"r": I32, "l": I64, "f": F32}


def intrinsic(typed: Callable[..., Any]) -> Any:
    """Numba's decorator of functions that emit LLVM; in the simulator, a function that raises."""
    if not SIMULATED:
        from numba.cuda.extending import intrinsic as decorate

        return decorate(typed)

    def missing(*args: Any) -> Any:
        raise NotImplementedError(f"the simulator has no {typed.__name__}")

    return missing


def operation(
    name: str, text: str, results: str, operands: dict[str, str], doc: str, *, together: bool = False,
    memory: bool = False, early: bool = False, into: bool = False, floats: int = 0,
) -> Any:  # fmt: skip
    """A function for kernels that is an instruction, or a few.

    Parameters
    ----------
    name : str
        Name of the function.
    text : str
        PTX; ``$0`` and so on are the results, then the operands.
    results : str
        A letter for each result: ``r`` a word (uint32), ``f`` a float32. Several come as a tuple.
    operands : dict of str to str
        Names and letters of the operands; ``l`` is an address of global memory (int64).
    doc : str
        What it does.
    together : bool
        Whether the threads of a warp have to run it together: then the compiler leaves it where it stands.
    memory : bool
        Whether it reads or writes memory, or orders accesses.
    early : bool
        Whether it sets results while it still needs operands, so that they may not share registers.
    into : bool
        Whether results go to the first elements of a local array, which is given last, not to a tuple.
    floats : int
        So many more operands are the first elements of a local array of float32, which is given last.
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

    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = ["typing_context", *operands, *(["array"] if into or floats else [])]
    typed.__signature__ = inspect.Signature([inspect.Parameter(n, either) for n in names])  # type: ignore[attr-defined]
    typed.__name__ = typed.__qualname__ = name
    typed.__doc__ = doc
    return intrinsic(typed)
