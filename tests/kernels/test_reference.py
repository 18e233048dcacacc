"""`tests/reference`, on which tests of caches run by day: each operation gives what the kernels of the CPU give."""

import inspect

import numpy as np
import pytest
import reference

from numkv.kernels.operations import NAMES, Codebook, CodesOptions, Operations, StoredCodes, load

F32, I32, I64 = np.float32, np.int32, np.int64
BLOCKS, HEADS, SIZE, DIM, TOKENS = 6, 2, 4, 8, 5
TABLE = np.array([3, 0, 5], I32)
SLOTS = np.array([9, -1, 0, 23, 14])
NO_SCALE = np.empty((0, 0, 0), F32)
LENS, STARTS = np.array([11, 0, 6]), np.array([0, 3, 3, 5])
TABLES = np.array([[3, 0, 5], [-1, -1, -1], [1, 2, -1]], I32)


def normal(*shape, dtype=F32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def side(kind="int8", seed=0):
    """New rows, and a pool of a kind for them."""
    pool = (
        normal(BLOCKS, HEADS, SIZE, DIM)
        if kind == "fp32"
        else np.zeros((BLOCKS, HEADS, SIZE, DIM), np.int8)
    )
    scale = NO_SCALE if kind == "fp32" else np.zeros((BLOCKS, HEADS, SIZE), F32)
    return normal(TOKENS, HEADS, DIM, seed=seed), "fp32", pool, kind, scale


def stored_in_int8():
    codes = np.random.default_rng(1).integers(-127, 128, (BLOCKS, HEADS, SIZE, DIM), np.int8)
    return codes, "int8", np.abs(normal(BLOCKS, HEADS, SIZE))


def pool(seed=0):
    return normal(BLOCKS, HEADS, SIZE, DIM, seed=seed)


def angles(rows=16, dim=DIM):
    turned = normal(rows, dim // 2)
    return np.cos(turned), np.sin(turned)


def fused(places, start):
    columns = (4 + 2 * HEADS) * DIM
    weights = normal(DIM, seed=1), normal(DIM, seed=2)
    pools = pool(), "fp32", NO_SCALE, pool(1), "fp32", NO_SCALE
    return [
        normal(TOKENS, columns), "fp32", *angles(), (True, True, False), *weights, 1e-6, start,
        np.zeros((TOKENS, 4, DIM), F32), *pools, *places,
    ]  # fmt: skip


NO_RANGES = np.empty((0, 2), I64)


def reading(ranges=NO_RANGES):
    """What attention takes between queries and results."""
    return [TABLES, LENS, STARTS, ranges, 0]


def attending(*, window=4, cap=0.0, **more):
    out, lse = np.zeros((5, 4, DIM), F32), np.zeros((5, 4), F32)
    keys = pool(), "fp32", NO_SCALE, pool(1), "fp32", NO_SCALE
    return [
        normal(5, 4, DIM),
        "fp32",
        *keys,
        *reading(**more),
        0.4,
        cap,
        window,
        normal(4),
        out,
        lse,
    ]


def mask(*, tree):
    words = np.full((5, 1), 0b111, np.uint32) if tree else np.empty((0, 0), np.uint32)
    heads = (normal(4), np.abs(normal(4, seed=1))) if tree else (np.empty(0, F32),) * 2
    columns, made = (5, 8) if tree else (2, 0)
    rows = np.zeros((5, columns), I64), np.zeros(made, F32)
    return [LENS, STARTS, np.empty((0, 2), I64), words, 1, -1 if tree else 4, 0, 99, *heads, *rows]


def codebook(bits=4, projections=8):
    """A codebook, and vectors that have been encoded by it on the CPU."""
    rotation = np.stack([np.linalg.qr(normal(DIM, DIM, seed=h))[0] for h in range(HEADS)]).astype(
        F32
    )
    levels = np.linspace(-0.9, 0.9, 1 << bits).astype(F32)
    return Codebook(
        rotation, rotation.swapaxes(1, 2).copy(), levels, levels, normal(HEADS, DIM, projections)
    )


def encoding():
    book = codebook()
    edges = ((book.levels[1:] + book.levels[:-1]) / 2).astype(F32)
    made = (
        np.zeros((HEADS, 9, DIM // 2), np.uint8), np.zeros((HEADS, 9), F32),
        np.zeros((HEADS, 9, 1), np.uint8), np.zeros((HEADS, 9), F32),
    )  # fmt: skip
    return [normal(7, HEADS, DIM), "fp32", book.rotation, edges, book.levels, book.sketch, *made, 1]


def encoded():
    args = encoding()
    reference.operations()["encode_rows"](*args)
    return codebook(), StoredCodes(*args[6:10], *args[6:8], 1, 8), args


def of_codes(*out):
    book, stored, _ = encoded()
    return [normal(2, 4, DIM), "fp32", book, stored, CodesOptions(0.4, 0.0, 3), *out]


#: Arguments of a call or two of each operation; what it writes to is among them.
CALLS = {
    "append_rows": [lambda: [*side(), TABLE, 3], lambda: [*side("fp32"), TABLE, 3]],
    "append_both": [lambda: [side(), side("int8", 1), TABLE, 6]],
    "attend": [attending, lambda: attending(window=-1, ranges=np.array([[0, 3], [2, 9], [5, 5], [0, 1], [3, 6]]))],
    "attend_codes": [lambda: of_codes(np.zeros((2, 4, DIM), F32), np.zeros((2, 4), F32))],
    "attention_weights": [
        lambda: [normal(5, 4, DIM), "fp32", pool(), "fp32", NO_SCALE, *reading(), normal(5, 4) + 5, 0.4, 0.0, 4,
                 np.zeros((3, HEADS, 12), F32)],
    ],
    "block_scores": [
        lambda: [normal(3, 4, DIM), "fp32", np.minimum(*normal(2, BLOCKS, HEADS, DIM)),
                 np.maximum(*normal(2, BLOCKS, HEADS, DIM)), TABLES, LENS, SIZE, 0.4, np.zeros((3, HEADS, 3), F32)],
    ],
    "choose_blocks": [
        lambda: [normal(3, HEADS, 3), TABLES, LENS, SIZE, 0, 1, np.zeros((3, HEADS, 2), I32),
                 np.zeros((3, HEADS), I64)],
    ],
    "copy_blocks": [lambda: [pool(), TABLE, pool(1), np.array([4, 1, 2], I32)]],
    "copy_both": [lambda: [normal(3, HEADS, 2, DIM), pool()[:3], normal(3, HEADS, 2, DIM), pool(1)[:3],
                           np.array([-1, 1, 3])]],
    "copy_rows": [lambda: [normal(3, HEADS, 2, DIM), pool()[:3], np.array([-1, 1, 9])]],
    "copy_tokens": [lambda: [pool(), np.array([3, 9]), pool(1), np.array([0, 22])]],
    "decode_rows": [
        lambda: [*encoded()[2][6:8], 2, codebook().levels, codebook().back, np.zeros((HEADS, 5, DIM), F32)],
    ],
    "encode_rows": [encoding],
    "fill_mask": [lambda: mask(tree=False), lambda: mask(tree=True)],
    "first_non_finite": [lambda: [np.where(normal(5, 2, 8) > 1, F32(np.inf), F32(1)), "fp32"],
                         lambda: [normal(5, 2, 8), "fp32"]],
    "key_bounds": [lambda: [pool(), "fp32", NO_SCALE, np.array([3, 9, 0]), np.array([4, 1, 2]),
                            np.zeros((BLOCKS, HEADS, DIM), F32), np.zeros((BLOCKS, HEADS, DIM), F32)]],
    "merge_states": [lambda: [normal(5, 4, DIM), normal(5, 4), normal(5, 4, DIM, seed=1), normal(5, 4, seed=1), "fp32",
                              np.zeros((5, 4, DIM), F32), np.zeros((5, 4), F32)]],
    "quantise_groups": [
        lambda: [normal(2, HEADS, 128, DIM), "fp32", np.array([3, 0]), np.zeros((3, HEADS, 64, DIM // 2), np.uint8),
                 "int4_channel", np.zeros((3, HEADS, 1, 2 * DIM), np.uint16), np.array([0, 2])],
    ],
    "rotate_rows": [lambda: [normal(5, HEADS, DIM), "fp32", np.sign(normal(DIM)), False, np.zeros((5, HEADS, DIM), F32),
                             "fp32"]],
    "scatter_both": [lambda: [side(), side("int8", 1), SLOTS]],
    "scatter_latents": [lambda: [*side("fp32")[:2], *angles(dim=4), (True, True, False, 1e-6, 4), normal(4),
                                 np.arange(TOKENS) + 2, pool(), "fp32", NO_SCALE, SLOTS]],
    "scatter_rows": [lambda: [*side(), SLOTS]],
    "scatter_write": [lambda: fused([SLOTS], np.arange(TOKENS) + 2)],
    "score_codes": [lambda: of_codes(np.zeros((2, 4, 7), F32))],
    "shift_rows": [lambda: [*stored_in_int8(), np.array([3, 9]), -2, *angles(), False],
                   lambda: [pool(), "fp32", NO_SCALE, np.array([3, 9]), 5, *angles(dim=4), False]],
    "tables_of_heads": [lambda: [np.stack([TABLES, TABLES + 1], 1), HEADS, np.zeros((6, 3), I32)]],
    "write_rows": [lambda: fused([TABLE, 4], 4)],
}  # fmt: skip
SMALL = [name for name in vars(Operations) if name.startswith("small_") or name == "append_attend"]


def arrays_in(x):
    if isinstance(x, np.ndarray):
        return [x]
    return [y for part in x for y in arrays_in(part)] if isinstance(x, (list, tuple)) else []


def test_every_operation_is_compared():
    assert sorted([*CALLS, *SMALL]) == sorted(reference.operations()) == list(NAMES)


@pytest.mark.parametrize("name", CALLS)
def test_what_the_cpu_does(name):
    for make in CALLS[name]:
        found, want = make(), make()
        result = reference.operations()[name](*found)
        assert getattr(load("cpu"), name)(*want) == result
        changed = False
        before = arrays_in(make())
        for a, b, old in zip(arrays_in(found), arrays_in(want), before, strict=True):
            changed |= not np.array_equal(a, old, equal_nan=True)
            if a.dtype.kind == "f":
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
            else:
                np.testing.assert_array_equal(a, b)
        assert changed or result is not None


def test_small_calls_have_no_fast_path():
    for name in SMALL:
        parameters = inspect.signature(getattr(Operations, name)).parameters
        assert reference.operations()[name](*("fp32" for _ in parameters)) is None


def test_operations_stand_in_for_a_while():
    own = load("cpu").attend
    with reference.standing_in():
        for name in reference.TARGETS:
            assert load(name).attend is reference.operations()["attend"]
        with reference.standing_in(False):
            assert load("cpu").attend is own
        assert load("cpu").attend is not own
    assert load("cpu").attend is own
