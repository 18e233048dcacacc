"""Hooks of mkdocs for the site (`hooks` of mkdocs.yml), and functions for tests of its pages.

Pages in ``docs/`` are also read on a code forge, so links are those between files of the repository. On the site, files
outside of ``docs/`` get addresses: pages of measurements under ``results/``, other pages at the top, other files under
``source/``. Four comments are replaced by text:

``<!-- code: PATH -->``, ``<!-- code: PATH NAME -->``
    A file of the repository, or a function or class in it.
``<!-- figures -->``
    All pages of measurements, with their pictures.
``<!-- machines -->``
    The races of all processors, side by side.
``<!-- python -->``
    Nothing; a separate test runs the blocks of such a page.

On API pages, names and pages in docstrings become links.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "address", "expand", "links", "on_files", "on_page_content", "on_page_markdown", "pages", "source_of",
]  # fmt: skip

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^(```.*?^```[^\n]*$)", re.M | re.S)
_NAME = re.compile(r"<code>(?:numkv\.)?(\w+(?:\.\w+)*)</code>")
_MENTIONED = re.compile(r"(?<![\w/])docs/([\w/]+)\.md")
_COMMENT = re.compile(r"^<!-- (code|figures|machines)(?:: (\S+)(?: (\S+))?)? -->$", re.M)


# Kinds in a race's first table.
_KINDS = ("fp32", "fp16", "bf16", "int8", "int4")


def pages() -> list[Path]:
    """Return all pages of the site: those in ``docs/``, and all pages that these link to."""
    found = sorted((ROOT / "docs").rglob("*.md")) + sorted((ROOT / "perf/results").glob("*.md"))
    for page in found:  # grows meanwhile
        for target, _ in links(page):
            path = _within(page, target)
            if path is not None and path.suffix == ".md" and path.is_file() and path not in found:
                found.append(path)
    return found


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Yield targets and anchors of a page's links to files, without code and links to the web."""
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", expand(page.read_text(encoding="utf-8"))))
    for link in _LINK.findall(text):
        target, _, anchor = link.partition("#")
        if not re.match(r"[a-z]+:", link):
            yield target, anchor


def _within(page: Path, target: str) -> Path | None:
    """Return the file of a page's link; None for a link without a path."""
    return Path(posixpath.normpath((page.parent / target).as_posix())) if target else None


def address(path: Path) -> str:
    """Return the address of a file on the site, such as ``results/2026-11-27-accuracy.md``."""
    inside = path.relative_to(ROOT).as_posix()
    if inside.startswith("docs/"):
        return inside.removeprefix("docs/")
    if inside.startswith("perf/results/"):
        return inside.removeprefix("perf/")
    if path.suffix == ".md":
        return (
            inside.removesuffix("/README.md").removesuffix(".md").lower().replace("/", "_") + ".md"
        )
    return f"source/{inside}"


def source_of(path: str, name: str | None = None) -> str:
    """Return the text of a file, or of one function or class in it with its decorators.

    Parameters
    ----------
    path : str
        The file, from the repository's root.
    name : str, optional
        A name at the top of the module.

    Returns
    -------
    str

    Raises
    ------
    LookupError
        If there is no such file or name.
    """
    file = ROOT / path
    if not file.is_file():
        raise LookupError(f"<!-- code: {path} -->: there is no such file")
    text = file.read_text(encoding="utf-8")
    if name is None:
        return text
    for node in ast.parse(text).body:
        if getattr(node, "name", None) == name and isinstance(
            node, (ast.FunctionDef, ast.ClassDef)
        ):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno]) + "\n"
    raise LookupError(f"<!-- code: {path} {name} -->: there is no such function or class")


def expand(text: str) -> str:
    """Replace comments by code and figures."""
    tables = {"figures": _figures, "machines": _machines}
    return _COMMENT.sub(lambda m: tables[m[1]]() if m[1] in tables else _code(m[2], m[3]), text)


def _code(path: str, name: str | None) -> str:
    return f'```py title="{path}"\n{source_of(path, name)}```'


def _figures() -> str:
    """List pages of measurements, the newest first: those with a picture, then the others."""
    drawn, plain, titles = ["## Pictures\n"], ["\n## Other pages\n"], set()
    for page in sorted((ROOT / "perf/results").glob("*.md"), reverse=True):
        text = page.read_text(encoding="utf-8")
        title = re.sub(r"^\d{4}-\d\d-\d\d: ", "", text.splitlines()[0].removeprefix("# "))
        if title in titles:  # several pages of one race
            title += f" ({page.stem[11:].rpartition('-peers')[2].strip('-') or 'peers'})"
        titles.add(title)
        link = f"](../perf/results/{page.name})"
        picture = re.search(r"!\[([^\]]*)\]\(([^)]+)\)", text)
        if picture is None:
            plain.append(f"- {page.name[:10]}: [{title}{link}")
            continue
        drawn.append(f"### {title}\n\n![{picture[1]}](../perf/results/{picture[2]})\n")
        drawn.append(f"[{page.name[:10]}: all numbers, and how they were measured{link}\n")
    return "\n".join([*drawn, *plain])


def _machines() -> str:
    """Return a table of the newest race of each processor: numkv's share of the bandwidth and its speed."""
    races = dict[str, tuple[str, dict[str, list[str]]]]()
    # A further race of a day has a number in its name, and replaces the earlier ones.
    for page in sorted((ROOT / "perf/results").glob("*-peers*.md"), key=lambda x: x.stem):
        text = page.read_text(encoding="utf-8")
        rows = re.findall(r"^\| (\w+: [^|]+) \| (\d[^|]*\|.*) \|$", text, re.M)
        cells = {name: [x.strip() for x in rest.split("|")] for name, rest in rows}
        summary = {name: found for name, found in cells.items() if len(found) == 2 * len(_KINDS)}
        if summary:
            machine = re.sub(r"^\d{4}-\d\d-\d\d-|-peers(-\d+)?$", "", page.stem)
            races[machine] = f"[{machine}, {page.name[:10]}](../perf/results/{page.name})", summary
    titles = [title for title, _ in races.values()]
    lines = [f"| shape | kind | {' | '.join(titles)} |", f"|---|---|{'---|' * len(titles)}"]
    for shape in dict.fromkeys(name for _, found in races.values() for name in found):
        for i, kind in enumerate(_KINDS):
            some = [found.get(shape) for _, found in races.values()]
            cells_of = [f"{x[2 * i]}, × {x[2 * i + 1]}" if x else "–" for x in some]
            lines.append(f"| {shape} | {kind} | {' | '.join(cells_of)} |")
    return "\n".join(lines)


# ---------------------------------------------------------------- hooks of mkdocs


def on_files(files: Any, config: Any) -> Any:
    """Add pages and files from outside of ``docs/``."""
    from mkdocs.structure.files import File

    outside = {p for p in pages() if not p.is_relative_to(ROOT / "docs")}
    for page in pages():
        for target, _ in links(page):
            path = _within(page, target)
            if path is not None and path.is_file() and not path.is_relative_to(ROOT / "docs"):
                outside.add(path)
    for path in sorted(outside):
        files.append(File.generated(config, address(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Insert code and figures, and change links to addresses on the site."""
    here = Path(page.file.abs_src_path)
    base = posixpath.dirname(address(here))

    def moved(match: re.Match[str]) -> str:
        target, sign, anchor = match[1].partition("#")
        path = None if re.match(r"[a-z]+:", match[1]) else _within(here, target)
        if path is None or not path.is_relative_to(ROOT):
            return match[0]
        return f"]({posixpath.relpath(address(path), base or '.')}{sign}{anchor})"

    parts = _FENCE.split(expand(markdown))
    return "".join(part if i % 2 else _LINK.sub(moved, part) for i, part in enumerate(parts))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Link names and pages in docstrings on API pages."""
    if not page.file.src_uri.startswith("api/"):
        return html
    of_classes = {name.rpartition(".")[2]: name for name in _documented()}

    def to_name(match: re.Match[str]) -> str:
        first, _, member = match[1].partition(".")
        full = f"numkv.{match[1]}" if match[0][6:].startswith("numkv.") else match[1]
        if full != match[1] or (first[0].isupper() and first in of_classes):
            if first in of_classes:
                full = of_classes[first] + (f".{member}" if member else "")
            return f'<autoref identifier="{full}" optional>{match[0]}</autoref>'
        return match[0]

    def to_page(match: re.Match[str]) -> str:
        path = ROOT / "docs" / f"{match[1]}.md"
        if not path.is_file():
            return match[0]
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        return f'<a href="../{match[1]}.html">{title}</a>'

    return _MENTIONED.sub(to_page, _NAME.sub(to_name, html)).replace(
        '<span class="o">=...</span>', '<span class="o">=</span><span class="kc">None</span>'
    )


def _documented() -> Iterator[str]:
    """Yield the names on API pages."""
    for path in (ROOT / "docs/api").glob("*.md"):
        yield from re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), re.M)
