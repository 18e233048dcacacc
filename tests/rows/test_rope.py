"""`numkv.rows.rope`: pairs, against a multiplication of complex numbers."""

import cmath

import numpy as np
import pytest

from numkv.rows.rope import pair_of, rotate_pair


@pytest.mark.parametrize("half", [1, 2, 5, 64])
@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_are_a_partition(run, half, interleaved):
    pairs = [run(pair_of)(i, half, interleaved) for i in range(half)]
    assert sorted(i for pair in pairs for i in pair) == list(range(2 * half))
    distance = 1 if interleaved else half
    assert all(b - a == distance for a, b in pairs)
    assert [a for a, _ in pairs] == [(2 * i if interleaved else i) for i in range(half)]


@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 2e-6), (np.float64, 1e-14)])
def test_a_pair_is_a_complex_number(run, rng, dtype, bound):
    for a, b, angle in rng.uniform(-5, 5, (20, 3)):
        want = complex(a, b) * cmath.exp(1j * angle)
        got = run(rotate_pair)(dtype(a), dtype(b), dtype(np.cos(angle)), dtype(np.sin(angle)))
        assert abs(complex(*got) - want) <= bound * abs(want)


def test_an_angle_of_0_keeps_bits(run):
    a, b = np.float32(0.1), np.float32(-1e-30)
    assert run(rotate_pair)(a, b, np.float32(1), np.float32(0)) == (a, b)
