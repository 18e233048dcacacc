"""The tests of each file that `mutate.py` changes, and the survivors that no test can catch.

These are tests of the CPU target: they run a changed kernel as compiled code, and a changed cache on `tests/reference`,
without the slow simulator. Where compilation would exceed the time of a mutant, words as for ``-k`` choose some tests.
"""

__all__ = ["EQUIVALENT", "tests_of"]

_POOL = (
    "objects/test_block_counters objects/test_block_pool objects/test_block_pool_errors "
    "objects/test_block_pool_states"
)
_PAGED = (
    "objects/test_paged_cache objects/test_paged_cache_states objects/test_paged_sharing "
    "objects/test_paged_prefix"
)
_CELLS = (
    "objects/test_multi_sequence objects/test_multi_sequence_errors objects/test_multi_sequence_removal "
    "objects/test_multi_sequence_states"
)
_ATTENTION = "kernels/test_attention kernels/test_attention_ranges kernels/test_attention_paged"
_FP32 = "fp32 and not fp64 and not fp16 and not bf16 and not int"
#: The same for tests whose names have other words than kinds.
_NARROW = "not fp64 and not fp16 and not bf16 and not fp8 and not int8 and not int4"

#: Files of tests, and words for their tests, by path within numkv; the longest fitting path counts.
_TESTS = {
    "rows/address": ("rows/test_address", ""),
    "rows/codec": ("rows/test_codec", ""),
    "rows/codes": ("rows/test_codes", ""),
    "rows/convert": ("rows/test_convert rows/test_fp8", ""),
    "rows/hadamard": ("rows/test_hadamard", ""),
    "rows/int4": ("rows/test_int4", ""),
    "rows/quantize": ("rows/test_quantize", ""),
    "rows/rmsnorm": ("rows/test_rmsnorm", ""),
    "rows/rope": ("rows/test_rope", ""),
    "rows/softmax": ("rows/test_softmax", ""),
    "rows/visible": ("rows/test_visible", ""),
    "kernels/disk_cache": ("test_disk_cache", ""),
    "kernels/builder": ("test_disk_cache test_progress", ""),
    "kernels/scratch": ("test_reentry", "scratch"),
    "kernels/small_calls": ("objects/test_fast_path", ""),
    "kernels/dispatch": ("kernels/test_copy kernels/test_finite", ""),
    "kernels/validate": (
        "kernels/test_validate objects/test_bad_paged objects/test_bad_input objects/test_tables "
        "kernels/test_shared_slots",
        "",
    ),
    "kernels/cpu/append": ("kernels/test_append kernels/test_append_int8", "fp32"),
    "kernels/cpu/write": ("kernels/test_write", "fp32 and not fp64 and not int4"),
    "kernels/cpu/copy": ("kernels/test_copy", ""),
    "kernels/cpu/merge": ("kernels/test_merge", ""),
    "kernels/cpu/mass": ("kernels/test_mass", "fp32 and not fp64"),
    "kernels/cpu/shift": ("kernels/test_shift", "fp32 and not fp64"),
    "kernels/cpu/convert": ("kernels/test_fp8_storage objects/test_int8", ""),
    "kernels/cpu/finite": ("kernels/test_finite", ""),
    "kernels/cpu/hadamard": ("kernels/test_hadamard", _NARROW),
    "kernels/cpu/threads": ("kernels/test_threads test_fork", ""),
    "kernels/cpu/compress": ("kernels/test_compress", ""),
    "kernels/cpu/attention": (_ATTENTION, _FP32),
    "kernels/cpu/attention/__init__": (
        "kernels/test_attention",
        "fp32 and not fp64 and not bf16 and not fp8 and not int",
    ),
    "kernels/cpu/attention/sides": (
        "kernels/test_attention_integers kernels/test_attention_int4",
        "not fp64 and not fp16 and not bf16",
    ),
    "kernels/cpu/attention/vector": ("kernels/test_attention_int8", ""),
    "kernels/cpu/attention/scales": (
        "kernels/test_attention_int8 kernels/test_attention_int4",
        "(groups or accuracy or extreme) and not fp64",
    ),
    "kernels/cpu/attention/amx": ("kernels/test_attention_amx kernels/test_attention_amx_few", ""),
    "kernels/cpu/attention/offsets": (
        "kernels/test_attention_offsets kernels/test_attention_ranges",
        _NARROW,
    ),
    "blocks": (_POOL, ""),
    "blocks/pool": (f"{_POOL} objects/test_block_pool_threads", ""),
    "blocks/prefix": (f"{_POOL} objects/test_prefix", ""),
    "blocks/tables": ("objects/test_tables objects/test_block_pool objects/test_paged_layer", ""),
    "cells": (_CELLS, ""),
    "caches/paged": (_PAGED, ""),
    "caches/paged/compact": ("objects/test_paged_compaction", ""),
    "caches/paged/swap": (
        "objects/test_paged_swap objects/test_paged_cache files/test_sequences",
        "",
    ),
    "storage/hadamard": ("objects/test_hadamard", ""),
    "storage/jit_views": ("objects/test_jit_views", ""),
    "storage/tables": ("objects/test_tables objects/test_kv_cache", ""),
    "storage/buffer": ("objects/test_kv_cache objects/test_rotate_moves", ""),
    "storage/pool": ("objects/test_kv_cache objects/test_int8", ""),
    "storage/own_kernels": ("objects/test_own_kernels", "upload or arrays_of_a_pool"),
    "storage": ("objects/test_contiguous_layer objects/test_kv_cache", ""),
}

#: Files whose tests are mostly marked slow: of users' compiled code, and of threads.
_SLOW = {"kernels/cpu/threads", "kernels/scratch", "storage/jit_views", "storage/own_kernels"}

#: Survivors that behave as the original, by key, with the reason.
EQUIVALENT: dict[str, str] = {
    "dc75126d728f9522": "NumPy's memory begins at multiples of 16: one byte less is enough, too",
    "3c1cba1959214daf": "how many threads work: speed alone",
    "d3dbc250b3093add": "rows without NaN are looked through twice: speed alone",
    "a5e71338dabc28a0": "infinity becomes infinity in the next branch, too",
    "d0443a50220e9276": "errors are compared with each other alone: 1 more in each of them changes nothing",
    "a44dbf7490c49e95": "the last of equals, not the first: of 4,000 groups drawn to tie none has two words",
    "779da1e0d5e27bcf": "callers ask whether the number is negative",
    "39e32fef9bc14bd0": "room for more rows than there are; with a matrix unit, which this machine lacks, for fewer",
    "9067379a381a2cbe": "needs a matrix unit, which this machine lacks",
    "119f0deeb1957953": "scales of queries of float kinds: read for INT8 and INT4 alone, which set their own",
    "d4e049a1a54a4fd4": "a number that stands for itself: whoever sets or asks it takes it from here",
    "b94914661603f33e": "what is added or subtracted is 0, or NaN",
    "e4f0b634ffc1973a": "where a slice ends: compiled code does not check, and reads the same memory",
    "3b722de3b9df2c4e": "needs a matrix unit, which this machine lacks",
    "a02a9e1aa0f8fada": "a structure of CUDA's, which tests of the CPU do not make",
}


def tests_of(file):
    """Return arguments of pytest; none if the file has no tests."""
    name = file.removeprefix("numkv/").removesuffix(".py")
    fitting = [path for path in _TESTS if f"{name}/".startswith(f"{path}/")]
    if not fitting:
        return []
    place = max(fitting, key=len)
    names, words = _TESTS[place]
    chosen = f"({words}) and not cuda" if words else "not cuda"
    slow = ["--slow"] if place in _SLOW else []
    return [*(f"tests/{name}.py" for name in names.split()), *slow, "-k", chosen]
