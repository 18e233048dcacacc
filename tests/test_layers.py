"""Imports point down the ladder of rooms that docs/architecture.md draws."""

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
PACKAGE = ROOT / "numkv"
FILES = sorted(PACKAGE.rglob("*.py"))
# What a room may import: itself, and what stands in a line above its own. Rooms in one line know nothing of each other.
LADDER = [
    ["rows", "errors", "arrays", "interrupts", "keywords", "_version"],
    ["access", "numbers", "replace"],
    ["kinds", "drawing"],
    ["device"],
    ["kernels"],
    ["targets"],
    ["checks", "threads", "snapshots"],
    ["blocks", "cells", "storage"],
    ["compaction", "planning", "store"],
    ["attention", "writing"],
    ["sparse", "compression"],
    ["caches"],
    ["files", "compile_ahead"],
    [""],  # the package itself
    ["torch", "ray", "plugins"],
    ["transformers"],
    ["bench"],
    ["demo"],
    ["cli"],
    ["__main__"],
]
HEIGHT = {room: height for height, line in enumerate(LADDER) for room in line}
FOREIGN = {  # what the rows may import beside each other, and the core beside itself
    "rows": {"__future__", "math", "numpy", "numba"},
    "core": {"numpy", "numba", "ml_dtypes", "llvmlite", "numba_cuda", "cuda"},
    "ray": set(),  # imported by what makes actors
    "torch": {"torch"},  # rooms that have an extra of their own
    "transformers": {"torch", "transformers"},
    "bench": {"torch", "transformers"},
    "plugins": {"torch", "sglang", "lmcache"},
}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path, within_functions: bool = True):
    """The import statements of a file."""
    todo = [tree_of(path)]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        if within_functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # Statements hold statements in these fields alone; expressions hold none.
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                todo += getattr(node, field, ())


@functools.cache
def modules_of(path: Path, within_functions: bool = True) -> frozenset[str]:
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
    return frozenset(found)


def _is_module(base: str, name: str) -> bool:
    place = PACKAGE.parent.joinpath(*base.split("."), name)
    return base.split(".")[0] == "numkv" and (place.with_suffix(".py").exists() or place.is_dir())


def room_of(module: str) -> str:
    """The folder or top-level file of a module."""
    return module.split(".")[1] if "." in module else ""


def there(module: str) -> bool:
    """Whether what the extra of a module's room brings is installed."""
    return all(map(importlib.util.find_spec, FOREIGN.get(room_of(module), ())))


def name_of(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.slow  # it reads all of the source
def test_imports_point_down_the_ladder():
    for path in FILES:
        own = room_of(name_of(path))
        rooms = {room_of(m) for m in modules_of(path) if m.split(".")[0] == "numkv"} - {own}
        assert not {room for room in rooms if HEIGHT[room] >= HEIGHT[own]}, path


@pytest.mark.slow
def test_no_module_imports_itself_by_way_of_others():
    """Within a room too: imports at the top of modules make no circle."""
    names = {name_of(path): path for path in FILES}
    arrows = {name: modules_of(path, False) & names.keys() - {name} for name, path in names.items()}
    while leaves := {name for name, after in arrows.items() if not after & arrows.keys()}:
        arrows = {name: after for name, after in arrows.items() if name not in leaves}
    assert not arrows


def test_no_function_shadows_its_module():
    """What a package exports never hides a module of the same name."""
    for path in PACKAGE.rglob("__init__.py"):
        if not there(name_of(path)):
            continue
        package = importlib.import_module(name_of(path))
        inside = {p.stem for p in path.parent.iterdir() if p.suffix == ".py" or p.is_dir()} - {
            "__init__"
        }
        hidden = {name for name in inside if not inspect.ismodule(getattr(package, name, inspect))}
        assert not hidden, path


def test_rows_import_numpy_numba_and_each_other():
    for path in PACKAGE.glob("rows/*.py"):
        foreign = {m for m in modules_of(path) if not m.startswith("numkv.rows")}
        assert {m.split(".")[0] for m in foreign} <= FOREIGN["rows"], path


def test_core_needs_its_own_dependencies_only():
    """What is optional is imported where it is used, inside a function."""
    for path in FILES:
        roots = {m.split(".")[0] for m in modules_of(path, within_functions=False)}
        own = FOREIGN["core"] | FOREIGN.get(room_of(name_of(path)), set())
        assert roots - {"numkv"} - sys.stdlib_module_names <= own, path


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_target_does_not_import_the_other(where):
    other = {"cpu": "cuda", "cuda": "cpu"}[where]
    for path in PACKAGE.glob(f"kernels/{where}/*.py"):
        assert not any(m.startswith(f"numkv.kernels.{other}") for m in modules_of(path)), path
        if where == "cpu":
            assert not any(m.startswith("numba.cuda") for m in modules_of(path)), path


def test_llvm_is_written_in_few_files_only():
    with_llvm = {
        path.name if path.parent.name in ("cpu", "cuda") else path.parent.name
        for path in FILES
        if any(m.split(".")[0] == "llvmlite" for m in modules_of(path))
        and HEIGHT[room_of(name_of(path))] < HEIGHT[""]
    }
    assert with_llvm == {
        "vectors",
        "llvm",
        "compress_codes.py",
        "instructions.py",
    }  # the last one of CUDA


def test_ptx_gets_into_kernels_in_one_file():
    """A compiler that takes PTX in another way then changes this file alone."""
    ways = re.compile(
        r"InlineAsm|cgutils|llvm\.nvvm|cuda\.extending|inline_ptx|import .*\bintrinsic\b"
    )
    files = [x for x in FILES if {"cuda", "rows"} & set(x.relative_to(PACKAGE).parts)]
    found = {x.name for x in files if ways.search(x.read_text())}
    assert len(files) > 50
    assert found == {"instructions.py"}


def test_the_ladder_tells_rooms_apart():
    """The check above can fail: rows may not reach up."""
    assert HEIGHT["rows"] < HEIGHT["kernels"] < HEIGHT["storage"] < HEIGHT["caches"]
    assert room_of("numkv.kernels.cpu.append") == "kernels"
    assert room_of("numkv") == ""
    assert "numpy" in modules_of(TESTS / "naive.py")


@pytest.mark.parametrize("name", ["naive.py", "naive_cells.py", "naive_codes.py", "tolerances.py"])
def test_the_oracle_knows_nothing_of_the_library(name):
    roots = {m.split(".")[0] for m in modules_of(TESTS / name)}
    assert roots <= {"numpy", "ml_dtypes", "naive", "copy"}


PATH = re.compile(r"\b(?:numkv|tests|perf|docs|tools)/[\w./<>*]*[\w>*/]")


def paths_in(text: str) -> set[str]:
    """Paths that a page names, from the root on; what varies is in angle brackets."""
    return set(PATH.findall(text))


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_a_page_names_paths_that_exist(page):
    """A folder may go without its slash, and a file of Python without its suffix."""
    named = paths_in((ROOT / page).read_text())
    assert len(named) > 10
    globs = {path: re.sub(r"<\w+>", "*", path).rstrip("/") for path in named}
    assert not {p for p, g in globs.items() if not [*ROOT.glob(g), *ROOT.glob(f"{g}.py")]}


def test_paths_are_found_in_text():
    text = "| `numkv/rows/<row>.py` | see `tests/objects/`, perf/test_a.py; and numkv.rows |"
    assert paths_in(text) == {"numkv/rows/<row>.py", "tests/objects/", "perf/test_a.py"}


def test_the_architecture_is_on_two_screens():
    lines = (ROOT / "docs/architecture.md").read_text().splitlines()
    assert len(lines) <= 110
