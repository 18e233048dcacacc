"""The table of everything public: how it is called, and what sort of thing each argument is."""

from __future__ import annotations

import inspect

from fuzz import rows_functions, rows_multi, rows_paged, rows_single, rows_sparse
from fuzz.play import Row, Scene
from fuzz.surface import members, options_of, resolve

__all__ = ["SCENES", "fitting", "rows_of"]

#: Scenes with their weights; each has rows.
SCENES = [
    *rows_functions.SCENES, *rows_single.SCENES, *rows_paged.SCENES, *rows_multi.SCENES, *rows_sparse.SCENES,
]  # fmt: skip

#: Properties and methods that compile for seconds when they are first asked for, or end an object for good.
NOT_BY_CHANCE = {"jit", "close"}
#: How often a property is read and a method without arguments called that no row names.
SELDOM = 0.05


def _get(name):
    return lambda x, given: getattr(x, name)


def _fitting(row: Row) -> Row | None:
    """A row without the arguments that its callable does not have, or nothing where there is no such callable."""
    try:
        function = resolve(row.name)
        parameters = {*inspect.signature(function).parameters, *options_of(function)}
    except AttributeError:
        return None
    except (TypeError, ValueError):
        return row
    if row.call is not None and row.call.__name__ != "constructed":
        return row
    return row._replace(args={n: a for n, a in row.args.items() if n in parameters})


def fitting(scene: type[Scene]) -> list[Row]:
    """The rows of a scene whose callables there are."""
    if scene.__name__ not in _known:
        _known[scene.__name__] = [row for row in map(_fitting, scene.rows) if row is not None]
    return _known[scene.__name__]


_known: dict[str, list[Row]] = {}


def rows_of(scene: Scene) -> list[Row]:
    """All rows of a scene: its own, and of its objects what takes no arguments."""
    found = list(fitting(type(scene)))
    named = {row.name for row in found}
    for key, pair in scene.objects.items():
        cls = type(pair.a)
        for name, member in members(cls).items():
            full = f"{cls.__name__}.{name}"
            if (
                name in NOT_BY_CHANCE
                or full in named
                or (name[0] == "_" and name not in ("__len__", "__repr__"))
            ):
                continue
            if isinstance(member, property):
                found.append(Row(full, {}, key, call=_get(name), weight=SELDOM))
            elif inspect.isfunction(member) and len(inspect.signature(member).parameters) < 2:
                found.append(Row(full, {}, key, weight=SELDOM))
    return found
