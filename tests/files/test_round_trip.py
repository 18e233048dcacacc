"""Caches in files: what is saved comes back to the bit, and goes on; a file is what the page says."""

import ml_dtypes
import naive
import numpy as np
import pytest
from safetensors.numpy import load_file
from saved_caches import (
    CACHES,
    HEADS,
    kv_cache,
    layer,
    multi,
    paged_cache,
    random,
    rows,
    same,
    seen,
)

import numkv

WITH_SHIFT = {"CausalCache int8", "WrapperCache"}
#: What is tried on CUDA every day, and what takes kernels that nothing else compiles.
ON_CUDA = {
    "KVCache int4/bf16", "PagedLayer int8 residual", "PagedKVCache windows", "CausalCache int8", "WrapperCache",
    "MultiHeadCompressor sketch",
}  # fmt: skip
RARE = {"KVCache int4/bf16"}
PLACES = [
    pytest.param(
        name, there, marks=[pytest.mark.nightly] if (name not in ON_CUDA if there == "cuda" else name in RARE) else []
    )
    for there in ("cpu", "cuda")
    for name in CACHES
]  # fmt: skip


@pytest.mark.parametrize(("name", "there"), PLACES)
def test_a_cache_comes_back_to_the_bit_and_goes_on(tmp_path, name, there):
    cache = CACHES[name](there)
    numkv.save(tmp_path / "file", cache)
    loaded = numkv.load(tmp_path / "file", target=there)
    assert type(loaded) is type(cache)
    assert same(seen(loaded, there), seen(cache, there))
    assert load_file(tmp_path / "file") is not None  # the library reads it


@pytest.mark.parametrize(
    "name", ["KVCache int8 residual", "PagedLayer int8", "PagedKVCache fp8", "CausalCache fp8", "HeadCompressor"]
)  # fmt: skip
@pytest.mark.parametrize("there", ["cpu", "cuda"])
def test_a_file_knows_no_target(tmp_path, name, there):
    here = {"cpu": "cuda", "cuda": "cpu"}[there]
    numkv.save(tmp_path / "here", CACHES[name](here))
    moved = numkv.load(tmp_path / "here", target=there)
    numkv.save(tmp_path / "back", moved)
    assert (tmp_path / "back").read_bytes() == (tmp_path / "here").read_bytes()
    stayed = seen(numkv.load(tmp_path / "here", target=here), here)
    for a, b in zip(seen(moved, there), stayed, strict=True):
        if isinstance(a, np.ndarray) and a.dtype.kind == "f":
            assert np.allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["fp32", pytest.param("fp16", marks=pytest.mark.nightly), "bf16"])
def test_tensors_are_the_rows_that_were_appended(tmp_path, kind):
    cache = kv_cache("cpu", kind=kind)
    numkv.save(tmp_path / "file", cache)
    found = load_file(tmp_path / "file")
    for at in range(2):
        given = np.concatenate([random(n, HEADS, 32, seed=10 * at + n) for n in (4, 6, 1)])
        wanted = given.astype(naive.DTYPES[kind]).transpose(1, 0, 2)
        assert found[f"k.{at}"].tobytes() == np.ascontiguousarray(wanted).tobytes()
    assert sorted(found) == ["k.0", "k.1", "v.0", "v.1"]


def test_quantised_rows_and_scales_give_the_values(tmp_path):
    numkv.save(tmp_path / "file", layer(numkv.PagedLayer, "cpu", kind="int8"))
    found = load_file(tmp_path / "file")
    given = np.concatenate([random(12, HEADS, 32, seed=12), random(1, HEADS, 32, seed=1)])
    values = found["k.0"] * found["k_scale.0"][..., None]
    limit = found["k_scale.0"][..., None] * 0.5001
    assert (abs(values - given.transpose(1, 0, 2)) <= limit).all()


def test_a_file_holds_nothing_but_rows_of_tokens(tmp_path):
    """Neither what was truncated, nor other sequences' rows, nor free room."""
    secret = np.full((4, HEADS, 32), 77.0, np.float32)
    cache = kv_cache("cpu", kind="fp32", pending=False, max_seq_len=5000)
    for at in range(2):
        cache.append(at, secret, secret)
    cache.advance(4), cache.truncate(10)
    pool = numkv.PagedPool(8, 4, HEADS, 32, kind="fp32")
    other, mine = (numkv.PagedLayer(4, 4, HEADS, 32, pool=pool) for _ in range(2))
    other.append(secret, secret), other.free()
    mine.append(secret[:2] / 77, secret[:2] / 77)
    paged = numkv.PagedKVCache(1, HEADS, 32, num_blocks=4, block_size=4, kind="fp32")
    seq = paged.add()
    for n, x in ((4, secret), (1, secret / 77)):
        step = paged.reserve([seq], [n])
        step.append(0, x[:n], x[:n])
        paged.commit(step)
        if n == 4:
            paged.truncate(seq, 0)
    cells = numkv.CausalCache()
    cells.init("fp32", 2, 8, 8)
    for sequence, x in ((0, secret), (1, secret / 77)):
        cells.start_forward(numkv.Batch(range(4), [sequence] * 4))
        cells.put(0, x, x)
    cells.remove(0, 0)
    saved = [cache, mine, paged, cells, paged.swap_out(seq), [paged.swap_out(seq)]]
    for i, x in enumerate(saved):
        path = tmp_path / str(i)
        numkv.save(path, x)
        assert np.float32(77).tobytes() not in path.read_bytes(), i
        assert path.stat().st_size < 20_000


def test_saving_changes_nothing_and_is_repeatable(tmp_path):
    for name, make in CACHES.items():
        cache = make("cpu")
        numkv.save(tmp_path / "a", cache)
        numkv.save(tmp_path / "b", cache)
        numkv.save(tmp_path / "c", numkv.load(tmp_path / "a", shift=None))
        a = (tmp_path / "a").read_bytes()
        assert a == (tmp_path / "b").read_bytes(), name
        if name not in WITH_SHIFT:
            assert a == (tmp_path / "c").read_bytes(), name


def test_a_growing_cache_grows_on(tmp_path):
    cache = kv_cache("cpu", kind="fp32")
    numkv.save(tmp_path / "file", cache)
    loaded = numkv.load(tmp_path / "file")
    for x in (cache, loaded):
        x.truncate(10)
        for at in range(2):
            x.append(at, rows(30, "cpu", seed=3), rows(30, "cpu", seed=4))
        x.advance(30)
    assert np.array_equal(cache.k(1), loaded.k(1))
    assert np.array_equal(loaded.k(0)[10:], random(30, HEADS, 32, seed=3))


def test_full_precision_tokens_leave_the_window_as_they_would_have(tmp_path):
    cache = kv_cache("cpu", kind="int8", full_precision=numkv.FullPrecision(3, 2))
    numkv.save(tmp_path / "file", cache)
    loaded = numkv.load(tmp_path / "file")
    for x in (cache, loaded):
        for n in (1, 5):
            x.append(0, rows(n, "cpu", seed=n), rows(n, "cpu", seed=n))
    assert np.array_equal(cache.k(0), loaded.k(0))
    assert np.array_equal(cache.k_codes(0)[2:12], loaded.k_codes(0)[2:12])


def test_prefixes_of_loaded_sequences_are_found(tmp_path):
    cache = paged_cache("cpu", kind="int8")
    numkv.save(tmp_path / "file", cache)
    loaded = numkv.load(tmp_path / "file")
    for x in (cache, loaded):
        again = x.add(np.arange(9), extra={"adapter": 7, "salt": b"\x00\xff"})
        assert x.cached_len(again) == 8
        assert x.cached_len(x.add(np.arange(9))) == 0
        x.check()
    assert loaded.sequences == cache.sequences


def test_forks_go_on_sharing_their_blocks(tmp_path):
    cache = paged_cache("cpu", kind="fp32")
    numkv.save(tmp_path / "file", cache)
    loaded = numkv.load(tmp_path / "file")
    assert loaded.num_free == cache.num_free
    a, _, c = loaded.sequences
    loaded.remove(a)
    loaded.check()
    assert loaded.length(c) == 12
    loaded.remove(c)
    loaded.check()


def test_sequences_and_caches_of_sequences_are_told_apart(tmp_path):
    cache = paged_cache("cpu", kind="int8")
    a, b, _ = cache.sequences
    numkv.save(tmp_path / "one", cache.swap_out(a))
    numkv.save(tmp_path / "two", [cache.swap_out(a), cache.swap_out(b)])
    one, two = numkv.load(tmp_path / "one"), numkv.load(tmp_path / "two")
    assert isinstance(one, numkv.SwappedSequence)
    assert [x.length for x in two] == [9, 6]
    other = numkv.PagedKVCache(2, HEADS, 32, num_blocks=9, block_size=4, kind="int8")
    seq = other.swap_in(one)
    q = random(1, 4, 32)
    assert np.array_equal(other.decode_attention(1, [seq], q), cache.decode_attention(1, [a], q))


def test_a_scattered_set_of_cells_comes_back(tmp_path):
    """Runs of cells that are too short to be read one by one."""
    cache = numkv.CausalCache()
    cache.init("fp16", 4, 64, 64)
    for step in range(40):
        cache.start_forward(numkv.Batch([step] * 3, [0, 1, 2]))
        cache.put(0, rows(3, "cpu", seed=step), rows(3, "cpu", seed=step + 50))
    cache.remove(1, 0)
    numkv.save(tmp_path / "file", cache)
    loaded = numkv.load(tmp_path / "file")
    for x in (cache, loaded):
        x.start_forward(numkv.Batch([40], [2]))
        x.put(0, rows(1, "cpu"), rows(1, "cpu"))
    for a, b in zip(cache.get(0), loaded.get(0), strict=True):
        shown = np.isfinite(cache.get(0)[2][0]) if a.ndim == 3 else slice(None)
        assert np.array_equal(a[shown], b[shown])


def test_a_key_shift_is_taken_anew(tmp_path):
    from saved_caches import shift

    cache = multi(numkv.CausalCache(shift()), "cpu", kind="fp32")
    cache.remove(11, 0)
    numkv.save(tmp_path / "file", cache)
    loaded = numkv.load(tmp_path / "file", shift=shift())
    for x in (cache, loaded):
        x.remove(7, 1, 3)
    assert same(seen(loaded, "cpu"), seen(cache, "cpu"))
    without = numkv.load(tmp_path / "file")
    with pytest.raises(numkv.NotSupported, match="no shift"):
        without.remove(7, 1, 3)


def test_words_of_a_file_are_the_floats_of_its_kind(tmp_path):
    numkv.save(tmp_path / "file", layer(numkv.ContiguousLayer, "cpu", n=1 + 1, kind="bf16"))
    words = load_file(tmp_path / "file")["v.0"]
    assert words.dtype == np.uint16
    given = random(1, HEADS, 32, seed=6)
    assert np.array_equal(
        words.view(ml_dtypes.bfloat16)[:, :1], given.transpose(1, 0, 2).astype(ml_dtypes.bfloat16)
    )
