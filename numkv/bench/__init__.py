"""Benchmarks of whole models, for ``numkv bench``; needs the extra ``transformers``."""

__all__: list[str] = []
