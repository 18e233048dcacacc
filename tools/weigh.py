"""Measure the size of numkv: code lines by room, private names used across files, ancestors, the public surface.

    python tools/weigh.py            a table, and the rooms
    python tools/weigh.py --where    also the uses of other files' private names, and classes with many ancestors

A code line is not blank, not a comment and not part of a docstring. A private name counts if a file uses ``x._name`` of
an object other than ``self`` or ``cls``, and does not define that name. If no file of numkv defines it, it is another
library's. `tests/ratchet.json` bounds these numbers: `tests/test_ratchet.py`.
"""

import argparse
import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "numkv"
#: Rooms of the application on top of the library.
APPLICATION = ("bench", "cli", "demo", "drawing")
#: Base classes without behaviour of their own, which do not count as ancestors.
_NO_ANCESTORS = ("Protocol", "NamedTuple", "Exception", "Enum", "IntEnum", "StrEnum", "Generic")


def sources(root=PACKAGE):
    """Return the Python files below a folder."""
    return sorted(root.rglob("*.py"))


@functools.cache
def tree_of(path):
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path):
    """Return all nodes of a file's syntax tree, walked once for all counts."""
    return _nodes(tree_of(path))


def _nodes(tree):
    """Return the nodes of `ast.walk` without contexts and operators; several times as fast."""
    found = [tree]
    for node in found:  # grows meanwhile
        for field, value in vars(node).items():
            if isinstance(value, list):
                found += [x for x in value if isinstance(x, ast.AST)]
            elif field not in ("ctx", "op") and isinstance(value, ast.AST):
                found.append(value)
    return found


def code_lines(text):
    """Return the numbers of the code lines."""
    return _code_lines(text, _nodes(ast.parse(text)))


def _code_lines(text, nodes):
    docstrings = {
        line
        for node in nodes
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and ast.get_docstring(node, clean=False) is not None
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    lines = enumerate(text.splitlines(), 1)
    return {i for i, line in lines if line.strip() and line.lstrip()[0] != "#"} - docstrings


def room_of(path, root=PACKAGE):
    """Return the folder of a file below the package; "" for the package's own files."""
    parts = path.relative_to(root).parts
    return (
        "/".join(parts[:2])
        if parts[0] == "kernels" and len(parts) > 2
        else parts[0]
        if len(parts) > 1
        else ""
    )


def lines_by_room(root=PACKAGE):
    """Return the code lines of each room."""
    found = Counter()
    for path in sources(root):
        found[room_of(path, root)] += len(_code_lines(path.read_text(), nodes_of(path)))
    return found


def _defined(nodes):
    """Return the names that a file defines, also as attributes."""
    names = set()
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign) and any(
            getattr(t, "id", "") == "__slots__" for t in node.targets
        ):
            names.update(x.value for x in ast.walk(node.value) if isinstance(x, ast.Constant))
    return names


def private_uses(root=PACKAGE):
    """Return ``(file, line, name)`` of private names of other objects that the file does not define."""
    found = []
    for path in sources(root):
        nodes = nodes_of(path)
        own = _defined(nodes) | {"_replace", "_asdict", "_fields", "_make", "_field_defaults"}
        for node in nodes:
            if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Store):
                continue
            name, of = node.attr, node.value
            if not name.startswith("_") or name.startswith("__") or name in own:
                continue
            if isinstance(of, ast.Name) and of.id in ("self", "cls", "np", "ctypes", "sys"):
                continue
            if isinstance(of, ast.Call) and getattr(of.func, "id", "") == "super":
                continue
            found.append((str(path.relative_to(root)), node.lineno, name))
    return found


def classes(root=PACKAGE):
    """Return classes by name, with the names of their bases in the source."""
    found = {}
    for path in sources(root):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(b).partition("[")[0].rpartition(".")[2] for b in node.bases]
                found.setdefault(node.name, []).append((str(path.relative_to(root)), bases))
    return found


def ancestors(name, known, file=None):
    """Return numkv's own ancestors of a class, without exceptions and protocols."""
    entries = known.get(name, [])
    entry = next((e for e in entries if e[0] == file), entries[0] if entries else None)
    if entry is None:
        return set()
    found = set()
    for base in entry[1]:
        if base in known and base != name and not _is_only_a_type(base, known):
            found |= {base} | ancestors(base, known)
    return found


def _is_only_a_type(name, known):
    """Return whether a class is a protocol, a named tuple or an exception."""
    return any(
        base in _NO_ANCESTORS
        or base.endswith("Error")
        or (base in known and base != name and _is_only_a_type(base, known))
        for _, bases in known.get(name, ())
        for base in bases
    )


def public_surface():
    """Count the public members and parameters of ``import numkv``."""
    sys.path.insert(0, str(ROOT))
    numkv = importlib.import_module("numkv")
    members = parameters = 0
    most = Counter()
    for name in numkv.__all__:
        thing = getattr(numkv, name)
        if inspect.isclass(thing):
            most[name] = 0 if issubclass(thing, enum.Enum) else _parameters(thing)
            parameters += most[name]
            for member, value in inspect.getmembers(thing):
                if member.startswith("_") or not _is_ours(thing, member):
                    continue
                members += 1
                if inspect.isroutine(value):
                    parameters += _parameters(value)
        elif callable(thing):
            parameters += _parameters(thing)
    return members, parameters, most


def _is_ours(thing, member):
    """Return whether one of numkv's classes defines a member."""
    return any(member in vars(c) for c in thing.__mro__ if c.__module__.startswith("numkv")) or (
        dataclasses.is_dataclass(thing) and member in {f.name for f in dataclasses.fields(thing)}
    )


def _parameters(function):
    try:
        return sum(name != "self" for name in inspect.signature(function).parameters)
    except (ValueError, TypeError):
        return 0


def weigh():
    """Return the bounded numbers by name."""
    lines = lines_by_room()
    known = classes()
    members, parameters, most = public_surface()
    ours = set().union(*(_defined(nodes_of(path)) for path in sources()))
    private = [name for _, _, name in private_uses()]
    named = {
        (name, file): ancestors(name, known, file) for name, es in known.items() for file, _ in es
    }
    return {
        "code lines": sum(lines.values()),
        "code lines without cli, demo, bench and drawing": sum(
            n for r, n in lines.items() if r not in APPLICATION
        ),
        "files": len(sources()),
        "private names used across files": sum(name in ours for name in private),
        "private names of other libraries": sum(name not in ours for name in private),
        "ancestors of a class": max(len(x) for x in named.values()),
        "public members": members,
        "public parameters": parameters,
        "parameters of a constructor": max(most.values()),
    }


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--where", action="store_true", help="list places, too")
    options = parser.parse_args()
    print("| what | now |\n|---|--:|")
    for name, number in weigh().items():
        print(f"| {name} | {number:,} |")
    print("\n| room | code lines |\n|---|--:|")
    for room, number in lines_by_room().most_common():
        print(f"| {room or 'numkv'} | {number:,} |")
    if options.where:
        places = Counter((file, name) for file, _, name in private_uses())
        by_file = Counter(file for file, _, _ in private_uses())
        for file, number in by_file.most_common():
            print(
                f"{number:4} {file}: {', '.join(f'{n} {c}' for (f, n), c in places.items() if f == file)}"
            )
        known = classes()
        for name, entries in sorted(known.items()):
            for file, _ in entries:
                above = ancestors(name, known, file)
                if len(above) > 2:
                    print(f"{len(above)} {file} {name}: {', '.join(sorted(above))}")


if __name__ == "__main__":
    main()
