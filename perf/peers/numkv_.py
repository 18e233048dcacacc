"""numkv itself: contiguous, and paged with blocks of 16 tokens in shuffled order."""

import subprocess
from pathlib import Path

import llvmlite
import numba
import numpy as np

import numkv
from perf.peers import CONTIGUOUS, FLOATS, OURS, Contestant, float_layers, layers_of, nbytes

NAME = OURS
BLOCK_SIZE = 16


def versions():
    at = _commit()
    of_numkv = f"numkv {numkv.__version__}" + (f" (commit {at})" if at else "")
    return f"{of_numkv} with Numba {numba.__version__}, llvmlite {llvmlite.__version__}"


def _commit():
    """The commit that is measured, where there is a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def stored(problem, kind):
    """K, V and their scales as numkv stores them: what a layer holds after `append`."""
    shape = problem.shape
    layer = numkv.ContiguousLayer(shape.length, shape.kv_heads, shape.dim, kind=kind)
    names = ("k", "v", "k_scale", "v_scale") if numkv.kind(kind).has_scales else ("k", "v")
    arrays = {}
    for b in range(shape.batch):
        layer.seq_len = 0
        layer.append(problem.k[b].swapaxes(0, 1), problem.v[b].swapaxes(0, 1))
        for name in names:
            of_layer = getattr(layer, name)
            if b == 0:
                arrays[name] = np.empty((shape.batch, *of_layer.shape[1:]), of_layer.dtype)
            arrays[name][b] = of_layer[0]
    return arrays


def _layers(problem, kind):
    if kind in FLOATS:
        return dict(zip("kv", float_layers(problem, kind), strict=True))
    arrays = stored(problem, kind)
    return dict(zip(arrays, layers_of(*arrays.values()), strict=True))


def _contestant(call, stacks, more=()):
    """Calls ``call(i, k, v, **scales)`` with a layer's arrays."""
    layers = len(stacks["k"])
    of = [{name: x[i] for name, x in stacks.items()} for i in range(layers)]
    size = nbytes(*of[0].values(), *more)
    return Contestant(lambda i: call(**of[i]), np.asarray, layers, size)


def _contiguous(kind):
    def make(problem):
        lens = np.full(problem.shape.batch, problem.shape.length)

        def call(k, v, **scales):
            return numkv.decode_attention(problem.q, k, v, lens, **scales)

        return _contestant(call, _layers(problem, kind))

    return make


def in_blocks(x, order):
    """``(batch, heads, tokens, …)`` as a pool ``(blocks, heads, BLOCK_SIZE, …)`` whose blocks lie in `order`."""
    batch, heads, tokens = x.shape[:3]
    cut = x.reshape(batch, heads, tokens // BLOCK_SIZE, BLOCK_SIZE, *x.shape[3:]).swapaxes(1, 2)
    pool = np.empty((len(order), heads, BLOCK_SIZE, *x.shape[3:]), x.dtype)
    pool[order] = cut.reshape(pool.shape)
    return pool


def _paged(kind):
    def make(problem):
        shape = problem.shape
        lens = np.full(shape.batch, shape.length)
        order = np.random.default_rng(0).permutation(shape.batch * shape.length // BLOCK_SIZE)
        table = order.reshape(shape.batch, -1).astype(np.int32)
        pools = {n: in_blocks(x[0], order) for n, x in _layers(problem, kind).items()}
        stacks = dict(zip(pools, layers_of(*pools.values()), strict=True))

        def call(k, v, **scales):
            return numkv.paged_decode_attention(problem.q, k, v, table, lens, **scales)

        return _contestant(call, stacks, (table,))

    return make


def decode(kind):
    return {CONTIGUOUS: _contiguous(kind), f"paged by {BLOCK_SIZE}": _paged(kind)}


def prefill(kind):
    """Queries in the kind's own dtype, as a model of that dtype has them."""

    def make(problem):
        length = problem.shape.length
        q = problem.q[0].astype(numkv.kind(kind).dtype)

        def call(k, v, **scales):
            return numkv.prefill_attention(q, k, v, [length], [0, length], **scales)[None]

        return _contestant(call, _layers(problem, kind))

    return {CONTIGUOUS: make}
