"""What is public: every function and method that a user can call, with the names of its arguments."""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numkv

__all__ = ["callables", "options_of", "properties", "resolve"]

#: Packages whose `__all__` is public, as `tests/test_api.py` lists them.
PACKAGES = [
    "attention",
    "blocks",
    "caches",
    "compaction",
    "device",
    "files",
    "storage",
    "store",
    "targets",
]
SPECIAL = {
    "__len__", "__getitem__", "__contains__", "__iter__", "__call__", "__enter__", "__exit__",
    "__copy__", "__deepcopy__",
}  # fmt: skip


def public() -> dict[str, Any]:
    """Public functions and classes by name: each once, by its shortest name."""
    found: dict[str, Any] = {}
    known = set()
    home = Path(numkv.__file__).parent
    there = [n for n in PACKAGES if (home / n).is_dir() or (home / f"{n}.py").exists()]
    places = [("", numkv)] + [(f"{n}.", importlib.import_module(f"numkv.{n}")) for n in there]
    for prefix, module in places:
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if isinstance(value, types.ModuleType) or id(value) in known or not callable(value):
                continue
            known.add(id(value))
            found[prefix + name] = value
    return found


def members(cls: type) -> dict[str, Any]:
    """What a class of numkv has, from its bases in numkv too."""
    bases = [b for b in reversed(cls.__mro__) if b.__module__.partition(".")[0] == "numkv"]
    return {name: member for base in bases for name, member in vars(base).items()}


#: Options of attention that have rows of their own, for the functions that take them.
_SIGHT = {"causal", "ranges", "mask", "alibi_slopes"}


def options_of(function: Any) -> set[str]:
    """The options of attention that a function takes by name, as its docstring says."""
    parameters = inspect.signature(function).parameters
    if (
        "options" not in parameters
        or parameters["options"].kind is not inspect.Parameter.VAR_KEYWORD
    ):
        return set()
    lines = inspect.getdoc(inspect.unwrap(function)).splitlines()
    first = next(i for i, line in enumerate(lines) if line.endswith("**options")) + 1
    text = " ".join(itertools.takewhile(lambda line: line.startswith(" "), lines[first:]))
    every = set(numkv.AttentionOptions.__annotations__)
    named = every & set(re.findall(r"`(\w+)`", text))
    return every - named if " but " in text else named or every


def _arguments(function: Any) -> list[str]:
    """Names of arguments and options, but for what else is taken by any name: rows have what these are."""
    found = inspect.signature(function).parameters.values()
    own = [p.name for p in found if p.kind is not p.VAR_KEYWORD]
    return own + sorted(options_of(function) - _SIGHT)


def callables() -> Iterator[tuple[str, list[str]]]:
    """Name and arguments of everything that can be called; a property that can be set has the argument ``value``."""
    for name, value in public().items():
        if typing.is_typeddict(value):
            continue
        if not inspect.isclass(value):
            yield name, _arguments(value)
            continue
        if issubclass(value, Exception) or getattr(value, "_is_protocol", False):
            continue
        try:
            yield name, _arguments(value)
        except ValueError:
            yield name, []
        for method, member in sorted(members(value).items()):
            if isinstance(member, property):
                if member.fset is not None and not method.startswith("_"):
                    yield f"{name}.{method}", ["value"]
            elif not method.startswith("_") or method in SPECIAL:
                function = getattr(value, method)
                if callable(function):
                    arguments = _arguments(function)
                    yield f"{name}.{method}", [a for a in arguments if a != "self"]


def properties(cls: type) -> list[str]:
    """Public properties of a class."""
    return [
        name
        for name, member in sorted(members(cls).items())
        if not name.startswith("_") and isinstance(member, property)
    ]


def resolve(name: str) -> Any:
    """What a name stands for: ``"KVCache.append"``, ``"blocks.slot_mapping"``."""
    found: Any = numkv
    for part in name.split("."):
        if found is numkv and part in PACKAGES:
            found = importlib.import_module(f"numkv.{part}")
        else:
            found = getattr(found, part)
    return found
