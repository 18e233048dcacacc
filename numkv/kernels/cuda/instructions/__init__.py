"""What CUDA kernels say in LLVM or PTX: all of it is in this folder, as named operations.

Each operation says what it computes by a line of NumPy, and where values move between the threads of a warp, by a
drawing. A kernel that needs more composes it of these (`numkv.kernels.cuda.widen`) or adds one here: whoever moves
kernels to another compiler then writes this folder anew, and nothing else.

Addresses are plain integers: 64 bits of global memory, 32 bits of shared memory, both in bytes.

The simulator runs none of these but `load_chunk`; others raise there. The interpreter of PTX runs them all
(`tests/compile/test_instructions.py`).
"""

from numkv.kernels.cuda.instructions.chunks import load_chunk, loader
from numkv.kernels.cuda.instructions.memory import (
    cp_async_4_words,
    cp_async_16,
    cp_async_16_or_zeros,
    cp_async_16_rows,
    cp_async_16_steps,
    cp_async_commit,
    cp_async_wait,
    global_address,
    load_global_2,
    load_global_4,
    load_global_16,
    load_shared_4,
    load_shared_4_floats_from,
    load_shared_4_from,
    load_shared_8,
    load_shared_8_steps,
    load_shared_16,
    load_shared_16_from,
    load_shared_floats,
    load_shared_pairs,
    load_shared_quad,
    shared_address,
    store_global_16,
    store_shared_4,
    store_shared_8,
    store_shared_16,
    store_shared_16_at,
    store_shared_pairs,
)
from numkv.kernels.cuda.instructions.warps import (
    ldmatrix_x2,
    ldmatrix_x2_trans,
    ldmatrix_x4,
    ldmatrix_x4_into,
    ldmatrix_x4_steps,
    ldmatrix_x4_trans,
    mma_bf16,
    mma_fp16,
    shuffle,
    shuffle_float,
    shuffle_xor,
    shuffle_xor_by,
    shuffle_xor_float,
    transpose,
)
from numkv.kernels.cuda.instructions.words import (
    exp2_approx,
    fma_bf16x2,
    fma_fp16x2,
    keep,
    keep_address,
    log2_approx,
    pack_bf16,
    pack_fp16,
    permute_bytes,
    permute_bytes_as,
    select_bits,
    split_bf16,
    unpack_fp16,
)

__all__ = [
    "cp_async_4_words", "cp_async_16", "cp_async_16_or_zeros", "cp_async_16_rows", "cp_async_16_steps",
    "cp_async_commit", "cp_async_wait", "exp2_approx", "fma_bf16x2", "fma_fp16x2", "global_address", "keep",
    "keep_address", "ldmatrix_x2", "ldmatrix_x2_trans", "ldmatrix_x4", "ldmatrix_x4_into", "ldmatrix_x4_steps",
    "ldmatrix_x4_trans", "load_chunk", "load_global_2", "load_global_4", "load_global_16", "load_shared_4",
    "load_shared_4_floats_from", "load_shared_4_from", "load_shared_8", "load_shared_8_steps", "load_shared_16",
    "load_shared_16_from", "load_shared_floats", "load_shared_pairs", "load_shared_quad", "loader", "log2_approx",
    "mma_bf16", "mma_fp16", "pack_bf16", "pack_fp16", "permute_bytes", "permute_bytes_as", "select_bits",
    "shared_address", "shuffle", "shuffle_float", "shuffle_xor", "shuffle_xor_by", "shuffle_xor_float", "split_bf16",
    "store_global_16", "store_shared_4", "store_shared_8", "store_shared_16", "store_shared_16_at",
    "store_shared_pairs", "transpose", "unpack_fp16",
]  # fmt: skip
