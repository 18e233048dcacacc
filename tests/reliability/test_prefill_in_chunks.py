"""A prompt in several calls: to the last bit what one call gives where chunks are whole, and close otherwise.

Whole chunks are those that `docs/reliability.md` names. Its rules are written down here once more, and not asked of
numkv: they hold for every engine, whatever it does with few rows and with many.
"""

import math

import naive
import numpy as np
import pytest
import tolerances

import numkv
from numkv.kernels.cpu.vectors.features import has_amx

DIM = 16
#: How far chunks of any size may be from one call, where queries are float32: relative L2 error of an output row.
APART = {
    "fp64": 1e-5, "fp32": 1e-5, "fp16": 1e-5, "fp8_e4m3": 1e-5, "bf16": 1e-4, "int8": 1e-4, "code6": 3e-4,
    "int4": 3e-4, "code4": 3e-4,
}  # fmt: skip
#: And what outputs of 16 bits may add: a unit in the last place of each element.
LAST_PLACE = {"fp64": 0, "fp32": 0, "fp16": 1e-3, "bf16": 8e-3}


def query_block(target, kind, group, q_kind="fp32"):
    """Query tokens of a query block, B."""
    if target == "cuda":
        return 128 // math.gcd(128, group)
    wide = "fp64" in (kind, q_kind)
    with_unit = kind in ("bf16", "int8") and has_amx()
    many = not wide and (numkv.kind(kind).is_float or with_unit)
    return max(1, (256 if many else 64) // group)


def least_tokens(target, kind, group, q_kind="fp32"):
    """The fewest query tokens of a call that is promised anything: more than B, and more than 128 query rows."""
    return 1 + max(query_block(target, kind, group, q_kind), 128 // group)


class Prompt:
    """Queries of a prompt, behind some tokens that are cached already."""

    def __init__(
        self, rng, to, host, target, kind, group, before, tokens, q_kind="fp32", **options
    ):
        self.to, self.host, self.options = to, host, options
        self.before, self.tokens = before, tokens
        n, heads = before + tokens, 1 if target == "cuda" else 2  # the simulator is slow
        layer = numkv.ContiguousLayer(n, heads, DIM, kind=kind, target=target)
        self.rows = rng.standard_normal((2, n, heads, DIM), dtype=np.float32)
        layer.append(to(self.rows[0].copy()), to(self.rows[1].copy()))
        self.q = naive.round_to(rng.standard_normal((tokens, heads * group, DIM)), q_kind)
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


def ends_of(chunk, tokens, least=1):
    """Ends of chunks of a size; the last one has `least` tokens or more."""
    return [*range(chunk, tokens - least + 1, chunk), tokens]


EVERYDAY = [
    ("fp32", 1, 0, {}), ("fp32", 4, 70, {"window_left": 30}), ("int8", 4, 0, {}),
    ("bf16", 7, 0, {"q_kind": "bf16", "logits_soft_cap": 5.0}),
]  # fmt: skip
SLOW = [("fp16", 4, 0, {})]
NIGHTLY = [
    ("int4", 3, 5, {}), ("bf16", 2, 1, {"logits_soft_cap": 5.0}),
    ("fp64", 4, 0, {}), ("fp8_e4m3", 4, 0, {}), ("code6", 4, 0, {}), ("code4", 3, 0, {}),
    ("int8", 4, 0, {"q_kind": "bf16"}), ("int4", 8, 0, {"q_kind": "fp16"}), ("int8", 3, 0, {"q_kind": "fp64"}),
]  # fmt: skip
ON_CUDA = [EVERYDAY[1], ("int8", 8, 30, {})]  # the simulator is slow
every_case = pytest.mark.parametrize(
    ("target", "kind", "group", "before", "options"),
    [("cpu", *case) for case in EVERYDAY]
    + [pytest.param("cpu", *case, marks=pytest.mark.slow) for case in SLOW]
    + [pytest.param("cpu", *case, marks=pytest.mark.nightly) for case in NIGHTLY]
    + [pytest.param("cuda", *case, marks=pytest.mark.slow) for case in ON_CUDA],
    indirect=["target"],
)


def assert_whole(prompt, sizes, least):
    """Chunks of these sizes give the bits of one call."""
    whole = prompt.attend([prompt.tokens])
    for size in sizes:
        ends = ends_of(size, prompt.tokens, least)
        assert len(ends) > 1
        for got, want in zip(prompt.attend(ends), whole, strict=True):
            np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@every_case
def test_whole_chunks_give_the_same_bits(target, to, host, rng, kind, group, before, options):
    """Behind so many tokens that smaller calls are split; the last query block has a few rows, or many."""
    q_kind = options.get("q_kind", "fp32")
    block, least = (of(target, kind, group, q_kind) for of in (query_block, least_tokens))
    smallest = -(-least // block) * block
    lengths, sizes = [smallest + least], [smallest]
    if target == "cpu":
        before, sizes = before + 1100, [smallest, smallest + block]
        # Numbers of rows around those from which engines take them otherwise: 13 and 25.
        last_rows = [1, 4, 12, 13, 24, 25, 63]
        lengths = [
            3 * smallest + (least // block + 1) * block + n
            for n in sorted({-(-rows // group) for rows in last_rows})
        ]
    for tokens in lengths:
        prompt = Prompt(rng, to, host, target, kind, group, before, tokens, **options)
        assert_whole(prompt, sizes, least)


@pytest.mark.parametrize("target", ["cpu"], indirect=True)
@pytest.mark.parametrize("kind", ["fp32", "int8"])
@pytest.mark.parametrize("group", [1, 4, pytest.param(16, marks=pytest.mark.slow)])
def test_multiples_of_512_are_whole_where_groups_are_powers_of_two(
    to, host, rng, target, kind, group
):
    for last in (257, 300):
        prompt = Prompt(rng, to, host, target, kind, group, 1100, 1024 + last)
        assert_whole(prompt, [512, 1024], 257)


@every_case
def test_other_chunks_are_close(target, to, host, rng, kind, group, before, options):
    """Each against one call, and against float64 like any attention."""
    tokens, sizes = (20, [1, 7]) if target == "cuda" else (150, [1, 3, 7, 13, 33, 64])
    before += 0 if target == "cuda" else 1500
    q_kind = options.get("q_kind", "fp32")
    prompt = Prompt(rng, to, host, target, kind, group, before, tokens, **options)
    out, lse = prompt.attend([tokens])
    for size in sizes:
        got, got_lse = prompt.attend(ends_of(size, tokens))
        errors = tolerances.row_errors(got, out.astype(np.float64))
        assert errors.max() <= APART[kind] + LAST_PLACE[q_kind]
        tolerances.assert_lse_close(
            got_lse, lse, tolerances.INTEGERS if kind in tolerances.QUANTISED else 1e-5
        )
    if kind == "fp32" and target == "cpu":
        k, v = prompt.rows.transpose(0, 2, 1, 3)[:, None]
        want, _ = naive.attention(prompt.q, k, v, [before + tokens], [0, tokens], **options)
        tolerances.assert_rows_close(got, want, tolerances.attention("fp32", "fp32"))
