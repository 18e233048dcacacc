"""Drawings say what is in a cache: as text, in ASCII, as HTML, at the command line."""

import doctest
import html.parser
import io

import numpy as np
import pytest
from layer_lists import paged_kv_cache

import numkv
from numkv.cli import main
from numkv.drawing import text as text_module
from numkv.drawing.picture import Picture, State, Strip, in_short
from numkv.drawing.text import text_of


def rows(tokens, heads=2, dim=8):
    return np.ones((2, tokens, heads, dim), np.float32)


def drawn(cache):
    """What `show` prints."""
    stream = io.StringIO()
    numkv.show(cache, file=stream)
    return stream.getvalue()


def fill(cache, sequences, tokens, ids=None):
    step = cache.reserve(sequences, [tokens] * len(sequences))
    for layer in range(cache.num_layers):
        step.append(layer, *rows(step.num_tokens))
    cache.commit(step, token_ids=ids)


def caches():
    """One of every class, with something in it."""
    kv = numkv.KVCache(
        2, 2, 8, kind="int8", max_seq_len=30, full_precision=numkv.FullPrecision(3, 2)
    )
    for layer in range(2):
        kv.append(layer, *rows(9))
    kv.advance(9)
    contiguous = numkv.ContiguousLayer(20, 2, 8, kind="int8", rotate=True)
    contiguous.append(*rows(3))
    pool = numkv.PagedPool(8, 4, 2, 8)
    first, other = (numkv.PagedLayer(4, 4, 2, 8, pool=pool) for _ in range(2))
    first.append(*rows(6)), other.append(*rows(4))
    paged = paged_kv_cache(2, 2, 8, num_blocks=20, block_size=4, windows=[-1, 4])
    seq = paged.add()
    fill(paged, [seq], 10, np.arange(10))
    paged.fork(seq)
    cells = numkv.CausalCache()
    cells.init("fp32", 3, 4, 8)
    cells.start_forward(numkv.Batch(positions=[0, 1, 2, 0], sequences=[0, 0, 0, 7]))
    cells.put(0, *rows(4))
    cells.copy_prefix(0, 1, 2)
    wrapper = numkv.WrapperCache(numkv.CausalCache(window_left=2), numkv.CausalCache())
    wrapper.init("fp32", 1, 8, 4)
    encoder = numkv.EncoderCache()
    encoder.init("fp32", 1, 8, 4)
    heads = numkv.HeadCompressor(numkv.CompressorConfig(head_dim=8))
    heads.extend(*rows(3)[:, :, 0])
    return [
        kv, contiguous, pool, first, paged, paged.swap_out(seq), cells, numkv.CausalCache(), wrapper,
        encoder, heads,
    ]  # fmt: skip


CACHES = caches()


class Tags(html.parser.HTMLParser):
    """Which tags are open, and what could load something."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], set()

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.seen |= {tag} | {name for name, _ in attributes}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("cache", CACHES, ids=lambda c: type(c).__name__)
def test_every_cache_is_drawn(cache):
    lines = drawn(cache).splitlines()
    assert lines[0].startswith(type(cache).__name__ + ": ")
    assert all(len(line) <= 80 for line in lines)
    tags = Tags()
    tags.feed(cache._repr_html_())
    assert not tags.open
    assert tags.seen <= {"div", "b", "span", "table", "tr", "td", "style", "title"}


def test_blocks_of_a_paged_cache():
    """Shared, own, half full, released and free blocks, as the books have them."""
    cache = numkv.PagedKVCache(1, 2, 8, num_blocks=8, block_size=4)
    a = cache.add()
    fill(cache, [a], 8, np.arange(8))
    b = cache.fork(a)
    fill(cache, [b], 3)
    assert "▓▓▄·····  3 of 8 in use" in drawn(cache)
    cache.remove(a)
    assert "██▄·····" in drawn(cache)
    assert "1        11 tokens, blocks 0-2\n" in drawn(cache)
    cache.remove(b)
    assert "░░······  0 of 8 in use" in drawn(cache)
    c = cache.add(np.arange(8))
    assert "7 tokens (7 found), blocks 0 2\n" in drawn(cache)
    assert cache.cached_len(c) == 7


def test_windows_of_many_layers():
    """Of groups with one window the layers and how many blocks each has: a list of them all would fit no line."""
    cache = paged_kv_cache(6, 2, 8, num_blocks=99, block_size=4, windows=[7, 7, 7, 7, 7, -1])
    fill(cache, [cache.add()], 30)
    text = drawn(cache)
    assert "0        30 tokens\n" in text
    assert "layers 0-4: window 7, 3 blocks each\n" in text
    assert "layers 5: 8 blocks each\n" in text


def test_full_precision_tokens():
    assert "◆◆████◆◆◆·····················  9 of 30" in drawn(CACHES[0])


def test_rows_that_do_not_count_yet():
    cache = numkv.KVCache(2, 2, 8, max_seq_len=8)
    cache.append(0, *rows(3))
    assert "pending  3 tokens appended, which count after advance" in drawn(cache)


def test_cells_have_the_sign_of_their_sequence():
    text = drawn(CACHES[6])
    assert "cells    ▓▓07········  4 of 12 in use" in text
    assert "7        1 token, positions 0" in text


def test_letters_where_a_stream_has_no_graphics():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    numkv.show(CACHES[4], file=stream)
    stream.flush()
    text = stream.buffer.getvalue().decode("ascii")
    assert "SSS" in text
    assert "S shared" in text


def test_a_cache_without_blocks_is_shown(capsys):
    numkv.show(numkv.PagedKVCache(1, 2, 8, num_blocks=0))
    assert "0 of 0 in use" in capsys.readouterr().out


def test_a_sign_for_several():
    strip = Strip("blocks: x", [(5, State.FULL, ""), (4, State.SHARED, ""), (1, State.FREE, "")])
    assert len(strip) == 10
    assert strip.marks(10)[0] == 1
    each, marks = strip.marks(4)
    assert (each, [state for state, _ in marks]) == (
        3,
        [State.FULL, State.FULL, State.SHARED, State.FREE],
    )
    huge = Strip("tokens: y", [(3, State.FULL, ""), (1 << 40, State.FREE, "")])
    assert len(huge.marks(100)[1]) == 100
    picture = Picture("Cache", ["fp16"], [huge])
    assert all(len(line) <= 60 for line in text_of(picture, 60).splitlines())


def test_long_lists_are_short():
    assert in_short([0, 1, 2, 5, 7, 8]) == "0-2 5 7-8"
    assert in_short(range(0, 100, 2), 4) == "0 2 ... 96 98"


def test_text_is_escaped():
    from numkv.drawing.page import page_of

    found = page_of(Picture("<b>", ["a & b"], [Strip("x<y", [(1, State.FULL, "<")])], [("<", ">")]))
    assert "<b>&lt;b&gt;</b>" in found
    assert "a &amp; b" in found
    assert ">&lt;</span>" in found


@pytest.mark.parametrize("wrong", [3, None, np.zeros(3), numkv.kind("fp16")])
def test_what_is_no_cache(wrong):
    with pytest.raises(TypeError, match="`cache`: expected a cache"):
        numkv.show(wrong)


def test_what_is_no_stream():
    with pytest.raises(TypeError, match="`file`: expected a text stream, got str"):
        numkv.show(CACHES[0], file="x")


def test_layers_that_keep_states_alone():
    layers = [numkv.LayerSpec(states=[((4,), "float32")]), numkv.LayerSpec(2, 8, kind="fp32")]
    slots = numkv.StateSlots(4)
    cache = numkv.PagedKVCache(layers=layers, num_blocks=8, block_size=4, state_slots=slots)
    cache.add()
    assert "2 layers, 2 kv heads of 8" in drawn(cache)
    assert cache._repr_html_()


def test_the_example():
    found = doctest.testmod(text_module)
    assert (found.attempted > 0, found.failed) == (True, 0)


# ---------------------------------------------------------------- numkv show


def test_the_command(tmp_path, capsys):
    numkv.save(tmp_path / "a", CACHES[0], mark={"model": "mine"})
    numkv.save(tmp_path / "b", [CACHES[5], CACHES[5]])
    assert main(["show", str(tmp_path / "a")]) == 0
    assert drawn(CACHES[0]) in capsys.readouterr().out
    assert main(["show", str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.count("SwappedSequence") == 2
    assert main(["show", str(tmp_path / "c")]) == 2
    assert "no such file" in capsys.readouterr().err
