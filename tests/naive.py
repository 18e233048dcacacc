"""The oracle: all that numkv computes, in plain NumPy float64, one loop at a time.

It imports nothing of numkv (``test_layers.py`` checks that) and is simple: it never reads a row that a query does not
see, as it slices out the visible range.
"""

import ml_dtypes
import numpy as np

DTYPES = {
    "fp64": np.dtype(np.float64),
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


def words(x):
    """The bits of an array, as unsigned integers: to compare NaN payloads."""
    x = np.ascontiguousarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def round_to(x, kind):
    """Round to nearest, ties to even."""
    with np.errstate(over="ignore", invalid="ignore"):  # a signalling NaN is invalid
        return np.asarray(x).astype(DTYPES[kind])


def int8_quantise(x):
    """Codes and scales of rows ``(..., d)``: ``max |x| / 127`` in float32, nearest code, ties to even."""
    x = np.asarray(x).astype(np.float32)
    scale = np.abs(x).max(axis=-1) / np.float32(127)
    quotient = x / np.where(scale > 0, scale, np.float32(1))[..., None]
    codes = np.clip(np.rint(quotient), -127, 127) * (scale > 0)[..., None]
    return codes.astype(np.int8), scale


def int8_dequantise(codes, scale):
    """Float64 values of codes ``(..., d)`` with scales ``(...)``."""
    return codes.astype(np.float64) * np.asarray(scale).astype(np.float64)[..., None]


INT4_GROUP = 32


def int4_lowest(scale):
    """Return the value of code 0 in units of the scale: the last three bits of a bfloat16 scale move it by halves."""
    return (words(scale) & 7).astype(np.float32) / 2 - np.float32(9.25)


def int4_quantise(x):
    """Codes, two to a byte, and bfloat16 scales of rows ``(..., d)``, for each 32 elements of a row.

    Levels span a group from end to end, or 0.96 or 0.92 of that, whichever has the least error; the first of equals.
    Elements are cut to 512ths of a scale. Errors are squared as integers, so the order of adding does not matter.
    """
    x = np.asarray(x).astype(np.float32)
    codes, scales = [], []
    for first in range(0, x.shape[-1], INT4_GROUP):
        group = x[..., first : first + INT4_GROUP]
        low, high = group.min(axis=-1), group.max(axis=-1)
        span = high / np.float32(15) - low / np.float32(15)
        span = np.maximum(span, np.maximum(high, -low) / np.float32(9.25))
        best, least = np.zeros(span.shape, DTYPES["bf16"]), np.full_like(span, np.inf)
        for f in (23, 24, 25):
            step = span * (np.float32(f) / np.float32(25))
            fits = step >= np.float32(2.0**-117)
            step = np.where(fits, step, np.float32(1))
            middle = np.where(fits, high / step + low / step, np.float32(0))
            offset = np.clip(np.floor(middle + np.float32(4)), 0, 7).astype(np.int64)
            units = np.floor((words(step).astype(np.int64) - (offset << 16)) / (8 << 16) + 0.5)
            scale = (8 * units.astype(np.int64) + offset).astype(np.uint16).view(DTYPES["bf16"])
            code, error = int4_fit(group, scale)
            unit = scale.astype(np.float32) / np.where(fits, span, np.float32(1))
            error = (error**2).sum(axis=-1).astype(np.float32) * unit * unit
            better = fits & (error < least)
            best, least = np.where(better, scale, best), np.where(better, error, least)
        code, _ = int4_fit(group, np.where(best > 0, best, DTYPES["bf16"].type(1)))
        code[best == 0] = 15
        half = code.shape[-1] // 2
        codes.append(code[..., :half] | code[..., half:] << 4)
        scales.append(best)
    return np.concatenate(codes, axis=-1), np.stack(scales, axis=-1)


def int4_fit(group, scale):
    """Codes of a group under a scale, and their errors in 512ths of it."""
    lowest = int4_lowest(scale)[..., None].astype(np.float64)
    in_1 = np.float32(512) / scale.astype(np.float32)[..., None]
    places = np.trunc(group * in_1).astype(np.float64) / 512 - lowest
    code = np.clip(np.floor(places + 0.5), 0, 15)
    return code.astype(np.uint8), np.rint(512 * (places - code)).astype(np.int64)


def int4_dequantise(codes, scale):
    """Float64 values of bytes ``(..., d / 2)`` with scales ``(..., groups)``."""
    values = []
    lowest = int4_lowest(scale)
    for group in range(scale.shape[-1]):
        first = group * INT4_GROUP // 2
        pairs = codes[..., first : first + INT4_GROUP // 2]
        code = np.concatenate([pairs & 15, pairs >> 4], axis=-1).astype(np.float64)
        level = code + lowest[..., group, None]
        values.append(level * scale[..., group, None].astype(np.float64))
    return np.concatenate(values, axis=-1)


CODE4_LEVELS = np.array([5, 15, 25, 36, 48, 62, 79, 104])


#: Magnitudes of levels by bits of a code, and the scale that fits normal numbers times the largest of them.
CODE_LEVELS = {
    4: (CODE4_LEVELS, 2.733),
    6: (
        np.array([*range(1, 30, 2), 32, 34, 37, 39, 42, 45, 48, 51, 54, 58, 62, 66, 71, 77, 84, 93, 108]),
        3.7405,
    ),
}  # fmt: skip


def code4_quantise(x):
    """Codes, two to a byte, and float32 scales of rows ``(..., d)``."""
    codes, scale = codebook_quantise(x, 4)
    return codes[..., ::2] | codes[..., 1::2] << 4, scale


def code6_quantise(x):
    """Codes, eight to three int16, and float32 scales of rows ``(..., d)``."""
    codes, scale = codebook_quantise(x, 6)
    bits = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :6]
    packed = np.packbits(
        bits.reshape(*codes.shape[:-1], 6 * codes.shape[-1]), axis=-1, bitorder="little"
    )
    return packed.view(np.int16), scale


def code6_unpack(codes):
    """The numbers of codes, uint8 ``(..., d)``."""
    bits = np.unpackbits(np.ascontiguousarray(codes).view(np.uint8), axis=-1, bitorder="little")
    bits = bits.reshape(*codes.shape[:-1], -1, 6)
    return np.packbits(bits, axis=-1, bitorder="little")[..., 0]


def codebook_quantise(x, bits):
    """Codes and float32 scales of rows ``(..., d)``: the sign above the number of a magnitude.

    Of three scales the first with the least squared error is taken, then improved by least squares. Numbers are cut to
    integers before they are added, so the order does not matter.
    """
    f32 = np.float32
    levels, of_normal = CODE_LEVELS[bits]
    x = np.asarray(x).astype(f32)
    size = np.abs(x)
    top = size.max(axis=-1, keepdims=True)
    fits = (top >= f32(1e-30)) & np.isfinite(top)
    top, size = np.where(fits, top, f32(1)), np.where(fits, size, f32(1))
    parts = (size * (f32(32767) / top)).astype(np.int64)
    mean = (parts**2).sum(-1, keepdims=True).astype(f32) / (f32(x.shape[-1]) * f32(32767.0**2))
    of_normal = top * np.sqrt(mean) * f32(of_normal / levels[-1])
    of_top = top / f32(levels[-1])
    best, least = np.zeros_like(top), np.full_like(top, np.inf)
    for scale in (of_normal, (of_normal + of_top) * f32(0.5), of_top):
        place = sixteenths(size, scale)
        off = (place - 16 * nearest_level(place, levels)).clip(max=32767)
        unit = scale / of_top
        error = (off**2).sum(-1, keepdims=True).astype(f32) * unit * unit
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    place = sixteenths(size, best)
    level = nearest_level(place, levels)
    along = (place * level).sum(-1, keepdims=True)
    best = best * (along.astype(f32) / ((level**2).sum(-1, keepdims=True).astype(f32) * f32(16)))
    codes = np.searchsorted(levels, nearest_level(sixteenths(size, best), levels))
    codes = codes + 2 ** (bits - 1) * np.signbit(x)
    codes = np.where(fits, codes, 0).astype(np.uint8)
    scale = np.where(
        fits, best, np.where(np.isfinite(np.abs(x).max(-1, keepdims=True)), f32(0), f32(np.nan))
    )
    return codes, scale[..., 0]


def sixteenths(size, scale):
    """Magnitudes in sixteenths of a scale, cut to integers."""
    return (size * (np.float32(16) / scale)).clip(max=np.float32(1 << 20)).astype(np.int64)


def nearest_level(place, levels):
    """Return the nearest level to magnitudes in sixteenths of the scale; of two equally near, the larger."""
    return levels[np.searchsorted(8 * (levels[1:] + levels[:-1]), place, side="right")]


def code4_dequantise(codes, scale):
    """Float64 values of bytes ``(..., d / 2)`` with scales ``(...)``."""
    both = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    levels = np.concatenate([CODE4_LEVELS, -CODE4_LEVELS]).astype(np.float64)
    return levels[both] * np.asarray(scale).astype(np.float64)[..., None]


def code6_dequantise(codes, scale):
    """Float64 values of int16 words ``(..., 3 d / 8)`` with scales ``(...)``."""
    levels = np.concatenate([CODE_LEVELS[6][0], -CODE_LEVELS[6][0]]).astype(np.float64)
    return levels[code6_unpack(codes)] * np.asarray(scale).astype(np.float64)[..., None]


CHANNEL_TOKENS = 64


def channel_quantise(x, bits):
    """Codes, scales and zero points of token groups ``(..., 64, d)``: bfloat16 ``(..., d)`` each; of 4 bits unpacked.

    Zero points lie between a channel's extremes, scales are rounded up, and all levels are at half steps.
    """
    f32, bf16 = np.float32, DTYPES["bf16"]
    x = np.asarray(x).astype(f32)
    with np.errstate(all="ignore"):
        low, high = x.min(axis=-2), x.max(axis=-2)
        zero = (low / f32(2) + high / f32(2) + f32(0)).astype(bf16)
        at = zero.astype(f32)
        half = np.maximum(high - at, at - low) + f32(0)
        lost = ~(half <= f32(3.0e38)) | ~np.isfinite(x).all(axis=-2)
        exact = half / f32(2 ** (bits - 1) - 0.5)
        bits_of = np.where(lost, f32(0), exact).view(np.uint32).astype(np.uint64)
        scale = ((bits_of + 0xFFFF) >> 16).astype(np.uint16).view(bf16)
        scale, zero = np.where(lost, bf16.type(np.nan), scale), np.where(lost, bf16.type(0), zero)
        step = scale.astype(f32)[..., None, :]
        place = np.floor((x - zero.astype(f32)[..., None, :]) / step)
        codes = np.clip(place, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return np.where(step > 0, codes, 0).astype(np.int8), scale, zero


def channel_dequantise(codes, scale, zero):
    """Float64 values of unpacked codes ``(..., 64, d)``."""
    scale, zero = (x.astype(np.float64)[..., None, :] for x in (scale, zero))
    return zero + scale * (codes.astype(np.float64) + 0.5)


def channel_words(codes, kind):
    """Codes as they are stored: of 4 bits two to a byte, neighbours together, each 8 more."""
    if kind == "int8_channel":
        return codes
    codes = (codes + 8).astype(np.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def channel_codes(words, kind):
    """The inverse of `channel_words`."""
    if kind == "int8_channel":
        return words
    both = np.stack([words & 15, words >> 4], axis=-1)
    both = both.reshape(*words.shape[:-1], 2 * words.shape[-1])
    return both.astype(np.int8) - np.int8(8)


def channel_bits(kind):
    """Bits of a code."""
    return 8 if kind == "int8_channel" else 4


def channel_fine(kind):
    """Channels of a group that have a second code."""
    return 8 if kind == "int4_channel_fine" else 0


def channel_group(x, kind):
    """Return words of token groups ``(..., 64, d)``, and scales and zeros of channels as 16-bit words ``(..., 2 d)``.

    Second codes follow a row's codes, and their channels the zero points.
    """
    f32, fine = np.float32, channel_fine(kind)
    codes, scale, zero = channel_quantise(x, channel_bits(kind))
    shared = [words(scale), words(zero)]
    if fine:
        size = np.where(np.isnan(scale), -1, scale.astype(f32))
        wide = np.sort(np.argsort(-size, axis=-1, kind="stable")[..., :fine], axis=-1)
        x = np.asarray(x).astype(f32)
        x, step, at = (np.take_along_axis(y, wide[..., None, :], -1)
                       for y in (x, scale.astype(f32)[..., None, :], zero.astype(f32)[..., None, :]))  # fmt: skip
        with np.errstate(all="ignore"):
            both = np.clip(np.floor((x - at) / step * f32(16)), -128, 127)
        second = np.where(step > 0, both, 0).astype(np.int64) % 16
        codes = np.concatenate([codes, (second - 8).astype(np.int8)], axis=-1)
        shared.append(wide.astype(np.uint16))
    return channel_words(codes, kind), np.concatenate(shared, axis=-1)


def channel_values(stored, shared, kind):
    """Return float64 values of words ``(..., w)``; scales and zeros of channels are broadcast but for the last axis."""
    fine = channel_fine(kind)
    d = (shared.shape[-1] - fine) // 2
    codes = channel_codes(stored, kind).astype(np.float64)
    scale, zero = (
        np.broadcast_to(x.view(DTYPES["bf16"]).astype(np.float64), (*codes.shape[:-1], d))
        for x in (shared[..., :d], shared[..., d : 2 * d])
    )
    place = codes[..., :d] + 0.5
    if fine:
        wide = np.broadcast_to(shared[..., 2 * d :].astype(np.int64), (*codes.shape[:-1], fine))
        parts = np.take_along_axis(codes, wide, -1) + (codes[..., d:] + 8 + 0.5) / 16
        np.put_along_axis(place, wide, parts, -1)
    return zero + scale * place


def rotation(signs):
    """The matrix that a row is multiplied by before it is stored, as a column: signs, then Walsh-Hadamard in blocks."""
    block = len(signs) & -len(signs)
    hadamard = np.ones((1, 1))
    while len(hadamard) < block:
        hadamard = np.kron(hadamard, [[1.0, 1.0], [1.0, -1.0]])
    return np.kron(np.eye(len(signs) // block), hadamard / np.sqrt(block)) @ np.diag(signs)


CODES = {
    "int8": np.dtype(np.int8), "code6": np.dtype(np.int16), "int4": np.dtype(np.uint8), "code4": np.dtype(np.uint8),
}  # fmt: skip
#: Signs for tests of every kind: the same for all, as other signs have tests of their own.
EVERYWHERE = ("int8", "int4")


def quantise(x, kind):
    """Codes and scales of rows in a quantised kind."""
    return {
        "int8": int8_quantise, "int4": int4_quantise, "code4": code4_quantise, "code6": code6_quantise,
    }[kind](x)  # fmt: skip


def dequantise(codes, scale):
    """Return float64 values of codes; the dtypes of codes and scales tell the kind."""
    if codes.dtype == np.int8:
        return int8_dequantise(codes, scale)
    if codes.dtype == np.int16:
        return code6_dequantise(codes, scale)
    return (code4_dequantise if scale.dtype == np.float32 else int4_dequantise)(codes, scale)


def gather(pool, block_table, seq_lens):
    """Paged rows side by side: ``pool (blocks, heads, block_size, ...)`` -> ``(num_seqs, heads, longest, ...)``.

    Rows past a length stay 0, and their blocks are never looked up.
    """
    pool = np.asarray(pool)
    _, heads, block_size = pool.shape[:3]
    out = np.zeros((len(seq_lens), heads, max(seq_lens, default=0), *pool.shape[3:]), pool.dtype)
    for s, n in enumerate(seq_lens):
        for position in range(n):
            block = int(block_table[s][position // block_size])
            assert 0 <= block < len(pool)
            out[s, :, position] = pool[block, :, position % block_size]
    return out


# ---------------------------------------------------------------- attention


def attention_row(q, k, v, sm_scale, logits_soft_cap, sink, bias=0.0):
    """One query against the rows it sees: ``q (d,)``, ``k (n, d)``, ``v (n, dv)`` -> row, lse."""
    if len(k) == 0:
        return np.zeros(v.shape[1]), -np.inf if sink is None else float(sink)
    logits = (k @ q) * sm_scale
    if logits_soft_cap > 0:
        logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
    logits = logits + bias
    top = logits.max() if sink is None else max(logits.max(), sink)
    weights = np.exp(logits - top)
    total = weights.sum() + (0.0 if sink is None else np.exp(sink - top))
    return (weights / total) @ v, top + np.log(total)


def attention(
    q,
    k,
    v,
    seq_lens,
    cu_seqlens_q=None,
    *,
    sm_scale=None,
    logits_soft_cap=0.0,
    window_left=-1,
    sinks=None,
):
    """Decode (one query per sequence) or ragged prefill over contiguous caches.

    ``q (tokens, num_q_heads, d)``, ``k, v (batch, num_kv_heads, capacity, d)``; query ``i`` of the
    ``T`` of a sequence of length ``n`` sits at position ``n - T + i`` and sees itself, earlier
    ones, and of these the last ``window_left``. Returns float64 ``(out, lse)``.
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    num_tokens, num_q_heads, head_dim = q.shape
    batch, num_kv_heads = k.shape[:2]
    group = num_q_heads // num_kv_heads
    if cu_seqlens_q is None:
        cu_seqlens_q = np.arange(batch + 1)
        decode = True
    else:
        decode = False
    scale = 1 / np.sqrt(head_dim) if sm_scale is None else sm_scale
    out = np.zeros((num_tokens, num_q_heads, v.shape[3]))
    lse = np.full((num_tokens, num_q_heads), -np.inf)
    for s in range(batch):
        first, last, n = int(cu_seqlens_q[s]), int(cu_seqlens_q[s + 1]), int(seq_lens[s])
        for i in range(last - first):
            position = n - (last - first) + i
            assert position >= 0 or (decode and n == 0)
            begin = 0 if window_left < 0 else max(0, position - window_left)
            for h in range(num_q_heads):
                g = h // group
                out[first + i, h], lse[first + i, h] = attention_row(
                    q[first + i, h],
                    k[s, g, begin : position + 1],
                    v[s, g, begin : position + 1],
                    scale,
                    logits_soft_cap,
                    None if sinks is None else float(sinks[h]),
                )
    return out, lse


def seen_tokens(query, tokens, length, *, causal=True, window_left=-1, span=None, parents=None):
    """Return the tokens that query number `query` of a sequence's `tokens` sees, and the distance of each.

    `span` is a range in place of causality; `parents` are the parents of the newest tokens in a tree, or -1.
    """
    if parents is not None:
        base, path = length - tokens, []
        while query >= 0:
            path += [base + query] if base + query >= 0 else []
            query = parents[query]
        seen = np.array([*range(base), *reversed(path)], int)
        far = np.arange(len(seen))[::-1]
        near = far <= window_left if window_left >= 0 else far >= 0
        return seen[near], far[near]
    position = length - tokens + query
    begin = max(0, position - window_left) if window_left >= 0 else 0
    end = position + 1 if causal else length
    if span is not None:
        begin, end = max(0, span[0]), span[1]
    seen = np.arange(begin, max(begin, min(end, length)))
    return seen, np.abs(position - seen)


def attention_to_seen(
    q, k, v, seq_lens, cu_seqlens_q, *, sm_scale=None, logits_soft_cap=0.0, window_left=-1, sinks=None, causal=True,
    ranges=None, parents=None, slopes=None,
):  # fmt: skip
    """Compute `attention` beyond causality: with ranges of queries, parents of a tree, slopes of biases."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    num_tokens, num_q_heads, head_dim = q.shape
    group = num_q_heads // k.shape[1]
    scale = 1 / np.sqrt(head_dim) if sm_scale is None else sm_scale
    out = np.zeros((num_tokens, num_q_heads, v.shape[3]))
    lse = np.full((num_tokens, num_q_heads), -np.inf)
    for s in range(len(seq_lens)):
        first, last = int(cu_seqlens_q[s]), int(cu_seqlens_q[s + 1])
        for i in range(first, last):
            seen, far = seen_tokens(
                i - first, last - first, int(seq_lens[s]), causal=causal, window_left=window_left,
                span=None if ranges is None else ranges[i],
                parents=None if parents is None else parents[first:last],
            )  # fmt: skip
            for h in range(num_q_heads):
                out[i, h], lse[i, h] = attention_row(
                    q[i, h], k[s, h // group, seen], v[s, h // group, seen], scale, logits_soft_cap,
                    None if sinks is None else float(sinks[h]),
                    0.0 if slopes is None else -float(slopes[h]) * far,
                )  # fmt: skip
    return out, lse


def packed_bits(parents, cu_seqlens_q, words):
    """Rows of bits that say which of its sequence's newest tokens each one sees, itself and its ancestors."""
    bits = np.zeros((len(parents), 32 * words), bool)
    for s, first in enumerate(cu_seqlens_q[:-1]):
        for i in range(first, cu_seqlens_q[s + 1]):
            if parents[i] >= 0:
                bits[i] = bits[first + parents[i]]
            bits[i, i - first] = True
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


def attention_weights(
    q, k, seq_lens, starts, *, sm_scale=None, logits_soft_cap=0.0, window_left=-1, sinks=None
):
    """Weights ``(num_seqs, num_kv_heads, capacity)`` of queries ``starts[b] .. starts[b + 1]``, row by row."""
    q, k = q.astype(np.float64), k.astype(np.float64)
    group = q.shape[1] // k.shape[1]
    scale = 1 / np.sqrt(q.shape[2]) if sm_scale is None else sm_scale
    out = np.zeros(k.shape[:3])
    for b, n in enumerate(seq_lens):
        tokens = starts[b + 1] - starts[b]
        for i in range(tokens):
            position = n - tokens + i
            begin = 0 if window_left < 0 else max(0, position - window_left)
            if position < 0:
                continue
            for h in range(q.shape[1]):
                logits = k[b, h // group, begin : position + 1] @ q[starts[b] + i, h] * scale
                if logits_soft_cap:
                    logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
                extra = [] if sinks is None else [sinks[h]]
                exps = np.exp(np.append(logits, extra) - logits.max())
                out[b, h // group, begin : position + 1] += (exps / exps.sum())[: len(logits)]
    return out


def merge_states(o_a, lse_a, o_b, lse_b):
    """The state of the union of two disjoint sets of rows."""
    out, lse = np.zeros(np.shape(o_a)), np.full(np.shape(lse_a), -np.inf)
    for i in np.ndindex(lse.shape):
        top = max(lse_a[i], lse_b[i])
        if top == -np.inf:
            continue
        a, b = np.exp(lse_a[i] - top), np.exp(lse_b[i] - top)
        lse[i] = top + np.log(a + b)
        out[i] = (a * np.float64(o_a[i]) + b * np.float64(o_b[i])) / (a + b)
    return out, lse


# ---------------------------------------------------------------- writing


def rms_norm(x, weight, eps):
    """Root mean square norm over the last axis."""
    x = np.asarray(x).astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope(x, cos, sin, interleaved):
    """Rotate the first ``2 * len(cos)`` dims of each row: ``x (..., d)``, ``cos, sin (half,)``."""
    x = np.array(x, dtype=np.float64)
    half = len(cos)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        first, second = x[..., a].copy(), x[..., b].copy()
        x[..., a] = first * cos[i] - second * sin[i]
        x[..., b] = second * cos[i] + first * sin[i]
    return x


def split_qkv(qkv, num_q_heads, num_kv_heads, head_dim):
    """``(tokens, (num_q_heads + 2 * num_kv_heads) * head_dim)`` -> q, k, v by token and head."""
    rows = (
        np.asarray(qkv)
        .astype(np.float64)
        .reshape(len(qkv), num_q_heads + 2 * num_kv_heads, head_dim)
    )
    q, k, v = np.split(rows, [num_q_heads, num_q_heads + num_kv_heads], axis=1)
    return q, k, v


NORM_MODES, INTERLEAVED_MODES = (1, 4), (3, 4)


def write(qkv, num_q_heads, num_kv_heads, head_dim, mode, cos, sin, q_w, k_w, eps, pos_offset):
    """Return the q that a layer returns, and the K and V that it stores, in float64."""
    q, k, v = split_qkv(qkv, num_q_heads, num_kv_heads, head_dim)
    if mode in NORM_MODES:
        q, k = rms_norm(q, q_w, eps), rms_norm(k, k_w, eps)
    if mode != 0:
        for i in range(len(qkv)):
            row = pos_offset + i
            q[i] = rope(q[i], cos[row], sin[row], mode in INTERLEAVED_MODES)
            k[i] = rope(k[i], cos[row], sin[row], mode in INTERLEAVED_MODES)
    return q, k, v


def latent_rows(rows, width, mode, cos, sin, weight, eps, positions):
    """Return the rows that a cache of latents stores of projections ``(tokens, heads, d)``: norm of `width`, RoPE."""
    latent, key = np.split(np.asarray(rows).astype(np.float64), [width], axis=-1)
    if mode in NORM_MODES:
        latent = rms_norm(latent, weight, eps)
    if mode != 0:
        key = np.stack(
            [
                rope(x, cos[p], sin[p], mode in INTERLEAVED_MODES)
                for x, p in zip(key, positions, strict=True)
            ]
        )
    return np.concatenate([latent, key], axis=-1)


def latent_attention(q, rows, width, sm_scale):
    """The newest tokens' absorbed queries ``(T, q heads, d)`` over one sequence's rows ``(n, d)``: output, lse.

    A row is a key as it is, and its first `width` elements are the value.
    """
    q, rows = np.asarray(q).astype(np.float64), np.asarray(rows).astype(np.float64)
    first = len(rows) - len(q)
    found = [
        [
            attention_row(
                x, rows[: first + t + 1], rows[: first + t + 1, :width], sm_scale, 0, None
            )
            for x in of_token
        ]
        for t, of_token in enumerate(q)
    ]
    return (np.array([[x[i] for x in of_token] for of_token in found]) for i in (0, 1))


def rope_tables(positions, rotary_dim, base=10000.0, dtype=np.float32):
    """``cos, sin (positions, rotary_dim / 2)``."""
    angles = np.outer(np.arange(positions), base ** (-np.arange(0, rotary_dim, 2) / rotary_dim))
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def plan_append(new, cache, cache_offsets):
    """``cache[b, h, offsets[b] + l] = new[b, h, l]`` where that row exists; returns a copy."""
    out = cache.copy()
    for b in range(new.shape[0]):
        for row in range(new.shape[2]):
            to = int(cache_offsets[b]) + row
            if 0 <= to < cache.shape[2]:
                out[b, :, to] = new[b, :, row]
    return out
