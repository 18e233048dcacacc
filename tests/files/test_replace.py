"""A file appears as a whole or not at all: several writers, full disks, interrupts, a process that is killed."""

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
import time

import numpy as np
import processes
import pytest
from interrupts import Interrupt, interrupted_in_a_condition, raising_signals
from saved_caches import kv_cache

import numkv
from numkv.files import container
from numkv.replace import replacing


def cache_of(value, tokens=2000):
    """A cache whose rows say which it is, of 512 KB."""
    cache = numkv.KVCache(1, 2, 32, kind="fp32")
    rows = np.full((tokens, 2, 32), value, np.float32)
    cache.append(0, rows, rows)
    cache.advance(tokens)
    return cache


def whole(path):
    """The value that a whole file holds."""
    found = np.unique(numkv.load(path).k(0))
    assert len(found) == 1
    return int(found[0])


def test_threads_that_save_to_one_path_leave_one_whole_file(tmp_path):
    caches, errors, path = [cache_of(i) for i in range(4)], [], tmp_path / "file"
    done = threading.Event()

    def save(cache):
        try:
            for _ in range(4):
                numkv.save(path, cache)
        except BaseException as error:
            errors.append(error)

    def load():
        while not done.is_set():
            if path.exists():
                try:
                    whole(path)
                except BaseException as error:
                    errors.append(error)

    reader = threading.Thread(target=load)
    writers = [threading.Thread(target=save, args=(cache,)) for cache in caches]
    reader.start()
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    done.set(), reader.join()
    assert not errors
    assert os.listdir(tmp_path) == ["file"]
    assert whole(path) in range(4)


SAVING = """
cache = numkv.KVCache(1, 2, 32, kind="fp32")
rows = np.full((2000, 2, 32), int(sys.argv[1]) if len(sys.argv) > 1 else 1, np.float32)
cache.append(0, rows, rows)
cache.advance(2000)
"""


def script(body, *arguments, **more):
    """Start a process that has a cache to save."""
    settings = os.environ | {"PYTHONPATH": str(processes.ROOT), "NUMKV_PROGRESS": "0"}
    return subprocess.Popen(
        [sys.executable, "-c", processes.COMMON + SAVING + body, *map(str, arguments)],
        env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more,
    )  # fmt: skip


@pytest.mark.slow
def test_processes_that_save_to_one_path_leave_one_whole_file(tmp_path):
    """This one and another."""
    path, cache = tmp_path / "file", cache_of(4)
    body = "print('ready', flush=True)\nfor _ in range(20): numkv.save(sys.argv[2], cache)"
    process = script(body, 3, path)
    assert process.stdout.readline() == "ready\n"
    for _ in range(20):
        numkv.save(path, cache)
        assert whole(path) in (3, 4)
    assert process.communicate(timeout=processes.PATIENCE)[1] == ""
    assert process.returncode == 0
    assert os.listdir(tmp_path) == ["file"]
    assert whole(tmp_path / "file") in (3, 4)


@pytest.mark.parametrize("turns", [1, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_process_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path, rng, turns):
    path = tmp_path / "file"
    numkv.save(path, cache_of(1))
    # Rows of the first save of each turn are 2, of the next ones too; the file is the old one or a whole new one.
    body = "print('ready', flush=True)\nwhile True: numkv.save(sys.argv[2], cache)"
    for turn in range(turns):
        process = script(body, 2 + turn, path)
        assert process.stdout.readline() == "ready\n"
        time.sleep(float(rng.random()) * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=processes.PATIENCE)
        assert whole(path) in range(1, 3 + turn)
    left = [x for x in os.listdir(tmp_path) if x != "file"]
    assert all(x.startswith(".file.") and x.endswith(".partial") for x in left)
    numkv.save(path, cache_of(9))
    assert whole(path) == 9
    assert os.listdir(tmp_path) == ["file"]


def test_only_what_nobody_writes_any_more_is_removed(tmp_path):
    """A file of a writer that lives, here or in a fork of it, or may live elsewhere, stays."""
    path = tmp_path / "file"

    def partials(write=True):
        if write:
            numkv.save(path, cache_of(1, tokens=3))
        return sorted(set(os.listdir(tmp_path)) - {"file"})

    with replacing(path) as descriptor:
        os.write(descriptor, b"mine")
        (mine,) = partials()
    assert path.read_bytes() == b"mine"

    read, write = os.pipe()
    child = os.fork()
    if not child:
        with replacing(path) as descriptor:
            os.write(descriptor, b"x")
            os.write(write, b"x")
            time.sleep(processes.PATIENCE)
        os._exit(0)
    os.read(read, 1), os.close(read), os.close(write)
    theirs = partials()
    assert len(theirs) == 1
    os.kill(child, signal.SIGKILL), os.waitpid(child, 0)
    assert partials(write=False) == theirs
    assert partials() == []

    elsewhere = mine[:6] + "0" * 8 + mine[14:]
    for name in (elsewhere, ".files.0.partial", mine[:-1]):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / mine).touch()  # no lock has been taken yet
    assert partials() == sorted([elsewhere, ".files.0.partial", mine[:-1], mine])
    for name in (elsewhere, mine):
        os.utime(tmp_path / name, (0, 0))
    assert partials() == sorted([".files.0.partial", mine[:-1]])


FULL = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for limit in (0, 100, 70_000, 1_000_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        numkv.save(sys.argv[2], cache)
    except OSError as error:
        print(type(error).__name__, error.errno)
    print(os.listdir(os.path.dirname(sys.argv[2])))
"""


@pytest.mark.slow
def test_a_file_that_may_not_grow_leaves_the_old_one(tmp_path):
    path = tmp_path / "file"
    numkv.save(path, cache_of(1))
    out, err = script(FULL, 2, path).communicate(timeout=processes.PATIENCE)
    assert (out, err) == (f"OSError {errno.EFBIG}\n['file']\n" * 4, "")
    assert whole(path) == 1


def test_a_full_disk_leaves_the_old_file(small_disk):
    disk = small_disk("1m")
    path = disk / "file"
    numkv.save(path, cache_of(1, tokens=900))
    with pytest.raises(OSError, match="No space left") as caught:
        numkv.save(path, cache_of(2))
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(disk) == ["file"]
    assert whole(path) == 1
    (disk / "more").write_bytes(bytes((1 << 20) - path.stat().st_size - (64 << 10)))
    for name in ("file", "new"):  # no room for the smallest one
        with pytest.raises(OSError, match="No space left"):
            numkv.save(disk / name, cache_of(3, tokens=900))
    assert sorted(os.listdir(disk)) == ["file", "more"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "gone"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("call", [0, 1, pytest.param(2, marks=pytest.mark.nightly), 4])
def test_an_error_at_any_write_leaves_the_old_file(tmp_path, monkeypatch, error, call):
    path, calls = tmp_path / "file", iter(range(100))
    cache = kv_cache("cpu", kind="fp32")
    numkv.save(path, cache)
    before = path.read_bytes()
    writev = os.writev

    def fails(descriptor, views):
        if next(calls) == call:
            raise error
        return writev(descriptor, views)

    monkeypatch.setattr(container.os, "writev", fails)
    with pytest.raises(type(error)):
        numkv.save(path, kv_cache("cpu", kind="fp32", pending=False))
    assert os.listdir(tmp_path) == ["file"]
    assert path.read_bytes() == before
    assert not [
        x for x in threading.enumerate() if x is not threading.main_thread() and not x.daemon
    ]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_an_error_at_the_end_leaves_the_old_file(tmp_path, monkeypatch, name):
    path = tmp_path / "file"
    numkv.save(path, cache_of(1))

    def fails(*args):
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(container.os, name, fails)
    with pytest.raises(OSError, match="gone"):
        numkv.save(path, cache_of(2))
    assert os.listdir(tmp_path) == ["file"]
    assert whole(path) == 1


def test_writes_that_take_part_of_what_they_are_given(tmp_path, monkeypatch):
    """As systems do with much memory, pipes and signals."""
    cache = kv_cache("cpu", kind="int8")
    numkv.save(tmp_path / "a", cache)
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(container.os, "writev", lambda d, views: writev(d, [views[0][:7]]))
    numkv.save(tmp_path / "b", cache)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    monkeypatch.setattr(container.os, "preadv", lambda d, views, at: preadv(d, [views[0][:7]], at))
    assert np.array_equal(numkv.load(tmp_path / "b").k(1), cache.k(1))


def test_a_folder_that_cannot_be_written_to(tmp_path):
    cache = kv_cache("cpu", kind="fp32")
    with pytest.raises(FileNotFoundError):
        numkv.save(tmp_path / "no" / "file", cache)
    with pytest.raises(IsADirectoryError):
        numkv.save(tmp_path, cache)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        numkv.save(tmp_path / "file" / "x", cache)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(numkv.NotSupported, match="pipe"):
        numkv.save(tmp_path / "pipe", cache)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    if os.geteuid():
        tmp_path.chmod(0o500)
        with pytest.raises(PermissionError):
            numkv.save(tmp_path / "new", cache)
        tmp_path.chmod(0o700)
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]


def test_an_interrupt_leaves_no_open_file(tmp_path, monkeypatch):
    made, opened = [], os.open

    def interrupted(*given):
        made.append(opened(*given))
        signal.raise_signal(signal.SIGUSR1)
        return made[-1]

    monkeypatch.setattr(os, "open", interrupted)
    with raising_signals(), pytest.raises(Interrupt), replacing(tmp_path / "a"):
        pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])
    assert not list(tmp_path.iterdir())


def test_interrupts_leave_neither_locks_nor_threads(tmp_path):
    cache, path, before = kv_cache("cpu"), tmp_path / "a", threading.active_count()
    with raising_signals():
        at = 1
        while interrupted_in_a_condition(lambda: numkv.save(path, cache), at):
            assert threading.active_count() <= before
            at += 1
    assert at > 3


def test_a_link_keeps_pointing_to_the_file(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "there" / "file")
    for value in (1, 2):
        numkv.save(link, cache_of(value, tokens=3))
        assert link.is_symlink()
        assert whole(tmp_path / "there" / "file") == value
    assert sorted(os.listdir(tmp_path)) == ["link", "there"]
    assert os.listdir(tmp_path / "there") == ["file"]


def test_long_names_and_names_of_bytes(tmp_path):
    name, of_four_bytes = "x" * 250, "\U0001d54f" * 63
    numkv.save(tmp_path / name, cache_of(1, tokens=3))
    numkv.save(tmp_path / of_four_bytes, cache_of(1, tokens=3))
    numkv.save(os.fsencode(tmp_path / "y"), cache_of(2, tokens=3))
    assert sorted(os.listdir(tmp_path)) == [name, "y", of_four_bytes]
    assert whole(os.fsencode(tmp_path / "y")) == 2
