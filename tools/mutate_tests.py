"""Which tests bear the name of a file that `mutate.py` changes, and which survivors no test can catch.

Tests of the CPU target alone: they run a changed file as compiled code, and need not wait for the simulator. What would
compile for longer than a mutant may take is a part, chosen by ``-k``.
"""

__all__ = ["EQUIVALENT", "tests_of"]

_CPU = ["-k", "not cuda"]


def _some(words):
    return ["-k", f"({words}) and not cuda"]


_POOL = ["tests/objects/test_block_pool.py", "tests/objects/test_block_pool_errors.py", "tests/objects/test_block_pool_states.py"]  # fmt: skip
_PAGED = [
    "tests/objects/test_paged_cache.py", "tests/objects/test_paged_cache_states.py", "tests/objects/test_paged_sharing.py",
    "tests/objects/test_paged_prefix.py",
]  # fmt: skip
_CELLS = [
    "tests/objects/test_multi_sequence.py", "tests/objects/test_multi_sequence_errors.py",
    "tests/objects/test_multi_sequence_removal.py", "tests/objects/test_multi_sequence_states.py",
]  # fmt: skip
_ATTENTION = ["tests/kernels/test_attention.py", "tests/kernels/test_attention_ranges.py", "tests/kernels/test_attention_paged.py"]  # fmt: skip
_FP32 = _some("fp32 and not fp64 and not fp16 and not bf16 and not int")

#: By path within numkv, the longest that fits.
_TESTS = {
    "rows/address": ["tests/rows/test_address.py"],
    "rows/codec": ["tests/rows/test_codec.py"],
    "rows/codes": ["tests/rows/test_codes.py"],
    "rows/convert": ["tests/rows/test_convert.py", "tests/rows/test_fp8.py"],
    "rows/hadamard": ["tests/rows/test_hadamard.py"],
    "rows/int4": ["tests/rows/test_int4.py"],
    "rows/quantize": ["tests/rows/test_quantize.py"],
    "rows/rmsnorm": ["tests/rows/test_rmsnorm.py"],
    "rows/rope": ["tests/rows/test_rope.py"],
    "rows/softmax": ["tests/rows/test_softmax.py"],
    "rows/visible": ["tests/rows/test_visible.py"],
    "kernels/disk_cache": ["tests/test_disk_cache.py"],
    "kernels/builder": ["tests/test_disk_cache.py", "tests/test_progress.py"],
    "kernels/scratch": ["tests/test_reentry.py", "-k", "scratch"],
    "kernels/small_calls": ["tests/objects/test_fast_path.py", *_CPU],
    "kernels/dispatch": ["tests/kernels/test_copy.py", "tests/kernels/test_finite.py", *_CPU],
    "kernels/validate": [
        "tests/objects/test_bad_paged.py", "tests/objects/test_bad_input.py", "tests/objects/test_tables.py",
        "tests/kernels/test_shared_slots.py", *_CPU,
    ],
    "kernels/cpu/append": ["tests/kernels/test_append.py", "tests/kernels/test_append_int8.py", *_some("fp32")],
    "kernels/cpu/write": ["tests/kernels/test_write.py", *_some("fp32 and not fp64 and not int4")],
    "kernels/cpu/copy": ["tests/kernels/test_copy.py", *_CPU],
    "kernels/cpu/merge": ["tests/kernels/test_merge.py", *_CPU],
    "kernels/cpu/mass": ["tests/kernels/test_mass.py", *_some("fp32 and not fp64")],
    "kernels/cpu/shift": ["tests/kernels/test_shift.py", *_some("fp32 and not fp64")],
    "kernels/cpu/convert": ["tests/kernels/test_fp8_storage.py", "tests/objects/test_int8.py", *_CPU],
    "kernels/cpu/finite": ["tests/kernels/test_finite.py", *_CPU],
    "kernels/cpu/hadamard": ["tests/kernels/test_hadamard.py", *_some("fp32")],
    "kernels/cpu/threads": ["tests/kernels/test_threads.py", "tests/test_fork.py", *_CPU],
    "kernels/cpu/compress": ["tests/kernels/test_compress.py", *_CPU],
    "kernels/cpu/memory": ["tests/objects/test_contiguous_layer.py", *_FP32],
    "kernels/cpu/scales": ["tests/kernels/test_append_int8.py", *_CPU],
    "kernels/cpu/inline": ["tests/kernels/test_merge.py", *_CPU],
    "kernels/cpu/attention": [*_ATTENTION, *_FP32],
    "kernels/cpu/attention/integers": ["tests/kernels/test_attention_integers.py", *_CPU],
    "kernels/cpu/attention/vector": ["tests/kernels/test_attention_int8.py", *_CPU],
    "kernels/cpu/attention/scales": ["tests/kernels/test_attention_int8.py", *_CPU],
    "kernels/cpu/attention/amx": ["tests/kernels/test_attention_amx.py", *_CPU],
    "kernels/cpu/attention/offsets": ["tests/kernels/test_attention_offsets.py", "tests/kernels/test_attention_paged.py", *_FP32],
    "blocks": _POOL,
    "blocks/prefix": [*_POOL, "tests/objects/test_prefix.py"],
    "blocks/tables": ["tests/objects/test_tables.py", "tests/objects/test_block_pool.py", "tests/objects/test_paged_layer.py", *_CPU],
    "cells": [*_CELLS, *_CPU],
    "caches/paged": [*_PAGED, *_CPU],
    "caches/paged/compact": ["tests/objects/test_paged_compaction.py", *_CPU],
    "caches/paged/files": ["tests/objects/test_files.py", *_CPU],
    "caches/paged/swap": ["tests/objects/test_paged_cache.py", "tests/objects/test_files.py", *_CPU],
    "storage/hadamard": ["tests/objects/test_hadamard.py", *_CPU],
    "storage/jit_views": ["tests/objects/test_jit_views.py", *_CPU],
    "storage/tables": ["tests/objects/test_tables.py", "tests/objects/test_kv_cache.py", *_CPU],
    "storage/given": ["tests/objects/test_contiguous_layer.py", *_CPU],
    "storage/own_kernels": [],
    "storage": ["tests/objects/test_contiguous_layer.py", "tests/objects/test_kv_cache.py", *_CPU],
}  # fmt: skip

#: Survivors that behave as the original does, by key, and why.
EQUIVALENT: dict[str, str] = {}


def tests_of(file):
    """Arguments of pytest; none if no test bears the file's name."""
    name = file.removeprefix("numkv/").removesuffix(".py").removesuffix("/__init__")
    fitting = [path for path in _TESTS if f"{name}/".startswith(f"{path}/")]
    return _TESTS[max(fitting, key=len)] if fitting else []
