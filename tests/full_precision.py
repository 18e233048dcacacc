"""A model of caches with full-precision tokens, and every cache behind one interface."""

import naive
import numpy as np
import pytest
import tolerances
from layer_lists import in_full

import numkv
from numkv import targets
from numkv.storage.hadamard import Rotation

F32 = np.float32
HEADS = 2
LAYOUTS = ["cache", "contiguous", "paged", "shared"]
# Kinds of K and V, with a head dim that both targets read in whole chunks of and int4 in groups.
KINDS = {"int8": ("int8", "int8", 8), "int4": ("int4", "int4", 34), "mixed": ("int8", "int4", 32)}


def cases(names, on_cpu, on_cuda):
    """Parametrise a test on both targets, with fewer cases in the simulator: a target and values of `names`.

    Mixed kinds are a kernel of their own on the CPU.
    """
    found = [("cpu", *case) for case in on_cpu] + [("cuda", *case) for case in on_cuda]
    ids = ["-".join(map(str, case)) for case in found]
    found = [
        pytest.param(*case, marks=pytest.mark.nightly if {"cpu", "mixed"} <= {*case} else [])
        for case in found
    ]
    return pytest.mark.parametrize(("target", *names), found, indirect=["target"], ids=ids)


class Model:
    """Rows ``(heads, dim)`` of K and V one by one, and the values that reading them gives."""

    def __init__(self, kinds, window, sinks, rotate=False):
        self.kinds, self.window, self.sinks, self.rotate = kinds[:2], window, sinks, rotate
        self.rows = []  # (k, v, whether it has been quantised)

    def append(self, k, v):
        self.rows += [[a, b, False] for a, b in zip(k, v, strict=True)]
        oldest = len(self.rows) - self.window  # of the window
        for p, row in enumerate(self.rows):
            first = p < self.sinks and not any(done for *_, done in self.rows[:p])
            row[2] = row[2] or (p < oldest and not first)

    def truncate(self, length):
        del self.rows[length:]

    def keep(self, kept):
        self.rows = [list(self.rows[i]) for i in kept]

    @property
    def quantised(self):
        return [p for p, row in enumerate(self.rows) if row[2]]

    def stored(self, which, rows):
        """Return rows ``(tokens, heads, dim)`` after quantisation, in float32."""
        rows = np.asarray(rows)
        if not self.rotate:
            return rows
        found = Rotation(rows.shape[-1]).forward(targets.get("cpu"), rows)
        want = rows.astype(np.float64) @ naive.rotation(Rotation(rows.shape[-1]).signs).T
        tolerances.assert_rows_close(found, want, 1e-6)
        return found

    def values(self, which):
        """``(tokens, heads, dim)`` in float64."""
        found = []
        for row in self.rows:
            x = row[which].astype(F32)
            if row[2] and self.kinds[which] in naive.CODES:
                x = self.stored(which, x[None])[0]
                x = naive.dequantise(*naive.quantise(x, self.kinds[which]))
                if self.rotate:
                    x = x @ naive.rotation(Rotation(x.shape[-1]).signs)
            found.append(x.astype(np.float64))
        return np.array(found)

    def attention(self, q, **options):
        k, v = (self.values(i).swapaxes(0, 1)[None] for i in (0, 1))
        return naive.attention(q, k, v, [len(self.rows)], [0, len(q)], **options)


class Cache:
    """One interface for layers and for the second layer of a `KVCache`."""

    def __init__(self, layout, target, kinds, window, sinks, capacity=None, rotate=False):
        self.layout = layout
        k_kind, v_kind, dim = kinds
        kw = {"k_kind": k_kind, "v_kind": v_kind, "target": target, "rotate": rotate}
        parts = {"full_precision": in_full(window, sinks)}
        if layout == "cache":
            self.it = numkv.KVCache(2, HEADS, dim, max_seq_len=capacity, **kw, **parts)
        elif layout == "contiguous":
            self.it = numkv.ContiguousLayer(capacity or 32, HEADS, dim, **kw, **parts)
        elif layout == "paged":
            blocks = -(-(capacity or 30) // 3)
            self.it = numkv.PagedLayer(blocks, 3, HEADS, dim, **kw, **parts)
        else:  # blocks in no order, beside another layer that keeps other tokens
            pool = numkv.PagedPool(20, 3, HEADS, dim, **kw)
            other, hole = (
                numkv.PagedLayer(4, 3, HEADS, dim, pool=pool, full_precision=numkv.FullPrecision(1))
                for _ in range(2)
            )
            place = targets.get(target)
            for layer, tokens in ((hole, 7), (other, 4)):
                rows = place.asarray(np.zeros((tokens, HEADS, dim), F32))
                layer.append(rows, rows)
            hole.free()
            blocks = -(-(capacity or 30) // 3)
            self.it = numkv.PagedLayer(blocks, 3, HEADS, dim, pool=pool, **parts)

    def append(self, k, v, **kw):
        if self.layout == "cache":
            self.it.append(1, k, v, **kw)
        else:
            self.it.append(k, v, **kw)

    def level(self):
        """Bring the first layer and the length of a `KVCache` up to the second layer."""
        if self.layout == "cache":
            more = len(self.quantised_and_not) - len(self.it)
            if more:
                self.it.append(0, self.it.k(1)[-more:], self.it.v(1)[-more:])
                self.it.advance(more)
        return self.it

    @property
    def quantised_and_not(self):
        return self.it.k(1) if self.layout == "cache" else range(self.it.seq_len)

    @property
    def quantised(self):
        found = self.it.quantised_tokens(1) if self.layout == "cache" else self.it.quantised_tokens
        return list(found)

    def attend(self, q, **kw):
        return (
            self.it.decode_attention(1, q, **kw)
            if self.layout == "cache"
            else self.it.decode_attention(q, **kw)
        )

    def weigh(self, q, **kw):
        return (
            self.it.attention_weights(1, q, **kw)
            if self.layout == "cache"
            else self.it.attention_weights(q, **kw)
        )

    def codes(self, host):
        """Codes and scales by token and head: K's, then V's."""
        it = self.it
        if self.layout == "cache":
            return [host(x(1)) for x in (it.k_codes, it.k_scales, it.v_codes, it.v_scales)]
        table = it.block_table[None] if it.is_paged else [[0]]
        found = (naive.gather(host(x), table, [it.seq_len])[0] for x in (it.k, it.v))
        k, v = (x.swapaxes(0, 1) for x in found)
        found = (naive.gather(host(x), table, [it.seq_len])[0] for x in (it.k_scale, it.v_scale))
        k_scale, v_scale = (x.swapaxes(0, 1) for x in found)
        return [k, k_scale, v, v_scale]


def draw(rng, tokens, dim, dtype=F32):
    """Keys and values, with scales that differ by token."""
    x = rng.standard_normal((2, tokens, HEADS, dim)) * rng.uniform(0.1, 3, (tokens, 1, 1))
    return x.astype(dtype)


def fill(one, model, rng, to, chunks, dim, dtype=F32):
    for n in chunks:
        k, v = draw(rng, n, dim, dtype)
        one.append(to(k), to(v))
        model.append(k, v)


def assert_same(one, model, host):
    """Which tokens are quantised, and their codes and scales, bit for bit."""
    assert one.quantised == model.quantised
    if one.quantised:
        codes = [x[model.quantised] for x in one.codes(host)]
        for i in (0, 1):
            rows = model.stored(i, [model.rows[p][i] for p in model.quantised])
            for got, want in zip(
                codes[2 * i : 2 * i + 2], naive.quantise(rows, model.kinds[i]), strict=True
            ):
                assert np.array_equal(naive.words(got), naive.words(want))
    if one.layout == "cache" and model.rows:  # full-precision rows are what was appended
        for got, which in ((one.it.k(1), 0), (one.it.v(1), 1)):
            got = host(got)
            want = model.values(which)
            assert got.dtype == F32
            floats = [p for p in range(len(model.rows)) if p not in model.quantised]
            assert np.array_equal(got[floats], want[floats])
            off = 1e-5 if model.rotate else 1e-6
            np.testing.assert_allclose(got, want, rtol=off, atol=off)


def assert_attends(one, model, q, to, host, **options):
    moved = {n: to(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    out, lse = (host(x) for x in one.attend(to(q), return_lse=True, **moved))
    want, want_lse = model.attention(q, **options)
    assert out.dtype == q.dtype
    name = next(n for n, dtype in naive.DTYPES.items() if dtype == q.dtype)
    kind = tolerances.widest(*model.kinds)
    tolerances.assert_rows_close(out, want, tolerances.attention(kind, name))
    tolerances.assert_lse_close(
        lse, want_lse, tolerances.INTEGERS if kind in tolerances.QUANTISED else tolerances.LSE
    )
