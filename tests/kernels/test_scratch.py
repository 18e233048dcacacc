"""Scratch memory on the stack: kernels use nothing in it that they did not write, or it would change their results."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import numkv
from numkv.kernels.cpu.vectors import emit

REPOSITORY = Path(__file__).parents[2]


def results():
    """What layers store, and attention over it: head dims that end within vectors and within groups."""
    rng = np.random.default_rng(0)
    found = []
    for kind in ("int4", "code4", "code6", "fp16"):
        for dim in (64, 120) if kind == "code6" else (30, 62, 64, 126):
            layer = numkv.ContiguousLayer(200, 2, dim, kind=kind)
            layer.append(*rng.standard_normal((2, 130, 2, dim), np.float32))
            scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale} if kind != "fp16" else {}
            found += [np.array(x[:, :, :130]) for x in (layer.k, *scales.values())]
            for dtype, rows in (("float64", 1), ("float32", 1), ("float32", 3), ("float32", 7)):
                q = rng.standard_normal((1, 2 * rows, dim)).astype(dtype)
                found.append(numkv.decode_attention(q, layer.k, layer.v, [130], **scales))
    return found


def main(file):
    """Put NaN into all scratch memory; compare the results with a file's."""
    make, made = emit.scratch_floats, []

    def scratch_floats(builder, element, size):
        place = make(builder, element, size)
        made.append(place)
        with builder.goto_entry_block():
            array = place.operands[0]
            builder.store(array.type.pointee([element(np.nan)] * size), array)
        return place

    emit.scratch_floats = scratch_floats
    for x, y in zip(results(), pickle.loads(Path(file).read_bytes()), strict=True):
        np.testing.assert_array_equal(x, y)
    assert made


@pytest.mark.nightly
def test_nothing_unwritten_is_used(tmp_path, monkeypatch):
    file = tmp_path / "results"
    file.write_bytes(pickle.dumps(results()))
    assert all(np.isfinite(x.astype(float)).all() for x in pickle.loads(file.read_bytes()))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    command = [
        sys.executable,
        "-c",
        f"from tests.kernels import test_scratch as t; t.main({str(file)!r})",
    ]
    subprocess.run(command, check=True, cwd=REPOSITORY)
