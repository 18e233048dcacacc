"""Files of compiled kernels: what identifies a kernel, and what happens when a file is damaged or out of date."""

import itertools
import json
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import numba
import pytest
from numba import types
from processes import PATIENCE

from numkv.kernels import builder, disk_cache

PACKAGE = Path(builder.__file__).resolve().parents[2]


def make_add(amount):
    def add(x):
        return x + amount

    return add


def plain(x):
    return x


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of the test's own for kernels."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(builder, "_stats", {"hits": 0, "misses": 0})
    disk_cache._warn.cache_clear()
    return tmp_path


def build(amount=3, **options):
    """Build a kernel; says "hit" or "miss"."""
    before = builder.cache_stats()
    built = builder.build(
        make_add, (types.int64,), args=(amount,), label=f"add {amount}", **options
    )
    assert built(4) == 4 + amount
    after = builder.cache_stats()
    return next(name for name in ("hits", "misses") if after[name] > before[name])


def files(folder):
    return sorted(folder.rglob(f"*{disk_cache.SUFFIX}"))


def test_a_kernel_is_found_again(folder):
    assert build() == "misses"
    (file,) = files(folder)
    assert file.name.startswith("make_add-")
    assert build() == "hits"
    assert list(file.parent.iterdir()) == [file]  # nothing temporary stays


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:10],
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: os.urandom(len(data)),
        lambda data: b"\0" * len(data),
        lambda data: data.replace(b"numkv kernel 1", b"numkv kernel 2"),
    ],
    ids=["empty", "head", "half", "last byte", "longer", "garbage", "zeros", "another format"],
)
def test_a_damaged_file_is_said_once_and_made_anew(folder, damage):
    build()
    (file,) = files(folder)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    with pytest.warns(RuntimeWarning, match="cannot be used") as caught:
        assert build() == "misses"
    assert len(caught) == 1
    assert str(file) in str(caught[0].message)
    assert build() == "hits"  # without a warning, which would be an error


def test_no_flipped_bit_goes_unseen(folder):
    build()
    (file,) = files(folder)
    whole = file.read_bytes()
    step = max(1, len(whole) // 200)
    for at in range(0, len(whole), step):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        with pytest.raises((disk_cache._Damaged, FileNotFoundError)):
            file.write_bytes(flipped)
            disk_cache._read(file)
    file.write_bytes(whole)
    assert build() == "hits"


def test_content_that_does_not_load_is_a_damage_too(folder):
    """The checksum is right, but Numba cannot make a kernel of it."""
    build()
    (file,) = files(folder)
    disk_cache._write(file, b"no pickle")
    with pytest.warns(RuntimeWarning, match="UnpicklingError"):
        assert build() == "misses"
    assert build() == "hits"


def test_a_folder_in_the_place_of_a_file_is_no_reason_to_fail(folder):
    build()
    (file,) = files(folder)
    file.unlink()
    file.mkdir()
    with pytest.warns(RuntimeWarning, match="cannot keep compiled kernels on disk"):
        assert build() == "misses"
    assert file.is_dir()


def test_too_little_memory_is_no_damage(folder, monkeypatch):
    build()
    (file,) = files(folder)

    def fails(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(disk_cache.pickle, "loads", fails)
        with pytest.raises(MemoryError):
            build()
    assert files(folder) == [file]
    assert build() == "hits"


def test_what_a_killed_process_left_is_cleared_away(folder):
    build()
    (file,) = files(folder)
    old, new = (file.with_name(f".{file.name[-60:]}.{name}.partial") for name in ("old", "new"))
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    file.unlink()
    build()
    assert set(file.parent.iterdir()) == {file, new}


def test_an_edit_replaces_the_file(folder, monkeypatch):
    build()
    (file,) = files(folder)
    monkeypatch.setattr(disk_cache, "source_digest", lambda: "f" * 64)
    assert build() == "misses"
    assert build() == "hits"
    assert files(folder) == [file]


def test_an_edit_under_a_running_process_leaves_nothing_for_others(folder, monkeypatch):
    """It may run the old sources and read the new ones: what it compiles is found by nobody."""
    digest = disk_cache.source_digest
    assert digest.__wrapped__() == digest()
    newest = max(path.stat().st_ctime for path in (disk_cache._PACKAGE / "rows").glob("*.py"))
    monkeypatch.setattr(disk_cache, "_BEGUN", newest - 1e-3)
    assert len({digest(), digest.__wrapped__(), digest.__wrapped__()}) == 3


def test_a_folder_that_is_cleared_meanwhile_is_no_reason_to_warn(folder, monkeypatch):
    replace = os.replace

    def cleared(source, target):
        os.unlink(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", cleared)
    assert build() == "misses"
    assert files(folder) == []


def test_what_makes_another_kernel_makes_another_file(folder, monkeypatch):
    builds = [
        lambda: build(3),
        lambda: build(4),
        lambda: build(True),
        lambda: build(3, fastmath={"contract"}),
        lambda: builder.build(make_add, (types.float64,), args=(3,), label="of floats"),
        lambda: builder.build(plain, (types.int64,), label="without a factory"),
    ]
    for count, one in enumerate(builds, 1):
        one()
        assert len(files(folder)) == count
    monkeypatch.setattr(numba.config, "BOUNDSCHECK", 1)
    build(3)
    assert len(files(folder)) == len(builds) + 1


def test_a_closure_is_not_built_without_its_factory(folder):
    with pytest.raises(TypeError, match="expected the factory and its args"):
        builder.build(make_add(3), (types.int64,), label="closure")
    with pytest.raises(TypeError, match="expected strings and numbers"):
        builder.build(make_add, (types.int64,), args=(2.5,), label="closure")
    assert files(folder) == []


MODULE = """
import json, sys
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable
from numkv.kernels import builder

def make_square(kind):
    @intrinsic
    def multiply(typing_context, x, y):
        def codegen(context, builder, signature, args):
            return builder.mul(*args)
        return types.int64(types.int64, types.int64), codegen

    @register_jitable
    def squared(x):
        return multiply(x, x) if kind == "exact" else multiply(x, x) + 1

    def square(x):
        return squared(x)

    return square

found = [builder.build(make_square, (types.int64,), args=(kind,), label=kind)(5)
         for kind in ("exact", "other")]
print(json.dumps([found, builder.cache_stats()]))
"""


def processes_of(folder, count):
    """Start so many processes at once that build kernels of closures and intrinsics; returns what they print."""
    script = folder / "closures.py"
    script.write_text(textwrap.dedent(MODULE))
    settings = os.environ | {"PYTHONPATH": str(PACKAGE), "NUMBA_CACHE_DIR": str(folder)}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(script)],
            env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(count)
    ]  # fmt: skip
    printed = []
    for process in started:
        output, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors
        assert not errors
        printed.append(output.strip())
    return printed


@pytest.mark.slow
def test_kernels_may_close_over_intrinsics_and_closures(tmp_path):
    """Of three processes that need them at the same time one compiles each; a later one finds them."""
    first = [json.loads(text) for text in processes_of(tmp_path, 3)]
    assert all(results == [25, 26] for results, _ in first)
    assert sum(stats["misses"] for _, stats in first) == 2
    assert processes_of(tmp_path, 1) == ['[[25, 26], {"hits": 2, "misses": 0}]']
    assert len(files(tmp_path)) == 2
    assert not list(tmp_path.rglob("*.partial"))


HOLDS = """
import sys, time
from pathlib import Path
from numkv.kernels import disk_cache
turn = disk_cache.Turn(Path(sys.argv[1]))
print("taken", flush=True)
sys.stdin.read()
"""


def test_who_compiles_is_waited_for_but_not_for_ever(tmp_path, monkeypatch):
    """A turn ends when it is given back, with its process, or when patience does."""
    path, other = tmp_path / "a.kernel", tmp_path / "b.kernel"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(PACKAGE)},
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == "taken\n"
        monkeypatch.setattr(disk_cache, "_PATIENCE", 0.05)
        assert disk_cache.Turn(path).waited
        assert not disk_cache.Turn(other).waited
        monkeypatch.setattr(disk_cache, "_PATIENCE", PATIENCE)
        threading.Timer(0.2, holder.kill).start()
        turn = disk_cache.Turn(path)
        assert turn.waited
        turn.end()
    finally:
        holder.kill()
        holder.communicate()
    assert not disk_cache.Turn(path).waited


def test_labels_and_identities_are_one_to_one(monkeypatch):
    """Two kernels that are told apart by name are two files, over all kernels of a large process."""
    seen = {}

    class Watched(disk_cache.KernelCache):
        def load_overload(self, sig, target_context):
            label = self._on_miss.args[0].args[0]  # of `compiled`
            path = self.path(sig, target_context.codegen())
            assert seen.setdefault(path, label) == label
            return super().load_overload(sig, target_context)

    monkeypatch.setattr(builder, "KernelCache", Watched)
    from numkv.kernels.cpu import append, copy

    with warnings.catch_warnings():
        for bytes_ in (1, 2, 4, 8):
            append._copy_rows.__wrapped__(bytes_)
            copy._copy_tokens.__wrapped__(bytes_)
    assert len(seen) == len(set(seen.values())) == 8


NUMBERS = """
import itertools
import os
from numba.core.bytecode import FunctionIdentity
import numkv.kernels.builder
def number():
    return FunctionIdentity.from_function(number).unique_id
print(number(), flush=True)
if os.fork() == 0:
    print(number(), flush=True)
    os._exit(0)
os.wait()
print(number())
"""


@pytest.mark.slow
def test_processes_number_functions_apart():
    """Kernels that see equal types differ in their symbol by that number alone, and share a folder."""
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", NUMBERS], capture_output=True, text=True, check=True
        )
        found += map(int, done.stdout.split())
    near = sorted(found)
    apart = [b - a for a, b in itertools.pairwise(near)]
    assert len(found) == 6
    assert sum(gap > 10**6 for gap in apart) == 3  # two parents and their children
