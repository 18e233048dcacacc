"""Functions that are emitted from their source, without Numba's type inference: the same as Numba makes of them."""

import itertools
import re
from typing import NamedTuple

import numba
import numpy as np
import pytest
from numba import types
from numba.core.runtime import _nrt_python, rtsys
from numba.extending import register_jitable

from numkv.kernels import builder, disk_cache
from numkv.kernels.cpu.vectors.arrays import by_row, row_of
from numkv.kernels.cpu.vectors.emitted import alone, as_kernel

NUMBERS = [-(1 << 40), -7, -3, -1, 0, 1, 2, 5, 64, 1 << 40]
I64 = types.int64


class Pair(NamedTuple):
    first: int
    second: int


NOTHING = Pair(0, 0)


def divisions(a, b):
    return a // b * 7 + a % b, a // 8, a % 8, a // 3, a % 3


def bits(a, b):
    shift = b & 31
    return (a << shift) ^ (a >> shift) | ~b, -a, abs(b), max(a, b, 3), min(a, np.int64(b), 3)


def branches(a, b):
    if a < 0 < b:
        return 1
    elif not (a == b or a > b + 3):
        return True
    elif a == b and a != 5:
        return np.int64(3) if b > 1 else False
    return 4 if 0 <= a <= b or b == 2 else 5


def loops(a, b):
    total = taken = np.int64(0)
    for i in range(min(a, 9), min(b, 30), 1 if a < b else max(b, 1)):
        if i == 4:
            continue
        for j in range(3, -1, -1):
            total += i * j
            if total > 100:
                break
        else_ = total
        while else_ > 10:
            else_ //= 2
            taken += 1
            if taken == 17:
                return total, -taken
    for k in range(3):  # one after another, as an index of a tuple has to be known
        total += (4, 5, 6)[k]
    for c, d in ((a, 1), (b, 2)):
        total += c * d if d == 2 else 0
    return total, taken


def records(a, b):
    found = nothing = NOTHING
    for i in range(6):
        if i * a > b:
            found = Pair(i, found.first + a)
    first, second = swapped(found)
    return first, second, nothing.second, len(found), found[1]


@register_jitable
def swapped(pair):
    return pair.second, pair.first


def one_name_of_two_types(a, b):
    a = np.uint32(a)
    a = np.uint32(a << np.uint32(3))
    b = np.float64(b) / 2
    return np.int64(a), b


FUNCTIONS = [divisions, bits, branches, loops, records, one_name_of_two_types]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_numbers(function):
    by_numba = numba.njit(error_model="numpy")(function)
    by_numba(1, 2)
    result = by_numba.nopython_signatures[0].return_type
    emitted = numba.njit((I64, I64), error_model="numpy")(as_kernel(function, result))
    for a, b in itertools.product(NUMBERS, repeat=2):
        assert emitted(a, b) == by_numba(a, b), (a, b)


def floats(x, y, out):
    biggest = np.float32(0)
    for i in range(len(x)):
        value = x[i] if x[i] == x[i] else np.float32(2)
        biggest = max(biggest, np.float32(value * y))
        out[i] = np.float32(value).view(np.int32) & np.int32(0x7FFFFFFF)
    return biggest + np.sqrt(np.float64(y)), -biggest, 1 if biggest > 3 else np.float32(0.5)


def test_floats_are_what_numba_makes_of_them():
    x = np.array([1.5, -0.0, np.nan, np.inf, 3e-42, -7], np.float32)
    by_numba = numba.njit(error_model="numpy")(floats)
    expected = np.empty(len(x), np.int32)
    wanted = by_numba(x, np.float32(0.3), expected)
    (sig,) = by_numba.nopython_signatures
    emitted = numba.njit(sig.args, error_model="numpy")(as_kernel(floats, sig.return_type))
    out = np.empty_like(expected)
    assert emitted(x, np.float32(0.3), out) == wanted
    assert (out == expected).all()


def arrays(x, table, scale):
    part, row = x[2:], table[1]
    part[0] = part[1] = len(part) + x.shape[0] * 100 + table.strides[0] // table.itemsize + x.ndim
    x[7:9][1] = row[0] + table[0, 2]
    x[0] += np.int64(row_of(table[None, :, :], (np.int64(0), np.int64(1)))[1])
    of_heads = by_row(scale)
    return np.int64(row_of(of_heads, (np.int64(5), np.int64(1), np.int64(9)))[0])


def test_parts_of_arrays():
    for layout in ("C", "A"):
        x, table = np.arange(10), np.arange(12, dtype=np.int32).reshape(3, 4)
        if layout == "A":
            x, table = np.arange(20)[::2], np.arange(24, dtype=np.int32).reshape(3, 8)[:, :4]
        scale = np.array([5.0, 6.0], np.float32)
        kinds = [types.Array(numba.typeof(z).dtype, z.ndim, layout) for z in (x, table, scale)]
        made = [
            numba.njit(tuple(kinds), error_model="numpy")(f)
            for f in (arrays, as_kernel(arrays, I64))
        ]
        copies = [(x.copy() if layout == "C" else x.repeat(2)[::2]) for _ in made]
        assert made[0](copies[0], table, scale) == made[1](copies[1], table, scale) == 6
        assert (copies[0] == copies[1]).all()


@register_jitable
def memory(n, early):
    if early:
        return 0
    x = np.empty(n, np.int64)
    for i in range(n):
        x[i] = i
    return x[n - 1] + of_another(n)


@register_jitable
def of_another(n):
    y, total = np.empty(n, np.float32), np.int64(0)
    for i in range(n):
        y[i] = i
        total += np.int64(y[i])
    return total


def in_a_loop(n, early):
    total = np.int64(0)
    for i in range(n):
        total += memory(i, i < 3 or early)
    return total


def test_memory_is_freed():
    _nrt_python.memsys_enable_stats()
    for function in (memory, in_a_loop):
        made = numba.njit((I64, types.boolean))(as_kernel(function, I64))
        assert made(20, True) == 0
        by_numba = numba.njit(function)
        assert made(20, False) == by_numba(20, False)
        before = rtsys.get_allocation_stats()
        assert made(20, False) > 0
        after = rtsys.get_allocation_stats()
        assert after.alloc - before.alloc == after.free - before.free


@alone
@register_jitable(fastmath={"reassoc"})
def flagged(x):
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i]
    return total


def calls_flagged(x):
    return flagged(x)


def test_a_function_with_flags_of_its_own_is_compiled_by_itself():
    signature = (types.Array(types.float32, 1, "C"),)
    made = numba.njit(signature)(as_kernel(calls_flagged, types.float32))
    (text,) = made.inspect_asm().values()
    assert "vaddps" in text  # sums in vectors, which no rule of floats allows
    assert made(np.ones(1000, np.float32)) == 1000


def raises(a):
    if a < 0:
        raise ValueError("negative")
    return a


def comprehends(a):
    return sum([i * i for i in range(a)])


def by_name(a):
    return swapped(pair=a)


def two_types(a):
    x = 1
    for _ in range(a):
        x = x / 2
    return x


def allocates_in_a_loop(a):
    for _ in range(a):
        x = np.empty(a, np.float32)
        x[0] = 1
    return a


def unknown(a):
    return c + a  # noqa: F821


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (raises, "line 2: .*Raise"),
        (comprehends, "ListComp"),
        (by_name, "by name"),
        (two_types, "float64 for a variable of int64"),
        (allocates_in_a_loop, "made in a loop"),
        (unknown, "c, which has no value"),
    ],
)
def test_what_cannot_be_emitted_is_said(function, what):
    with pytest.raises(
        (TypeError, numba.core.errors.NumbaError), match="expected what can be"
    ) as e:
        numba.njit((I64,))(as_kernel(function, I64))
    first = function.__code__.co_firstlineno
    what = what.replace("line 2", f"line {first + 2}")
    assert re.search(what, str(e.value))
    assert function.__name__ in str(e.value)


def test_numba_compiles_kernels_whose_sources_have_changed(monkeypatch):
    """What is emitted is the source as it is on disk: it has to be that which was imported."""
    path = disk_cache._sources()[0]
    assert not disk_cache.sources_changed()
    seen = []
    monkeypatch.setattr(builder, "as_kernel", lambda f, result: seen.append(f) or f)
    builder.build(loops, (I64, I64), label="loops", emit=types.UniTuple(I64, 2))
    assert seen == [loops]
    monkeypatch.setattr(disk_cache, "_BEGUN", path.stat().st_ctime - 1)
    assert disk_cache.sources_changed()
    kernel = builder.build(loops, (I64, I64), label="loops", emit=types.UniTuple(I64, 2))
    assert seen == [loops]
    assert kernel(2, 9) == loops(2, 9)
