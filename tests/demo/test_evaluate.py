"""Evaluation on texts."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from demo_models import reference_logits, write_checkpoint

from numkv.demo import BUNDLED_MODEL
from numkv.demo.cache import CacheChoice
from numkv.demo.evaluate import Document, evaluate, held_out
from numkv.demo.model import Model
from numkv.errors import NotSupported


def expected_bits(config, weights, texts, context, scored=None):
    """Windows of `context` inputs every half context; each byte scored in the first that has it."""
    bits = size = 0
    for text in texts:
        tokens = [0, *text.encode()]
        chosen = range(1, len(tokens)) if scored is None else scored
        size += len(chosen)
        for target in chosen:
            begin = 0
            while target > begin + context:
                begin += context // 2
            logits = reference_logits(config, weights, tokens[begin:target])[-1]
            p = np.exp(logits - logits.max())
            bits -= np.log2(p[tokens[target]] / p.sum())
    return bits / size


def test_evaluate(tmp_path):
    config, weights = write_checkpoint(tmp_path)
    texts = ["def f(x):\n    return x + 1\n", "é", "import os\n"]
    documents = [Document(str(i), text) for i, text in enumerate(texts)]
    caches = {"same": CacheChoice("fp32"), "coarse": CacheChoice("bf16", block_size=4)}
    seen = []
    reference, same, coarse = evaluate(
        Model.load(tmp_path), documents, caches, context=8, progress=lambda *n: seen.append(n)
    )
    size = sum(len(text.encode()) for text in texts)
    assert [s.label for s in (reference, same, coarse)] == ["reference", "same", "coarse"]
    assert all((s.num_tokens, s.num_bytes) == (size, size) for s in (reference, same, coarse))
    assert seen[-1][0] == seen[-1][1]
    expected = expected_bits(config, weights, texts, 8)
    assert reference.bits_per_byte == pytest.approx(expected, abs=1e-5)
    assert same.bits_per_byte == reference.bits_per_byte
    assert (same.kl_divergence, same.agreement) == (0, 1)
    assert 1e-9 < coarse.kl_divergence < 1e-3
    assert coarse.agreement > 0.9
    assert coarse.bits_per_byte == pytest.approx(expected, abs=1e-2)


def test_some_windows(tmp_path):
    config, weights = write_checkpoint(tmp_path)
    model = Model.load(tmp_path)
    document = Document("", "def f(x):\n    return x + 1\nab\n")  # 30 bytes
    # With windows of 8 tokens from 0, 4, … each but the first scores 4 bytes: 9 to 12, 13 to 16, … 29 and 30.
    for count, scored in (
        (1, range(21, 25)),
        (2, [*range(13, 17), *range(25, 29)]),
        (9, range(9, 31)),
    ):
        (score,) = evaluate(model, [document], {}, context=8, windows=count)
        assert (score.num_tokens, score.num_bytes) == (len(scored), len(scored))
        expected = expected_bits(config, weights, [document.text], 8, scored)
        assert score.bits_per_byte == pytest.approx(expected, abs=1e-5)
    (score,) = evaluate(
        model, [document, Document("", "import os\n"), Document("", "")], {}, context=16, windows=1
    )
    assert len(score.by_document) == 2
    alone = evaluate(model, [Document("", "import os\n")], {}, context=16, windows=1)[0]
    assert alone.num_bytes == 10  # there is but the first window
    assert score.by_document[1] == pytest.approx(alone.bits_per_byte, abs=1e-9)


def test_evaluate_refuses(tmp_path):
    write_checkpoint(tmp_path)
    model = Model.load(tmp_path)
    for context in (1, 65):
        with pytest.raises(ValueError, match="context"):
            evaluate(model, [Document("", "text")], {}, context=context)
    with pytest.raises(ValueError, match="windows: expected 1 or more"):
        evaluate(model, [Document("", "text")], {}, windows=0)
    with pytest.raises(NotSupported, match="two tokens or more"):
        evaluate(model, [Document("", "")], {})


def test_held_out(tmp_path):
    texts = {"a.py": b"import b\n", "b.py": b"x = 1\n"}
    entries = [{"name": n, "sha256": hashlib.sha256(t).hexdigest()} for n, t in texts.items()]
    listing = tmp_path / "heldout.json"
    listing.write_text(json.dumps({"python": "3.11.7", "modules": entries}))
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    found = held_out(listing, tmp_path)
    assert found.is_reference
    assert [(d.name, d.text.encode()) for d in found.documents] == list(texts.items())
    assert str(found) == "2 held-out modules, exactly those of Python 3.11.7"
    (tmp_path / "a.py").write_bytes(b"import c\n")
    (tmp_path / "b.py").unlink()
    found = held_out(listing, tmp_path)
    assert not found.is_reference
    assert (found.changed, found.missing) == (("a.py",), ("b.py",))
    assert "not the reference text of Python 3.11.7; 1 differ; missing: b.py" in str(found)


def test_no_held_out_module_was_trained_on():
    training = Path(__file__).parents[2] / "training" / "corpus.json"
    corpus = json.loads(training.read_text())
    names = {
        entry["name"]
        for entry in json.loads((BUNDLED_MODEL / "heldout.json").read_text())["modules"]
    }
    assert len(names) == 12
    assert names == set(corpus["held_out"])
    trained = {entry["name"] for entry in corpus["files"]}
    assert "test/test_string.py" in trained
    assert not trained & {*names, *(f"test/test_{name}" for name in names)}
    hashes = {
        x["sha256"] for x in json.loads((BUNDLED_MODEL / "heldout.json").read_text())["modules"]
    }
    assert not hashes & {entry["sha256"] for entry in corpus["files"]}
