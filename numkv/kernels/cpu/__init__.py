"""Operations on the CPU; `numkv.kernels.cuda` has the same ones."""

from __future__ import annotations

from numkv.kernels.cpu.append import append_rows, copy_rows, scatter_rows
from numkv.kernels.cpu.attention import attend
from numkv.kernels.cpu.compress import attend_codes, decode_rows, encode_rows, score_codes
from numkv.kernels.cpu.copy import copy_blocks, copy_tokens
from numkv.kernels.cpu.finite import first_non_finite
from numkv.kernels.cpu.hadamard import rotate_rows
from numkv.kernels.cpu.mass import attention_weights
from numkv.kernels.cpu.merge import merge_states
from numkv.kernels.cpu.shift import shift_rows
from numkv.kernels.cpu.write import scatter_write, write_rows

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
