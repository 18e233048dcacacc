"""The interpreter of PTX: what it computes, and that it finds what it is there to find; on kernels written by hand."""

import ctypes

import numpy as np
import pytest

from tools.cuda import ptx_machine
from tools.cuda.ptx_machine import Compiled
from tools.cuda.ptx_program import PtxError, parse

HEAD = """
.version 8.0
.target sm_90
.address_size 64
{shared}
.visible .entry kernel(.param .u64 out, .param .u64 in, .param .u32 n)
{{
    .reg .pred %p<8>;
    .reg .b16 %rs<8>;
    .reg .b32 %r<32>;
    .reg .f32 %f<8>;
    .reg .b64 %rd<16>;
    .reg .f64 %fd<8>;
    {local}
    ld.param.u64 %rd1, [out];
    ld.param.u64 %rd2, [in];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %rd3, %r2, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    {body}
    ret;
}}
"""


def program(body, shared="", local=""):
    return parse(HEAD.format(body=body, shared=shared, local=local))


def run(body, out, given=None, n=0, blocks=1, threads=64, shared="", local="", shared_bytes=0):
    """Run a kernel over arrays of the process."""
    given = np.zeros(threads, np.uint32) if given is None else given
    arrays = [out, given]

    def find(address):
        for x in arrays:
            if x.ctypes.data <= address < x.ctypes.data + x.nbytes:
                return x.ctypes.data, x.nbytes
        return None

    params = {
        "out": ctypes.c_uint64(out.ctypes.data),
        "in": ctypes.c_uint64(given.ctypes.data),
        "n": ctypes.c_uint32(n),
    }
    compiled = Compiled(program(body, shared, local))
    as_bytes = {name: bytes(x) for name, x in params.items()}
    return ptx_machine.run(compiled, (blocks, 1, 1), (threads, 1, 1), shared_bytes, as_bytes, find)


def problems(body, out=None, **more):
    """The kinds of problems of a run, also of one that cannot go on."""
    try:
        return set(
            run(body, np.zeros(64, np.uint32) if out is None else out, **more).problems.counts
        )
    except PtxError as error:
        return set(error.result.problems.counts)


LOAD, STORE = "ld.global.u32 %r3, [%rd5];\n", "st.global.u32 [%rd4], %r4;\n"


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("add.s32 %r4, %r3, -3;", lambda x: x - 3),
        ("sub.s32 %r4, 7, %r3;", lambda x: 7 - x),
        ("mul.lo.s32 %r4, %r3, 77777;", lambda x: x * 77777),
        ("mad.lo.s32 %r4, %r3, 5, %r3;", lambda x: x * 6),
        ("mul.hi.u32 %r4, %r3, 2863311531;", lambda x: (x & 0xFFFFFFFF) * 2863311531 >> 32),
        ("shl.b32 %r4, %r3, 5;", lambda x: x << 5),
        ("shr.s32 %r4, %r3, 3;", lambda x: x >> 3),
        ("shr.u32 %r4, %r3, 3;", lambda x: (x & 0xFFFFFFFF) >> 3),
        ("shr.s32 %r4, %r3, %r3;", lambda x: x >> (x & 0xFFFFFFFF if 0 <= x < 32 else 31)),
        ("shl.b32 %r4, %r3, %r3;", lambda x: x << x if 0 <= x < 32 else 0),
        ("div.s32 %r4, %r3, 7;", lambda x: int(x / 7)),
        ("rem.s32 %r4, %r3, 7;", lambda x: x - 7 * int(x / 7)),
        ("div.u32 %r4, %r3, 7;", lambda x: (x & 0xFFFFFFFF) // 7),
        ("min.s32 %r4, %r3, 4;", lambda x: min(x, 4)),
        ("max.u32 %r4, %r3, 4;", lambda x: max(x & 0xFFFFFFFF, 4)),
        ("abs.s32 %r4, %r3;", abs),
        ("xor.b32 %r4, %r3, 255;", lambda x: x ^ 255),
        ("not.b32 %r4, %r3;", lambda x: ~x),
        ("popc.b32 %r4, %r3;", lambda x: (x & 0xFFFFFFFF).bit_count()),
        ("clz.b32 %r4, %r3;", lambda x: 32 - (x & 0xFFFFFFFF).bit_length()),
        ("bfe.u32 %r4, %r3, 4, 7;", lambda x: (x >> 4) & 127),
        ("bfi.b32 %r4, %r3, %r1, 8, 4;", lambda x: (x & 15) << 8),
        (
            "prmt.b32 %r4, %r3, 0, 0x0123;",
            lambda x: int.from_bytes((x & 0xFFFFFFFF).to_bytes(4, "little"), "big"),
        ),
        ("lop3.b32 %r4, %r3, 12, 10, 0x96;", lambda x: x ^ 12 ^ 10),
        ("setp.lt.s32 %p1, %r3, 5;\nselp.b32 %r4, 1, 2, %p1;", lambda x: 1 if x < 5 else 2),
        ("setp.lt.u32 %p1, %r3, 5;\nselp.b32 %r4, 1, 2, %p1;", lambda x: 1 if 0 <= x < 5 else 2),
        (
            "cvt.u16.u32 %rs1, %r3;\ncvt.s32.s16 %r4, %rs1;",
            lambda x: ((x + 0x8000) & 0xFFFF) - 0x8000,
        ),
        (
            "cvt.s64.s32 %rd6, %r3;\nshr.s64 %rd7, %rd6, 33;\ncvt.u32.u64 %r4, %rd7;",
            lambda x: x >> 33,
        ),
        ("mov.b64 %rd6, {%r3, %r2};\nmov.b64 {%r5, %r4}, %rd6;\nmov.b32 %r4, %r5;", lambda x: x),
    ],
    ids=lambda x: x.split(";")[0] if isinstance(x, str) else "",
)
def test_integers(instruction, expected):
    values = [*range(-6, 40), 2**31 - 1, -(2**31), 12345678, -12345678]
    values += [0] * (64 - len(values))
    out, given = np.zeros(64, np.uint32), np.array(values, np.int64).astype(np.uint32)
    result = run(LOAD + instruction + STORE, out, given)
    assert result.ok
    assert list(out) == [expected(x) & 0xFFFFFFFF for x in values]


def as_int32(x):
    return np.float32(0 if np.isnan(x) else np.clip(np.trunc(np.float64(x)), -(2**31), 2**31 - 1))


def square_and_more(x):
    return np.float32(np.float64(x) ** 2 + np.float64(x))


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("add.rn.f32 %f2, %f1, 0f3F800000;", lambda x: x + np.float32(1)),
        ("div.rn.f32 %f2, 0f3F800000, %f1;", lambda x: np.float32(1) / x),
        ("fma.rn.f32 %f2, %f1, %f1, 0fBF800000;", lambda x: np.float32(np.float64(x) ** 2 - 1)),
        ("ex2.approx.ftz.f32 %f2, %f1;", np.exp2),
        ("max.f32 %f2, %f1, 0f00000000;", lambda x: np.fmax(x, np.float32(0))),
        ("neg.f32 %f2, %f1;", lambda x: -x),
        ("copysign.f32 %f2, %f1, 0f40000000;", lambda x: np.copysign(np.float32(2), x)),
        (
            "cvt.rzi.s32.f32 %r5, %f1;\ncvt.rn.f32.s32 %f2, %r5;",
            lambda x: np.float32(
                0 if np.isnan(x) else np.clip(np.trunc(np.float64(x)), -(2**31), 2**31 - 1)
            ),
        ),
        ("cvt.rn.f16.f32 %rs1, %f1;\ncvt.f32.f16 %f2, %rs1;", lambda x: np.float32(np.float16(x))),
        (
            "setp.leu.f32 %p1, %f1, 0f00000000;\nselp.f32 %f2, 0f3F800000, 0f00000000, %p1;",
            lambda x: np.float32(not x > 0),
        ),
        (
            "setp.ne.f32 %p1, %f1, %f1;\nselp.f32 %f2, 0f3F800000, 0f00000000, %p1;",
            lambda x: np.float32(0),
        ),
        (
            "setp.neu.f32 %p1, %f1, %f1;\nselp.f32 %f2, 0f3F800000, 0f00000000, %p1;",
            lambda x: np.float32(np.isnan(x)),
        ),
        (
            "cvt.f64.f32 %fd1, %f1;\nfma.rn.f64 %fd2, %fd1, %fd1, %fd1;\ncvt.rn.f32.f64 %f2, %fd2;",
            square_and_more,
        ),
    ],
    ids=lambda x: x.split(";")[0] if isinstance(x, str) else "",
)
def test_floats(instruction, expected):
    values = np.float32(
        [0.0, 1.5, -2.25, 1e-3, -7e4, 3e9, -3e9, np.inf, -np.inf, np.nan] + [0.3] * 54
    )
    out = np.zeros(64, np.float32)
    body = "ld.global.f32 %f1, [%rd5];\n" + instruction + "st.global.f32 [%rd4], %f2;\n"
    assert run(body, out, values).ok
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(out, np.array([expected(x) for x in values], np.float32))


def test_fma_of_float64_is_rounded_once():
    from tools.cuda.ptx_arithmetic import fma64

    a, b = np.float64([1 + 2**-30, 3.0, 1e300]), np.float64([1 - 2**-30, 1 / 3, 1e10])
    with np.errstate(all="ignore"):
        found = fma64(a, b, np.float64([-1.0, -1.0, 0.0]))
    assert found[0] == -(2.0**-60)
    assert found[1] == -(2.0**-54)
    assert np.isinf(found[2])


def test_threads_part_and_meet_again():
    """A loop of another number of rounds for each thread; the last instructions are run once for each warp."""
    body = """
    mov.u32 %r4, 0; mov.u32 %r5, 0;
    $loop: setp.ge.u32 %p1, %r5, %r2; @%p1 bra $done;
    add.s32 %r4, %r4, %r5; add.s32 %r5, %r5, 1; bra.uni $loop;
    $done: st.global.u32 [%rd4], %r4;"""
    out = np.zeros(64, np.uint32)
    result = run(body, out)
    assert list(out) == [t * (t - 1) // 2 for t in range(64)]
    program_ = program(body)
    assert result.executed[program_.labels["$done"]] == 2 * 2  # store and ret, by two warps


SHARED = ".shared .align 4 .b8 mine[512];"
#: Each thread stores to its place, and reads the place of another one.
EXCHANGE = (
    """
    mov.u32 %r8, mine; shl.b32 %r9, %r2, 2; add.s32 %r10, %r8, %r9;
    xor.b32 %r11, %r2, {other}; shl.b32 %r11, %r11, 2; add.s32 %r12, %r8, %r11;
    st.shared.u32 [%r10], %r2;
    {barrier}
    ld.shared.u32 %r4, [%r12];
    {more}
"""
    + STORE
)


def exchange(barrier="bar.sync 0;", other=33, more=""):
    return EXCHANGE.format(barrier=barrier, other=other, more=more)


def test_blocks_have_memory_of_their_own():
    out = np.zeros(64, np.uint32)
    result = run(exchange(), out, blocks=5, shared=SHARED)
    assert result.ok
    assert result.barriers == 5
    assert list(out) == [t ^ 33 for t in range(64)]


def test_a_missing_barrier_is_a_race():
    assert problems(exchange(barrier=""), shared=SHARED) == {
        "race: read after another thread wrote it"
    }
    # Also within a warp, whose threads need not go together.
    assert problems(exchange(barrier="", other=1), shared=SHARED) == {
        "race: read after another thread wrote it"
    }
    assert problems(exchange(barrier="bar.warp.sync -1;", other=1), shared=SHARED) == set()
    assert problems(exchange(barrier="bar.warp.sync -1;"), shared=SHARED) == {
        "race: read after another thread wrote it"
    }


#: All threads count in one word, which the first one has set.
COUNTED = (
    """
    setp.ne.u32 %p1, %r2, 0; @%p1 bra $a;
    st.shared.u32 [mine], 7;
    $a: {before}
    red.shared.add.u32 [mine], 2;
    {after}
    ld.shared.u32 %r4, [mine];
"""
    + STORE
)


def test_atomics_in_shared_memory_meet_each_other_only():
    barrier, out = "bar.sync 0;", np.zeros(64, np.uint32)
    result = run(COUNTED.format(before=barrier, after=barrier), out, shared=SHARED)
    assert result.ok
    assert (out == 7 + 2 * 64).all()
    assert problems(COUNTED.format(before="", after=barrier), shared=SHARED) == {
        "race: two threads write"
    }
    assert problems(COUNTED.format(before=barrier, after=""), shared=SHARED) == {
        "race: read after another thread wrote it"
    }


def test_a_place_written_while_another_reads_it_is_a_race():
    again = "st.shared.u32 [%r10], %r1;"
    assert problems(exchange(more=again), n=99, shared=SHARED) == {
        "race: written after another thread read it"
    }
    assert problems(exchange(more="bar.sync 0;" + again), n=99, shared=SHARED) == set()
    everyone = "st.shared.u32 [mine], %r2;"
    assert "different values stored to one place at once" in problems(everyone, shared=SHARED)
    first = "setp.eq.u32 %p1, %r2, 0; @%p1 bra $a; bra.uni $b; $a: st.shared.u32 [mine], 1; "
    first += "$b: st.shared.u32 [mine], 2;"
    assert problems(first, shared=SHARED) == {"race: two threads write"}


def test_what_was_not_written_is_not_read():
    assert problems("ld.shared.u32 %r4, [mine+64];", shared=SHARED) == {
        "uninitialised shared memory read"
    }
    local = ".local .align 4 .b8 __local_depot0[8];"
    read = "mov.u64 %rd6, __local_depot0; ld.local.u32 %r4, [%rd6+4];"
    assert problems(read, local=local) == {"uninitialised local memory read"}
    written = (
        "mov.u64 %rd6, __local_depot0; st.local.u32 [%rd6+4], %r2; ld.local.u32 %r4, [%rd6+4];"
    )
    assert problems(written, local=local) == set()
    sometimes = "setp.gt.u32 %p1, %r2, 3; @%p1 bra $on; mov.u32 %r7, 1; $on: add.s32 %r4, %r7, 1;"
    assert problems(sometimes) == {"register read that was not set"}
    always = "setp.gt.u32 %p1, %r2, 3; @%p1 bra $on; mov.u32 %r7, 1; bra.uni $end; "
    always += "$on: mov.u32 %r7, 2; $end: add.s32 %r4, %r7, 1;"
    assert problems(always) == set()


def test_barriers_that_not_all_threads_reach():
    half = "setp.gt.u32 %p1, %r2, 31; @%p1 bra $over; bar.sync 0; $over: add.s32 %r4, %r2, 1; bar.sync 0;"
    assert "threads of a block wait at different barriers" in problems(half)
    some = "setp.gt.u32 %p1, %r2, 31; @%p1 bra $end; bar.sync 0; $end: "
    assert problems(some + "add.s32 %r4, %r2, 1;") == {"barrier that some threads have left behind"}


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("st.global.u32 [%rd4+4], %r2;", "access outside of all memory"),
        ("ld.global.u32 %r4, [%rd5+-4];", "access outside of all memory"),
        ("add.s64 %rd6, %rd4, 2; st.global.u32 [%rd6], %r2;", "misaligned access to global memory"),
        ("ld.global.v2.u32 {%r4, %r5}, [%rd5];", "misaligned access to global memory"),
        ("mov.u32 %r8, mine; ld.shared.u32 %r4, [%r8+512];", "access outside of shared memory"),
        ("mov.u32 %r8, mine; ld.shared.u32 %r4, [%r8+-4];", "access outside of shared memory"),
        ("mov.u32 %r8, mine; st.shared.u32 [%r8+2], %r2;", "misaligned access to shared memory"),
        ("st.global.u32 [%rd1], %r2;", "different values stored to one place at once"),
    ],
)
def test_stray_accesses(body, problem):
    # Arrays that lie far from each other, and from others.
    out, given = (np.zeros((3, 1 << 16), np.uint32)[1, :64].copy() for _ in range(2))
    assert problems(body, out, given=given, shared=SHARED) == {problem}


def test_values_pass_between_the_threads_of_a_warp():
    out = np.zeros(64, np.uint32)
    run("shfl.sync.bfly.b32 %r4|%p1, %r2, 5, 31, -1;" + STORE, out)
    assert list(out) == [t ^ 5 for t in range(64)]
    run("shfl.sync.down.b32 %r4, %r2, 3, 31, -1;" + STORE, out)
    assert list(out) == [t + 3 if t % 32 < 29 else t for t in range(64)]
    run("setp.lt.u32 %p1, %r2, 40; vote.sync.ballot.b32 %r4, %p1, -1;" + STORE, out)
    assert list(out) == [0xFFFFFFFF] * 32 + [0xFF] * 32
    part = "setp.gt.u32 %p1, %r2, 9; @%p1 bra $end; shfl.sync.bfly.b32 %r4, %r2, 1, 31, -1; $end: "
    assert problems(part) >= {"a warp's threads do not meet"}


def test_generic_addresses_reach_every_memory():
    body = """
    mov.u32 %r8, mine; shl.b32 %r9, %r2, 2; add.s32 %r8, %r8, %r9; cvt.u64.u32 %rd6, %r8; cvta.shared.u64 %rd7, %rd6;
    st.u32 [%rd7], %r2; ld.u32 %r4, [%rd7]; st.u32 [%rd4], %r4;"""
    out = np.zeros(64, np.uint32)
    assert run(body, out, shared=SHARED).ok
    assert list(out) == list(range(64))


def test_atomics():
    out = np.zeros(64, np.uint32)
    run("atom.global.add.u32 %r4, [%rd1], 2;", out, blocks=3)
    assert out[0] == 2 * 64 * 3
    out[0] = 1000
    run("add.s32 %r5, %r2, 7; red.global.min.u32 [%rd1], %r5;", out)
    assert out[0] == 7


def test_functions_are_put_where_they_are_called():
    text = HEAD.format(
        shared="",
        local="",
        body="""
    { .reg .b32 temp_param_reg; .param .b32 param0; st.param.b32 [param0+0], %r2; .param .b32 retval0;
    call.uni (retval0), twice, ( param0 ); ld.param.b32 %r4, [retval0+0]; }
    { .param .b32 param0; st.param.b32 [param0], %r4; .param .b32 retval0;
    call.uni (retval0), twice, ( param0 ); ld.param.b32 %r4, [retval0]; }"""
        + STORE,
    )
    function = """
.func (.param .b32 func_retval0) twice( .param .b32 twice_param_0 )
{
    .reg .b32 %r<4>; .reg .pred %p<2>;
    ld.param.u32 %r1, [twice_param_0]; setp.gt.u32 %p1, %r1, 9; @%p1 bra $big;
    add.s32 %r2, %r1, %r1; st.param.b32 [func_retval0+0], %r2; ret;
    $big: st.param.b32 [func_retval0+0], %r1; ret;
}
"""
    program_ = parse(text.replace(".visible", function + ".visible"))
    out = np.zeros(64, np.uint32)
    find = {"out": out.ctypes.data, "in": out.ctypes.data, "n": 0}
    params = {name: int(x).to_bytes(8, "little") for name, x in find.items()}
    ptx_machine.run(
        Compiled(program_),
        (1, 1, 1),
        (64, 1, 1),
        0,
        params,
        lambda _: (out.ctypes.data, out.nbytes),
    )
    twice = [2 * t if t < 10 else t for t in range(64)]
    assert list(out) == [2 * t if t < 10 else t for t in twice]


@pytest.mark.parametrize(
    "body",
    [
        "wgmma.fence.sync.aligned;",
        "add.cc.u32 %r4, %r2, 1;",
        "mov.u32 %r4, %clock;",
        "@%p1 add.s32 %r4, %r2, 1;",
    ],
)
def test_unknown_instructions_are_errors(body):
    with pytest.raises(PtxError, match=r"unknown|predicate"):
        run(body, np.zeros(64, np.uint32))


def test_barriers_can_be_left_out():
    whole = program(exchange(), SHARED)
    (barrier,) = whole.barriers()
    without = whole.without(barrier)
    assert not without.barriers()
    assert len(whole.barriers()) == 1
    assert len(without.code) == len(whole.code)


#: Each thread copies 16 bytes to shared memory and reads those of another one.
COPY = """
    mov.u32 %r8, mine; shl.b32 %r9, %r2, 4; add.s32 %r10, %r8, %r9; xor.b32 %r11, %r9, {other}; add.s32 %r12, %r8, %r11;
    mul.wide.u32 %rd6, %r2, 16; add.s64 %rd7, %rd2, %rd6; {before}
    cp.async.cg.shared.global [%r10], [%rd7], 16{size};
    cp.async.commit_group;
    {wait} {barrier}
    ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r12]; {after}
"""
WIDE = ".shared .align 16 .b8 mine[2048];"


def copy(
    wait="cp.async.wait_group 0;", barrier="bar.sync 0;", other=16, size="", before="", after=""
):
    return (
        COPY.format(wait=wait, barrier=barrier, other=other, size=size, before=before, after=after)
        + STORE
    )


def test_copies_arrive_at_the_wait():
    out, given = np.zeros(64, np.uint32), np.arange(256, dtype=np.uint32)
    assert run(copy(), out, given, shared=WIDE).ok
    np.testing.assert_array_equal(out, 4 * (np.arange(64) ^ 1))
    # Half of the threads read nothing, as their address is none, and get zeros.
    half = "and.b32 %r13, %r2, 1; setp.eq.u32 %p1, %r13, 0; selp.b64 %rd7, %rd7, 8, %p1; selp.b32 %r13, 16, 0, %p1;"
    assert run(copy(before=half, size=", %r13"), out, given, shared=WIDE).ok
    np.testing.assert_array_equal(out, np.where(np.arange(64) % 2, 4 * (np.arange(64) ^ 1), 0))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (copy(wait=""), "race: read while a copy is under way"),
        (copy(wait="", barrier="", other=0), "race: read while a copy is under way"),
        (copy(wait="cp.async.wait_group 1;"), "race: read while a copy is under way"),
        (copy(barrier=""), "race: read after another thread wrote it"),
        (copy(barrier="", other=0), None),
        (
            copy(barrier="cp.async.cg.shared.global [%r10], [%rd7], 16; bar.sync 0;"),
            "race: read while a copy is under way",
        ),
        (
            copy(before="cp.async.cg.shared.global [%r10], [%rd7], 16;"),
            "race: two copies to one place",
        ),
        (
            copy(wait="st.shared.u32 [%r10], %r2; cp.async.wait_group 0;"),
            "race: written while a copy is under way",
        ),
        (
            copy(after="cp.async.cg.shared.global [%r10], [%rd7], 16;"),
            "race: written after another thread read it",
        ),
        (copy(after="bar.sync 0; cp.async.cg.shared.global [%r10], [%rd7], 16;"), None),
        (copy(before="add.s64 %rd7, %rd7, 8;"), "misaligned access to global memory"),
        (copy(before="add.s64 %rd7, %rd7, 16;"), "access outside of all memory"),
        (copy(before="add.s32 %r10, %r10, 4;"), "misaligned access to shared memory"),
        (copy(before="add.s32 %r10, %r10, 1040;"), "access outside of shared memory"),
    ],
)  # fmt: skip
def test_what_copies_may_not_do(body, problem):
    given = np.zeros((3, 1 << 16), np.uint32)[1, :256].copy()
    assert problems(body, given=given, shared=WIDE) == ({problem} if problem else set())


def test_matrices_need_whole_warps():
    half = "setp.gt.u32 %p1, %r2, 9; @%p1 bra $end; {} $end: "
    load = (
        "mov.u32 %r8, mine; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r8];"
    )
    product = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, %f4}, {%r2, %r2, %r2, %r2}, "
        "{%r2, %r2}, {%f1, %f2, %f3, %f4};"
    )
    for body in (load, product):
        assert "a warp's threads do not meet" in problems(half.format(body), shared=WIDE)
    assert problems(load, shared=WIDE) == {"uninitialised shared memory read"}
    assert problems(load.replace("mine;", "mine; add.s32 %r8, %r8, 8;"), shared=WIDE) == {
        "misaligned access to shared memory"
    }
