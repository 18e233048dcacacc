"""A storage plug-in of LMCache over a `BlockStore`; vLLM reaches it through LMCache, which is not tested here.

Tested with the interface of lmcache 0.5.6. An object is a chunk: 4 bytes with the length of a JSON text; the text, with
shapes, dtypes and the memory format; the chunk's bytes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from numkv.plugins.settings import store_of

log = logging.getLogger("numkv.plugins")


class NumkvBackend(StoragePluginInterface):  # type: ignore[misc]
    """Chunks of LMCache in a folder or on a network.

    Parameters
    ----------
    dst_device, config, metadata, local_cpu_backend, loop
        LMCache's. ``config.extra_config`` has ``numkv.place``, and optionally ``numkv.max_nbytes``,
        ``numkv.durable``, ``numkv.timeout`` and ``numkv.mark``; see `numkv.store.BlockStore`.
    """

    def __init__(
        self, dst_device: str = "cpu", config: Any = None, metadata: Any = None, local_cpu_backend: Any = None,
        loop: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        self._store = store_of(
            getattr(config, "extra_config", None), "numkv.", {"engine": "lmcache"}
        )
        self._writers = ThreadPoolExecutor(2, "numkv lmcache")
        self._lock = threading.Lock()
        self._putting: set[str] = set()

    def __str__(self) -> str:
        return "NumkvBackend"

    # -- what is there

    def contains(self, key: Any, pin: bool = False) -> bool:
        """Return whether a chunk exists; nothing is pinned, as reading copies a chunk."""
        return self._store.exists([key.to_string()])[0]

    def batched_contains(self, keys: list[Any], pin: bool = False) -> int:
        """Return how many leading chunks exist."""
        found = self._store.exists([key.to_string() for key in keys])
        return found.index(False) if False in found else len(found)

    async def batched_async_contains(
        self, lookup_id: str, keys: list[Any], pin: bool = False
    ) -> int:
        """Call `batched_contains` without blocking the event loop."""
        return await asyncio.to_thread(self.batched_contains, keys, pin)

    def exists_in_put_tasks(self, key: Any) -> bool:
        """Return whether a chunk is being written."""
        with self._lock:
            return key.to_string() in self._putting

    # -- out

    def batched_submit_put_task(
        self, keys: Sequence[Any], objs: list[Any], transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> list[Future[bool]] | None:  # fmt: skip
        """Write chunks in a thread, which keeps a reference to each meanwhile."""
        with self._lock:
            chosen = [
                (k, x)
                for k, x in zip(keys, objs, strict=True)
                if k.to_string() not in self._putting
            ]
            if not chosen:
                return None
            future = self._writers.submit(self._put, chosen, on_complete_callback)
            # `_put` takes the lock before it gives these back; a closed back end takes none.
            self._putting.update(key.to_string() for key, _ in chosen)
            for _, obj in chosen:
                obj.ref_count_up()
        return [future]

    async def async_batched_submit_put_task(
        self, keys: Sequence[Any], objs: list[Any], transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> None:  # fmt: skip
        """Write chunks, and return when they are written."""
        for future in (
            self.batched_submit_put_task(keys, objs, transfer_spec, on_complete_callback) or ()
        ):
            # A cancelled request ends only the wait: its chunks are written, and their references given back.
            await asyncio.shield(asyncio.wrap_future(future))

    def _put(self, chosen: Sequence[tuple[Any, Any]], done: Callable[[Any], None] | None) -> bool:
        names = [key.to_string() for key, _ in chosen]
        try:
            good = self._store.put(names, [_packed(obj) for _, obj in chosen])
        finally:
            with self._lock:
                self._putting.difference_update(names)
            _give_back([obj for _, obj in chosen])
        for (key, _), is_good in zip(chosen, good, strict=True):
            if done is not None and is_good:
                try:
                    done(key)
                except Exception:  # as in LMCache's own back ends: the chunk is there
                    log.exception("the callback for chunk %s failed", key.to_string())
        return all(good)

    # -- in

    def get_blocking(self, key: Any) -> Any:
        """Read a chunk; return None if it is missing, or memory is short."""
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[Any]) -> list[Any]:
        """Read chunks."""
        return [
            None if found is None else self._unpacked(memoryview(found))
            for found in self._store.get([key.to_string() for key in keys])
        ]

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[Any], transfer_spec: Any = None
    ) -> list[Any]:
        """Read chunks up to the first missing one, without blocking the event loop."""
        read: Future[list[Any]] = Future()
        try:
            await asyncio.to_thread(lambda: read.set_result(self.batched_get_blocking(keys)))
        except asyncio.CancelledError:  # the thread goes on, and nobody will take its chunks
            read.add_done_callback(lambda late: _give_back(late.result()))
            raise
        found = read.result()
        end = found.index(None) if None in found else len(found)
        _give_back(found[end:])
        return found[:end]

    def _unpacked(self, data: memoryview) -> Any:
        """Return a chunk in LMCache's own memory; None if that is full."""
        end = 4 + int.from_bytes(data[:4], "little")
        facts = json.loads(bytes(data[4:end]))
        shapes = [torch.Size(shape) for shape in facts["shapes"]]
        dtypes = [getattr(torch, name) for name in facts["dtypes"]]
        obj = self.local_cpu_backend.allocate(shapes, dtypes, MemoryFormat(facts["format"]))
        if obj is not None:
            memoryview(obj.byte_array).cast("B")[:] = data[end:]
        return obj

    # -- the rest

    def pin(self, key: Any) -> bool:
        """Return whether the chunk exists; nothing is pinned."""
        return self.contains(key)

    def unpin(self, key: Any) -> bool:
        """Return whether the chunk exists."""
        return self.contains(key)

    def remove(self, key: Any, force: bool = True) -> bool:
        """Delete a chunk; return whether it was deleted."""
        return self._store.remove([key.to_string()])[0]

    def touch_cache(self) -> None:
        """Do nothing: reading records the use of a chunk."""

    def get_allocator_backend(self) -> Any:
        """Return the allocator of memory for chunks that are read."""
        return self.local_cpu_backend

    def close(self) -> None:
        """Finish pending writes, then close the store; lookups that still run find nothing from then on."""
        self._writers.shutdown()
        self._store.close()


def _give_back(objs: Sequence[Any]) -> None:
    """Release a reference to each object; None is ignored."""
    for obj in objs:
        if obj is not None:
            obj.ref_count_down()


def _packed(obj: Any) -> bytes:
    """Return the description and the bytes of an object."""
    facts = {
        "shapes": [list(shape) for shape in obj.get_shapes()],
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in obj.get_dtypes()],
        "format": obj.get_memory_format().value,
    }
    text = json.dumps(facts).encode()
    return b"".join([len(text).to_bytes(4, "little"), text, memoryview(obj.byte_array).cast("B")])
