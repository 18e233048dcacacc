"""What storage kinds cost: bytes of a token, and the error of attention against float64.

The rows have a channel 20 times as large as the others, as keys of real models do. That is what `rotate=True` and
full-precision tokens are for.
"""

import numpy as np

import numkv

KV_HEADS, Q_HEADS, DIM = 2, 8, 128
KINDS = {
    "fp32": {"kind": "fp32"},
    "fp16": {"kind": "fp16"},
    "int8": {"kind": "int8"},
    "int8, rotated": {"kind": "int8", "rotate": True},
    "int8 and int4": {"k_kind": "int8", "v_kind": "int4", "rotate": True},
    "int4": {"kind": "int4"},
    "int4, rotated": {"kind": "int4", "rotate": True},
    "int4, recent in full": {"kind": "int4", "full_precision": numkv.FullPrecision(128, 4)},
}


def reference(q, k, v):
    """Attention of one query token in float64."""
    groups = Q_HEADS // KV_HEADS
    k, v = (np.repeat(x.astype(np.float64), groups, axis=1) for x in (k, v))
    scores = np.einsum("hd,thd->ht", q[0], k) / DIM**0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)


def main(tokens=1024):
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, tokens, KV_HEADS, DIM), dtype=np.float32)
    k[..., 5] *= 20
    v[..., 9] *= 20
    q = rng.standard_normal((1, Q_HEADS, DIM), dtype=np.float32)
    q[..., 5] /= 20  # real queries ask little of such a channel
    right = reference(q, k, v)

    errors = {}
    print(f"{'':22} {'bytes a token':>13} {'error':>8}")
    for name, options in KINDS.items():
        layer = numkv.ContiguousLayer(tokens, KV_HEADS, DIM, **options)
        layer.append(k, v)
        out = layer.decode_attention(q)[0]
        errors[name] = np.linalg.norm(out - right) / np.linalg.norm(right)
        print(f"{name:22} {layer.nbytes / tokens:13,.0f} {errors[name]:8.2%}")
    return errors


if __name__ == "__main__":
    main()
