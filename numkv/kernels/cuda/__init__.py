"""Operations on CUDA: see `numkv.kernels.operations`.

Arrays are device arrays. Their values are not known to the host, so a slot or block out of range is skipped where a
kernel meets it. Integer arrays may be int32 or int64.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from numkv.kernels.dispatch import FILES

__all__ = ["catalogue"]


def catalogue() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Every kernel, for kinds that bring out all of its branches: what can be compiled without a GPU.

    Not all combinations of kinds are there, as each takes seconds.

    Yields
    ------
    name : str
        The kernel, and in brackets what it is for.
    kernel : function
        Plain Python, as ``numba.cuda.compile`` takes it.
    signature : tuple of numba types
        Types of its arguments.
    """
    for name in (*FILES, "convert"):
        yield from import_module(f"numkv.kernels.cuda.{name}").catalogue()
