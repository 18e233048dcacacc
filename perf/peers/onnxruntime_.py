"""ONNX Runtime: a model of one GroupQueryAttention node, past and present bound to one buffer.

The node appends the newest token itself, so writing one row is part of its time. Quantised caches have static scales,
one for the whole tensor or one for each channel, and take and give float32.
"""

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from perf.peers import (
    Contestant,
    apart,
    float_bytes,
    float_layers,
    nbytes,
    padded_layers,
    refuse,
    same_widths,
    threads,
)

NAME = "ONNX Runtime"

_ELEMENT = {"fp16": TensorProto.FLOAT16}
_CACHE = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "int8": TensorProto.INT8,
    "int4": TensorProto.UINT8,
}
_BITS = {"int8": 8, "int4": 4}


def versions():
    return f"ONNX Runtime {onnxruntime.__version__}"


def _model(shape, kind, num_scales):
    """The node and nothing else; `num_scales` is 0 for float caches."""
    element, cache = _ELEMENT.get(kind, TensorProto.FLOAT), _CACHE[kind]
    width = shape.dim // 2 if kind == "int4" else shape.dim
    rows = [shape.batch, shape.kv_heads, shape.length, width]
    inputs = {
        "query": (element, [shape.batch, shape.queries, shape.q_heads * shape.dim]),
        "key": (element, [shape.batch, shape.queries, shape.kv_heads * shape.dim]),
        "value": (element, [shape.batch, shape.queries, shape.kv_heads * shape.dim]),
        "past_key": (cache, rows),
        "past_value": (cache, rows),
        "seqlens_k": (TensorProto.INT32, [shape.batch]),
        "total_sequence_length": (TensorProto.INT32, []),
    }
    attributes = {"num_heads": shape.q_heads, "kv_num_heads": shape.kv_heads}
    names = list(inputs)
    if num_scales:
        inputs["k_scale"] = inputs["v_scale"] = (TensorProto.FLOAT, [num_scales])
        names += [""] * 5 + ["k_scale", "v_scale"]  # no rotation, positions, bias, sinks
        how = "PER_TENSOR" if num_scales == 1 else "PER_CHANNEL"
        attributes |= {
            "k_quant_type": how, "v_quant_type": how, "kv_cache_bit_width": _BITS[kind],
        }  # fmt: skip
    outputs = {
        "output": inputs["query"],
        "present_key": (cache, rows),
        "present_value": (cache, rows),
    }
    node = helper.make_node(
        "GroupQueryAttention", names, list(outputs), domain="com.microsoft", **attributes
    )
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, *of) for name, of in inputs.items()],
        [helper.make_tensor_value_info(name, *of) for name, of in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return model.SerializeToString()


def _scales(x, kind, per_channel):
    most = np.max([np.abs(rows).max(1) for rows in x], 0) if per_channel else _most(x)
    return (most / (2 ** (_BITS[kind] - 1) - 1)).astype(np.float32)


def _most(x):
    return max(np.abs(rows).max() for rows in x)


def _codes(x, kind, scale):
    """Symmetric codes of ``(heads, tokens, dim)``; those of 4 bits plus 8, two to a byte, the lower first."""
    scale = scale[:, None] if scale.ndim else scale
    codes = np.rint(x / scale).astype(np.int8)
    if kind == "int8":
        return codes
    codes = (codes + 8).astype(np.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def _newest(problem):
    """The queries and rows that are appended, ``(batch, queries, heads * dim)``."""
    shape = problem.shape

    def flat(x):
        return np.stack([rows[:, -shape.queries :].swapaxes(0, 1) for rows in x])

    rows = {"query": problem.every_query, "key": flat(problem.k), "value": flat(problem.v)}
    return {name: x.reshape(shape.batch, shape.queries, -1) for name, x in rows.items()}


def _maker(kind, per_channel=False):
    def make(problem):
        same_widths(problem)
        shape, scales = problem.shape, {}
        if kind in _BITS:
            both = {"k_scale": problem.k, "v_scale": problem.v}
            scales = {name: _scales(x, kind, per_channel) for name, x in both.items()}
            pairs = zip(both.values(), scales.values(), strict=True)
            codes = [[_codes(rows, kind, s) for rows in x] for x, s in pairs]
            k, v = padded_layers(codes, shape.length)
            size = nbytes(*codes, *scales.values())
        else:
            k, v = float_layers(problem, kind)
            size = float_bytes(problem, kind)

        # With several queries over a past, the node takes one sequence.
        at_once = shape.batch if shape.queries == 1 else 1
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads()
        num_scales = next((s.size for s in scales.values()), 0)
        session = onnxruntime.InferenceSession(
            _model(shape._replace(batch=at_once), kind, num_scales),
            options,
            providers=["CPUExecutionProvider"],
        )
        dtype = np.float16 if kind == "fp16" else np.float32
        inputs = {n: apart(x.astype(dtype)) for n, x in _newest(problem).items()}
        inputs["seqlens_k"] = apart(np.array(shape.lens, np.int32) - 1)
        given = {n: apart(s.ravel()) for n, s in scales.items()}
        given["total_sequence_length"] = apart(np.array(max(shape.lens), np.int32))
        out = apart(np.empty_like(inputs["query"]))
        value = onnxruntime.OrtValue.ortvalue_from_numpy  # the array's own memory

        def bound(k, v, some):
            binding = session.io_binding()
            for name, x in {**given, **{n: x[some] for n, x in inputs.items()}}.items():
                binding.bind_ortvalue_input(name, value(x))
            for name, x in {"key": value(k[some]), "value": value(v[some])}.items():
                binding.bind_ortvalue_input(f"past_{name}", x)
                binding.bind_ortvalue_output(f"present_{name}", x)
            binding.bind_ortvalue_output("output", value(out[some]))
            return binding

        calls = [slice(b, b + at_once) for b in range(0, shape.batch, at_once)]
        layers = [[bound(*kv, some) for some in calls] for kv in zip(k, v, strict=True)]

        def run(i):
            for binding in layers[i]:
                session.run_with_iobinding(binding)

        return Contestant(run, lambda _: out.reshape(problem.expected.shape), len(layers), size)

    return make


def decode(kind):
    name = "GroupQueryAttention"
    if kind == "int8":
        return {f"{name}, a scale per tensor": _maker(kind)}
    if kind == "int4":
        return {f"{name}, a scale per channel": _maker(kind, per_channel=True)}
    if kind not in _CACHE:
        return {name: refuse(f"no CPU kernel for {kind}")}
    return {name: _maker(kind)}


def prefill(kind):
    return {}
