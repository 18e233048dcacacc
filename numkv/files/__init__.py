"""Files: caches and sequences, saved as safetensors with checksums, and loaded again."""

from __future__ import annotations

from numkv.files.api import load, load_sequences, save, save_sequences

__all__ = ["load", "load_sequences", "save", "save_sequences"]
