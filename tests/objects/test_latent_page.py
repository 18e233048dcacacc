"""docs/latent.md is true: its Python blocks run, and what they compute is attention over K and V of every head."""

import re
from pathlib import Path

import naive
import numpy as np

import numkv

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "latent.md").read_text()


def test_the_page_runs_and_is_right():
    found: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S):
        exec(block, found)
    x, width = found["projected"], found["latent"]
    cos, sin = (found["tables"][name].astype(np.float64) for name in ("cos", "sin"))
    rows = naive.latent_rows(x, width, 1, cos, sin, found["weight"], 1e-6, range(len(x)))[:, 0]
    q, of_k, of_v = (found[name].astype(np.float64) for name in ("q", "w_uk", "w_uv"))
    for h in range(found["heads"]):
        k = np.concatenate([rows[:, :width] @ of_k[h].T, rows[:, width:]], -1)
        v = rows[:, :width] @ of_v[h].T
        for t in range(len(q)):
            seen = len(rows) - len(q) + t + 1
            want, _ = naive.attention_row(q[t, h], k[:seen], v[:seen], found["scale"], 0, None)
            assert np.linalg.norm(found["out"][t, h] - want) < 1e-5 * np.linalg.norm(want)


def test_bytes_of_rows():
    """The table's."""
    for kind, size in (
        ("fp32", 2304),
        ("bf16", 1152),
        ("fp8_e4m3", 576),
        ("int8", 580),
        ("int4", 324),
    ):
        layer = numkv.ContiguousLayer(100, 1, 576, head_dim_v=512, kind=kind, v_kind="latent")
        assert layer.nbytes - 100 * size in (0, 4)
        assert str(size) in PAGE
