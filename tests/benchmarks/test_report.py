"""Options, tables and documents of `python -m perf`."""

import numpy as np
import pytest
from made_results import compared, lines

from perf import __main__ as program
from perf import bandwidth, report
from perf.shapes import (
    PREFILL,
    SHAPES,
    WORDS,
    Shape,
    labelled,
)

TINY = Shape(2, 4, 2, 8, 32)


# ------------------------------------------------------------------ options


def test_options():
    options = program.parse([])
    assert options.shapes == [*"ABCDEFP"]
    assert (options.seconds, options.patience) == (0.25, 20.0)
    options = program.parse(["--full"])
    assert options.shapes == [*"ABCDEFGHIJK", "L4", "L8", "P"]
    assert (options.seconds, options.patience) == (1.0, 600.0)
    assert options.kinds[:4] == ["fp32", "fp16", "bf16", "int8"]
    options = program.parse(["--shapes", "F,P", "--kinds", "int8", "--peers", "numpy"])
    assert (options.shapes, options.kinds, options.peers) == (["F", "P"], ["int8"], ["numpy"])


@pytest.mark.parametrize("argv", [["--shapes", "Z"], ["--kinds", ""], ["--peers", "numpy,x"]])
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
    assert program.parse([]).check == [("C", "int8")]
    assert program.parse(["--full"]).check == [("C", "bf16"), ("C", "int8"), ("P", "fp32")]
    assert program.parse(["--check", "none"]).check == []
    with pytest.raises(SystemExit):
        program.parse(["--check", "C"])


# ------------------------------------------------------------------ tables


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
    assert row == "| A: 1 sequence, 32k tokens | fp32 | 50.0 | 48.0 | 52.0 | 3 | – |"
    assert len(report.probe_table([report.Line("A", "fp32", [])]).splitlines()) == 2


def test_what_pieces_cost():
    of = "| A: 1 sequence, 32k tokens | fp32 |"
    assert report.pieces_table(lines()).splitlines()[2:] == [
        f"{of} a head, 4 KB | 1.20 | 0.90 |",
        f"{of} all heads, 32 KB | 1.05 | 0.90 |",
    ]
    assert report.pieces_table(lines()[1:]) == ""
    titles = ["## What shuffled blocks cost memory alone"]
    for some, expected in ((lines(), titles), (lines()[1:], [])):
        text = report.document("T", [], SHAPES, some, [])
        assert [x for x in text.splitlines() if "blocks cost" in x] == expected


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("size", [4096, 8192, 16384])
def test_pieces_are_read_once(size, pieces, threads):
    floats = np.zeros(2 * pieces * size // 4 + 1, np.float32)
    starts = np.random.default_rng(0).permutation(pieces) * (2 * size // 4)
    for start in starts:
        floats[start : start + size // 4] = 1.0
    sums = bandwidth._read_pieces(
        floats, starts, size // 4, bandwidth.PART // 4, bandwidth.PARTS_AHEAD, threads
    )
    assert sums.sum() == pieces * size // 4


def test_pieces_fill_the_memory():
    for size in (100, 4096, 24576):
        starts, length, part = bandwidth._pieces(size)
        assert length % part == 0 <= length * 4 - size < bandwidth.PART
        assert sorted(starts) == list(range(0, len(starts) * length, length))
        assert bandwidth.SIZE - length * 4 < len(starts) * length * 4 <= bandwidth.SIZE


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
    text = report.document("T", ["word " * 100], shapes, lines(), [], pictures=["p.svg", "q.svg"])
    assert text.startswith("# T\n\nword word")
    words = text.replace("\n", " ")
    assert "A: 1 sequence, 32k tokens (2, 4, 2, 8, 32), B: 8 sequences, 4k" in words
    assert "](p.svg)" in text
    assert "](q.svg)" in text
    assert "**2 of 2 lines meet their bars.**" in text
    assert "- A/fp32 paged by 128: 0.90" not in text
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


def test_many_shapes_make_several_pictures(tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, of the extra perf")
    first = lines()[0]
    many = [report.Line(letter, "fp32", first.rows) for letter in SHAPES]
    assert len(many) == 13
    names = report.draw_all(many, tmp_path / "a.svg")
    assert names == ["a.svg", "a-picture-2.svg"]
    one, two = ((tmp_path / name).read_text() for name in names)
    assert "groups of 8" in one
    assert "groups of 8" not in two
    assert "8 queries each" in two
    assert report.draw_all(many[:7], tmp_path / "b.svg") == ["b.svg"]
