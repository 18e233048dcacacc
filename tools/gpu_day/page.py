"""Make a page of the results of `tools.gpu_day.day`: ``python -m tools.gpu_day.page FOLDER > page.md``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["page", "read"]


def read(folder: Path) -> list[dict[str, Any]]:
    """Read the results of all calls; skip a line that was cut off."""
    found = []
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def _time(what: Any) -> str:
    """Write a median with the middle half of the times, or why there is none."""
    return (
        f"{what[1]:,.1f} ({what[0]:,.1f} to {what[2]:,.1f})"
        if isinstance(what, list)
        else str(what or "")
    )


def _wrong(what: Any) -> str:
    """Say what was wrong: an error's text, or a line's error."""
    if isinstance(what, dict):
        return f"wrong: off by {what['off']:.1e}, expected at most {what['bound']:.0e}"
    return " ".join(str(what).split())


def _row(found: dict[str, Any], copy: float) -> list[str]:
    line, who, what = found["name"], found["worker"], found["what"]
    off = f"{what['off']:.1e}" if "off" in what else ""
    if not found["ok"]:
        return [line, who, _wrong(what), "", "", "", off]
    graph, eager = what.get("graph"), what.get("eager")
    best = graph if isinstance(graph, list) else eager
    seconds = 1e-6 * best[1] if isinstance(best, list) else 0.0
    part = what.get("bytes", 0) / seconds / copy if seconds and copy else 0.0
    rate = what.get("flops", 0) / seconds / 1e12 if seconds else 0.0
    shares = [f"{part:.0%}" if part else "", f"{rate:.0f}" if rate else ""]
    return [line, who, _time(eager), _time(graph), *shares, off]


def page(results: list[dict[str, Any]]) -> str:
    """Return the page as Markdown."""
    first: dict[str, Any] = {}
    for x in results:  # of a repeated call the last result stands
        first[f"{x['call']}/{x['worker']}/{x['name']}"] = x
    results = list(first.values())
    probe = {x["name"]: x["what"] for x in results if x["call"] == "probe"}
    device = probe.get("device") if isinstance(probe.get("device"), dict) else {}
    versions = probe.get("versions") if isinstance(probe.get("versions"), dict) else {}
    lines = [f"# numkv on {device.get('name', 'a device')}", ""]
    lines += [", ".join(f"{name} {version}" for name, version in versions.items()) + "."]
    lines += ["", "## Right", "", "| call | worker | right | not |", "| --- | --- | --: | --: |"]
    timed = [x for x in results if isinstance(x["what"], dict) and "eager" in x["what"]]
    checks = [x for x in results if x not in timed or not x["ok"]]
    for call, worker in dict.fromkeys((x["call"], x["worker"]) for x in checks):
        of = [x["ok"] for x in checks if (x["call"], x["worker"]) == (call, worker)]
        lines.append(f"| {call} | {worker} | {sum(of)} | {len(of) - sum(of)} |")
    wrong = [x for x in checks if not x["ok"]]
    if wrong:
        lines += ["", *(f"- {x['worker']}, {x['name']}: {_wrong(x['what'])}" for x in wrong)]
    copies = [x["what"]["bytes_per_second"] for x in results if x["name"] == "copy" and x["ok"]]
    copy = copies[0] if copies else 0.0
    if timed:
        lines += [
            "", "## Times", "",
            f"A copy within the device's memory reads and writes {copy / 1e9:,.0f} GB/s; shares are of that. TFLOP/s "
            "are given where arithmetic bounds a line. Microseconds of a call are by device events: median and middle "
            "half, over buffers that do not fit into L2. Shares are of calls that are replayed from a graph. The first "
            "call of attention is compared with float64: off is its relative L2 error. A line that is off by more than "
            "rounding explains is wrong, and has no times.", "",
            "| line | who | as called | graph | of copy | TFLOP/s | off |",
            "| --- | --- | --: | --: | --: | --: | --: |",
        ]  # fmt: skip
        rows = sorted(timed, key=lambda x: [y["name"] for y in timed].index(x["name"]))
        lines += ["| " + " | ".join(_row(x, copy)) + " |" for x in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page(read(Path(sys.argv[1]))))
