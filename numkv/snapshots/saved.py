"""`Saved`: the small values that an object is rebuilt from, each declared once for writing and for reading.

A subclass is a dataclass whose attributes are made by `integer`, `text` and the like, which say what a file may hold::

    @dataclass(kw_only=True)
    class SavedLayers(Saved):
        num_layers: int = integer(1)
        rows: list[int] = integers(count="num_layers")

        def check(self) -> None:
            expect(max(self.rows) < 100, "too many rows")

What is read is not trusted: every value is checked as it is read, and `check` compares them with each other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from numkv.kinds import Kind
from numkv.snapshots.fields import MOST, Fields

#: Reads an entry: of the header, its name, and what has been read before.
Reader = Callable[[Fields, str, dict[str, Any]], Any]
_NEEDED = object()


def entry(read: Reader, missing: Any = _NEEDED) -> Any:
    """An entry of a header; `missing` is what it is where there is none, and is not written then."""
    more = {} if missing is _NEEDED else {"default": missing}
    return dataclasses.field(metadata={"read": read}, **more)


def integer(least: int = 0, most: int | str = MOST, missing: Any = _NEEDED) -> Any:
    """An integer in ``[least, most]``; `most` may be the name of an earlier entry."""
    return entry(
        lambda f, name, x: f.integer(name, least, x[most] if isinstance(most, str) else most),
        missing,
    )


def optional(least: int = 0, most: int = MOST, missing: Any = _NEEDED) -> Any:
    """An integer, or None."""
    return entry(lambda f, name, x: f.optional(name, least, most), missing)


def integers(count: int | str | None = None, most: int = MOST) -> Any:
    """A list of integers, of which there are `count`, which may be the name of an earlier entry."""
    return entry(
        lambda f, name, x: f.integers(name, x[count] if isinstance(count, str) else count, 0, most)
    )


def flag() -> Any:
    """A truth value."""
    return entry(lambda f, name, x: f.flag(name))


def text(among: Sequence[str] = ()) -> Any:
    """A string."""
    return entry(lambda f, name, x: f.text(name, among))


def storage_kind(optional: bool = False) -> Any:
    """A storage kind, by its name, or None."""
    return entry(lambda f, name, x: None if optional and f.get(name) is None else f.kind(name))


def part(of: type[Saved], optional: bool = False) -> Any:
    """Saved values within others, or None."""
    return entry(
        lambda f, name, x: None if optional and f.get(name) is None else of.read(f.part(name))
    )


def parts(of: type[Saved]) -> Any:
    """A list of saved values."""
    return entry(lambda f, name, x: [of.read(part) for part in f.parts(name)])


class Spec(NamedTuple):
    """What a tensor is."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.dtype.itemsize * math.prod(self.shape)


class Saved:
    """Values of a dataclass, to and from the header of a file."""

    #: What the entry ``layout`` says; None if there is none.
    layout: ClassVar[str | None] = None

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """Return the values that a header holds.

        Raises
        ------
        Damaged
            If an entry is not what it has to be, or contradicts another.
        """
        if cls.layout is not None:
            fields.text("layout", [cls.layout])
        values: dict[str, Any] = {}
        of: Any = cls
        for x in dataclasses.fields(of):
            if x.default is dataclasses.MISSING or fields.has(x.name):
                values[x.name] = x.metadata["read"](fields, x.name, values)
        found: Self = of(**values)
        found.check()
        return found

    def check(self) -> None:
        """Compare what has been read with itself; `Damaged` if it contradicts itself."""

    def specs(self) -> dict[str, Spec]:
        """All tensors of the object, by name."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes that the object takes."""
        raise NotImplementedError

    def entries(self) -> dict[str, Any]:
        """What a header holds, for JSON."""
        of: Any = self
        values = {x.name: (getattr(self, x.name), x.default) for x in dataclasses.fields(of)}
        found = {} if self.layout is None else {"layout": self.layout}
        return found | {name: _plain(x) for name, (x, default) in values.items() if x != default}


def _plain(x: Any) -> Any:
    if isinstance(x, Saved):
        return x.entries()
    if isinstance(x, list):
        return [_plain(each) for each in x]
    if isinstance(x, Mapping):
        return {name: _plain(each) for name, each in x.items()}
    if isinstance(x, bytes):
        return {"bytes": x.hex()}
    return x.name if isinstance(x, Kind) else x
