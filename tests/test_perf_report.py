"""What `python -m perf` computes beside times: medians, turns, bytes, tables. Nothing here depends on a clock."""

from types import SimpleNamespace

import ml_dtypes
import naive
import numpy as np
import pytest

import numkv
from perf import __main__ as program
from perf import race, report
from perf.peers import CannotRun, Contestant, numkv_, numpy_, refuse, stacked
from perf.shapes import COLD, MOST_LAYERS, Decode, Prefill, Shape, cold_layers

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


def fake(cost, clock, seen, layers=3):
    """A contestant whose calls move a clock by `cost`."""

    def run(i):
        seen.append(i)
        clock.now += cost

    return Contestant(run, np.asarray, layers, 100)


def test_race(rng):
    clock, seen = SimpleNamespace(now=0.0), {"quick": [], "slow": []}
    contestants = {n: fake(c, clock, seen[n]) for n, c in (("quick", 0.01), ("slow", 1.0))}
    probed = []

    def probe():
        probed.append(clock.now)
        return 1000.0

    result = race.race(contestants, 2.0, probe, rng, clock=lambda: clock.now)
    assert result.seconds("quick") == pytest.approx(0.01)
    assert result.seconds("slow") == pytest.approx(1)
    assert result.ratio("slow", "quick") == pytest.approx(100)
    assert result.share("quick", 100) == pytest.approx(10)
    assert len(result.probes) == len(probed) == race.ROUNDS + 1
    assert sum(bool(x) for x in result.calls["slow"]) == race.FEWEST_ROUNDS
    assert sum(bool(x) for x in result.calls["quick"]) > 0.8 * race.ROUNDS
    assert seen["slow"] == [
        n % 3 for n in range(2 * race.FEWEST_ROUNDS)
    ]  # one to settle, one timed
    assert seen["quick"] == [n % 3 for n in range(len(seen["quick"]))]


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
        contestant, error = program.checked(make, decode, kind)
        assert contestant.bytes == expected[form]
        assert contestant.layers == MOST_LAYERS
        assert 0 < error < 0.02
    contestant, error = program.checked(numpy_.decode(kind)[""], decode, kind)
    assert contestant.bytes == plain
    assert 0 < error < 0.02


def test_prefill(rng):
    problem = Prefill(Shape(1, 4, 2, 8, 24), rng)
    out, _ = naive.attention(problem.q[0], problem.k, problem.v, [24], [0, 24])
    assert np.allclose(problem.expected[0], out, rtol=1e-12)
    assert problem.flops == 4 * 4 * 8 * sum(range(1, 25))
    contestant, error = program.checked(numkv_.prefill("fp32")[""], problem, "fp32")
    assert contestant.run(1).dtype == np.float32
    assert error < 1e-6
    make = numkv_.prefill("bf16")[""]
    assert make(problem).run(0).dtype == ml_dtypes.bfloat16


def test_wrong_results_do_not_run(decode):
    def wrong_in_the_last_layer(problem):
        results = [problem.expected, problem.expected, 1.1 * problem.expected]
        return Contestant(lambda i: i, lambda i: results[i], 3, 1)

    with pytest.raises(CannotRun, match=r"wrong result, its relative error is 1\.0e-01"):
        program.checked(wrong_in_the_last_layer, decode, "fp32")


def test_what_cannot_run_says_why(decode, rng, monkeypatch):
    def broken(problem):
        raise RuntimeError("from a.cpp:1\n\n  no such kernel\n")

    library = SimpleNamespace(NAME="Peer", decode=lambda kind: {"x": broken, "y": refuse("why")})
    monkeypatch.setattr(program.bandwidth, "read", lambda: 1.0)
    line = program.measure([library], "F", "fp32", decode, 0.01, rng)
    assert [(r.name, r.reason) for r in line.rows] == [
        ("Peer x", "RuntimeError: no such kernel"),
        ("Peer y", "why"),
    ]
    assert line.ran == []
    assert line.ours is line.best_peer is None


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


def test_missing_peers():
    found, missing = program.load(["numpy"])
    assert found == [numpy_]
    assert missing == {}


def test_a_peer_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(program.PEERS, "gone", "gone_")
    found, missing = program.load(["gone", "numpy"])
    assert found == [numpy_]
    assert "gone_" in missing["gone"]


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
    assert rows[2] == "| A | numkv | 1,000 | 40.0 | 40.0 | 0.80 | 1.00 | 1.2e-07 |"
    assert rows[4] == "| A | PyTorch SDPA | 3,500 | 40.0 | 11.4 | 0.20 | 3.50 | 2.0e-07 |"
    assert rows[-1] == "| A, B | NumPy | does not run: no dtype |  |  |  |  |  |"
    assert len({row.count("|") for row in rows}) == 1


def test_summary_and_probes():
    assert report.summary_table(lines()).splitlines()[2:] == [
        "| A | 0.80 | 2.00 (OpenVINO) |",
        "| B | 0.80 | – |",
    ]
    assert report.probe_table(lines()).splitlines()[2] == "| A | fp32 | 50.0 | 48.0 | 52.0 |"


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
    text = report.document("T", ["word " * 100], shapes, lines(), [], "p.svg")
    assert text.startswith("# T\n\nword word")
    assert "A (2, 4, 2, 8, 32), B (2, 4, 2, 8, 32)" in text.replace("\n", " ")
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
    assert text == (tmp_path / "b.svg").read_text()
