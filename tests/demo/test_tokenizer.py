"""Tokenizers."""

import sys

import pytest
from demo_models import SIZES, write_checkpoint

import numkv
from numkv.demo.checkpoint import CheckpointError, ModelConfig
from numkv.demo.model import Model
from numkv.demo.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer

TEXT = "naïve – 日本 🎉\n"


def test_bytes_stream_whole_characters():
    tokenizer = ByteTokenizer(bos_token=0)
    tokens = tokenizer.encode(TEXT)
    assert tokens == [0, *TEXT.encode()]
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokens[1:]]
    assert "".join(pieces) + stream.finish() == TEXT
    assert "\ufffd" not in "".join(pieces)
    stream.push(0xE2)
    assert stream.finish() == "\ufffd"


def json_tokenizer(path, texts=(TEXT * 20,)):
    """A small byte-level BPE, as Qwen and Llama 3 use."""
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers library is an extra")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    backend.save(str(path))


def test_tokenizer_json_streams_whole_characters(tmp_path):
    json_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    for text in (TEXT, "ab é ŵ " * 3 + "🎈"):
        tokens, stream = tokenizer.encode(text), tokenizer.stream()
        pieces = [stream.push(token) for token in tokens]
        assert "".join(pieces) + stream.finish() == text
        assert "\ufffd" not in "".join(pieces)
    stream = tokenizer.stream()
    assert [stream.push(token) for token in tokenizer.encode("🎉")[:1]] == [""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_tokenizer_json_must_fit_the_model(tmp_path):
    json_tokenizer(tmp_path / "tokenizer.json")
    write_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="the model knows 256"):
        Model.load(tmp_path)
    write_checkpoint(tmp_path, vocab_size=280)
    tokens = Model.load(tmp_path).tokenizer.encode(TEXT)
    assert len(tokens) < len(TEXT.encode())


def test_broken_tokenizer_json(tmp_path):
    pytest.importorskip("tokenizers", reason="the tokenizers library is an extra")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        JsonTokenizer(tmp_path / "tokenizer.json")


def test_tokenizers_library_is_optional(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    config = ModelConfig.from_dict({"model_type": "llama", **SIZES})
    assert isinstance(load_tokenizer(tmp_path, config), ByteTokenizer)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(numkv.NotSupported, match="pip install tokenizers"):
        load_tokenizer(tmp_path, config)
