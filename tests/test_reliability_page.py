"""`docs/reliability.md` names commands that can be run: their files, modules, options and tests exist."""

import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "reliability.md").read_text()
#: What stands in a row whose figure is still to come; such a row is not looked at.
OPEN = "**to fill in**"


def commands_in(text):
    """Commands of the page's tables."""
    rows = [line for line in text.splitlines() if line.startswith("|") and OPEN not in line]
    return [c for row in rows for c in re.findall(r"`(python [^`]*)`", row)]


COMMANDS = commands_in(PAGE)


def test_there_are_commands():
    assert len(COMMANDS) >= 10
    assert len(set(COMMANDS)) == len(COMMANDS)
    assert commands_in(f"| a | `python x.py` |\n| {OPEN} | `python y.py` |\n`python z.py`") == [
        "python x.py"
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_what_exists(command):
    """Scripts by path, modules by ``-m``; of pytest the files, and tests of the words behind ``-k``."""
    words = shlex.split(command)[1:]
    if words[0] != "-m":
        assert (ROOT / words[0]).is_file()
        check_options(words[0], words[1:])
        return
    if words[1] != "pytest":
        place = ROOT.joinpath(*words[1].split("."))
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file()
        return
    files = [ROOT / word for word in words[2:] if word.endswith(".py")]
    assert files
    assert all(path.is_file() for path in files)
    if "-k" in words:
        text = "\n".join(
            re.findall(r"^def (test_\w+)", "\n".join(p.read_text() for p in files), re.M)
        )
        wanted = words[words.index("-k") + 1].split(" or ")
        assert all(word in text for word in wanted)
    if "--nightly" in words:
        assert any("pytest.mark.nightly" in path.read_text() for path in files)


def check_options(script, words):
    """Every option is in the script."""
    source = (ROOT / script).read_text()
    for word in words:
        if word.startswith("--"):
            assert f'"{word}"' in source


def test_files_that_are_named_exist():
    open_rows = [line for line in PAGE.splitlines() if OPEN not in line]
    named = set(re.findall(r"`((?:tests|tools|docs)/[\w/]+\.(?:py|md))`", "\n".join(open_rows)))
    assert named
    assert all((ROOT / name).is_file() for name in named)


def test_what_is_seen_is_within_what_is_promised():
    """The table of chunks, which `tests/reliability/test_prefill_in_chunks.py` holds, too."""
    sys.path.insert(0, str(ROOT / "tests" / "reliability"))
    try:
        from test_prefill_in_chunks import APART
    finally:
        sys.path.pop(0)
    rows = re.findall(r"^\| ((?:fp|bf|int|code)[\w, ]+) \| (\S+) \| (\S+) \|$", PAGE, re.M)
    found = {
        kind: (float(promised), float(seen))
        for kinds, promised, seen in rows
        for kind in kinds.split(", ")
    }
    assert {kind: promised for kind, (promised, _) in found.items()} == APART
    assert all(seen < promised for promised, seen in found.values())
