"""What a target needs to know of a public function that it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numkv.errors import NonFiniteInput

#: What notes that a kernel has found a token's rows to be NaN or infinite: by the token's number, the error, and which
#: of its object's calls it was.
Mark = Callable[[int, NonFiniteInput, int], None]


class Marker(NamedTuple):
    """Whom to tell of a call's rows that a kernel finds to be NaN or infinite.

    Attributes
    ----------
    watch : object
        What the object has from `numkv.targets.base.Target.new_watch`.
    mark : function
        Takes it.
    first : int
        Number of the call's first token.
    skipped : int
        Tokens of the arrays that the caller passed before those that are looked at, which come back in indices.
    """

    watch: Any
    mark: Mark
    first: int = 0
    skipped: int = 0


class Call:
    """A public function, and what it is called with.

    Parameters
    ----------
    arrays, options : str
        Names of its arguments, arrays first.
    written : str
        Which of the arrays it writes to.
    late : bool
        Whether it writes rows in which a kernel may find NaN and infinity, which then is said here.
    """

    def __init__(self, arrays: str, options: str, written: str = "", late: bool = False) -> None:
        self.arrays, self.options = arrays.split(), options.split()
        self.written = frozenset(self.arrays.index(name) for name in written.split())
        self.late = late
        #: Where among the options it says whether to look at values first, which waits; None if it never does.
        self.validate = self.options.index("validate") if "validate" in self.options else None
