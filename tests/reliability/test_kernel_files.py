"""Files of compiled kernels, damaged in every part and in every way: compiled again with one warning, never trusted.

And what else can happen to their folder: it is removed while a process runs, full, or holds what a process that was
killed had half written.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numba
import numpy as np
import pytest
from numba import types
from processes import PATIENCE

from numkv.kernels import builder, disk_cache

ROOT = Path(builder.__file__).resolve().parents[2]
_HEAD = len(disk_cache._MAGIC)
_STAMP = len(disk_cache.source_digest())
#: Parts of a file, from byte to byte; parts of the content as shares of it.
PARTS = {
    "format": lambda n: (0, _HEAD),
    "digest of the sources": lambda n: (_HEAD, _HEAD + _STAMP),
    "checksum": lambda n: (_HEAD + _STAMP, _HEAD + _STAMP + 32),
    "first content": lambda n: (_HEAD + _STAMP + 32, _HEAD + _STAMP + 200),
    "content": lambda n: (n // 2, n // 2 + 300),
    "last content": lambda n: (n - 100, n),
}


def _flipped(data, begin, end, other):
    at = (begin + end) // 2
    return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]


#: What becomes of a file, of which `other` is another kernel's.
DAMAGES = {
    "cut off before it": lambda data, begin, end, other: data[:begin],
    "cut off within it": lambda data, begin, end, other: data[: (begin + end) // 2],
    "zeros": lambda data, begin, end, other: data[:begin] + bytes(end - begin) + data[end:],
    "a flipped bit": _flipped,
    "garbage": lambda data, begin, end, other: (
        data[:begin] + np.random.default_rng(1).bytes(end - begin) + data[end:]
    ),
    "left out": lambda data, begin, end, other: data[:begin] + data[end:],
    "twice": lambda data, begin, end, other: data[:end] + data[begin:],
    "another kernel's": lambda data, begin, end, other: data[:begin] + other[begin:end] + data[end:],
    "another kernel's from there on": lambda data, begin, end, other: data[:begin] + other[begin:],
}  # fmt: skip


def make_add(amount):
    def add(x):
        return x + amount

    return add


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of the test's own for kernels."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    disk_cache._warn.cache_clear()
    return tmp_path


def build(amount=3):
    """Build a kernel and run it; returns whether it was compiled."""
    before = builder.cache_stats()["misses"]
    built = builder.build(make_add, (types.int64,), args=(amount,), label=f"add {amount}")
    assert built(4) == 4 + amount
    return builder.cache_stats()["misses"] > before


def files(folder):
    return sorted(folder.rglob(f"*{disk_cache.SUFFIX}"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A kernel's file and another one's, made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba.config, "CACHE_DIR", str(tmp_path_factory.mktemp("whole")))
        found = []
        for amount in (3, 4):
            build(amount)
            (path,) = [p for p in files(Path(numba.config.CACHE_DIR)) if p not in dict(found)]
            found.append((path, path.read_bytes()))
    return [(path.parent.name, path.name, data) for path, data in found]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_said_once_and_made_good(folder, whole, part, damage):
    (parent, name, data), (_, _, other) = whole
    begin, end = PARTS[part](len(data))
    bad = DAMAGES[damage](data, begin, end, other)
    path = folder / parent / name
    path.parent.mkdir()
    path.write_bytes(bad)
    stale = (
        bad[:_HEAD] == data[:_HEAD]
        and len(bad) > 300
        and bad[_HEAD : _HEAD + _STAMP] != data[_HEAD : _HEAD + _STAMP]
    )
    if bad == data:  # the two kernels have that part in common
        assert damage.startswith("another kernel's")
        assert not build()
    elif stale:  # of other sources: out of date, which happens every day
        assert build()
    else:
        with pytest.warns(RuntimeWarning, match="cannot be used") as caught:
            assert build()
        assert len(caught) == 1
        assert str(path) in str(caught[0].message)
    assert not build()  # a warning would be an error
    assert files(folder) == [path]


def test_another_kernels_file_is_no_kernel(folder, whole):
    """Whole, but under a name that is not its own: it would add another number."""
    (parent, name, _), (_, _, other) = whole
    (folder / parent).mkdir()
    (folder / parent / name).write_bytes(other)
    with pytest.warns(RuntimeWarning, match="checksum"):
        assert build()
    assert not build()


def test_a_file_of_another_version_is_out_of_date(folder, whole):
    """No warning: each upgrade leaves such files."""
    parent, name, data = whole[0]
    (folder / parent).mkdir()
    (folder / parent / name).write_bytes(data[:_HEAD] + b"0" * _STAMP + data[_HEAD + _STAMP :])
    assert disk_cache.is_stale(folder / parent / name)
    assert build()
    assert not build()


def test_a_folder_that_is_removed_is_made_again(folder):
    assert build()
    for removed in (files(folder)[0].parent, folder):
        shutil.rmtree(removed)
        assert build()
        assert not build()


# ---------------------------------------------------------------- in processes of their own

SCRIPT = """
import json, os, resource, signal, sys, warnings
from numba import types
from numkv.kernels import builder, disk_cache

def make_add(amount):
    def add(x):
        return x + amount
    return add

{before}
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    results = [builder.build(make_add, (types.int64,), args=(n,), label="add")(4) for n in (3, 4)]
{after}
print(json.dumps([results, builder.cache_stats()["misses"], [str(w.message) for w in said]]))
"""


@pytest.fixture
def start(tmp_path):
    """``start(before, after)`` starts a process that builds two kernels."""
    script = tmp_path / "script.py"

    def begin(before="", after="", where=None):
        script.write_text(
            SCRIPT.format(before=textwrap.dedent(before), after=textwrap.dedent(after))
        )
        return subprocess.Popen(
            [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "NUMKV_PROGRESS": "0"}
            | {"NUMBA_CACHE_DIR": str(where or tmp_path / "kernels")},
        )  # fmt: skip

    return begin


def result(process):
    """What it printed: results, kernels compiled, and warnings."""
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    results, misses, said = json.loads(output)
    assert results == [7, 8]
    return misses, said


@pytest.mark.slow
def test_processes_that_find_damage_at_the_same_time(start, tmp_path):
    assert result(start()) == (2, [])
    for path in files(tmp_path):
        path.write_bytes(path.read_bytes()[:-1])
    found = list(map(result, [start() for _ in range(2)]))
    assert sum(len(said) for _, said in found) >= 2  # each damaged file is found by one of them
    # One may compile a kernel that both found damaged.
    assert sum(misses for misses, _ in found) >= 2
    for _, said in found:
        assert all("cannot be used" in text for text in said)
    assert result(start()) == (0, [])
    assert len(files(tmp_path)) == 2
    assert not list(tmp_path.rglob("*.partial"))


KILLED = {
    "before it is renamed": """
        os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    """,
    "half way": """
        def half(descriptor, views):
            os.write(descriptor, views[0][:len(views[0]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        disk_cache.write_all = half
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "when", [pytest.param("before it is renamed", marks=pytest.mark.nightly), "half way"]
)
def test_a_process_that_is_killed_while_it_writes(start, tmp_path, when):
    """The next one finds nothing that it could mistake for a kernel; what was left goes with the next clearing."""
    killed = start(before=KILLED[when])
    killed.communicate(timeout=PATIENCE)
    assert killed.returncode == -9
    assert not files(tmp_path)
    (left,) = tmp_path.rglob("*.partial")
    assert disk_cache.kernel_files(left.parent) == [left]
    assert result(start()) == (2, [])


def test_a_file_that_vanishes_while_a_folder_is_listed_hides_no_other(tmp_path, monkeypatch):
    """Another process renames what it has written."""
    kept = tmp_path / f"append-{'0' * 32}{disk_cache.SUFFIX}"
    kept.write_bytes(b"")
    gone = kept.with_name(f".{kept.name}.a.partial")
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter([gone, kept]))
    assert disk_cache.kernel_files(tmp_path) == [kept]


@pytest.mark.slow
def test_a_full_disk_is_said_once(start, tmp_path):
    """Files cannot grow past 2,000 bytes, and then can."""
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))"
    misses, said = result(
        start(before=limit, after="resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))")
    )
    assert misses == 2
    assert len(said) == 1
    assert "cannot keep compiled kernels on disk" in said[0]
    assert not list((tmp_path / "kernels").rglob("*.*"))  # nothing half written
    assert result(start()) == (2, [])


@pytest.mark.slow
def test_a_full_file_system_is_said_once(start, small_disk):
    place = small_disk("12k")
    misses, said = result(start(where=place))
    assert misses == 2
    assert len(said) == 1
    assert "No space left on device" in said[0]
    assert not list(place.rglob("*.partial"))
