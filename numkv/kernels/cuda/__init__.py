"""Operations on CUDA: the same as in `numkv.kernels.cpu`, with the same parameters.

Arrays are device arrays. Their values are not known to the host, so a slot or block out of range is skipped where a
kernel meets it. Integer arrays may be int32 or int64.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from numkv.kernels.cuda.append import append_rows, copy_rows, scatter_rows
from numkv.kernels.cuda.attention import attend
from numkv.kernels.cuda.compress import attend_codes, decode_rows, encode_rows, score_codes
from numkv.kernels.cuda.copy import copy_blocks, copy_tokens
from numkv.kernels.cuda.finite import first_non_finite
from numkv.kernels.cuda.hadamard import rotate_rows
from numkv.kernels.cuda.mass import attention_weights
from numkv.kernels.cuda.merge import merge_states
from numkv.kernels.cuda.shift import shift_rows
from numkv.kernels.cuda.write import scatter_write, write_rows

__all__ = [
    "append_rows",
    "attend",
    "attend_codes",
    "attention_weights",
    "copy_blocks",
    "copy_rows",
    "copy_tokens",
    "decode_rows",
    "encode_rows",
    "first_non_finite",
    "merge_states",
    "rotate_rows",
    "scatter_rows",
    "scatter_write",
    "score_codes",
    "shift_rows",
    "write_rows",
]


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
    for name in (
        "append", "attend", "compress", "convert", "copy", "finite", "merge_states", "rotate",
        "shift", "splits", "weights", "write",
    ):  # fmt: skip
        yield from import_module(f"numkv.kernels.cuda.{name}").catalogue()
