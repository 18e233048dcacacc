"""The Hadamard rotation: rows are read once and written once."""

import numpy as np
import pytest

import numkv

HEADS, DIM = 8, 128


@pytest.mark.parametrize("tokens", [1, 8192])
@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
def test_rotate_rows(measure, target, to, rng, kind, tokens):
    x = rng.standard_normal((tokens, HEADS, DIM), np.float32).astype(numkv.kind(kind).dtype)
    signs = rng.choice(np.float32([-1, 1]), DIM)
    given, out = target.words(to(x)), target.empty(x.shape, numkv.kind(kind).word)
    to_signs = to(signs)

    def run():
        target.ops.rotate_rows(given, kind, to_signs, False, out, kind)

    run()
    matrix = np.ones((1, 1))
    while len(matrix) < DIM:
        matrix = np.kron(matrix, [[1, 1], [1, -1]])
    expected = (x[-1].astype(np.float64) * signs) @ matrix / np.sqrt(DIM)
    got = target.to_host(target.typed(out, numkv.kind(kind).dtype))[-1].astype(np.float64)
    assert np.linalg.norm(got - expected) < 4e-3 * np.linalg.norm(expected)
    measure(run, 2 * x.nbytes, "copy")
