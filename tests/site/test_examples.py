"""The scripts and the notebook in `examples/` run, on small sizes, and what they find is right."""

import ast
import contextlib
import html.parser
import importlib.util
import io
import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from numkv.demo.model import Model

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LINES = {"server.py": 150, "decoder.py": 100, "openai_server.py": 203}


def run(name, **options):
    """What an example returns, and what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        found = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"](**options)
    return found, printed.getvalue()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_are_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= LINES.get(path.name, 80)
    assert ast.get_docstring(ast.parse(text))
    assert f"test_{path.stem}" in globals()


def test_shared_prefixes():
    (used, alone), printed = run("shared_prefixes", requests=4, answer=2)
    assert used * 3 < alone
    assert "shared" in printed


def test_long_chat():
    cache, printed = run("long_chat", window=256, tokens=700, most_nbytes=800_000)
    assert 4 + 256 <= len(cache) <= 4 + 256 + 64
    assert "restarted with" in printed
    assert "in 3 shifts" in printed
    cache.check()


def test_sharded():
    """Shards of heads and of context give what one process gives; each layer is a message to a shard."""
    (by_shards, alone, messages), printed = run("sharded", tokens=40, new=2)
    assert np.allclose(by_shards, alone, atol=2e-3)
    assert messages == 3 * 2
    assert "4 shards" in printed


@pytest.mark.slow
def test_storage_kinds():
    errors, _ = run("storage_kinds", tokens=256)
    assert errors["fp32"] < 1e-5
    assert errors["fp32"] < errors["fp16"] < errors["int8, rotated"] < errors["int8"]
    assert errors["int4, rotated"] < errors["int4"] / 2


def test_drop_by_attention():
    (layer, loud, keep), _ = run("drop_by_attention", tokens=64, steps=16)
    assert layer.seq_len == len(keep) == 40
    assert np.isin(loud, keep).sum() >= 6
    layer.check()


@pytest.mark.slow
def test_own_kernels():
    (mine, theirs), _ = run("own_kernels", tokens=20)
    assert np.allclose(mine, theirs, atol=1e-3)


def test_save_and_load():
    (again, other), printed = run("save_and_load", tokens=40)
    assert len(again) == other.length(0) == 40
    assert "refused: `mark`" in printed


def test_prefix_store():
    found, _ = run("prefix_store", tokens=100)
    assert found == 96


def test_plan_memory():
    needs, printed = run("plan_memory", contexts=(1024, 8192))
    # 34 layers of 4 kv heads, 256 numbers each, K and V, 2 bytes; what is past the window is not kept
    assert needs.sequence_bytes(1024, "fp16") == 34 * 4 * 256 * 2 * 2 * 1024
    assert "NOT KNOWN" not in printed


def test_decoder():
    """The model's own text, in fewer bytes too; `numkv` generates it with kernels of its own."""
    text, printed = run("decoder", tokens=30, kind="fp32")
    assert run("decoder", tokens=30, kind="int8", rotate=True)[0] == text
    session = Model.load().start(64)
    logits, expected = session.forward([0, *b"def mean(values):\n    "])[-1], []
    for _ in range(30):
        expected.append(int(logits.argmax()))
        logits = session.step(expected[-1])
    assert text == expected
    assert "\n52 tokens, " in printed


def test_decoder_batch(monkeypatch):
    """Each text is what it is alone; all but the first find what they have in common."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    (texts, found), printed = run("decoder_batch", tokens=4, kind="fp32", rotate=False)
    names = runpy.run_path(str(ROOT / "examples" / "decoder_batch.py"))
    for text, ending in zip(texts, names["ENDINGS"], strict=True):
        prompt, count = names["HEADER"] + ending, len(text.encode())
        alone, _ = run("decoder", prompt=prompt, tokens=count, kind="fp32")
        assert bytes(alone).decode() == text
    assert found == [0, 72, 71]
    assert "72 tokens of the prompt were found: pop(self" in printed


def test_server():
    server, printed = run("server", requests=8, prompt=34, answer=40, num_blocks=8)
    assert len(server.done) == 8
    assert all(len(r.tokens) == 74 for r in server.done)
    assert server.events["swapped out"] == server.events["swapped in"] > 0
    assert server.events["found"] > 0
    assert "wait" in printed


def test_server_refuses_what_can_never_fit():
    names = runpy.run_path(str(ROOT / "examples" / "server.py"))
    with pytest.raises(ValueError, match="never fit"):
        names["Server"](2, 64).submit(names["Request"](0, [1] * 30, 10))


def test_torch_operators():
    pytest.importorskip("torch")
    (eager, graph), _ = run("torch_operators", sequences=2, tokens=2)
    assert bool((eager == graph).all())


def test_transformers_on_cpu():
    pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5.0")
    out, printed = run("transformers_on_cpu", context=32, new_tokens=4)
    assert out.shape == (1, 36)
    assert "numkv, int8" in printed


def test_openai_server():
    """Its tests need a client: tests/transformers_models/test_openai_server.py."""
    tests = ROOT / "tests" / "transformers_models" / "test_openai_server.py"
    assert '"openai_server.py"' in tests.read_text()


# ---------------------------------------------------------------- the notebook


class Parts(html.parser.HTMLParser):
    """Tags, to see that a drawing loads nothing."""

    def __init__(self):
        super().__init__()
        self.tags = set()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        assert not {"src", "href"} & {name for name, _ in attributes}


def test_the_notebook():
    """Its cells run one after another; drawings at their ends are those that the file has."""
    cells = json.loads((ROOT / "examples" / "caches.ipynb").read_text())["cells"]
    names, drawings = {}, 0
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        body = ast.parse("".join(cell["source"])).body
        last = body[-1].value if isinstance(body[-1], ast.Expr) else None
        named = isinstance(last, ast.Name)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(ast.Module(body[: -1 if named else None], []), "cell", "exec"), names)
        shown = {x["output_type"]: x for x in cell["outputs"]}
        assert printed.getvalue() == "".join(shown.get("stream", {"text": []})["text"])
        if named:
            drawing = names[last.id]._repr_html_()
            assert ["".join(shown["execute_result"]["data"]["text/html"])] == [drawing]
            Parts().feed(drawing)
            drawings += 1
    assert drawings >= 6


@pytest.mark.skipif(
    importlib.util.find_spec("nbformat") is None, reason="nbformat is not installed"
)
def test_the_notebook_is_one():
    import nbformat

    nbformat.validate(nbformat.read(ROOT / "examples" / "caches.ipynb", as_version=4))
