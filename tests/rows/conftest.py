"""Row functions in both of their forms: plain Python, as the simulator runs them, and compiled for the CPU.

By day they are compiled as parts of the kernels of `tests/kernels`, and here with the slow tests.
"""

import functools

import numba
import numpy as np
import pytest

compiled = functools.cache(numba.njit)


@pytest.fixture(params=["plain", pytest.param("compiled", marks=pytest.mark.slow)])
def run(request):
    """``run(function)`` is a row function in the form that is tested."""
    return compiled if request.param == "compiled" else lambda function: function


@pytest.fixture(autouse=True)
def silent():
    """Kernels ignore overflow and NaN, and so do NumPy's scalars here."""
    with np.errstate(all="ignore"):
        yield
