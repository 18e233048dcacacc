"""Prefixes past one process: full blocks under their content names, on a disk or in any fsspec file system.

Three tiers hold the blocks of a `PagedKVCache` that was made with ``store=``::

    pool          blocks of the cache itself; found and shared by `add`
      | evicted                                   ^ copied
    host tier     host memory of the store, `host_nbytes` of it, least recently used first out
      | not written yet                           ^ read, by several threads, straight into the pool's memory
    store         one object for each block, in a folder that processes and machines share

**Write-behind.** `commit` only notes which blocks are full. A thread of the store copies each one out of the pool,
adds a header and writes it; the loop that decodes does not wait. A block that the pool evicts before its turn came is
copied to the host tier at that moment; where that is full of blocks which wait too, it is given up and counted, as
memory has a bound and decoding does not stop for a disk. On a target whose memory the host does not see, blocks are
copied to the host tier by `commit`. `PrefixStore.flush` waits for all that was committed before.

**Objects** (`numkv.store.objects`). All layers of a block, K, V and scales, behind a header that says what they are:
format, the identity below, the block's name and token ids, and CRC-32 of header and content. One write makes an
object, one read brings it back. What is read is compared with all of that before anybody can find it.

**Names** are those of the prefix cache (`numkv.blocks.prefix`): sha256 chained over token ids and extra keys, another
one for each layer group. An object lies at ``<identity>/<two digits>/<the other digits of its name>``, where the
identity is a digest of mark, RoPE, sizes, kinds, windows, rotation, scales of heads and versions
(`numkv.store.objects`). So blocks of another model are never looked at, and one that was moved there by hand is
refused by its header. There is no index beside the folders, so there is none that a kill can damage.

**Publishing** (`numkv.store.folder`). A temporary file in the same folder, then a rename: an object is there as a
whole or not at all, whatever is killed when. With ``durable=True`` file and folder are brought to the disk
(``fsync``) before a block counts as written; without it a power cut, not a kill, may lose or damage the newest
objects, which checksums find.

**Bounds** (`numkv.store.folder.Bound`). A process that writes counts what it wrote, looks through the folder now and
then, and deletes what was used longest ago. Reading sets a file's time of modification, as times of access are seldom
kept. A reader whose object is deleted under it has a miss, nothing else.

**Forks and threads.** Any number of caches and threads use one store. A forked child begins with an empty queue and
an empty host tier, and threads of its own: what the parent has not written yet, the parent writes. `close` writes
what waits, and so does the end of the process unless it is killed.
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
