"""Processes that write to one store and are killed: ``python tests/killed_writers.py FOLDER KILLS [BYTES | mixed]``.

Four processes add prompts, check every row that they find, and record the blocks that their store has reported as
written. One after another is killed (SIGKILL) at random moments, and another takes its place. In the end the store must
hold each recorded block, with the right rows, unless it may evict. With "mixed" layers differ, and keep states. Prints
counts as JSON.
"""

import json
import os
import random
import signal
import struct
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import stored_mixed
import stored_prefixes
from stored_prefixes import HEADS, SIZE, prompt, rows, store_in

from numkv.caches.paged.prefix_match import block_names, group_mask
from numkv.store import BlocksWritten

MIXED = sys.argv[-1] == "mixed"
MODEL = stored_mixed if MIXED else stored_prefixes
cache, check_rows, started = MODEL.cache, MODEL.check_rows, MODEL.started

WRITERS = 4
RECORD = struct.Struct("<II32s")
WRONG = 3


def names_of_parts(of, number, tokens):
    """Return names of a prompt's blocks for each group of layers, and for states."""
    ids = np.array(prompt(number, tokens)[: tokens // SIZE * SIZE], np.int32)
    found = block_names(of._store, ids, None)
    if MIXED:
        found.append(found[0].copy())
        found[-1].view(np.uint64)[:, 0] ^= group_mask(len(found) - 1)
    return found


def named(of, number, tokens):
    """Return names of a prompt's blocks, with the prompt's number and their places in it."""
    parts = names_of_parts(of, number, tokens)
    return {x.tobytes(): (number, i) for names in parts for i, x in enumerate(names)}


def write(folder, said, seed, max_nbytes):
    """Add prompts, some new and some old, until the process is killed."""
    rng, known = random.Random(seed), {}
    notes = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(names):
        os.write(notes, b"".join(RECORD.pack(*known[name], name) for name in names))

    def told(event):
        if isinstance(event, BlocksWritten):
            note([name.tobytes() for name in event.block_hashes])

    of = cache(
        store_in(folder, max_nbytes=max_nbytes, host_nbytes=1 << 15, on_event=told),
        num_blocks=80 if MIXED else 24,
    )
    while True:
        number, tokens = rng.choice([rng.randrange(30), rng.randrange(10**6)]), rng.randrange(2, 60)
        mine = named(of, number, tokens)
        known |= mine
        seq, _ = started(of, prompt(number, tokens))
        check_rows(of, seq, prompt(number, tokens))
        of.remove(seq)
        if rng.randrange(10) == 0 and of.store.flush() == 0 and max_nbytes is None and not MIXED:
            note(mine)


def born(folder, notes, seed, max_nbytes):
    """Start a writer."""
    child = os.fork()
    if child:
        return child
    try:
        write(folder, notes / str(seed), seed, max_nbytes)
    except BaseException:
        traceback.print_exc()
    os._exit(WRONG)


def run(folder, notes, kills, max_nbytes=None):
    """Kill writers; return the final counts."""
    started(cache(None), prompt(1))  # loads kernels before processes fork
    rng = random.Random(kills)
    children = [born(folder, notes, seed, max_nbytes) for seed in range(WRITERS)]
    for kill in range(kills):
        time.sleep(rng.choice([0.0, 0.02, 0.1]) + rng.random() * 0.05)
        which = rng.randrange(WRITERS)
        end(children[which])
        children[which] = born(folder, notes, WRITERS + kill, max_nbytes)
    until = time.monotonic() + 100
    while noted(notes) < 60 * kills and time.monotonic() < until:  # machines may be slow
        time.sleep(0.05)
    for child in children:
        end(child)
    acknowledged = set()
    for path in notes.iterdir():
        whole = path.read_bytes()
        acknowledged |= set(RECORD.iter_unpack(whole[: len(whole) // RECORD.size * RECORD.size]))
    there = check(folder, sorted(acknowledged))
    left = list(folder.rglob("*.partial"))
    return {"kills": kills, "acknowledged": len(acknowledged), "there": there, "left": len(left)}


def noted(notes):
    """Return the number of records."""
    return sum(path.stat().st_size for path in notes.iterdir()) // RECORD.size


def end(child):
    """Kill a writer; it must not have ended by itself, as it does when it has found a wrong row."""
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status), f"a writer has ended: {os.waitstatus_to_exitcode(status)}"


class OneBlock:
    """A block that is read into an array."""

    def __init__(self, name, depth, tokens, content):
        self.names, self.depths = [name], [depth]
        self.tokens = lambda i: np.array(tokens, "<i4").tobytes()
        self.content = lambda i: [content]
        self.sound = lambda content: True


def check(folder, acknowledged):
    """Return the number of blocks in the store, and check each."""
    of = cache(store_in(folder))
    tiers, there = of._store.tiers, 0
    for number, i, name in acknowledged:
        text, part = prompt(number, (i + 1) * SIZE), tiers.parts[0]
        if MIXED:
            names = [x[i].tobytes() for x in names_of_parts(of, number, len(text))]
            part = [*tiers.parts, tiers.of_states][names.index(name)]
        content = np.zeros(part.content.content, np.uint8)
        if tiers.engine.read(part.section, OneBlock(name, i, text[-SIZE:], content))[0]:
            there += 1
            if MIXED:
                continue
            want = [rows(layer, text)[:, -SIZE:].swapaxes(1, 2) for layer in range(of.num_layers)]
            assert content.tobytes() == np.stack(want).tobytes()
            assert content.size == np.stack(want).nbytes == of.num_layers * 2 * HEADS * SIZE * 8 * 4
    for number in {number for number, _, _ in acknowledged if MIXED}:
        seq, _ = started(of, prompt(number))
        check_rows(of, seq, prompt(number))
        of.remove(seq)
    now = of.store.stats()
    assert now.damaged == now.refused == 0
    return there


if __name__ == "__main__":
    places = [Path(sys.argv[1]) / name for name in ("store", "notes")]
    places[1].mkdir(parents=True)
    most = int(sys.argv[3]) if len(sys.argv) > 3 and sys.argv[3].isdigit() else None
    print(json.dumps(run(*places, int(sys.argv[2]), most)))
