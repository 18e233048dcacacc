"""Descriptions of public functions for the target that runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numkv.errors import NonFiniteInput

#: Records that a kernel found NaN or infinity in a token's rows, given the token's number, the error, and the number of
#: the object's call.
Mark = Callable[[int, NonFiniteInput, int], None]


class Marker(NamedTuple):
    """The receiver of reports of NaN and infinity in a call's rows.

    Attributes
    ----------
    watch : object
        The object's own `numkv.targets.base.Target.new_watch`.
    mark : function
        Called with each report.
    first : int
        Number of the call's first token.
    skipped : int
        Tokens of the caller's arrays before the checked ones, which are added to indices in errors.
    """

    watch: Any
    mark: Mark
    first: int = 0
    skipped: int = 0


class Call:
    """The arguments of a public function.

    Parameters
    ----------
    arrays, options : str
        Names of its arguments, arrays first.
    written : str
        Names of the arrays that it writes to.
    late : bool
        Whether it may raise late errors: for NaN and infinity that a kernel found in rows.
    """

    def __init__(self, arrays: str, options: str, written: str = "", late: bool = False) -> None:
        self.arrays, self.options = arrays.split(), options.split()
        self.written = frozenset(self.arrays.index(name) for name in written.split())
        self.late = late
        #: Index of the option that checks values first, which waits for the device; None if there is none.
        self.validate = self.options.index("validate") if "validate" in self.options else None

    def named(self, arrays: tuple[Any, ...], options: tuple[Any, ...]) -> dict[str, Any]:
        """Return arguments by name."""
        return dict(zip((*self.arrays, *self.options), (*arrays, *options), strict=True))
