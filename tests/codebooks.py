"""Kinds of codes of a codebook: what is to be known of each, and rows there and back."""

from types import SimpleNamespace

import numpy as np

from numkv.rows import code4, code6

F32 = np.float32


def book_of(module, bits, best, error, step):
    """What is to be known of a kind: its functions, its levels, what theory says of them, how many fill whole bytes."""
    name = f"code{bits}"
    functions = {
        x: getattr(module, x.format(name)) for x in ("{}_level", "{}_value", "load_{}", "store_{}")
    }
    return SimpleNamespace(
        name=name, bits=bits, levels=module.LEVELS, edges=module.EDGES, best=best, error=error, step=step,
        signed=np.array([*module.LEVELS, *(-x for x in module.LEVELS)]),
        **{x.replace("_{}", "").replace("{}_", ""): f for x, f in functions.items()},
    )  # fmt: skip


#: The largest level in deviations, the squared error of the best levels (Max, 1960), and how little rounding adds.
BOOKS = {
    4: book_of(code4, 4, 2.733, (0.0095, 1.001), 2),
    6: book_of(code6, 6, 3.7405, (0.000644, 1.029), 8),
}


def stored(run, book, x):
    """Words and the scale of one row."""
    words, scales = np.full(len(x) * book.bits // 8, 99, np.uint8), np.full(1, 77, F32)
    run(book.store)(x, words, scales)
    return words, scales


def assert_there_and_back(run, book, codes):
    """Rows of levels come back as they were; the words."""
    x = (book.signed[codes] * F32(0.5)).astype(F32)
    words, scales = stored(run, book, x)
    assert scales == 0.5
    out = np.empty(len(codes), F32)
    run(book.load)(words, scales, out)
    assert np.array_equal(out, x)
    return words
