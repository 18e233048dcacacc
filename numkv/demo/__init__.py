"""A small language model that runs on numkv: the forward pass in NumPy, the KV cache in numkv.

Nothing in the library imports this package. It reads the bundled model (``numkv/demo/model``), or
any local Qwen3 or Llama checkpoint in Hugging Face format, generates text with it, and measures
what a cache kind costs in quality.

`numkv.demo.checkpoint` reads files, `numkv.demo.tokenizer` turns text into tokens, `numkv.demo.cache` names caches,
`numkv.demo.network` computes, `numkv.demo.model` holds a model and its texts, `numkv.demo.generate` chooses tokens, and
`numkv.demo.evaluate`, `.recall` and `.accuracy` compare caches.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["BUNDLED_MODEL"]

#: Folder of the model that comes with numkv.
BUNDLED_MODEL = Path(__file__).resolve().parent / "model"
