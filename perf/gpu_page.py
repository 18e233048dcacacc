"""What times on a GPU say: shares of its bandwidth, who is how fast beside whom, and the page; knows no GPU."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

__all__ = ["OURS", "Page", "Timing", "beside", "page", "picture", "share", "spread"]

OURS = "numkv"


@dataclass
class Timing:
    """A contestant of a line."""

    line: str  #: such as "decode A/bf16"
    contestant: str
    seconds: list[float] = field(default_factory=list)  #: of single calls, from device events
    bytes: int = 0  #: that have to be read or written
    flops: int = 0
    reason: str = ""  #: why it did not run

    @property
    def typical(self) -> float:
        """The median."""
        return median(self.seconds)


@dataclass
class Page:
    """Everything that a page says."""

    device: str
    copy: float  #: bytes that a copy within the device's memory reads and writes in a second
    timings: list[Timing]
    checks: list[tuple[str, str]]  #: what was checked, and what came of it
    versions: str = ""
    left_out: Sequence[str] = ()  #: for want of time
    minutes: float = 0.0


def share(timing: Timing, copy: float) -> float | None:
    """Of the measured copy bandwidth; None where nothing is said of bytes."""
    return (
        timing.bytes / timing.typical / copy if timing.bytes and timing.seconds and copy else None
    )


def spread(timing: Timing) -> float:
    """How far the middle half of the times reaches, relative to the median."""
    if len(timing.seconds) < 4:
        return 0.0
    low, _, high = quantiles(timing.seconds, n=4)
    return (high - low) / timing.typical


def beside(timings: Sequence[Timing], line: str) -> tuple[str, float] | None:
    """The fastest of the others in a line, and its time over numkv's; None where one of them did not run."""
    ran = [t for t in timings if t.line == line and t.seconds]
    ours = [t for t in ran if t.contestant.startswith(OURS)]
    others = [t for t in ran if not t.contestant.startswith(OURS)]
    if not ours or not others:
        return None
    best, mine = min(others, key=lambda t: t.typical), min(ours, key=lambda t: t.typical)
    return best.contestant, best.typical / mine.typical


def _cells(timing: Timing, copy: float) -> list[str]:
    if timing.reason:
        return ["", "", "", "", timing.reason]
    part = share(timing, copy)
    rate = f"{timing.flops / timing.typical / 1e12:.1f}" if timing.flops else ""
    return [
        f"{timing.typical * 1e6:,.1f}", f"{spread(timing):.0%}", "" if part is None else f"{part:.0%}", rate, "",
    ]  # fmt: skip


def page(what: Page) -> str:
    """The page, as Markdown."""
    today = datetime.datetime.now(datetime.UTC).date()
    lines = [
        f"# numkv on {what.device}", "",
        f"`python -m perf.gpu`, {today}, Python {platform.python_version()}, {what.minutes:.1f} minutes. "
        f"{what.versions}",
        "",
        f"A copy within the device's memory reads and writes {what.copy / 1e9:,.0f} GB/s; shares are of that. "
        "Times are medians of device events, over buffers that do not fit into L2. "
        "TFLOP/s are given where a line is bound by arithmetic.",
        "", "## Checks", "", "| what | result |", "| --- | --- |",
        *(f"| {name} | {result} |" for name, result in what.checks), "", "## Times", "",
        "| line | who | us | spread | of copy | TFLOP/s | |", "| --- | --- | --: | --: | --: | --: | --- |",
    ]  # fmt: skip
    lines += [
        "| " + " | ".join([t.line, t.contestant, *_cells(t, what.copy)]) + " |" for t in what.timings
    ]  # fmt: skip
    compared = [
        (line, beside(what.timings, line)) for line in dict.fromkeys(t.line for t in what.timings)
    ]
    compared = [(line, found) for line, found in compared if found]
    if compared:
        lines += [
            "",
            "## Beside the fastest of the others",
            "",
            "| line | who | its time / numkv's |",
            "| --- | --- | --: |",
        ]
        lines += [f"| {line} | {name} | {ratio:.2f} |" for line, (name, ratio) in compared]
    if what.left_out:
        lines += ["", f"Left out for want of time: {', '.join(what.left_out)}."]
    return "\n".join(lines) + "\n"


def picture(what: Page) -> str:
    """Bars of numkv's shares of the copy bandwidth, as SVG."""
    found = [
        (t.line, share(t, what.copy))
        for t in what.timings
        if t.contestant.startswith(OURS) and t.seconds
    ]
    bars = [(line, part) for line, part in found if part is not None]
    height, width, left = 22, 760, 300
    rows = []
    for i, (line, part) in enumerate(bars):
        y, long = 40 + i * height, min(part, 1.0) * (width - left - 70)
        rows.append(
            f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{line}</text>'
            f'<rect x="{left}" y="{y}" width="{long:.0f}" height="{height - 6}" fill="#4878a8"/>'
            f'<text x="{left + long + 6:.0f}" y="{y + 13}">{part:.0%}</text>'
        )
    top = f'<text x="{left}" y="22" font-weight="bold">Share of the copy bandwidth, {what.device}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{50 + len(bars) * height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>{top}'
        f"{''.join(rows)}</svg>\n"
    )
