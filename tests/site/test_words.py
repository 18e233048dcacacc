"""The pages' language: width of code, length of sentences, and words that readers stumble over.

The rules are those of CONTRIBUTING.md under "Words". Each is proved by a line that breaks it.
"""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
from walked import each

import numkv

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
COLUMNS, WORDS = 84, 30
SOURCES = sorted((ROOT / "numkv").rglob("*.py"))

FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```[^\n]*$", re.M | re.S)
#: A pattern, and what to write in its place.
FORBIDDEN = {
    r"\b(?:[Nn]obody|[Nn]o one)\b": "the positive form: `no call blocks`, `is ignored`",
    r"(?:^|[.:;,] )[Ww]ho (?!should\b|reads this\b)": "the caller, a reader thread, the cache",
    r"\btold so\b|\b(?:is|are) told\b": "is reported",
    r"\bwhat (?:is left|there is|has been)\b": "the rest, the contents",
    r"\b(?:take|takes|taken|took|taking) apart\b": "unpack",
    r"\b(?:take|takes|taken|took|taking) over\b": "reuse, accept",
    r"\bput down\b": "record",
    r"\bshort way\b": "fast path",
    r"\bbinds\b": "is the bottleneck",
    r"\bmend(?:s|ed|ing)?\b": "repair",
    r"\bhand(?:s|ed)? in\b": "pass",
    r"\bgo(?:es)? behind\b": "is evicted after",
    r"\b(?:is|are) gone\b": "is missing, was removed",
    r"\blook(?:s|ed)? (?:at|into)\b": "read, check; a table lookup",
    r"\bbrought to the disk\b": "fsynced",
    r"\balike\b": "equal, of one shape",
    r"\bspeaks?(?: for)?\b": "covers, decides",
    r"\bbeside\b": "compared with, in addition to, next to",
    r"\btakes 0\.\d+ of\b": "one direction: `1.2x faster`, `4 % slower`",
}


def without_code(text):
    """The text with code blocks and comments blank, lines where they were."""
    blank = re.sub(FENCE, lambda m: "\n" * m[0].count("\n"), text)
    return re.sub(r"<!--.*?-->", lambda m: "\n" * m[0].count("\n"), blank, flags=re.S)


def wide_lines(text):
    """Lines of code that do not fit; drawings, in blocks without a language, scroll."""
    blocks = [m for m in FENCE.finditer(text) if m["language"]]
    return [line for m in blocks for line in m["code"].splitlines() if len(line) > COLUMNS]


def sentences(text):
    """Sentences of the prose, in words; tables and headings are none."""
    lines = ["" if re.match(r"\s*\||#", x) else x for x in without_code(text).splitlines()]
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines)):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
        plain = re.sub(r"`[^`]*`", "Code", plain).replace("*", "")
        yield from re.split(r"(?<=[.!?])\s+(?=[A-Z\d(])", " ".join(plain.split()))


def long_sentences(text):
    return [x for x in sentences(text) if len(re.findall(r"\w[\w'’-]*", x)) > WORDS]


def prose(docstring):
    """A docstring's sentences: tables, code, drawings, headings and names of parameters are blank lines."""
    kept, code, in_table, in_section = [], -1, False, False
    lines = inspect.cleandoc(docstring).replace("``", "`").splitlines()
    rules = sum(bool(re.match(r"=+( +=+)+$", line)) for line in lines)
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        indent, is_rule = len(line) - len(line.lstrip()), re.match(r"=+( +=+)+$", line)
        if is_rule:
            rules -= 1
            in_table = rules % 3 > 0
        heads = bool(re.match(r"-{3,}$", after))
        in_section = in_section or heads
        if line and indent <= code:
            code = -1
        is_code = code >= 0 or re.match(r"\s*(?:>>>|\.\.\.) ?", line)
        names = in_section and indent == 0
        blank = is_rule or in_table or heads or is_code or names or re.match(r"-{3,}$", line)
        kept.append("" if blank else line.replace("::", ":") if line.endswith("::") else line)
        if code < 0 and line.endswith("::"):
            code = indent
    return "\n".join(kept)


def docstrings_of(source):
    nodes = ast.walk(ast.parse(source))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [text for x in nodes if isinstance(x, kinds) and (text := ast.get_docstring(x))]


def forbidden(text):
    plain = re.sub(r"`[^`\n]*`", "code", without_code(text))
    plain = re.sub(r"\]\([^)]*\)", "]", plain)
    return [
        f"line {number}: {found[0]!r}: write {instead}"
        for number, line in enumerate(plain.splitlines(), 1)
        for pattern, instead in FORBIDDEN.items()
        for found in re.finditer(pattern, line)
    ]


@each("page", PAGES)
def test_code_fits_a_narrow_window(page):
    assert wide_lines(page.read_text()) == [], page


@each("page", PAGES)
def test_sentences_are_short(page):
    assert long_sentences(page.read_text()) == [], page


@each("source", SOURCES)
def test_sentences_of_docstrings_are_short(source):
    assert [x for d in docstrings_of(source.read_text()) for x in long_sentences(prose(d))] == [], (
        source
    )


@each("page", PAGES)
def test_words_are_the_fields(page):
    assert forbidden(page.read_text()) == [], page


def docstrings():
    """Those of the public names, by name; inherited ones once."""
    found, rooms = {}, ["blocks", "compaction", "device", "files", "planning", "sparse", "store"]
    for module in [numkv, *(importlib.import_module(f"numkv.{room}") for room in rooms)]:
        found[module.__name__] = module.__doc__
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            found.setdefault(f"{module.__name__}.{name}", inspect.getdoc(value))
            if isinstance(value, type):
                for key in (key for key in dir(value) if not key.startswith("_")):
                    of = getattr(value, key)
                    if inspect.isroutine(of) or isinstance(of, property):
                        found[f"{module.__name__}.{name}.{key}"] = inspect.getdoc(of)
    return {name: text for name, text in found.items() if text}


def test_words_of_public_docstrings_are_the_fields():
    texts = docstrings()
    assert len(texts) > 400
    assert {n: bad for n, text in texts.items() if (bad := forbidden(text))} == {}


def test_a_wide_line_is_found():
    line = "x = 1  # " + "x" * COLUMNS
    assert wide_lines(f"```python\n{line}\n```\n") == [line]
    assert wide_lines(f"```text\n{line}\n```\n") == [line]
    assert wide_lines(f"{line}\n\n```\n{line}\n```\n") == []


@pytest.mark.parametrize("before", ["", "- ", "A short one. "])
def test_a_long_sentence_is_found(before):
    sentence = " ".join(["It", *["goes"] * 29, "on."])
    assert long_sentences(f"{before}{sentence}\n") != []
    assert long_sentences(f"{before}{sentence}\n".replace("It goes", "It")) == []
    assert long_sentences(f"```text\n{sentence}\n```\n| {sentence} |\n# {sentence}\n") == []


LONG_SENTENCE = " ".join(["It", *["goes"] * 29, "on."])
DOCSTRING = f"""A short one.

=====  ======
name   {LONG_SENTENCE}
=====  ======
`x`    {LONG_SENTENCE}
=====  ======

Code::

    {LONG_SENTENCE}

Parameters
----------
x : a kind that {LONG_SENTENCE}
    A short one.

Examples
--------
>>> {LONG_SENTENCE}
"""


def test_a_long_sentence_of_a_docstring_is_found():
    assert long_sentences(prose(DOCSTRING)) == []
    for old, new in {
        "A short one.\n\n=": f"{LONG_SENTENCE}\n\n=", "Code::\n": f"Code::\n\n    x\n\n{LONG_SENTENCE}\n\nMore::\n",
        "    A short one.\n\nE": f"    {LONG_SENTENCE}\n\nE", "Parameters": f"{LONG_SENTENCE}\n\nParameters",
    }.items():  # fmt: skip
        assert len(long_sentences(prose(DOCSTRING.replace(old, new)))) == 1, old


EXAMPLES = [
    "Nobody waits.", "Who sends more waits.", "Each is told so.", "It writes what is left.",
    "Codes are taken apart.", "It takes over blocks.", "It is put down.", "The short way is quicker.",
    "Arithmetic binds here.", "It mends files.", "What you hand in is read.", "It goes behind others.",
    "The block is gone.", "It looks into a table.", "It was brought to the disk.", "Layers are alike.",
    "The highest bound speaks for it.", "Readers beside a writer.", "It takes 0.96 of the time.",
]  # fmt: skip


def test_each_word_is_found():
    assert len(EXAMPLES) == len(FORBIDDEN)
    for example, pattern in zip(EXAMPLES, FORBIDDEN, strict=True):
        assert re.search(pattern, example), example
        assert forbidden(f"Good.\n{example}\n"), example
        assert not forbidden(f"Good.\n`{example}`\n\n```text\n{example}\n```\n"), example
