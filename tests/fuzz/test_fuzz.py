"""The fuzzer finds nothing, in nightly runs with another seed in each; and it would find what it is there for."""

import math
import os
import secrets
import subprocess
import sys

import pytest

from fuzz import SHORT
from fuzz import __main__ as fuzzer
from fuzz.play import Arg, Defect, Row, Scene, play


@pytest.fixture(scope="module")
def played(request):
    """Seed, calls, minutes and processes: a nightly run plays something new for as long as the rest of it takes."""
    if request.config.getoption("nightly"):
        yield secrets.randbits(32), 1_000_000, 30.0, 2
        return
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(SHORT, "1")
        yield 1, 2_000, math.inf, 1  # the same calls on every machine, however fast it is


@pytest.mark.slow
def test_nothing_is_found(played, capsys):
    report = fuzzer.run(*played)
    seed, calls, minutes, _ = played
    fuzzer.tell(report, seed, 60 * minutes)
    assert report.calls == calls or minutes < math.inf
    assert report.calls > 200
    assert not report.defects, capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize("cpu", ["haswell", "x86-64"])
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names x86 CPUs")
def test_nothing_is_found_in_code_for_other_cpus(cpu, monkeypatch, capsys):
    monkeypatch.setenv("NUMBA_CPU_NAME", cpu)
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "")
    report = fuzzer.run(78, 100_000, 10.0, 2)
    fuzzer.tell(report, 78, 600.0)
    assert not report.defects, capsys.readouterr().out


# ---------------------------------------------------------------- it would find …


def run(program: str) -> subprocess.CompletedProcess:
    """Run Python code in a process whose arrays lie between guard pages."""
    start = f"import sys; sys.path.insert(0, {str(fuzzer.TESTS)!r}); from fuzz import memory; memory.install()\n"
    end = "\nimport os; os._exit(0)"
    return subprocess.run(
        [sys.executable, "-c", start + program + end], capture_output=True, text=True, env=dict(os.environ)
    )  # fmt: skip


PROBES = """
import ctypes, os, signal, numba, numpy as np
@numba.njit
def fill(x, n):
    for i in range(n):
        x[i] = 1
fill(np.empty(1, np.float32), 1)
@numba.njit
def fill_own(size, n, kind):
    x = np.empty(size, kind)
    fresh = x[size - 1]
    fill(x, n)
    return fresh, x.sum()

def dies(function):
    child = os.fork()
    if not child:
        function()
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGSEGV

def read(address):
    return lambda: ctypes.c_uint8.from_address(address).value

for dtype in ("float32", "uint8", "float64"):
    for shape in (4, (5, 7), 1024, 70_000, 300_000):
        died = []
        for _ in range(2):
            x = np.ones(shape, dtype)
            begin, end = x.ctypes.data, x.ctypes.data + x.nbytes
            died += [dies(read(begin - 1)), dies(read(end))]
            assert not dies(read(begin)) and not dies(read(end - 1))
        # Of two arrays one lies against the page before it, the other against the page after it.
        assert died[0] + died[2] >= 1 and died[1] + died[3] >= 1, (dtype, shape, died)
x = [np.empty(8, np.float32) for _ in range(2)]
assert [dies(lambda: fill(y, 9)) for y in x].count(True) == 1
assert not any(dies(lambda: fill(y, 8)) for y in x)
for kind in (np.float32, np.int8):
    for size in (1, 35, 1024, 4036, 4041, 70_000, 300_000):
        fresh, total = fill_own(size, size, kind)
        assert total == size and not fresh >= 0, (fresh, total)
        assert dies(lambda: fill_own(size, size + 1, kind)), size
"""


@pytest.mark.slow
def test_reading_and_writing_past_an_array_ends_the_process():
    found = run(PROBES)
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
def test_new_memory_is_poisoned():
    found = run("""
import numpy as np
for shape in (3, (40, 40), 70_000):
    assert np.isnan(np.empty(shape, np.float32)).all()
    assert not np.zeros(shape).any()
    x = np.ones(shape)
    x.resize(2 * x.size, refcheck=False)
    assert (x[: x.size // 2] == 1).all()
""")
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
def test_numkv_is_served_by_the_guarded_memory():
    """Its buffers, outputs and scratch: an output begins or ends with its page."""
    found = run("""
import numkv, numpy as np
layer = numkv.ContiguousLayer(4, 2, 8, kind="fp32")
rows = np.ones((4, 2, 8), np.float32)
layer.append(rows, rows)
for x in (layer.k, layer.v, layer.decode_attention(np.ones((1, 2, 8), np.float32))):
    while isinstance(x.base, np.ndarray):
        x = x.base
    assert x.ctypes.data % 4096 == 0 or (x.ctypes.data + x.nbytes) % 4096 == 0
""")
    assert found.returncode == 0, found.stderr


# Callables with one defect each, in the place of numkv's.


class Careless:
    """Changes itself before it looks at its arguments."""

    def __init__(self):
        self.n = 0

    def add(self, n):
        self.n += 1
        if n is not True:
            raise ValueError("`n`: expected True")


def unnamed(n):
    raise TypeError("no")


def overflowing(n):
    raise OverflowError("`n`: too large")


def takes_all(n):
    return 3


def of_type(n):
    return repr(n)


def changes(n):
    raise ValueError("`n`: expected another")


class Plain(Scene):
    def __init__(self, rng, x=None):
        super().__init__(rng)
        self.objects = {} if x is None else {"x": x}

    def held(self, side):
        return [vars(pair[side]) for pair in self.objects.values()]


def outcome_of(function, family, variant, valid=2, side=None):
    import random

    from fuzz.hostile import VARIANTS

    number = [v.__name__ for v in VARIANTS[family]].index(variant)
    row = Row("f", {"n": Arg(family, lambda d: valid)})
    pair = (side, Careless()) if side else None
    return play(row, Plain(None, pair), lambda _: function, random.Random(1), {"n": number})[0]


@pytest.mark.parametrize(
    ("function", "variant", "kind"),
    [
        (unnamed, "_huge", "unnamed exception"),
        (overflowing, "_huge", "unnamed exception"),
        (takes_all, "_no_integer", "accepted what nobody may accept"),
        (of_type, "_typed_integer", "wrong result"),
    ],
)
def test_a_defect_of_each_kind_is_found(function, variant, kind):
    outcome = outcome_of(function, "int", variant)
    assert isinstance(outcome.defect, Defect)
    assert outcome.defect.kind == kind


def test_a_change_after_an_error_is_found():
    careless = Careless()
    outcome = outcome_of(careless.add, "int", "_huge", side=careless)
    assert outcome.defect.kind == "state change after an error"


def test_a_named_refusal_is_none():
    outcome = outcome_of(changes, "int", "_huge")
    assert (outcome.defect, outcome.error) == (None, "ValueError")
