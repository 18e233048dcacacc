"""Every object that stores quantised rows, and the codes and scales that are in it afterwards."""

import naive
import numpy as np

import numkv
from numkv.blocks.tables import slot_mapping

SCALES = {kind: naive.DTYPES["bf16" if kind == "int4" else "fp32"] for kind in naive.CODES}
TABLE = np.array([[3, 0, 4, 1]], np.int32)  # of the functional form; block 2 belongs to others


def token_major(buffers, table, tokens):
    """Codes and scales of one sequence by token and head, K's, then V's; from K, V and the scales of both."""
    k, v, k_scale, v_scale = (naive.gather(x, table, [tokens])[0].swapaxes(0, 1) for x in buffers)
    return k, k_scale, v, v_scale


class Stores:
    """Functions that store rows ``(tokens, heads, dim)`` in a quantised kind, and return what `token_major` does.

    `all` has them by name. `to` and `host` move arrays to the target and back; options are those of `append`.
    """

    def __init__(self, kind):
        self.kind = kind
        self.all = {
            "cache": self.in_cache, "contiguous": self.in_contiguous, "paged": self.in_paged,
            "slots": self.in_slots,
        }  # fmt: skip

    def in_cache(self, k, v, to, host, target, **kw):
        kinds = {"kind": self.kind, "target": target}
        cache = numkv.KVCache(2, *k.shape[1:], head_dim_v=v.shape[2], **kinds)
        cache.append(1, to(k), to(v), **kw)
        found = cache.k_codes(1), cache.k_scales(1), cache.v_codes(1), cache.v_scales(1)
        return [host(x) for x in found]

    @staticmethod
    def in_layer(layer, k, v, to, host, **kw):
        for part in (np.s_[:2], np.s_[2:]):  # several at once, at 0 and further on
            layer.append(to(k[part]), to(v[part]), **kw)
        table = layer.block_table[None] if layer.is_paged else [[0]]
        buffers = layer.k, layer.v, layer.k_scale, layer.v_scale
        return token_major(map(host, buffers), table, len(k))

    def in_contiguous(self, k, v, to, host, target, **kw):
        layer = numkv.ContiguousLayer(len(k) + 1, *k.shape[1:], kind=self.kind, target=target)
        return self.in_layer(layer, k, v, to, host, **kw)

    def in_paged(self, k, v, to, host, target, **kw):
        layer = numkv.PagedLayer(len(k), 3, *k.shape[1:], kind=self.kind, target=target)
        return self.in_layer(layer, k, v, to, host, **kw)

    def in_slots(self, k, v, to, host, target, **kw):
        """Store by the functional form, into pools of five blocks; blocks without slots stay as they were."""
        size, heads = -(-len(k) // 4), k.shape[1]
        pools, scales = [], []
        for x in (k, v):
            dim, groups = x.shape[2], ()
            if self.kind == "int4":
                groups = (-(-dim // 32),)
            dim = int(dim * {"int8": 1, "code6": 3 / 8}.get(self.kind, 1 / 2))
            pools.append(to(np.full((5, heads, size, dim), 99, naive.CODES[self.kind])))
            scales.append(to(np.full((5, heads, size, *groups), np.nan, SCALES[self.kind])))
        slots = to(slot_mapping(TABLE, [len(k)], size, new_lens=[len(k)]))
        numkv.paged_append(to(k), to(v), *pools, slots, k_scale=scales[0], v_scale=scales[1], **kw)
        assert np.all(host(pools[0])[2] == 99)
        assert np.all(np.isnan(host(scales[1])[2].astype(np.float32)))
        return token_major(map(host, (*pools, *scales)), TABLE, len(k))

    def assert_exact(self, got, k, v):
        """Codes and scales are right, bit for bit."""
        for rows, (codes, scale) in zip((k, v), (got[:2], got[2:]), strict=True):
            want_codes, want_scale = naive.quantise(rows, self.kind)
            assert codes.dtype == naive.CODES[self.kind]
            assert scale.dtype == SCALES[self.kind]
            assert np.array_equal(naive.words(scale), naive.words(want_scale))
            assert np.array_equal(codes, want_codes)


def assert_int4_no_worse(values, scale, rows):
    """Check that elements in range are off by half a scale and a 512th, others by their distance from the range."""
    x = np.asarray(rows).astype(np.float64)
    low = naive.int4_lowest(scale) * scale.astype(np.float64)
    low, scale = (
        np.repeat(a.astype(np.float64), 32, axis=-1)[..., : x.shape[-1]] for a in (low, scale)
    )
    bound = np.maximum((0.5 + 1 / 512) * scale, np.maximum(low - x, x - (low + 15 * scale)))
    assert np.all(np.abs(values - x) <= bound * (1 + 1e-6) + 2.0**-22 * np.abs(x))
