"""Attention on CPUs with narrower vectors: Numba is told of another CPU, in a process of its own.

Vectors of 256 bits take INT8 as integers and INT4 as floats; those of 128 bits know no half floats and no products of
16-bit integers. The processes start when the first of all tests does (`conftest.py`): most of their time goes to the
compiler, and another core can do that meanwhile.
"""

import os

import other_cpus
import pytest


@pytest.mark.parametrize("cpu", other_cpus.LANES)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names x86 CPUs")
def test_other_cpus(on_other_cpus, cpu):
    printed, errors = on_other_cpus[cpu].communicate()
    assert on_other_cpus[cpu].returncode == 0, errors
    assert printed.strip() == "right"
