"""What a system without `fcntl` and its kin does: import, compute, save, share prefixes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import sys
import asyncio, concurrent.futures, logging, multiprocessing, random, subprocess, tempfile  # know their system
for name in ("fcntl", "pwd", "grp", "resource", "termios"):
    sys.modules[name] = None  # an import of it fails
import os
for name in ("register_at_fork", "posix_fadvise", "sched_getaffinity", "geteuid"):
    if hasattr(os, name):
        delattr(os, name)
import numpy as np
import numkv
from numkv.cli import main
from numkv.store import PrefixStore
from numkv.store.folder import Folder

rows = np.ones((2, 40, 2, 8), np.float32)
cache = numkv.KVCache(1, 2, 8)
cache.append(0, *rows)
cache.advance(40)
assert np.allclose(cache.decode_attention(0, np.ones((1, 4, 8), np.float32)), 1)
numkv.save("saved", cache)
assert len(numkv.load("saved")) == 40
assert main(["show", "saved"]) == 0
for found in (0, 32):
    with PrefixStore("store", mark="mine", max_nbytes=10_000) as store:
        paged = numkv.PagedKVCache(1, 2, 8, num_blocks=8, block_size=16, store=store)
        seq = paged.add(range(40))
        assert paged.cached_len(seq) == found
        step = paged.reserve([seq], [40 - found])
        step.append(0, *rows[:, found:])
        paged.commit(step, token_ids=range(found, 40))
        assert store.flush() == 0
with Folder("store", False).alone():  # the turn to evict, which takes a lock elsewhere
    print("done")
"""


def test_without_what_posix_has(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NUMBA_ENABLE_CUDASIM": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")
