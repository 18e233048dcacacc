"""Prefixes in the three tiers: pool, host memory, and a folder that caches share."""

import errno
import gc
import os
import pickle
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from processes import PATIENCE
from stored_prefixes import (
    SIZE,
    cache,
    check_rows,
    grow,
    prompt,
    started,
    store_in,
    stored_rows,
)

import numkv
from numkv.store import BlocksDropped, BlocksWritten, PrefixFound
from numkv.store.engine import FullBlock
from numkv.store.folder import Bound, Folder


def objects(folder):
    """Paths of all objects."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".evicting")


def test_a_second_cache_finds_what_the_first_one_wrote(target, tmp_path):
    text = prompt(1)
    first, second = (cache(store_in(tmp_path), target=target) for _ in "ab")
    seq, found = started(first, text)
    assert found == 0
    assert first.store.flush() == 0
    assert first.store.stats().written == len(objects(tmp_path)) == 5
    seq, found = started(second, text)
    assert found == second.cached_len(seq) == 20
    check_rows(second, seq, text)
    now = second.store.stats()
    assert (now.lookups, now.wanted, now.found_in_store, now.missed) == (1, 5, 5, 0)
    assert now.bytes_read == sum(path.stat().st_size for path in objects(tmp_path))
    assert second.store.flush() == 0
    assert second.store.stats().written == 0


@pytest.mark.parametrize("kind", ["int8", "int4", "fp16", "fp8_e4m3"])
def test_rows_come_back_as_they_are_stored(tmp_path, kind):
    """To the bit, scales included."""
    text = prompt(2)
    dim = {"layers": 1}
    first, second = (cache(store_in(tmp_path), kind=kind, **dim) for _ in "ab")
    if kind.startswith("fp8"):
        for each in (first, second):
            each.set_scales(0, k=np.array([0.5, 16], np.float32), v=32.0)
    seq, _ = started(first, text)
    first.store.close()
    other, found = started(second, text)
    assert found == 20
    second.check()
    for a, b in zip(stored_rows(first, seq), stored_rows(second, other), strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.tobytes() == y.tobytes()


def test_scales_of_heads_belong_to_the_identity(tmp_path):
    first, second = (cache(store_in(tmp_path), kind="fp8_e4m3", layers=1) for _ in "ab")
    first.set_scales(0, k=2.0)
    started(first, prompt(3))
    first.store.flush()
    assert started(second, prompt(3))[1] == 0
    second.clear()
    second.set_scales(0, k=2.0)
    assert started(second, prompt(3))[1] == 20


OTHERS = {
    "mark": ({"mark": "another"}, {}),
    "mark by name": ({"mark": {"model": "a model"}}, {}),
    "rope": ({"rope": {"base": 5e5}}, {}),
    "kind": ({}, {"kind": "fp16"}),
    "kind of V": ({}, {"v_kind": "fp16"}),
    "rotation": ({}, {"rotate": True}),
    "windows": ({}, {"windows": [-1, 4]}),
    "layers": ({}, {"layers": 3}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_blocks_of_another_model_are_not_found(tmp_path, name):
    of_store, of_cache = OTHERS[name]
    first = cache(store_in(tmp_path))
    started(first, prompt(4))
    first.store.flush()
    other = cache(store_in(tmp_path, **of_store), **of_cache)
    assert started(other, prompt(4))[1] == 0
    assert cache(store_in(tmp_path)).add(prompt(4)) == 0


def test_blocks_of_another_model_in_this_ones_place_are_refused(tmp_path, caplog):
    """Somebody has moved the folder of one mark to the place of another, of a name as long."""
    text, told = prompt(5), []
    for mark, number in (("model a", 5), ("model b", 6)):
        first = cache(store_in(tmp_path, mark=mark))
        started(first, prompt(number))
        first.store.flush()
    folders = [p for p in tmp_path.iterdir() if p.is_dir()]
    other = cache(store_in(tmp_path, mark="model b", on_event=told.append))
    (theirs,) = [p for p in folders if p.name == other._store.tiers.parts[0].section.folder]
    (ours,) = [p for p in folders if p != theirs]
    os.rename(theirs, tmp_path / "away"), os.rename(ours, theirs)
    assert started(other, text)[1] == 0
    other.store.flush()
    now = other.store.stats()
    assert (now.refused, now.damaged, now.found_in_store) == (5, 0, 0)
    assert [x.reason for x in told if isinstance(x, BlocksDropped)] == ["refused"] * 5
    assert "another mark" in caplog.text
    assert started(cache(store_in(tmp_path, mark="model b")), text)[1] == 20


def test_extra_keys_keep_prompts_apart(tmp_path):
    first, second = (cache(store_in(tmp_path)) for _ in "ab")
    seq = first.add(prompt(7), extra={"tenant": "a"})
    grow(first, seq, prompt(7))
    first.store.flush()
    assert second.cached_len(second.add(prompt(7), extra={"tenant": "b"})) == 0
    assert second.cached_len(second.add(prompt(7))) == 0
    assert second.cached_len(second.add(prompt(7), extra={"tenant": "a"})) == 20


def test_what_the_pool_evicts_comes_back_from_the_host(target, tmp_path):
    told = []
    of = cache(store_in(tmp_path, on_event=told.append), num_blocks=8, target=target)
    for number in range(4):  # five blocks each
        seq, _ = started(of, prompt(number))
        of.remove(seq)
    seq, found = started(of, prompt(0))
    assert found == 20
    check_rows(of, seq, prompt(0))
    assert of.store.stats().found_in_host == 5
    assert of.store.flush() == 0
    lookups = [x for x in told if isinstance(x, PrefixFound)]
    assert [(x.in_pool, x.in_host, x.in_store, x.missed) for x in lookups] == [
        *[(0, 0, 0, 5)] * 4,
        (0, 5, 0, 0),
    ]
    assert {x.wanted for x in lookups} == {5}
    written = [x.block_hashes for x in told if isinstance(x, BlocksWritten)]
    assert len({name.tobytes() for names in written for name in names}) == 20


def test_a_prefix_is_put_together_from_all_tiers(tmp_path):
    """Its beginning is in the pool, the middle in host memory, the end in the folder."""
    text = prompt(8, 41)
    writer = cache(store_in(tmp_path))
    started(writer, text)
    writer.store.flush()
    of = cache(store_in(tmp_path), num_blocks=11)
    seq = of.add(text[:25])
    grow(of, seq, text[:25])
    of.remove(seq)
    ids = of.blocks.find(_names(of, text)[0], text[:40])
    of.blocks.release(of.blocks.allocate_ids(ids[3:6]))
    seq, found = started(of, text)
    assert found == 40
    check_rows(of, seq, text)
    now = of.store.stats()
    assert (now.found_in_pool, now.found_in_host, now.found_in_store) == (3, 3, 4 + 6)


def _names(of, text):
    from numkv.caches.paged.prefix_match import block_names

    return block_names(of._store, np.array(text[:40], np.int32), None)


@pytest.mark.parametrize("windows", [[-1, 6], [6, 6], [6, 3]])
def test_sliding_windows(tmp_path, windows):
    text = prompt(9, 45)
    writer, reader = (cache(store_in(tmp_path), windows=windows) for _ in "ab")
    seq = writer.add(text)
    for end in range(7, 46, 7):
        grow(writer, seq, text[:end])
    grow(writer, seq, text)
    writer.store.flush()
    seq, found = started(reader, text)
    assert found == 44
    reader.check()
    q = np.ones((1, 4, 8), np.float32)
    for layer in range(2):
        a, b = (of.decode_attention(layer, [0], q) for of in (writer, reader))
        assert np.array_equal(a, b)


def test_as_much_as_there_is_room_for(tmp_path):
    text = prompt(10, 41)
    writer = cache(store_in(tmp_path))
    started(writer, text)
    writer.store.flush()
    small = cache(store_in(tmp_path), num_blocks=8)
    other = small.add()
    grow(small, other, prompt(11, 9))
    seq = small.add(text)
    assert small.cached_len(seq) == 20
    check_rows(small, seq, text)
    assert small.num_free == 0


def test_objects_that_go_missing_shorten_a_prefix(tmp_path, monkeypatch):
    """They are deleted between the look and the reading."""
    text = prompt(12, 41)
    writer, reader = (cache(store_in(tmp_path)) for _ in "ab")
    started(writer, text)
    writer.store.flush()
    gone = reader._store.tiers.parts[0].section.key(_names(reader, text)[0][6].tobytes())
    sizes = Folder.sizes

    def looked(self, keys):
        found = sizes(self, keys)
        (tmp_path / gone).unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Folder, "sizes", looked)
    seq = reader.add(text)
    assert reader.cached_len(seq) == 24
    check_rows(reader, seq, text)
    assert reader.store.stats().damaged == 0


def test_what_cannot_be_written_is_counted_and_computed_anew(tmp_path, monkeypatch, caplog):
    told = []
    of = cache(store_in(tmp_path, on_event=told.append))
    write = Folder.write

    def full(self, key, pieces, age):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Folder, "write", full)
    seq, _ = started(of, prompt(13))
    assert of.store.flush() == 5
    assert of.store.flush() == 0
    check_rows(of, seq, prompt(13))
    now = of.store.stats()
    assert (now.failed, now.written) == (5, 0)
    assert "No space left" in now.last_error
    assert "No space left" in caplog.text
    assert {x.reason for x in told if isinstance(x, BlocksDropped)} == {"failed"}
    monkeypatch.setattr(Folder, "write", write)
    seq, _ = started(of, prompt(14))
    assert of.store.flush() == 0
    assert started(cache(store_in(tmp_path)), prompt(14))[1] == 20


def test_a_full_host_tier_gives_blocks_up_and_says_so(tmp_path, monkeypatch):
    """The disk stands still, and the pool needs its blocks."""
    go, write = threading.Event(), Folder.write

    def slow(self, key, pieces, age):
        assert go.wait(PATIENCE)
        write(self, key, pieces, age)

    monkeypatch.setattr(Folder, "write", slow)
    content = 2 * 2 * 2 * 8 * SIZE * 4
    of = cache(store_in(tmp_path, host_nbytes=3 * content), num_blocks=6)
    for number in range(3):
        seq, _ = started(of, prompt(number))
        of.remove(seq)
    now = of.store.stats()
    assert now.host_blocks == 3
    assert now.dropped > 0
    with pytest.raises(TimeoutError, match="not written"):
        of.store.flush(0.01)
    go.set()
    assert of.store.flush() == now.dropped
    assert of.store.stats().written == 15 - now.dropped


def test_max_nbytes_keeps_what_was_used_last(tmp_path):
    size = 0
    for number in range(12):
        of = cache(store_in(tmp_path, max_nbytes=30 * size or None))
        started(of, prompt(number))
        of.store.flush()
        size = size or objects(tmp_path)[0].stat().st_size
        assert started(cache(store_in(tmp_path)), prompt(0))[1] == 20  # used every time
        of.store.close()
        _age(tmp_path)
    assert sum(path.stat().st_size for path in objects(tmp_path)) <= 30 * size
    found = [started(cache(store_in(tmp_path)), prompt(n))[1] for n in range(12)]
    assert found[0] == found[11] == 20
    assert found[1] == 0


def _age(folder):
    """Have everything be a minute older."""
    for path in objects(folder):
        at = path.stat().st_mtime - 60
        os.utime(path, (at, at))


def test_what_a_killed_process_left_is_deleted(tmp_path):
    of = cache(store_in(tmp_path, max_nbytes=1 << 20))
    started(of, prompt(1))
    of.store.flush()
    old, new = (objects(tmp_path)[0].parent / f".{x}.partial" for x in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    again = cache(store_in(tmp_path, max_nbytes=1 << 20))
    started(again, prompt(2))
    again.store.flush()
    assert (old.exists(), new.exists()) == (False, True)
    assert started(cache(store_in(tmp_path)), prompt(1))[1] == 20


def test_how_old_a_file_is_says_the_clock_that_it_has_its_time_from(tmp_path, monkeypatch):
    """With that of this machine, which is an hour ahead, a file that is being written would be gone."""
    place = Folder(str(tmp_path), False)
    folder = f"{'a' * 32}/bb"
    place.write(f"{folder}/{'c' * 62}", [b"whole"], 1.0)
    new = tmp_path / folder / ".new.partial"
    new.write_bytes(b"half")
    ahead = SimpleNamespace(
        time=lambda: time.time() + 3600, monotonic=time.monotonic, sleep=time.sleep
    )
    monkeypatch.setattr("numkv.store.folder.time", ahead)
    assert Bound(place, 10).make_room(10) == 1
    assert new.exists()


def test_nothing_is_added_while_a_store_is_closed(tmp_path, monkeypatch):
    """Neither after it has waited for what was there: nobody would write that."""
    of = cache(store_in(tmp_path))
    engine, section = of.store._engine, of._store.tiers.parts[0].section
    flush, late = engine.flush, threading.Thread(
        target=lambda: engine.add(section, [(FullBlock(0, bytes(32), b"", 0), np.zeros(8, np.uint8))])
    )  # fmt: skip

    def waited(timeout):
        lost = flush(timeout)
        late.start()
        late.join(0.1)
        return lost

    monkeypatch.setattr(engine, "flush", waited)
    assert of.store.close() == 0
    late.join()
    now = of.store.stats()
    assert (now.waiting, now.host_blocks, now.written, now.failed) == (0, 0, 0, 0)


def test_blocks_that_others_are_writing_are_not_evicted(tmp_path, monkeypatch):
    """However long ago they were used: a writer would find that its file is gone."""
    of = cache(store_in(tmp_path))
    started(of, prompt(1))
    of.store.flush()
    old, place = objects(tmp_path)[0], Folder(str(tmp_path), False)
    half = old.parent / ".half.partial"
    half.write_bytes(b"half")
    os.utime(half, (time.time() - 300,) * 2)
    assert Bound(place, 5 * old.stat().st_size).make_room(old.stat().st_size) == 2
    assert half.exists()

    def renamed(source, target):
        assert Bound(place, 10).make_room(10) > 0
        replace(source, target)

    replace = os.replace
    monkeypatch.setattr(os, "replace", renamed)
    key = str(old.relative_to(tmp_path))
    place.write(key, [b"whole"], 1000.0)
    assert (tmp_path / key).read_bytes() == b"whole"
    assert abs((tmp_path / key).stat().st_mtime - (time.time() - 1000.0)) < 60


def test_a_closed_store_is_no_store(tmp_path):
    with store_in(tmp_path) as store:
        of = cache(store)
        started(of, prompt(1))
    assert store.closed
    assert "closed" in repr(store)
    assert len(objects(tmp_path)) == 5
    started(of, prompt(2))
    assert store.close() == store.flush() == 0
    assert len(objects(tmp_path)) == 5
    with pytest.raises(numkv.NumkvError, match="closed"):
        cache(store)


def test_copies_share_the_store_and_pickles_have_none(tmp_path):
    of = cache(store_in(tmp_path))
    started(of, prompt(1))
    twin, other = of.copy(), pickle.loads(pickle.dumps(of))
    assert twin.store is of.store
    assert other.store is None
    started(twin, prompt(2)), started(other, prompt(3))
    of.store.flush()
    assert len(objects(tmp_path)) == 10
    with pytest.raises(numkv.NotSupported, match="copied or pickled"):
        pickle.dumps(of.store)


def test_a_cache_that_is_gone_is_written_all_the_same(tmp_path):
    store = store_in(tmp_path)
    started(cache(store), prompt(1))
    gc.collect()
    assert store.flush() == 0
    assert len(objects(tmp_path)) == 5


def test_sequences_that_are_swapped_in_are_written_too(tmp_path):
    plain, of = cache(None), cache(store_in(tmp_path))
    seq, _ = started(plain, prompt(1))
    of.swap_in(plain.swap_out(seq))
    of.store.flush()
    assert len(objects(tmp_path)) == 5


def test_compaction_writes_no_moved_rows(tmp_path, monkeypatch):
    """A block that waits is taken out of the pool before its rows move."""
    go, write = threading.Event(), Folder.write
    monkeypatch.setattr(Folder, "write", lambda *args: (go.wait(PATIENCE), write(*args))[1])
    of, text = cache(store_in(tmp_path)), prompt(1)
    seq, _ = started(of, text)
    of.compact(seq, [0, 5, 6, 7, 8, 9, 20])
    go.set()
    assert of.store.flush() == 0
    seq, found = started(reader := cache(store_in(tmp_path)), text)
    assert found == 20
    check_rows(reader, seq, text)


def test_caches_of_several_threads_share_a_store(tmp_path):
    """Small pools, so that blocks go through all tiers; every row that is found is right."""
    store, errors = store_in(tmp_path, host_nbytes=1 << 14), []

    def work(seed):
        rng = np.random.default_rng(seed)
        of = cache(store, num_blocks=12)
        try:
            for _ in range(30):
                text = prompt(int(rng.integers(6)), int(rng.integers(2, 40)))
                seq, _ = started(of, text)
                check_rows(of, seq, text)
                of.remove(seq)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    store.flush()
    now = store.stats()
    assert now.found_in_host + now.found_in_store > 0
    assert now.waiting == 0


def test_a_forked_child_begins_with_an_empty_queue(tmp_path, monkeypatch):
    go, write = threading.Event(), Folder.write
    monkeypatch.setattr(Folder, "write", lambda *args: (go.wait(PATIENCE), write(*args))[1])
    of = cache(store_in(tmp_path))
    started(of, prompt(1))
    child = os.fork()
    if not child:
        status = 1
        try:
            go.set()
            assert of.store.stats().waiting == 0
            assert of.store.flush(PATIENCE) == 0
            started(of, prompt(2))
            assert of.store.flush(PATIENCE) == 0
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert started(cache(store_in(tmp_path)), prompt(2))[1] == 20
    go.set()
    assert of.store.flush() == 0
    assert started(cache(store_in(tmp_path)), prompt(1))[1] == 20


def test_events_may_not_flush(tmp_path):
    raised = []

    def told(event):
        if isinstance(event, BlocksWritten):
            try:
                of.store.flush()
            except numkv.NumkvError as error:
                raised.append(str(error))
            raise ValueError("of the user's own")

    of = cache(store_in(tmp_path, on_event=told))
    started(of, prompt(1))
    assert of.store.flush() == 0
    assert len(raised) == 5


def test_threads_end_when_there_is_nothing_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("numkv.store.engine._IDLE", 0.01)
    of = cache(store_in(tmp_path))
    started(of, prompt(1))
    of.store.flush()
    until = time.monotonic() + PATIENCE
    while of.store._engine._threads and time.monotonic() < until:
        time.sleep(0.01)
    assert of.store._engine._threads == 0
    started(of, prompt(2))
    assert of.store.flush() == 0
    assert len(objects(tmp_path)) == 10


def test_durable_blocks_are_brought_to_the_disk(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr("numkv.store.folder.os.fsync", lambda fd: (synced.append(fd), fsync(fd)))
    of = cache(store_in(tmp_path, durable=True))
    started(of, prompt(1))
    of.store.flush()
    assert len(synced) == 10  # each file, and the folder that it is in
