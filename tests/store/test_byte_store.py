"""`BlockStore`: bytes under keys of the caller's."""

import asyncio
import contextlib
import errno
import gc
import os
import pickle
import threading
import time
import weakref

import ml_dtypes
import numpy as np
import pytest
from networks import Network

import numkv
from numkv.store import BlockStore


def over(place, **options):
    return BlockStore(place, **{"mark": "an engine", **options})


@pytest.fixture(params=["folder", "network"])
def make(request, tmp_path):
    """Makes stores over one place."""
    if request.param == "folder":
        return lambda **options: over(tmp_path, **options)
    network = Network()
    return lambda **options: over("x", file_system=network, timeout=60.0, **options)


def files(folder):
    return [p for p in folder.rglob("*") if p.is_file()]


def test_what_is_put_is_there_for_others(make):
    rng = np.random.default_rng(1)
    values = [rng.integers(0, 256, n, np.uint8) for n in (1, 100, 0, 4096, 100)]
    keys = ["a", b"a", "", "long " * 1000, "\N{SNOWMAN}"]
    first, second = make(), make()
    assert first.put(keys, values) == [True] * 5
    assert second.exists([*keys, "b"]) == [True] * 5 + [False]
    into = [np.zeros_like(x) for x in values]
    assert second.get_into(keys, into) == [True] * 5
    for got, want in zip(into, values, strict=True):
        np.testing.assert_array_equal(got, want)
    now = second.stats()
    assert (now.found, now.missed, now.bytes_read, now.errors) == (5, 0, 4297, {})
    assert (first.stats().written, first.stats().bytes_written) == (5, 4297)


def test_what_is_not_there(make):
    store = make()
    into = bytearray(b"old")
    assert store.get_into(["a"], [into]) == [False]
    assert into == b"old"
    assert store.get(["a", "b"]) == [None, None]
    assert store.stats().missed == 3
    assert store.exists([]) == store.get_into([], []) == store.put([], []) == []
    store.put(["a"], [b"four"])
    assert store.get_into(["a", "a"], [bytearray(3), bytearray(4)]) == [False, True]
    assert store.stats().damaged == 0  # of another length is no damage
    assert make(mark="another engine").exists(["a"]) == [False]
    assert store.remove(["a", "b"]) == [True, True]
    assert store.exists(["a"]) == [False]


def test_errors_keep_no_memory_alive(make, tmp_path, monkeypatch):
    """Without a collection of cycles: it may come late, and the memory may be a gigabyte."""
    store, more = make(), ["b", "c", "d", "e", "f"]
    x = np.zeros(10, np.uint8)
    of_x = weakref.ref(x)
    if hasattr(store._place, "_fs"):
        monkeypatch.setattr(store._place._fs, "refuses", True)
    (tmp_path / store._empty.folder).write_text("a file in the place of the folder")
    gc.collect()
    gc.disable()
    try:
        assert store.get_into(["a", *more], [x] * 6) == [False] * 6
        with contextlib.suppress(OSError):
            store._place.write(f"{store._empty.folder}/b/c", [x], 0.0)
        assert store.put(["a", *more], [x] * 6) == [False] * 6
        del x
        until = time.monotonic() + 30  # the network's threads let go of it when they end
        while of_x() is not None and time.monotonic() < until:
            time.sleep(0.01)
        assert of_x() is None
    finally:
        gc.enable()


def test_a_key_has_the_bytes_that_were_put_last(make):
    store, into = make(), bytearray(4)
    for value in (b"1111", b"1111", b"2222"):
        assert store.put(["a"], [value]) == [True]
    assert store.get_into(["a"], [into]) == [True]
    assert into == b"2222"


def test_every_flipped_bit_is_a_miss(tmp_path):
    store = over(tmp_path)
    store.put(["a"], [b"content"])
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert store.get_into(["a"], [bytearray(7)]) == [False], at
        assert not path.exists()
    assert store.stats().damaged == len(whole)


def test_a_file_that_is_longer_than_memory_is_a_miss(tmp_path):
    store = over(tmp_path)
    store.put(["a", "b"], [b"content", b"other"])
    os.truncate(tmp_path / store._empty.key(store._names(["a"])[0]), 1 << 43)  # without blocks
    assert store.get(["a", "b"]) == [None, b"other"]
    assert store.stats().errors == {"read: MemoryError": 1}
    assert store.put(["a"], [b"content"]) == [True]
    assert store.get(["a"]) == [b"content"]


@pytest.mark.parametrize("what", ["a folder", "a pipe", "a device", "a loop", "a link"])
def test_what_is_no_file_in_the_place_of_an_object_is_a_miss(tmp_path, what):
    """It is replaced, but for a folder; a link is not followed, as its target need not be the store's."""
    store, outside = over(tmp_path / "store"), tmp_path / "outside"
    outside.write_text("precious")
    place = tmp_path / "store" / store._empty.key(store._names(["a"])[0])
    place.parent.mkdir(parents=True)
    make = {
        "a folder": place.mkdir, "a pipe": lambda: os.mkfifo(place), "a device": lambda: place.symlink_to("/dev/zero"),
        "a loop": lambda: place.symlink_to(place), "a link": lambda: place.symlink_to(outside),
    }  # fmt: skip
    make[what]()
    assert store.exists(["a"]) == [what == "a link"]
    assert store.get(["a"]) == [None]
    is_folder = what == "a folder"
    assert store.put(["a"], [b"1"]) == [not is_folder]
    assert store.stats().errors == ({"write: IsADirectoryError": 1} if is_folder else {})
    assert store.get(["a"]) == [None if is_folder else b"1"]
    assert outside.read_text() == "precious"
    assert len(list(store._place.entries())) == (not is_folder)


def test_objects_of_one_key_in_the_place_of_another(tmp_path):
    store = over(tmp_path)
    store.put(["a"], [b"of a"])
    (of_a,) = files(tmp_path)
    store.put(["b"], [b"of b"])
    (of_b,) = set(files(tmp_path)) - {of_a}
    of_b.write_bytes(of_a.read_bytes())
    assert store.get_into(["a", "b"], [bytearray(4), bytearray(4)]) == [True, False]


def test_a_bound(tmp_path):
    store = over(tmp_path, max_nbytes=20_000)
    for i in range(40):
        assert store.put([str(i)], [bytes(1000)]) == [True]
    assert sum(p.stat().st_size for p in files(tmp_path)) <= 21_000
    assert store.stats().evicted > 15
    assert store.exists(["39"]) == [True]
    assert store.put(["large"], [bytes(30_000)]) == [False]
    assert "larger than the store may be" in store.stats().last_error


@pytest.mark.parametrize("is_network", [False, True])
def test_files_of_others_are_neither_counted_nor_deleted(tmp_path, is_network):
    theirs = [tmp_path / x for x in ("weights", "llama/weights", "llama/1/weights", "a/b/c/d")]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(20_000))
        os.utime(path, (1, 1))
    system = pytest.importorskip("fsspec").filesystem("file") if is_network else None
    store = over(tmp_path, max_nbytes=20_000, file_system=system, timeout=60.0)
    for i in range(40):
        assert store.put([str(i)], [bytes(1000)]) == [True]
    assert all(path.exists() for path in theirs)
    assert 10 < sum(store.exists([str(i) for i in range(40)])) < 20
    store.clear()
    assert {p for p in files(tmp_path) if p.name != ".evicting"} == set(theirs)


@pytest.mark.parametrize("root", ["a", "/a", "0/"])
def test_a_bound_in_a_place_whose_name_is_a_digit(root):
    system = Network()
    store = over(root, max_nbytes=20_000, file_system=system, timeout=60.0)
    for i in range(40):
        assert store.put([str(i)], [bytes(1000)]) == [True]
    assert len(system.store) < 20


def test_many_keys_are_asked_for_at_once():
    network = Network(0.1)
    store = over("x", file_system=network, timeout=60.0)
    keys, values = [str(i) for i in range(64)], [bytes(10)] * 64
    assert all(store.put(keys, values))
    assert network.peak > 16
    network.peak = 0
    assert all(store.get_into(keys, [bytearray(10) for _ in keys]))
    assert network.peak > 32


def test_a_network_that_is_silent_is_left_alone():
    network = Network()
    assert over("x", file_system=network, timeout=60.0).put(["a"], [b"1"]) == [True]
    store = over("x", file_system=network, timeout=0.05)
    network.be_silent()
    into = bytearray(b"-")
    try:
        assert store.get_into(["a"], [into]) == [False]
        asked = len(network.calls)
        assert store.exists(["a"]) == [False]
        assert store.put(["a"], [b"2"]) == [False]
        assert len(network.calls) == asked
        assert not store.stats().answers
        assert "read: Unanswered" in store.stats().errors
    finally:
        store.close()
        network.speak()
    assert into == b"-"  # late answers are written nowhere


def test_who_awaits(make):
    store, into = make(), bytearray(3)

    async def run():
        assert await store.put_async(["a"], [b"abc"]) == [True]
        assert await store.exists_async(["a", "b"]) == [True, False]
        return await store.get_into_async(["a"], [into])

    assert asyncio.run(run()) == [True]
    assert into == b"abc"


def test_threads_that_write_and_read_the_same_keys(tmp_path):
    wrong = []

    def work(number):
        store = over(tmp_path)
        for i in range(60):
            key, into = str(i % 7), bytearray(500)
            store.put([key], [bytes([i % 7]) * 500])
            if store.get_into([key], [into])[0] and into != bytes([i % 7]) * 500:
                wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_is_refused(tmp_path):
    store = over(tmp_path)
    with pytest.raises(TypeError, match="`keys`: expected a list of keys"):
        store.exists("a")
    with pytest.raises(TypeError, match="`keys`: expected texts or bytes, got int"):
        store.exists([1])
    with pytest.raises(ValueError, match="`buffers`: expected one for each of 2 keys, got 1"):
        store.put(["a", "b"], [b"1"])
    with pytest.raises(TypeError, match="`buffers`: expected contiguous buffers"):
        store.put(["a"], [np.zeros((4, 4))[:, 1]])
    with pytest.raises(
        TypeError, match=r"`buffers`: expected contiguous .* x\.view\(numpy\.uint8\)"
    ):
        store.put(["a"], [np.zeros(4, ml_dtypes.bfloat16)])
    with pytest.raises(TypeError, match="`buffers`: expected contiguous buffers of bytes, got int"):
        store.put(["a"], [3])
    with pytest.raises(TypeError, match="`buffers`: expected buffers that can be written to"):
        store.get_into(["a"], [b"1"])
    with pytest.raises(TypeError, match="`mark`"):
        BlockStore(tmp_path, mark=None)
    with pytest.raises(numkv.NotSupported, match="cannot be copied or pickled"):
        pickle.dumps(store)
    assert repr(store) == f"<BlockStore: {tmp_path}>"


def test_a_closed_store_finds_nothing_and_changes_nothing(make):
    """Reads raise nothing: an engine's lookup may still run when the engine closes its store."""
    with make() as store:
        assert store.put(["a"], [b"1"]) == [True]
    assert repr(store).endswith(", closed>")
    into = bytearray(b"-")
    assert store.exists(["a"]) == store.get_into(["a"], [into]) == [False]
    assert store.get(["a"]) == [None]
    assert into == b"-"
    for name, arguments in (("put", (["a"], [b"2"])), ("remove", (["a"],)), ("clear", ())):
        with pytest.raises(numkv.NumkvError, match=f"{name}: expected an open store"):
            getattr(store, name)(*arguments)
    assert make().get(["a"]) == [b"1"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_asks_by_threads_of_its_own():
    """Those of the parent, which wait for more to do, are not there."""
    store = over("x", file_system=Network(0.05), timeout=10.0)
    keys, values = [str(i) for i in range(8)], [bytes([i]) * 10 for i in range(8)]
    assert all(store.put(keys, values))
    assert all(store.get_into(keys, [bytearray(10) for _ in keys]))
    child = os.fork()
    if child == 0:
        into = [bytearray(10) for _ in keys]
        good = all(store.get_into(keys, into)) and into == values
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(store.exists(keys))


@pytest.fixture(params=["folder", "network"])
def fronted(request, tmp_path):
    """Makes stores over one place, with local copies or without."""
    network = None if request.param == "folder" else Network()
    place = "x" if network else tmp_path / "far"
    return lambda local=None: over(
        place, file_system=network, timeout=60.0, local=local and tmp_path / local
    )


def copied(store):
    """Wait until no copy is to be made."""
    until = time.monotonic() + 20
    while store._place._waiting:
        assert time.monotonic() < until
        time.sleep(0.001)


def holding(monkeypatch, owner, name):
    """Let a method wait; returns two events: that it waits, and that it may go on."""
    waits, goes_on, method = threading.Event(), threading.Event(), getattr(owner, name)

    def slow(*args):
        waits.set()
        assert goes_on.wait(20)
        return method(*args)

    monkeypatch.setattr(owner, name, slow)
    return waits, goes_on


@pytest.mark.parametrize("why", ["too many bytes wait", "a full disk", "another process"])
def test_a_replaced_object_leaves_no_old_copy(fronted, monkeypatch, why):
    store, other = fronted("near"), fronted()
    assert store.put(["a"], [b"old"]) == [True]
    copied(store)
    if why == "too many bytes wait":
        monkeypatch.setattr("numkv.store.places._MOST_WAITING", 0)
    elif why == "a full disk":
        monkeypatch.setattr(store._place._near, "write", lambda *_: 1 / 0)
    else:
        assert other.put(["a"], [b"new"]) == [True]
    assert store.put(["a"], [b"new"]) == [True]
    copied(store)
    assert store.get(["a"]) == other.get(["a"]) == [b"new"]


@pytest.mark.parametrize("change", ["replaced", "removed", "cleared"])
def test_a_copy_that_waits_is_not_made_from_old_bytes(fronted, monkeypatch, change):
    store = fronted("near")
    waits, goes_on = holding(monkeypatch, store._place._bound, "make_room")
    assert store.put(["a"], [b"old"]) == [True]
    assert waits.wait(20)
    if change == "replaced":
        monkeypatch.setattr("numkv.store.places._MOST_WAITING", 0)
        assert store.put(["a"], [b"new"]) == [True]
    elif change == "removed":
        assert store.remove(["a"]) == [True]
    else:
        store.clear()
    goes_on.set()
    copied(store)
    assert store.get(["a"]) == [b"new" if change == "replaced" else None]


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_read_that_began_before_a_change_leaves_no_copy(fronted, monkeypatch, is_removed):
    store = fronted("near")
    assert fronted().put(["a"], [b"old"]) == [True]
    waits, goes_on = holding(monkeypatch, store._place, "_keep")
    reader = threading.Thread(target=store.get, args=(["a"],))
    reader.start()
    assert waits.wait(20)
    monkeypatch.undo()
    with monkeypatch.context() as patch:  # its own copy would replace the old one
        patch.setattr("numkv.store.places._MOST_WAITING", 0)
        assert store.remove(["a"]) if is_removed else store.put(["a"], [b"new"])
    goes_on.set()
    reader.join()
    copied(store)
    assert store.get(["a"]) == [None if is_removed else b"new"]


def test_a_copy_that_cannot_be_read_now_stays(fronted, monkeypatch):
    """Such as where a process has too many open files; a damaged one is deleted."""
    store = fronted("near")
    assert store.put(["a"], [b"1"]) == [True]
    copied(store)
    near = store._place._near
    with monkeypatch.context() as patch:
        patch.setattr(near, "_announced", lambda key: OSError(errno.EMFILE, "too many open files"))
        patch.setattr("numkv.store.places._MOST_WAITING", 0)
        assert store.get(["a"]) == [b"1"]  # from the place
    key = store._empty.key(store._names(["a"])[0])
    assert near.sizes([key]) != [None]
    os.truncate(near._path(key), 0)
    os.truncate(near._path(key), store._section(1).layout.nbytes)
    monkeypatch.setattr("numkv.store.places._MOST_WAITING", 0)
    assert store.get(["a"]) == [b"1"]
    assert near.sizes([key]) == [None]


def test_clear_deletes_copies_of_objects_that_are_gone(fronted):
    store = fronted("near")
    assert store.put(["a"], [b"1"]) == [True]
    copied(store)
    assert fronted().remove(["a"]) == [True]
    store.clear()
    assert store.exists(["a"]) == [False]


def test_writes_at_the_same_time_leave_the_copy_that_others_have(fronted, monkeypatch):
    """The place may have another order of them than this process."""
    store, done = fronted("near"), threading.Barrier(2)
    write = store._place._far.write

    def at_once(*args):
        write(*args)
        done.wait(20)

    monkeypatch.setattr(store._place._far, "write", at_once)
    for i in range(20):
        values = [b"%d" % i, b"-%d" % i]
        threads = [threading.Thread(target=store.put, args=(["a"], [x])) for x in values]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        copied(store)
        assert store.get(["a"]) == fronted().get(["a"])


@pytest.mark.parametrize("name", ["pipe_file", "rm_file"])
@pytest.mark.parametrize("reads", [False, True])
def test_a_change_that_arrives_after_its_timeout_leaves_no_old_copy(
    tmp_path, monkeypatch, name, reads
):
    """Not even of bytes that are read while it is on its way."""
    monkeypatch.setattr("numkv.store.remote._PATIENCE", 0.2)
    monkeypatch.setattr("numkv.store.requests._FIRST", 0.01)
    network, is_removed = Network(), name == "rm_file"
    store, other = (
        over("x", file_system=network, timeout=60.0, local=local)
        for local in (tmp_path / "near", None)
    )
    assert store.put(["a", "b"], [b"old"] * 2) == [True, True]
    copied(store)
    _, goes_on = holding(monkeypatch, network, name)
    change = store.remove if is_removed else lambda keys: store.put(keys, [b"new"])
    assert change(["a"]) == [False]
    until = time.monotonic() + 20
    while reads and store.get(["a"]) != [b"old"]:  # the place has to answer again
        assert time.monotonic() < until
    copied(store)
    goes_on.set()
    want = [None if is_removed else b"new"]
    while not (other.get(["a"]) == want and store.stats().answers):
        assert time.monotonic() < until
    assert store.get(["a"]) == want
    network.be_silent()
    assert store.put(["b"], [b"old"]) == [False]  # the copy has the same bytes
    assert store.get(["b"]) == [b"old"]
    store.close(), other.close()
    network.speak()
