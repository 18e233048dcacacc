"""Few query rows on a matrix unit: all sizes, what is not seen, memory, batches and threads, its instructions.

Where there is no unit, `test_attention_amx_emulated` runs this file on an emulated one.
"""

import ctypes
import mmap
import re

import amx_emulator
import assembly
import naive
import numba
import numpy as np
import paged_problems
import problems
import pytest
import tolerances
from problems import Shape

import numkv

# The package has a function of the same name.
from numkv.kernels.cpu.attention import state
from numkv.kernels.cpu.attention.engines import ROWS_OF_ALL_SIZES, use_amx
from numkv.kernels.cpu.attention.steps import steps_for
from numkv.kernels.cpu.vectors.features import has_amx

pytestmark = pytest.mark.skipif(
    not has_amx() or use_amx("bf16", "bf16", "float32") != ROWS_OF_ALL_SIZES,
    reason="no matrix unit here that decodes: see test_attention_amx_emulated",
)

SHAPES = [
    Shape(4, 1, 128, (130, 7)),
    Shape(4, 1, 64, (130, 70)),
    Shape(8, 1, 128, (100,)),
    Shape(7, 1, 64, (100,)),  # a group that is filled up
    Shape(16, 1, 128, (100,)),
    Shape(13, 1, 64, (70,)),
    Shape(6, 1, 40, (70,), head_dim_v=24),  # rows that end within 64 bytes
    Shape(10, 2, 80, (90,)),
    Shape(4, 1, 96, (90,)),
    Shape(4, 1, 192, (90,), head_dim_v=128),
    Shape(4, 1, 64, (90,), head_dim_v=200),
    Shape(5, 1, 256, (90,)),
    Shape(4, 2, 128, (90, 50), new=(2, 4)),  # query tokens that see different tokens
    Shape(1, 1, 64, (150,), new=(9,)),
    Shape(2, 1, 64, (90, 50), new=(8, 1)),
]
OPTIONS = [{}, {"window_left": 33}, {"logits_soft_cap": 5.0, "window_left": 70}]


def same(x):
    return x


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_size(rng, shape, options):
    problems.make(rng, shape, "bf16").check(same, same, **options)


@pytest.mark.parametrize("block_size", [5, 8, 16, 32])
@pytest.mark.parametrize(
    "shape", [Shape(8, 2, 128, (130, 40)), Shape(14, 2, 64, (90, 300))], ids=str
)
def test_blocks(rng, shape, block_size):
    problem = paged_problems.make(rng, shape, "bf16", block_size=block_size)
    problem.check(same, same)
    sinks = rng.standard_normal(shape.num_q_heads).astype(np.float32)
    problem.check(same, same, window_left=40, sinks=sinks)


def test_a_long_sequence_is_split_and_merged(rng):
    problems.make(rng, Shape(4, 1, 64, (2300,)), "bf16").check(same, same)


def test_strides_of_other_layouts(rng):
    problem = problems.make(rng, Shape(8, 2, 128, (90, 70)), "bf16")
    want, _ = problem.expect()
    for order in ((0, 2, 1, 3), (2, 0, 1, 3)):
        rows = [np.ascontiguousarray(x.transpose(order)) for x in (problem.k, problem.v)]
        k, v = (x.transpose(np.argsort(order)) for x in rows)
        out = numkv.decode_attention(problem.q, k, v, problem.seq_lens)
        tolerances.assert_rows_close(out, want, tolerances.attention("bf16", "fp32"))


def test_scores_that_grow_rescale_what_is_summed(rng):
    for dim in (64, 128):
        problem = problems.make(rng, Shape(4, 1, dim, (300, 40)), "bf16")
        tokens = np.arange(problem.k.shape[2])
        k = (problem.k.astype(np.float32) * 2.0 ** (tokens[:, None] // 64)).astype(problem.k.dtype)
        want, want_lse = naive.attention(problem.q, k, problem.v, problem.seq_lens)
        out, lse = numkv.decode_attention(
            problem.q, k, problem.v, problem.seq_lens, return_lse=True
        )
        tolerances.assert_rows_close(out, want, tolerances.attention("bf16", "fp32"))
        tolerances.assert_lse_close(lse, want_lse)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_of_tokens_that_some_queries_see(rng, bad, dim):
    """Vector code takes such a tile; tiles before and behind it, in which maxima grow, go on as before."""
    problem = problems.make(rng, Shape(4, 1, dim, (200,), new=(4,)), "bf16")
    tokens = np.arange(problem.k.shape[2])
    problem.k[:] = problem.k.astype(np.float32) * 2.5 ** (tokens[:, None] // 64)
    # The window of the first two queries has it; tokens before it are seen by the first alone.
    options = {"window_left": 136}
    want, want_lse = problem.expect(**options)
    problem.v[0, 0, 61, 5] = bad
    out, lse = problem.run(same, return_lse=True, **options)
    bound = tolerances.attention("bf16", "fp32")
    tolerances.assert_rows_close(out[2:], want[2:], bound)
    tolerances.assert_rows_close(np.delete(out, 5, -1), np.delete(want, 5, -1), bound)
    assert not np.isfinite(out[:2, :, 5]).any()
    tolerances.assert_lse_close(lse, want_lse)


def at_a_wall(array, after):
    """A copy that ends where memory ends, or begins where it begins: beyond is a page that nobody may touch."""
    size = -(-array.nbytes // 4096) * 4096
    room = mmap.mmap(-1, size + 8192)
    at = ctypes.addressof(ctypes.c_char.from_buffer(room))
    libc = ctypes.CDLL(None, use_errno=True)
    for wall in (at, at + 4096 + size):
        assert libc.mprotect(ctypes.c_void_p(wall), 4096, 0) == 0
    first = 4096 + (size - array.nbytes if after else 0)
    words = np.frombuffer(room, np.uint8, array.nbytes, first).view(array.dtype)
    copy = words.reshape(array.shape)
    copy[:] = array
    return copy


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("dims", [(128, 128), (40, 24), (64, 96)])
def test_memory_beyond_rows_is_not_touched(rng, dims, after):
    for length in (1, 17, 63, 90):
        shape = Shape(4, 1, dims[0], (length,), head_dim_v=dims[1], spare=0)
        problem = problems.make(rng, shape, "bf16")
        k, v = (at_a_wall(x, after) for x in (problem.k, problem.v))
        out = numkv.decode_attention(problem.q, k, v, problem.seq_lens)
        want, _ = problem.expect()
        tolerances.assert_rows_close(out, want, tolerances.attention("bf16", "fp32"))


@pytest.mark.parametrize("dim", [64, 128])
def test_results_do_not_depend_on_the_batch_or_on_threads(rng, dim):
    lens = np.array([300, 70, 1500, 5], np.int32)
    shape = Shape(8, 2, dim, tuple(lens))
    problem = problems.make(rng, shape, "bf16")
    together = problem.run(same)
    for s in range(4):
        np.testing.assert_array_equal(problem.only(s).run(same), together[s : s + 1])
    paged = paged_problems.make(rng, shape, "bf16", block_size=8)
    several = paged.run(same)  # heads of an item
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    try:
        np.testing.assert_array_equal(problem.run(same), together)
        np.testing.assert_array_equal(paged.run(same), several)
    finally:
        numba.set_num_threads(before)


@pytest.mark.skipif(amx_emulator.missing() != "", reason="counts instructions on the emulated unit")
@pytest.mark.parametrize(
    ("heads", "dim", "each"),
    [
        # Of 64 tokens. Two products add up a score of 64 columns; sums of 64 columns stay where they are.
        (4, 128, {"tilezero": 4, "tileloadd": 68, "tilestored": 20, "tdpbf16ps": 32}),
        (7, 64, {"tilezero": 4, "tileloadd": 26, "tilestored": 4, "tdpbf16ps": 16}),
        (16, 64, {"tilezero": 4, "tileloadd": 36, "tilestored": 4, "tdpbf16ps": 32}),
    ],
)
def test_instructions_of_a_tile(rng, heads, dim, each):
    emulator = amx_emulator.load()
    if not emulator.installed:
        pytest.skip("there is a unit")

    def counted(length):
        problem = problems.make(rng, Shape(heads, 1, dim, (length,)), "bf16")
        # Maxima that do not grow.
        problem.k[:, :, 1:] = problem.k[:, :, :1]
        emulator.counts()
        problem.run(same)
        return emulator.counts()

    few, more = counted(128), counted(256)
    assert {x: (more[x] - few[x]) / 2 for x in few if more[x] != few[x]} == each
    assert few["ldtilecfg"] == few["tilerelease"] == 1


TILES = re.compile(r"^(tile|tdp|ldtilecfg)")


def test_assembly_for_an_intel_xeon():
    """Products in small loops of their own, nothing set up in them, hardly anything of them on the stack."""
    import llvmlite.binding as llvm

    machine = llvm.Target.from_default_triple().create_target_machine(cpu="sapphirerapids", opt=3)
    steps = steps_for("bf16", "bf16", "float32", ROWS_OF_ALL_SIZES)

    def blocks_of(step):
        (overload,) = steps.kernel(step).overloads.values()
        text = machine.emit_assembly(overload.library._get_module_for_linking().clone())
        return assembly.of_assembly(text, overload.fndesc.llvm_func_name)

    blocks = blocks_of(state.ATTEND)
    loops = [blocks.lines(loop) for loop in blocks.innermost()]
    loops = [lines for lines in loops if any(TILES.match(x) for x in lines)]
    assert len(loops) >= 4
    for lines in loops:
        names = [x.split()[0] for x in lines if TILES.match(x)]
        assert "ldtilecfg" not in names
        assert sum(x.startswith("tdp") for x in names) > 0 or len(names) <= 2
        on_stack = [x for x in lines if re.search(r"\(%r[sb]p[,)]", x)]
        assert len(on_stack) <= 6, on_stack
        assert not [x for x in on_stack if "%zmm" in x]
    # Two set-ups, for either number of query rows, before an item's tiles.
    before = [x for lines in blocks_of(state.LOAD).code.values() for x in lines]
    assert sum(x.startswith("ldtilecfg") for x in before) == 2
    everything = [x for lines in blocks.code.values() for x in lines]
    assert not [x for x in everything if x.startswith("ldtilecfg")]
    assert not [x for x in everything if TILES.match(x) and "%rsp" in x and "ldtilecfg" not in x]
