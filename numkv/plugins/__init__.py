"""Plug-ins of other engines over `numkv.store.BlockStore`: their own bytes, under their own keys, in numkv's objects.

- `numkv.plugins.sglang.NumkvStorage`: a back end of SGLang's HiCache.
- `numkv.plugins.lmcache.NumkvBackend`: a storage plug-in of LMCache, through which vLLM reaches it too.

Each module imports its engine; no other module of numkv imports them. docs/store.md has their configuration.
"""
