"""`numkv bench transformers`: who takes part computes the same, goes back after a step, and is told apart if absent."""

import importlib.util
import io
import json
import signal
import time

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

import decoder_models

from numkv.bench import contestants, decode, models, requests
from numkv.bench.contestants import Kinds
from numkv.bench.rounds import DYNAMIC, FLOOR, STATIC
from numkv.cli import bench, main
from numkv.demo.cache import CacheChoice
from numkv.errors import NotSupported
from numkv.transformers.metadata import BatchMetadata

SIZES = {
    "model_type": "qwen2", "vocab_size": 90, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
FP32, INT8 = Kinds("fp32", "fp32", "fp32"), Kinds("int8", "int8", "int8")


@pytest.fixture
def config_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    return tmp_path


@pytest.fixture
def made(config_file):
    """A bench of three rounds over a tiny model in fp32."""

    def make(**options):
        config = models.config_of(str(config_file))
        for name, value in options.pop("config", {}).items():
            setattr(config, name, value)
        wanted = ["dynamic", "static", "fp8", "quanto", "turboquantcpu", "numkv", "floor"]
        given = {"wanted": wanted, "kinds": [FP32, INT8], "batch": 1, "seed": 0, "rounds": 3}
        model = models.build(config, "fp32", 0)
        return decode.Bench(model, probe=lambda: 1e9, **(given | options))

    return make


@pytest.mark.parametrize("batch", [1, 2])
def test_contestants_agree_with_the_reference(made, batch):
    line = made(batch=batch).decode(70, time.monotonic())
    for name in (DYNAMIC, STATIC, "numkv fp32"):
        found = line.agreement[name]
        assert (found.same, found.predictions) == (4 * batch, 4 * batch)
        assert found.error < 1e-5
    assert 1e-4 < line.agreement["numkv int8"].error < 0.1
    assert 1e-3 < line.agreement["QuantizedCache fp8 + SDPA"].error < 0.5
    assert FLOOR not in line.agreement
    assert {FLOOR, *line.agreement} <= set(line.names)
    assert len(line.measured.rounds) == 3


def test_the_reference_sees_the_rows(made):
    """Agreement says something: without attention the logits are others."""
    one = made(wanted=["floor"], kinds=[])
    made_by = dict(contestants.candidates(["floor"], [], one.model, 70, 80))
    floor = made_by[FLOOR]()
    ids = one._ids(4)
    expected = one._reference(70, ids)
    floor.store(0, *next(one._rows(70))[1:])
    found = [one._logits(floor, ids[i]) for i in range(4)]
    assert decode._agreement(found, expected).error > 0.3


def test_bytes(made):
    line = made().decode(70, time.monotonic())
    rows = 2 * 2 * 2 * 16  # elements of a token: layers, K and V, heads, dim
    assert line.read[DYNAMIC] == line.sizes[DYNAMIC] == 70 * rows * 4
    assert line.read[STATIC] == pytest.approx(70 * rows * 4, rel=1e-3)
    assert line.sizes[STATIC] == pytest.approx(80 * rows * 4, rel=1e-3)
    assert line.read["numkv fp32"] == 70 * rows * 4
    assert line.read["numkv int8"] == 70 * 2 * 2 * 2 * (16 + 4)
    assert line.sizes["numkv int8"] == 256 * 2 * 2 * 2 * (16 + 4)
    assert line.sizes[FLOOR] == 0


@pytest.mark.parametrize("window", [None, 8])
def test_steps_leave_nothing_behind(made, window):
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window}
    one = made(config=sliding if window else {})
    ids = one._ids(1)[0]
    names = (DYNAMIC, STATIC, "numkv fp32", "QuantizedCache fp8 + SDPA")
    for name, make in contestants.candidates(one.wanted, one.kinds, one.model, 40, 48):
        if name not in names or (window and name.startswith("Quantized")):
            continue
        there = make()
        one._fill({name: there}, 40, {})
        first, size = one._logits(there, ids), there.nbytes
        for _ in range(3):
            again = one._logits(there, ids)
            assert int(there.cache.get_seq_length()) == 40
        assert (again == first).all(), name
        assert there.nbytes == size


@pytest.mark.parametrize("window", [None, 8])
def test_layers_share_what_a_step_is_worked_out_from(made, window, monkeypatch):
    """As in a model that generates, so that a step costs what it costs there."""
    types = ["full_attention", "sliding_attention" if window else "full_attention"] * 2
    config = {"num_hidden_layers": 4, "layer_types": types, "sliding_window": window}
    one = made(config=config)
    there = dict(contestants.candidates(["numkv"], [FP32], one.model, 40, 48))["numkv fp32"]()
    one._fill({"x": there}, 40, {})
    advance, worked_out = BatchMetadata.advance, []

    def counted(metadata, *args, **kwargs):
        worked_out.append(metadata.columns)
        return advance(metadata, *args, **kwargs)

    monkeypatch.setattr(BatchMetadata, "advance", counted)
    there.enter()
    for _ in range(3):
        worked_out.clear()
        one._step(there, one._ids(1)[0])
        assert worked_out == [40] * len(set(types))  # for each kind of layer, not for each layer
        there.restore()


def test_a_growing_cache_is_cut_back(made):
    one = made()
    there = dict(contestants.candidates(["dynamic"], [], one.model, 256, 272))[DYNAMIC]()
    one._fill({"x": there}, 256, {})
    ids = one._ids(1)[0]
    lengths = []
    for _ in range(4):
        one._step(there, ids)
        there.restore()
        lengths.append(there.cache.get_seq_length())
    assert lengths == [257, 258, 256, 257]  # by one part in 128


@pytest.mark.parametrize("padded", [False, True])
def test_prompts(made, padded):
    line = made().prefill(24, time.monotonic(), padded=padded)
    assert line.batch == (2 if padded else 1)
    for name in (DYNAMIC, STATIC, "numkv fp32"):
        assert line.agreement[name].error < 1e-5, name
        assert line.measured.seconds(name) > 0
    assert line.new_tokens == (36 if padded else 24)
    assert line.sizes[DYNAMIC] > 0


def test_who_fails_is_absent_and_the_others_go_on(made, monkeypatch):
    real = contestants.Contestant.store

    def store(self, layer, k, v):
        if type(self.cache).__name__ == "StaticCache" and layer == 1:
            raise RuntimeError("no room")
        real(self, layer, k, v)

    monkeypatch.setattr(contestants.Contestant, "store", store)
    line = made().decode(20, time.monotonic())
    assert line.absent[STATIC] == "RuntimeError: no room"
    assert DYNAMIC in line.names
    assert STATIC not in line.names
    if importlib.util.find_spec("turboquantcpu") is None:
        assert "not installed; pip install turboquantcpu" in line.absent["turboquantcpu prod"]


def test_models_are_left_as_they_were(made):
    one = made()
    before = {name: vars(m).get("forward") for name, m in one.model.named_modules()}
    one.decode(20, time.monotonic())
    assert {name: vars(m).get("forward") for name, m in one.model.named_modules()} == before
    assert not [m for m in one.model.modules() if hasattr(m, "_numkv_bench_queries")]


def test_models_that_cannot_be_filled_are_refused(made):
    one = made(wanted=["dynamic", "numkv"], kinds=[FP32])
    one.model = decoder_models.make("qwen3_next")
    with pytest.raises(NotSupported, match="every layer attends"):
        one.decode(20, time.monotonic())


def test_a_model_without_sdpa(made):
    one = made(wanted=["dynamic", "numkv", "floor"], kinds=[FP32])
    one.model = decoder_models.make("gemma2")
    line = one.decode(20, time.monotonic())
    assert "does not support" in line.absent[DYNAMIC]
    assert line.names == ["numkv fp32", FLOOR]


def test_nobody_left(made, monkeypatch):
    def no_cache(**_):
        raise RuntimeError("no room")

    monkeypatch.setattr(contestants, "StaticCache", no_cache)
    with pytest.raises(NotSupported, match="no room"):
        made(wanted=["static"]).decode(20, time.monotonic())


# ------------------------------------------------------------------ configs


def test_presets():
    small, big = (models.config_of(name) for name in models.PRESETS)
    assert (small.num_hidden_layers, small.vocab_size, small.tie_word_embeddings) == (24, 151_936, True)  # fmt: skip
    assert (big.num_attention_heads, big.num_key_value_heads, models.head_dim(big)) == (32, 8, 128)
    assert models.config_of("8b", layers=2).num_hidden_layers == 2


def test_errors_are_one_line(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": "many"}))
    options = ["bench", "transformers", "--model"]
    for more, said in (
        ([str(tmp_path)], "no config that transformers can read"),
        ([str(damaged)], "no config that transformers can read"),
        ([str(tmp_path / "x.json")], "no such file"),
        (["8b", "--kind", "int9"], "int9"),
        (["8b", "--kind", "int8+window8"], "no tokens in full precision"),
        (["8b", "--picture", "a.gif"], ".png or .svg"),
        (["8b", "--context"], "nothing to measure"),
        (["8b", "--contestants", "vllm"], "invalid choice"),
        (["8b", "--minutes", "0"], "--minutes: expected more than 0, got '0'"),
    ):
        assert main([*options, *more]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("missing", ["matplotlib", "transformers", "torch"])
def test_what_is_missing_is_named(missing, monkeypatch, capsys):
    for place in ("numkv.cli.bench", "numkv.cli.output"):
        monkeypatch.setattr(f"{place}.is_installed", lambda name: name != missing)
    options = ["--picture", "a.svg"] if missing == "matplotlib" else []
    assert main(["bench", "transformers", *options]) == 2
    assert f"needs {missing}, which is not installed; try pip install" in capsys.readouterr().err


# ------------------------------------------------------------------ the command


def test_the_command(config_file, tmp_path, capsys):
    page = tmp_path / "out" / "page.md"
    options = [
        "bench", "transformers", "--model", str(config_file), "--context", "40", "--prefill", "12", "--rounds", "2",
        "--contestants", "dynamic", "static", "numkv", "floor", "--kind", "fp32", "int8", "--dtype", "fp32",
        "--markdown", str(page), "--threads", "1",
    ]  # fmt: skip
    assert main(options) == 0
    printed = capsys.readouterr()
    for text in (printed.out, page.read_text()):
        for name in ("DynamicCache + SDPA", "numkv fp32", "numkv int8"):
            assert text.count(name) >= 3, name
        for title in ("Decode at 40 tokens", "Prompts of 12 tokens", "padded on the left, batch 2"):
            assert title in text
        assert "Absent" not in text
    assert "`numkv bench transformers --model" in page.read_text()
    assert "40 tokens: 6 rounds" in printed.err
    assert "prompts of 12 tokens: 2 rounds" in printed.err


def test_an_interrupt_shows_the_rounds_so_far(config_file, tmp_path, capsys, monkeypatch):
    """Ctrl-C in the first round: its table is shown as partial, later ones are not measured, and no page is written."""
    page, count_rounds = tmp_path / "page.md", bench.Bar.count_rounds

    def once(bar, done, left_out, wanted):
        count_rounds(bar, done, left_out, wanted)
        if done + left_out == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(bench.Bar, "count_rounds", once)
    options = [
        "bench", "transformers", "--model", str(config_file), "--context", "40", "50", "--rounds", "9",
        "--contestants", "dynamic", "numkv", "--kind", "fp32", "--dtype", "fp32", "--threads", "1",
        "--markdown", str(page),
    ]  # fmt: skip
    assert main(options) == 130
    printed = capsys.readouterr()
    assert "stopping after this round" in printed.err
    assert "Decode at 40 tokens" in printed.out
    assert "numkv fp32" in printed.out
    assert "50 tokens" not in printed.out
    assert "partial: interrupted before everything was measured" in printed.out
    assert not page.exists()


def test_the_picture(config_file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "out" / "a.svg"
    options = ["--model", str(config_file), "--context", "20", "--rounds", "2", "--picture", str(path)]  # fmt: skip
    options += ["--contestants", "dynamic", "numkv", "floor", "--kind", "fp32", "--dtype", "fp32"]
    assert main(["bench", "transformers", *options]) == 0
    drawn = path.read_text()
    assert "numkv fp32" in drawn
    assert "decode at 20 tokens" in drawn
    assert str(path) in capsys.readouterr().out


def test_kinds():
    asked = {
        "bf16": ("bf16", "bf16", "bf16", False),
        "int8/fp16": ("int8/fp16", "int8", "fp16", False),
        "int4+rotate": ("int4+rotate", "int4", "int4", True),
    }
    for text, expected in asked.items():
        assert bench._kinds(CacheChoice.parse(text)) == expected


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar():
    stream = Terminal()
    bar = bench.Bar(stream)
    bar.report("64 tokens: filling caches")
    bar.count_rounds(3, 1, 6)
    bar.close()
    assert "64 tokens: filling caches…" in stream.getvalue()
    assert f"[{'#' * 12}{'.' * 12}] 3 of 6 rounds, 1 left out" in stream.getvalue()
    assert stream.getvalue().endswith("\r")


def test_requests(config_file, tmp_path, capsys):
    """Every way makes the same tokens; what would take too long is left out by name."""
    page, picture = tmp_path / "page.md", tmp_path / "picture.svg"
    draws = importlib.util.find_spec("matplotlib") is not None
    words = f"--model {config_file} --dtype fp32 --kind fp32/fp32+rotate --requests 1 4 --shared 70 --longest 100"
    arguments = [*words.split(), "--new", "5", "--minutes", "0.2", "--markdown", str(page)]
    arguments += ["--picture", str(picture)] if draws else []
    assert main(["bench", "transformers", *arguments]) == 0
    printed = capsys.readouterr().out
    for count, each in ((1, 3), (4, 4)):
        lines = [x.split() for x in printed.splitlines() if x.endswith(f" {count}/{count}")]
        assert len(lines) == each
    assert printed.count("numkv fp32+rotate, ContinuousBatch") == 2
    assert printed.count("numkv fp32+rotate, use") == 1
    assert printed.splitlines()[-1].startswith(f"written: {page}")
    text = page.read_text()
    assert "4 requests, 70 tokens in common and up to 100 tokens of their own" in text
    assert ("picture.svg" in text) == draws == picture.exists()


def test_requests_that_take_too_long(made):
    """They end within a prompt, and leave no hook behind."""
    model, load, kinds = made().model, requests.Workload(3, 0, 80, 4), [FP32]
    found = dict(requests.serve(model, load, kinds, 0, 1e-9, lambda _: None))
    assert all(isinstance(x, requests.LeftOut) for x in found.values())
    assert str(found[requests.PADDED]) == "not done in 0 s"
    assert not requests.torch.nn.modules.module._global_forward_pre_hooks
    assert [len(x) for x in load.prompts(90, 0)] == [len(x) for x in load.prompts(90, 0)]
    assert all(64 <= len(x) <= 80 for x in load.prompts(90, 1))


def test_requests_that_are_interrupted(config_file, monkeypatch, capsys):
    """What there is of the table is printed."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(requests, "_padded", interrupted)
    words = f"--model {config_file} --dtype fp32 --kind int8 --requests 2 --shared 0 --longest 64 --new 3"
    assert main(["bench", "transformers", *words.split()]) == 130
    printed = capsys.readouterr().out
    assert "2 requests, up to 64 tokens" in printed
    assert "numkv int8, ContinuousBatch" in printed
    assert "partial: interrupted" in printed
