"""Benchmarks of whole models, for ``numkv bench``; most modules need the extra ``transformers``."""
