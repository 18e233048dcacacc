"""`Saved`: the small values of an object, each declared once for writing and reading.

A subclass is a dataclass whose attributes are made by `integer`, `text` and the like, which define valid values::

    @dataclass(kw_only=True)
    class SavedLayers(Saved):
        num_layers: int = integer(1)
        rows: list[int] = integers(count="num_layers")

        def check(self) -> None:
            expect(max(self.rows) < 100, "too many rows")

A file is not trusted: every value is checked as it is read, and `check` compares them with each other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from numkv.kinds import Kind
from numkv.snapshots.fields import MOST, Fields

#: Reads an entry, given the header, its name and the values read before.
Reader = Callable[[Fields, str, dict[str, Any]], Any]
_NEEDED = object()


def entry(read: Reader, missing: Any = _NEEDED) -> Any:
    """Declare an entry of a header; the value `missing` is its default, and is not written."""
    more = {} if missing is _NEEDED else {"default": missing}
    return dataclasses.field(metadata={"read": read}, **more)


def integer(least: int = 0, most: int | str = MOST, missing: Any = _NEEDED) -> Any:
    """Declare an integer in ``[least, most]``; `most` may be the name of an earlier entry."""
    return entry(
        lambda f, name, x: f.integer(name, least, x[most] if isinstance(most, str) else most),
        missing,
    )


def optional(least: int = 0, most: int = MOST, missing: Any = _NEEDED) -> Any:
    """Declare an integer, or None."""
    return entry(lambda f, name, x: f.optional(name, least, most), missing)


def integers(count: int | str | None = None, most: int = MOST) -> Any:
    """Declare a list of `count` integers; `count` may be the name of an earlier entry."""
    return entry(
        lambda f, name, x: f.integers(name, x[count] if isinstance(count, str) else count, 0, most)
    )


def flag() -> Any:
    """Declare a truth value."""
    return entry(lambda f, name, x: f.flag(name))


def text(among: Sequence[str] = ()) -> Any:
    """Declare a string."""
    return entry(lambda f, name, x: f.text(name, among))


def storage_kind(optional: bool = False) -> Any:
    """Declare a storage kind, stored by name, or None."""
    return entry(lambda f, name, x: None if optional and f.get(name) is None else f.kind(name))


def part(of: type[Saved], optional: bool = False) -> Any:
    """Declare nested saved values, or None."""
    return entry(
        lambda f, name, x: None if optional and f.get(name) is None else of.read(f.part(name))
    )


def parts(of: type[Saved]) -> Any:
    """Declare a list of saved values."""
    return entry(lambda f, name, x: [of.read(part) for part in f.parts(name)])


class Spec(NamedTuple):
    """Dtype and shape of a tensor."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return its bytes."""
        return self.dtype.itemsize * math.prod(self.shape)


class Saved:
    """Values of a dataclass, to and from the header of a file."""

    #: The entry ``layout``; None if there is none.
    layout: ClassVar[str | None] = None

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """Read the values from a header.

        Raises
        ------
        Damaged
            If an entry is invalid, or contradicts another.
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
        """Compare the values with each other; raise `Damaged` if they contradict."""

    def specs(self) -> dict[str, Spec]:
        """Return all tensors of the object, by name."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Return the bytes of the object."""
        raise NotImplementedError

    def entries(self) -> dict[str, Any]:
        """Return the entries of a header, for JSON."""
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
