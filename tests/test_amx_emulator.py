"""The emulated matrix unit against models in NumPy and exact arithmetic, written from the manual's formulas."""

import ctypes
import math
import signal
import subprocess
import sys
import threading
from fractions import Fraction

import amx_emulator
import numpy as np
import pytest

from numkv.kernels.cpu.vectors.amx import Amx
from numkv.kernels.cpu.vectors.emit import I64
from numkv.kernels.cpu.vectors.features import has_amx

pytestmark = [
    pytest.mark.skipif(bool(amx_emulator.missing()), reason=amx_emulator.missing()),
    pytest.mark.skipif(has_amx(), reason="there is a unit: nothing traps"),
]

#: Of a product: the sum's rows, its lanes, lanes of the first operand.
SHAPES = [(16, 16, 16), (8, 8, 16), (3, 5, 2), (1, 1, 1), (16, 8, 4)]


@pytest.fixture(scope="module")
def emulator():
    found = amx_emulator.load()
    found.install()
    found.fault()
    return found


@pytest.fixture(scope="module")
def compiled():
    """A function that compiles instructions, as `Amx` emits them, to be called with addresses and steps."""
    import llvmlite.binding as llvm
    from llvmlite import ir

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    flags = "+amx-tile,+amx-bf16,+amx-int8"
    engines = []

    def compile_(emit, pointers, numbers=0):
        module = ir.Module()
        module.triple = llvm.get_process_triple()
        types = [ir.IntType(8).as_pointer()] * pointers + [ir.IntType(64)] * numbers
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), types), "run")
        b = ir.IRBuilder(function.append_basic_block())
        emit(Amx(b), *function.args)
        b.ret_void()
        # An engine owns its machine.
        machine = llvm.Target.from_default_triple().create_target_machine(features=flags, jit=True)
        engines.append(llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), machine))
        engines[-1].finalize_object()
        address = engines[-1].get_function_address("run")
        signature = ctypes.CFUNCTYPE(
            None, *[ctypes.c_void_p] * pointers, *[ctypes.c_int64] * numbers
        )
        call = signature(address)

        def run(*args):
            call(*(x.ctypes.data if isinstance(x, np.ndarray) else int(x) for x in args))

        return run

    return compile_


def layout(*tiles, palette=1):
    """The 64 bytes of a configuration: (rows, bytes a row) of each tile."""
    found = np.zeros(64, np.uint8)
    found[0] = palette
    for i, (rows, size) in enumerate(tiles):
        found[48 + i] = rows
        found[16 + 2 * i : 18 + 2 * i] = size % 256, size // 256
    return found


def product_of(compiled, name):
    """Load three tiles, multiply, store the sum."""

    def emit(amx, config, total, rows, columns):
        step = I64(64)
        amx.configure(config)
        amx.load(0, total, step)
        amx.load(1, rows, step)
        amx.load(2, columns, step)
        amx.multiply(name, 0, 1, 2)
        amx.store(0, total, step)
        amx.release()

    return compiled(emit, 4)


def to_float32(x):
    """A fraction rounded to the nearest float32, ties to even; below the smallest normal number 0."""
    if x == 0:
        return Fraction(0)
    exponent = max(math.floor(math.log2(abs(x))) - 2, -200)
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    rounded = round(x / unit) * unit
    return rounded if abs(rounded) >= Fraction(2) ** -126 else Fraction(0)


def as_bf16(words):
    """Fractions that words stand for; denormal numbers are 0."""
    values = (words.astype(np.uint32) << 16).view(np.float32)
    values = np.where(np.abs(values) < 2.0**-126, 0, values)
    return np.vectorize(lambda x: Fraction(float(x)), otypes=[object])(values)


def bf16_product(total, a, b):
    """The manual's loop: products of even elements and of odd ones in sums of their own, then all added."""
    out = total.copy()
    for m in range(a.shape[0]):
        for n in range(b.shape[1] // 2):
            even = odd = Fraction(0)
            for k in range(a.shape[1] // 2):
                even = to_float32(even + a[m, 2 * k] * b[k, 2 * n])
                odd = to_float32(odd + a[m, 2 * k + 1] * b[k, 2 * n + 1])
            both = to_float32(even + odd)
            out[m, n] = float(to_float32(Fraction(float(total[m, n])) + both))
    return out


@pytest.mark.parametrize(("rows", "lanes", "depth"), SHAPES)
def test_products_of_bf16(emulator, compiled, rng, rows, lanes, depth):
    a, b = (rng.standard_normal((16, 32)).astype(np.float32) for _ in range(2))
    a *= np.float32(2.0) ** rng.integers(-20, 20, a.shape)
    a, b = (np.ascontiguousarray(x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b))
    total = rng.standard_normal((16, 16)).astype(np.float32)
    total[rows // 2] = 0
    want = bf16_product(
        total[:rows, :lanes], as_bf16(a[:rows, : 2 * depth]), as_bf16(b[:depth, : 2 * lanes])
    )
    config = layout((rows, 4 * lanes), (rows, 4 * depth), (depth, 4 * lanes))
    before = total.copy()
    product_of(compiled, "bf16ps")(config, total, a, b)
    assert emulator.fault() == ""
    np.testing.assert_array_equal(total[:rows, :lanes], want)
    # What is not stored stays.
    np.testing.assert_array_equal(total[rows:], before[rows:])
    np.testing.assert_array_equal(total[:, lanes:], before[:, lanes:])


@pytest.mark.parametrize(
    ("left", "right", "total", "want"),
    [
        (0x0080, 0x3F80, 0.0, 2.0**-126),
        (0x0080, 0x3E80, 0.0, 0.0),  # a product below normal numbers
        (0x0001, 0x7200, 0.0, 0.0),  # operands that are
        (0x7200, 0x8040, 0.0, 0.0),
        (0x0000, 0x3F80, 2.0**-130, 0.0),  # sums that are
        (0x0080, 0x3F80, -(2.0**-130), 2.0**-126),
        (0x3980, 0x3980, 1 + 2.0**-23, 1 + 2.0**-22),  # ties, to even
        (0x3980, 0x3980, 1.0, 1.0),
    ],
)
def test_denormal_numbers_and_ties(emulator, compiled, left, right, total, want):
    tiles = np.zeros((2, 16, 32), np.uint16)
    tiles[:, 0, 0] = left, right
    c = np.full((16, 16), total, np.float32)
    product_of(compiled, "bf16ps")(layout((1, 4), (1, 4), (1, 4)), c, *tiles)
    assert emulator.fault() == ""
    assert c[0, 0] == want


@pytest.mark.parametrize(("rows", "lanes", "depth"), SHAPES)
@pytest.mark.parametrize("name", ["bssd", "bsud", "busd", "buud"])
def test_products_of_bytes(emulator, compiled, rng, name, rows, lanes, depth):
    a, b = (rng.integers(0, 256, (16, 64)).astype(np.uint8) for _ in range(2))
    total = rng.integers(-(2**31), 2**31, (16, 16)).astype(np.int32)
    signs = {"s": np.int8, "u": np.uint8}
    x, y = (z.view(signs[sign]).astype(np.int64) for z, sign in zip((a, b), name[1:3], strict=True))
    x = x[:rows, : 4 * depth].reshape(rows, depth, 4)
    y = y[:depth, : 4 * lanes].reshape(depth, lanes, 4)
    want = total[:rows, :lanes] + np.einsum("mki,kni->mn", x, y)
    config = layout((rows, 4 * lanes), (rows, 4 * depth), (depth, 4 * lanes))
    product_of(compiled, name)(config, total, a, b)
    assert emulator.fault() == ""
    np.testing.assert_array_equal(total[:rows, :lanes], want.astype(np.int32))


@pytest.mark.parametrize("step", [64, 100, 0, -70])
def test_loads_and_stores(emulator, compiled, rng, step):
    def emit(amx, config, source, target, clear, from_step, to_step):
        amx.configure(config)
        amx.load(5, source, from_step)
        amx.store(5, target, to_step)
        amx.clear(5)
        amx.store(5, clear, to_step)

    memory = rng.integers(0, 256, 4000).astype(np.uint8)
    rows, size = 7, 20
    target, clear = np.full((2, 16, 64), 9, np.uint8)
    config = layout(*[(0, 0)] * 5, (rows, size))
    emulator.counts()
    compiled(emit, 4, 2)(config, memory[2000:], target, clear, step, 64)
    assert emulator.fault() == ""
    want = [memory[2000 + r * step : 2000 + r * step + size] for r in range(rows)]
    np.testing.assert_array_equal(target[:rows, :size], want)
    assert (target[rows:] == 9).all()
    assert (target[:, size:] == 9).all()
    assert (clear[:rows, :size] == 0).all()
    counts = emulator.counts()
    assert {x: n for x, n in counts.items() if n} == {
        "ldtilecfg": 1, "tileloadd": 1, "tilestored": 2, "tilezero": 1
    }  # fmt: skip


def test_what_is_configured_is_of_the_thread(emulator, compiled):
    set_up = compiled(lambda amx, config: amx.configure(config), 1)
    ask = compiled(lambda amx, to: amx._run("sttilecfg ($0)", to), 1)
    clear = compiled(lambda amx: amx.clear(3), 0)
    release = compiled(lambda amx: amx.release(), 0)
    config = layout(*[(16, 64)] * 8)
    set_up(config)
    found, other = np.ones((2, 64), np.uint8)
    ask(found)
    thread = threading.Thread(target=lambda: (ask(other), clear()))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(found, config)
    assert not other.any()
    assert emulator.fault() == "tilezero: no configuration (3, 0)"
    release()
    ask(found)
    assert not found.any()


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (layout((16, 64), palette=2), "palette"),
        (layout((17, 64)), "too many rows"),
        (layout((16, 68)), "too long"),
        (layout((16, 0)), "rows without bytes"),
        (layout(*[(16, 64)] * 9), "past the last"),
        (layout((8, 64), (16, 64), (16, 64)), "rows of the sum"),
        (layout((16, 64), (16, 64), (16, 32)), "bytes of the sum"),
        (layout((16, 64), (16, 60), (16, 64)), "lanes of the first"),
        (layout((16, 64), (16, 64)), "without a shape"),
    ],
)
def test_what_the_unit_would_refuse_is_noted(emulator, compiled, config, what):
    tiles = np.zeros((3, 1024), np.uint8)
    product_of(compiled, "bf16ps")(config, *tiles)
    assert what in emulator.fault()
    assert emulator.fault() == ""


def test_other_illegal_instructions_are_not_taken():
    program = (
        f"import sys; sys.path.insert(0, {str(amx_emulator.TESTS)!r}); import amx_emulator, ctypes, mmap\n"
        "amx_emulator.load().install()\n"
        "page = mmap.mmap(-1, 4096, prot=7); page.write(bytes([0x0F, 0x0B]))\n"  # ud2
        "ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert ended.returncode == -signal.SIGILL
