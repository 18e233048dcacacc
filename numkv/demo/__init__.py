"""A small language model that runs on numkv: the forward pass in NumPy, the KV cache in numkv.

No other package of the library imports this one. It reads the bundled model (``numkv/demo/model``), or a local Qwen3 or
Llama checkpoint in Hugging Face format, generates text with it, and measures the quality of cache kinds.

`numkv.demo.checkpoint` reads files, `numkv.demo.tokenizer` converts text to tokens, `numkv.demo.cache` makes caches,
`numkv.demo.network` computes, `numkv.demo.model` has the model and its texts, `numkv.demo.generate` chooses tokens, and
`numkv.demo.evaluate`, `.recall` and `.accuracy` compare caches.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["BUNDLED_MODEL"]

#: Folder of the model that comes with numkv.
BUNDLED_MODEL = Path(__file__).resolve().parent / "model"
