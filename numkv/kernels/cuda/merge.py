"""Merge two attention results over disjoint parts of a KV range, on CUDA; see `numkv.kernels.cpu.merge`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda, types

from numkv.kernels.builder import WORDS
from numkv.kernels.cuda.instructions import global_address
from numkv.kernels.cuda.launches import THREADS, Kernel, array, launch
from numkv.kernels.cuda.octets import bytes_of, lanes_for, octet_loader, octet_storer, octets_fit
from numkv.kernels.cuda.simd import LANES, ROWS, ceil_div, compute_of, natural
from numkv.kernels.operations import Operations, implements
from numkv.rows.convert import codec
from numkv.rows.softmax import merge_weights


def make_merge(KIND, COMPUTE):
    """Make the kernel for outputs of a float kind."""
    load, store = codec(KIND, COMPUTE)
    F = np.float32 if COMPUTE == "float32" else np.float64

    def kernel(o_a, lse_a, o_b, lse_b, out, lse):
        num_tokens, num_heads, dim = out.shape
        first = np.int64(cuda.blockIdx.x) * ROWS + cuda.threadIdx.y
        for row in range(first, num_tokens * num_heads, np.int64(cuda.gridDim.x) * ROWS):
            t, h = row // num_heads, row % num_heads
            weight_a, weight_b, total = merge_weights(lse_a[t, h], lse_b[t, h])
            if cuda.threadIdx.x == 0:
                lse[t, h] = total
            for d in range(cuda.threadIdx.x, dim, LANES):
                # A part that saw nothing has weight 0; its row is not read, so it may hold anything.
                value = F(0) if weight_a == 0 else F(weight_a) * load(o_a[t, h, d])
                if weight_b != 0:
                    value += F(weight_b) * load(o_b[t, h, d])
                out[t, h, d] = store(value)

    return kernel


def make_merge_octets(KIND, COMPUTE):
    """Make the kernel of `make_merge` for aligned rows: an octet a thread at once, several rows a warp."""
    load, store, SIZE = octet_loader(KIND, COMPUTE), octet_storer(KIND), bytes_of(KIND)
    F = np.float32 if COMPUTE == "float32" else np.float64

    def kernel(o_a, lse_a, o_b, lse_b, out, lse, log):
        num_tokens, num_heads = out.shape[0], natural(out.shape[1])
        octets = natural(out.shape[2]) >> 3
        lanes, thread = np.int64(1) << log, np.int64(cuda.threadIdx.x)
        at_once = np.int64(THREADS) >> log
        lane, first = thread & (lanes - 1), np.int64(cuda.blockIdx.x) * at_once + (thread >> log)
        a, b = cuda.local.array(8, F), cuda.local.array(8, F)
        for item in range(first, num_tokens * num_heads, np.int64(cuda.gridDim.x) * at_once):
            row = natural(item)
            t = row // num_heads
            h = row - t * num_heads
            weight_a, weight_b, total = merge_weights(lse_a[t, h], lse_b[t, h])
            if lane == 0:
                lse[t, h] = total
            from_a = global_address(o_a) + t * o_a.strides[0] + h * o_a.strides[1]
            from_b = global_address(o_b) + t * o_b.strides[0] + h * o_b.strides[1]
            to = global_address(out) + t * out.strides[0] + h * out.strides[1]
            for octet in range(lane, octets, lanes):
                for i in range(8):
                    a[i], b[i] = F(0), F(0)
                # A part that saw nothing has weight 0; its row is not read, so it may hold anything.
                if weight_a != 0:
                    load(from_a + octet * SIZE, a, 0)
                if weight_b != 0:
                    load(from_b + octet * SIZE, b, 0)
                for i in range(8):
                    a[i] = F(weight_a) * a[i] + F(weight_b) * b[i]
                store(a, 0, to + octet * SIZE, np.float32(1))

    return kernel


@functools.cache
def _merge(kind: str, octets: bool = False) -> Any:
    o, lse = array(WORDS[kind], 3), array(types.float32, 2)
    if octets:
        signature = (o, lse, o, lse, o, lse, types.int64)
        return Kernel(make_merge_octets, (kind, compute_of(kind)), signature, 8)
    return Kernel(make_merge, (kind, compute_of(kind)), (o, lse, o, lse, o, lse), 8)


@implements(Operations.merge_states)
def merge_states(o_a, lse_a, o_b, lse_b, kind, out, lse):
    if all(octets_fit(x, kind, x.shape[2]) for x in (o_a, o_b, out)):
        lanes = lanes_for(out.shape[2] // 8)
        launch(
            _merge(kind, True), ceil_div(out.shape[0] * out.shape[1], THREADS >> lanes), THREADS,
            o_a, lse_a, o_b, lse_b, out, lse, lanes,
        )  # fmt: skip
        return
    blocks = ceil_div(out.shape[0] * out.shape[1], ROWS)
    launch(_merge(kind), blocks, (LANES, ROWS), o_a, lse_a, o_b, lse_b, out, lse)
