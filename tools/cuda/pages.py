"""Pages under ``perf/results`` that the instruments write: what was run, on what, with which versions, and tables."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

__all__ = ["table", "versions", "write"]

PACKAGES = (
    "numba", "numba-cuda", "cuda-core", "cuda-bindings", "nvidia-nvvm", "nvidia-nvjitlink", "llvmlite", "numpy",
)  # fmt: skip


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """A Markdown table, its numbers on the right.

    Parameters
    ----------
    heads : sequence of str
        Names of the columns.
    rows : sequence of sequences of str
        As long as `heads`.
    left : collection of int
        Columns that are words.
    """
    rule = [("---" if i in left else "--:") for i in range(len(heads))]
    return "\n".join(
        "| " + " | ".join(cells) + " |" for cells in [list(heads), rule, *map(list, rows)]
    )


def versions() -> str:
    """The packages that decide what machine code comes out, as far as they are installed."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def commit() -> str:
    """The commit of this tree; with a plus where files differ from it."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def processor() -> str:
    """The CPU's name."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = [
        line.partition(":")[2].strip()
        for line in text.splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()


def write(path: Path, title: str, about: str, *parts: str) -> None:
    """Write a page: the title, where and when it was made, what it is about, and its tables."""
    today = datetime.datetime.now(datetime.UTC).date()
    where = f"{today}, commit {commit()}, {processor()}, Python {platform.python_version()}. {versions()}."
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join([f"# {title}", where, about.strip(), *parts]) + "\n")
