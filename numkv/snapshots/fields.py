"""`Fields`: the header of a file; each entry is checked when it is read."""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

from numkv.errors import NumkvError
from numkv.kinds import Kind, kind

#: Exclusive bound of sizes and positions.
MOST = 2**31 - 1


class Damaged(Exception):
    """A file is damaged; `numkv.load` raises an error that names the path."""


class Foreign(Damaged):
    """A file does not seem to be one of numkv's."""


def expect(holds: bool, reason: str) -> None:
    """Raise `Damaged` with a reason unless a condition holds."""
    if not holds:
        raise Damaged(reason)


@contextlib.contextmanager
def claims(what: str) -> Iterator[None]:
    """Turn errors of the library's checks into `Damaged`, for values from a file."""
    try:
        yield
    except (NumkvError, ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
        raise Damaged(f"{what}: {error}") from error


class Fields:
    """Entries of a header by name.

    Parameters
    ----------
    entries : object
        The JSON value, which should be an object.
    where : str
        Its name in messages.
    """

    def __init__(self, entries: Any, where: str = "the header") -> None:
        expect(isinstance(entries, dict), f"expected an object in {where}, got {_short(entries)}")
        self._by_name: dict[str, Any] = entries
        self._where = where

    def get(self, name: str) -> Any:
        """Return an entry unchecked."""
        expect(name in self._by_name, f"{self._where} has no {name!r}")
        return self._by_name[name]

    def has(self, name: str) -> bool:
        """Return whether there is such an entry."""
        return name in self._by_name

    def integer(self, name: str, least: int = 0, most: int = MOST) -> int:
        """Return an integer in ``[least, most]``."""
        return self._integer(name, self.get(name), least, most)

    def optional(self, name: str, least: int = 0, most: int = MOST) -> int | None:
        """Return an integer, or None."""
        return None if self.get(name) is None else self.integer(name, least, most)

    def integers(
        self, name: str, count: int | None = None, least: int = 0, most: int = MOST
    ) -> list[int]:
        """Return a list of `count` integers."""
        return [self._integer(name, x, least, most) for x in self.entries(name, count)]

    def entries(self, name: str, count: int | None = None) -> list[Any]:
        """Return a list of `count` entries."""
        found = self.get(name)
        self._expect(isinstance(found, list), name, "a list", found)
        self._expect(count is None or len(found) == count, name, f"{count} entries", found)
        return list(found)

    def flag(self, name: str) -> bool:
        """Return a truth value."""
        found = self.get(name)
        self._expect(isinstance(found, bool), name, "true or false", found)
        return bool(found)

    def text(self, name: str, among: Sequence[str] = ()) -> str:
        """Return a string."""
        found = self.get(name)
        self._expect(isinstance(found, str), name, "a string", found)
        self._expect(not among or found in among, name, f"one of {', '.join(among)}", found)
        return str(found)

    def kind(self, name: str) -> Kind:
        """Return a storage kind, from its name."""
        found = self.text(name)
        with claims(f"{name!r} in {self._where}"):
            wanted = kind(found)
        self._expect(wanted.name == found, name, wanted.name, found)
        return wanted

    def part(self, name: str) -> Fields:
        """Return the entries of an object in this one."""
        return Fields(self.get(name), f"{name!r} of {self._where}")

    def parts(self, name: str, count: int | None = None) -> list[Fields]:
        """Return the entries of each object in a list."""
        where = f"{name!r} of {self._where}"
        return [Fields(x, f"{where}[{i}]") for i, x in enumerate(self.entries(name, count))]

    def _integer(self, name: str, found: Any, least: int, most: int) -> int:
        plain = isinstance(found, int) and not isinstance(found, bool)
        self._expect(plain and least <= found <= most, name, f"{least} to {most}", found)
        return int(found)

    def _expect(self, holds: bool, name: str, wanted: str, found: Any) -> None:
        if not holds:
            raise Damaged(f"expected {wanted} as {name!r} in {self._where}, got {_short(found)}")


def _short(x: Any) -> str:
    return reprlib.repr(x)
