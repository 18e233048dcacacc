"""OpenVINO: a model of one PagedAttention node, its cache in blocks of 32 tokens, one after another.

The plugin chooses layout and type of the cache from the precision it is asked for: u8 and u4 have a scale and zero
point for each channel of K in a block, and for each row of V. The node appends the newest token itself, so writing one
row is part of its time.
"""

import numpy as np
import openvino
from openvino import Model, PartialShape, Tensor, Type
from openvino.op import Constant, Parameter, _PagedAttentionExtension

from perf.peers import Contestant, refuse, threads
from perf.shapes import cold_layers

NAME = "OpenVINO"
BLOCK_SIZE = 32
FILLED_AT_ONCE = 64  # blocks

#: Precision of the cache, and of the arithmetic: a bf16 cache is only there with arithmetic in bf16.
_PRECISIONS = {
    "fp32": ("f32", "f32"),
    "fp16": ("f16", "f32"),
    "bf16": ("bf16", "bf16"),
    "int8": ("u8", "f32"),
    "int4": ("u4", "f32"),
}
_TABLES = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")


def versions():
    return f"OpenVINO {openvino.__version__.split('-')[0]}"


def _model(shape):
    """The node with its 28 inputs; whatever it can do beside attention is switched off by an empty constant."""
    parameters = []

    def given(name, kind, dims):
        parameter = Parameter(kind, PartialShape(dims))
        parameter.output(0).set_names({name})
        parameters.append(parameter)
        return parameter

    def none(kind):
        return Constant(kind, openvino.Shape([0]), [])

    def number(kind, value):
        return Constant(kind, openvino.Shape([]), [value])

    i32, f32 = Type.i32, Type.f32
    inputs = [
        given("q", f32, [-1, shape.q_heads * shape.dim]),
        given("k", f32, [-1, shape.kv_heads * shape.dim]),
        given("v", f32, [-1, shape.kv_heads * shape.dim_v]),
        given("key_cache", Type.dynamic, [-1, shape.kv_heads, -1, -1]),
        given("value_cache", Type.dynamic, [-1, shape.kv_heads, -1, -1]),
        *(given(name, i32, [-1]) for name in _TABLES),
        number(f32, shape.dim**-0.5),
        number(i32, 0),  # sliding window
        none(f32),  # ALiBi
        number(i32, shape.length),
        none(i32),  # windows of scores to sum up
        none(i32), none(i32), none(f32),  # rotation of blocks
        none(f32), number(i32, 64), number(i32, 8),  # sparse attention: thresholds, block size, stride
        none(f32),  # sinks
        number(i32, 0), none(i32), none(i32), none(i32),  # eviction
        none(i32),  # token types
        none(Type.u8), none(i32),  # bias between queries
    ]  # fmt: skip
    node = _PagedAttentionExtension([x.output(0) for x in inputs])
    sizes = {"num_k_heads": shape.kv_heads, "k_head_size": shape.dim}
    sizes |= {"num_v_heads": shape.kv_heads, "v_head_size": shape.dim_v}
    for name, size in sizes.items():
        node.get_rt_info()[name] = size
    return Model([node.output(0)], parameters, "attention")


def _set_rows(request, q, k, v):
    for name, x in {"q": q, "k": k, "v": v}.items():
        request.set_tensor(name, Tensor(np.ascontiguousarray(x.reshape(len(x), -1), np.float32)))


def _set_tables(request, *tables):
    for name, table in zip(_TABLES, tables, strict=True):
        request.set_tensor(name, Tensor(np.ascontiguousarray(table, np.int32)))


def _fill(request, problem):
    """Let the node itself store all rows, each block as a sequence of its own, which costs next to no arithmetic."""
    shape = problem.shape
    blocks = [(b, at) for b, n in enumerate(shape.lens) for at in range(0, n, BLOCK_SIZE)]
    for first in range(0, len(blocks), FILLED_AT_ONCE):
        some = blocks[first : first + FILLED_AT_ONCE]
        k, v = (
            [x[b].swapaxes(0, 1)[at : at + BLOCK_SIZE] for b, at in some]
            for x in (problem.k, problem.v)
        )
        begins = np.cumsum([0, *map(len, k)])
        _set_rows(
            request,
            np.zeros((begins[-1], shape.q_heads, shape.dim)),
            *map(np.concatenate, (k, v)),
        )
        order = np.arange(len(some) + 1)
        _set_tables(request, np.zeros(len(some)), begins, first + order[:-1], order)
        request.infer()


def _maker(kind):
    def make(problem):
        shape = problem.shape
        cache, arithmetic = _PRECISIONS[kind]
        options = {
            "KV_CACHE_PRECISION": cache,
            "INFERENCE_PRECISION_HINT": arithmetic,
            "INFERENCE_NUM_THREADS": threads(),
        }
        compiled = openvino.Core().compile_model(_model(shape), "CPU", options)
        counts = [-(-n // BLOCK_SIZE) for n in shape.lens]
        blocks = sum(counts)

        def allocated(request, name):
            of = compiled.input(name)
            dims = [d.get_length() for d in list(of.partial_shape)[1:]]
            request.set_tensor(name, Tensor(of.element_type, openvino.Shape([blocks, *dims])))
            return request.get_tensor(name)

        def layer():
            request = compiled.create_infer_request()
            return request, [allocated(request, name) for name in ("key_cache", "value_cache")]

        first, caches = layer()
        _fill(first, problem)
        # Of the bytes of whole blocks, those that have rows.
        in_rows = sum(shape.lens) / (blocks * BLOCK_SIZE)
        size = round(in_rows * sum(x.byte_size for x in caches))
        requests = [first]
        for _ in range(cold_layers(size) - 1):
            request, copies = layer()
            for to, x in zip(copies, caches, strict=True):
                x.copy_to(to)
            requests.append(request)
        queries = shape.queries
        newest = [
            np.concatenate([rows[:, -queries:].swapaxes(0, 1) for rows in x])
            for x in (problem.k, problem.v)
        ]
        for request in requests:
            _set_rows(request, problem.q.reshape(-1, shape.q_heads, shape.dim), *newest)
            _set_tables(
                request, np.array(shape.lens) - queries, np.arange(shape.batch + 1) * queries,
                np.arange(blocks), np.cumsum([0, *counts]),
            )  # fmt: skip

        def run(i):
            requests[i].infer(share_outputs=True)
            return requests[i]

        def floats(request):
            out = request.get_output_tensor(0).data
            return out.reshape(problem.expected.shape).astype(np.float32)

        return Contestant(run, floats, len(requests), size)

    return make


def decode(kind):
    if kind not in _PRECISIONS:
        return {"PagedAttention": refuse(f"no {kind} caches")}
    return {f"PagedAttention, {_PRECISIONS[kind][0]}": _maker(kind)}


def prefill(kind):
    return {}
