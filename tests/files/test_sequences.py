"""Sequences in files: what is saved comes back, and a mismatch is refused with the reason."""

import numpy as np
import pytest
from layer_lists import paged_kv_cache
from safetensors.numpy import save_file

import numkv
from numkv.files import load_sequences, save_sequences


def filled(kind, windows=None, lens=(37, 5)):
    cache = paged_kv_cache(2, 2, 8, num_blocks=64, block_size=4, kind=kind, windows=windows)
    rng = np.random.default_rng(3)
    seqs = []
    for n in lens:
        tokens = rng.integers(0, 50, n)
        seq = cache.add(tokens, extra={"adapter": 7, "salt": b"\x00\xff"})
        step = cache.reserve([seq], [n])
        for layer in range(2):
            rows = rng.standard_normal((2, n, 2, 8)).astype(np.float32)
            step.append(layer, *rows)
        cache.commit(step, token_ids=tokens)
        seqs.append(seq)
    return cache, seqs


@pytest.mark.parametrize("windows", [None, [-1, 6]])
@pytest.mark.parametrize(
    "kind",
    [
        "fp16",
        "int8",
        *(pytest.param(k, marks=pytest.mark.nightly) for k in ("fp32", "bf16", "int4")),
    ],
)
def test_a_round_trip_attends_alike(tmp_path, kind, windows):
    cache, seqs = filled(kind, windows)
    path = tmp_path / "cache.safetensors"
    save_sequences(path, [cache.swap_out(s) for s in seqs])
    other = paged_kv_cache(2, 2, 8, num_blocks=40, block_size=4, kind=kind, windows=windows)
    back = [other.swap_in(s) for s in load_sequences(path)]
    q = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)
    for layer in range(2):
        expected = cache.decode_attention(layer, seqs, q)
        assert np.array_equal(other.decode_attention(layer, back, q), expected)
    other.check()
    assert [other.length(s) for s in back] == [37, 5]


def test_what_was_loaded_is_findable(tmp_path):
    cache, (seq, _) = filled("fp16")
    path = tmp_path / "cache.safetensors"
    swapped = cache.swap_out(seq)
    save_sequences(path, [swapped])
    other = numkv.PagedKVCache(2, 2, 8, num_blocks=40, block_size=4, kind="fp16")
    (loaded,) = load_sequences(path)
    other.swap_in(loaded)
    assert loaded.extra == {"adapter": 7, "salt": b"\x00\xff"}
    assert np.array_equal(loaded.tokens, swapped.tokens)
    again = other.add(loaded.tokens, extra=loaded.extra)
    assert other.cached_len(again) == 36
    assert other.cached_len(other.add(loaded.tokens)) == 0


@pytest.mark.parametrize(
    "other", [{"kind": "bf16"}, {"block_size": 8}, {"windows": [-1, 3]}, {"head_dim": 16}]
)
def test_another_geometry_is_refused(tmp_path, other):
    cache, (seq, _) = filled("fp16")
    save_sequences(tmp_path / "s", [cache.swap_out(seq)])
    arguments = {"head_dim": 8, "block_size": 4, "kind": "fp16"} | other
    target = paged_kv_cache(2, 2, num_blocks=40, **arguments)
    with pytest.raises(numkv.DimensionMismatch, match="geometry"):
        target.swap_in(load_sequences(tmp_path / "s")[0])
    assert target.num_free == 40


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("no tensors here")
    with pytest.raises(numkv.NotSupported, match="safetensors"):
        load_sequences(tmp_path / "text")
    save_file({"x": np.zeros(3)}, tmp_path / "other")
    with pytest.raises(numkv.NotSupported, match="format"):
        load_sequences(tmp_path / "other")


def test_an_interrupted_save_keeps_the_old_file(tmp_path, monkeypatch):
    cache, seqs = filled("fp16")
    path = tmp_path / "s"
    save_sequences(path, [cache.swap_out(seqs[0])])
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("numkv.files.container.write_all", fail)
    with pytest.raises(OSError, match="disk full"):
        save_sequences(path, [cache.swap_out(seqs[1])])
    assert path.read_bytes() == before


def test_nothing_to_save_is_an_error(tmp_path):
    with pytest.raises(numkv.NumkvError):
        save_sequences(tmp_path / "s", [])
