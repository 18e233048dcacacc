"""Combinations of kinds that tests run: each is a kernel of its own, and attention takes seconds to compile.

Every kind but those of `LIKE_OTHERS` is stored, read and attended to by itself in every run, on every target. The lists
below name the mixed combinations of K, V and queries that the CPU compiles in every run. The others have the marker
`nightly` (``python -m pytest --nightly``). On CUDA all of them run always, as the simulator compiles nothing.
"""

import naive
import pytest

FLOATS = list(naive.DTYPES)
STORED = [*FLOATS, *naive.EVERYWHERE]

#: Pairs of kinds of K and of V. The vector code of K and that of V are independent, so one pair of codes and floats and
#: one of floats and codes suffice.
APART = [("int8", "fp16"), ("fp32", "int8")]
#: Kinds of K and V that meet queries in float64; codes, which are integers otherwise, do so in nightly runs.
IN_FLOAT64 = ["fp64"]
#: Kinds before and after a rotation, where it changes the kind.
CONVERSIONS = [("fp32", "fp64"), ("fp32", "fp16"), ("fp64", "fp32"), ("bf16", "fp32")]
#: By folder or file: kinds that differ from another one only in the conversion of elements, which `tests/rows` checks
#: in every run. Tests of these kinds on the CPU run nightly. So fp8_e4m3 stands for both 8-bit floats. Objects do not
#: depend on kinds: there, on both targets, fp32 stands for fp64, and int4_channel_fine, which has more words, for
#: int4_channel; in paged caches int8_channel stands for both. Where operations differ only in conversions, one kind of
#: 16 bits and one of the others stand for all.
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
    "int4_channel_fine": ("objects/test_paged_channel",),
}  # fmt: skip
#: The same for the simulator, where kinds by channel take long. So int8_channel stands for all three in objects there.
#: CI interprets PTX of attention with int4_channel.
LIKE_OTHERS_IN_SIMULATOR = {
    "int4_channel": ("kernels/test_channel",), "int4_channel_fine": ("objects",),
}  # fmt: skip
#: Kinds that only slow tests compile: they differ from others only in conversions, which `tests/rows` checks daily.
LEFT_TO_CI = {
    "fp64": ("kernels",), "code6": ("kernels",), "int4_channel": ("kernels/test_channel",),
    "bf16": ("kernels/test_append", "kernels/test_channel", "kernels/test_choice", "kernels/test_hadamard"),
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
    """Return parameters of a test of attention.

    `order` names the values of a row: K's kind (k), V's (v; K's if absent) and the queries' (q; fp32 if absent).
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
    """Return parameters of a test that converts rows of one kind to another."""
    return [_param(row, row[0] == row[1] or row in CONVERSIONS) for row in rows]


def _param(row, always):
    return pytest.param(*row, marks=[] if always else pytest.mark.nightly)
