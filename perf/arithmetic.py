"""How many multiply-adds in float32 the machine does: what bounds attention where many query rows share one of K."""

import time

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numkv.kernels.cpu.vectors.emit import I64, steps, unpack
from numkv.kernels.cpu.vectors.features import LANES
from numkv.kernels.cpu.vectors.vectors import Vectors

# Sums that wait for none of the others: enough for two units of a latency of five, and few enough for registers.
_SUMS = 20
_TURNS = 400_000


@intrinsic
def _multiply_add(typing_context, f, turns):
    """So many turns of `_SUMS` multiply-adds of vectors; their sum goes to the beginning of `f`."""

    def codegen(context, b, sig, args):
        data, turns = unpack(context, b, sig.args, args)
        v = Vectors(b, "float32")
        x, y = v.load_floats(data, I64(16)), v.load_floats(data, I64(32))
        sums = [cgutils.alloca_once_value(b, x) for _ in range(_SUMS)]
        with steps(b, I64(0), turns, 1):
            for slot in sums:
                b.store(v.fma(x, y, b.load(slot)), slot)
        total = b.load(sums[0])
        for slot in sums[1:]:
            total = b.fadd(total, b.load(slot))
        v.store(total, data, I64(0))
        return context.get_dummy_value()

    return types.void(f, types.int64), codegen


@numba.njit(parallel=True)
def _on_threads(memory, turns):
    for i in numba.prange(len(memory)):
        _multiply_add(memory[i], turns)


def multiply_adds_per_second():
    """Multiply-adds of float32 a second, on all threads that Numba has; measured now, in about 10 ms."""
    memory = np.zeros((numba.get_num_threads(), 64), np.float32)
    _on_threads(memory, 1)
    begin = time.perf_counter()
    _on_threads(memory, _TURNS)
    return len(memory) * _TURNS * _SUMS * LANES / (time.perf_counter() - begin)
