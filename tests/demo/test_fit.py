"""`numkv fit`: the choice is the best one, channels are seen, and the command writes what caches take."""

import itertools
import re

import numpy as np
import pytest

import numkv
from numkv.caches import LayerSpec, Profile
from numkv.cli import fit as command
from numkv.cli import main
from numkv.demo.evaluate import Document, held_out, with_outliers
from numkv.demo.fit import DemoJudge, Pair, choose, fit, least_bytes, pairs, spread
from numkv.demo.model import Model

LAYERS = [LayerSpec(2, 64, kind="fp32")] * 3
KINDS = "int8", "int4"


def size(layers):
    return Profile(layers).bytes_per_token


class Additive:
    """A judge whose divergences add up, drawn at random: fewer bits cost more, rotated or not."""

    name = "additive"
    layers = LAYERS

    def __init__(self, rng):
        small = rng.uniform(1e-5, 1e-4, (3, 2, 2))
        self.cost = {
            "int8": small,
            "int4": small * rng.uniform(2, 500, (3, 2, 2)),
            "fp32": np.zeros((3, 2, 2)),
        }
        self.calls = 0

    def divergences(self, candidates, held_out):
        self.calls += len(candidates)
        return [
            float(sum(self.cost[str(x)][i, s, int(of.rotate)] for i, of in enumerate(layers)
                      for s, x in enumerate((of.kind, of.v_kind))))
            for layers in candidates
        ]  # fmt: skip

    def rows(self):
        return [(np.ones((2, 2, 4)), np.ones((2, 2, 4)))] * 3


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_near_the_best(seed):
    """Of all that fit, what is chosen costs at most what one layer less widened would: greedy steps are whole."""
    rng = np.random.default_rng(seed)
    judge, tried = Additive(rng), pairs(KINDS, KINDS)
    smallest, largest = (size([Pair(k, k).spec(x) for x in LAYERS]) for k in ("int4", "int8"))
    budget = int(rng.integers(smallest, largest + 1))
    found = fit(judge, budget, tried=tried)
    chosen = [pair.spec(x) for pair, x in zip(found.kinds, LAYERS, strict=True)]
    assert size(chosen) <= budget
    assert list(found.chosen.profile) == chosen
    assert len({pair.rotate for pair in found.kinds}) == 1
    every = [
        [pair.spec(x) for pair, x in zip(found, LAYERS, strict=True)]
        for rotate in (False, True)
        for found in itertools.product([pair for pair in tried if pair.rotate == rotate], repeat=3)
    ]
    step = max(
        size([Pair("int8", "int8").spec(LAYERS[0])]) - size([Pair("int4", "int4").spec(LAYERS[0])]),
        0,
    )
    best = min(
        judge.divergences([x for x in every if size(x) <= max(smallest, budget - step)], False)
    )
    assert judge.divergences([chosen], False)[0] <= best * (1 + 1e-9)


def test_progress_ends_with_the_whole(rng):
    judge, told = Additive(rng), []
    fit(
        judge,
        10**6,
        tried=pairs(KINDS, KINDS),
        progress=lambda done, total: told.append((done, total)),
    )
    assert told[-1][0] == told[-1][1] == judge.calls


def test_a_budget_that_is_too_small(rng):
    least = size([Pair("int4", "int4").spec(x) for x in LAYERS])
    assert (
        fit(Additive(rng), least, tried=pairs(KINDS, KINDS)).chosen.profile.bytes_per_token == least
    )
    judge = Additive(rng)
    with pytest.raises(ValueError, match=f"at least {least} bytes"):
        fit(judge, least - 1, tried=pairs(KINDS, KINDS))
    assert not judge.calls  # it is known before anything is measured


def test_a_way_that_costs_more_for_more_bytes_is_never_taken():
    costs = [{Pair("int4", "int4"): 1.0, Pair("int8", "int4"): 2.0, Pair("int8", "int8"): 0.5}]
    budget = size([Pair("int8", "int4").spec(LAYERS[0])])
    assert choose(LAYERS[:1], costs, budget) == [Pair("int4", "int4")]
    assert choose(LAYERS[:1], costs, 10**6) == [Pair("int8", "int8")]
    assert least_bytes(LAYERS[:1], list(costs[0])) == size([Pair("int4", "int4").spec(LAYERS[0])])


def test_the_spread_of_channels(rng):
    rows = rng.uniform(-1, 1, (500, 2, 16))
    assert 1 <= spread(rows) < 1.1
    rows[:, 1, 3] *= 40
    assert 35 < spread(rows) < 45
    assert spread(np.zeros((3, 1, 4))) == 0
    assert spread(np.full((3, 1, 4), 2.0)) == 1


@pytest.mark.slow
def test_outlier_channels_are_seen_and_avoided():
    """On keys with channels 64 times as large, no more bytes than int4 or half as many again."""
    texts = {x.name: Document(x.name, x.text[:800]) for x in held_out().documents}
    judge = DemoJudge(
        with_outliers(Model.load(), 64), [texts["calendar.py"]], [texts["csv.py"]], 256, 1
    )
    int4 = size([Pair("int4", "int4").spec(x) for x in judge.layers])
    found = fit(judge, int4 * 3 // 2, tried=pairs(KINDS, KINDS))
    assert min(k for k, _ in found.spreads) > 20
    assert max(v for _, v in found.spreads) < 4
    alone = {x.label: x.divergence for x in found.uniform}
    assert found.chosen.divergence < alone["int4"] / 50
    assert found.chosen.divergence < alone["int4+rotate"] / 5


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    text, profile = tmp_path / "text", tmp_path / "p"
    text.write_text(next(x.text for x in held_out().documents if x.name == "sched.py")[:1200])
    options = [
        "--text",
        str(text),
        "--context",
        "128",
        "--windows",
        "1",
        "--budget",
        "900",
        "--out",
        str(profile),
    ]
    assert main(["fit", *options, "--k-kind", "int8", "int4"]) == 0
    printed = capsys.readouterr().out
    assert "no layer has outlier channels" in printed
    found = numkv.Profile.load(profile)
    assert len(found) == 5
    assert found.bytes_per_token <= 900
    assert re.search(rf"^chosen +{found.bytes_per_token:,} ", printed, re.MULTILINE)
    assert main(["plan", "--profile", str(profile), "--tokens", "1000"]) == 0
    assert f"{found.bytes_per_token:,} bytes/token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--budget", "10"], "at least 720 bytes a token"),
        (["--budget", "int3"], "--budget"),
        (["--budget", "²"], "--budget"),
        (["no_such_folder", "--context", "16"], "no_such_folder"),
        (["--text", "no_such_file"], "no_such_file"),
    ],
)
def test_what_is_refused(capsys, monkeypatch, options, said):
    monkeypatch.setattr(
        "numkv.demo.fit.DemoJudge.divergences",
        lambda self, x, held_out: [1.0] * len(x),
    )
    assert main(["fit", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_text_that_is_too_short(tmp_path, capsys):
    (tmp_path / "text").write_text("")
    assert main(["fit", "--text", str(tmp_path / "text"), "--budget", "int8"]) == 2
    assert capsys.readouterr().err.endswith(
        "numkv: expected a text of two tokens or more, got none\n"
    )


@pytest.mark.parametrize("config", ["{}", '{"model_type": "no such", "num_hidden_layers": "x"}'])
def test_a_model_that_transformers_cannot_load_is_one_line(config, tmp_path, capsys):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(config)
    assert main(["fit", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"numkv: {tmp_path}: transformers cannot load it: " in error
    assert error.count("\n") == 1


def test_a_plan_takes_no_kind_beside_a_profile(tmp_path, capsys):
    Profile(LAYERS).save(tmp_path / "p")
    assert main(["plan", "--profile", str(tmp_path / "p"), "--kind", "int8"]) == 2
    assert "--profile has shapes and kinds" in capsys.readouterr().err


def test_an_interrupt_shows_the_layers_that_were_measured(tmp_path, capsys, monkeypatch):
    """Every layer whose kinds were all measured is in the table; no profile is written."""

    def stopped(judge, budget, *, tried, progress, report):
        for layer in range(2):
            report(layer, dict.fromkeys(tried, 0.5 + layer))
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "fit", stopped)
    options = ["--budget", "900", "--out", str(tmp_path / "p"), "--k-kind", "int8", "int4"]
    assert main(["fit", *options]) == 130
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].split()[:3] == ["layer", "alone,", "KL"]
    assert [line.split()[:2] for line in lines[-3:-1]] == [["0", "5.0e-01"], ["1", "1.5e+00"]]
    assert lines[-1] == "partial: interrupted before everything was measured"
    assert not (tmp_path / "p").exists()


def test_layers_are_reported_as_they_are_measured():
    """Reported costs are those of the result, in order, before the whole is measured."""
    judge, seen = Additive(np.random.default_rng(0)), []
    found = fit(
        judge,
        10**6,
        tried=pairs(KINDS, KINDS),
        report=lambda layer, costs: seen.append((layer, dict(costs))),
    )
    assert seen == list(enumerate(found.costs))
