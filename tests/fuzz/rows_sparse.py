"""The table's rows of sparse reading."""

from __future__ import annotations

import numpy as np

from fuzz.common import CAP, FLAG, OUT, SINKS, SM_SCALE, integer
from fuzz.play import Arg, Draw, Pair, Row
from fuzz.rows_functions import ONE_EACH, POOL_SCALES, POOLS, TABLE, Attention, lengths, of_scene
from numkv.sparse import KeyBounds

__all__ = ["SCENES"]


class Sparse(Attention):
    """Paged pools with the bounds of their keys."""

    def __init__(self, rng) -> None:
        super().__init__(rng)
        size = (self.num_blocks, self.heads, self.dim)
        self.objects["bounds"] = Pair(KeyBounds(*size), KeyBounds(*size))

    def capacity(self, name: str) -> int:
        return self.num_blocks * self.block


def _blocks(d: Draw) -> np.ndarray:
    d.n = d.randrange(d.scene.num_blocks + 1)
    return d.choice([np.int32, np.int64])(np.arange(d.n))


def _counts(d: Draw) -> np.ndarray:
    return np.array([d.randrange(d.scene.block + 1) for _ in range(d.n)], np.int64)


def _scores(d: Draw) -> np.ndarray:
    return d.floats((d.scene.num_seqs, d.scene.heads, d.scene.num_blocks))


def _tables(d: Draw) -> np.ndarray:
    s = d.scene
    return np.array(
        [d.randrange(s.num_blocks) for _ in range(s.num_seqs * s.heads * s.num_blocks)], np.int32
    ).reshape(s.num_seqs, s.heads, s.num_blocks)


def _lens_of_heads(d: Draw) -> np.ndarray:
    s = d.scene
    most = s.num_blocks * s.block
    return np.array(
        [d.randrange(most + 1) for _ in range(s.num_seqs * s.heads)], d.choice([np.int32, np.int64])
    ).reshape(s.num_seqs, s.heads)


def _slots(d: Draw) -> np.ndarray:
    s = d.scene
    most = s.num_blocks * s.block
    return np.array(
        [d.randrange(most) for _ in range(s.num_seqs * most)], np.int32
    ).reshape(s.num_seqs, most)  # fmt: skip


BLOCK = Arg("size", lambda d: d.scene.block)


OPTIONS = {"sm_scale": SM_SCALE, "logits_soft_cap": CAP, "return_lse": FLAG, "out": OUT}
Sparse.rows = [
    Row(
        "sparse.KeyBounds",
        {
            "num_blocks": integer(1, 9, "size"),
            "num_kv_heads": integer(1, 3, "size"),
            "head_dim": integer(1, 9, "size"),
            "target": Arg("target", lambda d: "cpu"),
        },
        call=lambda function, given: repr(function(**given)),
    ),
    Row(
        "sparse.KeyBounds.update",
        {
            "k_pool": of_scene("k_pool"),
            "blocks": Arg("integers", _blocks),
            "counts": Arg("integers", _counts),
            "k_scale": of_scene("k_pool_scale"),
            "validate": FLAG,
        },
        "bounds",
        weight=2,
    ),
    Row(
        "sparse.KeyBounds.scores",
        {
            "q": ONE_EACH,
            "block_table": TABLE,
            "seq_lens": lengths(True),
            "block_size": BLOCK,
            "sm_scale": SM_SCALE,
            "validate": FLAG,
        },
        "bounds",
        weight=2,
    ),
    Row(
        "sparse.choose_blocks",
        {
            "scores": Arg("floats", _scores),
            "block_table": TABLE,
            "seq_lens": lengths(True),
            "block_size": BLOCK,
            "top": integer(2, 9, "size"),
            "first": integer(0, 1, "size"),
            "newest": integer(1, 1, "size"),
            "validate": FLAG,
        },
        weight=2,
    ),
    Row(
        "sparse.sparse_decode_attention",
        {
            "q": ONE_EACH,
            **POOLS,
            "tables": Arg("integers", _tables),
            "seq_lens": Arg("integers", _lens_of_heads),
            **OPTIONS,
            **POOL_SCALES,
            "validate": FLAG,
        },
        weight=2,
    ),
    Row(
        "sparse.token_decode_attention",
        {
            "q": ONE_EACH,
            **POOLS,
            "slots": Arg("integers", _slots),
            "counts": lengths(True),
            **OPTIONS,
            "sinks": SINKS,
            **POOL_SCALES,
            "validate": FLAG,
        },
        weight=2,
    ),
]
SCENES = [(2, Sparse)]
