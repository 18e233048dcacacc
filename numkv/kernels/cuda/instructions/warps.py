"""Operations that the 32 threads of a warp run together: matrices in registers, values from another thread.

Thread ``l`` of a warp is of group ``g = l // 4`` and has place ``t = l % 4`` there. The matrices of `mma_bf16` and
`mma_fp16` lie in the warp's registers so; a word has two adjacent elements, the first in its low half::

    A, 16 x 16, by rows             B, 16 x 8, by columns     C and D, 16 x 8

              k 0-7   k 8-15                  n 0-7                     n 0-7
    m  0-7     a0       a2          k 0-7      b0             m  0-7    c0, c1
    m 8-15     a1       a3          k 8-15     b1             m 8-15    c2, c3

    a0 = A[g, 2t : 2t + 2]          b0 = B[2t : 2t + 2, g]      c0 = C[g, 2t]         c2 = C[g + 8, 2t]
    a1 = A[g + 8, 2t : 2t + 2]      b1 = B[2t + 8 : 2t + 10, g] c1 = C[g, 2t + 1]     c3 = C[g + 8, 2t + 1]
    a2 = A[g, 2t + 8 : 2t + 10]
    a3 = A[g + 8, 2t + 8 : 2t + 10]

So D of one product, packed in pairs, is half of an A, and of its transpose a B: softmax weights need not move.

`ldmatrix_x4` loads four 8 x 8 matrices of 16-bit elements. Threads ``8 i`` to ``8 i + 7`` give the addresses of the
eight rows of matrix ``i``, 16 bytes each; every thread gets word ``i`` of matrix ``i``::

    plain: row g, elements 2t and 2t + 1             _trans: rows 2t and 2t + 1, element g

             e 0   1   2   3   4   5   6   7                 e 0   1   2 ...  7
    row 0    l0      l1      l2      l3              row 0   l0  l4  l8 ... l28
    row 1    l4      l5      l6      l7              row 1   l0  l4  l8 ... l28
    ...                                              row 2   l1  l5  l9 ... l29
    row 7    l28     l29     l30     l31             ...

Plain gives A of a matrix stored by rows, and B of one stored by columns (K, of which a row is a token); ``_trans`` the
others (V). Figures and layouts are those of NVIDIA's "Parallel Thread Execution ISA", sections on ``mma`` and
``ldmatrix``.
"""

from __future__ import annotations

import functools
from typing import Any

from numkv.kernels.cuda.instructions.emit import operation


def _mma(of: str, called: str) -> Any:
    operands = dict.fromkeys(["a0", "a1", "a2", "a3", "b0", "b1"], "r")
    operands |= dict.fromkeys(["c0", "c1", "c2", "c3"], "f")
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{of}.{of}.f32 "
    text += "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    doc = f"``D = A @ B + C``, A and B of {called}, C and D of float32; its four of D. Layouts are drawn above."
    return operation(f"mma_{called}", text, "ffff", operands, doc, together=True)


mma_bf16, mma_fp16 = _mma("bf16", "bf16"), _mma("f16", "fp16")


def _ldmatrix(matrices: int, trans: bool) -> Any:
    found = ", ".join(f"${i}" for i in range(matrices))
    name = f"ldmatrix_x{matrices}" + "_trans" * trans
    text = f"ldmatrix.sync.aligned.m8n8.x{matrices}{'.trans' * trans}.shared.b16 {{{found}}}, [${matrices}];"
    word = "M[[2t, 2t + 1], g]" if trans else "M[g, [2t, 2t + 1]]"
    doc = f"{matrices} matrices ``M`` of 8 x 8 elements of shared memory, of each ``{word}``; drawn above."
    return operation(name, text, "r" * matrices, {"address": "r"}, doc, together=True, memory=True)


ldmatrix_x4, ldmatrix_x4_trans = _ldmatrix(4, False), _ldmatrix(4, True)
ldmatrix_x2, ldmatrix_x2_trans = _ldmatrix(2, False), _ldmatrix(2, True)


def _ldmatrix_steps(count: int, step: int, trans: bool, into: bool, offset: int = 0) -> Any:
    text, opcode = "", f"ldmatrix.sync.aligned.m8n8.x4{'.trans' * trans}.shared.b16"
    for i in range(count):
        found = ", ".join(f"${4 * i + j}" for j in range(4))
        text += f"{opcode} {{{found}}}, [${4 * count}+{offset + i * step}];\n"
    # Results may not share a register with the address, which later loads still need.
    name = f"ldmatrix_x4{'_trans' * trans}_{count}_steps_of_{step}_from_{offset}"
    return operation(
        name, text, "r" * (4 * count), {"address": "r"}, "", together=True, memory=True, early=True, into=into
    )  # fmt: skip


@functools.cache
def ldmatrix_x4_steps(count: int, step: int, trans: bool) -> Any:
    """An operation that is `count` times `ldmatrix_x4`, or `ldmatrix_x4_trans`, each `step` bytes after the one before.

    ``sum((ldmatrix_x4(address + i * step) for i in range(count)), ())``; the steps are part of the instructions, so
    that no address but the first is computed.
    """
    return _ldmatrix_steps(count, step, trans, False)


@functools.cache
def ldmatrix_x4_into(count: int, step: int, trans: bool, offset: int = 0) -> Any:
    """`ldmatrix_x4_steps` from `offset` on, that puts its words into a local array: ``load(address, words)``."""
    return _ldmatrix_steps(count, step, trans, True, offset)


def _shuffle(name: str, mode: str, of: str, doc: str) -> Any:
    operands = {"x": of, "lanes" if mode == "bfly" else "lane": "r"}
    text = f"shfl.sync.{mode}.b32 $0, $1, $2, 31, -1;"
    return operation(name, text, of, operands, doc, together=True)


_XOR = "What thread ``l ^ lanes`` of the warp has: ``x[arange(32) ^ lanes]``; of a {}."
_IDX = (
    "What thread `lane` of the warp has, which may be another one for each: ``x[lane]``; of a {}."
)
shuffle_xor = _shuffle("shuffle_xor", "bfly", "r", _XOR.format("word"))
shuffle_xor_float = _shuffle("shuffle_xor_float", "bfly", "f", _XOR.format("float32"))
shuffle = _shuffle("shuffle", "idx", "r", _IDX.format("word"))
shuffle_float = _shuffle("shuffle_float", "idx", "f", _IDX.format("float32"))


@functools.cache
def shuffle_xor_by(lanes: int, of: str = "r") -> Any:
    """`shuffle_xor` by a constant, which is a part of the instruction; of a word, or of a float32, ``"f"``."""
    text = f"shfl.sync.bfly.b32 $0, $1, {lanes}, 31, -1;"
    return operation(f"shuffle_xor_{of}_by_{lanes}", text, of, {"x": of}, "", together=True)


transpose = operation(
    "transpose", "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "r", {"x": "r"},
    """A matrix of 8 x 8 elements of 16 bits, in the warp's registers, turned: what `ldmatrix_x4_trans` makes of plain.

    ``M[[2t, 2t + 1], g]`` where `x` is ``M[g, [2t, 2t + 1]]``.
    """, together=True,
)  # fmt: skip
