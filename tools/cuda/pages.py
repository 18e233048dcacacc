"""Pages of the instruments under ``perf/results``: the command, the machine, versions, and tables."""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

__all__ = ["table", "versions", "write"]

PACKAGES = (
    "numba", "numba-cuda", "cuda-core", "cuda-bindings", "nvidia-nvvm", "nvidia-nvjitlink", "llvmlite", "numpy",
)  # fmt: skip


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Return a Markdown table; see `numkv.cli.output.markdown_table`."""
    from numkv.cli.output import markdown_table  # not before a stub driver is loaded

    return markdown_table(heads, rows, left)


def versions() -> str:
    """Return the versions of the installed packages that decide the machine code."""
    from numkv.cli.output import version_of

    found = {name: version_of(name) for name in PACKAGES}
    return ", ".join(f"{name} {version}" for name, version in found.items() if version)


def commit() -> str:
    """Return the commit of this tree, with a plus if files differ from it."""
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


def write(path: Path, title: str, about: str, *parts: str) -> None:
    """Write a page: title, date and machine, subject, and tables."""
    from numkv.cli.output import cpu_name

    today = datetime.datetime.now(datetime.UTC).date()
    where = f"{today}, commit {commit()}, {cpu_name()}, Python {platform.python_version()}. {versions()}."
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join([f"# {title}", where, about.strip(), *parts]) + "\n")
