"""Helpers of tests of a user's own code."""

import ml_dtypes
import naive
import numpy as np

FP8 = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}


def as_stored(x, kind, scales=1):
    """Return rows as floats after they were stored and read; `scales` are the heads' scales of fp8."""
    if kind in FP8:
        scales = np.broadcast_to(np.asarray(scales, np.float32), x.shape[-2:-1])[:, None]
        return (x / scales).astype(FP8[kind]).astype(np.float32) * scales
    if kind in naive.CODES:  # exact in float32
        return naive.dequantise(*naive.quantise(x, kind)).reshape(x.shape).astype(np.float32)
    return naive.round_to(x, kind).astype(np.result_type(naive.DTYPES[kind], np.float32))
