"""Sizes that may only shrink: lines of a file and of a function, parameters, repeated code.

What is above a limit is listed in `ratchet.json`, with its size; nothing may join the list or grow.
``python tests/test_ratchet.py`` writes the list anew where it has become shorter.
"""

import ast
import functools
import json
import sys
from pathlib import Path

import pytest
from walked import each

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "ratchet.json"
LIMITS = {"lines of a file": 620, "lines of a function": 130, "parameters": 12}
#: Lines that must be equal, docstrings and signatures included, to count as repeated; imports do not count.
REPEATED = 8


def sources(*folders: str) -> list[Path]:
    return sorted(p for f in folders for p in (ROOT / f).rglob("*.py") if ".envs" not in p.parts)


def functions(tree: ast.AST, prefix: str):
    """Name within the module, and node, of every function."""
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{prefix}.{node.name}" if prefix else node.name
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield name, node
        yield from functions(node, name)


@functools.cache
def sizes() -> dict[str, dict[str, int]]:
    """What is above its limit."""
    found: dict[str, dict[str, int]] = {name: {} for name in LIMITS}
    for path in sources("numkv", "tests", "perf", "tools"):
        where, text = str(path.relative_to(ROOT)), path.read_text()
        found["lines of a file"][where] = len(text.splitlines())
        if where.startswith("numkv"):
            for name, node in functions(ast.parse(text), ""):
                a = node.args
                count = len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs)
                key = f"{where}: {name}"
                found["lines of a function"][key] = node.end_lineno - node.lineno + 1
                found["parameters"][key] = count - (
                    bool(a.args) and a.args[0].arg in ("self", "cls")
                )
    return {
        name: {key: size for key, size in sorted(found[name].items()) if size > limit}
        for name, limit in LIMITS.items()
    }


def repeated_lines() -> int:
    """Lines of numkv that stand elsewhere in it too, by pylint's measure."""
    from pylint.checkers.symilar import Symilar

    check = Symilar(REPEATED, ignore_imports=True)
    for path in sources("numkv"):
        with path.open(encoding="utf-8") as stream:
            check.append_stream(str(path), stream)
    return sum(lines * (len(places) - 1) for lines, places in check._compute_sims())


LISTED = json.loads(LIST.read_text()) if LIST.exists() else {}


@each("limit", LIMITS)
def test_nothing_joins_the_list_or_grows(limit):
    found, listed = sizes()[limit], LISTED[limit]
    grown = {key: size for key, size in found.items() if size > listed.get(key, LIMITS[limit])}
    assert not grown


@each("limit", LIMITS)
def test_the_list_has_nothing_that_has_become_small(limit):
    assert not LISTED[limit].keys() - sizes()[limit].keys()


@pytest.mark.slow
def test_repeated_code_does_not_grow():
    assert repeated_lines() <= LISTED["repeated lines"]


def test_the_limits_can_be_passed():
    node = ast.parse(
        "class A:\n    def f(self, a, *, b):\n        def g(): ...\n        return g\n"
    )
    assert [name for name, _ in functions(node, "")] == ["A.f", "A.f.g"]


if __name__ == "__main__":
    made = {**sizes(), "repeated lines": repeated_lines()}
    if LISTED and "--new" not in sys.argv:
        for limit in LIMITS:
            allowed = LISTED[limit]
            made[limit] = {k: min(n, allowed[k]) for k, n in made[limit].items() if k in allowed}
        made["repeated lines"] = min(made["repeated lines"], LISTED["repeated lines"])
    LIST.write_text(json.dumps(made, indent=2) + "\n")
