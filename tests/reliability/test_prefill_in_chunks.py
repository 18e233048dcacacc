"""A prompt in several calls: to the last bit what one call gives where chunks are whole, and close otherwise.

Whole chunks are those that `docs/reliability.md` names: a multiple of a query block, and more than what is split.
"""

import naive
import numpy as np
import pytest
import tolerances

import numkv
from numkv.kernels.cpu.attention.engines import query_rows
from numkv.kernels.cpu.attention.plan import SPLIT_ROWS

HEADS, DIM = 2, 16
#: How far chunks of any size may be from one call: relative L2 error of an output row.
APART = {"fp32": 1e-5, "fp16": 1e-5, "bf16": 1e-4, "int8": 1e-4, "int4": 3e-4}


def query_block(target, kind, group):
    """Query tokens that attention takes at once."""
    if target == "cuda":
        return 8
    return max(1, query_rows(kind, kind, "float32") // group)


def most_split(target, kind, group):
    """Query tokens up to which a call is split over the cached tokens."""
    block = query_block(target, kind, group)
    return block if target == "cuda" else max(block, SPLIT_ROWS // group)


class Prompt:
    """Queries of a prompt, behind some tokens that are cached already."""

    def __init__(self, rng, to, host, target, kind, group, before, tokens, **options):
        self.to, self.host, self.options = to, host, options
        self.before, self.tokens = before, tokens
        n = before + tokens
        layer = numkv.ContiguousLayer(n, HEADS, DIM, kind=kind, target=target)
        self.rows = rng.standard_normal((2, n, HEADS, DIM), dtype=np.float32)
        layer.append(to(self.rows[0].copy()), to(self.rows[1].copy()))
        self.q = rng.standard_normal((tokens, HEADS * group, DIM), dtype=np.float32)
        self.cache = layer.k, layer.v
        if numkv.kind(kind).has_scales:
            self.options |= {"k_scale": layer.k_scale, "v_scale": layer.v_scale}

    def attend(self, ends):
        """Outputs and lse, of chunks that end there."""
        found = []
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            q = self.to(self.q[begin:end].copy())
            lens = self.to(np.array([self.before + end], np.int32))
            starts = self.to(np.array([0, end - begin], np.int32))
            found.append(
                numkv.prefill_attention(
                    q, *self.cache, lens, starts, return_lse=True, **self.options
                )
            )
        return [np.concatenate([self.host(x) for x in parts]) for parts in zip(*found, strict=True)]


def ends_of(chunk, tokens):
    return [*range(chunk, tokens, chunk), tokens]


CASES = [
    ("fp32", 1, 0, {}), ("fp32", 4, 70, {"window_left": 30}), ("int8", 4, 0, {}), ("int4", 3, 5, {}),
    ("bf16", 2, 1, {"logits_soft_cap": 5.0}), ("fp16", 4, 0, {}),
]  # fmt: skip

ON_CUDA = [CASES[1], CASES[2]]  # the simulator is slow
every_case = pytest.mark.parametrize(
    ("target", "kind", "group", "before", "options"),
    [("cpu", *case) for case in CASES] + [("cuda", *case) for case in ON_CUDA],
    indirect=["target"],
)


@every_case
def test_whole_chunks_give_the_same_bits(target, to, host, rng, kind, group, before, options):
    block = query_block(target, kind, group)
    multiples = [2, 3] if target == "cuda" else [2, 3, 5]
    tokens = (
        (3 if target == "cuda" else 11) * block + block + block // 2 + 1
    )  # the last chunk: more than a block
    if target == "cpu":  # past where short chunks are split
        before += 1100
    prompt = Prompt(rng, to, host, target, kind, group, before, tokens, **options)
    whole = prompt.attend([tokens])
    least = most_split(target, kind, group)
    multiples = [m for m in multiples if m * block > least]
    assert len(multiples) > 1
    for multiple in multiples:
        ends = ends_of(multiple * block, tokens)
        if ends[-1] - ends[-2] <= least:
            del ends[-2]  # which would be no chunk that is promised anything
        for got, want in zip(prompt.attend(ends), whole, strict=True):
            assert np.array_equal(got, want)


@every_case
def test_other_chunks_are_close(target, to, host, rng, kind, group, before, options):
    """Each against one call, and against float64 like any attention."""
    tokens, sizes = (20, [1, 7]) if target == "cuda" else (150, [1, 3, 7, 13, 33, 64])
    before += 0 if target == "cuda" else 1500
    prompt = Prompt(rng, to, host, target, kind, group, before, tokens, **options)
    out, lse = prompt.attend([tokens])
    for size in sizes:
        got, got_lse = prompt.attend(ends_of(size, tokens))
        assert tolerances.row_errors(got, out).max() <= APART[kind]
        tolerances.assert_lse_close(
            got_lse, lse, tolerances.INTEGERS if kind in tolerances.QUANTISED else 1e-5
        )
    if kind == "fp32" and target == "cpu":
        k, v = prompt.rows.transpose(0, 2, 1, 3)[:, None]
        want, _ = naive.attention(prompt.q, k, v, [before + tokens], [0, tokens], **options)
        tolerances.assert_rows_close(got, want, tolerances.attention("fp32", "fp32"))
