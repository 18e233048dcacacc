"""The third target: every operation in plain NumPy, over the oracle, to stand in for the kernels of another target.

Tests of caches ask what a cache does, not how fast: by day they run with these operations in place of compiled and of
simulated kernels (`standing_in`), and nightly with the kernels themselves. That an operation of a target is what it
is here, `tests/kernels` shows, kind by kind: `tests/kernels/test_reference.py` compares the two, and the other files
there compare kernels with the oracle that this is made of.

Arithmetic is float64, rounded once; what is stored of rows that are only converted is the same, bit for bit.
"""

import contextlib
import os
from importlib import import_module

from numkv.kernels.operations import load, operations_in
from reference import attention, choice, codes, rows, writes

#: Whose memory NumPy sees: on a GPU operations stay what they are.
TARGETS = ("cpu", "cuda") if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1" else ("cpu",)


def operations() -> dict:
    """All of them, by their names."""
    return {
        name: f
        for module in (attention, choice, codes, writes)
        for name, f in operations_in(module).items()
    }


def _kept():
    """Caches of what asks a target for functions of small calls once."""
    from numkv.attention import fast_path as attention
    from numkv.writing import fast_path as writing

    of_writes = writing._by_slot, writing._in_pool, writing._copy, writing._writer
    return (attention._way, *of_writes)


_own = {}


def stands_in() -> bool:
    """Whether these operations stand in for those of targets."""
    return bool(_own)


def stand_in(wanted=True) -> None:
    """Have these operations stand in for those of all targets; or else give them their own back."""
    if wanted == stands_in():
        return
    found = operations()
    for name in TARGETS:
        ops, convert = vars(load(name)), vars(import_module(f"numkv.kernels.{name}.convert"))
        if wanted:
            _own[name] = dict(ops), {"dequantise": convert["dequantise"]}
        of_ops, of_convert = (found, {"dequantise": rows.dequantise}) if wanted else _own.pop(name)
        ops.update(of_ops)
        convert.update(of_convert)
    for cache in _kept():
        cache.cache_clear()


@contextlib.contextmanager
def standing_in(wanted=True):
    """`stand_in` for a while."""
    before = stands_in()
    stand_in(wanted)
    try:
        yield
    finally:
        stand_in(before)
