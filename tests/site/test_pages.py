"""The documentation site: its code runs and prints what it says, its links resolve, its navigation is complete.

One rule for all pages: Python blocks of a page run one after another, as someone would paste them. A ``text`` block
behind one says what it prints; behind a block titled ``wrong``, which error it raises.
"""

import contextlib
import importlib.util
import io
import re
import sys
import warnings
from pathlib import Path

import pytest
from walked import each

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
try:
    from tools import site
finally:
    sys.path.pop(0)

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(
    r"^```python(?P<info>[^\n]*)\n(?P<code>.*?)^```\n(?:\n```text\n(?P<said>.*?)^```$)?",
    re.M | re.S,
)
NEEDS = {
    "torch.md": ["torch"],
    "transformers.md": ["torch", "transformers"],
    "tutorial_transformers.md": ["torch", "transformers"],
}


def named(path):
    return str(path.relative_to(DOCS))


def with_code():
    found = [page for page in PAGES if BLOCK.search(page.read_text())]
    return [
        # Which compiles.
        pytest.param(page, marks=[pytest.mark.slow] * (page.name == "own_kernels.md"))
        for page in found
    ]


def words(text):
    return " ".join(text.split())


@pytest.mark.parametrize("page", with_code(), ids=named)
def test_code_runs_and_prints_what_it_says(page, tmp_path, monkeypatch):
    for module in NEEDS.get(page.name, []):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    names = {"__name__": "page"}
    text = page.read_text()
    for block in BLOCK.finditer(text):
        line = text[: block.start()].count("\n") + 1
        code = compile("\n" * line + block["code"], str(page), "exec")
        printed = io.StringIO()
        if "wrong" in block["info"]:
            with pytest.raises(Exception) as caught:
                exec(code, names)
            error = f"{type(caught.value).__name__}: {caught.value}"
            assert words(error) == words(block["said"]), f"line {line}"
            continue
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            exec(code, names)
        if block["said"] is not None:
            assert printed.getvalue() == block["said"], f"line {line}"


def anchors(page):
    """Anchors of the headings of a page, as GitHub and mkdocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return found


@each("page", [*site.pages(), ROOT / "README.md"])
def test_links_resolve(page):
    for target, anchor in site.links(page):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page}: {target}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{page}: {target}#{anchor}"


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"([\w/]+\.md)$", text[text.index("\nnav:") :], re.M)
    assert sorted(listed) == sorted(set(listed))
    assert set(listed) <= {site.address(page) for page in site.pages()}
    assert {named(page) for page in PAGES} - set(listed) <= set(LATER)


#: Pages that the navigation does not have yet.
LATER = ()


def test_the_newest_race_of_a_machine_counts(tmp_path, monkeypatch):
    results = tmp_path / "perf/results"
    results.mkdir(parents=True)
    pages = {
        "2026-11-01-b-peers-3": 3, "2026-11-02-a-peers": 1, "2026-11-02-a-peers-2": 2, "2026-11-01-a-peers": 4,
        "2026-11-03-a-transformers-peers": None,
    }  # fmt: skip
    for name, share in pages.items():
        cells = "" if share is None else f"| A: long | {' | '.join([f'0.{share}', '2 (x)'] * 5)} |"
        (results / f"{name}.md").write_text(f"# A race\n\n{cells}\n")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    table = site._machines()
    assert re.findall(r"results/(\S+)\.md", table) == [
        "2026-11-02-a-peers-2",
        "2026-11-01-b-peers-3",
    ]
    assert "| A: long | fp32 | 0.2, × 2 (x) | 0.3, × 2 (x) |" in table


def test_names_on_the_api_pages_are_public_and_complete():
    import numkv

    shown = set()
    for page in (DOCS / "api").glob("*.md"):
        for name in re.findall(r"^::: numkv\.(\S+)$", page.read_text(), re.M):
            value = numkv
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(f"numkv.{name.partition('.')[0]}")
            for part in name.split("."):
                value = (
                    getattr(value, part, None)
                    or importlib.import_module(f"numkv.{name.rpartition('.')[0]}").__dict__[part]
                )
            assert name not in shown
            shown.add(name)
    assert {n for n in numkv.__all__ if not n.startswith("_")} <= shown


def test_each_parameter_of_a_class_has_its_own_text():
    """One text for several would stand behind each of them; those of objects that users do not make lead elsewhere."""
    import numkv

    joint = []
    for name in numkv.__all__:
        value = getattr(numkv, name)
        if isinstance(value, type):
            section = (value.__doc__ or "").partition("Parameters\n")[2].partition("\n\n")[0]
            joint += [
                f"{name}: {line}" for line in re.findall(r"^    (\w+, .* : .*)$", section, re.M)
            ]
    assert joint == []


def test_help_of_a_class_can_be_read():
    """Its arguments fit into a few lines."""
    import inspect
    import pydoc

    import numkv

    text = pydoc.render_doc(numkv.PagedKVCache, renderer=pydoc.plaintext)
    assert "ForwardRef" not in text
    shown = str(inspect.signature(numkv.PagedKVCache))
    assert shown.startswith("(num_layers: 'int | None' = None, num_kv_heads:")
    assert len(shown) < 420


def test_code_that_pages_show_is_there():
    text = (DOCS / "how_it_works.md").read_text()
    assert text.count("<!-- code: ") >= 8
    assert "<!-- code" not in site.expand(text)
    assert "block = np.int64(block_table[position // block_size])" in site.expand(text)
    with pytest.raises(LookupError, match="no such function"):
        site.expand("<!-- code: numkv/rows/address.py nothing -->")
    with pytest.raises(LookupError, match="no such file"):
        site.expand("<!-- code: numkv/rows/nothing.py -->")


def test_nothing_is_loaded_from_elsewhere():
    """Neither the theme nor a page asks for a font, a script or a picture of another host."""
    config = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in config
    assert "http" not in config
    for page in PAGES:
        assert not re.search(
            r"!\[[^\]]*\]\(https?:|<(?:script|link|img|iframe)\b", page.read_text()
        )


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_the_site_builds(tmp_path):
    """With warnings as errors; no page loads anything from another host."""
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "api/many_sequences.html").read_text()
    signature = re.search(r"<pre>.*?PagedKVCache.*?</pre>", api, re.S)[0]
    plain = re.sub(r"<[^>]*>|\s", "", signature)
    assert "PagedKVCache(num_layers" in plain
    assert "state_slots" in plain
    assert 'href="functions.html#numkv.decode_attention"' in api
    assert 'href="../latent.html">Latent attention' in api
    assert not re.search(r"docs/\w+\.md", api)
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]*)"', page.read_text())
        loaded += re.findall(
            r'<link rel="(?:stylesheet|icon|preconnect)"[^>]* href="([^"]*)"', page.read_text()
        )
        assert not [url for url in loaded if re.match(r"(https?:)?//", url)], page
