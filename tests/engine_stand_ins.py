"""Stand-ins for the parts of SGLang and LMCache that numkv's plug-ins use, for machines without these engines.

Names of methods and parameters are those of sglang 0.5.23 and lmcache 0.5.6; where the engines can be imported, tests
use theirs and compare them with the stand-ins.
"""

import enum
import importlib
import sys
import types

import torch

#: Methods with their parameters, in order.
SGLANG = {
    "get": "key target_location target_sizes",
    "batch_get": "keys target_locations target_sizes",
    "set": "key value target_location target_sizes",
    "batch_set": "keys values target_locations target_sizes",
    "exists": "key",
    "batch_exists": "keys extra_info",
    "batch_get_v1": "keys host_indices extra_info",
    "batch_set_v1": "keys host_indices extra_info",
    "clear": "",
}
LMCACHE = {
    "contains": "key pin",
    "exists_in_put_tasks": "key",
    "batched_submit_put_task": "keys objs transfer_spec on_complete_callback",
    "async_batched_submit_put_task": "keys objs transfer_spec on_complete_callback",
    "get_blocking": "key",
    "batched_get_blocking": "keys",
    "batched_get_non_blocking": "lookup_id keys transfer_spec",
    "batched_async_contains": "lookup_id keys pin",
    "batched_contains": "keys pin",
    "pin": "key",
    "unpin": "key",
    "remove": "key force",
    "touch_cache": "",
    "get_allocator_backend": "",
    "close": "",
}


class Pages:
    """The methods of SGLang's host pool that plug-ins call: pages of tokens, one after another."""

    def __init__(self, pages, page_size=4, width=6, dtype=torch.bfloat16):
        self.page_size = page_size
        self.data = torch.zeros((pages * page_size, width), dtype=dtype)

    def get_dummy_flat_data_page(self):
        return torch.zeros_like(self.data[: self.page_size]).flatten()

    def get_data_page(self, index, flat=True):
        return self.data[index : index + self.page_size].flatten()

    def set_from_flat_data_page(self, index, data_page):
        self.data[index : index + self.page_size] = data_page.reshape(self.page_size, -1)


class _HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host):
        self.mem_pool_host = mem_pool_host


class MemoryFormat(enum.Enum):
    """LMCache's memory format that plug-ins use."""

    UNDEFINED = 0
    KV_2LTD = enum.auto()


class _StoragePluginInterface:
    def __init__(self, dst_device, config=None, metadata=None, local_cpu_backend=None, loop=None):
        self.dst_device, self.config, self.metadata = dst_device, config, metadata
        self.local_cpu_backend, self.loop = local_cpu_backend, loop


class Chunk:
    """The methods of a memory object of LMCache that plug-ins call."""

    def __init__(self, tensor, fmt):
        self.tensor, self._fmt, self.references = tensor, fmt, 1

    def get_shapes(self):
        return [self.tensor.shape]

    def get_dtypes(self):
        return [self.tensor.dtype]

    def get_memory_format(self):
        return self._fmt

    @property
    def byte_array(self):
        return memoryview(self.tensor.view(torch.uint8).numpy()).cast("B")

    def ref_count_up(self):
        self.references += 1

    def ref_count_down(self):
        self.references -= 1


class HostMemory:
    """The methods of LMCache's memory that plug-ins call: room for a number of chunks."""

    def __init__(self, room=100):
        self.room, self.given = room, []

    def allocate(self, shapes, dtypes, fmt, **options):
        if len(self.given) >= self.room:
            return None
        self.given.append(Chunk(torch.zeros(shapes[0], dtype=dtypes[0]), fmt))
        return self.given[-1]


def install(monkeypatch):
    """Make the engines' modules importable, or stand-ins for them; return the names of the real ones."""
    real = {}
    for name, modules in {
        "sglang": {"sglang.srt.mem_cache.hicache_storage": {"HiCacheStorage": _HiCacheStorage}},
        "lmcache": {
            "lmcache.v1.memory_management": {"MemoryFormat": MemoryFormat},
            "lmcache.v1.storage_backend.abstract_backend": {
                "StoragePluginInterface": _StoragePluginInterface
            },
        },
    }.items():
        try:
            for module in modules:
                importlib.import_module(module)
            real[name] = True
        except Exception:
            real[name] = False
            for module, contents in modules.items():
                parts = module.split(".")
                for i in range(1, len(parts) + 1):
                    monkeypatch.setitem(
                        sys.modules, ".".join(parts[:i]), types.ModuleType(".".join(parts[:i]))
                    )
                vars(sys.modules[module]).update(contents)
        monkeypatch.delitem(sys.modules, f"numkv.plugins.{name}", raising=False)
    return real
