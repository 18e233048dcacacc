"""One row to INT4 codes and scales, and back: groups of 32 elements, each with a scale and an offset of its own.

``value = (code - 7.5 + offset) * scale`` with codes 0 to 15. The scale of a group is a bfloat16, whose range is that of
float32. The last three bits of its word, a number k, also encode the offset ``(k - 3.5) / 2``, as no group needs so
exact a scale. So levels follow groups that are larger on one side at no cost: 4.5 bits an element in all, if `head_dim`
is a multiple of 32.

A group's levels span the range between its smallest and its largest element, or 0.96 or 0.92 of that range. The choice
has the least squared error, the smallest of equals. Elements between the outermost levels, and half a scale beyond, are
off by at most ``scale / 2`` and a 512th of it; others become the outermost level. A group below 1e-34 is stored as
zeros, with scale 0; one with NaN or infinity has scale NaN.

Where an element lies among the levels is an integer, in 512ths of a scale: its *place*. Its code and its error follow
from that. So errors have 11 bits, their squares are summed as integers, and vector code takes twice as many at once.

A group takes 16 bytes: byte j holds element j in its low and element j + 16 in its high nibble. The last group of a row
may be shorter; of n elements, n even, byte j holds element j and element ``j + n / 2``.

Values are exact in float32, and the order of integers' sums makes no difference: all targets find the same words.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from numkv.rows.convert import bf16_to_float32

#: Elements of a group.
GROUP = 32
#: How many offsets there are: the last bits of a scale's word. Each is 1/2 above the one before.
OFFSETS = 8
#: Level of code 0 in units of the scale, with the first of the offsets.
LOWEST = -7.5 - (OFFSETS - 1) / 4

_NAN = 0x7FC0


@register_jitable
def lowest_level(word):
    """The level of code 0, in units of the scale, by the scale's word."""
    offset = np.int32(np.int32(word) & np.int32(OFFSETS - 1))
    return np.float32(np.float32(np.float32(offset) * np.float32(0.5)) + np.float32(LOWEST))


#: Places between levels, and the last one of level 15.
STEPS, STEP_BITS = 512, 9
LAST_PLACE = 16 * STEPS - 1
#: The smallest step between levels. The number of places in a scale over it is still a float32.
LEAST_STEP = 2.0**-117


@register_jitable
def place_of_0(word):
    """The place of 0, by the scale's word; places count from half a scale below the level of code 0 on."""
    offset = np.int32(np.int32(word) & np.int32(OFFSETS - 1))
    return np.int32(
        np.int32(-LOWEST * STEPS + STEPS // 2) - np.int32(offset * np.int32(STEPS // 2))
    )


@register_jitable
def places_in_1(scale):
    """How many places make 1, under a scale that is not 0."""
    return np.float32(np.float32(STEPS) / scale)


@register_jitable
def place_in(x, in_1, of_0):
    """The place of a float32. It is rounded before the sum, which therefore is none of floats that a GPU would fuse."""
    return np.int32(np.int32(np.float32(x * in_1)) + of_0)


@register_jitable
def code_at(place):
    """The code of a place: the nearest level's, or the outermost one's."""
    return np.int32(min(max(place, np.int32(0)), np.int32(LAST_PLACE)) >> np.int32(STEP_BITS))


@register_jitable
def error_at(place):
    """How far a place is from that of its code's level."""
    middle = np.int32(np.int32(code_at(place) * np.int32(STEPS)) + np.int32(STEPS // 2))
    return np.int32(place - middle)


# Loops over a group count from 0 on in a slice that begins with it, and add and compare integers: so they become vector
# code.


@register_jitable
def _squared_error(group, count, in_1, of_0):
    """The squared error of a group, in squared places."""
    total = np.int32(0)
    for i in range(count):
        error = error_at(place_in(np.float32(group[i]), in_1, of_0))
        total = np.int32(total + np.int32(error * error))  # at most 32 squares of 1024
    return total


@register_jitable
def _in_order(bits):
    """An integer for the bits of a float32, in the order of floats, or the bits for that integer."""
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@register_jitable
def _word_near(x, offset):
    """The bfloat16 word nearest to a positive float32 among those that end with the bits of `offset`."""
    bits = np.int32(np.float32(x).view(np.int32) - np.int32(offset * np.int32(1 << 16)))
    unit = np.int32(OFFSETS << 16)
    return np.uint16(np.int32((bits + unit // 2) // unit * OFFSETS) + offset)


@register_jitable
def int4_scale(x, first, count):
    """Return the word of the scale, and of the offset, of the group ``x[first : first + count]``."""
    group = x[first:]
    largest = np.int32(0)  # magnitude's bits; those of NaN are above those of infinity
    lowest = highest = _in_order(np.float32(group[0]).view(np.int32))
    for i in range(count):
        bits = np.float32(group[i]).view(np.int32)
        largest = max(largest, np.int32(bits & np.int32(0x7FFFFFFF)))
        place = _in_order(bits)
        lowest, highest = min(lowest, place), max(highest, place)
    if largest >= np.int32(0x7F800000):
        return np.uint16(_NAN)
    low = np.int32(_in_order(lowest)).view(np.float32)
    high = np.int32(_in_order(highest)).view(np.float32)
    # Levels that reach from end to end; however far a group lies from 0, the largest offset brings them there.
    span = np.float32(np.float32(high / np.float32(15)) - np.float32(low / np.float32(15)))
    reach = np.float32(max(high, np.float32(-low)) / np.float32(-LOWEST))
    widest = max(span, reach)
    best, least = np.uint16(0), np.float32(np.inf)
    for i in range(3):
        step = np.float32(widest * np.float32(np.float32(23 + i) / np.float32(25)))
        if step < np.float32(LEAST_STEP):
            continue
        middle = np.float32(np.float32(high / step) + np.float32(low / step))  # twice that
        middle = np.float32(middle + np.float32(OFFSETS // 2))
        offset = np.int32(min(max(middle, np.float32(0)), np.float32(OFFSETS - 1)))
        word = _word_near(step, offset)
        scale = bf16_to_float32(word)
        # Relative to the group, so that tiny errors do not vanish when they are squared.
        unit = np.float32(scale / widest)
        error = np.float32(_squared_error(group, count, places_in_1(scale), place_of_0(word)))
        error = np.float32(np.float32(error * unit) * unit)
        if error < least:
            best, least = word, error
    return best


@register_jitable
def store_int4_group(x, first, count, words, at):
    """Put the group ``x[first : first + count]`` into ``words[at : at + count // 2]``, and return its scale's word."""
    word = int4_scale(x, first, count)
    scale, of_0, half = bf16_to_float32(word), place_of_0(word), count // 2
    if scale > np.float32(0):
        lower, upper, target, in_1 = x[first:], x[first + half :], words[at:], places_in_1(scale)
        for j in range(half):
            low = code_at(place_in(np.float32(lower[j]), in_1, of_0))
            high = code_at(place_in(np.float32(upper[j]), in_1, of_0))
            target[j] = np.uint8(np.int32(low + np.int32(high * np.int32(16))))
    else:  # 0 or NaN: the codes do not matter; the last ones give +0
        for j in range(half):
            words[at + j] = np.uint8(0xFF)
    return word


@register_jitable
def store_int4(x, words, scales):
    """Put a row of floats, or its first groups, into its bytes and its groups' scales."""
    whole = len(x) // GROUP
    for group in range(whole):  # of a number of elements that is known when this is compiled
        first = group * GROUP
        scales[group] = store_int4_group(x, first, GROUP, words, first // 2)
    first = whole * GROUP
    if first < len(x):
        scales[whole] = store_int4_group(x, first, len(x) - first, words, first // 2)


@register_jitable
def int4_column(byte, upper, dim):
    """Which element of a row of `dim` lies in a byte's lower or `upper` nibble; `dim` for bytes past the row's end."""
    if 2 * byte >= dim:
        return dim
    first = byte // (GROUP // 2) * GROUP
    column = first + byte % (GROUP // 2)
    return column + min(GROUP, dim - first) // 2 if upper else column


@register_jitable
def int4_value(words, scales, d, dim):
    """Element `d` of a stored row of `dim`, float32."""
    group, i = d // GROUP, d % GROUP
    half = min(GROUP, dim - group * GROUP) // 2
    byte = np.int32(words[group * (GROUP // 2) + i % half])
    code = np.int32(byte & np.int32(15)) if i < half else np.int32(byte >> np.int32(4))
    level = np.float32(np.float32(code) + lowest_level(scales[group]))
    return np.float32(level * bf16_to_float32(scales[group]))


@register_jitable
def load_int4(words, scales, out):
    """Put the values of a stored row, or of its first groups, into `out`."""
    dim = len(out)
    for d in range(dim):
        out[d] = int4_value(words, scales, d, dim)
