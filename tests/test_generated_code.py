"""What makes attention fast and does not jitter: vector code in hot loops, no allocation, few launches of threads."""

import ctypes
import functools
import math
import platform
import re
import tracemalloc

import assembly
import numba
import numpy as np
import pytest

import numkv

# The package has a function of the same name.
from numkv.kernels.cpu import attention, threads
from numkv.kernels.cpu.attention import state
from numkv.kernels.cpu.attention.driver import driver_kernel
from numkv.kernels.cpu.attention.records import PAIRS as PAIRS_OF_BF16
from numkv.kernels.cpu.attention.steps import steps_for
from numkv.kernels.cpu.vectors.features import (
    HAS_BF16_PAIRS,
    INT4_INTEGERS,
    LANES,
    ROW_UNROLL,
)

on_x86 = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="reads assembly of x86-64 in the form it has on Linux",
)
with_vectors = pytest.mark.skipif(LANES < 8, reason="without AVX2, SSE has no multiply-add")

WIDE = {16: "%zmm", 8: "%ymm"}.get(LANES)
FLOATS = re.compile(r"^vfn?m(add|sub)\d+ps\b")
PAIRS = re.compile(r"^(vpdp(wssd|busd)s?|vpmadd(wd|ubsw))\b")
MATRICES = re.compile(r"^(tdp\w+|vdpbf16ps)\b")
ONE_FLOAT = re.compile(r"^vfn?m(add|sub)\d+s[sd]\b")
# Of single numbers: between floats, to and from integers; and half floats fewer than a vector.
CONVERSION = re.compile(r"^v?cvtt?(ss|sd|si|usi)2|^vcvt(ph2ps|ps2ph)x?\b.*%xmm\d+$")

# What multiplies rows of a kind: floats as they are or widened, INT8 in integers, INT4 too from AVX2 on.
INTEGERS = (PAIRS, MATRICES)
PRODUCTS = {
    "fp32": (FLOATS, MATRICES),
    "fp16": (FLOATS, MATRICES),
    "bf16": (FLOATS, MATRICES),
    "int8": INTEGERS,
    "int4": INTEGERS if INT4_INTEGERS else (FLOATS, *INTEGERS),
}


class Compiled:
    """LLVM and assembly of a kernel.

    One from the disk cache has kept its LLVM, as it is when all is optimised, for others to be linked with it. What
    is left to do then, without which there is no assembly, takes less than a second.
    """

    def __init__(self, dispatcher, kind=None):
        self.kind = kind
        (overload,) = dispatcher.overloads.values()
        module = overload.library._get_module_for_linking()
        self.name = overload.fndesc.llvm_func_name
        self.llvm = str(module)
        self.assembly = overload.library.codegen._tm.emit_assembly(module.clone())

    def hot_loops(self):
        """Instructions of the innermost loops that multiply and add."""
        blocks = assembly.of_assembly(self.assembly, self.name)
        loops = [blocks.lines(loop) for loop in blocks.innermost()]
        hot = (FLOATS, PAIRS, MATRICES, ONE_FLOAT)
        return [lines for lines in loops if any(p.match(x) for p in hot for x in lines)]

    def faults(self, products):
        """What should not be in the hot loops, with at least one each for scores and weights.

        They also have to ask for memory ahead of time. `products` are patterns of the instructions that these loops
        are about.
        """
        loops = self.hot_loops()
        found = []
        about = asking = 0
        for lines in loops:
            found += [f"conversion: {line}" for line in lines if CONVERSION.match(line)]
            found += [f"call: {line}" for line in assembly.calls(lines)]
            found += [f"one float: {line}" for line in lines if ONE_FLOAT.match(line)]
            vectors = [line for line in lines if FLOATS.match(line) or PAIRS.match(line)]
            found += [f"narrow: {line}" for line in vectors if WIDE not in line]
            about += any(product.match(line) for product in products for line in lines)
            asking += any(line.startswith("prefetch") for line in lines)
        if about < 2:
            found.append(f"{about} loops of products")
        # Sums of V rows ask for K rows, scores for V rows; those of INT4 do it in another loop.
        if asking < 1:
            found.append(f"{asking} loops that ask for memory ahead of time")
        return found

    def counted_in_loops(self):
        return counted_in_loops(self.llvm, self.name)


def counted_in_loops(llvm, name):
    """What of Numba's runtime (allocation, reference counts) is called more than once for a call of a kernel.

    Functions that the kernel calls in a loop, and that count references of arrays, have to be given borrowed ones,
    whose owner is null: nothing is counted then. Wrappers that unpack Python's arguments do not matter.
    """
    kernel = assembly.of_llvm(llvm, name)
    again = [line for loop in kernel.loops() for line in kernel.lines(loop)]
    found = {x for x in assembly.called(again) if x.startswith("NRT_")}
    for other, parameters in re.findall(r'^define [^@\n]*@"?([^"(]+)"?\((.*)\)', llvm, re.M):
        if other.startswith(("_ZN7cpython", "cfunc.", "NRT_", "numba_")):
            continue
        blocks = assembly.of_llvm(llvm, other)
        used = assembly.called(line for lines in blocks.code.values() for line in lines)
        found |= {x for x in used if "alloc" in x.lower()}
        if other == name or not {"NRT_incref", "NRT_decref"} & used:
            continue
        owners = [
            i for i, x in enumerate(split(parameters)) if re.search(r"^ptr.*%arg\.\S+\.0$", x)
        ]
        for line in again:
            if f"@{other}(" in line.replace('"', ""):
                given = split(line[line.index("(") + 1 : line.rindex(")")])
                found |= {f"{other}: {given[i]}" for i in owners if given[i] != "ptr null"}
    return found


def split(parameters):
    """The parts of a list whose parts may have lists in brackets."""
    return re.split(r",\s*(?![^()]*\))", parameters)


#: The steps of few query rows, by how many they take.
ROWS = {1: state.OF_1, 2: state.OF_2, 4: state.OF_4, 8: state.OF_8}


def steps_of(kind, compute="float32"):
    """The kernels of a kind's steps for few query rows."""
    steps = steps_for("fp32", kind, kind, compute, 0)
    return {rows: Compiled(steps.kernel(ROWS[rows]), kind) for rows in ROW_UNROLL}


@pytest.fixture(scope="module")
def compiled():
    """A function that gives the steps of a kind."""
    return functools.cache(steps_of)


@on_x86
@with_vectors
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.nightly if k == "fp16" else []) for k in PRODUCTS],
)
def test_hot_loops_are_vector_code(compiled, kind):
    for rows, step in compiled(kind).items():
        assert step.faults(PRODUCTS[kind]) == [], rows


@on_x86
@pytest.mark.skipif(not HAS_BF16_PAIRS, reason="this CPU does not multiply pairs of bf16")
def test_hot_loops_of_pairs_widen_nothing():
    """K and V rows are multiplied as they are stored, but for their order."""
    steps = steps_of("bf16", PAIRS_OF_BF16).values()
    assert [step.faults((MATRICES,)) for step in steps] == [[]] * len(steps)
    for lines in (lines for step in steps for lines in step.hot_loops()):
        products = sum(bool(MATRICES.match(line)) for line in lines)
        if products >= 8:
            widened = [x for x in lines if re.match(r"^(vpmovzx|vpslld|vcvt)", x)]
            assert widened == []


@on_x86
@pytest.mark.parametrize("kind", PRODUCTS)
def test_tiles_neither_allocate_nor_count_references(compiled, kind):
    for step in compiled(kind).values():
        assert step.counted_in_loops() == set()


@on_x86
def test_items_neither_allocate_nor_count_references():
    driver = Compiled(driver_kernel())
    assert driver.counted_in_loops() == set()
    # It does look at the kernel, which calls steps.
    everything = assembly.of_llvm(driver.llvm, driver.name).code.values()
    assert any("call" in line for lines in everything for line in lines)


def one_by_one(x, y, out):
    """A dot product with a chain of single sums, and numbers converted one after another."""
    for i in range(out.size):
        total = np.float32(0)
        for d in range(x.shape[1]):
            total += np.float32(np.float64(x[i, d]) * y[d])
        out[i] = total


def with_calls(x, y, out):
    """A call in the innermost loop, and an array for each row."""
    for i in range(out.size):
        row = np.empty(x.shape[1], np.float32)
        for d in range(x.shape[1]):
            row[d] = math.tanh(x[i, d])
        out[i] = row.sum()


def compile_bad(function):
    return Compiled(numba.njit("f4[:, :], f8[:], f4[:]", nogil=True, error_model="numpy")(function))


@on_x86
@with_vectors
def test_slow_code_is_found():
    bad = compile_bad(one_by_one)
    blocks = assembly.of_assembly(bad.assembly, bad.name)
    inner = [line for loop in blocks.innermost() for line in blocks.lines(loop)]
    assert any(CONVERSION.match(line) for line in inner)
    assert "0 loops of products" in bad.faults([FLOATS])
    assert bad.counted_in_loops() == set()

    bad = compile_bad(with_calls)
    blocks = assembly.of_assembly(bad.assembly, bad.name)
    assert any(assembly.calls(blocks.lines(loop)) for loop in blocks.innermost())
    found = bad.counted_in_loops()
    assert any("alloc" in name.lower() for name in found), found
    assert "NRT_decref" in found


LOOP = """
define i32 @kernel(ptr %arg.x.0, i64 %n) {
entry:
  br label %again
again:
  %r = call i32 @helper(ptr GIVEN, i64 range(i64 0, 9) %n)
  br i1 %r, label %again, label %done
done:
  ret i32 0
}

define i32 @helper(ptr captures(none) %arg.row.0, i64 range(i64 0, 9) %n) {
  call void @NRT_incref(ptr %arg.row.0)
  ret i32 0
}
"""


def test_arrays_that_are_not_borrowed_are_found():
    assert counted_in_loops(LOOP.replace("GIVEN", "null"), "kernel") == set()
    owned = counted_in_loops(LOOP.replace("GIVEN", "%arg.x.0"), "kernel")
    assert owned == {"helper: ptr %arg.x.0"}


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("vcvtss2sd\t%xmm0, %xmm0, %xmm1", True),
        ("vcvttss2si\t(%rax), %ecx", True),
        ("vcvtsi2ssq\t%rax, %xmm3, %xmm0", True),
        ("vcvtph2ps\t%xmm4, %xmm4", True),
        ("vcvtph2ps\t(%rax), %ymm4", False),
        ("vcvtph2psx\t(%rax), %zmm4", False),
        ("vcvtdq2ps\t%zmm1, %zmm1", False),
    ],
)
def test_conversions_of_single_numbers_are_told_apart(line, is_one):
    assert bool(CONVERSION.match(line)) == is_one


def test_loops_are_found():
    # 1 and 2 are a loop with the loop 3, 4 in it; 5 jumps to itself; 6 is on the way out.
    ways = {"1": "2", "2": "36", "3": "4", "4": "32", "5": "56", "6": ""}
    blocks = assembly.Blocks({x: [x] for x in ways}, {x: set(to) for x, to in ways.items()})
    assert sorted(map(sorted, blocks.loops())) == [["2", "3", "4"], ["5"]]
    assert sorted(map(sorted, blocks.innermost())) == [["3", "4"], ["5"]]


# -- launches of threads, and memory

LAUNCH = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 2, ctypes.c_int32)


@pytest.fixture
def launches(monkeypatch):
    """Workers of each launch of threads so far."""
    if threads.num_threads() < 2:
        pytest.skip("one thread starts no others")
    threads.start()
    real = LAUNCH(threads._state.launch)
    counted = []

    @LAUNCH
    def count(*args):
        counted.append(args[-1])
        real(*args)

    monkeypatch.setattr(threads._state, "launch", ctypes.cast(count, ctypes.c_void_p).value)
    yield counted
    del count  # kept until here: the kernels have its address only


def problem(rng, length, heads=4, dim=64, num_seqs=1):
    """What `decode_attention` takes, as float32."""
    q = rng.standard_normal((num_seqs, 2 * heads, dim), np.float32)
    k, v = rng.standard_normal((2, num_seqs, heads, length, dim), np.float32)
    return q, k, v, np.full(num_seqs, length)


def test_small_problems_start_no_threads(launches, rng):
    numkv.decode_attention(*problem(rng, 100))
    assert launches == []


def compiled_before(launches, *problems):
    """Have the steps compiled that problems need: a call that lacks one is begun again."""
    for each in problems:
        numkv.decode_attention(*each)
    launches.clear()


def test_large_problems_start_threads_once(launches, rng):
    workers = numba.get_num_threads()
    large = problem(rng, 900, num_seqs=8)
    compiled_before(launches, large)
    numkv.decode_attention(*large)
    assert launches == [workers]


def test_a_short_sequence_starts_threads_once(launches, rng):
    workers = numba.get_num_threads()
    problems = problem(rng, 1000, heads=8)
    compiled_before(launches, problems)
    shared = numkv.decode_attention(*problems)
    assert launches == [workers]
    numba.set_num_threads(1)
    try:
        assert np.array_equal(numkv.decode_attention(*problems), shared)
    finally:
        numba.set_num_threads(workers)
    assert launches == [workers]
    # Of a long one in a short window, there is little to do.
    numkv.decode_attention(*problems, window_left=10)
    assert launches == [workers]


def test_much_to_merge_starts_threads_once_more(launches, rng):
    workers = numba.get_num_threads()
    little, (_, *rows) = problem(rng, 5000), problem(rng, 1030, heads=16)
    much = rng.standard_normal((1, 1024, 64), np.float32), *rows
    compiled_before(launches, little, much)
    numkv.decode_attention(*little)
    assert launches == [workers]
    numkv.decode_attention(*much)
    assert launches == [workers] * 3


def most_bytes(call):
    """How much memory a call takes at a time, beyond what there was."""
    tracemalloc.start()
    try:
        call()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [100, 5000])
def test_later_calls_take_no_memory(rng, monkeypatch, length):
    args = problem(rng, length)
    out = np.empty_like(args[0])

    def call():
        numkv.decode_attention(*args, out=out)

    call()
    workspaces = attention._workspaces
    have = dict(workspaces._free[-1]._arrays)
    assert min(most_bytes(call) for _ in range(5)) < 8192  # another thread may take some beside it
    assert all(workspaces._free[-1]._arrays[name] is array for name, array in have.items())
    # A workspace for each call is seen. Tests with threads may have left more than one.
    monkeypatch.setattr(workspaces, "_most_kept", 0)
    monkeypatch.setattr(workspaces, "_free", [])
    assert most_bytes(call) > 65536
