"""Helpers of kernels that become part of their caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

#: Make a function part of each caller, before types are known: the machine code is that of one long kernel, and is
#: compiled once. `numba.extending.register_jitable` would compile it by itself first, and LLVM would call large ones.
inlined: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.njit(inline="always")
