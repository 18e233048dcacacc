"""Caches of many sequences in shared cells: causal, sliding window, chunked, encoder, wrapper."""
