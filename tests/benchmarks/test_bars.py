"""Bars and verdicts of `python -m perf`."""

import pytest
from made_results import row

from perf import bars, report
from perf.peers import CONTIGUOUS, INT8_BESIDE, LARGEST_ERROR, PAGED
from perf.shapes import PREFILL, PREFILL_KINDS, SHAPES


def line(letter, kind, *rows):
    """numkv's contiguous row takes 1 ms; ``(library, form, ratio)`` are the others."""
    others = [row(library, form, ratio) for library, form, ratio in rows]
    return report.Line(letter, kind, [row("numkv", CONTIGUOUS, 1.0), *others])


def said(one):
    """What is said of the line's layouts, in order."""
    return [verdict.words for verdict in bars.verdicts([one])]


def test_every_line_has_the_bars_it_should():
    def of(letter, kind, form=CONTIGUOUS):
        one = line(letter, kind)
        some = [bar for bar in bars.BARS if bar.applies(one, row("numkv", form, 1.0))]
        return [str(bar) for bar in some]

    for letter in SHAPES:
        for kind in LARGEST_ERROR:
            speeds = [x for x in of(letter, kind) if x.endswith("× best peer")]
            assert len(speeds) == 1
            assert of(letter, kind, PAGED)[-1 - (letter == "F" and kind in ("fp32", "bf16"))] == (
                "≤ 1.05 × contiguous"
            )
    for kind in PREFILL_KINDS:
        assert of("P", kind) == ["≥ 1.25 × PyTorch"]
    share, share_of_e = (f"≥ {x} of the bandwidth" for x in bars.INT8_SHARES)
    assert of("A", "fp32") == ["≥ 1.5 × best peer"]
    assert of("C", "fp32") == of("C", "int4")[:1] == of("L8", "bf16") == ["≥ 1.1 × best peer"]
    assert of("D", "int8") == ["≥ 2 × best peer", share]
    assert of("E", "int8") == ["≥ 2 × best peer", share_of_e]
    assert of("D", "int4") == ["≥ 3 × best peer", "≤ 0.75 of int8's time"]
    assert of("E", "int4") == ["≥ 3 × best peer", "≤ 0.85 of int8's time"]
    assert of("E", "code4") == ["≥ 3 × best peer", "≤ 1 of int8's time"]
    assert of("E", "int4", PAGED) == ["≥ 3 × best peer", "≤ 1.05 × contiguous"]
    assert of("A", "int8", INT8_BESIDE) == []


def test_bars_name_shapes_and_kinds_that_there_are():
    for bar in bars.BARS:
        assert set(bar.shapes) <= SHAPES.keys() | PREFILL.keys()
        assert set(bar.kinds) <= LARGEST_ERROR.keys()
        assert bar.shapes
        assert bar.kinds


@pytest.mark.parametrize(
    ("ratio", "words"), [(1.5, "met"), (1.49, "MISSED: 1.49 (≥ 1.5 × best peer)")]
)
def test_the_best_peer_counts(ratio, words):
    one = line("A", "fp32", ("PyTorch", "x", ratio), ("PyTorch", "y", 9.0), ("NumPy", "", 8.0))
    assert said(one) == [words]


def test_paged_is_compared_with_contiguous_and_with_peers():
    one = line("C", "fp32", ("numkv", PAGED, 1.06), ("vLLM", "vec", 1.14))
    met, missed = said(one)
    assert met == "met"
    assert missed == "MISSED: 1.08 (≥ 1.1 × best peer); 1.06 (≤ 1.05 × contiguous)"


def test_a_line_at_the_bandwidth_need_not_be_faster_than_others():
    one = line("A", "fp32", ("vLLM", "vec", 1.2), ("numkv", PAGED, 1.2))
    for x in one.rows:
        x.share = 0.9
    met, paged = bars.verdicts([one])
    assert met.met
    assert met.words == "met: 0.90 of the bandwidth"
    assert paged.missed == ["1.20 (≤ 1.05 × contiguous)"]  # that stays
    one.rows[0].share = 0.89
    assert not bars.verdicts([one])[0].met


def test_without_groups_a_line_is_level_with_a_peer_at_the_bandwidth():
    one = line("C", "fp32", ("PyTorch", "SDPA", 1.01))
    one.rows[1].share = 0.95
    assert bars.verdicts([one])[0].met
    one.rows[1].share = 0.94
    assert said(one) == ["MISSED: 1.01 (≥ 1.1 × best peer)"]
    one.rows[1].ratio, one.rows[1].share = 0.99, 0.97
    assert said(one) == ["MISSED: 0.99 (≥ 1.1 × best peer)"]


def test_eight_and_four_bits():
    one = line("A", "int8", ("vLLM", "fp8_e5m2, amx", 2.2), ("vLLM", "fp8_e4m3, vec", 1.9))
    one.rows[0].share = 0.6
    assert said(one)[0].startswith("MISSED: 1.90 (≥ 2 × best peer); 0.60 (≥ 0.")
    one.rows[0].share = 0.75
    assert said(one) == ["met: 0.75 of the bandwidth"]
    one = line("A", "int4", ("numkv", INT8_BESIDE, 1.3), ("OpenVINO", "u4", 3.1))
    assert said(one) == ["MISSED: 0.77 (≤ 0.75 of int8's time)"]
    one.rows[1].ratio = 1.4
    assert said(one) == ["met"]


def test_small_calls():
    one = line("F", "bf16")
    one.rows[0].share, one.rows[0].seconds = 0.5, 60e-6  # 30 us for the bytes: 47 are due
    assert said(one) == ["MISSED: 1.28 (≤ 1 × a small call's due)"]
    one.rows[0].share = 0.7
    assert said(one) == ["met"]


def test_prefill_is_beside_pytorch():
    one = line("P", "fp32", ("PyTorch", "SDPA", 1.31), ("vLLM", "vec", 0.9))
    assert said(one) == ["met"]


def test_lines_without_a_peer_have_no_bar_and_broken_ones_miss_theirs():
    one = line("B", "bf16")
    assert bars.verdicts([one]) == []
    one.rows[0].reason = "died of SIGSEGV"
    found = bars.verdicts([one, line("C", "fp32", ("NumPy", "", 3.0))])
    assert bars.head_count(found) == "1 of 2 lines meet their bars."
    assert bars.misses(found) == ["B/bf16: does not run: died of SIGSEGV"]
    table = report.bars_table(found).splitlines()
    assert table[2] == (
        "| B/bf16 | contiguous | – | – | – | MISSED: does not run: died of SIGSEGV |"
    )
    assert table[3] == "| C/fp32 | contiguous | 0.50 | 3.00 (NumPy) | ≥ 1.1 × best peer | met |"


def test_features_of_the_processor(tmp_path):
    (tmp_path / "cpuinfo").write_text("flags : fpu amx_tile amx_bf16\n")
    assert bars.has_feature("amx_tile", tmp_path / "cpuinfo")
    assert not bars.has_feature("amx", tmp_path / "cpuinfo")
    assert not bars.has_feature("amx_tile", tmp_path / "none")
