"""From an operation to the kernels of a target that implement it.

A file of kernels marks a host function by `implements`; `load` gathers what the files of a target implement. The files
have the same names under every target.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from numkv.kernels.operations import Operations

Spec = TypeVar("Spec", bound=Callable[..., Any])

#: Files of kernels that every target has.
FILES = (
    "append", "attention", "choice", "compress", "copy", "finite", "hadamard", "latents", "mask", "mass", "merge",
    "shift", "write",
)  # fmt: skip

#: Names of all operations.
NAMES = tuple(sorted(name for name in dir(Operations) if not name.startswith("_")))


def implements(spec: Spec) -> Callable[[Callable[..., Any]], Spec]:
    """Mark a target's implementation of an operation: it takes the docstring; parameters are compared.

    Parameters
    ----------
    spec : function
        A method of `Operations`.

    Raises
    ------
    TypeError
        If the parameters are not those of `spec`.
    """
    want = _parameters(spec)

    def mark(function: Callable[..., Any]) -> Spec:
        if _parameters(function) != want:
            raise TypeError(f"{function.__qualname__}: expected the parameters {want}")
        function.__doc__ = inspect.getdoc(spec)
        function.operation = spec.__name__  # type: ignore[attr-defined]
        return function  # type: ignore[return-value]

    return mark


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.default) for parameter in found]


def operations_in(module: ModuleType) -> dict[str, Any]:
    """The operations that a module marks as its own, by their names."""
    return {
        found.operation: found
        for found in vars(module).values()
        if callable(found) and "operation" in getattr(found, "__dict__", ())
    }


@functools.cache
def load(target: str) -> Operations:
    """The operations of a target.

    Parameters
    ----------
    target : {"cpu", "cuda"}
        Name of the target; ``"cuda"`` imports Numba's CUDA target.
    """
    found = Operations()
    for file in FILES:
        module = importlib.import_module(f"numkv.kernels.{target}.{file}")
        vars(found).update(operations_in(module))
    missing = set(NAMES) ^ vars(found).keys()
    if missing:
        raise TypeError(
            f"numkv.kernels.{target}: expected all operations and no others, differs in {missing}"
        )
    return found
