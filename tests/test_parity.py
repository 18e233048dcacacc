"""The two targets implement the same operations, in files of the same names."""

import ast
import importlib
import inspect
import itertools
from pathlib import Path

import pytest

from numkv.kernels import operations
from numkv.kernels.operations import FILES, NAMES, Operations, implements, load, operations_in

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("cpu", "cuda")


def file_of(function) -> str:
    return function.__module__.removeprefix("numkv.kernels.").split(".")[1]


def test_there_are_operations():
    assert {"append_rows", "attend", "copy_rows", "merge_states", "write_rows"} <= set(NAMES)


def test_the_same_file_the_same_parameters_and_one_docstring():
    for name in NAMES:
        spec, cpu, cuda = (getattr(x, name) for x in (Operations, load("cpu"), load("cuda")))
        assert file_of(cpu) == file_of(cuda), name
        names = [list(inspect.signature(f).parameters) for f in (spec, cpu, cuda)]
        assert names[0] == names[1] == names[2], name
        assert cpu.__doc__ == cuda.__doc__ == inspect.getdoc(spec), name
        assert cpu is not cuda


@pytest.mark.parametrize("target", TARGETS)
def test_each_file_implements_operations_under_their_names(target):
    for file in FILES:
        module = importlib.import_module(f"numkv.kernels.{target}.{file}")
        found = operations_in(module)
        assert found, file
        assert all(name == function.__name__ for name, function in found.items()), file


def test_an_implementation_with_other_parameters_is_refused():
    with pytest.raises(TypeError, match="merge_states"):

        @implements(Operations.merge_states)
        def merge_states(o_a, o_b): ...


def test_a_target_without_an_operation_is_refused(monkeypatch):
    monkeypatch.setattr(operations, "FILES", tuple(file for file in FILES if file != "merge"))
    with pytest.raises(TypeError, match=r"differs in \{'merge_states'\}"):
        load.__wrapped__("cpu")


def test_an_operation_has_a_test_and_a_benchmark_of_its_name():
    """They take `target`, as whatever runs on one target has to run on the other."""
    for file, where in itertools.product(FILES, ("tests/kernels", "perf")):
        path = ROOT / where / f"test_{file}.py"
        taking = [
            node.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef) and "target" in [arg.arg for arg in node.args.args]
        ]
        assert any(name.startswith("test_") for name in taking), path


def test_a_file_of_rows_has_a_test_of_its_name():
    for path in (ROOT / "numkv/rows").glob("[!_]*.py"):
        assert (ROOT / f"tests/rows/test_{path.name}").exists()
