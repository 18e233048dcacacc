"""PyTorch: `scaled_dot_product_attention` in its forms, and the two products written out.

Its kernels take q in the cache's dtype and answer in it.
"""

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from perf.peers import FLOATS, Contestant, float_bytes, float_pieces, refuse, threads

NAME = "PyTorch"

torch.set_num_threads(threads())
torch.set_grad_enabled(False)


def versions():
    return f"PyTorch {torch.__version__}"


def tensor(x):
    """The same memory as a tensor; bfloat16 goes as its bits, which is all that the two libraries share."""
    if x.dtype == FLOATS["bf16"]:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def _maker(kind, prepare, call, finish):
    """``call(*prepare(q, k, v))`` for each layer and piece, `prepare` ahead of time.

    q is ``(batch, queries, heads, dim)``. ``finish(out)`` is shaped as expected, but for the batch's axis.
    """

    def make(problem):
        shape = problem.shape
        q = tensor(problem.every_query.astype(FLOATS[kind]))
        of_pieces = q.split(1) if shape.lengths else [q]
        layers = [
            [prepare(x, tensor(k), tensor(v)) for x, (k, v) in zip(of_pieces, pieces, strict=True)]
            for pieces in float_pieces(problem, kind)
        ]
        run = lambda i: [call(*piece) for piece in layers[i]]  # noqa: E731

        def floats(outs):
            outs = [finish(out.float(), problem).reshape(-1) for out in outs]
            return torch.cat(outs).reshape(problem.expected.shape).numpy()

        return Contestant(run, floats, len(layers), float_bytes(problem, kind))

    return make


def _bmm(q, k, v, hidden):
    scores = torch.bmm(q, k.mT)
    if hidden is not None:
        scores[..., -hidden.shape[1] :] += hidden
    return torch.bmm(torch.softmax(scores, -1), v)


def _hidden(queries, columns, like):
    """What is added to scores, ``(queries, columns)``: earlier ones of the newest tokens see no later ones."""
    if queries == 1:
        return None
    mask = torch.full((queries, columns), -torch.inf, dtype=like.dtype)
    return mask.triu(columns - queries + 1)


def _fold(q, k, v, columns=None):
    """The q heads of a kv head as its queries: ``(batch, kv heads, group * queries, dim)``."""
    batch, queries, heads, dim = q.shape
    kv_heads = k.shape[1]
    hidden = _hidden(queries, columns or k.shape[2], q)
    if hidden is not None:
        hidden = hidden.repeat(heads // kv_heads, 1)
    return _heads_first(q).reshape(batch, kv_heads, -1, dim), k, v, hidden


def _fold_for_bmm(q, k, v):
    *rows, hidden = _fold(q, k, v, q.shape[1])
    q, k, v = (x.flatten(0, 1) for x in rows)
    return q * q.shape[-1] ** -0.5, k, v, hidden


def _queries_first(out, problem):
    """Any order of ``(batch, heads, queries, dim)`` as ``(batch, queries, heads, dim)``."""
    heads, queries = problem.shape.q_heads, problem.every_query.shape[1]
    return out.reshape(-1, heads, queries, out.shape[-1]).transpose(1, 2)


def decode(kind):
    if kind not in FLOATS:
        return {"": refuse(f"no attention over {kind} caches")}
    return {
        "SDPA, enable_gqa": _maker(
            kind,
            lambda q, k, v: (_heads_first(q), k, v, _hidden(q.shape[1], k.shape[2], q)),
            lambda q, k, v, mask: sdpa(q, k, v, attn_mask=mask, enable_gqa=True),
            _queries_first,
        ),
        "SDPA, folded": _maker(
            kind, _fold, lambda q, k, v, mask: sdpa(q, k, v, attn_mask=mask), _queries_first
        ),
        "bmm, softmax, bmm, folded": _maker(kind, _fold_for_bmm, _bmm, _queries_first),
    }


def _heads_first(q):
    return q.transpose(1, 2).contiguous()


def _expand(q, k, v, copy):
    """K and V for each q head: copied ahead of time, or as views with a stride of 0."""
    q = _heads_first(q)
    group = q.shape[1] // k.shape[1]
    k, v = (x[:, :, None].expand(-1, -1, group, -1, -1) for x in (k, v))
    if copy:
        return q, k.flatten(1, 2), v.flatten(1, 2)
    return q[0].unflatten(0, (-1, group)), k[0], v[0]


def prefill(kind):
    if kind not in FLOATS:
        return {"": refuse(f"no attention over {kind} caches")}

    def tokens_first(out, _):
        return out.flatten(end_dim=-3).transpose(0, 1).contiguous()

    return {
        "SDPA, enable_gqa": _maker(
            kind,
            lambda q, k, v: (_heads_first(q), k, v),
            lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True),
            tokens_first,
        ),
        "SDPA, K and V copied for each q head ahead": _maker(
            kind,
            lambda q, k, v: _expand(q, k, v, True),
            lambda q, k, v: sdpa(q, k, v, is_causal=True),
            tokens_first,
        ),
        "SDPA, groups as batch, K and V as views": _maker(
            kind,
            lambda q, k, v: _expand(q, k, v, False),
            lambda q, k, v: sdpa(q, k, v, is_causal=True),
            tokens_first,
        ),
    }
