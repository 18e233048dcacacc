"""Attention over rows whose elements share bytes: INT4 and codes of codebooks."""

from dataclasses import replace

import numpy as np
import paged_problems
import pytest
from problems import Shape

F32 = np.float32

SHAPES = [  # shape, block size
    (Shape(2, 1, 8, (9, 0, 1)), 3),
    (Shape(4, 2, 34, (18,), head_dim_v=6), 16),
    (Shape(3, 1, 32, (5, 6), new=(3, 2)), 1),
    (Shape(2, 1, 64, (70,)), 16),
]
LARGE = [
    (Shape(2, 2, 32, (7, 33)), 1),
    (Shape(16, 4, 64, (129, 2, 17, 0)), 16),
    (Shape(14, 2, 128, (300, 5)), 3),
    (Shape(7, 1, 80, (1, 0, 31, 16)), 7),
    (Shape(9, 1, 96, (70,), head_dim_v=130), 5),
    (Shape(1, 1, 256, (100,)), 256),
    (Shape(8, 1, 128, (130, 20), new=(3, 0)), 1),
    (Shape(4, 2, 320, (40,), new=(40,)), 16),
    (Shape(16, 2, 62, (2100, 37), head_dim_v=2), 16),
]
shapes = pytest.mark.parametrize(
    ("target", "shape", "block_size"),
    [("cpu", *row) for row in LARGE + SHAPES] + [("cuda", *row) for row in SHAPES],
    indirect=["target"],
    ids=str,
)
kinds = pytest.mark.parametrize("kind", ["int4", "code4", "code6"])
#: Of tests on the CPU alone; CI compiles the last one.
kinds_on_the_cpu = pytest.mark.parametrize(
    "kind", ["int4", "code4", pytest.param("code6", marks=pytest.mark.slow)]
)


def made(rng, shape, kind, *args, **options):
    """A problem of a shape whose rows a kind can store: of CODE6 they are as many elements more as it takes."""
    if kind == "code6":
        dims = [None if n is None else -(-n // 8) * 8 for n in (shape.head_dim, shape.head_dim_v)]
        shape = replace(shape, head_dim=dims[0], head_dim_v=dims[1])
    return paged_problems.make(rng, shape, kind, *args, **options)


@pytest.mark.boundscheck
@kinds
@shapes
def test_every_shape(target, to, host, rng, kind, shape, block_size):
    """NaN or garbage in unused slots, blocks, scales and table entries reaches no output."""
    made(rng, shape, kind, block_size=block_size).check(to, host)


@kinds_on_the_cpu
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 17])
@pytest.mark.parametrize("q_kind", ["fp32", pytest.param("fp64", marks=pytest.mark.nightly)])
def test_groups(rng, kind, group, q_kind):
    """Rows that vector code takes at once, on the CPU."""
    shape = Shape(2 * group, 2, 112, (45, 100), new=(2, 45))
    problem = made(rng, shape, kind, q_kind, block_size=16)
    problem.check(lambda x: x, lambda x: x)


@kinds
def test_a_later_tokens_rows_do_not_reach_an_earlier_query(target, to, host, rng, kind):
    problem = made(rng, Shape(2, 1, 34, (12,), new=(6,)), kind, block_size=4)
    want = host(problem.run(to, window_left=5))
    for position in (0, 11):  # left of every window; the last token
        at = problem.block_table[0, position // 4], slice(None), position % 4
        for x in (problem.k_scale, problem.v_scale):
            x[at] = np.nan
    got = host(problem.run(to, window_left=5))
    assert np.array_equal(got[:-1], want[:-1])
    assert np.all(np.isnan(got[-1].astype(F32)))
