"""ONNX Runtime: a model of one GroupQueryAttention node, past and present bound to one buffer.

The node appends the newest token itself, so writing one row is part of its time. Quantised caches have static scales,
one for the whole tensor or one for each channel, and take and give float32.
"""

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from perf.peers import Contestant, float_layers, layers_of, nbytes, refuse, threads

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
        "query": (element, [shape.batch, 1, shape.q_heads * shape.dim]),
        "key": (element, [shape.batch, 1, shape.kv_heads * shape.dim]),
        "value": (element, [shape.batch, 1, shape.kv_heads * shape.dim]),
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
    most = np.abs(x).max((0, 2)) if per_channel else np.abs(x).max()
    return (most / (2 ** (_BITS[kind] - 1) - 1)).astype(np.float32)


def _codes(x, kind, scale):
    """Symmetric codes; those of 4 bits are stored plus 8, two to a byte, the lower first."""
    scale = scale[:, None] if scale.ndim else scale
    codes = np.rint(x / scale).astype(np.int8)
    if kind == "int8":
        return codes
    codes = (codes + 8).astype(np.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def _maker(kind, per_channel=False):
    def make(problem):
        shape, scales = problem.shape, {}
        if kind in _BITS:
            both = {"k_scale": problem.k, "v_scale": problem.v}
            scales = {name: _scales(x, kind, per_channel) for name, x in both.items()}
            pairs = zip(both.values(), scales.values(), strict=True)
            k, v = layers_of(*(_codes(x, kind, s) for x, s in pairs))
        else:
            k, v = float_layers(problem, kind)

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads()
        num_scales = next((s.size for s in scales.values()), 0)
        session = onnxruntime.InferenceSession(
            _model(shape, kind, num_scales), options, providers=["CPUExecutionProvider"]
        )
        dtype = np.float16 if kind == "fp16" else np.float32
        newest = {"query": problem.q, "key": problem.k[:, :, -1], "value": problem.v[:, :, -1]}
        inputs = {n: x.astype(dtype).reshape(shape.batch, 1, -1) for n, x in newest.items()}
        inputs |= {n: np.atleast_1d(s).ravel() for n, s in scales.items()}
        inputs["seqlens_k"] = np.full(shape.batch, shape.length - 1, np.int32)
        inputs["total_sequence_length"] = np.array(shape.length, np.int32)
        out = np.empty_like(inputs["query"])
        value = onnxruntime.OrtValue.ortvalue_from_numpy  # the array's own memory

        def bound(k, v):
            binding = session.io_binding()
            for name, x in inputs.items():
                binding.bind_ortvalue_input(name, value(x))
            for name, x in {"key": value(k), "value": value(v)}.items():
                binding.bind_ortvalue_input(f"past_{name}", x)
                binding.bind_ortvalue_output(f"present_{name}", x)
            binding.bind_ortvalue_output("output", value(out))
            return binding

        layers = [bound(*kv) for kv in zip(k, v, strict=True)]
        return Contestant(
            lambda i: session.run_with_iobinding(layers[i]),
            lambda _: out.reshape(problem.q.shape),
            len(layers),
            nbytes(k[0], v[0], *scales.values()),
        )

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
