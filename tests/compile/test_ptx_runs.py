"""Kernels' real PTX, interpreted: right on small inputs, and right for no lucky reason. See `ptx_cases`.

A few cases run always; all of them with ``--nightly``, or by ``python -m tools.cuda.interpret``.
"""

import numpy as np
import pytest
from ptx_cases import cases
from ptx_on_cuda import device

import numkv
from tools.cuda import interpret

CASES = cases()
PARAMS = [
    pytest.param(case, id=name, marks=[] if case.everyday else pytest.mark.nightly)
    for name, case in CASES.items()
]  # fmt: skip


@pytest.mark.parametrize("case", PARAMS)
def test_every_kernel(case):
    assert interpret.run_case(device, case).error == ""


def test_every_kernel_and_kind_has_a_case():
    """Of each operation; a kind is in the name of a case of it."""
    for operation in ("append", "write", "shift", "attention", "mass"):
        names = " ".join(n for n in CASES if n.startswith((operation, "attention_of_heads" if operation == "mass" else operation)))  # fmt: skip
        missing = [k.name for k in numkv.kinds.kinds() if k.name not in names]
        assert missing == ([] if operation != "mass" else [m for m in missing if m == "int4"])


def test_missing_barriers_are_caught():
    """Of a kernel in which rows meet, each barrier."""
    found = interpret.mutants(device, CASES["append[fp32, int8, False, 96]"], set())
    assert len(found) == 2
    assert all("race" in mutant.caught for mutant in found), found


def test_a_wrong_result_fails():
    """A case's own comparison is seen, not only the interpreter's findings."""

    class Wrong:
        name = "wrong"

        @staticmethod
        def run(rng):
            np.testing.assert_array_equal(rng.standard_normal(3), 0)

    assert "AssertionError" in interpret.run_case(device, Wrong).error
