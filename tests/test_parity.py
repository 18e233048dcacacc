"""The two targets have the same operations, in files of the same name, with the same parameters.

An operation is what a target's package lists in ``__all__``; files that only help them (vector code,
conversions, the merge of splits) are each target's own.
"""

import importlib
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {name: importlib.import_module(f"numkv.kernels.{name}") for name in ("cpu", "cuda")}
NAMES = sorted({name for package in PACKAGES.values() for name in package.__all__})


def parameters(function) -> list[tuple]:
    signature = inspect.signature(function)
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


def file_of(function) -> str:
    return function.__module__.split(".")[-1]


def test_there_are_operations():
    assert {"append_rows", "attend", "copy_rows", "merge_states", "write_rows"} <= set(NAMES)


def test_the_same_operations():
    assert PACKAGES["cpu"].__all__ == PACKAGES["cuda"].__all__ == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_same_file_and_the_same_parameters(name):
    cpu, cuda = (getattr(package, name) for package in PACKAGES.values())
    assert file_of(cpu) == file_of(cuda)
    assert parameters(cpu) == parameters(cuda)
    assert cpu.__doc__
    assert cuda.__doc__


@pytest.mark.parametrize("target", PACKAGES)
def test_a_file_exports_operations(target):
    """What a file of operations lists is what the package offers, and nothing else."""
    offered = {name: getattr(PACKAGES[target], name) for name in NAMES}
    for file in {file_of(function) for function in offered.values()}:
        module = importlib.import_module(f"numkv.kernels.{target}.{file}")
        assert set(module.__all__) == {n for n, f in offered.items() if file_of(f) == file}


@pytest.mark.parametrize("name", ["append", "attention", "write"])
def test_operations_that_move_memory_have_a_benchmark(name):
    assert any(name in path.stem for path in (ROOT / "perf").glob("test_*.py"))
