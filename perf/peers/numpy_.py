"""NumPy as one would write it: K and V widened to float32 where they are narrower, two products and a softmax."""

import numpy as np

from perf.peers import FLOATS, Contestant, float_pieces, nbytes, pieces_of, refuse

NAME = "NumPy"


def versions():
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"NumPy's BLAS {blas['name']} {blas['version']}"


def _attend(q, k, v, hidden):
    """q ``(batch, kv heads, rows, dim)`` over k, v ``(batch, kv heads, tokens, dim)``; `hidden` as `_hidden` has it."""
    scores = q @ k.swapaxes(2, 3)
    if hidden is not None:
        scores[..., -hidden.shape[1] :] += hidden
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p @ v / p.sum(-1, keepdims=True)


def _hidden(queries, group):
    """What is added to the scores of the newest tokens, ``(group * queries, queries)``: they see no later ones."""
    if queries == 1:
        return None
    mask = np.where(np.tri(queries, dtype=bool), np.float32(0), np.float32(-np.inf))
    return np.tile(mask, (group, 1))


def _contestant(problem, call, layers):
    """``call(q, *arrays, hidden)`` for each piece of a layer."""
    s, queries = problem.shape, problem.every_query.shape[1]
    q = problem.every_query.swapaxes(1, 2).reshape(s.batch, s.kv_heads, -1, s.dim)
    q = q / np.float32(np.sqrt(s.dim))
    hidden = _hidden(queries, s.group)
    of_pieces = [q[b : b + 1] for b in range(s.batch)] if s.lengths else [q]

    def run(i):
        return [call(x, *arrays, hidden) for x, arrays in zip(of_pieces, layers[i], strict=True)]

    def floats(out):
        out = np.concatenate(out).reshape(s.batch, s.q_heads, queries, s.dim_v)
        return out.swapaxes(1, 2).reshape(problem.expected.shape)

    return Contestant(run, floats, len(layers), nbytes(*map(list, layers[0])))


def _floats(kind):
    def call(q, k, v, hidden):
        wide = (x.astype(np.float32, copy=False) for x in (k, v))
        return _attend(q, *wide, hidden)

    return lambda problem: _contestant(problem, call, float_pieces(problem, kind))


def quantised(rows):
    """Codes and a scale for each row, symmetric."""
    scale = np.abs(rows).max(-1, keepdims=True) / np.float32(127)
    return np.rint(rows / scale).astype(np.int8), scale


def _int8(problem):
    def call(q, k, k_scale, v, v_scale, hidden):
        return _attend(q, k * k_scale, v * v_scale, hidden)

    parts = []
    for rows in (problem.k, problem.v):
        if isinstance(rows, list):
            parts += map(list, zip(*map(quantised, rows), strict=True))
        else:
            parts += quantised(rows)
    return _contestant(problem, call, pieces_of(*parts))


def decode(kind):
    if kind in FLOATS:
        return {"": _floats(kind)}
    if kind == "int8":
        return {"": _int8}
    return {"": refuse(f"no dtype for {kind}")}


def prefill(kind):
    return {}
