"""The two targets have the same operations, with the same parameters."""

import importlib
import inspect
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parent.parent / "numkv" / "kernels"
APART = {"__init__", "simd", "convert", "splits"}  # what kernels of one target share


def operations(target: str) -> set[str]:
    return {path.stem for path in KERNELS.glob(f"{target}/*.py")} - APART


NAMES = sorted(operations("cpu") | operations("cuda"))


def exported(target: str, name: str) -> dict[str, inspect.Signature]:
    """Host functions of a kernel file, by name."""
    module = importlib.import_module(f"numkv.kernels.{target}.{name}")
    functions = {n: getattr(module, n) for n in module.__all__}
    return {n: inspect.signature(f) for n, f in functions.items() if inspect.isfunction(f)}


def parameters(signature: inspect.Signature) -> list[tuple]:
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


def test_there_are_operations():
    assert {"append", "attention"} <= operations("cpu")


def test_the_same_files():
    assert operations("cpu") == operations("cuda")


@pytest.mark.parametrize("name", NAMES)
def test_the_same_functions_with_the_same_parameters(name):
    cpu, cuda = exported("cpu", name), exported("cuda", name)
    assert cpu, "a kernel file exports its host functions"
    assert {n: parameters(s) for n, s in cpu.items()} == {n: parameters(s) for n, s in cuda.items()}


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_target_offers_all_of_them(target):
    package = importlib.import_module(f"numkv.kernels.{target}")
    for name in NAMES:
        for function in exported(target, name):
            assert callable(getattr(package, function))


@pytest.mark.parametrize("name", ["append", "attention", "paged_attention", "write"])
def test_operations_that_move_memory_have_a_benchmark(name):
    perf = KERNELS.parent.parent / "perf"
    assert any(name in path.stem for path in perf.glob("test_*.py"))
