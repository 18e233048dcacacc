"""Write rows of latents into a cache, on the CPU: RMS norm of the latent, RoPE of what follows it, and the write."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types
from numba.np.numpy_support import from_dtype

from numkv.kernels.builder import SCALES, WORDS, array, build
from numkv.kernels.cpu.threads import ON_THREADS, run, workers_for
from numkv.kernels.cpu.vectors.arrays import by_row, row_of
from numkv.kernels.cpu.vectors.coding import row_storer
from numkv.kernels.cpu.vectors.launch import on_threads
from numkv.kernels.cpu.write import (
    convert_row,
    rotate_halves,
    rotate_neighbours,
    scale_row,
    sum_of_squares,
)
from numkv.kernels.operations import Operations, implements
from numkv.rows.convert import codec
from numkv.rows.rmsnorm import root_mean_square


def make_scatter_latents(SRC, KIND, COMPUTE):
    """The kernel for rows of kind `SRC` and a pool of kind `KIND`, computing in `COMPUTE`."""
    F = np.float32 if COMPUTE == "float32" else np.float64
    load, _ = codec(SRC, COMPUTE)
    store = row_storer(KIND, COMPUTE)

    def kernel(rows, cos, sin, how, weight, angles, pool, scale, slots, launch, worker, workers):
        if launch != 0:
            on_threads(launch, workers)
            return
        normalise, rotate, interleaved, eps, width = how
        num_tokens, num_heads = np.int64(rows.shape[0]), np.int64(rows.shape[1])
        dim, half, block_size = rows.shape[2], np.int64(cos.shape[1]), np.int64(pool.shape[2])
        x, c, s = np.empty(dim, F), np.empty(half, F), np.empty(half, F)
        latent, rotary = x[:width], x[width:]
        low, high = rotary[:half], rotary[half : 2 * half]
        factors, scales = np.empty(len(weight), F), by_row(scale)
        convert_row(weight, factors, F)  # it may be strided
        for t in range(num_tokens * worker // workers, num_tokens * (worker + 1) // workers):
            slot = np.int64(slots[t])
            if slot < 0:
                continue
            if rotate:
                angle = np.int64(angles[t])
                convert_row(row_of(cos, (angle,)), c, F)
                convert_row(row_of(sin, (angle,)), s, F)
            for h in range(num_heads):
                convert_row(row_of(rows, (np.int64(t), np.int64(h))), x, load)
                if normalise:
                    root = root_mean_square(sum_of_squares(latent), F(width), F(eps))
                    scale_row(latent, F(1) / F(root), factors)
                if rotate and interleaved:
                    rotate_neighbours(rotary, c, s)
                elif rotate:
                    rotate_halves(low, high, c, s)
                place = (slot // block_size, np.int64(h), slot % block_size)
                store(x, row_of(pool, place), row_of(scales, place))

    return kernel


@functools.cache
def _writer(src: str, kind: str, compute: Any, table: Any) -> Any:
    real, angle, flag = from_dtype(compute), array(from_dtype(table), 2), types.boolean
    signature = (
        array(WORDS[src], 3), angle, angle, types.Tuple((flag, flag, flag, types.float64, types.int64)),
        array(real, 1), array(types.int64, 1), array(WORDS[kind], 4, out=True), array(*SCALES[kind], out=True),
        array(types.int64, 1), *ON_THREADS,
    )  # fmt: skip
    label = f"scatter_latents, {src} to {kind}"
    return build(
        make_scatter_latents,
        signature,
        args=(src, kind, compute.name),
        label=label,
        emit=types.none,
    )


@implements(Operations.scatter_latents)
def scatter_latents(
    rows, rows_kind, cos, sin, how, weight, positions, pool, pool_kind, scale, slot_mapping, look=0
):  # fmt: skip
    kernel = _writer(rows_kind, pool_kind, weight.dtype, cos.dtype)
    run(
        kernel, workers_for(rows.size),
        rows, cos, sin, how, weight, positions, pool, scale, slot_mapping,
    )  # fmt: skip
