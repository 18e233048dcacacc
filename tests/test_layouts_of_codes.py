"""docs/layouts.md is true of codes that are no whole bytes; see `test_layouts`."""

import re

import numpy as np
from test_layouts import drawing

import numkv


def test_levels_of_code6():
    """Bits as they are drawn: each element's level of its own, the others at the first."""
    title = "CODE4 and CODE6: levels of a codebook"
    places = re.search(r"^bits +(.*?)  +CODE6", drawing(title), re.M)[1].split()
    assert re.search(r"^of 3 bytes +(.*?)  +the", drawing(title), re.M)[1].split() == [
        "e0",
        "e1",
        "e2",
        "e3",
    ]
    for i, place in enumerate(places):
        codes = np.zeros(8, int)
        codes[i] = 31
        row = np.where(codes, 108, 1).astype(np.float32).reshape(1, 1, 8)
        layer = numkv.ContiguousLayer(1, 1, 8, kind="code6")
        layer.append(row, row)
        unit = int.from_bytes(layer.k.tobytes()[:3], "little")
        low, high = map(int, place.split(".."))
        assert unit >> low & (2 << high - low) - 1 == 31
        assert unit == 31 << low
