"""Imports point downward: objects -> kernels -> rows, as docs/architecture.md says."""

import ast
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "numkv"
FILES = sorted(PACKAGE.rglob("*.py"))
# Rows 0, kernels 2, objects 4, the package and what is built on it 5; leaves lie between.
LEAVES = {"errors": 1, "kinds": 1, "_version": 1, "targets": 3, "targets_cuda": 3, "checks": 3}
FOREIGN = {  # what the rows may import beside each other, and the core beside itself
    "rows": {"__future__", "math", "numpy", "numba"},
    "core": {"numpy", "numba", "ml_dtypes", "safetensors", "llvmlite", "numba_cuda"},
}


def imports(path: Path, within_functions: bool = True):
    """The import statements of a file."""
    todo = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        if within_functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            todo += ast.iter_child_nodes(node)


def modules_of(path: Path, within_functions: bool = True) -> set[str]:
    """Full names of the modules that a file imports."""
    found = set()
    for node in imports(path, within_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{path}: relative import"
            inner = {a.name for a in node.names if _is_module(node.module, a.name)}
            found |= {f"{node.module}.{name}" for name in inner}
            if len(inner) < len(node.names):
                found.add(node.module)
    return found


def _is_module(base: str, name: str) -> bool:
    place = PACKAGE.parent.joinpath(*base.split("."), name)
    return base.split(".")[0] == "numkv" and (place.with_suffix(".py").exists() or place.is_dir())


def layer_of(module: str) -> int:
    """The height of a module; it may import what is not above it."""
    parts = module.split(".")[1:]
    if not parts or parts[0] in ("cli", "demo", "__main__"):
        return 5
    if parts[0] in LEAVES:
        return LEAVES[parts[0]]
    return {"rows": 0, "kernels": 2}.get(parts[0], 4)


def name_of(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    own = layer_of(name_of(path))
    above = {m for m in modules_of(path) if m.split(".")[0] == "numkv" and layer_of(m) > own}
    assert not above


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("rows/*.py")), ids=lambda p: p.name)
def test_rows_import_numpy_numba_and_each_other(path):
    foreign = {m for m in modules_of(path) if not m.startswith("numkv.rows")}
    assert {m.split(".")[0] for m in foreign} <= FOREIGN["rows"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_core_needs_its_own_dependencies_only(path):
    """What is optional is imported where it is used, inside a function."""
    roots = {m.split(".")[0] for m in modules_of(path, within_functions=False)}
    assert roots - {"numkv"} - sys.stdlib_module_names <= FOREIGN["core"]


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_target_does_not_import_the_other(where):
    other = {"cpu": "cuda", "cuda": "cpu"}[where]
    for path in PACKAGE.glob(f"kernels/{where}/*.py"):
        assert not any(m.startswith(f"numkv.kernels.{other}") for m in modules_of(path)), path
        if where == "cpu":
            assert not any(m.startswith("numba.cuda") for m in modules_of(path)), path


def test_llvm_is_written_in_few_files_only():
    with_llvm = {
        path.name
        for path in FILES
        if any(m.split(".")[0] == "llvmlite" for m in modules_of(path))
        and layer_of(name_of(path)) < 5
    }
    assert with_llvm <= {"simd.py", "simd_codes.py", "simd_integers.py", "simd_tiles.py"}


def test_the_layers_are_told_apart():
    """The check above can fail: rows may not reach up."""
    assert layer_of("numkv.rows.rope") < layer_of("numkv.errors") < layer_of("numkv.kernels.cpu")
    assert layer_of("numkv.kernels.cpu.append") < layer_of("numkv.kv_cache") < layer_of("numkv.cli")
    assert "numpy" in modules_of(TESTS / "naive.py")


@pytest.mark.parametrize("name", ["naive.py", "naive_cells.py", "naive_codes.py", "tolerances.py"])
def test_the_oracle_knows_nothing_of_the_library(name):
    roots = {m.split(".")[0] for m in modules_of(TESTS / name)}
    assert roots <= {"numpy", "ml_dtypes", "naive", "copy"}
