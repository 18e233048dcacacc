"""SGLang's HiCache over a `BlockStore`: ``--hicache-storage-backend dynamic``.

Tested with the interface of sglang 0.5.23: pages of keys and values of one pool. Further pools of hybrid models
(``batch_get_v2`` and the like) are not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from numkv.plugins.settings import store_of

#: The facts of SGLang's configuration that decide pages. All ranks of an MLA model have the same pages.
_SHARED = (
    "model_name", "is_mla_model", "is_page_first_layout", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size",
    "dcp_rank", "dcp_size", "logical_page_size",
)  # fmt: skip
_OF_RANKS = ("tp_rank", "tp_size")


class NumkvStorage(HiCacheStorage):  # type: ignore[misc]
    """Pages of SGLang's host cache in a folder or on a network.

    Parameters
    ----------
    storage_config : HiCacheStorageConfig
        SGLang's; its ``extra_config`` has ``place``, and optionally ``max_nbytes``, ``durable``, ``timeout`` and
        ``mark``; see `numkv.store.BlockStore`.
    kwargs : mapping, optional
        Other arguments of SGLang, which are ignored.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        names = _SHARED if storage_config.is_mla_model else (*_SHARED, *_OF_RANKS)
        mark = {"engine": "sglang", **{name: getattr(storage_config, name, None) for name in names}}
        self._store = store_of(storage_config.extra_config, "", mark)

    # -- single pages, and several

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Read a page into a tensor; return None if it is missing."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Read pages into tensors; return None for each missing one."""
        targets = list(target_locations or [])
        if len(targets) != len(keys) or any(target is None for target in targets):
            raise ValueError("`target_locations`: expected a tensor for each key")
        pages = [x.contiguous() for x in targets]
        found = self._store.get_into(keys, [_bytes_of(page) for page in pages])
        into = zip(targets, pages, found, strict=True)
        return [
            (x if page is x else x.copy_(page)) if is_there else None for x, page, is_there in into
        ]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Write a page; return whether it exists now."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Write pages; return whether all exist now."""
        return all(self._store.put(keys, [_bytes_of(x.contiguous()) for x in values]))

    def exists(self, key: str) -> bool:
        """Return whether a page exists."""
        return self._store.exists([key])[0]

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages exist."""
        found = self._store.exists(keys)
        return found.index(False) if False in found else len(found)

    # -- pages of the registered host pool

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Read pages into the host pool; return for each whether it existed."""
        pages = [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        found = self._store.get_into(keys, [_bytes_of(page) for page in pages])
        for first, page, is_there in zip(
            self._firsts(keys, host_indices), pages, found, strict=True
        ):
            if is_there:
                self.mem_pool_host.set_from_flat_data_page(first, page)
        return found

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Write pages of the host pool; return for each whether it exists now."""
        pages = [
            self.mem_pool_host.get_data_page(first) for first in self._firsts(keys, host_indices)
        ]
        return self._store.put(keys, [_bytes_of(page.contiguous()) for page in pages])

    def _firsts(self, keys: Sequence[str], host_indices: Any) -> list[Any]:
        """Return the first index of each page."""
        size = self.mem_pool_host.page_size
        if len(host_indices) != len(keys) * size:
            raise ValueError(
                f"`host_indices`: expected {size} for each of {len(keys)} pages, got {len(host_indices)}"
            )
        return [host_indices[i * size] for i in range(len(keys))]

    # -- the rest

    def clear(self) -> None:
        """Delete all pages of this model and rank."""
        self._store.clear()

    def close(self) -> None:
        """Close the store: later reads find nothing."""
        self._store.close()


def _bytes_of(x: Any) -> Any:
    """Return the bytes of a contiguous tensor in host memory, without a copy."""
    return x.view(-1).view(torch.uint8).numpy()
