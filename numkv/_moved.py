"""Modules and names that were elsewhere before: they can be imported from there for one more release, and warn."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

__all__ = ["MOVED", "MOVED_NAMES", "install", "moved", "moved_name"]

#: What 0.1 called a module, and where its public names are now.
MOVED = {
    "block_pool": "numkv.blocks",
    "codebook": "numkv.compression.codebook",
    "eviction": "numkv.compaction",
    "paging": "numkv.blocks",
    "pool": "numkv.storage",
    "prefix": "numkv.blocks",
    "residual": "numkv.caches.full_precision",
    "rotation": "numkv.storage",
    "structs": "numkv.storage.jit_views",
}

#: Names that a package had, and where they are now.
MOVED_NAMES = {
    "caches": {"load_sequences": "numkv.files", "save_sequences": "numkv.files"},
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module under its old name: a module with the public names of the new one."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, old = name.partition(".")
        if package != "numkv" or old not in MOVED:
            return None
        return importlib.util.spec_from_loader(name, self)

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__.partition(".")[2]
        _warn(old, 2)
        _fill(module, old)


def _warn(old: str, stacklevel: int) -> None:
    warnings.warn(
        f"numkv.{old} is now part of {MOVED[old]}; the old name goes with the next release",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )


def _fill(module: ModuleType, old: str) -> None:
    """Give a module the public names of the one that took its place."""
    new = importlib.import_module(MOVED[old])
    names: list[str] = new.__all__
    module.__doc__, module.__all__ = new.__doc__, names  # type: ignore[attr-defined]
    vars(module).update((name, getattr(new, name)) for name in names)


def install() -> None:
    """Have the old names found, after everything else."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def moved(name: str) -> ModuleType:
    """The module that was ``numkv.<name>``, for attributes of the package; raises ``AttributeError`` for others."""
    if name not in MOVED:
        raise AttributeError(f"module 'numkv' has no attribute {name!r}")
    _warn(name, 3)
    module = ModuleType(f"numkv.{name}")
    _fill(module, name)
    return module


def moved_name(package: str, name: str) -> object:
    """What was ``numkv.<package>.<name>``, for attributes of packages; raises ``AttributeError`` for others."""
    place = MOVED_NAMES[package].get(name)
    if place is None:
        raise AttributeError(f"module 'numkv.{package}' has no attribute {name!r}")
    warnings.warn(
        f"numkv.{package}.{name} is now {place}.{name}; the old name goes with the next release",
        DeprecationWarning,
        stacklevel=3,
    )
    found: object = getattr(importlib.import_module(place), name)
    return found
