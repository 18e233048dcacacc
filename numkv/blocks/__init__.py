"""Blocks of a paged cache as numbers: their references, the prefixes they hold, and block tables."""

from __future__ import annotations

from numkv.blocks.pool import BlockPool
from numkv.blocks.prefix import block_digests, root_digest, token_ids
from numkv.blocks.records import BlocksRemoved, BlocksStored, MissReason, PoolStats
from numkv.blocks.tables import block_table_to_csr, csr_to_block_table, slot_mapping

__all__ = [
    "BlockPool",
    "BlocksRemoved",
    "BlocksStored",
    "MissReason",
    "PoolStats",
    "block_digests",
    "block_table_to_csr",
    "csr_to_block_table",
    "root_digest",
    "slot_mapping",
    "token_ids",
]
