"""Arguments as nobody should pass them, by family: numbers, names, objects; of arrays see `hostile_arrays`."""

from __future__ import annotations

import decimal
import fractions
import operator

import numpy as np

from fuzz.hostile_arrays import (
    FLOATS,
    INTEGERS,
    OMIT,
    REFUSED,
    SAME,
    CallersOwn,
    Hostile,
    none,
    plain_array,
)

__all__ = ["OMIT", "REFUSED", "SAME", "VARIANTS", "CallersOwn", "Hostile", "plain_array"]


# ---------------------------------------------------------------- numbers


class _Index:
    """Has ``__index__``, as an integer of another library has."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __index__(self) -> int:
        return self.n


class _FailingIndex:
    def __index__(self):
        raise CallersOwn


def _integer(value):
    """An integer of whatever type, or what is none."""
    try:
        return Hostile(value, operator.index(value))
    except Exception:
        return Hostile(value, REFUSED)


NO_INTEGERS = [
    np.nan,
    np.inf,
    -np.inf,
    3.7,
    0.5,
    -0.5,
    3.0,
    "x",
    "3",
    b"3",
    1j,
    [],
    [1],
    (),
    {},
    object(),
    np.float32(2),
    np.float64(1.5),
    fractions.Fraction(2),
    fractions.Fraction(1, 2),
    decimal.Decimal(1),
    np.array(1.5),
    np.array([1, 2]),
    int,
    _FailingIndex(),
    np.datetime64(3, "s"),
    np.ma.masked,
]
HUGE = [
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    -(2**31) - 1,
    -(2**63),
    -(2**63) - 1,
    -(10**30),
]


def _no_integer(x, d):
    return _integer(d.choice(NO_INTEGERS))


def _huge(x, d):
    return Hostile(d.choice(HUGE))


def _small(x, d):
    return Hostile(d.choice([-3, -2, -1, 0, 1, 2, 3, 5, 17, True, False]))


def _typed_integer(x, d):
    n = x if isinstance(x, int) else 1
    types = [np.uint8, np.int8, np.int32, np.uint64, np.array, _Index, bool]
    return _integer(d.choice(types)(n if -1 < n < 128 else 1))


def _no_integer_of_each(x, d):
    value = d.choice(NO_INTEGERS)
    # A list may be right: one number for each layer. Then it is its own plain argument.
    return Hostile(value, value) if np.ndim(value) == 1 else _integer(value)


INTS = [_no_integer, _no_integer, _huge, _huge, _small, _small, _typed_integer, none]


NO_NUMBERS = [
    "x",
    "1",
    b"1",
    1j,
    [],
    [1.0],
    (),
    {},
    object(),
    np.array([1.0, 2.0]),
    float,
    np.datetime64(3, "s"),
    np.ma.masked,
]


def _no_number(x, d):
    return Hostile(d.choice(NO_NUMBERS), REFUSED)


def _no_finite(x, d):
    return Hostile(
        d.choice([np.nan, np.inf, -np.inf, np.float32(np.nan), np.float64(np.inf)]), REFUSED
    )


def _too_large(x, d):
    return Hostile(d.choice([10**400, -(10**400), fractions.Fraction(10**400)]), REFUSED)


def _number(x, d):
    value = d.choice([0, 1, 2, -1, 0.5, -0.5, 1e-300, 1e38, 1e300, -1e300, 2**63, True])
    return Hostile(value, float(value), finite=abs(value) < 10)


def _typed_number(x, d):
    types = [
        np.float32,
        np.float64,
        np.float16,
        np.array,
        fractions.Fraction,
        decimal.Decimal,
        np.int8,
    ]
    value = d.choice(types)(d.choice([0.5, 1.0, 0.0, 2.0]))
    return Hostile(value, float(value))


REALS = [
    _no_number,
    _no_number,
    _no_finite,
    _no_finite,
    _too_large,
    _number,
    _number,
    _typed_number,
    none,
]


def _odd_flag(x, d):
    return Hostile(d.choice([0, 1, 2, "", "x", [], [0], np.bool_(True), np.True_, 0.0, object()]))


def _no_flag(x, d):
    return Hostile(d.choice([np.array([1, 2]), np.array([]), np.ma.masked]))


# ---------------------------------------------------------------- names and objects


class _FailingHash:
    __hash__ = None  # type: ignore[assignment]


def _pick(*values, plain=SAME):
    def variant(x, d):
        return Hostile(d.choice(values), plain)

    return variant


_kinds = _pick(
    "x",
    "",
    "fp 16",
    b"fp16",
    3,
    3.5,
    object(),
    _FailingHash(),
    [],
    ["fp16"],
    {},
    np.nan,
    True,
    ("fp16",),
    np.array("fp16"),
    np.array(["a", "b"]),
    plain=REFUSED,
)
#: What may stand for a kind in one place and not in another.
_dtypes = _pick(
    "FP16", np.float32, np.dtype("f4"), float, "float32", "f4", np.dtype("i4"), np.float16
)
_targets = _pick(
    "x",
    "",
    "CPU",
    b"cpu",
    3,
    object(),
    _FailingHash(),
    [],
    ["cpu"],
    {},
    np.nan,
    True,
    np.array(["cpu"]),
    plain=REFUSED,
)
_objects = _pick(3, "x", object(), [], {}, np.zeros(3), type, np.nan, 3.5, _FailingHash(), Ellipsis)
_mappings = _pick(
    3,
    "x",
    [],
    [1],
    {1: 2},
    {"a": 1.5},
    {"a": None},
    {"a": object()},
    {"a": 10**30},
    {"a": [1]},
    {None: 1},
    {"a": {}},
    {"": ""},
    {"a": b"x", "b": "x"},
    {"a": -1},
    [("a", 1)],
    {("a",): 1},
    object(),
    np.zeros(3),
)
_names = _pick(3, None, object(), b"x", [], "")


def _bad_iterable(x, d):
    def failing():
        yield 0
        raise CallersOwn

    values = [
        3,
        "x",
        object(),
        [1.5],
        [np.nan],
        [10**30],
        [-1],
        [None],
        ["x"],
        [[1]],
        [2**63],
        [-(2**63) - 1],
        failing(),
        [0, 0],
        {},
        {0: 0},
        np.array([0.5]),
        np.array(0),
        [object()],
        [_FailingHash()],
    ]
    return Hostile(d.choice(values))


def _good_iterable(x, d):
    if x is None:  # where an iterable may be left out
        return Hostile(x)
    flat, makers = list(x), [list, tuple, iter, lambda y: (i for i in y)]
    if all(np.ndim(i) == 0 for i in flat):
        makers += [np.array, dict.fromkeys]
    make = d.choice(makers)
    if make == dict.fromkeys:  # which has each key once
        flat = list(make(flat))
    return Hostile(make(flat), list(flat))


def _functions(x, d):
    def failing(*args, **kwargs):
        raise CallersOwn

    values = [
        3,
        "x",
        object(),
        [],
        lambda: 3,
        lambda *a: None,
        lambda *a: a[1] if len(a) > 1 else 3,
        lambda *a: np.zeros(3),
        failing,
    ]
    return Hostile(d.choice(values))


#: Variants of each family.
VARIANTS = {
    "floats": FLOATS,
    "output": FLOATS,
    "integers": INTEGERS,
    "int": INTS,
    "int or ints": [_no_integer_of_each if variant is _no_integer else variant for variant in INTS],
    "size": INTS,
    "real": REALS,
    "scale": [*FLOATS, *REALS],
    "flag": [_odd_flag, _odd_flag, _no_flag, none],
    "kind": [_kinds, _kinds, _dtypes, none],
    "target": [_targets, _targets, none],
    "object": [_objects, _objects, none],
    "iterable": [_bad_iterable, _bad_iterable, _good_iterable, none],
    "mapping": [_mappings, _mappings, none],
    "function": [_functions, _functions, none],
    "name": [_names],
    # Made by the caller and given to nothing that reads it: whatever it is.
    "anything": [],
}
