"""The order of scores as that of integers, and the parts of a query, beside NumPy."""

import numpy as np

from numkv.rows import choice

F32 = np.float32
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0, -1.0]


def numbers(rng):
    return np.concatenate(
        [SPECIAL, rng.standard_normal(50) * 10.0 ** rng.integers(-20, 20, 50)]
    ).astype(F32)


def test_the_order_is_that_of_the_scores(run, rng):
    order_of = run(choice.order_of)
    x = numbers(rng)
    got = np.array([int(order_of(score)) for score in x])
    as_said = np.where(np.isnan(x), np.inf, x)
    for i in range(len(x)):
        assert ((got < got[i]) == (as_said < as_said[i])).all()
        assert ((got == got[i]) == (as_said == as_said[i])).all()


def test_digits_make_the_number(run, rng):
    order_of, digit_of, whose = (
        run(f) for f in (choice.order_of, choice.digit_of, choice.whose_digit)
    )
    places = 32 // choice.DIGIT_BITS
    for score in numbers(rng):
        order = np.uint32(order_of(score))
        digits = [int(digit_of(order, place)) for place in range(places)]
        assert sum(d << (choice.DIGIT_BITS * i) for i, d in enumerate(digits)) == order
        for place in range(places):
            low = np.uint32(1 << (choice.DIGIT_BITS * place))
            high = np.uint32(np.uint64(low) << np.uint64(choice.DIGIT_BITS))
            assert whose(order, np.uint32(order ^ low), place)
            assert place == places - 1 or not whose(order, np.uint32(order ^ high), place)


def test_parts_of_a_query(run, rng):
    """Their products with bounds are the larger of both products."""
    parts_of = run(choice.parts_of)
    x = rng.standard_normal(40).astype(F32)
    low, high = np.sort(rng.standard_normal((2, 40)).astype(F32), axis=0)
    for q, a, b in zip(x, low, high, strict=True):
        negative, positive = parts_of(q)
        assert negative * a + positive * b == max(q * a, q * b)
    assert tuple(parts_of(F32(0))) == (0, 0)
    assert np.isnan(parts_of(F32(np.nan))).all()


def test_ties_and_signs_of_zero_are_one(run):
    order_of = run(choice.order_of)
    assert order_of(F32(0.0)) == order_of(F32(-0.0))
