"""Where a token lies: the only place a slot is computed."""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable


@register_jitable
def slot_of(block_table, position, block_size):
    """Flat slot of a sequence's token: ``block_table[position // block_size] * block_size + position % block_size``."""
    block = np.int64(block_table[position // block_size])
    return block * np.int64(block_size) + np.int64(position % block_size)
