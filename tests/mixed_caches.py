"""A `PagedKVCache` whose layers differ, beside a model of plain dictionaries of rows."""

import zlib
from typing import NamedTuple

import naive
import numpy as np
import tolerances

import numkv

GROUP = 2  # q heads of a kv head


class Layer(NamedTuple):
    heads: int
    dim: int
    dim_v: int
    kind: str = "fp32"
    window: int = -1
    chunk: int = 0
    source: int | None = None


#: Full layers, a wider one that slides, one in another kind within chunks, and two that read others.
LAYERS = [
    Layer(2, 8, 8),
    Layer(1, 16, 16, window=3),
    Layer(2, 8, 8, "int8", chunk=4),
    Layer(2, 8, 8, source=0),
    Layer(2, 8, 8),
    Layer(1, 16, 16, window=3, source=1),
    Layer(1, 16, 8, window=3),
]


def specs_of(layers=LAYERS, states=None, **alike):
    """Return the `LayerSpec` of each layer."""
    return [
        numkv.LayerSpec(
            x.heads, x.dim, head_dim_v=x.dim_v, kind=x.kind, window_left=x.window, chunk_size=x.chunk or None,
            states=(states or {}).get(i, ()), **alike,
        ) if x.source is None else numkv.LayerSpec(shares=x.source, states=(states or {}).get(i, ()))
        for i, x in enumerate(layers)
    ]  # fmt: skip


def make(layers=LAYERS, *, num_blocks=96, block_size=4, states=None, alike=(), **options):
    specs = specs_of(layers, states, **dict(alike))
    return numkv.PagedKVCache(layers=specs, num_blocks=num_blocks, block_size=block_size, **options)


def row(number, layer, text):
    """K and V of the last token of a text in a layer."""
    seed = zlib.crc32(repr((number, list(map(int, text)))).encode())
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((layer.heads, dim), np.float32) for dim in (layer.dim, layer.dim_v)]


class Plain:
    """A model of sequences: each has a text, and a list of rows for each layer."""

    def __init__(self, layers=LAYERS):
        self.layers, self.texts, self.rows = layers, {}, {}

    def extend(self, seq, tokens):
        for token in tokens:
            self.texts[seq] = [*self.texts.get(seq, []), token]
            for number, layer in enumerate(self.layers):
                if layer.source is None:
                    found = row(number, layer, self.texts[seq])
                    self.rows.setdefault(seq, {}).setdefault(number, []).append(found)

    def new_rows(self, number, seq, tokens):
        """Return K and V of tokens that follow a sequence's text."""
        text = self.texts.get(seq, [])
        found = [
            row(number, self.layers[number], text + tokens[: i + 1]) for i in range(len(tokens))
        ]
        layer = self.layers[number]
        empty = [np.empty((0, layer.heads, dim), np.float32) for dim in (layer.dim, layer.dim_v)]
        return [np.stack([x[i] for x in found]) if found else empty[i] for i in range(2)]

    def fork(self, old, new):
        self.keep(old, range(len(self.texts[old])), new)

    def keep(self, seq, kept, to=None):
        kept = list(kept)
        own = self.rows.get(seq, {})
        self.rows[seq if to is None else to] = {n: [x[i] for i in kept] for n, x in own.items()}
        self.texts[seq if to is None else to] = [self.texts[seq][i] for i in kept]

    def attended(self, seq, number, q, position=None):
        """Return naive attention of a token's query over the rows that it sees."""
        layer = self.layers[number]
        source = number if layer.source is None else layer.source
        rows = self.rows[seq][source]
        position = len(rows) - 1 if position is None else position
        first = 0 if layer.window < 0 else max(0, position - layer.window)
        if layer.chunk:
            first = position // layer.chunk * layer.chunk
        k, v = (np.stack([x[i] for x in rows[first : position + 1]]) for i in range(2))
        stored = [naive.round_to(x, layer.kind) if layer.kind in naive.DTYPES else
                  naive.dequantise(*naive.quantise(x, layer.kind)) for x in (k, v)]  # fmt: skip
        k, v = (x.transpose(1, 0, 2)[None] for x in stored)
        return naive.attention(q[None], k, v, [position + 1 - first])[0][0]


def queries(layer, n):
    rng = np.random.default_rng(n)
    return rng.standard_normal((n, layer.heads * GROUP, layer.dim), np.float32)


def grow(cache, to, plain, seqs, texts, *, named=True, accepted=None, host=None):
    """Append texts to sequences, and check the attention of every new token."""
    step = cache.reserve(seqs, [len(x) for x in texts])
    for number, layer in enumerate(plain.layers):
        if layer.source is None:
            new = [plain.new_rows(number, s, list(t)) for s, t in zip(seqs, texts, strict=True)]
            step.append(number, *(to(np.concatenate([x[i] for x in new])) for i in range(2)))
    outs = {}
    if host is not None:
        for number, layer in enumerate(plain.layers):
            outs[number] = host(step.attention(number, to(queries(layer, step.num_tokens))))
    ids = [token for text in texts for token in text]
    cache.commit(step, accepted, token_ids=ids if named else None)
    at = 0
    for i, (seq, text) in enumerate(zip(seqs, texts, strict=True)):
        begin = len(plain.texts.get(seq, []))
        took = len(text) if accepted is None else accepted[i]
        plain.extend(seq, list(text)[:took])
        for number, layer in enumerate(plain.layers):
            q = queries(layer, step.num_tokens)
            for j in range(took if outs else 0):
                want = plain.attended(seq, number, q[at + j], begin + j)
                bound = tolerances.attention(layer.kind, "fp32")
                tolerances.assert_rows_close(outs[number][at + j], want, bound)
        at += len(text)


def check(cache, to, host, plain):
    """Check the attention of every sequence in every layer."""
    cache.check()
    seqs = [seq for seq in cache.sequences if cache.length(seq)]
    for seq in cache.sequences:
        assert cache.length(seq) == len(plain.texts[seq])
    if not seqs:
        return
    for number, layer in enumerate(plain.layers):
        q = queries(layer, len(seqs))
        out = host(cache.decode_attention(number, seqs, to(q)))
        for i, seq in enumerate(seqs):
            bound = tolerances.attention(layer.kind, "fp32")
            tolerances.assert_rows_close(out[i], plain.attended(seq, number, q[i]), bound)
