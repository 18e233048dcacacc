"""What `save` and `load` take beside a path and a cache, and what else may use the cache meanwhile."""

import threading

import numpy as np
import pytest
from saved_caches import (
    CACHES,
    HEADS,
    compressor,
    kv_cache,
    layer,
    multi,
    on_host,
    paged_cache,
    query,
    random,
    rows,
    shift,
)

import numkv
from numkv.access import Access
from numkv.files import api, load_sequences, save_sequences

# ---------------------------------------------------------------- marks

MARKS = [
    "llama",
    {"model": "llama", "rope_theta": 1e6, "revision": 3, "adapter": None, "tied": True},
]


@pytest.mark.parametrize("mark", MARKS)
def test_a_mark_is_compared(tmp_path, mark):
    path = tmp_path / "file"
    numkv.save(path, kv_cache("cpu", kind="fp32"), mark=mark)
    numkv.load(path, mark=mark)
    numkv.load(path)
    for other in ("mistral", {}, {"model": "llama", "rope_theta": 5e5}, ""):
        with pytest.raises(numkv.NotSupported, match="`mark`: expected a file marked"):
            numkv.load(path, mark=other)
    numkv.save(path, kv_cache("cpu", kind="fp32"))
    with pytest.raises(numkv.NotSupported, match="marked None"):
        numkv.load(path, mark=mark)


def test_a_message_says_which_facts_differ(tmp_path):
    numkv.save(tmp_path / "file", kv_cache("cpu", kind="fp32"), mark=MARKS[1])
    with pytest.raises(numkv.NotSupported, match=r"\(adapter, rope_theta differ\)"):
        numkv.load(
            tmp_path / "file",
            mark={"model": "llama", "rope_theta": 5e5, "revision": 3, "tied": True},
        )


@pytest.mark.parametrize("mark", [3, b"x", ["x"], {"x": []}, {3: "x"}, {"x": b""}])
def test_what_is_no_mark_is_refused(tmp_path, mark):
    with pytest.raises(TypeError, match="`mark`"):
        numkv.save(tmp_path / "file", kv_cache("cpu", kind="fp32"), mark=mark)
    with pytest.raises(TypeError, match="`mark`"):
        numkv.load(tmp_path / "file", mark=mark)
    with pytest.raises(ValueError, match="`mark`"):
        numkv.save(tmp_path / "file", kv_cache("cpu", kind="fp32"), mark={"x": np.inf})


def test_sequences_have_marks_too(tmp_path):
    cache = paged_cache("cpu", kind="int8")
    one = cache.swap_out(cache.sequences[0])
    save_sequences(tmp_path / "file", [one], mark="m")
    assert len(load_sequences(tmp_path / "file", mark="m")) == 1
    with pytest.raises(numkv.NotSupported, match="`mark`"):
        load_sequences(tmp_path / "file", mark="n")
    numkv.save(tmp_path / "file", cache)
    with pytest.raises(numkv.NotSupported, match="expected sequences, got a PagedKVCache"):
        load_sequences(tmp_path / "file")


# ---------------------------------------------------------------- options of load


def test_a_shift_of_another_rope_is_refused(tmp_path):
    numkv.save(tmp_path / "file", multi(numkv.CausalCache(shift()), "cpu"))
    angles = np.outer(np.arange(64), np.full(16, 0.3))
    other = numkv.rope_shift(np.cos(angles), np.sin(angles))
    with pytest.raises(numkv.NotSupported, match="`shift`: expected the RoPE"):
        numkv.load(tmp_path / "file", shift=other)
    longer = shift()
    numkv.load(tmp_path / "file", shift=longer)
    numkv.load(tmp_path / "file", shift=lambda at, keys, offsets: keys)
    with pytest.raises(TypeError, match="`shift`"):
        numkv.load(tmp_path / "file", shift=3)


def test_shifts_of_children(tmp_path):
    numkv.save(tmp_path / "file", CACHES["WrapperCache"]("cpu"))
    for given in (shift(), [None, shift()], (shift(), None)):
        loaded = numkv.load(tmp_path / "file", shift=given)
        wanted = given if isinstance(given, (list, tuple)) else [given] * 2
        assert [child._shift for child in loaded.caches] == list(wanted)
    with pytest.raises(numkv.NotSupported, match="`shift`: expected one for all"):
        numkv.load(tmp_path / "file", shift=[shift()])


REFUSED = [
    ("KVCache fp32", {"shift": shift()}, "`shift`"),
    ("KVCache fp32", {"pool": numkv.PagedPool(4, 4, HEADS, 32)}, "`pool`"),
    ("EncoderCache int8", {"shift": shift()}, "`shift`"),
    ("PagedLayer int8", {"shift": shift()}, "`shift`"),
    ("PagedLayer int8", {"pool": numkv.PagedPool(9, 4, HEADS, 32), "target": "cuda"}, "`target`"),
    ("PagedLayer int8", {"max_nbytes": 100}, "max_nbytes"),
    ("KVCache int8 rotated, bounded", {"max_nbytes": 1000}, "max_nbytes"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_an_option_that_does_not_suit_is_refused(tmp_path, name, options, message):
    numkv.save(tmp_path / "file", CACHES[name]("cpu"))
    with pytest.raises(numkv.NotSupported, match=message):
        numkv.load(tmp_path / "file", **options)


@pytest.mark.parametrize(
    ("options", "error"),
    [({"pool": 3}, TypeError), ({"max_nbytes": -1}, TypeError), ({"max_nbytes": 1.5}, TypeError),
     ({"max_nbytes": True}, TypeError), ({"target": "tpu"}, ValueError)],
)  # fmt: skip
def test_an_option_that_is_none_is_refused(tmp_path, options, error):
    numkv.save(tmp_path / "file", CACHES["PagedLayer int8"]("cpu"))
    with pytest.raises(error):
        numkv.load(tmp_path / "file", **options)


def test_a_layer_takes_its_blocks_from_a_pool(tmp_path, target):
    made = layer(numkv.PagedLayer, target, kind="int8")
    numkv.save(tmp_path / "file", made)
    pool = numkv.PagedPool(5, 4, HEADS, 32, kind="int8", target=target)
    loaded = numkv.load(tmp_path / "file", pool=pool)
    assert loaded.pool is pool
    assert pool.blocks.num_free == 1
    with pytest.raises(numkv.CacheFull):
        numkv.load(tmp_path / "file", pool=pool)
    assert pool.blocks.num_free == 1
    for other in (
        {"kind": "fp16"}, {"block_size": 8}, {"head_dim": 64}, {"num_kv_heads": 1}, {"rotate": True},
    ):  # fmt: skip
        sizes = {
            "num_blocks": 9,
            "block_size": 4,
            "num_kv_heads": HEADS,
            "head_dim": 32,
            "kind": "int8",
        }
        wrong = numkv.PagedPool(**(sizes | other), target=target)
        with pytest.raises(numkv.DimensionMismatch, match="`pool`"):
            numkv.load(tmp_path / "file", pool=wrong)
        assert wrong.blocks.num_free == 9


def test_rows_of_others_in_a_pool_stay(tmp_path, target):
    made = layer(numkv.PagedLayer, target, kind="int8")
    numkv.save(tmp_path / "file", made)
    pool = numkv.PagedPool(9, 4, HEADS, 32, kind="int8", target=target)
    other = numkv.PagedLayer(5, 4, HEADS, 32, pool=pool)
    other.append(rows(7, target), rows(7, target, seed=1))
    before = on_host(other.decode_attention(query(1, target)), target)
    loaded = numkv.load(tmp_path / "file", pool=pool)
    assert np.array_equal(on_host(other.decode_attention(query(1, target)), target), before)
    q = query(1, target)
    wanted = on_host(made.decode_attention(q), target)
    assert np.array_equal(on_host(loaded.decode_attention(q), target), wanted)


def test_a_pool_keeps_its_scales(tmp_path):
    numkv.save(tmp_path / "file", layer(numkv.PagedLayer, "cpu", kind="fp8_e4m3"))
    pool = numkv.PagedPool(9, 4, HEADS, 32, kind="fp8_e4m3")
    with pytest.raises(numkv.NumkvError, match="`pool`: expected one whose scales of v"):
        numkv.load(tmp_path / "file", pool=pool)
    assert pool.blocks.num_free == 9
    pool.set_scales(v=0.5)
    numkv.load(tmp_path / "file", pool=pool)


# ---------------------------------------------------------------- what can be saved


class Mine(numkv.KVCache):
    pass


@pytest.mark.parametrize(
    "cache", [None, 3, "x", {}, object(), numkv.PagedPool(1, 1, 1, 8), Mine(1, 1, 8), [3]]
)
def test_what_is_no_cache_is_refused(tmp_path, cache):
    with pytest.raises((TypeError, numkv.NumkvError), match=r"`cache`|`sequences`"):
        numkv.save(tmp_path / "file", cache)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "error"), [(3, TypeError), (None, TypeError), ("a\0b", ValueError), ("", OSError)]
)
def test_what_is_no_path_is_refused(tmp_path, monkeypatch, path, error):
    monkeypatch.chdir(tmp_path)
    cache = kv_cache("cpu", kind="fp32")
    for call in (
        lambda: numkv.save(path, cache),
        lambda: numkv.load(path),
        lambda: load_sequences(path),
    ):
        with pytest.raises(error) as caught:
            call()
        assert error is OSError or "`path`" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_caches_that_are_not_ready_are_refused(tmp_path):
    before, closed = numkv.CausalCache(), multi(numkv.CausalCache(), "cpu")
    closed.close()
    paged = paged_cache("cpu", kind="int8")
    paged.reserve([paged.sequences[0]], 1)
    for cache in (before, closed, paged, []):
        with pytest.raises(numkv.NumkvError):
            numkv.save(tmp_path / "file", cache)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_scales_that_are_none_are_not_saved(tmp_path, kind):
    bad = np.full((1, HEADS, 32), np.inf, np.float32)
    single = kv_cache("cpu", kind=kind)
    single.append(1, bad, bad, check_finite=False)
    paged = numkv.PagedKVCache(1, HEADS, 32, num_blocks=4, kind=kind)
    step = paged.reserve([paged.add()], 1)
    step.append(0, bad, bad, check_finite=False)
    paged.commit(step)
    head = compressor("cpu", bits=4)
    head.extend(bad, bad, check_finite=False)
    for cache in (single, paged, head):
        with pytest.raises(numkv.NumkvError, match="`cache`: expected finite"):
            numkv.save(tmp_path / "file", cache)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- who else uses it


def during(monkeypatch, action):
    """Do something while a file is being written."""
    write = api.write

    def write_and_more(path, fields, tensors):
        action()
        write(path, fields, tensors)

    monkeypatch.setattr(api, "write", write_and_more)


def test_a_cache_that_loses_rows_meanwhile_is_not_saved(tmp_path, monkeypatch):
    cache = kv_cache("cpu", kind="fp32")
    cache._access = Access()
    numkv.save(tmp_path / "file", cache)
    before = (tmp_path / "file").read_bytes()
    during(monkeypatch, lambda: setattr(cache._access, "dropped", cache._access.dropped + 2))
    with pytest.raises(numkv.NumkvError, match="no thread changes while it is saved"):
        numkv.save(tmp_path / "file", cache)
    assert (tmp_path / "file").read_bytes() == before
    assert [x.name for x in tmp_path.iterdir()] == ["file"]


def test_tokens_that_come_meanwhile_are_not_in_the_file(tmp_path, monkeypatch):
    cache = kv_cache("cpu", kind="fp32", pending=False)
    wanted = cache.k(0).copy()
    during(monkeypatch, lambda: cache.append(0, rows(40, "cpu"), rows(40, "cpu")))
    numkv.save(tmp_path / "file", cache)
    assert np.array_equal(numkv.load(tmp_path / "file").k(0), wanted)
    assert cache.k(0).shape[0] == 50


@pytest.mark.parametrize("name", ["KVCache int8 residual", "CausalCache int8", "PagedKVCache int8"])
def test_saving_is_a_writer_where_new_tokens_would_change_rows(tmp_path, monkeypatch, name):
    cache = CACHES[name]("cpu")
    access = cache._access = Access()
    seen = []
    during(monkeypatch, lambda: seen.append("call" in access.writer))
    numkv.save(tmp_path / "file", cache)
    assert seen == [True]
    assert not access.writer
    access.writer["call"] = object()
    with pytest.raises(numkv.NumkvError, match="no thread changes while it is saved"):
        numkv.save(tmp_path / "other", cache)
    assert len(access.writer) == 1  # it is the other's
    assert not (tmp_path / "other").exists()


def test_caches_of_a_wrapper_that_are_held_together(tmp_path):
    cache = CACHES["WrapperCache"]("cpu")
    access = cache._access = Access()
    for child in cache.caches:
        child._access = access
    numkv.save(tmp_path / "file", cache)
    assert not access.writer
    assert len(numkv.load(tmp_path / "file").caches) == 2


def test_attention_goes_on_while_a_cache_is_saved(tmp_path):
    cache = kv_cache("cpu", kind="fp32")
    q = random(1, 4, 32)
    wanted, wrong, done = cache.decode_attention(0, q), [], threading.Event()

    def attend():
        while not done.is_set():
            if not np.array_equal(cache.decode_attention(0, q), wanted):
                wrong.append(1)

    thread = threading.Thread(target=attend)
    thread.start()
    for _ in range(5):
        numkv.save(tmp_path / "file", cache)
    done.set(), thread.join()
    assert not wrong
