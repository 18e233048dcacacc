"""NumPy as one would write it: K and V widened to float32 where they are narrower, two products and a softmax."""

import numpy as np

from perf.peers import FLOATS, Contestant, float_layers, layers_of, nbytes, refuse

NAME = "NumPy"


def versions():
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"NumPy's BLAS {blas['name']} {blas['version']}"


def _attend(q, k, v):
    """q ``(batch, kv heads, group, dim)`` over k, v ``(batch, kv heads, tokens, dim)``."""
    scores = q @ k.swapaxes(2, 3)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p @ v / p.sum(-1, keepdims=True)


def _contestant(problem, call, stacks):
    s = problem.shape
    q = problem.q.reshape(s.batch, s.kv_heads, -1, s.dim) / np.float32(np.sqrt(s.dim))
    layers = [tuple(x[i] for x in stacks) for i in range(len(stacks[0]))]
    return Contestant(
        lambda i: call(q, *layers[i]),
        lambda out: out.reshape(problem.q.shape),
        len(layers),
        nbytes(*layers[0]),
    )


def _floats(kind):
    def call(q, k, v):
        return _attend(q, k.astype(np.float32, copy=False), v.astype(np.float32, copy=False))

    return lambda problem: _contestant(problem, call, float_layers(problem, kind))


def quantised(rows):
    """Codes and a scale for each row, symmetric."""
    scale = np.abs(rows).max(-1, keepdims=True) / np.float32(127)
    return np.rint(rows / scale).astype(np.int8), scale


def _int8(problem):
    def call(q, k, k_scale, v, v_scale):
        return _attend(q, k * k_scale, v * v_scale)

    return _contestant(problem, call, layers_of(*quantised(problem.k), *quantised(problem.v)))


def decode(kind):
    if kind in FLOATS:
        return {"": _floats(kind)}
    if kind == "int8":
        return {"": _int8}
    return {"": refuse(f"no dtype for {kind}")}


def prefill(kind):
    return {}
