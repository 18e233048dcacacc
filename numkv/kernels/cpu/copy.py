"""Copy whole blocks between pools or within one, on the CPU: ``to[to_ids[i]] = source[source_ids[i]]``."""

from __future__ import annotations

__all__ = ["copy_blocks"]


def copy_blocks(source, source_ids, to, to_ids):
    """Copy blocks.

    Parameters
    ----------
    source, to : array (num_blocks, ...)
        Buffers of the same dtype whose blocks have the same shape; they may be one. K, V or scales.
    source_ids, to_ids : int32 array (n,)
        Which blocks, and where they go. No block of `to_ids` is among `source_ids` where the buffers are one.
    """
    to[to_ids] = source[source_ids]
