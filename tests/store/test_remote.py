"""Stores in file systems of fsspec: memory, local files, and S3 where moto is installed."""

import time

import pytest
from stored_prefixes import cache, check_rows, prompt, started

import numkv
from numkv.store import PrefixStore
from numkv.store.folder import Bound
from numkv.store.remote import RemoteFolder

fsspec = pytest.importorskip("fsspec")


def s3_server():
    """Start a server that does as S3 does; return it, and the options of its file system."""
    server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    thread = server.ThreadedMotoServer(port=0)
    thread.start()
    host, port = thread.get_host_and_port()
    url = f"http://{host}:{port}"
    return thread, {"key": "a", "secret": "b", "endpoint_url": url, "use_listings_cache": False}


@pytest.fixture(scope="module")
def s3():
    thread, options = s3_server()
    yield fsspec.filesystem("s3", **options)
    thread.stop()


MADE = []


@pytest.fixture(params=["memory", "file", "memory url", "file url", "s3"])
def place(request, tmp_path):
    """A new place, as arguments of `PrefixStore`."""
    yield new_place(request, tmp_path)
    while MADE:
        MADE.pop().close()


def new_place(request, tmp_path):
    if request.param == "memory":
        return {"place": f"/{tmp_path.name}", "file_system": fsspec.filesystem("memory")}
    if request.param == "file":
        return {"place": str(tmp_path / "x"), "file_system": fsspec.filesystem("file")}
    if request.param == "memory url":
        return {"place": f"memory://{tmp_path.name}/y"}
    if request.param == "file url":
        return {"place": f"file://{tmp_path}/z"}
    file_system = request.getfixturevalue("s3")
    bucket = f"bucket-{time.time_ns()}"
    file_system.mkdir(bucket)
    return {"place": f"{bucket}/prefixes", "file_system": file_system}


def over(place, timeout=30, **options):
    """A cache over the place; it waits long, as a busy machine's answers may come late."""
    MADE.append(PrefixStore(mark="a model", timeout=timeout, **place, **options))
    return cache(MADE[-1])


def objects(of):
    remote = of.store._engine.place
    return remote, [entry for entry in remote.entries() if ".evicting" not in entry.key]


def test_a_second_cache_finds_what_the_first_one_wrote(place):
    first, second = over(place), over(place)
    seq, found = started(first, prompt(1, 41))
    assert found == 0
    assert first.store.flush() == 0
    remote, entries = objects(first)
    assert len(entries) == first.store.stats().written == 10
    assert all(abs(entry.stamp - time.time()) < 300 for entry in entries)
    seq, found = started(second, prompt(1, 41))
    assert found == 40
    check_rows(second, seq, prompt(1, 41))
    assert second.store.flush() == 0
    assert second.store.stats().written == 0
    assert repr(second.store).startswith("<PrefixStore: ")


def test_damaged_and_missing_objects(place):
    first, second = over(place), over(place)
    started(first, prompt(2, 41))
    first.store.flush()
    names = first._sequences[0].digests[0]
    key = first._store.tiers.parts[0].section.key
    remote = first.store._engine.place
    path = remote._path(key(names[7].tobytes()))
    whole = remote._fs.cat_file(path)
    remote._fs.pipe_file(path, whole[:-1] + bytes([whole[-1] ^ 1]))
    seq = second.add(prompt(2, 41))
    assert second.cached_len(seq) == 28
    check_rows(second, seq, prompt(2, 41))
    assert second.store.stats().damaged == 1
    second.store.flush()  # by then it is deleted
    third = over(place)
    assert third.cached_len(third.add(prompt(2, 41))) == 28
    assert third.store.stats().damaged == 0
    remote._fs.pipe_file(path, whole[:-1])
    assert third.cached_len(third.add(prompt(2, 41))) == 28
    remote._fs.pipe_file(path, whole)
    assert third.cached_len(third.add(prompt(2, 41))) == 40


def test_max_nbytes(place):
    first = over(place)
    started(first, prompt(0))
    first.store.flush()
    size = objects(first)[1][0].nbytes
    bounded = over(place, max_nbytes=12 * size)
    for number in range(1, 6):
        started(bounded, prompt(number))
        bounded.store.flush()  # many are written at once, so one prompt after another
    assert len(objects(first)[1]) <= 13
    assert bounded.store.stats().evicted > 10
    last = over(place)
    seq, found = started(last, prompt(5))
    if "bucket" not in place["place"]:  # whose times are whole seconds
        assert found == 20
    check_rows(last, seq, prompt(5))


def test_without_times_nothing_that_is_being_written_is_deleted():
    class Timeless(fsspec.implementations.memory.MemoryFileSystem):
        store: dict[str, object] = {}
        cachable = False

        def find(self, *given, **options):
            return {
                name: {"size": x["size"]} for name, x in super().find(*given, **options).items()
            }

    files = Timeless()
    folder = f"{'a' * 32}/bb"
    files.pipe_file(f"/x/{folder}/.new.partial", b"half")
    files.pipe_file(f"/x/{folder}/{'c' * 62}", b"whole")
    place = RemoteFolder(files, "/x", None)
    assert Bound(place, 10).make_room(10) == 1
    assert [entry.key for entry in place.entries()] == [f"{folder}/.new.partial"]


def test_a_file_system_that_fails_costs_nothing_but_time():
    class Broken(fsspec.implementations.memory.MemoryFileSystem):
        def info(self, path, *given, **options):
            raise ConnectionError("no network")

        pipe_file = cat_file = info

    of = cache(PrefixStore("x", mark="a", file_system=Broken()))
    seq, found = started(of, prompt(1))
    assert found == 0
    check_rows(of, seq, prompt(1))
    assert of.store.flush() == 5
    assert "no network" in of.store.stats().last_error


def test_an_s3_that_goes_away():
    """Protocol and errors are those of S3 over HTTP, as moto's server has them."""
    thread, options = s3_server()
    files = fsspec.filesystem("s3", skip_instance_cache=True, **options)
    files.mkdir("gone")
    of = cache(PrefixStore("gone/x", mark="a model", file_system=files, timeout=5.0))
    started(of, prompt(1))
    assert of.store.flush(60.0) == 0
    thread.stop()
    other = cache(PrefixStore("gone/x", mark="a model", file_system=files, timeout=0.2))
    seq, found = started(other, prompt(1))
    assert found == 0
    assert not other.store.stats().answers
    assert sum(other.store.stats().errors.values()) > 0
    assert other.store.flush(60.0) == 5
    check_rows(other, seq, prompt(1))
    assert other.store.close(60.0) == 5


def test_urls_of_what_is_not_installed():
    with pytest.raises((numkv.NotSupported, ValueError), match="nosuchprotocol"):
        PrefixStore("nosuchprotocol://x", mark="a")
