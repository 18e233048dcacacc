"""Kernels' real PTX, interpreted: right on small inputs, and right for no lucky reason. See `ptx_cases`.

A few cases run always; all of them with ``--nightly``, or by ``python -m tools.cuda.interpret``.
"""

import numpy as np
import pytest
from ptx_on_cuda import device

from numkv.kinds import kinds
from tools.cuda import interpret

CASES = interpret.all_cases()
PARAMS = [
    pytest.param(case, id=name, marks=[] if case.everyday else pytest.mark.nightly)
    for name, case in CASES.items()
]  # fmt: skip


@pytest.mark.parametrize("case", PARAMS)
def test_every_kernel(case):
    assert interpret.run_case(device, case).error == ""


def test_every_kernel_and_kind_has_a_case():
    """Of each operation; a kind is in the name of a case of it."""
    # Of 8-bit floats, mass is looked at beside attention.
    for operation in ("append", "write", "shift", "attention", ("mass", "attention_of_heads")):
        names = " ".join(name for name in CASES if name.startswith(operation))
        assert [kind.name for kind in kinds() if kind.name not in names] == []


def test_missing_barriers_are_caught():
    """Of a kernel in which rows meet, each barrier."""
    found = interpret.mutants(device, CASES["append[bf16, int8, True, 34]"], set())
    assert len(found) == 4  # two for K, two for V
    assert all("race" in mutant.caught for mutant in found), found


def test_a_wrong_result_fails():
    """A case's own comparison is seen, not only the interpreter's findings."""

    class Wrong:
        name = "wrong"

        @staticmethod
        def run(rng):
            np.testing.assert_array_equal(rng.standard_normal(3), 0)

    assert "AssertionError" in interpret.run_case(device, Wrong).error
