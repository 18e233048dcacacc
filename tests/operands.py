"""Arguments of operations, in words as kernels see them, and their contents afterwards; imports nothing of numkv."""

import naive
import numpy as np

#: The contents of pool elements that are never written.
UNTOUCHED = 77


def stored(rows, kind):
    """Words and scales of rows ``(..., dim)`` in a kind; scales of float kinds are None."""
    if kind in naive.CODES:
        codes, scale = naive.quantise(rows, kind)
        return codes_words(codes), naive.words(scale) if kind == "int4" else scale
    return words(naive.round_to(rows, kind)), None


def codes_words(codes):
    """Codes as kernels see them: of CODE6 bytes."""
    return codes.view(np.uint8) if codes.dtype == np.int16 else codes


def codes_of(words, kind):
    """Codes as users see them, of words of a kind: the inverse of `codes_words`."""
    return words.view(naive.CODES[kind])


def words(x):
    """16-bit floats as ``uint16``, others as they are."""
    return naive.words(x) if x.dtype.itemsize == 2 else x


def pool(kind, shape, dim):
    """Buffer ``(num_blocks, num_kv_heads, block_size, words)`` and scales of a recognisable filling."""
    buffer, scale = stored(np.zeros((*shape, dim)), kind)
    buffer = np.full(buffer.shape, UNTOUCHED, buffer.dtype)
    if scale is None:
        return buffer, np.zeros((0, 0, 0), np.float32)
    return buffer, np.full(scale.shape, UNTOUCHED, scale.dtype)


def after(buffer, scale, kind, rows, slots):
    """Return a buffer and its scales after ``rows (num_tokens, num_kv_heads, dim)`` went into slots; -1 skips."""
    buffer, scale, size = buffer.copy(), scale.copy(), buffer.shape[2]
    new, new_scale = stored(rows, kind)
    for t, slot in enumerate(slots):
        if slot >= 0:
            buffer[slot // size, :, slot % size] = new[t]
            if new_scale is not None:
                scale[slot // size, :, slot % size] = new_scale[t]
    return buffer, scale


def slots_of(table, start, tokens, block_size):
    """Slots of a sequence's tokens from position `start` on."""
    return [
        int(table[p // block_size]) * block_size + p % block_size
        for p in range(start, start + tokens)
    ]


def assert_same(got, want):
    """The same bits."""
    assert got.dtype == want.dtype
    assert np.array_equal(naive.words(got), naive.words(want))
