"""Options of commands: a line each, whose errors say what was expected."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

from numkv.errors import NumkvError

T = TypeVar("T")


def checked(convert: Callable[[str], T], what: str) -> Callable[[str], T]:
    """An argparse type whose error says what was expected."""

    def check(text: str) -> T:
        try:
            return convert(text)
        except NumkvError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}") from None

    return check


def at_least(smallest: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        number = int(text.replace(",", "").replace("_", ""))
        if number < smallest:
            raise ValueError(text)
        return number

    return checked(convert, f"an integer of {smallest} or more")


def option(
    parser: Any, name: str, meaning: str, of: Any = None, metavar: str | None = None, *,
    default: Any = None, **more: Any,
) -> None:  # fmt: skip
    """Add an option, whose help ends with its default if there is one."""
    if of is not None:
        more["type"] = of
    if metavar is not None:
        more["metavar"] = metavar
    if default is not None and "(default: " not in meaning:
        meaning += " (default: %(default)s)"
    parser.add_argument(name, default=default, help=meaning, **more)


def flag(parser: Any, name: str, meaning: str) -> None:
    """Add an option that is there or not."""
    parser.add_argument(name, action="store_true", help=meaning)
