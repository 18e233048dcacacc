"""Rotary position embedding of one pair, and which elements make a pair.

Su et al., "RoFormer" (arXiv:2104.09864), section 3.4.2, equation 34. Two pairings are in use. *Interleaved* pairs
elements 2i and 2i + 1, as in the paper and in GGUF files. *Half-split* pairs elements i and i + rotary_dim / 2, as in
Hugging Face checkpoints.
"""

from __future__ import annotations

from numba.extending import register_jitable


@register_jitable
def pair_of(i, half, interleaved):
    """Indices of the two elements of pair `i`, of `half` pairs in all."""
    if interleaved:
        return 2 * i, 2 * i + 1
    return i, i + half


@register_jitable
def rotate_pair(a, b, cos, sin):
    """The pair (a, b) turned by an angle: ``(a cos - b sin, b cos + a sin)``."""
    return a * cos - b * sin, b * cos + a * sin
