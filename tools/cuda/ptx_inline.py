"""Inlining of functions in PTX text, such as ``pow`` of float64, which NVVM does not inline.

Arguments must be whole words; anything else is an error.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["inlined"]

FUNCTION = re.compile(
    r"\.func\s*(?:\(\s*\.param\s+\.\w+\s+(?P<result>[\w$]+)\s*\))?\s*(?P<name>[\w$]+)\s*\((?P<params>[^)]*)\)[^{;]*\{"
)
CALL = re.compile(
    r"call(?:\.uni)?\s*(?:\(\s*(?P<result>[\w$]+)\s*\)\s*,)?\s*(?P<name>[\w$]+)\s*,\s*\((?P<args>[^)]*)\)\s*;"
)


class _Function(NamedTuple):
    params: list[str]
    result: str
    body: str


def _end(text: str, start: int) -> int:
    """Return the position after the closing brace of the brace before `start`."""
    depth = 1
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return at
    raise ValueError("a brace is not closed")


def _functions(text: str) -> dict[str, _Function]:
    found = {}
    for match in FUNCTION.finditer(text):
        params = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.\w+\s+([\w$]+)", match["params"])
        body = text[match.end() : _end(text, match.end())]
        found[match["name"]] = _Function(params, match["result"] or "", body)
    return found


def inlined(text: str, entry: str) -> str:
    """Return the body of an entry with all calls inlined.

    Parameters
    ----------
    text : str
        The module, without comments.
    entry : str
        The text between the entry's braces.

    Raises
    ------
    ValueError
        If the module lacks a called function, or an argument is not a whole word.
    """
    functions, number = _functions(text), 0
    while match := CALL.search(entry):
        if match["name"] not in functions:
            raise ValueError(f"unknown function: {match['name']}")
        function = functions[match["name"]]
        start = entry.rindex("{", 0, match.start())
        end = _end(entry, start + 1)
        before, after = entry[start + 1 : match.start()], entry[match.end() : end]
        args = [a.strip() for a in match["args"].split(",") if a.strip()]
        names = dict(zip(args, function.params, strict=True))
        if match["result"]:
            names[match["result"]] = function.result
        places = {inner: f"%passed{number}_{inner}" for inner in names.values()}
        outer = {name: places[inner] for name, inner in names.items()}
        declared = re.findall(r"\.param\s+\.b(\d+)\s+([\w$]+)\s*;", before)
        if {name for _, name in declared} != set(names):
            raise ValueError(f"only words are passed: {before[:200]}")
        registers = "".join(f".reg .b{bits} {outer[name]};\n" for bits, name in declared)
        before = re.sub(r"\.(?:param|reg)\s[^;]*;", "", before)
        body = _renamed(function.body, number)
        body = _moves(re.sub(r"\bret\s*;", f"bra $returned{number};", body), places)
        entry = "".join([
            entry[:start], registers, _moves(before, outer), body, f"\n$returned{number}:\n", _moves(after, outer),
            entry[end + 1 :],
        ])  # fmt: skip
        number += 1
    return entry


def _renamed(body: str, number: int) -> str:
    """Rename a function's registers and labels, so that they are unique."""
    body = re.sub(r"%(?!n?tid\b|n?ctaid\b|laneid\b|warpid\b)(\w+)", rf"%in{number}_\1", body)
    labels = set(re.findall(r"(\$[\w$]+)\s*:", body))
    for label in sorted(labels, key=len, reverse=True):
        body = re.sub(re.escape(label) + r"\b", f"$in{number}_{label[1:]}", body)
    return body


def _moves(text: str, places: dict[str, str]) -> str:
    """Replace accesses to parameters by moves between registers."""
    for name, register in places.items():
        memory = rf"\[\s*{re.escape(name)}\s*(?:\+\s*0)?\s*\]"
        text = re.sub(
            rf"ld\.param\.(\w+)\s+(%[\w$]+)\s*,\s*{memory}", rf"mov.\1 \2, {register}", text
        )
        text = re.sub(
            rf"st\.param\.(\w+)\s+{memory}\s*,\s*(%?[\w$]+)", rf"mov.\1 {register}, \2", text
        )
    return text
