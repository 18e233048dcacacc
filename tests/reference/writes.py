"""Operations that write: appends, copies, fused writes, and what turns rows."""

import functools

import naive
import numpy as np

from numkv.kernels.operations import Operations
from reference.rows import (
    CODES,
    FLOATS,
    GROUP,
    dim_of,
    floats,
    operation,
    places,
    put,
    stored,
    values,
)


def reporter(look, side=0, raw=None, stride=0, first=0):
    """Takes rows that hold NaN or infinity for zeros, and says so where CUDA's kernels do; None on the CPU.

    It looks at `raw`, if that is given, in place of the rows; `stride` and `first` say where in the array that a caller
    has passed a token's elements lie.
    """
    if not look:
        return None
    from numkv.kernels.cuda import late
    from numkv.kernels.cuda.rows import V_SIDE

    def report(x, kept):
        bad = ~np.isfinite(x if raw is None else raw) & kept[:, None, None]
        if not bad.any():
            return x
        found, raised = (y._ary for y in late.flags(look))
        for t, h in np.argwhere(bad.any(axis=2)).tolist():
            index = t * (stride or x[0].size) + first + h * x.shape[2] + int(bad[t, h].argmax())
            word = t & (len(found) - 1)
            found[word] = min(found[word], int(look) + side * V_SIDE + index)
        raised[0] = 1
        return np.where(bad.any(axis=2, keepdims=True), 0, x).astype(x.dtype)

    return report


def slots_of(block_table, start, count, size):
    """Slots of a sequence's tokens."""
    tokens = np.arange(start, start + count)
    return block_table[tokens // size].astype(np.int64) * size + tokens % size


def store_rows(rows, rows_kind, pool, pool_kind, scale, slots, report=None):
    """Convert rows into slots; words of the same kind are copied."""
    if not rows.size:
        return
    if rows_kind == pool_kind:
        slots = np.asarray(slots, np.int64)
        kept = (slots >= 0) & (slots < pool.shape[0] * pool.shape[2])
        pool[places(pool, slots[kept])] = rows[kept]
    else:
        put(floats(rows, rows_kind, np.float32), pool, pool_kind, scale, slots, report)


@operation(Operations.append_rows)
def append_rows(rows, rows_kind, pool, pool_kind, scale, block_table, start):
    slots = slots_of(block_table, int(start), len(rows), pool.shape[2])
    store_rows(rows, rows_kind, pool, pool_kind, scale, slots)


@operation(Operations.scatter_rows)
def scatter_rows(rows, rows_kind, pool, pool_kind, scale, slot_mapping):
    store_rows(rows, rows_kind, pool, pool_kind, scale, slot_mapping)


@operation(Operations.append_both)
def append_both(k, v, block_table, start, look=0):
    for side, given in enumerate((k, v)):
        slots = slots_of(block_table, int(start), len(given[0]), given[2].shape[2])
        store_rows(*given, slots, reporter(look, side))


@operation(Operations.scatter_both)
def scatter_both(k, v, slot_mapping, look=0):
    for side, given in enumerate((k, v)):
        store_rows(*given, slot_mapping, reporter(look, side))


@operation(Operations.copy_rows)
def copy_rows(new, cache, offsets):
    cache[...] = naive.plan_append(_bits(new), _bits(cache), offsets).view(cache.dtype)


@operation(Operations.copy_both)
def copy_both(k_new, k_cache, v_new, v_cache, offsets):
    copy_rows(k_new, k_cache, offsets)
    copy_rows(v_new, v_cache, offsets)


def _bits(x):
    return x.view(f"u{x.dtype.itemsize}")


@operation(Operations.copy_blocks)
def copy_blocks(source, source_ids, to, to_ids):
    to[to_ids] = source[source_ids]


@operation(Operations.copy_tokens)
def copy_tokens(source, source_slots, to, to_slots):
    for here, there in zip(source_slots.tolist(), to_slots.tolist(), strict=True):
        to[there // to.shape[2], :, there % to.shape[2]] = (
            source[here // source.shape[2], :, here % source.shape[2]]
        )  # fmt: skip


@operation(Operations.quantise_groups)
def quantise_groups(rows, rows_kind, groups, pool, pool_kind, scale, to_groups):
    tokens = naive.CHANNEL_TOKENS
    for here, there in zip(groups.tolist(), to_groups.tolist(), strict=True):
        a, first = here // (rows.shape[2] // tokens), here % (rows.shape[2] // tokens) * tokens
        b, to = there // (pool.shape[2] // tokens), there % (pool.shape[2] // tokens)
        x = floats(rows[a, :, first : first + tokens], rows_kind, np.float32)
        of_group = slice(to * tokens, (to + 1) * tokens)
        pool[b, :, of_group], scale[b, :, to] = naive.channel_group(x, pool_kind)


@operation(Operations.first_non_finite)
def first_non_finite(rows, kind):
    bad = np.flatnonzero(~np.isfinite(floats(rows, kind, np.float32)))
    return int(bad[0]) if len(bad) else -1


def turned(x, cos, sin, interleaved):
    """Rows ``(n, heads, dim)`` rotated by the angles ``(n, half)`` of their tokens."""
    x, half = x.copy(), cos.shape[1]
    low, high = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )  # fmt: skip
    a, b, c, s = x[..., low].copy(), x[..., high].copy(), cos[:, None], sin[:, None]
    x[..., low], x[..., high] = a * c - b * s, b * c + a * s
    return x


def write(
    qkv, qkv_kind, cos, sin, mode, q_weight, k_weight, eps, angles, q_out, k_side, v_side, slots, look
):  # fmt: skip
    """What `write_rows` and `scatter_write` do, with a row of the tables and a slot for each token."""
    normalise, rotate, interleaved = mode
    q_heads, dim = q_out.shape[1:]
    tokens, heads, compute = len(qkv), k_side[0].shape[1], q_weight.dtype
    if not tokens:
        return
    starts = q_heads * dim, (q_heads + heads) * dim
    q, k, v = np.split(floats(qkv, qkv_kind), starts, axis=1)
    q, k = q.reshape(tokens, q_heads, dim), k.reshape(tokens, heads, dim)
    v = v.reshape(tokens, heads, dim_of(v_side[0], v_side[1]))
    raw, known = (k, v), np.ones(tokens, bool)
    if normalise:
        q, k = naive.rms_norm(q, q_weight, eps), naive.rms_norm(k, k_weight, eps)
    if rotate:
        known, tables = angles_of(cos, sin, angles)
        q, k = turned(q, *tables, interleaved), turned(k, *tables, interleaved)
    q_out[known] = stored(q.astype(compute), qkv_kind, None, q_out.dtype, None)[0][known]
    slots = np.where(known, slots, -1)
    for side, (new, given) in enumerate(((k, k_side), (v, v_side))):
        report = reporter(look, side, raw[side], qkv.shape[1], starts[side])
        put(new.astype(compute), *given, slots, report)


def angles_of(cos, sin, rows):
    """Which tokens have a row in the tables, and those rows, in float64."""
    rows = np.asarray(rows, np.int64)
    known = (rows >= 0) & (rows < len(cos))
    return known, [x[np.where(known, rows, 0)].astype(np.float64) for x in (cos, sin)]


@operation(Operations.write_rows)
def write_rows(
    qkv, qkv_kind, cos, sin, mode, q_weight, k_weight, eps, first_angle,
    q_out, k_pool, k_kind, k_scale, v_pool, v_kind, v_scale, block_table, start, look=0,
):  # fmt: skip
    tokens = len(qkv)
    write(
        qkv, qkv_kind, cos, sin, mode, q_weight, k_weight, eps, int(first_angle) + np.arange(tokens), q_out,
        (k_pool, k_kind, k_scale), (v_pool, v_kind, v_scale),
        slots_of(block_table, int(start), tokens, k_pool.shape[2]), look,
    )  # fmt: skip


@operation(Operations.scatter_write)
def scatter_write(
    qkv, qkv_kind, cos, sin, mode, q_weight, k_weight, eps, positions,
    q_out, k_pool, k_kind, k_scale, v_pool, v_kind, v_scale, slot_mapping, look=0,
):  # fmt: skip
    write(
        qkv, qkv_kind, cos, sin, mode, q_weight, k_weight, eps, positions, q_out,
        (k_pool, k_kind, k_scale), (v_pool, v_kind, v_scale), slot_mapping, look,
    )  # fmt: skip


@operation(Operations.scatter_latents)
def scatter_latents(
    rows, rows_kind, cos, sin, how, weight, positions, pool, pool_kind, scale, slot_mapping, look=0
):  # fmt: skip
    normalise, rotate, interleaved, eps, width = how
    x, known = floats(rows, rows_kind), np.ones(len(rows), bool)
    if normalise:
        x[..., :width] = naive.rms_norm(x[..., :width], weight, eps)
    if rotate:
        known, tables = angles_of(cos, sin, positions)
        x[..., width:] = turned(x[..., width:], *tables, interleaved)
    report = reporter(look, raw=floats(rows, rows_kind))
    put(x.astype(weight.dtype), pool, pool_kind, scale, np.where(known, slot_mapping, -1), report)


@operation(Operations.shift_rows)
def shift_rows(pool, kind, scale, slots, offset, cos, sin, interleaved):
    compute = np.float64 if kind == "fp64" else np.float32
    slots = np.asarray(slots, np.int64)
    at = places(pool, slots[(slots >= 0) & (slots < pool.shape[0] * pool.shape[2])])
    of_rows = scale[at] if kind in CODES else scale
    x = values(pool[at], kind, of_rows).astype(compute)
    c, s = (
        np.broadcast_to(t[abs(offset)].astype(compute), (len(x), t.shape[1])) for t in (cos, sin)
    )
    x = turned(x, c, s if offset >= 0 else -s, interleaved)
    words, scales = stored(x, kind, scale, pool.dtype, scale.dtype)
    last, group = 2 * cos.shape[1], GROUP.get(kind)
    if kind in FLOATS:  # elements that are not rotated stay as they are
        pool[at] = np.concatenate([words[..., :last], pool[at][..., last:]], axis=-1)
    elif group:  # and so do groups
        n = -(-last // group)
        pool[at] = np.concatenate(
            [words[..., : n * group // 2], pool[at][..., n * group // 2 :]], axis=-1
        )
        scale[at] = np.concatenate([scales[..., :n], of_rows[..., n:]], axis=-1)
    else:
        pool[at], scale[at] = words, scales


@functools.cache
def _hadamard(block):
    return naive.rotation(np.ones(block))


@operation(Operations.rotate_rows)
def rotate_rows(x, x_kind, signs, inverse, out, out_kind):
    if not x.size:
        return
    block = len(signs) & -len(signs)
    rows, signs = floats(x, x_kind), signs.astype(np.float64)
    if not inverse:
        rows = rows * signs
    rows = (rows.reshape(*rows.shape[:2], -1, block) @ _hadamard(block)).reshape(rows.shape)
    if inverse:
        rows = rows * signs
    wide = np.float64 if "fp64" in (x_kind, out_kind) else np.float32
    out[...] = stored(rows.astype(wide), out_kind, None, out.dtype, None)[0]
