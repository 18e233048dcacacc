"""Attention on CPUs with narrower vectors: Numba is told of another CPU, in a process of its own.

Vectors of 256 bits add products of bytes in pairs; those of 128 bits know no half floats, and take INT4 as floats.
Most of the processes' time goes to the compiler, so they run at the same time; CI compiles for one of
these CPUs, nightly runs for all.
"""

import os

import llvmlite.binding as llvm
import other_cpus
import pytest

# What this CPU may lack that kernels for another one take.
NEEDS = {"skylake-avx512": "avx512f", "alderlake": "avxvnni"}


@pytest.fixture(scope="module")
def processes(request, tmp_path_factory):
    """A running process for each CPU that is asked for; of one cache, which knows the CPU that it compiles for."""
    folder = tmp_path_factory.mktemp("other_cpus")
    items = (item for item in request.session.items if item.path == request.path)
    started = {
        cpu: other_cpus.start(cpu, folder) for cpu in {x.callspec.params["cpu"] for x in items}
    }
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "cpu",
    [pytest.param(x, marks=[pytest.mark.nightly] * (x != "haswell")) for x in other_cpus.LANES],
)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names x86 CPUs")
def test_other_cpus(processes, cpu):
    feature = NEEDS.get(cpu)
    if feature and not llvm.get_host_cpu_features().get(feature, False):
        pytest.skip(f"this CPU cannot run {feature}, which kernels for that one take")
    printed, errors = processes[cpu].communicate()
    assert processes[cpu].returncode == 0, errors
    assert printed.strip() == "right"
