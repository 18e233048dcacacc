"""Helpers of the table in `fault_subjects.py`: subjects, rows, and values that can be compared."""

import dataclasses
import functools
import gc
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from failing_memory import failing

import numkv
from numkv.kernels import scratch

F32 = np.float32
HEADS, Q_HEADS, DIM, BLOCK = 2, 4, 8, 2
#: More allocations than any method makes.
MOST = 600
TABLES = [np.cos(np.arange(64)[:, None] * [1.0, 0.3, 0.1, 0.01]).astype(F32)]
TABLES.append(np.sin(np.arange(64)[:, None] * [1.0, 0.3, 0.1, 0.01]).astype(F32))


@dataclasses.dataclass(frozen=True)
class Subject:
    """One object, all that can be seen of it, and its calls."""

    make: Callable[[], Any]
    see: Callable[[Any], Any]
    calls: dict[str, Any]
    #: The class, whose public methods shall all be called; None for functions.
    of: type | None

    def split(self, call):
        """Return a call's preparation, and the call."""
        found = self.calls[call]
        return found if isinstance(found, tuple) else (lambda it: None, found)


def rows(n, seed=0, heads=HEADS, dim=DIM):
    """K and V of so many tokens."""
    found = np.random.default_rng([n, seed]).standard_normal((2, n, heads, dim), F32)
    return found[0], found[1]


def queries(n, heads=Q_HEADS, dim=DIM):
    return np.random.default_rng(n).standard_normal((n, heads, dim), F32)


def projections(n):
    return np.random.default_rng(n).standard_normal((n, (Q_HEADS + 2 * HEADS) * DIM), F32)


FUSED = {
    "num_q_heads": Q_HEADS, "cos": TABLES[0], "sin": TABLES[1], "qk_mode": 3,
    "q_norm_weight": np.full(DIM, 2, F32), "k_norm_weight": np.full(DIM, 3, F32),
}  # fmt: skip


def refused(call):
    """Mark a call that an object refuses, with or without memory."""

    def tried(it):
        try:
            return call(it)
        except numkv.NotSupported:
            return "refused"

    return tried


def plain(x):
    """Return a value that can be compared: arrays become bytes, partial functions are called."""
    if isinstance(x, functools.partial):
        return x()
    if isinstance(x, np.ndarray | np.generic):
        return x.dtype.str, x.shape, np.ascontiguousarray(x).tobytes()
    if isinstance(x, list | tuple):
        return [plain(each) for each in x]
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return repr([(f.name, plain(getattr(x, f.name))) for f in dataclasses.fields(x)])
    if isinstance(x, functools.partial):  # reads the result once there is memory again
        return plain(x())
    if x is None or isinstance(x, int | float | str | bool | bytes | range):
        return x
    return type(x).__name__  # another cache, say


def run_out(monkeypatch, subject, call, name, every, most=MOST):
    """Fail every so many allocations of a call: the object must be as before the call, or as after it."""
    lent, (prepare, do) = _lent(monkeypatch), subject.split(call)

    def make():
        found = subject.make()
        prepare(found)
        return found

    good = make()
    before = subject.see(good)
    result = plain(do(good))
    after = subject.see(good)
    assert subject.see(make()) == before
    for at in range(1 + zlib.crc32(name.encode()) % every, most + every, every):
        found = make()
        failed = None
        try:
            with failing(at) as memory:
                do(found)
        except MemoryError as error:
            failed = type(error)
        if not memory.failed:
            assert failed is None
            break
        assert lent[0] == 0, f"allocation {at}: scratch memory was not given back"
        if failed is not None:
            assert subject.see(found) == before, f"allocation {at}: the object has changed"
            assert plain(do(found)) == result, f"allocation {at}: another result the second time"
        assert subject.see(found) == after, f"allocation {at}: another state in the end"
        del found
    else:
        pytest.fail(f"more than {most} allocations")
    gc.collect(0)


def _lent(monkeypatch):
    """Count the workspaces in use; none are kept, so that each call allocates its own."""
    count = [0]
    borrow, give_back = scratch.Workspaces.borrow, scratch.Workspaces.give_back

    def lend(self):
        self._free.clear()
        workspace = borrow(self)
        count[0] += 1
        return workspace

    def take_back(self, workspace):
        count[0] -= 1
        give_back(self, workspace)

    monkeypatch.setattr(scratch.Workspaces, "borrow", lend)
    monkeypatch.setattr(scratch.Workspaces, "give_back", take_back)
    return count
