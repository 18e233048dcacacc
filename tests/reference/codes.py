"""Compressed heads."""

import naive_codes
import numpy as np

from numkv.kernels.operations import Operations
from reference.attention import softmax
from reference.rows import floats, operation

TOP = np.finfo(np.float32).max


def bits_of(levels):
    return len(levels).bit_length() - 1


@operation(Operations.encode_rows)
def encode_rows(
    rows, rows_kind, rotation, edges, levels, sketch, codes, scales, signs, residuals, start, slots=None
):  # fmt: skip
    if not len(rows):
        return
    at = int(start) + np.arange(len(rows)) if slots is None else np.asarray(slots)
    x, bits = floats(rows, rows_kind, np.float32).swapaxes(0, 1), bits_of(levels)
    z, _ = naive_codes.quantise(x, rotation, levels)
    chosen = np.searchsorted(edges.astype(np.float64), z, side="right")
    scale, rest = naive_codes.scale_and_rest(x, z, chosen, levels)
    codes[:, at], scales[:, at] = naive_codes.pack(chosen, bits), np.minimum(scale, TOP)
    if sketch.shape[2]:
        signs[:, at] = naive_codes.pack(naive_codes.turn(rest, sketch) >= 0, 1)
        residuals[:, at] = np.minimum(np.linalg.norm(rest, axis=-1), TOP)


def decoded(codes, scales, levels, back):
    """Rows ``(heads, n, dim)`` of packed codes."""
    numbers = naive_codes.unpack(codes, back.shape[1], bits_of(levels))
    return naive_codes.decode(numbers, scales, levels, np.swapaxes(back, -1, -2))


@operation(Operations.decode_rows)
def decode_rows(codes, scales, begin, levels, back, out):
    some = slice(int(begin), int(begin) + out.shape[1])
    out[...] = decoded(codes[:, some], scales[:, some], levels, back)


def code_scores(q, book, stored_, tokens, options):
    """Scores ``(queries, q heads, n)`` of the newest tokens' queries; -inf for what one does not see."""
    keys = decoded(stored_.k_codes[:, tokens], stored_.k_scales[:, tokens], book.levels, book.back)
    signs = residuals = None
    if book.sketch.shape[2]:
        signs = naive_codes.unpack(stored_.signs[:, tokens], book.sketch.shape[2], 1)
        residuals = stored_.residuals[:, tokens]
    found = [
        naive_codes.scores(
            row, keys, book.rotation, book.sketch, signs, residuals, options.sm_scale
        )
        for row in q
    ]
    return naive_codes.restrict(np.stack(found), options.logits_soft_cap, options.window_left)


@operation(Operations.score_codes)
def score_codes(q, q_kind, book, stored, options, out):
    tokens = np.arange(stored.begin, stored.end)
    out[...] = code_scores(floats(q, q_kind), book, stored, tokens, options)


def _sequences(stored_, queries):
    """Of each sequence its tokens in the buffers, and how many queries it has."""
    several = stored_.sequences
    if several is None:
        yield np.arange(stored_.begin, stored_.end), queries
        return
    for n, count, start in zip(several.lengths, several.query_lens, several.starts, strict=True):
        tokens = np.arange(n)
        blocks = several.blocks[start + tokens // several.block_size]
        yield blocks * several.block_size + tokens % several.block_size, int(count)


@operation(Operations.attend_codes)
def attend_codes(q, q_kind, book, stored, options, out, lse):
    rows, heads, first = floats(q, q_kind), len(book.back), 0
    for tokens, count in _sequences(stored, len(q)):
        some, first = slice(first, first + count), first + count
        if not count:
            continue
        out[some] = 0
        if lse.size:
            lse[some] = -np.inf
        if not len(tokens):
            continue
        scores = code_scores(rows[some], book, stored, tokens, options)
        v = decoded(stored.v_codes[:, tokens], stored.v_scales[:, tokens], book.v_levels, book.back)
        seen = scores[:, 0] != -np.inf
        by_head = scores.reshape(count, heads, -1, len(tokens)).swapaxes(0, 1)
        none = np.full((heads, 1, by_head.shape[2]), -np.inf)
        result, log = softmax(by_head, seen, v, none)
        out[some] = result.swapaxes(0, 1).reshape(count, -1, v.shape[2])
        if lse.size:
            lse[some] = log.swapaxes(0, 1).reshape(count, -1)
