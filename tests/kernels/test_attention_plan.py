"""What a plan of attention would give on more cores than there are: items dealt out on paper, costs without a clock.

Each item costs as many tokens as it reads, for each of its kv heads, and a start. Workers take items in order, as they
do in the kernel. What they would have to do without starts and without waiting for the last one, as a part of what they
take, is the efficiency. All cores read equally fast here: that of two memory nodes is a bound below.
"""

import heapq
from itertools import pairwise

import numpy as np
import problems
import pytest
from problems import Shape

from numkv.kernels.cpu.attention import plan as plans
from numkv.kernels.cpu.attention.driver import plan_kernel

# Tokens that the start of an item counts for. Halving splits to 512 tokens, 2 cores of an AMD EPYC took 2 to 3 % longer
# on shape A of `python -m perf` in bf16 and int8, quartering them 3 to 4 %: that is 11 to 25 tokens an item.
START = 20

# Lengths, query tokens of each, kv heads, q heads of each, elements of a K and V row.
LENGTHS = np.exp(np.random.default_rng(0).uniform(np.log(16), np.log(8192), 64)).astype(np.int64)
SHAPES = {
    "A": ([32768], 1, 8, 4, 256),
    "B": ([4096] * 8, 1, 8, 4, 256),
    "C": ([4096], 1, 32, 1, 256),
    "D": ([1024] * 32, 1, 8, 4, 256),
    "E": ([32768], 1, 2, 7, 128),
    "F": ([512], 1, 8, 4, 256),
    "group of 8": ([32768], 1, 8, 8, 256),
    "one head": ([32768], 1, 1, 16, 256),
    "one head, 128k": ([131072], 1, 1, 16, 256),
    "A, 128k": ([131072], 1, 8, 4, 256),
    "dim 256": ([32768], 1, 4, 4, 512),
    "192 and 128": ([4096] * 4, 1, 16, 1, 320),
    "ragged": (LENGTHS, 1, 8, 4, 256),
    "4 tokens": ([32768], 4, 8, 4, 256),
    "8 tokens": ([32768], 8, 8, 4, 256),
    "8 tokens, group of 8": ([32768], 8, 8, 8, 256),
    "8 tokens, one head": ([32768], 8, 1, 16, 256),
}
# Efficiencies with 8, 32 and 96 workers, at least; those below 0.9 are what the plan falls short of. One of the heads
# of F is too short to share, one head has too few splits for 96 workers, and two query blocks read K and V twice.
EXPECTED = {
    "C": (0.95, 0.95, 0.6), "E": (0.95, 0.95, 0.6), "F": (0.95, 0.2, 0.07),
    "one head": (0.95, 0.95, 0.3), "one head, 128k": (0.95, 0.95, 0.6), "dim 256": (0.95, 0.95, 0.6),
    "ragged": (0.95, 0.95, 0.9), "8 tokens, one head": (0.45, 0.45, 0.3),
}  # fmt: skip
MOST = (0.95, 0.95, 0.85)
#: Of blocks of 16 and of 128 tokens, where items take several heads.
EXPECTED_PAGED = EXPECTED | {
    "A, 128k": (0.94, 0.95, 0.85), "ragged": (0.93, 0.95, 0.89)
}  # fmt: skip


def items_of(shape, workers, block_size=1 << 20, max_rows=64, window=-1):
    """The workers and items of a plan, in order."""
    lengths, tokens, heads, group, columns = shape
    seqs = len(lengths)
    ints = np.zeros(plans.plan_size(seqs), np.int64)
    plan = plans.plan_of.py_func(ints, seqs)
    problem = plans.Problem(
        np.array(lengths), np.arange(seqs + 1) * tokens, np.zeros((0, 2), np.int64), window,
        max(lengths), block_size, heads, group, max_rows,
    )  # fmt: skip
    workers, _ = plan_kernel()(*problem, columns // 2, columns, workers, ints)  # rows of INT8
    items, b = [], 0
    for number in range(plan.first_item[seqs]):
        while plan.first_item[b + 1] <= number:
            b += 1
        items.append(plans.find_item.py_func(problem, plan, b, number))
    return workers, items


def cost(item):
    return (max(0, item.end - item.begin) + START) * (item.end_head - item.first_head)


def efficiency(shape, workers, block_size=1 << 20, speeds=None):
    """What there is to read / what workers could read until the last one is done."""
    used, items = items_of(shape, workers, block_size)
    assert used == workers
    free = [(0.0, i) for i in range(workers)]
    speeds = [1.0] * workers if speeds is None else speeds
    for item in items:
        at, i = free[0]
        heapq.heapreplace(free, (at + cost(item) / speeds[i], i))
    return sum(shape[0]) * shape[2] / (sum(speeds) * max(free)[0])


@pytest.mark.parametrize(
    ("block_size", "expected"), [(1 << 20, EXPECTED), (16, EXPECTED_PAGED), (128, EXPECTED_PAGED)]
)
@pytest.mark.parametrize("name", SHAPES)
def test_many_workers_have_enough_to_do(name, block_size, expected):
    found = [efficiency(SHAPES[name], workers, block_size) for workers in (8, 32, 96)]
    wanted = expected.get(name, (0.89, *MOST[1:]) if block_size < 1024 else MOST)
    assert all(f >= w for f, w in zip(found, wanted, strict=True)), found
    assert all(f <= 1 for f in found)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("block_size", [16, 128, 1 << 20])
def test_items_cover_what_is_seen_once(name, block_size):
    """Every token, kv head and query that meet do so in one item; splits do not depend on the number of workers."""
    lengths, tokens, heads, _, _ = SHAPES[name]
    edges = []
    for workers in (2, 8, 96):
        _, items = items_of(SHAPES[name], workers, block_size)
        covered = {}
        for item in items:
            for head in range(item.first_head, item.end_head):
                place = item.seq, item.first_token - item.seq * tokens, head
                covered.setdefault(place, []).append((item.begin, item.end))
        firsts = {first for _, first, _ in covered}
        assert covered.keys() == {
            (b, t, h) for b in range(len(lengths)) for t in firsts for h in range(heads)
        }
        sizes = dict(zip(sorted(firsts), np.diff([*sorted(firsts), tokens]), strict=True))
        for (b, first, _), ranges in covered.items():
            end = lengths[b] - tokens + first + sizes[first]
            seen = sorted(r for r in ranges if r[0] < r[1])
            assert seen[0][0] == 0
            assert seen[-1][1] == end
            assert all(x[1] == y[0] for x, y in pairwise(seen))
        edges.append({place: sorted(ranges) for place, ranges in covered.items()})
    assert edges[0] == edges[1] == edges[2]


def test_parts_of_blocks_lie_apart():
    """Rows of a split's parts: every query token of every block has its own."""
    shape = SHAPES["8 tokens, one head"]
    _, items = items_of(shape, 2)
    rows = [item.part + t * 16 + h for item in items for t in range(item.tokens) for h in range(16)]
    assert sorted(rows) == list(range(32 * 8 * 16))


def test_cores_that_read_more_slowly_take_fewer_items():
    """Half of the cores far from memory, at 0.6 of the speed: items in order balance that, fixed shares would not."""
    speeds = [1.0] * 16 + [0.6] * 16
    assert efficiency(SHAPES["A"], 32, speeds=speeds) > 0.8
    assert efficiency(SHAPES["ragged"], 32, speeds=speeds) > 0.93
    # A share for each core, as large as any other: all wait for the slow ones.
    assert 0.6 * 32 / sum(speeds) < 0.76


@pytest.mark.parametrize(
    "shape",
    [
        Shape(16, 1, 64, (2500, 1030, 8, 3000), new=(8, 8, 8, 8)),
        Shape(16, 1, 64, (2300,), new=(5,)),
    ],
    ids=str,
)
def test_blocks_of_queries_and_splits_at_once(rng, shape):
    """Large groups: some blocks see nothing of the last split, windows begin at other tokens in each."""
    problem = problems.make(rng, shape)
    problem.check(lambda x: x, lambda x: x)
    problem.check(lambda x: x, lambda x: x, window_left=1500, logits_soft_cap=5.0)
