"""`numkv bench`: rounds, what is left out of them, ratios within them, and the tables; on made-up times."""

import os
from itertools import count

import pytest

from numkv.bench import rounds
from numkv.bench.rounds import (
    DYNAMIC,
    EVERY,
    FLOOR,
    MOST,
    STATIC,
    Agreement,
    Line,
    Load,
    Measured,
    Round,
    Spread,
    take_rounds,
)
from numkv.cli import bench


class Scripted:
    """A `Load` that says what it was told."""

    def __init__(self, shares):
        self._shares = iter(shares)

    def __call__(self):
        return self

    def of_others(self):
        return next(self._shares)


def steps(*seconds):
    """A turn that takes these seconds, one after the other, the last one for ever."""
    left = list(seconds)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


QUIET = (0.0 for _ in count())


def rounds_of(turns, wanted, **options):
    given = {"load": Scripted(QUIET), "clock": lambda: 0.0, "probe": lambda: 10.0} | options
    return take_rounds(turns, given.pop("probe"), wanted, given.pop("deadline", 1.0), **given)


def test_disturbed_rounds_are_left_out_and_others_run_instead():
    shares = [0.0, 2 * MOST, 0.0, MOST, 0.5, 0.0, 0.0]
    found = rounds_of({"a": steps(1.0, 9.0, 2.0, 3.0, 9.0, 4.0, 5.0)}, 5, load=Scripted(shares))
    assert [x.seconds["a"] for x in found.rounds] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert (found.left_out, found.noisy, found.all_count) == (2, False, False)
    assert found.seconds("a") == 3.0


def test_when_time_is_up_what_there_is_counts_and_is_noisy():
    ticks = count()
    busy = Scripted(1.0 if n % 3 else 0.0 for n in count())
    found = rounds_of({"a": steps(1.0)}, 9, load=busy, clock=lambda: next(ticks), deadline=15)
    # Time is asked for from the fifth round on.
    assert (len(found.rounds), found.left_out) == (7, 14)
    assert found.noisy
    assert not found.all_count
    ticks = count()
    busy = Scripted(1.0 for _ in count())
    found = rounds_of({"a": steps(1.0)}, 9, load=busy, clock=lambda: next(ticks), deadline=3)
    assert (len(found.rounds), found.left_out) == (9, 9)
    assert found.noisy
    assert found.all_count


def test_time_that_is_up_on_a_quiet_machine_is_not_noise():
    few = Scripted(1.0 if n == 2 else 0.0 for n in count())
    late = rounds_of({"a": steps(1.0)}, 9, load=few, clock=iter([0.0, 5.0]).__next__)
    assert (len(late.rounds), late.left_out, late.noisy) == (5, 1, False)
    found = rounds_of({"a": steps(1.0)}, 9, clock=lambda: 5.0)
    assert len(found.rounds) == 5
    assert not found.noisy
    assert not found.all_count


def test_slow_contestants_sit_rounds_out():
    found = rounds_of({"a": steps(1.0), "b": steps(1.9), "c": steps(2.1)}, 2 * EVERY + 1)
    assert sum("b" in x.seconds for x in found.rounds) == 2 * EVERY + 1
    assert ["c" in x.seconds for x in found.rounds] == [
        n % EVERY == 0 for n in range(2 * EVERY + 1)
    ]
    assert found.ratio("c", "a").count == 3


def test_who_raises_has_no_further_turn():
    def fail():
        raise ValueError("no room\nfor more")

    found = rounds_of({"a": steps(1.0), "b": fail}, 3)
    assert found.lost == {"b": "ValueError: no room"}
    assert found.seconds("b") is None
    assert found.ratio("b", "a") is None
    assert len(found.rounds) == 3


def test_the_probe_is_the_mean_of_before_and_after():
    found = rounds_of({"a": steps(1.0)}, 2, probe=steps(2.0, 4.0, 4.0))
    assert [x.probe for x in found.rounds] == pytest.approx([2 / (1 / 2 + 1 / 4), 4.0])


# Times that double from round to round: what is formed within a round is the same in each.
MEASURED = Measured(
    [
        Round(
            {DYNAMIC: 0.4 * f, STATIC: 0.2 * f, "numkv bf16": 0.16 * f, FLOOR: 0.1 * f},
            1e9 / f,
            0.0,
        )
        for f in (1.0, 2.0, 4.0)
    ],
    left_out=2,
)


def test_ratios_and_shares_are_formed_within_a_round():
    found = MEASURED.ratio("numkv bf16", DYNAMIC)
    assert [found.middle, found.low, found.high] == pytest.approx([2.5, 2.5, 2.5])
    assert found.count == 3
    assert MEASURED.ratio(FLOOR, STATIC).middle == pytest.approx(2)
    assert MEASURED.seconds("numkv bf16") == pytest.approx(0.32)
    assert MEASURED.beyond("numkv bf16", FLOOR) == pytest.approx(0.12)
    # 30 MB in 0.06 s are 0.5 GB/s where the machine reads 1
    assert MEASURED.share("numkv bf16", FLOOR, 30_000_000) == pytest.approx(0.5)


def test_no_share_where_attention_does_not_show():
    noise = [Round({"a": 1.0 + x, FLOOR: 1.0}, 1e9) for x in (-0.1, -0.05, 0.1)]
    assert Measured(noise).share("a", FLOOR, 1000) is None
    outlier = [Round({"a": 1.0 + x, FLOOR: 1.0}, 1e9) for x in (0.1, 0.1, 0.1, 0.1, -0.5)]
    assert Measured(outlier).share("a", FLOOR, 10_000_000) == pytest.approx(0.1)


def test_the_spread_is_the_middle_half():
    assert Spread.of([]) is None
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 1)
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 2.0, 4.0, 5)


def load(passed, busy, own, thread, monkeypatch, cores=2):
    monkeypatch.setattr("numkv.bench.rounds.num_cores", lambda: cores)
    numbers = [iter((None if x is None else 0.0, x)) for x in (passed, busy, own, thread)]
    return Load(*(one.__next__ for one in numbers)).of_others()


def test_load_of_others(monkeypatch):
    assert load(10.0, 15.0, 13.0, 10.0, monkeypatch) == pytest.approx(0.1)
    assert load(10.0, 12.0, 13.0, 10.0, monkeypatch) == 0
    assert load(0.1, 0.2, 0.1, 0.1, monkeypatch) == 0  # too short for the system's clock
    assert load(10.0, None, 13.0, 9.0, monkeypatch) == pytest.approx(0.1)


def test_busy_seconds_of_all_cores(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 10 20 5000 300 1 2 4 50 0\ncpu0 1 1 1 1\n")
    ticks = os.sysconf("SC_CLK_TCK")
    assert rounds._busy_seconds(stat) == (100 + 10 + 20 + 1 + 2 + 4) / ticks
    assert rounds._busy_seconds(tmp_path / "none") is None


def line(**options):
    names = (DYNAMIC, STATIC, "numkv bf16", FLOOR)
    sizes = dict(zip(names, (2_000_000, 2_500_000, 2_100_000, 0), strict=True))
    read = dict.fromkeys(names, 30_000_000)
    agreement = {"numkv bf16": Agreement(3, 4, 0.0123)}
    absent = {"x": "not installed", "y": "not installed"}
    return Line(
        4096, MEASURED, sizes=sizes, read=read, agreement=agreement, absent=absent, **options
    )


def test_a_table():
    header, rows = bench.rows(line(batch=2))
    cells = dict(zip(header, rows[2], strict=True))
    assert cells == {
        "contestant": "numkv bf16",
        "tok/s": "6.2",
        "ms/token": "320.0",
        "× Dynamic": "2.50 (2.50–2.50)",
        "× Static": "1.25 (1.25–1.25)",
        "attention, ms": "120.0",
        "bandwidth": "0.50",
        "ceiling": "0.62",
        "cache": "2.1 MB",
        "same token": "3/4",
        "logit error": "1.2e-02",
    }
    assert [row[0] for row in rows] == [DYNAMIC, STATIC, "numkv bf16", FLOOR]
    assert rows[3][1:7] == ["10.0", "200.0", "4.00 (4.00–4.00)", "2.00 (2.00–2.00)", "–", "–"]


def test_tokens_of_prompts_without_padding():
    assert line().new_tokens == 1
    assert line(prompt=True, batch=2).new_tokens == 8192
    assert line(prompt=True, batch=3, padded=True).new_tokens == 2 * 4096 + 2048
    header, rows = bench.rows(line(prompt=True))
    assert "s/prompt" in header
    assert "bandwidth" not in header
    assert rows[0][1] == "5,120"


def test_what_is_said_below_a_table():
    said = " ".join(bench.terminal(line()).split())
    assert "3 rounds, 2 left out because other processes ran; 0.5 GB/s" in said
    assert "NOISY" not in said
    assert "Absent: x, y: not installed" in said
    noisy = Measured(MEASURED.rounds, 3, noisy=True, all_count=True)
    assert bench.verdict(Line(1, noisy)).startswith("NOISY")
    late = bench.verdict(Line(1, Measured(MEASURED.rounds, wanted=9)))
    assert late.startswith("3 rounds, as time was up before there were 9, 0 left out")
    assert "3 of them disturbed by other processes" in bench.verdict(Line(1, noisy))


def test_a_page(tmp_path):
    about = bench.About("m", "2 layers", "numkv bench transformers", "numkv 1", 2, "fp32")
    text = bench.page([line()], about, tmp_path / "a" / "p.md", tmp_path / "p.svg")
    assert "](../p.svg)" in text
    assert "`numkv bench transformers`" in text
    assert "## Decode at 4,096 tokens" in text
    assert "| numkv bf16 | 3.1 |" in text
    assert "2 left out" in text
    assert "](" not in bench.page([line()], about, tmp_path / "p.md", None)
