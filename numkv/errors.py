"""Every error that numkv raises on purpose, apart from the builtin ``IndexError`` and ``ValueError``.

All of them are raised before anything is changed: after an error, an object is what it was before the call.
"""

from __future__ import annotations

__all__ = [
    "CacheFull",
    "DimensionMismatch",
    "NonFiniteInput",
    "NotSupported",
    "NumkvError",
    "UnsupportedDType",
]


class NumkvError(Exception):
    """Base of all errors of numkv."""


class DimensionMismatch(NumkvError, ValueError):
    """A shape, a length or a count differs from the one expected.

    Attributes
    ----------
    expected, actual : object
        The shape or number that was expected, and the one that came.
    """

    def __init__(self, message: str, expected: object = None, actual: object = None) -> None:
        super().__init__(message)
        self.expected = expected
        self.actual = actual


class NonFiniteInput(NumkvError, ValueError):
    """An input to quantise contains NaN or infinity.

    Attributes
    ----------
    index : int or tuple of int
        Position of the first bad element.
    """

    def __init__(self, message: str, index: object = None) -> None:
        super().__init__(message)
        self.index = index


class UnsupportedDType(NumkvError, TypeError):
    """The operation does not accept an array's dtype, or a storage kind."""


class CacheFull(NumkvError):
    """There is no room for the tokens; nothing was written."""


class NotSupported(NumkvError):
    """The operation is not possible on this object, target or array."""
