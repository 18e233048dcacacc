"""The caches: objects that hold buffers and keep the books of sequences."""

from __future__ import annotations

from numkv.caches.paged.files import load_sequences, save_sequences

__all__ = ["load_sequences", "save_sequences"]
