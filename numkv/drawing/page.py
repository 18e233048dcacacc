"""Drawings as HTML, for notebooks: one piece without scripts, fonts or links, for light and dark pages."""

from __future__ import annotations

import html
from typing import TypeVar

from numkv.drawing.describe import picture_of
from numkv.drawing.picture import Picture, State
from numkv.keywords import explains

_C = TypeVar("_C")

_MOST_MARKS = 600
_MOST_SEQUENCES = 40
#: How much of a mark is filled, and its border, in the text's own colour: that is seen on any background.
_STYLES = {
    State.SHARED: "background:repeating-linear-gradient(45deg,currentColor 0 2px,transparent 2px 4px)",
    State.FULL: "background:currentColor",
    State.PART: "background:linear-gradient(0deg,currentColor 50%,transparent 50%)",
    State.EXACT: "background:currentColor;border-radius:50%",
    State.OTHER: "background:currentColor;opacity:.35",
    State.CACHED: "border-style:dashed;background:linear-gradient(currentColor,currentColor) center/3px 3px no-repeat",
    State.FREE: "opacity:.35",
}
_MARK = (
    "display:inline-block;box-sizing:border-box;width:12px;height:12px;margin:1px;vertical-align:middle;"
    "border:1px solid currentColor"
)
_LABEL = (
    "display:inline-block;box-sizing:border-box;width:14px;height:14px;margin:0 1px;vertical-align:middle;"
    "border:1px solid currentColor;font:10px/12px monospace;text-align:center"
)


def drawn(cls: type[_C]) -> type[_C]:
    """A class of what notebooks show as a drawing, and whose constructor says which argument was meant."""

    def draw(self: object) -> str:
        return page_of(picture_of(self))

    cls._repr_html_ = draw  # type: ignore[attr-defined]
    return explains(cls)


def page_of(picture: Picture) -> str:
    """Draw a picture.

    Parameters
    ----------
    picture : Picture
        What to draw.

    Returns
    -------
    str
        A ``<div>``.
    """
    return f'<div style="font-family:sans-serif;line-height:1.4">{_inner(picture)}</div>'


def _inner(picture: Picture) -> str:
    text = html.escape(", ".join(picture.facts))
    parts = [f"<div><b>{html.escape(picture.name)}</b>: {text}</div>"]
    for strip in picture.strips:
        each, marks = strip.marks(_MOST_MARKS)
        title = html.escape(strip.title + (f", each sign {each:,} of them" if each > 1 else ""))
        parts.append(f"<div>{title}</div><div>{''.join(_mark(*mark) for mark in marks)}</div>")
    if picture.lines:
        rows = "".join(
            f'<tr><td style="padding-right:1em">{html.escape(a)}</td><td>{html.escape(b)}</td></tr>'
            for a, b in picture.lines[:_MOST_SEQUENCES]
        )
        more = len(picture.lines) - _MOST_SEQUENCES
        rows += f"<tr><td></td><td>and {more:,} more</td></tr>" if more > 0 else ""
        parts.append(f'<table style="text-align:left">{rows}</table>')
    if states := picture.states():
        legend = " &nbsp; ".join(f"{_mark(s, '')} {html.escape(s.legend)}" for s in states)
        parts.append(f'<div style="font-size:85%">{legend}</div>')
    parts += [f'<div style="margin:.4em 0 0 1.2em">{_inner(part)}</div>' for part in picture.parts]
    return "".join(parts)


def _mark(state: State, label: str) -> str:
    """A small square; the state is its title too, for those who cannot tell patterns apart."""
    if label:
        return f'<span title="{html.escape(state.legend)}" style="{_LABEL}">{html.escape(label)}</span>'
    return f'<span title="{html.escape(state.legend)}" style="{_MARK};{_STYLES[state]}"></span>'
