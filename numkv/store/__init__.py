"""Prefixes past one process: full blocks under their content names, on a disk or in any fsspec file system.

Three tiers store the blocks of a `PagedKVCache` that was made with ``store=``::

    pool          blocks of the cache itself; found and shared by `add`
      | evicted                                   ^ copied
    host tier     host memory of the store, `host_nbytes` of it, least recently used first out
      | not written yet                           ^ read, by several threads, straight into the pool's memory
    store         one object for each block, in a folder that processes and machines share

**Write-behind.** `commit` only records full blocks. A thread of the store copies each one out of the pool, adds a
header and writes it; the decode loop does not wait. A block that the pool evicts earlier is copied to the host tier.
If that is full of waiting blocks, the block is dropped and counted, as memory is bounded and decoding never waits for
a disk. If the host cannot read the target's memory, `commit` copies blocks to the host tier. `PrefixStore.flush`
waits for all earlier commits.

**Objects** (`numkv.store.objects`). A header, then all layers of a block with K, V and scales. The header has the
format, the identity below, the block's hash and token ids, and CRC-32 of header and content. An object is written and
read in one request. All of the header is verified before a block can be found.

**Names** are those of the prefix cache (`numkv.blocks.prefix`): sha256 chained over token ids and extra keys, another
one for each layer group. An object lies at ``<identity>/<two digits>/<the other digits of its name>``, where the
identity is a digest of mark, RoPE, sizes, kinds, windows, rotation, scales of heads and versions
(`numkv.store.objects`). So blocks of another model are never read, and one that was moved there by hand is refused by
its header. There is no index that a kill could damage.

**Publishing** (`numkv.store.folder`). A temporary file in the same folder, then a rename: a crash never leaves a
partial object. With ``durable=True`` file and folder are fsynced before a block counts as written. Without it a power
cut, not a kill, may lose or damage the newest objects; checksums find damage.

**Bounds** (`numkv.store.folder.Bound`). A writing process counts its bytes, scans the folder from time to time, and
deletes the least recently used objects. A read sets a file's time of modification, as times of access are seldom
stored. A reader whose object is deleted meanwhile has a miss.

**Forks and threads.** Any number of caches and threads use one store. A forked child begins with an empty queue, an
empty host tier and its own threads; the parent writes its own queue. `close` writes all waiting blocks, and so does
the end of the process unless it is killed.
"""

from __future__ import annotations

from numkv.store.byte_store import BlockStore
from numkv.store.prefix_store import PrefixStore
from numkv.store.records import (
    BlocksDropped,
    BlocksWritten,
    ByteStats,
    PrefixFound,
    StoreAnswers,
    StoreSilent,
    StoreStats,
)

__all__ = [
    "BlockStore", "BlocksDropped", "BlocksWritten", "ByteStats", "PrefixFound", "PrefixStore", "StoreAnswers",
    "StoreSilent", "StoreStats",
]  # fmt: skip
