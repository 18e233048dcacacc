"""Budgets on the whole: code lines of each room, private names used across files, ancestors, the public surface.

`ratchet.json` has them; `tools/weigh.py` counts. ``python tests/test_ratchet.py`` lowers budgets to what is there, and
with ``--raise`` raises them, too: whoever does that says in the commit what it bought. How long a file or a function
is, and how many parameters it has, is for reviewers to judge.
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "ratchet.json"
#: Lines that must be equal, docstrings and signatures included, to count as repeated; imports do not count.
REPEATED = 8
#: Budgets of lines are multiples of this, so that small changes do not meet in the list.
STEP = 20


def weigh_module():
    """`tools/weigh.py`, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("weigh", ROOT / "tools" / "weigh.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def repeated_lines() -> int:
    """Lines of numkv that stand elsewhere in it too, by pylint's measure."""
    from pylint.checkers.symilar import Symilar

    check = Symilar(REPEATED, ignore_imports=True)
    for path in sorted((ROOT / "numkv").rglob("*.py")):
        with path.open(encoding="utf-8") as stream:
            check.append_stream(str(path), stream)
    return sum(lines * (len(places) - 1) for lines, places in check._compute_sims())


def weights() -> dict[str, int]:
    """What is bounded, and how much of it there is; rooms by their names."""
    weigh = weigh_module()
    rooms = {
        f"code lines of {room or 'numkv itself'}": n for room, n in weigh.lines_by_room().items()
    }
    return {**dict(sorted(rooms.items())), **weigh.weigh()}


def budget_for(name: str, number: int) -> int:
    """The least budget that a number keeps."""
    return -(-number // STEP) * STEP if name.startswith("code lines") else number


def test_budgets_are_kept_and_follow_what_has_shrunk():
    budgets, now = json.loads(LIST.read_text()), weights()
    del budgets["repeated lines"]
    assert budgets.keys() == now.keys(), (
        "python tests/test_ratchet.py writes the list of rooms anew"
    )
    above = {
        name: (number, budgets[name]) for name, number in now.items() if number > budgets[name]
    }
    assert not above, "what a budget is raised for is said in the commit"
    # Two steps of room, so that not every commit changes the list.
    room = {name: 2 * STEP if name.startswith("code lines") else 0 for name in now}
    below = {
        name: (number, budgets[name])
        for name, number in now.items()
        if budget_for(name, number) + room[name] < budgets[name]
    }
    assert not below, "python tests/test_ratchet.py lowers budgets"


@pytest.mark.nightly
def test_no_more_lines_are_repeated():
    assert repeated_lines() == json.loads(LIST.read_text())["repeated lines"]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("x = 1\n", 1),
        ('"""A docstring."""\n# a comment\n\nx = (\n    1\n)\n', 3),
        ('def f():\n    """Of f."""\n    return """no\ndocstring"""\n', 3),
        ("class C:\n    '''Two\n    lines.'''\n\n    y = 2  # and a comment\n", 2),
    ],
)
def test_code_lines(text, lines):
    assert len(weigh_module().code_lines(text)) == lines


def test_private_names_and_ancestors(tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "a.py").write_text(
        "class A:\n    def f(self):\n        self._x = 1\n        return self._y\n"
    )
    (tmp_path / "room" / "b.py").write_text(
        "class B(A):\n    def g(self, other):\n        return other._x + other._x + self._x + other._mine()\n"
        "    def _mine(self): ...\nclass C(B): ...\nclass E(Exception): ...\nclass F(E): ...\n"
    )
    weigh = weigh_module()
    assert [name for _, _, name in weigh.private_uses(tmp_path)] == ["_x", "_x"]
    known = weigh.classes(tmp_path)
    assert weigh.ancestors("C", known) == {"A", "B"}
    assert weigh.ancestors("F", known) == set()
    assert weigh.lines_by_room(tmp_path) == {"": 4, "room": 7}


def main() -> None:
    """Write budgets anew: lower ones, and higher ones where that is asked for."""
    budgets = json.loads(LIST.read_text())
    now = {**weights(), "repeated lines": repeated_lines()}
    made = {}
    for name, number in now.items():
        least, old = budget_for(name, number), budgets.get(name)
        made[name] = least if old is None or "--raise" in sys.argv else min(least, old)
    LIST.write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main()
