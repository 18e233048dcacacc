"""Kinds that tests put together: each combination is a kernel of its own, and attention takes seconds to compile.

Every kind but those of `LIKE_OTHERS` is stored, read and attended to by itself in every run, on every target. Of the
kinds of K, of V and of queries that may meet beside that, the lists below name those that the CPU compiles in every
run. The others have the marker `nightly` (``python -m pytest --nightly``). On CUDA all of them run always, as the
simulator compiles nothing.
"""

import naive
import pytest

FLOATS = list(naive.DTYPES)
STORED = [*FLOATS, *naive.EVERYWHERE]

#: Kinds of K and of V: codes beside floats, floats beside codes. K's side of the vector code and V's know nothing of
#: each other, so integers and floats stand on each side once; so do both kinds of codes, each beside itself.
APART = [("int8", "fp16"), ("fp32", "int8")]
#: Kinds of both that meet queries in float64; codes, which are integers otherwise, do so in nightly runs.
IN_FLOAT64 = ["fp64"]
#: From where to where rows are rotated, beside those that keep their kind.
CONVERSIONS = [("fp32", "fp64"), ("fp32", "fp16"), ("fp64", "fp32"), ("bf16", "fp32")]
#: Kinds that differ from another one in how an element is converted, which `tests/rows` looks at in every run: where a
#: test asks for one of them on the CPU, in these folders and files, it is for nightly runs. So fp8_e4m3 stands for both
#: kinds of 8 bits, and in objects, which know no kinds, fp32 for fp64, and int4_channel_fine, which has more words, for
#: int4_channel; there on both targets. Of operations whose code for one float kind is
#: that for another with another conversion, one kind of 16 bits and one of the others stand for all.
LIKE_OTHERS = {
    "fp8_e5m2": ("kernels", "objects"),
    "fp64": (
        "objects", "kernels/test_append", "kernels/test_compress", "kernels/test_mass", "kernels/test_shift",
        "test_device",
    ),
    "fp16": ("kernels/test_append_paged", "kernels/test_shift"),
    "bf16": ("kernels/test_compress", "kernels/test_mass", "test_device"),
    "int8": ("test_device",),
    "int4_channel": ("objects",),
}  # fmt: skip
#: Kinds that slow tests compile, not those of every run: conversions of their own, which `tests/rows` looks at by
#: day, and otherwise like others.
LEFT_TO_CI = {
    "fp64": ("kernels",), "code6": ("kernels",), "int4_channel": ("kernels/test_channel",),
    "bf16": ("kernels/test_append", "kernels/test_choice", "kernels/test_hadamard"),
    "int8": ("kernels/test_choice",),
    "fp16": (
        "kernels/test_append", "kernels/test_append_int8", "kernels/test_attention_paged",
        "kernels/test_attention_ranges", "kernels/test_compress", "kernels/test_hadamard", "kernels/test_write",
    ),
}  # fmt: skip


def is_like_others(place, values, kinds=LIKE_OTHERS):
    """Whether parameters of a test in a file (as ``kernels/test_mass``) name one of `kinds` there.

    Some parameters come as tuples.
    """
    named = {
        x
        for value in values
        for x in (value if isinstance(value, tuple) else (value,))
        if isinstance(x, str)
    }
    folder = place.rpartition("/")[0]
    return any(
        kind in named and (folder in places or place in places) for kind, places in kinds.items()
    )


def attending(rows, order):
    """Parameters of a test that attends.

    `order` says what the values of a row are: K's kind (k), V's (v; K's if there is none) and the queries' (q; fp32).
    """
    params = []
    for row in rows:
        kinds = {"q": "fp32"} | dict(zip(order, row, strict=True))
        k, v, q = kinds["k"], kinds.get("v", kinds["k"]), kinds["q"]
        wide = "fp64" in (k, v, q)
        params.append(
            _param(row, k in IN_FLOAT64 or not wide if k == v else (k, v) in APART and not wide)
        )
    return params


def converting(rows):
    """Parameters of a test that turns rows of one kind into another."""
    return [_param(row, row[0] == row[1] or row in CONVERSIONS) for row in rows]


def _param(row, always):
    return pytest.param(*row, marks=[] if always else pytest.mark.nightly)
