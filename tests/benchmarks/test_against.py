"""What `python -m perf against` does beside measuring: turns, ratios, repeats, trees, tables. No clock matters."""

import os
import re
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from perf import against, calls, envs, worker, workers
from perf.against import Line, Run
from perf.peers import CALLS, CannotRun, Contestant


def line(*ratios, form="append", group=CALLS, **options):
    """A line with one run of one round for each ratio; the other tree takes 2 us."""
    runs = [Run([2e-6], [2e-6 * ratio]) for ratio in ratios]
    return Line(group, "", CALLS, form, runs, **options)


# ------------------------------------------------------------------ ratios


def test_ratios_are_formed_within_rounds():
    run = Run(other=[1.0, 2.0, 4.0], this=[1.0, 3.0, 8.0])
    assert run.ratios == [1, 1.5, 2]
    assert run.ratio == 1.5


def test_medians_over_runs():
    one = Line(CALLS, "", CALLS, "x", [Run([1.0, 1.0], [1.2, 1.4]), Run([2.0, 4.0], [2.0, 4.4])])
    assert one.ratio == pytest.approx((1.3 + 1.05) / 2)
    assert one.spread == pytest.approx(tuple(np.quantile([1.0, 1.1, 1.2, 1.4], [0.25, 0.75])))
    assert one.seconds("other") == 1.5
    assert one.seconds("this") == pytest.approx(1.7)


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([1.029], ""),
        ([0.972], ""),
        ([1.031], "SLOWER"),
        ([0.97], "faster"),
        ([1.1, 0.99, 1.0], "not confirmed"),
        ([1.1, 1.05, 1.0, 1.06], "SLOWER"),
    ],
)
def test_verdicts(ratios, said):
    one = line(*ratios)
    assert against.verdict(one) == said
    assert one.differs == (said in ("SLOWER", "faster"))
    assert one.slower == (said == "SLOWER")


def test_what_does_not_run_does_not_differ():
    assert not line().differs
    assert not line(2.0, reason="why").differs


# ------------------------------------------------------------------ turns


class Turns:
    """A contestant whose calls take `cost`, and who writes down whose turn it is."""

    def __init__(self, name, cost, order):
        self.name, self.cost, self.order = name, cost, order

    def turn(self, seconds):
        self.order.append(self.name)
        return [self.cost] * max(1, round(seconds / self.cost))


def turns(cost):
    order = []
    costs = {"this": 1.5 * cost, "other": cost}
    contestants = {name: Turns(name, of, order) for name, of in costs.items()}
    return against.in_turns(contestants, 1.2), order


def test_turns_alternate():
    run, order = turns(0.001)
    assert run.ratio == pytest.approx(1.5)
    assert order == ["other", "this", "this", "other"] * (against.ROUNDS // 2)


def test_slow_lines_have_fewer_rounds_in_both_orders():
    run, order = turns(5.0)
    assert len(run.this) == len(run.other) == against.FEWEST_ROUNDS
    assert against.FEWEST_ROUNDS % 2 == against.ROUNDS % 2 == 0
    assert order.count("this") == order.count("other")


def test_only_what_differs_is_repeated():
    ratios = {
        "same": iter([1.01]),
        "once": iter([1.1, 0.94]),  # then the median is 1.02
        "slower": iter([1.1, 1.2, 1.1, 1.0]),
        "broken": iter([]),
    }
    lines, measured, said = [line(form=form) for form in ratios], [], []

    def measure(some):
        measured.append([x.form for x in some])
        for x in some:
            ratio = next(ratios[x.form], None)
            if ratio is None:
                x.reason = "why"
            else:
                x.runs.append(Run([1.0], [ratio]))

    against.repeated(lines, 3, measure, said.append)
    assert measured == [list(ratios), ["once", "slower"], ["slower"], ["slower"]]
    assert said[0] == "\n2 beyond 3%, run 2 of at most 4:"
    assert [x.form for x in lines if x.differs] == ["slower"]


def test_runs_are_added_or_the_reason():
    quiet = lambda: SimpleNamespace(of_others=lambda: 0.02)  # noqa: E731
    one, said = line(), []
    made = {name: Turns(name, 1e-3, []) for name in ("this", "other")}
    against.add_run(one, lambda: made, 0.1, quiet, said.append)
    against.add_run(one, lambda: made, 0.1, quiet, said.append)
    assert (len(one.runs), one.ratio, one.others) == (2, 1, 0.02)
    assert said[0].split() == ["append", "1.000"]

    def refuse():
        raise CannotRun("this: why")

    against.add_run(one, refuse, 0.1, quiet, said.append)
    assert one.reason == "this: why"
    assert not one.ran


# ------------------------------------------------------------------ lines and tables


def test_lines():
    lines = against.every_line()
    names = [x.name for x in lines]
    assert len(set(names)) == len(names)
    assert {
        "A/int4",
        "G/code4",
        "F/bf16 paged by 128",
        "P/fp32",
        "KVCache.append fp16",
        "import",
    } <= set(names)
    assert {x.group for x in lines} == against.GROUPS.keys()
    assert sum(x.group == against.ATTENTION for x in lines) == 13 * 6 * 2 + 2
    picked = [x for x in names if re.search("^F/int8|^import$", x)]
    assert picked == ["F/int8", "F/int8 paged by 128", "import"]


def test_tables():
    slow = Line(against.ATTENTION, "A", "fp32", "", [Run([0.03, 0.02], [0.033, 0.024])])
    lines = [slow, line(1.0, form="x"), line(1.1, 0.9, form="y"), line(form="z", reason="why")]
    rows = against.lines_table(lines).splitlines()
    assert rows[0] == (
        "| line | other, µs | this, µs | this / other | middle half | runs | verdict |"
    )
    assert rows[2:] == [
        "| A/fp32 | 25,000 | 28,500 | 1.150 | 1.125 to 1.175 | 1 | SLOWER |",
        "| x | 2.00 | 2.00 | 1.000 | 1.000 to 1.000 | 1 |  |",
        "| y | 2.00 | 2.00 | 1.000 | 0.950 to 1.050 | 2 | not confirmed |",
        "| z | does not run: why |  |  |  |  |  |",
    ]
    assert len({row.count("|") for row in rows}) == 1


def test_geometric_means():
    lines = [line(2.0), line(0.5), line(reason="why"), line(1.1, group=against.STARTS)]
    assert against.means_table(lines).splitlines()[2:] == [
        "| one-token calls | 1.000 | 2 |",
        "| cold starts | 1.100 | 1 |",
        "| all | 1.032 | 3 |",
    ]


def test_conclusions():
    assert against.conclusions([line(1.0)]) == ["no line differs by more than 3%"]
    lines = [
        line(0.9, form="x", others=0.5),
        line(1.1, 1.2, form="y"),
        line(form="z", reason="why"),
    ]
    assert against.conclusions(lines) == [
        "SLOWER: y, 1.150 in the median of 2 runs",
        "faster: x, 0.900 in one run",
        "DOES NOT RUN: z: why",
        "OTHER PROCESSES USED UP TO 50% OF THE CORES in 1 of 3 lines: repeat it on a quiet machine",
    ]


@pytest.mark.parametrize(("ratio", "status"), [(1.01, 0), (1.1, 1), (0.9, 0)])
def test_the_whole_program(monkeypatch, capsys, ratio, status):
    @contextmanager
    def trees(other):
        yield {}, {"this": "here", "other": other}

    def measure(lines, trees, problems, seconds, say):
        for x in lines:
            x.runs.append(Run([1.0], [ratio]))

    monkeypatch.setattr(against, "both_trees", trees)
    monkeypatch.setattr(against, "measure", measure)
    monkeypatch.setattr(against.signal, "signal", lambda *_: None)
    assert against.main(["main", "--lines", "^F/", "--repeat", "1"]) == status
    out = capsys.readouterr().out
    assert "this: here\nother: main" in out
    assert f"| attention | {ratio:.3f} | 12 |" in out


def test_bad_options(capsys):
    with pytest.raises(SystemExit):
        against.parse(["main", "--lines", "("])
    assert "expected a regular expression" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no line's name has 'nothing'"):
        against.main(["main", "--lines", "nothing"])
    with pytest.raises(SystemExit, match="expected a commit or a folder with numkv, got 'no/such'"):
        against.main(["no/such"])


# ------------------------------------------------------------------ trees and processes


def package(folder, text):
    (folder / "numkv" / "__pycache__").mkdir(parents=True)
    (folder / "numkv" / "__init__.py").write_text(text)
    return folder


def text_of(tree):
    return (tree / "numkv" / "__init__.py").read_text()


def test_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(against, "ROOT", package(tmp_path / "here", "mine"))
    given = package(tmp_path / "there", "theirs")
    with against.both_trees(str(given)) as (trees, told):
        assert {name: text_of(tree) for name, tree in trees.items()} == {
            "this": "mine", "other": "theirs",
        }  # fmt: skip
        assert not (trees["this"] / "numkv" / "__pycache__").exists()
        assert told["other"].startswith(str(given))
    assert not trees["this"].exists()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_commit(tmp_path, monkeypatch):
    for name in [x for x in os.environ if x.startswith("GIT_")]:
        monkeypatch.delenv(name)
    here = package(tmp_path, "committed")

    def git(*args):
        me = ("-c", "user.name=x", "-c", "user.email=x@y", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(here), *me, *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    (here / "numkv" / "__init__.py").write_text("edited")
    monkeypatch.setattr(against, "ROOT", here)
    with against.both_trees("HEAD") as (trees, told):
        assert {name: text_of(tree) for name, tree in trees.items()} == {
            "this": "edited", "other": "committed",
        }  # fmt: skip
        assert told["this"].endswith("-dirty)")
        assert re.fullmatch(r"HEAD \([0-9a-f]+\)", told["other"])
    assert not trees["other"].exists()
    assert len(git("worktree", "list").splitlines()) == 1
    with pytest.raises(LookupError), against.both_trees("no-such-commit"):
        pass


@pytest.mark.slow
def test_a_worker_takes_numkv_from_its_tree(tmp_path):
    variables = {"NUMKV_PERF_TREE": str(workers.ROOT)}
    library = workers.Library("numkv", "perf.tree", variables=variables)
    try:
        made = library.only(CALLS, "append")
        assert made.error == 0
        assert all(x > 0 for x in made.turn(0.001))
        assert library.worker.ask("forms", kind=CALLS) == list(calls.CALLS)
    finally:
        library.close()
    with pytest.raises(workers.Missing, match=re.escape(f"expected numkv from {tmp_path}")):
        workers.Library("numkv", "perf.tree", variables={"NUMKV_PERF_TREE": str(tmp_path)})


def test_a_start_takes_numkv_from_its_tree(tmp_path):
    tree = package(tmp_path / "tree", "")
    assert len(against.Start(tree, "import numkv").turn(0.0)) == 1
    with pytest.raises(CannotRun, match="why"):
        against.Start(tree, "import numkv; raise SystemExit('why')")
    with pytest.raises(CannotRun, match="expected numkv out of"):
        against.Start(tree, f"import numkv; numkv.__file__ = {str(Path(envs.__file__))!r}")


class FakeLibrary:
    """Writes down what it is asked; the other tree's refuses int4."""

    def __init__(self, peer, module, variables):
        self.tree, self.asked = Path(variables["NUMKV_PERF_TREE"]).name, []
        self.pid = len(self.tree)

    def problem(self, **problem):
        self.asked.append(("problem", problem["shape"]))

    def free(self):
        self.asked.append("free")

    def only(self, kind, form):
        self.asked.append((kind, form))
        if kind == "int4" and self.tree == "other":
            raise workers.Died("died of SIGSEGV")
        return self.tree

    def close(self):
        self.asked.append("close")


def test_both_trees_make_the_same():
    made, problems = [], {"A": {"shape": 1}, "B": {"shape": 2}}

    def start(*args, **options):
        made.append(FakeLibrary(*args, **options))
        return made[-1]

    trees = {"this": Path("/x/this"), "other": Path("/x/other")}
    pair = against.Pair(trees, problems, start)
    places = [("A", "fp32", ""), ("A", "fp32", "paged"), ("A", "int8", ""), ("B", "int8", "")]
    for letter, kind, form in places:
        of = pair.contestants(Line(against.ATTENTION, letter, kind, form))
        assert of == {"this": "this", "other": "other"}
    with pytest.raises(CannotRun, match="other: died of SIGSEGV"):
        pair.contestants(Line(against.ATTENTION, "B", "int4", ""))
    pair.contestants(Line(CALLS, "", CALLS, "append"))
    pair.close()
    assert pair.pids == [4, 5]
    for library in made:
        assert library.asked == [
            ("problem", 1), ("fp32", ""), ("fp32", "paged"), "free", ("int8", ""),
            ("problem", 2), ("int8", ""), "free", ("int4", ""), "free", (CALLS, "append"), "close",
        ]  # fmt: skip


# ------------------------------------------------------------------ one-token calls


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.slow] * ("write" in x)) for x in calls.CALLS],  # compiles
)
def test_calls(name):
    contestant = calls.CALLS[name]()
    assert (contestant.calls, contestant.layers) == (calls.BATCH, 1)
    for _ in range(3):  # there is always room
        contestant.run(0)


def test_wrong_calls_do_not_run():
    with pytest.raises(CannotRun, match="does not do what it should"):
        calls._contestant(lambda: None, lambda: False)


def test_turns_of_several_calls(monkeypatch):
    times = iter([([6.0, 8.0], 0)])
    monkeypatch.setattr(worker, "turn", lambda *args: next(times))
    library = SimpleNamespace(CALLS={"x": lambda: Contestant(id, id, 1, 0, calls=2)})
    commands = worker.Commands(library)
    assert commands.make(CALLS, "x") == {
        "error": 0.0, "bytes": 0, "layers": 1, "pieces": (),
    }  # fmt: skip
    assert commands.turn("x", 0.1)["times"] == [3, 4]
