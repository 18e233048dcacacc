"""llama.cpp: a graph of one flash attention node in its tensor library, ggml, built for this processor.

The library is the one that llama-cpp-python brings along, called by ctypes. K and V lie as llama.cpp keeps them (all
heads of a token together) or head after head, as numkv does. It takes q in float32 and answers in it.
"""

import ctypes
import importlib.metadata
import importlib.util
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import numpy as np

from perf.peers import FLOATS, CannotRun, Contestant, threads
from perf.shapes import cold_layers

NAME = "llama.cpp"

#: ggml's numbers of its types.
_F16 = 1
_TYPES = {"fp32": 0, "fp16": 1, "bf16": 30, "int8": 8, "int4": 2}
_LABELS = {"int8": "q8_0", "int4": "q4_0"}
_ACCUMULATE_IN_F32 = 10
#: Over fp16 it adds the weighted rows of V in fp16.
_LARGEST_ERROR = {"fp16": 5e-2}


def _folder():
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None:
        raise ImportError("No module named 'llama_cpp'")
    return Path(spec.origin).parent / "lib"


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


def _declared(library, name, result, *arguments):
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function


_P = c_void_p
try:
    _base = ctypes.CDLL(str(_folder() / "libggml-base.so"), ctypes.RTLD_GLOBAL)
    _cpu = ctypes.CDLL(str(_folder() / "libggml-cpu.so"))
except OSError as error:
    raise ImportError(str(error)) from error

_version = _declared(_base, "ggml_version", c_char_p)
_init = _declared(_base, "ggml_init", _P, _InitParams)
_free = _declared(_base, "ggml_free", None, _P)
_overhead = _declared(_base, "ggml_tensor_overhead", c_size_t)
_graph_overhead = _declared(_base, "ggml_graph_overhead", c_size_t)
_new_tensor = _declared(_base, "ggml_new_tensor_4d", _P, _P, c_int, *[c_int64] * 4)
_permute = _declared(_base, "ggml_permute", _P, _P, _P, *[c_int] * 4)
_attention = _declared(_base, "ggml_flash_attn_ext", _P, *[_P] * 5, *[c_float] * 3)
_set_precision = _declared(_base, "ggml_flash_attn_ext_set_prec", None, _P, c_int)
_new_graph = _declared(_base, "ggml_new_graph", _P, _P)
_expand = _declared(_base, "ggml_build_forward_expand", None, _P, _P)
_size = _declared(_base, "ggml_nbytes", c_size_t, _P)
_allocate = _declared(_base, "ggml_backend_alloc_ctx_tensors", _P, _P, _P)
_free_buffer = _declared(_base, "ggml_backend_buffer_free", None, _P)
_set = _declared(_base, "ggml_backend_tensor_set", None, _P, _P, c_size_t, c_size_t)
_get = _declared(_base, "ggml_backend_tensor_get", None, _P, _P, c_size_t, c_size_t)
_quantise = _declared(
    _base, "ggml_quantize_chunk", c_size_t, c_int, _P, _P, c_int64, c_int64, c_int64, _P
)
_row_size = _declared(_base, "ggml_row_size", c_size_t, c_int, c_int64)
_compute = _declared(_base, "ggml_backend_graph_compute", c_int, _P, _P)
_cpu_backend = _declared(_cpu, "ggml_backend_cpu_init", _P)
_set_threads = _declared(_cpu, "ggml_backend_cpu_set_n_threads", None, _P, c_int)

_backend = _cpu_backend()
_set_threads(_backend, threads())


def versions():
    of_python = importlib.metadata.version("llama-cpp-python")
    return f"llama-cpp-python {of_python} (ggml {_version().decode()})"


def encoded(rows, kind):
    """Rows in a type of ggml: bytes, as many for each row."""
    rows = np.ascontiguousarray(rows)
    if kind in FLOATS:
        return rows.astype(FLOATS[kind]).view(np.uint8)
    width = rows.shape[-1]
    to = np.empty((*rows.shape[:-1], _row_size(_TYPES[kind], width)), np.uint8)
    _quantise(_TYPES[kind], rows.ctypes.data, to.ctypes.data, 0, rows.size // width, width, None)
    return to


class _Layers:
    """Layers over the same rows, each a graph with tensors of its own in one allocation."""

    def __init__(self, problem, kind, token_major, folded, prefill):
        shape = problem.shape
        k, v = (x.swapaxes(1, 2) if token_major else x for x in (problem.k, problem.v))
        k, v = encoded(k, kind), encoded(v, kind)
        self.size = k.nbytes + v.nbytes
        # ggml names dims from the innermost: (dim, tokens, heads, batch).
        rows = (shape.dim, shape.length, shape.kv_heads, shape.batch)
        if token_major:
            rows = (shape.dim, shape.kv_heads, shape.length, shape.batch)
        queries, heads = (shape.length if prefill else 1), shape.q_heads
        q = problem.q.swapaxes(1, 2) if prefill else problem.q
        if folded:
            queries, heads = heads // shape.kv_heads, shape.kv_heads
        q = np.ascontiguousarray(q)
        mask = None
        if prefill:
            mask = np.where(np.tri(queries, dtype=bool), np.float16(0), np.float16(-np.inf))

        self._layers = cold_layers(self.size)
        room = (8 * _overhead() + _graph_overhead()) * self._layers + _overhead()
        self._context = _init(_InitParams(room, None, True))
        made = _new_tensor(self._context, 0, shape.dim, queries, heads, shape.batch)
        masked = _new_tensor(self._context, _F16, queries, queries, 1, 1) if prefill else None
        of_layers, self.graphs, self.outputs = [], [], []
        for _ in range(self._layers):
            both = [_new_tensor(self._context, _TYPES[kind], *rows) for _ in range(2)]
            of_layers.append(both)
            if token_major:
                both = [_permute(self._context, x, 0, 2, 1, 3) for x in both]
            out = _attention(self._context, made, *both, masked, shape.dim**-0.5, 0.0, 0.0)
            _set_precision(out, _ACCUMULATE_IN_F32)
            graph = _new_graph(self._context)
            _expand(graph, out)
            self.graphs.append(graph)
            self.outputs.append(out)
        self._buffer = _allocate(self._context, _backend)
        if not self._buffer:
            raise CannotRun("no memory for the layers")
        given = [(made, q), *((masked, x) for x in [mask] if x is not None)]
        given += [(x, rows) for both in of_layers for x, rows in zip(both, (k, v), strict=True)]
        for tensor, array in given:
            if _size(tensor) != array.nbytes:
                raise CannotRun(f"expected {array.nbytes} bytes, ggml has {_size(tensor)}")
            _set(tensor, array.ctypes.data, 0, array.nbytes)
        self.result = (shape.batch, queries, heads, shape.dim)

    def __len__(self):
        return self._layers

    def run(self, i):
        status = _compute(_backend, self.graphs[i])
        if status:
            raise RuntimeError(f"ggml's status is {status}")
        return self.outputs[i]

    def floats(self, out):
        """What a layer gave, ``(batch, queries, heads, dim)``."""
        result = np.empty(self.result, np.float32)
        _get(out, result.ctypes.data, 0, result.nbytes)
        return result

    def __del__(self):
        if getattr(self, "_buffer", None):
            _free_buffer(self._buffer)
        if getattr(self, "_context", None):
            _free(self._context)


def _maker(kind, token_major=False, folded=False, prefill=False):
    def make(problem):
        if not (prefill or problem.shape.plain):
            raise CannotRun(
                "called for one query over sequences of one length, K and V of one width"
            )
        layers = _Layers(problem, kind, token_major, folded, prefill)

        def floats(out):
            result = layers.floats(out)
            if folded:
                result = result.swapaxes(1, 2)
            return result.reshape(problem.expected.shape)

        most = _LARGEST_ERROR.get(kind)
        return Contestant(layers.run, floats, len(layers), layers.size, most)

    return make


def _label(kind, form):
    return f"{_LABELS[kind]}, {form}" if kind in _LABELS else form


def decode(kind):
    return {
        _label(kind, "its own order"): _maker(kind, token_major=True),
        _label(kind, "head after head"): _maker(kind),
        _label(kind, "head after head, q heads folded"): _maker(kind, folded=True),
    }


def prefill(kind):
    return {
        "its own order": _maker(kind, token_major=True, prefill=True),
        "head after head": _maker(kind, prefill=True),
    }
