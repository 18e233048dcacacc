"""Rows in octets: eight adjacent elements at a time, which a thread of CUDA keeps in registers.

A row has a few lanes, a power of two, and each lane has two of its octets. With elements of 16 bits, 16 threads of a
warp then read 256 adjacent bytes by one instruction of 16 bytes each. A warp processes several rows at once. Lanes
exchange a row's largest magnitude, or the ends of its groups, by shuffles, for every storage kind. This module reads,
rotates and writes octets; `row_putter` stores whole rows. `append`, `write` and `shift` are composed of these.

The simulator and rows that are not aligned use the kernels that process single elements.

**Codes without divisions.** A row's scale is inverted once. ``q = x * r`` is then corrected by the remainder, ``q + (x
- q * scale) * r``, each in one rounding. The result is the quotient rounded to nearest wherever a code depends on it.
That was tested for all 2**23 significands of a scale, with the four floats next to each of its 128 ties. For INT4's
scales of eight bits it holds everywhere (Markstein, "Computation of elementary functions on the IBM RISC System/6000
processor", IBM J. Res. Dev. 34, 1990). Rows with tiny or infinite scales use divisions.
"""

from __future__ import annotations

import numpy as np
from numba import cuda
from numba.extending import register_jitable

from numkv.kernels.cuda.instructions import (
    global_address,
    greater_float,
    load_global_2,
    load_global_4,
    load_global_8,
    load_global_16,
    other_float,
    pack_bf16,
    pack_fp16,
    permute_bytes,
    shuffle_xor,
    shuffle_xor_float,
    smaller_float,
    store_global,
    store_global_8,
    store_global_16,
    unpack_fp16,
)
from numkv.kernels.cuda.streams import SIMULATED
from numkv.kinds import kind as kind_of
from numkv.rows.convert import bf16_to_float32, codec
from numkv.rows.int4 import (
    LEAST_STEP,
    LOWEST,
    OFFSETS,
    code_at,
    error_at,
    lowest_level,
    place_in,
    place_of_0,
    places_in_1,
)
from numkv.rows.quantize import int8_code, int8_scale, is_finite
from numkv.rows.rmsnorm import root_mean_square
from numkv.rows.rope import rotate_pair

#: Elements that a lane has of a row: two octets.
ELEMENTS = 16
#: Elements of the longest row that a warp keeps in registers.
MAX_DIM = 32 * ELEMENTS


def lanes_for(octets: int, least: int = 4) -> int:
    """Return the binary logarithm of a row's lanes: enough for all of it, with two octets each; at most a warp."""
    lanes = least
    while lanes < 32 and 2 * lanes < octets:
        lanes *= 2
    return lanes.bit_length() - 1


def octets_fit(array, kind: str, dim: int) -> bool:
    """Return whether the rows of an array ``(..., words)`` can be read and written by octets, two a lane.

    Parameters
    ----------
    array : array
        In words of `kind`; its last axis is in order.
    kind : str
        Its kind.
    dim : int
        Elements of a row.
    """
    of = kind_of(kind)
    size, words = max(8, min(16, bytes_of(kind))), array.dtype.itemsize
    if (
        SIMULATED
        or not array.size
        or (of.is_packed and of.scales_per == "row")  # CODE4 and CODE6
        or dim % (32 if of.is_packed else 8)
        or (of.has_scales and dim > MAX_DIM)
    ):
        return False
    steps = tuple(array.strides)
    rows = array.size // max(1, array.shape[-1])
    if steps[-1] != words or any(step % size for step in steps[:-1]) or rows >= 1 << 31:
        return False
    return int(array.gpu_data.device_pointer) % size == 0


def bytes_of(kind: str) -> int:
    """Return the bytes of an octet."""
    of = kind_of(kind)
    return of.words_per_row(8) * of.word.itemsize


def _quad_loader(COMPUTE, KIND):
    """Make the function that reads four numbers of kind fp32 or fp64: ``load(address, x, at)``."""
    REAL, WIDE = np.float64 if COMPUTE == "float64" else np.float32, KIND == "fp64"

    @register_jitable
    def load(address, x, at):
        if WIDE:
            for i in range(2):
                a, b, c, d = load_global_16(address + np.int64(16 * i))
                low = np.uint64(np.uint64(a) | np.uint64(np.uint64(b) << np.uint64(32)))
                high = np.uint64(np.uint64(c) | np.uint64(np.uint64(d) << np.uint64(32)))
                x[at + 2 * i] = REAL(low.view(np.float64))
                x[at + 2 * i + 1] = REAL(high.view(np.float64))
        else:
            a, b, c, d = load_global_16(address)
            x[at], x[at + 1] = REAL(a.view(np.float32)), REAL(b.view(np.float32))
            x[at + 2], x[at + 3] = REAL(c.view(np.float32)), REAL(d.view(np.float32))

    return load


def octet_loader(KIND, COMPUTE="float32"):
    """Make the function that reads an octet: ``load(address, x, at)`` puts its floats at ``x[at:]``; codes for INT8."""
    REAL = np.float64 if COMPUTE == "float64" else np.float32
    FP16, EIGHT = KIND == "fp16", kind_of(KIND).word.itemsize == 1
    of_word, _ = codec("fp32" if kind_of(KIND).has_scales else KIND)

    if KIND in ("fp32", "fp64"):
        load_quad, SIZE = _quad_loader(COMPUTE, KIND), bytes_of(KIND) // 2

        @register_jitable
        def load(address, x, at):
            load_quad(address, x, at)
            load_quad(address + np.int64(SIZE), x, at + 4)

    elif KIND == "int8":

        @register_jitable
        def four(word, x, at):
            # ``code + 128`` is a byte. As the last byte of the float 2**23, it adds its value to it.
            moved = np.uint32(word ^ np.uint32(0x80808080))
            for i in range(4):
                bits = permute_bytes(moved, np.uint32(0x4B000000), np.uint32(0x7440 + i))
                x[at + i] = bits.view(np.float32) - np.float32(8388736.0)

        @register_jitable
        def load(address, x, at):
            a, b = load_global_8(address)
            four(a, x, at)
            four(b, x, at + 4)

    elif EIGHT:

        @register_jitable
        def load(address, x, at):
            words = load_global_8(address)
            for i in range(4):
                by = np.uint32(8 * i)
                x[at + i] = REAL(of_word(np.uint8(np.uint32(words[0] >> by) & np.uint32(255))))
                x[at + 4 + i] = REAL(of_word(np.uint8(np.uint32(words[1] >> by) & np.uint32(255))))

    else:

        @register_jitable
        def two(word, x, at):
            if FP16:
                low, high = unpack_fp16(word)
            else:
                low = np.uint32(word << np.uint32(16)).view(np.float32)
                high = np.uint32(word & np.uint32(0xFFFF0000)).view(np.float32)
            x[at], x[at + 1] = REAL(low), REAL(high)

        @register_jitable
        def load(address, x, at):
            a, b, c, d = load_global_16(address)
            two(a, x, at)
            two(b, x, at + 2)
            two(c, x, at + 4)
            two(d, x, at + 6)

    return load


def octet_storer(KIND):
    """Make the function that writes an octet of a float kind: ``store(x, at, address, scale)``; `scale` for 8 bits."""
    EIGHT, FP16 = kind_of(KIND).word.itemsize == 1, KIND == "fp16"
    _, to_word = codec(KIND)

    @register_jitable
    def bits(x):
        return np.float32(x).view(np.uint32)

    if KIND == "fp64":

        @register_jitable
        def store(x, at, address, scale):
            for i in range(4):
                a, b = np.float64(x[at + 2 * i]), np.float64(x[at + 2 * i + 1])
                low, high = a.view(np.uint64), b.view(np.uint64)
                store_global_16(
                    address + np.int64(16 * i), np.uint32(low), np.uint32(low >> np.uint64(32)),
                    np.uint32(high), np.uint32(high >> np.uint64(32)),
                )  # fmt: skip

    elif KIND == "fp32":

        @register_jitable
        def store(x, at, address, scale):
            store_global_16(address, bits(x[at]), bits(x[at + 1]), bits(x[at + 2]), bits(x[at + 3]))
            store_global_16(
                address + np.int64(16), bits(x[at + 4]), bits(x[at + 5]), bits(x[at + 6]), bits(x[at + 7])
            )  # fmt: skip

    elif EIGHT:

        @register_jitable
        def four(x, at, scale):
            word = np.uint32(0)
            for i in range(4):
                byte = np.uint32(to_word(np.float32(x[at + i]) / scale))
                word = np.uint32(word | np.uint32(byte << np.uint32(8 * i)))
            return word

        @register_jitable
        def store(x, at, address, scale):
            store_global_8(address, four(x, at, scale), four(x, at + 4, scale))

    else:

        @register_jitable
        def two(x, at):
            low, high = np.float32(x[at]), np.float32(x[at + 1])
            return pack_fp16(low, high) if FP16 else pack_bf16(low, high)

        @register_jitable
        def store(x, at, address, scale):
            store_global_16(address, two(x, at), two(x, at + 2), two(x, at + 4), two(x, at + 6))

    return store


@register_jitable
def copy_row(source, to, pieces, lane, lanes):
    """Copy `pieces` times 16 bytes between addresses, two at once."""
    for piece in range(lane, pieces, 2 * lanes):
        other = piece + lanes
        a, b, c, d = load_global_16(source + piece * 16)
        if other < pieces:
            e, f, g, h = load_global_16(source + other * 16)
            store_global_16(to + other * 16, e, f, g, h)
        store_global_16(to + piece * 16, a, b, c, d)


def address_finder(KIND):
    """Make the function that finds a row's addresses, for `row_putter` and `stored_loader`.

    ``find(pool, steps, scale, scale_steps, (block, head, offset))`` computes from addresses and strides of the pool and
    of its scales. It returns the address of the row, that of its scale, and the step between scales of groups.
    """
    PER = kind_of(KIND).scales_per
    HEAD, ROW, GROUPS = PER == "head", PER == "row", PER == "group"

    @register_jitable
    def find(pool, steps, scale, scale_steps, place):
        block, h, offset = place
        row = pool + block * steps[0] + h * steps[1] + offset * steps[2]
        of_scale, step = np.int64(0), np.int64(0)
        if HEAD:
            of_scale = scale + h * scale_steps[0]
        elif ROW or GROUPS:
            of_scale = scale + block * scale_steps[0] + h * scale_steps[1] + offset * scale_steps[2]
            if GROUPS:
                step = np.int64(scale_steps[3])
        return row, of_scale, step

    return find


def row_finder(KIND):
    """Make `address_finder` for arrays: ``find(pool, scale, (block, head, offset))``."""
    at = address_finder(KIND)

    @register_jitable
    def find(pool, scale, place):
        return at(global_address(pool), pool.strides, global_address(scale), scale.strides, place)

    return find


@register_jitable
def report(x, octets, index, token, found, raised):
    """Report a lane's first element that is not finite in its token's word; `index` is that of its row."""
    first = np.int64(0)
    for i in range(7, -1, -1):
        if not is_finite(x[8 + i]):
            first = np.int64(octets[1] * 8 + i)
    for i in range(7, -1, -1):
        if not is_finite(x[i]):
            first = np.int64(octets[0] * 8 + i)
    cuda.atomic.min(found, token & (found.shape[0] - 1), index + first)
    cuda.threadfence_system()
    raised[0] = 1


@register_jitable
def _sum_of_lanes(x, lanes):
    """Return the sum over a row's lanes, in the same order for all of them."""
    step = np.uint32(lanes) >> np.uint32(1)
    while step > np.uint32(0):
        x = x + other_float(x, np.uint32(step))
        step = np.uint32(np.uint32(step) >> np.uint32(1))
    return x


def octet_normaliser(COMPUTE):
    """Make the function that divides a lane's octets by their row's root mean square, and multiplies by weights.

    All lanes of a warp call ``normalise(x, octets, have, weight, dim, eps, lanes)`` together. `weight` is an address.
    """
    REAL, KIND = (np.float64, "fp64") if COMPUTE == "float64" else (np.float32, "fp32")
    load_weights, SIZE = octet_loader(KIND, COMPUTE), bytes_of(KIND)

    @register_jitable
    def normalise(x, octets, have, weight, dim, eps, lanes):
        total = REAL(0)
        if have:
            for i in range(ELEMENTS):
                total += x[i] * x[i]
        total = _sum_of_lanes(total, lanes)
        inverse = REAL(1) / REAL(root_mean_square(total, REAL(dim), REAL(eps)))
        w = cuda.local.array(8, REAL)
        for i in range(2):
            load_weights(weight + octets[i] * SIZE, w, 0)
            for j in range(8):
                x[8 * i + j] = x[8 * i + j] * inverse * w[j]

    return normalise


def octet_turner(COMPUTE, TABLE):
    """Make the function that rotates a lane's octets by tables of type `TABLE`.

    ``turn(x, octets, tables, half, interleaved, sign)``: `tables` are addresses of rows of `half` cosines and sines.
    With `interleaved`, pairs are adjacent elements. Otherwise they are elements at equal places of both octets. Sines
    are multiplied by `sign`.
    """
    REAL, SIZE = np.float64 if COMPUTE == "float64" else np.float32, 8 if TABLE == "float64" else 4
    load = _quad_loader(COMPUTE, "fp64" if TABLE == "float64" else "fp32")

    @register_jitable
    def turn(x, octets, tables, half, interleaved, sign):
        cos, sin = cuda.local.array(8, REAL), cuda.local.array(8, REAL)
        for i in range(2):
            quad = 4 * octets[i] if interleaved else 8 * octets[0] + 4 * i
            turns = quad < half
            at = (quad if turns else np.int64(0)) * SIZE
            load(tables[0] + at, cos, 4 * i)
            load(tables[1] + at, sin, 4 * i)
            for j in range(4):
                cos[4 * i + j] = cos[4 * i + j] if turns else REAL(1)
                sin[4 * i + j] = sin[4 * i + j] * sign if turns else REAL(0)
        if interleaved:
            for i in range(8):
                x[2 * i], x[2 * i + 1] = rotate_pair(x[2 * i], x[2 * i + 1], cos[i], sin[i])
        else:
            for i in range(8):
                x[i], x[8 + i] = rotate_pair(x[i], x[8 + i], cos[i], sin[i])

    return turn


def stored_loader(KIND, COMPUTE="float32"):
    """Make the function that reads a stored octet: ``load(at_row, octet, x, at)`` puts its values at ``x[at:]``.

    `at_row` is the result of `address_finder`.
    """
    PER, SIZE = kind_of(KIND).scales_per, bytes_of(KIND)
    if PER == "group":
        return _load_int4
    SCALED, REAL = PER != "none", np.float64 if COMPUTE == "float64" else np.float32
    load_words = octet_loader(KIND, COMPUTE)

    @register_jitable
    def load(at_row, octet, x, at):
        load_words(at_row[0] + octet * SIZE, x, at)
        if SCALED:
            scale = REAL(load_global_4(at_row[1]).view(np.float32))
            for i in range(8):
                x[at + i] = x[at + i] * scale

    return load


@register_jitable
def _load_int4(at_row, octet, x, at):
    group, quarter = octet >> 2, octet & 3
    word = np.uint16(load_global_2(at_row[1] + group * at_row[2]))
    scale, lowest = bf16_to_float32(word), lowest_level(word)
    low, high = load_global_8(at_row[0] + group * 16 + (quarter & 1) * 8)
    by = np.uint32((quarter >> 1) * 4)
    low = np.uint32(np.uint32(low >> by) & np.uint32(0x0F0F0F0F))
    high = np.uint32(np.uint32(high >> by) & np.uint32(0x0F0F0F0F))
    for i in range(4):  # as the last byte of the float 2**23, a byte adds its value to it
        which, top = np.uint32(0x7440 + i), np.uint32(0x4B000000)
        a = permute_bytes(low, top, which).view(np.float32) - np.float32(8388608.0)
        b = permute_bytes(high, top, which).view(np.float32) - np.float32(8388608.0)
        x[at + i] = np.float32(np.float32(a + lowest) * scale)
        x[at + 4 + i] = np.float32(np.float32(b + lowest) * scale)


def rows_aligned(array, whole: bool = False) -> bool:
    """Return whether every row of an array starts at a multiple of 16 bytes, and its elements are in order.

    With `whole`, whether rows also end at one.
    """
    steps = tuple(array.strides)
    if steps[-1] != array.dtype.itemsize or any(step % 16 for step in steps[:-1]):
        return False
    if whole and array.shape[-1] * array.dtype.itemsize % 16:
        return False
    return SIMULATED or int(array.gpu_data.device_pointer) % 16 == 0


_INFINITY = 0x7F800000
# Finite scales from here on are inverted.
_LEAST = 7.9e-31


@register_jitable
def magnitude(x):
    """Return the float32 bits of the largest magnitude of a lane's elements; those of NaN are above infinity's."""
    largest = np.uint32(0)
    for i in range(ELEMENTS):
        largest = max(largest, np.uint32(np.float32(x[i]).view(np.uint32) & np.uint32(0x7FFFFFFF)))
    return largest


@register_jitable
def _of_row(largest, lanes):
    """Return the largest word among those of a row's lanes."""
    step = np.uint32(lanes) >> np.uint32(1)
    while step > np.uint32(0):
        largest = max(largest, shuffle_xor(largest, np.uint32(step)))
        step = np.uint32(np.uint32(step) >> np.uint32(1))
    return np.uint32(largest)


@register_jitable
def _quotient(x, divisor, inverse):
    """Return ``x / divisor`` rounded to nearest, from the divisor's inverse; see the head of this file."""
    q = np.float32(x * inverse)
    return cuda.fma(cuda.fma(np.float32(-q), divisor, x), inverse, q)


@register_jitable
def _four_codes(x, at, scale, inverse):
    """Return four INT8 codes as a word."""
    # 1.5 * 2**23: the nearest integer is in the last byte of the sum.
    middle = np.float32(12582912.0)
    a = np.float32(_quotient(np.float32(x[at]), scale, inverse) + middle).view(np.uint32)
    b = np.float32(_quotient(np.float32(x[at + 1]), scale, inverse) + middle).view(np.uint32)
    c = np.float32(_quotient(np.float32(x[at + 2]), scale, inverse) + middle).view(np.uint32)
    d = np.float32(_quotient(np.float32(x[at + 3]), scale, inverse) + middle).view(np.uint32)
    which = np.uint32(0x0040)
    return permute_bytes(permute_bytes(a, b, which), permute_bytes(c, d, which), np.uint32(0x5410))


@register_jitable
def _four_divided(x, at, scale):
    word = np.uint32(0)
    for i in range(4):
        byte = np.uint32(np.uint8(int8_code(np.float32(x[at + i]), scale)))
        word = np.uint32(word | np.uint32(byte << np.uint32(8 * i)))
    return word


def row_putter(KIND, COMPUTE="float32"):
    """Make the function that stores a row by its lanes.

    Parameters
    ----------
    KIND : str
        Kind of the pool.
    COMPUTE : {"float32", "float64"}
        Dtype of a row's floats.

    Returns
    -------
    function
        All lanes of a warp call ``put(x, octets, have, lanes, to, largest, look)`` together. A lane has `octets`, a
        pair of numbers, as floats in ``x``. The flags `have` mark those that exist; the others are zeros. `to` has the
        address of the row's words, that of its scale (or its head's), and the step between scales of groups. `largest`
        is at least the result of `magnitude`. With `look` above 0, a row that is not finite is stored as zeros. The
        function returns whether that happened.
    """
    if KIND == "int8":
        return _put_int8
    if KIND == "int4":
        return _put_int4
    SIZE, store, SCALED = bytes_of(KIND), octet_storer(KIND), kind_of(KIND).scales_per == "head"

    @register_jitable
    def put(x, octets, have, lanes, to, largest, look):
        scale = np.float32(1)
        if SCALED and have[0]:
            scale = load_global_4(to[1]).view(np.float32)
        if have[0]:
            store(x, 0, to[0] + np.int64(octets[0]) * np.int64(SIZE), scale)
        if have[1]:
            store(x, 8, to[0] + np.int64(octets[1]) * np.int64(SIZE), scale)
        return False

    return put


@register_jitable
def _put_int8(x, octets, have, lanes, to, largest, look):
    if look <= 0 and largest > np.uint32(_INFINITY):  # a NaN counts as 0
        largest = np.uint32(0)
        for i in range(ELEMENTS):
            of = np.uint32(np.float32(x[i]).view(np.uint32) & np.uint32(0x7FFFFFFF))
            if of <= np.uint32(_INFINITY):
                largest = max(largest, of)
    whole = _of_row(largest, lanes)
    bad = look > 0 and whole >= np.uint32(_INFINITY)
    scale = np.float32(0) if bad else int8_scale(np.uint32(whole).view(np.float32))
    inverse = np.float32(1) / scale
    inverts = scale >= np.float32(_LEAST) and scale < np.float32(np.inf)
    a, b, c, d = np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)
    if inverts:
        a, b = _four_codes(x, 0, scale, inverse), _four_codes(x, 4, scale, inverse)
        c, d = _four_codes(x, 8, scale, inverse), _four_codes(x, 12, scale, inverse)
    elif not bad:
        a, b = _four_divided(x, 0, scale), _four_divided(x, 4, scale)
        c, d = _four_divided(x, 8, scale), _four_divided(x, 12, scale)
    if have[0]:
        store_global_8(to[0] + np.int64(octets[0]) * np.int64(8), a, b)
    if have[1]:
        store_global_8(to[0] + np.int64(octets[1]) * np.int64(8), c, d)
    if have[0] and octets[0] == 0:
        store_global(to[1], scale)
    return bad


# ---------------------------------------------------------------- INT4: see `numkv.rows.int4` for what is computed
#
# A group is four octets. Four adjacent lanes with two octets each have two groups. These lanes redistribute their
# octets, so that a lane has 16 elements of one group: those that share its bytes.
#
#     octets of lanes 0 to 3      a0 b0    a1 b1    a2 b2    a3 b3
#     after redistribution        a0 a2    a1 a3    b0 b2    b1 b3
#
# Two lanes therefore compute each group's scale, and a lane has the low and high nibbles of the 8 bytes that it stores.


@register_jitable
def _group_error(x, at, in_1, of_0):
    """Return the squared error of 8 elements in squared places: integers, the same in any order."""
    total = np.int32(0)
    for i in range(8):
        error = error_at(place_in(x[at + i], in_1, of_0))
        total = np.int32(total + np.int32(error * error))
    return np.uint32(total)


@register_jitable
def _word_near(x, offset):
    bits = np.int32(np.float32(x).view(np.int32) - np.int32(offset * np.int32(1 << 16)))
    unit = np.int32(OFFSETS << 16)
    eighths = np.int32(np.int32(bits + np.int32(OFFSETS << 15)) >> np.int32(19))
    return np.uint16(np.int32(eighths * np.int32(unit >> 16)) + offset)


@register_jitable
def _scale_word(x):
    """Return the scale word of a finite group, which has 16 elements in this lane and in the next one."""
    low = high = x[0]
    for i in range(1, ELEMENTS):
        low, high = smaller_float(low, x[i]), greater_float(high, x[i])
    low = smaller_float(low, shuffle_xor_float(low, np.uint32(1)))
    high = greater_float(high, shuffle_xor_float(high, np.uint32(1)))
    span = np.float32(np.float32(high / np.float32(15)) - np.float32(low / np.float32(15)))
    reach = np.float32(greater_float(high, np.float32(-low)) / np.float32(-LOWEST))
    widest = greater_float(span, reach)
    best, least = np.uint16(0), np.float32(np.inf)
    for i in range(3):
        step = np.float32(widest * np.float32(np.float32(23 + i) / np.float32(25)))
        middle = np.float32(np.float32(high / step) + np.float32(low / step))
        middle = np.float32(middle + np.float32(OFFSETS // 2))
        offset = np.int32(
            smaller_float(greater_float(middle, np.float32(0)), np.float32(OFFSETS - 1))
        )
        word = _word_near(step, offset)
        scale, of_0 = bf16_to_float32(word), place_of_0(word)
        unit = np.float32(scale / widest)
        in_1 = places_in_1(scale)
        total = _group_error(x, 0, in_1, of_0)
        total = np.uint32(total + _group_error(x, 8, in_1, of_0))
        total = np.uint32(total + shuffle_xor(total, np.uint32(1)))
        error = np.float32(np.float32(np.float32(total) * unit) * unit)
        if error < least and step >= np.float32(LEAST_STEP):
            best, least = word, error
    return best


@register_jitable
def _four_int4_codes(x, at, in_1, of_0):
    """Return four INT4 codes as the bytes of a word."""
    codes = np.uint32(0)
    for i in range(4):
        code = np.uint32(code_at(place_in(x[at + i], in_1, of_0)))
        codes = np.uint32(codes | np.uint32(code << np.uint32(8 * i)))
    return codes


@register_jitable
def _not_finite(x, largest):
    """Return as bits which octets are not finite, over all four lanes of this lane's groups."""
    marks = np.uint32(0)
    if largest >= np.uint32(_INFINITY):
        for i in range(8):
            if not is_finite(np.float32(x[i])):
                marks = np.uint32(marks | np.uint32(1))
            if not is_finite(np.float32(x[8 + i])):
                marks = np.uint32(marks | np.uint32(2))
    marks = np.uint32(marks | shuffle_xor(marks, np.uint32(1)))
    return np.uint32(marks | shuffle_xor(marks, np.uint32(2)))


@register_jitable
def _put_int4(x, octets, have, lanes, to, largest, look):
    bad, marks = False, np.uint32(0)
    if look > 0:  # the same for all
        bad = _of_row(largest, lanes) >= np.uint32(_INFINITY)
    else:
        marks = _not_finite(x, largest)
    second = (octets[0] & 2) != 0  # whether this lane has the second octets' group
    y = cuda.local.array(ELEMENTS, np.float32)
    for i in range(8):
        a, b = np.float32(x[i]), np.float32(x[8 + i])
        y[i], given = b if second else a, a if second else b
        y[8 + i] = shuffle_xor_float(given, np.uint32(2))
    word = _scale_word(y)
    if bad:
        word = np.uint16(0)
    elif marks & (np.uint32(2) if second else np.uint32(1)):
        word = np.uint16(0x7FC0)
    scale = bf16_to_float32(word)
    in_1, of_0 = places_in_1(scale), place_of_0(word)
    # Selections in place of branches. Where the scale is 0 or NaN, the last codes result in +0.
    a, b = _four_int4_codes(y, 0, in_1, of_0), _four_int4_codes(y, 4, in_1, of_0)
    c, d = _four_int4_codes(y, 8, in_1, of_0), _four_int4_codes(y, 12, in_1, of_0)
    four = np.uint32(4)  # a lane with the second group has its earlier octet last
    first = np.uint32(
        np.uint32(c | np.uint32(a << four)) if second else np.uint32(a | np.uint32(c << four))
    )
    other = np.uint32(
        np.uint32(d | np.uint32(b << four)) if second else np.uint32(b | np.uint32(d << four))
    )
    is_there = scale > np.float32(0)
    if have[1] if second else have[0]:
        octet = octets[1] if second else octets[0]
        group, part = np.int64(octet >> 2), np.int64(octet & 1)
        store_global_8(
            to[0] + group * np.int64(16) + part * np.int64(8),
            first if is_there else np.uint32(0xFFFFFFFF),
            other if is_there else np.uint32(0xFFFFFFFF),
        )  # fmt: skip
        if part == 0:
            store_global(to[1] + group * to[2], np.uint16(word))
    return bad
