"""PyTorch: `scaled_dot_product_attention` in its forms, and the two products written out.

Its kernels take q in the cache's dtype and answer in it.
"""

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from perf.peers import FLOATS, Contestant, float_layers, nbytes, refuse, threads

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
    """``call(*prepare(q, k, v))`` for each layer, `prepare` ahead of time; ``finish(out)`` is shaped as expected."""

    def make(problem):
        k, v = float_layers(problem, kind)
        q = tensor(problem.q.astype(FLOATS[kind]))
        layers = [prepare(q, tensor(a), tensor(b)) for a, b in zip(k, v, strict=True)]
        return Contestant(
            lambda i: call(*layers[i]),
            lambda out: finish(out.float()).reshape(problem.expected.shape).numpy(),
            len(layers),
            nbytes(k[0], v[0]),
        )

    return make


def _unchanged(x):
    return x


def _bmm(q, k, v):
    p = torch.softmax(torch.bmm(q, k.mT), -1)
    return torch.bmm(p, v)


def _fold(q, k, v):
    """The q heads of a kv head as its queries: ``(batch, kv heads, group, dim)``."""
    return q.view(len(k), k.shape[1], -1, q.shape[-1]), k, v


def _fold_for_bmm(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in _fold(q, k, v))
    return q * q.shape[-1] ** -0.5, k, v


def decode(kind):
    if kind not in FLOATS:
        return {"": refuse(f"no attention over {kind} caches")}
    return {
        "SDPA, enable_gqa": _maker(
            kind,
            lambda q, k, v: (q[:, :, None], k, v),
            lambda q, k, v: sdpa(q, k, v, enable_gqa=True),
            _unchanged,
        ),
        "SDPA, folded": _maker(kind, _fold, sdpa, _unchanged),
        "bmm, softmax, bmm, folded": _maker(kind, _fold_for_bmm, _bmm, _unchanged),
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

    def tokens_first(out):
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
