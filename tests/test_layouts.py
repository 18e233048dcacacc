"""docs/layouts.md is true: its drawings are compared with arrays; its Python blocks run in `tests/site`."""

import json
import re
import zlib
from pathlib import Path

import naive_codes
import numpy as np
import pytest
from layer_lists import paged_kv_cache
from safetensors import safe_open
from walked import each

import numkv
from numkv import files

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "layouts.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


def drawing(title: str) -> str:
    """A section's drawing."""
    found = re.search(r"^```\n(.*?)^```", SECTIONS[title], re.M | re.S)
    assert found, f"{title}: no drawing"
    return found[1]


def after(title: str, start: str, which: int = 0) -> str:
    """What follows the beginning of a line of a drawing: of the first such line, or of a later one."""
    found = [x.strip() for x in drawing(title).splitlines() if x.strip().startswith(start)]
    assert len(found) > which, f"{title}: no line {start!r}"
    return found[which].removeprefix(start)


def words(text: str, n: int) -> list[str]:
    """The first `n` words of a line, without bars."""
    return text.replace("|", " ").split()[:n]


def numbers(text: str, n: int | None = None) -> list[int]:
    """The first `n` integers of a line."""
    return [int(x) for x in re.findall(r"-?\d+", text)[:n]]


def lists(text: str) -> list[list[int]]:
    """The lists of integers in a line."""
    return [numbers(x) for x in re.findall(r"\[([-\d, ]+)\]", text)]


def rows(values, dim: int = 8) -> np.ndarray:
    """Rows of one head that hold a number each."""
    column = np.asarray(values, np.float32)[:, None, None]
    return np.broadcast_to(column, (len(column), 1, dim)).copy()


def marks(seen: np.ndarray) -> list[list[str]]:
    """What a drawing says of what is seen."""
    return [["x" if s else "." for s in row] for row in seen]


def crosses(title: str, start: str, first: int, width: int) -> list[list[str]]:
    """The x and . of lines that begin alike: `width` of them from the `first` on."""
    lines = [x for x in drawing(title).splitlines() if x.startswith(start)]
    return [re.findall(r"(?<!\S)[x.](?!\S)", x)[first : first + width] for x in lines]


# ---------------------------------------------------------------- the page


@pytest.mark.parametrize("title", SECTIONS)
def test_sections_are_complete(title):
    assert drawing(title).isascii()
    assert "**Used by**" in SECTIONS[title]


def test_names_are_public():
    functions = set(re.findall(r"\bnumkv\.(\w+)", PAGE)) - {"files"}  # a public module
    classes = set(re.findall(r"`([A-Z][a-z]*[A-Z]\w+)", PAGE))
    assert {"kind", "paged_append"} <= functions
    assert {"KVCache", "AppendPlan"} <= classes | functions
    assert functions | classes <= set(numkv.__all__)


def test_it_is_short_and_can_be_found():
    assert len(PAGE.splitlines()) <= 560  # of code that is 84 columns wide
    assert "docs/layouts.md" in (ROOT / "README.md").read_text()
    assert "layouts.md" in (ROOT / "docs" / "architecture.md").read_text()


# ---------------------------------------------------------------- queries and caches of floats


def test_gqa_groups():
    """With values that are the kv head's number, outputs say which one a q head reads."""
    title = "Queries and outputs"
    q_heads, kv_heads = numbers(re.search("num_q_heads .*", drawing(title))[0])
    of_kv = numbers(after(title, "kv head"), kv_heads)
    v = np.zeros((1, kv_heads, 1, 8), np.float32)
    v[0, :, 0] = np.array(of_kv)[:, None]
    out = numkv.decode_attention(np.zeros((1, q_heads, 8), np.float32), np.zeros_like(v), v, [1])
    assert numbers(after(title, "GQA         q head"), q_heads) == list(range(q_heads))
    assert out[0, :, 0].tolist() == [h // (q_heads // kv_heads) for h in range(q_heads)]


def test_ragged_queries():
    """The last token that a query sees is its own."""
    title = "Queries and outputs"
    assert "sequences of 3, 0 and 2 queries, 5, 4 and 2 tokens" in drawing(title)
    cu_seqlens = numbers(after(title, "cu_seqlens_q"), 4)
    v = np.broadcast_to(np.eye(8, dtype=np.float32), (3, 1, 8, 8)).copy()
    q = np.zeros((5, 1, 8), np.float32)
    out = numkv.prefill_attention(q, np.zeros_like(v), v, [5, 4, 2], cu_seqlens)
    assert np.diff(cu_seqlens).tolist() == [3, 0, 2]
    assert numbers(after(title, "sequence", 1)) == np.repeat(range(3), np.diff(cu_seqlens)).tolist()
    assert numbers(after(title, "position"), 5) == [np.flatnonzero(row)[-1] for row in out[:, 0]]


@pytest.mark.parametrize(("window", "first"), [(-1, 0), (2, 5)])
def test_what_a_query_sees(window, first):
    v = np.eye(8, dtype=np.float32)[None, None]
    q = np.zeros((3, 1, 8), np.float32)
    out = numkv.prefill_attention(q, np.zeros_like(v), v, [5], [0, 3], window_left=window)
    assert crosses("What a query sees", "query", first, 5) == marks(out[:, 0, :5] > 0)


def test_a_query_that_sees_nothing():
    zeros = np.zeros((1, 1, 4, 8), np.float32)
    out, lse = numkv.decode_attention(zeros[:, :, 0], zeros, zeros, [0], return_lse=True)
    assert (out == 0).all()
    assert lse == -np.inf
    sinks = np.array([2.5], np.float32)
    _, lse = numkv.decode_attention(zeros[:, :, 0], zeros, zeros, [0], sinks=sinks, return_lse=True)
    assert lse == 2.5


def test_contiguous_cache():
    """What is drawn empty is NaN here, and not read; all else is."""
    title = "Contiguous cache"
    drawn = [words(x.split("head")[1], 9)[1:] for x in drawing(title).splitlines()]
    there = np.array(drawn).reshape(2, 2, 8, 1) != "."
    k = np.where(there, np.zeros(8, np.float32), np.float32(np.nan))
    v = np.where(there, np.eye(8, dtype=np.float32), np.float32(np.nan))
    lens = numbers(re.search(r"capacity 8, seq_lens (.*)", drawing(title))[1])
    out = numkv.decode_attention(np.zeros((2, 2, 8), np.float32), k, v, lens)
    assert np.array_equal(out > 0, there[..., 0])


def test_paged_pool():
    """Tokens lie in the slots that the table gives, and are found there; all other slots hold NaN."""
    title = "Paged pool, block table, slots"
    assert numbers(after(title, "slot"), 16) == list(range(16))
    holds = words(after(title, "holds"), 16)
    table = np.array(lists(after(title, "block_table"))[:2], np.int32)
    lens = lists(after(title, "seq_lens"))[0]
    slot_of = {
        f"{name}{t}": int(table[s, t // 4] * 4 + t % 4)
        for s, name in enumerate("AB")
        for t in range(lens[s])
    }
    assert {name: slot for slot, name in enumerate(holds) if name != "."} == slot_of
    assert lists(after(title, "seq_lens"))[1] == [slot_of["A5"], -1, slot_of["B2"]]
    k_pool, v_pool = np.full((2, 4, 1, 4, 8), np.nan, np.float32)
    x = rows([int(name[1:]) for name in slot_of])
    numkv.paged_append(x, x, k_pool, v_pool, np.array(list(slot_of.values())))
    q = np.zeros((2, 1, 8), np.float32)
    out = numkv.paged_decode_attention(q, k_pool, v_pool, table, lens)
    assert out[:, 0, 0].tolist() == [np.mean(range(n)) for n in lens]


def test_elements_of_a_pool():
    heads, size, dim = 2, 4, 8
    block, h, offset, d = 2, 1, 3, 5
    k_pool, v_pool = np.zeros((2, 4, heads, size, dim), np.float32)
    x = np.zeros((1, heads, dim), np.float32)
    x[0, h, d] = 1
    numkv.paged_append(x, x, k_pool, v_pool, np.array([block * size + offset]))
    assert np.flatnonzero(k_pool) == ((block * heads + h) * size + offset) * dim + d


def test_block_sizes_do_not_change_results():
    k, v, q = np.random.default_rng(0).standard_normal((3, 700, 2, 64), dtype=np.float32)
    whole = numkv.ContiguousLayer(700, 2, 64, kind="int8")
    whole.append(k, v)
    for size in (7, 16):
        layer = numkv.PagedLayer(100, size, 2, 64, kind="int8")
        layer.append(k, v)
        assert np.array_equal(layer.decode_attention(q[:5]), whole.decode_attention(q[:5]))


# ---------------------------------------------------------------- how an element is stored


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_words(name):
    bits, word = after("Storage kinds and words", f"1.0 in {name}").split("word")
    layer = numkv.ContiguousLayer(1, 1, 8, kind=name)
    layer.append(rows([1]), rows([1]))
    assert layer.k.dtype == numkv.kind(name).dtype
    assert layer.jit.k.dtype == np.uint16
    assert (layer.jit.k == int(word, 16)).all()
    assert int(bits.replace(" ", ""), 2) == int(word, 16)


def test_table_of_kinds():
    said = re.findall(r"^\| (fp.*|int.*|code.*) \|$", SECTIONS["Storage kinds and words"], re.M)
    names = []
    for line in said:
        kinds, seen, word, in_row, scales = line.split(" | ")
        dtypes = re.findall(r"bfloat16|float\d+|u?int\d+", seen)
        for i, name in enumerate(kinds.split(", ")):
            names.append(name)
            layer = numkv.ContiguousLayer(1, 1, 96, kind=name)
            assert str(layer.k.dtype) == dtypes[i % len(dtypes)]
            assert numkv.kind(name).word == (layer.k.dtype if word == "the same" else word)
            of_row = {"`D`": 96, "`D / 2`": 48, "`D / 2 + 4`": 52, "`3 D / 4`": 72}[in_row]
            assert numkv.kind(name).words_per_row(96) == of_row
            assert layer.k.nbytes == of_row * numkv.kind(name).word.itemsize * layer.capacity
            count = {"none": 0, "one float32": 1}.get(scales, 3)
            if numkv.kind(name).group_tokens:
                assert (layer.capacity, layer.k_scale.size) == (
                    64,
                    2 * 96 + numkv.kind(name).fine_channels,
                )
                assert scales.startswith("none of its own")
                continue
            assert layer.k_scale.size == count
            assert not count or str(layer.k_scale.dtype) in scales
    assert names == [
        kind.name for kind in numkv.kinds.kinds(by_channel=True) if "fp8" not in kind.name
    ]


def test_int8():
    title = "INT8: codes and scales"
    x = np.array([float(n) for n in words(after(title, "row"), 8)], np.float32).reshape(1, 1, 8)
    cache = numkv.KVCache(1, 1, 8, kind="int8")
    cache.append(0, x, x)
    assert cache.k_codes(0).flatten().tolist() == numbers(after(title, "codes"), 8)
    assert cache.k_scales(0) == float(re.search(r"/ 127 = (\S+)", drawing(title))[1])
    layer = numkv.PagedLayer(3, 4, 2, 8, kind="int8")
    assert layer.k.shape == (3, 2, 4, 8)
    assert layer.k_scale.shape == (3, 2, 4)


@each("element", range(40))
def test_nibbles_of_int4(element):
    """One element of its group is at the lowest level, with another one to keep the scale: which nibbles are 0?"""
    title = "INT4: nibbles and quantisation groups"
    bytes_, low, high = (words(after(title, s), 8) for s in ("byte", "low nibble", "high nibble"))
    codes = np.full(40, 15)
    codes[element] = 0
    row = ((codes - 7.25) * 1.03125).astype(np.float32).reshape(1, 1, 40)
    layer = numkv.ContiguousLayer(1, 1, 40, kind="int4")
    layer.append(row, row)
    nibbles = np.stack([layer.k[0, 0, 0] & 15, layer.k[0, 0, 0] >> 4])
    for byte, *of_byte in zip(bytes_, low, high, strict=True):
        if byte == "..":
            continue
        for found, name in zip(nibbles[:, int(byte)], of_byte, strict=True):
            same_group = (int(name[1:]) < 32) == (element < 32)
            assert found == (0 if name == f"e{element}" else 15) or not same_group


def test_values_of_int4():
    """The formula in the drawing, on the bytes as they are drawn."""
    x = np.random.default_rng(0).standard_normal((5, 1, 40), dtype=np.float32)
    cache = numkv.KVCache(1, 1, 40, kind="int4")
    cache.append(0, x, x)
    packed, scales = cache.k_codes(0)[:, 0], cache.k_scales(0)[:, 0]
    k = scales.view(np.uint16) & 7
    for group, part in enumerate((slice(0, 16), slice(16, 20))):
        codes = np.hstack([packed[:, part] & 15, packed[:, part] >> 4]).astype(np.float64)
        scale = scales[:, [group]].astype(np.float64)
        values = (codes - 7.5 + (k[:, [group]] - 3.5) / 2) * scale
        elements = slice(2 * part.start, 2 * part.stop)
        assert np.array_equal(values.astype(np.float32), cache.k(0)[:, 0, elements])
    assert numkv.kind("int4").bytes_per_token(1, 64) * 8 == 4.5 * 2 * 64
    with pytest.raises(numkv.DimensionMismatch):
        numkv.ContiguousLayer(1, 1, 7, kind="int4")


def test_levels_of_code4():
    """Nibbles as they are drawn, and the levels."""
    title = "CODE4 and CODE6: levels of a codebook"
    low, high = (words(after(title, s), 4) for s in ("low nibble", "high nibble"))
    levels = np.array(numbers(after(title, "level"), 8))
    codes = np.array([7, 0, 15, 1, 2, 10, 3, 4])
    row = (np.concatenate([levels, -levels])[codes] * 0.5).astype(np.float32).reshape(1, 1, 8)
    cache = numkv.KVCache(1, 1, 8, kind="code4")
    cache.append(0, row, row)
    assert cache.k_scales(0) == 0.5
    for byte, first, second in zip(cache.k_codes(0)[0, 0], low, high, strict=True):
        assert byte == codes[int(first[1:])] + 16 * codes[int(second[1:])]


def test_a_rotated_row():
    title = "Rotated pools"
    x, stored = (
        np.array([float(n) for n in words(after(title, start), 12)], np.float32).reshape(1, 1, 12)
        for start in ("head_dim 12, segments of 4      x", "stored")
    )
    cache = numkv.PagedKVCache(1, 1, 12, num_blocks=1, block_size=1, kind="fp32", rotate=True)
    seq = cache.add()
    fill(cache, seq, x)
    assert np.array_equal(cache.swap_out(seq).buffers[0][0][0], stored)


@pytest.mark.parametrize(("dim", "length"), [(128, 128), (96, 32), (80, 16), (12, 4), (7, 1)])
def test_segments_of_a_rotation(dim, length):
    layer = numkv.ContiguousLayer(1, 1, dim, kind="fp32", rotate=True)
    x = np.eye(dim, dtype=np.float32)[None, dim // 2 : dim // 2 + 1]
    layer.append(x, x)
    first = dim // 2 // length * length
    stored = layer.k[0, 0, 0]
    assert np.flatnonzero(stored).tolist() == list(range(first, first + length))
    assert np.allclose(np.abs(stored[stored != 0]), length**-0.5)
    assert np.allclose(layer.decode_attention(np.zeros_like(x)), x, atol=1e-6)


def test_full_precision_tokens():
    """Tokens drawn among the float rows come back bit for bit; the others are codes."""
    title = "Full-precision tokens"
    pool = words(after(title, "quantised pool"), 10)
    floats = numbers(after(title, "float rows"), 5)
    x = np.random.default_rng(0).standard_normal((10, 1, 8), dtype=np.float32)
    cache = numkv.KVCache(1, 1, 8, kind="int8", full_precision=numkv.FullPrecision(3, 2))
    for row in x:
        cache.append(0, row, row)
    coded = list(cache.quantised_tokens(0))
    assert coded == [int(n) for n in pool if n != "."] == [t for t in range(10) if pool[t] != "."]
    same = (cache.k(0) == x).all(axis=(1, 2))
    assert np.flatnonzero(same).tolist() == sorted(floats)
    assert [p % 3 for p in floats[2:]] == [0, 1, 2]


# ---------------------------------------------------------------- blocks of many sequences


def fill(cache, seq, x, ids=None) -> None:
    """Give a sequence of a paged cache the same rows in all layers."""
    step = cache.reserve([seq], [len(x)])
    for layer in range(cache.num_layers):
        step.append(layer, x, x)
    cache.commit(step, token_ids=ids)


def counts(cache) -> list[int]:
    return cache.blocks.ref_count(np.arange(cache.num_blocks)).tolist()


def test_groups_of_layers():
    """The blocks of the drawn tables are those in use; a buffer is written where its layers' groups have blocks."""
    title = "Groups of layers in a `PagedKVCache`"
    windows = lists(after(title, "windows"))[0]
    cache = paged_kv_cache(6, 1, 8, num_blocks=16, block_size=4, kind="fp32", windows=windows)
    groups = [numbers(after(title, f"buffer {i}")) for i in range(cache.layers_per_block)]
    tables = lists(after(title, "one block table each"))
    assert len(tables) == cache.num_groups == len(groups[0])
    for in_group in zip(*groups, strict=True):
        assert len({windows[layer] for layer in in_group}) == 1
    assert sorted(layer for buffer in groups for layer in buffer) == list(range(6))
    # Buffers, K and V, blocks, tokens, elements, bytes.
    assert cache.nbytes == len(groups) * 2 * 16 * 4 * 8 * 4

    seq = cache.add()
    step = cache.reserve([seq], [11])
    for layer in range(6):
        step.append(layer, rows([layer] * 11), rows([layer] * 11))
    cache.commit(step)
    held = [b for table in tables for b in table if b >= 0]
    assert [b for b, n in enumerate(counts(cache)) if n] == sorted(held)
    swapped = cache.swap_out(seq)
    assert [x.tolist() for x in swapped.logical] == [
        [i for i, b in enumerate(table) if b >= 0] for table in tables
    ]
    ends = np.cumsum([len(x) for x in swapped.logical])[:-1]
    for layers, (k, *_) in zip(groups, swapped.buffers, strict=True):
        assert [part[0, 0, 0, 0] for part in np.split(k, ends)] == layers


def test_window_and_starts():
    title = "Window of a sliding layer, and `starts`"
    cache = paged_kv_cache(2, 1, 8, num_blocks=8, block_size=4, kind="fp32", windows=[-1, 4])
    seq = cache.add()
    fill(cache, seq, rows(range(11)))
    table = numbers(after(title, "block table"), 3)
    assert [b for b in table if b >= 0] == np.flatnonzero(counts(cache))[3:].tolist()
    v = np.eye(16, dtype=np.float32)[None, None]
    q = np.zeros((1, 1, 16), np.float32)
    seen = numkv.decode_attention(q, np.zeros_like(v), v, [11], window_left=4)[0, 0] > 0
    assert words(after(title, "newest sees"), 12) == marks(seen[None, :12])[0]

    keep = lists(after(title, "compact(keep="))[0]
    cache.compact(seq, keep)
    swapped = cache.swap_out(seq)
    drawn = words(after(title, "row of old"), 8)
    stored = swapped.buffers[0][0][-2:, 0, :, 0].flatten()
    assert swapped.starts == (0, int(re.search(r"starts = (\d)", drawing(title))[1]))
    for token, row in enumerate(drawn):
        if row not in "-.":
            assert stored[token] == int(row) == keep[token]
    assert [i for i, row in enumerate(drawn) if row == "-"] == list(range(swapped.starts[1]))


def test_shared_blocks():
    title = "Shared blocks"
    steps = [numbers(x.split("]")[-1], 5) for x in drawing(title).splitlines()[1:]]
    cache = numkv.PagedKVCache(1, 1, 8, num_blocks=5, block_size=4)
    found = []
    a = cache.add()
    fill(cache, a, rows(range(10)), range(10))
    found.append(counts(cache))
    b = cache.fork(a)
    found.append(counts(cache))
    fill(cache, b, rows([10]), [77])
    found.append(counts(cache))
    c = cache.add(range(10))
    found.append(counts(cache))
    assert found == steps
    assert cache.cached_len(c) == 9


# ---------------------------------------------------------------- cells


def test_cells_and_mask():
    title = "Cells of a multi-sequence cache"
    positions = numbers(after(title, "position"), 8)
    lines = drawing(title).splitlines()
    columns = [[x[18 + 3 * c] for c in range(8)] for x in lines[2:4]]
    held = {s: numbers(re.search(rf"sequence {s}: ([\d ]+)", drawing(title))[1]) for s in range(3)}
    with numkv.CausalCache() as cache:
        cache.init("fp32", max_sequences=3, capacity=8, max_batch=8)
        cache.start_forward(numkv.Batch(positions=[0, 1, 2, 0, 1], sequences=[0, 0, 0, 1, 1]))
        cache.put(0, rows(range(5)), rows(range(5)))
        cache.copy_prefix(0, 2, 2)
        cache.start_forward(numkv.Batch(positions=[3, 2, 2], sequences=[0, 1, 2]))
        cache.put(0, rows([5, 6, 7]), rows([5, 6, 7]))
        k, _, mask = cache.get(0)
        out = cache.decode_attention(0, np.zeros((3, 1, 8), np.float32))
        assert k[:, 0, 0].tolist() == numbers(after(title, "cell"), 8)
        assert cache.jit.positions[:8].tolist() == positions
        assert {s: [positions[c] for c in held[s]] for s in held} == {
            s: cache.positions(s).tolist() for s in held
        }
        holders = [{int(x) for x in column if x != " "} for column in zip(*columns, strict=True)]
        assert holders == [{s for s in held if c in held[s]} for c in range(8)]
        assert cache.jit.num_sequences[:8].tolist() == [len(x) for x in holders]
    for row, (s, p) in enumerate([(0, 3), (1, 2), (2, 2)]):
        text = after(title, f"{s} at position {p}")
        assert words(text, 8) == ["0" if x == 0 else "-" for x in mask[row]]
        low, high = numbers(re.search(r"entries \[(.*)\)", text)[1])
        assert held[s][low:high] == np.flatnonzero(mask[row] == 0).tolist()
        assert np.isclose(out[row, 0, 0], np.mean(held[s]))


@pytest.mark.parametrize(
    ("cache", "first"),
    [(numkv.CausalCache(window_left=1), 0), (numkv.CausalCache(chunk_size=2), 5)],
)
def test_windows_and_chunks(cache, first):
    with cache:
        cache.init("fp32", max_sequences=1, capacity=16, max_batch=8)
        cache.start_forward(numkv.Batch(positions=range(5), sequences=[0] * 5))
        cache.put(0, rows(range(5)), rows(range(5)))
        mask = cache.get(0)[2]
        assert crosses("Windows and chunks in cells", "token", first, 5) == marks(mask == 0)
        cache.start_forward(numkv.Batch(positions=[5], sequences=[0]))
        assert cache.positions(0).tolist() == ([4, 5] if first == 0 else [0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("cache", "sequences", "cells"),
    [
        (numkv.CausalCache(), 3, 3 * 16),
        (numkv.CausalCache(chunk_size=4), 3, 3 * 16),
        (numkv.CausalCache(window_left=3), 1, 3 + 8),
        (numkv.CausalCache(window_left=3), 2, 2 * 4 + 8),
        (numkv.CausalCache(window_left=3, memory=10), 2, 2 * 10 + 8),
        (numkv.CausalCache(window_left=3, memory=16), 2, 2 * 16),
    ],
)
def test_number_of_cells(cache, sequences, cells):
    cache.set_config(numkv.CacheConfig(padding=8))
    cache.init("fp32", max_sequences=sequences, capacity=16, max_batch=8)
    assert cache.num_cells == -(-cells // 8) * 8


def test_what_get_gives():
    cache = numkv.CausalCache()
    cache.set_config(numkv.CacheConfig(permuted_v=True, mask_dtype="fp16"))
    cache.init("int8", max_sequences=1, capacity=16, max_batch=8)
    cache.start_forward(numkv.Batch(positions=range(5), sequences=[0] * 5))
    cache.put(0, np.ones((5, 2, 8), np.float32), np.ones((5, 2, 12), np.float32))
    k, v, mask = cache.get(0)
    assert (k.shape, v.shape, mask.shape) == ((5, 2, 8), (2, 12, 5), (5, 5))
    assert (k.dtype, v.dtype, mask.dtype) == (np.float32, np.float32, np.float16)


# ---------------------------------------------------------------- inputs, plans, codes, files


@pytest.mark.parametrize(
    ("start", "mode"),
    [
        ("half-split, pair of", numkv.QKMode.HALF_SPLIT),
        ("interleaved, pair of", numkv.QKMode.INTERLEAVED),
    ],
)
def test_pairs_of_rope(start, mode):
    """A quarter turn of one pair exchanges its elements, and negates one."""
    pair_of = numbers(after("Fused QKV input and RoPE tables", start), 4)
    for pair in (0, 1):
        cos, sin = np.ones((1, 2), np.float32), np.zeros((1, 2), np.float32)
        cos[0, pair], sin[0, pair] = 0, 1
        layer = numkv.ContiguousLayer(1, 1, 8, kind="fp32")
        x = np.arange(1, 9, dtype=np.float32)
        q = layer.write(np.tile(x, (1, 4)), num_q_heads=2, cos=cos, sin=sin, qk_mode=mode)
        a, b = (d for d in range(4) if pair_of[d] == pair)
        x[[a, b]] = -x[b], x[a]
        assert np.array_equal(layer.k[0, 0, 0], x)
        assert np.array_equal(q, [[x, x]])
        assert layer.v[0, 0, 0].tolist() == list(range(1, 9))


def test_parts_of_qkv():
    """q heads come first, then k heads, then v heads."""
    heads = np.repeat(np.arange(1, 7, dtype=np.float32), 8)[None]  # 2 q, 2 k, 2 v
    layer = numkv.ContiguousLayer(1, 2, 8, kind="fp32")
    q = layer.write(heads, num_q_heads=2, qk_mode=numkv.QKMode.COPY)
    assert re.findall(r"\b[qkv]0", after("Fused QKV input and RoPE tables", "a row of qkv")) == [
        "q0", "k0", "v0",
    ]  # fmt: skip
    assert q[0, :, 0].tolist() == [1, 2]
    assert layer.k[0, :, 0, 0].tolist() == [3, 4]
    assert layer.v[0, :, 0, 0].tolist() == [5, 6]


def test_offsets_of_a_plan():
    title = "Offsets of an `AppendPlan`"
    lines = [x for x in drawing(title).splitlines() if x.startswith("offset")]
    offsets = [numbers(x, 1)[0] for x in lines]
    drawn = [x.split()[2:8] for x in lines]
    new = np.arange(9, dtype=np.float32).reshape(3, 1, 3, 1)
    k, v = np.full((2, 3, 1, 6, 1), -1, np.float32)
    numkv.append(new, new, k, v, np.array(offsets))
    names = {-1: "."} | {i: f"{'abc'[i // 3]}{i % 3}" for i in range(9)}
    assert [[names[int(x)] for x in row] for row in k[:, 0, :, 0]] == drawn


def test_packed_codes():
    """The drawing against the oracle that `tests/kernels/test_compress.py` compares the kernels with."""
    title = "Compressed heads"
    bits, drawn = (numbers(after(title, start), 24) for start in ("bit ", "code "))
    for code in range(8):
        codes = np.zeros(8, np.int64)
        codes[code] = 7
        packed = np.unpackbits(naive_codes.pack(codes, 3), bitorder="big")
        assert np.flatnonzero(packed).tolist() == [i for i, c in enumerate(drawn) if c == code]
    assert bits == 3 * list(range(7, -1, -1))


def test_saved_file(tmp_path):
    title = "Saved files"
    cache = paged_kv_cache(
        2, 1, 32, num_blocks=16, block_size=4, k_kind="bf16", v_kind="int4", windows=[-1, 4],
        rotate=True,
    )  # fmt: skip
    seq = cache.add(extra={"adapter": 7, "salt": b"ab"})
    fill(cache, seq, rows(range(11), 32), range(11))
    files.save_sequences(tmp_path / "one", [cache.swap_out(seq)], mark="m")
    with safe_open(tmp_path / "one", "numpy") as file:
        header = json.loads(file.metadata()["numkv"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    drawn = re.findall(r"^(0\.\S+) +(\w+) +(\(.*?\))", drawing(title), re.M)
    assert {n: (d, s) for n, d, s in drawn} == {
        n: (str(x.dtype), str(x.shape)) for n, x in tensors.items()
    }
    for i in (0, 1):
        said = after(title, f"0.logical.{i}").split(":")[1]
        assert tensors[f"0.logical.{i}"].tolist() == numbers(said)
    crc32 = {name: f"{zlib.crc32(x.tobytes()):08x}" for name, x in tensors.items()}
    assert header == {
        "version": int(re.search(r"`version` \((\d)\)", SECTIONS[title])[1]),
        "class": "sequences",
        "numkv": numkv.__version__,
        "mark": "m",
        "layout": "paged",
        "geometry": [[1, 4, 32, 32], "bf16", "int4", [-1, 4], 0],
        "sequences": [
            {
                "length": 11,
                "tokens": 11,
                "extra": {"adapter": 7, "salt": {"bytes": "6162"}},
                "starts": [0, 0],
                "blocks": [3, 2],
            }
        ],
        "crc32": crc32,
    }
    assert cache.swap_in(files.load_sequences(tmp_path / "one")[0]) == seq + 1
