"""Scales as CPU kernels take them: a row for each token and kv head, whoever shares a scale."""

from __future__ import annotations

from numba.extending import register_jitable


@register_jitable
def by_row(scale):
    """A view ``(num_blocks, num_kv_heads, block_size, n)`` of scales of heads, of rows or of groups, for `row_of`.

    Scales of heads repeat themselves, by steps of 0. Of an empty array nothing may be read.
    """
    if scale.ndim == 1:
        return scale[None, :, None, None]
    if scale.ndim == 3:
        return scale[:, :, :, None]
    return scale
