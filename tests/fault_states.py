"""States in the test of memory that runs out; see `fault_subjects`."""

import fault_bound
import numpy as np
from fault_base import BLOCK, DIM, HEADS, rows
from layer_lists import paged_kv_cache

import numkv

_SHAPES = {0: [((3,), "float32"), ((2, 2), np.int32)]}


def cache():
    """Two sequences with the same states, and checkpoints of other lengths."""
    made = paged_kv_cache(
        2, [None, HEADS], DIM, num_blocks=64, block_size=BLOCK, kind="fp32", states=_SHAPES,
        state_slots=numkv.StateSlots(24),
    )  # fmt: skip
    seq = made.add()
    for ids in (range(BLOCK), range(BLOCK, 2 * BLOCK), [7]):
        _begin(made, [seq], len(ids))
        _write(made)
        made.commit(made.step, token_ids=ids)
    made.fork(seq)
    return made


def _begin(made, seqs, tokens):
    made.step = made.reserve(seqs, tokens)


def _write(made):
    seqs, tokens = len(made.step.sequences), made.step.num_tokens
    made.step.write_state(
        0, np.full((seqs, 3), tokens, np.float32), np.full((seqs, 2, 2), 5, np.int32)
    )
    made.step.append(1, *rows(tokens, 3))


def _both(made):
    _begin(made, [0, 1], BLOCK - 1)
    _write(made)


def see(made):
    """Lengths, tables and states."""
    made.check()
    found = []
    for seq in made.sequences:
        state = made._sequences[seq]
        found += [
            seq,
            state.length,
            state.reserved,
            [n for n, _ in state.marks],
            made.cached_len(seq),
        ]
        found += (
            [x.tolist() for layer in made.swap_out(seq).states for x in layer]
            if (state.reserved is None)
            else []
        )
    now = made.states.stats()
    return repr([found, now.used, now.cached, made.num_free, made._next])


def _swapped(made):
    made.swapped = made.swap_out(0)


CALLS = {
    "add a prompt with a checkpoint": lambda c: c.add([*range(2 * BLOCK), 9, 9]),
    "bind": fault_bound.bind,
    "fork": lambda c: c.fork(0),
    "remove": lambda c: c.remove(1),
    "truncate": lambda c: c.truncate(0, BLOCK),
    "swap_in": (_swapped, lambda c: c.swap_in(c.swapped)),
    "reserve": lambda c: len(c.reserve([0, 1], 1).sequences),
    "read_state": (lambda c: _begin(c, [0], 1), lambda c: list(c.step.read_state(0))),
    "state": (lambda c: _begin(c, [0], 1), lambda c: c.step.state(0).write.tolist()),
    "write_state": (lambda c: _begin(c, [0], 1), _write),
    "commit": (_both, lambda c: c.commit(c.step)),
    "commit with ids": (_both, lambda c: c.commit(c.step, token_ids=range(2 * BLOCK - 2))),
    "rollback": (_both, lambda c: c.rollback(c.step)),
}

#: Methods of objects without states that are tried here, or need not be.
LEFT_OUT = {name: "tried where there are states" for name in CALLS if name.endswith("state")}
