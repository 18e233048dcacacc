"""The accuracy report: errors against formulas written anew, caches of compressed heads, the command and its files."""

import math
import signal
import sys

import naive
import numpy as np
import pytest
from demo_models import TOKENS, cells, run, write_checkpoint

import numkv
from numkv.cli import accuracy_report, main
from numkv.cli.output import Progress
from numkv.demo import accuracy
from numkv.demo.cache import (
    CacheChoice,
    CompressorChoice,
    NewestChoice,
    parse_cache,
)
from numkv.demo.evaluate import Document, evaluate
from numkv.demo.model import Model
from numkv.storage import Rotation


def attention(k, v, q):
    """Masked scores of all tokens at once, in float64: heads of q in groups, the newest queries last."""
    k, v = (np.repeat(np.asarray(x, np.float64), q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("ihd,thd->iht", q, k) / math.sqrt(q.shape[2])
    unseen = np.arange(len(k)) > np.arange(len(k) - len(q), len(k))[:, None]
    weights = np.exp(np.where(unseen[:, None], -np.inf, scores))
    weights /= weights.sum(axis=2, keepdims=True)
    return np.einsum("iht,thd->ihd", weights, v)


# ---------------------------------------------------------------- random rows


def test_exact_attention(rng):
    k, v = rng.standard_normal((2, 9, 2, 4))
    q = rng.standard_normal((3, 6, 4))
    np.testing.assert_allclose(accuracy.exact_attention(k, v, q), attention(k, v, q), rtol=1e-12)


@pytest.mark.parametrize(
    ("actual", "error"),
    [([[3.0, 4.0]], 0.0), ([[3.0, 5.0]], 0.2), ([[0.0, 0.0]], 1.0), ([[6.0, 8.0]], 1.0)],
)
def test_relative_error(actual, error):
    found = accuracy.relative_error(np.array(actual), np.array([[3.0, 4.0]]))
    assert found == pytest.approx(error, abs=1e-15)


@pytest.mark.parametrize("name", accuracy.ROWS)
def test_rows(name):
    rows, again = accuracy.ROWS[name](64), accuracy.ROWS[name](64)
    assert rows.k.shape == rows.v.shape == (64, 8, 128)
    assert rows.q.shape == (8, 32, 128)
    for x, y in ((rows.k, again.k), (rows.v, again.v), (rows.q, again.q)):
        np.testing.assert_array_equal(x, y)
    size = np.sqrt((rows.v**2).mean(axis=(0, 1)))
    if name in ("outlier", "offset"):
        others = np.delete(size, size.argmax())
        assert 17 < size.max() / np.median(others) < 23
        assert np.array_equal((rows.k**2).mean(axis=(0, 1)).argmax(), size.argmax())
        steady = abs(rows.v[..., size.argmax()].mean()) / size.max()
        assert (steady > 0.9) == (name == "offset")
    else:
        np.testing.assert_allclose(size, 1, atol=0.2)
    weights = np.einsum("ihd,thd->iht", rows.q, np.repeat(rows.k, 4, axis=1)) / math.sqrt(128)
    weights = np.exp(weights - weights.max(axis=2, keepdims=True))
    few = 1 / ((weights / weights.sum(axis=2, keepdims=True)) ** 2).sum(axis=2)
    assert (few.mean() < 5) == (name in ("sharp", "fast bias"))


def test_per_row_attention():
    rows = accuracy.ROWS["outlier"](16)

    def rounded(x):
        scale = np.abs(x).max(axis=-1, keepdims=True) / 7
        return np.round(x / scale) * scale

    expected = attention(rounded(rows.k), rounded(rows.v), rows.q)
    np.testing.assert_allclose(accuracy.per_row_attention(rows, False), expected, rtol=1e-10)

    hadamard = np.ones((1, 1))
    while len(hadamard) < 128:
        hadamard = np.kron(hadamard, [[1.0, 1.0], [1.0, -1.0]])
    turn = np.diag(Rotation(128).signs.astype(np.float64)) @ hadamard / math.sqrt(128)
    k, v, q = rows.k @ turn, rows.v @ turn, rows.q @ turn
    expected = attention(rounded(k), rounded(v), q) @ turn.T
    np.testing.assert_allclose(accuracy.per_row_attention(rows, True), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("label", "bound"),
    [
        ("fp32", 1e-5),
        ("int8", 2e-3),
        ("int4", 2e-3),
        pytest.param("int8/int4", 2e-3, marks=pytest.mark.nightly),
    ],
)
def test_attended_is_attention_over_what_is_stored(label, bound):
    rows = accuracy.ROWS["Gaussian"](270)  # more than a piece of a prompt
    k, v = rows.k, rows.v
    if label != "fp32":
        k_kind, _, v_kind = label.partition("/")
        k = naive.dequantise(*naive.quantise(k, k_kind))
        v = naive.dequantise(*naive.quantise(v, v_kind or k_kind))
    out = accuracy.attended(parse_cache(label), rows)
    assert accuracy.relative_error(out, attention(k, v, rows.q)) < bound


def test_attended_with_compressed_heads():
    rows = accuracy.ROWS["sharp"](24)
    heads = numkv.MultiHeadCompressor(8, numkv.CompressorConfig(128), num_q_heads=32)
    k, v, q = (x.astype(np.float32) for x in (rows.k, rows.v, rows.q))
    heads.extend(k[:16], v[:16])
    expected = []
    for t in range(8):
        heads.push_token(k[16 + t], v[16 + t])
        expected.append(heads.attend(q[t]))
    out = accuracy.attended(CompressorChoice(4), rows)
    np.testing.assert_array_equal(out.astype(np.float32), expected)
    assert accuracy.relative_error(out, attention(rows.k, rows.v, rows.q)) < 0.3


def test_the_newest_tokens_alone():
    rows = accuracy.ROWS["Gaussian"](40)
    newest = [
        attention(rows.k[i - 8 : i], rows.v[i - 8 : i], rows.q[i - 33 : i - 32])[0]
        for i in range(33, 41)
    ]
    out = accuracy.attended(NewestChoice(8), rows)
    assert accuracy.relative_error(out, np.array(newest)) < 2e-3
    assert accuracy.relative_error(out, attention(rows.k, rows.v, rows.q)) > 0.3
    with pytest.raises(numkv.NotSupported, match="last8: expected one text, got 2"):
        NewestChoice(8)(accuracy.row_shape(), [4, 4])


@pytest.mark.parametrize("seed", range(4))
def test_better_caches(seed):
    rng = np.random.default_rng(seed)
    sizes, losses = rng.integers(1, 9, (2, 30))
    points = {str(i): x for i, x in enumerate(zip(sizes.tolist(), losses.tolist(), strict=True))}
    found = accuracy.better_caches(points)
    least = {n: min(y for x, y in points.values() if x <= n) for n in sizes.tolist()}
    for label, (size, loss) in points.items():
        fewer = [y for x, y in points.values() if x < size]
        above = loss > least[size] or loss in fewer
        assert (found[label] is not None) == above
        if above:
            assert points[found[label]][1] == least[size]
            assert points[found[label]][0] <= size


def test_rotation_spreads_an_outlier():
    rows = accuracy.ROWS["outlier"](256)
    expected = attention(rows.k, rows.v, rows.q)
    per_row = accuracy.relative_error(accuracy.per_row_attention(rows, False), expected)
    plain, rotated = (
        accuracy.relative_error(accuracy.attended(CacheChoice.parse(x), rows), expected)
        for x in ("int4", "int4+rotate")
    )
    assert rotated < per_row / 3
    assert rotated < plain / 2


# ---------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("label", "choice"),
    [
        ("int4", CacheChoice("int4")),
        ("int4+rotate", CacheChoice("int4", rotate=True)),
        ("int8/int4+rotate", CacheChoice("int8", "int4", rotate=True)),
        ("int4+window128+sinks4", CacheChoice("int4", window=128, sinks=4)),
        ("codes3", CompressorChoice(3)),
        ("codes4+sketch", CompressorChoice(4, True)),
        ("last256", NewestChoice(256)),
    ],
)
def test_labels(label, choice):
    assert parse_cache(label) == choice
    assert choice.label == label


def test_label_words_come_in_any_order():
    assert CacheChoice.parse("int4+sinks4+rotate").label == "int4+rotate+sinks4"
    assert CacheChoice.parse("int4+window0").label == "int4"
    assert CacheChoice.parse("int8").options == {}


@pytest.mark.parametrize(
    ("label", "error", "match"),
    [
        ("int4+turn", numkv.NotSupported, "expected rotate, or window .* got 'turn' in 'int4"),
        ("int4+window", numkv.NotSupported, "a number of tokens"),
        ("int4+", numkv.NotSupported, "got ''"),
        ("int5+rotate", numkv.UnsupportedDType, "expected one of fp64"),
        ("codes", numkv.NotSupported, "codes with a number of bits"),
        ("codes4+rotate", numkv.NotSupported, "codes with a number of bits"),
        ("codes17", numkv.NotSupported, r"codes17: .bits.: expected an integer in \[1, 16\]"),
    ],
)
def test_what_is_no_label(label, error, match):
    with pytest.raises(error, match=match):
        parse_cache(label)


# ---------------------------------------------------------------- caches of a model


@pytest.fixture
def model(tmp_path):
    write_checkpoint(tmp_path, num_key_value_heads=2)
    return Model.load(tmp_path)


def test_a_model_on_compressed_heads(model, target):
    tokens = TOKENS[:5]
    expected = model.start(16).forward(tokens)
    choice = CompressorChoice(8, target=target)
    session = model.start(16, choice, target)
    whole = session.forward(tokens)
    np.testing.assert_allclose(whole, expected, atol=0.05)
    assert np.abs(whole - expected).max() > 1e-6
    session.rewind()
    parts = [session.forward(tokens[:2])]
    with pytest.raises(IndexError, match="tokens"):
        session.forward([256])
    parts.append(session.forward(tokens[2:]))
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-5)
    assert session.num_tokens == len(tokens)


def test_compressed_heads_after_errors(model):
    session = model.start(4, CompressorChoice(4, sketch=True))
    cache = session.batch.cache
    expected = session.forward([1, 2])
    with pytest.raises(numkv.CacheFull, match="room for 3 more tokens, got 2 of capacity 4"):
        session.forward([3, 4, 5])
    session.rewind(1)
    np.testing.assert_allclose(session.forward([2]), expected[1:], atol=1e-5)
    session.rewind(2)
    step = cache.reserve([0], [1])
    model_logits = session.batch.network.hidden(np.array([7]), step)
    cache.rollback(step)
    assert (session.num_tokens, len(model_logits)) == (2, 1)
    session.rewind()
    np.testing.assert_array_equal(session.forward([1, 2]), expected)
    with pytest.raises(numkv.NotSupported, match="expected one text, got 2"):
        model.batch([4, 4], CompressorChoice(4))


@pytest.mark.parametrize(
    ("label", "size"),
    [
        ("fp32", 2 * 2 * 2 * 32),
        ("int8", 2 * 2 * 2 * (8 + 4)),
        ("codes4", 2 * 2 * 2 * (4 + 4)),
        ("codes3+sketch", 2 * 2 * (2 * (3 + 4) + 1 + 4)),
        ("int8+rotate", 2 * 2 * 2 * (8 + 4)),
        ("last4", 2 * 2 * 2 * 16 * 4 / 16),
        ("int8+window3+sinks1", 2 * 2 * 2 * (8 + 4 + 4 * 32 / 16)),
    ],
)
def test_bytes_at(model, label, size):
    choice = parse_cache(label)
    assert choice.bytes_at(model.config, 16) == size  # 2 layers of 2 heads of 8 elements
    session = model.start(16, choice)
    session.forward(TOKENS)
    cache = session.batch.cache
    if label.startswith("last"):  # it has more, of which queries see this
        return
    if label.startswith("codes"):
        assert sum(layer.compressor.bytes_per_token for layer in cache.layers) == size
    else:
        assert sum(layer.nbytes for layer in cache.layers) == 16 * size


def test_options_reach_the_layers(model):
    expected = model.start(16).forward(TOKENS)
    kept = model.start(16, CacheChoice.parse("int8+window16"))
    np.testing.assert_allclose(kept.forward(TOKENS), expected, atol=1e-5)
    turned = model.start(16, CacheChoice.parse("int8+rotate")).forward(TOKENS)
    np.testing.assert_allclose(turned, expected, atol=0.2)
    assert not np.array_equal(turned, model.start(16, CacheChoice("int8")).forward(TOKENS))


def test_blocks_take_kinds_alone(model):
    with pytest.raises(numkv.NotSupported, match="expected a storage kind alone"):
        model.start(16, CacheChoice("int8", rotate=True, block_size=4))


def test_pieces_of_a_text_do_not_matter(model):
    documents = [Document("a", "import os\nimport sys\n")]
    caches = {"codes8": CompressorChoice(8)}
    whole = evaluate(model, documents, caches, context=16)
    pieces = evaluate(model, documents, caches, context=16, chunk=3)
    for a, b in zip(whole, pieces, strict=True):
        assert (a.label, a.num_tokens) == (b.label, b.num_tokens)
        assert a.bits_per_byte == pytest.approx(b.bits_per_byte, abs=1e-5)


# ---------------------------------------------------------------- the command


@pytest.fixture
def options(tmp_path):
    write_checkpoint(tmp_path / "tiny", max_position_embeddings=128)
    path = tmp_path / "text.py"
    path.write_text("import os\n" * 3)
    kinds = ("--kind", "bf16", "int8", "codes4")
    sizes = ("--rows", 24, "--needles", 1)
    return ("accuracy", "--model", tmp_path / "tiny", "--file", path, *sizes, *kinds)


def test_accuracy(options, tmp_path, capsys):
    output = run(capsys, *options, "--out", tmp_path / "report")
    parts = output.split("\n\n")
    model_table, recall_table = parts[:2]
    (row_table,) = (x for x in parts if "bytes/token/head" in x)
    assert cells(model_table, "fp32")[1:3] == ["256", "32.00"]
    assert cells(model_table, "fp32")[4:8] == ["+0.00000", "reference", "reference", "reference"]
    assert cells(model_table, "bf16")[1:3] == ["128", "16.00"]
    assert cells(model_table, "codes4")[1:3] == ["64", "8.00"]  # 4 bits of 8 elements, and a scale
    assert 0 < float(cells(model_table, "bf16")[6]) < float(cells(model_table, "codes4")[6])
    assert [cells(model_table, x)[-1] for x in ("fp32", "bf16", "codes4")] == ["yes"] * 3
    assert (
        f"{tmp_path / 'text.py'}: 30 bytes, 1 of each module's windows of 128 tokens"
        in " ".join(output.split())
    )
    labels = [x.split()[0] for x in recall_table.splitlines()[2:7]]
    assert labels == ["fp32", "bf16", "int8", "codes4", "no"]
    copied = cells(recall_table, "int8")[3]
    assert copied == cells(model_table, "int8")[9]
    assert "fp32" not in row_table
    assert cells(row_table, "int8")[1:3] == [f"{2 * (128 + 4)}", "8.25"]
    assert cells(row_table, "codes4")[1:3] == [f"{2 * (64 + 4)}", "4.25"]
    rows = accuracy.ROWS["Gaussian"](24)
    stored = (naive.dequantise(*naive.quantise(x, "int8")) for x in (rows.k, rows.v))
    out, exact = attention(*stored, rows.q), attention(rows.k, rows.v, rows.q)
    error = np.sqrt(((out - exact) ** 2).sum() / (exact**2).sum())
    assert float(cells(row_table, "int8")[3]) == pytest.approx(100 * error, rel=0.05)
    assert "From per-row 4 bits to per-row 4 bits+rotate: Gaussian " in output
    (outliers,) = (x for x in parts if "as it is" in x)
    bf16, int8 = ([float(x) for x in cells(outliers, label)[2:5]] for label in ("bf16", "int8"))
    assert int8[2] > int8[1] > int8[0]
    assert bf16[2] == bf16[1] == bf16[0]  # which a power of two does not round
    written = (tmp_path / "report" / "accuracy.md").read_text()
    assert "| int8 | 264 | 8.25 | " in written
    assert recall_table.splitlines()[2].split()[2] in written
    assert "| bf16 | 128 | " in written
    assert max(len(x) for x in written.splitlines() if not x.startswith("|")) <= 120


def test_earlier_results_are_added(options, tmp_path, capsys):
    options = options[: options.index("--kind")]
    both = run(capsys, *options, "--kind", "bf16", "int8")
    run(capsys, *options, "--kind", "bf16", "--out", tmp_path)
    file = tmp_path / "accuracy.json"
    assert run(capsys, *options, "--kind", "int8", "--add", file) == both
    wrong = ["--kind", "int8", "--add", str(file), "--needles", "2"]
    assert main([*(str(x) for x in options), *wrong]) == 2
    expected = f"--add {file}: expected needle_texts 2 as in this report, got 1"
    assert expected in capsys.readouterr().err
    for damaged in ('{"settings": {}}', '{"settings": ["x"], "caches": []}', "[" * 100_000):
        file.write_text(damaged)
        assert main([*(str(x) for x in options), *wrong]) == 2
        assert "expected an accuracy.json of this command" in capsys.readouterr().err


def test_a_cache_above_the_envelope_is_told(options, capsys):
    options = options[: options.index("--kind")]
    output = run(capsys, *options, "--kind", "int8", "codes8", "last2")
    (worse,) = (x for x in output.split("\n\n") if x.startswith("not worth its bytes"))
    rows = [line.split() for line in worse.splitlines()[2:]]
    model_table = output.split("\n\n")[0]
    found = {}
    for label in ("fp32", "int8", "codes8", "last2"):
        row = cells(model_table, label)
        kl = 0.0 if label == "fp32" else float(row[6])
        found[label] = int(row[1]), kl
        better = cells(worse, label)[5] if row[-1] == "no" else None
        if better is not None:
            x, y = found[label], found.setdefault(better, _point(model_table, better))
            assert y[0] <= x[0]
            assert y[1] <= x[1]
    assert len(rows) == sum(cells(model_table, x)[-1] == "no" for x in found)
    assert rows  # int8 and codes8 take the same bytes: one of them loses more
    envelope = next(x for x in output.split("\n\n") if x.startswith("Lower envelope"))
    assert "fp32" not in envelope


def _point(table, label):
    row = cells(table, label)
    return int(row[1]), float(row[6])


def test_without_matplotlib_there_is_no_picture(options, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = [*options[:-2], "--out", tmp_path / "report"]
    assert main([str(x) for x in arguments]) == 0
    assert "no picture: matplotlib is missing; pip install" in capsys.readouterr().err
    assert sorted(x.name for x in (tmp_path / "report").iterdir()) == [
        "accuracy.json",
        "accuracy.md",
    ]
    assert "accuracy.svg" not in (tmp_path / "report" / "accuracy.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind", "codes4+window"], "argument --kind: expected codes with a number of bits"),
        (["--kind", "fp17"], "expected one of fp64"),
        (["--rows", "15"], "argument --rows: expected an integer of 16 or more, got '15'"),
        (["--context", "50"], "names to copy: context: expected room for names"),
        (["--kind", "last0"], "expected last with a number of tokens, 1 or more, got 'last0'"),
        (["--add", "/nowhere/accuracy.json"], "/nowhere/accuracy.json: no such file"),
        (["--context", "4096"], "--context 4,096: the model has 2,048"),
        (["--modules", "all", "csv"], "--modules: expected some of "),
        (["--file", "/nowhere"], "/nowhere: no such file or directory"),
        (["--out", "/dev/null/report"], "/dev/null/report: not a directory"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    assert main(["accuracy", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("numkv: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize("command", [[], ["warmup"], ["stream"]])
def test_other_commands_take_kinds_alone(command, capsys):
    assert main([*command, "--kind", "int4+rotate"]) == 2
    assert "expected a kind alone, got 'int4+rotate'" in capsys.readouterr().err


# ---------------------------------------------------------------- the picture


def test_picture(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, of the extra perf")
    crowd = [(f"codes{n} with a long name", 100.0 + n % 3, 0.1 + n / 1000) for n in range(12)]
    panels = [
        accuracy_report.Panel("a", "bytes", crowd),
        accuracy_report.Panel("b", "bytes", [("fp32", 4.0, 0.0)]),
    ]
    boxes = []

    def noted(box, offset, taken, inside):
        boxes.append([x.extents for x in taken])
        return cost(box, offset, taken, inside)

    cost = accuracy_report._cost
    monkeypatch.setattr(accuracy_report, "_cost", noted)
    accuracy_report.draw(panels, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert all(label in text for label, _, _ in crowd)
    assert "fp32" not in text  # no error to be shown
    found = boxes[-1][len(crowd) :]  # labels placed before the last
    assert len(found) == len(crowd) - 1
    for i, a in enumerate(found):
        for b in found[:i]:
            assert not (a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3])


@pytest.mark.parametrize(
    ("offset", "free"), [((9, -5), True), ((-3, -5), False), ((95, -5), False), ((30, 20), False)]
)
def test_labels_keep_off(offset, free):
    transforms = pytest.importorskip(
        "matplotlib.transforms", reason="matplotlib is of the extra perf"
    )
    inside, label, *taken = (
        transforms.Bbox.from_extents(*x)
        for x in ((0, 0, 150, 150), (50, 50, 70, 60), (45, 45, 55, 55), (75, 70, 100, 80))
    )
    price = accuracy_report._cost(label, offset, taken, inside)
    assert (price < 10_000) == free


@pytest.mark.parametrize(
    ("stage", "columns"),
    [("random rows", 1), ("evaluating", 4), ("needles", 5), ("keys with channels of 64 times their size", 6)],
)  # fmt: skip
def test_an_interrupt_shows_what_was_measured(
    stage, columns, options, tmp_path, capsys, monkeypatch
):
    """At the first news of a stage: the table has the columns before it, is marked, and nothing is written."""
    update = Progress.update

    def once(progress, done, total):
        if progress.what == stage and done == total:
            signal.raise_signal(signal.SIGINT)
        update(progress, done, total)

    monkeypatch.setattr(Progress, "update", once)
    # Jobs in the background of a shell begin with SIGINT ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main([str(x) for x in (*options, "--out", tmp_path / "report")]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
    captured = capsys.readouterr()
    assert "partial: interrupted before everything was measured" in captured.out
    assert "numkv: interrupted" in captured.err
    filled = len(cells(captured.out, "bf16")) - 1
    assert filled >= columns, captured.out
    assert ("%" in captured.out) == (columns >= 5)
    assert not list((tmp_path / "report").iterdir())
