"""Writers that are killed at random moments, and disks that are full."""

import json
import os
import subprocess
import sys

import processes
import pytest
from stored_prefixes import cache, check_rows, prompt, started, store_in

from numkv.store.folder import Folder


def killed(folder, kills, *more):
    """What `tests/killed_writers.py` says."""
    settings = os.environ | {
        "PYTHONPATH": str(processes.ROOT), "NUMKV_PROGRESS": "0", "NUMBA_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, processes.ROOT / "tests/killed_writers.py", folder, str(kills), *more],
        capture_output=True, text=True, env=settings, timeout=processes.PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert not done.stderr
    print(done.stdout)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=pytest.mark.nightly)])
def test_nothing_that_was_acknowledged_is_missing_after_kills(tmp_path, kills):
    found = killed(tmp_path, kills)
    assert found["there"] == found["acknowledged"] > 20 * kills


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.nightly)])
def test_nothing_is_wrong_after_kills_where_blocks_are_evicted(tmp_path, kills):
    """And the store has kept to its bound, but for a sixteenth and an object for each writer."""
    most = 60_000
    found = killed(tmp_path, kills, str(most))
    assert 0 < found["there"] < found["acknowledged"]
    objects = [p for p in (tmp_path / "store").rglob("*") if p.is_file()]
    sizes = [path.stat().st_size for path in objects]
    assert sum(sizes) <= most + 4 * (most / 16 + max(sizes))


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(40, marks=pytest.mark.nightly)])
def test_kills_where_layers_are_not_alike_and_keep_states(tmp_path, kills):
    found = killed(tmp_path, kills, "mixed")
    assert found["there"] == found["acknowledged"] > 20 * kills


def test_writers_wait_while_another_one_evicts(tmp_path, monkeypatch):
    """Else they would write without a bound, as often as that one is stopped in the middle."""
    monkeypatch.setattr("numkv.store.folder._PATIENCE", processes.PATIENCE)
    of = cache(store_in(tmp_path, max_nbytes=20_000))
    seq, _ = started(of, prompt(0))
    assert of.store.flush() == 0
    with Folder(str(tmp_path), False).alone():
        for number in range(1, 9):
            of.remove(seq)
            seq, _ = started(of, prompt(number))
        with pytest.raises(TimeoutError):
            of.store.flush(0.5)
        held = of.store.stats()
    assert of.store.flush() == 0
    assert held.bytes_written <= 20_000 * (1 + 1 / 16) + held.bytes_written / held.written
    assert of.store.stats().evicted > 0
    of.store.close()


def test_a_full_disk(small_disk):
    disk = small_disk("64k")
    of = cache(store_in(disk))
    for number in range(6):
        seq, _ = started(of, prompt(number))
        of.remove(seq)
    lost = of.store.flush()
    now = of.store.stats()
    assert 0 < lost == now.failed < 30
    assert now.written == 30 - lost
    assert "No space left" in now.last_error
    assert not list(disk.rglob("*.partial"))
    other, found = cache(store_in(disk)), 0
    for number in range(6):
        seq, cached = started(other, prompt(number))
        check_rows(other, seq, prompt(number))
        found += cached
        other.remove(seq)
    assert found > 0
    other.store.flush()  # what it has tried to write is gone from the disk, too
    assert other.store.stats().damaged == 0
    for path in disk.rglob("*"):
        if path.is_file():
            path.unlink()
    seq, _ = started(of, prompt(50))
    assert of.store.flush() == 0
    of.store.close(), other.store.close()


def test_a_process_that_ends_with_open_stores_says_nothing(tmp_path):
    script = f"""
    from numkv.store import BlockStore, PrefixStore
    other = PrefixStore("nowhere", mark="a")
    store = BlockStore({str(tmp_path / "far")!r}, mark="a", local={str(tmp_path / "near")!r})
    print(json.dumps(store.put(["a"], [b"1"])))
    """
    assert processes.run(script, common="import json\n") == [True]


def test_a_process_that_ends_writes_what_waits(tmp_path):
    """Without `flush` or `close`, and though the disk is slow."""
    script = f"""
    sys.path.insert(0, {str(processes.ROOT / "tests")!r})
    from stored_prefixes import cache, prompt, started, store_in
    from numkv.store.folder import Folder
    write = Folder.write
    ending = threading.Event()
    Folder.write = lambda *args: (ending.wait(), time.sleep(0.05), write(*args))[2]
    of = cache(store_in({str(tmp_path)!r}))
    started(of, prompt(1))
    print(of.store.stats().written)
    ending.set()
    """
    assert processes.run(script) == 0
    assert started(cache(store_in(tmp_path)), prompt(1))[1] == 20
